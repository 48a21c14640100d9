"""Whether somebody who runs gives way to somebody who waits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lengthwise.gateway.plugin.book import Book, Entry
from lengthwise.policy.compile import interpreted
from lengthwise.policy.named import resolve

PREFILL_WEIGHT = 0.1
"""What a prompt token costs of an output token, as in the gateway's own queue."""


class GivingWay:
    """Asks the takeover policy of the first of who waits and the worst of who runs.

    It is asked after a change of the queue and every ``window_tokens`` steps. Who was cut too often, is overdue
    or has not had its window since is left alone; only strictly better keys take a place.
    """

    def __init__(self, book: Book, clock: Callable[[], float]) -> None:
        self._book, self._settings, self._clock = book, book.settings, clock
        self._gain = interpreted(resolve("takeover", book.settings.takeover))
        self._steps, self._wanted, self._cut_s = 0, False, -math.inf

    def looks(self, *, changed: bool, shut: bool) -> bool:
        """Whether it is time to ask; call it once a step.

        Args:
            changed: Whether the queue changed.
            shut: Whether there is no place for anybody who waits.
        """
        self._steps += 1
        self._wanted |= changed or self._steps >= self._settings.window_tokens
        if not (shut and self._wanted) or self._clock() < self._cut_s + self._settings.between_cuts_s:
            return False
        self._steps, self._wanted = 0, False
        return True

    def victim(self, first: Any, running: list[Any], waiting: int, may_leave: Callable[[Any], bool]) -> Any:
        """Who gives way to the first of who waits; None nobody.

        Args:
            first: Of those who wait.
            running: Who runs.
            waiting: How many wait.
            may_leave: Whether the engine lets it go now.
        """
        now_s, book = self._clock(), self._book
        mine = book.entry(first)
        worst = None
        for request in running:
            entry = book.entry(request)
            if not self._may_be_cut(mine, entry) or not may_leave(request):
                continue
            place = book.key(now_s, entry)
            if worst is None or place > worst[0]:
                worst = place, entry
        if worst is None or not self._worth(now_s, mine, worst[1], len(running), waiting):
            return None
        return worst[1].request

    def cut(self, request: Any) -> None:
        """Notes that it gave way."""
        self._book.entry(request).cuts += 1
        self._cut_s = self._clock()

    def _may_be_cut(self, mine: Entry, entry: Entry) -> bool:
        request = entry.request
        if entry.overdue or entry.cuts >= self._settings.max_preemptions:
            return False
        if request.is_prefill_chunk or not 1 <= request.num_output_tokens >= entry.settled:
            return False
        return mine.overdue or mine.hint.priority <= entry.hint.priority

    def _worth(self, now_s: float, mine: Entry, other: Entry, resident: int, waiting: int) -> bool:
        book, request = self._book, other.request
        gain = self._gain(
            -math.inf if mine.overdue else book.rank_key(now_s, mine),
            book.rank_key(now_s, other),
            book.remaining_tokens(mine),
            book.remaining_tokens(other),
            request.num_output_tokens,
            (request.num_prompt_tokens + request.num_output_tokens) * PREFILL_WEIGHT / resident,
            resident,
            waiting,
            mine.waited_s + now_s - mine.queued_s,
            other.cuts,
        )
        return bool(gain > 0)
