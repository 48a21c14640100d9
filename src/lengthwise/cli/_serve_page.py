"""What ``lengthwise serve`` prints: its settings, its start, a look back."""

from __future__ import annotations

import asyncio
import json as texts
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lengthwise.cli import _outputs
from lengthwise.gateway.clock import monotonic
from lengthwise.gateway.notices import asked_notices, engine_notices, is_local, notices

if TYPE_CHECKING:
    from lengthwise.gateway.config import GatewayConfig
    from lengthwise.gateway.fleet import Worker
    from lengthwise.gateway.serve import Gateway
    from lengthwise.scenario import GatewaySettings

_log = logging.getLogger("lengthwise.gateway")


def given(
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
        minded += asyncio.run(asked_notices(settings.config))
    for text in minded:
        typer.echo(f"warning: {text}", err=True)


def look_back(
    journal: Path, config: Path | None, overrides: list[str], json: Path | None, *, quiet: bool
) -> None:
    """Prints what length-aware order would have gained on a journal's traffic."""
    from lengthwise import scenario as scenarios
    from lengthwise.gateway import observe
    from lengthwise.schema.files import write_whole

    _outputs.require_answers(json, None, [journal])
    anybody = ["http://localhost"] if config is None else []
    nothing_written = [*overrides, "listen.journal=null"]
    found = observe.report(journal, scenarios.load_gateway(config, nothing_written, anybody).config.order)
    if not quiet and json != _outputs.STDOUT:
        typer.echo(observe.text_report(found))
    if json is not None:
        text = texts.dumps(observe.as_json(found), indent=2) + "\n"
        written = _outputs.write_answers(
            json, None, lambda path: write_whole(path, text.encode()), lambda _: None
        )
        if not quiet:
            _outputs.tell(written)


def greeter(*, quiet: bool, as_log: bool) -> Callable[[Gateway], Awaitable[None]]:
    """What tells of a gateway that has started: to standard output, or as log records."""

    async def greet(gateway: Gateway) -> None:
        workers = gateway.fleet.workers()
        minded = notices(gateway.config) + await engine_notices(workers, gateway.config.order.mode)
        if as_log:
            _log.info("started", extra=facts(gateway, workers))
        elif not quiet:
            typer.echo("\n".join(_page(gateway, workers)))
        for text in minded:
            _log.warning(text)

    return greet


def facts(gateway: Gateway, workers: Iterable[Worker]) -> dict[str, Any]:
    """A start in fields."""
    order = gateway.config.order
    return {
        "port": gateway.port,
        "admin_port": gateway.admin_port,
        "mode": order.mode,
        "predictor": gateway.config.forecasting.predictor,
        "engines": {worker.name: worker.kind for worker in workers},
    }


def _page(gateway: Gateway, workers: Iterable[Worker]) -> list[str]:
    config = gateway.config
    base = _address(config, config.listen.host, gateway.port)
    lines = [f"lengthwise serve: {_order(config)}", ""]
    lines.append(f"clients  {base}/v1  ({_who(config)})")
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
    return f"{told}, predictor {config.forecasting.predictor}, {longest}"


def _who(config: GatewayConfig) -> str:
    count = len(config.keys)
    return f"{count} key{'s' if count > 1 else ''}" if count else "no key needed"


def _engine(worker: Worker, now_s: float) -> str:
    models = ", ".join(worker.abilities.models) or "no model known"
    trouble = worker.trouble(now_s)
    return f"engine   {worker.name}  {worker.kind or 'unknown'}  {models}  {trouble or 'up'}"


def _try(config: GatewayConfig, base: str, models: Iterable[str]) -> list[str]:
    model = next(iter(models), "MODEL")
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    key = "-H 'Authorization: Bearer YOUR_KEY' " if config.keys else ""
    quoted = texts.dumps(body).replace("'", "'\\''")
    return [
        "try it",
        f"  curl {base}/v1/chat/completions {key}-H 'Content-Type: application/json' -d '{quoted}'",
    ]


def _address(config: GatewayConfig, host: str, port: int) -> str:
    return f"{'https' if config.listen.tls else 'http'}://{_named(host)}:{port}"


def _named(host: str) -> str:
    """An address that a client on this machine can use."""
    if not is_local(host) and host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return "localhost"
    return f"[{host}]" if ":" in host else host
