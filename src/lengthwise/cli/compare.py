"""``lengthwise compare``: how far one run is off another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lengthwise import report
from lengthwise.cli.options import HtmlReport, JsonFile
from lengthwise.cli.outputs import write_answers
from lengthwise.cli.tables import console
from lengthwise.metrics import Comparison, Slo
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Measured

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
        typer.Option(metavar="METRIC=LIMIT", help="Count goodput: ttft=2s, tpot=100ms, jct=1min; repeatable."),
    ] = None,
    fail_above: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC.STAT=SHARE",
            help="End with 1 if the error is surely larger, either way: all of its interval is, or the error itself "
            "where it has none; ttft.p95=0.10; repeatable.",
        ),
    ] = None,
    unpaired: Annotated[bool, typer.Option("--unpaired", help="Do not compare the same requests one by one.")] = False,
    report: HtmlReport = None,
    json: JsonFile = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no table.")] = False,
) -> None:
    """Compare two runs, simulated or measured: the error of A against B in every metric and quantile."""
    from lengthwise import metrics
    from lengthwise.cli import outputs, results

    limits, bounds = slo_of(slo or []), bounds_of(fail_above or [])
    outputs.require_answers(json, report, inputs=[a, b])
    ours, theirs = results.read_named([a, b])
    found = metrics.compare(ours, theirs, paired=False if unpaired else "auto", warmup_s=warmup, slo=limits)
    broken = exceeded_bounds(found, bounds)
    if not quiet and json != outputs.STDOUT:
        show(found)
    written = write(found, (ours, theirs), json, report)
    if not quiet:
        outputs.tell(written)
    for told in broken:
        typer.echo(f"above its bound: {told}", err=True)
    if broken:
        raise typer.Exit(1)


_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_SLOS = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "tpot_s", "jct": "jct_s", "e2e": "jct_s"}


def slo_of(texts: Sequence[str]) -> Slo | None:
    """The limits of ``--slo``; None where there are none."""
    limits: dict[str, float] = {}
    for text in texts:
        name, _, limit = (part.strip() for part in text.partition("="))
        if name not in _SLOS or (value := _seconds(limit)) is None:
            raise InputError(f"--slo must be like ttft=2s, tpot=100ms or jct=1min; it is {text!r}")
        limits[_SLOS[name]] = value
    return Slo(**limits) if limits else None


def _seconds(text: str) -> float | None:
    """Seconds of "200ms" or "2"; None where it is neither."""
    for unit in ("ms", "us", "min", "s", "h", ""):
        if text.endswith(unit):
            try:
                return float(text.removesuffix(unit)) * _UNITS_S.get(unit, 1.0)
            except ValueError:
                continue
    return None


def bounds_of(texts: Sequence[str]) -> dict[str, float]:
    """The bounds of ``--fail-above`` by metric and statistic."""
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
    """The errors surely above their bounds, in words; one that is not known is above.

    Raises:
        UnknownNameError: There is no such number.
    """
    told = []
    for key, bound in bounds.items():
        one = found[key]
        if math.isnan(one.error) or one.least > bound:
            ends = f" [{100 * one.low:+.1f}, {100 * one.high:+.1f}]" if one.has_interval else ""
            told.append(f"{key} is {100 * one.error:+.1f} %{ends} off, and {100 * bound:g} % is allowed")
    return told


def show(found: Comparison) -> None:
    """Prints doubts and the table."""
    console().print(report.compare_table(found))


def write(found: Comparison, runs: tuple[Measured, Measured], json: Path | None, html: Path | None) -> list[Path]:
    """Writes the files that were asked for, each whole or not at all, and returns them."""
    return write_answers(
        json,
        html,
        lambda path: report.write_compare_json(path, found),
        lambda path: report.write_compare_html(path, found, *runs),
    )
