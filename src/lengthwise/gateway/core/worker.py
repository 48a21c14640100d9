"""A worker as the scheduler keeps it: who is there, what is still to come, and how many it is given."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace

from lengthwise.gateway.config import Dispatch
from lengthwise.gateway.core.cached import Cached
from lengthwise.gateway.core.cap import Cap
from lengthwise.gateway.core.entry import PREFILL_WEIGHT, Entry, State
from lengthwise.gateway.core.phases import Phasing
from lengthwise.gateway.core.price import Price
from lengthwise.gateway.core.speed import Speed
from lengthwise.gateway.decisions import Phase, WorkerNumbers, WorkerState
from lengthwise.gateway.request import Forecast

UNBOUND = sys.maxsize
"""The cap of a worker that is given all that come."""
_COLD = 0.25
"""A start of which a larger share may be cached does not say what a prompt costs."""


class Worker:
    """One worker.

    Attributes:
        state: What it was last seen to be.
        there: Requests in flight by id, with those that are being cut.
        tokens: Predicted output tokens still to come from it.
        work: The same with what its prompts cost.
        kv_tokens: What its requests will hold at their end, if predictions hold.
        cutting: How many are being cut.
        speed: Output tokens a second.
        price: What a cut and a prompt cost there.
        cached: Which beginnings of prompts it has probably in its cache.
        phasing: The phase that it is in; None where it keeps no schedule.
        beside: Those that leave, of the same engine under another key: they have some of its seats.

    Args:
        state: What it is seen to be.
        dispatch: Bounds of its cap, and its schedule.
        unheld: Whether it is given all at once, up to a cap of its own (``state.in_flight``).
        told: Hears of its phases, where it keeps the schedule.
    """

    def __init__(
        self,
        state: WorkerState,
        dispatch: Dispatch,
        *,
        unheld: bool,
        told: Callable[[Phase], None] | None = None,
    ) -> None:
        self.state = state
        self.there: dict[int, Entry] = {}
        self.tokens = self.work = self.kv_tokens = 0.0
        self.cutting = 0
        self.speed, self.price, self.cached = Speed(), Price(), Cached()
        self.beside: tuple[Worker, ...] = ()
        self._unheld = unheld
        self._cap = Cap(dispatch)
        # Until then it may have had a queue of its own: what waited there does not tell what a prompt costs.
        self._queued_s = -math.inf
        self.phasing: Phasing | None = None
        if told is not None and dispatch.phases is not None:
            self.phasing = Phasing(lambda: self.name, dispatch.phases, told)

    @property
    def name(self) -> str:
        """Its name."""
        return self.state.name

    @property
    def cap(self) -> int:
        """The most requests it is given at once; UNBOUND where nothing is held back."""
        if self.phasing is not None:
            return self._most(self.phasing)
        if self.state.in_flight is not None:
            return self.state.in_flight
        return UNBOUND if self._unheld else self._cap.limit(self.state.slots)

    def configure(self, dispatch: Dispatch) -> None:
        """Other bounds of its cap."""
        self._cap.configure(dispatch)
        if self.phasing is not None and dispatch.phases is not None:
            self.phasing.configure(dispatch.phases)

    def rename(self, name: str) -> None:
        """It is called so from now on, for those who are there as well."""
        self.state = replace(self.state, name=name)
        for entry in self.there.values():
            entry.worker = entry.request.worker = name

    def inherit(self, other: Worker) -> None:
        """It is the engine that the other one, which leaves, was: what was learned of it is of both."""
        self.speed, self.price, self.cached, self._cap = other.speed, other.price, other.cached, other._cap

    @property
    def _taken(self) -> int:
        """Seats of its engine that are taken."""
        return len(self.there) + sum(len(one.there) for one in self.beside)

    @property
    def _kv_taken(self) -> float:
        return self.kv_tokens + sum(one.kv_tokens for one in self.beside)

    def room(self, now_s: float) -> int:
        """How many more it may be given now."""
        if now_s < self._cap.held_until_s or not self.state.up:
            return 0
        return self.cap - self._taken

    def held_until_s(self, now_s: float) -> float:
        """When it may be given requests again after it had refused one; inf where it is not held."""
        held_s = self._cap.held_until_s
        return held_s if held_s > now_s and self.state.up else math.inf

    def admits(self, entry: Entry, waiting: int) -> bool:
        """Whether its phase lets the request in now, where so many wait; who has waited too long is always let in."""
        return self.phasing is None or entry.overdue or self.phasing.takes(entry, waiting)

    def fits(self, entry: Entry) -> bool:
        """Whether its cache would hold the request to its end; an empty one takes any."""
        kv_tokens = self.state.kv_tokens
        if kv_tokens is None or self._unheld or not self._taken:
            return True
        return self._kv_taken + entry.kv_tokens <= kv_tokens

    def room_without(self, entry: Entry, leaver: Entry) -> bool:
        """Whether there would be a place for the request once the leaver, and all that are being cut, are gone."""
        if not self.state.up or self._taken - self.cutting > self.cap:
            return False
        kv_tokens = self.state.kv_tokens
        if kv_tokens is None or self._taken - self.cutting == 1:
            return True
        return self._kv_taken - leaver.kv_tokens + entry.kv_tokens <= kv_tokens

    def drain_s(self, speed: float, more: float = 0.0) -> float:
        """Token-seconds: its backlog with so much more, in the seconds that a token takes it."""
        return (self.work + more) / speed

    def prefill_s(self, speed: float) -> float:
        """Seconds that a prompt token takes it, as its starts have shown: never more than an output token."""
        shown_s = self.price.prefill_s()
        return PREFILL_WEIGHT / speed if shown_s is None else min(shown_s, 1.0 / speed)

    # -- requests --------------------------------------------------------------------------

    def put(self, entry: Entry) -> None:
        """It is sent there."""
        entry.state, entry.worker, entry.request.worker = State.RUNNING, self.name, self.name
        entry.heard_s = math.nan
        q = entry.request
        q.cached_tokens = min(int(self.cached.sent(q.leading, self.state.kv_tokens)), q.prompt_tokens)
        self.there[entry.request.id] = entry
        self._add(entry, 1)
        self._cap.used(self._taken)
        if self._unheld and self.state.signals.waiting is None and len(self.there) > 1:
            self._queued_s = q.dispatched_s
        if self.phasing is not None:
            self.phasing.sent(entry)

    def take(self, entry: Entry) -> None:
        """It is there no more."""
        del self.there[entry.request.id]
        self._add(entry, -1)
        self.cutting -= entry.state is State.CUT
        if self.phasing is not None:
            self.phasing.left(entry.request.id)
        if not self.there:
            self.tokens = self.work = self.kv_tokens = 0.0

    def cut(self, now_s: float, entry: Entry) -> None:
        """It is to be brought back from there."""
        entry.state, entry.cut_s = State.CUT, now_s
        self.cutting += 1

    def came_back(self, now_s: float, entry: Entry) -> None:
        """It was cut: its place made nothing since its last token."""
        self.price.came_back(now_s - max(entry.cut_s, entry.heard_s))

    def keep(self, entry: Entry) -> bool:
        """It stays there to its end; whether it was to be brought back."""
        entry.kept, was_cut = True, entry.state is State.CUT
        if was_cut:
            entry.state = State.RUNNING
            self.cutting -= 1
        return was_cut

    def believe(self, entry: Entry, forecast: Forecast) -> None:
        """A new forecast of one that is there."""
        self._add(entry, -1)
        entry.believe(forecast)
        self._add(entry, 1)

    def progressed(self, now_s: float, entry: Entry, tokens: int) -> bool:
        """So many more tokens came of one that is there; they are counted already. Whether its phase is over by it."""
        self.speed.made(now_s, tokens)
        self._cap.accepted(entry.request.dispatched_s)
        self._heard(now_s, entry, tokens)
        remaining, work, kv_tokens = entry.remaining, entry.work, entry.kv_tokens
        entry.settle()
        self.tokens += entry.remaining - remaining
        self.work += entry.work - work
        self.kv_tokens += entry.kv_tokens - kv_tokens
        return self.phasing is not None and self.phasing.progressed(now_s, entry.request.id, tokens)

    def _heard(self, now_s: float, entry: Entry, tokens: int) -> None:
        since_s, entry.heard_s, q = entry.heard_s, now_s, entry.request
        if q.at_once:
            return  # all of it: neither when it began nor how fast it came can be told
        if since_s == since_s:  # noqa: PLR0124  NaN
            self.price.streamed(tokens, now_s - since_s)
        elif q.dispatched_s > self._queued_s:
            context, took_s = q.prompt_tokens + q.generated_tokens - tokens, now_s - q.dispatched_s
            cold = entry.admissions == 1 and q.cached_tokens <= _COLD * context
            self.price.began(context, took_s, cold=cold)

    def _add(self, entry: Entry, one: int) -> None:
        self.tokens += one * entry.remaining
        self.work += one * entry.work
        self.kv_tokens += one * entry.kv_tokens

    # -- what it tells ---------------------------------------------------------------------

    def seen(self, now_s: float, state: WorkerState) -> list[Entry]:
        """Takes what it tells now; returns who was there before it started anew."""
        lost: list[Entry] = []
        if state.epoch != self.state.epoch:
            lost, self._cap, self.price = self.lose(), Cap(self._cap.dispatch), Price()
            self.cached = Cached(self.cached.most)
        self.state = state
        if state.tokens_per_s is not None:
            self.speed.told(now_s, state.tokens_per_s)
        if state.signals.waiting:
            self._queued_s = now_s
        if not state.was:
            self._cap.look(now_s, state.signals, self._taken)
        return lost

    def lose(self) -> list[Entry]:
        """Nobody is there any more; returns who was."""
        if self.phasing is not None:
            self.phasing.lost()
        lost = list(self.there.values())
        for entry in lost:
            self.take(entry)
            entry.state = State.LOST
        return lost

    def _most(self, phasing: Phasing) -> int:
        """The cap of one that keeps a schedule: what that lets there be, never above its seats."""
        high = phasing.phases.high or self._cap.dispatch.most
        return min(high, self.state.in_flight or high, self.state.slots or high)

    def refused(self, now_s: float, hold_s: float) -> None:
        """Its own queue was full; it wants nothing for so long."""
        self._cap.refused(now_s, self._taken, hold_s)

    def numbers(self, speed: float) -> WorkerNumbers:
        """It now, for people."""
        return WorkerNumbers(
            self.name,
            self.state.up,
            len(self.there),
            None if self.cap == UNBOUND else self.cap,
            self.drain_s(speed),
            self.tokens,
            self.state.signals,
        )
