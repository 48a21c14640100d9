"""What the numbers of a comparison are called, and errors as people read them."""

from __future__ import annotations

import dataclasses
import math

from lengthwise.metrics import Comparison, Counts, MetricDistance, MetricError, Side
from lengthwise.report._counts import buckets
from lengthwise.report._numbers import UNKNOWN, rounded

NAMES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "tbt": "TBT",
    "jct": "JCT",
    "queueing_delay": "Queueing",
    "normalized_latency": "Latency/token",
    "requests_per_s": "Requests a second",
    "output_tokens_per_s": "Output tokens a second",
    "goodput": "Goodput a second",
    "within_slo": "Within SLO",
}
LONG = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "tbt": "Time between tokens (TBT)",
    "jct": "Job completion time (JCT)",
    "queueing_delay": "Queueing delay",
    "normalized_latency": "Latency per token",
}
MINUS = "\N{MINUS SIGN}"


def scale_of(comparison: Comparison, metric: str) -> tuple[float, str]:
    """Factor and unit in which both sides of a metric are shown."""
    if metric == "within_slo":
        return 100.0, "%"
    if metric not in LONG:
        return 1.0, ""
    most = max((max(e.a, e.b) for e in comparison.errors if e.metric == metric), default=0.0)
    return (1.0, "s") if most >= 1 else (1e3, "ms")


def value_text(value: float) -> str:
    """A number with three digits."""
    return rounded(value, math.nan)[0]


def error_text(one: MetricError) -> str:
    """A relative error, such as +3.2 %."""
    return percent(one.error)


def interval_text(one: MetricError) -> str:
    """The interval of the error in percent, such as "-1.0 to +7.4"; empty where it is not known."""
    if not one.has_interval:
        return ""
    return f"{signed(one.low)} to {signed(one.high)}"


def percent(share: float) -> str:
    """A signed percentage, or the mark of what is not known."""
    return f"{signed(share)} %" if math.isfinite(share) else UNKNOWN


def signed(share: float) -> str:
    """A share as a percentage with its sign; decimals where it is below 10 %."""
    shown = f"{100 * share:+z,.{1 if abs(share) < 0.1 else 0}f}"
    return shown.replace("-", MINUS)


def is_sure(one: MetricError) -> bool:
    """Whether the interval leaves no doubt that there is an error, and on which side."""
    return one.has_interval and (one.low > 0 or one.high < 0)


def counts_text(counts: Counts) -> str:
    """Requests by bucket; empty ones go without saying."""
    return ", ".join(buckets(counts))


def distance_heads(comparison: Comparison) -> list[str]:
    """What is told of whole distributions, and of pairs where there are any."""
    return ["moved by", "largest gap", *(("mean APE", "median APE") if comparison.paired else ())]


def distance_cells(comparison: Comparison, one: MetricDistance) -> list[str]:
    """The same for one metric."""
    cells = [percent(one.wasserstein).lstrip("+"), f"{one.kolmogorov_smirnov:.3f}"]
    pairs = (one.mape, one.median_ape) if comparison.paired else ()
    return cells + [percent(share).lstrip("+") for share in pairs]


def client_text(side: Side) -> str:
    """What of a side's TTFT and JCT is its client's own; empty where nobody says."""
    if side.client is None:
        return ""
    mean, median, most = (f"{1e3 * s:.3g} ms" for s in dataclasses.astuple(side.client))
    spread = f"median {median}, at most {most}"
    return f"of its mean TTFT and JCT {mean} are the client's own, from due until sent ({spread})"


def how_paired(comparison: Comparison) -> str:
    """Where the intervals come from."""
    level = f"{100 * comparison.level:g} %"
    how = "the same requests, one by one" if comparison.paired else "different requests"
    return f"{level} intervals of (A - B) / B by a bootstrap over blocks of requests; {how}"
