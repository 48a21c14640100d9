"""All numbers of a deployment under one load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lengthwise.metrics import hardware_of, over_seeds, request_column, weighted_quantiles
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.records import Records, Status
from lengthwise.search.window import Window

Floats = npt.NDArray[np.float64]

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

_ARRIVING = {"ttft": "ttft_s", "queueing_delay": "queueing_delay_s"}
_FINISHING = {"jct": "jct_s", "tpot": "tpot_s"}


def values_of(
    window: Window, guard_s: float, quantiles: Mapping[str, float] = STATISTICS
) -> dict[str, float]:
    """Every metric of the window by name, as in Point.values, but for goodput.

    TTFT and queueing delay are of the requests that arrive in it, all but those of its last
    ``guard_s`` (inf: had to wait longer; in a mean the wait until the end); JCT and TPOT of those that finish in it.
    """
    finished = window.as_records()
    values: dict[str, float] = {}
    for name, column in _ARRIVING.items():
        values |= _statistics(name, window.waiting(column, guard_s), quantiles)
        told = window.waited(column, guard_s)
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
            mean, half = over_seeds(np.array([run[name] for run in runs]), level)
        out[name] = Estimate(float(mean), float(half))
    return out


def _statistics(name: str, values: Floats, quantiles: Mapping[str, float]) -> dict[str, float]:
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


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan
