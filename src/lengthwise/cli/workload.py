"""``lengthwise workload show``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from typer import Argument, Option

from lengthwise.cli.options import TraceFormat

EXAMPLES = """\b
Examples:
  lengthwise workload show chat-1m
  lengthwise workload show trace.csv --format azure
"""
_BARS = "▁▂▃▄▅▆▇█"
_LEVELS = ("p5", "p25", "p50", "p75", "p90", "p99")


def run(
    source: Annotated[str, Argument(metavar="FILE|NAME", help="A trace or log, or the name of a preset.")],
    *,
    format_: TraceFormat = None,
    num_requests: Annotated[int, Option(min=1, help="Requests drawn from a preset.")] = 20_000,
    seed: Annotated[int, Option(min=0, help="Seed of the draw from a preset.")] = 0,
) -> None:
    """Show counts, rates, quantiles and a sketch of the lengths of a trace or a preset."""
    from lengthwise import workload
    from lengthwise.cli.tables import duration, print_properties, print_table
    from lengthwise.config.sources import open_workload

    d = workload.describe(open_workload(source, format_, num_requests, seed))
    open_loop = d.rate_rps is not None
    sides = (("prompt", d.prompt), ("output", d.output))
    properties = [
        ("requests", f"{d.requests:,}"),
        ("tokens", f"{d.total_tokens:,} ({d.prompt.total:,} prompt, {d.output.total:,} output)"),
        ("prompt : output", f"{d.pd_ratio:.2f} of all, {d.pd_ratio_median:.2f} of the median request"),
        ("correlation", _format("{:+.2f} of the ranks of prompt and output", d.rank_correlation)),
        ("concurrency", f"{d.concurrency} (closed loop)" if d.concurrency else ""),
        ("duration", duration(d.duration_s) if open_loop else ""),
        ("rate", _format("{:.3g} requests a second", d.rate_rps)),
        ("burstiness", _format("{:.2f} (cv of the interarrival times; Poisson: 1)", d.interarrival_cv)),
        ("arrivals", _sketch(d.arrivals.counts) if open_loop else "all at once" if not d.concurrency else ""),
        *(
            (side, f"{_sketch(s.histogram.counts).rstrip()}  {s.min:,} to {s.max:,} tokens, logarithmic")
            for side, s in sides
        ),
    ]
    rows = []
    for side, s in sides:
        spread = (s.min, *(s.quantiles[level] for level in _LEVELS), s.max)
        rows.append([side, f"{s.mean:,.1f}", f"{s.sd:,.1f}", *(f"{tokens:,.0f}" for tokens in spread)])
    print_properties(d.name or "workload", properties)
    print_table(("tokens", "mean", "sd", "min", *_LEVELS, "max"), rows, drops=("p5", "p25", "sd"))


def _format(template: str, value: float | None) -> str:
    return "" if value is None else template.format(value)


def _sketch(counts: Iterable[int]) -> str:
    counts = list(counts)
    highest = max(counts)
    return "".join(_BARS[-(-c * 8 // highest) - 1] if c else " " for c in counts)
