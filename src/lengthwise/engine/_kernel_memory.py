"""When memory runs out: who is evicted, and in which order decodes claim their blocks."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import kernel_layout
from lengthwise.engine._kernel_groups import drop_partial, join, leave, member, settle
from lengthwise.engine._kernel_queue import (
    first_sent,
    key_of,
    note_overdue,
    predicted_total,
    queue_push,
    queue_rebuild,
    rank_key,
    send_followers,
)
from lengthwise.policy import contracts
from lengthwise.schema.records import Status

OUTPUT_WEIGHT = contracts.SERVICE_OUTPUT_WEIGHT
TIMED_OUT = int(Status.TIMED_OUT)
INFINITY = float("inf")


@jit
def end_request(S, r, slot, status, now_s):
    """Books the end of a request, frees its slot, and sends who waited for that."""
    q = S.slots[slot]
    if q.reserved > 0:
        release_all(S, q)
    result = S.results[q.index]
    result.status = status
    result.output_tokens = max(0, q.generated + q.prompt - S.prompt[q.index])
    result.queued_for_s = q.queued_for_s + (now_s - q.queued_s if q.waiting == 1 else 0.0)
    S.replicas[r].ended_since += 1
    if S.par[0].central == 0:
        S.tokens[r] -= outstanding(S.prompt[q.index], S.predicted[q.index])
    if S.par[0].charges == 1:
        settle_service(S, q, result.output_tokens)
    S.free_slots[S.ctr[0].free_slots] = slot
    S.ctr[0].free_slots += 1
    release(S, q.index, status, now_s)


@jit_cold
def release_all(S, q):
    """The blocks where the request was prefilled are free."""
    home = S.replicas[q.home]
    home.free_blocks += q.reserved
    home.total_released += q.reserved
    S.touched[q.home] = 1
    q.reserved = 0


@jit_cold
def charge(S, q):
    """A tenant pays for the prompt and the predicted output when the request is first admitted."""
    q.charged = S.predicted[q.index]
    S.service[q.tenant] += q.prompt + OUTPUT_WEIGHT * q.charged
    _stops_waiting(S, q.tenant)


@jit_cold
def settle_service(S, q, produced):
    """The tenant is charged for what came instead of what was predicted."""
    if q.admission >= 0:
        S.service[q.tenant] += OUTPUT_WEIGHT * (produced - q.charged)
    else:
        _stops_waiting(S, q.tenant)


@jit_cold
def _stops_waiting(S, tenant):
    """One fewer of a tenant's requests has yet to be admitted; who is the last to wait sets the level."""
    S.backlog[tenant] -= 1
    if S.backlog[tenant] == 0:
        S.ctr[0].last_service = S.service[tenant]


@jit_cold
def lift(S, tenant):
    """A tenant that comes to wait starts level with those who do: no credit from absence (VTC)."""
    if S.backlog[tenant] == 0:
        least = float("inf")
        for t in range(len(S.service)):
            if S.backlog[t] > 0:
                least = min(least, S.service[t])
        if least == float("inf"):
            least = S.ctr[0].last_service
        S.service[tenant] = max(S.service[tenant], least)
    S.backlog[tenant] += 1


@jit
def outstanding(prompt, predicted):
    """Tokens that a router counts for a request: its prompt and its predicted output, rounded up."""
    whole = int(predicted)
    if whole < predicted:
        whole += 1
    return prompt + whole


@jit
def release(S, i, status, now_s):
    """Request ``i`` has ended: in a closed loop the next one is sent, else those that come after it."""
    ctr = S.ctr[0]
    if S.par[0].closed == 1 and ctr.released < len(S.arrival_s):
        S.arrival_s[ctr.released] = now_s
        ctr.released += 1
        if ctr.released == ctr.next + 1:
            to_front(S)
    if S.par[0].follows == 1:
        send_followers(S, i, status, now_s)
        to_front(S)


@jit
def to_front(S):
    """Who is sent first goes to the front as soon as it is there, and enters when it has passed it."""
    ctr, par = S.ctr[0], S.par[0]
    i = first_sent(S)
    if i >= 0:
        free_s = max(S.arrival_s[i], ctr.front_free_s) + par.front_queue_s
        ctr.entry_s = free_s + par.front_request_s
    else:
        ctr.entry_s = INFINITY


@jit
def expire(S, r, now_s):
    """Ends idle and waiting requests whose client has given up."""
    rep = S.replicas[r]
    if rep.deadline_s <= now_s:
        _expire_idle(S, r, now_s)
    if S.queues[rep.queue].deadline_s <= now_s:
        _expire_waiting(S, r, now_s)


@jit_cold
def _expire_idle(S, r, now_s):
    rep, timeout_s = S.replicas[r], S.par[0].timeout_s
    i = 0
    while i < S.groups[rep.idle].members:
        slot = member(S, rep.idle, i)
        if S.slots[slot].arrival_s + timeout_s <= now_s:
            leave(S, rep.idle, slot)
            _free(S, r, slot, now_s)
            i = 0
        else:
            i += 1
    for i in range(rep.partials - 1, -1, -1):
        slot = S.partials[r, i]
        if S.slots[slot].arrival_s + timeout_s <= now_s:
            drop_partial(S, r, slot)
            _free(S, r, slot, now_s)
    rep.deadline_s = _next_deadline(S, r)


@jit_cold
def _free(S, r, slot, now_s):
    S.replicas[r].free_blocks += S.slots[slot].blocks
    S.replicas[r].total_released += S.slots[slot].blocks
    S.running[r] -= 1
    end_request(S, r, slot, TIMED_OUT, now_s)


@jit_cold
def _next_deadline(S, r):
    """When the first of the replica's residents will give up."""
    rep, par = S.replicas[r], S.par[0]
    earliest = _first_arrival(S, rep.idle)
    for i in range(rep.partials):
        earliest = min(earliest, S.slots[S.partials[r, i]].arrival_s)
    for k in range(rep.in_flight):
        f = r * par.stride + (rep.first_flight + k) % par.stride
        earliest = min(earliest, _first_arrival(S, S.flights[f].group))
        for i in range(S.flights[f].prompts):
            earliest = min(earliest, S.slots[S.prompt_slot[f, i]].arrival_s)
    return earliest + par.timeout_s


@jit_cold
def _first_arrival(S, g):
    earliest = float("inf")
    for i in range(S.groups[g].members):
        earliest = min(earliest, S.slots[member(S, g, i)].arrival_s)
    return earliest


@jit_cold
def _expire_waiting(S, r, now_s):
    rep, timeout_s = S.replicas[r], S.par[0].timeout_s
    queue = S.queues[rep.queue]
    kept, earliest = 0, float("inf")
    for i in range(queue.length):
        at = queue.offset + i
        slot = S.pool_slot[at]
        if S.slots[slot].arrival_s + timeout_s <= now_s:
            S.waiting[rep.queue] -= 1
            end_request(S, r, slot, TIMED_OUT, now_s)
            continue
        earliest = min(earliest, S.slots[slot].arrival_s)
        to = queue.offset + kept
        S.pool_key[to] = S.pool_key[at]
        S.pool_index[to] = S.pool_index[at]
        S.pool_slot[to] = slot
        kept += 1
    queue.length = kept
    queue.deadline_s = earliest + timeout_s
    queue_rebuild(S, rep.queue)


FORM_ONCE, RESTART_AS_DECODE = contracts.FORM_ONCE, contracts.RESTART_AS_DECODE


@jit
def enqueue(S, q, now_s, slot, rank):
    """Puts a request that comes back into a queue under its rank; it waits from now on."""
    S.slots[slot].queued_s = now_s
    line_up(S, q, now_s, slot, rank)


@jit_cold
def change_load(S, q, r, to):
    """A request is another replica's from now on, for routers; that one has something to look at."""
    tokens = outstanding(S.prompt[q.index], S.predicted[q.index])
    S.tokens[r] -= tokens
    S.tokens[to] += tokens
    S.touched[to] = 1


@jit
def line_up(S, q, now_s, slot, rank):
    """Puts a request into a queue under its rank; it waits since ``queued_s``, before the front and in a bin too."""
    request = S.slots[slot]
    request.waiting = 1
    key = rank_key(S, now_s, slot, rank)
    note_overdue(S, q, now_s, request)
    queue_push(S, q, key, request.index, slot)
    deadline_s = request.arrival_s + S.par[0].timeout_s
    S.queues[q].deadline_s = min(S.queues[q].deadline_s, deadline_s)
    if S.par[0].takes_over == 1 and S.pool_slot[S.queues[q].offset] == slot:
        decide(S, q)


@jit_cold
def decide(S, q):
    """All replicas of a queue look for takeovers at their next step."""
    for r in range(S.par[0].replicas):
        if S.replicas[r].queue == q:
            S.replicas[r].decide = 1


@jit_cold
def rank_again(S, q, now_s, rank):
    """Keys that time has changed: ranks a whole queue anew."""
    queue = S.queues[q]
    late = queue.overdue_s <= now_s
    queue.overdue_s = INFINITY
    for at in range(queue.offset, queue.offset + queue.length):
        slot = S.pool_slot[at]
        S.pool_key[at] = rank_key(S, now_s, slot, rank)
        note_overdue(S, q, now_s, S.slots[slot])
    queue_rebuild(S, q)
    if late and S.par[0].takes_over == 1:
        decide(S, q)


@jit_cold
def evict(S, r, slot, now_s, rank):
    """Sends an idle resident back to the queue, its blocks freed, to be recomputed or swapped in."""
    rep, q, w = S.replicas[r], S.slots[slot], S.work[0]
    par = S.par[rep.side]
    if q.decoding == 1:
        leave(S, rep.idle, slot)
    else:
        drop_partial(S, r, slot)
    if par.finds_again == 1:
        computed = q.prompt + q.generated - 1 if q.decoding == 1 else q.prefilled
        q.retained = computed // par.block_size
        q.kept_mark = rep.total_released + q.blocks - q.retained
        q.kept_on = r
    rep.free_blocks += q.blocks
    rep.total_released += q.blocks
    w.evicted = 1
    if par.swap == 1 and q.decoding == 1:
        q.swapped = 1
        w.swap_s += q.blocks * par.swap_s_per_block
    else:
        if q.decoding == 0 and w.plan_flags & RESTART_AS_DECODE != 0:
            total = q.prompt + q.output
            q.prompt = q.prefilled - q.generated
            q.output = total - q.prompt
        q.decoding = 0
        q.prefilled = 0
    q.blocks = 0
    S.running[r] -= 1
    S.ctr[0].evictions += 1
    q.eviction = S.ctr[0].evictions
    S.results[q.index].preemptions += 1
    to = rep.queue
    if rep.side == 1 and q.swapped == 0:  # to be prefilled again, where that is done
        to = q.home
        change_load(S, q, r, to)
    S.waiting[to] += 1
    enqueue(S, to, now_s, slot, rank)


@jit_cold
def order_to_leave(S, r, now_s, leave_rank):
    """Idle residents in ``scratch``, those who leave first last; returns how many."""
    count = 0
    for i in range(_stable(S, r)):
        slot = _idle(S, r, i)
        count = _insert(S, count, slot, key_of(S, leave_rank, now_s, S.slots[slot]))
    return count


@jit_cold
def rank_residents(S, r, now_s, rank):
    """Idle residents that have got on, with their keys in the queue, in ``scratch``, unsorted; how many.

    Whoever has produced nothing since it was admitted is not among them: every admission is worth a
    token at least, or two requests could take turns for ever.
    """
    count = 0
    for i in range(_stable(S, r)):
        slot = _idle(S, r, i)
        if S.slots[slot].generated > S.slots[slot].entered:
            S.scratch_key[count] = rank_key(S, now_s, slot, rank)
            S.scratch_tie[count] = S.slots[slot].slot_index
            S.scratch_slot[count] = slot
            count += 1
    return count


@jit_cold
def _stable(S, r):
    """How many are idle on a replica, all brought up to date."""
    g = S.replicas[r].idle
    for i in range(S.groups[g].members):
        settle(S, g, member(S, g, i))
    return S.groups[g].members + S.replicas[r].partials


@jit
def _idle(S, r, i):
    g = S.replicas[r].idle
    members = S.groups[g].members
    return member(S, g, i) if i < members else S.partials[r, i - members]


@jit_cold
def _insert(S, count, slot, key):
    """Insertion by (key, seat): rare, and nearly sorted where it is not."""
    slot_index, i = S.slots[slot].slot_index, count
    while i > 0 and (S.scratch_key[i - 1] > key or (S.scratch_key[i - 1] == key and S.scratch_tie[i - 1] > slot_index)):
        S.scratch_key[i] = S.scratch_key[i - 1]
        S.scratch_tie[i] = S.scratch_tie[i - 1]
        S.scratch_slot[i] = S.scratch_slot[i - 1]
        i -= 1
    S.scratch_key[i] = key
    S.scratch_tie[i] = slot_index
    S.scratch_slot[i] = slot
    return count + 1


@jit_cold
def claim_blocks(S, r, now_s, limit, reserve, rank, leave_rank):
    """Decodes claim their next blocks in order, the last in order are evicted for them.

    Those who claimed stand first in ``scratch`` (half-computed prompts left out); returns how many.
    """
    rep = S.replicas[r]
    count = order_to_leave(S, r, now_s, leave_rank)
    last, claimed, i = count - 1, 0, 0
    while i <= last and claimed < limit:
        slot = S.scratch_slot[i]
        i += 1
        if S.slots[slot].decoding == 0:
            continue
        need = blocks_needed(S, slot)
        while _short(S, r, need, reserve) and last >= i:
            evict(S, r, S.scratch_slot[last], now_s, rank)
            last -= 1
        if _short(S, r, need, reserve):
            evict(S, r, slot, now_s, rank)
            break
        rep.free_blocks -= need
        S.scratch_slot[claimed] = slot
        claimed += 1
    return claimed


@jit
def _short(S, r, need, reserve):
    """Whether blocks lack; a spare one is not asked of the last on a replica, but by Vidur's rule."""
    free = S.replicas[r].free_blocks
    asked = S.running[r] > 1 or S.work[0].plan_flags & FORM_ONCE != 0
    return free < need or (asked and free < reserve)


@jit
def blocks_needed(S, slot):
    """Blocks that a settled decode lacks for its next token: 0 or 1."""
    q, block_size = S.slots[slot], S.par[0].block_size
    return max(0, (q.prompt + q.generated + block_size - 1) // block_size - q.blocks)


@jit_cold
def split_off(S, source, target, count):
    """Moves the first ``count`` slots of ``scratch`` from one group into another."""
    for i in range(count):
        slot = S.scratch_slot[i]
        leave(S, source, slot)
        join(S, target, slot)


@jit_cold
def free_partial_room(S, r, need, slot, now_s, rank, leave_rank):
    """Evicts until ``need`` blocks are free; False when the asking prompt itself had to leave."""
    rep = S.replicas[r]
    while rep.free_blocks < need:
        count = order_to_leave(S, r, now_s, leave_rank)
        victim = S.scratch_slot[count - 1]
        evict(S, r, victim, now_s, rank)
        if victim == slot:
            return False
    return True


BAD_MEMORY, BAD_DECODE_MEMORY = kernel_layout.BAD_MEMORY, kernel_layout.BAD_DECODE_MEMORY


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
    for i in range(rep.partials + rep.incoming):  # a replica has one kind of them
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
