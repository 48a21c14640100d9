"""Envoy's external processing service, by which the gateway's scheduler chooses the engine of each request.

It follows the endpoint picker protocol of the Gateway API Inference Extension. Envoy carries the bytes: it sends the
request to the picker, waits for the engine, and reports the response while it passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from lengthwise.gateway.certificates import RenewableContext
from lengthwise.gateway.config import Tls, bind_socket
from lengthwise.gateway.edge import Exchange, Fault
from lengthwise.gateway.edge.asgi import ClientGoneError
from lengthwise.gateway.envoy import messages
from lengthwise.gateway.envoy.grpc_server import NOT_FOUND, GrpcServer, StatusError, Stream
from lengthwise.gateway.relay import RelayedRequest, engine_request
from lengthwise.gateway.relay.failures import UpstreamError
from lengthwise.gateway.relay.responses import BufferedResponse, ResponseReader, UntrackedStream
from lengthwise.gateway.request import ClientRequest, Outcome, Refusal
from lengthwise.gateway.scheduler_driver import WORKER_GONE, NotServedError, Ticket

if TYPE_CHECKING:
    from lengthwise.gateway.edge import App
    from lengthwise.gateway.fleet import EngineWorker, Fleet
    from lengthwise.gateway.relay import Relay
    from lengthwise.gateway.scheduler_driver import SchedulerDriver
    from lengthwise.gateway.scheduling import WorkerState
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
_PASSED = frozenset({
    b"host", b"content-length", b"transfer-encoding", b"x-forwarded-for", b"x-forwarded-proto", b"via", b"user-agent",
})  # fmt: skip
"""Headers that reach engines beside those that the gateway sends."""
_READ = frozenset({":status", "content-type", "retry-after"})  # headers of responses; Envoy sends lower-case names


def _part(kind: str) -> bytes:
    """Return a response that lets a part of a request or a response pass unchanged."""
    response = messages.ProcessingResponse()
    getattr(response, kind).SetInParent()
    return bytes(response.SerializeToString())


_PARTS = ("request_headers", "request_body", "request_trailers")
_PASS = {kind: _part(kind) for one in _PARTS for kind in (one, one.replace("request", "response"))}
_EXTENSION = messages.ProcessingResponse(override_message_timeout={"seconds": MAX_WAIT_S}).SerializeToString()


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

    def __init__(self, stream: Stream, first: Any, body_s: float) -> None:
        super().__init__()
        self._stream, self._body_s = stream, body_s
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
            self._stream.write(_PASS["request_headers"])  # Envoy sends the body only after this
            self._pending = "request_body"
        if (data := await self._stream.read()) is None:
            raise ClientGoneError
        message = messages.ProcessingRequest.FromString(data)
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

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Let Envoy wait for an hour, instead of ``message_timeout``, if the block takes long.

        Without ``max_message_timeout`` Envoy ignores this.
        """
        if not self._is_buffered:  # no timeout in mode FULL_DUPLEX_STREAMED
            yield
            return
        timer = asyncio.get_running_loop().call_later(_EXTEND_AFTER_S, self._stream.write, _EXTENSION)
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
        self._stream.write(response.SerializeToString())

    async def answer(self, answer: Pick) -> None:
        """Send the request to its engine, and follow the response up to its end."""
        self.has_started, self._endpoint = True, answer.endpoints[0]
        for response in self._pick_responses(answer):
            self._stream.write(response)
        request = answer.request
        request.client_request.release(text=request.text is None, retained_bytes=0)
        await self._stream.each(partial(self._on_message, request))
        if self._response_mode == messages.NONE and request.status == 200:
            request.end(Outcome.FINISHED)  # Envoy reports no body, so that the stream ends with the response

    def _on_message(self, request: PickedRequest, data: bytes) -> None:
        message = messages.ProcessingRequest.FromString(data)
        kind = message.WhichOneof("kind")
        response = _PASS[kind]
        if kind == "response_body":
            part = message.response_body
            request.on_body(part.body, is_last=part.end_of_stream)
            if self._response_mode == messages.FULL_DUPLEX_STREAMED:
                response = _streamed(kind, part.body, part.end_of_stream)
        elif kind == "response_headers":
            self._on_headers(request, message)
            if message.response_headers.end_of_stream:
                request.on_body(b"", is_last=True)
            response = self._response_head()
        elif kind == "response_trailers":
            request.on_body(b"", is_last=True)
        self._stream.write(response)

    def _on_headers(self, request: PickedRequest, message: Any) -> None:
        headers = {
            name: one.raw_value.decode("latin-1") or one.value
            for one in message.response_headers.headers.headers
            if (name := one.key) in _READ
        }
        status = headers.get(":status", "")
        details = _text(message.attributes, "envoy.filters.http.ext_proc", CODE_DETAILS)
        is_local = bool(details) and details != "via_upstream"
        served = _text(message.metadata_context.filter_metadata, ENDPOINT_NAMESPACE, SERVED)
        moved = bool(served) and served != self._endpoint
        request.on_headers(int(status) if status.isdigit() else 0, headers, is_local=is_local, moved=moved)

    def _response_head(self) -> bytes:
        if not self.headers:
            return _PASS["response_headers"]
        response = messages.ProcessingResponse()
        _set_headers(response.response_headers.response.header_mutation, self.headers)
        return bytes(response.SerializeToString())

    def _pick_responses(self, pick: Pick) -> list[bytes]:
        """Return the answers to the pending parts of the request, with the endpoint in the first one."""
        response = messages.ProcessingResponse()
        is_duplex = not self._is_buffered
        kind = "request_headers" if is_duplex or not self._has_body else "request_body"
        common, client_request = getattr(response, kind).response, pick.request.client_request
        headers = [(name.lower().encode(), value.encode()) for name, value in client_request.headers]
        key = pick.request.worker.engine.api_key
        headers += [(b"authorization", b"Bearer " + key.encode())] if key else []
        if pick.body is not None and not is_duplex:
            common.body_mutation.body = pick.body
            headers.append((b"content-length", b"%d" % len(pick.body)))
        _set_headers(common.header_mutation, headers)
        names = _PASSED.union([ENDPOINT.encode()], [name for name, _ in headers])
        if is_duplex and pick.body is not None:
            names -= {b"content-length"}  # Envoy would send that of the old body
        dropped = tuple([name for name, _ in self.received if name not in names and not _is_proxys(name)])
        # Protobuf merges concatenated messages, so that the part that most requests share is cached.
        picked = _picked(kind, ",".join(pick.endpoints)) + _without(kind, dropped) + response.SerializeToString()
        if not (is_duplex and self._has_body):
            return [picked]
        body = b"".join(self._chunks) if pick.body is None else pick.body
        self._chunks.clear()
        starts = range(0, max(1, len(body)), _CHUNK_BYTES)
        has_trailers = self._pending == "request_trailers"
        parts = [(body[at : at + _CHUNK_BYTES], at == starts[-1] and not has_trailers) for at in starts]
        streamed = [_streamed("request_body", chunk, is_last) for chunk, is_last in parts]
        return [picked, *streamed, *([_PASS["request_trailers"]] if has_trailers else [])]


@lru_cache(1024)
def _picked(kind: str, endpoints: str) -> bytes:
    """Return the answer by which Envoy sends a request to the first endpoint that works."""
    response = messages.ProcessingResponse()
    common = getattr(response, kind).response
    common.clear_route_cache = True  # the route may depend on the endpoint
    _set_headers(common.header_mutation, [(ENDPOINT.encode(), endpoints.encode())])
    response.dynamic_metadata.update({ENDPOINT_NAMESPACE: {ENDPOINT: endpoints}})
    return bytes(response.SerializeToString())


@lru_cache(128)
def _without(kind: str, names: tuple[bytes, ...]) -> bytes:
    """Return the answer by which Envoy removes headers."""
    response = messages.ProcessingResponse()
    getattr(response, kind).response.header_mutation.remove_headers.extend([name.decode() for name in names])
    return bytes(response.SerializeToString())


def _is_proxys(name: bytes) -> bool:
    return name.startswith((b":", b"x-envoy-"))


def _streamed(kind: str, body: bytes, is_last: bool) -> bytes:
    response = messages.ProcessingResponse()
    streamed = getattr(response, kind).response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = body, is_last
    return bytes(response.SerializeToString())


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
        self._endpoints: dict[str, tuple[str, float]] = {}  # by URL, with the time up to which they are valid
        self._states: Sequence[WorkerState] | None = None
        self._usable_by_model: dict[str, list[EngineWorker]] = {}  # as of these states
        self.port = 0
        self.tls: RenewableContext | None = None

    async def __aenter__(self) -> Self:
        config = self._relay.config
        if (tls := config.envoy.tls) is not None:
            own = Tls(tls.cert, tls.key)  # ``tls.ca`` is for Envoy, which verifies this certificate by it
            self.tls = RenewableContext(own, is_server=True, purpose="[envoy] tls")
        limits = config.limits
        listener = bind_socket(config.listen.host, config.envoy.ext_proc_port or 0, "ext-proc port")
        self.port = listener.getsockname()[1]
        methods = {f"/{SERVICE}/Process": self.process, f"/{HEALTH}/Check": self._check}
        max_bytes = limits.body_bytes + limits.header_bytes + (1 << 16)
        self._server = GrpcServer(methods, listener, max_message_bytes=max_bytes, tls=self.tls)
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.__aexit__()

    async def _check(self, stream: Stream) -> None:
        service = messages.HealthCheckRequest.FromString(await stream.read() or b"").service
        if service not in ("", "liveness", "readiness", SERVICE):
            raise StatusError(NOT_FOUND, f"there is no service {service!r}")
        is_serving = service == "liveness" or (self._fleet.ready() and not (self._app.closing or self._app.draining))
        stream.write(messages.HealthCheckResponse(status=_SERVING if is_serving else _NOT_SERVING).SerializeToString())

    async def process(self, stream: Stream) -> None:
        """Serve a stream of Envoy's filter, which is one request and its response."""
        first = messages.ProcessingRequest.FromString(await stream.read() or b"")
        exchange = ExtProcExchange(stream, first, self._relay.config.limits.body_s)
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
        """Return the workers that are up and serve the request's model, by name."""
        if (states := self._fleet.states()) is not self._states:
            self._states, by_name = states, {worker.name: worker for worker in self._fleet.workers()}
            self._usable_by_model.clear()
            for state in states:
                if state.up and (worker := by_name.get(state.name)) is not None:
                    for model in state.models:
                        self._usable_by_model.setdefault(model, []).append(worker)
        return self._usable_by_model.get(client_request.model, [])

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
        endpoint, until_s = self._endpoints.get(worker.url, ("", 0.0))
        if time.monotonic() > until_s:
            parts = urlsplit(worker.url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            with contextlib.suppress(OSError):
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(parts.hostname or "", port, type=socket.SOCK_STREAM)
                address = str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])
                endpoint = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            self._endpoints[worker.url] = endpoint, time.monotonic() + _RESOLVED_S
        return endpoint
