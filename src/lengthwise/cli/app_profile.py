"""``lengthwise app profile``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from lengthwise.cli import options, outputs
from lengthwise.cli.options import AppFile, Quiet

if TYPE_CHECKING:
    from lengthwise.usecases.app_profile_folder import CostRow, SwitchRow
    from lengthwise.usecases.app_profile_measurement import ProfileRun

EXAMPLES = """\b
Examples:
  lengthwise app profile examples/apps/ensemble.toml --out profile
  lengthwise app profile mine.toml --out profile --rows 64 --times 5 --calibrate
  lengthwise app plan mine.toml --profile profile
"""


def run(
    app_file: AppFile,
    *,
    out: Annotated[Path, Option(metavar="DIR", help="Folder of the profile; an existing one is continued.")],
    node: Annotated[
        list[str] | None,
        Option(metavar="NxGPU", help="GPUs of this machine: 8xA100-80GB; repeatable. Default: the file's."),
    ] = None,
    models: Annotated[str | None, Option(metavar="NAMES", help="Only these models, with commas between.")] = None,
    rows: Annotated[int, Option(min=0, help="Random rows to run for their output lengths; 0: none.")] = 32,
    times: Annotated[int, Option(min=1, help="How often each engine is started.")] = 3,
    shapes: Annotated[
        str, Option(metavar="smallest|all", help="Replicas to time: on the fewest GPUs, or all that a plan may use.")
    ] = "smallest",
    calibrate: Annotated[bool, Option("--calibrate", help="Calibrate cost tables at three concurrencies.")] = False,
    repeat: Annotated[bool, Option("--again", help="Repeat the measurements in the folder.")] = False,
    set_: Annotated[list[str] | None, options.setting("run.max_num_seqs=8")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the sample and of the prompts.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Measure an application on this machine: switching times, output lengths, costs.

    Engines are started by the same commands as in a run. Existing measurements in the folder are reused, so that the
    same command continues an interrupted profile. app plan and app run read it with --profile.
    """
    from lengthwise.config.app_file import load_app
    from lengthwise.config.cluster import parse_node
    from lengthwise.schema.app import Cluster
    from lengthwise.usecases.app_profile import profile_app, profile_target
    from lengthwise.usecases.app_profile_measurement import ProfileOptions

    names = tuple(name.strip() for name in models.split(",")) if models else ()
    wanted = ProfileOptions(names, rows, times, shapes, calibrate, repeat, seed)
    outputs.require_folder(out)
    file = load_app(app_file, set_ or ())
    if node:
        file = replace(file, cluster=Cluster(tuple(parse_node(text) for text in node)))
    report = (lambda _: None) if quiet else (lambda message: typer.echo(message, err=True))
    profiled = profile_app(profile_target(file), out, wanted, report=report)
    if not quiet:
        show(profiled)
        typer.echo(f"wrote {out}", err=True)
        typer.echo(f"use it: lengthwise app plan {app_file} --profile {out}", err=True)


def show(profiled: ProfileRun) -> None:
    """Print switching times, output lengths, calibrated costs, and notes."""
    from lengthwise.cli.tables import console, print_table

    out, found, notes = console(), profiled.profile, list(profiled.notes)
    lengths = []
    for row in found.lengths:
        mean = "" if row.mean_tokens is None else f"{row.mean_tokens:.1f}"
        half_width = "" if row.half_width is None else f" ± {row.half_width:.1f}"
        lengths.append([row.model, str(row.rows), str(row.outputs), mean + half_width, str(row.cut)])
        if row.outputs and row.cut > row.outputs / 2:
            notes.append(
                f"more than half of the outputs of {row.model} were cut at their limit (max_tokens): their lengths "
                "without it are unknown"
            )
    switches = []
    for switch in found.switches:
        seconds = map(_mean, (switch.start_s, switch.sleep_s, switch.wake_s, switch.stop_s))
        switches.append([switch.model, _replica(switch), str(len(switch.start_s)), *seconds])
        first, *later = switch.start_s or (0.0,)
        if later and first > 2 * max(later):
            notes.append(
                f"{switch.model} took {first:.1f} s to start at first and at most {max(later):.1f} s later, when "
                "weights were in the page cache; plans use the mean"
            )
    costs = [
        [cost.model, _replica(cost), str(cost.requests), f"{cost.before:.0%}", f"{cost.after:.0%}"]
        for cost in found.costs
    ]
    tables = (
        ("switching times, means with 95 % intervals:",
         ("model", "replica", "times", "start s", "sleep s", "wake s", "stop s"), switches),
        ("output lengths of the sample, means with 95 % intervals:",
         ("model", "rows", "outputs", "mean tokens", "cut at their limit"), lengths),
        ("calibrated costs, errors on single held-out requests:",
         ("model", "replica", "requests", "error before", "error after"), costs),
    )  # fmt: skip
    for title, columns, rows in tables:
        if rows:
            out.print(title, style="bold")
            print_table(columns, rows, wraps=())
            out.print()
    for note in notes:
        out.print(f"note: {note}", highlight=False)


def _mean(values: Sequence[float]) -> str:
    from lengthwise.statistics import mean_estimate

    if not values:
        return ""
    found = mean_estimate(values)
    return f"{found.value:.2f}" + (f" ± {found.half_width:.2f}" if found.has_interval else "")


def _replica(row: SwitchRow | CostRow) -> str:
    return f"{row.gpu}, tp={row.tp}" + (f", pp={row.pp}" if row.pp > 1 else "")
