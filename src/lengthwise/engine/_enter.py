"""Requests enter, once past the front: refused, or routed to a replica's queue."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import _layout as layout
from lengthwise.engine._bins import gather
from lengthwise.engine._expire import lift, outstanding, release, to_front
from lengthwise.engine._fits import remaining_tokens
from lengthwise.engine._follow import first_sent, take_sent
from lengthwise.engine._form import chunk_for
from lengthwise.engine._handover import blocks_to_decode
from lengthwise.engine._keys import predicted_total
from lengthwise.schema.records import Refusal, Status

BAD_ROUTE = layout.BAD_ROUTE
REJECTED = int(Status.REJECTED)
NONE = int(Refusal.NONE)
TOO_LONG = int(Refusal.PROMPT_REACHES_MAX_MODEL_LEN)
OVER_BUDGET = int(Refusal.PROMPT_ABOVE_TOKEN_BUDGET)
OVER_MEMORY = int(Refusal.PROMPT_ABOVE_KV_MEMORY)


@jit_cold
def arrivals(S, D, now_s, rank, memory, router, binning, decode_memory):
    """Takes in all requests that enter now."""
    ctr = S.ctr[0]
    while ctr.entry_s == now_s:
        i = first_sent(S)
        take_sent(S, i)
        ctr.front_free_s = max(S.arrival_s[i], ctr.front_free_s) + S.par[0].front_queue_s
        to_front(S)
        refusal = _refusal(S, i, memory, decode_memory)
        if refusal != NONE:
            S.results[i].status = REJECTED
            S.results[i].refusal = refusal
            release(S, i, REJECTED, now_s)
            continue
        slot = _new_slot(S, i)
        r = _route(S, D, i, router)
        if r < 0:
            return
        if S.par[0].charges == 1:
            lift(S, S.slots[slot].tenant)
        gather(S, S.replicas[r].queue, now_s, slot, rank, binning)


@jit
def _refusal(S, i, memory, decode_memory):
    """Why not even an idle replica could take the request, if so."""
    par, prompt, predicted = S.par[0], S.prompt[i], predicted_total(S, i, 0)
    if prompt >= par.max_model_len:
        return TOO_LONG
    S.work[0].prompts = 0
    S.work[0].prompt_tokens = 0
    S.work[0].longest = 0
    chunk = chunk_for(S, prompt, False, par.empty_tokens, par.empty_flags)
    if chunk <= 0:
        return OVER_BUDGET
    peak = prompt + remaining_tokens(predicted, 0) if par.needs_peak == 1 else 0
    blocks = memory(
        prompt,
        chunk,
        predicted,
        par.max_model_len,
        par.block_size,
        par.total_blocks,
        par.total_blocks,
        par.watermark_blocks,
        0,
        peak,
    )
    if blocks >= 0 and par.decodes > 0:
        blocks = blocks_to_decode(S, i, decode_memory)
    return OVER_MEMORY if blocks < 0 else NONE


@jit
def _new_slot(S, i):
    ctr = S.ctr[0]
    if ctr.free_slots > 0:
        ctr.free_slots -= 1
        slot = S.free_slots[ctr.free_slots]
    else:
        slot = ctr.slots
        ctr.slots += 1
    q = S.slots[slot]
    q.index = i
    q.arrival_s = S.arrival_s[i]
    q.prompt = S.prompt[i]
    q.output = S.output[i]
    q.priority = S.priority[i]
    q.tenant = S.tenant[i] if S.par[0].charges == 1 else 0
    q.generated = 0
    q.context = 0
    q.prefilled = 0
    q.blocks = 0
    q.admission = -1
    q.eviction = 0
    q.seat = 0
    q.last_token_s = 0.0
    q.join_step = 0
    q.growing = 0
    q.decoding = 0
    q.swapped = 0
    q.waiting = 1
    q.batch = 0
    q.entered = 0
    q.kept = 0
    q.held = 0
    q.queued_s = q.arrival_s
    q.waited_s = 0.0
    q.charged = 0.0
    return slot


@jit
def _route(S, D, i, router):
    """The replica of a request; -1 after a problem."""
    if S.par[0].central == 1:
        S.waiting[0] += 1
        return 0
    r = router(i, S.draws[i, 0], S.draws[i, 1], D.waiting_here, D.running_here, D.tokens_here)
    if r < 0 or r >= S.par[0].replicas:
        S.ctr[0].problem = BAD_ROUTE
        S.ctr[0].problem_request = r
        return -1
    S.waiting[r] += 1
    S.tokens[r] += outstanding(S.prompt[i], S.predicted[i])
    S.touched[r] = 1
    return r
