"""Starts or wakes the engines of a run's current plans, and stops or puts to sleep all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from lengthwise.apps.launch.engine import Engine, Launcher
from lengthwise.apps.launch.local import GIVEN_GPU
from lengthwise.apps.run.dispatch import ModelDispatcher
from lengthwise.apps.run.job import Placer, Plans
from lengthwise.apps.run.task_state import ReplicaSlot, spawn
from lengthwise.schema.app import ModelPlan, Placement, Replica
from lengthwise.schema.errors import EngineError

MIN_SILENCE_S = 30.0  # shorter silence is normal: long prompts and health checks take some seconds
_PLANNED_FACTOR = 2.0  # a start that takes less than this times its planned time is not reported as silent
_MAX_STARTS = 3
_Key = tuple[int, tuple[str, int, int], Replica]
Found = TypeVar("Found")
Report = Callable[[str, ModelPlan, Replica, str], None]
"""Receives "start", "wake", "sleep", "stop", "ready" or "died", with the plan, GPUs and description of the engine."""


@dataclass(frozen=True)
class Silent:
    """An engine that does not answer."""

    model: int
    gpus: Replica
    description: str  # description of the engine, or "" if it has not been ready yet
    since_s: float  # time of its start or last progress, from the start of the run
    for_s: float  # seconds since ``since_s``
    # Planned seconds until the engine is ready. They are 0 if it was ready before, or if they are unknown.
    planned_s: float
    starts: int
    # Whether ``gpus`` are GPUs. If not, they hold the engine's number among the engines of its model.
    is_placed: bool = True

    def words(self, name: str) -> str:
        """Return a sentence that describes the engine. ``name`` is the model's name."""
        numbers = ", ".join(map(str, self.gpus))
        gpus = f"GPU{'s' if len(self.gpus) > 1 else ''}" if self.is_placed else "engine"
        where = f"{name} on {gpus} {numbers}"
        if self.description:
            return f"{where} has not answered for {self.for_s:.0f} s ({self.description})"
        planned = f", {self.planned_s:.0f} s were planned" if self.planned_s > 0 else ""
        restarts = f", started {self.starts} times" if self.starts > 1 else ""
        return f"{where} is not ready {self.for_s:.0f} s after its start{planned}{restarts}"


def silent_engines(slots: Sequence[ReplicaSlot], placer: Placer, start_s: float, now_s: float) -> tuple[Silent, ...]:
    """Return the engines that have made no progress for too long. Both times are on the loop's clock."""
    found = []
    for slot in slots:
        if slot.restart is not None and not slot.restart.done():
            continue
        if slot.engine is None:
            description, since_s, planned_s = "", slot.started_s, placer.ready_s(slot.plan)
        else:
            description, since_s, planned_s = slot.engine.description, slot.last_progress_s(now_s), 0.0
        plan, for_s, is_placed = slot.plan, now_s - since_s, slot.plan.gpu != GIVEN_GPU
        if for_s > max(MIN_SILENCE_S, _PLANNED_FACTOR * planned_s):
            times = since_s - start_s, for_s, planned_s
            found.append(Silent(plan.model, slot.gpus, description, *times, slot.starts, is_placed))
    return tuple(found)


def _by_model(pairs: Iterable[tuple[int, Found]]) -> dict[int, tuple[Found, ...]]:
    found: dict[int, tuple[Found, ...]] = {}
    for model, one in pairs:
        found[model] = (*found.get(model, ()), one)
    return found


class Fleet:
    """All engines of a run. ``dispatchers`` has one per model. ``on_error`` gets the error if engines do not start."""

    def __init__(
        self,
        launcher: Launcher,
        dispatchers: Sequence[ModelDispatcher],
        on_error: Callable[[BaseException], None],
        report: Report,
    ) -> None:
        self._launcher, self._dispatchers = launcher, dispatchers
        self._on_error, self._report = on_error, report
        self.slots: list[ReplicaSlot] = []
        self._asleep: dict[_Key, Engine] = {}
        self._leaving: dict[asyncio.Task[None], Replica] = {}
        self._restarting: set[asyncio.Task[None]] = set()

    @property
    def placement(self) -> Placement:
        """Return the GPUs of the running and starting engines by model."""
        return _by_model((slot.plan.model, slot.gpus) for slot in self.slots)

    def is_overdue(self, placer: Placer) -> bool:
        """Return whether an engine is starting and has taken longer than planned."""
        now_s = asyncio.get_running_loop().time()
        return any(slot.engine is None and now_s - slot.started_s > placer.ready_s(slot.plan) for slot in self.slots)

    def sleeping(self, plans: Plans) -> Placement:
        """Return the GPUs of sleeping engines that have the shape of one of these plans."""
        shapes = {(plan.model, plan.shape) for plan in plans}
        return _by_model((model, gpus) for model, shape, gpus in sorted(self._asleep) if (model, shape) in shapes)

    def descriptions(self) -> dict[int, tuple[str, ...]]:
        """Return the descriptions of ready engines by model."""
        return _by_model((slot.plan.model, slot.engine.description) for slot in self.slots if slot.engine is not None)

    async def switch(self, plans: Plans, placement: Mapping[int, Sequence[Replica]]) -> None:
        """Switch to these plans. Replicas on the same GPUs continue, and new replicas start in the background."""
        new = {(plan.model, plan.shape, gpus): plan for plan in plans for gpus in placement[plan.model]}
        stay, leave = [], []
        for slot in self.slots:
            plan = new.pop((slot.plan.model, slot.plan.shape, slot.gpus), None)
            if plan is None:
                leave.append(slot)
            else:
                slot.plan = plan
                stay.append(slot)
        self.slots = stay
        for model in sorted({slot.plan.model for slot in leave}):
            await self._dispatchers[model].close([slot for slot in leave if slot.plan.model == model])
        for slot in leave:
            leaving = spawn(self._leave(slot), self._on_error)
            self._leaving[leaving] = slot.gpus
            leaving.add_done_callback(self._leaving.pop)
        for (_, _, gpus), plan in new.items():
            self.slots.append(slot := ReplicaSlot(plan, gpus))
            self._start(slot)

    async def _leave(self, slot: ReplicaSlot) -> None:
        if slot.restart is not None:
            await asyncio.wait([slot.restart])
        await _cancel_start(slot)
        engine, slot.engine = slot.engine, None
        if engine is None:
            if slot.starts:
                self._report("stop", slot.plan, slot.gpus, "")
        elif engine.is_alive and await self._launcher.sleep(engine):
            self._report("sleep", slot.plan, slot.gpus, engine.description)
            self._asleep[slot.plan.model, slot.plan.shape, slot.gpus] = engine
        else:
            self._report("stop", slot.plan, slot.gpus, engine.description)
            await self._launcher.stop(engine)

    def _start(self, slot: ReplicaSlot) -> None:
        slot.startup = spawn(self._open(slot), self._on_error)

    async def _open(self, slot: ReplicaSlot) -> None:
        loop = asyncio.get_running_loop()
        slot.started_s = loop.time()
        if self._launcher.is_placed:
            before = [task for task, gpus in self._leaving.items() if not set(gpus).isdisjoint(slot.gpus)]
            if before:
                await asyncio.wait(before)
        engine = await self._wake(slot) or await self._launch(slot)
        slot.engine, slot.failures, slot.liveness_check = engine, 0, None
        slot.starts, slot.progress_s = 0, loop.time()
        self._report("ready", slot.plan, slot.gpus, engine.description)
        self._dispatchers[slot.plan.model].open(slot)

    async def _wake(self, slot: ReplicaSlot) -> Engine | None:
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

    async def _launch(self, slot: ReplicaSlot) -> Engine:
        while True:
            self._report("start", slot.plan, slot.gpus, "")
            slot.starts += 1
            try:
                return await self._launcher.start(slot.plan, slot.gpus)
            except EngineError:
                if slot.starts == _MAX_STARTS:
                    raise
                await asyncio.sleep(2.0 ** (slot.starts - 1))

    def restart(self, slot: ReplicaSlot, *, died: bool) -> None:
        """Restart the engine of a slot in the background, and release its tasks. ``died``: the engine has ended."""
        if slot in self.slots and slot.engine is not None:
            engine, slot.engine = slot.engine, None
            slot.restart = spawn(self._restart(slot, engine, died=died), self._on_error)
            self._restarting.add(slot.restart)
            slot.restart.add_done_callback(self._restarting.discard)

    async def _restart(self, slot: ReplicaSlot, engine: Engine, *, died: bool) -> None:
        dispatcher = self._dispatchers[slot.plan.model]
        self._report("died" if died else "stop", slot.plan, slot.gpus, engine.description)
        if died:
            await dispatcher.engine_died(slot, f"its engine died: {engine.description}")
        else:
            await dispatcher.close([slot])
        await self._launcher.stop(engine)
        if slot in self.slots:
            self._start(slot)

    async def close(self) -> None:
        """Stop all engines, including starting and sleeping engines."""
        while self._restarting:
            await asyncio.wait(self._restarting)
        slots, self.slots = self.slots, []
        sleeping, self._asleep = list(self._asleep.values()), {}

        async def stop(slot: ReplicaSlot) -> None:
            await _cancel_start(slot)
            if slot.engine is not None:
                with suppress(EngineError):
                    await self._launcher.stop(slot.engine)

        await asyncio.gather(*map(stop, slots))
        await asyncio.gather(*map(self._launcher.stop, sleeping))
        if self._leaving:
            await asyncio.wait(list(self._leaving))
        await self._launcher.close()


async def _cancel_start(slot: ReplicaSlot) -> None:
    if slot.startup is not None and not slot.startup.done():
        slot.startup.cancel()
        await asyncio.gather(slot.startup, return_exceptions=True)
