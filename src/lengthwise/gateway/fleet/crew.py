"""Which engines are kept, and who watches them: what discovery wants, made so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lengthwise.gateway.clock import Clock
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.fleet.found import Found
from lengthwise.gateway.fleet.watch import Watch
from lengthwise.gateway.fleet.worker import Worker

_LOOK_S = 0.5
_NAMES = 4096
"""Names whose epochs are remembered: names of pods come and go."""


@dataclass
class _Kept:
    """A worker and who watches it."""

    worker: Worker
    watch: Watch
    task: asyncio.Task[None]
    going: asyncio.Task[None] | None = None


class Crew:
    """The workers by name.

    Args:
        config: The gateway's.
        clock: The gateway's.
        changed: Called after every change; with True where requests must know at once.
        renamed: Called when a name passes on: the scheduler must hear of it before anybody is sent there.
        freed: Called with a name that its engine has no more: whoever has it next is another one.
        busy: Requests in flight at a worker; None: nobody knows.
        dice: Of the jitter.

    Attributes:
        workers: All that are kept.
    """

    def __init__(
        self,
        config: GatewayConfig,
        clock: Clock,
        changed: Callable[[bool], None],
        renamed: Callable[[], None],
        freed: Callable[[str], None],
        *,
        busy: Callable[[str], int] | None,
        dice: random.Random,
    ) -> None:
        self.config = config
        self.workers: dict[str, Worker] = {}
        self._clock, self._busy, self._dice = clock, busy, dice
        self._changed, self._renamed, self._freed = changed, renamed, freed
        self._kept: dict[str, _Kept] = {}
        self._epochs: dict[str, int] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def wanted(self, found: Sequence[Found]) -> None:
        """All engines that there are now; who is not among them any more is let go."""
        names = {one.name for one in found}
        for name in [name for name in self._kept if name not in names]:
            self._let_go(self._kept[name])
        for one in found:
            kept = self._kept.get(one.name)
            if kept is not None and not kept.watch.follow(one.engine):
                self._replace(kept)
                kept = None
            if kept is not None:
                self._stay(kept, up=one.up)
            elif one.up:
                self._begin(one)
        self._changed(True)

    def configure(self, config: GatewayConfig) -> None:
        """Another configuration: how engines are watched from now on."""
        self.config = config
        for kept in self._kept.values():
            kept.watch.configure(config.care, config.dispatch.adapt_every_s)

    def look(self, name: str) -> None:
        """Checks a worker as soon as may be."""
        if name in self._kept:
            self._kept[name].watch.look()

    async def checked(self) -> None:
        """Returns when all that are there now have been checked once."""
        for kept in list(self._kept.values()):
            await kept.watch.checked.wait()

    async def close(self) -> None:
        """Lets all go at once."""
        for kept in list(self._kept.values()):
            self._drop(kept)
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    def _begin(self, found: Found) -> None:
        care, dispatch = self.config.care, self.config.dispatch
        worker = Worker(found.engine, care, dispatch, epoch=self._epochs.get(found.name, 0))
        watch = Watch(
            worker,
            care,
            dispatch.adapt_every_s,
            self._clock,
            self._changed,
            priority=self.config.order.mode == "engine-priority",
            dice=self._dice,
        )
        task = asyncio.create_task(watch.run(), name=f"watch {found.name}")
        self._kept[found.name] = _Kept(worker, watch, task)
        self.workers[found.name] = worker

    def _stay(self, kept: _Kept, *, up: bool) -> None:
        if kept.going is not None:
            kept.going.cancel()
            kept.going = None
        kept.worker.draining = not up

    def _replace(self, kept: _Kept) -> None:
        """Another engine, or another way to it, takes the name; what runs there may end, where it can."""
        worker = kept.worker
        if not worker.health.up and not self._streams(worker):
            self._drop(kept)
            return
        del self._kept[worker.name], self.workers[worker.name]
        self._note_epoch(worker)
        worker.make_way()
        self._kept[worker.name], self.workers[worker.name] = kept, worker
        self._renamed()
        self._let_go(kept)

    def _streams(self, worker: Worker) -> bool:
        """Whether answers may be under way at one that is not well; who fails its checks may still stream."""
        return self._busy is not None and not worker.health.was_refused and self._busy(worker.name) > 0

    def _let_go(self, kept: _Kept) -> None:
        """No new requests; those that are there may end."""
        if kept.going is None:
            kept.worker.draining = True
            kept.watch.look()
            kept.going = asyncio.create_task(self._gone(kept), name=f"drain {kept.worker.name}")

    async def _gone(self, kept: _Kept) -> None:
        """Returns, and drops it, once nothing can be lost by it."""
        worker, began_s = kept.worker, self._clock()
        longest_s = self.config.care.drain_s if self._busy is None else self.config.care.leave_s
        while self._clock() - began_s < longest_s and not worker.health.was_refused:
            await asyncio.sleep(min(_LOOK_S, longest_s))
            if self._busy is not None and self._busy(worker.name) == 0:
                break
        kept.going = None
        if self._kept.get(worker.name) is kept:
            self._drop(kept)
            self._changed(True)

    def _drop(self, kept: _Kept) -> None:
        name = kept.worker.name
        del self._kept[name], self.workers[name]
        if not kept.worker.was:
            self._note_epoch(kept.worker)
        tasks = [task for task in (kept.task, kept.going) if task is not None]
        for task in tasks:
            task.cancel()
        closing = asyncio.create_task(self._closed(kept.worker, tasks))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _note_epoch(self, worker: Worker) -> None:
        """Who has its name next is another one."""
        self._freed(worker.name)
        self._epochs[worker.name] = worker.epoch + 1
        if len(self._epochs) > _NAMES:
            del self._epochs[next(iter(self._epochs))]

    async def _closed(self, worker: Worker, tasks: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        await worker.close()
