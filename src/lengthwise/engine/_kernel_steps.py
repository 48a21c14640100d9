"""Runs a step through the pipeline, records it and ends it."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.cost._lookup import (
    PackedCost,
    decode_attention,
    entry,
    masked_attention,
    merged_prefills,
    prefill_attention,
)
from lengthwise.engine import kernel_layout
from lengthwise.engine._kernel_groups import (
    advance,
    assign_return_number,
    free_skipped,
    frees_contents,
    is_dummy,
    join,
    member,
    merge,
    next_event_step,
    overlaps,
    pop_finished,
    remove,
    renumber,
)
from lengthwise.engine._kernel_memory import add_ending, end_request, free_blocks_of
from lengthwise.engine._kernel_prefix import RADIX, cache_blocks, release_blocks
from lengthwise.engine._kernel_queue import push_event
from lengthwise.engine._kernel_reserve import adapt_margin
from lengthwise.engine._kernel_sglang import insert_prompts, lower_ratio, merge_prompts, note_room
from lengthwise.engine._kernel_speculation import advance_each, start_drafts, verification_s
from lengthwise.engine._kernel_tiers import LOADING, complete_offloading, end_load, end_offloading, store_prompts, wake
from lengthwise.engine._kernel_transfers import end_before_transfer, end_transfer, queue_for_decode
from lengthwise.schema.records import Status

BAD_DECODE_ROUTE = kernel_layout.BAD_DECODE_ROUTE
FINISHED = int(Status.FINISHED)
gap_bin = jit(kernel_layout.gap_bin)


@jit
def launch(S, D, r, now_s):
    """Start the step in ``work`` on replica ``r``. Return the time at which its last pipeline stage ends.

    The step of a data-parallel rank starts when the steps of all ranks have been formed (``record_rank``).
    """
    rep, w, stride = S.replicas[r], S.work[0], S.params[0].stride
    flight = S.flights[w.flight]
    kv_tokens = S.groups[flight.group].kv_tokens if w.decodes > 0 else 0
    if overlaps(S) and w.decodes > 0:
        kv_tokens = w.kv_tokens  # The decodes stay in the idle group.
    end_s, pairs, completed = _run_stages(S, D, r, now_s, kv_tokens)
    rep.tokens += w.decodes + w.drafts + w.prompt_tokens
    rep.swap_s += w.swap_s
    rep.pairs += kv_tokens + w.draft_pairs
    rep.pairs += pairs
    rep.kv_read += kv_tokens
    if S.params[rep.side].dp > 1:
        flight.decodes = w.decodes
        flight.drafts = w.drafts
        flight.prompts = w.prompts
        flight.prompt_tokens = w.prompt_tokens
        flight.outputs = w.decodes + w.accepted + completed
        w.rank_tokens += w.decodes + w.drafts + w.prompt_tokens
        w.slowest_s = max(w.slowest_s, S.stage_free[r, 0])
        _count_rounds(rep, w.prompts)
        return end_s
    outputs = 0 if overlaps(S) else w.decodes + w.accepted + completed  # With overlap they count at the end.
    busy_s = _record_step(S, r, now_s, end_s, outputs)
    if S.params[0].reserve == 1:
        adapt_margin(S, r, busy_s)
    if S.params[0].offload_blocks > 0 and rep.side == 0:
        store_prompts(S, r, now_s, end_s)
        complete_offloading(S, r, now_s)
    flight.end_s = end_s
    flight.prompts = w.prompts
    _count_rounds(rep, w.prompts)
    rep.in_flight += 1
    if rep.in_flight == 1:
        rep.first_flight = w.flight - r * stride
    return end_s


@jit
def begin_rank(S, r):
    """Begin to form the next step of data-parallel rank ``r``, which is a dummy step unless ``launch`` fills it."""
    flight = S.flights[_next_flight(S, r)]
    flight.decodes = flight.drafts = flight.prompts = flight.prompt_tokens = flight.outputs = 0


@jit
def _next_flight(S, r):
    rep, stride = S.replicas[r], S.params[0].stride
    at = rep.first_flight + rep.in_flight
    return r * stride + (at if at < stride else at - stride)  # a division would take longer than the rest


@jit
def load_rank(S, r):
    """Load the next step of data-parallel rank ``r`` into ``work``. Return its tokens."""
    w, f = S.work[0], _next_flight(S, r)
    flight = S.flights[f]
    w.flight, w.swap_s = f, 0.0
    w.decodes, w.drafts, w.prompts = flight.decodes, flight.drafts, flight.prompts
    w.prompt_tokens, w.seqs = flight.prompt_tokens, flight.decodes + flight.prompts
    return w.decodes + w.drafts + w.prompt_tokens


@jit
def run_together(S, D, first, drafter_s):
    """Take the next steps of a replica's ranks, which ``launch`` prepared, through the pipeline.

    Return when they end, and the seconds of the layers that the ranks compute together.
    """
    w, side, row = S.work[0], S.replicas[first].side, len(S.replicas) + first
    stages = len(D.cost.stage_layers) if side == 1 else len(S.cost.stage_layers)
    layer_s = entry(S.shared, S.shared_slope, w.rank_tokens, 0)
    if side == 1:
        layer_s = entry(D.shared, D.shared_slope, w.rank_tokens, 0)
    end_s, shared_s = w.slowest_s, 0.0
    w.rank_tokens, w.slowest_s = 0, 0.0
    for p in range(stages):
        if p > 0:
            end_s = _slowest_s(S, first, p, end_s)
        stage_s = (D.cost.stage_layers[p] if side == 1 else S.cost.stage_layers[p]) * layer_s
        end_s += stage_s
        end_s += drafter_s if p == stages - 1 else 0.0
        S.stage_free[row, p] = end_s
        shared_s += stage_s
    return end_s, shared_s


@jit_cold
def _slowest_s(S, first, p, ready_s):
    """Return when the slowest rank leaves stage ``p`` above 0, which all enter at ``ready_s`` or later."""
    slowest_s, begin_s = 0.0, max(ready_s, S.stage_free[len(S.replicas) + first, p])
    for r in range(first, first + S.params[S.replicas[first].side].dp):
        if not is_dummy(S, _next_flight(S, r)):
            slowest_s = max(slowest_s, begin_s + S.stage_s[r, p])
    return slowest_s


@jit_cold
def shared_drafter_s(S, D, first):
    """Return the seconds of the drafter's layers that all ranks compute together (``Reference._shared_drafter_s``)."""
    side, most, seconds = S.replicas[first].side, 0, 0.0
    params = S.params[side]
    for r in range(first, first + params.dp):
        most = max(most, S.replicas[r].drafts if load_rank(S, r) > 0 else 0)
    for number in range(most):
        tokens = 0
        for r in range(first, first + params.dp):
            step_tokens = load_rank(S, r)
            if step_tokens > 0 and S.replicas[r].drafts > number:
                tokens += S.work[0].seqs if number > 0 else step_tokens
        layer_s = entry(S.shared, S.shared_slope, tokens, 0)
        seconds += params.draft_shared_layers * (entry(D.shared, D.shared_slope, tokens, 0) if side == 1 else layer_s)
    return seconds


@jit
def record_rank(S, r, now_s, end_s, free_s, shared_s, drafter_s):
    """Start the step in ``work`` of rank ``r``, which all ranks of its replica end together."""
    rep, w = S.replicas[r], S.work[0]
    S.flights[w.flight].end_s = end_s
    S.stage_free[r, 0] = free_s  # A rank's step begins when the steps of all ranks have left the first stage.
    rep.layer_s += shared_s
    rep.draft_s += drafter_s
    busy_s = _record_step(S, r, now_s, end_s, S.flights[w.flight].outputs)
    rep.in_flight += 1
    if S.params[0].reserve == 1 and w.seqs > 0:
        adapt_margin(S, r, busy_s)


@jit_cold
def _end_dummy(S, r):
    """End the oldest step in flight of rank ``r``, which is a dummy step."""
    rep = S.replicas[r]
    rep.first_flight = (rep.first_flight + 1) % S.params[0].stride
    rep.in_flight -= 1
    rep.is_blocked = 0


@jit
def _run_stages(S, D, r, now_s, kv_tokens):
    w = S.work[0]
    if S.replicas[r].side > 1:
        return _run_stages_of_group(S, r, now_s, kv_tokens)
    if S.replicas[r].side == 1:
        pairs, completed = _pairs_of_prompts(S, D) if w.prompts > 0 else (0.0, 0)
        if S.params[1].speculates == 1:
            start_drafts(S, D.draft_cost, r, kv_tokens, _prompts_cost(S, D.draft_cost)[0])
        return _pipeline_by_stage(S, D.cost, D.other, D.stage_other, r, now_s, kv_tokens), pairs, completed
    prefill_s, pairs, completed = _prompts_cost(S, S.cost)
    if S.params[0].has_other_degree == 1:
        return _pipeline_by_stage(S, S.cost, S.other, S.stage_other, r, now_s, kv_tokens), pairs, completed
    decode_s = decode_attention(S.cost, w.decodes, kv_tokens, w.prompts)
    if S.cost.masked_s > 0.0:
        prefill_s, decode_s = _with_masked_pairs(S, S.cost, kv_tokens, prefill_s, decode_s)
    if S.params[0].speculates == 1:
        decode_s = verification_s(S, 0, decode_s, kv_tokens)
        start_drafts(S, S.draft_cost, r, kv_tokens, _prompts_cost(S, S.draft_cost)[0])
    return _pipeline(S, S.cost, r, now_s, prefill_s, decode_s), pairs, completed


@jit_cold
def _pairs_of_prompts(S, D):
    """Return ((query, key) pairs, completed prompts) of a decode replica's step."""
    _, pairs, completed = _prompts_cost(S, D.cost)
    return pairs, completed


@jit_cold
def _run_stages_of_group(S, r, now_s, kv_tokens):
    """Do as ``_run_stages`` on a replica of a further group, whose costs are a part of ``State.group_costs``."""
    at, costs = S.replicas[r].side - 2, S.group_costs
    size = S.group_sizes[at]
    cost = PackedCost(
        costs.by_tokens[at, : size[0]],
        costs.tokens_slope[at],
        costs.by_seqs[at, : size[1]],
        costs.seqs_slope[at],
        costs.prefill[at, : size[2], : size[3]],
        costs.decode[at, : size[4], : size[5]],
        costs.stage_layers[at, : size[6]],
        size[9] == 1,
        size[10],
        costs.scalars[at, 0],
        costs.beside_prompts[at, : size[7], : size[8]],
        size[11] == 1,
        costs.scalars[at, 1],
    )
    prefill_s, pairs, completed = _prompts_cost(S, cost)
    decode_s = decode_attention(cost, S.work[0].decodes, kv_tokens, S.work[0].prompts)
    if cost.masked_s > 0.0:
        prefill_s, decode_s = _with_masked_pairs(S, cost, kv_tokens, prefill_s, decode_s)
    return _pipeline(S, cost, r, now_s, prefill_s, decode_s), pairs, completed


@jit
def _prompts_cost(S, cost):
    """Return (seconds of a layer's prefill attention, (query, key) pairs, completed prompts) of the step."""
    w = S.work[0]
    seconds, pairs = 0.0, 0.0
    squared, context_units, completed = 0, 0, 0
    for i in range(w.prompts):
        q = S.slots[S.prompt_slot[w.flight, i]]
        chunk = S.prompt_chunk[w.flight, i]
        pairs += chunk * q.prefilled + chunk * (chunk + 1) / 2
        if q.prefilled + chunk >= q.context:
            completed += 1
        if cost.merged:
            squared += chunk * chunk
            context_units += (q.prefilled + cost.context_unit_tokens - 1) // cost.context_unit_tokens
        else:
            seconds += prefill_attention(cost, chunk, q.prefilled)
    if cost.merged:
        seconds = merged_prefills(cost, w.prompts, squared, context_units)
    return seconds, pairs, completed


@jit
def _with_masked_pairs(S, cost, kv_tokens, prefill_s, decode_s):
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
def _pipeline(S, cost, r, now_s, prefill_s, decode_s):
    rep, w = S.replicas[r], S.work[0]
    layer_s, comm_s, embedding_s, send_s, head_s, host_s = _table_rows(S, cost)
    last = len(cost.stage_layers) - 1
    end_s, layers, added_s = now_s, 0.0, host_s
    if S.params[0].hide_host == 1:
        end_s = max(now_s, rep.host_free_s) + host_s
        rep.host_free_s = end_s
        added_s = 0.0
    for p in range(last + 1):
        stage_s = cost.stage_layers[p] * (layer_s + comm_s + prefill_s + decode_s)
        if p == 0:
            stage_s += embedding_s + added_s + w.swap_s
        stage_s += head_s + w.draft_s if p == last else send_s
        S.stage_s[r, p] = stage_s
        end_s = max(end_s, S.stage_free[r, p]) + stage_s
        S.stage_free[r, p] = end_s
        layers += cost.stage_layers[p]
    rep.layer_s += layers * layer_s
    rep.comm_s += layers * comm_s
    rep.prefill_attention_s += layers * prefill_s
    rep.decode_attention_s += layers * decode_s
    rep.host_s += host_s
    rep.head_s += head_s
    rep.embedding_s += embedding_s
    rep.send_s += last * send_s
    return end_s


@jit_cold
def _pipeline_by_stage(S, one, other, stage_other, r, now_s, kv_tokens):
    """Do as ``_pipeline``, but stages with ``stage_other`` 1 have the costs ``other`` of another TP degree."""
    rep, w = S.replicas[r], S.work[0]
    prefill_a, decode_a = _attention(S, one, kv_tokens)
    prefill_b, decode_b = _attention(S, other, kv_tokens)
    if S.params[rep.side].speculates == 1:  # with one stage
        decode_a = verification_s(S, rep.side, decode_a, kv_tokens)
    layer_a, comm_a, embedding_a, send_a, head_a, host_a = _table_rows(S, one)
    layer_b, comm_b, embedding_b, send_b, head_b, host_b = _table_rows(S, other)
    last, end_s = len(one.stage_layers) - 1, now_s
    layer_s, comm_s, prefill_s, decode_s, send_s = 0.0, 0.0, 0.0, 0.0, 0.0
    for p in range(last + 1):
        n, b = one.stage_layers[p], stage_other[p] == 1
        layer, comm = (layer_b, comm_b) if b else (layer_a, comm_a)
        prefill, decode = (prefill_b, decode_b) if b else (prefill_a, decode_a)
        send = send_b if b else send_a
        stage_s = n * (layer + comm + prefill + decode)
        if p == 0:
            stage_s += (embedding_b if b else embedding_a) + (host_b if b else host_a) + w.swap_s
        stage_s += (head_b if b else head_a) + w.draft_s if p == last else send
        S.stage_s[r, p] = stage_s
        end_s = max(end_s, S.stage_free[r, p]) + stage_s
        S.stage_free[r, p] = end_s
        layer_s += n * layer
        comm_s += n * comm
        prefill_s += n * prefill
        decode_s += n * decode
        send_s += send if p < last else 0.0
    rep.layer_s += layer_s
    rep.comm_s += comm_s
    rep.prefill_attention_s += prefill_s
    rep.decode_attention_s += decode_s
    rep.host_s += host_b if stage_other[0] == 1 else host_a
    rep.head_s += head_b if stage_other[last] == 1 else head_a
    rep.embedding_s += embedding_b if stage_other[0] == 1 else embedding_a
    rep.send_s += send_s
    return end_s


@jit_cold
def _attention(S, cost, kv_tokens):
    w = S.work[0]
    prefill_s, _, _ = _prompts_cost(S, cost)
    decode_s = decode_attention(cost, w.decodes, kv_tokens, w.prompts)
    if cost.masked_s > 0.0:
        prefill_s, decode_s = _with_masked_pairs(S, cost, kv_tokens, prefill_s, decode_s)
    return prefill_s, decode_s


@jit
def _table_rows(S, cost):
    """Return the step's seconds (layer, communication, token embedding, send, head, host) without attention."""
    w = S.work[0]
    tokens = w.decodes + w.drafts + w.prompt_tokens
    return (
        entry(cost.by_tokens, cost.tokens_slope, tokens, 0),
        entry(cost.by_tokens, cost.tokens_slope, tokens, 1),
        entry(cost.by_tokens, cost.tokens_slope, tokens, 2),
        entry(cost.by_tokens, cost.tokens_slope, tokens, 3),
        entry(cost.by_seqs, cost.seqs_slope, w.seqs + w.drafts, 0),
        entry(cost.by_seqs, cost.seqs_slope, w.seqs, 1),
    )


@jit
def _count_rounds(rep, prompts):
    """Count a step that starts, and the rounds. In a round each micro-batch of the pipeline runs one step.

    A round is counted whenever the marked micro-batch starts its next step. ``marked_step`` is its latest step, at
    first the latest step that prefilled. Steps leave the pipeline in the order in which they enter it. Three cases:
    (1) ``marked_step`` is in the pipeline: no round. (2) It has left, and the step after it has not: this step is the
    next one of the marked micro-batch, so it counts a round and takes the mark. (3) Both have left: the marked
    micro-batch has no requests left, so the last step that started counts a round and takes the mark. If that
    step has left as well, the step that starts now also counts a round and takes the mark.
    """
    n, mark = rep.phase_steps, rep.marked_step
    rep.phase_steps = n + 1
    if n == 0 or prompts > 0:
        rep.phase_rounds, rep.marked_step = 0, n
        return
    if n - rep.in_flight > mark + 1:
        rep.phase_rounds, mark = rep.phase_rounds + 1, n - 1
    if n - rep.in_flight > mark:
        rep.phase_rounds, mark = rep.phase_rounds + 1, n
    rep.marked_step = mark


@jit
def _record_step(S, r, now_s, end_s, outputs):
    rep, w = S.replicas[r], S.work[0]
    params = S.params[rep.side]
    in_use = params.total_blocks - rep.free_blocks
    waiting = S.queues[rep.queue].length + S.tiers[r].loading
    busy_s = end_s - max(now_s, rep.busy_until_s)
    rep.steps += 1
    rep.busy_until_s = end_s
    rep.busy_s += busy_s
    rep.kv_block_s += in_use * busy_s
    while end_s >= params.series_bins * rep.series_bin_s:
        _double_bin_width(S, r)
    b = int(end_s / rep.series_bin_s)
    S.series[r, b, 0] += busy_s
    S.series[r, b, 1] += w.seqs * busy_s
    S.series[r, b, 2] += waiting * busy_s
    S.series[r, b, 3] += in_use * busy_s
    S.series[r, b, 4] += w.prompt_tokens
    S.series[r, b, 5] += outputs
    if w.seqs == 0:  # a rank's dummy step
        return busy_s
    if S.counters[0].step_rows < len(S.step_log):
        line = S.step_log[S.counters[0].step_rows]
        line.start_s = now_s
        line.end_s = end_s
        line.replica = r
        line.decode_seqs = w.decodes
        line.prefill_seqs = w.prompts
        line.prefill_tokens = w.prompt_tokens
        line.kv_blocks = in_use
        line.waiting = waiting
    S.counters[0].step_rows += 1
    return busy_s


@jit_cold
def _double_bin_width(S, r):
    bins, columns = S.series.shape[1], S.series.shape[2]
    for c in range(columns):
        for b in range(bins // 2):
            S.series[r, b, c] = S.series[r, 2 * b, c] + S.series[r, 2 * b + 1, c]
        for b in range(bins // 2, bins):
            S.series[r, b, c] = 0.0
    S.replicas[r].series_bin_s *= 2


@jit
def _count_gap(S, r, gap_s, count):
    """Count ``count`` tokens, each ``gap_s`` after the previous token of its request."""
    if count == 0:
        return
    rep = S.replicas[r]
    S.histogram[gap_bin(gap_s)] += count
    rep.gaps += count
    rep.gap_sum_s += gap_s * count
    rep.gap_max_s = max(rep.gap_max_s, gap_s)
    if S.counters[0].gap_rows < len(S.gap_log):
        line = S.gap_log[S.counters[0].gap_rows]
        line.gap_s = gap_s
        line.count = count
    S.counters[0].gap_rows += 1


@jit
def _advance_group(S, r, g, now_s):
    for c in range(S.groups[g].cohorts):
        _count_gap(S, r, now_s - S.cohort_s[g, c], S.cohort_n[g, c])
    advance(S, g, now_s)


@jit
def _finish_decodes(S, r, g, now_s):
    """Finish the requests of the group that have all tokens, in order of admission (SGLang: of its decode batch)."""
    finished, slot, sglang = 0, pop_finished(S, g), S.params[0].sglang == 1
    while slot >= 0:
        i, q = finished, S.slots[slot]
        while i > 0 and (
            S.slots[S.tmp_slot[i - 1]].place > q.place if sglang else S.slots[S.tmp_slot[i - 1]].admission > q.admission
        ):
            S.tmp_slot[i] = S.tmp_slot[i - 1]
            i -= 1
        S.tmp_slot[i] = slot
        finished += 1
        slot = pop_finished(S, g)
    for i in range(finished):
        _finish(S, r, S.tmp_slot[i], now_s)


@jit_cold
def _end_verification(S, r, g, now_s):
    """Give the decodes of a step their tokens, which come at once, and finish those that have all of them."""
    for c in range(S.groups[g].cohorts):
        _count_gap(S, r, now_s - S.cohort_s[g, c], S.cohort_n[g, c])
    finished = advance_each(S, g, now_s)
    for i in range(finished):
        remove(S, g, S.tmp_slot[i])
    for i in range(finished):
        _finish(S, r, S.tmp_slot[i], now_s)


@jit
def end_step(S, D, r, now_s, rank, router):  # noqa: C901, PLR0912  one sequence
    """End the replica's oldest step in flight. Under disaggregation, ``router`` chooses the decode replicas."""
    rep, stride = S.replicas[r], S.params[0].stride
    if S.params[rep.side].dp > 1 and is_dummy(S, r * stride + rep.first_flight):
        _end_dummy(S, r)
        return
    if overlaps(S):
        _end_overlapped_step(S, r, now_s)
        return
    if S.params[0].async_scheduling == 1:
        _end_async_step(S, r, now_s)
        return
    f = r * stride + rep.first_flight
    flight = S.flights[f]
    rep.first_flight = (rep.first_flight + 1) % stride
    rep.in_flight -= 1
    rep.steps_since_admit += 1
    rep.steps_since_check += 1
    g, is_alone = flight.group, S.groups[rep.idle_group].members == 0
    is_mixed, caches = S.groups[g].members > 0, S.params[rep.side].prefix_caching == RADIX
    by_sglang = S.params[rep.side].sglang == 1
    if caches and by_sglang:
        insert_prompts(S, r, f)
    if S.groups[g].members > 0:
        if S.params[0].speculates == 1:
            _end_verification(S, r, g, now_s)
        elif flight.paused == 0:
            _advance_group(S, r, g, now_s)
            _finish_decodes(S, r, g, now_s)
        if rep.partials > 0 or S.groups[rep.idle_group].members > 0:
            renumber(S, g)
        if S.groups[rep.idle_group].members == 0:
            flight.group, rep.idle_group = rep.idle_group, g
            S.groups[flight.group].cohorts = 0
        else:
            merge(S, g, rep.idle_group)
    for i in range(flight.prompts):
        slot = S.prompt_slot[f, i]
        q = S.slots[slot]
        q.prefilled += S.prompt_chunk[f, i]
        if caches and (not by_sglang or q.prefilled < q.context):
            cache_blocks(S, r, q, q.prefilled)
        if q.prefilled < q.context:
            _add_partial(S, r, slot)
        else:
            _end_prompt(S, D, r, slot, now_s, rank, router)
    if by_sglang and flight.prompts > 0:
        merge_prompts(S, r, f, is_mixed, is_alone)
    flight.prompts = 0


@jit_cold
def count_at_start(S, r, end_s):
    """Count the tokens of the step just launched, which ends at ``end_s`` (asynchronous scheduling).

    The next step is formed before this end. A request that ends by EOS also decodes in the step after its last token,
    and that result is lost. By SGLang's rules tokens count when the step ends.
    """
    rep, w = S.replicas[r], S.work[0]
    if S.params[0].sglang == 1:
        _start_overlapped(S, r)
        return
    flight, lost_tokens = S.flights[w.flight], 0
    if w.decodes > 0:
        rep.idle_group, flight.group = flight.group, rep.idle_group
        group = S.groups[rep.idle_group]
        group.steps += 1
        group.kv_tokens += group.members
        group.cohorts = 0  # All its members got their last token at ``last_end_s``.
        slot = pop_finished(S, rep.idle_group)
        while slot >= 0:
            lost_tokens += S.slots[slot].extra_steps
            S.slots[slot].generated = S.slots[slot].output
            oldest = r * S.params[0].stride + rep.first_flight
            add_ending(S, r, slot, oldest if S.slots[slot].extra_steps == 1 else w.flight)
            slot = pop_finished(S, rep.idle_group)
        S.series[r, int(end_s / rep.series_bin_s), 5] -= lost_tokens
    flight.tokens = w.decodes - lost_tokens
    for i in range(w.prompts):
        slot = S.prompt_slot[w.flight, i]
        q = S.slots[slot]
        q.chunk_step, q.chunk_tokens = rep.steps, S.prompt_chunk[w.flight, i]
        q.prefilled += q.chunk_tokens
        S.prompt_chunk[w.flight, i] = 1 if q.prefilled == q.context else 0
        if q.prefilled < q.context:
            _add_partial(S, r, slot)
            continue
        q.resumed_token_s = q.last_token_s
        q.generated += 1
        q.decoding = 1
        assign_return_number(S, slot)
        if q.generated == q.output and q.extra_steps == 0:
            add_ending(S, r, slot, w.flight)
        else:
            join(S, rep.idle_group, slot)


@jit_cold
def _end_async_step(S, r, now_s):
    """End the oldest step in flight, whose tokens ``count_at_start`` counted, also for requests preempted meanwhile."""
    rep, stride = S.replicas[r], S.params[0].stride
    f, group = r * stride + rep.first_flight, S.groups[rep.idle_group]
    rep.first_flight = (rep.first_flight + 1) % stride
    rep.in_flight -= 1
    rep.is_blocked = 0
    _count_gap(S, r, now_s - group.last_end_s, S.flights[f].tokens)
    group.last_end_s = now_s
    for i in range(S.flights[f].prompts):
        q = S.slots[S.prompt_slot[f, i]]
        if S.prompt_chunk[f, i] == 0:
            continue
        first_s = S.results[q.index].first_token_s
        if first_s != first_s:  # noqa: PLR0124  NaN
            S.results[q.index].first_token_s = now_s
        else:
            _count_gap(S, r, now_s - q.resumed_token_s, 1)
        q.last_token_s = now_s
    S.flights[f].prompts = 0
    no_step = rep.in_flight == 0 or (S.params[0].dp > 1 and is_dummy(S, r * stride + rep.first_flight))
    if no_step and group.members > 0:
        _note_uncounted_ends(S, r, f)
    count, left = 0, 0
    for at in range(rep.ending):
        slot, i = S.ending[r, at], count
        if S.slots[slot].last_flight != f:
            S.ending[r, left] = slot
            left += 1
            continue
        while i > 0 and S.slots[S.tmp_slot[i - 1]].admission > S.slots[slot].admission:
            S.tmp_slot[i] = S.tmp_slot[i - 1]
            i -= 1
        S.tmp_slot[i] = slot
        count += 1
    rep.ending = left
    for i in range(count):
        slot = S.tmp_slot[i]
        if S.slots[slot].blocks == 0:  # Preempted: it is no resident.
            S.running[r] += 1
        _finish(S, r, slot, now_s)


@jit_cold
def _start_overlapped(S, r):
    """Note what the step just launched computes (SGLang with overlap). Its tokens count when it ends."""
    rep, w = S.replicas[r], S.work[0]
    S.flights[w.flight].decodes = w.decodes
    rep.ahead = 1 if w.decodes > 0 else 0
    rep.unmerged = w.flight + 1 if w.prompts > 0 else 0
    for i in range(w.prompts):
        slot = S.prompt_slot[w.flight, i]
        q = S.slots[slot]
        q.prefilled += S.prompt_chunk[w.flight, i]
        S.prompt_chunk[w.flight, i] = 1 if q.prefilled == q.context else 0
        if q.prefilled < q.context:
            _add_partial(S, r, slot)
            rep.has_chunk = 1


@jit_cold
def _end_overlapped_step(S, r, now_s):
    """End the oldest step in flight under SGLang's rules with overlap (``Reference._end_overlapped_step``)."""
    rep, stride, g, finished = S.replicas[r], S.params[0].stride, S.replicas[r].idle_group, 0
    f, outputs, is_alone = r * stride + rep.first_flight, 0, S.groups[g].members == 0
    flight = S.flights[f]
    is_mixed = flight.decodes > 0
    rep.first_flight = (rep.first_flight + 1) % stride
    rep.in_flight -= 1
    rep.is_blocked = 0
    if rep.in_flight == 0:
        rep.ahead = 0
    if is_mixed and S.groups[g].members > 0:
        outputs = S.groups[g].members
        _advance_group(S, r, g, now_s)
        slot = pop_finished(S, g)
        while slot >= 0:
            S.tmp_slot[finished] = slot
            finished += 1
            slot = pop_finished(S, g)
        _sort_ends(S, r, finished)
    rep.is_reordered = 0
    for i in range(flight.prompts):
        slot = S.prompt_slot[f, i]
        if S.prompt_chunk[f, i] == 1 and S.slots[slot].blocks > 0:
            outputs += 1
            _end_overlapped_prompt(S, r, slot, now_s)
    for i in range(finished):
        _finish_overlapped(S, r, S.tmp_slot[i], now_s)
    S.series[r, int(now_s / rep.series_bin_s), 5] += outputs
    rep.joining = 0
    if rep.unmerged == f + 1:  # No step was formed while this one ran, because it took no time.
        merge_prompts(S, r, f, is_mixed, is_mixed or is_alone)
        rep.unmerged = 0
    flight.prompts = 0


@jit_cold
def _sort_ends(S, r, count):
    """Sort the ``count`` slots in ``tmp_slot`` by their order in the step that ends."""
    is_reordered = S.replicas[r].is_reordered == 1
    for end in range(1, count):
        i, slot = end, S.tmp_slot[end]
        at = S.slots[slot].return_number if is_reordered else S.slots[slot].place
        while i > 0:
            before = S.slots[S.tmp_slot[i - 1]]
            if (before.return_number if is_reordered else before.place) < at:
                break
            S.tmp_slot[i] = S.tmp_slot[i - 1]
            i -= 1
        S.tmp_slot[i] = slot


@jit_cold
def _end_overlapped_prompt(S, r, slot, now_s):
    q, rep = S.slots[slot], S.replicas[r]
    first_s = S.results[q.index].first_token_s
    if first_s != first_s:  # noqa: PLR0124  NaN
        S.results[q.index].first_token_s = now_s
    else:
        _count_gap(S, r, now_s - q.last_token_s, 1)
    q.last_token_s = now_s
    q.generated += 1
    q.decoding = 1
    if q.generated == q.output:
        _finish_overlapped(S, r, slot, now_s)
        return
    if S.params[0].prefix_caching == RADIX:
        cache_blocks(S, r, q, q.context)
    if rep.ahead == 1 and q.context % S.params[0].block_size == 0:
        q.blocks += 1
    join(S, rep.idle_group, slot)


@jit_cold
def _finish_overlapped(S, r, slot, now_s):
    """Finish a request. If it ends before max_tokens, a next step with decodes also computes the last token."""
    q, rep, size = S.slots[slot], S.replicas[r], S.params[0].block_size
    tokens = q.prompt + q.generated - 1
    if rep.ahead == 1 and q.output < S.max_tokens[q.index]:
        tokens += 1
        q.blocks = max(q.blocks, (tokens + size - 1) // size)
    if S.params[0].prefix_caching == RADIX:
        cache_blocks(S, r, q, tokens)
        release_blocks(S, r, q, q.blocks)
        q.blocks = 0
    _finish(S, r, slot, now_s)


@jit_cold
def _note_uncounted_ends(S, r, f):
    """Note the requests that end with step ``f``, if no other step with sequences was formed while it ran."""
    g, at = S.replicas[r].idle_group, 0
    while at < S.groups[g].members:
        slot = member(S, g, at)
        if S.slots[slot].finish_step - S.slots[slot].extra_steps <= S.groups[g].steps:
            remove(S, g, slot)
            add_ending(S, r, slot, f)
            at = 0
        else:
            at += 1


@jit
def _end_prompt(S, D, r, slot, now_s, rank, router):
    q = S.slots[slot]
    if q.generated == 0:
        S.results[q.index].first_token_s = now_s
    else:
        _count_gap(S, r, now_s - q.last_token_s, 1)
    q.generated += 1
    q.unhashed = 0
    q.decoding = 1
    q.last_token_s = now_s
    if q.generated == q.output:
        if q.early_blocks > 0:
            end_before_transfer(S, r, slot, now_s)
        else:
            _finish(S, r, slot, now_s)
    elif S.params[0].decode_replicas > 0 and S.replicas[r].side == 0:
        queue_for_decode(S, D, r, slot, now_s, rank, router)
    else:
        assign_return_number(S, slot)
        S.replicas[r].newest_decode = max(S.replicas[r].newest_decode, q.admission)
        join(S, S.replicas[r].idle_group, slot)


@jit
def _finish(S, r, slot, now_s):
    q = S.slots[slot]
    if S.params[0].offload_blocks > 0:
        end_offloading(S, r, q)
    free_blocks_of(S, r, q, True)
    S.running[r] -= 1
    S.results[q.index].finished_s = now_s
    end_request(S, r, slot, FINISHED, now_s)


@jit
def _add_partial(S, r, slot):
    rep = S.replicas[r]
    assign_return_number(S, slot)
    i = rep.partials
    while i > 0 and S.slots[S.partials[r, i - 1]].admission > S.slots[slot].admission:
        S.partials[r, i] = S.partials[r, i - 1]
        i -= 1
    S.partials[r, i] = slot
    rep.partials += 1


@jit_cold
def handle_event(S, D, i):
    """Process event ``i``: the end of a KV transfer or load, or the time at which a replica may form a step again.

    With n requests, events below n are ends of request i's transfer to a decode replica or load from CPU memory. Event
    n + i wakes the replica of deferred request i, and event 2 n + r wakes replica r, whose host is free again.
    """
    if i >= 2 * len(S.results):
        r = i - 2 * len(S.results)
        S.replicas[r].wakes = 0
        S.pending[r] = 1
        return
    if i >= len(S.results):
        wake(S, i - len(S.results))
        return
    if S.params[0].offload_blocks > 0 and S.offloads[i].state == LOADING:
        end_load(S, i)
        return
    end_transfer(S, D, i)


@jit_cold
def may_form(S, first, now_s):
    """Return whether a replica, whose first rank is ``first``, may form a step now under asynchronous scheduling."""
    host_free_s, is_blocked = 0.0, True
    for r in range(first, first + S.params[S.replicas[first].side].dp):
        host_free_s = max(host_free_s, S.replicas[r].host_free_s)
        is_blocked = is_blocked and S.replicas[r].is_blocked == 1
    if host_free_s > now_s:
        if S.replicas[first].wakes == 0:
            S.replicas[first].wakes = 1
            push_event(S, host_free_s, len(S.replicas) + 2 * len(S.results) + first)
        return False
    return not is_blocked


@jit
def can_repeat(S, r, end_s, until_s):
    """Return whether the next step certainly has the same sequences as the step of decodes just launched."""
    rep, queue = S.replicas[r], S.queues[S.replicas[r].queue]
    params = S.params[rep.side]
    g = S.flights[S.work[0].flight].group
    group = S.groups[g]
    only_group = rep.partials == 0 and S.groups[rep.idle_group].members == 0 and S.tiers[r].loading == 0
    no_admission = queue.length == 0 or S.running[r] >= params.max_num_seqs or rep.batch_is_full == 1
    no_event = end_s < min(until_s, rep.deadline_s, queue.deadline_s, queue.overdue_at_s) and end_s <= params.limit_s
    no_check = rep.check_preemption == 0 and rep.steps_since_check + 1 < params.preemption_interval_steps
    same_plan = params.counts_steps == 0 and (params.preempts_by_policy == 0 or queue.length == 0 or no_check)
    if not (only_group and no_admission and no_event and same_plan) or next_event_step(S, g) <= group.steps + 1:
        return False
    need = S.block_needs[g, (group.steps + 1) % params.block_size]
    if params.hybrid == 1:
        need *= params.attention_groups
    # A batching policy may require a free block (RESERVE_BLOCK).
    return rep.free_blocks - need >= 1 and not frees_contents(S, r, g, group.steps + 1)


@jit
def stays_empty(S, r, until_s, end_s):
    """Return whether a rank without sequences certainly has none in the next step either."""
    rep = S.replicas[r]
    is_empty = rep.partials == 0 and S.groups[rep.idle_group].members == 0 and S.queues[rep.queue].length == 0
    return is_empty and end_s < until_s


@jit
def end_in_place(S, r, end_s):
    """End the step in ``work`` without an event, and take the blocks for the next step of the same sequences."""
    rep, w = S.replicas[r], S.work[0]
    g = S.flights[w.flight].group
    S.counters[0].last_s = max(S.counters[0].last_s, end_s)
    _advance_group(S, r, g, end_s)
    need = S.block_needs[g, S.groups[g].steps % S.params[0].block_size]
    if S.params[rep.side].sglang == 1:
        lower_ratio(S, r)
        note_room(S, r, S.groups[g].members)
    if S.params[0].hybrid == 1:
        need = need * S.params[0].attention_groups - free_skipped(S, r, g)
    rep.free_blocks -= need
    rep.in_flight -= 1
    rep.steps_since_check += 1
    w.swap_s = 0.0
