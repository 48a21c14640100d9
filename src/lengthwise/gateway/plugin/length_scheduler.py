"""vLLM's own scheduler, its queue in order of predicted length."""

from __future__ import annotations

import heapq
import math
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lengthwise.gateway.plugin.settings import Hint, Settings, hint_of, settings_of
from lengthwise.gateway.plugin.vllm_adapter import Guarded, Rules, doubts_of_classes, doubts_of_scheduler, log
from lengthwise.policy.compile import interpreted
from lengthwise.policy.named_schedulers import resolve

Key = tuple[int, int, float, int]
"""Overdue first; class; the rank's key; arrival."""
_MIN_COUNT = 256
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
        queued_for_s: In the queue, in all, up to its last admission.
        running: Whether it was seen admitted.
        overdue: It has waited too long and goes before all who have not.
        admission: Number of its last admission; -1 never.
        cuts: How often it gave way.
        stable: Generated tokens below which it does not give way again.
        key: Its place among who waits.
    """

    request: Any
    hint: Hint
    number: int
    arrival_s: float
    queued_s: float
    queued_for_s: float = 0.0
    running: bool = False
    overdue: bool = False
    admission: int = -1
    cuts: int = 0
    stable: int = 0
    key: Key = (1, 0, math.inf, 0)


class Registry:
    """The order of one engine.

    Attributes:
        missing: Requests without a length that can be used, so far.
        trouble: What was wrong with the last of them.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self.settings, self._clock = settings, clock
        self._policy = settings.rank_policy()
        self._rank = interpreted(self._policy)
        self._entries: dict[str, Entry] = {}
        self._deadline: list[tuple[float, int, Entry]] = []
        self._arrivals = self._admissions = 0
        self._changed, self._reordered, self._merges = True, dict[str, Entry](), 0
        self.missing, self.trouble = 0, ""

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
            getattr(request.sampling_params, "extra_args", None), request.max_tokens, self.settings.prior_tokens
        )
        if hint.trouble:
            self.missing, self.trouble = self.missing + 1, hint.trouble
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
            entry.stable = request.num_output_tokens + self.settings.window_tokens
            self._waits(now_s, entry)

    def admitted(self, running: list[Any]) -> bool:
        """Notes who was admitted: the last of who runs. Whether anybody was."""
        now_s, found = self._clock(), False
        for request in reversed(running):
            entry = self.entry(request)
            if entry.running:
                break
            entry.running = found = True
            entry.queued_for_s += now_s - entry.queued_s
            entry.admission, self._admissions = self._admissions, self._admissions + 1
        return found

    def discard(self, alive: dict[str, Any]) -> None:
        """Drops requests that are over, when there are many of them."""
        if len(self._entries) > 2 * len(alive) + _MIN_COUNT:
            self._entries = {name: one for name, one in self._entries.items() if name in alive}
            self._reordered = {name: one for name, one in self._reordered.items() if name in alive}
            self._deadline = [one for one in self._deadline if one[2].request.request_id in self._entries]
            heapq.heapify(self._deadline)

    def changed(self) -> bool:
        """Whether those who wait may stand in another order than when they were last asked for."""
        now_s = self._clock()
        while self._deadline and self._deadline[0][0] <= now_s:
            entry = heapq.heappop(self._deadline)[2]
            if not entry.running:
                self._waits(now_s, entry)
        return self._changed or self._policy.every_step

    def in_order(self, waiting: Iterable[Any]) -> list[Any]:
        """Those who wait, in order.

        Few have moved since the last time: these are put in their places, the others stand in order. Now and
        then all are sorted nevertheless, so that whoever got out of place by a way nobody saw finds back.
        """
        queue, moved = list(waiting), self._reordered
        self._reordered, self._changed, self._merges = {}, False, self._merges + 1
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
                entry.queued_for_s if entry.running else entry.queued_for_s + now_s - entry.queued_s,
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
        deadline_s = entry.queued_s + self.settings.max_wait_s - entry.queued_for_s
        entry.overdue = entry.overdue or deadline_s <= now_s
        if not entry.overdue and math.isfinite(deadline_s):
            heapq.heappush(self._deadline, (deadline_s, entry.number, entry))
        entry.key = self.key(now_s, entry)
        self._reordered[entry.request.request_id] = entry
        self._changed = True


def _reads(request: Any) -> bool:
    """Whether its prompt (and what it lost) is still being computed."""
    return bool(request.is_prefill_chunk) or request.num_computed_tokens < request.num_prompt_tokens


PREFILL_WEIGHT = 0.1
"""What a prompt token costs of an output token, as in the gateway's own queue."""


class GivingWay:
    """Asks the takeover policy of the first of who waits and the worst of who runs.

    It is asked after a change of the queue and every ``window_tokens`` steps. Who was cut too often, is overdue
    or has not had its window since is left alone; only strictly better keys take a place.
    """

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._book, self._settings, self._clock = registry, registry.settings, clock
        self._gain = interpreted(resolve("takeover", registry.settings.takeover))
        self._steps, self._wanted, self._cut_s = 0, False, -math.inf

    def polls(self, *, changed: bool, shut: bool) -> bool:
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
        if worst is None or not self._is_improvement(now_s, mine, worst[1], len(running), waiting):
            return None
        return worst[1].request

    def cut(self, request: Any) -> None:
        """Notes that it gave way."""
        self._book.entry(request).cuts += 1
        self._cut_s = self._clock()

    def _may_be_cut(self, own: Entry, entry: Entry) -> bool:
        request = entry.request
        if entry.overdue or entry.cuts >= self._settings.max_preemptions:
            return False
        if request.is_prefill_chunk or not 1 <= request.num_output_tokens >= entry.stable:
            return False
        return own.overdue or own.hint.priority <= entry.hint.priority

    def _is_improvement(self, now_s: float, own: Entry, other: Entry, num_running: int, waiting: int) -> bool:
        book, request = self._book, other.request
        gain = self._gain(
            -math.inf if own.overdue else book.rank_key(now_s, own),
            book.rank_key(now_s, other),
            book.remaining_tokens(own),
            book.remaining_tokens(other),
            request.num_output_tokens,
            (request.num_prompt_tokens + request.num_output_tokens) * PREFILL_WEIGHT / num_running,
            num_running,
            waiting,
            own.queued_for_s + now_s - own.queued_s,
            other.cuts,
        )
        return bool(gain > 0)


TIGHT = 0.8
"""Above this share of the KV cache in use somebody may soon have to leave."""
_READY = ("WAITING", "PREEMPTED")


class Order:
    """What is done to one scheduler before and after a step. Any error of it is the caller's to meet.

    Args:
        settings: How.
        clock: The time.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = Registry(settings, clock)
        self._giving_way = GivingWay(self.registry, clock) if settings.takes_over else None
        self._window, self._since_sorted, self._report = settings.window_tokens, settings.window_tokens, False
        self._clock, self._shut_out = clock, False

    def before(self, scheduler: Any) -> Any:
        """Puts queue and batch in order; the request that had to give way, held out of the queue, or None."""
        if scheduler.pause_state:
            return None
        changed = self.registry.changed()
        max_num_seqs = scheduler.max_num_active_reqs - scheduler.num_waiting_for_streaming_input
        full, tight = len(scheduler.running) >= max_num_seqs, scheduler.get_kv_cache_usage() > TIGHT
        shut = full or (tight and self._shut_out)
        looks = self._giving_way is not None and self._giving_way.polls(changed=changed, shut=shut)
        if scheduler.waiting and changed and (looks or not full):
            self._sort(scheduler)
        if tight:
            self._sort_batch(scheduler)
        return self._preemption_pass(scheduler) if looks and scheduler.waiting else None

    def after(self, scheduler: Any) -> None:
        """Notes what the step did."""
        admitted = self.registry.admitted(scheduler.running)
        self._shut_out = not admitted
        if admitted:
            self._since_sorted = self._window
        self.registry.discard(scheduler.requests)
        if self.registry.missing and not self._report:
            self._report = True
            log.warning(
                "lengthwise: a request came without a length that can be used (%s); such requests count as %g "
                "tokens long. This is said once",
                self.registry.trouble,
                self.registry.settings.prior_tokens,
            )

    def _sort(self, scheduler: Any) -> None:
        waiting = scheduler.waiting
        ordered = self.registry.in_order(waiting)
        if len(ordered) != len(waiting):
            raise RuntimeError("the queue changed while it was put in order")
        waiting.clear()
        waiting.extend(ordered)

    def _sort_batch(self, scheduler: Any) -> None:
        """Whoever is to leave first, if memory runs out, stands last: there vLLM takes them from."""
        self._since_sorted += 1
        if self._since_sorted > self._window:
            self._since_sorted = 0
            scheduler.running[:] = self.registry.worst_last(scheduler.running)

    def _preemption_pass(self, scheduler: Any) -> Any:
        if scheduler.connector is not None or scheduler.ec_connector is not None or scheduler.kv_holding_waiting:
            return None
        first = scheduler.waiting[0]
        if first.status.name not in _READY or self._giving_way is None:
            return None
        may_leave = scheduler._request_blocks_can_be_freed  # noqa: SLF001 - it has no other door
        victim = self._giving_way.victim(first, scheduler.running, len(scheduler.waiting), may_leave)
        if victim is None:
            return None
        _preempt(scheduler, victim, self._clock())
        self._giving_way.cut(victim)
        # It must not come back in this very step: the workers are only told then that it left.
        scheduler.waiting.remove_request(victim)
        return victim


def _preempt(scheduler: Any, victim: Any, now_s: float) -> None:
    """Has it leave the batch; whatever fails, it is in the batch or in the queue."""
    scheduler.running.remove(victim)
    try:
        scheduler._preempt_request(victim, now_s)  # noqa: SLF001
    except BaseException:
        if victim not in scheduler.waiting:
            scheduler.running.append(victim)
        raise


class Ordering(Guarded):
    """Goes before vLLM's own scheduler class. At the first error it gives up for good: stock order from then on."""

    lengthwise: Order | None = None
    """None: the engine's own order."""

    def schedule(self, *args: Any, **named: Any) -> Any:
        """A step, its queue in order."""
        held = self._lengthwise(lambda order: order.before(self))
        try:
            return super().schedule(*args, **named)  # type: ignore[misc]
        finally:
            if held is not None:
                self.waiting.prepend_request(held)  # type: ignore[attr-defined]
            self._lengthwise(lambda order: order.after(self))

    def add_request(self, request: Any) -> None:
        """It waits from now on."""
        super().add_request(request)  # type: ignore[misc]
        self._lengthwise(lambda order: order.registry.entry(request))

    def _preempt_request(self, request: Any, *args: Any, **named: Any) -> None:
        super()._preempt_request(request, *args, **named)  # type: ignore[misc]
        self._lengthwise(lambda order: order.registry.left_batch(request))


class LengthScheduler:
    """Makes the scheduler that vLLM would make itself, with its queue in order of predicted length.

    Where anything is in doubt it is vLLM's own and nothing else, and the log says why.
    """

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """A scheduler."""
        return _ORDERED.made(cls.__name__, args, named)


def _warnings(stock: type, _: Any) -> Iterator[str]:
    yield from doubts_of_classes(stock, import_module("vllm.v1.request").Request)


def _says(settings: Settings) -> str:
    return (
        f"orders this engine: rank {settings.rank}, takeover {settings.takeover}, nobody waits over "
        f"{settings.max_wait_s:g} s behind later ones"
    )


_ORDERED = Rules(Ordering, settings_of, _warnings, doubts_of_scheduler, Order, _says, "order")
