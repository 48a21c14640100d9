"""The event loop: arrivals, ends of steps and schedulers in one total order.

At one instant: arrivals, steps that end (by replica), transfers that end (by request), then the schedulers of the
pending replicas by number, decode replicas first. If requests wait in a central queue, all replicas are scheduled, the
least loaded first.
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import kernel_layout
from lengthwise.engine._kernel_batch import chunk_for, form
from lengthwise.engine._kernel_groups import member
from lengthwise.engine._kernel_memory import (
    blocks_when_idle,
    enqueue,
    join_backlog,
    outstanding,
    remaining_tokens,
    send_next,
    update_entry_time,
)
from lengthwise.engine._kernel_queue import next_sent, pop_event, predicted_total, push_event, take_sent
from lengthwise.engine._kernel_steps import can_repeat, end_in_place, end_step, end_transfer, launch, start_transfers
from lengthwise.policy import contracts
from lengthwise.schema.records import Rejection, Status

OK, BLOCKED = kernel_layout.OK, kernel_layout.BLOCKED
BAD_BIN, BAD_ROUTE = kernel_layout.BAD_BIN, kernel_layout.BAD_ROUTE
FORM_ONCE = contracts.FORM_ONCE
REJECTED = int(Status.REJECTED)
NONE = int(Rejection.NONE)
TOO_LONG = int(Rejection.PROMPT_REACHES_MAX_MODEL_LEN)
OVER_BUDGET = int(Rejection.PROMPT_ABOVE_TOKEN_BUDGET)
OVER_MEMORY = int(Rejection.PROMPT_ABOVE_KV_MEMORY)
INFINITY = float("inf")


def run(
    S, D, rank, victim, batching, memory, router, preemption, binning,
    decode_batching, decode_memory, decode_router,
):  # fmt: skip
    """Run until nothing is left or the time limit is reached; return a status code.

    ``D`` and the last three policies are those of the decode side, if there is one; its replicas are scheduled first.
    """
    params, counters = S.params[0], S.counters[0]
    while True:
        end_s = S.event_s[0] if counters.events > 0 else INFINITY
        now_s = min(counters.entry_s, end_s, counters.bin_deadline_s)
        if now_s == INFINITY:
            now_s = counters.last_s
            if not _complete_oldest_bin(S, now_s, rank):
                return _first_blocked(S)
        else:
            if now_s > params.limit_s:
                return OK
            counters.last_s = max(counters.last_s, now_s)
            _handle_events(S, D, now_s, rank, memory, router, binning, decode_memory, decode_router)
        # Two passes: decode, then prefill replicas; with a central queue the second offers preempted requests again.
        passes = 2 if params.central_queue == 1 or params.decode_replicas > 0 else 1
        while passes > 0:
            passes -= 1
            preemptions = counters.preemptions
            decoding = passes == 1 and params.decode_replicas > 0
            count = _order(S, decoding)
            for k in range(count):
                _schedule(
                    S, D, S.tmp_order[k], now_s, count - 1 - k, preemptions, rank, victim,
                    decode_batching if decoding else batching, decode_memory if decoding else memory, preemption,
                )  # fmt: skip
            if counters.problem != OK or (counters.preemptions == preemptions and not decoding):
                break
        if counters.problem != OK:
            return counters.problem


@jit
def _handle_events(S, D, now_s, rank, memory, router, binning, decode_memory, decode_router):
    """Handle all arrivals, expired bins, and ends of steps and transfers at this instant."""
    counters = S.counters[0]
    _handle_entries(S, D, now_s, rank, memory, router, binning, decode_memory)
    if counters.bin_deadline_s <= now_s:
        _complete_expired_bins(S, now_s, rank)
    while counters.events > 0 and S.event_s[0] == now_s:
        r = pop_event(S)
        if r >= len(S.replicas):  # Transfers are numbered after the replicas, by request.
            end_transfer(S, D, r - len(S.replicas))
        else:
            end_step(S, D, r, now_s, rank, decode_router)
            S.pending[r] = 1
            if S.replicas[r].in_flight > 0:
                push_event(S, S.flights[r * S.params[0].stride + S.replicas[r].first_flight].end_s, r)
        if counters.entry_s == now_s:
            _handle_entries(S, D, now_s, rank, memory, router, binning, decode_memory)


@jit_cold
def _handle_entries(S, D, now_s, rank, memory, router, binning, decode_memory):
    """Route all requests that enter now to a queue or a bin, or reject them."""
    counters, params = S.counters[0], S.params[0]
    while counters.entry_s == now_s:
        i = next_sent(S)
        take_sent(S, i)
        counters.front_free_s = max(S.arrival_s[i], counters.front_free_s) + params.front_serial_s
        update_entry_time(S)
        rejection = _rejection(S, i, memory, decode_memory)
        if rejection != NONE:
            S.results[i].status = REJECTED
            S.results[i].rejection = rejection
            send_next(S, i, REJECTED, now_s)
            continue
        slot = _new_slot(S, i)
        r = 0
        if params.central_queue == 1:
            S.waiting[0] += 1
        else:
            r = router(i, S.draws[i, 0], S.draws[i, 1], D.prefill_waiting, D.prefill_running, D.prefill_tokens)
            if r < 0 or r >= params.replicas:
                counters.problem = BAD_ROUTE
                counters.problem_value = r
                return
            S.waiting[r] += 1
            S.tokens[r] += outstanding(S.prompt[i], S.predicted[i])
            S.pending[r] = 1
        if params.tracks_service == 1:
            join_backlog(S, S.slots[slot].tenant)
        if params.bins == 0:
            enqueue(S, S.replicas[r].queue, now_s, slot, rank)
        else:
            _add_to_bin(S, S.replicas[r].queue, now_s, slot, rank, binning)


@jit
def _rejection(S, i, memory, decode_memory):
    """Return why not even an idle replica could serve the request, or ``NONE``."""
    params, prompt, predicted = S.params[0], S.prompt[i], predicted_total(S, i, 0)
    if prompt >= params.max_model_len:
        return TOO_LONG
    S.work[0].prompts = 0  # ``chunk_for`` reads the step in ``work``: that of an idle replica is empty
    S.work[0].prompt_tokens = 0
    S.work[0].longest = 0
    chunk = chunk_for(S, prompt, False, params.idle_tokens, params.idle_flags)
    if chunk <= 0:
        return OVER_BUDGET
    peak = prompt + remaining_tokens(predicted, 0) if params.needs_peak == 1 else 0
    blocks = blocks_when_idle(S, 0, prompt, chunk, predicted, peak, memory)
    if blocks >= 0 and params.decode_replicas > 0:
        context, predicted = prompt + 1, predicted_total(S, i, 1)
        peak = context + remaining_tokens(predicted, 1) if S.params[1].needs_peak == 1 else 0
        blocks = blocks_when_idle(S, 1, context, context, predicted, peak, decode_memory)
    return OVER_MEMORY if blocks < 0 else NONE


@jit
def _new_slot(S, i):
    counters = S.counters[0]
    if counters.free_slots > 0:
        counters.free_slots -= 1
        slot = S.free_slots[counters.free_slots]
    else:
        slot = counters.slots
        counters.slots += 1
    q = S.slots[slot]
    q.index = i
    q.arrival_s = S.arrival_s[i]
    q.prompt = S.prompt[i]
    q.output = S.output[i]
    q.priority = S.priority[i]
    q.tenant = S.tenant[i] if S.params[0].tracks_service == 1 else 0
    q.generated = 0
    q.context = 0
    q.prefilled = 0
    q.blocks = 0
    q.admission = -1
    q.last_preemption = 0
    q.return_number = 0
    q.last_token_s = 0.0
    q.join_step = 0
    q.counts_block = 0
    q.decoding = 0
    q.swapped = 0
    q.waiting = 1
    q.batch = 0
    q.generated_at_admission = 0
    q.cached_blocks = 0
    q.transfer_blocks = 0
    q.queued_s = q.arrival_s
    q.queued_for_s = 0.0
    q.charged_tokens = 0.0
    return slot


@jit_cold
def _add_to_bin(S, queue_index, now_s, slot, rank, binning):
    """Add a request to a bin, which becomes a batch when it is full; the bins of a queue are consecutive rows."""
    request, params = S.slots[slot], S.params[0]
    number = binning(S.predicted[request.index], S.prompt[request.index])
    if number < 0 or number >= params.bins:
        S.counters[0].problem = BAD_BIN
        S.counters[0].problem_value = number
        return
    b = queue_index * params.bins + number
    S.bin_slot[b, S.bin_count[b]] = slot
    S.bin_count[b] += 1
    if S.bin_count[b] == 1:
        S.counters[0].bin_deadline_s = min(S.counters[0].bin_deadline_s, request.arrival_s + params.bin_wait_s)
    if S.bin_count[b] == params.max_num_seqs:
        _complete_bin(S, b, now_s, rank)


@jit_cold
def _complete_bin(S, b, now_s, rank):
    """Make a batch of a bin and add it to the queue."""
    q, counters = b // S.params[0].bins, S.counters[0]
    counters.batches += 1
    for i in range(S.bin_count[b]):
        slot = S.bin_slot[b, i]
        S.slots[slot].batch = counters.batches
        enqueue(S, q, now_s, slot, rank)
    S.bin_count[b] = 0
    if S.params[0].central_queue == 0:
        S.pending[q] = 1
    deadline_s = INFINITY
    for other in range(len(S.bin_count)):
        if S.bin_count[other] > 0:
            deadline_s = min(deadline_s, S.slots[S.bin_slot[other, 0]].arrival_s + S.params[0].bin_wait_s)
    counters.bin_deadline_s = deadline_s


@jit_cold
def _complete_expired_bins(S, now_s, rank):
    """Make batches of the bins whose first request has waited ``bin_wait_s``."""
    for b in range(len(S.bin_count)):
        if S.bin_count[b] > 0 and S.slots[S.bin_slot[b, 0]].arrival_s + S.params[0].bin_wait_s <= now_s:
            _complete_bin(S, b, now_s, rank)


@jit_cold
def _complete_oldest_bin(S, now_s, rank):
    """Complete the bin of the earliest request when there are no further events; return False if all bins are empty."""
    oldest, first = -1, 0
    for b in range(len(S.bin_count)):
        if S.bin_count[b] > 0 and (oldest < 0 or S.slots[S.bin_slot[b, 0]].index < first):
            oldest, first = b, S.slots[S.bin_slot[b, 0]].index
    if oldest >= 0:
        _complete_bin(S, oldest, now_s, rank)
    return oldest >= 0


@jit
def _order(S, decoding):
    """Store the replicas to schedule in ``tmp_order``; return how many there are.

    They are the pending ones of a side by number, or with requests in a central queue all of them, the least loaded
    first.
    """
    if S.params[0].central_queue == 1 and S.queues[0].length > 0:
        _order_by_load(S)
        S.pending[:] = 0
        return S.params[0].replicas
    count, first = 0, S.params[0].replicas if decoding else 0
    for r in range(first, len(S.replicas) if decoding else S.params[0].replicas):
        if S.pending[r] == 1:
            S.pending[r] = 0
            S.tmp_order[count] = r
            count += 1
    return count


@jit_cold
def _order_by_load(S):
    for r in range(S.params[0].replicas):
        i = r
        while i > 0 and S.running[S.tmp_order[i - 1]] > S.running[r]:
            S.tmp_order[i] = S.tmp_order[i - 1]
            i -= 1
        S.tmp_order[i] = r


@jit_cold
def _first_blocked(S):
    """Return ``BLOCKED`` and note the first request if any is left in the system, else ``OK``."""
    first = len(S.results)
    for q in range(len(S.queues)):
        for i in range(S.queues[q].length):
            first = min(first, S.pool_index[S.queues[q].offset + i])
    for r in range(len(S.replicas)):
        for i in range(S.replicas[r].partials):
            first = min(first, S.slots[S.partials[r, i]].index)
        for i in range(S.groups[S.replicas[r].idle].members):
            first = min(first, S.slots[member(S, S.replicas[r].idle, i)].index)
    S.counters[0].problem_value = first
    return OK if first == len(S.results) else BLOCKED


@jit
def _schedule(S, D, r, now_s, left, preemptions, rank, victim, batching, memory, preemption):
    """Fill a replica's pipeline with steps; decode-only steps repeat in place.

    ``left``: replicas still to be scheduled in this pass. ``preemptions``: the run's count when the pass began.
    """
    rep, w = S.replicas[r], S.work[0]
    params = S.params[rep.side]
    repeating, retried, swap_s = False, False, 0.0
    if rep.side == 1:
        start_transfers(S, D, r, now_s, rank, memory)
    while repeating or rep.in_flight < params.max_in_flight:
        if not repeating and not form(S, r, now_s, rank, victim, batching, memory, preemption):
            if w.short_of_blocks == 0 or retried or w.plan_flags & FORM_ONCE != 0:
                return
            retried = True
            swap_s = w.swap_s
            continue
        w.swap_s += swap_s
        retried, swap_s = False, 0.0
        end_s = launch(S, D, r, now_s)
        alone = params.max_in_flight == 1 and w.prompts == 0
        repeating = alone and can_repeat(S, r, end_s, _independent_until_s(S, left, preemptions))
        if repeating:
            end_in_place(S, r, end_s)
            now_s = end_s
        elif rep.in_flight == 1:
            push_event(S, end_s, r)


@jit
def _independent_until_s(S, left, preemptions):
    """Return the time before which no other replica and no arrival can change the decisions of this replica.

    Replicas interact where requests arrive; in a closed loop and with dependents also where any request ends; with a
    central queue also where any replica preempts; under disaggregation also where a prompt or a transfer ends. The
    replicas still to be scheduled now are not among the events yet.
    """
    counters, params = S.counters[0], S.params[0]
    until_s = min(counters.entry_s, counters.bin_deadline_s)
    if params.closed_loop == 1 or params.has_dependents == 1 or params.central_queue == 1 or params.decode_replicas > 0:
        if left > 0 or counters.preemptions != preemptions or (params.decode_replicas > 0 and _prefill_pending(S)):
            return -INFINITY
        if counters.events > 0:
            until_s = min(until_s, S.event_s[0])
    return until_s


@jit_cold
def _prefill_pending(S):
    """Return whether prefill replicas are still to be scheduled at this instant."""
    pending = 0
    for r in range(S.params[0].replicas):
        pending += S.pending[r]
    return pending > 0
