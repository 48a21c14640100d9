"""The pipeline's recurrence: a round of visits, again and again until it is steady.

Stages come in groups of ``count`` neighbours that take the same time. Nothing is allocated: scratch comes in.
"""

from __future__ import annotations

import math

from lengthwise._jit import jit

MOST_ROUNDS = 64
_EVEN = 1e-10


@jit
def _pass(jobs, count, visit_s, column, scale, ready_s, first_s, last_s, started_s):
    """Moves micro-batches 0 .. jobs - 1 through all stages, each stage in their order.

    ``ready_s`` is when each can enter, then when it has left; ``first_s`` and ``last_s`` are when the first and
    the last stage of each group are free. Between these two nobody waits: the stages take the same time.
    """
    for job in range(jobs):
        now = ready_s[job]
        for group in range(len(count)):
            seconds = visit_s[group, column]
            if column == 0:
                seconds *= scale[job]
            begin = max(now, first_s[group])
            if group == 0:
                started_s[job] = begin
            now = begin + seconds
            first_s[group] = now
            if count[group] > 1:
                now = max(now + (count[group] - 1) * seconds, last_s[group] + seconds)
            last_s[group] = now
        ready_s[job] = now


@jit
def _spread(values, before, size, least, most):
    for index in range(size):
        moved = values[index] - before[index]
        least, most = min(least, moved), max(most, moved)
        before[index] = values[index]
    return least, most


def steady_round(
    jobs, encodes, steps, finish, count, visit_s, scale, ready_s, first_s, last_s, started_s, before
):  # fmt: skip
    """(seconds of a round, seconds from a micro-batch's encoding to the end of iteration ``finish``), steady.

    Column 0 of ``visit_s`` [groups, steps + 1] is the encoding, which ``encodes`` of the micro-batches have,
    ``scale`` times as long each.
    A round is steady once everything in it comes later by the same time than in the round before; where that
    does not come to pass within ``MOST_ROUNDS``, the mean of their second half is taken.
    """
    groups = len(count)
    ready_s[:jobs] = 0.0
    first_s[:groups] = 0.0
    last_s[:groups] = 0.0
    before[:, :] = 0.0
    half_s, latency_s = 0.0, 0.0
    for turn in range(MOST_ROUNDS):
        _pass(encodes, count, visit_s, 0, scale, ready_s, first_s, last_s, started_s)
        for job in range(encodes):
            before[3, job] = started_s[job]
        latency_s = 0.0
        for column in range(steps + 1):
            if column > 0:
                _pass(jobs, count, visit_s, column, scale, ready_s, first_s, last_s, started_s)
            if column == finish:
                for job in range(encodes):
                    latency_s = max(latency_s, ready_s[job] - before[3, job])
        least, most = _spread(ready_s, before[0], jobs, math.inf, 0.0)
        least, most = _spread(first_s, before[1], groups, least, most)
        least, most = _spread(last_s, before[2], groups, least, most)
        if most - least <= _EVEN * most:
            return most, latency_s
        if turn == MOST_ROUNDS // 2 - 1:
            half_s = ready_s[0]
    return (ready_s[0] - half_s) / (MOST_ROUNDS // 2), latency_s
