"""What a changed application takes over from before: answers whose key is still the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from lengthwise.apps.ledger.contracts import State
from lengthwise.apps.run._work import again
from lengthwise.apps.run.books import Books
from lengthwise.apps.run.contracts import Job
from lengthwise.apps.run.preparing import prepare

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
    kept: tuple[int, ...]
    asked: tuple[int, ...]

    def words(self) -> str:
        """For people: call by call."""
        parts = (
            f"{call}: {kept} of {kept + asked} answers kept"
            for call, kept, asked in zip(self.calls, self.kept, self.asked, strict=True)
        )
        return "; ".join(parts)


async def sweep(books: Books, job: Job, now_s: Callable[[], float]) -> Reused | None:
    """Settles all tasks whose answers are known before any engine starts; None where it is a first run.

    Tasks that have to be asked are given back for a moment later than the one at which the sweep leases, so that it
    meets none of them twice.
    """
    ledger = books.ledger
    before = (await books.call(ledger.facts)).get(BEFORE)
    await books.call(lambda: ledger.note({BEFORE: job.identity}))
    if before is None or before == job.identity:
        return None
    at_s = now_s()
    kept: Counter[int] = Counter()
    models = list(range(len(job.layout.tasks.models)))
    while any([await _swept(books, job, model, at_s, kept) for model in models]):
        pass
    await asyncio.sleep(2 * _LATER_S)
    return await _told(books, job, kept)


async def _swept(books: Books, job: Job, model: int, at_s: float, kept: Counter[int]) -> bool:
    """Whether a model had ready tasks that were not looked at yet."""
    ledger, settings = books.ledger, job.settings
    leases = await books.call(
        lambda: ledger.lease(model, _PAGE, owner=job.owner, now_s=at_s, lease_s=settings.lease_s)
    )
    found = await prepare(books, job.layout, job.decider, leases)
    for ending in found.endings:
        if ending.state == State.DONE:
            kept[job.layout.pairs[int(job.layout.tasks.call[ending.task])][0]] += 1
        books.end(ending)
    for work in found.works:
        books.end(again(work.lease, None, not_before_s=at_s + _LATER_S))
    await books.flush()
    return bool(leases)


async def there(books: Books, job: Job) -> Reused:
    """What a run that is gone on with has answered already."""
    kept: Counter[int] = Counter()
    for (pair, state), tasks in (await books.call(books.ledger.counts)).items():
        if state == State.DONE:
            kept[job.layout.pairs[pair][0]] += tasks
    return await _told(books, job, kept)


async def _told(books: Books, job: Job, kept: Counter[int]) -> Reused:
    asked: Counter[int] = Counter()
    for (pair, state), tasks in (await books.call(books.ledger.counts)).items():
        if state in (State.WAITING, State.READY, State.LEASED):
            asked[job.layout.pairs[pair][0]] += tasks
    calls = job.layout.tasks.calls
    numbers = range(len(calls))
    return Reused(calls, tuple(kept[n] for n in numbers), tuple(asked[n] for n in numbers))
