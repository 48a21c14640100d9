"""Leases become requests: what parents answered is looked up, templates are filled, known answers are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lengthwise.apps.launch.contracts import Draft
from lengthwise.apps.ledger.contracts import Ending, Lease, Output
from lengthwise.apps.run._work import Work, dead, done, skipped
from lengthwise.apps.run.books import Books
from lengthwise.apps.run.contracts import Asked, Decider
from lengthwise.apps.run.layout import Layout
from lengthwise.schema.errors import InputError


@dataclass
class Prepared:
    """What came of leases.

    Attributes:
        works: To be asked.
        endings: Of tasks that need no engine: skipped, known already, or without a request that could be sent.
        known: How many of them were known.
    """

    works: list[Work] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    known: int = 0


async def prepare(books: Books, layout: Layout, decider: Decider, leases: Sequence[Lease]) -> Prepared:
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


async def _known_taken(books: Books, found: Prepared, asked: list[tuple[Lease, Asked]]) -> None:
    keys = [one.key for _, one in asked]
    if not keys:
        return
    results = await books.call(lambda: books.ledger.results(keys))
    left = [key for key in keys if key not in results]
    partials = await books.call(lambda: books.ledger.partials(left)) if left else {}
    for lease, one in asked:
        if (output := results.get(one.key)) is not None:
            found.endings.append(done(lease, one.key, output))
            found.known += 1
        else:
            draft = Draft.of(partials.get(one.key))
            found.works.append(Work(lease, one.key, one.ask, draft, saved=len(draft.output_ids)))


class _Answers:
    """Answers by the application's numbers."""

    def __init__(self, layout: Layout, found: dict[int, Output | None]) -> None:
        self._layout, self._found = layout, found

    def __call__(self, task: int) -> Output | None:
        return self._found.get(int(self._layout.place_of[task]))


async def _answers(books: Books, layout: Layout, leases: Sequence[Lease]) -> _Answers:
    parents = sorted({place for lease in leases for place in layout.parents(lease.task).tolist()})
    found = await books.call(lambda: books.ledger.outputs(parents)) if parents else {}
    return _Answers(layout, found)
