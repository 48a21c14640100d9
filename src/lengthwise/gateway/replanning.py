"""The schedule follows the lengths of its own traffic: watched and planned anew beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import signal
import struct
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self

from lengthwise.gateway.child_process import close, reaped, spawned
from lengthwise.gateway.config import Phases
from lengthwise.gateway.protocols import Clock, Listener
from lengthwise.gateway.request import Outcome, Request
from lengthwise.schema.errors import LengthwiseError

Lengths = tuple[int, int, float]
"""(prompt tokens, output tokens, seconds since the watch began when it and all that came before it had ended)"""


@dataclass(frozen=True)
class ReplanEvent:
    """What came of lengths that moved.

    Attributes:
        message: In sentences.
        phases: The schedule to be kept from now on; None: it stays.
        schedule: What is kept then, in words; "" as before.
        failed: Whether it could not be planned anew.
        more: What its maker has to say besides; it can be pickled.
    """

    message: tuple[str, ...]
    phases: Phases | None = None
    schedule: str = ""
    failed: bool = False
    more: Any = None


class Follower(Protocol):
    """Watches lengths and plans anew when they moved; it lives in a process of its own, where it may take its time."""

    @property
    def evidence(self) -> float:
        """What speaks for a move now; news are due where it reaches ``1 / false_alarms``."""

    @property
    def false_positive_rate(self) -> float:
        """Probability of ever an alarm while lengths do not change."""

    def observe(self, prompt_tokens: int, output_tokens: int, at_s: float) -> ReplanEvent | None:
        """One more request, in the order of arrival; news if it makes them due."""


Make = Callable[[], Follower]
"""Makes the follower; it can be pickled."""


@dataclass(frozen=True)
class ReplanningState:
    """How lengths are followed now.

    Attributes:
        up: Whether somebody watches; before the watch has begun, too.
        trouble: Why nobody does; "" somebody does.
        observed: Requests told.
        evidence: As ``Follower.evidence`` was last.
        false_positive_rate: As the follower says; NaN until it has begun.
        schedule: What is kept, in words; "" what the gateway was told first.
        changed: How often B_E or N_D were changed.
        left: How often the schedule was left as it was.
        failed: How often it could not be planned anew.
        last: What was said last; () nothing.
        last_s: When, on the gateway's clock; NaN never.
    """

    up: bool
    trouble: str
    observed: int
    evidence: float
    false_positive_rate: float
    schedule: str
    changed: int
    left: int
    failed: int
    last: tuple[str, ...]
    last_s: float


class InOrder:
    """Told as they end, the first are the short ones; in the order of arrival they are a fair sample at any time."""

    def __init__(self) -> None:
        self._arrivals: deque[int] = deque()
        self._in: set[int] = set()
        self._over: dict[int, tuple[int, int] | None] = {}

    def on_arrival(self, request_id: int) -> None:
        """It is in."""
        self._arrivals.append(request_id)
        self._in.add(request_id)

    def finished(self, request_id: int, lengths: tuple[int, int] | None, now_s: float) -> list[Lengths]:
        """It is over; what is known now that was not before. None: it says nothing of lengths."""
        if request_id not in self._in:
            return []
        self._in.remove(request_id)
        self._over[request_id] = lengths
        known: list[Lengths] = []
        while self._arrivals and self._arrivals[0] in self._over:
            pair = self._over.pop(self._arrivals.popleft())
            if pair is not None:
                known.append((*pair, now_s))
        return known


LENGTH = struct.Struct("<I")


def main() -> None:
    """Answers until its input ends. What it prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked = sys.stdin.buffer
    first = _read(asked)
    if first is None:
        return
    try:
        follower: Follower = pickle.loads(first)()  # noqa: S301 - the parent's own words
    except Exception as error:  # noqa: BLE001 - the parent is told, whatever it is
        _write(answers, {"refused": f"{type(error).__name__}: {error}"})
        return
    _write(answers, {"refused": "", "false_positive_rate": follower.false_positive_rate})
    while (payload := _read(asked)) is not None:
        _write(answers, _answer(follower, pickle.loads(payload)))  # noqa: S301


def framed(what: Any) -> bytes:
    """It as a message, its length before it."""
    payload = pickle.dumps(what)
    return LENGTH.pack(len(payload)) + payload


def _answer(follower: Follower, lengths: list[Lengths]) -> dict[str, Any]:
    """News by the place of the request that made them due, and the evidence after all."""
    news: list[ReplanEvent] = []
    for prompt_tokens, output_tokens, at_s in lengths:
        try:
            told = follower.observe(prompt_tokens, output_tokens, at_s)
        except Exception as error:  # noqa: BLE001 - what runs goes on
            why = f"planning anew failed, the schedule stays as it is: {type(error).__name__}: {error}"
            told = ReplanEvent((why,), failed=True)
        if told is not None:
            news.append(told)
    return {"news": news, "evidence": float(follower.evidence)}


def _read(file: BinaryIO) -> bytes | None:
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return file.read(LENGTH.unpack(head)[0])


def _write(file: BinaryIO, what: dict[str, Any]) -> None:
    file.write(framed(what))
    file.flush()


_END_S = 5.0


class Process:
    """A follower that is asked; entered it has begun, left it has ended.

    Args:
        make: Makes the follower there.
        start_s: It must have begun within this.
        plan_s: An answer must be there within this.

    Attributes:
        false_positive_rate: As the follower says.
    """

    def __init__(self, make: Make, start_s: float, plan_s: float) -> None:
        self._load = pickle.dumps(make)
        self._start_s, self._plan_s = start_s, plan_s
        self._process: asyncio.subprocess.Process | None = None
        self.false_positive_rate = float("nan")

    async def __aenter__(self) -> Self:
        """Begins; raises LengthwiseError where the follower cannot be had."""
        try:
            self._process = await spawned(__name__)
            hello = await self._report(LENGTH.pack(len(self._load)) + self._load, self._start_s)
            self.false_positive_rate = _greeted(hello)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends it, whatever it does."""
        await self._end()

    async def observe(self, lengths: Sequence[Lengths]) -> tuple[list[ReplanEvent], float]:
        """News that these made due, and the evidence after them.

        Raises:
            LengthwiseError: It has ended, or takes too long.
        """
        told = await self._report(framed(list(lengths)), self._plan_s)
        return told["news"], told["evidence"]

    async def _report(self, message: bytes, within_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                process.stdin.write(message)
                await process.stdin.drain()
                size = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))[0]
                told: dict[str, Any] = pickle.loads(await process.stdout.readexactly(size))  # noqa: S301
        except TimeoutError:
            raise LengthwiseError(f"it did not answer within {within_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise LengthwiseError(await _fate(process, min(_END_S, within_s))) from error
        return told

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        close(process)
        await reaped(process, _END_S)


async def _fate(process: asyncio.subprocess.Process, within_s: float) -> str:
    """What became of a process that closed its end, in words."""
    try:
        async with asyncio.timeout(within_s):
            return f"its process ended with {await process.wait()}"
    except TimeoutError:
        return "its process answers no more, although it lives"


def _greeted(hello: dict[str, Any]) -> float:
    """The false-alarm rate of a follower that is there."""
    if hello["refused"]:
        raise LengthwiseError(hello["refused"])
    return float(hello["false_positive_rate"])


_log = logging.getLogger("lengthwise.gateway")
_MOST_TOLD = 512


@dataclass(frozen=True)
class Care:
    """How the follower's process is treated.

    Attributes:
        start_s: It must have begun within this.
        plan_s: What it is told must be answered within this, planning included.
    """

    start_s: float = 120.0
    plan_s: float = 300.0


class PlanTracker(Listener):
    """An async context manager: while it is entered, the schedule follows the lengths of requests.

    They are told in the order of arrival, each once all that came before it have ended: told as they end, the first
    would be the short ones. A very long request holds back all that came behind it.

    Whatever happens to the follower, requests are served by the schedule that was kept last.

    Args:
        make: Makes the follower, in a process of its own.
        phases: The schedule that is kept first.
        keep: Has another schedule kept from each engine's next phase on.
        clock: The gateway's.
        resilience: How the process is treated.

    Attributes:
        report: All news so far with when they came, oldest first.
        paused: Whether who arrives now is left out: a probe, not traffic.
    """

    def __init__(
        self,
        make: Make,
        phases: Phases,
        keep: Callable[[Phases], Awaitable[None]],
        clock: Clock,
        resilience: Care = Care(),
    ) -> None:
        self._make, self._phases, self._keep, self._clock, self._care = make, phases, keep, clock, resilience
        self._order = InOrder()
        self._waiting: list[Lengths] = []
        self._something, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._trouble, self._schedule = "", ""
        self._observed, self._evidence, self._false_alarms = 0, 1.0, math.nan
        self._changed = self._left = self._failed = 0
        self._began_s, self.paused = clock(), False
        self.report: list[tuple[float, ReplanEvent]] = []

    async def __aenter__(self) -> Self:
        """Begins; who ends until the follower is there is told to it then."""
        self._task = asyncio.ensure_future(self._live())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the watch, a plan under way included."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def stable(self) -> None:
        """Returns when all that ended so far has been looked at, or nobody looks."""
        await self._idle.wait()

    @property
    def state(self) -> ReplanningState:
        """How lengths are followed now."""
        last_s, last = self.report[-1] if self.report else (math.nan, ReplanEvent(()))
        return ReplanningState(
            up=not self._trouble,
            trouble=self._trouble,
            observed=self._observed,
            evidence=self._evidence,
            false_positive_rate=self._false_alarms,
            schedule=self._schedule,
            changed=self._changed,
            left=self._left,
            failed=self._failed,
            last=last.message,
            last_s=last_s,
        )

    # Of requests:

    def on_arrival(self, request: Request) -> None:  # noqa: D102 - as Listener
        if not (self._trouble or self.paused):
            self._order.on_arrival(request.id)

    def finished(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:  # noqa: D102
        del detail
        if self._trouble:
            return
        counts = outcome is Outcome.FINISHED and request.choices == 1 and request.generated_tokens > 0
        lengths = (max(1, request.prompt_tokens), request.generated_tokens) if counts else None
        self._waiting += self._order.finished(request.id, lengths, max(0.0, now_s - self._began_s))
        if self._waiting:
            self._idle.clear()
            self._something.set()

    # Within:

    async def _live(self) -> None:
        try:
            async with Process(self._make, self._care.start_s, self._care.plan_s) as process:
                self._false_alarms = process.false_positive_rate
                while True:
                    await self._something.wait()
                    await self._tell(process)
        except Exception as error:  # noqa: BLE001 - requests are served whatever becomes of the watch
            self._lost(error)

    async def _tell(self, process: Process) -> None:
        lengths, self._waiting = self._waiting[:_MOST_TOLD], self._waiting[_MOST_TOLD:]
        news, self._evidence = await process.observe(lengths)
        self._observed += len(lengths)
        for one in news:
            await self._received(one)
        if not self._waiting:
            self._something.clear()
            self._idle.set()

    async def _received(self, news: ReplanEvent) -> None:
        before, phases = self._phases, news.phases
        if phases is not None and phases != before:
            await self._keep(phases)
            self._phases = phases
        now = self._phases
        moved = (before.encode_batch, before.decode_steps) != (now.encode_batch, now.decode_steps)
        self._failed += news.failed
        self._changed += moved
        self._left += not (moved or news.failed)
        self._schedule = news.schedule or self._schedule
        self.report.append((self._clock(), news))
        for description in news.message:
            _log.log(logging.WARNING if news.failed else logging.INFO, "%s", description)

    def _lost(self, error: Exception) -> None:
        """Nobody watches any more."""
        what = str(error) if isinstance(error, LengthwiseError) else f"{type(error).__name__}: {error}"
        self._trouble = what or type(error).__name__
        self._failed += 1
        said = f"lengths are followed no more, the schedule stays as it is: {self._trouble}"
        self.report.append((self._clock(), ReplanEvent((said,), failed=True)))
        self._waiting, self._order = [], InOrder()
        self._idle.set()
        _log.error("%s", said)
