"""Engines that should answer and do not: started and not ready, or asked and not heard of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lengthwise.apps.launch.static import KIND
from lengthwise.apps.run._work import Berth
from lengthwise.apps.run.contracts import Rooms
from lengthwise.schema.app import Replica

LEAST_S = 30.0
"""Nothing is called silent before: long prompts, and checks of a server's health, take some seconds."""
_TIMES = 2.0
"""Nor is a start within twice the time that was planned for it."""


@dataclass(frozen=True)
class Silent:
    """An engine that does not answer.

    Attributes:
        model: By number.
        gpus: Of the replica.
        about: What it is; "": it was started and has not been ready.
        since_s: Of its start, or of what was heard of it last, since the start of the run.
        for_s: So long ago.
        planned_s: Within which it was to be ready; 0: it was ready, or nobody knows.
        starts: How often it was started.
        is_placed: Whether its GPUs are known; else they are its number among its model's engines.
    """

    model: int
    gpus: Replica
    about: str
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
        if self.about:
            return f"{where} has not answered for {self.for_s:.0f} s ({self.about})"
        planned = f", {self.planned_s:.0f} s were planned" if self.planned_s > 0 else ""
        again = f", started {self.starts} times" if self.starts > 1 else ""
        return f"{where} is not ready {self.for_s:.0f} s after its start{planned}{again}"


def silent(berths: Sequence[Berth], rooms: Rooms, start_s: float, now_s: float) -> tuple[Silent, ...]:
    """Those of a fleet, by the loop's clock."""
    return tuple(_found(berths, rooms, start_s, now_s))


def _found(berths: Sequence[Berth], rooms: Rooms, start_s: float, now_s: float) -> Iterator[Silent]:
    for berth in berths:
        if berth.mending is not None and not berth.mending.done():
            continue
        engine = berth.engine
        planned_s = rooms.ready_s(berth.plan) if engine is None else 0.0
        since_s = berth.since_s if engine is None else berth.heard(now_s)
        for_s = now_s - since_s
        if for_s > max(LEAST_S, _TIMES * planned_s):
            yield Silent(
                berth.plan.model,
                berth.gpus,
                "" if engine is None else engine.about,
                since_s - start_s,
                for_s,
                planned_s,
                berth.starts,
                berth.plan.gpu != KIND,
            )
