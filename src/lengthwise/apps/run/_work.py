"""A task on its way through the coordinator, and the engine that it is on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from lengthwise.apps.launch.contracts import Ask, Draft, Engine
from lengthwise.apps.ledger.contracts import Ending, Lease, Output, State
from lengthwise.schema.app import ModelPlan, Replica


@dataclass(eq=False, slots=True)
class Work:
    """A leased task.

    Attributes:
        lease: Of it.
        key: Of its answer.
        ask: What is asked.
        draft: The answer so far.
        twins: Leases of tasks that ask the very same: they take its answer.
        asking: The request that is under way.
        saved: How many tokens of the draft are kept.
    """

    lease: Lease
    key: str
    ask: Ask
    draft: Draft
    twins: list[Lease] = field(default_factory=list)
    asking: asyncio.Task[Output] | None = None
    saved: int = 0

    @property
    def place(self) -> int:
        """In the ledger."""
        return self.lease.task

    @property
    def is_answered(self) -> bool:
        """Whether its answer has come, and is on its way into the ledger."""
        asking = self.asking
        return asking is not None and asking.done() and not asking.cancelled() and asking.exception() is None


@dataclass(eq=False)
class Berth:
    """The GPUs of one replica, and its engine where one is ready.

    Attributes:
        plan: The replica's.
        gpus: Where.
        engine: That runs there; None while it starts.
        going: What it works on, by place.
        failures: Answers in a row that were no good.
        opening: The start that is under way.
        since_s: When it began, on the loop's clock.
        starts: How often an engine was started there.
        heard_s: When something was heard of the engine last, on the loop's clock.
        said: Tokens that it had written by then of what it works on.
        inquiry: The question whether it died.
        mending: Its end, before it is started anew.
    """

    plan: ModelPlan
    gpus: Replica
    engine: Engine | None = None
    going: dict[int, Work] = field(default_factory=dict)
    failures: int = 0
    opening: asyncio.Task[None] | None = None
    since_s: float = 0.0
    starts: int = 0
    heard_s: float = 0.0
    said: int = 0
    inquiry: asyncio.Task[None] | None = None
    mending: asyncio.Task[None] | None = None

    def take(self, work: Work, now_s: float) -> None:
        """It works on it from now on; what did not answer before is not heard for that."""
        if not self.going and not self.failures:
            self.heard_s = now_s
        self.going[work.place] = work

    def heard(self, now_s: float) -> float:
        """When something was heard of its engine last: now, where it has nothing to say or has said more."""
        said = sum(work.draft.tokens - work.draft.kept for work in self.going.values())
        if said > self.said:
            self.heard_s = now_s
        self.said = said
        return self.heard_s if self.going else now_s

    @property
    def seats(self) -> int:
        """Requests at once; a few wait in the engine, so that a seat that gets free is taken at once."""
        return 0 if self.engine is None else self.engine.seats + max(1, self.engine.seats // 16)


def done(lease: Lease, key: str, output: Output) -> Ending:
    """It was answered."""
    return Ending(lease.task, lease.fence, State.DONE, key=key, output=output)


def dead(lease: Lease, error: str) -> Ending:
    """It is left alone."""
    return Ending(lease.task, lease.fence, State.DEAD, error=error)


def skipped(lease: Lease) -> Ending:
    """It asks nothing."""
    return Ending(lease.task, lease.fence, State.SKIPPED)


def again(lease: Lease, error: str | None, *, not_before_s: float = 0.0, counts: bool = False) -> Ending:
    """It is given back."""
    return Ending(lease.task, lease.fence, State.READY, error=error, not_before_s=not_before_s, counts=counts)
