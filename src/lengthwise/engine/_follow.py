"""Who goes to the front next where requests come after others: by when they are sent, then by number."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.schema.records import Refusal, Status

FINISHED, REJECTED = int(Status.FINISHED), int(Status.REJECTED)
NOT_FINISHED = int(Refusal.PARENT_NOT_FINISHED)


@jit
def first_sent(S):
    """The request that goes to the front next, or -1: who waits for nobody and is first, or the top of the heap."""
    ctr = S.ctr[0]
    if S.par[0].follows == 0:
        return ctr.next if ctr.next < ctr.released else -1
    while ctr.next < ctr.released and S.follow_left[ctr.next] != 0:
        ctr.next += 1
    if ctr.sent == 0:
        return ctr.next if ctr.next < ctr.released else -1
    top = S.sent[0]
    if ctr.next < ctr.released and _before(S, ctr.next, top):
        return ctr.next
    return top


@jit
def take_sent(S, i):
    """Takes that request away."""
    ctr = S.ctr[0]
    if i == ctr.next:
        ctr.next += 1
    else:
        _pop(S)


@jit_cold
def send_followers(S, i, status, now_s):
    """Sends those that waited for request ``i`` alone; where it did not finish, all behind it never come."""
    if status != FINISHED:
        _refuse_behind(S, i, now_s)
        return
    for k in range(S.follow_start[i], S.follow_start[i + 1]):
        child = S.follow[k]
        S.follow_left[child] -= 1
        if S.follow_left[child] == 0:
            S.follow_left[child] = -1
            S.arrival_s[child] = max(S.arrival_s[child], now_s)
            _push(S, child)


@jit
def _refuse_behind(S, i, now_s):
    """Who is refused waits on the free end of the heap for those behind it to be looked at."""
    end = len(S.sent)
    at = end - 1
    S.sent[at] = i
    while at < end:
        one = S.sent[at]
        at += 1
        for k in range(S.follow_start[one], S.follow_start[one + 1]):
            child = S.follow[k]
            if S.results[child].status == REJECTED:
                continue
            S.results[child].status = REJECTED
            S.results[child].refusal = NOT_FINISHED
            S.arrival_s[child] = now_s
            at -= 1
            S.sent[at] = child


@jit
def _before(S, a, b):
    return S.arrival_s[a] < S.arrival_s[b] or (S.arrival_s[a] == S.arrival_s[b] and a < b)


@jit
def _push(S, i):
    ctr = S.ctr[0]
    at = ctr.sent
    ctr.sent += 1
    while at > 0:
        up = (at - 1) // 2
        if not _before(S, i, S.sent[up]):
            break
        S.sent[at] = S.sent[up]
        at = up
    S.sent[at] = i


@jit
def _pop(S):
    ctr = S.ctr[0]
    ctr.sent -= 1
    last, at = S.sent[ctr.sent], 0
    while 2 * at + 1 < ctr.sent:
        down = 2 * at + 1
        if down + 1 < ctr.sent and _before(S, S.sent[down + 1], S.sent[down]):
            down += 1
        if not _before(S, S.sent[down], last):
            break
        S.sent[at] = S.sent[down]
        at = down
    S.sent[at] = last
