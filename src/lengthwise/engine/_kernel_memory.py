"""Memory of a replica: ends of requests, preemptions, the order of victims, blocks at admission; tenants' service."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import kernel_layout
from lengthwise.engine._kernel_groups import drop_partial, join, member, remove, update
from lengthwise.engine._kernel_queue import (
    key_of,
    next_sent,
    note_starvation,
    predicted_total,
    queue_push,
    queue_rebuild,
    rank_key,
    release_children,
)
from lengthwise.policy import contracts
from lengthwise.schema.records import Status

OUTPUT_WEIGHT = contracts.SERVICE_OUTPUT_WEIGHT
FORM_ONCE, RESTART_AS_DECODE = contracts.FORM_ONCE, contracts.RESTART_AS_DECODE
TIMED_OUT = int(Status.TIMED_OUT)
BAD_MEMORY, BAD_DECODE_MEMORY = kernel_layout.BAD_MEMORY, kernel_layout.BAD_DECODE_MEMORY
INFINITY = float("inf")


@jit
def end_request(S, r, slot, status, now_s):
    """Record the end of a request, free its slot, and send the requests that depend on it."""
    q = S.slots[slot]
    if q.transfer_blocks > 0:
        release_transfer_blocks(S, q)
    result = S.results[q.index]
    result.status = status
    result.output_tokens = max(0, q.generated + q.prompt - S.prompt[q.index])
    result.queued_for_s = q.queued_for_s + (now_s - q.queued_s if q.waiting == 1 else 0.0)
    S.replicas[r].ended_since_admit += 1
    if S.params[0].central_queue == 0:
        S.tokens[r] -= outstanding(S.prompt[q.index], S.predicted[q.index])
    if S.params[0].tracks_service == 1:
        _correct_service(S, q, result.output_tokens)
    S.free_slots[S.counters[0].free_slots] = slot
    S.counters[0].free_slots += 1
    send_next(S, q.index, status, now_s)


@jit_cold
def release_transfer_blocks(S, q):
    """Free the blocks of a request on the replica where it was prefilled."""
    source = S.replicas[q.prefill_replica]
    source.free_blocks += q.transfer_blocks
    source.freed_blocks += q.transfer_blocks
    S.pending[q.prefill_replica] = 1
    q.transfer_blocks = 0


@jit_cold
def charge(S, q):
    """Charge a tenant for the prompt and the predicted output at the first admission of a request."""
    q.charged_tokens = S.predicted[q.index]
    S.service[q.tenant] += q.prompt + OUTPUT_WEIGHT * q.charged_tokens
    _leave_backlog(S, q.tenant)


@jit_cold
def _correct_service(S, q, output_tokens):
    """Charge the tenant for the actual output instead of the predicted one."""
    if q.admission >= 0:
        S.service[q.tenant] += OUTPUT_WEIGHT * (output_tokens - q.charged_tokens)
    else:
        _leave_backlog(S, q.tenant)


@jit_cold
def _leave_backlog(S, tenant):
    S.backlog[tenant] -= 1
    if S.backlog[tenant] == 0:
        S.counters[0].last_service = S.service[tenant]


@jit_cold
def join_backlog(S, tenant):
    """Raise the service of a tenant without backlog to the minimum of the others: absence earns no credit (VTC)."""
    if S.backlog[tenant] == 0:
        minimum = INFINITY
        for t in range(len(S.service)):
            if S.backlog[t] > 0:
                minimum = min(minimum, S.service[t])
        if minimum == INFINITY:
            minimum = S.counters[0].last_service
        S.service[tenant] = max(S.service[tenant], minimum)
    S.backlog[tenant] += 1


@jit
def _round_up(tokens):
    integer = int(tokens)
    return integer + 1 if integer < tokens else integer


@jit
def outstanding(prompt, predicted):
    """Return the tokens that a router counts for a request: its prompt and its predicted output, rounded up."""
    return prompt + _round_up(predicted)


@jit
def remaining_tokens(predicted, generated):
    """Return the predicted remaining tokens, rounded up, at least 1."""
    return max(1, _round_up(predicted) - generated)


@jit
def send_next(S, i, status, now_s):
    """Send the next request of a closed loop, or the dependents of request ``i``, which has ended."""
    counters = S.counters[0]
    if S.params[0].closed_loop == 1 and counters.released < len(S.arrival_s):
        S.arrival_s[counters.released] = now_s
        counters.released += 1
        if counters.released == counters.next + 1:
            update_entry_time(S)
    if S.params[0].has_dependents == 1:
        release_children(S, i, status, now_s)
        update_entry_time(S)


@jit
def update_entry_time(S):
    """Note when the next request that is sent will have passed the front end."""
    counters, params = S.counters[0], S.params[0]
    i = next_sent(S)
    if i >= 0:
        free_s = max(S.arrival_s[i], counters.front_free_s) + params.front_serial_s
        counters.entry_s = free_s + params.front_request_s
    else:
        counters.entry_s = INFINITY


@jit
def expire(S, r, now_s):
    """End idle and waiting requests whose timeout has passed."""
    rep = S.replicas[r]
    if rep.deadline_s <= now_s:
        _expire_idle(S, r, now_s)
    if S.queues[rep.queue].deadline_s <= now_s:
        _expire_waiting(S, r, now_s)


@jit_cold
def _expire_idle(S, r, now_s):
    rep, params = S.replicas[r], S.params[0]
    i = 0
    while i < S.groups[rep.idle].members:
        slot = member(S, rep.idle, i)
        if S.slots[slot].arrival_s + params.timeout_s <= now_s:
            remove(S, rep.idle, slot)
            _time_out(S, r, slot, now_s)
            i = 0
        else:
            i += 1
    for i in range(rep.partials - 1, -1, -1):
        slot = S.partials[r, i]
        if S.slots[slot].arrival_s + params.timeout_s <= now_s:
            drop_partial(S, r, slot)
            _time_out(S, r, slot, now_s)
    first = _first_arrival(S, rep.idle)
    for i in range(rep.partials):
        first = min(first, S.slots[S.partials[r, i]].arrival_s)
    for k in range(rep.in_flight):
        f = r * params.stride + (rep.first_flight + k) % params.stride
        first = min(first, _first_arrival(S, S.flights[f].group))
        for i in range(S.flights[f].prompts):
            first = min(first, S.slots[S.prompt_slot[f, i]].arrival_s)
    rep.deadline_s = first + params.timeout_s


@jit_cold
def _time_out(S, r, slot, now_s):
    S.replicas[r].free_blocks += S.slots[slot].blocks
    S.replicas[r].freed_blocks += S.slots[slot].blocks
    S.running[r] -= 1
    end_request(S, r, slot, TIMED_OUT, now_s)


@jit_cold
def _first_arrival(S, g):
    first = INFINITY
    for i in range(S.groups[g].members):
        first = min(first, S.slots[member(S, g, i)].arrival_s)
    return first


@jit_cold
def _expire_waiting(S, r, now_s):
    rep, timeout_s = S.replicas[r], S.params[0].timeout_s
    queue = S.queues[rep.queue]
    remaining, first = 0, INFINITY
    for i in range(queue.length):
        at = queue.offset + i
        slot = S.pool_slot[at]
        if S.slots[slot].arrival_s + timeout_s <= now_s:
            S.waiting[rep.queue] -= 1
            end_request(S, r, slot, TIMED_OUT, now_s)
            continue
        first = min(first, S.slots[slot].arrival_s)
        to = queue.offset + remaining
        S.pool_key[to] = S.pool_key[at]
        S.pool_index[to] = S.pool_index[at]
        S.pool_slot[to] = slot
        remaining += 1
    queue.length = remaining
    queue.deadline_s = first + timeout_s
    queue_rebuild(S, rep.queue)


@jit
def requeue(S, queue_index, now_s, slot, rank):
    """Add a request that returns to a queue; its wait starts now."""
    S.slots[slot].queued_s = now_s
    enqueue(S, queue_index, now_s, slot, rank)


@jit_cold
def move_load(S, q, r, to):
    """Count a request as load of replica ``to`` instead of ``r``, and mark ``to`` as pending."""
    tokens = outstanding(S.prompt[q.index], S.predicted[q.index])
    S.tokens[r] -= tokens
    S.tokens[to] += tokens
    S.pending[to] = 1


@jit
def enqueue(S, queue_index, now_s, slot, rank):
    """Add a request to a queue by its rank; its wait started at ``queued_s``, in front of the replica or in a bin."""
    request = S.slots[slot]
    request.waiting = 1
    key = rank_key(S, now_s, slot, rank)
    note_starvation(S, queue_index, now_s, request)
    queue_push(S, queue_index, key, request.index, slot)
    deadline_s = request.arrival_s + S.params[0].timeout_s
    S.queues[queue_index].deadline_s = min(S.queues[queue_index].deadline_s, deadline_s)
    if S.params[0].preempts == 1 and S.pool_slot[S.queues[queue_index].offset] == slot:
        _request_preemption_check(S, queue_index)


@jit_cold
def _request_preemption_check(S, queue_index):
    """Make all replicas of a queue consider preemptions at their next step."""
    for r in range(S.params[0].replicas):
        if S.replicas[r].queue == queue_index:
            S.replicas[r].check_preemption = 1


@jit_cold
def update_ranks(S, queue_index, now_s, rank):
    """Rank all requests of a queue again, as time has changed their keys."""
    queue = S.queues[queue_index]
    late = queue.overdue_at_s <= now_s
    queue.overdue_at_s = INFINITY
    for at in range(queue.offset, queue.offset + queue.length):
        slot = S.pool_slot[at]
        S.pool_key[at] = rank_key(S, now_s, slot, rank)
        note_starvation(S, queue_index, now_s, S.slots[slot])
    queue_rebuild(S, queue_index)
    if late and S.params[0].preempts == 1:
        _request_preemption_check(S, queue_index)


@jit_cold
def preempt(S, r, slot, now_s, rank):
    """Return an idle resident to the queue with its blocks freed, to be recomputed or swapped in."""
    rep, q, w = S.replicas[r], S.slots[slot], S.work[0]
    params = S.params[rep.side]
    if q.decoding == 1:
        remove(S, rep.idle, slot)
    else:
        drop_partial(S, r, slot)
    if params.prefix_caching == 1:
        computed = q.prompt + q.generated - 1 if q.decoding == 1 else q.prefilled
        q.cached_blocks = computed // params.block_size
        q.freed_before_cached = rep.freed_blocks + q.blocks - q.cached_blocks
        q.cached_replica = r
    rep.free_blocks += q.blocks
    rep.freed_blocks += q.blocks
    w.short_of_blocks = 1
    if params.swap == 1 and q.decoding == 1:
        q.swapped = 1
        w.swap_s += q.blocks * params.swap_s_per_block
    else:
        if q.decoding == 0 and w.plan_flags & RESTART_AS_DECODE != 0:
            total = q.prompt + q.output
            q.prompt = q.prefilled - q.generated
            q.output = total - q.prompt
        q.decoding = 0
        q.prefilled = 0
    q.blocks = 0
    S.running[r] -= 1
    S.counters[0].preemptions += 1
    q.last_preemption = S.counters[0].preemptions
    S.results[q.index].preemptions += 1
    to = rep.queue
    if rep.side == 1 and q.swapped == 0:  # Its prompt is recomputed on a replica that prefills.
        to = q.prefill_replica
        move_load(S, q, r, to)
    S.waiting[to] += 1
    requeue(S, to, now_s, slot, rank)


@jit_cold
def _order_victims(S, r, now_s, victim):
    """Sort idle residents into ``tmp_slot`` by (victim key, return number), the first victim last; return how many."""
    count = 0
    for at in range(_update_idle(S, r)):
        slot = _idle(S, r, at)
        key, return_number, i = key_of(S, victim, now_s, S.slots[slot]), S.slots[slot].return_number, count
        while i > 0 and (S.tmp_key[i - 1] > key or (S.tmp_key[i - 1] == key and S.tmp_tie[i - 1] > return_number)):
            S.tmp_key[i] = S.tmp_key[i - 1]
            S.tmp_tie[i] = S.tmp_tie[i - 1]
            S.tmp_slot[i] = S.tmp_slot[i - 1]
            i -= 1
        S.tmp_key[i] = key
        S.tmp_tie[i] = return_number
        S.tmp_slot[i] = slot
        count += 1
    return count


@jit_cold
def rank_residents(S, r, now_s, rank):
    """Store idle residents with a token since their admission in ``tmp_slot``, with their queue keys; return how many.

    Residents without a token since then are exempt: every admission yields at least one token, or two requests could
    preempt each other forever.
    """
    count = 0
    for i in range(_update_idle(S, r)):
        slot = _idle(S, r, i)
        if S.slots[slot].generated > S.slots[slot].generated_at_admission:
            S.tmp_key[count] = rank_key(S, now_s, slot, rank)
            S.tmp_tie[count] = S.slots[slot].return_number
            S.tmp_slot[count] = slot
            count += 1
    return count


@jit_cold
def _update_idle(S, r):
    """Bring the idle residents of a replica up to date; return how many there are."""
    g = S.replicas[r].idle
    for i in range(S.groups[g].members):
        update(S, g, member(S, g, i))
    return S.groups[g].members + S.replicas[r].partials


@jit
def _idle(S, r, i):
    g = S.replicas[r].idle
    members = S.groups[g].members
    return member(S, g, i) if i < members else S.partials[r, i - members]


@jit_cold
def claim_blocks(S, r, now_s, limit, reserve, rank, victim):
    """Give idle decodes their next blocks in order, preempting the last in order for them.

    The decodes that got their blocks are the first of ``tmp_slot``; half-computed prompts are skipped. Return how many.
    """
    rep = S.replicas[r]
    count = _order_victims(S, r, now_s, victim)
    last, claimed, i = count - 1, 0, 0
    while i <= last and claimed < limit:
        slot = S.tmp_slot[i]
        i += 1
        q, block_size = S.slots[slot], S.params[0].block_size
        if q.decoding == 0:
            continue
        need = max(0, (q.prompt + q.generated + block_size - 1) // block_size - q.blocks)
        while _short(S, r, need, reserve) and last >= i:
            preempt(S, r, S.tmp_slot[last], now_s, rank)
            last -= 1
        if _short(S, r, need, reserve):
            preempt(S, r, slot, now_s, rank)
            break
        rep.free_blocks -= need
        S.tmp_slot[claimed] = slot
        claimed += 1
    return claimed


@jit
def _short(S, r, need, reserve):
    """Return whether blocks are lacking; the last request of a replica needs no reserve except by Vidur's rule."""
    free = S.replicas[r].free_blocks
    applies = S.running[r] > 1 or S.work[0].plan_flags & FORM_ONCE != 0
    return free < need or (applies and free < reserve)


@jit_cold
def split_off(S, source, target, count):
    """Move the first ``count`` slots of ``tmp_slot`` from one group into another."""
    for i in range(count):
        slot = S.tmp_slot[i]
        remove(S, source, slot)
        join(S, target, slot)


@jit_cold
def preempt_for_partial(S, r, need, slot, now_s, rank, victim):
    """Preempt until ``need`` blocks are free; return False if the half-computed prompt itself was preempted."""
    rep = S.replicas[r]
    while rep.free_blocks < need:
        count = _order_victims(S, r, now_s, victim)
        last = S.tmp_slot[count - 1]
        preempt(S, r, last, now_s, rank)
        if last == slot:
            return False
    return True


@jit
def blocks_to_admit(S, r, slot, chunk, memory):
    """Return the blocks for a request at its admission, -1 if it must wait."""
    rep, q = S.replicas[r], S.slots[slot]
    params = S.params[rep.side]
    peak = _peak_tokens(S, r, slot) if params.needs_peak == 1 else 0
    blocks = memory(
        q.context, chunk, predicted_total(S, q.index, q.generated), params.max_model_len, params.block_size,
        rep.free_blocks, params.total_blocks, params.watermark_blocks, S.running[r], peak,
    )  # fmt: skip
    if blocks < 0:
        return -1
    minimum = q.context if q.swapped == 1 else chunk
    blocks = max(blocks, (minimum + params.block_size - 1) // params.block_size)
    if blocks > rep.free_blocks:
        S.counters[0].problem = BAD_MEMORY if rep.side == 0 else BAD_DECODE_MEMORY
        S.counters[0].problem_value = blocks
        return -1
    return blocks


@jit
def blocks_when_idle(S, side, context, chunk, predicted, peak, memory):
    """Return the blocks that an idle replica of a side gives a request; -1: none."""
    params = S.params[side]
    return memory(
        context, chunk, predicted, params.max_model_len, params.block_size, params.total_blocks, params.total_blocks,
        params.watermark_blocks, 0, peak,
    )  # fmt: skip


@jit_cold
def _peak_tokens(S, r, candidate):
    """Return the maximum of KV tokens in use if all predicted lengths are exact (Past-Future, ASPLOS '25)."""
    rep, stride, w = S.replicas[r], S.params[0].stride, S.work[0]
    count = _insert_remaining(S, 0, candidate)
    count = _insert_group(S, count, rep.idle)
    for i in range(rep.partials + rep.incoming):  # A replica has either half-computed prompts or incoming transfers.
        count = _insert_remaining(S, count, S.partials[r, i])
    for k in range(rep.in_flight):
        f = r * stride + (rep.first_flight + k) % stride
        count = _insert_group(S, count, S.flights[f].group)
        for i in range(S.flights[f].prompts):
            count = _insert_remaining(S, count, S.prompt_slot[f, i])
    if w.decodes > 0:
        count = _insert_group(S, count, S.flights[w.flight].group)
    for i in range(w.prompts):
        count = _insert_remaining(S, count, S.prompt_slot[w.flight, i])
    in_use, peak = 0, 0  # ``tmp_tie`` holds tokens in use and ``tmp_slot`` remaining tokens here
    for i in range(count):
        in_use += S.tmp_tie[i]
        peak = max(peak, in_use + S.tmp_slot[i] * (i + 1))
    return peak


@jit_cold
def _insert_group(S, count, g):
    for i in range(S.groups[g].members):
        slot = member(S, g, i)
        update(S, g, slot)
        count = _insert_remaining(S, count, slot)
    return count


@jit_cold
def _insert_remaining(S, count, slot):
    """Insert (tokens in use, predicted remaining tokens) in (``tmp_tie``, ``tmp_slot``), the most remaining first."""
    q = S.slots[slot]
    remaining = remaining_tokens(predicted_total(S, q.index, q.generated), q.generated)
    i = count
    while i > 0 and S.tmp_slot[i - 1] < remaining:
        S.tmp_slot[i] = S.tmp_slot[i - 1]
        S.tmp_tie[i] = S.tmp_tie[i - 1]
        i -= 1
    S.tmp_slot[i] = remaining
    S.tmp_tie[i] = q.prompt + q.generated
    return count + 1
