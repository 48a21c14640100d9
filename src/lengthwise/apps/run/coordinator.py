"""The coordinator of a run, which follows the plan, supervises engines and leases, and ends with the last task."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from lengthwise.apps.launch.engine import Launcher
from lengthwise.apps.launch.simulated import run_virtually
from lengthwise.apps.ledger.contracts import State
from lengthwise.apps.ledger.table_ledger import Ledger
from lengthwise.apps.run.dispatch import ModelDispatcher, Reused, count_reused, interrupt, reuse_results, written_tokens
from lengthwise.apps.run.fleet import Fleet, silent_engines
from lengthwise.apps.run.job import ENGINES, OWNER, Job, Plans, join_run
from lengthwise.apps.run.plan_tracking import PlanTracker, Status
from lengthwise.apps.run.progress import (
    SHAPE,
    Clock,
    EnginesFailedError,
    Event,
    Progress,
    RunResult,
    encoded_engines,
    encoded_names,
    progress_of,
    work_done,
)
from lengthwise.apps.run.task_state import LedgerWriter, ReplicaSlot, SharedState, spawn
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.errors import EngineError

CANCEL = "cancel"  # name of the ledger's metadata by which another process stops a run
RESUME = "Recorded outputs remain; continue with the same command and --resume"
_TICK_S = 0.5


class Coordinator:
    """Runs a job: follows its plan, supervises the engines and renews the leases. ``run`` may be called once.

    While it runs, ``dispatchers`` has one per model, ``writer`` writes the ledger, and ``events`` are those so far.

    Args:
        now_s: Returns the wall clock (UTC) of leases, in seconds.
        monitor: Receives the progress every ``watch_s`` seconds, when the engines are checked.
        started: Receives the reused outputs before engines start, in a resumed run or after the application changed.
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
        self._forced = False
        self._error: BaseException | None = None
        self.events: list[Event] = []
        self._engines: dict[int, set[str]] = {}
        self._crashes: dict[int, tuple[int, int]] = {}
        self._running: Plans = ()
        self._tasks: list[asyncio.Task[None]] = []

    def stop(self, how: str = "stopped") -> None:
        """End the run: interrupt requests and save their tokens. A second call kills the engines and saves none."""
        if self._how is not None:
            self._forced = True
            self._launcher.force_stop()
        self._how = self._how or how
        self._wakeup.set()

    async def run(self) -> RunResult:
        """Run until all tasks have finished or the run is stopped. The ledger stays open.

        Raises:
            OutputError: The ledger cannot be written. Recorded outputs stay.
            EnginesFailedError: Engines of a model do not start, or die repeatedly.
        """
        loop, job = asyncio.get_running_loop(), self._job
        resumed, reused, failed = False, None, None
        self._start_s = loop.time()
        self._clock = Clock(self._start_s)
        self.writer = writer = LedgerWriter(self._ledger, job.layout, job.settings.linger_s, self._on_release)
        shared = SharedState(job, writer, self._now_s, self._wakeup.set, self._on_engine_failure, self._on_error)
        self.dispatchers = [ModelDispatcher(model, shared) for model in range(len(job.layout.tasks.models))]
        self._fleet = Fleet(self._launcher, self.dispatchers, self._on_error, self._on_switch)
        written, placement = lambda: written_tokens(shared, self.dispatchers), lambda: self._fleet.placement
        overdue = partial(self._fleet.is_overdue, job.placer)
        self._tracker = PlanTracker(job, writer, self._at_s, written, placement, overdue, self._on_replan)
        try:
            resumed = await writer.call(join_run, self._ledger, job, self._now_s())
            await writer.call(self._ledger.set_metadata, {SHAPE: encoded_names(job.layout)})
            reused = None if resumed else await reuse_results(writer, job, self._now_s)
            retained = await count_reused(writer, job) if resumed else reused
            if self._started is not None and retained is not None:
                self._started(retained)
            self._clock.before = work_done(job, self._by_model(await writer.call(self._ledger.counts)))
            for work in (writer.run(), self._renew_leases(), self._save_drafts(), self._supervise()):
                self._run_in_background(work)
            await self._follow_plan()
        except EngineError as error:
            failed = error
        finally:
            seconds = loop.time() - self._start_s
            unresponsive = silent_engines(self._fleet.slots, job.placer, self._start_s, loop.time())
            await self._close()
        result = RunResult(
            how="failed" if failed else self._how or "done",
            counts=self._by_model(self._ledger.counts()),
            seconds=seconds,
            resumed=resumed,
            reused=reused,
            engines={model: tuple(sorted(names)) for model, names in sorted(self._engines.items())},
            events=tuple(self.events),
            silent=unresponsive,
            error="" if failed is None else str(failed),
        )
        if failed is not None:
            raise EnginesFailedError(result) from failed
        return result

    async def _follow_plan(self) -> None:
        self._run_in_background(self._tracker.pending_search())
        while self._how is None:
            self._wakeup.clear()
            if any(one.slots and one.is_idle for one in self.dispatchers):
                await self.writer.flush()  # endings that are not recorded yet may unblock tasks of idle models
            status = Status.of(self._job.layout, await self.writer.call(self._ledger.counts))
            if status.is_finished:
                return
            plans = self._tracker.step(status)
            if plans is not None:
                sleeping = self._fleet.sleeping(plans)
                placement = self._job.placer.place(plans, self._fleet.placement, self._running, sleeping)
                await self._fleet.switch(plans, placement)
                self._running = plans
            self._run_in_background(self._tracker.due_search())
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._wakeup.wait()
            except TimeoutError:
                # Tasks become ready without an event when their backoff ends: try to lease.
                for one in self.dispatchers:
                    if one.slots and one.is_idle and status.available[one.model]:
                        one.wakeup()
            if self._error is not None:
                raise self._error

    def _run_in_background(self, work: Coroutine[Any, Any, None] | None) -> None:
        if work is not None:
            self._tasks.append(spawn(work, self._on_error))

    def _on_error(self, error: BaseException) -> None:
        self._error = self._error or error
        self._wakeup.set()

    def _on_replan(self, what: str, description: str) -> None:
        self.events.append(Event(self._at_s(), what, -1, (), description))
        self._wakeup.set()

    def _on_release(self, models: Sequence[int]) -> None:
        for model in models:
            self.dispatchers[model].wakeup()
        self._wakeup.set()

    def _on_switch(self, what: str, plan: ModelPlan, gpus: Replica, description: str) -> None:
        self.events.append(Event(self._at_s(), what, plan.model, gpus, description))
        if what == "ready":
            self._engines.setdefault(plan.model, set()).add(description)

    def _on_engine_failure(self, slot: ReplicaSlot, died: bool) -> None:
        """Restart an engine, or end the run if engines of its model have died too often without an answer."""
        model = slot.plan.model
        if died and slot.engine is not None:
            tokens = self.dispatchers[model].tokens
            crashes, tokens_before = self._crashes.get(model, (0, -1))
            crashes = crashes + 1 if tokens == tokens_before else 1
            self._crashes[model] = (crashes, tokens)
            if crashes >= self._job.settings.max_engine_failures:
                rule = f"engines of {self._job.layout.tasks.models[model]} must answer requests"
                found = f"{crashes} died one after another without an answer"
                self._on_error(EngineError(f"{rule}; {found}. See their logs, then run again with --resume"))
                return
        self._fleet.restart(slot, died=died)

    def _at_s(self) -> float:
        return asyncio.get_running_loop().time() - self._start_s

    def _by_model(self, counts: dict[tuple[int, State], int]) -> dict[tuple[int, int, State], int]:
        pairs = self._job.layout.pairs
        return {(*pairs[pair], state): tasks for (pair, state), tasks in counts.items()}

    async def _renew_leases(self) -> None:
        lease_s, owner, ledger = self._job.settings.lease_s, self._job.owner, self._ledger
        noted = ""
        while True:
            await asyncio.sleep(min(lease_s / 3, 2.0))
            now_s = self._now_s()
            await self.writer.call(ledger.heartbeat, owner, now_s=now_s, lease_s=lease_s)
            if await self.writer.call(ledger.expire, now_s=now_s):
                self._on_release(range(len(self.dispatchers)))
            engines = encoded_engines(self._job.layout.tasks.models, self._fleet.descriptions())
            if engines != noted:
                noted = engines
                await self.writer.call(ledger.set_metadata, {ENGINES + owner: noted})
            if self._how is None and CANCEL in await self.writer.call(ledger.metadata):
                self.stop("cancelled")

    async def _save_drafts(self) -> None:
        while True:
            await asyncio.sleep(self._job.settings.save_s)
            for dispatcher in self.dispatchers:
                await dispatcher.save()

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(self._watch_s)
            for slot in self._fleet.slots:
                slot.last_progress_s(asyncio.get_running_loop().time())
                if slot.engine is not None and not slot.engine.is_alive:
                    self._on_engine_failure(slot, True)
            if self._monitor is not None:
                self._monitor(await self.progress())

    async def progress(self) -> Progress:
        """Return the progress of the run."""
        counts = self._by_model(await self.writer.call(self._ledger.counts))
        now_s = asyncio.get_running_loop().time()
        return progress_of(self._job, self._tracker, self.dispatchers, self._fleet.slots, counts, self._clock, now_s)

    async def _close(self) -> None:
        owner = self._job.owner
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await interrupt([task for one in self.dispatchers for task in one.active_tasks])
            for dispatcher in self.dispatchers:
                await dispatcher.close(dispatcher.slots, save_tokens=not self._forced)
            await self.writer.flush()
            await self.writer.call(self._ledger.set_metadata, {OWNER + owner: "", ENGINES + owner: ""})
        finally:
            await self._fleet.close()
            self.writer.close()


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
    """Run a job on simulated engines. All times, including the ledger's and ``watch_s``, are virtual.

    The clock starts at ``from_s``, which must be after the end of a run that is resumed. The other arguments are as in
    ``Coordinator``.
    """

    async def main() -> RunResult:
        loop = asyncio.get_running_loop()
        return await Coordinator(
            job, ledger, launcher, now_s=lambda: from_s + loop.time(), monitor=monitor, watch_s=watch_s, started=started
        ).run()

    return run_virtually(main())


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
    """Run a job on real engines.

    The first SIGINT or SIGTERM stops leasing, interrupts running requests, saves their tokens and ends the engines. The
    second one kills the engines. The ledger is consistent either way. At each signal, ``stopping`` receives the number
    of signals so far. The other arguments are as in ``Coordinator``.
    """

    async def main() -> RunResult:
        coordinator = Coordinator(
            job, ledger, launcher, now_s=time.time, monitor=monitor, watch_s=watch_s, started=started
        )
        signals = 0

        def stop() -> None:
            nonlocal signals
            signals += 1
            coordinator.stop()
            if stopping is not None:
                stopping(signals)

        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, stop)
        try:
            return await coordinator.run()
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    return asyncio.run(main())
