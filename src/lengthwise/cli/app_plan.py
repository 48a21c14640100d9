"""``lengthwise app plan``: which models run when, on how many GPUs each, so that all is done soonest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli._options import HtmlReport, JsonFile, Quiet

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
        list[str] | None,
        typer.Option(metavar="NODE", help="GPUs: 8xA100-80GB, or a node of the catalog; repeatable."),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="lengthwise, samullm, max, min, or one of these with _no_preemption."
        ),
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
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Change a setting: calls.answer.max_tokens=256; repeatable."
        ),
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
    from lengthwise.cli import _app_plan_page, _app_report, _outputs
    from lengthwise.report.apps import write_app_html
    from lengthwise.scenario.app_files import asked_app
    from lengthwise.scenario.app_plans import Planning

    asked = asked_app(app, set_ or (), node or (), profile)
    _outputs.require_answers(json, report, inputs=asked.file.files)
    how = Planning(method, draws=draws, true_draws=true_draws, quantile=quantile, seed=seed, what_ifs=what_if)
    made = asked.planned(how)
    plan = made.plan
    assert plan is not None
    facts = _app_report.facts_of(asked, made, app.stem)
    if not quiet and json != _outputs.STDOUT:
        _app_plan_page.show(plan, facts.name, len(facts.gpus), is_mixed=facts.is_mixed)
    written = _outputs.write_answers(
        json, report, lambda path: write_plan(path, plan), lambda path: write_app_html(path, plan, facts)
    )
    if not quiet:
        _outputs.tell(written)
