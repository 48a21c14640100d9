"""Sends a step through the pipeline, books it, and ends it."""

from __future__ import annotations

import math

from lengthwise._jit import jit, jit_cold
from lengthwise.cost._lookup import (
    decode_attention,
    merged_prefill_attention,
    prefill_attention,
    row,
)
from lengthwise.engine import _layout as layout
from lengthwise.engine._expire import end_request
from lengthwise.engine._groups import advance, join, merge, pop_due, seat_anew, sit
from lengthwise.schema.records import Status

FINISHED = int(Status.FINISHED)
GAP_BINS, GAP_SUBBINS = layout.GAP_BINS, layout.GAP_SUBBINS
GAP_SMALLEST_EXPONENT = layout.GAP_SMALLEST_EXPONENT


@jit
def launch(S, r, now_s):
    """Puts the step in ``work`` into flight; returns when its last stage ends."""
    rep, w, pp = S.replicas[r], S.work[0], S.par[0].pp
    flight = S.flights[w.flight]
    prefill_s, pairs, completed = _prompts_cost(S)
    kv_tokens = S.groups[flight.group].kv_tokens if w.decodes > 0 else 0
    decode_s = decode_attention(S.cost, w.decodes, kv_tokens, w.prompts)
    end_s = _pipeline(S, r, now_s, prefill_s, decode_s)
    rep.pairs += kv_tokens
    rep.pairs += pairs
    rep.kv_read += kv_tokens
    book(S, r, now_s, end_s, w.decodes + completed)
    flight.end_s = end_s
    flight.prompts = w.prompts
    rep.in_flight += 1
    if rep.in_flight == 1:
        rep.first_flight = w.flight - r * pp
    return end_s


@jit
def _prompts_cost(S):
    """(one layer's prefill attention, (query, key) pairs, prompts that complete) of the step."""
    w, cost = S.work[0], S.cost
    seconds, pairs = 0.0, 0.0
    squared, steps, completed = 0, 0, 0
    for i in range(w.prompts):
        q = S.slots[S.prompt_slot[w.flight, i]]
        chunk = S.prompt_chunk[w.flight, i]
        pairs += chunk * q.prefilled + chunk * (chunk + 1) / 2
        if q.prefilled + chunk == q.context:
            completed += 1
        if cost.merged:
            squared += chunk * chunk
            steps += (q.prefilled + cost.step_tokens - 1) // cost.step_tokens
        else:
            seconds += prefill_attention(cost, chunk, q.prefilled)
    if cost.merged:
        seconds = merged_prefill_attention(cost, w.prompts, squared, steps)
    return seconds, pairs, completed


@jit
def _pipeline(S, r, now_s, prefill_s, decode_s):
    """When the last stage ends; adds where the time goes."""
    rep, w, cost = S.replicas[r], S.work[0], S.cost
    tokens = w.decodes + w.prompt_tokens
    layer_s = row(cost.by_tokens, cost.tokens_slope, tokens, 0)
    comm_s = row(cost.by_tokens, cost.tokens_slope, tokens, 1)
    first_s = row(cost.by_tokens, cost.tokens_slope, tokens, 2)
    send_s = row(cost.by_tokens, cost.tokens_slope, tokens, 3)
    head_s = row(cost.by_seqs, cost.seqs_slope, w.seqs, 0)
    host_s = row(cost.by_seqs, cost.seqs_slope, w.seqs, 1)
    last = len(cost.stage_layers) - 1
    end_s, layers = now_s, 0.0
    for p in range(last + 1):
        stage_s = cost.stage_layers[p] * (layer_s + comm_s + prefill_s + decode_s)
        if p == 0:
            stage_s += first_s + host_s + w.swap_s
        stage_s += head_s if p == last else send_s
        end_s = max(end_s, S.stage_free[r, p]) + stage_s
        S.stage_free[r, p] = end_s
        layers += cost.stage_layers[p]
    rep.steps += 1
    rep.tokens += tokens
    rep.layer_s += layers * layer_s
    rep.comm_s += layers * comm_s
    rep.prefill_attention_s += layers * prefill_s
    rep.decode_attention_s += layers * decode_s
    rep.host_s += host_s
    rep.head_s += head_s
    rep.first_s += first_s
    rep.send_s += last * send_s
    rep.swap_s += w.swap_s
    return end_s


@jit
def book(S, r, now_s, end_s, outputs):
    """Time in steps, memory held, the time series, and a row of the step log."""
    rep, w, par = S.replicas[r], S.work[0], S.par[0]
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
def end_step(S, r, now_s):
    """Hands out the tokens of the replica's oldest step in flight."""
    rep, pp = S.replicas[r], S.par[0].pp
    f = r * pp + rep.first_flight
    flight = S.flights[f]
    rep.first_flight = (rep.first_flight + 1) % pp
    rep.in_flight -= 1
    rep.steps_since += 1
    rep.undecided += 1
    if S.groups[flight.group].members > 0:
        _end_decodes(S, r, flight, now_s)
    for i in range(flight.prompts):
        slot = S.prompt_slot[f, i]
        q = S.slots[slot]
        q.prefilled += S.prompt_chunk[f, i]
        if q.prefilled < q.context:
            _add_partial(S, r, slot)
        else:
            _end_prompt(S, r, slot, now_s)
    flight.prompts = 0


@jit
def _end_decodes(S, r, flight, now_s):
    rep, g = S.replicas[r], flight.group
    count_cohorts(S, r, g, now_s)
    advance(S, g, now_s)
    slot = pop_due(S, g)
    while slot >= 0:
        _finish(S, r, slot, now_s)
        slot = pop_due(S, g)
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
def _end_prompt(S, r, slot, now_s):
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
