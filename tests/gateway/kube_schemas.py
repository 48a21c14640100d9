"""Kinds of Kubernetes 1.37 with their published schemas, which the emulated API server validates and merges by.

Core kinds have the OpenAPI definitions that the package kubernetes-validate ships (closed against unknown fields, with
the list types and keys of server-side apply). Custom kinds have the transcribed schemas of ``deploy/schemas``, whose
lists are atomic, as in a CustomResourceDefinition without list types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

VERSION = "1.37"
_CORE = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{VERSION}.0-local-strict"
_CUSTOM = Path(__file__).parent / "deploy" / "schemas"
_URI = "https://kubernetes.io/api/_definitions.json"
Json = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind that the emulated server serves."""

    group: str
    version: str
    kind: str
    plural: str
    is_namespaced: bool = True
    short: tuple[str, ...] = ()
    has_scale: bool = False
    schema: Json = field(default_factory=dict, compare=False, repr=False)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def base(self) -> str:
        """Return the path of its group and version."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"

    def errors(self, item: Json) -> Iterator[str]:
        """Yield what the schema does not allow."""
        for error in self._validator().iter_errors(item):
            yield f"{'.'.join(map(str, error.absolute_path)) or self.kind}: {error.message[:300]}"

    @cache  # noqa: B019 - there are some twenty kinds
    def _validator(self) -> Any:
        return jsonschema.Draft202012Validator(self.schema, registry=_registry())


@cache
def _definitions() -> Json:
    found: Json = json.loads((_CORE / "_definitions.json").read_text("utf-8"))
    return found


@cache
def _registry() -> Any:
    resource = Resource.from_contents(_definitions(), default_specification=DRAFT202012)
    return Registry().with_resources([(_URI, resource), ("/api/_definitions.json", resource)])


_CORE_KINDS = """
    v1 Namespace namespaces cluster ns
    v1 ConfigMap configmaps - cm
    v1 Secret secrets -
    v1 Service services - svc
    v1 ServiceAccount serviceaccounts - sa
    v1 Pod pods - po
    v1 PersistentVolumeClaim persistentvolumeclaims - pvc
    apps/v1 Deployment deployments scale deploy
    apps/v1 StatefulSet statefulsets scale sts
    autoscaling/v2 HorizontalPodAutoscaler horizontalpodautoscalers - hpa
    discovery.k8s.io/v1 EndpointSlice endpointslices -
    networking.k8s.io/v1 NetworkPolicy networkpolicies - netpol
    policy/v1 PodDisruptionBudget poddisruptionbudgets - pdb
    rbac.authorization.k8s.io/v1 Role roles -
    rbac.authorization.k8s.io/v1 RoleBinding rolebindings -
"""
_CUSTOM_KINDS = {
    "scaledobject": "scaledobjects",
    "servicemonitor": "servicemonitors",
    "prometheusrule": "prometheusrules",
    "inferenceobjective": "inferenceobjectives",
}


@cache
def kinds() -> tuple[Kind, ...]:
    """Return all kinds."""
    found = []
    for line in _CORE_KINDS.strip().splitlines():
        api, kind, plural, how, *short = line.split()
        group, _, version = api.rpartition("/")
        file = f"{kind.lower()}-{group.partition('.')[0]}-{version}.json" if group else f"{kind.lower()}-{version}.json"
        schema = json.loads((_CORE / file).read_text("utf-8"))
        found.append(Kind(group, version, kind, plural, how != "cluster", tuple(short), how == "scale", schema))
    for name, plural in _CUSTOM_KINDS.items():
        schema = json.loads((_CUSTOM / f"{name}.json").read_text("utf-8"))
        properties = schema["properties"]
        group, _, version = properties["apiVersion"]["const"].rpartition("/")
        properties["metadata"] = {"$ref": f"{_URI}#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
        found.append(Kind(group, version, properties["kind"]["const"], plural, schema=schema))
    return tuple(found)


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, or the definition that it refers to with its own other keys."""
    if "$ref" not in schema:
        return schema
    name = re.sub(r".*#/\$defs/", "", schema["$ref"])
    return {**_definitions()["$defs"][name], **{key: value for key, value in schema.items() if key != "$ref"}}


def child(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the schema of a field of an object."""
    schema = resolved(schema)
    found = schema.get("properties", {}).get(name)
    if found is None:
        found = schema.get("additionalProperties")
    return resolved(found) if isinstance(found, dict) else {}


def open_api(of: list[Kind]) -> Json:
    """Return an OpenAPI 3 document of a group and version, as far as kubectl reads it: kinds and verbs."""
    paths: Json = {}
    for kind in of:
        gvk = {"group": kind.group, "version": kind.version, "kind": kind.kind}
        place = "/namespaces/{namespace}" if kind.is_namespaced else ""
        parameters = [
            {"name": name, "in": "query", "schema": {"type": "string"}}
            for name in ("dryRun", "fieldManager", "fieldValidation", "force")
        ]
        patch = {"x-kubernetes-action": "patch", "x-kubernetes-group-version-kind": gvk, "parameters": parameters}
        patch["responses"] = {"200": {"description": "OK"}}
        patch["requestBody"] = {"content": {"application/apply-patch+yaml": {"schema": {"type": "object"}}}}
        post = patch | {"x-kubernetes-action": "post"}
        paths[f"{kind.base}{place}/{kind.plural}/{{name}}"] = {"patch": patch}
        paths[f"{kind.base}{place}/{kind.plural}"] = {"post": post}
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": f"v{VERSION}.0"}, "paths": paths}
