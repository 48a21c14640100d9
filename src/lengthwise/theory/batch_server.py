"""Simulation of Multi-Bin Batching for given arrivals and service times: bins fill, batches queue, servers run them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.theory.service import Floats, check_count, check_counts


@dataclass(frozen=True, eq=False)
class Served:
    """Times of n requests. A request that no batch includes has infinite ``formed_s``, ``start_s`` and ``end_s``."""

    arrival_s: Floats  # [n]
    formed_s: Floats  # [n] when the batch was full (or had waited ``max_wait_s``)
    start_s: Floats  # [n] start of the batch on a server
    end_s: Floats  # [n] when its longest member finished
    batches: int

    @property
    def served(self) -> npt.NDArray[np.bool_]:
        """Return [n] whether the request was in a batch."""
        return np.isfinite(self.end_s)

    @property
    def latency_s(self) -> float:
        """Return the mean time from arrival to the end of the batch, over served requests."""
        done = self.served
        return float(np.mean(self.end_s[done] - self.arrival_s[done])) if done.any() else math.nan

    @property
    def throughput_rps(self) -> float:
        """Return the served requests per second from the first arrival to the last end."""
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
    """Simulate when every request's batch is formed, started and finished. Raises InputError for invalid columns.

    A batch is formed when its last member arrives. Batches are served in the order in which they were formed, each by
    the server that is free first. A batch takes as long as its longest member.

    Args:
        arrival_s: [n] seconds, non-decreasing.
        service_s: [n] seconds that each request takes alone, at least 0.
        bins: [n] the bin of each request, 0 to ``num_bins`` - 1.
        servers: Number of servers. None means infinitely many.
        max_wait_s: A bin becomes a batch when its oldest request has waited this long, before new arrivals join it.
        drain: Whether to dispatch partial batches at the last arrival, if ``max_wait_s`` is infinite.
        engine: "reference" gives the same result in plain Python.
    """
    check_counts(batch, num_bins)
    arrival = np.ascontiguousarray(arrival_s, np.float64)
    service = np.ascontiguousarray(service_s, np.float64)
    bin_of = np.ascontiguousarray(bins, np.int64)
    if not (arrival.ndim == 1 and arrival.shape == service.shape == bin_of.shape):
        shapes = f"{arrival.shape}, {service.shape}, {bin_of.shape}"
        raise InputError(f"arrival_s, service_s and bins must be columns of one length; shapes {shapes}")
    if not np.isfinite(arrival).all() or (np.diff(arrival) < 0).any():
        raise InputError("arrival_s must be finite and must not decrease; sort the requests first")
    if not (np.isfinite(service) & (service >= 0)).all():
        raise InputError("service_s must be finite and at least 0; look for NaN or negative times")
    if len(bin_of) and not (bin_of.min() >= 0 and bin_of.max() < num_bins):
        raise InputError(f"bins must lie within 0 to {num_bins - 1}; found {bin_of.min()} to {bin_of.max()}")
    if servers is not None:
        check_count("servers", servers)
    if math.isnan(max_wait_s) or max_wait_s < 0:
        raise InputError(f"max_wait_s must be at least 0 seconds, or infinite; it is {max_wait_s:g}")
    if engine == "reference":
        return reference(arrival, service, bin_of, batch, num_bins, servers or 0, float(max_wait_s), drain)
    n = len(arrival)
    formed_s, start_s, end_s = (np.full(n, math.inf) for _ in range(3))
    waiting, num_waiting = np.zeros((num_bins, batch), np.int64), np.zeros(num_bins, np.int64)
    free_s = np.full(servers or 0, -math.inf)
    columns = (arrival, service, bin_of, batch, float(max_wait_s), int(drain), waiting, num_waiting, free_s)
    batches = _kernel()(*columns, formed_s, start_s, end_s)
    return Served(arrival, formed_s, start_s, end_s, int(batches))


def reference(  # noqa: C901 - the specification, in one function
    arrival_s: Floats,
    service_s: Floats,
    bins: npt.NDArray[np.int64],
    batch: int,
    num_bins: int,
    servers: int,
    max_wait_s: float,
    drain: bool,
) -> Served:
    """Run ``serve`` in plain Python, as the specification of the kernel. 0 ``servers`` means infinitely many."""
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

    def dispatch_expired(until_s: float) -> None:
        while True:
            occupied = [b for b in range(num_bins) if waiting[b]]
            oldest = min(occupied, key=lambda b: waiting[b][0], default=None)
            if oldest is None or not (leaves_s := float(arrival_s[waiting[oldest][0]]) + max_wait_s) <= until_s:
                return
            dispatch(waiting[oldest], leaves_s)

    for i in range(n):
        if math.isfinite(max_wait_s):
            dispatch_expired(float(arrival_s[i]))
        members = waiting[bins[i]]
        members.append(i)
        if len(members) == batch:
            dispatch(members, float(arrival_s[i]))
    if math.isfinite(max_wait_s):
        dispatch_expired(math.inf)
    elif drain:
        for members in waiting:
            if members:
                dispatch(members, float(arrival_s[n - 1]))
    return Served(arrival_s, formed_s, start_s, end_s, batches)


@lru_cache(maxsize=1)
def _kernel() -> Any:
    from lengthwise import _jit
    from lengthwise.theory import batch_kernel

    f, i = _jit.f8_1d, _jit.i8_1d
    signature = _jit.i8(f, f, i, _jit.i8, _jit.f8, _jit.i8, _jit.i8_2d, i, f, f, f, f)
    return _jit.compile_now(batch_kernel.serve, signature, cached=True)
