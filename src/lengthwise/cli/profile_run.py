"""``lengthwise profile run``."""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from lengthwise.cli.outputs import require_writable
from lengthwise.cli.progress import bar
from lengthwise.schema.errors import InputError

if TYPE_CHECKING:
    from lengthwise.measure.operators import Measurement

EXAMPLES = """\b
Examples:
  lengthwise profile run --model llama-3-8b --tp 1,2,4 --out h100.parquet
  lengthwise profile run --model ./my-model/config.json --device cpu --threads 8 --budget 10m
  lengthwise profile run --model llama-3-8b --out h100.parquet --resume
"""


def run(
    *,
    model: Annotated[str, Option(metavar="NAME|FILE", help="A model of the catalog, or its config.json.")],
    device: Annotated[str, Option(help="cuda, cpu, or auto: a GPU if there is one.")] = "auto",
    dtype: Annotated[
        str, Option(help="bfloat16, float16, float32; auto: on a CPU float32, else the model's.")
    ] = "auto",
    tp: Annotated[str, Option(metavar="N,N...", help="TP degrees whose shards are measured.")] = "1",
    budget: Annotated[str, Option(metavar="TIME", help="Total time: 300, 90s, 5m, 1h.")] = "5m",
    out: Annotated[Path | None, Option(metavar="FILE", help="The profile; default: NAME-DEVICE.parquet.")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue an interrupted run.")] = False,
    max_tokens: Annotated[int | None, Option(min=1, help="Tokens of the largest step.")] = None,
    max_seqs: Annotated[int | None, Option(min=1, help="Sequences of the largest step.")] = None,
    max_context: Annotated[int | None, Option(min=1, help="Tokens of the longest request.")] = None,
    threads: Annotated[int | None, Option(min=1, help="Threads of a CPU; default: all cores.")] = None,
    seed: Annotated[int, Option(min=0, help="Seed of the tensors' values.")] = 0,
    quiet: Annotated[bool, Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Measure a model's operators on this machine with torch, and write a profile.

    The most informative points are measured first, until the time is up. No weights are needed: shapes are enough.
    Points are stored next to the profile as they are measured; --resume continues from them.
    """
    from lengthwise import catalog
    from lengthwise.cost.profiles import write_profile
    from lengthwise.measure.operators import MeasurementSettings, device_kind, measure_operators, require_measurable
    from lengthwise.usecases.profile_run import naming_points_file, points_file

    degrees, budget_s, spec = _degrees(tp), _seconds(budget), catalog.model(model)
    settings = MeasurementSettings(device, dtype, degrees, threads, max_tokens, max_seqs, max_context, seed)
    require_measurable(spec, settings)
    target = out or Path(f"{spec.name.replace('/', '-')}-{device_kind(device)}.parquet")
    require_writable([target])
    points = points_file(target, resume=resume)
    saved_rows = naming_points_file(points, lambda note: typer.echo(note, err=True))
    with bar("measuring {task.description}", quiet=quiet, counts=False) as progress, saved_rows:
        measured = measure_operators(spec, settings, budget_s=budget_s, progress=progress, resume=points)
    write_profile(measured.profile, target)
    show(measured, target)
    if measured.lost:
        typer.echo(
            f"the device failed: {measured.lost}. {points} has the measured points: continue with --resume, which "
            "skips the point that failed",
            err=True,
        )
        raise typer.Exit(1)
    points.unlink(missing_ok=True)


def _degrees(text: str) -> tuple[int, ...]:
    try:
        degrees = tuple(int(word) for word in text.split(","))
    except ValueError:
        degrees = ()
    if not degrees or min(degrees) < 1:
        raise InputError(f"--tp must be whole numbers from 1, with commas between, such as 1,2,4; it is {text!r}")
    return degrees


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h|)\s*", text)
    if match is None or not float(match[1]):
        raise InputError(f"--budget must be a time above 0 such as 300, 90s, 5m or 1h; it is {text!r}")
    return float(match[1]) * {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}[match[2]]


def show(measured: Measurement, target: Path) -> None:
    """Print a row for each operator, the error of predicting a point from the other points, and the file's path."""
    from lengthwise.cli.tables import print_table

    def percent(value: float) -> str:
        return "-" if math.isnan(value) else f"{value:.1%}"

    metadata, lines = measured.profile.metadata, measured.lines
    typer.echo(f"{metadata.name}: {len(measured.profile)} rows, {metadata.engine}")
    rows = []
    for line in lines:
        shares = map(percent, (line.spread, line.error, line.share))
        rows.append([line.operator, str(line.tp or "-"), str(line.points), *shares])
    print_table(("operator", "tp", "points", "spread", "error", "share of a step"), rows, drops=("spread",))
    if errors := [line.error for line in lines if line.tp and math.isfinite(line.error)]:
        median = statistics.median(errors)
        typer.echo(f"points are predicted by the others within {median:.1%} (median over operators)")
        if median > 0.05:
            typer.echo("more time (--budget) or a quieter machine would lower that")
    for note in metadata.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"wrote {target}; show it with: lengthwise profile show {target}")
