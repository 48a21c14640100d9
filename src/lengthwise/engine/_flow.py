"""What the step in ``work`` takes on each stage, from the cost tables, and when the last one ends."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.cost._lookup import (
    decode_attention,
    masked_attention,
    merged_prefill_attention,
    prefill_attention,
    row,
)


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
