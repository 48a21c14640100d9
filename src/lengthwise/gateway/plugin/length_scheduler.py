"""Order the queue of vLLM's own scheduler by predicted length, and reserve memory by it."""

from __future__ import annotations

import heapq
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lengthwise.gateway.plugin import vllm_adapter
from lengthwise.gateway.plugin.settings import Hint, Settings, hint_of, settings_of
from lengthwise.policy.compile import interpreted
from lengthwise.policy.named_schedulers import resolve
from lengthwise.policy.reservation import MemoryGate

Key = tuple[int, int, float, int]  # (0 if overdue else 1, class, the rank's key, arrival)
_PRUNE_ABOVE = 256
_MANY, _SORT_EVERY = 8, 100  # all requests are sorted if more than 1/8 of them are pending, and every 100th time


@dataclass(slots=True, eq=False)
class Entry:
    """Scheduling state of a request in the engine."""

    request: Any  # vLLM's request
    hint: Hint
    number: int  # in order of arrival
    arrival_s: float
    enqueued_at_s: float  # when it last joined the queue
    queued_for_s: float = 0.0  # total time in the queue until the last admission
    running: bool = False
    overdue: bool = False  # whether it has waited ``max_wait_s``, so that it precedes all others
    admission: int = -1  # number of its last admission, counted over all requests; -1 never admitted
    last_preemption: int = 0  # number of its last preemption, counted over all requests; 0 never preempted
    preemptions: int = 0  # preemptions by the preemption policy, without those by a lack of memory
    recompute_until: int = 0  # context at its last preemption
    protected_until: int = 0  # generated tokens below which the preemption policy does not preempt it
    key: Key = (1, 0, math.inf, 0)


class Registry:
    """Scheduling state of all requests in an engine, which determines the order of its queue.

    ``arrivals`` counts the requests, ``num_unhinted`` those without a valid hint; ``error`` describes the last error.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self.settings, self._clock = settings, clock
        self._policy = settings.rank_policy()
        self._rank = interpreted(self._policy)
        self._entries: dict[str, Entry] = {}
        self._overdue_times: list[tuple[float, int, Entry]] = []
        self.arrivals = self._admissions = self._preemptions = 0
        self._changed, self._pending, self._merges = True, dict[str, Entry](), 0
        self.num_unhinted, self.error = 0, ""

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, request: Any) -> Entry:
        """Return the entry of a request. A request without an entry is added as if it arrived now."""
        entry = self._entries.get(request.request_id)
        return entry if entry is not None and entry.request is request else self.add(request)

    def add(self, request: Any) -> Entry:
        """Add a request that arrives now."""
        now_s = self._clock()
        extra_args = getattr(request.sampling_params, "extra_args", None)
        hint = hint_of(extra_args, request.max_tokens, self.settings.prior_tokens)
        if hint.error:
            self.num_unhinted, self.error = self.num_unhinted + 1, hint.error
        entry = self._entries[request.request_id] = Entry(request, hint, self.arrivals, now_s, now_s)
        self.arrivals += 1
        self._enqueue(now_s, entry)
        return entry

    def on_preempted(self, request: Any) -> None:
        """Record that a running request has returned to the queue."""
        entry, now_s = self.entry(request), self._clock()
        entry.recompute_until = request.num_prompt_tokens + request.num_output_tokens
        self._changed = True
        if entry.running:
            self._preemptions += 1
            entry.running, entry.enqueued_at_s, entry.last_preemption = False, now_s, self._preemptions
            entry.protected_until = request.num_output_tokens + self.settings.window_tokens
            self._enqueue(now_s, entry)

    def on_admitted(self, running: list[Any]) -> int:
        """Record the requests that the step admitted, which are the last ones of ``running``. Return their number."""
        now_s, found = self._clock(), 0
        for request in reversed(running):
            entry = self.entry(request)
            if entry.running:
                break
            entry.running, found = True, found + 1
            entry.queued_for_s += now_s - entry.enqueued_at_s
            entry.admission, self._admissions = self._admissions, self._admissions + 1
        return found

    def prune(self, live: dict[str, Any]) -> None:
        """If there are many entries, remove those of requests that are not in ``live`` (by request id)."""
        if len(self._entries) > 2 * len(live) + _PRUNE_ABOVE:
            self._entries = {name: entry for name, entry in self._entries.items() if name in live}
            self._pending = {name: entry for name, entry in self._pending.items() if name in live}
            self._overdue_times = [item for item in self._overdue_times if item[2].request.request_id in self._entries]
            heapq.heapify(self._overdue_times)

    def needs_sort(self) -> bool:
        """Return whether the order may have changed."""
        now_s = self._clock()
        while self._overdue_times and self._overdue_times[0][0] <= now_s:
            entry = heapq.heappop(self._overdue_times)[2]
            if not entry.running:
                self._enqueue(now_s, entry)
        return self._changed or self._policy.every_step

    def in_order(self, waiting: Iterable[Any]) -> list[Any]:
        """Return the waiting requests in order. Every 100th call sorts all, in case vLLM has reordered them."""
        queue, pending = list(waiting), self._pending
        self._pending, self._changed, self._merges = {}, False, self._merges + 1
        if self._policy.every_step or len(pending) * _MANY > len(queue) or self._merges >= _SORT_EVERY:
            self._merges = 0
            if self._policy.every_step:
                now_s = self._clock()
                for request in queue:
                    entry = self.entry(request)
                    entry.key = self.key(now_s, entry)
            return sorted(queue, key=lambda request: self.entry(request).key)
        ordered = [request for request in queue if request.request_id not in pending]
        for request in queue if len(ordered) < len(queue) else ():
            if request.request_id in pending:
                insort(ordered, request, key=lambda r: self.entry(r).key)
        return ordered

    def worst_last(self, running: Iterable[Any]) -> list[Any]:
        """Return the running requests, the worst one last: vLLM preempts from there. Prefills follow all decodes."""
        now_s = self._clock()

        def place(request: Any) -> tuple[bool, Key]:
            is_prefill = bool(request.is_prefill_chunk) or request.num_computed_tokens < request.num_prompt_tokens
            return is_prefill, self.key(now_s, self.entry(request))

        return sorted(running, key=place)

    def key(self, now_s: float, entry: Entry) -> Key:
        """Return the current sort key of a request."""
        if entry.overdue:
            return 0, 0, 0.0, entry.number
        return 1, entry.hint.priority, self.rank_key(now_s, entry), entry.number

    def rank_key(self, now_s: float, entry: Entry) -> float:
        """Return the rank's key. NaN becomes infinity, which is the last place."""
        request, generated = entry.request, entry.request.num_output_tokens
        predicted, remaining = self.lengths(entry)
        waited_s = entry.queued_for_s if entry.running else entry.queued_for_s + now_s - entry.enqueued_at_s
        lengths = request.num_prompt_tokens, generated, predicted, remaining, math.nan
        counts = entry.hint.priority, entry.admission, entry.last_preemption, math.nan, 0
        key = float(self._rank(now_s, entry.arrival_s, *lengths, waited_s, *counts))
        return math.inf if math.isnan(key) else key

    def lengths(self, entry: Entry) -> tuple[float, float]:
        """Return the length predicted at the start of the current window, and the remaining tokens (at least 1)."""
        window, generated = self.settings.window_tokens, entry.request.num_output_tokens
        predicted = entry.hint.predicted_tokens(generated // window * window)
        return predicted, max(1.0, predicted - generated)

    def needs(self, request: Any) -> tuple[float, int, int]:
        """Return (predicted remaining tokens, tokens that its limit leaves, tokens so far) of a request."""
        generated = request.num_output_tokens
        remaining = self.lengths(self.entry(request))[1]
        return remaining, request.max_tokens - generated, request.num_prompt_tokens + generated

    def _enqueue(self, now_s: float, entry: Entry) -> None:
        overdue_s = entry.enqueued_at_s + self.settings.max_wait_s - entry.queued_for_s
        entry.overdue = entry.overdue or overdue_s <= now_s
        if not entry.overdue and math.isfinite(overdue_s):
            heapq.heappush(self._overdue_times, (overdue_s, entry.number, entry))
        entry.key = self.key(now_s, entry)
        self._pending[entry.request.request_id] = entry
        self._changed = True


PREFILL_WEIGHT = 0.1  # cost of a prompt token in output tokens, as in the gateway's own queue


class Preemption:
    """Applies the preemption policy after each change of the queue and every ``window_tokens`` steps."""

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._registry, self._settings, self._clock = registry, registry.settings, clock
        self._gain = interpreted(resolve("preemption", registry.settings.preemption))
        self._steps, self._pending, self._last_s = 0, False, -math.inf

    def is_due(self, *, changed: bool, blocked: bool) -> bool:
        """Return whether to look for a victim: the queue has ``changed``, and admissions are ``blocked``."""
        self._steps += 1
        self._pending |= changed or self._steps >= self._settings.window_tokens
        if not (blocked and self._pending) or self._clock() < self._last_s + 1 / self._settings.preemptions_per_s:
            return False
        self._steps, self._pending = 0, False
        return True

    def victim(self, first: Any, running: list[Any], num_waiting: int, can_free: Callable[[Any], bool]) -> Any:
        """Return the running request that ``first`` preempts, or None. ``can_free`` tests if it can free its blocks."""
        now_s, registry = self._clock(), self._registry
        own = registry.entry(first)
        candidates = [entry for entry in map(registry.entry, running) if self._is_candidate(own, entry)]
        candidates = [entry for entry in candidates if can_free(entry.request)]
        other = max(candidates, key=lambda entry: registry.key(now_s, entry), default=None)
        if other is None:
            return None
        request = other.request
        keys = (-math.inf if own.overdue else registry.rank_key(now_s, own), registry.rank_key(now_s, other))
        lengths = (registry.lengths(own)[1], registry.lengths(other)[1], request.num_output_tokens)
        recompute = (request.num_prompt_tokens + request.num_output_tokens) * PREFILL_WEIGHT / len(running)
        waited_s = own.queued_for_s + now_s - own.enqueued_at_s
        gain = self._gain(*keys, *lengths, recompute, len(running), num_waiting, waited_s, other.preemptions)
        return request if gain > 0 else None

    def record(self, victim: Any) -> None:
        """Record that a victim was preempted."""
        self._registry.entry(victim).preemptions += 1
        self._last_s = self._clock()

    def _is_candidate(self, own: Entry, entry: Entry) -> bool:
        request = entry.request
        is_settled = not request.is_prefill_chunk and request.num_output_tokens >= max(1, entry.protected_until)
        is_exempt = entry.overdue or entry.preemptions >= self._settings.max_preemptions
        return is_settled and not is_exempt and (own.overdue or own.hint.priority <= entry.hint.priority)


TIGHT_KV_USAGE = 0.8  # share of the KV cache in use above which vLLM may soon preempt for lack of memory
_READY = ("WAITING", "PREEMPTED")


class QueueOrder:
    """Hooks that order the queue around each step of a scheduler. The scheduler handles their errors."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = Registry(settings, clock)
        preempts = settings.preemption != "never" and settings.max_preemptions > 0 and settings.preemptions_per_s > 0
        self._preemption = Preemption(self.registry, clock) if preempts else None
        self._window, self._since_sorted, self._has_warned = settings.window_tokens, settings.window_tokens, False
        self._clock, self._admission_blocked, self._preempts_by_policy = clock, False, False
        share, budget = settings.max_recompute_share, settings.max_preemptions_per_request
        self.gate = MemoryGate(share, budget, self.registry.needs) if settings.reserve else None
        # Steps in flight: output, start, tokens of decodes and prompts, share of memory that is idle.
        self._steps: deque[tuple[Any, float, int, int, float]] = deque()
        self._busy_until_s, self._busy_s, self._prompt_s = -math.inf, 0.0, 0.0
        self._tokens = self._prompt_tokens = self._preempted_tokens = self._finished = 0

    def before(self, scheduler: Any) -> Any:
        """Order queue and batch. Return the request that the policy preempts, now in neither of them, or None."""
        if scheduler.pause_state:
            return None
        changed = self.registry.needs_sort()
        max_num_seqs = scheduler.max_num_active_reqs - scheduler.num_waiting_for_streaming_input
        is_full, is_tight = len(scheduler.running) >= max_num_seqs, scheduler.get_kv_cache_usage() > TIGHT_KV_USAGE
        blocked = is_full or (is_tight and self._admission_blocked)
        is_due = self._preemption is not None and self._preemption.is_due(changed=changed, blocked=blocked)
        waiting = scheduler.waiting
        if waiting and changed and (is_due or not is_full):
            ordered = self.registry.in_order(waiting)
            if len(ordered) != len(waiting):
                raise RuntimeError("the queue changed while it was sorted")
            waiting.clear()
            waiting.extend(ordered)
        if is_tight:
            self._since_sorted += 1
            if self._since_sorted > self._window:
                self._since_sorted = 0
                # vLLM preempts the last running request when memory runs out.
                scheduler.running[:] = self.registry.worst_last(scheduler.running)
        return self._preempt(scheduler) if is_due and waiting else None

    def defer(self, scheduler: Any) -> list[Any]:
        """Remove the requests from the queue for which memory will not suffice, and return them."""
        free_seqs = scheduler.max_num_active_reqs - scheduler.num_waiting_for_streaming_input - len(scheduler.running)
        if self.gate is None or scheduler.pause_state or not scheduler.waiting or free_seqs <= 0:
            return []
        if scheduler.connector is not None or scheduler.kv_holding_waiting:  # then other requests have KV blocks, too
            return []
        waiting = list(scheduler.waiting)
        count = self.gate.admissible(
            waiting[:free_seqs], scheduler.running, _pool_tokens(scheduler), scheduler.block_size
        )
        if count == min(free_seqs, len(waiting)):
            return []
        scheduler.waiting.clear()
        scheduler.waiting.extend(waiting[:count])
        return waiting[count:]

    def on_preempted(self, request: Any) -> None:
        """Record that a running request has returned to the queue."""
        self.registry.on_preempted(request)
        if self.gate is not None and not self._preempts_by_policy:
            self.gate.preemptions += 1
            self._preempted_tokens += request.num_prompt_tokens + request.num_output_tokens

    def after(self, scheduler: Any, output: Any) -> None:
        """Record which requests the step has admitted, and the tokens in its ``output`` (None if it failed)."""
        admitted = self.registry.on_admitted(scheduler.running)
        if self.gate is not None and output is not None:
            max_num_seqs = scheduler.max_num_active_reqs - scheduler.num_waiting_for_streaming_input
            is_short = scheduler.waiting and len(scheduler.running) < max_num_seqs
            idle = 1.0 - scheduler.get_kv_cache_usage() if is_short else 0.0
            self._steps.append((output, self._clock(), *self._token_counts(scheduler.running, output), idle))
        self._admission_blocked = not admitted
        if admitted:
            self._since_sorted = self._window
        self.registry.prune(scheduler.requests)
        if self.registry.num_unhinted and not self._has_warned:
            self._has_warned = True
            text = "lengthwise: a request has no valid length (%s) and counts as %g tokens long. Others are not logged"
            vllm_adapter.log.warning(text, self.registry.error, self.registry.settings.prior_tokens)

    def on_output(self, scheduler: Any, output: Any) -> None:
        """Adapt the gate's margin to the step that has ended, as the simulator does."""
        while self.gate is not None and self._steps:
            step, start_s, decodes, prompt_tokens, idle = self._steps.popleft()
            now_s, tokens = self._clock(), decodes + prompt_tokens
            seconds = now_s - max(start_s, self._busy_until_s)
            if step is not output or tokens == 0 or seconds <= 0.0:
                continue
            self._busy_until_s, self._busy_s, self._tokens = now_s, self._busy_s + seconds, self._tokens + tokens
            self._prompt_s += seconds * prompt_tokens / tokens
            self._prompt_tokens += prompt_tokens
            spent_s = self._preempted_tokens * self._prompt_s / max(1, self._prompt_tokens)
            self._preempted_tokens = 0
            turnovers_per_s = self._tokens / (_pool_tokens(scheduler) * self._busy_s)
            before, self._finished = self._finished, self.registry.arrivals - len(scheduler.requests)
            self.gate.adapt(spent_s, idle * seconds * decodes / tokens, turnovers_per_s, self._finished - before)
            return

    def _token_counts(self, running: list[Any], output: Any) -> tuple[int, int]:
        """Return the step's tokens of decodes and of prompts. A preempted request computes its output again, too."""
        decodes = prompt_tokens = 0
        for request in running:
            tokens, entry = output.num_scheduled_tokens.get(request.request_id, 0), self.registry.entry(request)
            if request.num_computed_tokens - tokens < max(request.num_prompt_tokens, entry.recompute_until):
                prompt_tokens += tokens
            else:
                decodes += tokens
        return decodes, prompt_tokens

    def _preempt(self, scheduler: Any) -> Any:
        if scheduler.connector is not None or scheduler.ec_connector is not None or scheduler.kv_holding_waiting:
            return None
        first = scheduler.waiting[0]
        if first.status.name not in _READY or self._preemption is None:
            return None
        can_free = scheduler._request_blocks_can_be_freed  # noqa: SLF001 - vLLM has no public method for it
        victim = self._preemption.victim(first, scheduler.running, len(scheduler.waiting), can_free)
        if victim is None:
            return None
        scheduler.running.remove(victim)
        self._preempts_by_policy = True
        try:
            scheduler._preempt_request(victim, self._clock())  # noqa: SLF001
        except BaseException:
            if victim not in scheduler.waiting:  # otherwise the request would be lost
                scheduler.running.append(victim)
            raise
        finally:
            self._preempts_by_policy = False
        self._preemption.record(victim)
        # The victim must not be admitted again in the same step, which informs the workers of its preemption.
        scheduler.waiting.remove_request(victim)
        return victim


def _pool_tokens(scheduler: Any) -> int:
    groups = len(scheduler.kv_cache_config.kv_cache_groups)  # each group needs its own blocks
    return int((scheduler.cache_config.num_gpu_blocks - 1) * scheduler.block_size // groups)  # without the null block


class OrderedScheduler(vllm_adapter.GuardedScheduler):
    """Mixin that orders the queue of vLLM's scheduler, and defers requests for which memory will not suffice."""

    lengthwise: QueueOrder | None = None

    def schedule(self, *args: Any, **keywords: Any) -> Any:
        """Run a step with the queue in order, and without the requests that wait for memory."""
        victim = self._guarded(lambda order: order.before(self))
        deferred = self._guarded(lambda order: order.defer(self))
        output = None
        try:
            output = super().schedule(*args, **keywords)  # type: ignore[misc]
            return output
        finally:
            if deferred:
                self.waiting.extend(deferred)  # type: ignore[attr-defined]
            if victim is not None:
                self.waiting.prepend_request(victim)  # type: ignore[attr-defined]
            self._guarded(lambda order: order.after(self, output))

    def update_from_output(self, scheduler_output: Any, *args: Any, **keywords: Any) -> Any:
        """End a step."""
        self._guarded(lambda order: order.on_output(self, scheduler_output))
        return super().update_from_output(scheduler_output, *args, **keywords)  # type: ignore[misc]

    def add_request(self, request: Any) -> None:
        """Add a request to the queue."""
        super().add_request(request)  # type: ignore[misc]
        self._guarded(lambda order: order.registry.entry(request))

    def _preempt_request(self, request: Any, *args: Any, **keywords: Any) -> None:
        super()._preempt_request(request, *args, **keywords)  # type: ignore[misc]
        self._guarded(lambda order: order.on_preempted(request))


class LengthScheduler:
    """Creates a scheduler of vLLM that orders its queue by predicted length.

    If vLLM's version is untested, or its scheduler is not as expected, its own order stays, with a warning.
    """

    def __new__(cls, *args: Any, **keywords: Any) -> Any:
        """Return the scheduler."""
        return _PLUGIN.create(cls.__name__, args, keywords)


_PLUGIN = vllm_adapter.SchedulerPlugin(
    OrderedScheduler,
    settings_of,
    lambda base, _: vllm_adapter.class_warnings(base, import_module("vllm.v1.request").Request),
    vllm_adapter.scheduler_warnings,
    QueueOrder,
    lambda settings: (
        f"orders this engine: rank {settings.rank}, preemption {settings.preemption}, "
        f"memory reserved {'by predicted length' if settings.reserve else 'as vLLM does'}; "
        f"after {settings.max_wait_s:g} s no later arrival overtakes a request"
    ),
    "order",
)
