"""Server-side apply: managers own fields, and an apply conflicts with what others own, as Kubernetes documents it.

A field is a path of elements ``("f", name)``, ``("k", keys of a list's item as JSON)`` or ``("v", item of a set as
JSON)``. Scalars, atomic objects and atomic lists are leaves; an item of a keyed list is a field of its own.
https://kubernetes.io/docs/reference/using-api/server-side-apply/
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kube_schemas import child, resolved

Json = dict[str, Any]
Path = tuple[tuple[str, str], ...]
Fields = frozenset[Path]
Schema = Mapping[str, Any]
_OF_SERVER = frozenset(
    [(("f", "apiVersion"),), (("f", "kind"),)]
    + [(("f", "metadata"), ("f", name)) for name in (
        "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink",
    )]
)  # fmt: skip
_DEFAULT_KEYS = {"protocol": "TCP"}


class Manager(NamedTuple):
    """By what a set of managed fields is known."""

    name: str
    operation: str
    api_version: str
    subresource: str = ""


Managed = dict[Manager, Fields]


class ConflictError(Exception):
    """Others own fields that an apply would change. ``conflicts`` has (their manager, field) pairs."""

    def __init__(self, conflicts: list[tuple[Manager, Path]]) -> None:
        super().__init__("; ".join(f'"{manager.name}": {dotted(path)}' for manager, path in conflicts))
        self.conflicts = conflicts


def dotted(path: Path) -> str:
    """Return a path as kubectl shows it."""
    found = ""
    for kind, name in path:
        if kind == "f":
            found += f".{name}"
        elif kind == "k":
            found += "[" + ",".join(f"{key}={json.dumps(value)}" for key, value in json.loads(name).items()) + "]"
        else:
            found += f"[={name}]"
    return found


def fields(item: Json, schema: Schema) -> Fields:
    """Return the fields that an object has, without those that only the server sets."""
    return frozenset(_fields(item, schema, ())) - _OF_SERVER


def _fields(value: Any, schema: Schema, path: Path) -> Iterator[Path]:
    schema = resolved(schema)
    if isinstance(value, dict) and value and _is_granular(schema):
        for name, inner in value.items():
            yield from _fields(inner, child(schema, name), (*path, ("f", name)))
    elif isinstance(value, list) and value and _list_type(schema) == "map":
        for item in value:
            at = (*path, ("k", _key(item, schema)))
            yield at
            yield from _fields(item, schema["items"], at)
    elif isinstance(value, list) and value and _list_type(schema) == "set":
        yield from ((*path, ("v", json.dumps(item))) for item in value)
    else:
        yield path


def _is_granular(schema: Schema) -> bool:
    return schema.get("x-kubernetes-map-type") != "atomic"


def _list_type(schema: Schema) -> str:
    return str(schema.get("x-kubernetes-list-type", "atomic"))


def _key(item: Json, schema: Schema) -> str:
    names = schema["x-kubernetes-list-map-keys"]
    return json.dumps({name: item.get(name, _DEFAULT_KEYS.get(name)) for name in sorted(names)})


def merged(live: Any, applied: Any, schema: Schema) -> Any:
    """Return an object with the fields of another put into it."""
    schema = resolved(schema)
    if isinstance(live, dict) and isinstance(applied, dict) and _is_granular(schema):
        return live | {name: merged(live.get(name), value, child(schema, name)) for name, value in applied.items()}
    if isinstance(live, list) and isinstance(applied, list) and _list_type(schema) == "map":
        new = {_key(item, schema): item for item in applied}
        old = {_key(item, schema): item for item in live}
        ordered = [key for key in old if key not in new] + list(new)
        return [merged(old.get(key), new[key], schema["items"]) if key in new else old[key] for key in ordered]
    if isinstance(live, list) and isinstance(applied, list) and _list_type(schema) == "set":
        return live + [item for item in applied if item not in live]
    return copy.deepcopy(applied)


def _without(value: Any, schema: Schema, removed: Fields, path: Path = ()) -> Any:
    """Return an object without fields, and without what is empty then; None if nothing is left."""
    schema = resolved(schema)
    if path in removed:
        return None
    if not any(one[: len(path)] == path for one in removed):
        return value
    if isinstance(value, dict):
        rest = {name: _without(v, child(schema, name), removed, (*path, ("f", name))) for name, v in value.items()}
        return {name: v for name, v in rest.items() if v is not None or value[name] is None} or None
    if isinstance(value, list) and _list_type(schema) == "map":
        items = [_without(v, schema["items"], removed, (*path, ("k", _key(v, schema)))) for v in value]
        return [item for item in items if item is not None] or None
    if isinstance(value, list):
        return [item for item in value if (*path, ("v", json.dumps(item))) not in removed] or None
    return value


def _values(item: Json, schema: Schema) -> dict[Path, Any]:
    """Return the leaves of an object, with their values."""
    found: dict[Path, Any] = {}

    def visit(value: Any, schema: Schema, path: Path) -> None:
        schema = resolved(schema)
        if isinstance(value, dict) and value and _is_granular(schema):
            for name, inner in value.items():
                visit(inner, child(schema, name), (*path, ("f", name)))
        elif isinstance(value, list) and value and _list_type(schema) == "map":
            for inner in value:
                found[(*path, ("k", _key(inner, schema)))] = None
                visit(inner, schema["items"], (*path, ("k", _key(inner, schema))))
        elif isinstance(value, list) and value and _list_type(schema) == "set":
            found.update({(*path, ("v", json.dumps(inner))): None for inner in value})
        else:
            found[path] = value

    visit(item, schema, ())
    return {path: value for path, value in found.items() if path not in _OF_SERVER}


def changed(old: Json, new: Json, schema: Schema) -> tuple[Fields, Fields]:
    """Return the fields that were added or have another value, and those that were removed."""
    before, after = _values(old, schema), _values(new, schema)
    other = frozenset(path for path, value in after.items() if path not in before or before[path] != value)
    return other, frozenset(before.keys() - after.keys())


def apply(
    live: Json | None, applied: Json, managed: Managed, manager: Manager, schema: Schema, *, force: bool
) -> tuple[Json, Managed]:
    """Return an object and its managers after an apply. Raises ConflictError."""
    own = fields(applied, schema)
    if live is None:
        return copy.deepcopy(applied), {manager: own}
    others = {other: owned for other, owned in managed.items() if other != manager}
    new = merged(live, applied, schema)
    different, _ = changed(live, new, schema)
    conflicts = [(other, path) for other, owned in others.items() for path in sorted(owned & different & own)]
    if conflicts and not force:
        raise ConflictError(conflicts)
    for other, path in conflicts:
        others[other] -= {path}
    dropped = managed.get(manager, frozenset()) - own
    elsewhere = frozenset().union(*others.values()) | own
    dropped = frozenset(path for path in dropped if not any(one[: len(path)] == path for one in elsewhere))
    new = _without(new, schema, dropped) if dropped else new
    others = {other: owned for other, owned in others.items() if owned}
    return new, others | {manager: own}


def update(old: Json | None, new: Json, managed: Managed, manager: Manager, schema: Schema) -> Managed:
    """Return the managers after an update: it owns what it changes, whoever had it before."""
    if old is None:
        return {manager: fields(new, schema)}
    different, removed = changed(old, new, schema)
    lost = different | removed
    others = {other: owned - lost if other != manager else owned - removed for other, owned in managed.items()}
    if different:
        others[manager] = others.get(manager, frozenset()) | different
    return {other: owned for other, owned in others.items() if owned}


def to_json(managed: Managed, times: Mapping[Manager, str]) -> list[Json]:
    """Return ``metadata.managedFields``."""
    rows = []
    for manager, owned in sorted(managed.items()):
        row = {"manager": manager.name, "operation": manager.operation, "apiVersion": manager.api_version}
        row |= {"time": times[manager], "fieldsType": "FieldsV1", "fieldsV1": _tree(owned)}
        rows.append(row | ({"subresource": manager.subresource} if manager.subresource else {}))
    return rows


def _tree(owned: Fields) -> Json:
    root: Json = {}
    for path in sorted(owned):
        at = root
        for kind, name in path:
            at = at.setdefault(f"{kind}:{name}", {})
        if path[-1][0] != "f" and any(one[: len(path)] == path and one != path for one in owned):
            at["."] = {}
    return root
