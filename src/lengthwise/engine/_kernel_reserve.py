"""Admission test of memory reserved by predicted length (``policy.reservation``).

The kernel gets ``admit_by_reserve`` as an argument, so that only runs that reserve compile it.
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine._kernel_groups import member, update
from lengthwise.engine._kernel_queue import remaining_of
from lengthwise.policy import reservation

OWN_RULE = reservation.OWN_RULE
reserved_tokens = jit(reservation.reserved_tokens)
adapted_margin = jit(reservation.adapted_margin)
budget_margin = jit(reservation.budget_margin)


def admit_by_reserve(S, r, _now_s, _rank):
    """Return 1 if the request in ``work.candidate`` fits, or else 0."""
    return 1 if fits_reserved(S, r, S.work[0].candidate, 0) else 0


@jit_cold
def fits_reserved(S, r, candidate, taken):
    """Return whether the predicted peak of KV tokens fits with the waiting request ``candidate``.

    The peak includes the residents, and of the first ``taken`` requests in ``tmp_slot`` those that still wait, because
    they are about to be admitted. Each has reserved tokens in ``tmp_waiting_key`` and its tokens in ``tmp_waiting``.
    """
    if S.replicas[r].margin <= OWN_RULE:
        return True
    rep, stride, w = S.replicas[r], S.params[0].stride, S.work[0]
    count = _insert(S, r, 0, candidate)
    count = _insert_group(S, r, count, rep.idle_group)
    for i in range(rep.partials):
        count = _insert(S, r, count, S.partials[r, i])
    for k in range(rep.in_flight):
        f = r * stride + (rep.first_flight + k) % stride
        count = _insert_group(S, r, count, S.flights[f].group)
        for i in range(S.flights[f].prompts):
            count = _insert(S, r, count, S.prompt_slot[f, i])
    if w.decodes > 0:
        count = _insert_group(S, r, count, S.flights[w.flight].group)
    for i in range(w.prompts):
        count = _insert(S, r, count, S.prompt_slot[w.flight, i])
    for i in range(taken):
        if S.slots[S.tmp_slot[i]].waiting == 1:
            count = _insert(S, r, count, S.tmp_slot[i])
    return count == 1 or _peak_tokens(S, r, count) <= S.params[0].total_blocks * S.params[0].block_size


@jit
def adapt_margin(S, r, busy_s):
    """Adapt the margin to the step in ``work``, which has been recorded and takes ``busy_s``."""
    rep, params, w = S.replicas[r], S.params[0], S.work[0]
    tokens, spent_s, idle_s = w.decodes + w.prompt_tokens, w.swap_s, 0.0
    rep.prompt_tokens += w.prompt_tokens
    rep.prompt_s += busy_s * w.prompt_tokens / tokens
    if rep.preempted_tokens > 0:
        spent_s += rep.preempted_tokens * rep.prompt_s / rep.prompt_tokens
        rep.preempted_tokens = 0
    if S.queues[rep.queue].length > 0 and S.running[r] < params.max_num_seqs:
        idle_s = busy_s * w.decodes / tokens * rep.free_blocks / params.total_blocks
    if rep.busy_s > 0.0:
        turnovers_per_s = rep.tokens / (params.total_blocks * params.block_size * rep.busy_s)
        rep.by_cost = adapted_margin(rep.by_cost, params.max_recompute_share, spent_s, idle_s, turnovers_per_s)
        rep.by_budget = budget_margin(rep.by_budget, params.preemption_budget, rep.shortages, rep.finished)
        rep.margin = max(rep.by_cost, rep.by_budget)
        rep.shortages = 0
        rep.finished = 0


@jit
def _peak_tokens(S, r, count):
    in_use, peak, reserves_limits = 0.0, 0.0, S.replicas[r].margin >= 1.0
    for i in range(count):
        in_use += S.tmp_waiting[i] + S.params[0].block_size - 1  # A last block may have one token.
        peak = peak + S.tmp_waiting_key[i] if reserves_limits else max(peak, in_use + S.tmp_waiting_key[i] * (i + 1))
    return in_use + peak if reserves_limits else peak


@jit
def _insert_group(S, r, count, g):
    for i in range(S.groups[g].members):
        slot = member(S, g, i)
        update(S, g, slot)
        count = _insert(S, r, count, slot)
    return count


@jit
def _insert(S, r, count, slot):
    q, i = S.slots[slot], count
    remaining = reserved_tokens(remaining_of(S, q), S.max_tokens[q.index] - q.generated, S.replicas[r].margin)
    while i > 0 and S.tmp_waiting_key[i - 1] < remaining:
        S.tmp_waiting_key[i] = S.tmp_waiting_key[i - 1]
        S.tmp_waiting[i] = S.tmp_waiting[i - 1]
        i -= 1
    S.tmp_waiting_key[i] = remaining
    S.tmp_waiting[i] = q.prompt + q.generated
    return count + 1
