"""Discover engines: from the configuration, by DNS, and by the EndpointSlices of a Kubernetes Service."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from lengthwise.gateway.background import background
from lengthwise.gateway.config import Engine, GatewayConfig
from lengthwise.gateway.fleet.kubernetes_api import ACCOUNT, KubernetesClient, KubernetesError
from lengthwise.schema.errors import InputError

_log = logging.getLogger("lengthwise.gateway")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An engine at an address. ``name`` is unique and equals ``engine.name``. If not ``up``, the engine drains."""

    name: str
    engine: Engine
    up: bool = True


Publish = Callable[[Sequence[Endpoint]], None]  # gets all endpoints that a source knows now


def engine_name(engine: Engine) -> str:
    """Return the configured name of an engine or, without one, its host and port."""
    return engine.name or urlsplit(engine.url).netloc.rpartition("@")[2]


def endpoint_at(address: str, port: int, template: Engine, *, name: str = "", up: bool = True) -> Endpoint:
    """Return an endpoint at the address and port, with the other settings of ``template``, by default named by both."""
    secure = template.tls is not None or template.url.startswith("https:")
    try:
        host = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    except ValueError:
        host = address
    netloc = f"{host}:{port}"
    url = f"{'https' if secure else 'http'}://{netloc}"
    return Endpoint(name or netloc, replace(template, url=url, name=name or netloc), up)


_LOOKUP_TIMEOUT_S, _MIN_INTERVAL_S = 10.0, 0.01
_Lookup = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Return all addresses that the system's resolver finds for a host name."""
    rows = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(row[4][0]) for row in rows]


class Dns:
    """Discovers engines by a lookup of ``host:port`` every ``interval_s``. If it fails, the last result stays valid."""

    def __init__(self, target: str, interval_s: float, template: Engine, *, lookup: _Lookup = resolve) -> None:
        self._host, _, port = target.rpartition(":")
        if not self._host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InputError(f"discovery by DNS needs host:port, such as engines.default.svc:8000; it is {target!r}")
        self._port, self._interval_s, self._template, self._lookup = int(port), interval_s, template, lookup

    async def run(self, publish: Publish) -> None:
        """Publish the endpoints after every lookup, until cancelled."""
        failed = False
        while True:
            try:
                async with asyncio.timeout(_LOOKUP_TIMEOUT_S):
                    addresses = sorted(set(await self._lookup(self._host, self._port)))
            except (OSError, UnicodeError) as error:  # TimeoutError is an OSError
                if not failed:
                    _log.warning("%s cannot be looked up, its engines stay as they are: %s", self._host, error)
                failed = True
            else:
                failed = False
                publish([endpoint_at(address, self._port, self._template) for address in addresses])
            await asyncio.sleep(max(_MIN_INTERVAL_S, self._interval_s))


_FAMILIES = {"IPv4": 0, "IPv6": 1, "FQDN": 2}


class Slices:
    """The EndpointSlices of a Service, as parsed from untrusted JSON. ``port`` is the engines' port, number or name."""

    def __init__(self, port: str, template: Engine) -> None:
        self._port, self._template = port, template
        self._slices: dict[str, Mapping[str, Any]] = {}

    def replace(self, items: list[Any]) -> None:
        """Replace all slices."""
        self._slices = {}
        for item in items:
            self.put(item)

    def put(self, item: Any) -> None:
        """Add or replace a slice."""
        if isinstance(item, dict) and (name := str(_dict(item, "metadata").get("name", ""))):
            self._slices[name] = item

    def drop(self, item: Any) -> None:
        """Remove a slice."""
        if isinstance(item, dict):
            self._slices.pop(str(_dict(item, "metadata").get("name", "")), None)

    def endpoints(self) -> list[Endpoint]:
        """Return one endpoint for each pod and port, even if several slices or address families list it."""
        by_pod: dict[str, Endpoint] = {}
        for _, endpoint, key in sorted(self._rows(), key=lambda row: (row[0], row[1].name, not row[1].up)):
            by_pod.setdefault(key, endpoint)
        counts = Counter(endpoint.name for endpoint in by_pod.values())
        for key, endpoint in by_pod.items():
            if counts[endpoint.name] > 1:  # several endpoints share the name of a pod: name them by their addresses
                netloc = endpoint.engine.url.partition("://")[2]
                by_pod[key] = Endpoint(netloc, replace(endpoint.engine, name=netloc), endpoint.up)
        return list(by_pod.values())

    def _rows(self) -> Iterator[tuple[int, Endpoint, str]]:
        """Yield (address family, endpoint, key). The key is the same for a pod and port in every slice."""
        rows = [(item, row) for item in self._slices.values() for row in _dicts(item, "endpoints")]
        terminating = {_pod_key(row) for _, row in rows if _dict(row, "conditions").get("terminating") is True}
        for item, row in rows:
            if not (address := _first_address(row)):
                continue
            key, pod = _pod_key(row), str(_dict(row, "targetRef").get("name", ""))
            up = _dict(row, "conditions").get("ready") is not False and key not in terminating
            family = _FAMILIES.get(str(item.get("addressType")), 3)
            ports: list[Any] = [int(self._port)] if self._port.isdecimal() else []
            ports += [port.get("port") for port in _dicts(item, "ports") if port.get("name") == self._port]
            for port in ports:
                if isinstance(port, int):
                    yield family, endpoint_at(address, port, self._template, name=pod, up=up), f"{key}:{port}"


def _dicts(item: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    rows = item.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _dict(item: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = item.get(name)
    return value if isinstance(value, dict) else {}


def _first_address(row: Mapping[str, Any]) -> str:
    """Return the first address. By the API's contract all addresses of an endpoint are equivalent."""
    addresses = row.get("addresses")
    return addresses[0] if isinstance(addresses, list) and addresses and isinstance(addresses[0], str) else ""


def _pod_key(row: Mapping[str, Any]) -> str:
    target = _dict(row, "targetRef")
    return str(target.get("uid") or target.get("name") or _first_address(row))


WATCH_DURATION_S, WATCH_TIMEOUT_S = 300.0, 150.0
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.2, 30.0
_GOOD_WATCH_S = 1.0  # a watch that lasted longer was good even without an event


class EndpointSlices:
    """Publishes the engines of a Kubernetes Service after every change.

    ``target`` is ``namespace/service:port``, with the number or name of a port. The slices are listed once, and then
    watched from the version of that list. When a watch ends, the next one continues from the last version. After an
    expired version or an invalid event, the slices are listed again. While the API fails, the last result stays valid,
    and the next request waits for 50 to 100 % of a backoff of 0.2 s, which doubles up to 30 s. A watch that is silent
    for ``timeout_s`` ends.
    """

    def __init__(
        self,
        target: str,
        template: Engine,
        *,
        api_url: str | None = None,
        account: Path = ACCOUNT,
        timeout_s: float = WATCH_TIMEOUT_S,
        rng: random.Random | None = None,
    ) -> None:
        path, _, port = target.rpartition(":")
        namespace, _, service = path.partition("/")
        if not (namespace and service and port) or "/" in service:
            rule = "discovery by EndpointSlices needs namespace/service:port, such as default/engines:8000"
            raise InputError(f"{rule}; it is {target!r}")
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = f"kubernetes.io/service-name={service}"
        self._slices, self.client = Slices(port, template), KubernetesClient(api_url, account=account)
        self._timeout_s = timeout_s
        self._rng = rng or random.Random()  # noqa: S311 - backoff, not secrets
        self._version = ""
        self._reset_backoff()

    async def run(self, publish: Publish) -> None:
        """Publish the endpoints after every change, until cancelled."""
        loop = asyncio.get_running_loop()
        async with self.client:
            while True:
                started_s = loop.time()
                try:
                    await self._list_and_watch(publish)
                except KubernetesError as error:
                    if error.status not in (401, 429) and not 500 <= error.status < 600:
                        self._version = ""
                    await self._back_off(str(error))
                except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
                    if loop.time() - started_s > _GOOD_WATCH_S:
                        self._reset_backoff()
                    await self._back_off(f"{type(error).__name__}: {error}")
                else:
                    if loop.time() - started_s < _GOOD_WATCH_S:
                        await self._back_off("")

    async def _list_and_watch(self, publish: Publish) -> None:
        if not self._version:
            items, self._version = await self.client.list(self._path, self._selector)
            self._slices.replace(items)
            self._reset_backoff()
            publish(self._slices.endpoints())
        limits = {"duration_s": WATCH_DURATION_S, "timeout_s": self._timeout_s}
        events = self.client.watch(self._path, self._selector, self._version, **limits)
        async with aclosing(events):
            async for event in events:
                self._reset_backoff()
                item, kind = event["object"], event.get("type")
                if version := (item.get("metadata") or {}).get("resourceVersion"):
                    self._version = str(version)
                if kind in ("ADDED", "MODIFIED"):
                    self._slices.put(item)
                elif kind == "DELETED":
                    self._slices.drop(item)
                else:  # a bookmark
                    continue
                publish(self._slices.endpoints())

    def _reset_backoff(self) -> None:
        self._backoff_s, self._reported = MIN_BACKOFF_S, ""

    async def _back_off(self, cause: str) -> None:
        if cause and cause != self._reported:
            _log.warning("EndpointSlices at %s: %s; the engines stay as they are", self.client.url, cause)
            self._reported = cause
        await asyncio.sleep(self._backoff_s * self._rng.uniform(0.5, 1.0))
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)


_RESTART_S = 5.0
_CONFIGURED = "configured"
_Source = Callable[[Publish], Coroutine[Any, Any, None]]


def configured_endpoints(config: GatewayConfig) -> tuple[Endpoint, ...]:
    """Return the engines of the configuration. Raises InputError if two have the same name."""
    names = [engine_name(engine) for engine in config.engines]
    duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
    if duplicates:
        raise InputError(f"every engine must have a unique name; {duplicates[0]!r} occurs twice. Set its name")
    return tuple(Endpoint(name, replace(engine, name=name)) for name, engine in zip(names, config.engines, strict=True))


class EndpointDiscovery:
    """Discovers engines by all sources. A configured engine has precedence over one of the same name or URL."""

    def __init__(self, config: GatewayConfig, publish: Publish, *, rng: random.Random) -> None:
        self._discovery, self._publish, self._rng = config.discovery, publish, rng
        self._by_source: dict[str, tuple[Endpoint, ...]] = {_CONFIGURED: configured_endpoints(config)}
        self._sources = self._make_sources(config)
        self._running = AsyncExitStack()

    async def start(self) -> None:
        """Publish the configured engines and start the other sources."""
        self._publish_all()
        for name, source in self._sources.items():
            await self._running.enter_async_context(background(self._run_source(name, source)))

    async def stop(self) -> None:
        """Stop the sources."""
        await self._running.aclose()

    def plan(self, config: GatewayConfig) -> tuple[tuple[Endpoint, ...], dict[str, _Source] | None]:
        """Return the configured engines and the other sources of a new configuration, without applying them.

        The sources are None if they are unchanged. Raises InputError if the configuration is invalid.
        """
        same = config.discovery == self._discovery
        return configured_endpoints(config), None if same else self._make_sources(config)

    async def apply(
        self, config: GatewayConfig, endpoints: tuple[Endpoint, ...], sources: dict[str, _Source] | None
    ) -> None:
        """Switch to another configuration, with the engines and sources that ``plan`` returned for it."""
        self._discovery, self._by_source[_CONFIGURED] = config.discovery, endpoints
        if sources is None:
            self._publish_all()
            return
        await self.stop()
        self._sources = sources
        for name in self._by_source.keys() - self._sources.keys() - {_CONFIGURED}:
            del self._by_source[name]
        await self.start()

    def _make_sources(self, config: GatewayConfig) -> dict[str, _Source]:
        discovery = config.discovery
        sources: dict[str, _Source] = {}
        if discovery.dns:
            sources["DNS"] = Dns(discovery.dns, discovery.every_s, discovery.engine).run
        if discovery.endpoint_slices:
            sources["EndpointSlices"] = EndpointSlices(
                discovery.endpoint_slices, discovery.engine, api_url=discovery.api_url, rng=self._rng
            ).run
        return sources

    async def _run_source(self, name: str, source: _Source) -> None:
        def update(found: Sequence[Endpoint]) -> None:
            if self._by_source.get(name) != tuple(found):
                self._by_source[name] = tuple(found)
                self._publish_all()

        while True:
            try:
                await source(update)
            except Exception:  # noqa: BLE001 - discovery continues, whatever a server sends
                _log.exception("discovery by %s failed, the engines stay as they are", name)
            await asyncio.sleep(_RESTART_S)

    def _publish_all(self) -> None:
        names_and_urls: set[str] = set()
        published = []
        for source in (_CONFIGURED, *self._sources):
            for endpoint in self._by_source.get(source, ()):
                if names_and_urls.isdisjoint((endpoint.name, endpoint.engine.url)):
                    published.append(endpoint)
                    names_and_urls |= {endpoint.name, endpoint.engine.url}
        self._publish(published)
