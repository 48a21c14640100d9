"""Sends a step through the pipeline, books it, and ends it."""

from __future__ import annotations

import math

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import _layout as layout
from lengthwise.engine._expire import end_request
from lengthwise.engine._flow import passes
from lengthwise.engine._groups import advance, join, merge, pop_due, seat_anew, sit
from lengthwise.engine._handover import hand_over
from lengthwise.schema.records import Status

FINISHED = int(Status.FINISHED)
GAP_BINS, GAP_SUBBINS = layout.GAP_BINS, layout.GAP_SUBBINS
GAP_SMALLEST_EXPONENT = layout.GAP_SMALLEST_EXPONENT


@jit
def launch(S, D, r, now_s):
    """Puts the step in ``work`` into flight; returns when its last stage ends."""
    rep, w, stride = S.replicas[r], S.work[0], S.par[0].stride
    flight = S.flights[w.flight]
    kv_tokens = S.groups[flight.group].kv_tokens if w.decodes > 0 else 0
    end_s, pairs, completed = passes(S, D, r, now_s, kv_tokens)
    rep.pairs += kv_tokens
    rep.pairs += pairs
    rep.kv_read += kv_tokens
    book(S, r, now_s, end_s, w.decodes + completed)
    flight.end_s = end_s
    flight.prompts = w.prompts
    count_rounds(rep, w.prompts)
    rep.in_flight += 1
    if rep.in_flight == 1:
        rep.first_flight = w.flight - r * stride
    return end_s


@jit
def count_rounds(rep, prompts):
    """Counts the step that begins: a round is over when the micro-batch that encoded last has its next turn.

    Steps leave the pipeline in the order in which they entered it: ``mark``, that micro-batch's last step, has left
    when fewer are in flight than began after it. Where it had nobody left, the one before it stands in.
    """
    n, mark = rep.phase_steps, rep.phase_mark
    rep.phase_steps = n + 1
    if n == 0 or prompts > 0:
        rep.phase_rounds, rep.phase_mark = 0, n
        return
    if n - rep.in_flight > mark + 1:
        rep.phase_rounds, mark = rep.phase_rounds + 1, n - 1
    if n - rep.in_flight > mark:
        rep.phase_rounds, mark = rep.phase_rounds + 1, n
    rep.phase_mark = mark


@jit
def book(S, r, now_s, end_s, outputs):
    """Time in steps, memory held, the time series, and a row of the step log."""
    rep, w = S.replicas[r], S.work[0]
    par = S.par[rep.side]
    held = par.total_blocks - rep.free_blocks
    waiting = S.queues[rep.queue].length
    busy_s = end_s - max(now_s, rep.busy_until_s)
    rep.busy_until_s = end_s
    rep.busy_s += busy_s
    rep.kv_block_s += held * busy_s
    while end_s >= par.series_bins * rep.bin_s:
        _fold(S, r)
    b = int(end_s / rep.bin_s)
    S.series[r, b, 0] += busy_s
    S.series[r, b, 1] += w.seqs * busy_s
    S.series[r, b, 2] += waiting * busy_s
    S.series[r, b, 3] += held * busy_s
    S.series[r, b, 4] += w.prompt_tokens
    S.series[r, b, 5] += outputs
    if S.ctr[0].step_rows < len(S.step_log):
        line = S.step_log[S.ctr[0].step_rows]
        line.start_s = now_s
        line.end_s = end_s
        line.replica = r
        line.decode_seqs = w.decodes
        line.prefill_seqs = w.prompts
        line.prefill_tokens = w.prompt_tokens
        line.kv_blocks = held
        line.waiting = waiting
    S.ctr[0].step_rows += 1


@jit_cold
def _fold(S, r):
    """Doubles the width of a replica's bins."""
    bins, columns = S.series.shape[1], S.series.shape[2]
    for c in range(columns):
        for b in range(bins // 2):
            S.series[r, b, c] = S.series[r, 2 * b, c] + S.series[r, 2 * b + 1, c]
        for b in range(bins // 2, bins):
            S.series[r, b, c] = 0.0
    S.replicas[r].bin_s *= 2


@jit
def count_gap(S, r, gap_s, count):
    """Counts ``count`` tokens that each came ``gap_s`` after the one before."""
    if count == 0:
        return
    rep = S.replicas[r]
    S.histogram[gap_bin(gap_s)] += count
    rep.gaps += count
    rep.gap_sum_s += gap_s * count
    rep.gap_max_s = max(rep.gap_max_s, gap_s)
    if S.ctr[0].gap_rows < len(S.gap_log):
        line = S.gap_log[S.ctr[0].gap_rows]
        line.gap_s = gap_s
        line.count = count
    S.ctr[0].gap_rows += 1


@jit
def gap_bin(gap_s):
    """The bin of a gap: octaves in equal parts, bin 0 below the smallest."""
    mantissa, exponent = math.frexp(gap_s)
    octave = exponent - 1 - GAP_SMALLEST_EXPONENT
    if octave < 0 or mantissa == 0:
        return 0
    return min(1 + octave * GAP_SUBBINS + int((mantissa - 0.5) * 2 * GAP_SUBBINS), GAP_BINS - 1)


@jit
def end_step(S, D, r, now_s, rank, router):
    """Hands out the tokens of the replica's oldest step in flight; ``router`` picks who decodes, if that is apart."""
    rep, stride = S.replicas[r], S.par[0].stride
    f = r * stride + rep.first_flight
    flight = S.flights[f]
    rep.first_flight = (rep.first_flight + 1) % stride
    rep.in_flight -= 1
    rep.steps_since += 1
    rep.undecided += 1
    if S.groups[flight.group].members > 0:
        if flight.rests == 0:
            _hand_out(S, r, flight.group, now_s)
        _back_to_idle(S, r, flight)
    for i in range(flight.prompts):
        slot = S.prompt_slot[f, i]
        q = S.slots[slot]
        q.prefilled += S.prompt_chunk[f, i]
        if q.prefilled < q.context:
            _add_partial(S, r, slot)
        else:
            _end_prompt(S, D, r, slot, now_s, rank, router)
    flight.prompts = 0


@jit
def _hand_out(S, r, g, now_s):
    """A token for every member of a group; who has got the last one goes."""
    count_cohorts(S, r, g, now_s)
    advance(S, g, now_s)
    slot = pop_due(S, g)
    while slot >= 0:
        _finish(S, r, slot, now_s)
        slot = pop_due(S, g)


@jit
def _back_to_idle(S, r, flight):
    rep, g = S.replicas[r], flight.group
    if rep.partials > 0 or S.groups[rep.idle].members > 0:
        seat_anew(S, g)
    if S.groups[rep.idle].members == 0:
        flight.group, rep.idle = rep.idle, g
        S.groups[flight.group].cohorts = 0
    else:
        merge(S, g, rep.idle)


@jit
def count_cohorts(S, r, g, now_s):
    """Counts the gap of every member's token that comes now."""
    for c in range(S.groups[g].cohorts):
        count_gap(S, r, now_s - S.cohort_s[g, c], S.cohort_n[g, c])


@jit
def _end_prompt(S, D, r, slot, now_s, rank, router):
    """A prompt is through: its next token has come."""
    q = S.slots[slot]
    if q.generated == 0:
        S.results[q.index].first_token_s = now_s
    else:
        count_gap(S, r, now_s - q.last_token_s, 1)
    q.generated += 1
    q.decoding = 1
    q.last_token_s = now_s
    if q.generated == q.output:
        _finish(S, r, slot, now_s)
    elif S.par[0].decodes > 0:
        hand_over(S, D, r, slot, now_s, rank, router)
    else:
        sit(S, slot)
        join(S, S.replicas[r].idle, slot)


@jit
def _finish(S, r, slot, now_s):
    q = S.slots[slot]
    S.replicas[r].free_blocks += q.blocks
    S.replicas[r].freed += q.blocks
    S.running[r] -= 1
    S.results[q.index].finished_s = now_s
    end_request(S, r, slot, FINISHED, now_s)


@jit
def _add_partial(S, r, slot):
    """Half-computed prompts stand in the order of their admission."""
    rep = S.replicas[r]
    sit(S, slot)
    i = rep.partials
    while i > 0 and S.slots[S.partials[r, i - 1]].admission > S.slots[slot].admission:
        S.partials[r, i] = S.partials[r, i - 1]
        i -= 1
    S.partials[r, i] = slot
    rep.partials += 1
