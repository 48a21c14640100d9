"""``lengthwise calibrate``: cost tables that agree with measured runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  lengthwise bench http://localhost:8000 mine.toml --request-rate 4 --records run.parquet
  lengthwise calibrate mine.toml run.parquet --out cost.npz
  lengthwise calibrate mine.toml low.parquet high.parquet --holdout mid.parquet --out cost.npz
  lengthwise simulate mine.toml --cost tables:cost.npz
"""


def run(
    scenario: Annotated[
        Path,
        typer.Argument(
            metavar="SCENARIO",
            help="A .toml or .yaml file that gives the deployment as it ran; its [workload] is not used.",
        ),
    ],
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Records of the engine, from bench --records.")
    ],
    *,
    out: Annotated[Path, typer.Option(metavar="FILE.npz", help="Where the cost tables go.")],
    holdout: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="Report errors on this run, which is not fitted to; repeatable."),
    ] = None,
    share: Annotated[
        float, typer.Option(min=0.01, max=0.95, help="Without --holdout: how much of the runs is held out.")
    ] = 0.3,
    iterations: Annotated[
        Path | None,
        typer.Option(
            metavar="LOG", help="Also fit to vLLM's log of steps (--enable-logging-iteration-details)."
        ),
    ] = None,
    fit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Move this alone: work, prefill, decode, comm, host_step, host_sequence, client, masked; repeatable. "
            "Dense masks are then not looked for, unless named.",
        ),
    ] = None,
    masks: Annotated[
        str,
        typer.Option(
            metavar="auto|no",
            help="Whether dense masks (attention over the whole batch) are looked for: without --fit, or never.",
        ),
    ] = "auto",
    scrape: Annotated[
        str,
        typer.Option(
            metavar="auto|no",
            help="Whether the counters that runs keep (bench --scrape, of a vLLM) are fitted to: without "
            "--iterations, or never.",
        ),
    ] = "auto",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Change a setting: engine.max_num_seqs=64; repeatable."
        ),
    ] = None,
    variant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which variant of the scenario was measured.")
    ] = None,
    cost: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="The tables to start from, such as roofline.")
    ] = None,
    allow_doubts: Annotated[
        bool,
        typer.Option(
            "--allow-doubts", help="Take runs that are partial, of another model or otherwise doubtful."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Take simulated runs, too, and write tables even if they are worse than those given.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the search's draws and of the intervals.")] = 0,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write a self-contained HTML page to this file, with distributions before and after; "
            "named .md: what is printed, as Markdown."
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(help="Write all numbers to this file; -: to standard output, without the tables."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.")] = False,
) -> None:
    """Calibrate a deployment's cost tables to measured runs, and report errors on what was held out.

    Tables that only make held-out requests worse are not written. What a server told of itself (bench --scrape) is
    used: the steps, tokens and seconds that a vLLM counted while it was busy are fitted to beside the requests; how
    many run and wait is checked against the simulation.
    """
    from lengthwise import cost as costs
    from lengthwise.cli import _calibrate_page as page
    from lengthwise.cli import _outputs, _progress, _records
    from lengthwise.measure.calibrate import calibrate, read_iterations

    page.require_npz(out)
    files = [path for path in (out, json if json != _outputs.STDOUT else None, report) if path is not None]
    _outputs.require_writable(files, inputs=[scenario, *runs, *(holdout or [])])
    if report is not None and page.is_html(report):
        _outputs.require_plotly()
    deployment = page.deployment_of(scenario, set_, cost, variant, quiet=quiet)
    allow = [name for name, on in (("doubts", allow_doubts), ("simulated", force)) if on]
    named = _records.read_named([*runs, *(holdout or [])])
    with _progress.shown(quiet=quiet):
        found = calibrate(
            named[: len(runs)],
            deployment,
            fit=fit,
            holdout=named[len(runs) :] if holdout else share,
            iterations=None if iterations is None else read_iterations(iterations),
            allow=allow,
            seed=seed,
            masks=masks,
            scrape=scrape,
        )
    if shown := not quiet and str(json) != "-":
        page.show(found)
    page.require_help(found, force=force, shown=shown)
    costs.save(found.tables, out, costs.MadeFor.of_deployment(deployment))
    page.write(found, json, report)
    if not quiet:
        for path in files:
            typer.echo(f"wrote {path}", err=True)
        again = "".join(f" --set {word}" for word in set_ or []) + (
            f" --variant {shlex.quote(variant)}" if variant else ""
        )
        typer.echo(f"simulate with it: lengthwise simulate {scenario}{again} --cost tables:{out}", err=True)
