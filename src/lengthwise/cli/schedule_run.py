"""``lengthwise schedule run``: a schedule kept before real engines, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli._options import JsonFile, Quiet

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
        list[str],
        typer.Option(metavar="URL", help="An engine that keeps the schedule; of WAA a router; repeatable."),
    ],
    schedule: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.json", help="What schedule --json wrote; default: the scenario is planned."
        ),
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
    strategy: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Among which it is planned: rra.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: schedule.gpus=8; repeatable."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of requests and prompts; default: the scenario's.")
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(metavar="FILE|NAME", help="Play these instead: a trace, or draws of a preset."),
    ] = None,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Follow the lengths that are served: plan anew when they moved.")
    ] = False,
    false_alarms: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="With --adapt: probability of ever an alarm if lengths stay; 0.01."
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="With --adapt: where other layouts would load from: dram or ssd."),
    ] = None,
    horizon: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="With --adapt: how long new lengths are taken to last; 1h."),
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Show metrics and the admin page there meanwhile.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Of the engines.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write records, requests, phases and the outcome there."),
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
    from lengthwise import scenario as scenarios
    from lengthwise.cli import (
        _outputs,
        _schedule_adapt,
        _schedule_page,
        _schedule_run,
        _schedule_run_page,
        _settings,
    )

    _schedule_adapt.require_no_rival(latency_bound, strategy, set_, planned=schedule is not None)
    given = _schedule_page.given(latency_bound, None, None, strategy, expected=False, threshold=threshold)
    number = [] if requests is None else [f"workload.num_requests={requests}"]
    asked = scenarios.load(scenario, [*(set_ or ()), *given, *number])
    _outputs.require_answers(json, None, inputs=asked.files)
    if out is not None:
        _outputs.require_folder(out)
    how = _schedule_adapt.asked_for(adapt=adapt, false_alarms=false_alarms, storage=storage, horizon=horizon)
    _settings.tell(asked.notes, quiet=quiet)
    planned = scenarios.planned_run(asked, schedule, threshold=threshold)
    if not quiet and json != _outputs.STDOUT:
        _schedule_run_page.show_plan(planned, len(engine))
    chosen_seed = asked.run.seed if seed is None else seed
    live = _schedule_adapt.requests_of(asked, planned, len(engine), workload, requests, chosen_seed)
    load = scenarios.ScheduleLoad(concurrency, request_rate, chosen_seed)
    played = _schedule_run.play(
        asked, engine, planned, live, load, follow=how, api_key=api_key, admin_port=admin_port, quiet=quiet
    )
    if not quiet and json != _outputs.STDOUT:
        _schedule_run_page.show(played)
    written = _schedule_run_page.write(played, json, out)
    if not quiet:
        _outputs.tell(written)
    _schedule_run.end(played)
