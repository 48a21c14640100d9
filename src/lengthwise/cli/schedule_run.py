"""``lengthwise schedule run``."""

from __future__ import annotations

import json as json_module
import math
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from lengthwise.cli import bench, log, options, outputs
from lengthwise.cli.options import ApiKey, JsonFile, LatencyBound, Quiet, ScenarioFile, Threshold
from lengthwise.cli.progress import bar
from lengthwise.cli.schedule import settings

if TYPE_CHECKING:
    from lengthwise.usecases.schedule_adaptation import FollowOptions
    from lengthwise.usecases.schedule_plan import PlannedRun
    from lengthwise.usecases.schedule_run import ObservedNumber, ScheduleRun

EXAMPLES = """\b
Examples:
  lengthwise schedule run examples/schedule-opt-13b.toml --strategy rra --engine http://gpu0:8000
  lengthwise schedule run chat.toml --engine http://gpu0:8000 --schedule plan.json --out run
  lengthwise schedule run chat.toml --engine http://gpu0:8000 --adapt --workload today.csv
"""
PRESET_REQUESTS = 1000


def run(
    scenario_file: ScenarioFile,
    *,
    engine: Annotated[list[str], Option(metavar="URL", help="An engine to serve on; for WAA a router; repeatable.")],
    schedule: Annotated[
        Path | None, Option(metavar="PLAN.json", help="Output of schedule --json; default: plan now.")
    ] = None,
    requests: Annotated[int | None, Option(min=1, help="Default: the scenario's, or enough to measure.")] = None,
    concurrency: Annotated[int | None, Option(min=1, help="Requests at a time; default: a full queue.")] = None,
    request_rate: Annotated[float | None, Option(help="Requests a second, Poisson: the queue may run empty.")] = None,
    threshold: Threshold = None,
    latency_bound: LatencyBound = None,
    strategy: Annotated[str | None, Option(metavar="NAMES", help="Strategies to plan with: rra.")] = None,
    set_: Annotated[list[str] | None, options.setting("schedule.gpus=8")] = None,
    seed: Annotated[int | None, Option(min=0, help="Seed of requests and prompts; default: the scenario's.")] = None,
    workload: Annotated[str | None, Option(metavar="FILE|NAME", help="A trace, or draws of a preset.")] = None,
    adapt: Annotated[bool, Option("--adapt", help="Plan again when the served lengths have drifted.")] = False,
    false_positive_rate: Annotated[
        float | None,
        Option(
            "--false-positive-rate",
            metavar="SHARE",
            help="With --adapt: probability of any alarm if lengths stay; default: 0.01.",
        ),
    ] = None,
    storage: Annotated[
        str | None, Option(metavar="PLACE", help="With --adapt: where weights load from, dram (default) or ssd.")
    ] = None,
    horizon: Annotated[
        str | None, Option(metavar="TIME", help="With --adapt: how long new lengths last; default: 1h.")
    ] = None,
    admin_port: Annotated[int | None, Option(min=0, max=65535, help="Port of metrics and admin page.")] = None,
    api_key: ApiKey = None,
    out: Annotated[Path | None, Option(metavar="DIR", help="Write records, phases and outcome here.")] = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Serve requests on real engines under a planned schedule.

    A gateway in mode rra admits B_E new requests to each engine, then none for N_D decode iterations, which it counts
    in the token streams. The engines stay as they are. Requests arrive in a closed loop that keeps the queue full,
    because planned throughput assumes a full queue. Latency counts from the dispatch to an engine, as planned.

    A plan of WAA (--schedule DIR/PLAN.json of --deploy) is served through its engines' router, at its concurrency.

    With --adapt lengths are monitored in order of arrival. A request counts once it and all earlier requests have
    finished, so a very long request delays those after it. After a drift the schedule is planned again in another
    process, and B_E, N_D and the means of batches change at each engine's next phase. A better schedule that requires
    reloading the weights is only reported.
    """
    from lengthwise import config
    from lengthwise.cli.tables import console
    from lengthwise.config.sources import open_workload
    from lengthwise.usecases import schedule_plan
    from lengthwise.usecases.schedule_run import AdminPage, ScheduleLoad, run_schedule, schedule_requests

    if schedule is not None:
        _require_no_planning_options(latency_bound, strategy, set_)
    changes = settings(latency_bound, strategy, threshold)
    number = [] if requests is None else [f"workload.num_requests={requests}"]
    scenario = config.load(scenario_file, [*(set_ or ()), *changes, *number])
    outputs.require_outputs(json, None, scenario.files)
    if out is not None:
        outputs.require_folder(out)
    follow = _follow(false_positive_rate, storage, horizon, adapt=adapt)
    options.print_notes(scenario.notes, quiet=quiet)
    planned = schedule_plan.planned_run(scenario, schedule, threshold=threshold)
    printing = not quiet and json != outputs.STDOUT
    if printing:
        show_plan(planned, len(engine))
    if seed is None:
        seed = scenario.run.seed
    if workload is None:
        live = schedule_requests(scenario, planned, len(engine), seed)
    else:
        live = open_workload(workload, None, requests or PRESET_REQUESTS, seed)

    def print_admin_page(port: int) -> None:
        if not quiet:
            console().print(f"admin page at http://127.0.0.1:{port}/, metrics at /metrics", style="dim")

    logging = log.logging_to_stderr("info", as_json=False, requests=False) if adapt and not quiet else nullcontext()
    with logging, bar("measuring", quiet=quiet, refresh_per_second=2) as progress:
        load = ScheduleLoad(concurrency, request_rate, seed, report=progress)
        admin = None if admin_port is None else AdminPage(admin_port, print_admin_page)
        done = run_schedule(scenario, engine, planned, live, load=load, follow=follow, api_key=api_key, admin=admin)
    if printing:
        show(done)
    write(done, json, out, quiet=quiet)
    bench.exit_as_measured(done.measured, None)


_PLANNING_SETTINGS = tuple(
    f"schedule.{key}" for key in ("latency_bound", "bound_for", "strategies", "worst_case", "threshold")
)


def _require_no_planning_options(latency_bound: str | None, strategy: str | None, set_: list[str] | None) -> None:
    given = [name for name, value in (("--latency-bound", latency_bound), ("--strategy", strategy)) if value]
    given += [f"--set {text}" for text in set_ or () if text.split("=")[0].strip() in _PLANNING_SETTINGS]
    if given:
        raise typer.BadParameter(
            f"excludes {' and '.join(given)}: a plan has its own bound and strategy; leave --schedule out to plan the "
            "scenario with these, or plan first: lengthwise schedule SCENARIO --json PLAN.json",
            param_hint="--schedule",
        )


def _follow(
    false_positive_rate: float | None, storage: str | None, horizon: str | None, *, adapt: bool
) -> FollowOptions | None:
    from lengthwise.cli.schedule_watch import replan_options
    from lengthwise.schedule import Monitor
    from lengthwise.usecases.schedule_adaptation import FollowOptions

    given = {"--false-positive-rate": false_positive_rate, "--storage": storage, "--horizon": horizon}
    for name, value in given.items():
        if value is not None and not adapt:
            raise typer.BadParameter("goes with --adapt", param_hint=name)
    if not adapt:
        return None
    monitor = Monitor() if false_positive_rate is None else Monitor(false_positive_rate)
    return FollowOptions(monitor, replan_options(storage or "dram", horizon or "1h", None))


def show_plan(planned: PlannedRun, engines: int) -> None:
    """Print the schedule that is about to run."""
    from lengthwise.cli.tables import console
    from lengthwise.usecases.schedule_run import split_in_flight

    out, phases, server = console(), planned.phases, "router" if planned.phases is None else "engine"
    servers = f"one {server}" if engines == 1 else f"each of {engines} {server}s"
    out.print(f"Serving {planned.row.words} on {servers} ({planned.source})")
    if phases is None:
        out.print(f"at most {split_in_flight(planned.row)} concurrent requests per router", style="dim")
    else:
        share = phases.threshold
        resized = "" if share is None else f", prefill batches resized within {100 * share:g} %"
        out.print(f"at most {phases.max_requests} concurrent requests per engine{resized}", style="dim")


def show(done: ScheduleRun) -> None:
    """Print the drift, the observed numbers next to the planned ones, whether the bound held, and warnings."""
    from lengthwise.cli.tables import console, print_table
    from lengthwise.usecases import schedule_run as usecase

    out, outcome = console(), done.outcome
    for line in _followed_text(done):
        out.print(line)
    heads = ("", "planned", "observed", "95 % interval", "observed / planned")
    print_table(heads, [_cells(number) for number in outcome.seen])
    if done.planned.phases is not None:
        causes = {"steps": "after all iterations", "idle": "with no request left", "stalled": "without the slowest"}
        ends = ", ".join(f"{count} {causes[cause]}" for cause, count in outcome.completed.items())
        out.print(
            f"{outcome.phases} of {outcome.all_phases} phases count (full queue, filled batches); all phases finished "
            f"{ends or 'none'}",
            style="dim",
        )
    out.print(usecase.bound_sentence(done))
    for warning in usecase.warnings(done):
        out.print(f"warning: {warning}", style="dim")


def _cells(number: ObservedNumber) -> list[str]:
    def text(value: float) -> str:
        return f"{value:.4g}" if math.isfinite(value) else "?"

    unit = f" {number.unit}" if number.unit else ""
    interval = f"{text(number.low)} to {text(number.high)}" if math.isfinite(number.low) else ""
    ratio = number.value / number.planned if number.planned else math.nan
    shown = f"{ratio:.2f}" if math.isfinite(ratio) else ""
    return [number.name, f"{text(number.planned)}{unit}", f"{text(number.value)}{unit}", interval, shown]


def _followed_text(done: ScheduleRun) -> list[str]:
    followed = done.followed
    if followed is None:
        return []
    monitored = f"Lengths of {followed.observed:,} requests were monitored"
    if not done.replans:
        rate = followed.false_positive_rate
        alarm = f" (evidence {followed.evidence:.3g}; an alarm needs {1 / rate:,.0f})" if math.isfinite(rate) else ""
        return [f"{monitored}: no drift detected{alarm}."]
    final = f"{monitored}. Below is the outcome of {done.planned.row.words}, the last schedule, since it was planned."
    return [*(line for _, event in done.replans for line in event.message), final]


def write(done: ScheduleRun, json: Path | None, out: Path | None, *, quiet: bool) -> None:
    """Write the requested files and, unless ``quiet``, print their paths."""
    from lengthwise import measure
    from lengthwise.gateway.telemetry import as_dict
    from lengthwise.report.json_file import plain
    from lengthwise.usecases.schedule_run import schedule_run_json

    text = schedule_run_json(done)
    if json is not None:
        outputs.write_text(json, text, quiet=quiet)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    for name, records in (("phases.jsonl", done.phases), ("requests.jsonl", map(as_dict, done.rows))):
        lines = "".join(json_module.dumps(plain(record)) + "\n" for record in records)
        outputs.write_text(out / name, lines, quiet=quiet)
    outputs.write_text(out / "outcome.json", text, quiet=quiet)
    measure.write_records(done.measured, out / "records.parquet")
    outputs.print_written([] if quiet else [out / "records.parquet"])
