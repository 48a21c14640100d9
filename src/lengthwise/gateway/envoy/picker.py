"""Envoy's external processing service, by which the gateway's scheduler chooses the engine of each request.

It follows the endpoint picker protocol of the Gateway API Inference Extension. Envoy carries the bytes: it sends the
request to the picker, waits for the engine, and reports the response while it passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from lengthwise.gateway.certificates import RenewableContext
from lengthwise.gateway.config import Tls, bind_socket
from lengthwise.gateway.edge import Exchange, Fault
from lengthwise.gateway.edge.asgi import ClientGoneError
from lengthwise.gateway.envoy import messages
from lengthwise.gateway.relay import RelayedRequest, engine_request
from lengthwise.gateway.relay.failures import UpstreamError
from lengthwise.gateway.relay.responses import BufferedResponse, ResponseReader, UntrackedStream
from lengthwise.gateway.request import ClientRequest, Outcome, Refusal
from lengthwise.gateway.scheduler_driver import WORKER_GONE, NotServedError, Ticket
from lengthwise.schema.errors import MissingExtraError

if TYPE_CHECKING:
    from lengthwise.gateway.edge import App
    from lengthwise.gateway.fleet import EngineWorker, Fleet
    from lengthwise.gateway.relay import Relay
    from lengthwise.gateway.scheduler_driver import SchedulerDriver
    from lengthwise.gateway.telemetry import Telemetry

ENDPOINT, SERVED, SUBSET = (f"x-gateway-destination-endpoint{suffix}" for suffix in ("", "-served", "-subset"))
ENDPOINT_NAMESPACE, SUBSET_NAMESPACE = "envoy.lb", "envoy.lb.subset_hint"
SERVICE, HEALTH = "envoy.service.ext_proc.v3.ExternalProcessor", "grpc.health.v1.Health"
CODE_DETAILS = "response.code_details"
_SERVING, _NOT_SERVING = 1, 2
_EXTEND_AFTER_S, MAX_WAIT_S = 0.1, 3600  # Envoy's default ``message_timeout`` is 0.2 s, its largest one 3600 s
MAX_FALLBACKS = 2  # further engines to which the proxy may go if the picked one gives no answer
_CHUNK_BYTES = 60_000  # of a body that is sent back; Envoy recommends at most 64 KiB
_RESOLVED_S = 5.0  # time for which the address of a host name is valid
_STOP_S = 1.0
_MAX_PENDING = 1 << 16  # streams that Python has not accepted yet; gRPC cancels streams above 1,000
_PASSED = frozenset({
    b"host", b"content-length", b"transfer-encoding", b"x-forwarded-for", b"x-forwarded-proto", b"via", b"user-agent",
})  # fmt: skip
"""Headers that reach engines beside those that the gateway sends."""


def _part(kind: str) -> bytes:
    """Return a response that lets a part of a request or a response pass unchanged."""
    response = messages.ProcessingResponse()
    getattr(response, kind).SetInParent()
    return bytes(response.SerializeToString())


_PARTS = ("request_headers", "request_body", "request_trailers")
_PASS = {kind: _part(kind) for one in _PARTS for kind in (one, one.replace("request", "response"))}


class PickedRequest(RelayedRequest):
    """A request from dispatch to end whose bytes Envoy carries. The response only passes by."""

    def __init__(self, relay: Relay, client_request: ClientRequest, ticket: Ticket, worker: EngineWorker) -> None:
        plan = engine_request.resume_plan(client_request, False, window_tokens=1, preempts=False)
        super().__init__(relay, client_request, plan, ticket)
        self.worker = self._attribution.worker = worker
        interval = engine_request.given_field(client_request, "stream_interval")
        self._event_tokens = max(1, interval) if type(interval) is int else 1
        self.status = 0

    def on_headers(self, status: int, headers: dict[str, str], *, is_local: bool, moved: bool) -> None:
        """Read status and headers of the response.

        ``is_local``: Envoy made the response, not an engine. ``moved``: another engine than the picked one made it,
        because that one gave no answer.
        """
        self.status = status
        if moved:
            self._attribution.on_error(UpstreamError("no connection"))
            self._attribution.worker = None
        if is_local:
            self._attribution.on_error(UpstreamError("no connection"))
            self.end(Outcome.FAILED, f"Envoy answered {status}, not the engine")
        elif status in (429, 503):
            self._attribution.on_accepted()
            retry_after_s = headers.get("retry-after", "")
            self.ticket.report_queue_full(float(retry_after_s) if retry_after_s.isdigit() else 0.0)
            self.end(Outcome.FAILED, f"http {status}")
        elif engine_request.is_engine_fault(status):
            self._attribution.on_error(UpstreamError(f"http {status}", status=status))
            self.end(Outcome.FAILED, f"http {status}")
        elif status >= 400:
            self._attribution.on_rejected(status)
            self.end(Outcome.REJECTED, f"http {status}")
        else:
            self._attribution.on_accepted()
            kind = headers.get("content-type", "")
            max_bytes = self._config.resilience.answer_bytes
            self.response = engine_request.new_response(self.client_request, self.plan, self.worker, kind, max_bytes)
            if isinstance(self.response, UntrackedStream):
                self.response.event_tokens = self._event_tokens
            self.ticket.request.dispatch.single_chunk = isinstance(self.response, BufferedResponse)

    def on_body(self, data: bytes, *, is_last: bool) -> None:
        """Read a part of the response's body."""
        response = self.response
        if self.ticket.has_ended or response is None:
            return
        events = response.feed(data) if data else b""
        if self.text is not None:
            self.text.add(events)
        if is_last and not response.finished and response.error is None:
            response.end()
        if not self._attempt_output_started or response.count >= self._window_end:
            self._note_progress(response)
        self.ticket.on_progress(response.count)
        if is_last or response.finished or response.error is not None:
            self._finish_response(response)

    def _finish_response(self, response: ResponseReader) -> None:
        if response.error is not None:
            self._attribution.on_error(response.error)
            self.end(Outcome.FAILED, str(response.error))
        else:
            self._attribution.on_finished()
            self.end(Outcome.FINISHED, response.finish_reason)

    async def aclose(self) -> None:
        """End the request as CLIENT_GONE unless it has ended."""
        self.end(Outcome.CLIENT_GONE, "while its answer came")

    def _on_interrupt(self, cause: str) -> None:
        if cause == WORKER_GONE:
            self.end(Outcome.FAILED, cause)
        else:
            self._done = True  # the ticket has ended, and Envoy carries the response to its end
            self._attribution.close()


class Pick:
    """The engine of a request: what the app passes to ``ExtProcExchange.answer``.

    ``endpoints`` are those of the engine and of engines to which the proxy may go instead. ``body`` replaces the
    request's body, unless it is None.
    """

    def __init__(self, request: PickedRequest, endpoints: list[str], body: bytes | None) -> None:
        self.request, self.endpoints, self.body = request, endpoints, body

    async def aclose(self) -> None:
        """End the request unless it has ended."""
        await self.request.aclose()


class ExtProcExchange(Exchange):
    """A request on a stream of Envoy's filter, which sends its parts and waits for an answer to each."""

    def __init__(self, context: Any, first: Any, body_s: float) -> None:
        super().__init__()
        self._context, self._body_s = context, body_s
        head, config = first.request_headers, first.protocol_config
        # A filter older than ``protocol_config`` knows no other mode that the picker accepts.
        has_modes = first.HasField("protocol_config")
        self.request_mode = config.request_body_mode if has_modes else messages.BUFFERED
        self._response_mode = config.response_body_mode if has_modes else messages.STREAMED
        self._has_body = not head.end_of_stream
        self.received = [
            (one.key.lower().encode(), one.raw_value or one.value.encode()) for one in head.headers.headers
        ]
        self._pending = "request_headers"  # part that waits for an answer
        self._chunks: list[bytes] = []  # of a body that is streamed back
        self._extension: asyncio.Task[None] | None = None
        self._endpoint = ""
        self.subset = _subset(first)

    def scope(self) -> dict[str, Any]:
        """Return the request's head as an ASGI scope."""
        found = dict(self.received)
        path, _, query = found.get(b":path", b"/").partition(b"?")
        address = found.get(b"x-forwarded-for", b"").rpartition(b",")[2].strip().decode("ascii", "replace")
        return {
            "type": "http", "method": found.get(b":method", b"").decode("ascii", "replace"), "raw_path": path,
            "path": path.decode("utf-8", "replace"), "query_string": query, "client": (address, 0),
            "headers": [pair for pair in self.received if not pair[0].startswith(b":")],
        }  # fmt: skip

    async def read(self) -> Any:
        """Return Envoy's next message, or None at the end of the stream."""
        return await self._context.read() or None

    async def body(self, *arguments: Any) -> bytes:  # noqa: D102 - as Exchange
        try:
            async with asyncio.timeout(self._body_s):  # Envoy has no such limit that spares requests that wait
                return await super().body(*arguments)
        except TimeoutError:
            raise Fault(408, "slow", "The request took too long to arrive.", code="request_timeout") from None

    async def _next_chunk(self) -> tuple[bytes, bool]:
        if not self._has_body:
            return b"", False
        if self.request_mode == messages.BUFFERED and self._pending == "request_headers":
            await self._write(_PASS["request_headers"])  # only then, Envoy sends the body
            self._pending = "request_body"
        message = await self.read()
        if message is None:
            raise ClientGoneError
        kind = message.WhichOneof("kind")
        if kind == "request_trailers":
            self._pending = kind
            return b"", False
        if self.request_mode == messages.FULL_DUPLEX_STREAMED:
            self._chunks.append(message.request_body.body)
        return message.request_body.body, not message.request_body.end_of_stream and not self._is_buffered

    @property
    def _is_buffered(self) -> bool:
        return self.request_mode == messages.BUFFERED

    async def extend_timeout(self) -> None:
        """Let Envoy wait for an hour, not ``message_timeout``. Without ``max_message_timeout`` it ignores this."""
        response = messages.ProcessingResponse()
        response.override_message_timeout.seconds = MAX_WAIT_S
        with contextlib.suppress(Exception):  # the client may be gone; its task is cancelled then
            await self._context.write(response)

    async def _write(self, response: Any) -> None:
        if self._extension is not None:
            extension, self._extension = self._extension, None
            await extension
        await self._context.write(response)

    @contextlib.contextmanager
    def waiting(self) -> Any:
        """Extend Envoy's timeout if the block takes longer than a part of Envoy's default."""
        if not self._is_buffered:  # no timeout in mode FULL_DUPLEX_STREAMED
            yield
            return
        loop = asyncio.get_running_loop()

        def extend() -> None:
            self._extension = loop.create_task(self.extend_timeout())

        timer = loop.call_later(_EXTEND_AFTER_S, extend)
        try:
            yield
        finally:
            timer.cancel()

    async def send(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:  # noqa: D102
        self.has_started = True
        response = messages.ProcessingResponse()
        immediate = response.immediate_response
        immediate.status.code, immediate.body = status, body
        names = {name.lower() for name, _ in headers} | {b"content-length", b"connection"}
        _set_headers(immediate.headers, [*headers, *(pair for pair in self.headers if pair[0].lower() not in names)])
        await self._write(response)

    async def answer(self, answer: Pick) -> None:
        """Send the request to its engine, and follow the response up to its end."""
        self.has_started, self._endpoint = True, answer.endpoints[0]
        for response in self._pick_responses(answer):
            await self._write(response)
        answer.request.client_request.release(text=answer.request.text is None, retained_bytes=0)
        request, is_duplex = answer.request, self._response_mode == messages.FULL_DUPLEX_STREAMED
        while (message := await self.read()) is not None:
            kind = message.WhichOneof("kind")
            if kind == "response_body":
                part = message.response_body
                request.on_body(part.body, is_last=part.end_of_stream)
                await self._write(
                    _streamed("response_body", part.body, part.end_of_stream) if is_duplex else _PASS[kind]
                )
            elif kind == "response_headers":
                self._on_headers(request, message)
                if message.response_headers.end_of_stream:
                    request.on_body(b"", is_last=True)
                await self._write(self._response_head())
            else:
                if kind == "response_trailers":
                    request.on_body(b"", is_last=True)
                await self._write(_PASS[kind])
        if self._response_mode == messages.NONE and request.status == 200:
            request.end(Outcome.FINISHED)  # Envoy reports no body, so that the stream ends with the response

    def _on_headers(self, request: PickedRequest, message: Any) -> None:
        headers = {one.key.lower(): (one.raw_value.decode("latin-1") or one.value)
                   for one in message.response_headers.headers.headers}  # fmt: skip
        status = headers.get(":status", "")
        details = _text(message.attributes, "envoy.filters.http.ext_proc", CODE_DETAILS)
        is_local = bool(details) and details != "via_upstream"
        served = _text(message.metadata_context.filter_metadata, ENDPOINT_NAMESPACE, SERVED)
        moved = bool(served) and served != self._endpoint
        request.on_headers(int(status) if status.isdigit() else 0, headers, is_local=is_local, moved=moved)

    def _response_head(self) -> Any:
        if not self.headers:
            return _PASS["response_headers"]
        response = messages.ProcessingResponse()
        _set_headers(response.response_headers.response.header_mutation, self.headers)
        return response

    def _pick_responses(self, pick: Pick) -> list[Any]:
        """Return the answers to the pending parts of the request, with the endpoint in the first one."""
        response = messages.ProcessingResponse()
        is_duplex = not self._is_buffered
        part = response.request_headers if is_duplex or not self._has_body else response.request_body
        common, client_request = part.response, pick.request.client_request
        common.clear_route_cache = True  # the route may depend on the endpoint
        own = [(name.lower().encode(), value.encode()) for name, value in client_request.headers]
        endpoints = ",".join(pick.endpoints)
        headers = [(ENDPOINT.encode(), endpoints.encode()), *own]
        key = pick.request.worker.engine.api_key
        headers += [(b"authorization", b"Bearer " + key.encode())] if key else []
        if pick.body is not None and not is_duplex:
            common.body_mutation.body = pick.body
            headers.append((b"content-length", b"%d" % len(pick.body)))
        _set_headers(common.header_mutation, headers)
        names = {name for name, _ in headers} | _PASSED
        if is_duplex and pick.body is not None:
            names -= {b"content-length"}
        dropped = [name.decode() for name, _ in self.received if name not in names and not _is_proxys(name)]
        common.header_mutation.remove_headers.extend(dropped)
        response.dynamic_metadata.update({ENDPOINT_NAMESPACE: {ENDPOINT: endpoints}})
        if not (is_duplex and self._has_body):
            return [response]
        body = b"".join(self._chunks) if pick.body is None else pick.body
        self._chunks.clear()
        starts = range(0, max(1, len(body)), _CHUNK_BYTES)
        has_trailers = self._pending == "request_trailers"
        parts = [(body[at : at + _CHUNK_BYTES], at == starts[-1] and not has_trailers) for at in starts]
        streamed = [_streamed("request_body", chunk, is_last) for chunk, is_last in parts]
        return [response, *streamed, *([_PASS["request_trailers"]] if has_trailers else [])]


def _is_proxys(name: bytes) -> bool:
    return name.startswith((b":", b"x-envoy-"))


def _streamed(kind: str, body: bytes, is_last: bool) -> Any:
    response = messages.ProcessingResponse()
    streamed = getattr(response, kind).response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = body, is_last
    return response


def _set_headers(mutation: Any, headers: Sequence[tuple[bytes, bytes]]) -> None:
    for name, value in headers:
        if name.lower() not in (b"content-length", b"connection") or name == b"content-length":
            option = mutation.set_headers.add(append_action=messages.OVERWRITE)
            option.header.key, option.header.raw_value = name.decode("ascii"), value


def _entry(entries: Any, namespace: str) -> Any:
    return next((entry.value for entry in entries if entry.key == namespace), None)


def _text(entries: Any, namespace: str, name: str) -> str:
    found = _entry(entries, namespace)
    return found.fields[name].string_value if found is not None and name in found.fields else ""


def _subset(message: Any) -> frozenset[str] | None:
    """Return the endpoints among which the proxy lets the picker choose, or None if it states none."""
    found = _entry(message.metadata_context.filter_metadata, SUBSET_NAMESPACE)
    if found is None or SUBSET not in found.fields:
        return None
    value = found.fields[SUBSET]
    listed = [one.string_value for one in value.list_value.values] or value.string_value.split(",")
    return frozenset(one.strip() for one in listed if one.strip())


class Picker:
    """The gRPC server of the picker, as an async context manager. ``port`` is the port at which it listens."""

    def __init__(self, app: App, relay: Relay, driver: SchedulerDriver, fleet: Fleet, telemetry: Telemetry) -> None:
        self._app, self._relay, self._driver, self._fleet, self._traced = app, relay, driver, fleet, telemetry.traced
        self._addresses: dict[tuple[str, int], tuple[str, float]] = {}
        self.port = 0

    async def __aenter__(self) -> Self:
        try:
            import grpc
        except ImportError as error:
            raise MissingExtraError("the endpoint picker", "envoy") from error
        config = self._relay.config
        limits, host, port = config.limits, config.listen.host, config.envoy.ext_proc_port
        server = self._server = grpc.aio.server(options=[
            *((f"grpc.server.max_pending_requests{limit}", _MAX_PENDING) for limit in ("", "_hard_limit")),
            ("grpc.so_reuseport", 0),  # a second picker at the port would get a part of the requests
            ("grpc.max_receive_message_length", limits.body_bytes + limits.header_bytes + (1 << 16)),
        ])  # fmt: skip
        process = grpc.stream_stream_rpc_method_handler(
            self._process, messages.ProcessingRequest.FromString, serialized
        )
        check = grpc.unary_unary_rpc_method_handler(
            self._check, messages.HealthCheckRequest.FromString, messages.HealthCheckResponse.SerializeToString
        )
        server.add_generic_rpc_handlers((
            grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
            grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),
        ))  # fmt: skip
        bind_socket(host, port or 0, "ext-proc port").close()  # gRPC would log the system's error
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if (tls := config.envoy.tls) is None:
            self.port = server.add_insecure_port(address)
        else:
            context = RenewableContext(tls, is_server=True, purpose="[envoy] tls")

            def read() -> Any:
                return grpc.ssl_server_certificate_configuration([_key_and_certificate(tls)])

            renewed = grpc.dynamic_ssl_server_credentials(read(), lambda: read() if context.renew() else None)
            self.port = server.add_secure_port(address, renewed)
        await server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(_STOP_S)

    async def _check(self, request: Any, context: Any) -> Any:
        import grpc

        if request.service == "liveness":
            return messages.HealthCheckResponse(status=_SERVING)
        if request.service not in ("", "readiness", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service!r}")
        is_ready = self._fleet.ready() and not self._app.draining
        return messages.HealthCheckResponse(status=_SERVING if is_ready else _NOT_SERVING)

    async def _process(self, _: Any, context: Any) -> None:
        await self.process(context)

    async def process(self, context: Any) -> None:
        """Serve a stream of Envoy's filter, given by gRPC's context: one request and its response."""
        first = await context.read()
        if not first:  # grpc.aio.EOF
            return
        exchange = ExtProcExchange(context, first, self._relay.config.limits.body_s)
        kind, mode = first.WhichOneof("kind"), exchange.request_mode
        problem = ""
        if kind != "request_headers":
            problem = "request_header_mode must be SEND"
        elif mode not in (messages.BUFFERED, messages.FULL_DUPLEX_STREAMED):
            name = messages.BODY_MODES[mode] if mode < len(messages.BODY_MODES) else str(mode)
            problem = f"request_body_mode must be BUFFERED or FULL_DUPLEX_STREAMED; it is {name}"
        if problem:
            fault = Fault(500, "proxy", f"The proxy's ext_proc filter is not set up: {problem}.", code="proxy_setup")
            await exchange.send_fault(fault)
            return
        await self._app.serve(exchange.scope(), exchange, self._traced(partial(self._pick, exchange)))

    async def _pick(self, exchange: ExtProcExchange, client_request: ClientRequest) -> Pick:
        if exchange.subset is not None:
            workers = await self._workers_in(exchange.subset, client_request)
            client_request.client = replace(client_request.client, workers=workers)
        with exchange.waiting():
            ticket = await self._relay.enter(client_request)
            while True:
                with contextlib.suppress(KeyError):
                    worker = self._fleet.worker(ticket.current_worker)
                    break
                await ticket.requeue("retried")
        request = PickedRequest(self._relay, client_request, ticket, worker)
        try:
            body, headers = client_request.body, client_request.headers
            hinted = self._relay.add_hints(ticket.request, worker, body, client_request.api, headers)
            fallbacks = self._fallbacks(worker.name, client_request)
            endpoints = [await self._endpoint(one) for one in (worker, *fallbacks)]
        except BaseException as error:
            request.end(Outcome.FAILED, str(error))
            raise
        if not endpoints[0]:
            request.end(Outcome.FAILED, "its name has no address")
            raise NotServedError(Refusal(502, "engine_failed", "The engine's name has no address.", 1.0))
        return Pick(request, [one for one in endpoints if one], None if hinted is body else hinted)

    def _fallbacks(self, name: str, client_request: ClientRequest) -> list[EngineWorker]:
        """Return other workers that may run the request, in the order of the fleet from ``name`` on."""
        usable, names = self._usable(client_request), client_request.client.workers
        others = [one for one in usable if one.name > name] + [one for one in usable if one.name < name]
        return [one for one in others if names is None or one.name in names][:MAX_FALLBACKS]

    def _usable(self, client_request: ClientRequest) -> list[EngineWorker]:
        model = client_request.model
        up = {one.name for one in self._fleet.states() if one.up and model in one.models}
        return [worker for worker in self._fleet.workers() if worker.name in up]

    async def _workers_in(self, subset: frozenset[str], client_request: ClientRequest) -> frozenset[str]:
        endpoints = {one.name: await self._endpoint(one) for one in self._usable(client_request)}
        names = frozenset(name for name, endpoint in endpoints.items() if endpoint in subset)
        if not names:
            message = "No engine of the proxy's subset is up and serves the model."
            refusal = Refusal(503, "no_engine", message, 1.0)
            self._driver.listeners.refused(refusal.reason, refusal, client_request.client.tenant, client_request.model)
            raise NotServedError(refusal)
        return names

    async def _endpoint(self, worker: EngineWorker) -> str:
        """Return the worker's IP address and port, or "" if its name has none. A name is resolved again after a while.

        If that fails, the last address stays in use.
        """
        parts = urlsplit(worker.url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        address, until_s = self._addresses.get((host, port), ("", 0.0))
        if time.monotonic() > until_s:
            with contextlib.suppress(OSError):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                address = str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
            self._addresses[host, port] = address, time.monotonic() + _RESOLVED_S
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}" if address else ""


def _key_and_certificate(tls: Tls) -> tuple[bytes, bytes]:
    return Path(str(tls.key)).read_bytes(), Path(str(tls.cert)).read_bytes()


def serialized(response: Any) -> bytes:
    """Return the bytes of a message, some of which are serialized already."""
    return response if isinstance(response, bytes) else response.SerializeToString()
