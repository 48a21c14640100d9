"""Statistics of a run's steady state: from the end of the warm-up until the last arrival."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import engine
from lengthwise.metrics import hardware_of, request_column, weighted_quantiles
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.metric_names import OTHERS, QUANTILES
from lengthwise.schema.records import Records, RequestRecords, Status, TokenGaps
from lengthwise.schema.workload import Floats, Workload
from lengthwise.statistics import mean_estimate

WARMUP_SHARE = 0.2
"""Share of a run's time that is excluded, because the batches fill up from empty."""

HARDWARE_METRICS = ("busy_share", "kv_utilization", "batch_seqs", "mfu", "mbu", "power_w", "energy_j_per_output_token")
SCALAR_METRICS = tuple(key for key in OTHERS if key not in ("within_slo", "goodput"))
"""Metrics without a statistic that a window has without an SLO."""


@dataclass(frozen=True)
class Window:
    """The part of a run from ``start_s`` to ``end_s``, the last arrival, at which the run stopped.

    ``before`` is the same run stopped at ``start_s``. Equal inputs give equal bytes, so that it is exactly the
    beginning of ``records``: sums over the window are differences of the two. None: the window is the complete run.
    """

    deployment: Deployment
    records: Records
    before: Records | None
    start_s: float
    end_s: float

    def waits_s(self, column: str, guard_s: float) -> Floats:
        """Return [m] a latency of arrivals in the window, except those of its last ``guard_s``.

        It is infinite where it did not end: the request was rejected, timed out or still ran for at least ``guard_s``.
        """
        values = request_column(self._arrivals(guard_s), column)
        return np.where(np.isnan(values), math.inf, values)

    def censored_waits_s(self, column: str, guard_s: float) -> Floats:
        """Return [m] the same latencies, with those of unfinished requests censored at the end of the run.

        They serve for means, which one infinity would make infinite in a run of any length.
        """
        arrivals = self._arrivals(guard_s)
        values = request_column(arrivals, column)
        is_censored = np.isnan(values) & (arrivals.status == Status.UNFINISHED)
        values = np.where(is_censored, self.end_s - arrivals.arrival_s, values)
        return np.where(np.isnan(values), math.inf, values)

    def tpot_s(self, guard_s: float) -> Floats:
        """Return [m] TPOT of the same arrivals, until the end for unfinished ones.

        It is 0 without a second token and infinite without a first one.
        """
        r = self._arrivals(guard_s)
        until_s = np.where(np.isnan(r.finished_s), self.end_s, r.finished_s)
        tpot_s = (until_s - r.first_token_s) / np.maximum(r.output_tokens - 1, 1)
        is_lost = (r.status == Status.REJECTED) | (r.status == Status.TIMED_OUT) | np.isnan(r.first_token_s)
        return np.where(is_lost, math.inf, np.where(r.output_tokens > 1, tpot_s, 0.0))

    def _arrivals(self, guard_s: float) -> RequestRecords:
        r = self.records.requests
        ends = np.searchsorted(r.arrival_s, [self.start_s, max(self.start_s, self.end_s - guard_s)])
        return _rows(r, slice(*ends))

    def queue_growth(self) -> float:
        """Return the growth of the queue of unprocessed requests over the window, as a share of its arrivals."""
        r = self.records.requests
        is_served = (r.status == Status.UNFINISHED) | (r.status == Status.FINISHED)
        first, last = (
            int((is_served & (r.arrival_s <= at_s) & ~(r.scheduled_s <= at_s)).sum())
            for at_s in (self.start_s, self.end_s)
        )
        arrivals = int(np.searchsorted(r.arrival_s, self.end_s) - np.searchsorted(r.arrival_s, self.start_s))
        return (last - first) / max(arrivals, 1)

    def gaps(self) -> TokenGaps:
        """Return the times between tokens in the window."""
        total = self.records.gaps
        if self.before is None:
            return total
        sums = {n: getattr(total, n) - getattr(self.before.gaps, n) for n in ("histogram", "total", "sum_s")}
        return dataclasses.replace(total, **sums)

    def finished(self) -> npt.NDArray[np.bool_]:
        """Return [n] which requests finished in the window."""
        finished_s = self.records.requests.finished_s
        return np.asarray((finished_s > self.start_s) & (finished_s <= self.end_s))

    def as_records(self) -> Records:
        """Return the window as a run: its sums, the requests that finished in it, its length."""
        totals = self.records.totals
        if self.before is not None:
            names = [f.name for f in dataclasses.fields(totals)]
            totals = type(totals)(**{n: getattr(totals, n) - getattr(self.before.totals, n) for n in names})
        return dataclasses.replace(
            self.records,
            requests=_rows(self.records.requests, self.finished()),
            totals=totals,
            gaps=self.gaps(),
            end_s=self.end_s - self.start_s,
        )


def _rows(requests: RequestRecords, rows: Any) -> RequestRecords:
    return type(requests)(**{f.name: getattr(requests, f.name)[rows] for f in dataclasses.fields(requests)})


def observe(workload: Workload, deployment: Deployment, seed: int, *, sums: bool = True) -> Window:
    """Simulate a workload of an open loop, and return its steady part.

    ``seed`` is that of routers that draw. Without ``sums`` the window has no sums and gaps, which take a second run, of
    its beginning.
    """
    end_s = float(workload.arrival_s[-1])
    start_s = WARMUP_SHARE * end_s
    simulated = partial(engine.simulate, workload, deployment, seed=seed, max_log_steps=0)
    before = simulated(time_limit_s=start_s) if sums else None
    return Window(deployment, simulated(time_limit_s=end_s), before, start_s, end_s)


def values_of(window: Window, guard_s: float, quantiles: Mapping[str, float] = QUANTILES) -> dict[str, float]:
    """Return the metrics of a window by name, as in Point.values, except within_slo.

    TTFT and queueing delay cover arrivals in the window except those of its last ``guard_s``: infinite where they
    lasted longer, and censored at the end in means. JCT and TPOT cover the requests that finished in it.
    """
    finished = window.as_records()
    values: dict[str, float] = {}
    for metric in ("ttft", "queueing_delay"):
        values |= _statistics(metric, window.waits_s(f"{metric}_s", guard_s), quantiles)
        censored_s = window.censored_waits_s(f"{metric}_s", guard_s)
        values[f"{metric}.mean"] = float(censored_s.mean()) if len(censored_s) else math.nan
    for metric in ("jct", "tpot"):
        column = request_column(finished.requests, f"{metric}_s")
        values |= _statistics(metric, column[~np.isnan(column)], quantiles)
    return values | _gap_statistics(window.gaps(), quantiles) | _scalars(window, finished)


def mean_point(runs: Sequence[Mapping[str, float]], level: float) -> dict[str, Estimate]:
    """Return each metric's mean over seeds with its t interval."""
    with np.errstate(invalid="ignore"):
        return {name: mean_estimate([run[name] for run in runs], level) for name in runs[0]}


def _statistics(metric: str, values: Floats, quantiles: Mapping[str, float]) -> dict[str, float]:
    mean, found = math.nan, np.full(len(quantiles), math.nan)
    if len(values):
        mean = float(values.mean())
        with np.errstate(invalid="ignore"):
            found = np.quantile(values, list(quantiles.values()), method="lower")
    return _named(metric, mean, found, quantiles)


def _gap_statistics(gaps: TokenGaps, quantiles: Mapping[str, float]) -> dict[str, float]:
    mean, found = math.nan, np.full(len(quantiles), math.nan)
    if gaps.total:
        used, mean = gaps.histogram > 0, gaps.sum_s / gaps.total
        middles = np.minimum((gaps.edges_s[:-1] + gaps.edges_s[1:]) / 2, gaps.max_s)[used]
        found = weighted_quantiles(middles, gaps.histogram[used], np.array(list(quantiles.values())))
    return _named("tbt", mean, found, quantiles)


def _named(metric: str, mean: float, found: Floats, quantiles: Mapping[str, float]) -> dict[str, float]:
    named = {f"{metric}.{statistic}": float(value) for statistic, value in zip(quantiles, found, strict=True)}
    return {f"{metric}.mean": mean, **named}


def _scalars(window: Window, finished: Records) -> dict[str, float]:
    r, span_s = finished.requests, finished.end_s
    hardware = hardware_of(finished, window.deployment)
    requests, tokens = len(r.output_tokens), float(r.output_tokens.sum())
    status = window.records.requests.status
    usd = window.deployment.price_per_hour_usd / 3600 * span_s
    return {
        "requests_per_s": requests / span_s,
        "output_tokens_per_s": tokens / span_s,
        "served": 1 - float(((status == Status.REJECTED) | (status == Status.TIMED_OUT)).mean()),
        "preemptions_per_request": float(r.preemptions.mean()) if requests else math.nan,
        **{name: getattr(hardware, name).value for name in HARDWARE_METRICS},
        "usd_per_million_output_tokens": usd * 1e6 / tokens if tokens else math.nan,
        "usd_per_thousand_requests": usd * 1e3 / requests if requests else math.nan,
    }
