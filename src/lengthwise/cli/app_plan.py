"""``lengthwise app plan``: which models run when, on how many GPUs each, so that all is done soonest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.options import HtmlReport, JsonFile, Quiet
from lengthwise.cli.tables import console, print_table
from lengthwise.report import percent
from lengthwise.report.apps_text import (
    IDLE_REASONS,
    difference_text,
    gpus_text,
    idle_shares,
    shape,
    what_if_text,
    slowest_switches,
    duration_text,
    estimate_duration_text,
)
from lengthwise.schema.app import AppPlan, AppStage

EXAMPLES = """\b
Examples:
  lengthwise app plan examples/apps/ensemble.toml --node 8xA100-80GB
  lengthwise app plan examples/apps/ensemble.toml --node 8xA100-80GB@pairs --report plan.html
  lengthwise app plan examples/apps/chain-summary.toml --node 8xA100-80GB --json plan.json
"""


def run(
    app: Annotated[Path, typer.Argument(metavar="APP", help="A .toml or .yaml file of an application.")],
    *,
    node: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="GPUs: 8xA100-80GB, or a node of the catalog; repeatable.")
    ] = None,
    method: Annotated[
        str, typer.Option(metavar="NAME", help="lengthwise, samullm, max, min, or one of these with _no_preemption.")
    ] = "lengthwise",
    draws: Annotated[int, typer.Option(min=1, help="Draws of lengths to plan with.")] = 3,
    true_draws: Annotated[int, typer.Option(min=2, help="Draws of lengths that tell the makespan.")] = 12,
    quantile: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Plan against this quantile of the makespan; default: its mean."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all draws.")] = 0,
    profile: Annotated[Path | None, typer.Option(metavar="DIR", help="What app profile measured.")] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if/--no-what-if", help="Try other numbers of GPUs, and a faster disk.")
    ] = True,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: calls.answer.max_tokens=256; repeatable."),
    ] = None,
    report: HtmlReport = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Plan an application of several models on a cluster: stages, makespan with its interval, idle GPUs and why.

    Lengths are drawn, the engine is simulated, and the plan is played over draws that it was not planned with. Other
    ways of planning stand beside it, and what one island of GPUs more or less or a disk twice as fast would bring.
    """
    from lengthwise.apps.plan import write_plan
    from lengthwise.cli import app_report, outputs
    from lengthwise.report.apps import write_app_html
    from lengthwise.usecases.app_plan import Planning
    from lengthwise.usecases.app_setup import asked_app

    asked = asked_app(app, set_ or (), node or (), profile)
    outputs.require_answers(json, report, inputs=asked.file.files)
    how = Planning(method, draws=draws, true_draws=true_draws, quantile=quantile, seed=seed, what_ifs=what_if)
    made = asked.planned(how)
    plan = made.plan
    assert plan is not None
    metadata = app_report.facts_of(asked, made, app.stem)
    if not quiet and json != outputs.STDOUT:
        show(plan, metadata.name, len(metadata.gpus), is_mixed=metadata.is_mixed)
    written = outputs.write_answers(
        json, report, lambda path: write_plan(path, plan), lambda path: write_app_html(path, plan, metadata)
    )
    if not quiet:
        outputs.tell(written)


_MOST_STAGES = 24
_STAGES = ("stage", "from", "to", "model", "replicas", "GPUs", "made ready", "")
_METHODS = ("method", "makespan", "search", "stages", "times as long")
_WHAT_IFS = ("with", "makespan", "difference")


def show(plan: AppPlan, title: str, gpus: int, *, is_mixed: bool = False) -> None:
    """Prints stages, makespan, idle GPUs, other methods, what something else would bring, and notes.

    Where GPUs are of several kinds (mixed), stages tell which each model has.
    """
    out = console()
    many = f"{len(plan.stages)} stage{'s' if len(plan.stages) != 1 else ''}"
    out.print(f"{title}: {estimate_duration_text(plan.makespan)} on {gpus} GPU{'s' if gpus != 1 else ''}, {many}")
    low, high = plan.quantiles_s.get(0.05), plan.quantiles_s.get(0.95)
    if low is not None and high is not None:
        out.print(f"90 % of the draws lie within {duration_text(low)} to {duration_text(high)}")
    out.print()
    _stages(plan, is_mixed=is_mixed)
    out.print(_idle(plan, gpus))
    if plan.methods:
        out.print()
        rows = [
            (
                one.name,
                estimate_duration_text(one.makespan),
                duration_text(one.search_s),
                str(one.stages),
                f"{one.gain:.2f}",
            )
            for one in plan.methods
        ]
        print_table(_METHODS, rows, wraps=(), drops=("stages", "search"))
        out.print("times as long: end to end, the search too", style="dim")
    if plan.what_ifs:
        out.print()
        of_s = plan.makespan.value
        changes = [
            (what_if_text(w), estimate_duration_text(w.makespan), difference_text(w.difference, of_s))
            for w in plan.what_ifs
        ]
        print_table(_WHAT_IFS, changes, wraps=("with",))
    for note in plan.notes:
        out.print(f"note: {note}", style="dim")


def _stages(plan: AppPlan, *, is_mixed: bool) -> None:
    """A row for each model of each stage; the stage's own columns are filled in its first row."""
    shown = plan.stages[:_MOST_STAGES]
    rows = [row for number, stage in enumerate(shown, 1) for row in _rows(number, stage, plan, is_mixed=is_mixed)]
    drops = [name for name in ("made ready", "GPUs", "from") if not (is_mixed and name == "GPUs")]
    print_table(_STAGES, rows, wraps=(), drops=drops)
    if len(plan.stages) > len(shown):
        console().print(f"... and {len(plan.stages) - len(shown)} more: --json or --report has all", style="dim")


def _rows(number: int, stage: AppStage, plan: AppPlan, *, is_mixed: bool) -> Iterator[tuple[str, ...]]:
    made = slowest_switches(stage)
    for k, one in enumerate(stage.plans):
        own = (str(number), duration_text(stage.start_s), duration_text(stage.end_s)) if k == 0 else ("", "", "")
        ready = duration_text(made[one.model][1]) if one.model in made else ""
        ends = "finishes" if stage.ends_by == one.model else ""
        yield (*own, plan.models[one.model], shape(one), gpus_text(one, is_mixed=is_mixed), ready, ends)


def _idle(plan: AppPlan, gpus: int) -> str:
    shares = [(why, share) for why, share in idle_shares(plan, gpus) if share >= 0.005]
    if not shares:
        return "GPUs work all the time"
    return (
        f"GPU time without work: {', '.join(f'{percent(share)} {IDLE_REASONS.get(why, why)}' for why, share in shares)}"
    )
