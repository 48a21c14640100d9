"""The ledger as the coordinator writes it: in order, many endings in one transaction, nobody held up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar, cast

import numpy as np

from lengthwise.apps.launch.virtual import VirtualLoop
from lengthwise.apps.ledger.contracts import Ending, Ledger, State
from lengthwise.apps.run.layout import Layout

Result = TypeVar("Result")
GROUP_S = 0.004
"""Endings on which others wait are written with those that come within so long."""
_MOST = 2_000


async def _beside(work: Callable[[], Result]) -> Result:
    """What work returns in a thread that nobody joins."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if error is not None and not found.done():
            found.set_exception(error)
        elif not found.done():
            found.set_result(cast("Result", result))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:  # noqa: BLE001 - whoever waits for it is told
            error = caught
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="beside", daemon=True).start()
    return await found


class Books:
    """One thread writes, so that what was asked first is done first.

    Args:
        ledger: Open.
        layout: Of its tasks.
        linger_s: How long an ending on which nothing hangs may wait for others.
        freed: Told the models that may have something to do.
    """

    def __init__(
        self, ledger: Ledger, layout: Layout, linger_s: float, freed: Callable[[Sequence[int]], None]
    ) -> None:
        self.ledger, self._linger_s, self._freed = ledger, linger_s, freed
        self._start, self._child = layout.tasks.children
        self._model = layout.tasks.model
        self._queue: list[Ending] = []
        self._urgent, self._some = asyncio.Event(), asyncio.Event()
        self._writing = asyncio.Lock()
        virtual = isinstance(asyncio.get_running_loop(), VirtualLoop)
        self._thread = None if virtual else ThreadPoolExecutor(1, "ledger")

    async def call(self, work: Callable[[], Result]) -> Result:
        """What the work with the ledger returns."""
        if self._thread is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def beside(self, work: Callable[[], Result]) -> Result:
        """What long work returns that has nothing to do with the ledger, which is written meanwhile.

        A process that ends does not wait for it.
        """
        return work() if self._thread is None else await _beside(work)

    def end(self, ending: Ending) -> None:
        """Will be settled soon."""
        self._queue.append(ending)
        self._some.set()
        first, last = self._start[ending.task], self._start[ending.task + 1]
        if last > first or ending.state != State.DONE or len(self._queue) >= _MOST:
            self._urgent.set()

    @property
    def is_clear(self) -> bool:
        """Whether all endings are written."""
        return not self._queue and not self._writing.locked()

    async def keep(self) -> None:
        """Settles for ever; cancelled, it leaves nothing half done."""
        while True:
            await self._some.wait()
            try:
                async with asyncio.timeout(self._linger_s):
                    await self._urgent.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(GROUP_S)
            await asyncio.shield(self.flush())

    async def flush(self) -> None:
        """Settles all that there is."""
        async with self._writing:
            while self._queue:
                batch, self._queue = self._queue[:_MOST], self._queue[_MOST:]
                await self.call(lambda batch=batch: self.ledger.settle(batch))  # type: ignore[misc]
                self._freed(self._woken(batch))
            self._some.clear()
            self._urgent.clear()

    def _woken(self, batch: Sequence[Ending]) -> list[int]:
        """Models of tasks that were ended, and of those that waited for them."""
        models = {int(self._model[one.task]) for one in batch if one.state == State.READY}
        for one in batch:
            first, last = self._start[one.task], self._start[one.task + 1]
            if last > first:
                models.update(np.unique(self._model[self._child[first:last]]).tolist())
        return sorted(models)

    def close(self) -> None:
        """Ends the thread; the ledger stays open."""
        if self._thread is not None:
            self._thread.shutdown()
