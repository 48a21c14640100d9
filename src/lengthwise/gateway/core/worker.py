"""The scheduler's state of a worker: its requests, its backlog, and its limit of requests."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from itertools import takewhile

import numpy as np

from lengthwise.gateway.config import Dispatch
from lengthwise.gateway.core.phases import PhaseReport, PhaseTracker
from lengthwise.gateway.core.ranking import PREFILL_WEIGHT, Entry, State
from lengthwise.gateway.request import PREFIX_BLOCKS, LengthPrediction, PromptPrefix
from lengthwise.gateway.scheduling import DispatchCounts, Signals, WorkerState, WorkerStatistics

_SHRINK = 0.75
_MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


class ConcurrencyLimit:
    """Adapts the limit of requests at a worker to the load that its engine reports.

    The limit grows only if it was reached, and the engine reports an empty queue, but no new preemptions and no KV
    cache in use above ``kv_high``. It doubles until it first shrinks, and then grows by 1/16. If the engine has a
    queue, the limit shrinks to the requests in flight without that queue, but at most by a quarter. Preemptions, or a
    KV cache above ``kv_high``, reduce it to 3/4 of the requests in flight.
    """

    def __init__(self, dispatch: Dispatch) -> None:
        self.bounds = dispatch
        self._limit, self._doubling, self._max_used = float(dispatch.start), True, 0
        self._signals, self._adapted_at_s = Signals(), -math.inf
        self._backoff_s, self.backoff_until_s, self._refused_s = _MIN_BACKOFF_S, -math.inf, -math.inf
        # The latest first token: its time, when its request was dispatched, and the requests in flight at that time.
        self.last_accepted_s, self.last_accepted_dispatch_s, self.accepted_in_flight = -math.inf, -math.inf, 0

    def configure(self, dispatch: Dispatch) -> None:
        """Change the settings. An adapted limit is clipped to the new bounds, an unchanged one becomes ``start``."""
        unchanged = self._doubling and self._limit == self.bounds.start
        limit = float(dispatch.start) if unchanged else self._limit
        self.bounds = dispatch
        self._limit = min(max(limit, float(dispatch.min_concurrency)), float(dispatch.max_concurrency))

    def limit(self, slots: int | None) -> int:
        """Return the limit, which is at most the engine's ``slots`` (None: unknown)."""
        return int(self._limit) if slots is None else max(1, min(int(self._limit), slots))

    def note_in_flight(self, in_flight: int) -> None:
        """Record the number of requests in flight after a dispatch."""
        self._max_used = max(self._max_used, in_flight)

    def adapt(self, now_s: float, signals: Signals, in_flight: int) -> None:
        """Adapt the limit to new signals of the engine, at most once per ``adapt_every_s``."""
        if signals.at_s <= self._signals.at_s or now_s - self._adapted_at_s < self.bounds.adapt_every_s:
            return
        before, self._signals, self._adapted_at_s = self._signals, signals, now_s
        self._backoff_s = _MIN_BACKOFF_S
        waiting = signals.waiting or 0.0
        preempted = before.preemptions is not None and (signals.preemptions or 0.0) > before.preemptions
        if preempted or (signals.kv_used or 0.0) > self.bounds.kv_high:
            self._shrink(max(in_flight, 1) * _SHRINK)
        elif waiting > 0:
            self._shrink(max(in_flight - waiting, self._limit * _SHRINK))
        elif signals.waiting is not None and self._max_used >= int(self._limit):
            step = self._limit if self._doubling else max(1.0, self._limit / 16)
            self._limit = min(float(self.bounds.max_concurrency), self._limit + step)
        self._max_used = in_flight

    def back_off(self, now_s: float, in_flight: int, retry_after_s: float = 0.0) -> None:
        """Reduce the limit to ``in_flight`` after a full queue, and back off: 0.1 s, doubled each time, up to 2 s."""
        self._shrink(float(in_flight))
        backoff_s = _MIN_BACKOFF_S if now_s - self.backoff_until_s > 2 * MAX_BACKOFF_S else self._backoff_s
        self.backoff_until_s = now_s + max(backoff_s, min(retry_after_s, MAX_BACKOFF_S))
        self._refused_s, self._backoff_s = now_s, min(2 * backoff_s, MAX_BACKOFF_S)

    def accepted(self, now_s: float, dispatched_s: float, in_flight: int) -> None:
        """Record a first token. Reset the backoff if its request was dispatched after the last full queue."""
        self.last_accepted_s, self.last_accepted_dispatch_s, self.accepted_in_flight = now_s, dispatched_s, in_flight
        if dispatched_s > self._refused_s:
            self._backoff_s = _MIN_BACKOFF_S

    def _shrink(self, to: float) -> None:
        self._doubling = False
        self._limit = max(float(self.bounds.min_concurrency), min(self._limit, to))


MAX_KEYS = 1 << 17  # hashes in the caches of all workers together, about 25 MB
_GROWTH = tuple(size - before for before, size in zip((0, *PREFIX_BLOCKS), PREFIX_BLOCKS, strict=False))


class PrefixCache:
    """Estimates a worker's prefix cache: an LRU of the hashes of leading blocks of dispatched prompts."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self.max_keys = max_keys
        self.tokens = 0.0
        self._tokens_of: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens_of)

    def cached_tokens(self, prefix: PromptPrefix) -> float:
        """Return how many leading tokens of a prompt are probably cached."""
        depth = sum(1 for _ in takewhile(self._tokens_of.__contains__, prefix.keys))
        return PREFIX_BLOCKS[depth - 1] * prefix.block_tokens if depth else 0.0

    def insert(self, prefix: PromptPrefix, max_tokens: float | None = None) -> float:
        """Add a prompt, and evict blocks beyond ``max_tokens``. Return how many prompt tokens were cached before."""
        before, blocks = self.cached_tokens(prefix), self._tokens_of
        for depth in range(len(prefix.keys) - 1, -1, -1):  # the shortest prefix last, so that it is evicted last
            key = prefix.keys[depth]
            if key in blocks:
                blocks.move_to_end(key)
            else:
                blocks[key] = tokens = _GROWTH[depth] * prefix.block_tokens
                self.tokens += tokens
        while blocks and (len(blocks) > self.max_keys or (max_tokens is not None and self.tokens > max_tokens)):
            self.tokens -= blocks.popitem(last=False)[1]
        if not blocks:
            self.tokens = 0.0  # discard rounding errors
        return before


_MIN_STARTS, _MIN_UNCACHED, _MIN_TOKENS = 8.0, 16.0, 64.0  # weighted starts, uncached starts and tokens that suffice
_START_DECAY, _TOKEN_DECAY = 0.98, 0.998
"""A new observation multiplies the weights of earlier ones by this, so that about 50 starts and 500 chunks count."""
_MIN_SPREAD = 0.01  # least variance of context lengths, as a share of their mean square, for a fitted slope
_MAX_GAP = 4.0  # gaps in a stream are clipped at this multiple of the mean gap: a slow reader causes longer ones


class PreemptionCost:
    """Estimates the cost of a preemption at a worker, from the times of its requests.

    The time from dispatch to first token is fitted as ``a + b x`` for x tokens of context. A preemption leaves the
    victim's slot idle from the decision until the victim leaves, and its next slot from dispatch to first token. Its
    recomputation delays the complete batch. Before there are enough observations, a prompt token costs a tenth of an
    output token.
    """

    def __init__(self) -> None:
        self._starts, self._uncached = _DecayingLine(), _DecayingLine()
        self._tokens = self._stream_s = self._idle_slots = self._idle_slot_s = 0.0

    def add_start(self, context_tokens: int, seconds: float, *, uncached: bool = False) -> None:
        """Add the time from dispatch to first token. ``uncached`` states that at most a quarter was cached."""
        self._starts.add(float(context_tokens), seconds)
        if uncached:
            self._uncached.add(float(context_tokens), seconds)

    def add_stream(self, tokens: int, seconds: float) -> None:
        """Add the time between two chunks of a stream. The second chunk has ``tokens`` tokens."""
        if not self._stream_s:  # all chunks so far came within one clock tick and show no time per token
            self._tokens = 0.0
        if self._tokens >= _MIN_TOKENS:
            seconds = min(seconds, _MAX_GAP * tokens * self._stream_s / self._tokens)
        self._tokens = self._tokens * _TOKEN_DECAY + tokens
        self._stream_s = self._stream_s * _TOKEN_DECAY + seconds

    def add_idle_slot(self, seconds: float) -> None:
        """Add the time for which the slot of a preempted request was idle."""
        self._idle_slots = self._idle_slots * _START_DECAY + 1.0
        self._idle_slot_s = self._idle_slot_s * _START_DECAY + seconds

    def prompt_token_s(self) -> float | None:
        """Return the seconds per uncached prompt token, or None before enough prompts of several lengths."""
        n, x, _, xx, _ = self._uncached.moments.tolist()
        identified = n >= _MIN_UNCACHED and xx - x * x / n > _MIN_SPREAD * xx
        return self._uncached.fit()[1] if identified else None

    def recompute_steps(self, context_tokens: int, num_running: int) -> float:
        """Return the cost of a preemption in decode steps of a batch of ``num_running`` requests."""
        if self._starts.moments[0] < _MIN_STARTS or self._tokens < _MIN_TOKENS or not self._stream_s:
            return context_tokens * PREFILL_WEIGHT / num_running
        step_s = self._stream_s / self._tokens
        start_s, token_s = self._starts.fit()
        idle_slot_s = self._idle_slot_s / self._idle_slots if self._idle_slots else 0.0
        idle_s = max(0.0, start_s - step_s) + idle_slot_s
        return (idle_s / num_running + token_s * context_tokens) / step_s


class _DecayingLine:
    """A least-squares line with decaying weights. ``moments`` are the weighted sums of 1, x, y, xx and xy."""

    def __init__(self) -> None:
        self.moments = np.zeros(5)

    def add(self, x: float, y: float) -> None:
        self.moments = self.moments * _START_DECAY + (1.0, x, y, x * x, x * y)

    def fit(self) -> tuple[float, float]:
        """Return (intercept, slope), which are never negative. At least one point must have been added."""
        n, x, y, xx, xy = self.moments.tolist()
        spread = xx - x * x / n
        slope = (xy - x * y / n) / spread if spread > 1e-9 * xx else 0.0
        if slope <= 0:
            return y / n, 0.0
        intercept = (y - slope * x) / n
        return (intercept, slope) if intercept >= 0 else (0.0, xy / xx)


_WINDOW_S = 1.0
_HALF_LIFE_S = 60.0


class Throughput:
    """The largest observed output rate of a worker, or None before any. It halves with each minute of streaming."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        self._since_s = math.nan
        self._tokens = 0
        self._reported_s = -math.inf

    def add_tokens(self, now_s: float, tokens: int) -> None:
        """Count streamed tokens."""
        passed_s = now_s - self._since_s
        if not passed_s < 4 * _WINDOW_S:  # the first tokens (NaN), or the first after an idle time
            self._since_s, self._tokens = now_s, 0
            return
        self._tokens += tokens
        if passed_s >= _WINDOW_S:
            self._add_rate(self._tokens / passed_s, passed_s)
            self._since_s, self._tokens = now_s, 0

    def report(self, now_s: float, tokens_per_s: float) -> None:
        """Add an output rate that the engine reports."""
        if tokens_per_s > 0:
            self._add_rate(tokens_per_s, min(now_s - self._reported_s, 4 * _WINDOW_S))
        self._reported_s = now_s

    def _add_rate(self, rate: float, passed_s: float) -> None:
        if rate > 0 and math.isfinite(rate):
            self.tokens_per_s = max(rate, (self.tokens_per_s or 0.0) * 0.5 ** (passed_s / _HALF_LIFE_S))


NO_LIMIT = sys.maxsize  # the limit of a worker without a limit
_MAX_CACHED_SHARE = 0.25  # a start with a larger cached share of the context does not show the cost of a prompt


class Worker:
    """A worker with its requests in flight.

    With ``passthrough``, it gets requests at once, up to a configured limit. ``tokens`` are the predicted remaining
    output tokens of its requests, ``work`` also includes the cost of computing their contexts, and ``peak_kv_tokens``
    are their KV tokens at their ends. ``predecessors`` are draining workers of the same engine, whose requests still
    use its slots.
    """

    def __init__(
        self, state: WorkerState, dispatch: Dispatch, *, passthrough: bool, report: PhaseReport | None = None
    ) -> None:
        self.state, self.name = state, state.name
        self.active: dict[int, Entry] = {}  # requests in flight by id, including those in state PREEMPTING
        self.tokens = self.work = self.peak_kv_tokens = 0.0
        self.num_preempting = 0
        self.throughput, self.cost, self.prefix_cache = Throughput(), PreemptionCost(), PrefixCache()
        self.dispatched = DispatchCounts()
        self.predecessors: tuple[Worker, ...] = ()
        self._passthrough = passthrough
        self.adaptive_limit = ConcurrencyLimit(dispatch)
        # Requests dispatched up to this time may have waited in the engine's own queue, so their starts are not used.
        self._engine_queue_until_s = -math.inf
        self.phase_tracker: PhaseTracker | None = None
        if report is not None and dispatch.phases is not None:
            self.phase_tracker = PhaseTracker(lambda: self.name, dispatch.phases, report)

    @property
    def limit(self) -> int:
        """Largest number of requests in flight, or NO_LIMIT if there is no limit. In mode rra, the schedule sets it."""
        if self.phase_tracker is not None:
            high = self.phase_tracker.phases.request_limit or self.adaptive_limit.bounds.max_concurrency
            return min(high, self.state.concurrency or high, self.state.slots or high)
        if self.state.concurrency is not None:
            return self.state.concurrency
        return NO_LIMIT if self._passthrough else self.adaptive_limit.limit(self.state.slots)

    def configure(self, dispatch: Dispatch) -> None:
        """Apply other settings of the concurrency limit and, from the next phase on, of phases."""
        self.adaptive_limit.configure(dispatch)
        if self.phase_tracker is not None and dispatch.phases is not None:
            self.phase_tracker.configure(dispatch.phases)

    def rename(self, name: str) -> None:
        """Change the name of the worker, also in its requests."""
        self.state, self.name = replace(self.state, name=name), name
        for entry in self.active.values():
            entry.worker = entry.request.dispatch.worker = name

    def inherit(self, other: Worker) -> None:
        """Take over the observations of ``other``, an earlier worker of the same engine."""
        self.throughput, self.cost, self.prefix_cache = other.throughput, other.cost, other.prefix_cache
        self.adaptive_limit, self.dispatched = other.adaptive_limit, other.dispatched

    @property
    def slots_in_use(self) -> int:
        """Number of requests in flight at the engine, also those of ``predecessors``."""
        return len(self.active) + sum(len(one.active) for one in self.predecessors)

    @property
    def kv_in_use(self) -> float:
        """Predicted KV tokens of the requests in flight at the engine at their ends, also those of ``predecessors``."""
        return self.peak_kv_tokens + sum(one.peak_kv_tokens for one in self.predecessors)

    @property
    def num_unstarted(self) -> int:
        """Number of requests without a token since their dispatch. The count takes 50 ns per request in flight."""
        return sum(math.isnan(entry.last_token_s) for entry in self.active.values())

    @property
    def free_kv_share(self) -> float:
        """Free share of the KV cache, as the engine reports it or else as predicted; 1 if its size is unknown."""
        used, kv_tokens = self.state.signals.kv_used, self.state.kv_tokens
        if used is None:
            used = self.kv_in_use / kv_tokens if kv_tokens else 0.0
        return min(max(1.0 - used, 0.0), 1.0)

    def free_slots(self, now_s: float) -> int:
        """Return the number of further requests that the worker may get now, negative if it has more than its limit."""
        if now_s < self.adaptive_limit.backoff_until_s or not self.state.up:
            return 0
        return self.limit - self.slots_in_use

    def backoff_until_s(self, now_s: float) -> float:
        """Return when the backoff after a full queue ends, or inf if the worker does not back off."""
        until_s = self.adaptive_limit.backoff_until_s
        return until_s if until_s > now_s and self.state.up else math.inf

    def refuses_only_this(self, entry: Entry) -> bool:
        """Return whether the worker, as full as now or fuller, accepted another request since it refused this one."""
        limit, refused_s = self.adaptive_limit, entry.request.dispatch.full_queues.last_s
        return limit.last_accepted_dispatch_s > refused_s and limit.accepted_in_flight >= self.slots_in_use

    def is_queued_alone(self, entry: Entry) -> bool:
        """Return whether all other requests had a token when this one was dispatched, so that none was queued."""
        return self.num_unstarted == 1 and self.adaptive_limit.last_accepted_s <= entry.request.dispatch.dispatched_s

    def fits(self, entry: Entry) -> bool:
        """Return whether the KV cache is large enough for the request up to its end. An empty worker takes any."""
        if self.state.kv_tokens is None or self._passthrough or not self.slots_in_use:
            return True
        return self.kv_in_use + entry.peak_kv_tokens <= self.state.kv_tokens

    def fits_without(self, entry: Entry, victim: Entry) -> bool:
        """Return whether the request can run here once ``victim`` has left.

        The slots of ``victim`` and of all requests in state PREEMPTING count as free, but only the victim's KV tokens.
        """
        staying_and_victim = self.slots_in_use - self.num_preempting
        if not self.state.up or staying_and_victim > self.limit:
            return False
        if (kv_tokens := self.state.kv_tokens) is None or staying_and_victim == 1:
            return True
        return self.kv_in_use - victim.peak_kv_tokens + entry.peak_kv_tokens <= kv_tokens

    def prompt_token_s(self, tokens_per_s: float) -> float:
        """Return the seconds per prompt token: at most 1 / ``tokens_per_s``, a tenth of that without observations."""
        observed_s = self.cost.prompt_token_s()
        return PREFILL_WEIGHT / tokens_per_s if observed_s is None else min(observed_s, 1.0 / tokens_per_s)

    def unseen_tokens(self, now_s: float, entry: Entry) -> float:
        """Estimate the output that no chunk has reported.

        It is the predicted length or, if that is larger, the request's share (by choices) of what the worker has
        generated since the request's dispatch.
        """
        q, rate = entry.request, self.throughput.tokens_per_s or 0.0
        share = q.choices / sum(one.request.choices for one in self.active.values())
        tokens = max(q.choices * entry.predicted_tokens, share * rate * (now_s - q.dispatch.dispatched_s))
        return min(tokens, float(q.choices * q.max_tokens))

    def dispatch(self, entry: Entry) -> None:
        """Add a request that is dispatched to the worker."""
        q = entry.request
        entry.state, entry.worker, q.dispatch.worker = State.RUNNING, self.name, self.name
        entry.last_token_s = math.nan
        cached_tokens = self.prefix_cache.insert(q.prefix, self.state.kv_tokens)
        q.dispatch.cached_tokens = min(int(cached_tokens), q.prompt_tokens)
        q.dispatch.kv_tokens = self.state.kv_tokens or 0
        if entry.dispatches == 1:
            self.dispatched.requests += 1
            self.dispatched.prompt_tokens += q.prompt_tokens
            self.dispatched.cached_tokens += q.dispatch.cached_tokens
        self.active[q.id] = entry
        self._count(entry, 1)
        self.adaptive_limit.note_in_flight(self.slots_in_use)
        if self._passthrough and self.state.signals.waiting is None and len(self.active) > 1:
            self._engine_queue_until_s = q.dispatch.dispatched_s
        if self.phase_tracker is not None:
            self.phase_tracker.dispatched(entry)

    def remove(self, entry: Entry) -> None:
        """Remove a request that has left the worker."""
        del self.active[entry.request.id]
        self._count(entry, -1)
        self.num_preempting -= entry.state is State.PREEMPTING
        if self.phase_tracker is not None:
            self.phase_tracker.remove(entry.request.id)
        if not self.active:
            self.tokens = self.work = self.peak_kv_tokens = 0.0  # discard rounding errors

    def preempt(self, now_s: float, entry: Entry) -> None:
        """Mark a request as being preempted."""
        entry.state, entry.preemption.preempted_s = State.PREEMPTING, now_s
        self.num_preempting += 1

    def mark_nonpreemptible(self, entry: Entry) -> bool:
        """Let a request run to its end. Return whether the request was being preempted."""
        entry.preemption.nonpreemptible, was_preempting = True, entry.state is State.PREEMPTING
        if was_preempting:
            entry.state = State.RUNNING
            self.num_preempting -= 1
        return was_preempting

    def set_prediction(self, entry: Entry, length_prediction: LengthPrediction) -> None:
        """Store a new prediction of a request in flight."""
        self._count(entry, -1)
        entry.set_prediction(length_prediction)
        self._count(entry, 1)

    def on_progress(self, now_s: float, entry: Entry, tokens: int) -> bool:
        """Record new tokens, which ``generated_tokens`` already includes. Return whether they let the phase end."""
        q, dispatch = entry.request, entry.request.dispatch
        self.throughput.add_tokens(now_s, tokens)
        last_token_s, entry.last_token_s = entry.last_token_s, now_s
        if math.isnan(last_token_s):
            self.adaptive_limit.accepted(now_s, dispatch.dispatched_s, self.slots_in_use)
            full = dispatch.full_queues
            full.last_s, full.count, full.count_while_accepting, full.count_queued_alone = math.inf, 0, 0, 0
        # A response in a single chunk shows neither when it began nor how fast its tokens were generated.
        if not dispatch.single_chunk:
            if not math.isnan(last_token_s):
                self.cost.add_stream(tokens, now_s - last_token_s)
            elif dispatch.dispatched_s > self._engine_queue_until_s:
                context = q.prompt_tokens + q.generated_tokens - tokens
                uncached = entry.dispatches == 1 and dispatch.cached_tokens <= _MAX_CACHED_SHARE * context
                self.cost.add_start(context, now_s - dispatch.dispatched_s, uncached=uncached)
        remaining, work, kv_tokens = entry.remaining_tokens, entry.work, entry.peak_kv_tokens
        entry.update_remaining()
        self._add(entry.remaining_tokens - remaining, entry.work - work, entry.peak_kv_tokens - kv_tokens)
        return self.phase_tracker is not None and self.phase_tracker.on_progress(now_s, q.id, tokens)

    def _count(self, entry: Entry, sign: int) -> None:
        self._add(sign * entry.remaining_tokens, sign * entry.work, sign * entry.peak_kv_tokens)

    def _add(self, tokens: float, work: float, kv_tokens: float) -> None:
        self.tokens += tokens
        self.work += work
        self.peak_kv_tokens += kv_tokens

    def update(self, now_s: float, state: WorkerState) -> list[Entry]:
        """Apply a new state of the worker. Return the requests that a restart of the engine has lost, or []."""
        lost: list[Entry] = []
        if state.epoch != self.state.epoch:
            lost, self.cost = self.clear(), PreemptionCost()
            self.adaptive_limit = ConcurrencyLimit(self.adaptive_limit.bounds)
            self.prefix_cache = PrefixCache(self.prefix_cache.max_keys)
        self.state = state
        if state.tokens_per_s is not None:
            self.throughput.report(now_s, state.tokens_per_s)
        if state.signals.waiting:
            self._engine_queue_until_s = now_s
        if not state.renamed_from:
            self.adaptive_limit.adapt(now_s, state.signals, self.slots_in_use)
        return lost

    def clear(self) -> list[Entry]:
        """Remove and return all requests, whose state becomes LOST."""
        if self.phase_tracker is not None:
            self.phase_tracker.clear()
        lost = list(self.active.values())
        for entry in lost:
            self.remove(entry)
            entry.state = State.LOST
        return lost

    def statistics(self, tokens_per_s: float) -> WorkerStatistics:
        """Return the worker's current numbers, with the seconds of prefill and decode left at ``tokens_per_s``."""
        state, limit = self.state, None if self.limit == NO_LIMIT else self.limit
        backlog_s, counts = self.work / tokens_per_s, copy(self.dispatched)
        return WorkerStatistics(
            self.name, state.up, len(self.active), limit, backlog_s, self.tokens, state.signals, counts
        )


def mean_tokens_per_s(workers: Iterable[Worker]) -> float:
    """Return the mean of the workers' observed output rates, or 0 if no rate was observed."""
    rates = [one.throughput.tokens_per_s for one in workers if one.throughput.tokens_per_s]
    return sum(rates) / len(rates) if rates else 0.0


def without_avoided(entry: Entry, serving: list[Worker]) -> list[Worker]:
    """Return the workers that may run the request and that it does not avoid.

    If it is overdue, or avoids all workers that may run it, return all of these.
    """
    if (names := entry.request.client.workers) is not None:
        serving = [worker for worker in serving if worker.name in names]
    avoid = entry.request.dispatch.avoid
    if entry.overdue or not avoid:
        return serving
    return [worker for worker in serving if worker.name not in avoid] or serving
