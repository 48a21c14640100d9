"""A worker as the scheduler keeps it: who is there, what is still to come, and how many it is given."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from lengthwise.gateway.config import Dispatch
from lengthwise.gateway.core.phases import Phasing
from lengthwise.gateway.core.ranking import PREFILL_WEIGHT, Entry, State
from lengthwise.gateway.request import SIZES, LengthPrediction, PromptPrefix
from lengthwise.gateway.scheduling import Phase, Signals, WorkerNumbers, WorkerState

_SHRINK = 0.75
_HOLD_S = 0.1
_LONGEST_HOLD_S = 2.0


class Cap:
    """A cap that finds itself: doubled while nothing is in the way, then up by a sixteenth and down by what waits.

    Signs of too many: requests in the engine's own queue, a cache fuller than ``kv_high``, preemptions, a
    refusal because its queue is full. It grows only after a look at a fully used worker that shows none of
    them: an engine that tells nothing keeps the cap it starts with.
    """

    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch = dispatch
        self.held_until_s = -math.inf
        self._cap = float(dispatch.start)
        self._doubling = True
        self._most_used = 0
        self._looked_s = -math.inf
        self._signals = Signals()
        self._hold_s = _HOLD_S
        self._refused_s = -math.inf

    def configure(self, dispatch: Dispatch) -> None:
        """Other bounds; what it has found is kept within them."""
        new = self._doubling and self._cap == self.dispatch.start
        cap = float(dispatch.start) if new else self._cap
        self.dispatch = dispatch
        self._cap = min(max(cap, float(dispatch.least)), float(dispatch.most))

    def limit(self, slots: int | None) -> int:
        """The cap, never above the worker's slots."""
        cap = int(self._cap)
        return cap if slots is None else max(1, min(cap, slots))

    def used(self, in_flight: int) -> None:
        """So many are there now."""
        self._most_used = max(self._most_used, in_flight)

    def poll(self, now_s: float, signals: Signals, in_flight: int) -> None:
        """Adapts to fresh signals, not more often than ``adapt_every_s``."""
        if signals.at_s <= self._signals.at_s or now_s - self._looked_s < self.dispatch.adapt_every_s:
            return
        before, self._signals, self._looked_s = self._signals, signals, now_s
        self._hold_s = _HOLD_S
        waiting = signals.waiting or 0.0
        if _evicted(before, signals) or (signals.kv_used or 0.0) > self.dispatch.kv_high:
            self._shrink(max(in_flight, 1) * _SHRINK)
        elif waiting > 0:
            self._shrink(max(in_flight - waiting, self._cap * _SHRINK))
        elif signals.waiting is not None and self._most_used >= int(self._cap):
            self._grow()
        self._most_used = in_flight

    def refused(self, now_s: float, in_flight: int, hold_s: float = 0.0) -> None:
        """The worker said that its queue is full: it gets no more for a moment, longer each time in a row.

        Args:
            now_s: Now.
            in_flight: Requests that are there.
            hold_s: How long it wants nothing; obeyed up to 2 s.
        """
        self._shrink(float(in_flight))
        if now_s - self.held_until_s > 2 * _LONGEST_HOLD_S:
            self._hold_s = _HOLD_S
        held_s = max(self._hold_s, min(hold_s, _LONGEST_HOLD_S))
        self.held_until_s, self._refused_s = now_s + held_s, now_s
        self._hold_s = min(2 * self._hold_s, _LONGEST_HOLD_S)

    def accepted(self, sent_s: float) -> None:
        """It makes tokens for a request that was sent at this time: after a refusal it takes some again."""
        if sent_s > self._refused_s:
            self._hold_s = _HOLD_S

    def _shrink(self, to: float) -> None:
        self._doubling = False
        self._cap = max(float(self.dispatch.least), min(self._cap, to))

    def _grow(self) -> None:
        more = self._cap if self._doubling else max(1.0, self._cap / 16)
        self._cap = min(float(self.dispatch.most), self._cap + more)


def _evicted(before: Signals, now: Signals) -> bool:
    return before.preemptions is not None and (now.preemptions or 0.0) > before.preemptions


MOST_BLOCKS = 1 << 17
"""Of all workers together: about 25 MB."""
_GROWTH = tuple(size - before for before, size in zip((0, *SIZES), SIZES, strict=False))


class Cached:
    """Hashes of the leading blocks of the prompts that it was sent; the longest unused are forgotten.

    Attributes:
        most: So many hashes at most.
    """

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self.most = most
        self._tokens_of: OrderedDict[int, float] = OrderedDict()
        self._tokens = 0.0

    def __len__(self) -> int:
        return len(self._tokens_of)

    def tokens(self, prefix: PromptPrefix) -> float:
        """Leading tokens of a prompt that are probably there."""
        depth = self._depth(prefix)
        return SIZES[depth - 1] * prefix.block_tokens if depth else 0.0

    def sent(self, prefix: PromptPrefix, max_tokens: float | None = None) -> float:
        """It is computed there; returns the tokens of it that were there before.

        Args:
            leading: How the prompt begins.
            max_tokens: What the engine's cache holds; None unknown.
        """
        before, known = self.tokens(prefix), self._tokens_of
        for depth in range(len(prefix.keys) - 1, -1, -1):  # what is shared most is forgotten last
            key = prefix.keys[depth]
            if key in known:
                known.move_to_end(key)
            else:
                known[key] = tokens = _GROWTH[depth] * prefix.block_tokens
                self._tokens += tokens
        while known and (len(known) > self.most or (max_tokens is not None and self._tokens > max_tokens)):
            self._tokens -= known.popitem(last=False)[1]
        if not known:
            self._tokens = 0.0
        return before

    def _depth(self, prefix: PromptPrefix) -> int:
        known, depth = self._tokens_of, 0
        for key in prefix.keys:
            if key not in known:
                break
            depth += 1
        return depth


_LEAST_STARTS, _LEAST_COLD, _LEAST_TOKENS = 8.0, 16.0, 64.0
"""Seen before anything is believed of it."""
_START_FADES, _TOKEN_FADES = 0.98, 0.998
"""What one more says of those before it: the last 50 starts and 500 pieces count most."""
_MIN_SPREAD = 0.01
"""Of the lengths whose cost is to be told apart: their variance over their mean square."""
_LONGEST_TIMES = 4.0
"""A silence counts as so many usual ones at most: who takes a stream slowly says nothing of its engine."""


class Price:
    """Seconds of a worker, as the gateway sees them.

    A start takes ``a + b x`` (prompt and tokens so far) until the first token; a stream takes some time a token; from
    the decision of a cut until the request is back its seat is lost as well. Bringing a request back later thus takes
    from its seat the way there and back (without the step that makes the first token), and from the whole batch
    what is computed again. Until enough was seen a prompt token counts a tenth of an output token.
    """

    def __init__(self) -> None:
        self._starts, self._cold = _Line(_START_FADES), _Line(_START_FADES)
        self._tokens = self._token_s = 0.0
        self._backs = self._back_s = 0.0

    def started(self, context_tokens: int, seconds: float, *, cold: bool = False) -> None:
        """A request with so many tokens spoke so long after it had been sent; cold: hardly any were in the cache."""
        self._starts.add(float(context_tokens), seconds)
        if cold:
            self._cold.add(float(context_tokens), seconds)

    def streamed(self, tokens: int, seconds: float) -> None:
        """So many further tokens of a stream came after so long."""
        if not self._token_s:  # all before came at once: that says nothing of how long a token takes
            self._tokens = 0.0
        if self._tokens >= _LEAST_TOKENS:
            seconds = min(seconds, _LONGEST_TIMES * tokens * self._token_s / self._tokens)
        self._tokens = self._tokens * _TOKEN_FADES + tokens
        self._token_s = self._token_s * _TOKEN_FADES + seconds

    def came_back(self, seconds: float) -> None:
        """A cut took so long."""
        self._backs = self._backs * _START_FADES + 1.0
        self._back_s = self._back_s * _START_FADES + seconds

    def prefill_s(self) -> float | None:
        """Seconds of a prompt token that is in no cache; None until enough prompts of several lengths were seen."""
        if self._cold.count < _LEAST_COLD or not self._cold.varied:
            return None
        return self._cold.fit_result()[1]

    def recompute_steps(self, context_tokens: int, num_running: int) -> float:
        """What bringing a request back costs, in steps of a batch of so many that are there."""
        if self._starts.count < _LEAST_STARTS or self._tokens < _LEAST_TOKENS or not self._token_s:
            return context_tokens * PREFILL_WEIGHT / num_running
        step_s = self._token_s / self._tokens
        way_s, each_s = self._starts.fit_result()
        back_s = self._back_s / self._backs if self._backs else 0.0
        idle_s = max(0.0, way_s - step_s) + back_s
        return (idle_s / num_running + each_s * context_tokens) / step_s


class _Line:
    """A straight line through what was seen, none of its coefficients below 0; what is older counts less."""

    __slots__ = ("_fades", "_x", "_xx", "_xy", "_y", "count")

    def __init__(self, fades: float) -> None:
        self._fades = fades
        self.count = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """One more point."""
        fades = self._fades
        self.count = self.count * fades + 1.0
        self._x, self._y = self._x * fades + x, self._y * fades + y
        self._xx, self._xy = self._xx * fades + x * x, self._xy * fades + x * y

    @property
    def varied(self) -> bool:
        """Whether a slope can be told."""
        return self._xx - self._x * self._x / self.count > _MIN_SPREAD * self._xx

    def fit_result(self) -> tuple[float, float]:
        """(at 0, slope); there must be points."""
        n = self.count
        spread = self._xx - self._x * self._x / n
        slope = (self._xy - self._x * self._y / n) / spread if spread > 1e-9 * self._xx else 0.0
        if slope <= 0:
            return self._y / n, 0.0
        at_0 = (self._y - slope * self._x) / n
        return (at_0, slope) if at_0 >= 0 else (0.0, self._xy / self._xx)


_EVERY_S = 1.0
_HALF_LIFE_S = 60.0


class Speed:
    """The best rate seen, fading by half in a minute of use: a worker with little to do is not a slow one.

    Attributes:
        tokens_per_s: None while nothing was seen.
    """

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        self._since_s = math.nan
        self._made = 0
        self._told_s = -math.inf

    def made(self, now_s: float, tokens: int) -> None:
        """So many tokens came."""
        if not now_s - self._since_s < 4 * _EVERY_S:  # it begins, or it had nothing to do
            self._since_s, self._made = now_s, 0
            return
        self._made += tokens
        passed_s = now_s - self._since_s
        if passed_s >= _EVERY_S:
            self._take(self._made / passed_s, passed_s)
            self._since_s, self._made = now_s, 0

    def report(self, now_s: float, tokens_per_s: float) -> None:
        """It was seen by others to be so fast."""
        if tokens_per_s > 0:
            self._take(tokens_per_s, min(now_s - self._told_s, 4 * _EVERY_S))
        self._told_s = now_s

    def _take(self, rate: float, passed_s: float) -> None:
        if rate > 0 and math.isfinite(rate):
            faded = (self.tokens_per_s or 0.0) * 0.5 ** (passed_s / _HALF_LIFE_S)
            self.tokens_per_s = max(rate, faded)


UNBOUND = sys.maxsize
"""The cap of a worker that is given all that come."""
_COLD = 0.25
"""A start of which a larger share may be cached does not say what a prompt costs."""


class Worker:
    """One worker.

    Attributes:
        state: What it was last seen to be.
        active: Requests in flight by id, with those that are being cut.
        tokens: Predicted output tokens still to come from it.
        work: The same with what its prompts cost.
        kv_tokens: What its requests will hold at their end, if predictions hold.
        cutting: How many are being cut.
        speed: Output tokens a second.
        price: What a cut and a prompt cost there.
        cached: Which beginnings of prompts it has probably in its cache.
        phasing: The phase that it is in; None where it keeps no schedule.
        additional: Those that leave, of the same engine under another key: they have some of its seats.

    Args:
        state: What it is seen to be.
        dispatch: Bounds of its cap, and its schedule.
        unheld: Whether it is given all at once, up to a cap of its own (``state.in_flight``).
        report: Hears of its phases, where it keeps the schedule.
    """

    def __init__(
        self, state: WorkerState, dispatch: Dispatch, *, unheld: bool, report: Callable[[Phase], None] | None = None
    ) -> None:
        self.state = state
        self.active: dict[int, Entry] = {}
        self.tokens = self.work = self.kv_tokens = 0.0
        self.cutting = 0
        self.speed, self.price, self.cached = Speed(), Price(), Cached()
        self.additional: tuple[Worker, ...] = ()
        self._unheld = unheld
        self._cap = Cap(dispatch)
        # Until then it may have had a queue of its own: what waited there does not tell what a prompt costs.
        self._queued_s = -math.inf
        self.phasing: Phasing | None = None
        if report is not None and dispatch.phases is not None:
            self.phasing = Phasing(lambda: self.name, dispatch.phases, report)

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
        for entry in self.active.values():
            entry.worker = entry.request.worker = name

    def inherit(self, other: Worker) -> None:
        """It is the engine that the other one, which leaves, was: what was learned of it is of both."""
        self.speed, self.price, self.cached, self._cap = other.speed, other.price, other.cached, other._cap

    @property
    def _taken(self) -> int:
        """Seats of its engine that are taken."""
        return len(self.active) + sum(len(one.active) for one in self.additional)

    @property
    def _kv_taken(self) -> float:
        return self.kv_tokens + sum(one.kv_tokens for one in self.additional)

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
        entry.received_s = math.nan
        q = entry.request
        q.cached_tokens = min(int(self.cached.sent(q.prefix, self.state.kv_tokens)), q.prompt_tokens)
        self.active[entry.request.id] = entry
        self._add(entry, 1)
        self._cap.used(self._taken)
        if self._unheld and self.state.signals.waiting is None and len(self.active) > 1:
            self._queued_s = q.dispatched_s
        if self.phasing is not None:
            self.phasing.sent(entry)

    def take(self, entry: Entry) -> None:
        """It is there no more."""
        del self.active[entry.request.id]
        self._add(entry, -1)
        self.cutting -= entry.state is State.CUT
        if self.phasing is not None:
            self.phasing.left(entry.request.id)
        if not self.active:
            self.tokens = self.work = self.kv_tokens = 0.0

    def cut(self, now_s: float, entry: Entry) -> None:
        """It is to be brought back from there."""
        entry.state, entry.cut_s = State.CUT, now_s
        self.cutting += 1

    def came_back(self, now_s: float, entry: Entry) -> None:
        """It was cut: its place made nothing since its last token."""
        self.price.came_back(now_s - max(entry.cut_s, entry.received_s))

    def keep(self, entry: Entry) -> bool:
        """It stays there to its end; whether it was to be brought back."""
        entry.retained, was_cut = True, entry.state is State.CUT
        if was_cut:
            entry.state = State.RUNNING
            self.cutting -= 1
        return was_cut

    def believe(self, entry: Entry, length_prediction: LengthPrediction) -> None:
        """A new forecast of one that is there."""
        self._add(entry, -1)
        entry.believe(length_prediction)
        self._add(entry, 1)

    def progressed(self, now_s: float, entry: Entry, tokens: int) -> bool:
        """So many more tokens came of one that is there; they are counted already. Whether its phase is over by it."""
        self.speed.made(now_s, tokens)
        self._cap.accepted(entry.request.dispatched_s)
        self._received(now_s, entry, tokens)
        remaining, work, kv_tokens = entry.remaining, entry.work, entry.kv_tokens
        entry.finalize()
        self.tokens += entry.remaining - remaining
        self.work += entry.work - work
        self.kv_tokens += entry.kv_tokens - kv_tokens
        return self.phasing is not None and self.phasing.progressed(now_s, entry.request.id, tokens)

    def _received(self, now_s: float, entry: Entry, tokens: int) -> None:
        since_s, entry.received_s, q = entry.received_s, now_s, entry.request
        if q.single_chunk:
            return  # all of it: neither when it began nor how fast it came can be told
        if since_s == since_s:  # noqa: PLR0124  NaN
            self.price.streamed(tokens, now_s - since_s)
        elif q.dispatched_s > self._queued_s:
            context, duration_s = q.prompt_tokens + q.generated_tokens - tokens, now_s - q.dispatched_s
            cold = entry.admissions == 1 and q.cached_tokens <= _COLD * context
            self.price.started(context, duration_s, cold=cold)

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
            self.speed.report(now_s, state.tokens_per_s)
        if state.signals.waiting:
            self._queued_s = now_s
        if not state.renamed_from:
            self._cap.poll(now_s, state.signals, self._taken)
        return lost

    def lose(self) -> list[Entry]:
        """Nobody is there any more; returns who was."""
        if self.phasing is not None:
            self.phasing.lost()
        lost = list(self.active.values())
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
            len(self.active),
            None if self.cap == UNBOUND else self.cap,
            self.drain_s(speed),
            self.tokens,
            self.state.signals,
        )
