"""``lengthwise bench``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from lengthwise.cli import options, outputs
from lengthwise.cli.options import ApiKey, Goodput, HtmlReport, JsonFile, Quiet
from lengthwise.cli.progress import bar
from lengthwise.schema.errors import InputError, OutputError

if TYPE_CHECKING:
    from lengthwise.config import Scenario
    from lengthwise.report import Result
    from lengthwise.schema.records import RunResult

EXAMPLES = """\b
Examples:
  lengthwise bench http://localhost:8000 --workload chat-1m --request-rate 4 --report bench.html
  lengthwise bench http://localhost:8000 --isl 512 --osl 128 --concurrency 16 --num-requests 100
  lengthwise bench http://localhost:8000 examples/chat-70b.toml --records run.parquet
"""
SERVER_FAILED = 3  # exit code of a run that failures of the server stopped after some requests had finished


def run(
    url: Annotated[str, Argument(metavar="URL", help="An OpenAI-compatible server, such as http://localhost:8000.")],
    scenario_file: Annotated[
        Path | None, Argument(metavar="[SCENARIO]", help="A .toml or .yaml file: workload, limits, deployment.")
    ] = None,
    *,
    workload: Annotated[str | None, Option(metavar="FILE|PRESET", help="A trace, or the name of a preset.")] = None,
    isl: Annotated[int | None, Option(min=1, help="Prompt tokens of every request.")] = None,
    osl: Annotated[int | None, Option(min=1, help="Output tokens of every request.")] = None,
    request_rate: Annotated[
        float | None, Option(help="Open loop: requests a second, Poisson; default: as in the workload.")
    ] = None,
    concurrency: Annotated[int | None, Option(min=1, help="Closed loop: number of concurrent requests.")] = None,
    num_requests: Annotated[int | None, Option(min=1, help="Default: 1,000, or all of a trace.")] = None,
    variant: Annotated[str | None, Option(help="The variant of the scenario whose workload is sent.")] = None,
    set_: Annotated[list[str] | None, options.setting("workload.cut=redraw")] = None,
    seed: Annotated[int | None, Option(min=0, help="Seed of requests and prompts; default: the scenario's.")] = None,
    salt: Annotated[
        int | None, Option(min=0, help="Salt of the prompts; default: a new one, so that no cache hits.")
    ] = None,
    slo: Goodput = None,
    warmup: Annotated[int, Option(min=0, help="Number of requests before the run, which do not count.")] = 3,
    time_limit: Annotated[float | None, Option(help="Seconds after which to stop; default: no limit.")] = None,
    stall: Annotated[float, Option(help="Seconds without a byte after which a request fails.")] = 120.0,
    timeout: Annotated[float, Option(help="Seconds after which a request fails.")] = 900.0,
    shared_prefix: Annotated[float, Option(min=0, max=1, help="Share of each prompt that all have in common.")] = 0.0,
    exact: Annotated[bool, Option(help="Exact output lengths; otherwise they are limits.")] = True,
    priorities: Annotated[
        bool, Option("--priorities", help="Send priorities (vLLM: --scheduling-policy priority).")
    ] = False,
    scrape: Annotated[bool, Option("--scrape", help="Record the server's /metrics of every second.")] = False,
    model: Annotated[str | None, Option(help="Model name at the server; default: its first.")] = None,
    api_key: ApiKey = None,
    records: Annotated[Path | None, Option(metavar="FILE.parquet", help="Write the requests and their times.")] = None,
    force: Annotated[bool, Option("--force", help="Replace an existing file of --records.")] = False,
    json: JsonFile = None,
    report: HtmlReport = None,
    quiet: Quiet = False,
) -> None:
    """Load a running server and record its latencies.

    The report has the metrics of simulate, and how late and busy the client was. The server's capabilities (token ids
    as prompts, outputs of exact lengths, token counts) are probed. Latencies count from when a request was due. Ctrl-C
    stops the run and writes the results so far. Exit codes: 2 no request finished; 3 some did, but failures of the
    server stopped the run; 130 Ctrl-C. Records contain the scenario's deployment, so that compare and calibrate know
    the hardware even if the model is served under another name.
    """
    from lengthwise import measure
    from lengthwise.backend.openai_protocol import Server
    from lengthwise.cli import simulate
    from lengthwise.usecases import bench

    if time_limit is not None and not time_limit > 0:
        raise InputError(f"--time-limit must be above 0 seconds; it is {time_limit:g}: leave it out for none")
    if request_rate is not None and concurrency is not None:
        raise InputError("--request-rate (open loop) excludes --concurrency (closed loop); give one of them")
    numbers = {"prompt": isl, "output": osl, "request_rate": request_rate, "concurrency": concurrency}
    numbers["num_requests"] = num_requests
    overrides = [*(set_ or ()), *(f"workload.{key}={value}" for key, value in numbers.items() if value is not None)]
    overrides += [f"slo.{text}" for text in slo or ()]
    _require_arrivals(scenario_file, workload, overrides)
    scenario = bench.server_scenario(scenario_file, workload, variant, overrides)
    outputs.require_outputs(json, report, scenario.files, [] if records is None else [records])
    if records is not None and records.is_file() and not force:  # is_file: a device or a pipe loses nothing
        raise OutputError(
            f"{records} exists already, and a measurement cannot be repeated: name another file, or give --force to "
            "replace it"
        )
    try:
        deployment = bench.deployment_of_server(scenario_file, workload, variant, overrides)
    except InputError as error:
        deployment = None
        typer.echo(f"records will not contain the scenario's deployment: {error}", err=True)
    options.print_notes(scenario.notes, quiet=quiet)
    if seed is None:
        seed = scenario.run.seed
    settings = measure.LoadSettings(
        seed=seed,
        salt=salt,
        warmup_requests=warmup,
        time_limit_s=math.inf if time_limit is None else time_limit,
        exact=exact,
        shared_prefix=shared_prefix,
        priorities=priorities,
        scrape=scrape,
    )
    with bar("measuring", quiet=quiet, refresh_per_second=2) as progress:  # redraws cost time of the load generator
        measured = measure.bench(
            Server(url, model, api_key, stall_s=stall, timeout_s=timeout),
            bench.requests(scenario, seed),
            settings,
            deployment=deployment,
            report=progress,
        )
    if records is not None:
        measure.write_records(measured, records)
    result = result_of(measured, scenario)
    if not quiet and json != outputs.STDOUT:
        show(result, measured)
    simulate.write([result], json, report, quiet=quiet)
    outputs.print_written([] if quiet or records is None else [records])
    exit_as_measured(measured, records)


def _require_arrivals(scenario: Path | None, workload: str | None, overrides: Sequence[str]) -> None:
    given = {override.partition("=")[0] for override in overrides}
    sources = ("request_rate", "concurrency", "arrivals", "trace", "preset", "rate")
    has_arrivals = any(key.startswith(tuple(f"workload.{name}" for name in sources)) for key in given)
    if {"workload.prompt", "workload.output"} <= given and not (scenario or workload or has_arrivals):
        raise InputError(
            "a load must say how its requests arrive: give --request-rate (open loop), --concurrency (closed loop), "
            "or a SCENARIO with arrivals"
        )


def result_of(measured: RunResult, scenario: Scenario) -> Result:
    """Return the run in the form that reports take."""
    from lengthwise import metrics
    from lengthwise.report import Result
    from lengthwise.usecases.simulate import slo_of

    metadata, client = measured.metadata, measured.metadata["client"]
    engine = {
        "Model": metadata["model"],
        "Engine": f"{metadata['engine']} {metadata['version']}".strip() or metadata["url"],
        "Address": metadata["url"],
        "Started": metadata["start"],
        "Prompts": f"{metadata['prompts']}",
        "Sent late": _lateness(client),
        "Client's share of a core": f"{100 * client['cpu_share']:.0f} %",
    }
    if metadata["failures"]:
        engine["Failures"] = "; ".join(_failure_text(failure) for failure in metadata["failures"])
    return Result(
        name="measured",
        summary=metrics.summarize(measured.records, slo=slo_of(scenario), warmup_s=scenario.run.warmup_s),
        records=measured.records,
        deployment=None,
        notes=measured.warnings,
        engine=engine,
    )


def show(result: Result, measured: RunResult) -> None:
    """Print the engine, the table with its warnings, failures, and how late and busy the client was."""
    from lengthwise import report
    from lengthwise.cli.tables import console, duration, print_table

    out, metadata = console(), measured.metadata
    fields = [name for name in ("ignore_eos", "min_tokens") if metadata["capabilities"][name] is not False]
    exact = metadata["arguments"]["exact"] and fields
    lengths = f"outputs of exact lengths by {' and '.join(fields)}" if exact else "outputs of the model's lengths"
    out.print(
        f"{result.engine['Engine']}, model {metadata['model']}; prompts of {metadata['prompts']}, {lengths}",
        style="dim",
    )
    out.print(report.table([result]))
    if rows := _outcome_rows(measured):
        print_table(("outcome", "requests", "message of the server"), rows)
    client = metadata["client"]
    lag, loop = client["loop_lag_s"], client["loop_lag"]
    wakeups = f"at most {duration(lag['max'])}" if lag["p99"] is None else f"{duration(lag['p99'])} (p99)"
    out.print(
        f"client: requests were sent {_lateness(client)}; delay of its event loop {wakeups} in {loop['of']:,} samples, "
        f"{100 * client['cpu_share']:.0f} % of a core busy",
        style="dim",
        highlight=False,
    )


def _lateness(client: dict[str, Any]) -> str:
    from lengthwise.cli.tables import duration

    late, above = client["late_s"], client["late"]
    tail = f"at most {duration(late['max'])}" if late["p99"] is None else f"p99 {duration(late['p99'])}"
    if above["count"]:
        tail += f", {above['count']:,} of {above['of']:,} by more than {duration(above['limit_s'])}"
    return f"{duration(late['p50'])} after they were due ({tail})"


_FINISHED_FAILURE = "wrong usage"  # a failure of finished requests: the server's token counts contradict its stream


def _outcome_rows(measured: RunResult) -> list[list[str]]:
    from lengthwise.schema.records import Status

    status, failures = measured.records.requests.status, measured.metadata["failures"]
    finished = int((status == Status.FINISHED).sum())
    if not measured.errors and finished == len(status):
        return []
    rows = [["finished", f"{finished:,}", ""]]
    unfinished = len(status) - finished
    for failure in failures:
        counted_twice = failure["reason"] == _FINISHED_FAILURE
        unfinished -= 0 if counted_twice else failure["count"]
        prefix = "of these: " if counted_twice else ""
        rows.append([prefix + failure["reason"], f"{failure['count']:,}", failure["message"]])
    if unfinished:
        rows.append(["cut off at the end of the run, or never due", f"{unfinished:,}", ""])
    return rows


def _failure_text(failure: dict[str, Any]) -> str:
    message = f' ("{failure["message"]}")' if failure["message"] else ""
    return f"{failure['reason']}: {failure['count']:,}{message}"


def exit_as_measured(measured: RunResult, records: Path | None) -> None:
    """Exit with code 130 after Ctrl-C, and 3 if the server failed. Raises InputError if no request finished."""
    from lengthwise.measure import INTERRUPTED
    from lengthwise.schema.records import Status
    from lengthwise.usecases.bench import advice_on

    requests, failures = measured.records.requests, measured.metadata["failures"]
    finished = requests.status == Status.FINISHED
    if any(f"ended by {INTERRUPTED}" in warning for warning in measured.warnings):
        raise typer.Exit(130)
    if not finished.any():
        exact = measured.metadata["arguments"]["exact"]
        reason = "; ".join(map(_failure_text, failures[:3])) or "; ".join(measured.warnings) or "the run was too short"
        advice = "; ".join(dict.fromkeys(advice_on(failure["reason"], exact=exact) for failure in failures[:3]))
        raise InputError(
            f"no request finished: {reason}. To do: {advice or 'let it run longer (--time-limit)'}"
            + (f". The results so far are in {records}, marked as partial" if records else "")
        )
    if any("failures in a row" in warning for warning in measured.warnings):
        note = f"; {records} is marked as partial" if records else ""
        typer.echo(f"the run was stopped early, since the server failed{note}: check whether it still runs", err=True)
        raise typer.Exit(SERVER_FAILED)
    if refused := measured.errors.get("refused", 0):
        # The server is gone if its refusals are the last requests, though too few in a row to stop the run.
        last = finished[requests.arrival_s.argsort(kind="stable")[-refused:]]
        if not last.any():
            note = f"; {records} has their failures" if records else ""
            typer.echo(f"the last requests were refused{note}: check whether the server still runs", err=True)
            raise typer.Exit(SERVER_FAILED)
