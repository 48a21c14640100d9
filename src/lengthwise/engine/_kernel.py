"""The event loop: arrivals, ends of steps, schedulers, in one total order.

At one instant: arrivals, then the steps that end (by replica), then the schedulers of the
replicas they touched (by number; over a central queue the emptiest first; those that only decode first).
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import _layout as layout
from lengthwise.engine._bins import complete_due, complete_oldest
from lengthwise.engine._coast import may_coast, ride
from lengthwise.engine._enter import arrivals
from lengthwise.engine._events import pop_event, push_event
from lengthwise.engine._form import form
from lengthwise.engine._groups import member
from lengthwise.engine._handover import arrive, fetch
from lengthwise.engine._launch import end_step, launch
from lengthwise.policy import contracts

FORM_ONCE = contracts.FORM_ONCE
OK, STUCK = layout.OK, layout.STUCK
INFINITY = float("inf")


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
def _order(S, apart):
    """Replicas to schedule, in ``scratch_order``; returns how many.

    The touched ones by number, ``apart`` those that only decode, else the others; over a central queue all of them
    while somebody waits, the emptiest first.
    """
    if S.par[0].central == 1 and S.queues[0].length > 0:
        _by_load(S)
        S.touched[:] = 0
        return S.par[0].replicas
    count, first = 0, S.par[0].replicas if apart else 0
    for r in range(first, len(S.replicas) if apart else S.par[0].replicas):
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
    return OK if first == len(S.results) else STUCK


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
        coasting = (
            par.flights == 1 and w.prompts == 0 and may_coast(S, r, end_s, _horizon(S, left, evictions))
        )
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
