"""``lengthwise workload show``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lengthwise.cli.options import TraceFormat

if TYPE_CHECKING:
    from lengthwise.schema.workload import Workload

EXAMPLES = """\b
Examples:
  lengthwise workload show chat-1m
  lengthwise workload show trace.csv --format azure
"""
PRESET_REQUESTS = 20_000
_BARS = "▁▂▃▄▅▆▇█"
_LEVELS = ("p5", "p25", "p50", "p75", "p90", "p99")


def run(
    source: Annotated[str, typer.Argument(metavar="FILE|NAME", help="A trace or log, or the name of a preset.")],
    *,
    format_: TraceFormat = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests drawn from a preset.")] = PRESET_REQUESTS,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw from a preset.")] = 0,
) -> None:
    """Show counts, rates, quantiles and a sketch of the lengths of a trace or a preset."""
    from lengthwise import workload
    from lengthwise.cli.tables import duration, print_properties, print_table

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
    rows = [
        [
            side,
            f"{s.mean:,.1f}",
            f"{s.sd:,.1f}",
            f"{s.min:,}",
            *(f"{s.quantiles[x]:,.0f}" for x in _LEVELS),
            f"{s.max:,}",
        ]
        for side, s in sides
    ]
    print_properties(d.name or "workload", properties)
    print_table(("tokens", "mean", "sd", "min", *_LEVELS, "max"), rows, drops=("p5", "p25", "sd"))


def open_workload(
    source: str, format_: str | None = None, num_requests: int = PRESET_REQUESTS, seed: int = 0
) -> Workload:
    """Return the requests of a trace file, or a draw from the preset of that name.

    Raises:
        InputError: There is neither, or the file cannot be read.
    """
    from lengthwise import workload
    from lengthwise.config.workload import read_trace
    from lengthwise.schema.errors import InputError, UnknownNameError

    path = Path(source).expanduser()
    if path.exists() or format_ is not None or path.suffix:
        return read_trace(path, format_)
    try:
        return workload.preset(source).generate(num_requests, seed=seed)
    except UnknownNameError as error:
        raise InputError(f"there is no file {source}, and {error}") from None


def _format(template: str, value: float | None) -> str:
    return "" if value is None else template.format(value)


def _sketch(counts: Iterable[int]) -> str:
    """Return a bar per bin; an empty bin is a space."""
    counts = list(counts)
    highest = max(counts)
    return "".join(_BARS[-(-c * 8 // highest) - 1] if c else " " for c in counts)
