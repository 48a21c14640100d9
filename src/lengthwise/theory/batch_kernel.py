"""Compiled twin of ``batch_server.reference``; a property test checks that both agree to the last bit.

All arrays are passed in. ``waiting[b]`` has the requests of bin b, ``num_waiting[b]`` is their number. ``free_s`` is
the time at which each server becomes free; its length is 0 for infinitely many servers.
"""

from __future__ import annotations

from lengthwise._jit import jit


@jit
def _dispatch(b, now_s, service_s, waiting, num_waiting, free_s, formed_s, start_s, end_s):
    servers, begin_s, server = len(free_s), now_s, -1
    if servers > 0:
        server = 0
        for other in range(1, servers):
            if free_s[other] < free_s[server]:
                server = other
        begin_s = max(now_s, free_s[server])
    longest_s = 0.0
    for place in range(num_waiting[b]):
        longest_s = max(longest_s, service_s[waiting[b, place]])
    done_s = begin_s + longest_s
    for place in range(num_waiting[b]):
        request = waiting[b, place]
        formed_s[request], start_s[request], end_s[request] = now_s, begin_s, done_s
    if servers > 0:
        free_s[server] = done_s
    num_waiting[b] = 0


@jit
def _oldest_bin(waiting, num_waiting):
    """Return the bin whose first request arrived earliest, or -1 if all bins are empty.

    Bin b holds ``num_waiting[b]`` requests, whose numbers, in order of arrival, are in ``waiting[b]``.
    """
    found = -1
    for b in range(len(num_waiting)):
        if num_waiting[b] > 0 and (found < 0 or waiting[b, 0] < waiting[found, 0]):
            found = b
    return found


def serve(arrival_s, service_s, bins, batch, max_wait_s, drain, waiting, num_waiting, free_s, formed_s, start_s, end_s):
    """Fill ``formed_s``, ``start_s`` and ``end_s`` of requests in batches, and return the number of batches."""
    n, batches = len(arrival_s), 0
    timed = max_wait_s < float("inf")
    oldest = -1  # the bin with the longest wait, where waits are bounded
    for step in range(n):
        now_s = arrival_s[step]
        while oldest >= 0 and arrival_s[waiting[oldest, 0]] + max_wait_s <= now_s:
            leave_s = arrival_s[waiting[oldest, 0]] + max_wait_s
            _dispatch(oldest, leave_s, service_s, waiting, num_waiting, free_s, formed_s, start_s, end_s)
            batches += 1
            oldest = _oldest_bin(waiting, num_waiting)
        b = bins[step]
        waiting[b, num_waiting[b]] = step
        num_waiting[b] += 1
        if num_waiting[b] == batch:
            _dispatch(b, now_s, service_s, waiting, num_waiting, free_s, formed_s, start_s, end_s)
            batches += 1
            if b == oldest:
                oldest = _oldest_bin(waiting, num_waiting)
        elif timed and oldest < 0:
            oldest = b
    if timed or drain != 0:
        b = _oldest_bin(waiting, num_waiting) if timed else 0
        while 0 <= b < len(num_waiting):
            if num_waiting[b] > 0:
                leave_s = arrival_s[waiting[b, 0]] + max_wait_s if timed else arrival_s[n - 1]
                _dispatch(b, leave_s, service_s, waiting, num_waiting, free_s, formed_s, start_s, end_s)
                batches += 1
            b = _oldest_bin(waiting, num_waiting) if timed else b + 1
    return batches
