"""What the lines of a run share, and how a task's lease ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np

from lengthwise.apps.launch.engine import Ask, Draft, Engine
from lengthwise.apps.launch.simulated import VirtualLoop
from lengthwise.apps.ledger.contracts import Ending, Lease, Ledger, Output, State
from lengthwise.apps.run.job import Job, Layout
from lengthwise.schema.app import ModelPlan, Replica


@dataclass(eq=False, slots=True)
class LeasedTask:
    """A leased task.

    Attributes:
        lease: Of it.
        key: Of its answer.
        request: What is asked.
        draft: The answer so far.
        twins: Leases of tasks that ask the very same: they take its answer.
        asking: The request that is under way.
        saved: How many tokens of the draft are kept.
    """

    lease: Lease
    key: str
    request: Ask
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
class ReplicaSlot:
    """The GPUs of one replica, and its engine where one is ready.

    Attributes:
        plan: The replica's.
        gpus: Where.
        engine: That runs there; None while it starts.
        active: What it works on, by place.
        failures: Answers in a row that were no good.
        startup: The start that is under way.
        since_s: When it began, on the loop's clock.
        starts: How often an engine was started there.
        received_s: When something was heard of the engine last, on the loop's clock.
        said: Tokens that it had written by then of what it works on.
        inquiry: The question whether it died.
        mending: Its end, before it is started anew.
    """

    plan: ModelPlan
    gpus: Replica
    engine: Engine | None = None
    active: dict[int, LeasedTask] = field(default_factory=dict)
    failures: int = 0
    startup: asyncio.Task[None] | None = None
    since_s: float = 0.0
    starts: int = 0
    received_s: float = 0.0
    message: int = 0
    inquiry: asyncio.Task[None] | None = None
    mending: asyncio.Task[None] | None = None

    def take(self, work: LeasedTask, now_s: float) -> None:
        """It works on it from now on; what did not answer before is not heard for that."""
        if not self.active and not self.failures:
            self.received_s = now_s
        self.active[work.place] = work

    def received(self, now_s: float) -> float:
        """When something was heard of its engine last: now, where it has nothing to say or has said more."""
        said = sum(work.draft.tokens - work.draft.retained for work in self.active.values())
        if said > self.message:
            self.received_s = now_s
        self.message = said
        return self.received_s if self.active else now_s

    @property
    def max_num_seqs(self) -> int:
        """Requests at once; a few wait in the engine, so that a seat that gets free is taken at once."""
        return 0 if self.engine is None else self.engine.max_num_seqs + max(1, self.engine.max_num_seqs // 16)


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


class Suspects:
    """When an engine dies, each request that it worked on may be why.

    After each death they run in groups of a quarter, so that whoever kills engines is soon alone, and takes nobody
    along for long; whoever is answered is suspect no more.
    """

    def __init__(self) -> None:
        self._deaths: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._deaths)

    def __contains__(self, place: int) -> bool:
        return place in self._deaths

    def additional(self, place: int, max_num_seqs: int) -> int:
        """How many may run at once with this one among them."""
        return max(1, max_num_seqs >> 2 * self._deaths.get(place, 0))

    def may_join(self, place: int, others: Iterable[int], max_num_seqs: int) -> bool:
        """Whether one may run beside others on an engine."""
        there = list(others)
        return len(there) < min(self.additional(one, max_num_seqs) for one in (place, *there))

    def died(self, places: Iterable[int]) -> None:
        """All of them were on an engine that died."""
        for place in places:
            self._deaths[place] = self._deaths.get(place, 0) + 1

    def cleared(self, place: int) -> None:
        """It was answered, or has ended."""
        self._deaths.pop(place, None)


Result = TypeVar("Result")
GROUP_S = 0.004
"""Endings on which others wait are written with those that come within so long."""
_MOST = 2_000


async def _additional(work: Callable[[], Result]) -> Result:
    """What work returns in a thread that nobody joins."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if error is not None and not found.done():
            found.set_exception(error)
        elif not found.done():
            found.set_result(cast("Result", result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:  # noqa: BLE001 - whoever waits for it is told
            error = caught
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="additional", daemon=True).start()
    return await found


class LedgerWriter:
    """One thread writes, so that what was asked first is done first.

    Args:
        ledger: Open.
        layout: Of its tasks.
        linger_s: How long an ending on which nothing hangs may wait for others.
        on_release: Told the models that may have something to do.
    """

    def __init__(
        self, ledger: Ledger, layout: Layout, linger_s: float, on_release: Callable[[Sequence[int]], None]
    ) -> None:
        self.ledger, self._linger_s, self._on_release = ledger, linger_s, on_release
        self._start, self._child = layout.tasks.children
        self._model = layout.tasks.model
        self._queue: list[Ending] = []
        self._urgent, self._some = asyncio.Event(), asyncio.Event()
        self._writing = asyncio.Lock()
        virtual = isinstance(asyncio.get_running_loop(), VirtualLoop)
        self._thread = None if virtual else ThreadPoolExecutor(1, "ledger")

    async def call(self, work: Callable[[], Result]) -> Result:
        """What the work with the ledger returns."""
        if self._thread is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def additional(self, work: Callable[[], Result]) -> Result:
        """What long work returns that has nothing to do with the ledger, which is written meanwhile.

        A process that ends does not wait for it.
        """
        return work() if self._thread is None else await _additional(work)

    def end(self, ending: Ending) -> None:
        """Will be settled soon."""
        self._queue.append(ending)
        self._some.set()
        first, last = self._start[ending.task], self._start[ending.task + 1]
        if last > first or ending.state != State.DONE or len(self._queue) >= _MOST:
            self._urgent.set()

    @property
    def is_clear(self) -> bool:
        """Whether all endings are written."""
        return not self._queue and not self._writing.locked()

    async def keep(self) -> None:
        """Settles for ever; cancelled, it leaves nothing half done."""
        while True:
            await self._some.wait()
            try:
                async with asyncio.timeout(self._linger_s):
                    await self._urgent.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(GROUP_S)
            await asyncio.shield(self.flush())

    async def flush(self) -> None:
        """Settles all that there is."""
        async with self._writing:
            while self._queue:
                batch, self._queue = self._queue[:_MOST], self._queue[_MOST:]
                await self.call(lambda batch=batch: self.ledger.finalize(batch))  # type: ignore[misc]
                self._on_release(self._woken(batch))
            self._some.clear()
            self._urgent.clear()

    def _woken(self, batch: Sequence[Ending]) -> list[int]:
        """Models of tasks that were ended, and of those that waited for them."""
        models = {int(self._model[one.task]) for one in batch if one.state == State.READY}
        for one in batch:
            first, last = self._start[one.task], self._start[one.task + 1]
            if last > first:
                models.update(np.unique(self._model[self._child[first:last]]).tolist())
        return sorted(models)

    def close(self) -> None:
        """Ends the thread; the ledger stays open."""
        if self._thread is not None:
            self._thread.shutdown()


@dataclass
class Shared:
    """What all lines share.

    Attributes:
        job: The run.
        books: The ledger.
        now_s: The clock of leases.
        idle: Told when a line has nothing left that it could do.
        down: Told when an engine is to be started anew, and whether it died.
        failed: Told an error that no line can mend.
        suspects: Who may have killed engines.
        asking: Who is under way, by key.
        tries: How often an engine had no room for a task, by place.
        shunned: The engine whose answer was no good, by place.
        retained: Tokens of answers that were cut off, by place.
    """

    job: Job
    books: LedgerWriter
    now_s: Callable[[], float]
    idle: Callable[[], None]
    down: Callable[[ReplicaSlot, bool], None]
    failed: Callable[[BaseException], None]
    suspects: Suspects = field(default_factory=Suspects)
    asking: dict[str, LeasedTask] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    shunned: dict[int, ReplicaSlot] = field(default_factory=dict)
    retained: dict[int, int] = field(default_factory=dict)


class Verdicts:
    """Ends leases: of a task and of those that ask the very same.

    Args:
        shared: Of the run.
        wakeup: Called when a task that was to wait may be leased again.
    """

    def __init__(self, shared: Shared, wakeup: Callable[[], None]) -> None:
        self._shared, self._stir = shared, wakeup

    def succeeded(self, work: LeasedTask, output: Output) -> None:
        """It has its answer."""
        self._discard(work)
        for lease in (work.lease, *work.twins):
            self._shared.books.end(done(lease, work.key, output))

    def dead(self, work: LeasedTask, error: str) -> None:
        """It is left alone."""
        self._discard(work)
        for lease in (work.lease, *work.twins):
            self._shared.books.end(dead(lease, error))

    def attempted(self, work: LeasedTask, error: str, slot: ReplicaSlot) -> None:
        """It was tried in vain: again after a while, elsewhere where there is an elsewhere, or never again."""
        job, shared = self._shared.job, self._shared
        if work.lease.attempt >= job.settings.max_attempts:
            self.dead(work, f"tried {work.lease.attempt} times; at last: {error}")
            return
        shared.shunned[work.place] = slot
        at_s = shared.now_s() + job.backoff_s(work.place, work.lease.attempt)
        self.release(work, error, not_before_s=at_s, counts=True)

    def has_no_room(self, work: LeasedTask, error: str, slot: ReplicaSlot, after_s: float = 0.0) -> None:
        """The engine was full: again after a while, not before it wants to be asked; so often it is an attempt.

        What it wants is heard up to the longest time between attempts: an engine must not hold up a run for ever.
        """
        tries = self._shared.tries[work.place] = self._shared.tries.get(work.place, 0) + 1
        if tries % BUSY_TRIES == 0:
            self.attempted(work, error, slot)
        else:
            job = self._shared.job
            wait_s = max(job.backoff_s(work.place, tries), min(after_s, job.settings.max_backoff_s))
            at_s = self._shared.now_s() + wait_s
            self.release(work, error, not_before_s=at_s)

    def release(self, work: LeasedTask, error: str | None, *, not_before_s: float = 0.0, counts: bool = False) -> None:
        """Others may lease it, from a moment on."""
        self._shared.asking.pop(work.key, None)
        end = self._shared.books.end
        end(again(work.lease, error, not_before_s=not_before_s, counts=counts))
        for lease in work.twins:
            end(again(lease, None, not_before_s=not_before_s))
        if not_before_s > 0.0:
            wait_s = max(0.0, not_before_s - self._shared.now_s()) + 0.01
            asyncio.get_running_loop().call_later(wait_s, self._stir)

    def _discard(self, work: LeasedTask) -> None:
        shared = self._shared
        shared.asking.pop(work.key, None)
        shared.suspects.cleared(work.place)
        shared.tries.pop(work.place, None)
        shared.shunned.pop(work.place, None)
        shared.retained.pop(work.place, None)


BUSY_TRIES = 20
"""An engine that is full for ever must not hold up a run for ever."""
