"""Leases the tasks of one model as its engines have room, sends their requests, and ends the leases."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lengthwise.apps.launch.engine import Draft, FailedError, Fault
from lengthwise.apps.ledger.contracts import Ending, Lease, Output, Partial, State
from lengthwise.apps.run.job import Job, RequestSpec
from lengthwise.apps.run.task_state import LeasedTask, LeaseSettler, LedgerWriter, ReplicaSlot, SharedState, spawn
from lengthwise.schema.errors import InputError

MIN_IMBALANCE = 8  # moving fewer requests gains less than the repeated prefill of their tokens costs
APPLICATION = "identity"  # name of the ledger's metadata that identifies the application
_CRASH_SHOWS_S = 2.0
_PAGE = 2_000
_LATER_S = 1e-3


async def prepare(writer: LedgerWriter, job: Job, leases: Sequence[Lease]) -> tuple[list[LeasedTask], list[Ending]]:
    """Return the leased tasks that an engine must answer, and the endings of all other leases.

    A task needs no engine if it is skipped, its output is already recorded, or it has no valid request (DEAD).
    """
    layout, ledger = job.layout, writer.ledger
    parents = sorted({place for lease in leases for place in layout.parents(lease.task).tolist()})
    answers = await writer.call(ledger.outputs, parents) if parents else {}
    tasks: list[LeasedTask] = []
    endings: list[Ending] = []
    requests: list[tuple[Lease, RequestSpec]] = []
    for lease in leases:
        try:
            request = job.decider.decide(
                int(layout.task_of[lease.task]), lambda task: answers.get(int(layout.place_of[task]))
            )
        except InputError as error:
            endings.append(lease.ending(State.DEAD, error=str(error)))
            continue
        if request is None:
            endings.append(lease.ending(State.SKIPPED))
        else:
            requests.append((lease, request))
    if not requests:
        return tasks, endings
    keys = [request.key for _, request in requests]
    results = await writer.call(ledger.results, keys)
    unknown = [key for key in keys if key not in results]
    partials = await writer.call(ledger.partials, unknown) if unknown else {}
    for lease, request in requests:
        if (output := results.get(request.key)) is not None:
            endings.append(lease.ending(State.DONE, key=request.key, output=output))
        else:
            draft = Draft.of(partials.get(request.key))
            tasks.append(LeasedTask(lease, request.key, request.request, draft, saved=len(draft.output_ids)))
    return tasks, endings


def requests_to_move(slots: Sequence[ReplicaSlot]) -> list[tuple[LeasedTask, ReplicaSlot]]:
    """Return requests that should move to another engine, with the slots of their present engines.

    An engine gives up its latest requests if it has at least twice as many as the least busy engine, and MIN_IMBALANCE
    more. Only the surplus over the mean moves, so no request moves back.
    """
    open_ = [slot for slot in slots if slot.liveness_check is None]
    if len(open_) < 2:
        return []
    least = min(len(slot.active) for slot in open_)
    mean = sum(len(slot.active) for slot in open_) / len(open_)
    chosen: list[tuple[LeasedTask, ReplicaSlot]] = []
    for slot in open_:
        active = len(slot.active)
        if active >= 2 * least and active - least >= MIN_IMBALANCE:
            # A request stays if another engine could not continue its tokens, which would be lost.
            active_tasks = [task for task in reversed(slot.active.values()) if task.is_active]
            movable = [t for t in active_tasks if t.draft.partial() is not None or not any(t.draft.text)]
            chosen += [(task, slot) for task in movable[: max(0, active - round(mean))]]
    return chosen


class ModelDispatcher:
    """Leases the tasks of one model and sends them to its ready engines (``slots``).

    ``pending`` has leased tasks for which no engine has room. ``tokens`` counts output tokens since the run's start.
    """

    def __init__(self, model: int, shared: SharedState) -> None:
        self.model, self._shared, self._settler = model, shared, LeaseSettler(shared, self.wakeup)
        self.slots: list[ReplicaSlot] = []
        self.pending: deque[LeasedTask] = deque()
        self.tokens = 0
        self._ledger_empty = self._leasing = False
        self._ready_s, self._ran_s = 0.0, 0.0
        self._wake = asyncio.Event()
        self._lease_loop: asyncio.Task[None] | None = None
        self._lease_call: asyncio.Task[None] | None = None
        self._balancing: asyncio.Task[None] | None = None

    @property
    def active_tasks(self) -> list[LeasedTask]:
        """Return the tasks that engines work on."""
        return [task for slot in self.slots for task in slot.active.values()]

    @property
    def active(self) -> int:
        """Return the number of running requests."""
        return len(self.active_tasks)

    @property
    def is_idle(self) -> bool:
        """Return whether no task runs or is pending, and the ledger had no more tasks to lease."""
        return self._ledger_empty and not self._leasing and not self.pending and not self.active

    def open(self, slot: ReplicaSlot) -> None:
        """Add a slot whose engine is ready."""
        if not self.slots:
            self._ready_s = asyncio.get_running_loop().time()
        self.slots.append(slot)
        if self._lease_loop is None:
            self._lease_loop = spawn(self._lease_forever(), self._shared.on_error)
        self.wakeup()
        self.fill()

    def engine_ready_s(self, at_s: float) -> float:
        """Return the seconds in which at least one engine was ready, out of the first ``at_s`` seconds of the run."""
        current_s = asyncio.get_running_loop().time() - self._ready_s if self.slots else 0.0
        return min(at_s, self._ran_s + current_s)

    def wakeup(self) -> None:
        """Try again to lease tasks, because there may be new ones."""
        self._ledger_empty = False
        self._wake.set()

    async def close(self, slots: list[ReplicaSlot], *, save_tokens: bool = True) -> None:
        """Remove slots: interrupt their requests, save the tokens if ``save_tokens``, and release the tasks.

        If no slot is left, the pending tasks are released, too.
        """
        if self._balancing is not None:
            await asyncio.wait([self._balancing])
        tasks = [task for slot in slots for task in slot.active.values()]
        self._remove(slots)
        if not self.slots:
            if self._lease_loop is not None:
                loop, self._lease_loop = self._lease_loop, None
                loop.cancel()
                await asyncio.gather(loop, return_exceptions=True)
            if self._lease_call is not None:
                # Wait for a lease in progress, so that its tasks are released, too.
                await asyncio.gather(self._lease_call, return_exceptions=True)
            tasks += self.pending
            self.pending.clear()
        await interrupt(tasks)
        if save_tokens:
            await self.save(tasks)
        for slot in slots:
            slot.active.clear()
        for task in tasks:
            if not task.is_answered:
                self._settler.release(task, None)
        self.fill()

    async def save(self, tasks: list[LeasedTask] | None = None) -> None:
        """Save the outputs of ``tasks`` (None: of all active tasks) that have grown since the last save."""
        grown: list[tuple[str, Partial]] = []
        for task in self.active_tasks if tasks is None else tasks:
            partial = task.draft.partial() if len(task.draft.output_ids) > task.saved else None
            if partial is not None:
                grown.append((task.key, partial))
                task.saved = self._shared.saved_tokens[task.place] = len(partial.output_ids)
        if grown:
            await self._shared.writer.call(self._shared.writer.ledger.save, grown)

    def _remove(self, slots: list[ReplicaSlot]) -> None:
        had_slots = bool(self.slots)
        self.slots = [slot for slot in self.slots if slot not in slots]
        if had_slots and not self.slots:
            self._ran_s += asyncio.get_running_loop().time() - self._ready_s

    async def _lease_forever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while not self._ledger_empty and (room := self._room()) > 0:
                self._lease_call = asyncio.get_running_loop().create_task(self._lease(room))
                await asyncio.shield(self._lease_call)

    def _room(self) -> int:
        """Return how many tasks to lease now. Half a batch is leased ahead, so that few calls are needed."""
        max_num_seqs = sum(slot.max_num_seqs for slot in self.slots)
        ahead = max(4, max_num_seqs // 2)
        free = max_num_seqs + ahead - self.active - len(self.pending)
        return free if free >= max(1, ahead // 2) else 0

    async def _lease(self, limit: int) -> None:
        shared, job = self._shared, self._shared.job
        times = {"now_s": shared.now_s(), "lease_s": job.settings.lease_s}
        self._leasing = self._ledger_empty = True
        try:
            lease = shared.writer.ledger.lease
            leases = await shared.writer.call(lease, self.model, limit, owner=job.owner, **times)
            if len(leases) == limit:
                self._ledger_empty = False
            tasks, endings = await prepare(shared.writer, job, leases)
        finally:
            self._leasing = False
        for ending in endings:
            shared.writer.enqueue(ending)
        for task in tasks:
            first = shared.in_flight.setdefault(task.key, task)
            if first is not task:
                first.duplicates.append(task.lease)
            elif task.place in shared.suspects:
                self.pending.appendleft(task)
            else:
                self.pending.append(task)
        if not leases:
            shared.on_idle()
        self.fill()
        if (
            self._ledger_empty
            and not self.pending
            and self._balancing is None
            and (moves := requests_to_move(self.slots))
        ):
            self._balancing = spawn(self._rebalance(moves), shared.on_error)
            self._balancing.add_done_callback(self._rebalanced)

    async def _rebalance(self, moves: list[tuple[LeasedTask, ReplicaSlot]]) -> None:
        await interrupt([task for task, _ in moves])
        for task, slot in moves:
            if slot.active.get(task.place) is task and not task.is_answered:
                del slot.active[task.place]
                task.draft, task.generation = Draft.of(task.draft.partial()), None
                task.saved = min(task.saved, len(task.draft.output_ids))
                self.pending.append(task)
        self.fill()

    def _rebalanced(self, _: asyncio.Task[None]) -> None:
        self._balancing = None

    def fill(self) -> None:
        """Send pending tasks to the engines that have room."""
        while self.pending and (slot := self._slot_for(self.pending[0])) is not None:
            task, loop = self.pending.popleft(), asyncio.get_running_loop()
            assert slot.engine is not None
            slot.add(task, loop.time())
            task.generation = loop.create_task(slot.engine.generate(task.request, task.draft))
            task.generation.add_done_callback(
                lambda generation, task=task, slot=slot: self._on_end(task, slot, generation)  # type: ignore[misc]
            )
        if self.slots and not self._ledger_empty and self._room() > 0:
            self._wake.set()

    def _slot_for(self, task: LeasedTask) -> ReplicaSlot | None:
        suspects, avoided = self._shared.suspects, self._shared.avoided.get(task.place)
        free = [slot for slot in self.slots if len(slot.active) < slot.max_num_seqs and slot.liveness_check is None]
        if suspects:
            free = [slot for slot in free if suspects.may_join(task.place, slot.active, slot.max_num_seqs)]
        return min(free, key=lambda slot: (slot is avoided, len(slot.active)), default=None)

    def _on_end(self, task: LeasedTask, slot: ReplicaSlot, generation: asyncio.Task[Output]) -> None:
        if generation.cancelled():
            return  # the code that interrupted the request releases its task
        error = generation.exception()
        if error is None:
            slot.active.pop(task.place, None)
            slot.failures, slot.progress_s = 0, asyncio.get_running_loop().time()
            output = generation.result()
            self.tokens += output.output_tokens - task.draft.retained
            self._settler.settle(task, State.DONE, key=task.key, output=output)
        elif isinstance(error, FailedError):
            self._on_failure(task, slot, error)
        else:
            self._shared.on_error(error)
            return
        self.fill()
        if self.is_idle:
            self._shared.on_idle()

    def _on_failure(self, task: LeasedTask, slot: ReplicaSlot, error: FailedError) -> None:
        if error.fault is Fault.ENGINE:
            # The task stays in its slot until it is known whether the engine died.
            if slot.liveness_check is None and slot in self.slots:
                slot.liveness_check = asyncio.get_running_loop().create_task(self._check_liveness(slot, str(error)))
            return
        slot.active.pop(task.place, None)
        if error.fault is Fault.REQUEST:
            self._settler.settle(task, State.DEAD, error=str(error))
        elif error.fault is Fault.BUSY:
            self._settler.retry_later(task, str(error), slot, error.retry_after_s)
        else:
            self._settler.retry(task, str(error), slot)
            slot.failures += 1
            if slot.failures >= self._shared.job.settings.engine_failures:
                self._shared.on_engine_failure(slot, False)

    async def _check_liveness(self, slot: ReplicaSlot, cause: str) -> None:
        """Check whether an unreachable engine has died. If not, its failed requests count as bad answers."""
        assert slot.engine is not None
        if await slot.engine.has_died(_CRASH_SHOWS_S):
            self._shared.on_engine_failure(slot, True)
            return
        slot.liveness_check = None
        for task in [task for task in slot.active.values() if not task.is_active]:
            self._on_failure(task, slot, FailedError(Fault.ANSWER, cause))
        self.fill()

    async def engine_died(self, slot: ReplicaSlot, error: str) -> None:
        """Release the tasks of an engine that died. If there is only one, this counts as one of its attempts."""
        if self._balancing is not None:
            await asyncio.wait([self._balancing])
        tasks = list(slot.active.values())
        self._remove([slot])
        slot.active.clear()
        await interrupt(tasks)
        tasks = [task for task in tasks if not task.is_answered]
        await self.save(tasks)
        self._shared.suspects.update(task.place for task in tasks)
        for task in tasks:
            if len(tasks) == 1:
                self._settler.retry(task, error, slot)
            else:
                self._settler.release(task, error)


async def interrupt(tasks: Sequence[LeasedTask]) -> None:
    """Cancel running requests and wait until they have ended."""
    running = [task.generation for task in tasks if task.generation is not None and task.is_active]
    for generation in running:
        generation.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def written_tokens(shared: SharedState, dispatchers: Sequence[ModelDispatcher]) -> dict[int, int]:
    """Return the tokens of unfinished outputs, including interrupted ones, by the task's number in the ledger."""
    active = (task for one in dispatchers for task in one.active_tasks)
    return shared.saved_tokens | {task.place: task.draft.tokens for task in active if not task.is_answered}


@dataclass(frozen=True)
class Reused:
    """Numbers of tasks by call: with an output of an earlier run (``retained``), and unfinished (``remaining``)."""

    calls: tuple[str, ...]
    retained: tuple[int, ...]
    remaining: tuple[int, ...]

    def words(self) -> str:
        """Return a text for messages with the numbers of each call."""
        return "; ".join(
            f"{call}: {retained} of {retained + remaining} answers kept"
            for call, retained, remaining in zip(self.calls, self.retained, self.remaining, strict=True)
        )


async def reuse_results(writer: LedgerWriter, job: Job, now_s: Callable[[], float]) -> Reused | None:
    """Finish the tasks whose outputs the ledger already has, before any engine starts.

    Return None if the ledger is new, or the application has not changed. The function leases tasks as of one time, and
    tasks that need an engine become ready after this time, so that it leases none of them twice.
    """
    ledger, lease_s = writer.ledger, job.settings.lease_s
    before = (await writer.call(ledger.metadata)).get(APPLICATION)
    await writer.call(ledger.set_metadata, {APPLICATION: job.identity})
    if before is None or before == job.identity:
        return None
    at_s = now_s()
    retained: Counter[int] = Counter()
    found_leases = True
    while found_leases:
        found_leases = False
        for model in range(len(job.layout.tasks.models)):
            leases = await writer.call(ledger.lease, model, _PAGE, owner=job.owner, now_s=at_s, lease_s=lease_s)
            found_leases = found_leases or bool(leases)
            tasks, endings = await prepare(writer, job, leases)
            for ending in endings:
                if ending.state == State.DONE:
                    retained[job.layout.pairs[int(job.layout.tasks.call[ending.task])][0]] += 1
                writer.enqueue(ending)
            for task in tasks:
                writer.enqueue(task.lease.ending(State.READY, not_before_s=at_s + _LATER_S, counts=False))
            await writer.flush()
    await asyncio.sleep(2 * _LATER_S)
    return await count_reused(writer, job, retained)


async def count_reused(writer: LedgerWriter, job: Job, retained: Counter[int] | None = None) -> Reused:
    """Return how many tasks of each call are answered (``retained`` by call, if not None) and how many are left."""
    finished: Counter[int] = Counter()
    remaining: Counter[int] = Counter()
    for (pair, state), tasks in (await writer.call(writer.ledger.counts)).items():
        call = job.layout.pairs[pair][0]
        if state == State.DONE:
            finished[call] += tasks
        elif state in (State.WAITING, State.READY, State.LEASED):
            remaining[call] += tasks
    retained = finished if retained is None else retained
    calls = job.layout.tasks.calls
    numbers = range(len(calls))
    return Reused(calls, tuple(retained[n] for n in numbers), tuple(remaining[n] for n in numbers))
