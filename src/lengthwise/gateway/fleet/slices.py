"""What the EndpointSlices of one Service say of its engines; knows nothing of how they came."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lengthwise.gateway.config import Engine
from lengthwise.gateway.fleet.found import Found, at

SERVICE_LABEL = "kubernetes.io/service-name"
_FAMILIES = {"IPv4": 0, "IPv6": 1, "FQDN": 2}


@dataclass(frozen=True)
class _Row:
    family: int
    key: str
    found: Found


class Slices:
    """All slices of a Service by name.

    Args:
        port: Number or name of the port.
        like: What holds of every engine.
    """

    def __init__(self, port: str, like: Engine) -> None:
        self._port, self._like = port, like
        self._slices: dict[str, Mapping[str, Any]] = {}

    def replace(self, items: list[Any]) -> None:
        """All there are."""
        self._slices = {}
        for item in items:
            self.put(item)

    def put(self, item: Any) -> None:
        """One that is new or has changed."""
        if isinstance(item, dict) and (name := _name(item)):
            self._slices[name] = item

    def drop(self, item: Any) -> None:
        """One that is gone."""
        if isinstance(item, dict):
            self._slices.pop(_name(item), None)

    def found(self) -> list[Found]:
        """The engines now: a pod is one, whatever slices and address families it is in.

        Where slices differ on a pod it may be given requests if any of them says so, unless one says that
        it is terminating.
        """
        rows: dict[str, _Row] = {}
        for row in sorted(self._rows(), key=lambda row: (row.family, row.found.name, not row.found.up)):
            rows.setdefault(row.key, row)
        names = Counter(row.found.name for row in rows.values())
        return [row.found if names[row.found.name] == 1 else _by_place(row.found) for row in rows.values()]

    def _rows(self) -> Iterator[_Row]:
        going = {
            _key(endpoint)
            for item in self._slices.values()
            for endpoint in _dicts(item, "endpoints")
            if _conditions(endpoint).get("terminating") is True
        }
        for item in self._slices.values():
            family = _FAMILIES.get(str(item.get("addressType")), 3)
            ports = list(self._ports(item))
            for endpoint in _dicts(item, "endpoints"):
                key, address = _key(endpoint), _address(endpoint)
                up = _conditions(endpoint).get("ready") is not False and key not in going
                for port in ports if address else ():
                    found = at(address, port, self._like, name=_pod(endpoint), up=up)
                    yield _Row(family, f"{key}:{port}", found)

    def _ports(self, item: Mapping[str, Any]) -> Iterator[int]:
        """The slice's ports of the name; a number stands for itself, whatever the slice says."""
        if self._port.isdecimal():
            yield int(self._port)
            return
        for port in _dicts(item, "ports"):
            number = port.get("port") if port.get("name") == self._port else None
            if isinstance(number, int):
                yield number


def _by_place(found: Found) -> Found:
    """The same under its address: several go by one name."""
    place = found.engine.url.partition("://")[2]
    return replace(found, name=place, engine=replace(found.engine, name=place))


def _dicts(item: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    rows = item.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _dict(item: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = item.get(name)
    return found if isinstance(found, dict) else {}


def _name(item: Mapping[str, Any]) -> str:
    return str(_dict(item, "metadata").get("name", ""))


def _conditions(endpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    return _dict(endpoint, "conditions")


def _address(endpoint: Mapping[str, Any]) -> str:
    """Its first address; all of one endpoint are the same by the API's own word."""
    rows = endpoint.get("addresses")
    return rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], str) else ""


def _pod(endpoint: Mapping[str, Any]) -> str:
    return str(_dict(endpoint, "targetRef").get("name", ""))


def _key(endpoint: Mapping[str, Any]) -> str:
    """The same for one pod in every slice."""
    target = _dict(endpoint, "targetRef")
    return str(target.get("uid") or target.get("name") or _address(endpoint))
