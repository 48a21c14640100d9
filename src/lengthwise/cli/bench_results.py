"""What ``lengthwise bench`` shows: the table of simulate, the engine, and what the client says of itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import typer

from lengthwise import metrics, report
from lengthwise.cli.tables import console, duration, print_table
from lengthwise.config import Scenario
from lengthwise.measure import INTERRUPTED
from lengthwise.report import Result
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Measured, Status
from lengthwise.usecases.bench import deployment_of_server
from lengthwise.usecases.simulate import slo_of

_COLUMNS = ("outcome", "requests", "server says")
_TOLD_AS_FINISHED = "lied usage"

_ADVICE = {
    "http 401": "give the right --api-key",
    "http 403": "give the right --api-key",
    "http 404": "check the address and --model",
    "http 408": "lower the load (--request-rate, --concurrency)",
    "http 429": "lower the load (--request-rate, --concurrency)",
    "http 503": "lower the load (--request-rate, --concurrency), or wait until the server is ready",
    "http 4": "send what it takes: lengths (--isl, --osl) within its limits, or no exact lengths (--no-exact)",
    "http 5": "look into the server's log",
    "server error": "look into the server's log",
    "malformed": "check that the address is that of an OpenAI-compatible server",
    "stalled": "lower the load, or wait longer for a byte (--stall)",
    "timed out": "lower the load, or wait longer for an answer (--timeout)",
    "empty answer": "look at what the server streams, in which no token is, and into its log",
}
_ENDED_AT_ONCE = "ask for exact lengths (without --no-exact)"
"""Of an empty answer where the model may end it as it likes."""
SERVER_FAILED = 3
"""The exit code of a run that a server's failures ended, though some requests had finished."""
_REFUSED = "refused"
"""What a request fails of where nobody listens."""
_GONE = "see whether the server still runs, and look into its log"


def show_outcomes(measured: Measured) -> None:
    """Prints a row an outcome, where not all requests finished as they should."""
    if measured.errors or (measured.records.requests.status != Status.FINISHED).any():
        print_table(_COLUMNS, list(_rows(measured)))


def require_finished(measured: Measured, retained: Path | None) -> None:
    """Nothing, where requests finished.

    Raises:
        InputError: None did; it says of what they failed, what to do and where the records are.
    """
    if (measured.records.requests.status == Status.FINISHED).any():
        return
    failures = _failures(measured)
    said = "; ".join(_message(one) for one in failures[:3])
    why = said or ("; ".join(measured.warnings) or "the run was too short")
    exact = bool(measured.metadata["arguments"]["exact"])
    todo = "; ".join(dict.fromkeys(_suggestion(one["reason"], exact=exact) for one in failures[:3]))
    raise InputError(
        f"no request finished: {why}. To do: {todo or 'let it run longer (--time-limit)'}"
        + (f". What there is was kept in {retained}, marked as partial" if retained else "")
    )


def words(measured: Measured) -> str:
    """Failures in one line; empty where there are none."""
    return "; ".join(_message(one) for one in _failures(measured))


def was_interrupted(measured: Measured) -> bool:
    """Whether Ctrl-C ended the run."""
    return any(f"ended by {INTERRUPTED}" in doubt for doubt in measured.warnings)


def was_given_up(measured: Measured) -> bool:
    """Whether failures in a row ended the run before its requests had ended."""
    return any("a partial run, ended by" in doubt and "failures in a row" in doubt for doubt in measured.warnings)


def was_left(measured: Measured) -> bool:
    """Whether nobody listened any more at the run's end: the last requests were refused, too few to give up for."""
    refused = measured.errors.get(_REFUSED, 0)
    if not refused:
        return False
    by_arrival = np.argsort(measured.records.requests.arrival_s, kind="stable")
    last = measured.records.requests.status[by_arrival[-refused:]]
    return bool((last != Status.FINISHED).all())


def _rows(measured: Measured) -> Iterator[list[str]]:
    status, failures = measured.records.requests.status, _failures(measured)
    finished = int(np.count_nonzero(status == Status.FINISHED))
    yield ["finished", f"{finished:,}", ""]
    for one in failures:
        of_these = "of these: " if one["reason"] == _TOLD_AS_FINISHED else ""
        yield [of_these + one["reason"], f"{one['count']:,}", one["message"]]
    failed = sum(one["count"] for one in failures if one["reason"] != _TOLD_AS_FINISHED)
    if left := len(status) - finished - failed:
        yield ["cut off, or never due, at the run's end", f"{left:,}", ""]


def _failures(measured: Measured) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = measured.metadata["failures"]
    return found


def _message(one: dict[str, Any]) -> str:
    message = f' ("{one["message"]}")' if one["message"] else ""
    return f"{one['reason']}: {one['count']:,}{message}"


def _suggestion(reason: str, *, exact: bool) -> str:
    if reason == "empty answer" and not exact:
        return _ENDED_AT_ONCE
    return next((_ADVICE[key] for key in (reason, reason[:6]) if key in _ADVICE), _GONE)


_LENGTHS = ("workload.prompt=", "workload.output=")
_ARRIVAL_METRICS = tuple(
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
    told = scenario or workload or any(text.startswith(_ARRIVAL_METRICS) for text in overrides)
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


def result_of(measured: Measured, requested: Scenario) -> Result:
    """The run as reports take it.

    Raises:
        InputError: The scenario's warm-up leaves no request to count.
    """
    slo = slo_of(requested)
    summary = metrics.summarize(measured.records, slo=slo, warmup_s=requested.run.warmup_s)
    metadata = measured.metadata
    client = metadata["client"]
    engine = {
        "Model": metadata["model"],
        "Engine": f"{metadata['engine']} {metadata['version']}".strip() or metadata["url"],
        "Address": metadata["url"],
        "Started": metadata["start"],
        "Prompts": f"{metadata['prompts']}",
        "Sent late": late_words(client),
        "Client's share of a core": f"{100 * client['cpu_share']:.0f} %",
    }
    if failed := words(measured):
        engine["Failures"] = failed
    return Result(
        name="measured",
        summary=summary,
        records=measured.records,
        deployment=None,
        notes=measured.warnings,
        engine=engine,
    )


def show(result: Result, measured: Measured) -> None:
    """Prints the engine, the table with its doubts, and how late and busy the client was."""
    out = console()
    able, client = measured.metadata["capabilities"], measured.metadata["client"]
    out.print(
        f"{result.engine['Engine']}, model {measured.metadata['model']}; "
        f"prompts of {measured.metadata['prompts']}, {_lengths(able, measured.metadata['arguments'])}",
        style="dim",
    )
    out.print(report.table([result]))
    show_outcomes(measured)
    lag, looks = client["loop_lag_s"], client["loop_lag"]
    woke = f"{duration(lag['max'])} late at most" if lag["p99"] is None else f"{duration(lag['p99'])} late (p99)"
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
        f", {often['count']:,} of {often['of']:,} by more than {duration(often['limit_s'])}" if often["count"] else ""
    )
    return f"{duration(late['p50'])} after they were due ({tail}{beyond})"


def _lengths(capabilities: dict[str, Any], arguments: dict[str, Any]) -> str:
    fields = [name for name in ("ignore_eos", "min_tokens") if capabilities[name] is not False]
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


def end(measured: Measured, retained: Path | None) -> None:
    """Ends the program as the run ended: 130 after Ctrl-C, 3 where the server failed, an error if none finished."""
    if was_interrupted(measured):
        raise typer.Exit(130)
    require_finished(measured, retained)
    if was_given_up(measured):
        where = f"; {retained} is marked as partial" if retained else ""
        typer.echo(f"the run was ended early, since the server failed{where}: see whether it still runs", err=True)
        raise typer.Exit(SERVER_FAILED)
    if was_left(measured):
        where = f"; {retained} holds their failures" if retained else ""
        typer.echo(f"nobody listened to the last requests{where}: see whether the server still runs", err=True)
        raise typer.Exit(SERVER_FAILED)
