"""The system that Multi-Bin Batching reasons about, simulated: bins fill, batches queue, servers take them.

Arrays in, arrays out, and no randomness inside: arrivals, service times and the bins that requests are
put into (right or wrong) are columns, so that runs can share them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.theory.service import Floats, checked_count, checked_counts


@dataclass(frozen=True, eq=False)
class Served:
    """What became of n requests; times of requests that no batch took are infinite.

    Attributes:
        arrival_s: [n] when they came.
        formed_s: [n] when their batch was complete (or had waited long enough).
        start_s: [n] when a server took it.
        end_s: [n] when its longest member was done.
        batches: How many batches there were.
    """

    arrival_s: Floats
    formed_s: Floats
    start_s: Floats
    end_s: Floats
    batches: int

    @property
    def served(self) -> npt.NDArray[np.bool_]:
        """[n] whether a batch took the request."""
        return np.isfinite(self.end_s)

    @property
    def latency_s(self) -> float:
        """Mean time from arrival to the end of the batch, over served requests."""
        done = self.served
        return float(np.mean(self.end_s[done] - self.arrival_s[done])) if done.any() else math.nan

    @property
    def throughput_rps(self) -> float:
        """Served requests over the time from the first arrival to the last end."""
        done = self.served
        span_s = self.end_s[done].max() - self.arrival_s[0] if done.any() else math.nan
        return float(np.count_nonzero(done) / span_s)


def serve(
    arrival_s: npt.ArrayLike,
    service_s: npt.ArrayLike,
    bins: npt.ArrayLike,
    *,
    batch: int,
    num_bins: int,
    servers: int | None = 1,
    max_wait_s: float = math.inf,
    drain: bool = False,
    engine: Literal["compiled", "reference"] = "compiled",
) -> Served:
    """When every request's batch was formed, started and ended.

    A batch is complete at its last member's arrival. Complete batches are served in the order in which
    they were formed, each by the server that is free first, for as long as its longest member takes.

    Args:
        arrival_s: [n] seconds, not decreasing.
        service_s: [n] seconds that each request takes alone, at least 0.
        bins: [n] the bin each is put into, 0 to ``num_bins`` - 1.
        batch: Requests in a complete batch.
        num_bins: Number of bins.
        servers: How many batches run at a time; None for infinitely many.
        max_wait_s: A bin whose oldest request has waited so long sends off what it holds; infinite in
            the paper. At one instant, such batches leave before arrivals join.
        drain: With an infinite wait: send off what is left in the bins at the last arrival.
        engine: "reference" for the same in plain Python.

    Raises:
        InputError: Columns differ in length or hold what they must not.
    """
    checked_counts(batch, num_bins)
    columns = _checked(arrival_s, service_s, bins, num_bins)
    if servers is not None:
        checked_count("servers", servers)
    if math.isnan(max_wait_s) or max_wait_s < 0:
        raise InputError(f"max_wait_s must be at least 0 seconds, or infinite; it is {max_wait_s:g}")
    run = _compiled_run if engine == "compiled" else reference
    return run(*columns, batch, num_bins, servers or 0, float(max_wait_s), drain)


def reference(  # noqa: C901 - the whole meaning, to be read in one go
    arrival_s: Floats,
    service_s: Floats,
    bins: npt.NDArray[np.int64],
    batch: int,
    num_bins: int,
    servers: int,
    max_wait_s: float,
    drain: bool,
) -> Served:
    """The meaning of ``serve``, in plain Python; ``servers`` of 0 are infinitely many."""
    n = len(arrival_s)
    formed_s, start_s, end_s = (np.full(n, math.inf) for _ in range(3))
    waiting: list[deque[int]] = [deque() for _ in range(num_bins)]
    free_s = [-math.inf] * servers
    batches = 0

    def dispatch(members: deque[int], now_s: float) -> None:
        nonlocal batches
        server = min(range(servers), key=lambda i: free_s[i], default=None)
        begin_s = now_s if server is None else max(now_s, free_s[server])
        done_s = begin_s + max(float(service_s[i]) for i in members)
        for i in members:
            formed_s[i], start_s[i], end_s[i] = now_s, begin_s, done_s
        if server is not None:
            free_s[server] = done_s
        members.clear()
        batches += 1

    def leave_partial(until_s: float) -> None:
        while True:
            held = [b for b in range(num_bins) if waiting[b]]
            due = min(held, key=lambda b: waiting[b][0], default=None)  # the oldest request first
            if due is None or not (leaves_s := float(arrival_s[waiting[due][0]]) + max_wait_s) <= until_s:
                return
            dispatch(waiting[due], leaves_s)

    for i in range(n):
        if math.isfinite(max_wait_s):
            leave_partial(float(arrival_s[i]))
        here = waiting[bins[i]]
        here.append(i)
        if len(here) == batch:
            dispatch(here, float(arrival_s[i]))
    if math.isfinite(max_wait_s):
        leave_partial(math.inf)
    elif drain:
        for members in waiting:
            if members:
                dispatch(members, float(arrival_s[n - 1]))
    return Served(arrival_s, formed_s, start_s, end_s, batches)


def _compiled_run(
    arrival_s: Floats,
    service_s: Floats,
    bins: npt.NDArray[np.int64],
    batch: int,
    num_bins: int,
    servers: int,
    max_wait_s: float,
    drain: bool,
) -> Served:
    n = len(arrival_s)
    formed_s, start_s, end_s = (np.full(n, math.inf) for _ in range(3))
    waiting, held = np.zeros((num_bins, batch), np.int64), np.zeros(num_bins, np.int64)
    free_s = np.full(servers, -math.inf)
    given = (arrival_s, service_s, bins, batch, max_wait_s, int(drain), waiting, held, free_s)
    batches = _kernel()(*given, formed_s, start_s, end_s)
    return Served(arrival_s, formed_s, start_s, end_s, int(batches))


@lru_cache(maxsize=1)
def _kernel() -> Any:
    from lengthwise import _jit
    from lengthwise.theory import batch_kernel

    f, i = _jit.f8_1d, _jit.i8_1d
    grid = _jit.i8_2d
    signature = _jit.i8(f, f, i, _jit.i8, _jit.f8, _jit.i8, grid, i, f, f, f, f)
    return _jit.compile_now(batch_kernel.serve, signature, cached=True)


def _checked(
    arrival_s: npt.ArrayLike, service_s: npt.ArrayLike, bins: npt.ArrayLike, num_bins: int
) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    arrival = np.ascontiguousarray(arrival_s, np.float64)
    service = np.ascontiguousarray(service_s, np.float64)
    put = np.ascontiguousarray(bins, np.int64)
    if not (arrival.ndim == 1 and arrival.shape == service.shape == put.shape):
        shapes = f"{arrival.shape}, {service.shape}, {put.shape}"
        raise InputError(f"arrival_s, service_s and bins must be columns of one length; shapes {shapes}")
    if not np.isfinite(arrival).all() or (np.diff(arrival) < 0).any():
        raise InputError("arrival_s must be finite and must not decrease; sort the requests first")
    if not (np.isfinite(service) & (service >= 0)).all():
        raise InputError("service_s must be finite and at least 0; look for NaN or negative times")
    if len(put) and not (put.min() >= 0 and put.max() < num_bins):
        raise InputError(f"bins must lie within 0 to {num_bins - 1}; found {put.min()} to {put.max()}")
    return arrival, service, put
