"""The program: its commands, and how it ends.

Exit codes: 0 done, 1 our bug (of compare: an error above its bound), 2 an input that cannot be used, 130 interrupted.
"""

from __future__ import annotations

import gc
import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lengthwise.schema.errors import InputError

EXAMPLES = """\b
Example:
  lengthwise simulate examples/chat-70b.toml --seeds 5 --report report.html
"""


COMMANDS = {
    "simulate": "Simulate a scenario: latency, goodput and cost of a deployment.",
    "capacity": "Find the request rate that a deployment sustains under SLOs.",
    "search": "Find the cheapest deployment that meets the SLOs.",
    "explain": "Show what a step costs, what fits in memory and what a scenario resolves to.",
    "schedule": "Find the best schedule under a latency bound (RRA, WAA).",
    "schedule run": "Serve requests on real engines under a planned schedule.",
    "schedule watch": "Detect when output lengths drift and how the schedule must change.",
    "lab": "Compare scheduling policies and length predictors on the same requests.",
    "theory": "Evaluate closed forms: batching by bins, queues with known lengths.",
    "predict": "Train, evaluate and apply predictors of output length.",
    "serve": "Run a gateway that schedules live requests by predicted output length.",
    "app": "Plan and run applications of several models over many rows.",
    "bench": "Load a running server and record its latencies.",
    "calibrate": "Fit the cost model to a measured run.",
    "compare": "Compare a simulated run with a measured one.",
    "profile": "Measure, import, show and compare operator times.",
    "workload": "Summarize traces and presets.",
    "catalog": "List models, GPUs, nodes, policies and presets.",
}
_MODULES = {"app": "apps"}


class _LazyCommands(dict[str, Any]):
    """Commands by name; a command's module is imported at first use, so that `--help` and typos stay fast."""

    def __missing__(self, name: str) -> Any:
        module = import_module(f"lengthwise.cli.{_MODULES.get(name, name.replace(' ', '_'))}")
        if (group := getattr(module, "app", None)) is None:
            group = typer.Typer(rich_markup_mode=None)
            group.command(name, epilog=module.EXAMPLES)(module.run)
        group._add_completion = False  # noqa: SLF001 - completion belongs to the program alone
        self[name] = command = typer.main.get_command(group)
        command.name = name
        return command

    def get(self, name: str, default: Any = None) -> Any:
        """Return a command, or the default for an unknown name."""
        return self[name] if name in COMMANDS else default

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def keys(self) -> Any:
        """Return the names, without importing a command."""
        return COMMANDS.keys()


class _Commands(TyperGroup):
    """A group of lazy commands. A name may have two words; a file that is called run is `schedule ./run`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help page."""
        del ctx
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the complete summary of each command."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command and its remaining arguments."""
        both = " ".join(args[:2])
        return super().resolve_command(ctx, [both, *args[2:]] if both in COMMANDS else args)


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit it
)


def _version(desired: bool) -> None:
    if desired:
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
