"""``lengthwise serve``: the gateway."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli._options import JsonFile, Quiet

EXAMPLES = """\b
Examples:
  lengthwise serve --engine http://localhost:8000 --engine http://gpu-2:8000 --port 8080
  lengthwise serve --engine http://localhost:8000 --port 8080 --mode observe --journal day.jsonl
  lengthwise serve --report day.jsonl
  lengthwise serve examples/gateway.toml --set order.max_wait_s=30 --check
  lengthwise serve --demo
"""


class LogLevel(StrEnum):
    """What is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def run(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A .toml or .yaml file of a gateway.")
    ] = None,
    *,
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="An engine, besides those of CONFIG; repeatable."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            help="observe, fcfs, srtf, isrtf (default), windowed, bins, rra, engine-priority, engine-plugin.",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Listen there: 127.0.0.1; 0.0.0.0 is the world.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="For clients: 8000.")] = None,
    admin_port: Annotated[
        str | None, typer.Option(metavar="PORT", help="Metrics and admin page: 8001; none: no such port.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Change a setting: order.max_wait_s=30; repeatable."
        ),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a line about every request to this file; no prompts."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Print all settings as they would hold, and end.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="JOURNAL", help="Print what length-aware order would have gained on its traffic, and end."
        ),
    ] = None,
    json: JsonFile = None,
    hash_key: Annotated[
        bool, typer.Option("--hash-key", help="Print the SHA-256 of a key read from standard input, and end.")
    ] = False,
    demo: Annotated[
        bool,
        typer.Option(
            "--demo",
            help="Run two engines on this machine, FCFS against ISRTF on the same load, a minute, and end.",
        ),
    ] = False,
    engine_python: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON",
            help="With --demo: interpreter with vLLM for CPUs; emulated: none; else looked for.",
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least weight of what is logged.")] = LogLevel.INFO,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Log JSON lines, and nothing else is printed.")
    ] = False,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Log every request; no prompts, no keys.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Serve live requests in front of engines, shortest predicted first.

    An OpenAI-compatible endpoint before one or more engines (vLLM, SGLang, llama.cpp, ...). SIGTERM or Ctrl-C lets
    requests finish first. SIGHUP reads CONFIG and the gateway's own certificate again; ports, predictor, mode and rank
    need a new start; a file that cannot be used changes nothing. Keys of engines and clients are named in CONFIG by
    variable, file or digest, never written there.
    """
    from lengthwise.cli import _serve_alone, _serve_demo, _serve_keys, _serve_page

    _serve_alone.refuse_others(context)
    if hash_key:
        _serve_keys.print_digest()
        return
    if engine_python is not None and not demo:
        raise typer.BadParameter("goes with --demo", param_hint="--engine-python")
    if demo:
        _serve_demo.show(engine_python, port, admin_port)
        return
    if json is not None and report is None:
        raise typer.BadParameter("goes with --report", param_hint="--json")
    from lengthwise import scenario as scenarios

    given = _serve_page.given(mode, host, port, admin_port, journal)
    overrides = [*(f"{setting}={value}" for (_, setting), value in given.items()), *(set_ or ())]
    if report is not None:
        _serve_page.look_back(report, config, overrides, json, quiet=quiet)
        return
    settings = scenarios.load_gateway(
        config, overrides, engine or (), {setting: option for option, setting in given}
    )
    if check:
        _serve_page.show_settings(settings)
        return
    from lengthwise.cli import _serve_log
    from lengthwise.gateway.serve import serve

    with _serve_log.logging_to_stderr(log_level.value, as_json=log_json, requests=log_requests):
        again = None if config is None else scenarios.gateway_reader(config, overrides, engine or ())
        serve(settings.config, started=_serve_page.greeter(quiet=quiet, as_log=log_json), reload=again)
