"""Whether a request fits: what the memory policy says, and the peak that predictions foresee."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import _layout as layout
from lengthwise.engine._groups import member, settle
from lengthwise.engine._keys import predicted_total

BAD_MEMORY, BAD_DECODE_MEMORY = layout.BAD_MEMORY, layout.BAD_DECODE_MEMORY


@jit
def ask_memory(S, r, slot, chunk, memory):
    """Blocks for a request that asks to be admitted, -1 to wait."""
    rep, q = S.replicas[r], S.slots[slot]
    par = S.par[rep.side]
    peak = peak_tokens(S, r, slot) if par.needs_peak == 1 else 0
    blocks = memory(
        q.context,
        chunk,
        predicted_total(S, q.index, q.generated),
        par.max_model_len,
        par.block_size,
        rep.free_blocks,
        par.total_blocks,
        par.watermark_blocks,
        S.running[r],
        peak,
    )
    if blocks < 0:
        return -1
    least = q.context if q.swapped == 1 else chunk
    blocks = max(blocks, (least + par.block_size - 1) // par.block_size)
    if blocks > rep.free_blocks:
        S.ctr[0].problem = BAD_MEMORY if rep.side == 0 else BAD_DECODE_MEMORY
        S.ctr[0].problem_request = blocks
        return -1
    return blocks


@jit_cold
def peak_tokens(S, r, candidate):
    """The most KV tokens held at once if every predicted length held (Past-Future, ASPLOS '25)."""
    rep, stride, w = S.replicas[r], S.par[0].stride, S.work[0]
    count = _note_remaining(S, 0, candidate)
    count = _note_group(S, count, rep.idle)
    for i in range(rep.partials + rep.coming):  # a replica has one kind of them
        count = _note_remaining(S, count, S.partials[r, i])
    for k in range(rep.in_flight):
        f = r * stride + (rep.first_flight + k) % stride
        count = _note_group(S, count, S.flights[f].group)
        for i in range(S.flights[f].prompts):
            count = _note_remaining(S, count, S.prompt_slot[f, i])
    if w.decodes > 0:
        count = _note_group(S, count, S.flights[w.flight].group)
    for i in range(w.prompts):
        count = _note_remaining(S, count, S.prompt_slot[w.flight, i])
    held, peak = 0, 0
    for i in range(count):
        held += S.scratch_tie[i]
        peak = max(peak, held + S.scratch_slot[i] * (i + 1))
    return peak


@jit_cold
def _note_group(S, count, g):
    for i in range(S.groups[g].members):
        slot = member(S, g, i)
        settle(S, g, slot)
        count = _note_remaining(S, count, slot)
    return count


@jit_cold
def _note_remaining(S, count, slot):
    """Inserts (tokens held, predicted remaining) into ``scratch``, the longest remaining first."""
    q = S.slots[slot]
    remaining = remaining_tokens(predicted_total(S, q.index, q.generated), q.generated)
    i = count
    while i > 0 and S.scratch_slot[i - 1] < remaining:
        S.scratch_slot[i] = S.scratch_slot[i - 1]
        S.scratch_tie[i] = S.scratch_tie[i - 1]
        i -= 1
    S.scratch_slot[i] = remaining
    S.scratch_tie[i] = q.prompt + q.generated
    return count + 1


@jit
def remaining_tokens(predicted, generated):
    """Predicted tokens still to come, at least 1."""
    whole = int(predicted)
    if whole < predicted:
        whole += 1
    return max(1, whole - generated)
