"""``lengthwise compare``: how far one run is off another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  lengthwise simulate examples/closed-loop.yaml --records simulated.parquet
  lengthwise compare simulated.parquet run.parquet --report errors.html
  lengthwise compare simulated.parquet run.parquet --fail-above ttft.p95=0.1 --fail-above jct.p50=5%
"""

_RUN = "A file of records, from simulate --records or bench --records."


def run(
    a: Annotated[Path, typer.Argument(metavar="A", help=f"The prediction. {_RUN}")],
    b: Annotated[Path, typer.Argument(metavar="B", help=f"The truth. {_RUN}")],
    *,
    warmup: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Leave out requests that arrived before.")
    ] = 0.0,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC=LIMIT", help="Count goodput: ttft=2s, tpot=100ms, jct=1min; repeatable."
        ),
    ] = None,
    fail_above: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC.STAT=SHARE",
            help="End with 1 if the error is surely larger, either way: all of its interval is, or the error itself "
            "where it has none; ttft.p95=0.10; repeatable.",
        ),
    ] = None,
    unpaired: Annotated[
        bool, typer.Option("--unpaired", help="Do not compare the same requests one by one.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write a self-contained HTML report to this file.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(help="Write all numbers to this file; -: to standard output, without the table."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no table.")] = False,
) -> None:
    """Compare two runs, simulated or measured: the error of A against B in every metric and quantile."""
    from lengthwise import measure, metrics
    from lengthwise.cli import _compare_page, _outputs

    limits, bounds = _compare_page.slo_of(slo or []), _compare_page.bounds_of(fail_above or [])
    files = [path for path in (json, report) if path is not None and str(path) != "-"]
    _outputs.require_writable(files, inputs=[a, b])
    if report is not None:
        _outputs.require_plotly()
    ours, theirs = measure.read_records(a), measure.read_records(b)
    found = metrics.compare(ours, theirs, paired=False if unpaired else "auto", warmup_s=warmup, slo=limits)
    broken = _compare_page.broken(found, bounds)
    if not quiet and str(json) != "-":
        _compare_page.show(found)
    for path in _compare_page.write(found, (ours, theirs), json, report):
        if not quiet:
            typer.echo(f"wrote {path}", err=True)
    for told in broken:
        typer.echo(f"above its bound: {told}", err=True)
    if broken:
        raise typer.Exit(1)
