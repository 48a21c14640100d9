"""``lengthwise compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from lengthwise.cli import options, outputs
from lengthwise.cli.options import Goodput, HtmlReport, JsonFile, NoTable

if TYPE_CHECKING:
    from lengthwise.metrics import Comparison

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
    a: Annotated[Path, Argument(metavar="A", help=f"The prediction. {_RUN}")],
    b: Annotated[Path, Argument(metavar="B", help=f"The reference. {_RUN}")],
    *,
    warmup: Annotated[float, Option(min=0, metavar="SECONDS", help="Leave out requests that arrived earlier.")] = 0.0,
    slo: Goodput = None,
    fail_above: Annotated[
        list[str] | None,
        Option(
            metavar="METRIC.STAT=SHARE",
            help="Exit with 1 if the relative error, without its sign, is above SHARE: its complete interval, or the "
            "error itself if it has no interval; ttft.p95=0.10; repeatable.",
        ),
    ] = None,
    unpaired: Annotated[bool, Option("--unpaired", help="Do not compare the same requests one by one.")] = False,
    report: HtmlReport = None,
    json: JsonFile = None,
    quiet: NoTable = False,
) -> None:
    """Compare a simulated run with a measured one.

    Any two runs can be compared: the report has the error of A against B in every metric and quantile.
    """
    from lengthwise import metrics
    from lengthwise import report as reports
    from lengthwise.cli.records import read_named
    from lengthwise.cli.tables import console
    from lengthwise.config.comparison import bounds_of, slo_of

    (limits, notes), bounds = slo_of(slo or []), bounds_of(fail_above or [])
    outputs.require_outputs(json, report, [a, b])
    options.print_notes(notes, quiet=quiet)
    prediction, reference = read_named([a, b])
    found = metrics.compare(prediction, reference, paired=False if unpaired else "auto", warmup_s=warmup, slo=limits)
    exceeded = reports.exceeded_bounds(found, bounds)
    if not quiet and json != outputs.STDOUT:
        console().print(reports.compare_table(found))

    def as_html(path: Path, found: Comparison) -> None:
        reports.write_compare_html(path, found, prediction, reference)

    outputs.write_outputs(json, report, found, reports.write_compare_json, as_html, quiet=quiet)
    for line in exceeded:
        typer.echo(f"above its bound: {line}", err=True)
    if exceeded:
        raise typer.Exit(1)
