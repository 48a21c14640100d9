"""Tells a follower of requests, in the order of arrival, and keeps the schedule that it makes of them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from lengthwise.gateway.clock import Clock
from lengthwise.gateway.follow._in_order import InOrder
from lengthwise.gateway.follow._process import Process
from lengthwise.gateway.follow.told import Followed, Lengths, Make, News
from lengthwise.gateway.listener import Listener
from lengthwise.gateway.phasing import Phases
from lengthwise.gateway.request import Outcome, Request
from lengthwise.schema.errors import LengthwiseError

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


class Following(Listener):
    """An async context manager: while it is entered, the schedule follows the lengths of requests.

    They are told in the order of arrival, each once all that came before it have ended: told as they end, the first
    would be the short ones. A very long request holds back all that came behind it.

    Whatever happens to the follower, requests are served by the schedule that was kept last.

    Args:
        make: Makes the follower, in a process of its own.
        phases: The schedule that is kept first.
        keep: Has another schedule kept from each engine's next phase on.
        clock: The gateway's.
        care: How the process is treated.

    Attributes:
        told: All news so far with when they came, oldest first.
        paused: Whether who arrives now is left out: a probe, not traffic.
    """

    def __init__(
        self,
        make: Make,
        phases: Phases,
        keep: Callable[[Phases], Awaitable[None]],
        clock: Clock,
        care: Care = Care(),
    ) -> None:
        self._make, self._phases, self._keep, self._clock, self._care = make, phases, keep, clock, care
        self._order = InOrder()
        self._waiting: list[Lengths] = []
        self._something, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._trouble, self._schedule = "", ""
        self._observed, self._evidence, self._false_alarms = 0, 1.0, math.nan
        self._changed = self._left = self._failed = 0
        self._began_s, self.paused = clock(), False
        self.told: list[tuple[float, News]] = []

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

    async def settled(self) -> None:
        """Returns when all that ended so far has been looked at, or nobody looks."""
        await self._idle.wait()

    @property
    def state(self) -> Followed:
        """How lengths are followed now."""
        last_s, last = self.told[-1] if self.told else (math.nan, News(()))
        return Followed(
            up=not self._trouble,
            trouble=self._trouble,
            observed=self._observed,
            evidence=self._evidence,
            false_alarms=self._false_alarms,
            schedule=self._schedule,
            changed=self._changed,
            left=self._left,
            failed=self._failed,
            last=last.said,
            last_s=last_s,
        )

    # Of requests:

    def arrived(self, request: Request) -> None:  # noqa: D102 - as Listener
        if not (self._trouble or self.paused):
            self._order.arrived(request.id)

    def ended(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:  # noqa: D102
        del detail
        if self._trouble:
            return
        counts = outcome is Outcome.FINISHED and request.choices == 1 and request.generated_tokens > 0
        lengths = (max(1, request.prompt_tokens), request.generated_tokens) if counts else None
        self._waiting += self._order.ended(request.id, lengths, max(0.0, now_s - self._began_s))
        if self._waiting:
            self._idle.clear()
            self._something.set()

    # Within:

    async def _live(self) -> None:
        try:
            async with Process(self._make, self._care.start_s, self._care.plan_s) as process:
                self._false_alarms = process.false_alarms
                while True:
                    await self._something.wait()
                    await self._tell(process)
        except Exception as error:  # noqa: BLE001 - requests are served whatever becomes of the watch
            self._gone(error)

    async def _tell(self, process: Process) -> None:
        lengths, self._waiting = self._waiting[:_MOST_TOLD], self._waiting[_MOST_TOLD:]
        news, self._evidence = await process.observe(lengths)
        self._observed += len(lengths)
        for one in news:
            await self._heard(one)
        if not self._waiting:
            self._something.clear()
            self._idle.set()

    async def _heard(self, news: News) -> None:
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
        self.told.append((self._clock(), news))
        for sentence in news.said:
            _log.log(logging.WARNING if news.failed else logging.INFO, "%s", sentence)

    def _gone(self, error: Exception) -> None:
        """Nobody watches any more."""
        what = str(error) if isinstance(error, LengthwiseError) else f"{type(error).__name__}: {error}"
        self._trouble = what or type(error).__name__
        self._failed += 1
        said = f"lengths are followed no more, the schedule stays as it is: {self._trouble}"
        self.told.append((self._clock(), News((said,), failed=True)))
        self._waiting, self._order = [], InOrder()
        self._idle.set()
        _log.error("%s", said)


__all__ = ["Care", "Following"]
