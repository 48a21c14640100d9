"""Engines on their GPUs: those that are wanted started or woken, those that are not stopped or put to sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lengthwise.apps.launch.engine import Engine, Launcher
from lengthwise.apps.launch.local import KIND
from lengthwise.apps.run.dispatch import ModelDispatcher
from lengthwise.apps.run.job import Placer, Plans
from lengthwise.apps.run.task_state import ReplicaSlot
from lengthwise.schema.app import ModelPlan, Placement, Replica
from lengthwise.schema.errors import EngineError

MIN_S = 30.0
"""Nothing is called silent before: long prompts, and checks of a server's health, take some seconds."""
_TIMES = 2.0
"""Nor is a start within twice the time that was planned for it."""


@dataclass(frozen=True)
class Silent:
    """An engine that does not answer.

    Attributes:
        model: By number.
        gpus: Of the replica.
        description: What it is; "": it was started and has not been ready.
        since_s: Of its start, or of what was heard of it last, since the start of the run.
        for_s: So long ago.
        planned_s: Within which it was to be ready; 0: it was ready, or nobody knows.
        starts: How often it was started.
        is_placed: Whether its GPUs are known; else they are its number among its model's engines.
    """

    model: int
    gpus: Replica
    description: str
    since_s: float
    for_s: float
    planned_s: float
    starts: int
    is_placed: bool = True

    def words(self, name: str) -> str:
        """For people, with the model's name."""
        numbers = ", ".join(map(str, self.gpus))
        gpus = f"GPU{'s' if len(self.gpus) > 1 else ''}" if self.is_placed else "engine"
        where = f"{name} on {gpus} {numbers}"
        if self.description:
            return f"{where} has not answered for {self.for_s:.0f} s ({self.description})"
        planned = f", {self.planned_s:.0f} s were planned" if self.planned_s > 0 else ""
        again = f", started {self.starts} times" if self.starts > 1 else ""
        return f"{where} is not ready {self.for_s:.0f} s after its start{planned}{again}"


def silent(slots: Sequence[ReplicaSlot], placer: Placer, start_s: float, now_s: float) -> tuple[Silent, ...]:
    """Those of a fleet, by the loop's clock."""
    return tuple(_found(slots, placer, start_s, now_s))


def _found(slots: Sequence[ReplicaSlot], placer: Placer, start_s: float, now_s: float) -> Iterator[Silent]:
    for slot in slots:
        if slot.mending is not None and not slot.mending.done():
            continue
        engine = slot.engine
        planned_s = placer.ready_s(slot.plan) if engine is None else 0.0
        since_s = slot.since_s if engine is None else slot.received(now_s)
        for_s = now_s - since_s
        if for_s > max(MIN_S, _TIMES * planned_s):
            yield Silent(
                slot.plan.model,
                slot.gpus,
                "" if engine is None else engine.description,
                since_s - start_s,
                for_s,
                planned_s,
                slot.starts,
                slot.plan.gpu != KIND,
            )


_STARTS = 3
_Key = tuple[int, tuple[str, int, int], Replica]
Report = Callable[[str, ModelPlan, Replica, str], None]
"""Hears of every switch: "start", "wake", "sleep", "stop", "ready", "died"; whose, where, and what it is."""


class Fleet:
    """All engines of a run.

    Args:
        launcher: Makes them be there.
        lines: Who gives them work, by model.
        failed: Told an engine that does not start.
        report: Hears of what is switched.
    """

    def __init__(
        self,
        launcher: Launcher,
        lines: Sequence[ModelDispatcher],
        failed: Callable[[BaseException], None],
        report: Report,
    ) -> None:
        self._launcher, self._lines, self._failed, self._report = launcher, lines, failed, report
        self.slots: list[ReplicaSlot] = []
        self._asleep: dict[_Key, Engine] = {}
        self._leaving: dict[asyncio.Task[None], Replica] = {}
        self._mending: set[asyncio.Task[None]] = set()

    @property
    def placement(self) -> Placement:
        """Where engines are, or are being started."""
        found: Placement = {}
        for slot in self.slots:
            found[slot.plan.model] = (*found.get(slot.plan.model, ()), slot.gpus)
        return found

    def in_sleep(self, plans: Plans) -> Placement:
        """Where engines of these very plans could be woken."""
        shapes = {(plan.model, plan.shape) for plan in plans}
        found: Placement = {}
        for model, shape, gpus in sorted(self._asleep):
            if (model, shape) in shapes:
                found[model] = (*found.get(model, ()), gpus)
        return found

    def abouts(self) -> dict[int, set[str]]:
        """What the engines that run are, by model."""
        found: dict[int, set[str]] = {}
        for slot in self.slots:
            if slot.engine is not None:
                found.setdefault(slot.plan.model, set()).add(slot.engine.description)
        return found

    async def go(self, plans: Plans, placement: Mapping[int, Sequence[Replica]]) -> None:
        """Switches to these plans; what stays goes on, what has to start does so meanwhile."""
        wanted = {(plan.model, plan.shape, gpus): plan for plan in plans for gpus in placement[plan.model]}
        stay, leave = [], []
        for slot in self.slots:
            plan = wanted.pop((slot.plan.model, slot.plan.shape, slot.gpus), None)
            if plan is None:
                leave.append(slot)
            else:
                slot.plan = plan
                stay.append(slot)
        self.slots = stay
        await self._leave(leave)
        for (_, _, gpus), plan in wanted.items():
            self._enter(ReplicaSlot(plan, gpus))

    async def _leave(self, slots: Sequence[ReplicaSlot]) -> None:
        for model in sorted({slot.plan.model for slot in slots}):
            await self._lines[model].close([slot for slot in slots if slot.plan.model == model])
        for slot in slots:
            leaving = asyncio.get_running_loop().create_task(self._left(slot))
            self._leaving[leaving] = slot.gpus
            leaving.add_done_callback(self._lost)

    def _lost(self, stopping: asyncio.Task[None]) -> None:
        del self._leaving[stopping]
        if not stopping.cancelled() and (error := stopping.exception()) is not None:
            self._failed(error)

    async def _left(self, slot: ReplicaSlot) -> None:
        if slot.mending is not None:
            await asyncio.wait([slot.mending])
        if slot.startup is not None and not slot.startup.done():
            slot.startup.cancel()
            await asyncio.gather(slot.startup, return_exceptions=True)
        engine, slot.engine = slot.engine, None
        if engine is None:
            if slot.starts:
                self._report("stop", slot.plan, slot.gpus, "")
            return
        if engine.is_alive and await self._launcher.sleep(engine):
            self._report("sleep", slot.plan, slot.gpus, engine.description)
            self._asleep[slot.plan.model, slot.plan.shape, slot.gpus] = engine
        else:
            self._report("stop", slot.plan, slot.gpus, engine.description)
            await self._launcher.stop(engine)

    def _enter(self, slot: ReplicaSlot) -> None:
        self.slots.append(slot)
        slot.startup = asyncio.get_running_loop().create_task(self._opened(slot))
        slot.startup.add_done_callback(self._checked)

    def _checked(self, startup: asyncio.Task[None]) -> None:
        if not startup.cancelled() and (error := startup.exception()) is not None:
            self._failed(error)

    async def _opened(self, slot: ReplicaSlot) -> None:
        """Ready, once whoever was on its GPUs has left."""
        slot.since_s = asyncio.get_running_loop().time()
        before = [task for task, gpus in self._leaving.items() if self._meet(gpus, slot.gpus)]
        if before:
            await asyncio.wait(before)
        engine = await self._woken(slot) or await self._started(slot)
        slot.engine, slot.failures, slot.inquiry = engine, 0, None
        slot.starts, slot.received_s = 0, asyncio.get_running_loop().time()
        self._report("ready", slot.plan, slot.gpus, engine.description)
        self._lines[slot.plan.model].open(slot)

    def _meet(self, left: Replica, right: Replica) -> bool:
        return self._launcher.is_placed and not set(left).isdisjoint(right)

    async def _woken(self, slot: ReplicaSlot) -> Engine | None:
        engine = self._asleep.pop((slot.plan.model, slot.plan.shape, slot.gpus), None)
        if engine is None:
            return None
        self._report("wake", slot.plan, slot.gpus, engine.description)
        try:
            await self._launcher.wake(engine)
        except EngineError:
            await self._launcher.stop(engine)
            return None
        except BaseException:
            await self._launcher.stop(engine)
            raise
        return engine

    async def _started(self, slot: ReplicaSlot) -> Engine:
        for tries in range(1, _STARTS + 1):
            self._report("start", slot.plan, slot.gpus, "")
            slot.starts = tries
            try:
                return await self._launcher.start(slot.plan, slot.gpus)
            except EngineError:
                if tries == _STARTS:
                    raise
                await asyncio.sleep(2.0 ** (tries - 1))
        raise AssertionError

    def mend(self, slot: ReplicaSlot, *, died: bool) -> None:
        """Starts an engine anew on its GPUs; what it works on is given back."""
        if slot in self.slots and slot.engine is not None:
            engine, slot.engine = slot.engine, None
            mending = asyncio.get_running_loop().create_task(self._mended(slot, engine, died=died))
            slot.mending = mending
            self._mending.add(mending)
            mending.add_done_callback(self._mending.discard)
            mending.add_done_callback(self._checked)

    async def _mended(self, slot: ReplicaSlot, engine: Engine, *, died: bool) -> None:
        line = self._lines[slot.plan.model]
        self._report("died" if died else "stop", slot.plan, slot.gpus, engine.description)
        if died:
            await line.lost(slot, f"its engine died: {engine.description}")
        else:
            await line.close([slot])
        await self._launcher.stop(engine)
        if slot in self.slots:
            slot.startup = asyncio.get_running_loop().create_task(self._opened(slot))
            slot.startup.add_done_callback(self._checked)

    async def close(self) -> None:
        """Stops all, those that start or sleep too."""
        while self._mending:
            await asyncio.wait(self._mending)
        slots, self.slots = self.slots, []
        in_sleep, self._asleep = list(self._asleep.values()), {}
        await asyncio.gather(*(self._finished(slot) for slot in slots))
        await asyncio.gather(*(self._launcher.stop(engine) for engine in in_sleep))
        if self._leaving:
            await asyncio.wait(list(self._leaving))
        await self._launcher.close()

    async def _finished(self, slot: ReplicaSlot) -> None:
        if slot.startup is not None and not slot.startup.done():
            slot.startup.cancel()
            await asyncio.gather(slot.startup, return_exceptions=True)
        if slot.engine is not None:
            with suppress(EngineError):
                await self._launcher.stop(slot.engine)
