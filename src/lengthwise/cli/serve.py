"""``lengthwise serve``."""

from __future__ import annotations

import json as json_module
import math
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from lengthwise.cli import options, outputs
from lengthwise.cli.options import JsonFile, Quiet
from lengthwise.schema.errors import InputError

if TYPE_CHECKING:
    from lengthwise.config import GatewaySettings
    from lengthwise.gateway.serve import Gateway

EXAMPLES = """\b
Examples:
  lengthwise serve --engine http://localhost:8000 --engine http://gpu-2:8000 --port 8080
  lengthwise serve --engine http://localhost:8000 --port 8080 --mode observe --journal day.jsonl
  lengthwise serve --report day.jsonl
  lengthwise serve --report day.jsonl --router all
  lengthwise serve --engine http://localhost:8000 --ext-proc-port 9002 --envoy-config envoy.yaml
  lengthwise serve examples/gateway.toml --set order.max_wait_s=30 --check
  lengthwise serve --demo
"""


class LogLevel(StrEnum):
    """The lowest level of messages that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def run(
    context: typer.Context,
    config_file: Annotated[Path | None, Argument(metavar="CONFIG", help="A .toml or .yaml file of a gateway.")] = None,
    *,
    engine: Annotated[
        list[str] | None, Option(metavar="URL", help="An engine, in addition to those of CONFIG; repeatable.")
    ] = None,
    mode: Annotated[
        str | None,
        Option(metavar="MODE", help="observe, fcfs, srtf, isrtf, windowed, bins, rra, engine-priority, engine-plugin."),
    ] = None,
    host: Annotated[
        str | None, Option(metavar="ADDRESS", help="Address, default 127.0.0.1; 0.0.0.0: all networks.")
    ] = None,
    port: Annotated[int | None, Option(min=0, max=65535, help="Port of clients; default: 8000.")] = None,
    admin_port: Annotated[
        str | None, Option(metavar="PORT", help="Port of metrics and admin page, default 8001; none: no such port.")
    ] = None,
    ext_proc_port: Annotated[
        int | None,
        Option(min=0, max=65535, help="Port of the endpoint picker for Envoy (gRPC, ext_proc); default: no picker."),
    ] = None,
    envoy_config: Annotated[
        Path | None, Option(metavar="FILE", help="Write Envoy's configuration for picker and engines, and exit.")
    ] = None,
    set_: Annotated[list[str] | None, options.setting("order.max_wait_s=30")] = None,
    journal: Annotated[Path | None, Option(metavar="FILE", help="Write a line per request; no prompts.")] = None,
    check: Annotated[bool, Option("--check", help="Print all settings in effect.")] = False,
    report: Annotated[
        Path | None,
        Option(
            metavar="JOURNAL", help="Print what length-aware scheduling would have gained on its traffic, and exit."
        ),
    ] = None,
    router: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="With --report: print what this router would have gained; all: the common ones; repeatable.",
        ),
    ] = None,
    json: JsonFile = None,
    hash_key: Annotated[bool, Option("--hash-key", help="Print the SHA-256 of a key on standard input.")] = False,
    demo: Annotated[
        bool, Option("--demo", help="Compare FCFS and ISRTF on two engines of this machine for a minute, and exit.")
    ] = False,
    engine_python: Annotated[
        str | None, Option(metavar="PYTHON", help="With --demo: a Python that has vLLM for CPUs; emulated: no vLLM.")
    ] = None,
    log_level: Annotated[LogLevel, Option(help="Lowest level that is logged.")] = LogLevel.INFO,
    log_json: Annotated[bool, Option("--log-json", help="Log JSON lines, and print nothing else.")] = False,
    log_requests: Annotated[bool, Option("--log-requests", help="Log every request; no prompts, no keys.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run a gateway that schedules live requests by predicted output length.

    It is an OpenAI-compatible endpoint in front of one or more engines (vLLM, SGLang, llama.cpp, ...). SIGTERM or
    Ctrl-C lets running requests finish. SIGHUP reloads CONFIG and all certificates; an invalid file changes nothing.
    Mode, rank, ports, predictor and stores need a restart. CONFIG refers to the keys of engines and clients by
    variable, file or digest, and never contains a key.
    """
    _refuse_ignored_options(context)
    if hash_key:
        _print_digest()
        return
    if engine_python is not None and not demo:
        raise typer.BadParameter("goes with --demo", param_hint="--engine-python")
    if demo:
        _run_demo(engine_python, port, admin_port)
        return
    if json is not None and report is None:
        raise typer.BadParameter("goes with --report", param_hint="--json")
    if router and report is None:
        text = "goes with --report; the router of a gateway is dispatch.router: --set dispatch.router=NAME"
        raise typer.BadParameter(text, param_hint="--router")
    if report is None and not check and envoy_config is None:
        _defer_signals(context)
    from lengthwise import config

    settings = {
        "order.mode": ("--mode", mode),
        "listen.host": ("--host", None if host is None else json_module.dumps(host)),
        "listen.port": ("--port", port),
        "listen.admin_port": ("--admin-port", admin_port),
        "envoy.ext_proc_port": ("--ext-proc-port", ext_proc_port),
        "listen.journal": ("--journal", None if journal is None else json_module.dumps(str(journal.absolute()))),
    }
    given = {setting: (option, value) for setting, (option, value) in settings.items() if value is not None}
    overrides = [*(f"{setting}={value}" for setting, (_, value) in given.items()), *(set_ or ())]
    if report is not None:
        _report(report, config_file, overrides, router or [], json, quiet=quiet)
        return
    gateway = config.load_gateway(
        config_file, overrides, engine or (), {setting: option for setting, (option, _) in given.items()}
    )
    if check:
        _check(gateway)
        return
    if envoy_config is not None:
        _write_envoy_config(gateway, envoy_config, quiet=quiet)
        return
    from lengthwise.cli.log import logging_to_stderr
    from lengthwise.gateway.serve import serve

    with logging_to_stderr(log_level.value, as_json=log_json, requests=log_requests):
        reload = None if config_file is None else config.gateway_reader(config_file, overrides, engine or ())
        serve(gateway.config, started=_announcer(quiet=quiet, as_log=log_json), reload=reload)


_COMPATIBLE: dict[str, tuple[str, ...]] = {  # options that each of these options accepts beside itself
    "hash_key": (),
    "demo": ("engine_python", "port", "admin_port"),
    "report": ("config_file", "set_", "router", "json", "quiet"),
    "envoy_config": ("config_file", "engine", "set_", "ext_proc_port", "host", "quiet"),
}


def _refuse_ignored_options(context: typer.Context) -> None:
    labels = {}
    for parameter in context.command.params:
        longest = max(parameter.opts, key=len)
        labels[parameter.name or ""] = longest if longest.startswith("-") else str(parameter.metavar)
    sources = {name: context.get_parameter_source(name) for name in labels}
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    for action, compatible in _COMPATIBLE.items():
        ignored = [name for name in given if name != action and name not in compatible]
        if action in given and ignored:
            only = f"only {', '.join(labels[name] for name in compatible)}" if compatible else "nothing else"
            raise typer.BadParameter(
                f"does not go with {labels[action]}, which takes {only}", param_hint=labels[ignored[0]]
            )


def _defer_signals(context: typer.Context) -> None:
    """Block signals that would kill the process during its imports. The gateway unblocks them when it handles them."""
    if hasattr(signal, "pthread_sigmask"):
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM})
        context.call_on_close(lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask))


def _print_digest() -> None:
    import hashlib

    if sys.stdin.isatty():
        key = str(typer.prompt("Key", hide_input=True, err=True))
    else:
        key = sys.stdin.readline()
        if sys.stdin.readline():
            raise InputError("--hash-key takes one key on one line; more lines came")
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable():
        raise InputError(
            "a key must be one line of printable ASCII, which a header can carry: printf %s KEY | lengthwise serve "
            "--hash-key"
        )
    typer.echo(hashlib.sha256(key.encode()).hexdigest())


def _run_demo(engine_python: str | None, port: int | None, admin_port: str | None) -> None:
    admin = "8001" if admin_port is None else admin_port
    if not admin.isdigit() or int(admin) > 65535:
        raise typer.BadParameter("the demo has admin pages: give a port, 0 for a free one", param_hint="--admin-port")
    from lengthwise.gateway import demo

    demo.run(engine_python, port=8000 if port is None else port, admin_port=int(admin))


def _report(
    journal: Path, config_file: Path | None, overrides: list[str], routers: list[str], json: Path | None, *, quiet: bool
) -> None:
    from lengthwise import config
    from lengthwise.gateway import observe
    from lengthwise.report.json_file import json_text

    outputs.require_outputs(json, None, [journal])
    engines = ["http://localhost"] if config_file is None else []  # required, and not contacted
    settings = config.load_gateway(config_file, [*overrides, "listen.journal=null"], engines)
    if routers:
        routing = observe.routing_gain(observe.of_journal(journal), routers)
        text, kind, values = observe.routing_text(routing), "routing_gain", asdict(routing)
    else:
        found = observe.report(journal, settings.config.order)
        text, kind, values = observe.text_report(found), "gain", observe.as_json(found)
        if (fair := observe.fairness(observe.of_journal(journal), settings.config.order)) is not None:
            text += "\n" + observe.fairness_text(fair)
            values["fairness"] = asdict(fair) | {"price": None if math.isnan(fair.price) else fair.price}
    if not quiet and json != outputs.STDOUT:
        typer.echo(text)
    if json is not None:
        outputs.write_text(json, json_text(kind, values), quiet=quiet)


def _write_envoy_config(settings: GatewaySettings, path: Path, *, quiet: bool) -> None:
    import yaml

    from lengthwise.gateway.envoy import bootstrap

    outputs.require_writable([path])
    text = yaml.safe_dump(bootstrap(settings.config), sort_keys=False, width=120)
    outputs.write_text(path, text, quiet=quiet)


def _check(settings: GatewaySettings) -> None:
    import asyncio

    from lengthwise.gateway.notices import notices, probe_notices

    typer.echo(f"# {settings.source}, with all defaults\n{settings.toml}", nl=False)
    warnings = notices(settings.config)
    if settings.config.order.mode == "engine-priority":  # its effect depends on the engines alone
        warnings += asyncio.run(probe_notices(settings.config))
    for text in warnings:
        typer.echo(f"warning: {text}", err=True)


def _announcer(*, quiet: bool, as_log: bool) -> Callable[[Gateway], Awaitable[None]]:
    import logging

    from lengthwise.gateway.notices import engine_notices, notices

    log = logging.getLogger("lengthwise.gateway")

    async def announce(gateway: Gateway) -> None:
        config, workers = gateway.config, gateway.fleet.workers()
        warnings = notices(config) + await engine_notices(workers, config.order.mode)
        if as_log:
            fields = {
                "port": gateway.port,
                "admin_port": gateway.admin_port,
                "ext_proc_port": None if gateway.picker is None else gateway.picker.port,
                "mode": config.order.mode,
                "predictor": config.prediction.predictor,
                "engines": {worker.name: worker.kind for worker in workers},
            }
            log.info("started", extra=fields)
        elif not quiet:
            typer.echo(_banner(gateway))
        for text in warnings:
            log.warning(text)

    return announce


def _banner(gateway: Gateway) -> str:
    from lengthwise.gateway.protocols import monotonic

    config, order, workers = gateway.config, gateway.config.order, gateway.fleet.workers()
    mode = f"mode {order.mode}" + (" (requests pass unchanged and unordered)" if order.mode == "observe" else "")
    rank = "" if order.rank is None else f", rank {order.rank}"
    bound = "no bound on waiting" if math.isinf(order.max_wait_s) else f"highest priority after {order.max_wait_s:g} s"
    count = len(gateway.app.keys.callers)
    keys = f"{count} key{'' if count == 1 else 's'}" if config.needs_key else "no key needed"
    base = f"{'https' if config.listen.tls else 'http'}://{_client_host(config.listen.host)}:{gateway.port}"
    lines = [
        f"lengthwise serve: {mode}{rank}, predictor {config.prediction.predictor}, {bound}",
        "",
        f"clients  {base}/v1  ({keys})",
    ]
    if gateway.admin_port is not None:
        scheme = "https" if config.listen.admin_tls else "http"
        admin = f"{scheme}://{_client_host(config.listen.admin_host)}:{gateway.admin_port}"
        lines.append(f"admin    {admin}/  metrics at {admin}/metrics")
    if gateway.picker is not None:
        lines.append(f"picker   {_client_host(config.listen.host)}:{gateway.picker.port}  (Envoy's ext_proc, gRPC)")
    if (shared := gateway.driver.statistics().shared_queue) is not None:
        leader = "this gateway leads" if shared.leads else f"led by {shared.leader or 'a gateway not known yet'}"
        name, count = config.shared_queue.name, shared.gateways
        lines.append(f"queue    {name}, shared by {count} gateway{'s' * (count > 1)} now, {leader}")
    lines.append("")
    for worker in workers:
        models = ", ".join(worker.capabilities.models) or "unknown model"
        state = worker.unavailable_reason(monotonic()) or "up"
        lines.append(f"engine   {worker.name}  {worker.kind or 'unknown'}  {models}  {state}")
    if not workers:
        lines.append(f"engines  none yet; requests wait {config.admission.no_engine_s:g} s for one")
    model = next(iter(gateway.fleet.models()), "MODEL")
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    header = "" if keys == "no key needed" else "-H 'Authorization: Bearer YOUR_KEY' "
    quoted = json_module.dumps(body).replace("'", "'\\''")
    request = f"curl {base}/v1/chat/completions {header}-H 'Content-Type: application/json' -d '{quoted}'"
    return "\n".join([*lines, "", "try it", f"  {request}", ""])


def _client_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return "localhost"
    return f"[{host}]" if ":" in host else host
