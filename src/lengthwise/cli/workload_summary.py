"""The page of ``lengthwise workload show``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lengthwise import workload as w
from lengthwise.cli.tables import duration, print_facts, print_table
from lengthwise.config.workload import read_trace
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.workload import Workload

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = ("p5", "p25", "p50", "p75", "p90", "p99")


def opened(source: str, form: str | None, num_requests: int, seed: int) -> Workload:
    """The requests of a trace file, or a draw from the preset of that name.

    Raises:
        InputError: There is neither, or the file cannot be read.
    """
    path = Path(source).expanduser()
    if path.exists() or form is not None or path.suffix:
        return read_trace(path, form)
    try:
        return w.preset(source).generate(num_requests, seed=seed)
    except UnknownNameError as error:
        raise InputError(f"there is no file {source}, and {error}") from None


def show(workload: Workload) -> None:
    """Prints counts, rates, quantiles and sketches."""
    d = w.describe(workload)
    print_facts(d.name or "workload", _metadata(d))
    columns = ("tokens", "mean", "sd", "min", *_SHOWN, "max")
    print_table(columns, [_row("prompt", d.prompt), _row("output", d.output)], drops=("p5", "p25", "sd"))


def _metadata(d: w.Description) -> list[tuple[str, str]]:
    open_loop = d.rate_rps is not None
    return [
        ("requests", f"{d.requests:,}"),
        ("tokens", f"{d.total_tokens:,} ({d.prompt.total:,} prompt, {d.output.total:,} output)"),
        ("prompt : output", f"{d.pd_ratio:.2f} of all, {d.pd_ratio_median:.2f} of the median request"),
        ("correlation", _number(d.rank_correlation, "{:+.2f} of the ranks of prompt and output")),
        ("concurrency", f"{d.concurrency} (closed loop)" if d.concurrency else ""),
        ("lasts", duration(d.duration_s) if open_loop else ""),
        ("rate", _number(d.rate_rps, "{:.3g} requests a second")),
        ("burstiness", _number(d.interarrival_cv, "{:.2f} (cv of the gaps; Poisson: 1)")),
        ("arrivals", _sketch(d.arrivals.counts) if open_loop else "all at once" if not d.concurrency else ""),
        *(
            (side, f"{_sketch(s.histogram.counts).rstrip()}  {s.min:,} to {s.max:,} tokens, logarithmic")
            for side, s in (("prompt", d.prompt), ("output", d.output))
        ),
    ]


def _number(value: float | None, text: str) -> str:
    return "" if value is None else text.format(value)


def _row(side: str, s: w.LengthSummary) -> list[str]:
    quantiles = [f"{s.quantiles[level]:,.0f}" for level in _SHOWN]
    middle = [f"{s.mean:,.1f}", f"{s.sd:,.1f}", f"{s.min:,}", *quantiles, f"{s.max:,}"]
    return [side, *middle]


def _sketch(counts: Iterable[int]) -> str:
    """A bar a bin; an empty bin is a space, so that gaps show."""
    counts = list(counts)
    top = max(counts)
    return "".join(_BARS[-(-c * 8 // top) - 1] if c else " " for c in counts)
