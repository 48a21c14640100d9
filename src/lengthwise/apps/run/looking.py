"""Whether a run is where it was planned to be: looked at now and then, beside the run, and its plan made anew.

A plan that is still looked for when engines start is followed as soon as it is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from lengthwise.apps.run.books import Books
from lengthwise.apps.run.contracts import Drifted, Guide, Job, Revised
from lengthwise.apps.run.following import Following
from lengthwise.apps.run.standing import Standing
from lengthwise.schema.app import Placement
from lengthwise.schema.errors import LengthwiseError

LOOKS = 24
"""How often lengths are looked at, each time after a twelfth of the time that was planned."""
SEARCHES = 3
"""For each plan made anew so often another is sought at most."""
_LOOK_SHARE = 1 / 12
_EARLIEST_S = 1.0


class Looking:
    """Looks at a run without holding it up.

    Args:
        job: The run.
        books: Its ledger.
        written: Tells tokens of answers so far, by place.
        placement: Tells where engines are.
        told: Hears what came of it ("replan" or "keep", and why), and that there is another guide to follow.
    """

    def __init__(
        self,
        job: Job,
        books: Books,
        written: Callable[[], Mapping[int, int]],
        placement: Callable[[], Placement],
        told: Callable[[str, str], None],
    ) -> None:
        self._job, self._books, self._told = job, books, told
        self._written, self._placement = written, placement
        self._under_way: asyncio.Task[None] | None = None
        self._looks = self._replans = self._searches = 0
        self._next_s: float | None = None

    def seek(self, following: Following, at_s: Callable[[], float]) -> asyncio.Task[None] | None:
        """Begins to wait for the plan that is still looked for; None: none is.

        Args:
            following: What follows it then.
            at_s: Tells seconds since the start of the run.
        """
        if self._job.seek is None:
            return None
        self._under_way = asyncio.get_running_loop().create_task(
            self._sought(following, self._job.seek, at_s)
        )
        return self._under_way

    async def _sought(
        self, following: Following, seek: Callable[[], Guide], at_s: Callable[[], float]
    ) -> None:
        try:
            guide = await self._books.beside(seek)
        except LengthwiseError as error:
            self._told("keep", f"no other plan was found: {error}")
        else:
            goes_on = guide.stages[:1] == following.guide.stages[:1]
            following.follow(guide, 0.0 if goes_on else at_s())
            if not goes_on:
                self._told("replan", "a better plan was found, which begins with other engines")
        self._under_way = None

    def look(self, following: Following, standing: Standing, at_s: float) -> asyncio.Task[None] | None:
        """Begins to look where there is reason to; what has begun, to be watched for errors."""
        if self._job.replan is None or self._under_way is not None:
            return None
        most = self._job.settings.replans
        if self._replans >= most or self._searches >= SEARCHES * most:
            return None
        drifted = following.drifted(standing, at_s)
        if drifted is None and self._is_time(following, at_s):
            drifted = following.looked_at(standing, at_s)
        if drifted is None:
            return None
        self._under_way = asyncio.get_running_loop().create_task(self._looked(following, drifted, at_s))
        return self._under_way

    def _is_time(self, following: Following, at_s: float) -> bool:
        if following.end_s is None or self._looks >= LOOKS:
            return False
        apart_s = max(_EARLIEST_S, following.planned_s * _LOOK_SHARE)
        if self._next_s is None:
            self._next_s = at_s + apart_s
        if at_s < self._next_s:
            return False
        self._looks, self._next_s = self._looks + 1, at_s + apart_s
        return True

    async def _looked(self, following: Following, drifted: Drifted, at_s: float) -> None:
        replan = self._job.replan
        assert replan is not None
        try:
            ended = await self._books.call(self._books.ledger.lengths)
            whole = replace(drifted, ended=ended, written=self._written(), placement=dict(self._placement()))
            found = await self._books.beside(lambda: replan(whole))
        except LengthwiseError as error:
            # A run goes on by the plan that it has, whatever comes of looking for another.
            self._told("keep", f"no other plan was found: {error}")
            found = None
        if isinstance(found, Guide):
            found = Revised(found, True, f"stage {drifted.stage + 1}")
        elif found is None and drifted.is_late:
            self._told("keep", f"stage {drifted.stage + 1}")
        if found is not None:
            self._searches += 1
            self._replans += found.is_new
            following.follow(found.guide, at_s)
            self._told("replan" if found.is_new else "keep", found.about)
        self._under_way = None
