"""The ASGI app for clients: a few routes, and nothing of the address ever goes on to an engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec

from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.edge import client_request
from lengthwise.gateway.edge.auth import Caller, Keys, Tenants, network
from lengthwise.gateway.edge.client_request import CHAT, COMPLETIONS, ClientRequest, Exchange, asked
from lengthwise.gateway.edge.errors import Fault, draining, internal, no_model, refused, shown
from lengthwise.gateway.edge.exchange import (
    BLOCKED,
    SLOW,
    ClientGoneError,
    Message,
    Part,
    Receive,
    Room,
    Scope,
    Send,
    Talk,
)
from lengthwise.gateway.edge.openapi import document
from lengthwise.gateway.protocols import Clock, Listener, monotonic
from lengthwise.gateway.request import PrefixHasher, Rejection

_MODELS = b"/v1/models/"


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes.

    Attributes:
        name: Of what is served.
        methods: That it takes.
        api: CHAT or COMPLETIONS, or "".
        is_open: Whether it takes no key.
        model: The one that is asked after.
    """

    name: str
    methods: tuple[str, ...] = ("GET", "HEAD")
    api: str = ""
    is_open: bool = False
    model: str = ""


_ROUTES = {
    b"/v1/chat/completions": Route("chat", ("POST",), CHAT),
    b"/v1/completions": Route("completions", ("POST",), COMPLETIONS),
    b"/v1/models": Route("models"),
    b"/health": Route("health", is_open=True),
    b"/ready": Route("ready", is_open=True),
    b"/openapi.json": Route("openapi", is_open=True),
}


def route(scope: dict[str, Any]) -> Route:
    """The route of a request.

    Raises:
        Fault: 404, there is none; 405, not by this method.
    """
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    found = _ROUTES.get(raw) or _of_model(raw)
    if found is None:
        path = raw.decode("ascii", "replace")
        raise Fault(404, "route", f"Unknown request URL: {shown(path)}.", code="unknown_url")
    if scope["method"] not in found.methods:
        allowed = ", ".join(found.methods)
        raise Fault(
            405, "method", f"This URL takes {allowed}.", code="method_not_allowed",
            headers=[(b"allow", allowed.encode())],
        )  # fmt: skip
    return found


def _of_model(raw: bytes) -> Route | None:
    """The route to one model; its name may hold slashes, coded or not. It is looked up, never sent on."""
    if not raw.startswith(_MODELS) or len(raw) == len(_MODELS):
        return None
    return Route("model", model=unquote(raw[len(_MODELS) :].decode("ascii", "replace"), errors="replace"))


_JSON = [(b"content-type", b"application/json")]
_log = logging.getLogger("lengthwise.gateway")
_LONG_BYTES = 1 << 18
"""A longer body is looked into in a thread beside the event loop, one at a time.

msgspec holds the GIL while it decodes, so the loop stands still for each of those calls (some ms for each MiB) all
the same; between them, and while numpy counts, it goes on."""


class App:
    """An OpenAI-compatible endpoint as an ASGI 3 application.

    Args:
        config: Keys, limits.
        exchange: Has a request answered.
        models: All models there are, those of engines that are down just now included.
        ready: Whether an engine is up.
        clock: Now.
        listener: Hears of what is refused here.
        tenants: Their numbers, kept over changes of keys.

    Attributes:
        draining: Once set, nothing new is let in: 503, and /ready says so.
        in_flight: Requests for completions whose body is coming or that are being answered.
        room: For bodies.
    """

    def __init__(
        self,
        config: GatewayConfig,
        exchange: Exchange,
        *,
        models: Callable[[], Sequence[str]],
        ready: Callable[[], bool] = lambda: True,
        clock: Clock = monotonic,
        listener: Listener | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self._exchange, self._models, self._ready, self._clock = exchange, models, ready, clock
        self._listener = listener or Listener()
        self._keys: Keys | None = None
        self._tenants = Tenants() if tenants is None else tenants
        self.draining, self.in_flight = False, 0
        self.room = Room(config.limits.body_budget_bytes)
        self._prints = PrefixHasher()
        self._additional = ThreadPoolExecutor(1, "lengthwise-bodies")
        self.configure(config)

    def configure(self, config: GatewayConfig) -> None:
        """Other keys and limits from the next request on; a key that stays keeps its bucket."""
        self._limits, self._prefixes = config.limits, config.dispatch.prefixes
        self.room.max_bytes = config.limits.body_budget_bytes
        self._keys = Keys(config, self._clock, self._keys, tenants=self._tenants)
        self._document = document(config.limits, keys=bool(config.keys))

    def refused(self, fault: Fault) -> None:
        """Tells the listener of a refusal, here or by the server before."""
        self._listener.refused(fault.reason, fault.as_refusal(), 0, "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection's request, as ASGI wants it."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        talk = Talk(scope, receive, send, self._limits.body_s)
        try:
            await self._served(scope, talk)
        except ClientGoneError:
            pass
        except asyncio.CancelledError:
            if not talk.cause and (talk.started or not self.draining):
                raise
            await self._waited_in_vain(talk)
        finally:
            talk.close()

    async def _served(self, scope: Scope, talk: Talk) -> None:
        """Answers, with an error where need be."""
        try:
            headers = {}
            try:
                headers = client_request.parse_headers(scope["headers"], self._limits)
            finally:
                name = client_request.resolve_request_id(headers)
                talk.headers.append((b"x-request-id", name.encode()))
            await self._routed(scope, talk, headers, name)
        except Fault as fault:
            await self._denied(talk, fault)
        except ClientGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever happens, the client is told, and the server lives
            rejection = getattr(error, "rejection", None)
            if isinstance(rejection, Rejection) and not talk.started:
                await talk.fault(refused(rejection))
                return
            _log.exception("a request failed in the gateway")
            if not talk.started:
                await talk.fault(internal())

    async def _denied(self, talk: Talk, fault: Fault) -> None:
        if not talk.handed_on:
            self.refused(fault)
        await talk.fault(fault)

    async def _waited_in_vain(self, talk: Talk) -> None:
        """After this task was cancelled by its own talk, or because the gateway ends."""
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        if talk.cause == SLOW:
            message = f"The body must come within {self._limits.body_s:g} s."
            close = [(b"connection", b"close")]
            await self._denied(talk, Fault(408, "slow", message, code="request_timeout", headers=close))
        elif talk.cause == BLOCKED:
            await talk.abort()
        elif not talk.cause:
            await self._denied(talk, draining())

    async def _routed(self, scope: Scope, talk: Talk, headers: dict[bytes, bytes], name: str) -> None:
        where = route(scope)
        if where.api:
            await self._completed(scope, talk, where.api, headers, name)
        elif where.is_open:
            await self._report(talk, where)
        else:
            caller = self._caller(scope, headers)
            await self._entries(talk, where, caller)

    def _caller(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        assert self._keys is not None
        return self._keys.caller(headers.get(b"authorization"), _address(scope))

    async def _completed(self, scope: Scope, talk: Talk, api: str, headers: dict[bytes, bytes], name: str) -> None:
        caller = self._caller(scope, headers)
        if self.draining:
            raise draining()
        self.in_flight += 1
        try:
            address = network(_address(scope))
            with caller, Part(self.room, caller if caller.key else address) as part:
                talk.headers += caller.take(self._clock())
                client_request.check_json(headers)
                body = await talk.body(self._limits.body_bytes, headers.get(b"content-length"), part)
                talk.monitor()
                request = await self._client_request(api, body, caller, headers, name)
                request.address = address
                del body  # the request has it, and lets it go
                part.reserve(request.memory_bytes)
                self._check_model(request.model, caller)
                await self._on_response(talk, request, part)
        finally:
            self.in_flight -= 1

    async def _client_request(
        self, api: str, body: bytes, caller: Caller, headers: dict[bytes, bytes], name: str
    ) -> ClientRequest:
        """What a body asks for; raises a Fault where it cannot be used."""
        prefix_hasher = None if self._prefixes == "none" else self._prints
        of_tenant = self._prefixes == "tenant"
        told = (api, body, self._limits, caller, headers, name, self._clock(), prefix_hasher, of_tenant)
        if len(body) <= _LONG_BYTES:
            return asked(*told)
        return await asyncio.get_running_loop().run_in_executor(self._additional, asked, *told)

    async def _on_response(self, talk: Talk, request: ClientRequest, part: Part) -> None:
        talk.handed_on = True
        answer = await self._exchange(request)
        part.release(request.memory_bytes)
        try:
            await talk.answer(answer)
        finally:
            await answer.aclose()

    def _check_model(self, model: str, caller: Caller) -> None:
        known = self._models()
        if not caller.can_access(model) or (known and model not in known):
            raise no_model(model)

    async def _report(self, talk: Talk, where: Route) -> None:
        """What everybody may know."""
        if where.name == "openapi":
            await talk.say(200, _JSON, self._document)
        elif where.name == "health":
            await talk.say(200, _JSON, b'{"status":"ok"}')
        elif self.draining or not self._ready():
            why = "draining" if self.draining else "no engine is up"
            raise Fault(503, "not_ready", f"The gateway is not ready: {why}.", code="not_ready", retry_after_s=1.0)
        else:
            await talk.say(200, _JSON, b'{"status":"ready"}')

    async def _entries(self, talk: Talk, where: Route, caller: Caller) -> None:
        """The models that a caller may see, or one of them."""
        seen = [model for model in self._models() if caller.can_access(model)]
        if where.name == "models":
            entries: object = {"object": "list", "data": [_model(model) for model in seen]}
        elif where.model in seen:
            entries = _model(where.model)
        else:
            raise no_model(where.model)
        await talk.say(200, _JSON, msgspec.json.encode(entries))


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "lengthwise"}


async def _lifespan(receive: Receive, send: Send) -> None:
    """Nothing is started here: that is done by who made the app."""
    message: Message = {}
    while message.get("type") != "lifespan.shutdown":
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
