"""``lengthwise app run``: an application run by its plan, every answer kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli._options import HtmlReport, Quiet

EXAMPLES = """\b
Examples:
  lengthwise app run examples/apps/critique.toml --out run --launcher simulated --node 2xA100-80GB
  lengthwise app run summaries.toml --out run
  lengthwise app run summaries.toml --out run --resume
  lengthwise app run summaries.toml --out run-2 --store postgresql://user@host/db?schema=tonight
"""


def run(
    app: Annotated[Path, typer.Argument(metavar="APP", help="A .toml or .yaml file of an application.")],
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where answers, their ledger and logs go.")],
    launcher: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="local, ray, static or simulated; default: as the file says."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="PLAN.json", help="What app plan --json wrote; default: it is planned now."),
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE", help="GPUs: 8xA100-80GB, or a node of the catalog; repeatable."),
    ] = None,
    profile: Annotated[Path | None, typer.Option(metavar="DIR", help="What app profile measured.")] = None,
    ray: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="With --launcher ray: of the cluster; local starts one here."),
    ] = "auto",
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where its ledger is, if not in the folder: postgresql://... for several coordinators, a folder each.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws to plan with.")] = 0,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Change a setting: calls.answer.max_tokens=256; repeatable."
        ),
    ] = None,
    report: HtmlReport = None,
    quiet: Quiet = False,
) -> None:
    """Run an application on engines: models come and go as planned, and every answer is recorded once.

    Exit codes: 0 all is answered, 1 some tasks are dead (dead.jsonl says why), 2 an input, an engine or the disk cannot
    be used (what was recorded stays), 130 it was stopped: go on with --resume.
    """
    from lengthwise.apps.plan import read_plan
    from lengthwise.apps.run import RunFolder
    from lengthwise.cli import _app_report, _app_run_page, _outputs
    from lengthwise.report.apps import write_app_html
    from lengthwise.scenario.app_files import asked_app
    from lengthwise.scenario.app_plans import Planning
    from lengthwise.scenario.app_runs import Watching, run_app

    asked = asked_app(app, set_ or (), node or (), profile)
    _outputs.require_answers(None, report, inputs=asked.file.files)
    run_of = asked.file.run
    store = store or run_of.store
    RunFolder(out, store).require_free(resume=resume)
    engines = asked.engines(launcher, ray)
    how = Planning(beside=False, draws=2, true_draws=4, seed=seed, what_ifs=False)
    if engines.launcher == "static":
        made = asked.drawn(how)
    else:
        given = None if plan is None else read_plan(plan)
        # In virtual time nothing can start while a plan is looked for by the clock.
        made = asked.planned(how, given, begins=engines.launcher != "simulated")
    notes = made.plan.notes if made.plan is not None else ()
    if resume and not RunFolder(out, store).is_begun:
        notes = (f"{out} holds no run to go on with: a new one begins", *notes)
    with _app_run_page.shown(notes, quiet=quiet) as watch:
        watching = Watching(
            watch, stopping=_app_run_page.stopping(quiet=quiet), begun=_app_run_page.begun(quiet=quiet)
        )
        ran = run_app(
            made, asked.file.rows, engines, out, settings=run_of.settings, store=store, resume=resume,
            watching=watching,
        )  # fmt: skip
    if report is not None:
        facts = _app_report.facts_of_run(asked, made, app.stem, ran)
        write_app_html(report, ran.plan, facts, [model.name for model in asked.app.models])
    _app_run_page.end(ran, report, quiet=quiet)
