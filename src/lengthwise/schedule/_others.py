"""Other systems beside the choice: the best of each under the same bound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

from lengthwise.schedule.baselines import curve
from lengthwise.schedule.choose import Planner
from lengthwise.schema.schedule import OtherSystem

Progress = Callable[[int, int], None]
"""Of configurations played out, and of how many it will be, 0 where that is not known."""


def others(
    planner: Planner,
    bound_s: float,
    systems: Iterable[str],
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> tuple[OtherSystem, ...]:
    """What the systems yield, each once, the bound held as the planner holds it."""
    played = itertools.count(1)
    return tuple(
        _other(planner, bound_s, system, seed, lambda: progress(next(played), 0))
        for system in dict.fromkeys(systems)
    )


def _other(planner: Planner, bound_s: float, system: str, seed: int, told: Callable[[], None]) -> OtherSystem:
    of = curve(planner.estimator, system, seed=seed, told=told)
    at = of.best_at(bound_s, worst_case=planner.worst_case)
    return OtherSystem(
        system=system,
        best=None if at is None else of.row(at),
        low_rps=math.nan if at is None else float(of.throughput_low_rps[at]),
        high_rps=math.nan if at is None else float(of.throughput_high_rps[at]),
        configurations=of.configurations,
        front=of.front(worst_case=planner.worst_case),
    )


__all__ = ["Progress", "others"]
