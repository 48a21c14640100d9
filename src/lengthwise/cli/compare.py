"""``lengthwise compare``: how far one run is off another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli._options import HtmlReport, JsonFile

EXAMPLES = """\b
Examples:
  lengthwise simulate examples/closed-loop.yaml --records simulated.parquet
  lengthwise compare simulated.parquet run.parquet --report errors.html
  lengthwise compare simulated.parquet run.parquet --fail-above ttft.p95=0.1 --fail-above jct.p50=5%
"""

_RUN = (
    "A file of records, from simulate --records or bench --records, or a result of vllm bench serve "
    "(--save-detailed), GuideLLM or AIPerf."
)


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
    report: HtmlReport = None,
    json: JsonFile = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no table.")] = False,
) -> None:
    """Compare two runs, simulated or measured: the error of A against B in every metric and quantile."""
    from lengthwise import metrics
    from lengthwise.cli import _compare_page, _outputs, _records

    limits, bounds = _compare_page.slo_of(slo or []), _compare_page.bounds_of(fail_above or [])
    _outputs.require_answers(json, report, inputs=[a, b])
    ours, theirs = _records.read_named([a, b])
    found = metrics.compare(ours, theirs, paired=False if unpaired else "auto", warmup_s=warmup, slo=limits)
    broken = _compare_page.broken(found, bounds)
    if not quiet and json != _outputs.STDOUT:
        _compare_page.show(found)
    written = _compare_page.write(found, (ours, theirs), json, report)
    if not quiet:
        _outputs.tell(written)
    for told in broken:
        typer.echo(f"above its bound: {told}", err=True)
    if broken:
        raise typer.Exit(1)
