"""One request over its life: read, put into the batch, streamed or told whole, with its fault, if any."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.testing.engine_server.completions import (
    DONE,
    CompletionRequest,
    RefusedError,
    Rendering,
    Writing,
    error_body,
    event,
    read_asked,
    read_body,
)
from lengthwise.testing.engine_server.engine import BatchSequence

KINDS = (
    "close",  # the connection is reset
    "die",  # the whole engine: all connections are reset, the port is closed (a process ends)
    "hang",  # no bytes any more, for seconds
    "stall",  # no bytes for seconds, then on
    "slow",  # seconds more before each piece
    "status",  # an HTTP error, at once
    "full",  # 503 as of a full queue, at once
    "error",  # an error as an event inside the stream
    "malformed",  # an event that is no JSON
    "split",  # every byte beyond ASCII, and every second one else, in a write of its own
    "no_done",  # the stream ends well, without its [DONE]
    "giant",  # a piece, or the whole of an answer that is not streamed, is longer by so many bytes
    "double_usage",  # the usage at the end comes twice
)
AT_ONCE = ("status", "full")
SILENT = ("close", "die", "hang", "stall")
ON_ALL = ("slow", "split", "no_done", "giant", "double_usage")
"""Not struck at one point: they change how pieces are written."""
LAST = -1
"""``after_tokens`` of what happens behind the last token and before [DONE]."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in one answer.

    Attributes:
        kind: One of KINDS.
        after_tokens: When so many tokens have been sent; 0: before the first byte; LAST: before [DONE].
        seconds: How long it takes (hang, stall), or what each piece takes more (slow).
        status: Of "status".
        size: Bytes, of "giant".
        retry_after_s: Told with "status" and "full".
    """

    kind: str
    after_tokens: int = 0
    seconds: float = math.inf
    status: int = 500
    size: int = 1 << 20
    retry_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownNameError("fault", self.kind, KINDS)
        if self.after_tokens < LAST:
            raise InputError(f"after_tokens must be at least 0, or {LAST}; it is {self.after_tokens}")


@dataclass
class FaultPlan:
    """Which request meets which fault.

    Attributes:
        by_number: Of requests by their number since the start, from 0.
        incoming: Of the next ones, in order; taken from here before ``always``.
        always: Of all others.
    """

    by_number: dict[int, Fault] = field(default_factory=dict)
    incoming: list[Fault] = field(default_factory=list)
    always: Fault | None = None

    def take(self, number: int) -> Fault | None:
        """The fault of a request, which will not come again unless planned again."""
        if number in self.by_number:
            return self.by_number[number]
        return self.incoming.pop(0) if self.incoming else self.always


def read_plan(report: Mapping[str, Any]) -> FaultPlan:
    """A plan out of JSON: ``{"coming": [...], "by_number": {"3": {...}}, "always": {...} or null}``."""
    always = report.get("always")
    return FaultPlan(
        {int(number): Fault(**one) for number, one in report.get("by_number", {}).items()},
        [Fault(**one) for one in report.get("incoming", ())],
        Fault(**always) if always else None,
    )


@dataclass
class Entry:
    """One request.

    Attributes:
        number: Since the start of the server, from 0; restarts do not begin anew.
        api: "completions" or "chat".
        headers: As they came, names in lower case.
        body: Parsed; {} where it could not be.
        came_s: On the event loop's clock.
        arrival_s: When it entered the batch, on the engine's own time; None: never.
        prompt_ids: After the template.
        fault: The kind of its fault, "" none.
        status: HTTP status; 0 where no answer began.
        sent: Pieces of a stream, (time on the event loop's clock, tokens of it).
        output_ids: What was generated for its first choice.
        finished_s: When its last token came out of the batch, on the engine's own time.
        finished: "" while it runs; "finished", "refused", "aborted" (the client left, or asked for it),
            "closed" (by a fault), "died" (with the engine).
    """

    number: int
    api: str
    headers: dict[str, str]
    came_s: float
    body: dict[str, Any] = field(default_factory=dict)
    arrival_s: float | None = None
    prompt_ids: list[int] = field(default_factory=list)
    fault: str = ""
    status: int = 0
    sent: list[tuple[float, int]] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    finished_s: float | None = None
    finished: str = ""

    @property
    def output_tokens(self) -> int:
        """Tokens that were generated for its first choice, sent or not."""
        return len(self.output_ids)

    @property
    def sent_tokens(self) -> int:
        """Tokens that were sent."""
        return sum(tokens for _, tokens in self.sent)


class Log:
    """All of them, the first first.

    Attributes:
        entries: One each.
        others: Paths of all other requests that came, such as "GET /health".
        most_at_once: Most requests that were open at the same time.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.others: list[str] = []
        self.open = 0
        self.most_at_once = 0

    def begin(self, api: str, headers: dict[str, str], now_s: float) -> Entry:
        """A new entry."""
        entry = Entry(len(self.entries), api, headers, now_s)
        self.entries.append(entry)
        self.open += 1
        self.most_at_once = max(self.most_at_once, self.open)
        return entry

    def end(self, entry: Entry, how: str) -> None:
        """How it ended; the first word on that is the last."""
        if not entry.finished:
            entry.finished = how
            self.open -= 1

    def count(self, how: str) -> int:
        """Requests that ended so."""
        return sum(entry.finished == how for entry in self.entries)


if TYPE_CHECKING:
    from aiohttp import web

    from lengthwise.testing.engine_server.server import EngineServer


class Answering:
    """Answers one request on a server.

    Args:
        server: Its batch, log and plan of faults are used.
        request: Of aiohttp.
        chat: Which of the two doors it came through.
    """

    def __init__(self, server: EngineServer, request: web.Request, *, chat: bool) -> None:
        self._server, self._request, self._chat = server, request, chat
        self._loop = asyncio.get_running_loop()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.entry: Entry = server.log.begin("chat" if chat else "completions", headers, self._loop.time())
        self._fault: Fault | None = server.faults.take(self.entry.number)
        self.entry.fault = self._fault.kind if self._fault else ""
        self._wakeup = asyncio.Event()
        self._writings: list[Writing] = []
        self._sequences: list[BatchSequence] = []

    async def run(self) -> web.StreamResponse:
        """The answer; whatever happens, nothing is left in the batch."""
        try:
            raw = await self._request.read()
            return await self._on_response(raw)
        except RefusedError as error:
            return self._refused(error.status, str(error), error.kind)
        except (asyncio.CancelledError, ConnectionError):
            self._server.log.end(self.entry, "aborted")
            raise
        finally:
            self._leave()

    def abort(self) -> None:
        """Ends it from outside, as /abort_requests does: the answer ends with what there is."""
        self._server.log.end(self.entry, "aborted")
        self._leave()
        for writing in self._writings:
            writing.finish_reason = writing.finish_reason or "abort"
        self._wakeup.set()

    def die(self) -> None:
        """Ends it with the engine."""
        self._server.log.end(self.entry, "died")

    def _leave(self) -> None:
        for q in self._sequences:
            self._server.clocked.abort(q)
        self._server.answers.pop(self.entry.number, None)

    async def _on_response(self, raw: bytes) -> web.StreamResponse:
        fault = self._fault
        if fault and fault.kind in AT_ONCE:
            status = 503 if fault.kind == "full" else fault.status
            return self._refused(status, "as planned", "ServiceUnavailable", fault.retry_after_s)
        asked = read_asked(raw, self.entry.headers, self._server.spec, chat=self._chat)
        self.entry.body, self.entry.prompt_ids = read_body(raw), list(asked.prompt_ids)
        self._enter(asked)
        if fault and fault.after_tokens == 0 and fault.kind in SILENT:
            await self._strike(fault, None)
        return await (self._streamed(asked) if asked.stream else self._told_whole(asked))

    def _enter(self, completion_request: CompletionRequest) -> None:
        server, limit = self._server, self._server.spec.limits.max_num_queued_reqs
        if limit is not None and server.clocked.batch.queued >= limit:
            raise RefusedError(503, "The request queue is full.", "ServiceUnavailableError")
        server.answers[self.entry.number] = (completion_request.request_id, self)
        for choice in range(completion_request.n):
            writing = Writing(completion_request, server.spec, choice, self._wakeup)
            self._writings.append(writing)
            q = server.clocked.enter(len(completion_request.prompt_ids), writing.on_token, completion_request.priority)
            self._sequences.append(q)
        self.entry.arrival_s = self._sequences[0].arrival_s
        self.entry.output_ids = self._writings[0].ids

    def _rendering(self, completion_request: CompletionRequest) -> Rendering:
        prefix = "chatcmpl" if completion_request.chat else "cmpl"
        name = completion_request.request_id or f"{self._server.port}-{self.entry.number}"
        return Rendering(completion_request, f"{prefix}-{name}", int(time.time()))

    async def _told_whole(self, completion_request: CompletionRequest) -> web.Response:
        from aiohttp import web

        while any(writing.finish_reason is None for writing in self._writings):
            self._wakeup.clear()
            await self._wakeup.wait()
            if self._fault and self._fault.kind in SILENT and self._reached(self._fault):
                await self._strike(self._fault, None)
        self._finished()
        self.entry.status = 200
        pad = self._fault.size if self._fault and self._fault.kind == "giant" else 0
        body = self._rendering(completion_request).complete(self._writings, pad)
        if self._fault and self._fault.kind == "malformed":
            body = body[: len(body) // 2]
        return web.Response(body=body, content_type="application/json")

    async def _streamed(self, completion_request: CompletionRequest) -> web.StreamResponse:
        from aiohttp import web

        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(self._request)
        self.entry.status = 200
        rendering = self._rendering(completion_request)
        for opening in rendering.startup():
            await self._write(answer, opening)
        if self._fault and self._fault.after_tokens == 0:
            await self._strike(self._fault, answer)
        async for index, tokens in self._deadline(completion_request):
            await self._send(answer, rendering, index, tokens)
        await self._end(answer, completion_request, rendering)
        return answer

    async def _deadline(self, completion_request: CompletionRequest) -> AsyncIterator[tuple[int, int]]:
        """Choices that have a piece to be sent and its tokens, until all are over."""
        left = set(range(completion_request.n))
        while left:
            await self._wakeup.wait()
            self._wakeup.clear()
            for index in sorted(left):
                writing = self._writings[index]
                while (tokens := writing.next_size()) is not None:
                    yield index, tokens
                left -= {index} if writing.finish_reason else set()

    async def _send(self, answer: web.StreamResponse, rendering: Rendering, index: int, tokens: int) -> None:
        fault, pad = self._fault, 0
        if fault and fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
        piece = self._writings[index].take(tokens)
        written = sum(writing.report for writing in self._writings)
        if fault and fault.kind == "giant" and self._reached(fault):
            self._fault, pad = None, fault.size
        await self._write(answer, rendering.piece(index, piece, written, pad))
        self.entry.sent.append((self._loop.time(), len(piece.ids)))
        if self._fault and self._fault.after_tokens > 0 and self._reached(self._fault):
            await self._strike(self._fault, answer)

    async def _end(
        self, answer: web.StreamResponse, completion_request: CompletionRequest, rendering: Rendering
    ) -> None:
        fault = self._fault
        if fault and fault.after_tokens == LAST:
            await self._strike(fault, answer)
        if completion_request.usage:
            for _ in range(2 if fault and fault.kind == "double_usage" else 1):
                await self._write(answer, rendering.usage(sum(len(w.ids) for w in self._writings)))
        if not (fault and fault.kind == "no_done"):
            await self._write(answer, DONE)
        await answer.write_eof()
        self._finished()

    def _finished(self) -> None:
        self.entry.finished_s = max(q.finished_s for q in self._sequences)
        self._server.log.end(self.entry, "finished")

    def _reached(self, fault: Fault) -> bool:
        sent = self.entry.sent_tokens if self.entry.sent else max(len(w.ids) for w in self._writings)
        return sent >= fault.after_tokens > 0

    async def _write(self, answer: web.StreamResponse, data: bytes) -> None:
        if not (self._fault and self._fault.kind == "split"):
            await answer.write(data)
            return
        for at in range(0, len(data), 2):
            for part in (data[at : at + 1], data[at + 1 : at + 2]):
                if part:
                    await answer.write(part)
            await asyncio.sleep(0)

    async def _strike(self, fault: Fault, answer: web.StreamResponse | None) -> None:
        """The fault happens, once; returns where the answer goes on after it."""
        if fault.kind in ON_ALL:
            return
        self._fault = None
        if fault.kind in {"hang", "stall"}:
            await asyncio.sleep(min(fault.seconds, 1e6))
        elif answer is None or fault.kind in {"close", "die"}:
            await self._cut_off(dead=fault.kind == "die")
        elif fault.kind == "malformed":
            await answer.write(b'data: {"choices": [{"text\n\n')
        else:
            await answer.write(event(error_body("out of luck", "InternalServerError", 500)))

    async def _cut_off(self, *, dead: bool) -> None:
        if dead:
            self._server.die_soon()
        else:
            self._server.log.end(self.entry, "closed")
            if self._request.transport is not None:
                self._request.transport.abort()
        await asyncio.Event().wait()  # until this handler is cancelled with its connection

    def _refused(self, status: int, message: str, kind: str, retry_after_s: float | None = None) -> web.Response:
        from aiohttp import web

        self.entry.status = status
        self._server.log.end(self.entry, "refused")
        headers: dict[str, Any] = {} if retry_after_s is None else {"Retry-After": f"{retry_after_s:g}"}
        return web.json_response(error_body(message, kind, status), status=status, headers=headers)
