"""Who waits and who runs in one engine, and in which order: no vLLM in here but its requests."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lengthwise.gateway.plugin.hint import Hint, hint_of
from lengthwise.gateway.plugin.settings import Settings
from lengthwise.policy.compile import interpreted

Key = tuple[int, int, float, int]
"""Overdue first; class; the rank's key; arrival."""
_FEW = 256
_MANY, _SORT_AFTER = 8, 100


@dataclass(slots=True, eq=False)
class Entry:
    """A request as the order knows it.

    Attributes:
        request: vLLM's.
        hint: What was told of its length.
        number: Of its arrival.
        arrival_s: When it came.
        queued_s: When it joined the queue last.
        waited_s: In the queue, in all, up to its last admission.
        running: Whether it was seen admitted.
        overdue: It has waited too long and goes before all who have not.
        admission: Number of its last admission; -1 never.
        cuts: How often it gave way.
        settled: Generated tokens below which it does not give way again.
        key: Its place among who waits.
    """

    request: Any
    hint: Hint
    number: int
    arrival_s: float
    queued_s: float
    waited_s: float = 0.0
    running: bool = False
    overdue: bool = False
    admission: int = -1
    cuts: int = 0
    settled: int = 0
    key: Key = (1, 0, math.inf, 0)


class Book:
    """The order of one engine.

    Attributes:
        untold: Requests without a length that can be used, so far.
        trouble: What was wrong with the last of them.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self.settings, self._clock = settings, clock
        self._policy = settings.rank_policy()
        self._rank = interpreted(self._policy)
        self._entries: dict[str, Entry] = {}
        self._due: list[tuple[float, int, Entry]] = []
        self._arrivals = self._admissions = 0
        self._changed, self._moved, self._merges = True, dict[str, Entry](), 0
        self.untold, self.trouble = 0, ""

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, request: Any) -> Entry:
        """What is known of a request; one that nobody saw coming came now."""
        found = self._entries.get(request.request_id)
        return found if found is not None and found.request is request else self.joined(request)

    def joined(self, request: Any) -> Entry:
        """Notes a request that came."""
        now_s = self._clock()
        hint = hint_of(
            getattr(request.sampling_params, "extra_args", None),
            request.max_tokens,
            self.settings.prior_tokens,
        )
        if hint.trouble:
            self.untold, self.trouble = self.untold + 1, hint.trouble
        entry = Entry(request, hint, self._arrivals, now_s, now_s)
        self._arrivals += 1
        self._entries[request.request_id] = entry
        self._waits(now_s, entry)
        return entry

    def left_batch(self, request: Any) -> None:
        """Notes that a running request is back in the queue."""
        entry, now_s = self.entry(request), self._clock()
        self._changed = True
        if entry.running:
            entry.running, entry.queued_s = False, now_s
            entry.settled = request.num_output_tokens + self.settings.window_tokens
            self._waits(now_s, entry)

    def admitted(self, running: list[Any]) -> bool:
        """Notes who was admitted: the last of who runs. Whether anybody was."""
        now_s, found = self._clock(), False
        for request in reversed(running):
            entry = self.entry(request)
            if entry.running:
                break
            entry.running = found = True
            entry.waited_s += now_s - entry.queued_s
            entry.admission, self._admissions = self._admissions, self._admissions + 1
        return found

    def forget(self, alive: dict[str, Any]) -> None:
        """Drops requests that are over, when there are many of them."""
        if len(self._entries) > 2 * len(alive) + _FEW:
            self._entries = {name: one for name, one in self._entries.items() if name in alive}
            self._moved = {name: one for name, one in self._moved.items() if name in alive}
            self._due = [one for one in self._due if one[2].request.request_id in self._entries]
            heapq.heapify(self._due)

    def changed(self) -> bool:
        """Whether those who wait may stand in another order than when they were last asked for."""
        now_s = self._clock()
        while self._due and self._due[0][0] <= now_s:
            entry = heapq.heappop(self._due)[2]
            if not entry.running:
                self._waits(now_s, entry)
        return self._changed or self._policy.every_step

    def in_order(self, waiting: Iterable[Any]) -> list[Any]:
        """Those who wait, in order.

        Few have moved since the last time: these are put in their places, the others stand in order. Now and
        then all are sorted nevertheless, so that whoever got out of place by a way nobody saw finds back.
        """
        queue, moved = list(waiting), self._moved
        self._moved, self._changed, self._merges = {}, False, self._merges + 1
        if self._policy.every_step or len(moved) * _MANY > len(queue) or self._merges >= _SORT_AFTER:
            self._merges = 0
            return self._sorted(queue)
        ordered = [request for request in queue if request.request_id not in moved]
        for request in queue if len(ordered) < len(queue) else ():
            if request.request_id in moved:
                insort(ordered, request, key=self._place)
        return ordered

    def _sorted(self, queue: list[Any]) -> list[Any]:
        if self._policy.every_step:
            now_s = self._clock()
            for request in queue:
                entry = self.entry(request)
                entry.key = self.key(now_s, entry)
        return sorted(queue, key=self._place)

    def _place(self, request: Any) -> Key:
        return self.entry(request).key

    def worst_last(self, running: Iterable[Any]) -> list[Any]:
        """Those who run: who leaves last first; who still has its prompt read leaves before all others.

        These stand behind, as they would in the order of admission: a step's tokens go to decodes first.
        """
        now_s = self._clock()
        keyed = [(_reads(request), *self.key(now_s, self.entry(request)), request) for request in running]
        return [one[-1] for one in sorted(keyed, key=lambda one: one[:-1])]

    def key(self, now_s: float, entry: Entry) -> Key:
        """Its place among others at this time."""
        if entry.overdue:
            return 0, 0, 0.0, entry.number
        key = self.rank_key(now_s, entry)
        return 1, entry.hint.priority, key, entry.number

    def rank_key(self, now_s: float, entry: Entry) -> float:
        """The rank's key; what is no number is the last place."""
        request, generated = entry.request, entry.request.num_output_tokens
        predicted = self.predicted_tokens(entry)
        key = float(
            self._rank(
                now_s,
                entry.arrival_s,
                request.num_prompt_tokens,
                generated,
                predicted,
                max(1.0, predicted - generated),
                math.nan,
                entry.waited_s if entry.running else entry.waited_s + now_s - entry.queued_s,
                entry.hint.priority,
                entry.admission,
                entry.cuts,
                math.nan,
                0,
            )
        )
        return key if key == key else math.inf  # noqa: PLR0124

    def predicted_tokens(self, entry: Entry) -> float:
        """The length predicted at the last window."""
        window = self.settings.window_tokens
        return entry.hint.predicted_tokens(entry.request.num_output_tokens // window * window)

    def remaining_tokens(self, entry: Entry) -> float:
        """Of it what is still to come, at least 1."""
        generated: int = entry.request.num_output_tokens
        return max(1.0, self.predicted_tokens(entry) - generated)

    def _waits(self, now_s: float, entry: Entry) -> None:
        """Files it; it is overdue when it has waited too long in all."""
        due_s = entry.queued_s + self.settings.max_wait_s - entry.waited_s
        entry.overdue = entry.overdue or due_s <= now_s
        if not entry.overdue and math.isfinite(due_s):
            heapq.heappush(self._due, (due_s, entry.number, entry))
        entry.key = self.key(now_s, entry)
        self._moved[entry.request.request_id] = entry
        self._changed = True


def _reads(request: Any) -> bool:
    """Whether its prompt (and what it lost) is still being computed."""
    return bool(request.is_prefill_chunk) or request.num_computed_tokens < request.num_prompt_tokens
