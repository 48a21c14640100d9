"""``lengthwise search``: which deployment to choose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli._options import CostSource, HtmlReport, JsonFile, Quiet

EXAMPLES = """\b
Examples:
  lengthwise search examples/buy-70b.toml
  lengthwise search examples/buy-70b.toml --report plan.html --deploy launch
  lengthwise search examples/vidur-study.toml --resume study --jobs 2
"""


def run(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO", help="A .toml or .yaml file with [search].")
    ],
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: search.max_gpus=8; repeatable."),
    ] = None,
    cost: CostSource = None,
    top: Annotated[int | None, typer.Option(min=1, help="Configurations to rank exactly: 10.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Evaluations at a time; default: one a CPU.")
    ] = None,
    processes: Annotated[
        bool, typer.Option("--processes", help="Use processes, not threads: faster from about 8 CPUs on.")
    ] = False,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Evaluate on a Ray cluster; local: start one here.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep every evaluation in this folder, and repeat none that is there."
        ),
    ] = None,
    report: HtmlReport = None,
    deploy: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write what to run: vLLM, SGLang, Kubernetes, a load test."),
    ] = None,
    deploy_top: Annotated[int, typer.Option(min=1, help="So many of the best go to --deploy.")] = 1,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Find the deployment that is best under limits, with the evidence."""
    from lengthwise import scenario as scenarios
    from lengthwise.cli import _outputs, _search_page, _settings

    asked = scenarios.load(scenario, [*_settings.overrides(set_, cost), *_settings.ranking(top)])
    _outputs.require_answers(json, report, inputs=asked.files)
    if deploy is not None:
        _outputs.require_folder(deploy)
    _settings.tell(asked.notes, quiet=quiet)
    workers = _search_page.workers(jobs, processes=processes, ray=ray)
    with workers as crew, _search_page.store(resume) as kept, _search_page.progress(quiet=quiet) as progress:
        study = scenarios.plan(asked, crew, store=kept, progress=progress)
    if not quiet and json != _outputs.STDOUT:
        _search_page.show(study, asked)
    written = _search_page.write(study, json, report)
    if deploy is not None:
        written += scenarios.write_launches(asked, study, deploy, deploy_top)
    if not quiet:
        _outputs.tell(written)
