"""Decodes that verify proposed tokens: their blocks, the tokens that they accept, and what the drafter costs.

A group of decoding sequences is only a set here. Each step brings the records of its members up to date, and the
group's count of steps stays 0, so that the functions for members (``join``, ``remove``) remain valid. A step costs
O(sequences) instead of O(1).
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.cost._lookup import decode_attention, entry
from lengthwise.engine._kernel_groups import member
from lengthwise.engine._kernel_memory import order_victims, preempt, slots_end
from lengthwise.schema import speculation

uniform, accepted = jit(speculation.uniform), jit(speculation.accepted)


@jit_cold
def take_decodes(S, r, now_s, rank, victim):
    """Put all idle decodes into the step in ``work`` and give them blocks, preempting others while blocks are short.

    Return their number.
    """
    rep, g, short = S.replicas[r], S.replicas[r].idle_group, 0
    for i in range(S.groups[g].members):
        q = S.slots[member(S, g, i)]
        _draw(S, q, rep.drafts)
        short += max(0, _blocks(S, q) - q.blocks)
    if short > rep.free_blocks:
        _claim_in_order(S, r, now_s, rank, victim)
    elif short > 0:
        rep.free_blocks -= short
        for i in range(S.groups[g].members):
            q = S.slots[member(S, g, i)]
            q.blocks = max(q.blocks, _blocks(S, q))
    w = S.work[0]
    for i in range(S.groups[g].members):
        q = S.slots[member(S, g, i)]
        w.drafts += q.drafts
        w.draft_pairs += q.drafts * (q.prompt + q.generated)
        w.accepted += q.emits - 1
    return S.groups[g].members


@jit
def _draw(S, q, drafts):
    """Set how many proposed tokens a decode verifies in its next step, and how many tokens the step gives it."""
    params = S.params[0]
    hit_probability = S.hit_rate[q.index]
    hit_probability += params.burstiness * (q.hit - hit_probability) if q.hit >= 0 else 0.0
    drawn = uniform(S.draw_key[q.index], q.generated)
    drafts = max(0, min(drafts if q.unhashed >= 0 else 0, params.max_model_len - (q.prompt + q.generated) - 1))
    q.next_hit = q.hit if drafts == 0 else 0
    if drawn >= hit_probability + (1.0 - hit_probability) * params.missed_draft_rate:
        drafts = 0
    tokens = accepted(drawn, hit_probability, S.survival, drafts)
    if tokens > 0:
        q.next_hit = 1
    q.drafts = drafts
    q.emits = min(1 + tokens, q.output - q.generated)


@jit
def _blocks(S, q):
    end, size = slots_end(S, q.prompt + q.generated + q.drafts), S.params[0].block_size
    return (end + size - 1) // size


@jit_cold
def _claim_in_order(S, r, now_s, rank, victim):
    """Give idle decodes their blocks in the order of victims, of which the last is preempted first."""
    rep, count, i = S.replicas[r], order_victims(S, r, now_s, victim), 0
    while i < count:
        slot = S.tmp_slot[i]
        q = S.slots[slot]
        i += 1
        if q.decoding == 0:
            continue
        need = max(0, _blocks(S, q) - q.blocks)
        while rep.free_blocks < need and count >= i:
            count -= 1
            preempt(S, r, S.tmp_slot[count], now_s, rank)
        if count >= i:
            rep.free_blocks -= need
            q.blocks += need


@jit
def verification_s(S, side, decode_s, kv_tokens):
    """Return the seconds of one layer's decode attention in the step in ``work``, which verifies proposed tokens.

    The keys are read once for all tokens of a sequence, unless the pairs of queries and keys take longer to compute.
    """
    w = S.work[0]
    if w.drafts == 0:
        return decode_s
    return max(decode_s, S.params[side].verify_pair_s * (kv_tokens + w.draft_pairs))


@jit_cold
def start_drafts(S, cost, r, kv_tokens, prefill_s):
    """Count the step in ``work``, and how many tokens the drafter proposes after it; set the drafter's seconds.

    ``prefill_s`` are the seconds of the step's prefill attention in one layer of the drafter, which has these costs.
    """
    rep, w = S.replicas[r], S.work[0]
    params = S.params[rep.side]
    rep.decodes += w.decodes
    rep.draft_tokens += w.drafts
    rep.accepted_tokens += w.accepted
    rep.drafts = S.drafts_by_seqs[w.seqs]
    if rep.drafts == 0:
        return
    w.draft_s = params.draft_pass_s
    if params.draft_layers > 0.0:
        keys, tokens = kv_tokens, w.decodes + w.drafts + w.prompt_tokens
        for i in range(w.prompts):
            keys += S.slots[S.prompt_slot[w.flight, i]].prefilled + S.prompt_chunk[w.flight, i]
        first_s = prefill_s + decode_attention(cost, w.decodes, kv_tokens, w.prompts)
        w.draft_s += _pass_s(S, cost, params, tokens, first_s)
        w.draft_s += (rep.drafts - 1) * (
            params.draft_pass_s + _pass_s(S, cost, params, w.seqs, decode_attention(cost, w.seqs, keys, 0))
        )
    rep.draft_s += w.draft_s


@jit
def _pass_s(S, cost, params, tokens, attention_s):
    layer_s = entry(cost.by_tokens, cost.tokens_slope, tokens, 0) + entry(cost.by_tokens, cost.tokens_slope, tokens, 1)
    head_s = entry(cost.by_seqs, cost.seqs_slope, S.work[0].seqs, 0)
    return params.draft_layers * (layer_s + attention_s) + params.draft_head_share * head_s


@jit_cold
def advance_each(S, g, now_s):
    """Give every member of a group the tokens of the step that ends. Return how many are complete.

    Their slots are the first in ``tmp_slot``, in the order of admission.
    """
    group, finished = S.groups[g], 0
    for at in range(group.members):
        slot = member(S, g, at)
        q = S.slots[slot]
        q.generated += q.emits
        q.unhashed = q.emits - 1
        group.kv_tokens += q.emits
        q.last_token_s = now_s
        q.hit = q.next_hit
        if q.generated < q.output:
            continue
        i = finished
        while i > 0 and S.slots[S.tmp_slot[i - 1]].admission > q.admission:
            S.tmp_slot[i] = S.tmp_slot[i - 1]
            i -= 1
        S.tmp_slot[i] = slot
        finished += 1
    group.last_end_s = now_s
    group.cohorts = 1
    S.cohort_s[g, 0] = now_s
    S.cohort_n[g, 0] = group.members
    return finished
