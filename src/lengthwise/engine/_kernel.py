"""The event loop: arrivals, ends of steps, schedulers, in one total order.

At one instant: arrivals, then the steps that end (by replica), then the schedulers of the
replicas they touched (by number; over a central queue the emptiest first).
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import _layout as layout
from lengthwise.engine._bins import complete_due, complete_oldest, gather
from lengthwise.engine._coast import may_coast, ride
from lengthwise.engine._evict import predicted_total
from lengthwise.engine._expire import lift, outstanding, release
from lengthwise.engine._form import chunk_for, form, remaining_tokens
from lengthwise.engine._groups import member
from lengthwise.engine._launch import end_step, launch
from lengthwise.policy import contracts
from lengthwise.schema.records import Refusal, Status

FORM_ONCE = contracts.FORM_ONCE
OK, BAD_ROUTE, STUCK = layout.OK, layout.BAD_ROUTE, layout.STUCK
REJECTED = int(Status.REJECTED)
NONE = int(Refusal.NONE)
TOO_LONG = int(Refusal.PROMPT_REACHES_MAX_MODEL_LEN)
OVER_BUDGET = int(Refusal.PROMPT_ABOVE_TOKEN_BUDGET)
OVER_MEMORY = int(Refusal.PROMPT_ABOVE_KV_MEMORY)
INFINITY = float("inf")


def run(S, rank, leave_rank, batching, memory, router, takeover, binning):
    """Runs until nothing is left or the time limit; returns a problem's code."""
    par, ctr = S.par[0], S.ctr[0]
    while True:
        arrival_s = S.arrival_s[ctr.next] if ctr.next < ctr.released else INFINITY
        end_s = S.event_s[0] if ctr.events > 0 else INFINITY
        now_s = min(arrival_s, end_s, ctr.bin_due_s)
        if now_s == INFINITY:
            now_s = ctr.last_s
            if not complete_oldest(S, now_s, rank):
                return _somebody_waits(S)
        else:
            if now_s > par.limit_s:
                return OK
            ctr.last_s = max(ctr.last_s, now_s)
            _happens(S, now_s, rank, memory, router, binning)
        passes = 2 if par.central == 1 else 1
        while passes > 0:
            passes -= 1
            evictions = ctr.evictions
            count = _order(S)
            for k in range(count):
                left = count - 1 - k
                _schedule(
                    S,
                    S.scratch_order[k],
                    now_s,
                    left,
                    evictions,
                    rank,
                    leave_rank,
                    batching,
                    memory,
                    takeover,
                )
            if ctr.evictions == evictions or ctr.problem != OK:
                break
        if ctr.problem != OK:
            return ctr.problem


@jit
def _happens(S, now_s, rank, memory, router, binning):
    """All that comes from outside and all steps that end at this instant."""
    ctr = S.ctr[0]
    _arrivals(S, now_s, rank, memory, router, binning)
    if ctr.bin_due_s <= now_s:
        complete_due(S, now_s, rank)
    while ctr.events > 0 and S.event_s[0] == now_s:
        _end_first(S, now_s)
        if ctr.next < ctr.released and S.arrival_s[ctr.next] == now_s:
            _arrivals(S, now_s, rank, memory, router, binning)


@jit
def _end_first(S, now_s):
    """Ends the step that is due, of the lowest replica."""
    r = _pop_event(S)
    end_step(S, r, now_s)
    S.touched[r] = 1
    if S.replicas[r].in_flight > 0:
        _push_event(S, S.flights[r * S.par[0].pp + S.replicas[r].first_flight].end_s, r)


@jit
def _order(S):
    """Replicas to schedule, in ``scratch_order``; returns how many.

    The touched ones by number; over a central queue all of them while somebody waits, the
    emptiest first.
    """
    if S.par[0].central == 1 and S.queues[0].length > 0:
        _by_load(S)
        S.touched[:] = 0
        return S.par[0].replicas
    count = 0
    for r in range(S.par[0].replicas):
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
    for r in range(S.par[0].replicas):
        for i in range(S.replicas[r].partials):
            first = min(first, S.slots[S.partials[r, i]].index)
        for i in range(S.groups[S.replicas[r].idle].members):
            first = min(first, S.slots[member(S, S.replicas[r].idle, i)].index)
    S.ctr[0].problem_request = first
    return OK if first == len(S.results) else STUCK


@jit_cold
def _arrivals(S, now_s, rank, memory, router, binning):
    """Takes in all requests that arrive now."""
    ctr = S.ctr[0]
    while ctr.next < ctr.released and S.arrival_s[ctr.next] == now_s:
        i = ctr.next
        ctr.next += 1
        refusal = _refusal(S, i, memory)
        if refusal != NONE:
            S.results[i].status = REJECTED
            S.results[i].refusal = refusal
            release(S, now_s)
            continue
        slot = _new_slot(S, i, now_s)
        r = _route(S, i, router)
        if r < 0:
            return
        if S.par[0].charges == 1:
            lift(S, S.slots[slot].tenant)
        gather(S, S.replicas[r].queue, now_s, slot, rank, binning)


@jit
def _refusal(S, i, memory):
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
    return OVER_MEMORY if blocks < 0 else NONE


@jit
def _new_slot(S, i, now_s):
    ctr = S.ctr[0]
    if ctr.free_slots > 0:
        ctr.free_slots -= 1
        slot = S.free_slots[ctr.free_slots]
    else:
        slot = ctr.slots
        ctr.slots += 1
    q = S.slots[slot]
    q.index = i
    q.arrival_s = now_s
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
    q.seat = 0
    q.last_token_s = 0.0
    q.join_step = 0
    q.growing = 0
    q.decoding = 0
    q.swapped = 0
    q.waiting = 1
    q.batch = 0
    q.entered = 0
    q.queued_s = now_s
    q.waited_s = 0.0
    q.charged = 0.0
    return slot


@jit
def _route(S, i, router):
    """The replica of a request; -1 after a problem."""
    if S.par[0].central == 1:
        S.waiting[0] += 1
        return 0
    r = router(i, S.draws[i, 0], S.draws[i, 1], S.waiting, S.running, S.tokens)
    if r < 0 or r >= S.par[0].replicas:
        S.ctr[0].problem = BAD_ROUTE
        S.ctr[0].problem_request = r
        return -1
    S.waiting[r] += 1
    S.tokens[r] += outstanding(S.prompt[i], S.predicted[i])
    S.touched[r] = 1
    return r


@jit
def _schedule(S, r, now_s, left, evictions, rank, leave_rank, batching, memory, takeover):
    """Fills a replica's pipeline with steps; pure decoding runs on in place.

    ``left`` replicas are still to be scheduled at this instant, before which there had been so
    many ``evictions``.
    """
    rep, par, w = S.replicas[r], S.par[0], S.work[0]
    coasting, retried, swap_s = False, False, 0.0
    while coasting or rep.in_flight < par.pp:
        if not coasting and not form(S, r, now_s, rank, leave_rank, batching, memory, takeover):
            if w.evicted == 0 or retried or w.plan_flags & FORM_ONCE != 0:
                return
            retried = True
            swap_s = w.swap_s
            continue
        w.swap_s += swap_s
        retried, swap_s = False, 0.0
        end_s = launch(S, r, now_s)
        coasting = par.pp == 1 and w.prompts == 0 and may_coast(S, r, end_s, _horizon(S, left, evictions))
        if coasting:
            ride(S, r, end_s)
            now_s = end_s
        elif rep.in_flight == 1:
            _push_event(S, end_s, r)


@jit
def _horizon(S, left, evictions):
    """Before this time nobody else can change what a replica does.

    Replicas meet where requests arrive; in a closed loop also where any of them ends, over a
    central queue also where any of them evicts. Those still to be scheduled now are not among
    the events yet.
    """
    ctr, par = S.ctr[0], S.par[0]
    horizon_s = S.arrival_s[ctr.next] if ctr.next < ctr.released else INFINITY
    horizon_s = min(horizon_s, ctr.bin_due_s)
    if par.closed == 1 or par.central == 1:
        if left > 0 or ctr.evictions != evictions:
            return -INFINITY
        if ctr.events > 0:
            horizon_s = min(horizon_s, S.event_s[0])
    return horizon_s


@jit_cold
def _by_load(S):
    """Replica numbers in ``scratch_order``, the fewest residents first."""
    for r in range(S.par[0].replicas):
        i = r
        while i > 0 and S.running[S.scratch_order[i - 1]] > S.running[r]:
            S.scratch_order[i] = S.scratch_order[i - 1]
            i -= 1
        S.scratch_order[i] = r


@jit
def _push_event(S, end_s, r):
    i = S.ctr[0].events
    S.ctr[0].events += 1
    while i > 0:
        parent = (i - 1) >> 1
        if not _sooner(end_s, r, S.event_s[parent], S.event_replica[parent]):
            break
        S.event_s[i] = S.event_s[parent]
        S.event_replica[i] = S.event_replica[parent]
        i = parent
    S.event_s[i] = end_s
    S.event_replica[i] = r


@jit
def _pop_event(S):
    """The replica whose step ends first."""
    first = S.event_replica[0]
    S.ctr[0].events -= 1
    length = S.ctr[0].events
    end_s, r, i = S.event_s[length], S.event_replica[length], 0
    while True:
        child = 2 * i + 1
        if child >= length:
            break
        if child + 1 < length and _sooner(
            S.event_s[child + 1], S.event_replica[child + 1], S.event_s[child], S.event_replica[child]
        ):
            child += 1
        if not _sooner(S.event_s[child], S.event_replica[child], end_s, r):
            break
        S.event_s[i] = S.event_s[child]
        S.event_replica[i] = S.event_replica[child]
        i = child
    S.event_s[i] = end_s
    S.event_replica[i] = r
    return first


@jit
def _sooner(s_a, r_a, s_b, r_b):
    return s_a < s_b or (s_a == s_b and r_a < r_b)
