"""The coordinator: leases, asks and records, follows the plan, and ends when all has ended."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence

from lengthwise.apps.launch.engine import Launcher
from lengthwise.apps.launch.simulated import run_virtually
from lengthwise.apps.ledger.contracts import Ledger, State
from lengthwise.apps.run import job as owners
from lengthwise.apps.run.dispatch import ModelDispatcher, Reused, cut, sweep, there, written
from lengthwise.apps.run.fleet import Fleet, silent
from lengthwise.apps.run.job import Job, Plans
from lengthwise.apps.run.plan_tracking import PlanMonitor, PlanTracker, Status, standing
from lengthwise.apps.run.progress import (
    SHAPE,
    Clock,
    EnginesFailedError,
    Event,
    Progress,
    RunResult,
    engines_of,
    shape_of,
    snapshot,
    worked,
)
from lengthwise.apps.run.task_state import LedgerWriter, ReplicaSlot, Shared
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.errors import EngineError

_TICK_S = 0.5
CANCEL = "cancel"
"""The fact by which another process asks a run to stop."""


class Coordinator:
    """One run of a job; ``run`` is called once.

    Args:
        job: What to run.
        ledger: Where answers are kept; stays open.
        launcher: Makes engines be there.
        now_s: Wall-clock seconds (UTC), of leases.
        monitor: Shown how far it is, once in a while.
        watch_s: How often.
        started: Told what is kept of a run that is gone on with, or of one before the application changed, before
            engines start.
    """

    def __init__(
        self,
        job: Job,
        ledger: Ledger,
        launcher: Launcher,
        *,
        now_s: Callable[[], float],
        monitor: Callable[[Progress], None] | None = None,
        watch_s: float = 0.5,
        started: Callable[[Reused], None] | None = None,
    ) -> None:
        self._job, self._ledger, self._launcher, self._now_s = job, ledger, launcher, now_s
        self._monitor, self._watch_s, self._started = monitor, watch_s, started
        self._wakeup = asyncio.Event()
        self._how: str | None = None
        self._hurries = False
        self._error: BaseException | None = None
        self._events: list[Event] = []
        self._engines: dict[int, set[str]] = {}
        self._deaths: dict[int, tuple[int, int]] = {}
        self._running: Plans = ()

    def stop(self, how: str = "stopped") -> None:
        """Asks the run to end: what is under way is cut and kept. Asked twice, it ends at once."""
        if self._how is not None:
            self._hurries = True
            self._launcher.hurry()
        self._how = self._how or how
        self._wakeup.set()

    async def run(self) -> RunResult:
        """How it ended.

        Raises:
            OutputError: The ledger cannot be written; what was recorded stays.
            EnginesFailedError: A model's engines do not start, or die again and again.
        """
        loop, job = asyncio.get_running_loop(), self._job
        resumed, reused, failed = False, None, None
        self._start_s = loop.time()
        self._clock = Clock(self._start_s)
        self._books = books = LedgerWriter(self._ledger, job.layout, job.settings.linger_s, self._on_release)
        shared = Shared(job, books, self._now_s, self._wakeup.set, self._down, self._failed)
        self._lines = [ModelDispatcher(model, shared) for model in range(len(job.layout.tasks.models))]
        self._fleet = Fleet(self._launcher, self._lines, self._failed, self._report)
        tasks: list[asyncio.Task[None]] = []
        self._poll_task = PlanMonitor(
            job, books, lambda: written(shared, self._lines), lambda: self._fleet.placement, self._looked
        )
        try:
            resumed = await books.call(lambda: owners.enter(self._ledger, job, self._now_s()))
            await books.call(lambda: self._ledger.note({SHAPE: shape_of(job.layout)}))
            reused = None if resumed else await sweep(books, job, self._now_s)
            kept = await there(books, job) if resumed else reused
            if self._started is not None and kept is not None:
                self._started(kept)
            self._clock.before = worked(job, self._by_model(await books.call(self._ledger.counts)))
            for work in (books.keep(), self._beat(), self._save(), self._poll()):
                tasks.append(loop.create_task(work))
                tasks[-1].add_done_callback(self._broke)
            await self._follow(PlanTracker(job), tasks)
        except EngineError as error:
            failed = error
        finally:
            seconds = loop.time() - self._start_s
            unheard = silent(self._fleet.slots, job.placer, self._start_s, loop.time())
            await self._end(tasks)
        counts = self._by_model(self._ledger.counts())
        engines = {model: tuple(sorted(abouts)) for model, abouts in sorted(self._engines.items())}
        how, events = "failed" if failed else self._how or "done", tuple(self._events)
        why = "" if failed is None else str(failed)
        ended = RunResult(how, counts, seconds, resumed, reused, engines, events, unheard, why)
        if failed is not None:
            raise EnginesFailedError(ended) from failed
        return ended

    async def _follow(self, tracker: PlanTracker, tasks: list[asyncio.Task[None]]) -> None:
        self._tracker = tracker
        if (seeking := self._poll_task.seek(tracker, self._at_s)) is not None:
            tasks.append(seeking)
            seeking.add_done_callback(self._broke)
        while self._how is None:
            self._wakeup.clear()
            now = await self._standing()
            if now.is_over:
                return
            plans = tracker.step(now)
            if plans is not None:
                running, in_sleep = self._running, self._fleet.in_sleep(plans)
                place = self._job.placer.place(plans, self._fleet.placement, running, in_sleep)
                await self._fleet.go(plans, place)
                self._running = plans
            if (looking := self._poll_task.check(tracker, now, self._at_s())) is not None:
                tasks.append(looking)
                looking.add_done_callback(self._broke)
            await self._pause(now)
            if self._error is not None:
                raise self._error

    async def _pause(self, now: Status) -> None:
        """Until something happens; once in a while it is asked again for what may be leased only after a time."""
        try:
            async with asyncio.timeout(_TICK_S):
                await self._wakeup.wait()
        except TimeoutError:
            for line in self._lines:
                if line.slots and line.is_idle and now.capabilities[line.model]:
                    line.wakeup()

    async def _standing(self) -> Status:
        """After what is known here is written, where a line waits for it."""
        if any(line.slots and line.is_idle for line in self._lines):
            await self._books.flush()
        return standing(self._job.layout, await self._books.call(self._ledger.counts))

    def _at_s(self) -> float:
        return asyncio.get_running_loop().time() - self._start_s

    def _looked(self, what: str, description: str) -> None:
        self._events.append(Event(self._at_s(), what, -1, (), description))
        self._wakeup.set()

    def _by_model(self, counts: dict[tuple[int, State], int]) -> dict[tuple[int, int, State], int]:
        pairs = self._job.layout.pairs
        return {(*pairs[pair], state): tasks for (pair, state), tasks in counts.items()}

    def _on_release(self, models: Sequence[int]) -> None:
        for model in models:
            self._lines[model].wakeup()
        self._wakeup.set()

    def _failed(self, error: BaseException) -> None:
        self._error = self._error or error
        self._wakeup.set()

    def _broke(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _down(self, slot: ReplicaSlot, died: bool) -> None:
        """An engine is to be started anew."""
        line = self._lines[slot.plan.model]
        if died and slot.engine is not None:
            deaths, tokens = self._deaths.get(line.model, (0, -1))
            deaths = deaths + 1 if tokens == line.tokens else 1
            self._deaths[line.model] = (deaths, line.tokens)
            if deaths >= self._job.settings.max_engine_failures:
                name = self._job.layout.tasks.models[line.model]
                self._failed(
                    EngineError(
                        f"engines of {name} must live to answer; {deaths} died one after another without an answer. "
                        "See their logs, then run again with --resume"
                    )
                )
                return
        self._fleet.mend(slot, died=died)

    def _report(self, what: str, plan: ModelPlan, gpus: Replica, description: str) -> None:
        self._events.append(Event(self._at_s(), what, plan.model, gpus, description))
        if what == "ready":
            self._engines.setdefault(plan.model, set()).add(description)

    async def _beat(self) -> None:
        """Keeps leases, takes those that ran out, and hears whether the run is to stop."""
        lease_s, owner = self._job.settings.lease_s, self._job.owner
        ledger, told = self._ledger, ""
        while True:
            await asyncio.sleep(min(lease_s / 3, 2.0))
            now_s = self._now_s()
            await self._books.call(lambda now_s=now_s: ledger.heartbeat(owner, now_s=now_s, lease_s=lease_s))  # type: ignore[misc]
            if await self._books.call(lambda now_s=now_s: ledger.expire(now_s=now_s)):  # type: ignore[misc]
                self._on_release(list(range(len(self._lines))))
            engines = engines_of(self._job.layout.tasks.models, self._fleet.abouts())
            if engines != told:
                told = engines
                await self._books.call(lambda told=told: ledger.note({owners.ENGINES + owner: told}))  # type: ignore[misc]
            if CANCEL in await self._books.call(ledger.metadata):
                self.stop("cancelled")

    async def _save(self) -> None:
        while True:
            await asyncio.sleep(self._job.settings.save_s)
            for line in self._lines:
                await line.save()

    async def _poll(self) -> None:
        """Looks after engines that die while nobody asks them, and shows how far the run is."""
        while True:
            await asyncio.sleep(self._watch_s)
            for slot in self._fleet.slots:
                slot.received(asyncio.get_running_loop().time())
                if slot.engine is not None and not slot.engine.is_alive:
                    self._down(slot, True)
            if self._monitor is not None:
                self._monitor(await self.progress())

    async def progress(self) -> Progress:
        """How far it is."""
        counts = self._by_model(await self._books.call(self._ledger.counts))
        now_s = asyncio.get_running_loop().time()
        return snapshot(self._job, self._tracker, self._lines, self._fleet.slots, counts, self._clock, now_s)

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Nothing is left behind: what is under way is given back, engines are ended."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await cut([work for line in self._lines for slot in line.slots for work in slot.active.values()])
            for line in self._lines:
                await line.close(line.slots, keep=not self._hurries)
            await self._books.flush()
            await self._books.call(lambda: owners.leave(self._ledger, self._job.owner))
        finally:
            await self._fleet.close()
            self._books.close()


def run_simulated(
    job: Job,
    ledger: Ledger,
    launcher: Launcher,
    *,
    from_s: float = 0.0,
    monitor: Callable[[Progress], None] | None = None,
    watch_s: float = 60.0,
    started: Callable[[Reused], None] | None = None,
) -> RunResult:
    """How a run ends whose engines are simulated; its seconds are virtual.

    Args:
        job: What to run.
        ledger: Where answers are kept; its times are virtual too.
        launcher: Of simulated engines.
        from_s: The clock at the start: later than that of a run that is gone on with.
        monitor: Shown how far it is.
        watch_s: How often, in virtual seconds.
        started: Told what is kept of a run before, before engines start.
    """

    async def whole() -> RunResult:
        loop = asyncio.get_running_loop()
        return await Coordinator(
            job, ledger, launcher, now_s=lambda: from_s + loop.time(), monitor=monitor, watch_s=watch_s, started=started
        ).run()

    return run_virtually(whole())


RESUME = "What was answered is kept; go on with the same command and --resume"


def run_on_engines(
    job: Job,
    ledger: Ledger,
    launcher: Launcher,
    *,
    monitor: Callable[[Progress], None] | None = None,
    watch_s: float = 0.5,
    stopping: Callable[[int], None] | None = None,
    started: Callable[[Reused], None] | None = None,
) -> RunResult:
    """How a run ends on engines of the real world.

    Ctrl-C or SIGTERM once: nothing more is leased, what is under way is cut and kept, engines are ended. Twice:
    engines are killed; the ledger is whole either way.

    Args:
        job: What to run.
        ledger: Where answers are kept.
        launcher: Of engines.
        monitor: Shown how far it is.
        watch_s: How often.
        stopping: Told how often it was asked to stop.
        started: Told what is kept of a run before, before engines start.
    """

    async def whole() -> RunResult:
        one = Coordinator(job, ledger, launcher, now_s=time.time, monitor=monitor, watch_s=watch_s, started=started)
        asked = 0

        def stop() -> None:
            nonlocal asked
            asked += 1
            one.stop()
            if stopping is not None:
                stopping(asked)

        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, stop)
        try:
            return await one.run()
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    return asyncio.run(whole())
