"""One engine process of this machine, started and ended without holding up whoever waits."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path

from lengthwise.backend import Launch, process
from lengthwise.schema.errors import EngineError, InternalError

_TRIES = 3
_TAKEN = "must be free"
READY_S, GRACE_S = process.READY_S, process.GRACE_S


class _HaltedError(Exception):
    """The start was called off."""


class Process:
    """An engine's process.

    Args:
        launch: What to run, by the port that it is to listen at.
        log_path: For what it prints.
        ready_s: How long it may take until it is ready.
        grace_s: How long it may take to end when asked to.
        host: Where it listens.
    """

    def __init__(
        self,
        launch: Callable[[int], Launch],
        log_path: Path,
        *,
        ready_s: float = READY_S,
        grace_s: float = GRACE_S,
        host: str = "127.0.0.1",
    ) -> None:
        self._launch, self._log_path, self._host = launch, log_path, host
        self._ready_s, self._grace_s = ready_s, grace_s
        self._halt, self._heeded, self._hurried = threading.Event(), False, False
        self._stack = ExitStack()
        self.local: process.LocalEngine | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.local is not None and self.local.is_alive

    async def start(self, threads: Executor) -> str:
        """Its address, once it is ready; called off, it is ended before that is told.

        Raises:
            EngineError: It ended, or was not ready in time; with its last lines.
        """
        starting = asyncio.get_running_loop().run_in_executor(threads, self.start_here)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self.call_off()
            with contextlib.suppress(_HaltedError, EngineError):
                await starting
            await asyncio.get_running_loop().run_in_executor(threads, self.stop_here)
            raise

    def start_here(self) -> str:
        """The same, holding up the thread."""
        for tries in range(1, _TRIES + 1):
            if self._halt.is_set():
                raise _HaltedError
            try:
                self.local = self._stack.enter_context(self._run(process.free_port(self._host)))
            except EngineError as error:
                # Between being found free and being listened at, a port can be taken by another.
                if tries == _TRIES or _TAKEN not in str(error):
                    raise
            else:
                return self.local.url
        raise InternalError("a start ends in an address or an error")

    def call_off(self) -> None:
        """A start, under way in another thread or to come, ends."""
        self._halt.set()

    def stop_here(self, *, at_once: bool = False) -> None:
        """Ends it, holding up the thread; what has ended already is cleared away."""
        self._halt.set()
        self._heeded = True
        if at_once:
            self.hurry()
        self._stack.close()

    def hurry(self) -> None:
        """Whoever ends it, now or later and in whatever thread, waits for nothing any more: it is killed."""
        self._hurried = True

    def _run(self, port: int) -> contextlib.AbstractContextManager[process.LocalEngine]:
        launch = self._launch(port)
        return process.local_engine(
            launch.command,
            port=port,
            log_path=self._log_path,
            env=launch.environment,
            host=self._host,
            ready_s=self._ready_s,
            grace_s=self._grace_s,
            now=self._now,
            pause=self._pause,
        )

    def _now(self) -> float:
        """Seconds; of a hurried end all that was granted has passed."""
        return math.inf if self._hurried and self._halt.is_set() else time.monotonic()

    def _pause(self, seconds: float) -> None:
        """Waits while it starts, unless nobody wants it any more; once that is heeded it is being ended."""
        if self._heeded or self.local is not None:
            time.sleep(seconds)
        elif self._halt.wait(seconds):
            self._heeded = True
            raise _HaltedError


__all__ = ["GRACE_S", "READY_S", "Process"]
