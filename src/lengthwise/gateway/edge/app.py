"""The ASGI app for clients: routes, authentication and limits. It passes requests for engines to the relay."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from lengthwise.gateway.apis import APIS
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.edge import asgi, client_request
from lengthwise.gateway.edge.auth import AddressRates, Caller, Charge, Keys, Tenants, Usage, network, token_digest
from lengthwise.gateway.edge.client_request import Headers, RequestParser
from lengthwise.gateway.edge.errors import Fault, draining, invalid, quoted, unknown_model
from lengthwise.gateway.edge.media_urls import MediaUrls
from lengthwise.gateway.edge.openapi import document
from lengthwise.gateway.protocols import Clock, Listener, monotonic
from lengthwise.gateway.request import UNAUTHENTICATED, ClientRequest, InvalidBodyError, PrefixHasher, Refusal

if TYPE_CHECKING:
    from lengthwise.gateway.edge.identity import AuthService, TokenVerifier
    from lengthwise.gateway.tenants.accounts import Accounts

_MODELS = b"/v1/models/"


@dataclass(frozen=True, slots=True)
class Route:
    """The route of a request."""

    name: str
    methods: tuple[str, ...] = ("GET", "HEAD")
    api: str = ""  # name in APIS of a route that is forwarded; "" for a route of another kind
    model: str = ""  # NAME in /v1/models/NAME
    is_open: bool = False  # whether it needs no key
    body: bytes = b""  # response of an open route; b"" stands for the OpenAPI document


_ROUTES = {
    **{one.path.encode(): Route(name, ("POST",), name) for name, one in APIS.items()},
    b"/v1/models": Route("models"),
    b"/health": Route("health", is_open=True, body=b'{"status":"ok"}'),
    b"/ready": Route("ready", is_open=True, body=b'{"status":"ready"}'),
    b"/openapi.json": Route("openapi", is_open=True),
}


def route(scope: dict[str, Any]) -> Route:
    """Return the route of a request. Raises Fault if the URL is unknown (404) or does not take the method (405)."""
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    found = _ROUTES.get(raw)
    if found is None and raw.startswith(_MODELS) and len(raw) > len(_MODELS):
        # A model's name may contain slashes, encoded or not. The app only compares it with known names.
        found = Route("model", model=unquote(raw[len(_MODELS) :].decode("ascii", "replace"), errors="replace"))
    if found is None:
        message = f"Unknown request URL: {quoted(raw.decode('ascii', 'replace'))}."
        raise Fault(404, "route", message, code="unknown_url")
    if scope["method"] not in found.methods:
        allowed, code = ", ".join(found.methods), "method_not_allowed"
        raise Fault(405, "method", f"This URL takes {allowed}.", code=code, headers=[(b"allow", allowed.encode())])
    return found


_JSON = [(b"content-type", b"application/json")]
_log = logging.getLogger("lengthwise.gateway.edge")
Handler = Callable[[ClientRequest], Awaitable[Any]]
_LONG_BYTES = 1 << 18  # longer bodies are parsed one at a time in a thread: msgspec holds the GIL for some ms per MiB


class App:
    """An endpoint with OpenAI's and Anthropic's routes as an ASGI 3 application.

    ``handler`` serves a request for an engine. It is cancelled if the client disconnects, and may raise Fault or an
    error with a ``refusal``. Its result goes to ``Exchange.answer`` and is closed. ``models`` returns all models,
    including those of unavailable engines, ``entries`` the fields of each model in the engines' /v1/models, and
    ``ready`` whether an engine is available. While ``closing`` is True, each answer closes its connection. While
    ``draining`` is True, requests for engines get 503, except the next one on each of ``closing_connections``.
    ``in_flight`` counts admitted requests, also those whose bodies still arrive; the last one ended at ``last_end_s``.
    """

    def __init__(
        self,
        config: GatewayConfig,
        handler: Handler,
        *,
        models: Callable[[], Sequence[str]],
        entries: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
        ready: Callable[[], bool] = lambda: True,
        clock: Clock = monotonic,
        listener: Listener | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self._handler, self._models, self._ready, self._clock = handler, models, ready, clock
        self._entries = entries
        self._listener = listener or Listener()
        self._tenants = Tenants() if tenants is None else tenants
        self.accounts: Accounts | None = None  # accounts of a store of tenants
        self.identity: TokenVerifier | AuthService | None = None  # identifies callers other than by keys
        self.keys = Keys(config, clock, tenants=self._tenants)
        self.closing = self.draining = False
        self.closing_connections: set[Any] = set()
        self.in_flight, self.last_end_s = 0, -math.inf
        self.body_budget = asgi.BodyBudget(config.limits.body_budget_bytes)
        self.prefix_hasher = PrefixHasher()
        self.parser_thread = ThreadPoolExecutor(1, "lengthwise-bodies")
        self.configure(config)

    def configure(self, config: GatewayConfig) -> None:
        """Apply other keys and limits to later requests. A key in both configurations keeps the rest of its quotas."""
        self._limits, prefixes = config.limits, config.dispatch.prefixes
        hasher = None if prefixes == "none" else self.prefix_hasher
        media = MediaUrls(config.limits.media_hosts)
        self._parser = RequestParser(
            config.limits, hasher, by_tenant=prefixes == "tenant", slo_classes=config.slo_classes, media=media
        )
        self.body_budget.max_bytes = config.limits.body_budget_bytes
        rate_rps = config.limits.rate_per_address
        self._rates = None if math.isinf(rate_rps) else AddressRates(rate_rps, self._clock)
        self.renew_keys(config)
        self.document = document(config.limits, keys=config.needs_key)

    def renew_keys(self, config: GatewayConfig) -> None:
        """Use the keys of a configuration and the current keys of the store of tenants for later requests."""
        self.keys = Keys(config, self._clock, self.keys, tenants=self._tenants, accounts=self.accounts)

    def pop_usage(self) -> list[Usage]:
        """Return the usage of keys since the last call, for the other gateways of a shared queue."""
        return self.keys.pop_usage()

    def add_usage(self, gateway: str, usage: list[Usage] | None) -> None:
        """Count the usage of keys at another gateway; None: that gateway, with its open requests, is lost."""
        self.keys.add_usage(gateway, usage, self._clock())

    def refused(self, fault: Fault, tenant: int = UNAUTHENTICATED) -> None:
        """Report to the listener that the app or its server refused a request."""
        refusal = Refusal(fault.status, fault.reason, fault.message, fault.retry_after_s)
        self._listener.refused(fault.reason, refusal, tenant, "")

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Serve an ASGI connection."""
        if scope["type"] == "http":
            await self.serve(scope, asgi.AsgiExchange(scope, receive, send))
        elif scope["type"] == "lifespan":
            message: asgi.Message = {}
            while message.get("type") != "lifespan.shutdown":
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    async def serve(self, scope: asgi.Scope, exchange: asgi.Exchange, handler: Handler | None = None) -> None:
        """Serve a request, with another ``handler`` of completion requests if it is given."""
        try:
            await self._serve(scope, exchange, handler or self._handler)
        except asgi.ClientGoneError:
            pass
        except asyncio.CancelledError:
            if not (exchange.is_client_gone or self.draining):
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()  # the exchange or the shutdown of the gateway has cancelled it
            if not exchange.is_client_gone:
                await (exchange.abort() if exchange.has_started else self._refuse(exchange, draining()))
        finally:
            exchange.close()

    async def _serve(self, scope: asgi.Scope, exchange: asgi.Exchange, handler: Handler) -> None:
        try:
            headers: Headers = {}
            try:
                headers = client_request.parse_headers(scope["headers"], self._limits)
            finally:
                request_id = client_request.resolve_request_id(headers)
                exchange.headers.append((b"x-request-id", request_id.encode()))
            target = route(scope)
            exchange.is_anthropic = bool(target.api) and APIS[target.api].is_anthropic
            if target.is_open:
                await exchange.send(200, _JSON, self._open_body(target))
                return
            address = (scope.get("client") or ("",))[0]
            caller = await self._caller(headers, scope, address)
            exchange.tenant = caller.tenant
            if target.api:
                arguments = (target.api, caller, network(address), headers, request_id)
                await self._forward(exchange, handler, *arguments)
            else:
                await self._send_models(exchange, target, caller)
        except (Fault, InvalidBodyError) as error:
            exchange.scheduler_reports_refusals = False  # the scheduler has not seen the request, so the app reports
            await self._refuse(
                exchange, error if isinstance(error, Fault) else invalid(None, str(error), "invalid_json")
            )
        except asgi.ClientGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - the client gets a response, and the server continues, in any case
            refusal = getattr(error, "refusal", None)
            if isinstance(refusal, Refusal) and not exchange.has_started:
                status, reason, message, after_s = astuple(refusal)
                code = "rate_limit_exceeded" if status == 429 else reason
                await exchange.send_fault(Fault(status, reason, message, code=code, retry_after_s=after_s))
                return
            _log.exception("a request failed in the gateway")
            if not exchange.has_started:
                message = "The gateway failed to serve this request."
                await exchange.send_fault(Fault(500, "internal", message, code="internal_error"))

    async def _caller(self, headers: Headers, scope: dict[str, Any], address: str) -> Caller:
        """Return the owner of the key or token of a request. Wrong tokens count as wrong keys do."""
        if self._rates is not None:
            self._rates.take(address)
        if b"authorization" not in headers and (secret := headers.get(b"x-api-key")) is not None:
            headers[b"authorization"] = b"Bearer " + secret  # as Anthropic's client sends it
        keys, authorization = self.keys, headers.get(b"authorization")
        if self.identity is not None:
            digest = token_digest(authorization or b"")
            keys.throttle.check(address, digest)
            try:
                named = await self.identity.key(headers, scope)
            except Fault as fault:
                if fault.status == 401:
                    keys.throttle.failed(address)
                raise
            if named is not None:
                keys.throttle.succeeded(address, digest)
                return self.keys.identified(named)
        return self.keys.caller(authorization, address)

    async def _refuse(self, exchange: asgi.Exchange, fault: Fault) -> None:
        if not exchange.scheduler_reports_refusals:
            self.refused(fault, exchange.tenant)
        await exchange.send_fault(fault)

    async def _forward(
        self,
        exchange: asgi.Exchange,
        handler: Handler,
        api: str,
        caller: Caller,
        address: str,
        headers: Headers,
        request_id: str,
    ) -> None:
        if self.draining:
            if exchange.connection not in self.closing_connections:
                raise draining()
            self.closing_connections.discard(exchange.connection)
        if self.closing and exchange.connection is not None:
            exchange.headers.append(asgi.CLOSE)
        self.in_flight += 1
        try:
            owner = caller if caller.key else address
            charge = Charge(caller, self._clock, exchange.headers, self.accounts)
            with caller, asgi.BodyReservation(self.body_budget, owner) as reservation, charge:
                exchange.headers += caller.take_request(self._clock())
                client_request.check_media_type(APIS[api], headers)
                body = await exchange.body(self._limits.body_bytes, headers.get(b"content-length"), reservation)
                exchange.monitor()
                arguments = (api, body, caller, headers, request_id, self._clock(), address)
                if len(body) <= _LONG_BYTES:
                    request = self._parser.parse(*arguments)
                else:
                    loop = asyncio.get_running_loop()
                    request = await loop.run_in_executor(self.parser_thread, self._parser.parse, *arguments)
                reservation.take(request.memory_bytes - len(body))
                del body, arguments  # only the request refers to the body now, so that it can free the memory
                known = self._models()
                if not caller.can_access(request.model) or (known and request.model not in known):
                    raise unknown_model(request.model)
                request.charge = charge if charge.is_needed else None
                exchange.scheduler_reports_refusals = True
                answer = await handler(request)
                reservation.shrink_to(request.memory_bytes)
                try:
                    await exchange.answer(answer)
                finally:
                    await answer.aclose()
        finally:
            self.in_flight -= 1
            self.last_end_s = self._clock()

    def _open_body(self, target: Route) -> bytes:
        if target.name == "ready" and (self.closing or self.draining or not self._ready()):
            message = f"The gateway is not ready: {'draining' if self.closing or self.draining else 'no engine is up'}."
            raise Fault(503, "not_ready", message, code="not_ready", retry_after_s=1.0)
        return target.body or self.document

    async def _send_models(self, exchange: asgi.Exchange, target: Route, caller: Caller) -> None:
        entry, entries = {"object": "model", "created": 0, "owned_by": "lengthwise"}, self._entries()
        names = [name for name in self._models() if caller.can_access(name)]
        models = {name: {"id": name, **entry, **entries.get(name, {})} for name in names}
        if target.name == "models":
            await exchange.send(200, _JSON, msgspec.json.encode({"object": "list", "data": list(models.values())}))
        elif target.model not in models:
            raise unknown_model(target.model)
        else:
            await exchange.send(200, _JSON, msgspec.json.encode(models[target.model]))
