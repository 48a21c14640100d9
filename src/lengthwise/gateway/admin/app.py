"""The admin port: metrics, the page and its data. It reads; nothing can be changed here."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import json
from collections.abc import Awaitable, Callable
from functools import lru_cache
from importlib.resources import files
from types import TracebackType
from typing import Any, Self

from lengthwise.gateway.admin.state import SAMPLE_S, Fleet, Forecaster, Recent, SchedulerDriver, State
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.observe import Monitor, Record
from lengthwise.gateway.protocols import Clock, monotonic
from lengthwise.gateway.telemetry import Telemetry


@lru_cache(maxsize=1)
def page() -> tuple[bytes, str]:
    """The document, and the content security policy that lets exactly its own style and script run."""
    style = _asset("admin.css")
    script = "\n".join(_asset(name) for name in ("charts.js", "sections.js", "admin.js"))
    text = _asset("admin.html").replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    return files("lengthwise.gateway.admin").joinpath("_assets", name).read_text(encoding="utf-8")


_NOT_PUBLIC = (".localhost", ".local", ".internal", ".svc", ".cluster.local")
"""Nobody can have such a name point anywhere he likes."""


def allowed(host: str, own: str = "") -> bool:
    """Whether a Host header is an address, a name that is not public, or the one that was configured."""
    name = _without_port(host).lower().rstrip(".")
    if not name:
        return False
    if name in ("localhost", own.lower()) or name.endswith(_NOT_PUBLIC):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return "." not in name and name.replace("-", "").isalnum()
    return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
EVERY_S = 1.0
MOST_STREAMS = 32
OPEN = ("/healthz", "/metrics")
"""Answered under any name: machines ask for these."""
_SECURE = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


class AdminApp:
    """An ASGI app; as an async context manager it takes samples meanwhile.

    Args:
        config: The gateway's.
        hub: Where requests wait.
        fleet: The engines.
        forecaster: Who predicts.
        telemetry: What is known of requests.
        monitor: Who looks back at the traffic; None: in mode "observe" one of its own, else nobody.
        clock: The gateway's.
    """

    def __init__(
        self,
        config: GatewayConfig,
        driver: SchedulerDriver,
        fleet: Fleet,
        forecaster: Forecaster | None,
        telemetry: Telemetry,
        *,
        monitor: Monitor | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._own_watch = None
        if monitor is None and config.order.mode == "observe":
            record = Record()
            telemetry.trips.subscribe(record.over)
            monitor = self._own_watch = Monitor(record, config.order)
        self.recent = Recent(telemetry, clock, driver.statistics)
        self.state = State(config, driver, fleet, forecaster, telemetry, self.recent, monitor, clock)
        self._own = config.listen.admin_host
        self._registry = telemetry.metrics.registry()
        self._clock = clock
        self._seen: tuple[float, bytes] = (float("-inf"), b"")
        self._streams: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None

    def configure(self, config: GatewayConfig) -> None:
        """Tells another configuration from now on."""
        self.state.config = config
        if self._own_watch is not None:
            self._own_watch.order = config.order

    async def __aenter__(self) -> Self:
        """Begins to take samples."""
        if self._own_watch is not None:
            await self._own_watch.__aenter__()
        self._task = asyncio.ensure_future(self._sample())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends; who watches is sent away."""
        for gone in self._streams:
            gone.set()
        if self._own_watch is not None:
            await self._own_watch.__aexit__(kind, error, trace)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        if path not in OPEN and not allowed(_host(scope), self._own):
            await _say(send, 421, b"This name is not mine.\n", b"text/plain")
        elif path not in _ROUTES:
            await _say(send, 404, b"There is no such page.\n", b"text/plain")
        elif method not in ("GET", "HEAD"):
            await _say(send, 405, b"Here one can only look.\n", b"text/plain", [(b"allow", b"GET, HEAD")])
        else:
            await _ROUTES[path](self, receive, send)

    # Routes:

    async def _page(self, receive: Receive, send: Send) -> None:
        del receive
        text, policy = page()
        await _say(send, 200, text, b"text/html; charset=utf-8", [(b"content-security-policy", policy.encode())])

    async def _healthz(self, receive: Receive, send: Send) -> None:
        del receive
        await _say(send, 200, b"ok\n", b"text/plain")

    async def _metrics(self, receive: Receive, send: Send) -> None:
        del receive
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        await _say(send, 200, generate_latest(self._registry), CONTENT_TYPE_LATEST.encode())

    async def _state(self, receive: Receive, send: Send) -> None:
        del receive
        await _say(send, 200, self._snapshot(), b"application/json")

    async def _events(self, receive: Receive, send: Send) -> None:
        """A snapshot a second, until the client has gone."""
        if len(self._streams) >= MOST_STREAMS:
            await _say(send, 503, b"Too many watch already.\n", b"text/plain")
            return
        gone = asyncio.Event()
        self._streams.add(gone)
        leaving = asyncio.ensure_future(_left(receive, gone))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _headers(b"text/event-stream")})
            while not gone.is_set():
                await send(_piece(b"data: " + self._snapshot() + b"\n\n", more=True))
                await _within(gone, EVERY_S)
            await send(_piece(b"", more=False))
        finally:
            self._streams.discard(gone)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    def _snapshot(self) -> bytes:
        """The state as JSON, made at most about once a second however many watch."""
        now_s = self._clock()
        if now_s - self._seen[0] >= EVERY_S / 2:
            self._seen = now_s, json.dumps(self.state.now(), separators=(",", ":")).encode()
        return self._seen[1]

    async def _sample(self) -> None:
        while True:
            self.recent.sample()
            await asyncio.sleep(SAMPLE_S)


Route = Callable[[AdminApp, Receive, Send], Awaitable[None]]
_ROUTES: dict[str, Route] = {
    "/": AdminApp._page,  # noqa: SLF001 - the class' own
    "/healthz": AdminApp._healthz,  # noqa: SLF001
    "/metrics": AdminApp._metrics,  # noqa: SLF001
    "/state.json": AdminApp._state,  # noqa: SLF001
    "/events": AdminApp._events,  # noqa: SLF001
}


def _host(scope: Scope) -> str:
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    return hosts[0].decode("latin-1") if len(hosts) == 1 else ""


def _headers(kind: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", kind), *_SECURE]


def _piece(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _say(
    send: Send, status: int, body: bytes, kind: bytes, more: list[tuple[bytes, bytes]] | None = None
) -> None:
    headers = [*_headers(kind), (b"content-length", b"%d" % len(body)), *(more or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send(_piece(body, more=False))


async def _left(receive: Receive, stopped: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stopped.set()


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
