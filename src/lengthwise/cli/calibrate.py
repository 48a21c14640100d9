"""``lengthwise calibrate``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from lengthwise.cli import options, outputs
from lengthwise.cli.options import JsonFile
from lengthwise.cli.progress import simulating
from lengthwise.cli.tables import console, print_table
from lengthwise.schema.errors import InputError

if TYPE_CHECKING:
    from lengthwise.measure.calibration import Calibration

EXAMPLES = """\b
Examples:
  lengthwise bench http://localhost:8000 mine.toml --request-rate 4 --records run.parquet
  lengthwise calibrate mine.toml run.parquet --out cost.npz
  lengthwise calibrate mine.toml low.parquet high.parquet --holdout mid.parquet --out cost.npz
  lengthwise simulate mine.toml --cost tables:cost.npz
"""


def run(
    scenario_file: Annotated[
        Path, Argument(metavar="SCENARIO", help="A file with the measured deployment; its [workload] is not used.")
    ],
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Records of the engine, from bench --records.")],
    *,
    out: Annotated[Path, Option(metavar="FILE.npz", help="File of the cost tables.")],
    holdout: Annotated[
        list[Path] | None, Option(metavar="RUN", help="Report errors on this run, and do not fit it; repeatable.")
    ] = None,
    share: Annotated[float, Option(min=0.01, max=0.95, help="Without --holdout: share that is held out.")] = 0.3,
    iterations: Annotated[
        Path | None, Option(metavar="LOG", help="Fit to vLLM's log (--enable-logging-iteration-details).")
    ] = None,
    fit: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Fit only this: work, prefill, context, decode, comm, host_step, host_sequence, client, masked; "
            "repeatable. Dense masks are then only fitted if named.",
        ),
    ] = None,
    masks: Annotated[
        str,
        Option(
            metavar="auto|no",
            help="Fit dense masks (attention over all of the batch). auto: unless --fit is given; no: never.",
        ),
    ] = "auto",
    scrape: Annotated[
        str,
        Option(
            metavar="auto|no",
            help="Fit to vLLM's counters (bench --scrape). auto: unless --iterations is given; no: never.",
        ),
    ] = "auto",
    set_: Annotated[list[str] | None, options.setting("engine.max_num_seqs=64")] = None,
    variant: Annotated[str | None, Option(metavar="NAME", help="The measured variant of the scenario.")] = None,
    cost: Annotated[str | None, Option(metavar="SOURCE", help="The tables to start from, such as roofline.")] = None,
    allow_warnings: Annotated[bool, Option("--allow-warnings", help="Accept partial or unreliable runs.")] = False,
    force: Annotated[
        bool, Option("--force", help="Accept simulated runs, and write tables that are worse than before.")
    ] = False,
    seed: Annotated[int, Option(min=0, help="Seed of the search and of the intervals.")] = 0,
    report: Annotated[
        Path | None, Option(help="Write an HTML page to this file; named .md: the printed output as Markdown.")
    ] = None,
    json: JsonFile = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print nothing.")] = False,
) -> None:
    """Fit the cost model to a measured run.

    Errors are reported on held-out requests; tables that only worsen them are not written. A server's counters
    (bench --scrape) are used, too: the steps, tokens and seconds that vLLM counted while it was busy are fitted along
    with the requests; the numbers of running and waiting requests are checked against the simulation.
    """
    from lengthwise import config
    from lengthwise import cost as costs
    from lengthwise.cli.records import read_named
    from lengthwise.measure.calibration import calibrate, read_iterations
    from lengthwise.usecases.calibrate import (
        calibration_json,
        markdown,
        measured_deployment,
        require_improvement,
        write_html,
    )

    if out.suffix.lower() != ".npz":
        raise InputError(
            f"--out must be a file named .npz, for cost tables; it is {out}. Give {out.with_suffix('.npz')}"
        )
    files = [path for path in (out, json if json != outputs.STDOUT else None, report) if path is not None]
    outputs.require_writable(files, inputs=[scenario_file, *runs, *(holdout or [])])
    as_html = report is not None and report.suffix.lower() in (".html", ".htm")
    if as_html:
        outputs.require_report_extra()
    scenario = config.load(scenario_file, options.overrides(set_, cost))
    options.print_notes(scenario.notes, quiet=quiet)
    deployment = measured_deployment(scenario, variant)
    measured = read_named([*runs, *(holdout or [])])
    with simulating(quiet=quiet):
        found = calibrate(
            measured[: len(runs)],
            deployment,
            fit=fit,
            holdout=measured[len(runs) :] if holdout else share,
            iterations=None if iterations is None else read_iterations(iterations),
            allow=[name for name, allowed in (("warnings", allow_warnings), ("simulated", force)) if allowed],
            seed=seed,
            masks=masks,
            scrape=scrape,
        )
    if printed := not quiet and json != outputs.STDOUT:
        show(found)
    if not force:
        require_improvement(found, printed=printed)
    costs.save(found.tables, out, costs.MadeFor.of_deployment(deployment))
    if json is not None:
        outputs.write_text(json, calibration_json(found), quiet=True)
    if report is not None and as_html:
        write_html(report, found)
    elif report is not None:
        outputs.write_text(report, markdown(found), quiet=True)
    if not quiet:
        outputs.print_written(files)
        same = "".join(f" --set {text}" for text in set_ or []) + (
            f" --variant {shlex.quote(variant)}" if variant else ""
        )
        typer.echo(f"simulate with it: lengthwise simulate {scenario_file}{same} --cost tables:{out}", err=True)


def show(found: Calibration) -> None:
    """Print errors, parameters, and how reliable both are."""
    from lengthwise.usecases.calibrate import error_table, parameter_table, reliability, urgent

    out = console()
    for warning in urgent(found):
        out.print(warning, highlight=False)
    out.print(f"errors on {found.held_out} held-out requests ({found.split}):", highlight=False)
    heads, *errors = error_table(found)
    print_table(heads, errors, drops=["measured"])
    out.print()
    heads, *parameters = parameter_table(found)
    print_table(heads, parameters)
    out.print()
    for line in reliability(found):
        out.print(line, highlight=False)
