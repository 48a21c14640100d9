"""Handles one request that the batch serves: parses and batches it, answers as a stream or at once, injects a fault."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from lengthwise.engine.continuous_batching import BatchSequence
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.testing.engine_server.completions import (
    CompletionRequest,
    OutputStream,
    RefusedError,
    ResponseFormatter,
    error_body,
)
from lengthwise.testing.engine_server.routes import ROUTES

if TYPE_CHECKING:
    from aiohttp import web

    from lengthwise.engine.continuous_batching import ClockedBatch
    from lengthwise.testing.engine_server.engine import EngineSpec

KINDS = (
    "close",  # the connection is reset
    "die",  # the engine dies: all connections are reset, the port is closed (a process ends)
    "hang",  # no bytes for seconds
    "stall",  # no bytes for seconds, then the response continues
    "slow",  # a delay before each chunk
    "status",  # an HTTP error, at once
    "full",  # 503 as of a full queue, at once
    "error",  # an error as an event inside the stream
    "malformed",  # an event that is no JSON
    "split",  # every byte beyond ASCII, and every second other byte, is written alone
    "no_done",  # the stream ends normally, without its [DONE]
    "giant",  # a chunk, or the body of a buffered response, is longer by ``size`` bytes
    "double_usage",  # the usage at the end comes twice
)
_BEFORE_PARSING = ("status", "full")
_SILENT = ("close", "die", "hang", "stall")
_FORMAT_FAULTS = ("slow", "split", "no_done", "giant", "double_usage")  # change how chunks are written
LAST = -1  # after_tokens of a fault between the last token and [DONE]


@dataclass(frozen=True)
class Fault:
    """A fault to inject into one response."""

    kind: str  # one of KINDS
    after_tokens: int = 0  # tokens sent before the fault; 0: before the first byte; LAST: before [DONE]
    seconds: float = math.inf  # duration (hang, stall) or delay of each chunk (slow)
    status: int = 500  # HTTP status of "status"
    size: int = 1 << 20  # bytes of "giant"
    retry_after_s: float | None = None  # sent with "status" and "full"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownNameError("fault", self.kind, KINDS)
        if self.after_tokens < LAST:
            raise InputError(f"after_tokens must be at least 0, or {LAST}; it is {self.after_tokens}")


@dataclass
class FaultPlan:
    """Faults by request number (from 0). Other requests get the ``incoming`` faults in order, then ``always``."""

    by_number: dict[int, Fault] = field(default_factory=dict)
    incoming: list[Fault] = field(default_factory=list)
    always: Fault | None = None

    def take(self, number: int) -> Fault | None:
        """Return the fault of a request, or None. A fault from ``incoming`` is removed from the plan."""
        if number in self.by_number:
            return self.by_number[number]
        return self.incoming.pop(0) if self.incoming else self.always


def parse_faults(body: Mapping[str, Any]) -> FaultPlan:
    """Parse a plan ``{"incoming": [...], "by_number": {"3": {...}}, "always": {...} or null}``."""
    always = body.get("always")
    return FaultPlan(
        {int(number): Fault(**fault) for number, fault in body.get("by_number", {}).items()},
        [Fault(**fault) for fault in body.get("incoming", ())],
        Fault(**always) if always else None,
    )


@dataclass
class Entry:
    """Log entry of one request. Times are on the engine's clock, but ``received_s`` and ``sent`` on the loop's."""

    number: int  # since the start of the server, from 0; continues over restarts
    api: str  # "chat", or the path without /v1/, such as "completions"
    headers: dict[str, str]  # names in lower case
    received_s: float
    body: dict[str, Any] = field(default_factory=dict)  # {} if parsing fails
    arrival_s: float | None = None  # time of entering the batch; None: never
    prompt_ids: list[int] = field(default_factory=list)  # with the chat template
    fault: str = ""  # kind of its fault; "": none
    status: int = 0  # HTTP status; 0: no response started
    sent: list[tuple[float, int]] = field(default_factory=list)  # chunks of a stream: (time, tokens)
    output_ids: list[int] = field(default_factory=list)  # generated tokens of the first choice, sent or not
    finished_s: float | None = None  # time of the last token
    finished: str = ""  # "" while it runs; "finished", "refused", "aborted", "closed" (by a fault), "died"

    @property
    def output_tokens(self) -> int:
        """Return the number of generated tokens of the first choice, sent or not."""
        return len(self.output_ids)

    @property
    def sent_tokens(self) -> int:
        """Return the number of tokens sent to the client."""
        return sum(tokens for _, tokens in self.sent)


class Log:
    """The completion requests in order of arrival, and the paths of others. ``open`` counts unfinished completions."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.others: list[str] = []
        self.open = self.max_concurrent = 0

    def start(self, api: str, headers: dict[str, str], now_s: float) -> Entry:
        """Add a new entry and return it."""
        entry = Entry(len(self.entries), api, headers, now_s)
        self.entries.append(entry)
        self.open += 1
        self.max_concurrent = max(self.max_concurrent, self.open)
        return entry

    def finish(self, entry: Entry, outcome: str) -> None:
        """Record the outcome of a request, unless it already has one."""
        if not entry.finished:
            entry.finished = outcome
            self.open -= 1

    def count(self, outcome: str) -> int:
        """Return the number of requests with an outcome."""
        return sum(entry.finished == outcome for entry in self.entries)


class Server(Protocol):
    """The state of a server that its handlers share."""

    spec: EngineSpec
    port: int
    faults: FaultPlan
    log: Log
    clocked: ClockedBatch
    handlers: dict[int, tuple[str, RequestHandler]]

    def die_soon(self) -> None:
        """Stop the engine as if it crashed."""


class RequestHandler:
    """Answers one request with the batch, the log and the fault plan of a server."""

    def __init__(self, server: Server, http_request: web.Request) -> None:
        self._server, self._http_request = server, http_request
        self._loop = asyncio.get_running_loop()
        headers = {name.lower(): value for name, value in http_request.headers.items()}
        api = http_request.path.removeprefix("/v1/").removesuffix("/completions")
        self.entry: Entry = server.log.start(api, headers, self._loop.time())
        self._fault: Fault | None = server.faults.take(self.entry.number)
        self.entry.fault = self._fault.kind if self._fault else ""
        self._on_change = asyncio.Event()
        self._streams: list[OutputStream] = []
        self._sequences: list[BatchSequence] = []

    async def run(self) -> web.StreamResponse:
        """Answer the request and return the response. Its sequences leave the batch in any case."""
        try:
            raw = await self._http_request.read()
            fault = self._fault
            if fault and fault.kind in _BEFORE_PARSING:
                status = 503 if fault.kind == "full" else fault.status
                return self._refuse(status, "as planned", "ServiceUnavailable", fault.retry_after_s)
            parse, formatter_type, prefix = ROUTES[self._http_request.path]
            body, request = parse(raw, self.entry.headers, self._server.spec)
            self.entry.body, self.entry.prompt_ids = body, list(request.prompt_ids)
            self._enter(request)
            if fault and fault.after_tokens == 0 and fault.kind in _SILENT:
                await self._inject(fault, None)
            response_id = request.request_id or f"{self._server.port}-{self.entry.number}"
            formatter = formatter_type(request, f"{prefix}-{response_id}", int(time.time()), body)
            return await (self._stream(request, formatter) if request.options.stream else self._buffer(formatter))
        except RefusedError as error:
            return self._refuse(error.status, str(error), error.kind)
        except (asyncio.CancelledError, ConnectionError):
            self._server.log.finish(self.entry, "aborted")
            raise
        finally:
            self._leave()

    def abort(self) -> None:
        """End the response with the tokens generated so far, as /abort_requests does."""
        self._server.log.finish(self.entry, "aborted")
        self._leave()
        for stream in self._streams:
            stream.finish_reason = stream.finish_reason or "abort"
        self._on_change.set()

    def _leave(self) -> None:
        for sequence in self._sequences:
            self._server.clocked.abort(sequence)
        self._server.handlers.pop(self.entry.number, None)

    def _enter(self, request: CompletionRequest) -> None:
        server, limit = self._server, self._server.spec.limits.max_num_queued_reqs
        if limit is not None and server.clocked.batch.queued >= limit:
            raise RefusedError(503, "The request queue is full.", "ServiceUnavailableError")
        server.handlers[self.entry.number] = (request.request_id, self)
        self._streams = [OutputStream(request, server.spec, choice, self._on_change) for choice in range(request.n)]
        self._sequences = [
            server.clocked.enter(len(request.prompt_ids), on_token=stream.on_token, priority=request.priority)
            for stream in self._streams
        ]
        self.entry.arrival_s = self._sequences[0].order.arrival_s
        self.entry.output_ids = self._streams[0].ids

    async def _buffer(self, formatter: ResponseFormatter) -> web.Response:
        from aiohttp import web

        while any(stream.finish_reason is None for stream in self._streams):
            self._on_change.clear()
            await self._on_change.wait()
            if self._fault and self._fault.kind in _SILENT and self._is_due(self._fault):
                await self._inject(self._fault, None)
        self._finish()
        self.entry.status = 200
        body = formatter.complete(self._streams, self._fault.size if self._fault and self._fault.kind == "giant" else 0)
        if self._fault and self._fault.kind == "malformed":
            body = body[: len(body) // 2]
        return web.Response(body=body, content_type="application/json")

    async def _stream(self, request: CompletionRequest, formatter: ResponseFormatter) -> web.StreamResponse:
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(self._http_request)
        self.entry.status = 200
        for data in formatter.first_events():
            await self._write(response, data)
        if self._fault and self._fault.after_tokens == 0:
            await self._inject(self._fault, response, formatter)
        open_choices = set(range(request.n))
        while open_choices:
            await self._on_change.wait()
            self._on_change.clear()
            for index in sorted(open_choices):
                while (tokens := self._streams[index].next_size()) is not None:
                    await self._send(response, formatter, index, tokens)
                open_choices -= {index} if self._streams[index].finish_reason else set()
        fault = self._fault
        if fault and fault.after_tokens == LAST:
            await self._inject(fault, response, formatter)
        kind, num_output = fault.kind if fault else "", sum(len(stream.ids) for stream in self._streams)
        events = formatter.last_events(num_output, done=kind != "no_done", double_usage=kind == "double_usage")
        for data in events:
            await self._write(response, data)
        await response.write_eof()
        self._finish()
        return response

    async def _send(self, response: web.StreamResponse, formatter: ResponseFormatter, index: int, tokens: int) -> None:
        fault, padding = self._fault, 0
        if fault and fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
        chunk = self._streams[index].take(tokens)
        num_output = sum(stream.num_taken for stream in self._streams)
        if fault and fault.kind == "giant" and self._is_due(fault):
            self._fault, padding = None, fault.size
        if data := formatter.chunk(index, chunk, num_output, padding):
            await self._write(response, data)
        self.entry.sent.append((self._loop.time(), len(chunk.ids)))
        if self._fault and self._fault.after_tokens > 0 and self._is_due(self._fault):
            await self._inject(self._fault, response, formatter)

    def _finish(self) -> None:
        self.entry.finished_s = max(sequence.finished_s for sequence in self._sequences)
        self._server.log.finish(self.entry, "finished")

    def _is_due(self, fault: Fault) -> bool:
        sent = self.entry.sent_tokens if self.entry.sent else max(len(stream.ids) for stream in self._streams)
        return sent >= fault.after_tokens > 0

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        if not (self._fault and self._fault.kind == "split"):
            await response.write(data)
            return
        for start in range(0, len(data), 2):
            for byte in data[start : start + 2]:
                await response.write(bytes((byte,)))
            await asyncio.sleep(0)

    async def _inject(
        self, fault: Fault, response: web.StreamResponse | None, formatter: ResponseFormatter | None = None
    ) -> None:
        """Inject the fault once. Return only if the response continues afterwards."""
        if fault.kind in _FORMAT_FAULTS:
            return
        self._fault = None
        if fault.kind in {"hang", "stall"}:
            await asyncio.sleep(min(fault.seconds, 1e6))
        elif response is None or formatter is None or fault.kind in {"close", "die"}:
            if fault.kind == "die":
                self._server.die_soon()
            else:
                self._server.log.finish(self.entry, "closed")
                if self._http_request.transport is not None:
                    self._http_request.transport.abort()
            await asyncio.Event().wait()  # until this handler is cancelled with its connection
        elif fault.kind == "malformed":
            await response.write(b'data: {"choices": [{"text\n\n')
        else:
            await response.write(formatter.error("injected fault"))

    def _refuse(self, status: int, message: str, kind: str, retry_after_s: float | None = None) -> web.Response:
        from aiohttp import web

        self.entry.status = status
        self._server.log.finish(self.entry, "refused")
        headers: dict[str, Any] = {} if retry_after_s is None else {"Retry-After": f"{retry_after_s:g}"}
        return web.json_response(error_body(message, kind, status), status=status, headers=headers)
