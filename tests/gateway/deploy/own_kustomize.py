"""As much of kustomize as deploy/ uses: where there is no kubectl, its overlays are tested all the same.

Names of generated ConfigMaps get no digest. A field of a kustomization that is not known here is an error.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

KEYS = {"containers": "name", "initContainers": "name", "env": "name", "volumes": "name",
        "volumeMounts": "mountPath"}  # fmt: skip
"""By what the items of a list are known to be the same; other lists are replaced."""
KNOWN = {"apiVersion", "kind", "namespace", "resources", "components", "configMapGenerator", "patches", "images",
         "replicas"}  # fmt: skip
ALL_PODS = "Deployment", "StatefulSet"
Resource = dict[str, Any]


def built(folder: Path) -> list[Resource]:
    """The resources of a folder with a kustomization."""
    return _applied(folder, [])


def _applied(folder: Path, made: list[Resource]) -> list[Resource]:
    reported = _load(folder / "kustomization.yaml")
    assert set(reported) <= KNOWN, set(reported) - KNOWN
    for one in reported.get("resources", []):
        path = folder / one
        made = made + (built(path) if path.is_dir() else _load_all(path))
    for one in reported.get("configMapGenerator", []):
        made = _generated(folder, one, made)
    for one in reported.get("components", []):
        made = _applied(folder / one, made)
    for one in reported.get("patches", []):
        made = _patched(folder, one, made)
    for one in made:
        _transformed(reported, one)
    return made


def _generated(folder: Path, report: Resource, made: list[Resource]) -> list[Resource]:
    options = report.get("options", {})
    meta = {"name": report["name"]} | ({"labels": options["labels"]} if "labels" in options else {})
    data = {Path(file).name: (folder / file).read_text("utf-8") for file in report["files"]}
    new = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}
    if report.get("behavior") != "replace":
        return [*made, new]
    assert sum(_is(one, "ConfigMap", report["name"]) for one in made) == 1
    return [one | {"data": data} if _is(one, "ConfigMap", report["name"]) else one for one in made]


def _patched(folder: Path, report: Resource, made: list[Resource]) -> list[Resource]:
    patch = yaml.safe_load(report["patch"]) if "patch" in report else _load(folder / report["path"])
    who = report["target"] if "target" in report else {"kind": patch["kind"], "name": patch["metadata"]["name"]}
    hit = [_is(one, who["kind"], who["name"]) for one in made]
    assert sum(hit) == 1, who
    change = _merged if isinstance(patch, dict) else _operated
    return [change(one, patch) if own else one for one, own in zip(made, hit, strict=True)]


def _transformed(report: Resource, one: Resource) -> None:
    if "namespace" in report and one["kind"] != "Namespace":
        one["metadata"]["namespace"] = report["namespace"]
        for subject in one.get("subjects", []):
            subject["namespace"] = report["namespace"]
    if one["kind"] not in ALL_PODS:
        return
    pod = one["spec"]["template"]["spec"]
    for image in report.get("images", []):
        for container in pod["containers"] + pod.get("initContainers", []):
            name, _, tag = container["image"].partition(":")
            if name == image["name"]:
                container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
    for count in report.get("replicas", []):
        if count["name"] == one["metadata"]["name"]:
            one["spec"]["replicas"] = count["count"]


def _merged(old: Any, patch: Any, field: str = "") -> Any:
    """A strategic merge."""
    if isinstance(patch, dict) and isinstance(old, dict):
        if patch.get("$patch") == "replace":
            return {name: value for name, value in patch.items() if name != "$patch"}
        return old | {name: _merged(old.get(name), value, name) for name, value in patch.items()}
    if isinstance(patch, list) and isinstance(old, list) and field in KEYS:
        return _merged_list(old, patch, KEYS[field])
    return copy.deepcopy(patch)


def _merged_list(old: list[Any], patch: list[Any], key: str) -> list[Any]:
    present = {one[key]: one for one in old}
    for change in patch:
        if change.get("$patch") == "delete":
            del present[change[key]]
        else:
            present[change[key]] = _merged(present.get(change[key]), change)
    return list(present.values())


def _operated(old: Resource, patch: list[Resource]) -> Resource:
    """A JSON patch."""
    made = copy.deepcopy(old)
    for one in patch:
        *way, last = one["path"].strip("/").split("/")
        at: Any = made
        for step in way:
            at = at[int(step)] if isinstance(at, list) else at[step]
        if one["op"] == "remove":
            del at[last]
        elif last == "-":
            at.append(one["value"])
        else:
            assert one["op"] in ("add", "replace")
            at[int(last) if isinstance(at, list) else last] = one["value"]
    return made


def _is(one: Resource, kind: str, name: str) -> bool:
    return one["kind"] == kind and one["metadata"]["name"] == name


def _load(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def _load_all(path: Path) -> list[Resource]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))
