"""Relay clients' requests to engines: attempts, preemption, resumption, failover, and answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Awaitable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from lengthwise.backend.openai_protocol import Server
from lengthwise.gateway.apis import APIS, CHUNKS, error_body, read_event
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.length_prediction import fixed_tokens
from lengthwise.gateway.protocols import ChunkWriter
from lengthwise.gateway.relay import engine_request, failures
from lengthwise.gateway.relay.engine_request import EngineRejectedError, ResumePlan
from lengthwise.gateway.relay.failures import AttemptInterruptedError, QueueFullError, UpstreamError
from lengthwise.gateway.relay.responses import (
    AssembledResponse,
    BufferedResponse,
    ResponseReader,
    TrackedStream,
    UntrackedStream,
)
from lengthwise.gateway.relay.sse import EventSplitter, EventTooLongError, event_data, parse_object, split_events
from lengthwise.gateway.relay.upstream import REQUEST_ENDED, SLOW_READER, Attempt, read_bounded
from lengthwise.gateway.request import ClientRequest, LengthPrediction, Outcome, Refusal, Request
from lengthwise.gateway.scheduler_driver import STOPPED, WORKER_GONE, NotServedError, RequestEndedError, Ticket

if TYPE_CHECKING:
    from lengthwise.gateway.fleet import EngineWorker, Fleet
    from lengthwise.gateway.length_prediction import LengthPredictor
    from lengthwise.gateway.scheduler_driver import SchedulerDriver

_CONTEXT_IDS = 12
_DETOKENIZE_TIMEOUT_S, _MAX_DETOKENIZED_BYTES = 2.0, 1 << 16


async def resumable_tokens(response: TrackedStream, worker: EngineWorker, model: str) -> int:
    """Return the number of flushed tokens from which a resumed output continues.

    The text of the last ``uncertain_tokens`` may end within a character. They are dropped one by one until the engine's
    ``/detokenize`` shows a complete character at the end. If no number of them gives one, all flushed tokens remain.
    """
    for num_dropped in range(response.uncertain_tokens):
        ids = response.last_ids(_CONTEXT_IDS + num_dropped)
        body = msgspec.json.encode({"model": model, "tokens": ids[: len(ids) - num_dropped]})
        try:
            async with (
                asyncio.timeout(_DETOKENIZE_TIMEOUT_S),
                worker.session.post(Server(worker.url).root + "/detokenize", data=body, allow_redirects=False) as reply,
            ):
                text = str(msgspec.json.decode(await read_bounded(reply, _MAX_DETOKENIZED_BYTES))["prompt"])
        except Exception:  # noqa: BLE001 - no usable answer, for whatever reason
            text = ""
        if not text.endswith("\ufffd"):
            return response.flushed_tokens - num_dropped
    return response.flushed_tokens


MAX_TEXT_BYTES = 1 << 21  # maximum number of bytes of a response's events that are stored for a predictor


class GeneratedText:
    """Collects the events that go to a client, and parses their text on request. ``form`` is that of the events."""

    def __init__(self, form: str = CHUNKS) -> None:
        self._form = form
        self._parts: list[bytes] = []
        self._text = ""
        self._size = 0
        self._splitter = EventSplitter()

    def add(self, events: bytes) -> None:
        """Add events that go to the client."""
        if self._size < MAX_TEXT_BYTES:
            self._size += len(events)
            self._parts.append(events)

    def text(self) -> str:
        """Return the text of all events so far."""
        parts, self._parts, texts = self._parts, [], [self._text]
        try:
            for event in split_events(self._splitter.feed(b"".join(parts))):
                if self._form != CHUNKS:
                    texts.append(read_event(event_data(event)).text)
                    continue
                with contextlib.suppress(ValueError, TypeError, AttributeError):
                    choices = parse_object(event_data(event)).get("choices") or ()
                    texts.append("".join(c.get("text") or (c.get("delta") or {}).get("content") or "" for c in choices))
        except EventTooLongError:
            self._size = MAX_TEXT_BYTES
        self._text = "".join(texts)
        return self._text


Headers = list[tuple[bytes, bytes]]
_STREAM_HEADERS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Answer:
    """Status, headers and body for the client. The body is ``first``, followed by the chunks of ``relayed``."""

    def __init__(self, status: int, headers: Headers, first: bytes, relayed: RelayedRequest | None = None) -> None:
        self.status, self.headers = status, headers
        self._first: bytes | None = first
        self._relayed = relayed

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> bytes:
        chunk, self._first = self._first, None
        try:
            if chunk is None and self._relayed is not None:
                chunk = await self._relayed.next_or_error()
        except BaseException:
            await self.aclose()
            raise
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def attach_writer(self, writer: ChunkWriter) -> None:
        """Write later chunks directly to a connection as they arrive. Call this when all yielded chunks are written."""
        if self._relayed is not None:
            self._relayed.writer = writer

    async def aclose(self) -> None:
        """End the request as CLIENT_GONE unless it has ended. The engine then aborts it."""
        if self._relayed is not None:
            self._relayed.stop_sending()


def complete_answer(status: int, body: bytes, content_type: str) -> Answer:
    """Return an answer with a complete body."""
    headers = [(b"content-type", content_type.encode("latin-1")), (b"content-length", b"%d" % len(body))]
    return Answer(status, headers, body)


def refused_answer(error: Refusal, api: str) -> Answer:
    """Return the answer to a request that no engine serves, in the form of its route."""
    is_anthropic = APIS[api].is_anthropic
    body = error_body(error.status, error.message, code=error.reason, is_anthropic=is_anthropic)
    answer = complete_answer(error.status, body, "application/json")
    if error.retry_after_s is not None:
        answer.headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after_s))))
    return answer


_STOPPED = Refusal(503, "stopped", "The gateway stopped this request.", 1.0)


_QUEUE_FULL_CODE = re.compile(
    r"""["']code["']:\s?"?(503|429)\b"""
)  # in /v1/messages vLLM quotes its own event in Python
MAX_FAILURES = 3  # failed attempts that end a request: a request that kills engines must not reach all of them


class RelayedRequest:
    """A request from dispatch to end. ``text`` collects the output of a stream if the predictor reads outputs."""

    def __init__(self, relay: Relay, client_request: ClientRequest, plan: ResumePlan, ticket: Ticket) -> None:
        self.client_request, self.plan, self.ticket = client_request, plan, ticket
        self.response: ResponseReader | None = None  # None before the first response, and before a restart
        form = APIS[client_request.api].events
        self.text = GeneratedText(form) if relay.track_text and client_request.stream else None
        self.writer: ChunkWriter | None = None  # client connection to which chunks go as they arrive
        self._relay, self._config = relay, relay.config
        self._attribution = failures.FailureAttribution(relay.fleet, client_request)
        self._rejection: EngineRejectedError | None = None  # by an engine, while a peer checks the request
        self._attempt: Attempt | None = None
        self._worker: EngineWorker | None = None
        self._attempts = self._failures = 0
        self._start_tokens = 0  # output tokens before the current attempt
        self._preempt_chunks = 0  # chunks since the scheduler requested a preemption
        self._content_type = ""
        self._window_end = 1  # output tokens at which progress is noted next
        self._queue_full_since_s: float | None = None
        self._resuming = False  # whether the next attempt continues the output, instead of starting it
        self._output_started = self._attempt_output_started = False  # in any attempt, in the current attempt
        self._retry_state_released = self._done = self._sending_stopped = False
        ticket.on_interrupt = self._on_interrupt

    async def respond(self) -> Answer:
        """Return the answer once its first chunk has arrived or the request has failed."""
        try:
            first = await self.next_chunk() or b""
        except EngineRejectedError as rejection:
            self._attribution.on_rejected(rejection.status)
            return self._reject(rejection)
        except NotServedError as error:
            if self._rejection is not None:  # no peer could check the request, so its rejection is final
                return self._reject(self._rejection)
            return self._fail(error.refusal)
        except RequestEndedError:
            return self._fail(_STOPPED)
        except BaseException as error:
            gone = isinstance(error, asyncio.CancelledError)
            self.end(Outcome.CLIENT_GONE if gone else Outcome.FAILED, "before its answer began")
            raise
        if isinstance(self.response, BufferedResponse | AssembledResponse):
            content_type = self._content_type if isinstance(self.response, BufferedResponse) else ""
            return complete_answer(200, first, content_type or "application/json")
        return Answer(200, _STREAM_HEADERS, first, self)

    async def next_or_error(self) -> bytes | None:
        """Return the next chunk, an error event if the request failed, or None at the end."""
        try:
            return await self.next_chunk()
        except RequestEndedError:
            error = _STOPPED
        except EngineRejectedError as rejection:
            error = Refusal(502, "engine_failed", f"the engine refused to continue: {rejection}")
        except NotServedError as not_served:
            error = not_served.refusal
        self.end(Outcome.FAILED, error.message)
        if self._sending_stopped:
            return None
        is_anthropic = APIS[self.client_request.api].is_anthropic
        body = error_body(error.status, error.message, code=error.reason, is_anthropic=is_anthropic)
        return b"event: error\n" * is_anthropic + b"data: " + body + b"\n\n"

    def stop_sending(self) -> None:
        """End the request as CLIENT_GONE unless it has ended, and send nothing more."""
        self._sending_stopped = True
        self.end(Outcome.CLIENT_GONE, "while its answer came")

    def _reject(self, rejection: EngineRejectedError) -> Answer:
        self.end(Outcome.REJECTED, str(rejection))
        return complete_answer(rejection.status, rejection.body, rejection.content_type)

    def _fail(self, error: Refusal) -> Answer:
        self.end(Outcome.FAILED, error.message)
        return refused_answer(error, self.client_request.api)

    async def next_chunk(self) -> bytes | None:
        """Return the next bytes for the client, or None at the end.

        Raises NotServedError, EngineRejectedError or RequestEndedError if there is no further output.
        """
        problem: Exception | None = None
        while not self._done:
            try:
                current, problem = problem, None
                if current is not None:
                    out = await self._handle(current)
                elif self._attempt is None:
                    out = await self._start_attempt()
                else:
                    data = await self._read(self._attempt)
                    out = b"" if data is None else self._process(self._attempt, data)
                if out:
                    return out
            except (UpstreamError, QueueFullError, AttemptInterruptedError) as error:
                problem = error
            except EngineRejectedError as rejection:
                if not self._attribution.should_check_rejection(self._relay.retry_budget):
                    raise
                self._rejection = problem = rejection
        return None

    def _read(self, attempt: Attempt) -> Awaitable[bytes | None]:
        response = self.response
        assert response is not None
        if (error := response.error) is not None:
            started = response.count > self._start_tokens or (response.sent and not self._resuming)
            full = None if started else _QUEUE_FULL_CODE.search(error.detail)
            if full is not None and error.reason == failures.IN_STREAM_ERROR:
                # vLLM answers 200 and then reports in the stream that its queue is full.
                raise QueueFullError(int(full[1]), error.detail)
            raise error
        return attempt.read(None if self.writer is None else self._write_through)

    def _write_through(self, data: bytes) -> bool:
        """Write a chunk of the engine to the client at once. Return False if the task must read the chunk instead."""
        writer, attempt, response = self.writer, self._attempt, self.response
        if writer is None or attempt is None or response is None or not writer.can_write():
            return False
        if out := self._process(attempt, data):
            writer.write_chunk(out)
        if self._done or response.error is not None:
            attempt.wake()
        return True

    def _process(self, attempt: Attempt, data: bytes) -> bytes:  # noqa: C901
        response, ticket = self.response, self.ticket
        assert response is not None
        out = response.feed(data) if data else response.end()
        if self.text is not None:
            self.text.add(out)
        if not self._attempt_output_started or response.count >= self._window_end:
            self._note_progress(response)
        ticket.on_progress(response.count)
        if not (response.trackable or ticket.nonpreemptible):
            ticket.mark_nonpreemptible()
        if out and not self._retry_state_released and response.sent:
            self._release_retry_state(response)
        if response.error is not None:
            return out  # ``_read`` raises the error after this output
        if response.finished or (response.output_complete and not data):
            self._attempt = None
            self._attribution.on_finished()
            if attempt.at_end:
                attempt.close()
            else:
                self._relay.spawn(attempt.drain())
            self.end(Outcome.FINISHED, response.finish_reason)
        elif ticket.is_interrupted and not response.output_complete and (tracked := _preemptible(response)):
            self._preempt_chunks += 1
            if preempt := tracked.should_preempt(self._preempt_chunks):
                attempt.interrupt("preemption")
            elif preempt is None:
                ticket.mark_nonpreemptible()
        return out

    async def _start_attempt(self) -> bytes:
        """Send the request to the assigned worker. Return b"", or the end of an output that has reached its limit."""
        relay, client_request, ticket = self._relay, self.client_request, self.ticket
        self._worker = None
        try:
            self._worker = worker = relay.fleet.worker(ticket.current_worker)
        except KeyError:
            raise UpstreamError(WORKER_GONE, engine_fault=False) from None
        body: bytes | None
        if self._resuming and isinstance(self.response, TrackedStream):
            num_tokens = await resumable_tokens(self.response, worker, client_request.model)
            path = "/v1/completions"
            body = engine_request.continuation_body(self.plan, self.response, worker, num_tokens)
            if body is None:
                return self._finish(self.response.end_at_limit())
        else:
            path = APIS[client_request.api].path
            body = engine_request.start_body(client_request, self.plan, worker)
        if not self.plan.can_preempt_at(worker):
            ticket.mark_nonpreemptible()
        if ticket.has_ended:
            raise RequestEndedError
        resilience = self._config.resilience
        self._attempt = attempt = Attempt(resilience)
        self._attempts, self._attempt_output_started = self._attempts + 1, False
        self._attribution.worker = worker
        headers = client_request.headers.copy()
        body = relay.add_hints(ticket.request, worker, body, client_request.api, headers)
        if self._attempts > 1:  # no engine sees the same request id twice
            suffix = f"-{self._attempts}"
            headers = [(name, value + suffix if name == "X-Request-Id" else value) for name, value in headers]
        connection = await attempt.open(worker.session, path, body, headers)
        listed_model = client_request.model if client_request.model in worker.capabilities.models else ""
        await engine_request.require_success(attempt, connection, resumed=self._resuming, listed_model=listed_model)
        self._attribution.on_accepted()
        self._preempt_chunks, self._rejection = 0, None
        self._content_type = connection.headers.get("content-type", "")
        if not self._resuming:
            self.response = engine_request.new_response(
                client_request, self.plan, worker, self._content_type, resilience.answer_bytes
            )
            ticket.request.dispatch.single_chunk = isinstance(self.response, BufferedResponse)
        self._start_tokens = self.response.count if self.response is not None else 0
        return b""

    def _note_progress(self, response: ResponseReader) -> None:
        if not self._attempt_output_started and (response.count > self._start_tokens or response.output_complete):
            self._queue_full_since_s, self._attempt_output_started = None, True
            self._attribution.on_first_output()
        if response.count and not self._output_started:
            self._output_started = True
            if not self.ticket.request.dispatch.single_chunk:
                self.ticket.on_first_token()
        if response.count >= self._window_end:
            tokens = self._config.order.window_tokens
            if response.count >= tokens and not response.output_complete and self._config.order.mode != "fcfs":
                self._relay.spawn(self._relay.repredict(self))
            self._window_end = (response.count // tokens + 1) * tokens

    def _release_retry_state(self, response: ResponseReader) -> None:
        """Free the state that only a restart needs: the client has received bytes, so the request cannot restart."""
        self._retry_state_released = True
        self.plan = self.plan.for_continuation()
        ids_bytes = response.memory_bytes if isinstance(response, TrackedStream) else 0
        self.client_request.release(text=self.text is None, retained_bytes=ids_bytes)

    async def _handle(self, problem: Exception) -> bytes:
        response = self.response
        if isinstance(problem, QueueFullError):
            await self._on_queue_full(problem)
        elif isinstance(problem, UpstreamError):
            return await self._fail_over(problem)
        elif isinstance(problem, EngineRejectedError):
            await self._requeue("retried", avoid=True)
        elif (cause := str(problem)) == SLOW_READER:  # an AttemptInterruptedError, whose text is its cause
            self.end(Outcome.CLIENT_GONE, cause)
            # The client may read again, and must not mistake a part of the output for the complete output.
            raise NotServedError(Refusal(408, "slow_reader", "The answer was not read in time."))
        elif response is not None and (rest := response.missing_end()) is not None:
            return self._finish(rest)  # preempted between its last token and the end of its stream
        elif cause == STOPPED:
            raise RequestEndedError
        elif cause == WORKER_GONE:
            await self._requeue("failed_over", avoid=True)
        else:
            if self._attempt_output_started:
                self._attribution.on_preempted()
            await self._requeue("window" if self._config.order.mode == "windowed" else "preemption")
        return b""

    async def _fail_over(self, error: UpstreamError) -> bytes:
        """Move to another engine if the output can continue there without a gap or a repetition."""
        response = self.response
        self._close_attempt()
        if error.engine_fault and self.ticket.worker:
            self._attribution.on_error(error)
        if isinstance(response, UntrackedStream) and response.error_forwarded:
            self.end(Outcome.FAILED, str(error))
            return b""
        if response is not None and (rest := response.missing_end()) is not None:
            return self._finish(rest)
        self._failures += 1
        started, attribution = self._attempt_output_started, self._attribution
        final = bool(error.code) or (response is not None and response.unrecoverable) or self._failures >= MAX_FAILURES
        if (final or attribution.is_request_fault()) or not self._relay.retry_budget.take_for(
            error, attribution.owner, failures=self._failures, output_started=started
        ):
            after_s = None if error.code else 1.0
            cause = "it sent a malformed event" if error.reason == failures.MALFORMED else str(error)
            raise NotServedError(Refusal(502, error.code or "engine_failed", f"The engine failed: {cause}", after_s))
        await self._requeue("failed_over" if self._output_started else "retried", avoid=True)
        return b""

    async def _requeue(self, cause: str, *, avoid: bool = False) -> None:
        """Queue the request again with its flushed tokens. If ``avoid``, prefer other workers to the last one."""
        self._close_attempt()
        response = self.response
        if response is not None and response.unrecoverable:
            raise NotServedError(Refusal(502, "engine_failed", "The engine is gone.", 1.0))
        self._resuming = response is not None and response.can_resume
        num_tokens = 0
        if isinstance(response, TrackedStream) and self._resuming:
            num_tokens = response.flushed_tokens
        else:
            self.response = None
            self.text = self.text and GeneratedText(APIS[self.client_request.api].events)
        last = self.ticket.current_worker if self._worker is None else self._worker.name
        await self.ticket.requeue(cause, avoid=last if avoid else "", generated=num_tokens)

    async def _on_queue_full(self, error: QueueFullError) -> None:
        self._close_attempt()
        now_s, config = asyncio.get_running_loop().time(), self._config
        self._queue_full_since_s = self._queue_full_since_s or now_s
        if now_s - self._queue_full_since_s > max(config.admission.no_engine_s, config.order.max_wait_s):
            raise NotServedError(error.refusal)
        await self.ticket.on_queue_full(error.refusal, error.retry_after_s)

    def _on_interrupt(self, cause: str) -> None:
        """End the attempt now if the request is stopped, or can restart or resume without a gap in its response."""
        response = self.response
        if self._attempt is None:
            return
        at_once = response is None or cause == STOPPED or (cause == WORKER_GONE and not response.sent)
        if at_once or ((tracked := _preemptible(response)) and (tracked.all_flushed or cause == WORKER_GONE)):
            self._attempt.interrupt(cause)

    def _close_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None

    def _finish(self, out: bytes) -> bytes:
        self.end(Outcome.FINISHED, self.response.finish_reason if self.response is not None else "")
        return out

    def end(self, outcome: Outcome, detail: str = "") -> None:
        """End the request. Only the first call sets the outcome."""
        self._done = True
        self._attribution.close()
        if self.response is not None:
            dispatch = self.ticket.request.dispatch
            dispatch.reported_cached_tokens = self.response.cached_tokens
            dispatch.reported_prompt_tokens = self.response.prompt_tokens
            if isinstance(self.response, UntrackedStream):
                self.ticket.on_progress(self.response.estimated_count)
        self.ticket.on_interrupt = None
        if self._attempt is not None:
            self._attempt.interrupt(REQUEST_ENDED)
            self._close_attempt()
        self.ticket.end(outcome, detail)


def _preemptible(response: ResponseReader | None) -> TrackedStream | None:
    if isinstance(response, TrackedStream) and response.trackable and not response.unrecoverable:
        return response
    return None


PREEMPTIVE_MODES = ("isrtf", "windowed")
_POLL_INTERVAL_S = 1.0


class Relay:
    """Sends requests to engines in the order of the scheduler."""

    def __init__(
        self, driver: SchedulerDriver, fleet: Fleet, length_predictor: LengthPredictor, config: GatewayConfig
    ) -> None:
        self.retry_budget = failures.RetryBudget(config.resilience.retry_share)
        self.config = config
        self.fleet, self._driver, self._length_predictor = fleet, driver, length_predictor
        self.add_hints = engine_request.SchedulingHints(config, driver.scheduler.engine_priority).add_to
        self.track_text = getattr(length_predictor, "reads_output", None) is not None
        self._ids = itertools.count(1)
        self._can_resume, self._polled_s = False, float("-inf")
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, client_request: ClientRequest) -> Answer:
        """Return the answer after its first chunk. Raises NotServedError if the request is refused or expires."""
        self.retry_budget.deposit(failures.request_owner(client_request.client))
        if not APIS[client_request.api].queued:
            return await self._pass_on(client_request)
        order = self.config.order
        can_resume, preempts = self._any_can_resume(), order.mode in PREEMPTIVE_MODES
        plan = engine_request.resume_plan(
            client_request, can_resume, window_tokens=order.window_tokens, preempts=preempts
        )
        if client_request.charge is not None or order.fairness == "vtc":
            plan = replace(plan, metered=True)
        ticket = await self.enter(client_request, preemptible=plan.conflict is None)
        return await RelayedRequest(self, client_request, plan, ticket).respond()

    async def enter(self, client_request: ClientRequest, *, preemptible: bool = False) -> Ticket:
        """Return a ticket once a worker is assigned. Raises NotServedError if the request is refused or expires."""
        api, max_tokens = APIS[client_request.api], client_request.max_tokens
        request = Request(
            id=next(self._ids),
            arrival_s=client_request.arrival_s,
            model=client_request.model,
            prompt_tokens=client_request.prompt_tokens,
            max_tokens=1 if not api.generates else self.config.limits.max_tokens if max_tokens is None else max_tokens,
            client=client_request.client,
            body_bytes=len(client_request.body),
            prefix=client_request.prefix,
            preemptible=preemptible,
            fixed_tokens=fixed_tokens(client_request.body, client_request.fields, max_tokens) if api.generates else 1,
            choices=client_request.choices,
            streamed=client_request.stream,
        )
        if api.generates:
            request.length_prediction = await self._length_predictor.predict(request, client_request.text)
        else:  # one pass over the prompt, as of a request for one token
            request.length_prediction = LengthPrediction(1.0, "requested")
        if client_request.charge is not None and api.queued:
            await client_request.charge(request)
        return await self._driver.enter(request)

    async def _pass_on(self, client_request: ClientRequest) -> Answer:
        """Return the answer of an engine that is up, without the queue. Each failure moves on to the next engine."""
        api, model = client_request.api, client_request.model
        plan = engine_request.resume_plan(client_request, can_resume=False, window_tokens=0, preempts=False)
        refusal = Refusal(503, "no_engine", "No engine serves this model now.", 1.0)
        names = [state.name for state in self.fleet.states() if state.up and model in state.models]
        first, attribution = next(self._ids), failures.FailureAttribution(self.fleet, client_request)
        for number in range(min(len(names), MAX_FAILURES)):
            attempt = Attempt(self.config.resilience)
            try:
                worker = attribution.worker = self.fleet.worker(names[(first + number) % len(names)])
                connection = await attempt.open(
                    worker.session, APIS[api].path, client_request.body, client_request.headers
                )
                await engine_request.require_success(attempt, connection, resumed=False, listed_model=model)
                media_type, max_bytes = connection.headers.get("content-type", ""), self.config.resilience.answer_bytes
                response = engine_request.new_response(client_request, plan, worker, "", max_bytes)
                while response.error is None and (data := await attempt.read()):
                    response.feed(data)
                body = b"" if response.error is not None else response.end()
                if response.error is not None:
                    raise response.error
                attribution.on_finished()
                return complete_answer(200, body, media_type or "application/json")
            except KeyError:
                continue  # the worker has just gone
            except EngineRejectedError as rejection:
                return complete_answer(rejection.status, rejection.body, rejection.content_type)
            except QueueFullError as error:
                refusal = error.refusal
            except UpstreamError as error:
                if error.engine_fault:
                    attribution.on_error(error)
                refusal = Refusal(502, error.code or "engine_failed", f"The engine failed: {error}", 1.0)
            finally:
                attempt.close()
        attribution.close()
        return refused_answer(refusal, api)

    def configure(self, config: GatewayConfig) -> None:
        """Use another configuration for later requests."""
        self.config = config
        self.retry_budget.share = config.resilience.retry_share

    async def aclose(self) -> None:
        """Cancel background tasks."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _any_can_resume(self) -> bool:
        now_s = self._driver.clock()
        if now_s - self._polled_s > _POLL_INTERVAL_S:
            all_capabilities = [worker.capabilities for worker in self.fleet.workers()]
            self._can_resume = any(one.token_ids_each and one.token_id_prompts for one in all_capabilities)
            self._polled_s = now_s if self._can_resume else float("-inf")
        return self._can_resume

    async def repredict(self, relayed: RelayedRequest) -> None:
        """Predict the length of a request again, after another window of its output."""
        request = relayed.ticket.request
        text = relayed.text.text() if relayed.text is not None else None
        prediction = await self._length_predictor.repredict(request, relayed.client_request.text or None, text)
        if not relayed.ticket.has_ended:
            self._driver.repredict(request.id, prediction)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a background task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
