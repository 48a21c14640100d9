"""Pure decoding between two changes: many steps in one tight loop.

While nothing can be admitted, nobody finishes, no new block is short and no outside event
comes before a step ends, the next step is the same group again. Its cost moves only with the
KV tokens; this loop does exactly what form, launch and end would do, without asking.
"""

from __future__ import annotations

from lengthwise._jit import jit
from lengthwise.engine._groups import advance, next_event
from lengthwise.engine._launch import count_cohorts, launch

INFINITY = float("inf")


@jit
def coast(S, r, end_s, horizon_s):  # type: ignore[no-untyped-def]
    """Runs on from a decode-only step just launched; returns the end of the last one in flight."""
    rep, par, w = S.replicas[r], S.par[0], S.work[0]
    if rep.partials > 0 or S.groups[rep.idle].members > 0:
        return end_s
    if S.queues[rep.queue].length > 0 and S.running[r] < par.max_num_seqs:
        return end_s
    horizon_s = min(horizon_s, min(rep.deadline_s, S.queues[rep.queue].deadline_s))
    flight = S.flights[w.flight]
    g = flight.group
    group = S.groups[g]
    w.evicted = 0
    w.swap_s = 0.0
    while end_s < horizon_s and end_s <= par.limit_s and next_event(S, g) > group.steps + 1:
        need = S.phases[g, (group.steps + 1) % par.block_size]
        if rep.free_blocks - need < 1:
            break
        S.ctr[0].last_s = max(S.ctr[0].last_s, end_s)
        count_cohorts(S, r, g, end_s)
        advance(S, g, end_s)
        rep.free_blocks -= need
        rep.in_flight -= 1
        end_s = launch(S, r, end_s)
    return end_s
