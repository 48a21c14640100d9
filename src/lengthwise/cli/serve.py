"""``lengthwise serve``: the gateway."""

from __future__ import annotations

import asyncio
import hashlib
import json as texts
import logging
import math
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lengthwise.cli import outputs
from lengthwise.cli.options import JsonFile, Quiet
from lengthwise.gateway.notices import probe_notices, engine_notices, is_local, notices
from lengthwise.gateway.protocols import monotonic
from lengthwise.schema.errors import InputError

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
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A .toml or .yaml file of a gateway.")] = None,
    *,
    engine: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="An engine, besides those of CONFIG; repeatable.")
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
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: order.max_wait_s=30; repeatable."),
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a line about every request to this file; no prompts.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Print all settings as they would hold, and end.")] = False,
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
            "--demo", help="Run two engines on this machine, FCFS against ISRTF on the same load, a minute, and end."
        ),
    ] = False,
    engine_python: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON", help="With --demo: interpreter with vLLM for CPUs; emulated: none; else looked for."
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least weight of what is logged.")] = LogLevel.INFO,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines, and nothing else is printed.")] = False,
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
    refuse_others(context)
    if hash_key:
        print_digest()
        return
    if engine_python is not None and not demo:
        raise typer.BadParameter("goes with --demo", param_hint="--engine-python")
    if demo:
        show(engine_python, port, admin_port)
        return
    if json is not None and report is None:
        raise typer.BadParameter("goes with --report", param_hint="--json")
    from lengthwise import config as config_module

    given = given_settings(mode, host, port, admin_port, journal)
    overrides = [*(f"{setting}={value}" for (_, setting), value in given.items()), *(set_ or ())]
    if report is not None:
        look_back(report, config, overrides, json, quiet=quiet)
        return
    settings = config_module.load_gateway(
        config, overrides, engine or (), {setting: option for option, setting in given}
    )
    if check:
        show_settings(settings)
        return
    from lengthwise.cli import log
    from lengthwise.gateway.serve import serve

    with log.logging_to_stderr(log_level.value, as_json=log_json, requests=log_requests):
        again = None if config is None else config_module.gateway_reader(config, overrides, engine or ())
        serve(settings.config, started=greeter(quiet=quiet, as_log=log_json), reload=again)


if TYPE_CHECKING:
    from lengthwise.config import GatewaySettings
    from lengthwise.gateway.config import GatewayConfig
    from lengthwise.gateway.fleet import Worker
    from lengthwise.gateway.serve import Gateway

_log = logging.getLogger("lengthwise.gateway")


def given_settings(
    mode: str | None, host: str | None, port: int | None, admin_port: str | None, journal: Path | None
) -> dict[tuple[str, str], str]:
    """The value of each (option, setting) that was given."""
    told = {
        ("--mode", "order.mode"): mode,
        ("--host", "listen.host"): host and texts.dumps(host),
        ("--port", "listen.port"): None if port is None else str(port),
        ("--admin-port", "listen.admin_port"): admin_port,
        ("--journal", "listen.journal"): None if journal is None else texts.dumps(str(journal.absolute())),
    }
    return {names: value for names, value in told.items() if value is not None}


def show_settings(settings: GatewaySettings) -> None:
    """Prints a file that says the same, and what to mind."""
    typer.echo(f"# {settings.source}, with all defaults\n{settings.toml}", nl=False)
    minded = notices(settings.config)
    if settings.config.order.mode == "engine-priority":  # what comes of it depends on the engines alone
        minded += asyncio.run(probe_notices(settings.config))
    for text in minded:
        typer.echo(f"warning: {text}", err=True)


def look_back(journal: Path, config: Path | None, overrides: list[str], json: Path | None, *, quiet: bool) -> None:
    """Prints what length-aware order would have gained on a journal's traffic."""
    from lengthwise import config as config_module
    from lengthwise.gateway import observe
    from lengthwise.schema.files import write_whole

    outputs.require_answers(json, None, [journal])
    anybody = ["http://localhost"] if config is None else []
    nothing_written = [*overrides, "listen.journal=null"]
    found = observe.report(journal, config_module.load_gateway(config, nothing_written, anybody).config.order)
    if not quiet and json != outputs.STDOUT:
        typer.echo(observe.text_report(found))
    if json is not None:
        text = texts.dumps(observe.as_json(found), indent=2) + "\n"
        written = outputs.write_answers(json, None, lambda path: write_whole(path, text.encode()), lambda _: None)
        if not quiet:
            outputs.tell(written)


def greeter(*, quiet: bool, as_log: bool) -> Callable[[Gateway], Awaitable[None]]:
    """What tells of a gateway that has started: to standard output, or as log records."""

    async def greet(gateway: Gateway) -> None:
        workers = gateway.fleet.workers()
        minded = notices(gateway.config) + await engine_notices(workers, gateway.config.order.mode)
        if as_log:
            _log.info("started", extra=metadata(gateway, workers))
        elif not quiet:
            typer.echo("\n".join(_page(gateway, workers)))
        for text in minded:
            _log.warning(text)

    return greet


def metadata(gateway: Gateway, workers: Iterable[Worker]) -> dict[str, Any]:
    """A start in fields."""
    order = gateway.config.order
    return {
        "port": gateway.port,
        "admin_port": gateway.admin_port,
        "mode": order.mode,
        "predictor": gateway.config.prediction.predictor,
        "engines": {worker.name: worker.kind for worker in workers},
    }


def _page(gateway: Gateway, workers: Iterable[Worker]) -> list[str]:
    config = gateway.config
    base = _address(config, config.listen.host, gateway.port)
    lines = [f"lengthwise serve: {_order(config)}", ""]
    lines.append(f"clients  {base}/v1  ({_owner(config)})")
    if gateway.admin_port is not None:
        admin = f"http://{_named(config.listen.admin_host)}:{gateway.admin_port}"
        lines.append(f"admin    {admin}/  metrics at {admin}/metrics")
    now_s = monotonic()
    lines += ["", *(_engine(worker, now_s) for worker in workers)]
    if not workers:
        lines.append(f"engines  none yet; requests wait {config.admission.no_engine_s:g} s for one")
    return [*lines, "", *_try(config, base, gateway.fleet.models()), ""]


def _order(config: GatewayConfig) -> str:
    order, told = config.order, f"mode {config.order.mode}"
    if order.mode == "observe":
        told += " (requests go straight on; nothing is ordered)"
    if order.rank is not None:
        told += f", rank {order.rank}"
    bound = f"first in line after {order.max_wait_s:g} s"
    longest = "no bound on waiting" if math.isinf(order.max_wait_s) else bound
    return f"{told}, predictor {config.prediction.predictor}, {longest}"


def _owner(config: GatewayConfig) -> str:
    count = len(config.keys)
    return f"{count} key{'s' if count > 1 else ''}" if count else "no key needed"


def _engine(worker: Worker, now_s: float) -> str:
    models = ", ".join(worker.capabilities.models) or "no model known"
    trouble = worker.unavailable_reason(now_s)
    return f"engine   {worker.name}  {worker.kind or 'unknown'}  {models}  {trouble or 'up'}"


def _try(config: GatewayConfig, base: str, models: Iterable[str]) -> list[str]:
    model = next(iter(models), "MODEL")
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    key = "-H 'Authorization: Bearer YOUR_KEY' " if config.keys else ""
    quoted = texts.dumps(body).replace("'", "'\\''")
    return ["try it", f"  curl {base}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{quoted}'"]


def _address(config: GatewayConfig, host: str, port: int) -> str:
    return f"{'https' if config.listen.tls else 'http'}://{_named(host)}:{port}"


def _named(host: str) -> str:
    """An address that a client on this machine can use."""
    if not is_local(host) and host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return "localhost"
    return f"[{host}]" if ":" in host else host


_TAKES: dict[str, tuple[str, ...]] = {
    "hash_key": (),
    "demo": ("engine_python", "port", "admin_port"),
    "report": ("config", "set_", "json", "quiet"),
}


def refuse_others(context: typer.Context) -> None:
    """Refuses what was given beside one of these and would be ignored there."""
    called = {one.name: _called(one.opts) for one in context.command.params if one.name}
    given = [name for name in called if _is_given(context, name)]
    for alone, takes in _TAKES.items():
        if alone not in given:
            continue
        others = [name for name in given if name != alone and name not in takes]
        if others:
            only = f"only {', '.join(called[name] for name in takes)}" if takes else "nothing else"
            raise typer.BadParameter(
                f"does not go with {called[alone]}, which takes {only}", param_hint=called[others[0]]
            )


def _called(options: Sequence[str]) -> str:
    """As people call it: by its long form; an argument in capitals."""
    longest = max(options, key=len)
    return longest if longest.startswith("-") else longest.upper()


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def show(engine_python: str | None, port: int | None, admin_port: str | None) -> None:
    """Runs the demo."""
    admin = "8001" if admin_port is None else admin_port
    if not admin.isdigit() or int(admin) > 65535:
        raise typer.BadParameter(
            "the demo shows its admin pages: give a port, 0 for a free one", param_hint="--admin-port"
        )
    from lengthwise.gateway import demo

    demo.run(engine_python, port=8000 if port is None else port, admin_port=int(admin))


def print_digest() -> None:
    """Prints the SHA-256 of the key on standard input; on a terminal it is asked for and not shown."""
    if sys.stdin.isatty():
        key = str(typer.prompt("Key", hide_input=True, err=True))
    else:
        key = sys.stdin.readline()
        if sys.stdin.readline():
            raise InputError("--hash-key takes one key on one line; more lines came")
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable():
        raise InputError(
            "a key must be one line of printable ASCII, as a header can carry it: printf %s KEY | lengthwise "
            "serve --hash-key"
        )
    typer.echo(hashlib.sha256(key.encode()).hexdigest())
