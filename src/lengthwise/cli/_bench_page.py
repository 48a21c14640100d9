"""What ``lengthwise bench`` shows: the table of simulate, the engine, and what the client says of itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from lengthwise import metrics, report
from lengthwise.cli._show import console, duration
from lengthwise.measure import INTERRUPTED
from lengthwise.report import Result
from lengthwise.scenario import Scenario, slo_of
from lengthwise.schema.errors import InputError
from lengthwise.schema.measured import Measured
from lengthwise.schema.records import Status


def settings(
    isl: int | None,
    osl: int | None,
    rate: float | None,
    concurrency: int | None,
    num_requests: int | None,
    slo: Sequence[str] | None,
) -> list[str]:
    """What the short options change of a scenario.

    Raises:
        InputError: A rate and a concurrency are given both.
    """
    if rate is not None and concurrency is not None:
        raise InputError("--request-rate (open loop) excludes --concurrency (closed loop); give one of them")
    numbers = {
        "prompt": isl,
        "output": osl,
        "request_rate": rate,
        "concurrency": concurrency,
        "num_requests": num_requests,
    }
    given = [f"workload.{name}={value}" for name, value in numbers.items() if value is not None]
    return given + [f"slo.{text}" for text in slo or ()]


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A callable for requests that ended and requests in all; a bar only on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as shown:
        task = shown.add_task("requests", total=None)
        yield lambda done, of: shown.update(task, completed=done, total=of)


def result_of(measured: Measured, asked: Scenario) -> Result:
    """The run as reports take it.

    Raises:
        InputError: The scenario's warm-up leaves no request to count.
    """
    slo = slo_of(asked)
    summary = metrics.summarize(measured.records, slo=slo, warmup_s=asked.run.warmup_s)
    facts = measured.facts
    client = facts["client"]
    engine = {
        "Model": facts["model"],
        "Engine": f"{facts['engine']} {facts['version']}".strip() or facts["url"],
        "Address": facts["url"],
        "Started": facts["start"],
        "Prompts": f"{facts['prompts']}",
        "Sent late, median and p99": f"{duration(client['late_s']['p50'])}, {duration(client['late_s']['p99'])}",
        "Client's share of a core": f"{100 * client['cpu_share']:.0f} %",
    }
    return Result(
        name="measured",
        summary=summary,
        records=measured.records,
        deployment=None,
        notes=measured.doubts,
        engine=engine,
    )


def show(result: Result, measured: Measured) -> None:
    """Prints the engine, the table with its doubts, and how late and busy the client was."""
    out = console()
    able, client = measured.facts["abilities"], measured.facts["client"]
    out.print(
        f"{result.engine['Engine']}, model {measured.facts['model']}; "
        f"prompts of {measured.facts['prompts']}, {_lengths(able, measured.facts['arguments'])}",
        style="dim",
    )
    out.print(report.table([result]))
    late, lag = client["late_s"], client["loop_lag_s"]
    out.print(
        f"client: requests left {duration(late['p50'])} after they were due (p99 {duration(late['p99'])}), its loop "
        f"woke {duration(lag['p99'])} late (p99), {100 * client['cpu_share']:.0f} % of a core busy",
        style="dim",
        highlight=False,
    )


def _lengths(able: dict[str, Any], arguments: dict[str, Any]) -> str:
    fields = [name for name in ("ignore_eos", "min_tokens") if able[name] is not False]
    if not arguments["exact"] or not fields:
        return "outputs of the length that came"
    return f"outputs of exact lengths by {' and '.join(fields)}"


def end(measured: Measured) -> None:
    """Ends the program as the run ended: 130 after Ctrl-C, an error where nothing was measured."""
    if any(f"ended by {INTERRUPTED}" in doubt for doubt in measured.doubts):
        raise typer.Exit(130)
    if not (measured.records.requests.status == Status.FINISHED).any():
        raise InputError(f"no request finished: {' '.join(measured.doubts) or 'the run was too short'}")
