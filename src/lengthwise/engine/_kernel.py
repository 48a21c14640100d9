"""The event loop: arrivals, ends of steps, schedulers, in one total order.

At one instant: arrivals, then the steps that end (by replica), then the schedulers of the
replicas they touched (by number; over a central queue the emptiest first).
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
from lengthwise.engine._launch import end_step, launch
from lengthwise.policy import contracts

FORM_ONCE = contracts.FORM_ONCE
OK, STUCK = layout.OK, layout.STUCK
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
    arrivals(S, now_s, rank, memory, router, binning)
    if ctr.bin_due_s <= now_s:
        complete_due(S, now_s, rank)
    while ctr.events > 0 and S.event_s[0] == now_s:
        _end_first(S, now_s)
        if ctr.next < ctr.released and S.arrival_s[ctr.next] == now_s:
            arrivals(S, now_s, rank, memory, router, binning)


@jit
def _end_first(S, now_s):
    """Ends the step that is due, of the lowest replica."""
    r = pop_event(S)
    end_step(S, r, now_s)
    S.touched[r] = 1
    if S.replicas[r].in_flight > 0:
        push_event(S, S.flights[r * S.par[0].pp + S.replicas[r].first_flight].end_s, r)


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
            push_event(S, end_s, r)


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
