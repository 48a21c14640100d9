"""A gateway that runs beside other work of this process, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.follow import Make
from lengthwise.gateway.listener import Listener
from lengthwise.gateway.running import Gateway
from lengthwise.gateway.telemetry import Row
from lengthwise.schema.errors import EngineError

_STOP_S = 60.0


class Beside:
    """A gateway on another thread.

    Attributes:
        gateway: It; what is read of it is read while its thread goes on.
        rows: Requests that are over, in the order of their ends.
    """

    def __init__(self, gateway: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        self.gateway, self._loop = gateway, loop
        self.rows: list[Row] = []

    @property
    def url(self) -> str:
        """Where clients ask."""
        return f"http://127.0.0.1:{self.gateway.port}"

    def call(self, what: Coroutine[Any, Any, Any], within_s: float = _STOP_S) -> Any:
        """What a coroutine of the gateway returns, run where it lives."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(timeout=within_s)


@contextmanager
def beside(
    config: GatewayConfig,
    listeners: tuple[Listener, ...] = (),
    *,
    engines_s: float = 30.0,
    follow: Make | None = None,
) -> Iterator[Beside]:
    """A gateway that serves until the end of the block, all of its engines up.

    Args:
        config: What it is told.
        listeners: Told of every request, on its thread.
        engines_s: So long engines may take to tell what they are.
        follow: Has the schedule of mode rra follow the lengths of its own traffic; None: it stays.

    Raises:
        InputError: It cannot start.
        EngineError: An engine is not there, or cannot be used.
    """
    ready: Future[tuple[Beside, asyncio.Event]] = Future()
    thread = threading.Thread(
        target=lambda: _run(_serve(config, listeners, engines_s, follow, ready), ready),
        name="gateway",
        daemon=True,
    )
    thread.start()
    running, over = ready.result()
    try:
        yield running
    finally:
        running._loop.call_soon_threadsafe(over.set)  # noqa: SLF001 - of this file
        thread.join(timeout=_STOP_S)


def _run(work: Coroutine[Any, Any, None], ready: Future[Any]) -> None:
    try:
        asyncio.run(work)
    except BaseException as error:
        if ready.done():
            raise
        ready.set_exception(error)


async def _serve(
    config: GatewayConfig,
    listeners: tuple[Listener, ...],
    engines_s: float,
    follow: Make | None,
    ready: Future[tuple[Beside, asyncio.Event]],
) -> None:
    over = asyncio.Event()
    async with Gateway(config, listeners=listeners, follow=follow) as gateway:
        await gateway.fleet.settled(engines_s)
        now_s = asyncio.get_running_loop().time()
        for worker in gateway.fleet.workers():
            if trouble := worker.trouble(now_s):
                raise EngineError(
                    f"the engine {worker.engine.shown} must be there and serve a model; it is {trouble}"
                )
        running = Beside(gateway, asyncio.get_running_loop())
        gateway.telemetry.trips.subscribe(running.rows.append)
        ready.set_result((running, over))
        await over.wait()
