"""The largest rate that each variant of a scenario sustains."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lengthwise import search
from lengthwise.scenario._loads import load_of
from lengthwise.scenario._space import limits_of
from lengthwise.scenario.outcomes import slo_of
from lengthwise.scenario.scenario import Scenario
from lengthwise.scenario.sections import SearchSection
from lengthwise.scenario.variants import deployment
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.plan import Limit, Point
from lengthwise.search import Capacity

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sustained:
    """What a variant sustains.

    Attributes:
        name: Of the variant.
        deployment: What serves.
        limits: What had to hold.
        capacity: The largest rate that holds them.
        at: All numbers at the lower end of its interval; None where nothing holds.
    """

    name: str
    deployment: Deployment
    limits: tuple[Limit, ...]
    capacity: Capacity
    at: Point | None


def capacities(
    scenario: Scenario, *, jobs: int | None = None, progress: Progress = lambda *_: None
) -> list[Sustained]:
    """The capacity of every variant, under the limits of [search] or the default one.

    Args:
        scenario: What is asked; its own rate does not matter.
        jobs: Seeds simulated at a time; None: one a CPU.
        progress: Called with variants done and variants in all.

    Raises:
        InputError: Something of the scenario cannot be used, or its requests have no rate.
    """
    sides = scenario.effective()
    found = []
    progress(0, len(sides))
    with ThreadPoolExecutor(jobs or search.available_cpus()) as pool:
        for side in sides:
            try:
                found.append(_sustained(side, pool))
            except InputError as error:
                where = f"variant {side.name!r} of " if scenario.variants else ""
                error.add_note(f"in {where}{scenario.source}")
                raise
            progress(len(found), len(sides))
    return found


def _sustained(side: Scenario, pool: ThreadPoolExecutor) -> Sustained:
    section = side.search or SearchSection()
    limits = search.with_stability(limits_of(section))
    promises, served = search.Promises(limits, slo_of(side)), deployment(side)
    load = load_of(side.workload, side.folder, side.run.seed, side.predictor, side.deployment.model)
    found = search.capacity(
        served, load, promises, precision=section.precision, seeds=section.seeds, each=pool.map
    )
    at = search.point_at_capacity(served, load, promises, found, section.seeds)
    return Sustained(side.name, served, limits, found, at)
