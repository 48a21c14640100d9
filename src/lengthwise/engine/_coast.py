"""Pure decoding between two changes: many steps without going through the event loop.

While nothing can be admitted, nobody finishes, no new block is short and no outside event
comes before a step ends, the next step is the same group again: its end and the forming of
the next one are a few sums.
"""

from __future__ import annotations

from lengthwise._jit import jit
from lengthwise.engine._groups import advance, next_event
from lengthwise.engine._launch import count_cohorts


@jit
def may_coast(S, r, end_s, horizon_s):
    """Whether the decode-only step just launched can only be followed by the same group."""
    rep, queue = S.replicas[r], S.queues[S.replicas[r].queue]
    par = S.par[rep.side]
    g = S.flights[S.work[0].flight].group
    group = S.groups[g]
    alone = rep.partials == 0 and S.groups[rep.idle].members == 0
    closed = queue.length == 0 or S.running[r] >= par.max_num_seqs
    before = (
        end_s < min(horizon_s, rep.deadline_s, queue.deadline_s, queue.overdue_s) and end_s <= par.limit_s
    )
    decided = rep.decide == 0 and rep.undecided + 1 < par.window
    settled = par.counts_steps == 0 and (par.takes_over == 0 or queue.length == 0 or decided)
    if not (alone and closed and before and settled) or next_event(S, g) <= group.steps + 1:
        return False
    return rep.free_blocks - S.phases[g, (group.steps + 1) % par.block_size] >= 1


@jit
def ride(S, r, end_s):
    """Ends the step in place and claims the blocks of the next one, left in ``work``."""
    rep, w = S.replicas[r], S.work[0]
    g = S.flights[w.flight].group
    S.ctr[0].last_s = max(S.ctr[0].last_s, end_s)
    count_cohorts(S, r, g, end_s)
    advance(S, g, end_s)
    rep.free_blocks -= S.phases[g, S.groups[g].steps % S.par[0].block_size]
    rep.in_flight -= 1
    rep.undecided += 1
    w.swap_s = 0.0
