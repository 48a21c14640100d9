"""A Kubernetes API server with EndpointSlices and nothing else: for whoever watches them, with its moods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from lengthwise.schema.errors import MissingExtraError

if TYPE_CHECKING:
    from aiohttp import web

_ROUTE = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
_SHUTDOWN_S = 0.05
"""For handlers to end; aiohttp takes 0 for no limit."""
Json = dict[str, Any]


def endpoint(
    address: str,
    *,
    pod: str = "",
    ready: bool | None = True,
    terminating: bool | None = None,
    serving: bool | None = None,
) -> Json:
    """One endpoint of a slice; conditions that are None are left out."""
    told = {"ready": ready, "serving": serving, "terminating": terminating}
    made: Json = {"addresses": [address], "conditions": {k: v for k, v in told.items() if v is not None}}
    if pod:
        made["targetRef"] = {"kind": "Pod", "name": pod, "uid": f"uid-of-{pod}"}
    return made


def endpoint_slice(
    name: str,
    endpoints: Sequence[Json],
    *,
    service: str = "engines",
    port: int = 8000,
    port_name: str = "http",
    family: str = "IPv4",
) -> Json:
    """A slice of a Service."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
        "addressType": family,
        "ports": [{"name": port_name, "port": port, "protocol": "TCP"}],
        "endpoints": list(endpoints),
    }


@dataclass
class Moods:
    """What goes wrong; may be changed at any time.

    Attributes:
        status: Every request is answered so; 0: as it should be.
        cut_next: The next event breaks off in its middle, and the watch with it.
        silent: Watches open, and nothing ever comes.
        ends_at_once: Watches end as soon as they have begun.
        slow_s: Before every answer and every event.
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
    selector: str
    events: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)


class KubeApi:
    """Lists and watches of EndpointSlices on loopback; an async context manager. Needs aiohttp.

    Args:
        token: Asked for as a bearer token; "" nobody is asked. May be changed at any time.
        tls: An ``ssl.SSLContext`` of a server; None: plain HTTP.
        port: 0 picks a free one, kept over ``stop`` and ``start``.

    Attributes:
        moods: What goes wrong.
        lists: How often a list was answered.
        watches: How often a watch was opened.
        refused: How often a request had the wrong token.
        paths: Of all requests, each once.
    """

    def __init__(self, *, token: str = "", tls: Any = None, port: int = 0) -> None:
        self.token, self.moods, self.port = token, Moods(), port
        self.lists = self.watches = self.refused = 0
        self.paths: set[str] = set()
        self._tls = tls
        self._version, self._oldest = 100, 0
        self._slices: dict[tuple[str, str], Json] = {}
        self._past: list[tuple[int, str, bytes]] = []
        self._open: set[_Watch] = set()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def open(self) -> int:
        """Watches that are open."""
        return len(self._open)

    async def __aenter__(self) -> Self:
        """Listens."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stops."""
        await self.stop()

    async def start(self) -> None:
        """Listens (again)."""
        try:
            from aiohttp import web
        except ImportError as error:
            raise MissingExtraError("lengthwise.testing.kube_api", "gateway") from error
        app = web.Application()
        app.router.add_get(_ROUTE, self._answer)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=self._tls, reuse_address=True).start()
        self.port = runner.addresses[0][1]
        self._runner = runner

    async def stop(self) -> None:
        """Closes the port and all watches; what it knows stays."""
        self.end_watches()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def put(self, item: Json, *, namespace: str = "default") -> None:
        """A slice that is new or has changed."""
        key = namespace, item["metadata"]["name"]
        kind = "MODIFIED" if key in self._slices else "ADDED"
        self._slices[key] = item
        self._happened(kind, namespace, item)

    def delete(self, name: str, *, namespace: str = "default") -> None:
        """A slice that is gone."""
        self._happened("DELETED", namespace, self._slices.pop((namespace, name)))

    def bookmark(self, *, namespace: str = "default") -> None:
        """Tells all watches how far they are."""
        self._version += 1
        event = {
            "type": "BOOKMARK",
            "object": {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(self._version)}},
        }
        for watch in self._open:
            if watch.namespace == namespace:
                watch.events.put_nowait(_line(event))

    def clear(self) -> None:
        """Versions up to now are too old to be gone on with: 410."""
        self._oldest = self._version
        self._past.clear()

    def end_watches(self) -> None:
        """All watches end as they do after a while."""
        for watch in self._open:
            watch.events.put_nowait(None)

    def tell_all(self, line: bytes) -> None:
        """Sends every watch whatever one likes."""
        for watch in self._open:
            watch.events.put_nowait(line)

    def _happened(self, kind: str, namespace: str, item: Json) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        line, service = _line({"type": kind, "object": item}), _service(item)
        self._past.append((self._version, f"{namespace}/{service}", line))
        for watch in self._open:
            if (watch.namespace, watch.selector) == (namespace, service):
                watch.events.put_nowait(line)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        self.paths.add(request.path)
        await asyncio.sleep(self.moods.slow_s)
        if self.moods.status:
            return web.json_response({"kind": "Status", "code": self.moods.status}, status=self.moods.status)
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            self.refused += 1
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        if request.query.get("watch") in ("1", "true"):
            return await self._monitor_task(request)
        return web.json_response(self._entries(request))

    def _entries(self, request: web.Request) -> Json:
        self.lists += 1
        namespace, service = request.match_info["namespace"], _selected(request)
        rows = [
            item
            for (where, _), item in sorted(self._slices.items())
            if where == namespace and _service(item) == service
        ]
        begin, page = int(request.query.get("continue", "0")), self.moods.page or len(rows)
        metadata = {"resourceVersion": str(self._version)}
        if begin + page < len(rows):
            metadata["continue"] = str(begin + page)
        return {"kind": "EndpointSliceList", "metadata": metadata, "items": rows[begin : begin + page]}

    async def _monitor_task(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        self.watches += 1
        since = int(request.query.get("resourceVersion") or self._version)
        if since < self._oldest:
            return web.json_response({"kind": "Status", "code": 410, "reason": "Expired"}, status=410)
        answer = web.StreamResponse(headers={"Content-Type": "application/json;stream=watch"})
        await answer.prepare(request)
        if self.moods.ends_at_once:
            return answer
        watch = _Watch(request.match_info["namespace"], _selected(request))
        for version, place, line in self._past:
            if version > since and place == f"{watch.namespace}/{watch.selector}":
                watch.events.put_nowait(line)
        self._open.add(watch)
        try:
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", "300"))):
                await self._write(watch, answer, request)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._open.discard(watch)
        return answer

    async def _write(self, monitor: _Watch, answer: web.StreamResponse, request: web.Request) -> None:
        while (line := await monitor.events.get()) is not None:
            await asyncio.sleep(self.moods.slow_s)
            if self.moods.silent:
                continue
            if self.moods.cut_next:
                self.moods.cut_next = False
                await answer.write(line[: len(line) // 2])
                if request.transport is not None:
                    request.transport.close()
                return
            await answer.write(line)


def _line(event: Json) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _service(item: Json) -> str:
    return str(item["metadata"].get("labels", {}).get("kubernetes.io/service-name", ""))


def _selected(request: web.Request) -> str:
    return request.query.get("labelSelector", "").removeprefix("kubernetes.io/service-name=")
