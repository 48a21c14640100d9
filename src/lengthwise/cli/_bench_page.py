"""What ``lengthwise bench`` shows: the table of simulate, the engine, and what the client says of itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from lengthwise import metrics, report
from lengthwise.cli import _bench_outcomes
from lengthwise.cli._show import console, duration
from lengthwise.report import Result
from lengthwise.scenario import Scenario, deployment_of_server, slo_of
from lengthwise.schema.errors import InputError
from lengthwise.schema.measured import Measured

_LENGTHS = ("workload.prompt=", "workload.output=")
_ARRIVING = tuple(
    f"workload.{key}" for key in ("request_rate", "concurrency", "arrivals", "trace", "preset", "rate")
)


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


def require_arrivals(scenario: Path | None, workload: str | None, overrides: Sequence[str]) -> None:
    """Nothing, if something says how requests of given lengths arrive.

    Raises:
        InputError: Neither a scenario or a workload does, nor any option.
    """
    lengths = all(any(text.startswith(key) for text in overrides) for key in _LENGTHS)
    told = scenario or workload or any(text.startswith(_ARRIVING) for text in overrides)
    if lengths and not told:
        raise InputError(
            "a load must say how its requests arrive: give --request-rate (open loop), --concurrency (closed loop), "
            "or a SCENARIO that says it"
        )


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
        "Sent late": late_words(client),
        "Client's share of a core": f"{100 * client['cpu_share']:.0f} %",
    }
    if failed := _bench_outcomes.words(measured):
        engine["Failures"] = failed
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
    _bench_outcomes.show(measured)
    lag, looks = client["loop_lag_s"], client["loop_lag"]
    woke = (
        f"{duration(lag['max'])} late at most" if lag["p99"] is None else f"{duration(lag['p99'])} late (p99)"
    )
    out.print(
        f"client: requests left {late_words(client)}; its loop woke {woke} in {looks['of']:,} looks, "
        f"{100 * client['cpu_share']:.0f} % of a core busy",
        style="dim",
        highlight=False,
    )


def late_words(client: dict[str, Any]) -> str:
    """How long after they were due requests left; a 99th percentile only of enough of them to have one."""
    late, often = client["late_s"], client["late"]
    tail = f"at most {duration(late['max'])}" if late["p99"] is None else f"p99 {duration(late['p99'])}"
    beyond = (
        f", {often['count']:,} of {often['of']:,} by more than {duration(often['limit_s'])}"
        if often["count"]
        else ""
    )
    return f"{duration(late['p50'])} after they were due ({tail}{beyond})"


def _lengths(able: dict[str, Any], arguments: dict[str, Any]) -> str:
    fields = [name for name in ("ignore_eos", "min_tokens") if able[name] is not False]
    if not arguments["exact"] or not fields:
        return "outputs of the length that came"
    return f"outputs of exact lengths by {' and '.join(fields)}"


def deployment_of(
    scenario: Path | None, workload: str | None, variant: str | None, overrides: Sequence[str]
) -> dict[str, Any] | None:
    """What the scenario says is behind the address; None, with a word on it, where that cannot be read."""
    try:
        return deployment_of_server(scenario, workload, variant, overrides)
    except InputError as error:
        typer.echo(f"records will not hold the scenario's deployment: {error}", err=True)
        return None


def end(measured: Measured, kept: Path | None) -> None:
    """Ends the program as the run ended: 130 after Ctrl-C, 3 where the server failed, an error if none finished."""
    if _bench_outcomes.was_interrupted(measured):
        raise typer.Exit(130)
    _bench_outcomes.end(measured, kept)
    if _bench_outcomes.was_given_up(measured):
        where = f"; {kept} is marked as partial" if kept else ""
        typer.echo(
            f"the run was ended early, since the server failed{where}: see whether it still runs", err=True
        )
        raise typer.Exit(_bench_outcomes.SERVER_FAILED)
    if _bench_outcomes.was_left(measured):
        where = f"; {kept} holds their failures" if kept else ""
        typer.echo(
            f"nobody listened to the last requests{where}: see whether the server still runs", err=True
        )
        raise typer.Exit(_bench_outcomes.SERVER_FAILED)
