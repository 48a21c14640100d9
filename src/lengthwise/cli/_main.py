"""The program: its commands, and how it ends.

Exit codes: 0 done, 1 our bug (of compare: an error above its bound), 2 an input that cannot be used, 130 interrupted.
"""

from __future__ import annotations

import gc
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lengthwise.cli import (
    apps,
    bench,
    calibrate,
    capacity,
    catalog,
    compare,
    explain,
    lab,
    predict,
    profile,
    schedule,
    schedule_run,
    schedule_watch,
    search,
    serve,
    simulate,
    theory,
    workload,
)
from lengthwise.schema.errors import InputError

EXAMPLES = """\b
Example:
  lengthwise simulate examples/chat-70b.toml --seeds 5 --report report.html
"""


class _Commands(TyperGroup):
    """A group whose commands may have two words; a file that is called run is `schedule ./run`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command, and what is left for it."""
        both = " ".join(args[:2])
        return super().resolve_command(ctx, [both, *args[2:]] if both in self.commands else args)


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit it
)
app.command("simulate", epilog=simulate.EXAMPLES)(simulate.run)
app.command("capacity", epilog=capacity.EXAMPLES)(capacity.run)
app.command("serve", epilog=serve.EXAMPLES)(serve.run)
app.command("bench", epilog=bench.EXAMPLES)(bench.run)
app.command("calibrate", epilog=calibrate.EXAMPLES)(calibrate.run)
app.command("compare", epilog=compare.EXAMPLES)(compare.run)
app.command("search", epilog=search.EXAMPLES)(search.run)
app.command("schedule", epilog=schedule.EXAMPLES)(schedule.run)
app.command("schedule run", epilog=schedule_run.EXAMPLES)(schedule_run.run)
app.command("schedule watch", epilog=schedule_watch.EXAMPLES)(schedule_watch.run)
app.command("lab", epilog=lab.EXAMPLES)(lab.run)
app.command("explain", epilog=explain.EXAMPLES)(explain.run)
app.command("catalog", epilog=catalog.EXAMPLES)(catalog.run)
app.add_typer(apps.app, name="app")
app.add_typer(predict.app, name="predict")
app.add_typer(profile.app, name="profile")
app.add_typer(workload.app, name="workload")
app.add_typer(theory.app, name="theory")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"lengthwise {version('lengthwise')}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Plan, simulate and schedule LLM inference by output length."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns its exit code."""
    _forgive_narrow_encodings()
    gc.set_threshold(100_000)  # imports make many objects and no garbage: a tenth of a warm start
    try:
        app(args=argv, prog_name="lengthwise")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except InputError as error:
        return _input_error(error)
    except PermissionError as error:
        return _not_permitted(error)
    except Exception:  # noqa: BLE001 - the last line of defence
        return _our_bug()
    return 0


def _forgive_narrow_encodings() -> None:
    """Where the output cannot hold a character (a pipe in cp1252), a question mark will do."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _input_error(error: InputError) -> int:
    typer.echo(f"error: {error}", err=True)
    for note in getattr(error, "__notes__", []):
        typer.echo(f"  ({note})", err=True)
    return 2


def _not_permitted(error: PermissionError) -> int:
    """Whether a file is there at all may be for others to know, anywhere on its way."""
    if error.filename is None:
        return _our_bug()
    typer.echo(
        f"error: {os.fspath(error.filename)} must be open to this user; it is not ({error.strerror}). Change its "
        "rights or those of the folders above it, or name another place",
        err=True,
    )
    return 2


def _our_bug() -> int:
    traceback.print_exc()
    typer.echo("\nThis is a bug of lengthwise, not of your input: please report the lines above.", err=True)
    return 1
