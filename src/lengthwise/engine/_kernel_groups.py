"""Sequences that decode together advance by sums: a step costs O(1), a change O(log members).

Each member has one entry in its group's heap, keyed by the group step at which something
happens to it: its last token, or the first block beyond what it took at admission. Members
that grow are counted by the step (modulo the block size) at which they need their next block.
A *cohort* counts the members whose last token came at the same time.
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold

_SHIFT = 32
_MASK = (1 << _SHIFT) - 1


@jit
def join(S, g, slot):
    """Puts a decoding sequence into a group."""
    group, q = S.groups[g], S.slots[slot]
    block_size = S.par[0].block_size
    q.join_step = group.steps
    q.due = group.steps + q.output - q.generated
    ahead = q.blocks * block_size + 1 - (q.prompt + q.generated)
    q.grow_at = group.steps + ahead
    q.growing = 1 if ahead < block_size else 0
    event = q.due
    if q.growing == 1:
        S.phases[g, q.grow_at % block_size] += 1
    elif q.grow_at < q.due:
        event = q.grow_at
    _sift_up(S.heaps, g, group.members, (event << _SHIFT) | slot)
    group.members += 1
    group.kv_tokens += q.prompt + q.generated
    _add_to_cohort(S, g, q.last_token_s, 1)


@jit_cold
def leave(S, g, slot):
    """Takes a sequence out of its group, its own counts brought up to date."""
    group, q = S.groups[g], S.slots[slot]
    settle(S, g, slot)
    at = 0
    while (S.heaps[g, at] & _MASK) != slot:
        at += 1
    _remove(S, g, at)
    _forget_growth(S, g, q)
    group.kv_tokens -= q.prompt + q.generated
    for c in range(group.cohorts):
        if S.cohort_s[g, c] == q.last_token_s:
            S.cohort_n[g, c] -= 1
            break


@jit
def settle(S, g, slot):
    """Brings a member's tokens, blocks and last token up to date."""
    group, q = S.groups[g], S.slots[slot]
    steps = group.steps - q.join_step
    if steps > 0:
        block_size = S.par[0].block_size
        q.generated += steps
        q.blocks = max(q.blocks, (q.prompt + q.generated - 1 + block_size - 1) // block_size)
        q.last_token_s = group.last_end_s
        q.join_step = group.steps


@jit
def sit(S, slot):
    """Gives a request that comes out of a step the next seat; ties in who leaves go by seat.

    Members of a group keep their seats while nobody else is idle: their order stays.
    """
    S.ctr[0].slot_indices += 1
    S.slots[slot].slot_index = S.ctr[0].slot_indices


@jit_cold
def seat_anew(S, g):
    """Seats the members of a group behind everybody else, in their own order."""
    members = S.groups[g].members
    for count in range(members):
        slot = S.heaps[g, count] & _MASK
        slot_index = S.slots[slot].slot_index
        i = count
        while i > 0 and S.scratch_tie[i - 1] > slot_index:
            S.scratch_tie[i] = S.scratch_tie[i - 1]
            S.scratch_slot[i] = S.scratch_slot[i - 1]
            i -= 1
        S.scratch_tie[i] = slot_index
        S.scratch_slot[i] = slot
    for i in range(members):
        sit(S, S.scratch_slot[i])


@jit_cold
def merge(S, source, target):
    """Moves all members of one group into another."""
    group = S.groups[source]
    for i in range(group.members):
        slot = S.heaps[source, i] & _MASK
        settle(S, source, slot)
        _forget_growth(S, source, S.slots[slot])
        join(S, target, slot)
    group.members = 0
    group.kv_tokens = 0
    group.cohorts = 0


@jit
def member(S, g, i):
    """The slot of the ``i``-th member."""
    return S.heaps[g, i] & _MASK


@jit
def next_event(S, g):
    """The group step at which something happens to a member; the group is not empty."""
    return S.heaps[g, 0] >> _SHIFT


@jit
def advance(S, g, now_s):
    """One token for every member; what falls due is left to ``pop_due``."""
    group = S.groups[g]
    group.steps += 1
    group.kv_tokens += group.members
    group.last_end_s = now_s
    group.cohorts = 1
    S.cohort_s[g, 0] = now_s
    S.cohort_n[g, 0] = group.members


@jit
def pop_due(S, g):
    """The slot of a member that has just got its last token, out of the group; -1: no more."""
    group = S.groups[g]
    while group.members > 0 and next_event(S, g) <= group.steps:
        slot = member(S, g, 0)
        q = S.slots[slot]
        if q.due <= group.steps:
            settle(S, g, slot)
            _remove(S, g, 0)
            _forget_growth(S, g, q)
            group.kv_tokens -= q.prompt + q.generated
            S.cohort_n[g, 0] -= 1
            return slot
        q.growing = 1
        S.phases[g, q.grow_at % S.par[0].block_size] += 1
        _sift_down(S.heaps, g, group.members, 0, (q.due << _SHIFT) | slot)
    return -1


@jit
def _forget_growth(S, g, q):
    if q.growing == 1:
        S.phases[g, q.grow_at % S.par[0].block_size] -= 1
        q.growing = 0


@jit
def _add_to_cohort(S, g, last_token_s, count):
    """Cohorts stay in order of time."""
    group = S.groups[g]
    c = group.cohorts
    while c > 0 and S.cohort_s[g, c - 1] > last_token_s:
        c -= 1
    if c > 0 and S.cohort_s[g, c - 1] == last_token_s:
        S.cohort_n[g, c - 1] += count
        return
    if group.cohorts == S.cohort_s.shape[1]:
        c = _drop_empty_cohorts(S, g, last_token_s)
    for i in range(group.cohorts, c, -1):
        S.cohort_s[g, i] = S.cohort_s[g, i - 1]
        S.cohort_n[g, i] = S.cohort_n[g, i - 1]
    S.cohort_s[g, c] = last_token_s
    S.cohort_n[g, c] = count
    group.cohorts += 1


@jit_cold
def _drop_empty_cohorts(S, g, last_token_s):
    """Makes room; returns where a cohort of this time now belongs."""
    group = S.groups[g]
    kept, place = 0, 0
    for c in range(group.cohorts):
        if S.cohort_n[g, c] > 0:
            S.cohort_s[g, kept] = S.cohort_s[g, c]
            S.cohort_n[g, kept] = S.cohort_n[g, c]
            kept += 1
            if S.cohort_s[g, kept - 1] < last_token_s:
                place = kept
    group.cohorts = kept
    return place


@jit
def _remove(S, g, at):
    group = S.groups[g]
    group.members -= 1
    if at == group.members:
        return
    key = S.heaps[g, group.members]
    if at > 0 and key < S.heaps[g, (at - 1) >> 1]:
        _sift_up(S.heaps, g, at, key)
    else:
        _sift_down(S.heaps, g, group.members, at, key)


@jit
def _sift_up(heaps, g, i, key):
    while i > 0:
        parent = (i - 1) >> 1
        if heaps[g, parent] <= key:
            break
        heaps[g, i] = heaps[g, parent]
        i = parent
    heaps[g, i] = key


@jit
def _sift_down(heaps, g, length, i, key):
    while True:
        child = 2 * i + 1
        if child >= length:
            break
        if child + 1 < length and heaps[g, child + 1] < heaps[g, child]:
            child += 1
        if heaps[g, child] >= key:
            break
        heaps[g, i] = heaps[g, child]
        i = child
    heaps[g, i] = key


@jit_cold
def drop_partial(S, r, slot):
    """Takes a request out of the half-computed prompts of a replica; their order stays."""
    rep = S.replicas[r]
    at = 0
    while S.partials[r, at] != slot:
        at += 1
    rep.partials -= 1
    for i in range(at, rep.partials):
        S.partials[r, i] = S.partials[r, i + 1]
