"""``lengthwise app plan``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from lengthwise.cli import options, outputs
from lengthwise.cli.options import AppFile, HtmlReport, JsonFile, Nodes, Quiet
from lengthwise.cli.progress import compile_note

if TYPE_CHECKING:
    from lengthwise.report.apps_text import AppFacts
    from lengthwise.schema.app import AppPlan

EXAMPLES = """\b
Examples:
  lengthwise app plan examples/apps/ensemble.toml --node 8xA100-80GB
  lengthwise app plan examples/apps/ensemble.toml --node 8xA100-80GB@pairs --report plan.html
  lengthwise app plan examples/apps/chain-summary.toml --node 8xA100-80GB --json plan.json
"""
_MAX_STAGES = 24


def run(
    app_file: AppFile,
    *,
    node: Nodes = None,
    method: Annotated[
        str, Option(metavar="NAME", help="lengthwise; samullm, max or min, also with the suffix _no_preemption.")
    ] = "lengthwise",
    draws: Annotated[int, Option(min=1, help="Length samples to plan with.")] = 3,
    true_draws: Annotated[int, Option(min=2, help="Length samples to evaluate the makespan on.")] = 12,
    quantile: Annotated[float | None, Option(metavar="SHARE", help="Minimize this quantile, not the mean.")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of all samples.")] = 0,
    profile: Annotated[Path | None, Option(metavar="DIR", help="Output folder of app profile.")] = None,
    what_if: Annotated[
        bool, Option("--what-if/--no-what-if", help="Try other numbers of GPUs and a faster disk.")
    ] = True,
    set_: Annotated[list[str] | None, options.setting("calls.answer.max_tokens=256")] = None,
    report: HtmlReport = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Plan an application on a cluster: stages, makespan with its interval, idle GPUs.

    Output lengths are sampled, the engines are simulated, and the plan is evaluated on other samples than those of its
    planning. The report compares it with other planning methods, other numbers of GPUs, and a disk twice as fast.
    """
    from lengthwise.usecases.app_setup import load_app_request

    requested = load_app_request(app_file, set_ or (), node or (), profile)

    from lengthwise.usecases.app_plan import PlanSettings

    planning = PlanSettings(method, draws=draws, true_draws=true_draws, quantile=quantile, seed=seed, what_ifs=what_if)
    outputs.require_outputs(json, report, requested.file.files)

    from lengthwise.apps.plan import write_plan
    from lengthwise.report.apps import write_app_html
    from lengthwise.usecases.app_report import facts_of

    with compile_note(quiet=quiet):
        planned = requested.planned(planning)
    plan = planned.plan
    assert plan is not None
    details = facts_of(requested, planned, app_file.stem)
    if not quiet and json != outputs.STDOUT:
        show(plan, details)
        given = [("--plan", json), *(("--node", one) for one in node or ()), ("--profile", profile)]
        given += [("--set", one) for one in set_ or ()]
        words = [str(word) for option, value in given if value for word in (option, value)]
        typer.echo(f"start: {shlex.join(['lengthwise', 'app', 'run', str(app_file), '--out', 'run', *words])}")
        typer.echo("rehearse: add --launcher simulated; progress: lengthwise app status run")
    outputs.write_outputs(
        json, report, plan, write_plan, lambda path, plan: write_app_html(path, plan, details), quiet=quiet
    )


def show(plan: AppPlan, details: AppFacts) -> None:
    """Print makespan, stages, idle GPUs, other methods, hypothetical clusters, and notes."""
    from lengthwise.cli.tables import console, print_table
    from lengthwise.report import apps_text as text
    from lengthwise.report import percent
    from lengthwise.report.formatting import counted

    out, duration, estimate = console(), text.duration_text, text.estimate_duration_text
    stages, gpus = counted(len(plan.stages), "stage"), counted(len(details.gpus), "GPU")
    headline = f"{details.name}: {estimate(plan.makespan)} on {gpus}, {stages}"
    out.print("\n".join(filter(None, (headline, ", ".join(details.metadata[:3])))))
    low, high = plan.quantiles_s.get(0.05), plan.quantiles_s.get(0.95)
    if low is not None and high is not None:
        out.print(f"90 % of the samples lie within {duration(low)} to {duration(high)}")
    if note := text.sample_note(plan):
        out.print(note)
    if plan.makespan.has_model_interval:
        out.print("(...): 90 % interval of the cost model's error, without that of loading times", style="dim")
    out.print()
    rows: list[tuple[str, ...]] = []
    for number, stage in enumerate(plan.stages[:_MAX_STAGES], 1):
        ready = text.slowest_switches(stage)
        stage_cells = (str(number), duration(stage.start_s), duration(stage.end_s))
        for model in stage.plans:
            after = duration(ready[model.model][1]) if model.model in ready else ""
            placement = (plan.models[model.model], text.shape(model), text.gpus_text(model, is_mixed=details.is_mixed))
            rows.append((*stage_cells, *placement, after, "finishes" if stage.ends_by == model.model else ""))
            stage_cells = ("", "", "")  # only in the first row of a stage
    drops = ("ready after", "from") if details.is_mixed else ("ready after", "GPUs", "from")
    print_table(("stage", "from", "to", "model", "replicas", "GPUs", "ready after", ""), rows, wraps=(), drops=drops)
    if (more := len(plan.stages) - _MAX_STAGES) > 0:
        out.print(f"... and {more} more: --json or --report has all", style="dim")
    idle = [
        f"{percent(share)} {text.IDLE_REASONS.get(cause, cause)}"
        for cause, share in text.idle_shares(plan, len(details.gpus))
        if share >= text.MIN_SHARE
    ]
    out.print(f"GPU time without work: {', '.join(idle)}" if idle else "GPUs are busy all the time")
    if plan.methods:
        out.print()
        rows = [
            (one.name, estimate(one.makespan), duration(one.search_s), f"{one.stages}", text.gain_text(plan, one))
            for one in plan.methods
        ]
        heads = ("method", "makespan", "search", "stages", "relative time")
        print_table(heads, rows, wraps=(), drops=("stages", "search"))
        out.print("relative time: of makespan and search, to the chosen plan", style="dim")
    if plan.what_ifs:
        out.print()
        makespan_s = plan.makespan.value
        rows = [
            (text.what_if_text(one), estimate(one.makespan), text.difference_text(one.difference, makespan_s))
            for one in plan.what_ifs
        ]
        print_table(("with", "makespan", "difference"), rows, wraps=(), drops=("makespan",))
    for note in plan.notes:
        out.print(f"note: {note}", style="dim")
