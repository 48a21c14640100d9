"""Fairness between tenants on recorded traffic: shares of service, the largest gap of service, and its price in JCT."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from lengthwise.gateway.config import Order
from lengthwise.gateway.observe.replay import FCFS, ISRTF, SRTF, VirtualGateway, fit, workload_of
from lengthwise.gateway.observe.trace import MIN_POOL, Bools, Trace, pools_of, with_first_tokens
from lengthwise.policy.contracts import SERVICE_OUTPUT_WEIGHT
from lengthwise.statistics import Floats, Ints

MAX_PAIRED = 8  # tenants with most service, of which each pair is compared
MAX_SIMULATED = 500  # last requests whose JCT is simulated with and without fairness


@dataclass(frozen=True)
class TenantShare:
    """The traffic of a tenant. Service is prompt tokens plus twice the output tokens (VTC)."""

    name: str
    requests: int
    service: float
    jct_s: float  # mean


@dataclass(frozen=True)
class Fairness:
    """Service of tenants. A gap is the difference of two tenants' service while both had waiting requests."""

    tenants: tuple[TenantShare, ...]  # the one with most service first
    jain: float  # Jain's index of their service: 1 if all had the same, 1 / tenants if one had all
    backlogged_s: float  # longest time for which two tenants had waiting requests without a pause
    max_gap: float  # largest gap over all such intervals and priority classes
    bound: float  # 2 max(w_p L, w_q M), VTC's bound of the gap (Sheng et al. 2024, theorem 4.4)
    price: float  # mean JCT with ``fairness = "vtc"`` over that without, simulated; NaN if unknown

    @property
    def mean_jct_s(self) -> float:
        """Return the mean JCT of all requests."""
        return sum(one.requests * one.jct_s for one in self.tenants) / sum(one.requests for one in self.tenants)

    @property
    def gap_over_bound(self) -> float:
        """Return the largest gap as a multiple of the bound."""
        return self.max_gap / self.bound


def fairness(trace: Trace, order: Order) -> Fairness | None:
    """Return the fairness of recorded traffic, or None if it has fewer than two tenants.

    The bound has the longest prompt as L, and as M the most tokens of requests that ran at once. Outputs are taken to
    come evenly between first token and finish.
    """
    names, tenants = np.unique([one.tenant for one in trace.contexts], return_inverse=True)
    if len(names) < 2:
        return None
    trace, _ = with_first_tokens(trace)
    service = trace.prompt_tokens + SERVICE_OUTPUT_WEIGHT * trace.output_tokens
    shares = []
    for number, name in enumerate(names.tolist()):
        of_tenant = tenants == number
        jct_s = float(trace.jct_s[of_tenant].mean())
        shares.append(TenantShare(name, int(of_tenant.sum()), float(service[of_tenant].sum()), jct_s))
    totals = np.array([one.service for one in shares])
    first = np.argsort(-totals, kind="stable")
    paired, max_gap, backlogged_s = first[:MAX_PAIRED].tolist(), 0.0, 0.0
    classes = np.array([one.priority for one in trace.contexts])
    for priority in np.unique(classes):
        of_class = np.flatnonzero(classes == priority)
        gap, length_s = _largest_gap(trace.take(of_class), tenants[of_class], paired)
        max_gap, backlogged_s = max(max_gap, gap), max(backlogged_s, length_s)
    times_s = np.concatenate([trace.dispatched_s, trace.finished_s])
    tokens = trace.prompt_tokens + trace.output_tokens
    in_order = np.lexsort((np.repeat([1, 0], len(trace)), times_s))  # at equal times, ends come first
    most = float(np.cumsum(np.concatenate([tokens, -tokens])[in_order]).max())
    return Fairness(
        tuple(shares[at] for at in first),
        float(totals.sum() ** 2 / (len(totals) * (totals**2).sum())),
        backlogged_s,
        max_gap,
        2 * max(float(trace.prompt_tokens.max()), SERVICE_OUTPUT_WEIGHT * most),
        _price(trace, order),
    )


def _largest_gap(trace: Trace, tenant_of: Ints, tenants: list[int]) -> tuple[float, float]:
    """Return the largest gap of service between two tenants, and the longest time for which two tenants waited.

    ``tenant_of`` is the tenant of each request.
    """
    times_s = np.unique(np.concatenate([trace.arrival_s, trace.dispatched_s, trace.first_token_s, trace.finished_s]))
    before, after, waits = {}, {}, {}
    for tenant in tenants:
        one = trace.take(np.flatnonzero(tenant_of == tenant))
        before[tenant], after[tenant] = _service(one, times_s)
        changes = np.bincount(np.searchsorted(times_s, one.arrival_s), minlength=len(times_s))
        changes = changes - np.bincount(np.searchsorted(times_s, one.dispatched_s), minlength=len(times_s))
        waits[tenant] = np.cumsum(changes) > 0
    max_gap = longest_s = 0.0
    for a, b in combinations(tenants, 2):
        earlier, later = before[a] - before[b], after[a] - after[b]
        for start, end in _runs(waits[a] & waits[b]):
            # Both wait from ``times_s[start]`` to ``times_s[end]``, at which one of them stops waiting.
            gaps = np.concatenate([later[start:end], earlier[start + 1 : end + 1]])
            max_gap = max(max_gap, float(np.ptp(gaps)))
            longest_s = max(longest_s, float(times_s[end] - times_s[start]))
    return max_gap, longest_s


def _service(trace: Trace, times_s: Floats) -> tuple[Floats, Floats]:
    """Return the service of all requests just before and just after each time."""
    n, rest = len(times_s), SERVICE_OUTPUT_WEIGHT * (trace.output_tokens - 1.0)
    last_s = np.maximum(trace.finished_s, trace.first_token_s)
    is_ramp = last_s > trace.first_token_s
    first, last = np.searchsorted(times_s, trace.first_token_s), np.searchsorted(times_s, last_s)
    jumps = np.bincount(np.searchsorted(times_s, trace.dispatched_s), trace.prompt_tokens.astype(float), n)
    jumps += np.bincount(first, SERVICE_OUTPUT_WEIGHT + np.where(is_ramp, 0.0, rest), n)
    slope = np.where(is_ramp, rest / np.where(is_ramp, last_s - trace.first_token_s, 1.0), 0.0)
    slopes = np.cumsum(np.bincount(first, slope, n) - np.bincount(last, slope, n))
    ramps = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(times_s))])
    after = np.cumsum(jumps) + ramps
    return after - jumps, after


def _runs(values: Bools) -> list[tuple[int, int]]:
    """Return start and end of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], values, [False]]).astype(np.int8)))
    return [(int(start), min(int(end), len(values) - 1)) for start, end in edges.reshape(-1, 2)]


def _price(trace: Trace, order: Order) -> float:
    """Return mean JCT with fairness over that without, of the last requests of the largest pool of engines."""
    pool = max(pools_of(trace), key=len)
    pool = pool.take(np.arange(max(0, len(pool) - MAX_SIMULATED), len(pool)))
    if len(pool) < MIN_POOL:
        return math.nan
    _, tenants = np.unique([one.tenant for one in pool.contexts], return_inverse=True)
    service, workload = fit(pool), workload_of(pool, order.window_tokens)
    mode = order.mode if order.mode in (SRTF, ISRTF) else FCFS
    means = []
    for name in ("none", "vtc"):
        used = replace(order, mode=mode, fairness=name)
        means.append(VirtualGateway(workload, service, used, tenants=tenants.tolist()).run().jct_s.mean())
    return float(means[1] / means[0])


def fairness_text(found: Fairness) -> str:
    """Return the fairness as lines of text."""
    total = sum(one.service for one in found.tenants)
    lines = [
        "",
        f"Fairness between {len(found.tenants)} tenants (service: prompt + {SERVICE_OUTPUT_WEIGHT:g} x output tokens)",
        f"{'tenant':24}{'requests':>10}{'service':>14}{'share':>9}{'mean JCT':>12}",
    ]
    for one in found.tenants[:MAX_PAIRED]:
        share = f"{100 * one.service / total:.1f} %"
        lines.append(f"{one.name[:23]:24}{one.requests:>10,}{one.service:>14,.0f}{share:>9}{one.jct_s:>10.3f} s")
    lines.append(f"Jain's index {found.jain:.3f} (1: equal service)")
    if found.backlogged_s > 0:
        lines.append(
            f"largest gap of service while two tenants waited: {found.max_gap:,.0f}, {found.gap_over_bound:.2f} of "
            f"VTC's bound {found.bound:,.0f} (longest such time {found.backlogged_s:.1f} s)"
        )
    else:
        lines.append("no two tenants waited at the same time, so that fairness changes nothing")
    if not math.isnan(found.price):
        lines.append(f'price of fairness = "vtc": mean JCT x{found.price:.3f} of that without it, simulated')
    return "\n".join(lines)
