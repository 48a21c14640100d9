"""``lengthwise app profile``: an application measured where it will run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.options import Quiet
from lengthwise.cli.tables import console, print_table
from lengthwise.usecases.app_profile import Profiled
from lengthwise.usecases.app_profile_folder import Costed, Lengths, Switched, mean_of

EXAMPLES = """\b
Examples:
  lengthwise app profile examples/apps/ensemble.toml --out profile
  lengthwise app profile mine.toml --out profile --rows 64 --times 5 --calibrate
  lengthwise app plan mine.toml --profile profile
"""


def run(
    application: Annotated[Path, typer.Argument(metavar="APP", help="A .toml or .yaml file of an application.")],
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the profile goes; one that is there goes on.")],
    node: Annotated[
        list[str] | None,
        typer.Option(metavar="NxGPU", help="GPUs of this machine: 8xA100-80GB; repeatable. Default: the file's."),
    ] = None,
    models: Annotated[str | None, typer.Option(metavar="NAMES", help="Only these models, with commas between.")] = None,
    rows: Annotated[
        int, typer.Option(min=0, help="Run so many rows, drawn at random, for their lengths; 0: none.")
    ] = 32,
    times: Annotated[int, typer.Option(min=1, help="How often each engine is started.")] = 3,
    shapes: Annotated[
        str,
        typer.Option(
            metavar="smallest|all",
            help="Replicas whose switches are timed: on as few GPUs as will do, or all that a plan may have.",
        ),
    ] = "smallest",
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Calibrate cost tables, too: load at three concurrencies, then a fit.")
    ] = False,
    repeat: Annotated[bool, typer.Option("--again", help="Measure what is there already once more.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: run.seats=8; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample, and of what is sent.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Measure an application on this machine: seconds of switching, output lengths, and costs where asked.

    Engines are started by the very commands that a run starts them with. What is in the folder already is kept, so
    that a profile that was interrupted goes on with the same command. app plan and app run take it by --profile.
    """
    from lengthwise.cli import outputs
    from lengthwise.config.app_file import load_app
    from lengthwise.config.app_sections import parse_node
    from lengthwise.schema.app import Cluster
    from lengthwise.usecases.app_profile import profile_app, profiling_of
    from lengthwise.usecases.app_profile_measurement import Wanted

    names = tuple(name.strip() for name in models.split(",")) if models else ()
    wanted = Wanted(names, rows, times, shapes, calibrate, repeat, seed)
    outputs.require_folder(out)
    file = load_app(application, set_ or ())
    if node:
        file = replace(file, cluster=Cluster(tuple(parse_node(text) for text in node)))
    told = (lambda _: None) if quiet else (lambda words: typer.echo(words, err=True))
    found = profile_app(profiling_of(file), out, wanted, report=told)
    if not quiet:
        show(found)
        tell(found, str(application))


_SWITCHES = ("model", "replica", "times", "start s", "sleep s", "wake s", "stop s")
_LENGTHS = ("model", "rows", "outputs", "mean tokens", "cut at their limit")
_COSTS = ("model", "replica", "requests", "off before", "off now")


def show(found: Profiled) -> None:
    """Prints what a profile holds."""
    out = console()
    book = found.profile_store
    parts: Sequence[tuple[str, Sequence[str], list[list[str]]]] = (
        ("seconds of switching, means with 95 % intervals:", _SWITCHES, [_switch(one) for one in book.switches]),
        ("output lengths of the sample, means with 95 % intervals:", _LENGTHS, [_length(one) for one in book.lengths]),
        ("calibrated costs, by how much single held-out requests are off:", _COSTS, [_cost(one) for one in book.costs]),
    )  # fmt: skip
    for title, columns, rows in parts:
        if rows:
            out.print(title, style="bold")
            print_table(columns, rows, wraps=())
            out.print()
    for note in (*found.notes, *_suggestion(found)):
        out.print(f"note: {note}", highlight=False)


def tell(found: Profiled, application: str) -> None:
    """Says where it is, and who uses it."""
    typer.echo(f"wrote {found.folder}", err=True)
    typer.echo(f"use it: lengthwise app plan {application} --profile {found.folder}", err=True)


def _switch(row: Switched) -> list[str]:
    seconds = (_mean(values) for values in (row.start_s, row.sleep_s, row.wake_s, row.stop_s))
    return [row.model, _replica(row), str(len(row.start_s)), *seconds]


def _length(row: Lengths) -> list[str]:
    mean = "" if row.mean_tokens is None else f"{row.mean_tokens:.1f}"
    off = "" if row.half_width is None else f" ± {row.half_width:.1f}"
    return [row.model, str(row.rows), str(row.outputs), mean + off, str(row.cut)]


def _cost(row: Costed) -> list[str]:
    return [row.model, _replica(row), str(row.requests), f"{row.before:.0%}", f"{row.after:.0%}"]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    found = mean_of(values)
    return f"{found.value:.2f}" + (f" ± {found.half_width:.2f}" if found.has_interval else "")


def _replica(row: Switched | Costed) -> str:
    return f"{row.gpu}, tp={row.tp}" + (f", pp={row.pp}" if row.pp > 1 else "")


def _suggestion(found: Profiled) -> Iterator[str]:
    """What a reader may take for more than it is."""
    for row in found.profile_store.lengths:
        if row.outputs and row.cut > row.outputs / 2:
            yield (
                f"more than half of the outputs of {row.model} were cut at their limit (max_tokens): how long they "
                "would be without it is not known"
            )
    for one in found.profile_store.switches:
        rest = one.start_s[1:]
        if rest and one.start_s[0] > 2 * max(rest):
            yield (
                f"{one.model} took {one.start_s[0]:.1f} s to start at first and {max(rest):.1f} s at most later, when "
                "weights were in the page cache; plans take the mean"
            )
