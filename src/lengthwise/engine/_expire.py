"""Clients who give up, and the end of a request."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine._follow import first_sent, send_followers
from lengthwise.engine._groups import drop_partial, leave, member
from lengthwise.engine._queue import queue_rebuild
from lengthwise.policy import contracts
from lengthwise.schema.records import Status

OUTPUT_WEIGHT = contracts.SERVICE_OUTPUT_WEIGHT
TIMED_OUT = int(Status.TIMED_OUT)
INFINITY = float("inf")


@jit
def end_request(S, r, slot, status, now_s):
    """Books the end of a request, frees its slot, and sends who waited for that."""
    q = S.slots[slot]
    if q.held > 0:
        let_go(S, q)
    result = S.results[q.index]
    result.status = status
    result.output_tokens = max(0, q.generated + q.prompt - S.prompt[q.index])
    result.waited_s = q.waited_s + (now_s - q.queued_s if q.waiting == 1 else 0.0)
    S.replicas[r].ended_since += 1
    if S.par[0].central == 0:
        S.tokens[r] -= outstanding(S.prompt[q.index], S.predicted[q.index])
    if S.par[0].charges == 1:
        settle_service(S, q, result.output_tokens)
    S.free_slots[S.ctr[0].free_slots] = slot
    S.ctr[0].free_slots += 1
    release(S, q.index, status, now_s)


@jit_cold
def let_go(S, q):
    """The blocks where the request was prefilled are free."""
    home = S.replicas[q.home]
    home.free_blocks += q.held
    home.freed += q.held
    S.touched[q.home] = 1
    q.held = 0


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
    S.replicas[r].freed += S.slots[slot].blocks
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
