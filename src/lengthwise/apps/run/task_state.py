"""State of leased tasks and replicas, which the dispatchers of a run share, and the ways in which a lease ends."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np

from lengthwise.apps.launch.engine import Draft, Engine, TaskRequest
from lengthwise.apps.launch.simulated import VirtualLoop
from lengthwise.apps.ledger.contracts import Ending, Lease, Output, State
from lengthwise.apps.ledger.table_ledger import Ledger
from lengthwise.apps.run.job import Job, Layout
from lengthwise.schema.app import ModelPlan, Replica

Given = ParamSpec("Given")
Result = TypeVar("Result")
BUSY_PER_ATTEMPT = 20
"""This many refusals by full engines count as one attempt: an engine that stays full must not delay a run forever."""
GROUP_S = 0.004  # endings that unblock other tasks are written with those that arrive within this time
_MAX_BATCH = 2_000


def spawn(work: Coroutine[Any, Any, None], on_error: Callable[[BaseException], None]) -> asyncio.Task[None]:
    """Start a coroutine in the background. If the coroutine fails, ``on_error`` receives the error."""

    def end(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            on_error(error)

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(end)
    return task


@dataclass(eq=False, slots=True)
class LeasedTask:
    """A leased task with its request and the output so far (``draft``)."""

    lease: Lease
    key: str
    request: TaskRequest
    draft: Draft
    # leases of other tasks with the same request (and key), which get the same output
    duplicates: list[Lease] = field(default_factory=list)
    generation: asyncio.Task[Output] | None = None  # the running request
    saved: int = 0  # number of the draft's tokens that are in the ledger

    @property
    def place(self) -> int:
        """Return the task's number in the ledger."""
        return self.lease.task

    @property
    def is_active(self) -> bool:
        """Return whether the task's request is running."""
        return self.generation is not None and not self.generation.done()

    @property
    def is_answered(self) -> bool:
        """Return whether the output has arrived and is being recorded."""
        run = self.generation
        return run is not None and run.done() and not run.cancelled() and run.exception() is None


@dataclass(eq=False)
class ReplicaSlot:
    """The GPUs of one replica, and its engine once the engine is ready."""

    plan: ModelPlan
    gpus: Replica
    engine: Engine | None = None
    active: dict[int, LeasedTask] = field(default_factory=dict)  # running tasks by their number in the ledger
    failures: int = 0  # number of consecutive bad answers
    startup: asyncio.Task[None] | None = None  # the start in progress, which began at ``started_s`` of the loop's clock
    started_s: float = 0.0
    starts: int = 0  # number of starts of the engine since it was last ready
    progress_s: float = 0.0  # time at which the engine last wrote a token or answered, on the loop's clock
    written: int = 0  # number of tokens of the active tasks when progress was last checked
    liveness_check: asyncio.Task[None] | None = None  # the check in progress of whether the engine has died
    restart: asyncio.Task[None] | None = None  # the stop in progress, after which the engine starts again

    def add(self, task: LeasedTask, now_s: float) -> None:
        """Add a running task. If the engine was idle without failures, its time without progress starts now."""
        if not self.active and not self.failures:
            self.progress_s = now_s
        self.active[task.place] = task

    def last_progress_s(self, now_s: float) -> float:
        """Return when the engine last made progress, or ``now_s`` if it is idle or has new tokens since then."""
        written = sum(task.draft.tokens - task.draft.retained for task in self.active.values())
        if written > self.written:
            self.progress_s = now_s
        self.written = written
        return self.progress_s if self.active else now_s

    @property
    def max_num_seqs(self) -> int:
        """Return the concurrency limit. It is a bit above the engine's, so that a free sequence is filled at once."""
        return 0 if self.engine is None else self.engine.max_num_seqs + max(1, self.engine.max_num_seqs // 16)


class Suspects(Counter[int]):
    """Counts how often each task, by number in the ledger, was active when an engine died: it may be the cause.

    Each crash reduces the groups in which suspects run to a quarter of the size, so that a request that kills engines
    is soon alone and takes few others along. An answered task is no longer suspect.
    """

    def group_size(self, place: int, max_num_seqs: int) -> int:
        """Return how many tasks may run at once on an engine if this one is among them."""
        return max(1, max_num_seqs >> 2 * self[place])

    def may_join(self, place: int, others: Iterable[int], max_num_seqs: int) -> bool:
        """Return whether a task may run together with others on an engine."""
        group = list(others)
        return len(group) < min(self.group_size(one, max_num_seqs) for one in (place, *group))


class LedgerWriter:
    """Runs all access to the ledger in one thread and in order. The ends of leases are recorded in groups.

    An output on which no task depends waits up to ``linger_s`` for others. ``on_release`` gets models with new work.
    """

    def __init__(
        self, ledger: Ledger, layout: Layout, linger_s: float, on_release: Callable[[Sequence[int]], None]
    ) -> None:
        self.ledger, self._linger_s, self._on_release = ledger, linger_s, on_release
        self._start, self._child = layout.tasks.children
        self._model = layout.tasks.model
        self._queue: list[Ending] = []
        self._urgent, self._pending = asyncio.Event(), asyncio.Event()
        self.writing = asyncio.Lock()
        virtual = isinstance(asyncio.get_running_loop(), VirtualLoop)
        self._thread = None if virtual else ThreadPoolExecutor(1, "ledger")

    async def call(self, work: Callable[Given, Result], *values: Given.args, **named: Given.kwargs) -> Result:
        """Run a function on the ledger's thread and return its result."""
        if self._thread is None:
            return work(*values, **named)
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *values, **named))

    async def background(self, work: Callable[[], Result]) -> Result:
        """Run a long function in a daemon thread, which delays no exit. The function must not use the ledger."""
        if self._thread is None:
            return work()
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # otherwise, set_result would fail after a cancelled wait

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
                future.set_exception(error)

        threading.Thread(target=run, name="background", daemon=True).start()
        return await asyncio.wrap_future(future)

    def enqueue(self, ending: Ending) -> None:
        """Add the end of a lease, which is recorded soon."""
        self._queue.append(ending)
        self._pending.set()
        has_children = self._start[ending.task + 1] > self._start[ending.task]
        if has_children or ending.state != State.DONE or len(self._queue) >= _MAX_BATCH:
            self._urgent.set()

    async def run(self) -> None:
        """Record queued endings until cancelled. A write in progress is completed."""
        while True:
            await self._pending.wait()
            try:
                async with asyncio.timeout(self._linger_s):
                    await self._urgent.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(GROUP_S)
            await asyncio.shield(self.flush())

    async def flush(self) -> None:
        """Record all queued endings."""
        async with self.writing:
            while self._queue:
                batch, self._queue = self._queue[:_MAX_BATCH], self._queue[_MAX_BATCH:]
                await self.call(self.ledger.finalize, batch)
                # Models of tasks that can be leased again, and of tasks that waited for one of the batch.
                models = {int(self._model[ending.task]) for ending in batch if ending.state == State.READY}
                for ending in batch:
                    first, last = self._start[ending.task], self._start[ending.task + 1]
                    if last > first:
                        models.update(np.unique(self._model[self._child[first:last]]).tolist())
                self._on_release(sorted(models))
            self._pending.clear()
            self._urgent.clear()

    def close(self) -> None:
        """End the ledger's thread. The ledger stays open."""
        if self._thread is not None:
            self._thread.shutdown()


@dataclass
class SharedState:
    """State that all dispatchers of a run share."""

    job: Job
    writer: LedgerWriter
    now_s: Callable[[], float]
    on_idle: Callable[[], None]  # called when a dispatcher has no more work that it can do
    # called with a slot whose engine must be restarted, and whether the engine died
    on_engine_failure: Callable[[ReplicaSlot, bool], None]
    on_error: Callable[[BaseException], None]
    suspects: Suspects = field(default_factory=Suspects)
    in_flight: dict[str, LeasedTask] = field(default_factory=dict)  # leased tasks by key
    # how often full engines refused a task, by its number in the ledger
    busy_replies: dict[int, int] = field(default_factory=dict)
    # slot of the engine that gave a task a bad answer, by the task's number
    avoided: dict[int, ReplicaSlot] = field(default_factory=dict)
    # number of saved tokens of unfinished outputs, by the task's number
    saved_tokens: dict[int, int] = field(default_factory=dict)


class LeaseSettler:
    """Ends the leases of a task and its duplicates. ``wakeup`` is called when a waiting task may be leased again."""

    def __init__(self, shared: SharedState, wakeup: Callable[[], None]) -> None:
        self._shared, self._wakeup = shared, wakeup

    def settle(self, task: LeasedTask, state: State, **fields: Any) -> None:
        """End the task as DONE with an output, or as DEAD with an error. ``fields`` are fields of ``Ending``."""
        shared = self._shared
        shared.in_flight.pop(task.key, None)
        for by_place in (shared.suspects, shared.busy_replies, shared.avoided, shared.saved_tokens):
            by_place.pop(task.place, None)
        for lease in (task.lease, *task.duplicates):
            shared.writer.enqueue(lease.ending(state, **fields))

    def retry(self, task: LeasedTask, error: str, slot: ReplicaSlot) -> None:
        """Retry after a backoff, preferably on another engine. After the last attempt, the task is dead."""
        job, shared = self._shared.job, self._shared
        if task.lease.attempt >= job.settings.max_attempts:
            self.settle(task, State.DEAD, error=f"failed {task.lease.attempt} times; last error: {error}")
            return
        shared.avoided[task.place] = slot
        at_s = shared.now_s() + job.backoff_s(task.place, task.lease.attempt)
        self.release(task, error, not_before_s=at_s, counts=True)

    def retry_later(self, task: LeasedTask, error: str, slot: ReplicaSlot, after_s: float = 0.0) -> None:
        """Retry after a backoff or the wait that a full engine requests, but after at most the longest backoff."""
        replies = self._shared.busy_replies[task.place] = self._shared.busy_replies.get(task.place, 0) + 1
        if replies % BUSY_PER_ATTEMPT == 0:
            self.retry(task, error, slot)
        else:
            job = self._shared.job
            wait_s = max(job.backoff_s(task.place, replies), min(after_s, job.settings.max_backoff_s))
            self.release(task, error, not_before_s=self._shared.now_s() + wait_s)

    def release(self, task: LeasedTask, error: str | None, *, not_before_s: float = 0.0, counts: bool = False) -> None:
        """Let the task be leased again from ``not_before_s`` on. ``counts`` tells whether an attempt was used up."""
        self._shared.in_flight.pop(task.key, None)
        enqueue, at = self._shared.writer.enqueue, {"not_before_s": not_before_s}
        enqueue(task.lease.ending(State.READY, error=error, counts=counts, **at))
        for lease in task.duplicates:
            enqueue(lease.ending(State.READY, counts=False, **at))
        if not_before_s > 0.0:
            wait_s = max(0.0, not_before_s - self._shared.now_s()) + 0.01
            asyncio.get_running_loop().call_later(wait_s, self._wakeup)
