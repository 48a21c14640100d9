"""``lengthwise search``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from lengthwise.cli import options, outputs
from lengthwise.cli.options import (
    Columns,
    CostSource,
    HtmlReport,
    Jobs,
    JsonFile,
    Limits,
    Model,
    OptionalScenario,
    Quiet,
    Rate,
    WorkloadName,
)
from lengthwise.cli.progress import compile_note, lines

EXAMPLES = """\b
Examples:
  lengthwise search --model llama-3.1-70b --gpu H100,H200,L40S --rate 5
  lengthwise search examples/buy-70b.toml
  lengthwise search examples/buy-70b.toml --report plan.html --deploy launch
  lengthwise search examples/vidur-study.toml --resume study --jobs 2
"""


def run(
    scenario_file: OptionalScenario = None,
    *,
    model: Model = None,
    gpu: Annotated[
        str | None,
        Option(metavar="NAME,...", help="GPUs of the catalog to compare.", autocompletion=options.names("gpus")),
    ] = None,
    rate: Rate = None,
    workload: WorkloadName = None,
    column: Columns = None,
    limit: Limits = None,
    set_: Annotated[list[str] | None, options.setting("search.max_gpus=8")] = None,
    cost: CostSource = None,
    top: Annotated[int | None, Option(min=1, help="Configurations to rank exactly; default: 10.")] = None,
    jobs: Jobs = None,
    processes: Annotated[bool, Option("--processes", help="Use processes: faster from about 8 CPUs on.")] = False,
    ray: Annotated[str | None, Option(metavar="ADDRESS", help="Evaluate on a Ray cluster; local: start one.")] = None,
    resume: Annotated[Path | None, Option(metavar="DIR", help="Store evaluations here and reuse stored ones.")] = None,
    report: HtmlReport = None,
    deploy: Annotated[Path | None, Option(metavar="DIR", help="Write launch files: engines, Kubernetes.")] = None,
    deploy_top: Annotated[int, Option(min=1, help="Number of best configurations in --deploy.")] = 1,
    force: Annotated[bool, Option("--force", help="Let --deploy replace the folders of an earlier search.")] = False,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Find the best deployment that meets the limits, by requests per dollar or another objective."""
    from lengthwise import backend

    ranking = [] if top is None else [f"search.top={top}"]
    from lengthwise.usecases import short_options

    scenario = short_options.scenario_of(
        scenario_file,
        [*short_options.columns(column), *short_options.limits(limit), *options.overrides(set_, cost), *ranking],
        model=model,
        gpus=gpu,
        rate=rate,
        workload=workload,
    )
    outputs.require_outputs(json, report, scenario.files)
    if deploy is not None:
        outputs.require_folder(deploy)
        backend.require_replaceable(deploy, force=force)
    options.print_notes(scenario.notes, quiet=quiet)
    from lengthwise import report as reports
    from lengthwise import search
    from lengthwise.cli.tables import console
    from lengthwise.usecases import search as usecase

    if ray is not None:
        workers = search.ray(ray, jobs=jobs)
    else:
        workers = search.processes(jobs) if processes else search.threads(jobs)
    stored = nullcontext(None) if resume is None else search.Store.open(resume)
    with compile_note(quiet=quiet), workers as worker_pool, stored as store, searching(quiet=quiet) as progress:
        study = usecase.plan(scenario, worker_pool, store=store, progress=progress)
    if not quiet and json != outputs.STDOUT:
        out = console()
        if scenario.description:
            out.print(scenario.description, style="dim")
        out.print(reports.search_table(study, top=scenario.search.top if scenario.search else 10))
    outputs.write_outputs(json, report, study, reports.write_search_json, reports.write_search_html, quiet=quiet)
    if deploy is not None:
        folders = usecase.write_launches(scenario, study, deploy, deploy_top, force=force)
        outputs.print_written([] if quiet else folders)


_STEPS = {"bound": "bounds", "scout": "short runs", "rank": "exact ranking", "shift": "other limits"}


def _step(step: str) -> str:
    head, _, word = step.rpartition(" ")
    return f"{head} {_STEPS.get(word, word)}".strip()


@contextmanager
def searching(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar per step on a terminal, else lines; yield a function of (step, evaluations done, total) for them."""
    if quiet:
        yield lambda *_: None
        return
    if not sys.stderr.isatty():
        printed = lines()
        yield lambda step, done, total: printed(f"{_step(step)}:", done, total)
        return
    from rich import progress as bars
    from rich.console import Console
    from rich.text import Text

    class RateColumn(bars.ProgressColumn):
        def render(self, task: Any) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.3g}/s", style="progress.data.speed")

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        RateColumn(),
        bars.TimeRemainingColumn(),
    )
    tasks: dict[str, bars.TaskID] = {}
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as shown:

        def advance(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = shown.add_task(_step(step), total=total)
            shown.update(tasks[step], completed=done, total=total)

        yield advance
