"""The program: its commands and its exit codes.

Exit codes: 0 success, 1 internal error or failed check or task, 2 unusable input, 3 lost server, 130 interrupted.
"""

from __future__ import annotations

import gc
import io
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from lengthwise.schema.errors import InputError

COMMANDS = {
    "simulate": "Simulate a scenario: latency, goodput and cost of a deployment.",
    "ui": "Open a planner in the browser: every move of a slider simulates the deployment again.",
    "capacity": "Find the request rate that a deployment sustains within limits.",
    "search": "Find the deployment with the most requests per dollar within limits.",
    "speculation": "Show whether speculative decoding helps at your load.",
    "kv": "Show the hit rate of a prefix cache by size, and whether memory pays.",
    "explain": "Show what a step costs, what fits in memory and what a scenario resolves to.",
    "schedule": "Find the best schedule under a latency bound (RRA, WAA).",
    "schedule run": "Serve requests on real engines under a planned schedule.",
    "schedule watch": "Detect when output lengths drift and how the schedule must change.",
    "lab": "Compare scheduling policies and length predictors on the same requests.",
    "theory": "Evaluate closed forms: batching by bins, queues with known lengths.",
    "theory multibin": "Show throughput, latency and boundaries by number of bins (Multi-Bin Batching).",
    "theory queue": "Show what known or predicted lengths are worth at a load (M/G/1: FCFS, SJF, SRPT).",
    "predict": "Train, evaluate and apply predictors of output length.",
    "predict train": "Train a predictor, evaluate it on held-out prompts, and write it to a file.",
    "predict eval": "Evaluate a predictor on samples that it has not seen, overall and file by file.",
    "predict collect": "Collect a running server's answers to prompts as training data.",
    "predict show": "Show a predictor and its training data, or its prediction for a prompt.",
    "predict serve": "Serve predicted lengths over HTTP to another router, and the hints that routers read.",
    "serve": "Run a gateway that schedules live requests by predicted output length.",
    "app": "Plan and run applications of several models over many rows.",
    "app plan": "Plan an application on a cluster: stages, makespan with its interval, idle GPUs.",
    "app profile": "Measure an application on this machine: switching times, output lengths, costs.",
    "app run": "Run an application on engines by its plan; every answer is recorded once.",
    "app status": "Show the progress of a run: tasks by state and by model, and how to resume it.",
    "app cancel": "Stop a run; what is recorded stays, and app run --resume continues it.",
    "bench": "Load a running server and record its latencies.",
    "calibrate": "Fit the cost model to a measured run.",
    "compare": "Compare a simulated run with a measured one.",
    "profile": "Measure, import, show and compare operator times.",
    "profile run": "Measure a model's operators on this machine with torch, and write a profile.",
    "profile import": "Import measurements of other projects into a profile.",
    "profile import vidur": "Import a model's mlp.csv, attention.csv and the device's network from Vidur's profiles.",
    "profile import llmservingsim": "Import the profile of a model on a device from LLMServingSim's profiles.",
    "profile import aiconfigurator": "Import the kernels of a system and an engine from AIConfigurator's tables.",
    "profile show": "Show a profile's operators: sizes, times, noise, share of the roofline, gaps.",
    "profile fit": "Fit cost tables to a profile: errors on held-out points by estimator, operator and region.",
    "profile check": "Compare a new profile with an old one and name the operators that changed.",
    "workload": "Summarize traces, scenarios and presets.",
    "workload show": "Show counts, rates, sessions and a sketch of the lengths of a trace, a scenario or a preset.",
    "catalog": "List models, GPUs, nodes, policies and presets.",
    "examples": "List the examples, or copy them into a folder.",
    "doctor": "Check this installation: versions, compiled code, optional parts, engines, GPUs.",
    "mcp": "Serve simulate, capacity, search, explain, compare, plan and catalog as tools for agents (MCP).",
}
"""Summary of each command and group, in the order of the help page."""

GROUPS = {
    "": ("lengthwise simulate examples/chat-70b.toml --seeds 5 --report report.html",),
    "theory": (
        "lengthwise theory multibin --batch 8 --bins 1,2,4,8,16,32 --uniform 1 20 --target 0.95",
        "lengthwise theory queue --lengths chat-1m --slots 8 --load 0.5..0.95 --error 0.5",
    ),
    "predict": (
        "lengthwise predict train log.jsonl --out mine.lwp",
        'lengthwise predict show default --prompt "Write an essay about rivers."',
    ),
    "app": (
        "lengthwise app plan examples/apps/ensemble.toml --node 8xA100-80GB@pairs --report plan.html",
        "lengthwise app profile examples/apps/ensemble.toml --out profile",
        "lengthwise app run examples/apps/ensemble.toml --out run --profile profile",
        "lengthwise app status run",
    ),
    "profile": (
        "lengthwise profile import aiconfigurator systems/data --system h200_sxm --out p.parquet",
        "lengthwise profile show p.parquet --report p.html",
        "lengthwise profile check new.parquet old.parquet",
    ),
    "profile import": ("lengthwise profile import aiconfigurator systems/data --system h200_sxm --out p.parquet",),
    "workload": (
        "lengthwise workload show chat-1m",
        "lengthwise workload show trace.csv --format azure",
        "lengthwise workload show examples/multi-turn.toml",
    ),
}
"""Examples of the program and of its groups. Other names in COMMANDS are commands."""

_FUNCTIONS = {
    "workload show": "workload:run",
    "theory multibin": "theory:multibin",
    "theory queue": "theory:queue",
    "predict train": "predict:train",
    "predict eval": "predict:evaluate",
    "predict collect": "predict:collect",
    "predict show": "predict:show",
    "predict serve": "predict:serve",
    "app status": "app_status:status",
    "app cancel": "app_status:cancel",
    "profile import vidur": "profile_import:vidur",
    "profile import llmservingsim": "profile_import:llmservingsim",
    "profile import aiconfigurator": "profile_import:aiconfigurator",
}
"""Module and function of the commands that share a module. Any other command is ``run`` in a module of its own."""


class CommandGroup(TyperGroup):
    """A group that imports its commands at first use, so that ``--help`` and mistyped names are fast."""

    def __init__(self, *, name: str | None = None, **settings: Any) -> None:
        super().__init__(name=name or "", **settings)
        self.summaries = {
            command.removeprefix(f"{name} "): summary
            for command, summary in COMMANDS.items()
            if max((group for group in GROUPS if command.startswith(f"{group} ")), key=len, default="") == (name or "")
        }
        self.commands: Any = dict.fromkeys(self.summaries)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help page."""
        del ctx
        return list(self.summaries)

    def invoke(self, ctx: Any) -> Any:
        """Run a command. An error of an option's type or range also states the value (Typer 0.29 leaves it out)."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if details := getattr(error.__cause__, "errors", None):
                error.message += f"; it is {details()[0]['input']!r}"
                error.__cause__ = None  # outer groups add nothing
            raise

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return a command, or return None for an unknown name."""
        del ctx
        if cmd_name in self.summaries and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _load(f"{self.name} {cmd_name}".strip(), cmd_name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the complete summaries. Typer would import every command and shorten the summaries."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(self.summaries.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return (name, command, arguments). The name may have two words."""
        two_words = " ".join(args[:2])  # a scenario file named run is still reached as `schedule ./run`
        return super().resolve_command(ctx, [two_words, *args[2:]] if two_words in self.summaries else args)


def _examples(group: str) -> str:
    lines = "".join(f"  {line}\n" for line in GROUPS[group])
    return f"\b\nExample{'s' if len(GROUPS[group]) > 1 else ''}:\n{lines}"


def _load(name: str, last_word: str) -> Any:
    if name in GROUPS:
        return CommandGroup(
            name=name, help=COMMANDS[name], epilog=_examples(name), no_args_is_help=True, rich_markup_mode=None
        )
    module_name, _, function = _FUNCTIONS.get(name, f"{name.replace(' ', '_')}:run").partition(":")
    module = import_module(f"lengthwise.cli.{module_name}")
    single = typer.Typer(rich_markup_mode=None, add_completion=False)  # completion belongs to the program alone
    single.command(last_word, epilog=module.EXAMPLES)(getattr(module, function))
    return typer.main.get_command(single)


app = typer.Typer(
    cls=CommandGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=_examples(""),
    context_settings={"help_option_names": ["-h", "--help"]},  # commands inherit it
)


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        typer.echo(f"lengthwise {version('lengthwise')}")
        raise typer.Exit


START = """lengthwise plans, simulates and schedules LLM inference by output length. Six tasks to start with:

What latency, throughput and cost does a deployment have at this load?
  lengthwise simulate --model llama-3.1-8b --gpu H100 --rate 20

Which GPUs serve this load at the lowest price within limits?
  lengthwise search --model llama-3.1-70b --gpu H100,H200,L40S --rate 5

Which schedule serves the most requests under a latency bound?
  lengthwise schedule examples/schedule-70b-5s.toml

How do several models finish many rows soonest on these GPUs?
  lengthwise app plan examples/apps/ensemble.toml --node 8xA100-80GB@pairs

Is it worth it to start short requests first, and which predictor does that need?
  lengthwise lab --model qwen2.5-32b --gpu H100

What does an order by predicted length gain, in front of running engines?
  lengthwise serve --demo

All commands: lengthwise --help. Options of one: lengthwise simulate --help.
"""


@app.callback(invoke_without_command=True)
def _program(
    ctx: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Plan, simulate and schedule LLM inference by output length."""
    del version  # printed by its callback
    if ctx.invoked_subcommand is None:
        typer.echo(START, nl=False)
        if not Path("examples").is_dir():
            typer.echo("The folder examples: lengthwise examples --copy examples.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's arguments, and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a pipe in cp1252 gets question marks, not a traceback
    gc.set_threshold(100_000)  # imports make many objects and no garbage; collecting took a tenth of a warm start
    try:
        app(args=argv, prog_name="lengthwise")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except InputError as error:
        typer.echo(f"error: {error}", err=True)
        for note in getattr(error, "__notes__", []):
            if note := note.removeprefix("in the options").removeprefix(", "):
                typer.echo(f"  ({note})", err=True)
        return 2
    except Exception as error:  # noqa: BLE001 - the last line of defence
        if isinstance(error, PermissionError) and error.filename is not None:
            typer.echo(
                f"error: this user has no access to {os.fspath(error.filename)} ({error.strerror}). Change its "
                "permissions or those of its parent folders, or choose another path",
                err=True,
            )
            return 2
        traceback.print_exc()
        typer.echo("\nThis is a bug in lengthwise, not in your input: please report the traceback above.", err=True)
        return 1
    return 0
