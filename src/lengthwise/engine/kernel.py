"""The event loop: arrivals, ends of steps and schedulers are processed in one total order.

At one instant the order is: requests that leave the front end; expired bins; ends of steps, by replica; ends of KV
transfers and of loads from CPU memory, by request; schedulers of the pending replicas, by number, decode replicas
first. If requests wait in a central queue, all replicas are scheduled, the least loaded first. A data-parallel rank is
like a replica here, but the ranks of one replica are scheduled together, and start and end their steps together. If the
end of a step finishes a request, and a request that its client then sends leaves the front end at the same instant, the
new request enters right after that end.
"""

from __future__ import annotations

from lengthwise._jit import by_pointer, jit, jit_cold
from lengthwise.engine import kernel_layout
from lengthwise.engine._kernel_batch import chunk_for, form
from lengthwise.engine._kernel_groups import member, overlaps
from lengthwise.engine._kernel_memory import (
    blocks_when_empty,
    enqueue,
    join_backlog,
    outstanding,
    remaining_tokens,
    send_next,
    update_entry_time,
)
from lengthwise.engine._kernel_prefix import index_prompt, previous_replica, set_router_arrays
from lengthwise.engine._kernel_queue import next_request, pop_event, predicted_total, push_event, take_request
from lengthwise.engine._kernel_steps import (
    begin_rank,
    can_repeat,
    count_at_start,
    end_in_place,
    end_step,
    handle_event,
    launch,
    load_rank,
    may_form,
    record_rank,
    run_together,
    shared_drafter_s,
    stays_empty,
)
from lengthwise.engine._kernel_tiers import complete_offloading
from lengthwise.engine._kernel_transfers import end_shared_transfers, route_to_decode, send_layers, start_transfers
from lengthwise.policy import contracts
from lengthwise.schema.records import Rejection, Status

OK, STUCK = kernel_layout.OK, kernel_layout.STUCK
BAD_BIN, BAD_ROUTE = kernel_layout.BAD_BIN, kernel_layout.BAD_ROUTE
FORM_ONCE = contracts.FORM_ONCE
REJECTED = int(Status.REJECTED)
NONE = int(Rejection.NONE)
TOO_LONG = int(Rejection.PROMPT_REACHES_MAX_MODEL_LEN)
OVER_BUDGET = int(Rejection.PROMPT_ABOVE_TOKEN_BUDGET)
REFUSED = int(Rejection.REFUSED_BY_MEMORY_POLICY)
INFINITY = float("inf")


def run(  # noqa: C901  one sequence
    state, decode_state, rank, victim, batching, memory, router, preemption, binning,
    decode_batching, decode_memory, decode_router, rules,
):  # fmt: skip
    """Process events until none is left or the time limit is reached. Return a status code of ``kernel_layout``.

    ``decode_state`` and the last three policies belong to the decode side, if there is one. ``rules`` forms the steps
    of an engine that has its own rules instead of policies, or tests admissions where memory is reserved by predicted
    length.
    """
    S, D = by_pointer(state), by_pointer(decode_state)
    params, counters = S.params[0], S.counters[0]
    sends_layers = params.decode_replicas > 0 and S.params[1].transfer_layers > 0
    while True:
        end_s = S.event_s[0] if counters.events > 0 else INFINITY
        now_s = min(counters.entry_s, end_s, counters.bin_deadline_s, counters.transfer_end_s)
        if now_s == INFINITY:
            now_s = counters.last_s
            if not _complete_oldest_bin(S, now_s, rank):
                return _final_status(S)
        else:
            if now_s > params.limit_s:
                return OK
            counters.last_s = max(counters.last_s, now_s)
            _handle_events(S, D, now_s, rank, memory, router, binning, decode_memory, decode_router)
        # Two passes: decode, then prefill replicas. With a central queue, the second is for requests preempted in the
        # first.
        passes = 2 if params.central_queue == 1 or params.decode_replicas > 0 else 1
        while passes > 0:
            passes -= 1
            preemptions = counters.preemptions
            decoding = passes == 1 and params.decode_replicas > 0
            count, k = _order_replicas(S, D, decoding, now_s, rank, decode_memory), 0
            while k < count:
                r = S.tmp_order[k]
                k, in_flight = k + 1, S.replicas[r].in_flight
                _schedule(
                    S, D, r, now_s, count - k, preemptions, rank, victim,
                    decode_batching if decoding else batching, decode_memory if decoding else memory, preemption, rules,
                )  # fmt: skip
                dp = S.params[S.replicas[r].side].dp
                if dp > 1 and k % dp == 0 and _start_together(S, D, r + 1 - dp, now_s, count - k, preemptions):
                    k -= dp  # The ranks form one more step.
                if sends_layers and not decoding:
                    for one in range(r + 1 - dp, r + 1):
                        send_layers(S, D, one, S.replicas[r].in_flight - in_flight, now_s, decode_memory, decode_router)
            if counters.problem != OK or (counters.preemptions == preemptions and not decoding):
                break
        if counters.problem != OK:
            return counters.problem


@jit
def _handle_events(S, D, now_s, rank, memory, router, binning, decode_memory, decode_router):
    counters = S.counters[0]
    _handle_entries(S, D, now_s, rank, memory, router, binning, decode_memory, decode_router)
    if counters.bin_deadline_s <= now_s:
        _complete_expired_bins(S, now_s, rank)
    if counters.transfer_end_s <= now_s:
        end_shared_transfers(S, D, now_s)
    while counters.events > 0 and S.event_s[0] == now_s:
        r = pop_event(S)
        if r >= len(S.replicas):  # Events of requests are numbered after the replicas.
            handle_event(S, D, r - len(S.replicas))
            if counters.entry_s == now_s:
                _handle_entries(S, D, now_s, rank, memory, router, binning, decode_memory, decode_router)
            continue
        last = r + S.params[S.replicas[r].side].dp - 1
        for one in range(r, last + 1):  # The event of several ranks has the number of the first.
            end_step(S, D, one, now_s, rank, decode_router)
            S.pending[one] = 1
            if one == last and S.replicas[r].in_flight > 0:
                push_event(S, S.flights[r * S.params[0].stride + S.replicas[r].first_flight].end_s, r)
            if counters.entry_s == now_s:
                _handle_entries(S, D, now_s, rank, memory, router, binning, decode_memory, decode_router)


@jit_cold
def _handle_entries(  # noqa: C901, PLR0912  one sequence
    S, D, now_s, rank, memory, router, binning, decode_memory, decode_router
):
    counters, params = S.counters[0], S.params[0]
    while counters.entry_s == now_s:
        i = next_request(S)
        take_request(S, i)
        counters.front_free_s = max(S.arrival_s[i], counters.front_free_s) + params.front_serial_s
        update_entry_time(S)
        is_local = params.decode_replicas > 0 and _is_local(S, i)
        rejection = _local_rejection(S, i, decode_memory) if is_local else _rejection(S, i, memory, decode_memory)
        if rejection != NONE:
            S.results[i].status = REJECTED
            S.results[i].rejection = rejection
            send_next(S, i, REJECTED, now_s)
            continue
        slot = _new_slot(S, i)
        r = 0
        if is_local:
            _enter_decode_side(S, D, slot, now_s, rank, decode_router)
            if counters.problem != OK:
                return
            continue
        if params.central_queue == 1:
            S.waiting[0] += 1
        else:
            if params.router_sees_memory == 1:
                set_router_arrays(S, i)
            r = router(
                i, S.draws[i, 0], S.draws[i, 1], S.prompt[i], previous_replica(S.routed, S.previous_turn, i),
                params.total_blocks, D.prefill_waiting, D.prefill_running, D.prefill_outstanding, S.router_free_blocks,
                S.prefix_tokens, S.index_tokens, S.service_rate,
            )  # fmt: skip
            if r < 0 or r >= params.replicas:
                counters.problem = BAD_ROUTE
                counters.problem_value = r
                return
            if params.router_prefix == 2:
                index_prompt(S, r, i)
            if len(S.routed) > 0:
                S.routed[i] = r
            S.waiting[r] += 1
            S.outstanding_tokens[r] += outstanding(S.prompt[i], S.predicted[i])
            S.pending[r] = 1
        if params.tracks_service == 1:
            join_backlog(S, S.slots[slot].tenant)
        if params.bins == 0:
            enqueue(S, S.replicas[r].queue, now_s, slot, rank)
        else:
            _add_to_bin(S, S.replicas[r].queue, now_s, slot, rank, binning)


@jit_cold
def _is_local(S, i):
    """Return whether a decode replica prefills a request (conditional disaggregation)."""
    waiting = 0
    for r in range(S.params[0].replicas):
        waiting += S.waiting[r]
    return waiting >= S.params[1].max_prefill_queue_size or S.prompt[i] <= S.params[1].max_local_prefill_length


@jit_cold
def _local_rejection(S, i, memory):
    params, prompt, predicted, w = S.params[1], S.prompt[i], predicted_total(S, i, 0), S.work[0]
    if prompt >= params.max_model_len:
        return TOO_LONG
    w.prompts = w.prompt_tokens = w.longest = 0
    chunk = chunk_for(S, prompt, False, params.empty_replica_tokens, params.empty_replica_flags)
    if chunk <= 0:
        return OVER_BUDGET
    peak = prompt + remaining_tokens(predicted, 0) if params.needs_peak == 1 else 0
    return REFUSED if blocks_when_empty(S, 1, prompt, chunk, predicted, peak, memory) < 0 else NONE


@jit_cold
def _enter_decode_side(S, D, slot, now_s, rank, router):
    q = S.slots[slot]
    r = route_to_decode(S, D, q, router)
    if r < 0:
        return
    S.waiting[r] += 1
    S.outstanding_tokens[r] += outstanding(q.prompt, S.predicted[q.index])
    S.pending[r] = 1
    if S.params[0].tracks_service == 1:
        join_backlog(S, q.tenant)
    enqueue(S, S.replicas[r].queue, now_s, slot, rank)


@jit
def _rejection(S, i, memory, decode_memory):
    params, prompt, predicted = S.params[0], S.prompt[i], predicted_total(S, i, 0)
    if prompt >= params.max_model_len:
        return TOO_LONG
    if params.sglang == 1 or params.trtllm > 0:
        if prompt > params.longest_prompt:
            return OVER_BUDGET
        return REFUSED if S.max_tokens[i] < 1 else NONE
    w = S.work[0]  # ``chunk_for`` reads the step in ``work``; on an empty replica it has no prompts.
    w.prompts = w.prompt_tokens = w.longest = 0
    chunk = chunk_for(S, prompt, False, params.empty_replica_tokens, params.empty_replica_flags)
    if chunk <= 0:
        return OVER_BUDGET
    peak = prompt + remaining_tokens(predicted, 0) if params.needs_peak == 1 else 0
    blocks = blocks_when_empty(S, 0, prompt, chunk, predicted, peak, memory)
    for side in range(2, len(S.params)):  # The router may choose a replica of any group.
        chunk = chunk_for(S, prompt, False, S.params[side].empty_replica_tokens, S.params[side].empty_replica_flags)
        if chunk <= 0:
            return OVER_BUDGET
        blocks = min(blocks, blocks_when_empty(S, side, prompt, chunk, predicted, peak, memory))
    if blocks >= 0 and params.decode_replicas > 0:
        context, predicted = prompt + 1, predicted_total(S, i, 1)
        peak = context + remaining_tokens(predicted, 1) if S.params[1].needs_peak == 1 else 0
        blocks = blocks_when_empty(S, 1, context, context, predicted, peak, decode_memory)
    return REFUSED if blocks < 0 else NONE


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
    q.generated = q.context = q.prefilled = q.blocks = q.last_preemption = q.return_number = q.join_step = 0
    q.in_block_needs = q.decoding = q.swapped = q.bin_batch = q.generated_at_admission = 0
    q.cached = q.inserted = q.transfer_blocks = q.reserved = q.unhashed = 0
    q.admission = q.cached_segment = q.last_flight = q.place = q.hit = q.prefill_replica = -1
    q.last_token_s = q.queued_for_s = q.charged_tokens = 0.0
    q.waiting = 1
    q.extra_steps = 1 - S.ends_at_limit[i] if S.params[0].async_scheduling == 1 and not overlaps(S) else 0
    q.queued_at_s = q.arrival_s
    return slot


@jit_cold
def _add_to_bin(S, queue_index, now_s, slot, rank, binning):
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
    queue_index, counters = b // S.params[0].bins, S.counters[0]
    counters.batches += 1
    for i in range(S.bin_count[b]):
        slot = S.bin_slot[b, i]
        S.slots[slot].bin_batch = counters.batches
        enqueue(S, queue_index, now_s, slot, rank)
    S.bin_count[b] = 0
    if S.params[0].central_queue == 0:
        S.pending[queue_index] = 1
    deadline_s = INFINITY
    for other in range(len(S.bin_count)):
        if S.bin_count[other] > 0:
            deadline_s = min(deadline_s, S.slots[S.bin_slot[other, 0]].arrival_s + S.params[0].bin_wait_s)
    counters.bin_deadline_s = deadline_s


@jit_cold
def _complete_expired_bins(S, now_s, rank):
    for b in range(len(S.bin_count)):
        if S.bin_count[b] > 0 and S.slots[S.bin_slot[b, 0]].arrival_s + S.params[0].bin_wait_s <= now_s:
            _complete_bin(S, b, now_s, rank)


@jit_cold
def _complete_oldest_bin(S, now_s, rank):
    oldest, first = -1, 0
    for b in range(len(S.bin_count)):
        if S.bin_count[b] > 0 and (oldest < 0 or S.slots[S.bin_slot[b, 0]].index < first):
            oldest, first = b, S.slots[S.bin_slot[b, 0]].index
    if oldest >= 0:
        _complete_bin(S, oldest, now_s, rank)
    return oldest >= 0


@jit
def _order_replicas(S, D, decoding, now_s, rank, decode_memory):
    """Store the replicas to schedule in ``tmp_order``, in the order of the module's docstring. Return their number."""
    if S.params[1 if decoding else 0].dp > 1:
        return _order_ranks(S, D, decoding, now_s, rank, decode_memory)
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
def _order_ranks(S, D, decoding, now_s, rank, decode_memory):
    """Store all ranks of the replicas that have a pending rank and may form a step. Return their number.

    On the decode side, transfers to all ranks of the pending replicas start before.
    """
    params, begin, count = S.params[1 if decoding else 0], S.params[0].replicas if decoding else 0, 0
    for first in range(begin, begin + params.replicas, params.dp):
        pending = 0
        for r in range(first, first + params.dp):
            pending += S.pending[r]
            S.pending[r] = 0
        if pending == 0:
            continue
        if decoding:
            for r in range(first, first + params.dp):
                start_transfers(S, D, r, now_s, rank, decode_memory)
        ahead, is_full = params.async_scheduling == 1, S.replicas[first].in_flight >= params.max_in_flight
        if not is_full and (not ahead or may_form(S, first, now_s)):
            for r in range(first, first + params.dp):
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
def _final_status(S):
    """Return ``STUCK`` if requests are left, and note their lowest number. Otherwise return ``OK``."""
    first = len(S.results)
    for queue_index in range(len(S.queues)):
        for i in range(S.queues[queue_index].length):
            first = min(first, S.slots[S.queued_slot[S.queues[queue_index].offset + i]].index)
    for r in range(len(S.replicas)):
        for i in range(S.replicas[r].partials):
            first = min(first, S.slots[S.partials[r, i]].index)
        for i in range(S.tiers[r].loading):
            first = min(first, S.slots[S.loading[r, i]].index)
        for i in range(S.groups[S.replicas[r].idle_group].members):
            first = min(first, S.slots[member(S, S.replicas[r].idle_group, i)].index)
    S.counters[0].problem_value = first
    return OK if first == len(S.results) else STUCK


@jit
def _schedule(S, D, r, now_s, left, preemptions, rank, victim, batching, memory, preemption, rules):  # noqa: C901  one sequence
    """Fill a replica's pipeline with steps, or form the next step of a data-parallel rank.

    A step of decodes only is repeated without an event while nothing else can happen. ``left`` replicas are still to be
    scheduled in this pass; ``preemptions`` is the run's count when the pass began.
    """
    rep, w = S.replicas[r], S.work[0]
    params = S.params[rep.side]
    repeating, retried, swap_s, ahead = False, False, 0.0, params.async_scheduling == 1
    if params.dp > 1:
        begin_rank(S, r)
    elif rep.side == 1:
        start_transfers(S, D, r, now_s, rank, memory)
    while repeating or rep.in_flight < params.max_in_flight:
        if ahead and params.dp == 1 and not may_form(S, r, now_s):
            return
        if not repeating and not form(S, r, now_s, rank, victim, batching, memory, preemption, rules):
            rep.is_blocked = 1 if ahead and rep.in_flight > 0 else 0
            if w.preempted_for_blocks == 0 or retried or w.plan_flags & FORM_ONCE != 0 or rep.is_blocked == 1:
                if params.offload_blocks > 0:
                    complete_offloading(S, r, now_s)
                return
            retried = True
            swap_s = w.swap_s  # The swaps of the preempted requests delay the step that is formed now.
            continue
        w.swap_s += swap_s
        retried, swap_s = False, 0.0
        end_s = launch(S, D, r, now_s)
        if params.dp > 1:
            return
        if ahead:
            count_at_start(S, r, end_s)
        decodes_alone = params.max_in_flight == 1 and w.prompts == 0
        repeating = decodes_alone and can_repeat(S, r, end_s, _independent_until_s(S, left, preemptions))
        if repeating:
            end_in_place(S, r, end_s)
            now_s = end_s
        elif rep.in_flight == 1:
            push_event(S, end_s, r)


@jit_cold
def _start_together(S, D, first, now_s, left, preemptions):
    """Start the steps that the ranks of a replica have formed, which end together.

    Return whether the ranks may form one more step now. A step of decodes only is repeated without an event, as
    ``_schedule`` does, while no rank can form another step.
    """
    params = S.params[S.replicas[first].side]
    end, until_s, ahead = first + params.dp, _independent_until_s(S, left, preemptions), params.async_scheduling == 1
    while True:
        if S.work[0].rank_tokens == 0:
            return False
        drafter_s = shared_drafter_s(S, D, first) if S.params[0].speculates == 1 else 0.0
        end_s, shared_s = run_together(S, D, first, drafter_s)
        free_s = S.stage_free[len(S.replicas) + first, 0]
        repeating = params.max_in_flight == 1
        for r in range(first, end):
            load_rank(S, r)
            record_rank(S, r, now_s, end_s, free_s, shared_s, drafter_s)
            if S.work[0].seqs == 0:
                repeating = repeating and stays_empty(S, r, until_s, end_s)
            elif ahead:
                count_at_start(S, r, end_s)
            else:
                repeating = repeating and S.work[0].prompts == 0 and can_repeat(S, r, end_s, until_s)
        if not repeating:
            if S.replicas[first].in_flight == 1:
                push_event(S, end_s, first)
            return S.replicas[first].in_flight < params.max_in_flight and (not ahead or may_form(S, first, now_s))
        for r in range(first, end):
            S.replicas[r].in_flight -= 1
            if load_rank(S, r) > 0:
                S.replicas[r].in_flight += 1  # which ``end_in_place`` subtracts
                end_in_place(S, r, end_s)
                launch(S, D, r, end_s)
        now_s = end_s


@jit
def _independent_until_s(S, left, preemptions):
    """Return the time before which no other replica and no arrival can change the decisions of this replica.

    Any arrival can change them. In a closed loop or with dependents, the end of any request can, too; with a central
    queue, any preemption; under disaggregation, the end of any prompt or transfer. In these cases the result is
    -infinity while ``left`` replicas are still to be scheduled at this instant, because their steps have no events yet.
    """
    counters, params = S.counters[0], S.params[0]
    until_s = min(counters.entry_s, counters.bin_deadline_s)
    if params.closed_loop == 1 or params.has_dependents == 1 or params.central_queue == 1 or params.decode_replicas > 0:
        if left > 0 or counters.preemptions != preemptions or (params.decode_replicas > 0 and _prefill_pending(S)):
            return -INFINITY
        if counters.events > 0:
            until_s = min(until_s, S.event_s[0])
        until_s = min(until_s, counters.transfer_end_s)
    return until_s


@jit_cold
def _prefill_pending(S):
    pending = 0
    for r in range(S.params[0].replicas):
        pending += S.pending[r]
    return pending > 0
