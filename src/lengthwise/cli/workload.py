"""``lengthwise workload show``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from lengthwise.cli.options import Columns, TraceFormat, print_notes
from lengthwise.schema.errors import InputError

EXAMPLES = """\b
Examples:
  lengthwise workload show chat-1m
  lengthwise workload show trace.csv --format azure
  lengthwise workload show examples/multi-turn.toml
"""
RARE_RPS = 0.05
RARE = "{rate:.2g} requests a second are few; if its arrivals are in milliseconds, name them: --column arrival_ms=NAME"
_BARS = "▁▂▃▄▅▆▇█"
_LEVELS = ("p5", "p25", "p50", "p75", "p90", "p99")


def run(
    source: Annotated[str, Argument(metavar="FILE|NAME", help="A trace, a log, a scenario, or the name of a preset.")],
    *,
    format_: TraceFormat = None,
    column: Columns = None,
    num_requests: Annotated[int, Option(min=1, help="Requests drawn from a preset.")] = 20_000,
    seed: Annotated[int, Option(min=0, help="Seed of the requests of a preset or a scenario.")] = 0,
) -> None:
    """Show counts, rates, sessions and a sketch of the lengths of a trace, a scenario or a preset."""
    from lengthwise import config, workload
    from lengthwise.cli.tables import duration, print_properties, print_table
    from lengthwise.config.sources import open_workload
    from lengthwise.config.workload import column_notes
    from lengthwise.usecases import short_options

    if format_ is not None and column:
        raise InputError("give --format or --column, not both: --column names the columns of a format of your own")
    if format_ is None and source.endswith((".toml", ".yaml", ".yml")):
        from lengthwise.usecases.requests import workload_by_seed

        scenario = config.load(source, short_options.columns(column))
        print_notes(scenario.notes)
        requests = workload_by_seed(scenario)(seed)
    else:
        requests = open_workload(source, format_ or short_options.columns_by_name(column) or None, num_requests, seed)
        print_notes([] if column else column_notes(source))
    shared = ""
    if requests.prefixes is not None:
        from lengthwise.report.formatting import counted
        from lengthwise.usecases.kv import shared_share

        shared = f"{shared_share(requests):.1%} of the prompt tokens: a prefix cache without limit finds them "
        shared += f"(in blocks of {counted(requests.prefixes.block_tokens, 'token')})"
    d = workload.describe(requests)
    if d.sessions is None and d.rate_rps is not None and d.rate_rps < RARE_RPS and d.requests >= 100:
        print_notes([RARE.format(rate=d.rate_rps)])
    sides = [("prompt", d.prompt), ("output", d.output)]
    rate, starts, sessions, delays, limits = _format("{:.3g} requests a second", d.rate_rps), "arrivals", "", "", ""
    if d.sessions is not None:
        one = d.sessions
        sessions = f"{one.count:,}, {one.mean_requests:.3g} requests each (mean; at most {one.max_requests:,})"
        sessions += f", {one.single_share:.0%} with a single one" if one.single_share else ""
        if one.delay_s is not None and one.delay_p90_s is not None:
            delays = f"{duration(one.delay_s)} (median), {duration(one.delay_p90_s)} (p90) until the next request"
        if one.starts_per_s is not None:
            rate = f"{one.starts_per_s:.3g} sessions a second, {rate} while as many sessions end as start"
            starts = "starts of sessions"
    if d.limits is not None:
        sides.append(("max_tokens", d.limits.tokens))
        limits = f"of {d.limits.share:.0%} of the requests; {d.limits.reached_share:.1%} of the outputs end there"
    properties = [
        ("requests", f"{d.requests:,}"),
        ("tokens", f"{d.total_tokens:,} ({d.prompt.total:,} prompt, {d.output.total:,} output)"),
        ("prompt : output", f"{d.pd_ratio:.2f} of all, {d.pd_ratio_median:.2f} of the median request"),
        ("correlation", _format("{:+.2f} of the ranks of prompt and output", d.rank_correlation)),
        ("concurrency", f"{d.concurrency} (closed loop)" if d.concurrency else ""),
        ("sessions", sessions),
        ("think times", delays),
        ("shared prefixes", shared),
        ("max_tokens", limits),
        (
            "duration",
            f"{duration(d.duration_s)}{', if requests took no time' if delays else ''}" if d.duration_s else "",
        ),
        ("rate", rate),
        ("burstiness", _format("{:.2f} (cv of the times between " + starts + "; Poisson: 1)", d.interarrival_cv)),
        ("arrivals", _sketch(d.arrivals.counts) if d.duration_s else "all at once" if not d.concurrency else ""),
        *(
            (side, f"{_sketch(s.histogram.counts).rstrip()}  {s.min:,} to {s.max:,} tokens, logarithmic")
            for side, s in sides[:2]
        ),
    ]
    rows = []
    for side, s in sides:
        spread = (s.min, *(s.quantiles[level] for level in _LEVELS), s.max)
        rows.append([side, f"{s.mean:,.1f}", f"{s.sd:,.1f}", *(f"{tokens:,.0f}" for tokens in spread)])
    print_properties(d.name or Path(source).stem, properties)
    print_table(("tokens", "mean", "sd", "min", *_LEVELS, "max"), rows, drops=("p5", "p25", "sd"))


def _format(template: str, value: float | None) -> str:
    return "" if value is None else template.format(value)


def _sketch(counts: Iterable[int]) -> str:
    counts = list(counts)
    highest = max(counts)
    return "".join(_BARS[-(-c * 8 // highest) - 1] if c else " " for c in counts)
