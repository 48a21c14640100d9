"""``lengthwise profile run``: this machine's device, measured."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from lengthwise import catalog
from lengthwise.cli.outputs import require_writable
from lengthwise.cli.tables import print_table
from lengthwise.cost.profiles import write_profile
from lengthwise.measure.operators import Measurement, OperatorLine, device_kind, measure_operators, require_measurable
from lengthwise.schema.errors import InputError

EXAMPLES = """\b
Examples:
  lengthwise profile run --model llama-3-8b --tp 1,2,4 --out h100.parquet
  lengthwise profile run --model ./my-model/config.json --device cpu --threads 8 --budget 10m
  lengthwise profile run --model llama-3-8b --out h100.parquet --resume
"""

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def run(
    *,
    model: Annotated[str, typer.Option(metavar="NAME|FILE", help="A model of the catalog, or its config.json.")],
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: a GPU where there is one.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32; auto: float32 on a CPU, the model's on a GPU.")
    ] = "auto",
    tp: Annotated[str, typer.Option(metavar="N,N...", help="TP degrees whose shards are measured.")] = "1",
    budget: Annotated[str, typer.Option(metavar="TIME", help="How long in all: 300, 90s, 5m, 1h.")] = "5m",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The profile; else NAME-DEVICE.parquet here.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of the largest step.")] = None,
    max_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences of the largest step.")] = None,
    max_context: Annotated[int | None, typer.Option(min=1, help="Tokens of the longest request.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a CPU; else all cores.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of what the tensors hold.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Measure a model's operators on this machine with torch, and write one profile.

    Points are spent where they tell most until the time is up. Needs no weights: shapes are enough. What
    was measured is kept beside the profile as it comes; --resume goes on with it.
    """
    measure_device(
        model, device=device, dtype=dtype, tp=_degrees(tp), budget_s=_seconds(budget), out=out, resume=resume,
        max_tokens=max_tokens, max_seqs=max_seqs, max_context=max_context, threads=threads, seed=seed,
        quiet=quiet,
    )  # fmt: skip


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
    return float(match[1]) * _UNITS_S[match[2]]


_COLUMNS = ("operator", "tp", "points", "spread", "error", "share of a step")
_ERROR_AIM = 0.05


def measure_device(
    model: str,
    *,
    device: str,
    dtype: str,
    tp: Sequence[int],
    threads: int | None,
    out: Path | None,
    resume: bool,
    budget_s: float,
    quiet: bool,
    **settings: Any,
) -> None:
    """Measures, writes, prints."""
    spec = catalog.model(model)
    asked: dict[str, Any] = {"device": device, "dtype": dtype, "tp": tp, "threads": threads}
    require_measurable(spec, **asked)
    kind = device_kind(device)
    target = out or Path(f"{spec.name.replace('/', '-')}-{kind}.parquet")
    require_writable([target])
    points = _points_file(target, resume=resume)
    with keeping(points), _shown(budget_s, quiet=quiet) as progress:
        measured = measure_operators(spec, **asked, budget_s=budget_s, resume=points, progress=progress, **settings)
    write_profile(measured.profile, target)
    _print(measured, target)
    if measured.lost:
        typer.echo(
            f"the device failed: {measured.lost}. {points} keeps what was measured: go on with --resume, which leaves "
            "out the point that broke it",
            err=True,
        )
        raise typer.Exit(1)
    points.unlink(missing_ok=True)


def _points_file(target: Path, *, resume: bool) -> Path:
    """Where points are kept until the profile is whole."""
    points = target.with_name(target.name + ".points.jsonl")
    if points.exists() and not resume:
        raise InputError(
            f"{points} holds the points of a run that was interrupted: give --resume to go on with it (same options, "
            "a larger --budget at most), or delete it"
        )
    return points


@contextmanager
def keeping(points: Path) -> Iterator[None]:
    """Where a measurement ends early, says where its points are; a file without any is removed."""
    try:
        yield
    except (InputError, KeyboardInterrupt) as error:
        if not _has_points(points):
            points.unlink(missing_ok=True)
            raise
        kept = (
            f"What was measured is kept in {points}; give --resume to go on with it (same options, a larger --budget "
            "at most), or delete it to measure other points"
        )
        if isinstance(error, KeyboardInterrupt):
            typer.echo(kept, err=True)
            raise
        if type(error) is not InputError:  # of another measurement, or not to be written: these say all
            raise
        raise InputError(f"{error} {kept}") from error


def _has_points(points: Path) -> bool:
    """Whether there is more than the line that says what is measured."""
    return points.is_file() and points.read_bytes().count(b"\n") > 1


def _print(measured: Measurement, target: Path) -> None:
    metadata = measured.profile.metadata
    typer.echo(f"{metadata.name}: {len(measured.profile)} rows, {metadata.engine}")
    print_table(_COLUMNS, [_row(line) for line in measured.lines], drops=("spread",))
    _print_error(measured.lines)
    for note in metadata.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"wrote {target}; look at it with: lengthwise profile show {target}")


def _print_error(lines: Sequence[OperatorLine]) -> None:
    errors = [line.error for line in lines if line.tp and np.isfinite(line.error)]
    if not errors:
        return
    median = float(np.median(errors))
    typer.echo(f"points are told by the others within {median:.1%} (median over operators)")
    if median > _ERROR_AIM:
        typer.echo("more time (--budget) or a quieter machine would make that better")


def _row(line: OperatorLine) -> list[str]:
    tp = str(line.tp) if line.tp else "-"
    return [line.operator, tp, str(line.points), *(_percent(x) for x in (line.spread, line.error, line.share))]


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


@contextmanager
def _shown(budget_s: float, *, quiet: bool) -> Iterator[Callable[[float, float, str], None]]:
    """A callable for seconds spent, seconds in all, and what is under way: a bar on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=budget_s)
        yield lambda spent, _, what: progress.update(task, completed=min(spent, budget_s), description=what)
