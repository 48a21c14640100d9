"""Serve the admin port: metrics, the page and its data, logins of users, and the API."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import html
import ipaddress
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qs

from lengthwise.gateway.admin.access import Access
from lengthwise.gateway.admin.state import SAMPLE_INTERVAL_S, State
from lengthwise.gateway.audit import AuditLog
from lengthwise.gateway.background import background
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.edge import asgi
from lengthwise.gateway.edge.asgi import Receive, Scope, Send
from lengthwise.gateway.edge.errors import Fault, Headers
from lengthwise.gateway.fleet import Fleet
from lengthwise.gateway.length_prediction import LengthPredictor
from lengthwise.gateway.observe import Monitor, RecentRows
from lengthwise.gateway.protocols import Clock, monotonic
from lengthwise.gateway.scheduler_driver import SchedulerDriver
from lengthwise.gateway.telemetry import Telemetry

if TYPE_CHECKING:
    from lengthwise.gateway.admin.api import AdminApi


def _asset(name: str) -> str:
    return files("lengthwise.gateway.admin").joinpath("_assets", name).read_text(encoding="utf-8")


@lru_cache(maxsize=2)
def page(name: str = "admin.html") -> tuple[bytes, str]:
    """Return a page as HTML, and a content security policy that allows only the page's own style and script."""

    def digest(text: str) -> str:
        return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    style, text = _asset("admin.css"), _asset(name)
    script = "\n".join(_asset(one) for one in ("charts.js", "sections.js", "admin.js")) if "/*script*/" in text else ""
    text = text.replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )
    return text.encode(), policy


_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".svc", ".cluster.local")
"""Suffixes of names that cannot be registered in public and point at this port (DNS rebinding)."""


def is_allowed_host(host: str, own: str = "") -> bool:
    """Return whether the admin port serves requests with this Host header.

    It serves IP addresses, private names and ``own``, the configured name. Other names may be attacks by DNS rebinding.
    """
    match = re.fullmatch(r"(\[[^]]+\]|[^:]+)(:\d*)?", host)
    name = match[1].lower().rstrip(".") if match else ""
    if not name:
        return False
    if name in ("localhost", own.lower()) or name.endswith(_PRIVATE_SUFFIXES):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return "." not in name and name.replace("-", "").isalnum()
    return True


EVENT_INTERVAL_S = 1.0
MAX_STREAMS = 32
_LOGIN_BYTES = 1 << 14
ESTIMATE_INTERVAL_S = 1800.0  # between two estimates of the gain, in all modes but observe
_SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"), (b"x-frame-options", b"DENY"), (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"), (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]  # fmt: skip


class AdminApp:
    """ASGI app of the admin port. Within its ``async with`` block it samples the queue and estimates the gain."""

    def __init__(
        self,
        config: GatewayConfig,
        driver: SchedulerDriver,
        fleet: Fleet,
        length_predictor: LengthPredictor | None,
        telemetry: Telemetry,
        *,
        monitor: Monitor | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._owns_monitor = monitor is None
        if monitor is None:
            recent = RecentRows()
            telemetry.timelines.subscribe(recent.append)
            monitor = Monitor(recent, config.order)
            if config.order.mode != "observe":  # an estimate takes seconds of CPU time
                monitor.interval_s, monitor.first_s = ESTIMATE_INTERVAL_S, ESTIMATE_INTERVAL_S / 6
        self.monitor = monitor
        telemetry.metrics.gain = lambda: monitor.estimate
        self.state = State(config, driver, fleet, length_predictor, telemetry, monitor, clock)
        self._host_name = config.listen.admin_host
        self._registry = telemetry.metrics.registry()
        self._clock = clock
        self._snapshot: tuple[float, bytes] = (float("-inf"), b"")
        self._streams: set[asyncio.Event] = set()
        self._stack = contextlib.AsyncExitStack()
        self.access = Access((), True, clock, AuditLog(None, clock))
        self.api: AdminApi | None = None

    def configure(self, config: GatewayConfig) -> None:
        """Show this configuration on the page from now on."""
        self.state.config = config
        if self._owns_monitor:
            self.monitor.order = config.order

    async def __aenter__(self) -> Self:
        if self._owns_monitor:
            await self._stack.enter_async_context(self.monitor)
        await self._stack.enter_async_context(background(self._sample()))
        return self

    async def __aexit__(self, *_: object) -> None:
        for closed in self._streams:
            closed.set()
        await self._stack.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: C901 - one path after the other
        """Respond to an HTTP request to the admin port."""
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        if path != "/healthz" and not is_allowed_host(host, self._host_name):
            await _respond(send, 421, b"This server does not serve this host name.\n", b"text/plain")
        elif self.api is not None and self.access.has_users and path.startswith("/admin/"):
            await self.api(scope, receive, send)
        elif path == "/session" or (self.access.has_users and path in ("/login", "/logout")):
            await self._serve_session(scope, receive, send)
        elif path != "/healthz" and (fault := await self._refusal(scope)) is not None:
            is_page = path == "/" and fault.status == 401
            headers = [(b"location", b"/login")] if is_page else fault.all_headers()[1:]
            await _respond(send, 303 if is_page else fault.status, fault.body, b"application/json", headers)
        elif path not in ("/", "/state.json", "/events", "/healthz", "/metrics"):
            await _respond(send, 404, b"Not found.\n", b"text/plain")
        elif method not in ("GET", "HEAD"):
            await _respond(send, 405, b"This port is read-only.\n", b"text/plain", [(b"allow", b"GET, HEAD")])
        elif path == "/":
            text, policy = page()
            headers = [(b"content-security-policy", policy.encode())]
            await _respond(send, 200, text, b"text/html; charset=utf-8", headers)
        elif path == "/healthz":
            await _respond(send, 200, b"ok\n", b"text/plain")
        elif path == "/metrics":
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

            await _respond(send, 200, generate_latest(self._registry), CONTENT_TYPE_LATEST.encode())
        elif path == "/state.json":
            await _respond(send, 200, self._state(), b"application/json")
        else:
            await self._stream_events(scope, receive, send)

    async def _refusal(self, scope: Scope) -> Fault | None:
        """Return the fault of a client that may not read, or None."""
        try:
            if not self.access.is_open:
                await self.access.user(scope)
        except Fault as fault:
            return fault
        return None

    async def _serve_session(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the login page, the logout, and the user and CSRF value of a session."""
        path, is_post = scope["path"], scope["method"] == "POST"
        try:
            if path == "/login" and is_post:
                exchange = asgi.AsgiExchange(scope, receive, send)
                body = await exchange.body(_LOGIN_BYTES, None, asgi.BodyReservation(asgi.BodyBudget(_LOGIN_BYTES)))
                token = parse_qs(body.decode("latin-1")).get("token", [""])[0]
                cookie = self.access.log_in(scope, token.strip())
                await _respond(send, 303, b"", b"text/plain", [(b"location", b"/"), cookie])
            elif path == "/logout" and is_post:
                cookie = self.access.log_out(scope)
                await _respond(send, 303, b"", b"text/plain", [(b"location", b"/login"), cookie])
            elif path == "/login":
                await self._send_login(send, 200, "")
            elif path == "/session" and not is_post:
                actor, csrf = await self.access.user(scope)
                data = {"name": actor.name, "role": actor.role, "csrf": csrf}
                await _respond(send, 200, json.dumps(data).encode(), b"application/json")
            else:
                await _respond(send, 405, b"This URL takes another method.\n", b"text/plain")
        except asgi.ClientGoneError:
            pass
        except Fault as fault:
            if path == "/login":
                await self._send_login(send, fault.status, fault.message, fault.all_headers()[1:])
            else:
                await _respond(send, fault.status, fault.body, b"application/json", fault.all_headers()[1:])

    @staticmethod
    async def _send_login(send: Send, status: int, message: str, headers: Headers = ()) -> None:
        text, policy = page("login.html")
        body = text.replace(b"<!--message-->", html.escape(message).encode())
        given = [(b"content-security-policy", policy.encode()), *headers]
        await _respond(send, status, body, b"text/html; charset=utf-8", given)

    async def _stream_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._streams) >= MAX_STREAMS:
            await _respond(send, 503, b"Too many event streams are open.\n", b"text/plain")
            return
        closed = asyncio.Event()
        self._streams.add(closed)

        async def await_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            closed.set()

        try:
            async with background(await_disconnect()):
                headers = [(b"content-type", b"text/event-stream"), *_SECURITY_HEADERS]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                while not closed.is_set() and await self._refusal(scope) is None:  # its session may have ended
                    body = b"data: " + self._state() + b"\n\n"
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(closed.wait(), EVENT_INTERVAL_S)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._streams.discard(closed)

    def _state(self) -> bytes:
        now_s = self._clock()
        if now_s - self._snapshot[0] >= EVENT_INTERVAL_S / 2:
            self._snapshot = now_s, json.dumps(self.state.now(), separators=(",", ":")).encode()
        return self._snapshot[1]

    async def _sample(self) -> None:
        while True:
            self.state.recent.sample()
            await asyncio.sleep(SAMPLE_INTERVAL_S)


async def _respond(
    send: Send, status: int, body: bytes, content_type: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    length = (b"content-length", b"%d" % len(body))
    headers = [(b"content-type", content_type), *_SECURITY_HEADERS, length, *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
