"""Where engines come from, together: the listed ones, and those that are found."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lengthwise.gateway.config import Engine, GatewayConfig
from lengthwise.gateway.fleet.kubernetes_api import ACCOUNT, ExpiredError, Kube, NoAnswerError
from lengthwise.gateway.fleet.worker import name_of
from lengthwise.schema.errors import InputError


@dataclass(frozen=True, slots=True)
class Found:
    """An engine that is there.

    Attributes:
        name: Unique.
        engine: How it is reached; its name is ``name``.
        up: Whether it may be given new requests; one that is not is only kept to its end.
    """

    name: str
    engine: Engine
    up: bool = True


Tell = Callable[[Sequence[Found]], None]
"""Takes all that a source knows now."""


def at(address: str, port: int, like: Engine, *, name: str = "", up: bool = True) -> Found:
    """An engine at an address that was found, in all else like another."""
    secure = like.tls is not None or like.url.startswith("https:")
    place = f"{_host(address)}:{port}"
    url = f"{'https' if secure else 'http'}://{place}"
    return Found(name or place, replace(like, url=url, name=name or place), up)


def split_port(text: str, what: str) -> tuple[str, str]:
    """What stands before and behind the last colon.

    Raises:
        InputError: There is none.
    """
    before, colon, port = text.rpartition(":")
    if not (before and colon and port):
        raise InputError(f"{what}; it is {text!r}")
    return before, port


def _host(address: str) -> str:
    try:
        return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    except ValueError:
        return address


_dns_log = logging.getLogger("lengthwise.gateway")
_LOOKUP_S, _LEAST_S = 10.0, 0.01
Lookup = Callable[[str, int], Awaitable[list[str]]]


async def addresses(host: str, port: int) -> list[str]:
    """All addresses of a name, by the system's resolver."""
    rows = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(row[4][0]) for row in rows]


class Dns:
    """Looks a name up again and again; while it cannot be looked up, what was found last holds.

    Args:
        place: ``host:port``.
        every_s: Between two looks.
        like: What holds of every engine that is found.
        lookup: By which resolver.

    Raises:
        InputError: The place is no host and port.
    """

    def __init__(self, place: str, every_s: float, like: Engine, *, lookup: Lookup = addresses) -> None:
        rule = "discovery by DNS needs host:port, such as engines.default.svc:8000"
        self._host, port = split_port(place, rule)
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise InputError(f"{rule}; it is {place!r}")
        self._port, self._every_s, self._like, self._lookup = int(port), every_s, like, lookup
        self._failed = False

    async def run(self, tell: Tell) -> None:
        """Tells every look's engines, until cancelled."""
        while True:
            await self._poll(tell)
            await asyncio.sleep(max(_LEAST_S, self._every_s))

    async def _poll(self, tell: Tell) -> None:
        try:
            async with asyncio.timeout(_LOOKUP_S):
                found = sorted(set(await self._lookup(self._host, self._port)))
        except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
            if not self._failed:
                _dns_log.warning("%s cannot be looked up, its engines stay as they are: %s", self._host, error)
            self._failed = True
            return
        self._failed = False
        tell([at(address, self._port, self._like) for address in found])


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


_endpoint_slices_log = logging.getLogger("lengthwise.gateway")
_RULE = "discovery by EndpointSlices needs namespace/service:port, such as default/engines:8000"
LASTS_S, SILENT_S = 300.0, 150.0
FIRST_WAIT_S, MOST_WAIT_S = 0.2, 30.0
_LONG_S = 1.0
"""A watch that lasted longer was a good one, even if nothing happened."""


class EndpointSlices:
    """The engines of a Service, told anew whenever its slices change.

    Lists once, then watches from the version of the list. A watch that ends is gone on with from the last
    version that was seen; one whose version is too old, or that sent what cannot be understood, begins with a
    list. While the API does not answer, what was found last holds, and it is asked again after 0.2 s, twice
    as long each time, at most 30 s, by chance up to half shorter. The role needs get, list and watch of
    ``endpointslices`` in the namespace.

    Args:
        place: ``namespace/service:port``, the port a number or a name.
        like: What holds of every engine.
        api_url: Of the API; None: as a pod finds it.
        account: Folder of the token and the authority.
        lasts_s: How long a watch is asked to last.
        silent_s: A watch without a word for so long is begun again.
        dice: Of the waits.

    Raises:
        InputError: The place is none, or there is no API to ask.
    """

    def __init__(
        self,
        place: str,
        like: Engine,
        *,
        api_url: str | None = None,
        account: Path = ACCOUNT,
        lasts_s: float = LASTS_S,
        silent_s: float = SILENT_S,
        dice: random.Random | None = None,
    ) -> None:
        where, port = split_port(place, _RULE)
        namespace, slash, service = where.partition("/")
        if not (namespace and slash and service) or "/" in service:
            raise InputError(f"{_RULE}; it is {place!r}")
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = f"{SERVICE_LABEL}={service}"
        self._slices, self._kube = Slices(port, like), Kube(api_url, account=account)
        self._lasts_s, self._silent_s = lasts_s, silent_s
        self._dice = dice or random.Random()  # noqa: S311 - waits, not secrets
        self._version = ""
        self._wait_s, self._message = FIRST_WAIT_S, ""

    async def run(self, tell: Tell) -> None:
        """Tells the engines after every change, until cancelled."""
        async with self._kube:
            while True:
                await self._once(tell)

    async def _once(self, tell: Tell) -> None:
        """A list, where it is needed, and a watch to its end."""
        import aiohttp

        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            if not self._version:
                await self._list(tell)
            await self._monitor(tell)
        except ExpiredError:
            self._version = ""
            await self._rest("the version is too old, listing again", quietly=True)
        except NoAnswerError as error:
            if error.status not in (401, 429) and not 500 <= error.status < 600:
                self._version = ""
            await self._rest(str(error))
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            if loop.time() - started_s > _LONG_S:
                self._well()
            await self._rest(f"{type(error).__name__}: {error}")
        else:
            if loop.time() - started_s < _LONG_S:
                await self._rest("the watch ended at once", quietly=True)

    async def _list(self, tell: Tell) -> None:
        items, version = await self._kube.list(self._path, self._selector)
        self._slices.replace(items)
        self._version = version
        self._well()
        tell(self._slices.found())

    async def _monitor(self, tell: Tell) -> None:
        events = self._kube.monitor(
            self._path, self._selector, self._version, lasts_s=self._lasts_s, silent_s=self._silent_s
        )
        async with aclosing(events):
            async for event in events:
                self._well()
                if self._take(event):
                    tell(self._slices.found())

    def _take(self, event: dict[str, Any]) -> bool:
        """Whether it is a change."""
        item, kind = event["object"], event.get("type")
        version = (item.get("metadata") or {}).get("resourceVersion")
        if version:
            self._version = str(version)
        if kind in ("ADDED", "MODIFIED"):
            self._slices.put(item)
        elif kind == "DELETED":
            self._slices.drop(item)
        return kind in ("ADDED", "MODIFIED", "DELETED")

    def _well(self) -> None:
        self._wait_s, self._message = FIRST_WAIT_S, ""

    async def _rest(self, cause: str, *, quietly: bool = False) -> None:
        """Waits, longer each time in a row."""
        if not quietly and cause != self._message:
            _endpoint_slices_log.warning(
                "EndpointSlices at %s: %s; the engines stay as they are", self._kube.url, cause
            )
            self._message = cause
        await asyncio.sleep(self._wait_s * self._dice.uniform(0.5, 1.0))
        self._wait_s = min(2 * self._wait_s, MOST_WAIT_S)


_log = logging.getLogger("lengthwise.gateway")
_AGAIN_S = 5.0
_Run = Callable[[Tell], Coroutine[Any, Any, None]]


def entries(config: GatewayConfig) -> list[Found]:
    """The engines that the configuration lists.

    Raises:
        InputError: Two have one name.
    """
    found = [Found(name_of(engine), replace(engine, name=name_of(engine))) for engine in config.engines]
    names = [one.name for one in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"every engine must have a name of its own; {twice[0]!r} is there twice: set its name")
    return found


@dataclass(frozen=True)
class Plan:
    """A configuration that can be gone over to; ``runs`` None: the sources stay."""

    config: GatewayConfig
    entries: tuple[Found, ...]
    runs: dict[str, _Run] | None


class Discoveries:
    """All sources; whoever is listed comes before whoever is found under the same name.

    Args:
        config: The gateway's.
        desired: Called with all engines whenever a source told something new.
        dice: Of waits.
    """

    def __init__(
        self, config: GatewayConfig, desired: Callable[[Sequence[Found]], None], *, dice: random.Random
    ) -> None:
        self._discovery, self._wanted, self._dice = config.discovery, desired, dice
        self._by_source: dict[str, tuple[Found, ...]] = {"entries": tuple(entries(config))}
        self._runs = self._sources(config)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Tells the listed ones and begins to look for others."""
        self._all()
        self._tasks = [
            asyncio.create_task(self._keep(source, run), name=f"discovery by {source}")
            for source, run in self._runs.items()
        ]

    async def stop(self) -> None:
        """Looks no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def plan(self, config: GatewayConfig) -> Plan:
        """What another configuration would mean; raises InputError where it cannot be."""
        same = config.discovery == self._discovery
        return Plan(config, tuple(entries(config)), None if same else self._sources(config))

    async def follow(self, plan: Plan) -> None:
        """Goes over to another configuration."""
        self._discovery, self._by_source["entries"] = plan.config.discovery, plan.entries
        if plan.runs is None:
            self._all()
            return
        await self.stop()
        self._runs = plan.runs
        for source in [one for one in self._by_source if one != "entries" and one not in self._runs]:
            del self._by_source[source]
        await self.start()

    def _sources(self, config: GatewayConfig) -> dict[str, _Run]:
        told = config.discovery
        runs: dict[str, _Run] = {}
        if told.dns:
            runs["DNS"] = Dns(told.dns, told.every_s, told.engine).run
        if told.endpoint_slices:
            slices = EndpointSlices(told.endpoint_slices, told.engine, api_url=told.api_url, dice=self._dice)
            runs["EndpointSlices"] = slices.run
        return runs

    async def _keep(self, source: str, run: _Run) -> None:
        while True:
            try:
                await run(lambda found: self._took(source, found))
            except Exception:  # noqa: BLE001 - discovery goes on, whatever somebody sends it
                _log.exception("discovery by %s failed, the engines stay as they are", source)
            await asyncio.sleep(_AGAIN_S)

    def _took(self, source: str, found: Sequence[Found]) -> None:
        if self._by_source.get(source) != tuple(found):
            self._by_source[source] = tuple(found)
            self._all()

    def _all(self) -> None:
        by_name: dict[str, Found] = {}
        places: set[str] = set()
        for source in ("entries", *self._runs):
            for one in self._by_source.get(source, ()):
                if one.name not in by_name and one.engine.url not in places:
                    by_name[one.name] = one
                    places.add(one.engine.url)
        self._wanted(list(by_name.values()))
