"""Replan the schedule when the lengths of requests change, in a separate process beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import pickle
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from lengthwise.gateway.child_process import ParentPipe, close, frame, read_frame, spawn_module, wait_terminated
from lengthwise.gateway.config import Phases
from lengthwise.gateway.protocols import Clock, Listener
from lengthwise.gateway.request import Outcome, Request
from lengthwise.schema.errors import LengthwiseError

Lengths = tuple[int, int, float]
"""Prompt tokens, output tokens, and seconds since the start until the request and all earlier ones had ended."""


@dataclass(frozen=True)
class ReplanEvent:
    """Result of a replanner after the lengths of requests have changed."""

    message: tuple[str, ...]  # sentences that describe the change
    phases: Phases | None = None  # new schedule; None: unchanged
    schedule: str = ""  # description of the new schedule; "" unchanged
    failed: bool = False  # whether replanning failed
    more: Any = None  # further results of the replanner; picklable


class Replanner(Protocol):
    """Watches the lengths of requests and replans when they change. It runs in a separate process, so it may block."""

    @property
    def evidence(self) -> float:
        """Evidence that lengths have changed. An event is due when it reaches ``1 / false_positive_rate``."""

    @property
    def false_positive_rate(self) -> float:
        """Largest probability of any event, however many requests are observed, while lengths do not change."""

    def observe(self, prompt_tokens: int, output_tokens: int, at_s: float) -> ReplanEvent | None:
        """Add the lengths of the next request in order of arrival (see Lengths). Return an event if one is due."""


Apply = Callable[[Phases], Awaitable[None]]  # applies a schedule from each engine's next phase on
ReplannerFactory = Callable[[], Replanner]  # makes the replanner; picklable


@dataclass
class ReplanningState:
    """The current state of replanning, for metrics and the admin page."""

    up: bool = True  # whether lengths are observed, or will be after the start
    error: str = ""  # cause if lengths are no longer observed
    observed: int = 0  # requests whose lengths were observed
    evidence: float = 1.0
    false_positive_rate: float = math.nan  # NaN until the replanner has started
    schedule: str = ""  # description of the current schedule; "" the configured one
    changed: int = 0  # events that changed the schedule
    unchanged: int = 0  # events without failure that left the schedule as it was
    failed: int = 0  # failures
    last: tuple[str, ...] = ()  # message of the last event; () none
    last_s: float = math.nan  # time of the last event


class ArrivalOrder:
    """Returns the lengths of requests in order of arrival, although the lengths become known in order of end.

    Short requests end before long ones that arrived with them, so lengths in order of end are biased.
    """

    def __init__(self) -> None:
        self._arrivals: deque[int] = deque()
        self._active: set[int] = set()
        self._finished: dict[int, tuple[int, int] | None] = {}

    def on_arrival(self, request_id: int) -> None:
        """Add a request."""
        self._arrivals.append(request_id)
        self._active.add(request_id)

    def on_end(self, request_id: int, lengths: tuple[int, int] | None, now_s: float) -> list[Lengths]:
        """Record that a request has ended. Return the lengths of all requests that are now complete and in order.

        Lengths are in order once all earlier requests have ended. Unknown ``lengths`` (None) are left out.
        """
        if request_id not in self._active:
            return []
        self._active.remove(request_id)
        self._finished[request_id] = lengths
        ready = []
        while self._arrivals and self._arrivals[0] in self._finished:
            ready.append(self._finished.pop(self._arrivals.popleft()))
        return [(*pair, now_s) for pair in ready if pair is not None]


def main() -> None:
    """Run a replanner in a child process until stdin ends."""
    pipe = ParentPipe()
    factory = pipe.receive()
    if factory is None:
        return
    try:
        replanner: Replanner = pickle.loads(factory)()  # noqa: S301 - written by the parent
    except Exception as error:  # noqa: BLE001 - the parent reports it, whatever it is
        pipe.send(pickle.dumps({"refused": f"{type(error).__name__}: {error}"}))
        return
    pipe.send(pickle.dumps({"refused": "", "false_positive_rate": replanner.false_positive_rate}))
    while (lengths := pipe.receive()) is not None:
        observed = [_observe(replanner, one) for one in pickle.loads(lengths)]  # noqa: S301 - written by the parent
        events = [event for event in observed if event is not None]
        pipe.send(pickle.dumps({"events": events, "evidence": float(replanner.evidence)}))


def _observe(replanner: Replanner, lengths: Lengths) -> ReplanEvent | None:
    try:
        return replanner.observe(*lengths)
    except Exception as error:  # noqa: BLE001 - the current schedule goes on
        message = f"replanning failed, the schedule stays as it is: {type(error).__name__}: {error}"
        return ReplanEvent((message,), failed=True)


_START_S, _EXIT_S = 120.0, 5.0


@contextlib.asynccontextmanager
async def _start_replanner(factory: bytes) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """Yield a new process and its first message. Raises LengthwiseError if ``factory`` makes no replanner there."""
    process = await spawn_module(__name__)
    try:
        hello = await _exchange(process, factory, _START_S)
        if hello["refused"]:
            raise LengthwiseError(hello["refused"])
        yield process, hello
    finally:
        close(process)
        await wait_terminated(process, _EXIT_S)


async def _exchange(process: asyncio.subprocess.Process, message: bytes, timeout_s: float) -> dict[str, Any]:
    assert process.stdin is not None
    try:
        async with asyncio.timeout(timeout_s):
            process.stdin.write(message)
            await process.stdin.drain()
            return dict[str, Any](pickle.loads(await read_frame(process)))  # noqa: S301 - our own process
    except TimeoutError:
        raise LengthwiseError(f"it did not answer within {timeout_s:g} s") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        status = "its process is alive but does not answer"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_EXIT_S, timeout_s)):
                status = f"its process exited with {await process.wait()}"
        raise LengthwiseError(status) from error


_log = logging.getLogger("lengthwise.gateway")
_MAX_LENGTHS = 512  # lengths in one message to the process


class PlanTracker(Listener):
    """Adapts the schedule of mode rra to the lengths of requests while its ``async with`` block runs.

    A replanner, which ``factory`` makes in a separate process, observes the lengths. ``apply`` applies its schedules.
    If it fails, or takes longer than ``plan_s``, the last schedule stays in use. Requests that are admitted while
    ``paused`` is True are left out.
    """

    def __init__(
        self, factory: ReplannerFactory, phases: Phases, apply: Apply, clock: Clock, *, plan_s: float = 300.0
    ) -> None:
        self._phases, self._apply, self._clock = phases, apply, clock
        self._factory, self._plan_s = frame(pickle.dumps(factory)), plan_s
        self._order = ArrivalOrder()
        self._waiting: list[Lengths] = []
        self._has_waiting, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._started_s, self.paused, self.state = clock(), False, ReplanningState()
        self.events: list[tuple[float, ReplanEvent]] = []  # (time, event), oldest first

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def wait_observed(self) -> None:
        """Wait until the replanner has observed all lengths so far, or has failed."""
        await self._idle.wait()

    def on_admission(self, request: Request) -> None:
        """Add a request, unless paused."""
        if self.state.up and not self.paused:
            self._order.on_arrival(request.id)

    def on_end(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:  # noqa: ARG002
        """Pass the lengths of finished requests to the replanner, in order of arrival."""
        if not self.state.up:
            return
        counts = outcome is Outcome.FINISHED and request.choices == 1 and request.generated_tokens > 0
        lengths = (max(1, request.prompt_tokens), request.generated_tokens) if counts else None
        self._waiting += self._order.on_end(request.id, lengths, max(0.0, now_s - self._started_s))
        if self._waiting:
            self._idle.clear()
            self._has_waiting.set()

    async def _run(self) -> None:
        try:
            async with _start_replanner(self._factory) as (process, hello):
                state = self.state
                state.false_positive_rate = float(hello["false_positive_rate"])
                while True:
                    await self._has_waiting.wait()
                    lengths, self._waiting = self._waiting[:_MAX_LENGTHS], self._waiting[_MAX_LENGTHS:]
                    answer = await _exchange(process, frame(pickle.dumps(lengths)), self._plan_s)
                    state.evidence = answer["evidence"]
                    state.observed += len(lengths)
                    for event in answer["events"]:
                        await self._apply_event(event)
                    if not self._waiting:
                        self._has_waiting.clear()
                        self._idle.set()
        except Exception as error:  # noqa: BLE001 - requests are served whatever happens to replanning
            message = str(error) if isinstance(error, LengthwiseError) else f"{type(error).__name__}: {error}"
            self.state.up, self.state.error = False, message or type(error).__name__
            self.state.failed += 1
            message = f"lengths are no longer observed, the schedule stays as it is: {self.state.error}"
            self._record(ReplanEvent((message,), failed=True))
            self._waiting, self._order = [], ArrivalOrder()
            self._idle.set()
            _log.error("%s", message)

    async def _apply_event(self, event: ReplanEvent) -> None:
        before, phases = self._phases, event.phases
        if phases is not None and phases != before:
            await self._apply(phases)
            self._phases = phases
        now = self._phases
        changed = (before.prefill_batch, before.decode_steps) != (now.prefill_batch, now.decode_steps)
        self.state.failed += event.failed
        self.state.changed += changed
        self.state.unchanged += not (changed or event.failed)
        self.state.schedule = event.schedule or self.state.schedule
        self._record(event)
        for description in event.message:
            _log.log(logging.WARNING if event.failed else logging.INFO, "%s", description)

    def _record(self, event: ReplanEvent) -> None:
        self.state.last, self.state.last_s = event.message, self._clock()
        self.events.append((self.state.last_s, event))
