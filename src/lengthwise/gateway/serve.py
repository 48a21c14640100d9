"""Runs a gateway until it is told to end, and lets it read its configuration again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from lengthwise.gateway._extra import require_extra
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.running import Gateway
from lengthwise.schema.errors import LengthwiseError

__all__ = ["Gateway", "serve"]

_log = logging.getLogger("lengthwise.gateway")


def serve(
    config: GatewayConfig,
    *,
    ready: Callable[[int, int | None], None] | None = None,
    reload: Callable[[], GatewayConfig] | None = None,
    started: Callable[[Gateway], Awaitable[None]] | None = None,
) -> None:
    """Runs a gateway until it is told to end.

    SIGTERM or SIGINT: /ready says no, who comes is sent away with 503, who is in may finish within
    ``care.drain_s``; a second one ends it at once. SIGHUP: ``reload`` reads the configuration again; what it
    cannot read, or what cannot change, is logged, and all stays as it was.

    Args:
        config: What it is told.
        ready: Called with both ports once it listens.
        reload: Reads the configuration again; raises a LengthwiseError where it is bad.
        started: Awaited with the gateway once it listens, while it serves.

    Raises:
        InputError: A port cannot be had, or the configuration does not hold together.
        MissingExtraError: The extra ``gateway`` is not installed.
    """
    require_extra()
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_until_told(config, ready, reload, started))


async def _until_told(
    config: GatewayConfig,
    ready: Callable[[int, int | None], None] | None,
    reload: Callable[[], GatewayConfig] | None,
    started: Callable[[Gateway], Awaitable[None]] | None,
) -> None:
    first, second = asyncio.Event(), asyncio.Event()
    reloads: set[asyncio.Future[None]] = set()
    async with Gateway(config) as gateway:
        with _signals(first, second, lambda: reloads.add(asyncio.ensure_future(_reloaded(gateway, reload)))):
            if ready is not None:
                ready(gateway.port, gateway.admin_port)
            if started is not None:
                await started(gateway)
            await first.wait()
            _log.info("ending: %d requests may finish within %g s", gateway.hub.held, config.care.drain_s)
            await _first_of(gateway.drain(), second.wait())
        await asyncio.gather(*reloads)


@contextlib.contextmanager
def _signals(first: asyncio.Event, second: asyncio.Event, again: Callable[[], None]) -> Any:
    loop = asyncio.get_running_loop()

    def told() -> None:
        (second if first.is_set() else first).set()

    handlers = {signal.SIGTERM: told, signal.SIGINT: told}
    if hasattr(signal, "SIGHUP"):
        handlers[signal.SIGHUP] = again
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


async def _reloaded(gateway: Gateway, reload: Callable[[], GatewayConfig] | None) -> None:
    if reload is None:
        _log.warning("there is no file to read again")
        return
    try:
        await gateway.configure(reload())
    except LengthwiseError as error:
        _log.error("the configuration stays as it was: %s", error)
    else:
        _log.info("the configuration was read again")


async def _first_of(*works: Any) -> None:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
