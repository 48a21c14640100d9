"""Engines that others run, at given addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lengthwise.apps.launch.commands import Loaded
from lengthwise.apps.launch.contracts import Engine
from lengthwise.apps.launch.http import HttpEngine
from lengthwise.apps.launch.local import USUAL, Patience
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.errors import EngineError, InputError

KIND = "given"
"""Stands for the kind of GPU of engines about whose GPUs nobody knows."""


@dataclass
class StaticLauncher:
    """Asks engines that are there; they are neither started nor stopped.

    Attributes:
        models: How they are asked, by the models' numbers.
        urls: Addresses by the models' numbers, a replica each.
        patience: How long they may take.
    """

    models: Sequence[Loaded]
    urls: Mapping[int, Sequence[str]]
    patience: Patience = USUAL
    is_placed: bool = False
    _open: list[HttpEngine] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        lacking = [one.name for number, one in enumerate(self.models) if not self.urls.get(number)]
        if lacking:
            raise InputError(
                f"every model must have an address of an engine; there is none for {', '.join(lacking)}"
            )

    def plans(self) -> tuple[ModelPlan, ...]:
        """All models at once, as many replicas each as there are addresses."""
        return tuple(ModelPlan(number, KIND, dp=len(self.urls[number])) for number in range(len(self.models)))

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:
        """Connects to the replica of this number; raises EngineError."""
        loaded, urls = self.models[plan.model], self.urls[plan.model]
        if gpus[0] >= len(urls):
            raise EngineError(f"{loaded.name} has {len(urls)} engines; a replica {gpus[0] + 1} was asked for")
        engine = HttpEngine(self.patience.server(urls[gpus[0]], loaded), loaded.seats)
        await engine.open()
        self._open.append(engine)
        return engine

    async def stop(self, engine: Engine) -> None:
        """Closes the connections to it."""
        found = next((one for one in self._open if one is engine), None)
        if found is not None:
            self._open.remove(found)
            await found.close()

    async def sleep(self, engine: Engine) -> bool:  # noqa: ARG002 - the contract's
        """It goes on for others."""
        return False

    async def wake(self, engine: Engine) -> None:
        """Never asked for: none of them sleeps."""
        raise EngineError(f"{engine.about} was never put to sleep")

    def hurry(self) -> None:
        """There is nothing to end."""

    async def close(self) -> None:
        """Closes all connections."""
        for engine in list(self._open):
            await self.stop(engine)
