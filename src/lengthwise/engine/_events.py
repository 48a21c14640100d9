"""Steps in flight by the time at which they end."""

from __future__ import annotations

from lengthwise._jit import jit


@jit
def push_event(S, end_s, r):
    i = S.ctr[0].events
    S.ctr[0].events += 1
    while i > 0:
        parent = (i - 1) >> 1
        if not _sooner(end_s, r, S.event_s[parent], S.event_replica[parent]):
            break
        S.event_s[i] = S.event_s[parent]
        S.event_replica[i] = S.event_replica[parent]
        i = parent
    S.event_s[i] = end_s
    S.event_replica[i] = r


@jit
def pop_event(S):
    """The replica whose step ends first."""
    first = S.event_replica[0]
    S.ctr[0].events -= 1
    length = S.ctr[0].events
    end_s, r, i = S.event_s[length], S.event_replica[length], 0
    while True:
        child = 2 * i + 1
        if child >= length:
            break
        if child + 1 < length and _sooner(
            S.event_s[child + 1], S.event_replica[child + 1], S.event_s[child], S.event_replica[child]
        ):
            child += 1
        if not _sooner(S.event_s[child], S.event_replica[child], end_s, r):
            break
        S.event_s[i] = S.event_s[child]
        S.event_replica[i] = S.event_replica[child]
        i = child
    S.event_s[i] = end_s
    S.event_replica[i] = r
    return first


@jit
def _sooner(s_a, r_a, s_b, r_b):
    return s_a < s_b or (s_a == s_b and r_a < r_b)
