"""What a run tells of the steady state: it stops at the last arrival, and its beginning is left out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import engine
from lengthwise.metrics import hardware_of, request_column, weighted_quantiles
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.records import Records, ReplicaTotals, RequestRecords, Status, TokenGaps
from lengthwise.schema.workload import Workload
from lengthwise.statistics import mean_estimate

Floats = npt.NDArray[np.float64]
Array = npt.NDArray[Any]

WARMUP_SHARE = 0.2
"""Of a run's time, left out: the batches fill up from empty."""


@dataclass(frozen=True)
class Window:
    """A run between ``start_s`` and ``end_s``; the run was stopped at the latter, the last arrival.

    ``before`` is the same run stopped at ``start_s`` (equal inputs give equal bytes, so that it is
    exactly the beginning of the other): sums over the window are differences of the two.
    """

    deployment: Deployment
    records: Records
    before: Records | None
    start_s: float
    end_s: float

    def waiting(self, name: str, guard_s: float) -> Floats:
        """[m] a wait of arrivals in the window, but for the last ``guard_s`` of it; inf: never.

        A request whose wait did not end (it was rejected, gave up, or was still under way at the end)
        has waited at least ``guard_s``: it counts as infinite.
        """
        values = request_column(self._arrivals(guard_s), name)
        return np.where(np.isnan(values), math.inf, values)

    def num_waiting(self, name: str, guard_s: float) -> Floats:
        """[m] the same, but what was still under way at the end counts with the time until then.

        That is for means, which one infinity would make infinite however long the run.
        """
        arrivals = self._arrivals(guard_s)
        values = request_column(arrivals, name)
        under_way = np.isnan(values) & (arrivals.status == Status.UNFINISHED)
        so_far = np.where(under_way, self.end_s - arrivals.arrival_s, values)
        return np.where(np.isnan(so_far), math.inf, so_far)

    def token_interval(self, guard_s: float) -> Floats:
        """[m] TPOT of the same arrivals, up to the end for those under way; 0 without a second token.

        Infinite: no token came.
        """
        r = self._arrivals(guard_s)
        until_s = np.where(np.isnan(r.finished_s), self.end_s, r.finished_s)
        pace = (until_s - r.first_token_s) / np.maximum(r.output_tokens - 1, 1)
        lost = (r.status == Status.REJECTED) | (r.status == Status.TIMED_OUT) | np.isnan(r.first_token_s)
        return np.where(lost, math.inf, np.where(r.output_tokens > 1, pace, 0.0))

    def _arrivals(self, guard_s: float) -> RequestRecords:
        r = self.records.requests
        rows = slice(*np.searchsorted(r.arrival_s, [self.start_s, max(self.start_s, self.end_s - guard_s)]))
        return type(r)(**{f.name: getattr(r, f.name)[rows] for f in dataclasses.fields(r)})

    def queue_growth(self) -> float:
        """By how much the queue grew in the window, as a share of the requests that arrived in it.

        The queue is of requests that were not in any step yet. In a steady state it is 0 on average.
        """
        r = self.records.requests
        still = (r.status == Status.UNFINISHED) | (r.status == Status.FINISHED)
        first, last = (self._queued(at_s, still) for at_s in (self.start_s, self.end_s))
        arrival_count = int(np.searchsorted(r.arrival_s, self.end_s) - np.searchsorted(r.arrival_s, self.start_s))
        return (last - first) / max(arrival_count, 1)

    def _queued(self, at_s: float, still: Array) -> int:
        r = self.records.requests
        return int((still & (r.arrival_s <= at_s) & ~(r.scheduled_s <= at_s)).sum())

    def gaps(self) -> TokenGaps:
        """Times between tokens in the window."""
        whole = self.records.gaps
        if self.before is None:
            return whole
        first = self.before.gaps
        return dataclasses.replace(
            whole,
            histogram=whole.histogram - first.histogram,
            total=whole.total - first.total,
            sum_s=whole.sum_s - first.sum_s,
        )

    def finished(self) -> Array:
        """[n] which requests finished in the window."""
        finished_s = self.records.requests.finished_s
        inside: Array = (finished_s > self.start_s) & (finished_s <= self.end_s)
        return inside

    def as_records(self) -> Records:
        """The window as a run of its own: its sums, the requests that finished in it, its length."""
        r, inside = self.records.requests, self.finished()
        return dataclasses.replace(
            self.records,
            requests=type(r)(**{f.name: getattr(r, f.name)[inside] for f in dataclasses.fields(r)}),
            totals=self._totals(),
            gaps=self.gaps(),
            end_s=self.end_s - self.start_s,
        )

    def _totals(self) -> ReplicaTotals:
        after = self.records.totals
        if self.before is None:
            return after
        first = self.before.totals
        names = [f.name for f in dataclasses.fields(after)]
        return ReplicaTotals(**{name: getattr(after, name) - getattr(first, name) for name in names})


def observe(workload: Workload, deployment: Deployment, seed: int, *, sums: bool = True) -> Window:
    """The steady part of a workload's run on a deployment.

    Args:
        workload: Requests that arrive one after the other.
        deployment: What serves them.
        seed: Of the routers that draw.
        sums: Whether sums and gaps of the window are wanted, which takes the beginning's run.
    """
    end_s = float(workload.arrival_s[-1])
    start_s = WARMUP_SHARE * end_s
    before = None
    if sums:
        before = engine.simulate(workload, deployment, seed=seed, time_limit_s=start_s, keep_steps=0)
    records = engine.simulate(workload, deployment, seed=seed, time_limit_s=end_s, keep_steps=0)
    return Window(deployment, records, before, start_s, end_s)


FloatArray = npt.NDArray[np.float64]

STATISTICS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
SIMPLE = (
    "requests_per_s",
    "output_tokens_per_s",
    "served",
    "preemptions_per_request",
    "busy_share",
    "kv_utilization",
    "batch_seqs",
    "mfu",
    "mbu",
    "power_w",
    "energy_j_per_output_token",
    "usd_per_million_output_tokens",
    "usd_per_thousand_requests",
)
"""Metrics without a statistic; "goodput" beside them."""

_ARRIVAL_METRICS = {"ttft": "ttft_s", "queueing_delay": "queueing_delay_s"}
_FINISHING = {"jct": "jct_s", "tpot": "tpot_s"}


def values_of(window: Window, guard_s: float, quantiles: Mapping[str, float] = STATISTICS) -> dict[str, float]:
    """Every metric of the window by name, as in Point.values, but for goodput.

    TTFT and queueing delay are of the requests that arrive in it, all but those of its last
    ``guard_s`` (inf: had to wait longer; in a mean the wait until the end); JCT and TPOT of those that finish in it.
    """
    finished = window.as_records()
    values: dict[str, float] = {}
    for name, column in _ARRIVAL_METRICS.items():
        values |= _statistics(name, window.waiting(column, guard_s), quantiles)
        told = window.num_waiting(column, guard_s)
        values[f"{name}.mean"] = float(told.mean()) if len(told) else math.nan
    for name, column in _FINISHING.items():
        told = request_column(finished.requests, column)
        values |= _statistics(name, told[~np.isnan(told)], quantiles)
    values |= _gap_statistics(window, quantiles)
    return values | _simple(window, finished)


def mean_point(runs: Sequence[Mapping[str, float]], level: float) -> dict[str, Estimate]:
    """Each metric's mean over seeds with its t interval."""
    out = {}
    for name in runs[0]:
        with np.errstate(invalid="ignore"):
            out[name] = mean_estimate([run[name] for run in runs], level)
    return out


def _statistics(name: str, values: FloatArray, quantiles: Mapping[str, float]) -> dict[str, float]:
    if len(values) == 0:
        return {f"{name}.{s}": math.nan for s in ("mean", *quantiles)}
    with np.errstate(invalid="ignore"):
        found = np.quantile(values, list(quantiles.values()), method="lower")
    named = zip(quantiles, found, strict=True)
    return {f"{name}.mean": float(values.mean()), **{f"{name}.{s}": float(v) for s, v in named}}


def _gap_statistics(window: Window, quantiles: Mapping[str, float]) -> dict[str, float]:
    gaps = window.gaps()
    if gaps.total == 0:
        return {f"tbt.{s}": math.nan for s in ("mean", *quantiles)}
    used = gaps.histogram > 0
    middles = np.minimum((gaps.edges_s[:-1] + gaps.edges_s[1:]) / 2, gaps.max_s)[used]
    found = weighted_quantiles(middles, gaps.histogram[used], np.array(list(quantiles.values())))
    named = zip(quantiles, found, strict=True)
    return {"tbt.mean": gaps.sum_s / gaps.total, **{f"tbt.{s}": float(v) for s, v in named}}


def _simple(window: Window, finished: Records) -> dict[str, float]:
    r, span_s = finished.requests, finished.end_s
    hardware = hardware_of(finished, window.deployment)
    done, tokens = len(r.output_tokens), float(r.output_tokens.sum())
    whole = window.records.requests
    lost = (whole.status == Status.REJECTED) | (whole.status == Status.TIMED_OUT)
    hour = window.deployment.price_per_hour_usd
    return {
        "requests_per_s": done / span_s,
        "output_tokens_per_s": tokens / span_s,
        "served": 1 - float(lost.mean()),
        "preemptions_per_request": float(r.preemptions.mean()) if done else math.nan,
        "busy_share": hardware.busy_share.value,
        "kv_utilization": hardware.kv_utilization.value,
        "batch_seqs": hardware.batch_seqs.value,
        "mfu": hardware.mfu.value,
        "mbu": hardware.mbu.value,
        "power_w": hardware.power_w.value,
        "energy_j_per_output_token": hardware.energy_j_per_output_token.value,
        "usd_per_million_output_tokens": _ratio(hour / 3600 * span_s * 1e6, tokens),
        "usd_per_thousand_requests": _ratio(hour / 3600 * span_s * 1e3, done),
    }


def _ratio(part: float, complete: float) -> float:
    return part / complete if complete > 0 else math.nan
