"""The errors of one run against another for a terminal."""

from __future__ import annotations

import dataclasses
import math

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lengthwise.metrics import Comparison, Counts, MetricDistance, MetricError, Side
from lengthwise.report.formatting import UNKNOWN, buckets, rounded

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


def is_significant(one: MetricError) -> bool:
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


def compare_table(comparison: Comparison) -> Group:
    """Doubts, then a row a number: A, B, the error and its interval; then distances and requests by bucket.

    Yellow marks errors whose interval does not hold 0.
    """
    return Group(_warnings(comparison), _numbers(comparison), _distances(comparison), _caption(comparison))


def _warnings(comparison: Comparison) -> Text:
    lines = [Text.assemble(("doubt: ", "bold yellow"), doubt) for doubt in comparison.warnings]
    return Text("\n").join(lines) if lines else Text("No doubts.", style="dim")


def _numbers(comparison: Comparison) -> Table:
    table = Table(header_style="bold", box=box.ROUNDED, border_style="dim")
    table.add_column("", no_wrap=True)
    for side, run in (("A", comparison.a), ("B", comparison.b)):
        table.add_column(f"{side}: {escape(run.name)}", justify="right", overflow="fold")
    table.add_column("error", justify="right")
    table.add_column("interval", justify="right")
    shown = comparison.errors
    for one, following in zip(shown, [*shown[1:], None], strict=True):
        last = following is None or (one.stat != "" and following.metric != one.metric)
        table.add_row(*_row(comparison, one), end_section=last)
    return table


def _row(comparison: Comparison, one: MetricError) -> tuple[Text | str, ...]:
    scale, unit = scale_of(comparison, one.metric)
    label = Text.assemble(f"{NAMES[one.metric]} {one.stat}".strip(), (f" {unit}" if unit else "", "dim"))
    error = Text(error_text(one), style="yellow" if is_significant(one) else "")
    values = (value_text(value * scale) for value in (one.a, one.b))
    return (label, *values, error, Text(interval_text(one), style="dim"))


def _distances(comparison: Comparison) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("whole distributions")
    for head in distance_heads(comparison):
        table.add_column(head, justify="right")
    for one in comparison.distances:
        table.add_row(NAMES[one.metric], *distance_cells(comparison, one))
    return table


def _caption(comparison: Comparison) -> Text:
    lines = [f"{how_paired(comparison)}."]
    for side, run in (("A", comparison.a), ("B", comparison.b)):
        own = f"; {client_text(run)}" if run.client else ""
        lines.append(f"{side} ({run.source}): {counts_text(run.counts)}{own}.")
    return Text("\n".join(lines), style="dim")
