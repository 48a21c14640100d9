"""Background tasks, and event loops on other threads."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
_STOP_S = 60.0


@asynccontextmanager
async def background(work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Run a coroutine as a task during the block. At the block's end, cancel the task and ignore its exceptions."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def stop_accepting(listeners: Iterable[socket.socket]) -> None:
    """Stop accepting connections, and wait until the event loop has given the accepted ones to their protocols.

    ``asyncio.Server.close`` alone leaves connections open that were accepted in the same iteration of the event loop.
    """
    loop = asyncio.get_running_loop()
    for listener in listeners:
        loop.remove_reader(listener)
    for _ in range(3):
        await asyncio.sleep(0)


@contextmanager
def on_thread(context: AbstractAsyncContextManager[T], name: str) -> Iterator[T]:
    """Yield the value of an async context manager that runs on the event loop of a new thread during the block."""
    ready: Future[tuple[T, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def work() -> None:
        stopped = asyncio.Event()
        async with context as entered:
            ready.set_result((entered, asyncio.get_running_loop(), stopped))
            await stopped.wait()

    def run() -> None:
        try:
            asyncio.run(work())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    entered, loop, stopped = ready.result()
    try:
        yield entered
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(timeout=_STOP_S)
