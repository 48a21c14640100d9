"""Sends a step through the pipeline, books it, and ends it."""

from __future__ import annotations

import math

from lengthwise._jit import jit, jit_cold
from lengthwise.cost._lookup import decode_attention, masked_attention, merged_prefill_attention, prefill_attention, row
from lengthwise.engine import kernel_layout
from lengthwise.engine._kernel_groups import advance, join, merge, next_event, pop_due, seat_anew, sit
from lengthwise.engine._kernel_memory import (
    ask_memory,
    change_load,
    end_request,
    enqueue,
    expire,
    rank_again,
    release_all,
    remaining_tokens,
)
from lengthwise.engine._kernel_queue import predicted_total, push_event, queue_pop
from lengthwise.schema.records import Status


@jit
def passes(S, D, r, now_s, kv_tokens):
    """(when the last stage ends, (query, key) pairs of prompts, prompts that complete); adds where the time goes."""
    w = S.work[0]
    if S.replicas[r].side == 1:
        return _by_stage(S, D.cost, D.other, D.stage_other, r, now_s, kv_tokens), 0.0, 0
    prefill_s, pairs, completed = _prompts_cost(S, S.cost)
    if S.par[0].two_degrees == 1:
        return _by_stage(S, S.cost, S.other, S.stage_other, r, now_s, kv_tokens), pairs, completed
    decode_s = decode_attention(S.cost, w.decodes, kv_tokens, w.prompts)
    if S.cost.masked_s > 0.0:
        prefill_s, decode_s = _masked(S, S.cost, kv_tokens, prefill_s, decode_s)
    return _pipeline(S, r, now_s, prefill_s, decode_s), pairs, completed


@jit
def _prompts_cost(S, cost):
    """(one layer's prefill attention, (query, key) pairs, prompts that complete) of the step."""
    w = S.work[0]
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
def _masked(S, cost, kv_tokens, prefill_s, decode_s):
    """One layer's prefill and decode attention with the pairs that a dense mask throws away."""
    w = S.work[0]
    keys, own = kv_tokens, 0
    for i in range(w.prompts):
        chunk = S.prompt_chunk[w.flight, i]
        length = S.slots[S.prompt_slot[w.flight, i]].prefilled + chunk
        keys += length
        own += chunk * length
    prefill_s += masked_attention(cost, w.prompt_tokens, keys, own)
    return prefill_s, decode_s + masked_attention(cost, w.decodes, keys, kv_tokens)


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


@jit_cold
def _by_stage(S, one, other, marks, r, now_s, kv_tokens):
    """As ``_pipeline``, sums made stage by stage: stages of two degrees, or of the side that decodes."""
    rep, w = S.replicas[r], S.work[0]
    prefill_s, decode_s = _attention(S, one, kv_tokens)
    other_prefill_s, other_decode_s = _attention(S, other, kv_tokens)
    layer_a, comm_a, first_a, send_a, head_a, host_a = _once(S, one)
    layer_b, comm_b, first_b, send_b, head_b, host_b = _once(S, other)
    last, end_s = len(one.stage_layers) - 1, now_s
    layer_s, comm_s, prefill_sum_s, decode_sum_s, send_s = 0.0, 0.0, 0.0, 0.0, 0.0
    for p in range(last + 1):
        n, b = one.stage_layers[p], marks[p] == 1
        layer, comm = (layer_b, comm_b) if b else (layer_a, comm_a)
        prefill, decode = (other_prefill_s, other_decode_s) if b else (prefill_s, decode_s)
        send = send_b if b else send_a
        stage_s = n * (layer + comm + prefill + decode)
        if p == 0:
            stage_s += (first_b if b else first_a) + (host_b if b else host_a) + w.swap_s
        stage_s += (head_b if b else head_a) if p == last else send
        end_s = max(end_s, S.stage_free[r, p]) + stage_s
        S.stage_free[r, p] = end_s
        layer_s += n * layer
        comm_s += n * comm
        prefill_sum_s += n * prefill
        decode_sum_s += n * decode
        send_s += send if p < last else 0.0
    rep.steps += 1
    rep.tokens += w.decodes + w.prompt_tokens
    rep.layer_s += layer_s
    rep.comm_s += comm_s
    rep.prefill_attention_s += prefill_sum_s
    rep.decode_attention_s += decode_sum_s
    rep.host_s += host_b if marks[0] == 1 else host_a
    rep.head_s += head_b if marks[last] == 1 else head_a
    rep.first_s += first_b if marks[0] == 1 else first_a
    rep.send_s += send_s
    rep.swap_s += w.swap_s
    return end_s


@jit_cold
def _attention(S, cost, kv_tokens):
    """One layer's prefill and decode attention of the step."""
    w = S.work[0]
    prefill_s, _, _ = _prompts_cost(S, cost)
    decode_s = decode_attention(cost, w.decodes, kv_tokens, w.prompts)
    if cost.masked_s > 0.0:
        prefill_s, decode_s = _masked(S, cost, kv_tokens, prefill_s, decode_s)
    return prefill_s, decode_s


@jit
def _once(S, cost):
    """(layer, comm, first, send, head, host) seconds of the step."""
    w = S.work[0]
    tokens = w.decodes + w.prompt_tokens
    return (
        row(cost.by_tokens, cost.tokens_slope, tokens, 0),
        row(cost.by_tokens, cost.tokens_slope, tokens, 1),
        row(cost.by_tokens, cost.tokens_slope, tokens, 2),
        row(cost.by_tokens, cost.tokens_slope, tokens, 3),
        row(cost.by_seqs, cost.seqs_slope, w.seqs, 0),
        row(cost.by_seqs, cost.seqs_slope, w.seqs, 1),
    )


BAD_DECODE_ROUTE = kernel_layout.BAD_DECODE_ROUTE


@jit_cold
def hand_over(S, D, r, slot, now_s, rank, router):
    """A prompt is through, its first token out: its cache stays where it is until it has been fetched."""
    q, first = S.slots[slot], S.par[0].replicas
    q.home = r
    q.reserved = q.blocks
    q.blocks = 0
    S.running[r] -= 1
    a, b = D.draws[q.index, 0], D.draws[q.index, 1]
    to = router(q.index, a, b, D.waiting_there, D.running_there, D.tokens_there)
    if to < 0 or to >= S.par[0].decodes:
        S.ctr[0].problem = BAD_DECODE_ROUTE
        S.ctr[0].problem_request = to
        return
    change_load(S, q, r, first + to)
    S.waiting[first + to] += 1
    enqueue(S, first + to, now_s, slot, rank)


@jit_cold
def fetch(S, D, r, now_s, rank, memory):
    """Starts transfers, in the order of the queue, for as long as there are seats and memory for whole requests."""
    expire(S, r, now_s)
    rep = S.replicas[r]
    par, queue = S.par[rep.side], S.queues[rep.queue]
    if queue.length > 0 and S.running[r] < par.max_num_seqs and (par.rekey == 1 or queue.overdue_s <= now_s):
        rank_again(S, rep.queue, now_s, rank)
    while queue.length > 0 and S.running[r] < par.max_num_seqs:
        slot = S.pool_slot[queue.offset]
        q = S.slots[slot]
        if q.reserved == 0:  # swapped out: it comes back with a step
            return
        q.context = q.prompt + q.generated
        S.work[0].decodes = 0
        S.work[0].prompts = 0
        blocks = ask_memory(S, r, slot, q.context, memory)
        if blocks < 0:
            return
        queue_pop(S, rep.queue)
        rep.free_blocks -= blocks
        q.blocks = blocks
        S.ctr[0].admissions += 1
        q.admission = S.ctr[0].admissions
        q.entered = q.generated
        q.waiting = 0
        q.queued_for_s += now_s - q.queued_s
        S.results[q.index].replica = r
        q.remote = r
        S.running[r] += 1
        S.waiting[rep.queue] -= 1
        _set_out(S, D, r, slot, now_s)


@jit_cold
def _set_out(S, D, r, slot, now_s):
    """A transfer that is let in now: it ends later, or at once."""
    rep, q = S.replicas[r], S.slots[slot]
    ends_s = _ends_s(S, r, q, now_s)
    if ends_s <= now_s:
        _seat(S, r, slot)
        return
    S.partials[r, rep.incoming] = slot
    rep.incoming += 1
    D.slot_of[q.index] = slot
    push_event(S, ends_s, len(S.replicas) + q.index)


@jit_cold
def _ends_s(S, r, q, now_s):
    rep, home, par = S.replicas[r], S.replicas[q.home], S.par[1]
    taken_s = par.handover_fixed_s + (q.context - 1) * par.handover_token_s
    if par.one_at_a_time == 0:
        return now_s + taken_s
    ends_s = max(now_s, home.sends_until_s, rep.receives_until_s) + taken_s
    home.sends_until_s = ends_s
    rep.receives_until_s = ends_s
    return ends_s


@jit_cold
def arrive(S, D, i):
    """The transfer of request ``i`` has ended."""
    slot = D.slot_of[i]
    r = S.slots[slot].remote
    rep, at = S.replicas[r], 0
    while S.partials[r, at] != slot:
        at += 1
    rep.incoming -= 1
    S.partials[r, at] = S.partials[r, rep.incoming]
    _seat(S, r, slot)
    S.touched[r] = 1


@jit_cold
def _seat(S, r, slot):
    rep, q = S.replicas[r], S.slots[slot]
    release_all(S, q)
    rep.deadline_s = min(rep.deadline_s, q.arrival_s + S.par[0].timeout_s)
    sit(S, slot)
    join(S, rep.idle, slot)


@jit_cold
def blocks_to_decode(S, i, memory):
    """Blocks that an idle replica of the decode side would give request ``i`` after its first token; -1: none."""
    par, context, predicted = S.par[1], S.prompt[i] + 1, predicted_total(S, i, 1)
    peak = context + remaining_tokens(predicted, 1) if par.needs_peak == 1 else 0
    return memory(
        context,
        context,
        predicted,
        par.max_model_len,
        par.block_size,
        par.total_blocks,
        par.total_blocks,
        par.watermark_blocks,
        0,
        peak,
    )


FINISHED = int(Status.FINISHED)
GAP_BINS, GAP_SUBBINS = kernel_layout.GAP_BINS, kernel_layout.GAP_SUBBINS
GAP_SMALLEST_EXPONENT = kernel_layout.GAP_SMALLEST_EXPONENT


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
    S.replicas[r].total_released += q.blocks
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


@jit
def may_coast(S, r, end_s, horizon_s):
    """Whether the decode-only step just launched can only be followed by the same group."""
    rep, queue = S.replicas[r], S.queues[S.replicas[r].queue]
    par = S.par[rep.side]
    g = S.flights[S.work[0].flight].group
    group = S.groups[g]
    alone = rep.partials == 0 and S.groups[rep.idle].members == 0
    closed = queue.length == 0 or S.running[r] >= par.max_num_seqs
    before = end_s < min(horizon_s, rep.deadline_s, queue.deadline_s, queue.overdue_s) and end_s <= par.limit_s
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
