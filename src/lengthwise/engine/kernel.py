"""The event loop: arrivals, ends of steps, schedulers, in one total order.

At one instant: arrivals, then the steps that end (by replica), then the schedulers of the
replicas they touched (by number; over a central queue the emptiest first; those that only decode first).
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import kernel_layout
from lengthwise.engine._kernel_batch import chunk_for, form
from lengthwise.engine._kernel_groups import member
from lengthwise.engine._kernel_memory import lift, line_up, outstanding, release, remaining_tokens, to_front
from lengthwise.engine._kernel_queue import first_sent, pop_event, predicted_total, push_event, take_sent
from lengthwise.engine._kernel_steps import arrive, blocks_to_decode, end_step, fetch, launch, may_coast, ride
from lengthwise.policy import contracts
from lengthwise.schema.records import Rejection, Status

BAD_BIN = kernel_layout.BAD_BIN
INFINITY = float("inf")


@jit
def gather(S, q, now_s, slot, rank, binning):
    """Into the queue, or into a bin that becomes a batch when it is full."""
    if S.par[0].bins == 0:
        line_up(S, q, now_s, slot, rank)
    else:
        _into_bin(S, q, now_s, slot, rank, binning)


@jit_cold
def _into_bin(S, q, now_s, slot, rank, binning):
    request, par = S.slots[slot], S.par[0]
    number = binning(S.predicted[request.index], S.prompt[request.index])
    if number < 0 or number >= par.bins:
        S.ctr[0].problem = BAD_BIN
        S.ctr[0].problem_request = number
        return
    b = q * par.bins + number
    S.bin_slot[b, S.bin_count[b]] = slot
    S.bin_count[b] += 1
    if S.bin_count[b] == 1:
        S.ctr[0].bin_due_s = min(S.ctr[0].bin_due_s, request.arrival_s + par.bin_wait_s)
    if S.bin_count[b] == par.max_num_seqs:
        _complete(S, b, now_s, rank)


@jit_cold
def _complete(S, b, now_s, rank):
    """A bin becomes a batch and joins the queue."""
    q = b // S.par[0].bins
    S.ctr[0].batches += 1
    for i in range(S.bin_count[b]):
        slot = S.bin_slot[b, i]
        S.slots[slot].batch = S.ctr[0].batches
        line_up(S, q, now_s, slot, rank)
    S.bin_count[b] = 0
    if S.par[0].central == 0:
        S.touched[q] = 1
    S.ctr[0].bin_due_s = _next_due(S)


@jit_cold
def _next_due(S):
    """When the first of all bins has waited long enough for its bin to fill."""
    deadline_s = INFINITY
    for b in range(len(S.bin_count)):
        if S.bin_count[b] > 0:
            deadline_s = min(deadline_s, S.slots[S.bin_slot[b, 0]].arrival_s + S.par[0].bin_wait_s)
    return deadline_s


@jit_cold
def complete_due(S, now_s, rank):
    """Bins whose first has waited long enough become batches as they are."""
    for b in range(len(S.bin_count)):
        if S.bin_count[b] > 0 and S.slots[S.bin_slot[b, 0]].arrival_s + S.par[0].bin_wait_s <= now_s:
            _complete(S, b, now_s, rank)


@jit_cold
def complete_oldest(S, now_s, rank):
    """When nothing else will happen: the bin whose first came first; False: all are empty."""
    oldest, first = -1, 0
    for b in range(len(S.bin_count)):
        if S.bin_count[b] > 0 and (oldest < 0 or S.slots[S.bin_slot[b, 0]].index < first):
            oldest, first = b, S.slots[S.bin_slot[b, 0]].index
    if oldest >= 0:
        _complete(S, oldest, now_s, rank)
    return oldest >= 0


BAD_ROUTE = kernel_layout.BAD_ROUTE
REJECTED = int(Status.REJECTED)
NONE = int(Rejection.NONE)
TOO_LONG = int(Rejection.PROMPT_REACHES_MAX_MODEL_LEN)
OVER_BUDGET = int(Rejection.PROMPT_ABOVE_TOKEN_BUDGET)
OVER_MEMORY = int(Rejection.PROMPT_ABOVE_KV_MEMORY)


@jit_cold
def arrivals(S, D, now_s, rank, memory, router, binning, decode_memory):
    """Takes in all requests that enter now."""
    ctr = S.ctr[0]
    while ctr.entry_s == now_s:
        i = first_sent(S)
        take_sent(S, i)
        ctr.front_free_s = max(S.arrival_s[i], ctr.front_free_s) + S.par[0].front_queue_s
        to_front(S)
        rejection = _rejection(S, i, memory, decode_memory)
        if rejection != NONE:
            S.results[i].status = REJECTED
            S.results[i].rejection = rejection
            release(S, i, REJECTED, now_s)
            continue
        slot = _new_slot(S, i)
        r = _route(S, D, i, router)
        if r < 0:
            return
        if S.par[0].charges == 1:
            lift(S, S.slots[slot].tenant)
        gather(S, S.replicas[r].queue, now_s, slot, rank, binning)


@jit
def _rejection(S, i, memory, decode_memory):
    """Why not even an idle replica could take the request, if so."""
    par, prompt, predicted = S.par[0], S.prompt[i], predicted_total(S, i, 0)
    if prompt >= par.max_model_len:
        return TOO_LONG
    S.work[0].prompts = 0
    S.work[0].prompt_tokens = 0
    S.work[0].longest = 0
    chunk = chunk_for(S, prompt, False, par.empty_tokens, par.empty_flags)
    if chunk <= 0:
        return OVER_BUDGET
    peak = prompt + remaining_tokens(predicted, 0) if par.needs_peak == 1 else 0
    blocks = memory(
        prompt,
        chunk,
        predicted,
        par.max_model_len,
        par.block_size,
        par.total_blocks,
        par.total_blocks,
        par.watermark_blocks,
        0,
        peak,
    )
    if blocks >= 0 and par.decodes > 0:
        blocks = blocks_to_decode(S, i, decode_memory)
    return OVER_MEMORY if blocks < 0 else NONE


@jit
def _new_slot(S, i):
    ctr = S.ctr[0]
    if ctr.free_slots > 0:
        ctr.free_slots -= 1
        slot = S.free_slots[ctr.free_slots]
    else:
        slot = ctr.slots
        ctr.slots += 1
    q = S.slots[slot]
    q.index = i
    q.arrival_s = S.arrival_s[i]
    q.prompt = S.prompt[i]
    q.output = S.output[i]
    q.priority = S.priority[i]
    q.tenant = S.tenant[i] if S.par[0].charges == 1 else 0
    q.generated = 0
    q.context = 0
    q.prefilled = 0
    q.blocks = 0
    q.admission = -1
    q.eviction = 0
    q.slot_index = 0
    q.last_token_s = 0.0
    q.join_step = 0
    q.growing = 0
    q.decoding = 0
    q.swapped = 0
    q.waiting = 1
    q.batch = 0
    q.entered = 0
    q.retained = 0
    q.reserved = 0
    q.queued_s = q.arrival_s
    q.queued_for_s = 0.0
    q.charged = 0.0
    return slot


@jit
def _route(S, D, i, router):
    """The replica of a request; -1 after a problem."""
    if S.par[0].central == 1:
        S.waiting[0] += 1
        return 0
    r = router(i, S.draws[i, 0], S.draws[i, 1], D.waiting_here, D.running_here, D.tokens_here)
    if r < 0 or r >= S.par[0].replicas:
        S.ctr[0].problem = BAD_ROUTE
        S.ctr[0].problem_request = r
        return -1
    S.waiting[r] += 1
    S.tokens[r] += outstanding(S.prompt[i], S.predicted[i])
    S.touched[r] = 1
    return r


FORM_ONCE = contracts.FORM_ONCE
OK, BLOCKED = kernel_layout.OK, kernel_layout.BLOCKED


def run(
    S, D, rank, leave_rank, batching, memory, router, takeover, binning,
    decode_batching, decode_memory, decode_router,
):  # fmt: skip
    """Runs until nothing is left or the time limit; returns a problem's code.

    ``D`` and the last three are of the side that decodes, where that is apart; its replicas are scheduled first.
    """
    par, ctr = S.par[0], S.ctr[0]
    while True:
        end_s = S.event_s[0] if ctr.events > 0 else INFINITY
        now_s = min(ctr.entry_s, end_s, ctr.bin_due_s)
        if now_s == INFINITY:
            now_s = ctr.last_s
            if not complete_oldest(S, now_s, rank):
                return _somebody_waits(S)
        else:
            if now_s > par.limit_s:
                return OK
            ctr.last_s = max(ctr.last_s, now_s)
            _happens(S, D, now_s, rank, memory, router, binning, decode_memory, decode_router)
        passes = 2 if par.central == 1 or par.decodes > 0 else 1
        while passes > 0:
            passes -= 1
            evictions = ctr.evictions
            apart = passes == 1 and par.decodes > 0
            count = _order(S, apart)
            for k in range(count):
                left = count - 1 - k
                _schedule(
                    S,
                    D,
                    S.scratch_order[k],
                    now_s,
                    left,
                    evictions,
                    rank,
                    leave_rank,
                    decode_batching if apart else batching,
                    decode_memory if apart else memory,
                    takeover,
                )
            if ctr.problem != OK or (ctr.evictions == evictions and not apart):
                break
        if ctr.problem != OK:
            return ctr.problem


@jit
def _happens(S, D, now_s, rank, memory, router, binning, decode_memory, decode_router):
    """All that comes from outside and all steps that end at this instant."""
    ctr = S.ctr[0]
    arrivals(S, D, now_s, rank, memory, router, binning, decode_memory)
    if ctr.bin_due_s <= now_s:
        complete_due(S, now_s, rank)
    while ctr.events > 0 and S.event_s[0] == now_s:
        _end_first(S, D, now_s, rank, decode_router)
        if ctr.entry_s == now_s:
            arrivals(S, D, now_s, rank, memory, router, binning, decode_memory)


@jit
def _end_first(S, D, now_s, rank, decode_router):
    """Ends the step that is due, of the lowest replica, or after all of them a transfer, of the lowest request."""
    r = pop_event(S)
    if r >= len(S.replicas):
        arrive(S, D, r - len(S.replicas))
        return
    end_step(S, D, r, now_s, rank, decode_router)
    S.touched[r] = 1
    if S.replicas[r].in_flight > 0:
        push_event(S, S.flights[r * S.par[0].stride + S.replicas[r].first_flight].end_s, r)


@jit
def _order(S, disaggregated):
    """Replicas to schedule, in ``scratch_order``; returns how many.

    The touched ones by number, ``disaggregated`` those that only decode, else the others; over a central queue all of them
    while somebody waits, the emptiest first.
    """
    if S.par[0].central == 1 and S.queues[0].length > 0:
        _by_load(S)
        S.touched[:] = 0
        return S.par[0].replicas
    count, first = 0, S.par[0].replicas if disaggregated else 0
    for r in range(first, len(S.replicas) if disaggregated else S.par[0].replicas):
        if S.touched[r] == 1:
            S.touched[r] = 0
            S.scratch_order[count] = r
            count += 1
    return count


@jit_cold
def _somebody_waits(S):
    first = len(S.results)
    for q in range(len(S.queues)):
        for i in range(S.queues[q].length):
            first = min(first, S.pool_index[S.queues[q].offset + i])
    for r in range(len(S.replicas)):
        for i in range(S.replicas[r].partials):
            first = min(first, S.slots[S.partials[r, i]].index)
        for i in range(S.groups[S.replicas[r].idle].members):
            first = min(first, S.slots[member(S, S.replicas[r].idle, i)].index)
    S.ctr[0].problem_request = first
    return OK if first == len(S.results) else BLOCKED


@jit
def _schedule(S, D, r, now_s, left, evictions, rank, leave_rank, batching, memory, takeover):
    """Fills a replica's pipeline with steps; pure decoding runs on in place.

    ``left`` replicas are still to be scheduled at this instant, before which there had been so
    many ``evictions``.
    """
    rep, w = S.replicas[r], S.work[0]
    par = S.par[rep.side]
    coasting, retried, swap_s = False, False, 0.0
    if rep.side == 1:
        fetch(S, D, r, now_s, rank, memory)
    while coasting or rep.in_flight < par.flights:
        if not coasting and not form(S, r, now_s, rank, leave_rank, batching, memory, takeover):
            if w.evicted == 0 or retried or w.plan_flags & FORM_ONCE != 0:
                return
            retried = True
            swap_s = w.swap_s
            continue
        w.swap_s += swap_s
        retried, swap_s = False, 0.0
        end_s = launch(S, D, r, now_s)
        coasting = par.flights == 1 and w.prompts == 0 and may_coast(S, r, end_s, _horizon(S, left, evictions))
        if coasting:
            ride(S, r, end_s)
            now_s = end_s
        elif rep.in_flight == 1:
            push_event(S, end_s, r)


@jit
def _horizon(S, left, evictions):
    """Before this time nobody else can change what a replica does.

    Replicas meet where requests arrive; in a closed loop, and where requests come after others, also where any of them
    ends, over a central queue also where any of them evicts, and where decoding is apart also where a prompt or a
    transfer ends. Those still to be scheduled now are not among the events yet.
    """
    ctr, par = S.ctr[0], S.par[0]
    horizon_s = min(ctr.entry_s, ctr.bin_due_s)
    if par.closed == 1 or par.follows == 1 or par.central == 1 or par.decodes > 0:
        if left > 0 or ctr.evictions != evictions or (par.decodes > 0 and _somebody_to_look(S)):
            return -INFINITY
        if ctr.events > 0:
            horizon_s = min(horizon_s, S.event_s[0])
    return horizon_s


@jit_cold
def _somebody_to_look(S):
    """Whether replicas that prefill are still to be scheduled at this instant."""
    touched = 0
    for r in range(S.par[0].replicas):
        touched += S.touched[r]
    return touched > 0


@jit_cold
def _by_load(S):
    """Replica numbers in ``scratch_order``, the fewest residents first."""
    for r in range(S.par[0].replicas):
        i = r
        while i > 0 and S.running[S.scratch_order[i - 1]] > S.running[r]:
            S.scratch_order[i] = S.scratch_order[i - 1]
            i -= 1
        S.scratch_order[i] = r
