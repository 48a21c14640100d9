"""vLLM's scheduler with its queue put in order before each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lengthwise.gateway.plugin.book import Book
from lengthwise.gateway.plugin.giving_way import GivingWay
from lengthwise.gateway.plugin.guard import Guarded, log
from lengthwise.gateway.plugin.settings import Settings

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
        self.book = Book(settings, clock)
        self._giving_way = GivingWay(self.book, clock) if settings.takes_over else None
        self._window, self._since_sorted, self._told = settings.window_tokens, settings.window_tokens, False
        self._clock, self._shut_out = clock, False

    def before(self, scheduler: Any) -> Any:
        """Puts queue and batch in order; the request that had to give way, held out of the queue, or None."""
        if scheduler.pause_state:
            return None
        changed = self.book.changed()
        seats = scheduler.max_num_active_reqs - scheduler.num_waiting_for_streaming_input
        full, tight = len(scheduler.running) >= seats, scheduler.get_kv_cache_usage() > TIGHT
        shut = full or (tight and self._shut_out)
        looks = self._giving_way is not None and self._giving_way.looks(changed=changed, shut=shut)
        if scheduler.waiting and changed and (looks or not full):
            self._sort(scheduler)
        if tight:
            self._sort_batch(scheduler)
        return self._give_way(scheduler) if looks and scheduler.waiting else None

    def after(self, scheduler: Any) -> None:
        """Notes what the step did."""
        admitted = self.book.admitted(scheduler.running)
        self._shut_out = not admitted
        if admitted:
            self._since_sorted = self._window
        self.book.forget(scheduler.requests)
        if self.book.untold and not self._told:
            self._told = True
            log.warning(
                "lengthwise: a request came without a length that can be used (%s); such requests count as %g "
                "tokens long. This is said once",
                self.book.trouble,
                self.book.settings.prior_tokens,
            )

    def _sort(self, scheduler: Any) -> None:
        waiting = scheduler.waiting
        ordered = self.book.in_order(waiting)
        if len(ordered) != len(waiting):
            raise RuntimeError("the queue changed while it was put in order")
        waiting.clear()
        waiting.extend(ordered)

    def _sort_batch(self, scheduler: Any) -> None:
        """Whoever is to leave first, if memory runs out, stands last: there vLLM takes them from."""
        self._since_sorted += 1
        if self._since_sorted > self._window:
            self._since_sorted = 0
            scheduler.running[:] = self.book.worst_last(scheduler.running)

    def _give_way(self, scheduler: Any) -> Any:
        if (
            scheduler.connector is not None
            or scheduler.ec_connector is not None
            or scheduler.kv_holding_waiting
        ):
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
        self._lengthwise(lambda order: order.book.entry(request))

    def _preempt_request(self, request: Any, *args: Any, **named: Any) -> None:
        super()._preempt_request(request, *args, **named)  # type: ignore[misc]
        self._lengthwise(lambda order: order.book.left_batch(request))
