"""Measures the steady state of a run, from the end of the warm-up to the last arrival."""

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
from lengthwise.metrics import hardware_of, request_column, steady_period, weighted_quantiles
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.metric_names import OTHERS, PREFIX_CACHE, QUANTILES
from lengthwise.schema.records import Records, RequestRecords, Status, TokenGaps
from lengthwise.schema.workload import Floats, Workload
from lengthwise.statistics import mean_estimate

WARMUP_SHARE = 0.2  # share of a run's time that is excluded, because the batches are empty at its start

HARDWARE_METRICS = ("busy_share", "kv_utilization", "batch_seqs", "mfu", "mbu", "power_w", "energy_j_per_output_token")
SCALAR_METRICS = tuple(key for key in OTHERS if key not in ("within_slo", "goodput", *PREFIX_CACHE))
"""Metrics of every window that have no statistic and need no SLO."""


@dataclass(frozen=True)
class Window:
    """The measured part of a run: from ``start_s`` to ``end_s``, where the simulation stopped.

    ``end_s`` is the last arrival, or of an offline batch the last event. ``before`` has the records of the same
    simulation, stopped at ``start_s``. Simulations are deterministic, so that sums over the window are the differences
    of both records. Without ``before``, sums and gaps are those of the complete run.
    """

    deployment: Deployment
    records: Records
    before: Records | None
    start_s: float
    end_s: float
    shares_prefixes: bool = False  # whether prompts may begin alike

    def waits_s(self, column: str, guard_s: float) -> Floats:
        """Return the values [m] of a latency column for the requests that arrived in the window.

        The last ``guard_s`` seconds of the window do not count. The latency is infinite if the request was rejected,
        timed out, or had not come to the end of this latency when the run stopped.
        """
        values = request_column(self._arrivals(guard_s), column)
        return np.where(np.isnan(values), math.inf, values)

    def censored_waits_s(self, column: str, guard_s: float) -> Floats:
        """Return the latencies of ``waits_s``, but those of unfinished requests end when the run stops.

        They are for means, which one infinite latency makes infinite. Rejected and timed-out requests stay infinite.
        """
        arrivals = self._arrivals(guard_s)
        values = request_column(arrivals, column)
        is_censored = np.isnan(values) & (arrivals.status == Status.UNFINISHED)
        values = np.where(is_censored, self.end_s - arrivals.arrival_s, values)
        return np.where(np.isnan(values), math.inf, values)

    def tpot_s(self, guard_s: float) -> Floats:
        """Return the TPOT [m] of the same requests as ``waits_s``.

        An unfinished request is measured until the end of the run. The TPOT is 0 without a second token, and infinite
        without a first one.
        """
        r = self._arrivals(guard_s)
        until_s = np.where(np.isnan(r.finished_s), self.end_s, r.finished_s)
        tpot_s = (until_s - r.first_token_s) / np.maximum(r.output_tokens - 1, 1)
        is_lost = (r.status == Status.REJECTED) | (r.status == Status.TIMED_OUT) | np.isnan(r.first_token_s)
        return np.where(is_lost, math.inf, np.where(r.output_tokens > 1, tpot_s, 0.0))

    def _arrivals(self, guard_s: float) -> RequestRecords:
        r = self.records.requests
        return _rows(r, (r.arrival_s >= self.start_s) & (r.arrival_s < max(self.start_s, self.end_s - guard_s)))

    def queue_growth(self) -> float:
        """Return the growth of the queue over the window, as a share of arrivals.

        The queue is the requests without a first step. Under disaggregation those that wait for their KV transfer count
        too: they fill the memory of the prefill side before any request waits in front of it.
        """
        r = self.records.requests
        is_served = (r.status == Status.UNFINISHED) | (r.status == Status.FINISHED)
        first, last = (
            int((is_served & (r.arrival_s <= at_s) & ~(r.scheduled_s <= at_s)).sum())
            for at_s in (self.start_s, self.end_s)
        )
        if self.deployment.decode is not None and self.before is not None:
            first += self._without_transfer(self.before.requests)
            last += self._without_transfer(r)
        arrivals = int(((r.arrival_s >= self.start_s) & (r.arrival_s < self.end_s)).sum())
        return (last - first) / max(arrivals, 1)

    def _without_transfer(self, r: RequestRecords) -> int:
        """Return how many requests have a first token, and were last admitted by a replica that prefills."""
        is_prefilled = (r.status == Status.UNFINISHED) & ~np.isnan(r.first_token_s)
        return int((is_prefilled & (r.replica < self.deployment.parallel.ranks)).sum())

    def gaps(self) -> TokenGaps:
        """Return the times between tokens in the window."""
        total = self.records.gaps
        if self.before is None:
            return total
        sums = {n: getattr(total, n) - getattr(self.before.gaps, n) for n in ("histogram", "total", "sum_s")}
        return dataclasses.replace(total, **sums)

    def finished(self) -> npt.NDArray[np.bool_]:
        """Return whether each request finished in the window, [n]."""
        finished_s = self.records.requests.finished_s
        return np.asarray((finished_s > self.start_s) & (finished_s <= self.end_s))

    def prefix_cache(self) -> dict[str, float]:
        """Return the cached and loaded shares of the prompts that started in the window; {} without a cache."""
        r, deployment = self.records.requests, self.deployment
        if not (self.shares_prefixes and deployment.limits.enable_prefix_caching):
            return {}
        rows = (r.scheduled_s > self.start_s) & (r.scheduled_s <= self.end_s)
        columns = {"hit_rate": r.cached_tokens, "loaded_share": r.loaded_tokens if deployment.offload_blocks else None}
        prompt = float(r.prompt_tokens[rows].sum())
        return {
            name: float(column[rows].sum()) / prompt if prompt else math.nan
            for name, column in columns.items()
            if column is not None
        }

    def as_records(self) -> Records:
        """Return the window as records of a run, with the requests that finished in it and its own sums."""
        totals = self.records.totals
        if self.before is not None:
            names = [f.name for f in dataclasses.fields(totals)]
            totals = type(totals)(**{n: getattr(totals, n) - getattr(self.before.totals, n) for n in names})
        requests, span_s = _rows(self.records.requests, self.finished()), self.end_s - self.start_s
        return dataclasses.replace(self.records, requests=requests, totals=totals, gaps=self.gaps(), end_s=span_s)


def _rows(requests: RequestRecords, rows: Any) -> RequestRecords:
    return type(requests)(**{f.name: getattr(requests, f.name)[rows] for f in dataclasses.fields(requests)})


def simulated_window(workload: Workload, deployment: Deployment, seed: int, *, sums: bool = True) -> Window:
    """Simulate an open-loop workload, and return its steady part: the window after the warm-up.

    ``seed`` is for routers that draw. With ``sums``, the warm-up is simulated a second time, so that the window has
    sums of its own; under disaggregation always, for ``queue_growth``. The warm-up is WARMUP_SHARE of the run. With
    sessions, it is extended until they send requests at their full rate (``metrics.steady_period``), but at most to
    half of the run.
    """
    end_s = float(workload.arrival_s[-1])
    start_s = WARMUP_SHARE * end_s
    simulated = partial(engine.simulate, workload, deployment, seed=seed, max_log_steps=0)
    records = simulated(time_limit_s=end_s)
    if (steady := steady_period(records, workload)) is not None:
        start_s = min(max(start_s, steady[0]), end_s / 2)
    before = simulated(time_limit_s=start_s) if sums or deployment.decode is not None else None
    return Window(deployment, records, before, start_s, end_s, workload.prefixes is not None)


def window_metrics(window: Window, guard_s: float, quantiles: Mapping[str, float] = QUANTILES) -> dict[str, float]:
    """Return the metrics of a window by name, as in ``Point.values``, but without "within_slo".

    TTFT and queueing delay are of the requests that arrived in the window, without its last ``guard_s`` seconds.
    Requests that still wait when the run stops count as infinite in quantiles; in means, their latency ends there. JCT
    and TPOT are of the requests that finished in the window.
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


def mean_values(runs: Sequence[Mapping[str, float]], level: float) -> dict[str, Estimate]:
    """Return the mean of each metric over seeds, with its t interval."""
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
        **window.prefix_cache(),
        "usd_per_million_output_tokens": usd * 1e6 / tokens if tokens else math.nan,
        "usd_per_thousand_requests": usd * 1e3 / requests if requests else math.nan,
    }
