"""What the lines of a run share, and how a task's lease ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from lengthwise.apps.ledger.contracts import Output
from lengthwise.apps.run._suspects import Suspects
from lengthwise.apps.run._work import Berth, Work, again, dead, done
from lengthwise.apps.run.books import Books
from lengthwise.apps.run.contracts import Job


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
        kept: Tokens of answers that were cut off, by place.
    """

    job: Job
    books: Books
    now_s: Callable[[], float]
    idle: Callable[[], None]
    down: Callable[[Berth, bool], None]
    failed: Callable[[BaseException], None]
    suspects: Suspects = field(default_factory=Suspects)
    asking: dict[str, Work] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    shunned: dict[int, Berth] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)


class Verdicts:
    """Ends leases: of a task and of those that ask the very same.

    Args:
        shared: Of the run.
        stir: Called when a task that was to wait may be leased again.
    """

    def __init__(self, shared: Shared, stir: Callable[[], None]) -> None:
        self._shared, self._stir = shared, stir

    def answered(self, work: Work, output: Output) -> None:
        """It has its answer."""
        self._forget(work)
        for lease in (work.lease, *work.twins):
            self._shared.books.end(done(lease, work.key, output))

    def dead(self, work: Work, error: str) -> None:
        """It is left alone."""
        self._forget(work)
        for lease in (work.lease, *work.twins):
            self._shared.books.end(dead(lease, error))

    def attempted(self, work: Work, error: str, berth: Berth) -> None:
        """It was tried in vain: again after a while, elsewhere where there is an elsewhere, or never again."""
        job, shared = self._shared.job, self._shared
        if work.lease.attempt >= job.settings.max_attempts:
            self.dead(work, f"tried {work.lease.attempt} times; at last: {error}")
            return
        shared.shunned[work.place] = berth
        at_s = shared.now_s() + job.backoff_s(work.place, work.lease.attempt)
        self.give_back(work, error, not_before_s=at_s, counts=True)

    def has_no_room(self, work: Work, error: str, berth: Berth, after_s: float = 0.0) -> None:
        """The engine was full: again after a while, not before it wants to be asked; so often it is an attempt.

        What it wants is heard up to the longest time between attempts: an engine must not hold up a run for ever.
        """
        tries = self._shared.tries[work.place] = self._shared.tries.get(work.place, 0) + 1
        if tries % BUSY_TRIES == 0:
            self.attempted(work, error, berth)
        else:
            job = self._shared.job
            wait_s = max(job.backoff_s(work.place, tries), min(after_s, job.settings.most_backoff_s))
            at_s = self._shared.now_s() + wait_s
            self.give_back(work, error, not_before_s=at_s)

    def give_back(
        self, work: Work, error: str | None, *, not_before_s: float = 0.0, counts: bool = False
    ) -> None:
        """Others may lease it, from a moment on."""
        self._shared.asking.pop(work.key, None)
        end = self._shared.books.end
        end(again(work.lease, error, not_before_s=not_before_s, counts=counts))
        for lease in work.twins:
            end(again(lease, None, not_before_s=not_before_s))
        if not_before_s > 0.0:
            wait_s = max(0.0, not_before_s - self._shared.now_s()) + 0.01
            asyncio.get_running_loop().call_later(wait_s, self._stir)

    def _forget(self, work: Work) -> None:
        shared = self._shared
        shared.asking.pop(work.key, None)
        shared.suspects.cleared(work.place)
        shared.tries.pop(work.place, None)
        shared.shunned.pop(work.place, None)
        shared.kept.pop(work.place, None)


BUSY_TRIES = 20
"""An engine that is full for ever must not hold up a run for ever."""
