"""KV blocks at admission, preemption, timeout and end of requests; entry into queues; tenants' service."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import kernel_layout
from lengthwise.engine._kernel_groups import (
    is_dummy,
    join,
    member,
    needed_blocks,
    overlaps,
    remove,
    remove_partial,
    settled_tokens,
    skipped_blocks,
    update,
)
from lengthwise.engine._kernel_prefix import RADIX, cache_blocks, release_blocks
from lengthwise.engine._kernel_queue import (
    key_of,
    next_request,
    note_overdue_time,
    predicted_total,
    queue_push,
    queue_rebuild,
    rank_key,
    release_children,
)
from lengthwise.engine._kernel_tiers import end_offloading, is_loaded, leave_loading
from lengthwise.policy import contracts
from lengthwise.schema import deployment
from lengthwise.schema.deployment import SCHEDULE_POLICIES
from lengthwise.schema.records import Status

OUTPUT_WEIGHT = contracts.SERVICE_OUTPUT_WEIGHT
FORM_ONCE, RESTART_AS_DECODE = contracts.FORM_ONCE, contracts.RESTART_AS_DECODE
TIMED_OUT = int(Status.TIMED_OUT)
BAD_MEMORY, BAD_DECODE_MEMORY = kernel_layout.BAD_MEMORY, kernel_layout.BAD_DECODE_MEMORY
INFINITY = float("inf")
UNSERVED, EXCLUDED, IN_STEP = -1, -2, -3
aligned_chunk = jit(deployment.aligned_chunk)
LOF = SCHEDULE_POLICIES.index("lof")


@jit
def end_request(S, r, slot, status, now_s):
    q = S.slots[slot]
    if q.transfer_blocks > 0:
        release_transfer_blocks(S, q)
    result = S.results[q.index]
    result.status = status
    result.output_tokens = max(0, q.generated + q.prompt - S.prompt[q.index])
    result.queued_for_s = q.queued_for_s + (now_s - q.queued_at_s if q.waiting == 1 else 0.0)
    S.replicas[r].ended_since_admit += 1
    S.replicas[r].finished += 1
    if S.params[0].central_queue == 0:
        S.outstanding_tokens[r] -= outstanding(S.prompt[q.index], S.predicted[q.index])
    if S.params[0].tracks_service == 1:
        _correct_service(S, q, result.output_tokens)
    S.free_slots[S.counters[0].free_slots] = slot
    S.counters[0].free_slots += 1
    send_next(S, q.index, status, now_s)


@jit
def free_blocks_of(S, r, q, has_ended):
    """Free the blocks of a request that has ended or is preempted. Call ``update`` first for a member of a group."""
    if S.params[0].prefix_caching > 0 and q.blocks > 0 and S.replicas[r].side != 1:
        if has_ended or S.params[0].prefix_caching != RADIX:
            cache_blocks(S, r, q, q.prompt + q.generated - 1 - q.unhashed if q.decoding == 1 else q.prefilled)
        release_blocks(S, r, q, q.blocks)
    else:
        S.replicas[r].free_blocks += q.blocks
    q.blocks = 0
    q.skipped = 0
    q.place = -1
    S.replicas[r].batch_is_full = 0
    S.replicas[r].reserved_blocks -= q.reserved
    q.reserved = 0


@jit_cold
def release_transfer_blocks(S, q):
    if S.params[0].prefix_caching > 0:
        release_blocks(S, q.prefill_replica, q, q.transfer_blocks)
    else:
        S.replicas[q.prefill_replica].free_blocks += q.transfer_blocks
    S.pending[q.prefill_replica] = 1
    q.transfer_blocks = 0


@jit_cold
def charge(S, q):
    """Charge a tenant for a request's prompt and predicted output when the request is admitted for the first time."""
    q.charged_tokens = S.predicted[q.index]
    S.service[q.tenant] += q.prompt + OUTPUT_WEIGHT * q.charged_tokens
    _leave_backlog(S, q.tenant)


@jit_cold
def _correct_service(S, q, output_tokens):
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
    """Count a waiting request of a tenant.

    If the tenant had none before, raise the tenant's service to the lowest service of the tenants with waiting requests
    (VTC).
    """
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
    """Return the load of a request for routers: prompt tokens plus predicted output tokens, rounded up."""
    return prompt + _round_up(predicted)


@jit
def remaining_tokens(predicted, generated):
    """Return how many predicted tokens a request has yet to produce, rounded up. The result is at least 1."""
    return max(1, _round_up(predicted) - generated)


@jit
def send_next(S, i, status, now_s):
    """Send the requests that waited for the end of ``i``: the next one of a closed loop, and the children of ``i``."""
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
    """Set ``entry_s`` to the time at which the next request leaves the front end."""
    counters, params = S.counters[0], S.params[0]
    i = next_request(S)
    if i >= 0:
        free_s = max(S.arrival_s[i], counters.front_free_s) + params.front_serial_s
        counters.entry_s = free_s + params.front_request_s
    else:
        counters.entry_s = INFINITY


@jit
def expire(S, r, now_s):
    """End the requests of a replica whose timeout has passed (TIMED_OUT), except for requests in a step.

    Abort the KV transfers that wait for too long.
    """
    rep = S.replicas[r]
    if rep.deadline_s <= now_s:
        _expire_idle(S, r, now_s)
    if S.queues[rep.queue].deadline_s <= now_s:
        _expire_waiting(S, r, now_s)


@jit_cold
def _expire_idle(S, r, now_s):
    rep, params = S.replicas[r], S.params[0]
    i = 0
    while i < S.groups[rep.idle_group].members:
        slot = member(S, rep.idle_group, i)
        if S.slots[slot].arrival_s + params.timeout_s <= now_s:
            remove(S, rep.idle_group, slot)
            _time_out(S, r, slot, now_s)
            i = 0
        else:
            i += 1
    for i in range(rep.partials - 1, -1, -1):
        slot = S.partials[r, i]
        if S.slots[slot].arrival_s + params.timeout_s <= now_s:
            remove_partial(S, r, slot)
            _time_out(S, r, slot, now_s)
    first = _first_arrival(S, rep.idle_group)
    i = 0
    while i < S.tiers[r].loading:
        slot = S.loading[r, i]
        if is_loaded(S, S.slots[slot]) and S.slots[slot].arrival_s + params.timeout_s <= now_s:
            leave_loading(S, r, i)
            S.running[r] += 1  # It is no resident, but ``_time_out`` subtracts one.
            S.waiting[rep.queue] -= 1
            _time_out(S, r, slot, now_s)
        else:
            first = min(first, S.slots[slot].arrival_s)
            i += 1
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
    end_offloading(S, r, S.slots[slot])
    free_blocks_of(S, r, S.slots[slot], True)
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
    remaining, first_s = 0, INFINITY
    for i in range(queue.length):
        at = queue.offset + i
        slot = S.queued_slot[at]
        q = S.slots[slot]
        is_late = q.arrival_s + timeout_s <= now_s
        if not is_late and q.transfer_blocks > 0:
            abort_s = q.last_token_s + S.params[1].transfer_timeout_s
            if abort_s <= now_s:
                release_transfer_blocks(S, q)
                q.decoding = q.prefilled = 0
                q.prefill_replica = -1
                is_late = S.params[1].recomputes == 0
            else:
                first_s = min(first_s, abort_s)
        if is_late:
            S.waiting[rep.queue] -= 1
            end_offloading(S, r, S.slots[slot])
            end_request(S, r, slot, TIMED_OUT, now_s)
            continue
        first_s = min(first_s, q.arrival_s + timeout_s)
        to = queue.offset + remaining
        S.queued_key[to] = S.queued_key[at]
        S.queued_index[to] = S.queued_index[at]
        S.queued_slot[to] = slot
        remaining += 1
    queue.length = remaining
    queue.deadline_s = first_s
    queue_rebuild(S, rep.queue)


@jit
def requeue(S, queue_index, now_s, slot, rank):
    """Put a request into a queue again. The request's new wait starts now."""
    S.slots[slot].queued_at_s = now_s
    enqueue(S, queue_index, now_s, slot, rank)


@jit_cold
def move_load(S, q, r, to):
    """Count a request's outstanding tokens at replica ``to`` instead of ``r``, and mark ``to`` to be scheduled."""
    tokens = outstanding(S.prompt[q.index], S.predicted[q.index])
    S.outstanding_tokens[r] -= tokens
    S.outstanding_tokens[to] += tokens
    S.pending[to] = 1


@jit
def enqueue(S, queue_index, now_s, slot, rank):
    """Put a request into a queue by its rank. The caller sets ``queued_at_s``, as the wait may have begun in a bin."""
    request = S.slots[slot]
    request.waiting = 1
    key = rank_key(S, now_s, slot, rank)
    note_overdue_time(S, queue_index, now_s, request)
    tie = request.index
    if S.params[0].sglang == 1:  # It admits requests with equal keys in the order of entry.
        S.counters[0].entries += 1
        tie = S.counters[0].entries
        if S.params[0].schedule_policy > 0:  # Its own orders instead of a rank.
            key = -float(S.max_tokens[request.index]) if S.params[0].schedule_policy == LOF else 0.0
    queue_push(S, queue_index, key, tie, slot)
    deadline_s = request.arrival_s + S.params[0].timeout_s
    S.queues[queue_index].deadline_s = min(S.queues[queue_index].deadline_s, deadline_s)
    if S.params[0].preempts_by_policy == 1 and S.queued_slot[S.queues[queue_index].offset] == slot:
        _flag_preemption_check(S, queue_index)


@jit_cold
def _flag_preemption_check(S, queue_index):
    for r in range(S.params[0].replicas):
        if S.replicas[r].queue == queue_index:
            S.replicas[r].check_preemption = 1


@jit_cold
def update_ranks(S, queue_index, now_s, rank):
    queue = S.queues[queue_index]
    late = queue.overdue_at_s <= now_s
    queue.overdue_at_s = INFINITY
    for at in range(queue.offset, queue.offset + queue.length):
        slot = S.queued_slot[at]
        S.queued_key[at] = rank_key(S, now_s, slot, rank)
        note_overdue_time(S, queue_index, now_s, S.slots[slot])
    queue_rebuild(S, queue_index)
    if late and S.params[0].preempts_by_policy == 1:
        _flag_preemption_check(S, queue_index)


@jit
def note_admission(S, r, slot, now_s, rank):
    """Count a request that has left the queue among the residents, and charge its tenant at the first admission."""
    rep, q = S.replicas[r], S.slots[slot]
    if q.admission < 0 and S.params[0].tracks_service == 1:
        charge(S, q)
        if S.params[0].rank_every_step == 1:
            update_ranks(S, rep.queue, now_s, rank)
    S.counters[0].admissions += 1
    q.admission = S.counters[0].admissions
    q.waiting = 0
    q.generated_at_admission = q.generated
    q.queued_for_s += now_s - q.queued_at_s
    result = S.results[q.index]
    if result.scheduled_s != result.scheduled_s:
        result.scheduled_s = now_s
    result.replica = r
    S.running[r] += 1
    S.waiting[rep.queue] -= 1
    rep.deadline_s = min(rep.deadline_s, q.arrival_s + S.params[0].timeout_s)


@jit
def add_prompt(S, slot, chunk):
    """Put ``chunk`` tokens of a prompt into the step in ``work``."""
    w = S.work[0]
    S.prompt_slot[w.flight, w.prompts] = slot
    S.prompt_chunk[w.flight, w.prompts] = chunk
    w.prompts += 1
    w.seqs += 1
    w.prompt_tokens += chunk
    w.longest = max(w.longest, chunk)


@jit_cold
def preempt(S, r, slot, now_s, rank):
    """Move a resident back to the queue. Its KV cache is recomputed or swapped in later.

    Under asynchronous scheduling, a resident whose last token is in flight does not return to the queue.
    """
    rep, q, w = S.replicas[r], S.slots[slot], S.work[0]
    params = S.params[rep.side]
    if q.last_flight >= 0:
        pass  # It is in ``State.ending``, and no longer in a group.
    elif q.decoding == 1:
        remove(S, rep.idle_group, slot)
        if rep.ahead == 1:  # With overlap: it has a decode in flight.
            q.blocks = max(q.blocks, (q.prompt + q.generated + params.block_size - 1) // params.block_size)
    elif q.place >= 0 and overlaps(S):  # Its prompt is complete, but it is in no group before its step ends.
        rep.joining -= 1
    else:
        remove_partial(S, r, slot)
    blocks = q.blocks
    if params.async_scheduling == 1 and not overlaps(S):
        ends_in_flight = _preempt_in_flight(S, r, slot)
    else:
        ends_in_flight = False
        free_blocks_of(S, r, q, False)
    w.preempted_for_blocks = 1
    rep.shortages += 1
    if params.swap == 1 and q.decoding == 1:
        q.swapped = 1
        w.swap_s += blocks * params.swap_s_per_block
    else:
        rep.preempted_tokens += q.prompt + q.generated if q.decoding == 1 else q.prefilled
        if q.decoding == 0 and w.plan_flags & RESTART_AS_DECODE != 0:
            total = q.prompt + q.output
            q.prompt = q.prefilled - q.generated
            q.output = total - q.prompt
        q.decoding = 0
        q.prefilled = 0
    S.running[r] -= 1
    S.counters[0].preemptions += 1
    q.last_preemption = S.counters[0].preemptions
    S.results[q.index].preemptions += 1
    if ends_in_flight:
        return
    to = rep.queue
    if rep.side == 1 and q.swapped == 0 and q.prefill_replica >= 0:  # It is recomputed where it was prefilled.
        to = q.prefill_replica
        move_load(S, q, r, to)
    S.waiting[to] += 1
    requeue(S, to, now_s, slot, rank)


@jit_cold
def _preempt_in_flight(S, r, slot):
    """Free the blocks of a resident that may be in the step in flight. Return whether that step gives its last token.

    A token in flight is not known yet, so that its block is not cached. The request gets it when the step ends.
    """
    rep, q = S.replicas[r], S.slots[slot]
    flight = r * S.params[0].stride + rep.first_flight
    decodes = rep.in_flight > 0 and q.decoding == 1 and q.prompt + q.generated > q.context + 1
    decodes = decodes and not (S.params[0].dp > 1 and is_dummy(S, flight))
    q.generated -= decodes
    free_blocks_of(S, r, q, False)
    q.generated += decodes
    if q.last_flight < 0 and q.decoding == 1 and q.generated == q.output:
        add_ending(S, r, slot, flight)
    elif decodes:
        q.last_token_s = S.flights[flight].end_s
    return q.last_flight >= 0


@jit_cold
def add_ending(S, r, slot, flight):
    """Note in ``State.ending`` that a request gets its last token when the step in flight ``flight`` ends."""
    rep = S.replicas[r]
    S.slots[slot].last_flight = flight
    S.ending[r, rep.ending] = slot
    rep.ending += 1


@jit
def aligned(S, q, start, tokens, boundary):
    """Return how many of a prompt's next ``tokens`` tokens a step computes, so that states can be cached."""
    params = S.params[0]
    junction = boundary * params.block_size
    return aligned_chunk(start, tokens, S.prompt[q.index], q.context, junction, params.block_size, params.token_budget)


@jit
def slots_end(S, tokens):
    """Return the number of a request's tokens that need KV memory in a step that computes up to ``tokens``."""
    params = S.params[0]
    return min(tokens + params.lookahead_tokens, params.max_model_len) if params.speculates == 1 else tokens


@jit_cold
def order_victims(S, r, now_s, victim):
    """Sort the idle residents into ``tmp_slot``, the next victim last. Return their number."""
    count = 0
    for at in range(_update_idle(S, r) + S.replicas[r].ending):
        slot = _idle(S, r, at)
        if S.slots[slot].blocks == 0:  # It has been preempted, and its last token is in flight.
            continue
        count = _insert_victim(S, count, slot, key_of(S, victim, now_s, S.slots[slot]))
    return count


@jit_cold
def rank_residents(S, r, now_s, rank):
    """Store the residents that may be preempted in ``tmp_slot`` and their ranks in ``tmp_key``. Return their number.

    Only residents that are idle and have produced a token since their admission may be preempted. Otherwise two
    requests could preempt each other forever.
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
    """Update the records of idle decodes. Return the number of idle residents, including half-computed prompts."""
    g = S.replicas[r].idle_group
    for i in range(S.groups[g].members):
        update(S, g, member(S, g, i))
    return S.groups[g].members + S.replicas[r].partials


@jit
def _idle(S, r, i):
    g = S.replicas[r].idle_group
    members, partials = S.groups[g].members, S.replicas[r].partials
    if i < members:
        return member(S, g, i)
    return S.partials[r, i - members] if i < members + partials else S.ending[r, i - members - partials]


@jit_cold
def claim_blocks(S, r, now_s, limit, reserve, rank, victim):
    """Give idle decodes the blocks for their next tokens, and preempt others while blocks are short.

    The order is that of victims, of which the last is preempted first. Return the number of decodes that got their
    blocks. Their slots are the first in ``tmp_slot``. Half-computed prompts get no blocks here.
    """
    rep = S.replicas[r]
    count = order_victims(S, r, now_s, victim)
    last, claimed, i = count - 1, 0, 0
    while i <= last and claimed < limit:
        slot = S.tmp_slot[i]
        i += 1
        q, block_size = S.slots[slot], S.params[0].block_size
        if q.decoding == 0 or q.last_flight >= 0:
            continue
        need = max(0, (q.prompt + q.generated + block_size - 1) // block_size - q.blocks)
        if S.params[0].hybrid == 1:
            need = needed_blocks(S, r, q, q.prompt + q.generated)
        while _blocks_short(S, r, need, reserve) and last >= i:
            preempt(S, r, S.tmp_slot[last], now_s, rank)
            last -= 1
        if _blocks_short(S, r, need, reserve):
            preempt(S, r, slot, now_s, rank)
            break
        rep.free_blocks -= need
        S.tmp_slot[claimed] = slot
        claimed += 1
    return claimed


@jit_cold
def take_in_order(S, r, now_s, victim):
    """Free the blocks before the windows of idle decodes, and take their next blocks, in the order of victims.

    With a prefix cache of states, the order is that of admission. The blocks suffice in any order, but which contents
    are evicted depends on it.
    """
    rep, block_size, count = S.replicas[r], S.params[0].block_size, 0
    g = rep.idle_group
    for at in range(S.groups[g].members):
        slot = member(S, g, at)
        q = S.slots[slot]
        computed = q.prompt + q.generated + S.groups[g].steps - q.join_step - 1
        if S.params[0].aligned == 1:
            acts = q.surplus != 0 or computed % block_size == 0 or (computed - 1) % block_size == 0
        else:
            acts = computed % block_size == 0 or skipped_blocks(S, settled_tokens(S, r, q, computed)) > q.skipped
        if acts:
            update(S, g, slot)
            key = float(q.admission) if S.params[0].aligned == 1 else key_of(S, victim, now_s, q)
            count = _insert_victim(S, count, slot, key)
    for i in range(count):
        q = S.slots[S.tmp_slot[i]]
        need = needed_blocks(S, r, q, q.prompt + q.generated)  # which frees blocks, too
        rep.free_blocks -= need


@jit
def _insert_victim(S, count, slot, key):
    """Insert a request into the ``count`` ones of ``tmp_slot``, the next victim last. Return their number."""
    return_number, i = S.slots[slot].return_number, count
    while i > 0 and (S.tmp_key[i - 1] > key or (S.tmp_key[i - 1] == key and S.tmp_tie[i - 1] > return_number)):
        S.tmp_key[i] = S.tmp_key[i - 1]
        S.tmp_tie[i] = S.tmp_tie[i - 1]
        S.tmp_slot[i] = S.tmp_slot[i - 1]
        i -= 1
    S.tmp_key[i] = key
    S.tmp_tie[i] = return_number
    S.tmp_slot[i] = slot
    return count + 1


@jit_cold
def serve_in_order(S, r, now_s, tokens, rank, victim):  # noqa: C901, PLR0912, PLR0915  one sequence
    """Give residents their blocks in the order of admission, and preempt while blocks are short (vLLM).

    The victim may have its blocks already. If a request is its own victim, no further resident is served. Return the
    number of decodes that got their blocks. Their slots are the first in ``tmp_slot``. The step may have up to
    ``tokens`` tokens.
    """
    rep, w, block_size, is_aligned = S.replicas[r], S.work[0], S.params[0].block_size, S.params[0].aligned == 1
    count, served, at, goes_on = _order_by_admission(S, r, now_s, victim), 0, 0, True
    while goes_on and at < count:
        slot = S.tmp_slot[at]
        q, chunk = S.slots[slot], 0
        if S.tmp_tie[at] == EXCLUDED or q.last_flight >= 0:
            at += 1
            continue
        end = q.prompt + q.generated
        if q.decoding == 0:
            chunk = min(q.context - q.prefilled, tokens - served - w.prompt_tokens, w.max_chunk)
            if chunk <= 0:
                break
            if is_aligned:
                chunk = aligned(S, q, q.prefilled, chunk, q.boundary)
                if chunk == 0:
                    at += 1
                    continue
            end = q.prefilled + chunk
        elif is_aligned and tokens - served - w.prompt_tokens <= 0:
            break
        need = max(0, (end + block_size - 1) // block_size - q.blocks)
        if is_aligned:
            need = needed_blocks(S, r, q, end)
        while goes_on and rep.free_blocks < need:
            worst = _worst(S, count)
            if S.tmp_tie[worst] == IN_STEP:
                _take_back_prompt(S, r, S.tmp_slot[worst])
            elif S.tmp_tie[worst] != UNSERVED:
                S.slots[S.tmp_slot[worst]].blocks += S.tmp_tie[worst]
                served -= 1
            preempt(S, r, S.tmp_slot[worst], now_s, rank)
            S.tmp_tie[worst] = EXCLUDED
            goes_on = worst != at
        if goes_on:
            rep.free_blocks -= need
            if q.decoding == 1:
                S.tmp_tie[at] = need
                served += 1
            else:
                S.tmp_tie[at] = IN_STEP
                q.blocks += need
                if S.params[0].prefix_caching == 1:
                    cache_blocks(S, r, q, end)
                remove_partial(S, r, slot)
                add_prompt(S, slot, chunk)
        at += 1
    claimed = 0
    for i in range(count):
        if S.tmp_tie[i] >= 0:
            S.tmp_slot[claimed] = S.tmp_slot[i]
            claimed += 1
    return served


@jit_cold
def _take_back_prompt(S, r, slot):
    """Take a prompt out of the step in ``work``, so that it can be preempted."""
    w, rep, i = S.work[0], S.replicas[r], 0
    while S.prompt_slot[w.flight, i] != slot:
        i += 1
    w.prompts -= 1
    w.seqs -= 1
    w.prompt_tokens -= S.prompt_chunk[w.flight, i]
    for k in range(i, w.prompts):
        S.prompt_slot[w.flight, k] = S.prompt_slot[w.flight, k + 1]
        S.prompt_chunk[w.flight, k] = S.prompt_chunk[w.flight, k + 1]
    S.partials[r, rep.partials] = slot
    rep.partials += 1


@jit_cold
def _order_by_admission(S, r, now_s, victim):
    """Sort the idle residents into ``tmp_slot`` by admission, and return their number. ``tmp_key`` has victim keys.

    Without ``long_prefill_token_threshold``, the half-computed prompt is last, even if a swapped request came after it.
    ``tmp_tie`` is ``UNSERVED``. Later it becomes the number of blocks that a decode gets, ``IN_STEP`` for prompts of
    the step, or ``EXCLUDED`` for preempted residents, which cannot be victims.
    """
    count, threshold = 0, S.params[0].long_prefill_token_threshold
    for at in range(_update_idle(S, r) + S.replicas[r].ending):
        slot, i = _idle(S, r, at), count
        q = S.slots[slot]
        if q.blocks == 0:  # It has been preempted, and its last token is in flight.
            continue
        moves = q.decoding == 1 or threshold > 0 or S.params[0].aligned == 1
        while moves and i > 0 and S.slots[S.tmp_slot[i - 1]].admission > q.admission:
            S.tmp_slot[i] = S.tmp_slot[i - 1]
            S.tmp_key[i] = S.tmp_key[i - 1]
            i -= 1
        S.tmp_slot[i] = slot
        S.tmp_key[i] = key_of(S, victim, now_s, q)
        S.tmp_tie[count] = UNSERVED
        count += 1
    return count


@jit_cold
def _worst(S, count):
    """Return the index of the next victim: the largest ``tmp_key``, among equal keys the latest arrival."""
    worst = -1
    for i in range(count):
        if S.tmp_tie[i] == EXCLUDED:
            continue
        later = worst >= 0 and S.slots[S.tmp_slot[i]].arrival_s > S.slots[S.tmp_slot[worst]].arrival_s
        if worst < 0 or S.tmp_key[i] > S.tmp_key[worst] or (S.tmp_key[i] == S.tmp_key[worst] and later):
            worst = i
    return worst


@jit
def _blocks_short(S, r, need, reserve):
    """Return whether blocks are short. A replica's only request needs no ``reserve``, except with FORM_ONCE (Vidur)."""
    free = S.replicas[r].free_blocks
    applies = S.running[r] > 1 or S.work[0].plan_flags & FORM_ONCE != 0
    return free < need or (applies and free < reserve)


@jit_cold
def split_off(S, source, target, count):
    for i in range(count):
        slot = S.tmp_slot[i]
        remove(S, source, slot)
        join(S, target, slot)


@jit_cold
def preempt_for_partial(S, r, need, slot, now_s, rank, victim):
    """Preempt until ``need`` blocks are free for a half-computed prompt. Return False if that prompt was preempted."""
    rep = S.replicas[r]
    while rep.free_blocks < need:
        count = order_victims(S, r, now_s, victim)
        last = S.tmp_slot[count - 1]
        preempt(S, r, last, now_s, rank)
        if last == slot:
            return False
    return True


@jit
def blocks_to_admit(S, r, slot, chunk, shared, memory):
    """Return the blocks that a request gets at its admission, or -1 if the request must wait.

    The memory policy counts two kinds of blocks as free, because the request takes no new ones for them: the ``shared``
    cached blocks, which other requests use, and the blocks that the request has from its own load.
    """
    rep, q = S.replicas[r], S.slots[slot]
    params = S.params[rep.side]
    if params.hybrid == 1:
        w = S.work[0]
        free_blocks = rep.free_blocks + shared
        return _blocks_in_groups(S, q.context, chunk, free_blocks, S.running[r], w.found_length, w.found_skipped)
    peak = _peak_tokens(S, r, slot) if params.needs_peak == 1 else 0
    if q.transfer_blocks == 0:  # No step computes the tokens that a KV transfer brings.
        chunk = slots_end(S, chunk)
    free_blocks = rep.free_blocks + shared + q.blocks
    blocks = memory(
        max(q.context, chunk), chunk, predicted_total(S, q.index, q.generated), params.max_model_len, params.block_size,
        free_blocks, params.total_blocks, params.watermark_blocks, S.running[r], peak,
    )  # fmt: skip
    if blocks < 0:
        return -1
    minimum = q.context if q.swapped == 1 else chunk
    blocks = max(blocks, (minimum + params.block_size - 1) // params.block_size, q.blocks)
    if blocks > free_blocks:
        S.counters[0].problem = BAD_DECODE_MEMORY if rep.side == 1 else BAD_MEMORY
        S.counters[0].problem_value = blocks
        return -1
    return blocks


@jit
def blocks_when_empty(S, side, context, chunk, predicted, peak, memory):
    """Return a request's blocks on an empty replica of a side (row of parameters), or -1 if it is refused."""
    params = S.params[side]
    if params.hybrid == 1:
        return _blocks_in_groups(S, context, chunk, params.total_blocks, 0, 0, 0)
    return memory(
        context, chunk, predicted, params.max_model_len, params.block_size, params.total_blocks, params.total_blocks,
        params.watermark_blocks, 0, peak,
    )  # fmt: skip


@jit_cold
def _blocks_in_groups(S, context, chunk, free_blocks, num_running, found, skipped):
    """Do as the memory policy ``paged_by_chunk``, with several KV cache groups of layers (``KvGroups.required``)."""
    params = S.params[0]
    blocks = params.attention_groups * ((chunk + params.block_size - 1) // params.block_size) + params.state_groups
    blocks -= params.local_groups * skipped
    states = 2 if found > 0 else 1
    if params.aligned == 1:
        in_full = (chunk + params.block_size - 1) // params.block_size
        blocks = (params.attention_groups - params.local_groups) * in_full + params.local_groups * states
    needed = (context + params.block_size - 1) // params.block_size
    required = (params.attention_groups - params.local_groups) * needed + params.state_groups
    local = states if params.aligned == 1 else max(min(needed, params.local_cap), found) - skipped
    left = free_blocks - max(blocks, required + params.local_groups * local)
    return -1 if left < 0 or (num_running > 0 and left < params.watermark_blocks) else blocks


@jit_cold
def _peak_tokens(S, r, candidate):
    rep, stride, w = S.replicas[r], S.params[0].stride, S.work[0]
    count = _insert_remaining(S, 0, candidate)
    count = _insert_group(S, count, rep.idle_group)
    for i in range(rep.partials):
        count = _insert_remaining(S, count, S.partials[r, i])
    for i in range(rep.incoming):
        count = _insert_remaining(S, count, S.partials[r, -1 - i])
    for i in range(S.tiers[r].loading):
        if S.loading[r, i] != candidate:
            count = _insert_remaining(S, count, S.loading[r, i])
    for k in range(rep.in_flight):
        f = r * stride + (rep.first_flight + k) % stride
        count = _insert_group(S, count, S.flights[f].group)
        for i in range(S.flights[f].prompts):
            count = _insert_remaining(S, count, S.prompt_slot[f, i])
    if w.decodes > 0:
        count = _insert_group(S, count, S.flights[w.flight].group)
    for i in range(w.prompts):
        count = _insert_remaining(S, count, S.prompt_slot[w.flight, i])
    in_use, peak = 0, 0  # Here ``tmp_tie`` has tokens in use and ``tmp_slot`` remaining tokens.
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
