"""One client's request over its life: sent, read, cut, resumed, moved to another engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from lengthwise.backend.openai_protocol import Server
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.protocols import ClientRequest, Fleet, Worker
from lengthwise.gateway.relay import engine_request
from lengthwise.gateway.relay.engine_request import Plan, Rejected, State
from lengthwise.gateway.relay.failures import Blame, Budget, Final, Full, Interrupted, Trouble
from lengthwise.gateway.relay.responses import BufferedResponse, Plain, Tracked
from lengthwise.gateway.relay.sse import Splitter, TooLong, data_of, decoded, split
from lengthwise.gateway.relay.upstream import CLIENT, SLOW, Call
from lengthwise.gateway.request import Outcome, Request
from lengthwise.gateway.scheduler_driver import GONE, RequestFinishedError, RequestRefusedError, Ticket


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all journeys share.

    Attributes:
        fleet: The engines.
        config: The gateway's.
        budget: Of retries.
        hinted: A body with what the engine is told besides.
        window: Called when a request's output passed a window.
        spawn: Runs something beside.
        hears: Whether the text of answers is kept, for a predictor that reads it.
    """

    fleet: Fleet
    config: GatewayConfig
    budget: Budget
    hinted: Callable[[Request, Worker, bytes], bytes]
    window: Callable[[Journey], None]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    hears: bool = False


_TAIL = 12
_REQUEST_TIMEOUT_S = 2.0
_HALF = "�"
_MAX_BYTES = 1 << 16
"""Of an answer: the text of a few tokens."""


async def kept_tokens(state: Tracked, worker: Worker, model: str) -> int:
    """Tokens behind which a further leg can begin.

    A chunk with several tokens and a text may end in half a character, which the engine holds back. Whether
    it does is seen by the text of the last tokens, asked of ``/detokenize``; an engine without it is believed.
    """
    kept = state.retained
    for dropped in range(state.unsure):
        tail = state.tail(_TAIL + dropped)
        text = await _text(worker, model, tail[: len(tail) - dropped])
        if text is None or not text.endswith(_HALF):
            return kept - dropped
    return kept


async def _text(worker: Worker, model: str, ids: list[int]) -> str | None:
    import msgspec

    body = msgspec.json.encode({"model": model, "tokens": ids})
    url = Server(worker.url).root + "/detokenize"
    try:
        async with (
            asyncio.timeout(_REQUEST_TIMEOUT_S),
            worker.session.post(url, data=body, allow_redirects=False) as answer,
        ):
            told = msgspec.json.decode(await _short(answer))
        return str(told["prompt"])
    except Exception:  # noqa: BLE001 - whatever it is: there is no answer
        return None


async def _short(answer: Any) -> bytes:
    """All of an answer; ValueError where it is longer than it can be, and the rest is not read."""
    parts, size = [], 0
    while part := await answer.content.readany():
        parts.append(part)
        size += len(part)
        if size > _MAX_BYTES:
            answer.close()
            raise ValueError("too long")
    return b"".join(parts)


MAX_BYTES = 1 << 21
"""Of events that are kept until somebody asks; what comes behind is not read."""


class Heard:
    """Takes the events that go to a client, and reads them when it is asked."""

    __slots__ = ("_parts", "_size", "_splitter", "_texts")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._texts: list[str] = []
        self._size = 0
        self._splitter = Splitter()

    def take(self, events: bytes) -> None:
        """Some more."""
        if self._size < MAX_BYTES:
            self._size += len(events)
            self._parts.append(events)

    def text(self) -> str:
        """Of all that came."""
        parts, self._parts = self._parts, []
        try:
            for event in split(self._splitter.feed(b"".join(parts))):
                self._texts.append(_text_of(event))
        except TooLong:
            self._size = MAX_BYTES
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""


def _text_of(event: bytes) -> str:
    try:
        choices = decoded(data_of(event)).get("choices") or ()
        return "".join(one.get("text") or (one.get("delta") or {}).get("content") or "" for one in choices)
    except (ValueError, TypeError, AttributeError):
        return ""


Headers = list[tuple[bytes, bytes]]
EVENTS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class ChunkWriter(Protocol):
    """Where pieces of an answer can go at once (``edge``: the client's connection)."""

    def can_write(self) -> bool: ...
    def write_chunk(self, chunk: bytes) -> None: ...


class Answer:
    """Status and headers at once, the body as it comes.

    Attributes:
        status: Of HTTP.
        headers: Content-type at least.
    """

    __slots__ = ("_close", "_first", "_next", "_pass_to", "headers", "status")

    def __init__(
        self,
        status: int,
        headers: Headers,
        first: bytes,
        tracker: Callable[[], Awaitable[bytes | None]] | None = None,
        close: Callable[[], None] | None = None,
        attach_writer: Callable[[ChunkWriter], None] | None = None,
    ) -> None:
        self.status, self.headers = status, headers
        self._first: bytes | None = first
        self._next, self._close, self._pass_to = tracker, close, attach_writer

    def __aiter__(self) -> Answer:
        """Itself: it can be read once."""
        return self

    async def __anext__(self) -> bytes:
        """The next piece of the body."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            piece = None if self._next is None else await self._next()
        except BaseException:
            await self.aclose()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def attach_writer(self, writer: ChunkWriter) -> None:
        """Pieces go there as soon as they come, past who iterates, while it takes them.

        All that were iterated over must be out.
        """
        if self._pass_to is not None:
            self._pass_to(writer)

    async def aclose(self) -> None:
        """Ends it, in whatever state; the engine aborts what it still does for it."""
        if self._close is not None:
            self._close()


def whole(status: int, body: bytes, kind: str = "application/json") -> Answer:
    """One that is all there."""
    return Answer(status, [(b"content-type", kind.encode("latin-1")), (b"content-length", b"%d" % len(body))], body)


def error_of(final: Final) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = "server_error" if final.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(final), "type": kind, "param": None, "code": final.reason}}


def failed(final: Final) -> Answer:
    """For a request that nothing has been sent of."""
    import msgspec

    answer = whole(final.status, msgspec.json.encode(error_of(final)))
    if final.retry_after_s is not None:
        answer.headers.append((b"retry-after", b"%d" % max(1, round(final.retry_after_s))))
    return answer


def error_event(final: Final) -> bytes:
    """For a stream that cannot go on."""
    import msgspec

    return b"data: " + msgspec.json.encode(error_of(final)) + b"\n\n"


MOST_FAILURES = 3
"""Engines that one request may fail at: what kills engines is not handed on to all of them."""


class Journey:
    """From the first assignment to the end; ``Reply`` makes an answer of it.

    Args:
        neighbors: What all share.
        client_request: By the client.
        plan: What can be done with it.
        turn: Its place.

    Attributes:
        state: How the engine's answer is read; None: none has come, or it was given up.
        received: The text so far, for a predictor that reads it.
        blame: What the fleet is told.
        no: That an engine called the request wrong, while another one is asked.
        kind: Content type of the engine's answer.
        outlet: Where pieces go at once while it takes them, past who asks for them.
    """

    def __init__(self, neighbors: Surroundings, client_request: ClientRequest, plan: Plan, ticket: Ticket) -> None:
        self.client_request, self.plan, self.ticket = client_request, plan, ticket
        self.state: State | None = None
        self.received = Heard() if neighbors.hears and client_request.stream else None
        self.blame = Blame(neighbors.fleet, client_request)
        self.no: Rejected | None = None
        self.kind = ""
        self._context = neighbors
        self.writer: ChunkWriter | None = None
        self._call: Call | None = None
        self._at: Worker | None = None
        self._failures = self._timeout = self._leg_from = self._legs = 0
        self._mark = 1
        self._full_since_s: float | None = None
        self._going_on = self._spoke = self._leg_spoke = self._light = self._done = False
        ticket.on_interrupt = self._interrupted

    async def piece(self) -> bytes | None:
        """The next bytes for the client; None at the end."""
        problem: Exception | None = None
        while not self._done:
            try:
                if problem is not None:
                    met, problem = problem, None
                    out = await self._met(met)
                elif self._call is not None:
                    data = await self._reading(self._call)
                    out = b"" if data is None else self._taken(self._call, data)
                else:
                    out = await self._open()
            except (Trouble, Full, Interrupted) as came:
                problem = came
                continue
            except Rejected as no:
                if not self.blame.warnings(self._context.budget):
                    raise
                self.no = problem = no
                continue
            if out:
                return out
        return None

    def _reading(self, call: Call) -> Awaitable[bytes | None]:
        """The next piece from the engine, to be awaited; what it told of trouble before is raised first."""
        state = self.state
        assert state is not None
        if state.trouble is not None:
            begun = state.count > self._leg_from or (state.sent and not self._going_on)
            raise engine_request.told_inside(state.trouble, started=begun)
        return call.read(None if self.writer is None else self._at_once)

    def _at_once(self, data: bytes) -> bool:
        """Whether a piece went on in the moment in which it came; ``piece`` is woken where there is more to do."""
        writer, call, state = self.writer, self._call, self.state
        if writer is None or call is None or state is None or not writer.can_write():
            return False
        if out := self._taken(call, data):
            writer.write_chunk(out)
        if self._done or state.trouble is not None:
            call.wakeup()
        return True

    def _taken(self, call: Call, data: bytes) -> bytes:
        """What goes to the client of a piece (b"" at the end), once all who count have been told."""
        state = self.state
        assert state is not None
        out = state.feed(data) if data else engine_request.ended(state)
        if self.received is not None:
            self.received.take(out)
        if not self._leg_spoke or state.count >= self._mark:
            self._reached(state)
        self.ticket.tokens(state.count)
        if not (state.resumable or self.ticket.nonpreemptible):
            self.ticket.mark_nonpreemptible()
        if out and not self._light and state.sent:
            self._lighten(state)
        if state.trouble is not None:
            return out  # what came before it; the next step meets it
        if state.finished or (state.complete and not data):
            self._complete(call)
        elif self.ticket.preempted.is_set() and (tracked := engine_request.movable(state)) and not state.complete:
            self._timeout += 1
            if leaves := engine_request.leaves(tracked, self._timeout):
                call.interrupt("cut")
            elif leaves is None:
                self.ticket.mark_nonpreemptible()
        return out

    async def _open(self) -> bytes:
        """Sends the request; what is returned ends it already."""
        self._at = None
        self._at = worker = engine_request.worker_of(self._context.fleet, self.ticket.current_worker)
        body: bytes | None
        if self._going_on and isinstance(self.state, Tracked):
            kept = await kept_tokens(self.state, worker, self.client_request.model)
            path, body = "/v1/completions", engine_request.next_body(self.plan, self.state, worker, kept)
            if body is None:
                return self._finished(self.state.at_limit())
        else:
            path, body = (
                engine_request.first_path(self.client_request),
                engine_request.first_body(self.client_request, self.plan, worker),
            )
        if not self.plan.cut_at(worker):
            self.ticket.mark_nonpreemptible()
        resilience = self._context.config.resilience
        self._call = call = Call(resilience)
        self._legs, self._leg_spoke = self._legs + 1, False
        self.blame.sent(worker)
        body = self._context.hinted(self.ticket.request, worker, body)
        await call.open(worker.session, path, body, engine_request.leg_headers(self.client_request, self._legs))
        entries = self.client_request.model if self.client_request.model in worker.capabilities.models else ""
        await engine_request.require_200(call, going_on=self._going_on, entries=entries)
        self.blame.served()
        self._timeout, self.no = 0, None
        self.kind = call.headers.get("content-type", "")
        if not self._going_on:
            self.state = engine_request.new_state(
                self.client_request, self.plan, worker, self.kind, resilience.answer_bytes
            )
            self.ticket.request.single_chunk = isinstance(self.state, BufferedResponse)
        self._leg_from = self.state.count if self.state is not None else 0
        return b""

    def _reached(self, state: State) -> None:
        """The first of a leg or of all, or the end of a window (the next mark)."""
        if not self._leg_spoke and (state.count > self._leg_from or state.complete):
            self._full_since_s, self._leg_spoke = None, True
            self.blame.started()
        if state.count and not self._spoke:
            self._spoke = True
            if not self.ticket.request.single_chunk:
                self.ticket.first_token()
        if state.count >= self._mark:
            tokens = self._context.config.order.window_tokens
            if state.count >= tokens and not state.complete:
                self._context.window(self)
            self._mark = (state.count // tokens + 1) * tokens

    def _lighten(self, state: State) -> None:
        """The client has a part of the answer, so that the request is not sent anew: what only that needs is let go."""
        self._light = True
        self.plan = self.plan.going_on()
        ids_bytes = state.memory_bytes if isinstance(state, Tracked) else 0
        self.client_request.release(text=self.received is None, others_bytes=ids_bytes)

    @property
    def _engine(self) -> str:
        """The engine it was sent to last, by the name that it has now."""
        return self.ticket.current_worker if self._at is None else self._at.name

    async def _met(self, problem: Exception) -> bytes:
        if isinstance(problem, Full):
            await self._wait_for_room(problem)
        elif isinstance(problem, Trouble):
            return await self._troubled(problem)
        elif isinstance(problem, Rejected):
            await self._resume("retried", avoid=self._engine)
        elif isinstance(problem, Interrupted) and problem.cause in (CLIENT, SLOW):
            self.end(Outcome.CLIENT_GONE, problem.cause)
            if problem.cause == SLOW:  # it may read on, and must not take what it has for all
                raise Final(408, "slow_reader", "The answer was not read in time.")
            raise RequestFinishedError
        elif (rest := engine_request.rest(self.state)) is not None:
            return self._finished(rest)  # cut between its last token and the end of its stream
        elif isinstance(problem, Interrupted) and problem.cause == GONE:
            await self._resume("failed_over", avoid=self._engine)
        else:
            if self._leg_spoke:
                self.blame.succeeded()
            await self._resume("window" if self._context.config.order.mode == "windowed" else "cut")
        return b""

    async def _troubled(self, trouble: Trouble) -> bytes:
        """An engine failed: on to another one, if that can be without a gap or a repeat."""
        state = self.state
        self._close_call()
        if trouble.engine and self.ticket.worker:
            self.blame.failed(trouble)
        if isinstance(state, Plain) and state.report:  # in the engine's own words
            self.end(Outcome.FAILED, str(trouble))
            return b""
        if (rest := engine_request.rest(self.state)) is not None:
            return self._finished(rest)
        self._failures += 1
        once = trouble.code or engine_request.blocked(self.state) or self.blame.is_the_requests()
        if once or self._failures >= MOST_FAILURES or not self._continues(trouble):
            raise Final(502, trouble.code or "engine_failed", f"The engine failed: {trouble}")
        await self._resume("failed_over" if self._spoke else "retried", avoid=self._engine)
        return b""

    def _continues(self, trouble: Trouble) -> bool:
        """Whether one more engine may be asked."""
        budget, failures = self._context.budget, self._failures
        return budget.retry(trouble, self.blame.caller, failures=failures, spoke=self._leg_spoke)

    async def _resume(self, cause: str, *, avoid: str = "") -> None:
        """Back to the queue with what is out, until it has a worker again."""
        self._close_call()
        if engine_request.blocked(self.state):
            raise Final(502, "engine_failed", "The engine is gone.")
        self._going_on = engine_request.can_go_on(self.state)
        kept = self.state.retained if self._going_on and isinstance(self.state, Tracked) else 0
        if not self._going_on:
            self.state = None
            self.received = self.received and Heard()
        await self._placed(self.ticket.retry(cause, avoid=avoid, generated=kept))

    async def _wait_for_room(self, busy: Full) -> None:
        """The engine is full: back to its place."""
        self._close_call()
        loop, admission = asyncio.get_running_loop(), self._context.config.admission
        since_s = self._full_since_s = self._full_since_s or loop.time()
        if loop.time() - since_s > max(admission.no_engine_s, self._context.config.order.max_wait_s):
            raise Final(503, "overloaded", "The engines are full.", busy.retry_after_s or 1.0)
        await self._placed(self.ticket.requeue(busy.retry_after_s or 0.0))

    async def _placed(self, retry: Awaitable[Ticket]) -> None:
        try:
            await retry
        except RequestRefusedError as no:
            rejection = no.rejection
            raise Final(rejection.status, rejection.reason, rejection.message, rejection.retry_after_s) from None

    def _complete(self, call: Call) -> None:
        self._call = None
        self.blame.completed()
        if call.at_end:
            call.close()
        else:
            self._context.spawn(call.drain())
        self.end(Outcome.FINISHED, self.state.cause if self.state is not None else "")

    def _finished(self, out: bytes) -> bytes:
        self.end(Outcome.FINISHED, self.state.cause if self.state is not None else "")
        return out

    def _interrupted(self, cause: str) -> None:
        """The scheduler wants the place back: at once, where nothing is lost by it."""
        state = self.state
        if self._call is None:
            return
        fresh = state is None or (cause == GONE and not state.sent)
        if fresh or ((tracked := engine_request.movable(state)) and (tracked.level or cause == GONE)):
            self._call.interrupt(cause)

    def _close_call(self) -> None:
        if self._call is not None:
            self._call.close()
            self._call = None

    def end(self, outcome: Outcome, detail: str = "") -> None:
        """It is over; the first call counts."""
        self._done = True
        self.blame.over()
        self.ticket.on_interrupt = None
        if self._call is not None:
            self._call.interrupt(CLIENT)
            self._close_call()
        self.ticket.end(outcome, detail)
