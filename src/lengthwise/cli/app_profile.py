"""``lengthwise app profile``: an application measured where it will run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli._options import Quiet

EXAMPLES = """\b
Examples:
  lengthwise app profile examples/apps/ensemble.toml --out profile
  lengthwise app profile mine.toml --out profile --rows 64 --times 5 --calibrate
  lengthwise app plan mine.toml --profile profile
"""


def run(
    application: Annotated[
        Path, typer.Argument(metavar="APP", help="A .toml or .yaml file of an application.")
    ],
    *,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the profile goes; one that is there goes on.")
    ],
    node: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NxGPU", help="GPUs of this machine: 8xA100-80GB; repeatable. Default: the file's."
        ),
    ] = None,
    models: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Only these models, with commas between.")
    ] = None,
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
        bool,
        typer.Option(
            "--calibrate", help="Calibrate cost tables, too: load at three concurrencies, then a fit."
        ),
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure what is there already once more.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: run.seats=8; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample, and of what is sent.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Measure an application on this machine: seconds of switching, output lengths, and costs where asked.

    Engines are started by the very commands that a run starts them with. What is in the folder already is kept, so
    that a profile that was interrupted goes on with the same command. app plan and app run take it by --profile.
    """
    from lengthwise.cli import _app_profile_page as page
    from lengthwise.cli import _outputs
    from lengthwise.scenario.app_profiles import Wanted, profile_app, profiling_of
    from lengthwise.scenario.apps import load_app, parse_node
    from lengthwise.schema.app import Cluster

    names = tuple(name.strip() for name in models.split(",")) if models else ()
    wanted = Wanted(names, rows, times, shapes, calibrate, again, seed)
    _outputs.require_folder(out)
    file = load_app(application, set_ or ())
    if node:
        file = replace(file, cluster=Cluster(tuple(parse_node(text) for text in node)))
    told = (lambda _: None) if quiet else (lambda words: typer.echo(words, err=True))
    found = profile_app(profiling_of(file), out, wanted, told=told)
    if not quiet:
        page.show(found)
        page.tell(found, str(application))
