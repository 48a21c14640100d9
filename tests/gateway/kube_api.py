"""An emulated Kubernetes API server for tests, with faults.

It is no kube-apiserver: none can be installed from PyPI, Debian or npm. It serves the kinds of ``kube_schemas`` as
Kubernetes documents it: discovery, strict validation by the published schemas, server-side apply with managed fields
and conflicts, create, update, merge patch, scale, delete, lists in pages, watches with versions and 410, and roles of
service accounts. It has no defaulting, no admission by webhooks or pod security, no CustomResourceDefinitions (custom
kinds are built in) and no strategic merge patch, which gets 415. ``kube_nodes`` adds controllers and a kubelet.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any, Self

import kube_apply
import yaml
from aiohttp import web
from kube_apply import Managed, Manager
from kube_schemas import VERSION, Kind, kinds, open_api

from lengthwise.testing.engine_server.server import close_runner

_SHUTDOWN_S = 0.05
"""For handlers to end; aiohttp takes 0 as no limit."""
Json = dict[str, Any]


def endpoint(address: str, *, pod: str = "", ready: bool | None = True, **conditions: bool | None) -> Json:
    """Return one endpoint of a slice; conditions are ``ready``, ``serving`` and ``terminating`` unless None."""
    states = {name: value for name, value in ({"ready": ready} | conditions).items() if value is not None}
    target = {"targetRef": {"kind": "Pod", "name": pod, "uid": f"uid-of-{pod}"}} if pod else {}
    return {"addresses": [address], "conditions": states, **target}


def endpoint_slice(
    name: str,
    endpoints: Sequence[Json],
    *,
    service: str = "engines",
    port: int = 8000,
    port_name: str = "http",
    family: str = "IPv4",
) -> Json:
    """Return a slice of a Service."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": family,
        "ports": [{"name": port_name, "port": port, "protocol": "TCP"}],
        "endpoints": list(endpoints),
    }


@dataclass
class ApiFaults:
    """Faults of the server; may be changed at any time.

    Attributes:
        status: HTTP status of every response; 0: normal.
        cut_next: Whether the next event breaks off in its middle, together with its watch.
        silent: Whether watches open but send nothing.
        ends_at_once: Whether watches end as soon as they have started.
        slow_s: Delay of every response and event.
        page: Slices in a page of a list; 0: all.
    """

    status: int = 0
    cut_next: bool = False
    silent: bool = False
    ends_at_once: bool = False
    slow_s: float = 0.0
    page: int = 0


@dataclass(frozen=True)
class _Change:
    """A version of an object: before (None: it is new) and after (None: it is gone)."""

    version: int
    kind: Kind
    namespace: str
    old: Json | None
    new: Json | None

    def event(self, selects: Callable[[Json], bool]) -> Json | None:
        """Return what a watch of a part of the objects sees, if it sees anything."""
        old, new = (item if item is not None and selects(item) else None for item in (self.old, self.new))
        if new is not None:
            return {"type": "ADDED" if old is None else "MODIFIED", "object": new}
        last = old and {**old, "metadata": old["metadata"] | {"resourceVersion": str(self.version)}}
        return {"type": "DELETED", "object": last} if last else None


@dataclass(eq=False)
class _Watch:
    kind: Kind
    namespace: str
    selects: Callable[[Json], bool]
    events: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)

    def send(self, change: _Change) -> None:
        """Send a change, if it is of this watch's objects."""
        is_here = change.kind is self.kind and self.namespace in ("", change.namespace)
        if is_here and (event := change.event(self.selects)):
            self.events.put_nowait(_line(event))


class StatusError(Exception):
    """What the server answers instead of an object."""

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
        self.body |= {"reason": reason, "details": details, "code": code}


@dataclass
class _Stored:
    item: Json
    managed: Managed = field(default_factory=dict)
    times: dict[Manager, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Target:
    kind: Kind
    namespace: str
    name: str
    subresource: str

    @property
    def key(self) -> tuple[Kind, str, str]:
        return self.kind, self.namespace, self.name


class KubeApi:
    """An API server on loopback; an async context manager.

    A ``token`` is required if not empty; ``tls`` is an ``ssl.SSLContext`` or None; ``port`` 0 picks a free one, which
    ``stop`` and ``start`` reuse. ``accounts`` has the tokens of service accounts, as (namespace, name), which may do
    what Roles allow. Counts lists and watches, requests with a wrong token (``refused``) and paths.
    """

    def __init__(self, *, token: str = "", tls: Any = None, port: int = 0) -> None:
        self.token, self.faults, self.port = token, ApiFaults(), port
        self.accounts: dict[str, tuple[str, str]] = {}
        self.lists = self.watches = self.refused = 0
        self.paths: set[str] = set()
        self.on_change: Callable[[Kind, str, Json | None, Json | None], None] = lambda *_: None
        self._tls = tls
        self._version, self._min_version = 100, 0
        self._stored: dict[tuple[Kind, str, str], _Stored] = {}
        self._changes: list[_Change] = []
        self._open: set[_Watch] = set()
        self._uids = itertools.count(1)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def open(self) -> int:
        """Number of open watches."""
        return len(self._open)

    async def __aenter__(self) -> Self:
        """Start to listen."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop."""
        await self.stop()

    async def start(self) -> None:
        """Listen, also after ``stop``."""
        app = web.Application(client_max_size=4 << 20)
        app.router.add_route("*", "/{path:.*}", self._respond)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=self._tls, reuse_address=True).start()
        self.port = runner.addresses[0][1]
        self._runner = runner

    async def stop(self) -> None:
        """Close the port and all watches; retain the objects."""
        self.end_watches()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await close_runner(runner)

    def put(self, item: Json, *, namespace: str = "default") -> None:
        """Add or replace an object as a controller would, without validation."""
        kind = _kind_of(item)
        key = kind, namespace if kind.is_namespaced else "", item["metadata"]["name"]
        self._write(key, _Stored(item, *self._owners(key)))

    def delete(self, name: str, *, namespace: str = "default", kind: str = "EndpointSlice") -> None:
        """Remove an object."""
        self._remove((kind_named(kind), namespace, name))

    def get(self, kind: str, name: str, namespace: str = "") -> Json | None:
        """Return an object."""
        stored = self._stored.get((kind_named(kind), namespace, name))
        return stored and stored.item

    def objects(self) -> list[Json]:
        """Return all objects."""
        return [stored.item for stored in self._stored.values()]

    def items(self, kind: str, namespace: str = "") -> list[Json]:
        """Return the objects of a kind, by name."""
        of = kind_named(kind)
        found = [key for key in self._stored if key[0] is of and namespace in ("", key[1])]
        return [self._stored[key].item for key in sorted(found, key=lambda key: key[1:])]

    def bookmark(self, *, namespace: str = "default") -> None:
        """Send all watches of a namespace the current version."""
        self._version += 1
        for watch in self._open:
            if watch.namespace == namespace:
                item = {"kind": watch.kind.kind, "metadata": {"resourceVersion": str(self._version)}}
                watch.events.put_nowait(_line({"type": "BOOKMARK", "object": item}))

    def clear(self) -> None:
        """Forget past versions: watches from an earlier one get status 410."""
        self._min_version = self._version
        self._changes.clear()

    def end_watches(self) -> None:
        """End all watches, as a real server does after some minutes."""
        for watch in self._open:
            watch.events.put_nowait(None)

    def send_all(self, line: bytes) -> None:
        """Send arbitrary bytes to every watch."""
        for watch in self._open:
            watch.events.put_nowait(line)

    # Objects
    def _owners(self, key: tuple[Kind, str, str]) -> tuple[Managed, dict[Manager, str]]:
        stored = self._stored.get(key)
        return (stored.managed, stored.times) if stored else ({}, {})

    def _write(self, key: tuple[Kind, str, str], stored: _Stored) -> Json:
        before = self._stored.get(key)
        self._version += 1
        item = stored.item = copy.deepcopy(stored.item)
        kind, namespace, _ = key
        of = before.item["metadata"] if before else {}
        meta = item.setdefault("metadata", {})
        meta["uid"] = of.get("uid") or meta.get("uid") or f"00000000-0000-4000-8000-{next(self._uids):012}"
        meta["creationTimestamp"] = of.get("creationTimestamp") or _now()
        meta["generation"] = of.get("generation", 0) + (before is None or before.item.get("spec") != item.get("spec"))
        meta["resourceVersion"] = str(self._version)
        if kind.is_namespaced:
            meta["namespace"] = namespace
        if stored.managed:
            meta["managedFields"] = kube_apply.to_json(stored.managed, stored.times)
        self._stored[key] = stored
        self._publish(_Change(self._version, kind, namespace, before and before.item, item))
        return item

    def _remove(self, key: tuple[Kind, str, str]) -> Json:
        stored = self._stored.pop(key)
        self._version += 1
        self._publish(_Change(self._version, key[0], key[1], stored.item, None))
        return stored.item

    def _publish(self, change: _Change) -> None:
        self._changes.append(change)
        for watch in self._open:
            watch.send(change)
        self.on_change(change.kind, change.namespace, change.old, change.new)

    # Requests
    async def _respond(self, request: web.Request) -> web.StreamResponse:
        self.paths.add(request.path)
        await asyncio.sleep(self.faults.slow_s)
        try:
            token = self._checked(request.headers.get("Authorization", "").removeprefix("Bearer "))
            if (found := _discovery(request.path)) is not None:
                return web.json_response(found)
            target = _target(request.path)
            verb = _verb(request, target)
            self._authorize(self.accounts.get(token), target, verb)
            if verb == "watch":
                return await self._watch(request, _Watch(target.kind, target.namespace, _selects(request.query)))
            if verb == "list":
                return self._list(request, target)
            code, item = self._changed(verb, target, request, await request.read())
            return web.json_response(item, status=code)
        except StatusError as error:
            return web.json_response(error.body, status=error.code)

    def _checked(self, token: str) -> str:
        if self.faults.status:
            raise StatusError(self.faults.status, "Fault", "as the test wants it")
        if self.token and token != self.token and token not in self.accounts:
            self.refused += 1
            raise StatusError(401, "Unauthorized", "Unauthorized")
        return token

    def _authorize(self, account: tuple[str, str] | None, target: _Target, verb: str) -> None:
        """Raise 403 unless a RoleBinding of the namespace gives a service account the verb on the resource."""
        if account is None:
            return
        for binding in self.items("RoleBinding", target.namespace) if target.namespace else ():
            subjects = [(one.get("namespace", target.namespace), one["name"]) for one in binding.get("subjects", ())]
            role = self.get("Role", binding["roleRef"]["name"], target.namespace)
            if account in subjects and role is not None:
                for rule in role["rules"]:
                    wanted = target.kind.group in rule["apiGroups"] and target.kind.plural in rule["resources"]
                    if wanted and verb in rule["verbs"]:
                        return
        user = f'User "system:serviceaccount:{account[0]}:{account[1]}"'
        raise StatusError(403, "Forbidden", f"{target.kind.plural} is forbidden: {user} cannot {verb} it")

    def _list(self, request: web.Request, target: _Target) -> web.StreamResponse:
        self.lists += 1
        selects = _selects(request.query)
        rows = [item for item in self.items(target.kind.kind, target.namespace) if selects(item)]
        start = int(request.query.get("continue") or 0)
        page = self.faults.page or int(request.query.get("limit") or 0) or len(rows)
        metadata = {"resourceVersion": str(self._version)}
        if start + page < len(rows):
            metadata["continue"] = str(start + page)
        body = {"kind": f"{target.kind.kind}List", "apiVersion": target.kind.api_version, "metadata": metadata}
        return web.json_response(body | {"items": rows[start : start + page]})

    def _changed(self, verb: str, target: _Target, request: web.Request, body: bytes) -> tuple[int, Json]:
        if target.subresource:
            return 200, self._scaled(verb, target, body)
        if verb == "create":
            item = _parsed(body)
            name = item.get("metadata", {}).get("name", "")
            target = _Target(target.kind, target.namespace, name, "")
            if target.key in self._stored:
                raise StatusError(409, "AlreadyExists", f'{target.kind.plural} "{name}" already exists')
            return 201, self._updated(target, item, request, "Update")
        if verb == "patch" and request.content_type == "application/apply-patch+yaml":
            return 200 if target.key in self._stored else 201, self._applied(target, _parsed(body), request)
        stored = self._found(target)
        if verb == "get":
            return 200, stored.item
        if verb == "delete":
            return 200, self._deleted(target)
        if verb == "patch" and request.content_type != "application/merge-patch+json":
            raise StatusError(415, "UnsupportedMediaType", f"the emulator does not know {request.content_type}")
        item = _merge_patched(stored.item, _parsed(body)) if verb == "patch" else _parsed(body)
        return 200, self._updated(target, item, request, "Update")

    def _found(self, target: _Target) -> _Stored:
        stored = self._stored.get(target.key)
        if stored is None:
            details = {"name": target.name, "group": target.kind.group, "kind": target.kind.plural}
            raise StatusError(404, "NotFound", f'{target.kind.plural} "{target.name}" not found', **details)
        return stored

    def _deleted(self, target: _Target) -> Json:
        inside = [key for key in self._stored if key[1] == target.name] if target.kind.kind == "Namespace" else []
        for key in [*inside, target.key]:
            self._remove(key)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": {"name": target.name}}

    def _scaled(self, verb: str, target: _Target, body: bytes) -> Json:
        stored = self._found(target)
        if verb in ("update", "patch"):
            count = int(_parsed(body)["spec"]["replicas"])
            new = copy.deepcopy(stored.item)
            new["spec"]["replicas"] = count
            manager = Manager("kubectl", "Update", target.kind.api_version, "scale")
            managed = kube_apply.update(stored.item, new, stored.managed, manager, target.kind.schema)
            self._write(target.key, _Stored(new, managed, {manager: _now()} | stored.times))
            stored = self._stored[target.key]
        names = ("name", "namespace", "resourceVersion")
        metadata = {name: stored.item["metadata"][name] for name in names}
        body_: Json = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata}
        replicas = stored.item["spec"].get("replicas", 1)
        return body_ | {"spec": {"replicas": replicas}, "status": {"replicas": replicas}}

    def _updated(self, target: _Target, item: Json, request: web.Request, operation: str) -> Json:
        stored = self._stored.get(target.key)
        version = item.get("metadata", {}).get("resourceVersion")
        if stored and version and version != stored.item["metadata"]["resourceVersion"]:
            raise StatusError(409, "Conflict", "the object has been modified; please apply your changes to the latest")
        item = _admitted(self, target, item, stored and stored.item)
        name = request.query.get("fieldManager") or request.headers.get("User-Agent", "unknown").partition("/")[0]
        manager, (managed, times) = Manager(name, operation, target.kind.api_version), self._owners(target.key)
        managed = kube_apply.update(stored and stored.item, item, managed, manager, target.kind.schema)
        if stored and _same(stored.item, item):
            return stored.item
        if request.query.get("dryRun"):
            return item
        return self._write(target.key, _Stored(item, managed, times | {manager: _now()}))

    def _applied(self, target: _Target, item: Json, request: web.Request) -> Json:
        stored, query = self._stored.get(target.key), request.query
        if not (name := query.get("fieldManager")):
            raise StatusError(422, "Invalid", "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value")
        if "managedFields" in item.get("metadata", {}):
            raise StatusError(400, "BadRequest", "metadata.managedFields must be nil")
        manager, (managed, times) = Manager(name, "Apply", target.kind.api_version), self._owners(target.key)
        arguments = (stored and stored.item, item, managed, manager, target.kind.schema)
        try:
            new, managed = kube_apply.apply(*arguments, force=query.get("force") == "true")
        except kube_apply.ConflictError as error:
            causes = [
                {"reason": "FieldManagerConflict", "field": kube_apply.dotted(path),
                 "message": f'conflict with "{other.name}"'}
                for other, path in error.conflicts
            ]  # fmt: skip
            message = f"Apply failed with {len(causes)} conflict{'s'[: len(causes) > 1]}: conflicts with {error}"
            raise StatusError(409, "Conflict", message, causes=causes) from None
        new = _admitted(self, target, new, stored and stored.item)
        if stored and _same(stored.item, new) and managed == stored.managed:
            return stored.item
        if query.get("dryRun"):
            return new
        return self._write(target.key, _Stored(new, managed, times | {manager: _now()}))

    async def _watch(self, request: web.Request, watch: _Watch) -> web.StreamResponse:
        self.watches += 1
        since = int(request.query.get("resourceVersion") or self._version)
        if since < self._min_version:
            raise StatusError(410, "Expired", f"too old resource version: {since} ({self._min_version})")
        response = web.StreamResponse(headers={"Content-Type": "application/json;stream=watch"})
        await response.prepare(request)
        if self.faults.ends_at_once:
            return response
        for change in self._changes:
            if change.version > since:
                watch.send(change)
        self._open.add(watch)
        try:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(float(request.query.get("timeoutSeconds", "300"))):
                    await self._write_events(watch, response, request)
        finally:
            self._open.discard(watch)
        return response

    async def _write_events(self, watch: _Watch, response: web.StreamResponse, request: web.Request) -> None:
        while (line := await watch.events.get()) is not None:
            await asyncio.sleep(self.faults.slow_s)
            if self.faults.silent:
                continue
            if self.faults.cut_next:
                self.faults.cut_next = False
                await response.write(line[: len(line) // 2])
                if request.transport is not None:
                    request.transport.close()
                return
            await response.write(line)


def _line(event: Json) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _same(old: Json, new: Json) -> bool:
    """Return whether two objects differ in nothing but what the server sets."""
    plain = [
        {**item, "metadata": {k: v for k, v in item["metadata"].items() if k not in _SERVER_SET}} for item in (old, new)
    ]
    return plain[0] == plain[1]


_SERVER_SET = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "namespace")


def _parsed(body: bytes) -> Json:
    if body.startswith(_PROTOBUF):
        return _parsed_protobuf(body.removeprefix(_PROTOBUF))
    try:
        found = yaml.load(body, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise StatusError(400, "BadRequest", f"no object: {error}") from None
    if not isinstance(found, dict):
        raise StatusError(400, "BadRequest", "no object")
    return found


_PROTOBUF = b"k8s\0"
_METADATA = {1: "name", 3: "namespace", 11: "labels", 12: "annotations"}


def _parsed_protobuf(body: bytes) -> Json:
    """Return a Namespace or a Secret, which Helm's client sends as protobuf (k8s.io/api, generated.proto)."""
    outer = dict(_protobuf_fields(body))
    types = dict(_protobuf_fields(outer[1]))
    item: Json = {"apiVersion": types[1].decode(), "kind": types[2].decode(), "metadata": {}}
    for number, value in _protobuf_fields(outer[2]):
        if number == 1:
            for inner, text in _protobuf_fields(value):
                name = _METADATA.get(inner)
                if name in ("labels", "annotations"):
                    pair = dict(_protobuf_fields(text))
                    item["metadata"].setdefault(name, {})[pair[1].decode()] = pair.get(2, b"").decode()
                elif name and text:
                    item["metadata"][name] = text.decode()
        elif item["kind"] == "Secret" and number == 2:
            pair = dict(_protobuf_fields(value))
            item.setdefault("data", {})[pair[1].decode()] = base64.b64encode(pair.get(2, b"")).decode()
        elif item["kind"] == "Secret" and number == 3:
            item["type"] = value.decode()
    return item


def _protobuf_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the bytes (or the integer) of each field of a message."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                return value, at

    at = 0
    while at < len(data):
        tag, at = varint(at)
        number, at = varint(at)
        if tag & 7 == 2:
            yield tag >> 3, data[at : at + number]
            at += number
        else:
            assert tag & 7 == 0, "Kubernetes' messages have integers and bytes"
            yield tag >> 3, number


def _merge_patched(old: Any, patch: Any) -> Any:
    """Return an object after a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    old = old if isinstance(old, dict) else {}
    rest = {name: value for name, value in old.items() if patch.get(name, 0) is not None}
    return rest | {name: _merge_patched(rest.get(name), value) for name, value in patch.items() if value is not None}


# Paths
@cache
def kind_named(name: str) -> Kind:
    """Return a kind by its name."""
    (found,) = [kind for kind in kinds() if kind.kind == name]
    return found


def _kind_of(item: Json) -> Kind:
    return next(k for k in kinds() if (k.kind, k.api_version) == (item["kind"], item["apiVersion"]))


_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_ALL_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def _target(path: str) -> _Target:
    """Return what a path leads to. Raises 404."""
    match = re.fullmatch(r"(/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/([^/]+))?/([^/]+)(?:/([^/]+)(?:/([^/]+))?)?", path)
    own = re.fullmatch(r"(/api/v1)()/(namespaces)(?:/([^/]+))?()", path)  # a Namespace itself
    if match := own or match:
        base, namespace, plural, name, subresource = match.groups()
        for kind in kinds():
            if (kind.base, kind.plural) == (base, plural) and (
                not subresource or (kind.has_scale and subresource == "scale")
            ):
                return _Target(kind, namespace or "", name or "", subresource or "")
    raise StatusError(404, "NotFound", "the server could not find the requested resource")


def _verb(request: web.Request, target: _Target) -> str:
    if request.method != "GET":
        return _VERBS[request.method]
    if target.name:
        return "get"
    return "watch" if request.query.get("watch") in ("1", "true") else "list"


def _selects(query: Mapping[str, str]) -> Callable[[Json], bool]:
    """Return whether an object has the labels and the name of a request."""
    terms = [term for term in query.get("labelSelector", "").split(",") if term]
    labels = {key: value for key, _, value in (term.replace("==", "=").partition("=") for term in terms)}
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")

    def selects(item: Json) -> bool:
        own = item["metadata"].get("labels") or {}
        return labels.items() <= own.items() and name in ("", item["metadata"]["name"])

    return selects


def _discovery(path: str) -> Json | None:
    """Return the answer to a path that leads to no object."""
    groups: dict[str, list[Kind]] = {}
    for kind in kinds():
        groups.setdefault(kind.api_version, []).append(kind)
    (major, minor), places = VERSION.split("."), [of[0].base for of in groups.values()]
    rows = [{"groupVersion": name, "version": name.partition("/")[2]} for name in groups if "/" in name]
    named = [
        {"name": row["groupVersion"].partition("/")[0], "versions": [row], "preferredVersion": row} for row in rows
    ]
    fixed: dict[str, Json] = {
        "/version": {"major": major, "minor": minor, "gitVersion": f"v{VERSION}.0+emulated", "platform": "linux/amd64"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": named},
        "/openapi/v3": {"paths": {one.lstrip("/"): {"serverRelativeURL": f"/openapi/v3{one}"} for one in places}},
    }
    if path in fixed:
        return fixed[path]
    for of in groups.values():
        if path == f"/openapi/v3{of[0].base}":
            return open_api(of)
        if path == of[0].base:
            return _resources(of)
    return None


def _resources(of: list[Kind]) -> Json:
    """Return the list of a group and version's resources."""
    rows = [
        {"name": kind.plural, "singularName": kind.kind.lower(), "namespaced": kind.is_namespaced, "kind": kind.kind,
         "verbs": _ALL_VERBS, "shortNames": list(kind.short)}
        for kind in of
    ]  # fmt: skip
    scale = {"group": "autoscaling", "version": "v1", "kind": "Scale", "verbs": ["get", "patch", "update"]}
    scale |= {"singularName": "", "namespaced": True}
    rows += [{"name": f"{kind.plural}/scale"} | scale for kind in of if kind.has_scale]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": of[0].api_version, "resources": rows}


# Admission
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_MUTABLE = {"replicas", "ordinals", "template", "updateStrategy", "persistentVolumeClaimRetentionPolicy",
            "minReadySeconds", "revisionHistoryLimit"}  # fmt: skip
"""Fields of a StatefulSet's specification that may change."""


def _admitted(api: KubeApi, target: _Target, item: Json, old: Json | None) -> Json:
    """Return an object as it is stored. Raises 400, 404 or 422 if Kubernetes would refuse it."""
    kind, meta = target.kind, item.setdefault("metadata", {})
    if (item.get("apiVersion"), item.get("kind")) != (kind.api_version, kind.kind):
        raise StatusError(400, "BadRequest", f"the object must be a {kind.kind} of {kind.api_version}")
    if meta.get("name") != target.name or meta.get("namespace", target.namespace) != target.namespace:
        raise StatusError(400, "BadRequest", "the name or the namespace of the object does not match the request")
    if kind.is_namespaced and api.get("Namespace", target.namespace) is None:
        raise StatusError(404, "NotFound", f'namespaces "{target.namespace}" not found')
    plain = {**item, "metadata": {name: value for name, value in meta.items() if name != "managedFields"}}
    errors = list(kind.errors(plain))
    if any("Additional properties" in error or "unevaluated" in error for error in errors):
        raise StatusError(400, "BadRequest", f"strict decoding error: {'; '.join(errors)}")
    errors += [] if _NAME.fullmatch(target.name) else [f"metadata.name: Invalid value: {target.name!r}"]
    if not errors and kind.has_scale:
        errors += _workload_errors(item, old)
    if errors:
        message = f'{kind.kind}.{kind.group} "{target.name}" is invalid: {"; ".join(errors)}'
        causes = [{"reason": "FieldValueInvalid", "message": error, "field": ""} for error in errors]
        raise StatusError(422, "Invalid", message, name=target.name, kind=kind.kind, causes=causes)
    return item


def _workload_errors(item: Json, old: Json | None) -> list[str]:
    spec, template = item["spec"], item["spec"]["template"]
    errors = []
    labels = template.get("metadata", {}).get("labels", {})
    if not spec["selector"].get("matchLabels", {}).items() <= labels.items():
        errors.append("spec.template.metadata.labels: `selector` does not match template `labels`")
    if old is not None and old["spec"]["selector"] != spec["selector"]:
        errors.append("spec.selector: field is immutable")
    if old is not None and item["kind"] == "StatefulSet":
        names = (old["spec"].keys() | spec.keys()) - _MUTABLE
        if different := sorted(name for name in names if old["spec"].get(name) != spec.get(name)):
            errors.append(f"spec: Forbidden: updates to statefulset spec for {', '.join(different)} are forbidden")
    pod = template["spec"]
    volumes = {one["name"] for one in pod.get("volumes", ())}
    volumes |= {one["metadata"]["name"] for one in spec.get("volumeClaimTemplates", ())}
    for one in pod["containers"] + pod.get("initContainers", []):
        missing = {mount["name"] for mount in one.get("volumeMounts", ())} - volumes
        errors += [f"{one['name']}.volumeMounts: Not found: {name!r}" for name in sorted(missing)]
        resources = one.get("resources", {})
        requests, limits = resources.get("requests", {}), resources.get("limits", {})
        for name, value in {**requests, **limits}.items():
            if not _QUANTITY.fullmatch(str(value)):
                errors.append(
                    f"{one['name']}.resources.{name}: quantities must match the regular expression: {value!r}"
                )
            elif name in requests and name in limits and _quantity(requests[name]) > _quantity(limits[name]):
                errors.append(f"{one['name']}.resources.requests.{name}: must be less than or equal to its limit")
    return errors


def _quantity(value: Any) -> float:
    number, unit = _QUANTITY.fullmatch(str(value)).groups()  # type: ignore[union-attr]
    return float(number) * _UNITS.get(unit, 1.0)
