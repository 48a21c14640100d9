"""The best point under a latency bound, by looking at every one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lengthwise.schedule._seen import NOTHING, Key, reached
from lengthwise.schedule.found import Found
from lengthwise.schedule.variables import Box, Floats, Ints, Perf, Performance, Variable, performance_at
from lengthwise.schema.errors import InputError

CHUNK = 65_536


def exhaustive(
    perf: Performance, variables: Sequence[Variable], bound_s: float, *, chunk: int = CHUNK
) -> Found:
    """The point of the highest throughput whose latency meets a bound, whatever perf is like.

    Args:
        perf: Evaluates points, many at a time.
        variables: What may be chosen.
        bound_s: The latency that is still good; infinite: any that can run.
        chunk: Points evaluated at a time, which bounds the memory.

    Raises:
        InputError: A number is out of range, or perf's answer cannot be used.
    """
    if not bound_s > 0:
        raise InputError(f"the latency bound must be above 0 s; it is {bound_s}")
    if chunk < 1:
        raise InputError(f"a chunk must be 1 point or more, not {chunk}")
    box = Box(variables)
    best, fastest, calls = NOTHING, NOTHING, 0
    for _, places in box.chunks(chunk):
        got = performance_at(perf, box, places)
        calls += 1
        best = min(best, _best(got, places, bound_s))
        fastest = min(fastest, _fastest(got, places))
    return Found(*reached(box, best, fastest), box.size, box.size, calls, 0.0)


def _best(got: Perf, places: Ints, bound_s: float) -> Key:
    good = np.flatnonzero((got.latency_s <= bound_s) & np.isfinite(got.latency_s))
    if not len(good):
        return NOTHING
    return _least(-got.throughput_rps[good], got.latency_s[good], places[good])


def _fastest(got: Perf, places: Ints) -> Key:
    loss = np.where(np.isfinite(got.latency_s), -np.nan_to_num(got.throughput_rps), 0.0)
    return _least(got.latency_s, loss, places)


def _least(first: Floats, second: Floats, places: Ints) -> Key:
    """The least of (first, second, place); places come in order."""
    same = np.flatnonzero(first == first.min())
    at = int(same[np.argmin(second[same])])
    return float(first[at]), float(second[at]), tuple(places[at].tolist())


def whole_box(perf: Performance, variables: Sequence[Variable], chunk: int = CHUNK) -> Perf:
    """Every point's latency and throughput, an axis a variable in the order of its effect.

    Throughput is NaN where a point cannot run.
    """
    box = Box(variables)
    latency_s, throughput_rps = np.empty(box.size), np.empty(box.size)
    for start, places in box.chunks(chunk):
        got = performance_at(perf, box, places)
        latency_s[start : start + len(places)] = got.latency_s
        throughput_rps[start : start + len(places)] = got.throughput_rps
    throughput_rps[latency_s == math.inf] = np.nan
    return Perf(latency_s.reshape(box.shape), throughput_rps.reshape(box.shape))


__all__ = ["CHUNK", "exhaustive", "whole_box"]
