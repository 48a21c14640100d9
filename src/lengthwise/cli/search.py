"""``lengthwise search``: which deployment to choose."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from lengthwise import engine, report, search
from lengthwise.cli.options import CostSource, HtmlReport, JsonFile, Quiet
from lengthwise.cli.outputs import write_answers
from lengthwise.cli.progress import COMPILE_S
from lengthwise.cli.tables import console
from lengthwise.config import Scenario
from lengthwise.schema.plan import Study
from lengthwise.search import Store
from lengthwise.search.workers import Workers

EXAMPLES = """\b
Examples:
  lengthwise search examples/buy-70b.toml
  lengthwise search examples/buy-70b.toml --report plan.html --deploy launch
  lengthwise search examples/vidur-study.toml --resume study --jobs 2
"""


def run(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A .toml or .yaml file with [search].")],
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: search.max_gpus=8; repeatable."),
    ] = None,
    cost: CostSource = None,
    top: Annotated[int | None, typer.Option(min=1, help="Configurations to rank exactly: 10.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Evaluations at a time; default: one a CPU.")] = None,
    processes: Annotated[
        bool, typer.Option("--processes", help="Use processes, not threads: faster from about 8 CPUs on.")
    ] = False,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Evaluate on a Ray cluster; local: start one here.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep every evaluation in this folder, and repeat none that is there."),
    ] = None,
    report: HtmlReport = None,
    deploy: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write what to run: vLLM, SGLang, Kubernetes, a load test.")
    ] = None,
    deploy_top: Annotated[int, typer.Option(min=1, help="So many of the best go to --deploy.")] = 1,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Find the deployment that is best under limits, with the evidence."""
    from lengthwise import config
    from lengthwise.cli import options, outputs
    from lengthwise.usecases import search

    asked = config.load(scenario, [*options.overrides(set_, cost), *options.ranking(top)])
    outputs.require_answers(json, report, inputs=asked.files)
    if deploy is not None:
        outputs.require_folder(deploy)
    options.tell(asked.notes, quiet=quiet)
    workers = search_workers(jobs, processes=processes, ray=ray)
    with workers as worker_pool, store(resume) as kept, search_progress(quiet=quiet) as progress:
        study = search.plan(asked, worker_pool, store=kept, progress=progress)
    if not quiet and json != outputs.STDOUT:
        show(study, asked)
    written = write(study, json, report)
    if deploy is not None:
        written += search.write_launches(asked, study, deploy, deploy_top)
    if not quiet:
        outputs.tell(written)


Progress = Callable[[str, int, int], None]
WORDS = {"bound": "bounds", "scout": "a quick look", "rank": "exact answers", "shift": "other limits"}


def search_workers(jobs: int | None, *, processes: bool, ray: str | None) -> AbstractContextManager[Workers]:
    """Threads, processes or a Ray cluster."""
    if ray is not None:
        return search.ray(ray, jobs=jobs)
    return search.processes(jobs) if processes else search.threads(jobs)


def store(folder: Path | None) -> AbstractContextManager[Store | None]:
    """The store of a folder, or none."""
    return nullcontext(None) if folder is None else Store.open(folder)


@contextmanager
def search_progress(*, quiet: bool) -> Iterator[Progress]:
    """A callable for a step's name, evaluations done and to do: a bar a step, on a terminal only."""
    if not engine.ready():
        if not quiet:
            typer.echo(f"compiling the engine (first run only, about {COMPILE_S} s)", err=True)
        engine.warm_up()
    if quiet or not sys.stderr.isatty():
        yield lambda *_: None
        return
    with _bars() as advance:
        yield advance


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from lengthwise.cli.progress import RateColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:

        def advance(step: str, done: int, of: int) -> None:
            if step not in tasks:
                head, _, word = step.rpartition(" ")
                tasks[step] = bars.add_task(f"{head} {WORDS.get(word, word)}".strip(), total=of)
            bars.update(tasks[step], completed=done, total=of)

        yield advance


def show(study: Study, requested: Scenario) -> None:
    """Prints the question and the ranked answers."""
    out = console()
    if requested.description:
        out.print(requested.description, style="dim")
    out.print(report.search_table(study, top=requested.search.top if requested.search else 10))


def write(study: Study, json: Path | None, html: Path | None) -> list[Path]:
    """Writes the files that were asked for, each whole or not at all, and returns them."""
    return write_answers(
        json,
        html,
        lambda path: report.write_search_json(path, study),
        lambda path: report.write_search_html(path, study),
    )
