"""Emulated engines for tests that have no event loop of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from lengthwise.testing.engine_server.server import EngineServer


class Running:
    """Servers in a thread of their own.

    Attributes:
        servers: They; read their logs freely, and change their faults.
    """

    def __init__(self, servers: tuple[EngineServer, ...], loop: asyncio.AbstractEventLoop) -> None:
        self.servers, self._loop = servers, loop

    def call(self, what: Coroutine[Any, Any, Any]) -> Any:
        """What a coroutine of a server returns (``die``, ``restart``, ``idle``), run where they live."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(timeout=60)


@contextmanager
def in_thread(*servers: EngineServer) -> Iterator[Running]:
    """The servers up, each at its ``url``, until the end of the block."""
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(servers, ready)), daemon=True)
    thread.start()
    loop, over = ready.result(timeout=60)
    try:
        yield Running(servers, loop)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(timeout=60)


async def _serve(
    servers: tuple[EngineServer, ...], ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
) -> None:
    over = asyncio.Event()
    try:
        async with AsyncExitStack() as stack:
            for server in servers:
                await stack.enter_async_context(server)
            ready.set_result((asyncio.get_running_loop(), over))
            await over.wait()
    except BaseException as error:
        if not ready.done():
            ready.set_exception(error)
        raise
