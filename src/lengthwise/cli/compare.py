"""``lengthwise compare``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lengthwise.cli import outputs
from lengthwise.cli.options import HtmlReport, JsonFile, NoTable
from lengthwise.schema.errors import InputError

if TYPE_CHECKING:
    from lengthwise.metrics import Comparison, Slo

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
    b: Annotated[Path, typer.Argument(metavar="B", help=f"The reference. {_RUN}")],
    *,
    warmup: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Leave out requests that arrived earlier.")
    ] = 0.0,
    slo: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=LIMIT", help="Count goodput: ttft=2s, tpot=100ms, jct=1min; repeatable."),
    ] = None,
    fail_above: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC.STAT=SHARE",
            help="Exit with 1 if the absolute error is significantly larger: its complete interval is, or the error "
            "itself if it has no interval; ttft.p95=0.10; repeatable.",
        ),
    ] = None,
    unpaired: Annotated[bool, typer.Option("--unpaired", help="Do not compare the same requests one by one.")] = False,
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

    limits, bounds = slo_of(slo or []), bounds_of(fail_above or [])
    outputs.require_answers(json, report, [a, b])
    prediction, reference = read_named([a, b])
    found = metrics.compare(prediction, reference, paired=False if unpaired else "auto", warmup_s=warmup, slo=limits)
    exceeded = exceeded_bounds(found, bounds)
    if not quiet and json != outputs.STDOUT:
        console().print(reports.compare_table(found))
    written = outputs.write_answers(
        json,
        report,
        lambda path: reports.write_compare_json(path, found),
        lambda path: reports.write_compare_html(path, found, prediction, reference),
    )
    if not quiet:
        outputs.print_written(written)
    for line in exceeded:
        typer.echo(f"above its bound: {line}", err=True)
    if exceeded:
        raise typer.Exit(1)


_UNITS_S = {"ms": 1e-3, "us": 1e-6, "min": 60.0, "s": 1.0, "h": 3600.0, "": 1.0}  # "s" after the units that end in s
_SLOS = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "tpot_s", "jct": "jct_s", "e2e": "jct_s"}


def slo_of(texts: Sequence[str]) -> Slo | None:
    """Return the limits of ``--slo``; None without any."""
    from lengthwise.metrics import Slo

    limits: dict[str, float] = {}
    for text in texts:
        name, _, limit = (part.strip() for part in text.partition("="))
        unit = next(unit for unit in _UNITS_S if limit.endswith(unit))
        try:
            limits[_SLOS[name]] = float(limit.removesuffix(unit)) * _UNITS_S[unit]
        except (KeyError, ValueError):
            raise InputError(f"--slo must be like ttft=2s, tpot=100ms or jct=1min; it is {text!r}") from None
    return Slo(**limits) if limits else None


def bounds_of(texts: Sequence[str]) -> dict[str, float]:
    """Return the bounds of ``--fail-above`` by metric and statistic."""
    bounds = {}
    for text in texts:
        key, _, share = (part.strip() for part in text.partition("="))
        try:
            bounds[key] = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
        except ValueError:
            raise InputError(f"--fail-above must be like ttft.p95=0.10; it is {text!r}") from None
        if not bounds[key] >= 0:
            raise InputError(f"--fail-above must have a share of at least 0; it is {text!r}")
    return bounds


def exceeded_bounds(found: Comparison, bounds: dict[str, float]) -> list[str]:
    """Return a sentence for each error that is significantly above its bound, or unknown.

    Raises:
        UnknownNameError: A bound is for a number that the comparison does not have.
    """
    exceeded = []
    for key, bound in bounds.items():
        one = found[key]
        if math.isnan(one.error) or one.least > bound:
            interval = f" [{100 * one.low:+.1f}, {100 * one.high:+.1f}]" if one.has_interval else ""
            exceeded.append(f"{key} is {100 * one.error:+.1f} %{interval} off; {100 * bound:g} % is allowed")
    return exceeded
