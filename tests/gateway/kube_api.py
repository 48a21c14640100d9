"""Kubernetes API server for tests that serves EndpointSlices alone, with faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from lengthwise.testing.engine_server.server import close_runner

_ROUTE = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
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


@dataclass(eq=False)
class _Watch:
    namespace: str
    service: str
    events: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)


class KubeApi:
    """Lists and watches of EndpointSlices on loopback; an async context manager.

    A ``token`` is required if not empty; ``tls`` is an ``ssl.SSLContext`` or None; ``port`` 0 picks a free one, which
    ``stop`` and ``start`` reuse. Counts lists and watches, requests with a wrong token (``refused``) and paths.
    """

    def __init__(self, *, token: str = "", tls: Any = None, port: int = 0) -> None:
        self.token, self.faults, self.port = token, ApiFaults(), port
        self.lists = self.watches = self.refused = 0
        self.paths: set[str] = set()
        self._tls = tls
        self._version, self._min_version = 100, 0
        self._slices: dict[tuple[str, str], Json] = {}
        self._past_events: list[tuple[int, str, str, bytes]] = []
        self._open: set[_Watch] = set()
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
        app = web.Application()
        app.router.add_get(_ROUTE, self._respond)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=self._tls, reuse_address=True).start()
        self.port = runner.addresses[0][1]
        self._runner = runner

    async def stop(self) -> None:
        """Close the port and all watches; retain the slices."""
        self.end_watches()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await close_runner(runner)

    def put(self, item: Json, *, namespace: str = "default") -> None:
        """Add or replace a slice."""
        key = namespace, item["metadata"]["name"]
        kind = "MODIFIED" if key in self._slices else "ADDED"
        self._slices[key] = item
        self._publish(kind, namespace, item)

    def delete(self, name: str, *, namespace: str = "default") -> None:
        """Remove a slice."""
        self._publish("DELETED", namespace, self._slices.pop((namespace, name)))

    def bookmark(self, *, namespace: str = "default") -> None:
        """Send all watches of a namespace the current version."""
        self._version += 1
        item = {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(self._version)}}
        for watch in self._open:
            if watch.namespace == namespace:
                watch.events.put_nowait(_line({"type": "BOOKMARK", "object": item}))

    def clear(self) -> None:
        """Forget past versions: watches from an earlier one get status 410."""
        self._min_version = self._version
        self._past_events.clear()

    def end_watches(self) -> None:
        """End all watches, as a real server does after some minutes."""
        for watch in self._open:
            watch.events.put_nowait(None)

    def send_all(self, line: bytes) -> None:
        """Send arbitrary bytes to every watch."""
        for watch in self._open:
            watch.events.put_nowait(line)

    def _publish(self, kind: str, namespace: str, item: Json) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        line, service = _line({"type": kind, "object": item}), _service(item)
        self._past_events.append((self._version, namespace, service, line))
        for watch in self._open:
            if (watch.namespace, watch.service) == (namespace, service):
                watch.events.put_nowait(line)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        self.paths.add(request.path)
        await asyncio.sleep(self.faults.slow_s)
        if self.faults.status:
            return web.json_response({"kind": "Status", "code": self.faults.status}, status=self.faults.status)
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            self.refused += 1
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        namespace = request.match_info["namespace"]
        service = request.query.get("labelSelector", "").removeprefix("kubernetes.io/service-name=")
        if request.query.get("watch") in ("1", "true"):
            return await self._watch(request, _Watch(namespace, service))
        self.lists += 1
        rows = [v for (n, _), v in sorted(self._slices.items()) if n == namespace and _service(v) == service]
        start, page = int(request.query.get("continue", "0")), self.faults.page or len(rows)
        metadata = {"resourceVersion": str(self._version)}
        if start + page < len(rows):
            metadata["continue"] = str(start + page)
        items = rows[start : start + page]
        return web.json_response({"kind": "EndpointSliceList", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, watch: _Watch) -> web.StreamResponse:
        self.watches += 1
        since = int(request.query.get("resourceVersion") or self._version)
        if since < self._min_version:
            return web.json_response({"kind": "Status", "code": 410, "reason": "Expired"}, status=410)
        response = web.StreamResponse(headers={"Content-Type": "application/json;stream=watch"})
        await response.prepare(request)
        if self.faults.ends_at_once:
            return response
        for version, namespace, service, line in self._past_events:
            if version > since and (namespace, service) == (watch.namespace, watch.service):
                watch.events.put_nowait(line)
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


def _service(item: Json) -> str:
    return str(item["metadata"].get("labels", {}).get("kubernetes.io/service-name", ""))
