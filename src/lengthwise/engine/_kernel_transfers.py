"""KV transfers to decode replicas: their queue, their links, and the bandwidth that they share."""

from __future__ import annotations

from lengthwise._jit import jit_cold
from lengthwise.engine import kernel_layout
from lengthwise.engine._kernel_groups import assign_return_number, join
from lengthwise.engine._kernel_memory import (
    blocks_to_admit,
    end_request,
    expire,
    move_load,
    note_admission,
    release_transfer_blocks,
    requeue,
    update_ranks,
)
from lengthwise.engine._kernel_prefix import previous_replica
from lengthwise.engine._kernel_queue import push_event, queue_pop
from lengthwise.engine._kernel_tiers import end_offloading
from lengthwise.schema.deployment import LINK_SHARINGS
from lengthwise.schema.records import Status

BAD_DECODE_ROUTE = kernel_layout.BAD_DECODE_ROUTE
FCFS, FAIR = LINK_SHARINGS.index("fcfs"), LINK_SHARINGS.index("fair")
FINISHED = int(Status.FINISHED)
INFINITY = float("inf")


@jit_cold
def queue_for_decode(S, D, r, slot, now_s, rank, router):
    """Queue a prefilled request at a decode replica. Its blocks remain on ``r`` until they are fetched."""
    q = S.slots[slot]
    end_offloading(S, r, q)
    q.prefill_replica = r
    q.transfer_blocks = q.blocks
    q.blocks = 0
    S.running[r] -= 1
    if q.early_blocks > 0:
        to = q.decode_replica
        q.blocks, q.early_blocks = q.early_blocks, 0
        q.context, q.queued_at_s = q.prompt + q.generated, now_s
        move_load(S, q, r, to)
        S.running[to] -= 1  # ``note_admission`` moves it from the waiting to the running requests.
        S.waiting[to] += 1
        note_admission(S, to, slot, now_s, rank)
        return
    to = route_to_decode(S, D, q, router)
    if to >= 0:
        move_load(S, q, r, to)
        S.waiting[to] += 1
        requeue(S, to, now_s, slot, rank)
        queue = S.queues[S.replicas[to].queue]
        queue.deadline_s = min(queue.deadline_s, q.last_token_s + S.params[1].transfer_timeout_s)


@jit_cold
def route_to_decode(S, D, q, router):
    """Return the decode replica that the router chooses for a request, or -1 and a ``problem`` if there is none."""
    first = S.params[0].replicas
    a, b = D.draws[q.index, 0], D.draws[q.index, 1]
    for k in range(S.params[0].decode_replicas):
        D.decode_free_blocks[k] = S.replicas[first + k].free_blocks
    to = router(
        q.index, a, b, S.prompt[q.index], previous_replica(D.routed, D.previous_turn, q.index),
        S.params[1].total_blocks, D.decode_waiting, D.decode_running, D.decode_outstanding, D.decode_free_blocks,
        S.no_tokens, S.no_tokens, D.service_rate,
    )  # fmt: skip
    if to < 0 or to >= S.params[0].decode_replicas:
        S.counters[0].problem = BAD_DECODE_ROUTE
        S.counters[0].problem_value = to
        return -1
    if len(D.routed) > 0:
        D.routed[q.index] = to
    return first + to


@jit_cold
def start_transfers(S, D, r, now_s, rank, memory):
    """Start KV transfers to a decode replica, in the order of its queue, while ``max_num_seqs`` and memory allow."""
    expire(S, r, now_s)
    rep, is_shared = S.replicas[r], False
    params, queue = S.params[rep.side], S.queues[rep.queue]
    needs_rerank = params.rank_every_step == 1 or queue.overdue_at_s <= now_s
    if queue.length > 0 and S.running[r] < params.max_num_seqs and needs_rerank:
        update_ranks(S, rep.queue, now_s, rank)
    while queue.length > 0 and S.running[r] < params.max_num_seqs:
        slot = S.queued_slot[queue.offset]
        q = S.slots[slot]
        if q.transfer_blocks == 0:  # A swapped request returns with a step, not by a transfer.
            break
        q.context = q.prompt + q.generated
        S.work[0].decodes = 0
        S.work[0].prompts = 0
        blocks = blocks_to_admit(S, r, slot, q.context, 0, memory)
        if blocks < 0:
            break
        queue_pop(S, rep.queue)
        rep.free_blocks -= blocks
        q.blocks = blocks
        note_admission(S, r, slot, now_s, rank)
        q.decode_replica = r
        is_shared = _start_transfer(S, D, slot, q.context - 1, now_s, 0.0) or is_shared
    if is_shared:
        _share_links(S, D)


@jit_cold
def _start_transfer(S, D, slot, tokens, now_s, earliest_end_s):
    """Start the transfer of a request's ``tokens`` cached tokens, which arrives at ``earliest_end_s`` at the earliest.

    Return whether it shares links, so that its end depends on others.
    """
    q, params = S.slots[slot], S.params[1]
    r, link_s = q.decode_replica, tokens * params.transfer_token_s
    rep, source = S.replicas[r], S.replicas[q.prefill_replica]
    is_shared, end_s = params.link_sharing == FAIR and link_s > 0, now_s
    if not is_shared:
        if params.link_sharing == FCFS:
            end_s = max(now_s, source.sends_until_s, rep.receives_until_s)
        end_s = max(end_s + (params.transfer_fixed_s + link_s), earliest_end_s)
        if params.link_sharing == FCFS:
            source.sends_until_s = end_s
            rep.receives_until_s = end_s
        if end_s <= now_s and q.early_blocks == 0:
            _receive(S, r, slot)
            return False
    S.partials[r, -1 - rep.incoming] = slot
    rep.incoming += 1
    D.slot_of[q.index] = slot
    if is_shared:
        D.earliest_end_s[q.index] = earliest_end_s
        _join_path(S, D, q, link_s, now_s)
    else:
        push_event(S, end_s, len(S.replicas) + q.index)
    return is_shared


@jit_cold
def send_layers(S, D, r, started, now_s, memory, router):
    """Start the transfers of the prompts that the last ``started`` steps of a prefill replica complete.

    They are layer by layer. A request that gets no slot and memory of its decode replica now, or would overtake another
    one there, is transferred after its prefill.
    """
    rep, stride, is_shared = S.replicas[r], S.params[0].stride, False
    for k in range(rep.in_flight - started, rep.in_flight):
        f = r * stride + (rep.first_flight + k) % stride
        for i in range(S.flights[f].prompts):
            slot = S.prompt_slot[f, i]
            q = S.slots[slot]
            if q.prefilled + S.prompt_chunk[f, i] < q.context or not _reserve(S, D, r, slot, memory, router):
                continue
            layer_s = q.context * S.params[1].transfer_token_s / S.params[1].transfer_layers
            earliest_end_s = S.flights[f].end_s + (S.params[1].transfer_fixed_s + layer_s)
            is_shared = _start_transfer(S, D, slot, q.context, now_s, earliest_end_s) or is_shared
    if is_shared:
        _share_links(S, D)


@jit_cold
def _reserve(S, D, r, slot, memory, router):
    """Take the slot and blocks that a request needs on a decode replica after prefill. Return False without them."""
    q = S.slots[slot]
    to = route_to_decode(S, D, q, router)
    if to < 0 or S.queues[S.replicas[to].queue].length > 0 or S.running[to] >= S.params[1].max_num_seqs:
        return False
    own = q.blocks
    q.transfer_blocks, q.blocks, q.context, q.generated = own, 0, q.context + 1, q.generated + 1
    S.work[0].decodes = 0
    S.work[0].prompts = 0
    blocks = blocks_to_admit(S, to, slot, q.context, 0, memory)
    q.transfer_blocks, q.blocks, q.context, q.generated = 0, own, q.context - 1, q.generated - 1
    if blocks < 0:
        return False
    S.replicas[to].free_blocks -= blocks
    S.running[to] += 1
    q.early_blocks = blocks
    q.prefill_replica, q.decode_replica = r, to
    return True


@jit_cold
def end_before_transfer(S, r, slot, now_s):
    """End a request with its first token. Both sides keep its blocks until its transfer ends, which is not aborted."""
    q = S.slots[slot]
    own, q.blocks = q.blocks, 0
    S.running[r] -= 1
    S.results[q.index].finished_s = now_s
    end_offloading(S, r, q)
    end_request(S, r, slot, FINISHED, now_s)
    S.counters[0].free_slots -= 1  # The transfer needs its slot.
    q.transfer_blocks = own


@jit_cold
def _join_path(S, D, q, link_s, now_s):
    """Start a transfer of ``link_s`` seconds at full bandwidth on the path between its replicas."""
    _serve_paths(D, now_s)
    p = q.prefill_replica * S.params[0].decode_replicas + q.decode_replica - S.params[0].replicas
    path, fabric = D.paths[p], D.fabric[0]
    if path.transfers == 0:
        path.served_s = 0.0
        path.target_s = INFINITY
        i = fabric.active
        while i > 0 and D.active_paths[i - 1] > p:
            D.active_paths[i] = D.active_paths[i - 1]
            i -= 1
        D.active_paths[i] = p
        fabric.active += 1
        path.rate = 0.0
    path.transfers += 1
    D.target_s[q.index] = path.served_s + link_s
    path.target_s = min(path.target_s, D.target_s[q.index])


@jit_cold
def _serve_paths(D, now_s):
    fabric = D.fabric[0]
    for i in range(fabric.active):
        path = D.paths[D.active_paths[i]]
        path.served_s += path.rate * (now_s - fabric.now_s)
    fabric.now_s = now_s


@jit_cold
def _share_links(S, D):
    """Divide the bandwidth of replicas and switch over the paths, max-min fair, and note when a transfer ends first."""
    fabric, decodes, first = D.fabric[0], S.params[0].decode_replicas, S.params[0].replicas
    switch = len(D.links) - 1
    _empty_links(S, D)
    unknown, end_s = fabric.active, INFINITY
    while unknown > 0:
        full, rate = 0, INFINITY
        for r in range(len(D.links)):
            if D.links[r].transfers > 0 and D.links[r].left / D.links[r].transfers < rate:
                full, rate = r, D.links[r].left / D.links[r].transfers
        for i in range(fabric.active):
            p = D.active_paths[i]
            path, links = D.paths[p], (p // decodes, first + p % decodes, switch)
            if path.rate >= 0.0 or full not in links:
                continue
            path.rate = rate
            unknown -= 1
            for link in links:
                if link != full:
                    D.links[link].left -= rate * path.transfers
                    D.links[link].transfers -= path.transfers
            path.end_s = fabric.now_s + max(0.0, path.target_s - path.served_s) / rate
            end_s = min(end_s, path.end_s)
        D.links[full].transfers = 0
    S.counters[0].transfer_end_s = end_s


@jit_cold
def _empty_links(S, D):
    """Make all bandwidth free again, and count the transfers of each link."""
    fabric, decodes, first = D.fabric[0], S.params[0].decode_replicas, S.params[0].replicas
    switch = len(D.links) - 1
    for r in range(switch):
        D.links[r].transfers = 0
        D.links[r].left = 1.0
    D.links[switch].transfers = 0
    D.links[switch].left = S.params[1].links_at_once
    for i in range(fabric.active):
        p = D.active_paths[i]
        D.paths[p].rate = -1.0  # not known yet
        for link in (p // decodes, first + p % decodes, switch):
            D.links[link].transfers += D.paths[p].transfers


@jit_cold
def end_shared_transfers(S, D, now_s):
    """End the transfers whose bytes have all been sent; they arrive ``transfer_fixed_s`` later."""
    fabric, left = D.fabric[0], 0
    _serve_paths(D, now_s)
    for i in range(fabric.active):
        p = D.active_paths[i]
        path = D.paths[p]
        if path.end_s <= now_s:
            path.served_s = path.target_s
            _end_on_path(S, D, p, now_s)
        if path.transfers > 0:
            D.active_paths[left] = p
            left += 1
    fabric.active = left
    _share_links(S, D)


@jit_cold
def _end_on_path(S, D, p, now_s):
    path, decodes, target_s = D.paths[p], S.params[0].decode_replicas, INFINITY
    source, r = p // decodes, S.params[0].replicas + p % decodes
    for at in range(S.replicas[r].incoming):
        q = S.slots[S.partials[r, -1 - at]]
        if q.prefill_replica != source:
            continue
        if D.target_s[q.index] <= path.served_s:
            D.target_s[q.index] = INFINITY
            path.transfers -= 1
            arrives_s = max(now_s + S.params[1].transfer_fixed_s, D.earliest_end_s[q.index])
            push_event(S, arrives_s, len(S.replicas) + q.index)
        else:
            target_s = min(target_s, D.target_s[q.index])
    path.target_s = target_s


@jit_cold
def end_transfer(S, D, i):
    """Receive the KV cache of request ``i`` on its decode replica."""
    slot = D.slot_of[i]
    r = S.slots[slot].decode_replica
    rep, at = S.replicas[r], 0
    while S.partials[r, -1 - at] != slot:
        at += 1
    rep.incoming -= 1
    S.partials[r, -1 - at] = S.partials[r, -1 - rep.incoming]
    _receive(S, r, slot)
    S.pending[r] = 1


@jit_cold
def _receive(S, r, slot):
    rep, q = S.replicas[r], S.slots[slot]
    release_transfer_blocks(S, q)
    if q.early_blocks > 0:  # The request has ended with its first token.
        rep.free_blocks += q.early_blocks
        S.running[r] -= 1
        q.early_blocks = 0
        S.free_slots[S.counters[0].free_slots] = slot
        S.counters[0].free_slots += 1
        return
    q.unhashed = -1
    rep.deadline_s = min(rep.deadline_s, q.arrival_s + S.params[0].timeout_s)
    assign_return_number(S, slot)
    join(S, rep.idle_group, slot)
