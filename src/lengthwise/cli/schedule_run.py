"""``lengthwise schedule run``: a schedule kept before real engines, and what came of it."""

from __future__ import annotations

import dataclasses
import json as json_format
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lengthwise import measure
from lengthwise.cli import bench_results, log, schedule_results, workload_summary
from lengthwise.cli.options import JsonFile, Quiet
from lengthwise.cli.outputs import write_answers
from lengthwise.cli.tables import console, print_table
from lengthwise.config import Scenario
from lengthwise.gateway.replanning import ReplanEvent
from lengthwise.gateway.telemetry import as_dict
from lengthwise.report.schedule_text import tokens_said
from lengthwise.schedule import Monitor
from lengthwise.schema.files import write_whole
from lengthwise.schema.workload import Workload
from lengthwise.usecases import schedule_run
from lengthwise.usecases.schedule_adaptation import Adapted, Follow
from lengthwise.usecases.schedule_plan import PlannedRun
from lengthwise.usecases.schedule_run import (
    FEWEST_PHASES,
    ScheduleLoad,
    ScheduleOutcome,
    ScheduleRun,
    requests_to_count,
    split_in_flight,
    split_requests,
)

EXAMPLES = """\b
Examples:
  lengthwise schedule run examples/schedule-opt-13b.toml --strategy rra --engine http://gpu0:8000
  lengthwise schedule run chat.toml --engine http://gpu0:8000 --schedule plan.json --out run
  lengthwise schedule run chat.toml --engine http://gpu0:8000 --adapt --workload today.csv
"""


def run(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A .toml or .yaml file.")],
    *,
    engine: Annotated[
        list[str], typer.Option(metavar="URL", help="An engine that keeps the schedule; of WAA a router; repeatable.")
    ],
    schedule: Annotated[
        Path | None,
        typer.Option(metavar="PLAN.json", help="What schedule --json wrote; default: the scenario is planned."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Default: as the scenario has, or enough phases to count.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests that are in at a time; default: the queue stays full.")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Requests a second instead, Poisson: the queue may run empty.")
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Resize encodings: prompts and decode batch stay so near their means; default: as planned.",
        ),
    ] = None,
    latency_bound: Annotated[
        str | None, typer.Option(metavar="TIME", help="Latency that must be held: 5s; inf: none.")
    ] = None,
    strategy: Annotated[str | None, typer.Option(metavar="NAMES", help="Among which it is planned: rra.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: schedule.gpus=8; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of requests and prompts; default: the scenario's.")] = None,
    workload: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="Play these instead: a trace, or draws of a preset.")
    ] = None,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Follow the lengths that are served: plan anew when they moved.")
    ] = False,
    false_positive_rate: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="With --adapt: probability of ever an alarm if lengths stay; 0.01."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="With --adapt: where other layouts would load from: dram or ssd."),
    ] = None,
    horizon: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --adapt: how long new lengths are taken to last; 1h.")
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Show metrics and the admin page there meanwhile.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Of the engines.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write records, requests, phases and the outcome there.")
    ] = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Keep a schedule before engines, play the scenario's requests, and hold what came against the plan.

    A gateway in mode rra admits B_E new requests to each engine, then none for N_D decode iterations, as its
    token streams tell. Engines stay as they are. Requests come in a closed loop that keeps the queue full, as
    planned throughput is of a full one; latency counts from when a request was sent to its engine, as planned.

    A plan of WAA (--schedule DIR/PLAN.json of --deploy) is played before the router of its engines, with as many
    requests under way as planned; throughput and latency stand beside the plan.

    With --adapt lengths are watched in the order of arrival, each once all requests before it have ended: a very
    long one holds back those behind it. When they moved, the schedule is planned anew in another process, and B_E,
    N_D and the means of batches change at each engine's next phase. A better schedule that would take loading
    weights is only told.
    """
    from lengthwise import config
    from lengthwise.cli import options, outputs, schedule_results
    from lengthwise.usecases import schedule_plan, schedule_run

    require_no_rival(latency_bound, strategy, set_, planned=schedule is not None)
    given = schedule_results.given(latency_bound, None, None, strategy, expected=False, threshold=threshold)
    number = [] if requests is None else [f"workload.num_requests={requests}"]
    asked = config.load(scenario, [*(set_ or ()), *given, *number])
    outputs.require_answers(json, None, inputs=asked.files)
    if out is not None:
        outputs.require_folder(out)
    how = asked_for(adapt=adapt, false_positive_rate=false_positive_rate, storage=storage, horizon=horizon)
    options.tell(asked.notes, quiet=quiet)
    planned = schedule_plan.planned_run(asked, schedule, threshold=threshold)
    if not quiet and json != outputs.STDOUT:
        show_plan(planned, len(engine))
    chosen_seed = asked.run.seed if seed is None else seed
    live = requests_of(asked, planned, len(engine), workload, requests, chosen_seed)
    load = schedule_run.ScheduleLoad(concurrency, request_rate, chosen_seed)
    played = play(asked, engine, planned, live, load, follow=how, api_key=api_key, admin_port=admin_port, quiet=quiet)
    if not quiet and json != outputs.STDOUT:
        show(played)
    written = write(played, json, out)
    if not quiet:
        outputs.tell(written)
    end(played)


MOST = 1000
"""Requests that are drawn from a preset, where nothing else is said."""
_OF_THE_PLAN = tuple(
    f"schedule.{key}" for key in ("latency_bound", "bound_for", "strategies", "worst_case", "threshold")
)


def require_no_rival(latency_bound: str | None, strategy: str | None, set_: list[str] | None, *, planned: bool) -> None:
    """Nothing, unless a plan is read and told what only planning takes.

    Raises:
        BadParameter: It is; the message says which of both to leave out.
    """
    given = [name for name, value in (("--latency-bound", latency_bound), ("--strategy", strategy)) if value]
    given += [f"--set {text}" for text in set_ or () if text.split("=")[0].strip() in _OF_THE_PLAN]
    if planned and given:
        raise typer.BadParameter(
            f"excludes {' and '.join(given)}: a plan that was made has its own bound and strategy; leave --schedule "
            "out to have the scenario planned with these, or plan first: lengthwise schedule SCENARIO --json PLAN.json",
            param_hint="--schedule",
        )


def asked_for(
    *, adapt: bool, false_positive_rate: float | None, storage: str | None, horizon: str | None
) -> Follow | None:
    """How lengths are to be followed; None: they are not.

    Raises:
        InputError: An option is out of its range.
        BadParameter: One goes with --adapt, which is not there.
    """
    given = {"--false-alarms": false_positive_rate, "--storage": storage, "--horizon": horizon}
    for name, value in given.items():
        if value is not None and not adapt:
            raise typer.BadParameter("goes with --adapt", param_hint=name)
    if not adapt:
        return None
    watch = Monitor() if false_positive_rate is None else Monitor(false_positive_rate)
    return Follow(watch, schedule_results.terms(storage or "dram", horizon or "1h", None))


def requests_of(
    requested: Scenario, planned: PlannedRun, engines: int, workload: str | None, number: int | None, seed: int
) -> Workload:
    """The requests to play: the scenario's, or others; of a preset so many are drawn, a trace is played whole.

    Raises:
        InputError: They cannot be read.
    """
    if workload is None:
        return schedule_run.schedule_requests(requested, planned, engines, seed)
    return workload_summary.opened(workload, None, number or MOST, seed)


def play(
    requested: Scenario,
    engines: Sequence[str],
    planned: PlannedRun,
    workload: Workload,
    load: ScheduleLoad,
    *,
    follow: Follow | None,
    api_key: str | None,
    admin_port: int | None,
    quiet: bool,
) -> ScheduleRun:
    """What came of the run, its progress shown meanwhile.

    Raises:
        InputError: As ``scenario.run_schedule`` does.
    """
    with _log(follow is not None and not quiet), bench_results.progress(quiet=quiet) as told:
        return schedule_run.run_schedule(
            requested, engines, planned, workload, load=replace(load, report=told), follow=follow, api_key=api_key,
            admin_port=admin_port, on_admin=_empty if quiet else _tell_admin,
        )  # fmt: skip


def end(simulated: ScheduleRun) -> None:
    """Ends the program as the run ended: an error where no request finished."""
    bench_results.end(simulated.measured, None)


def _log(shown: bool) -> AbstractContextManager[None]:
    """The gateway's log on standard error, where it is to be shown."""
    return log.logging_to_stderr("info", as_json=False, requests=False) if shown else nullcontext()


def _tell_admin(port: int) -> None:
    console().print(f"admin page at http://127.0.0.1:{port}/, metrics at /metrics", style="dim")


def _empty(_: int) -> None:
    """Says nothing."""


if TYPE_CHECKING:
    from lengthwise.usecases.schedule_run import SeenNumber

_HEADS = ("", "planned", "observed", "95 % interval", "observed / planned")
_ENDS = {"steps": "after all iterations", "idle": "since nobody was left", "stalled": "without the slowest"}
VERSION = 1


def show_plan(planned: PlannedRun, engines: int) -> None:
    """Prints what is about to be kept."""
    out, phases = console(), planned.phases
    on = "one engine" if engines == 1 else f"each of {engines} engines"
    if phases is None:
        before = "one router" if engines == 1 else f"each of {engines} routers"
        out.print(f"Keeping {planned.row.words} before {before} ({planned.source})")
        out.print(f"at most {split_in_flight(planned.row)} requests under way there", style="dim")
        return
    out.print(f"Keeping {planned.row.words} on {on} ({planned.source})")
    resized = "" if phases.threshold is None else f", encodings resized within {100 * phases.threshold:g} %"
    out.print(f"at most {phases.max_in_flight} requests at an engine{resized}", style="dim")


def show(simulated: ScheduleRun) -> None:
    """Prints what was observed beside the plan, whether the bound held, and what is to be doubted."""
    out, outcome, planned = console(), simulated.outcome, simulated.planned
    for line in followed_said(simulated):
        out.print(line)
    print_table(_HEADS, [_cells(one) for one in outcome.seen])
    if planned.phases is not None:
        _show_ends(outcome)
    out.print(decision(planned, outcome))
    for doubt in warnings(planned, simulated):
        out.print(f"doubt: {doubt}", style="dim")


def _show_ends(outcome: ScheduleOutcome) -> None:
    ends = ", ".join(f"{count} {_ENDS[why]}" for why, count in outcome.completed.items())
    console().print(
        f"{outcome.phases} of {outcome.all_phases} phases count (the queue full, batches filled); all ended "
        f"{ends or 'none'}",
        style="dim",
    )


def followed_said(simulated: ScheduleRun) -> list[str]:
    """What came of following lengths, in sentences; [] where they were not followed."""
    now = simulated.followed
    if now is None:
        return []
    watched = f"Lengths of {now.observed:,} requests were watched"
    if not simulated.news:
        alarm = f" {1 / now.false_positive_rate:,.0f}" if math.isfinite(now.false_positive_rate) else ""
        still = f"they did not move as far as can be told; evidence {now.evidence:.3g} of the{alarm} of an alarm"
        return [f"{watched}: {still}."]
    said = [line for _, one in simulated.news for line in one.message]
    kept = f"{watched}. Below is what came of {simulated.planned.row.words}, which was kept last, since it was planned."
    return [*said, kept]


def warnings(planned: PlannedRun, simulated: ScheduleRun) -> list[str]:
    """What speaks against the numbers: the client's doubts, and phases that were longer than the schedule's."""
    found, steps = list(simulated.measured.warnings), planned.row.decode_steps
    if planned.phases is None:
        return found + split_doubts(simulated)
    seen = {one.name: one.value for one in simulated.outcome.seen}["decode iterations, N_D"]
    if seen > 1.1 * steps + 1:
        found.append(
            f"phases had {seen:.3g} iterations in the mean, not {steps}: requests were lacking (--concurrency), or "
            "this machine was too busy to follow the engines' tokens"
        )
    if any(math.isnan(one.low) for one in simulated.outcome.seen):
        found.append(
            f"where there is no interval, too few phases count: {simulated.outcome.phases}, and it takes {FEWEST_PHASES} "
            f"of each engine; play more requests (--requests {requests_to_count(planned.row, simulated.engines)})"
        )
    return found


def split_doubts(simulated: ScheduleRun) -> list[str]:
    """What speaks against the numbers of a split schedule."""
    found, most = [], simulated.engines * split_in_flight(simulated.planned.row)
    under_way = simulated.outcome.seen[0].value
    if under_way < 0.9 * most:
        found.append(
            f"{under_way:.3g} requests were under way in the mean, of {most} that the schedule has: requests were "
            "lacking (--concurrency, --requests), or latency is shorter than planned"
        )
    if any(math.isnan(one.low) for one in simulated.outcome.seen):
        found.append(
            f"where there is no interval, too few requests count: {simulated.outcome.requests}; play more "
            f"(--requests {split_requests(simulated.planned.row, simulated.engines)})"
        )
    return found


def decision(planned: PlannedRun, outcome: ScheduleOutcome) -> str:
    """Whether the bound held, in a sentence."""
    if math.isinf(planned.bound_s):
        return "There was no bound to hold."
    bound = f"the bound of {planned.bound_s:g} s"
    if outcome.satisfied is None:
        return f"Whether {bound} held is not known: no request was served with a full queue. Play more (--requests)."
    latency = outcome.seen[-1]
    end = f"{latency.high:.3g}" if math.isfinite(latency.high) else "?"
    said = (
        f"{100 * planned.share:.3g} % of {outcome.requests:,} requests, as many as a bound for outputs of "
        f"{tokens_said(planned.bound_tokens)} is for, were served within {latency.value:.3g} s "
        f"[{latency.low:.3g} to {end}]"
    )
    doubt = "" if outcome.significant else ", but the interval reaches beyond it: play more (--requests) to be sure"
    return f"{bound[0].upper()}{bound[1:]} {'satisfied' if outcome.satisfied else 'did not hold'}: {said}{doubt}."


def as_json(simulated: ScheduleRun) -> dict[str, Any]:
    """All of it under stable keys; what is infinite or not known is null."""
    outcome, planned, followed = simulated.outcome, simulated.planned, simulated.followed
    told = {
        "format": "lengthwise.schedule-run",
        "version": VERSION,
        "answer": decision(planned, outcome),
        "schedule": dataclasses.asdict(planned.row),
        "phases": None if planned.phases is None else dataclasses.asdict(planned.phases),
        "bound_tokens": planned.bound_tokens,
        "share": planned.share,
        "source": planned.source,
        "outcome": dataclasses.asdict(outcome),
        "warnings": warnings(planned, simulated),
        "followed": None if followed is None else dataclasses.asdict(followed),
        "news": [_report(at_s, one) for at_s, one in simulated.news],
    }
    plain: dict[str, Any] = _plain(told)
    return plain


def _report(at_s: float, news: ReplanEvent) -> dict[str, Any]:
    """What came of lengths that moved, without what only programs can use."""
    more = news.more.adaptation if isinstance(news.more, Adapted) else None
    return {
        "at_s": at_s,
        "message": news.message,
        "failed": news.failed,
        "schedule": news.schedule,
        "phases": None if news.phases is None else dataclasses.asdict(news.phases),
        "adaptation": None if more is None else dataclasses.asdict(more),
    }


def write(simulated: ScheduleRun, json: Path | None, out: Path | None) -> list[Path]:
    """Writes what was asked for and returns the files."""
    text = json_format.dumps(as_json(simulated), indent=2, ensure_ascii=False) + "\n"
    written = write_answers(json, None, lambda path: write_whole(path, text.encode()), lambda _: None)
    if out is None:
        return written
    out.mkdir(parents=True, exist_ok=True)
    lines = {
        "phases.jsonl": [dataclasses.asdict(phase) for phase in simulated.phases],
        "requests.jsonl": [as_dict(row) for row in simulated.rows],
    }
    for name, rows in lines.items():
        whole = "".join(json_format.dumps(_plain(one)) + "\n" for one in rows)
        write_whole(out / name, whole.encode())
    write_whole(out / "outcome.json", text.encode())
    measure.write_records(simulated.measured, out / "records.parquet")
    return [*written, *(out / name for name in (*lines, "outcome.json", "records.parquet"))]


def _cells(seen: SeenNumber) -> list[str]:
    unit = f" {seen.unit}" if seen.unit else ""
    known = math.isfinite(seen.low)
    interval = f"{_number(seen.low)} to {_number(seen.high)}" if known else ""
    ratio = seen.value / seen.planned if seen.planned else math.nan
    return [
        seen.name,
        f"{_number(seen.planned)}{unit}",
        f"{_number(seen.value)}{unit}",
        interval,
        f"{ratio:.2f}" if math.isfinite(ratio) else "",
    ]


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "?"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
