"""One model's tasks: leased as its engines have seats, asked, and settled."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lengthwise.apps.launch.engine import Draft, FailedError, Fault
from lengthwise.apps.ledger.contracts import Ending, Lease, Output, Partial, State
from lengthwise.apps.run.job import Decider, Job, Layout, RequestSpec
from lengthwise.apps.run.task_state import (
    LeasedTask,
    LedgerWriter,
    ReplicaSlot,
    Shared,
    Verdicts,
    again,
    dead,
    done,
    skipped,
)
from lengthwise.schema.errors import InputError


@dataclass
class Prepared:
    """What came of leases.

    Attributes:
        works: To be asked.
        endings: Of tasks that need no engine: skipped, known already, or without a request that could be sent.
        known: How many of them were known.
    """

    works: list[LeasedTask] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    known: int = 0


async def prepare(books: LedgerWriter, layout: Layout, decider: Decider, leases: Sequence[Lease]) -> Prepared:
    """Requests of leases, in their order."""
    texts = await _answers(books, layout, leases)
    found, asked = Prepared(), []
    for lease in leases:
        try:
            one = decider.decide(int(layout.task_of[lease.task]), texts)
        except InputError as error:
            found.endings.append(dead(lease, str(error)))
            continue
        if one is None:
            found.endings.append(skipped(lease))
        else:
            asked.append((lease, one))
    await _known_taken(books, found, asked)
    return found


async def _known_taken(books: LedgerWriter, found: Prepared, requested: list[tuple[Lease, RequestSpec]]) -> None:
    keys = [one.key for _, one in requested]
    if not keys:
        return
    results = await books.call(lambda: books.ledger.results(keys))
    left = [key for key in keys if key not in results]
    partials = await books.call(lambda: books.ledger.partials(left)) if left else {}
    for lease, one in requested:
        if (output := results.get(one.key)) is not None:
            found.endings.append(done(lease, one.key, output))
            found.known += 1
        else:
            draft = Draft.of(partials.get(one.key))
            found.works.append(LeasedTask(lease, one.key, one.request, draft, saved=len(draft.output_ids)))


class _Answers:
    """Answers by the application's numbers."""

    def __init__(self, layout: Layout, found: dict[int, Output | None]) -> None:
        self._layout, self._found = layout, found

    def __call__(self, task: int) -> Output | None:
        return self._found.get(int(self._layout.place_of[task]))


async def _answers(books: LedgerWriter, layout: Layout, leases: Sequence[Lease]) -> _Answers:
    parents = sorted({place for lease in leases for place in layout.parents(lease.task).tolist()})
    found = await books.call(lambda: books.ledger.outputs(parents)) if parents else {}
    return _Answers(layout, found)


LEAST = 8
"""Fewer requests are not worth reading their tokens again."""


def uneven(slots: Sequence[ReplicaSlot]) -> list[tuple[LeasedTask, ReplicaSlot]]:
    """Requests to be moved, and where they are: those that began last of engines that have twice as much as another.

    Half of the difference goes, so that nothing is moved to and fro.
    """
    open_ = [slot for slot in slots if slot.inquiry is None]
    if len(open_) < 2:
        return []
    least = min(len(slot.active) for slot in open_)
    mean = sum(len(slot.active) for slot in open_) / len(open_)
    moved = []
    for slot in open_:
        going = len(slot.active)
        if going >= 2 * least and going - least >= LEAST:
            more = max(0, going - round(mean))
            movable = [work for work in reversed(slot.active.values()) if _can_move(work)]
            moved += [(work, slot) for work in movable[:more]]
    return moved


def _can_move(work: LeasedTask) -> bool:
    """Whether nothing that was written is lost by it."""
    draft = work.draft
    asked = work.asking is not None and not work.asking.done()
    return asked and (draft.partial() is not None or not any(draft.text))


_DEATH_SHOWS_S = 2.0


class ModelDispatcher:
    """Of one model.

    Attributes:
        slots: Its engines that are ready.
        pending: Leased, without a seat.
        tokens: That were written for it since the start.
        reused: Tasks whose answer was there already.
    """

    def __init__(self, model: int, shared: Shared) -> None:
        self.model, self._shared, self._decisions = model, shared, Verdicts(shared, self.wakeup)
        self.slots: list[ReplicaSlot] = []
        self.pending: deque[LeasedTask] = deque()
        self.tokens = self.reused = 0
        self._dry = self._leasing = False
        self._open_s, self._ran_s = 0.0, 0.0
        self._wake = asyncio.Event()
        self._feeding: asyncio.Task[None] | None = None
        self._lease_taken: asyncio.Task[None] | None = None
        self._evening: asyncio.Task[None] | None = None

    @property
    def active(self) -> int:
        """Requests under way."""
        return sum(len(slot.active) for slot in self.slots)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and the ledger had nothing more."""
        return self._dry and not self._leasing and not self.pending and not self.active

    def open(self, slot: ReplicaSlot) -> None:
        """An engine is ready."""
        if not self.slots:
            self._open_s = asyncio.get_running_loop().time()
        self.slots.append(slot)
        if self._feeding is None:
            self._feeding = asyncio.get_running_loop().create_task(self._feed())
            self._feeding.add_done_callback(self._fed)
        self.wakeup()
        self.fill()

    def ran_s(self, at_s: float) -> float:
        """Seconds in which it had an engine, of the first ``at_s`` of the run."""
        here_s = asyncio.get_running_loop().time() - self._open_s if self.slots else 0.0
        return min(at_s, self._ran_s + here_s)

    def wakeup(self) -> None:
        """There may be something to lease."""
        self._dry = False
        self._wake.set()

    async def close(self, slots: list[ReplicaSlot], *, keep: bool = True) -> None:
        """Takes engines away: what they work on is cut, its tokens are kept, and others may lease it.

        Without any engine left, all that waits is given back too.
        """
        if self._evening is not None:
            await asyncio.wait([self._evening])
        works = [work for slot in slots for work in slot.active.values()]
        self._take_out(slots)
        if not self.slots:
            await self._end_feed()
            works += self.pending
            self.pending.clear()
        await cut(works)
        if keep:
            await self.save(works)
        for slot in slots:
            slot.active.clear()
        for work in works:
            if not work.is_answered:
                self._decisions.release(work, None)
        self.fill()

    async def save(self, works: list[LeasedTask] | None = None) -> None:
        """Keeps answers so far, of those that have grown."""
        if works is None:
            works = [work for slot in self.slots for work in slot.active.values()]
        grown: list[tuple[str, Partial]] = []
        for work in works:
            partial = work.draft.partial() if len(work.draft.output_ids) > work.saved else None
            if partial is not None:
                grown.append((work.key, partial))
                work.saved = self._shared.retained[work.place] = len(partial.output_ids)
        if grown:
            await self._shared.books.call(lambda: self._shared.books.ledger.save(grown))

    def _take_out(self, slots: list[ReplicaSlot]) -> None:
        had = bool(self.slots)
        self.slots = [slot for slot in self.slots if slot not in slots]
        if had and not self.slots:
            self._ran_s += asyncio.get_running_loop().time() - self._open_s

    async def _end_feed(self) -> None:
        if self._feeding is not None:
            feeding, self._feeding = self._feeding, None
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        if self._lease_taken is not None:
            # What was leased meanwhile must be known, to be given back.
            await asyncio.gather(self._lease_taken, return_exceptions=True)

    def _fed(self, feeding: asyncio.Task[None]) -> None:
        if not feeding.cancelled() and (error := feeding.exception()) is not None:
            self._shared.failed(error)

    async def _feed(self) -> None:
        """Leases whenever less waits than engines will soon have seats for."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while not self._dry and (room := self._room()) > 0:
                self._lease_taken = asyncio.get_running_loop().create_task(self._lease(room))
                await asyncio.shield(self._lease_taken)

    def _room(self) -> int:
        max_num_seqs = sum(slot.max_num_seqs for slot in self.slots)
        ahead = max(4, max_num_seqs // 2)
        free = max_num_seqs + ahead - self.active - len(self.pending)
        return free if free >= max(1, ahead // 2) else 0

    async def _lease(self, most: int) -> None:
        shared, job = self._shared, self._shared.job
        ledger, now_s = shared.books.ledger, shared.now_s()
        self._leasing, self._dry = True, True
        try:
            leases = await shared.books.call(
                lambda: ledger.lease(self.model, most, owner=job.owner, now_s=now_s, lease_s=job.settings.lease_s)
            )
            if len(leases) == most:
                self._dry = False
            found = await prepare(shared.books, job.layout, job.decider, leases)
        finally:
            self._leasing = False
        self.reused += found.known
        for ending in found.endings:
            shared.books.end(ending)
        for work in found.works:
            self._add(work)
        if not leases:
            shared.idle()
        self.fill()
        if self._dry and not self.pending and self._evening is None and (moved := uneven(self.slots)):
            self._evening = asyncio.get_running_loop().create_task(self._uniform(moved))
            self._evening.add_done_callback(self._balanced)

    async def _uniform(self, moving: list[tuple[LeasedTask, ReplicaSlot]]) -> None:
        """Takes requests to an engine that came later and has little to do: they go on there from their tokens."""
        await cut([work for work, _ in moving])
        for work, slot in moving:
            if slot.active.get(work.place) is work and not work.is_answered:
                del slot.active[work.place]
                work.draft, work.asking = Draft.of(work.draft.partial()), None
                work.saved = min(work.saved, len(work.draft.output_ids))
                self.pending.append(work)
        self.fill()

    def _balanced(self, evening: asyncio.Task[None]) -> None:
        self._evening = None
        self._fed(evening)

    def _add(self, work: LeasedTask) -> None:
        first = self._shared.asking.setdefault(work.key, work)
        if first is not work:
            first.twins.append(work.lease)
        elif work.place in self._shared.suspects:
            self.pending.appendleft(work)
        else:
            self.pending.append(work)

    def fill(self) -> None:
        """Gives those who wait the seats that are free."""
        while self.pending:
            slot = self._berth_for(self.pending[0])
            if slot is None:
                break
            self._submit(self.pending.popleft(), slot)
        if self.slots and not self._dry and self._room() > 0:
            self._wake.set()

    def _berth_for(self, work: LeasedTask) -> ReplicaSlot | None:
        """The least busy engine with a seat; another than the one that failed last, where there is one."""
        shunned = self._shared.shunned.get(work.place)
        free = [slot for slot in self.slots if len(slot.active) < slot.max_num_seqs and slot.inquiry is None]
        if self._shared.suspects:
            may = self._shared.suspects.may_join
            free = [slot for slot in free if may(work.place, slot.active, slot.max_num_seqs)]
        return min(free, key=lambda slot: (slot is shunned, len(slot.active)), default=None)

    def _submit(self, work: LeasedTask, slot: ReplicaSlot) -> None:
        assert slot.engine is not None
        loop = asyncio.get_running_loop()
        slot.take(work, loop.time())
        work.asking = asking = loop.create_task(slot.engine.generate(work.request, work.draft))
        asking.add_done_callback(lambda over: self._over(work, slot, over))

    def _over(self, work: LeasedTask, slot: ReplicaSlot, over: asyncio.Task[Output]) -> None:
        if over.cancelled():
            return  # whoever cut it gives it back
        error = over.exception()
        if error is None:
            slot.active.pop(work.place, None)
            slot.failures, slot.received_s = 0, asyncio.get_running_loop().time()
            self._on_response(work, over.result())
        elif isinstance(error, FailedError):
            self._failed(work, slot, error)
        else:
            self._shared.failed(error)
            return
        self.fill()
        if self.is_idle:
            self._shared.idle()

    def _on_response(self, work: LeasedTask, output: Output) -> None:
        self.tokens += output.output_tokens - work.draft.retained
        self._decisions.succeeded(work, output)

    def _failed(self, work: LeasedTask, slot: ReplicaSlot, error: FailedError) -> None:
        if error.fault is Fault.ENGINE:
            # It stays where it is until it is known whether the engine died.
            if slot.inquiry is None and slot in self.slots:
                slot.inquiry = asyncio.get_running_loop().create_task(self._inquire(slot, str(error)))
            return
        slot.active.pop(work.place, None)
        if error.fault is Fault.REQUEST:
            self._decisions.dead(work, str(error))
        elif error.fault is Fault.BUSY:
            self._decisions.has_no_room(work, str(error), slot, error.retry_after_s)
        else:
            self._decisions.attempted(work, str(error), slot)
            slot.failures += 1
            if slot.failures >= self._shared.job.settings.engine_failures:
                self._shared.down(slot, False)

    async def _inquire(self, slot: ReplicaSlot, cause: str) -> None:
        """An engine was not reached: has it died, or was it this once?"""
        assert slot.engine is not None
        if await slot.engine.stopped(_DEATH_SHOWS_S):
            self._shared.down(slot, True)
            return
        slot.inquiry = None
        for work in [work for work in slot.active.values() if work.asking is None or work.asking.done()]:
            self._failed(work, slot, FailedError(Fault.ANSWER, cause))
        self.fill()

    async def lost(self, slot: ReplicaSlot, error: str) -> None:
        """An engine died: what it worked on is asked again, and the one that was alone with it answers for that."""
        if self._evening is not None:
            await asyncio.wait([self._evening])
        works = list(slot.active.values())
        self._take_out([slot])
        slot.active.clear()
        await cut(works)
        works = [work for work in works if not work.is_answered]
        await self.save(works)
        self._shared.suspects.died(work.place for work in works)
        for work in works:
            if len(works) == 1:
                self._decisions.attempted(work, error, slot)
            else:
                self._decisions.release(work, error)


async def cut(works: list[LeasedTask]) -> None:
    """Ends requests that are under way, and waits until they have ended."""
    asking = [work.asking for work in works if work.asking is not None and not work.asking.done()]
    for one in asking:
        one.cancel()
    if asking:
        await asyncio.gather(*asking, return_exceptions=True)


def written(shared: Shared, lines: list[ModelDispatcher]) -> dict[int, int]:
    """Tokens of answers so far, by place: of those that were cut off and those that are under way."""
    going = (work for line in lines for slot in line.slots for work in slot.active.values())
    return shared.retained | {work.place: work.draft.tokens for work in going if not work.is_answered}


_PAGE = 2_000
_LATER_S = 1e-3
BEFORE = "identity"
"""The fact that tells of which application the run is."""


@dataclass(frozen=True)
class Reused:
    """Tasks by call.

    Attributes:
        calls: Names.
        kept: Whose answers were there already.
        asked: That have to be asked, those behind them included.
    """

    calls: tuple[str, ...]
    retained: tuple[int, ...]
    requested: tuple[int, ...]

    def words(self) -> str:
        """For people: call by call."""
        parts = (
            f"{call}: {kept} of {kept + asked} answers kept"
            for call, kept, asked in zip(self.calls, self.retained, self.requested, strict=True)
        )
        return "; ".join(parts)


async def sweep(books: LedgerWriter, job: Job, now_s: Callable[[], float]) -> Reused | None:
    """Settles all tasks whose answers are known before any engine starts; None where it is a first run.

    Tasks that have to be asked are given back for a moment later than the one at which the sweep leases, so that it
    meets none of them twice.
    """
    ledger = books.ledger
    before = (await books.call(ledger.metadata)).get(BEFORE)
    await books.call(lambda: ledger.note({BEFORE: job.identity}))
    if before is None or before == job.identity:
        return None
    at_s = now_s()
    kept: Counter[int] = Counter()
    models = list(range(len(job.layout.tasks.models)))
    while any([await _swept(books, job, model, at_s, kept) for model in models]):
        pass
    await asyncio.sleep(2 * _LATER_S)
    return await _report(books, job, kept)


async def _swept(books: LedgerWriter, job: Job, model: int, at_s: float, retained: Counter[int]) -> bool:
    """Whether a model had ready tasks that were not looked at yet."""
    ledger, settings = books.ledger, job.settings
    leases = await books.call(lambda: ledger.lease(model, _PAGE, owner=job.owner, now_s=at_s, lease_s=settings.lease_s))
    found = await prepare(books, job.layout, job.decider, leases)
    for ending in found.endings:
        if ending.state == State.DONE:
            retained[job.layout.pairs[int(job.layout.tasks.call[ending.task])][0]] += 1
        books.end(ending)
    for work in found.works:
        books.end(again(work.lease, None, not_before_s=at_s + _LATER_S))
    await books.flush()
    return bool(leases)


async def there(books: LedgerWriter, job: Job) -> Reused:
    """What a run that is gone on with has answered already."""
    kept: Counter[int] = Counter()
    for (pair, state), tasks in (await books.call(books.ledger.counts)).items():
        if state == State.DONE:
            kept[job.layout.pairs[pair][0]] += tasks
    return await _report(books, job, kept)


async def _report(books: LedgerWriter, job: Job, retained: Counter[int]) -> Reused:
    asked: Counter[int] = Counter()
    for (pair, state), tasks in (await books.call(books.ledger.counts)).items():
        if state in (State.WAITING, State.READY, State.LEASED):
            asked[job.layout.pairs[pair][0]] += tasks
    calls = job.layout.tasks.calls
    numbers = range(len(calls))
    return Reused(calls, tuple(retained[n] for n in numbers), tuple(asked[n] for n in numbers))
