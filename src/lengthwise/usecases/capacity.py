"""The largest rate that each variant of a scenario sustains."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lengthwise import engine, metrics, search
from lengthwise.config.scenario import Scenario
from lengthwise.config.search_space import limits_of
from lengthwise.config.sections import SearchSection
from lengthwise.config.variants import deployment, untold_note
from lengthwise.config.workload import load_of
from lengthwise.metrics import Beyond
from lengthwise.schema.cost_tables import Reach
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.plan import Limit, Point
from lengthwise.search import Capacity
from lengthwise.usecases.simulate import MANY_STEPS, front_note, slo_of

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
        beyond: Where a run at that rate goes beyond the measurements behind the cost tables.
        missing: That the file of cost tables does not tell what it is of; empty where it does.
    """

    name: str
    deployment: Deployment
    limits: tuple[Limit, ...]
    capacity: Capacity
    at: Point | None
    out_of_range: tuple[Beyond, ...] = ()
    missing: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know, a sentence each: extrapolated steps, a front that binds, untold origins."""
        front = front_note(self.deployment.cost, self.capacity.rate_rps.value)
        beyond = (f"At capacity {one.description}." for one in self.out_of_range)
        return (*beyond, *(note for note in (front, self.missing) if note))


def capacities(scenario: Scenario, *, jobs: int | None = None, progress: Progress = lambda *_: None) -> list[Sustained]:
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
    found = search.capacity(served, load, promises, precision=section.precision, seeds=section.seeds, each=pool.map)
    at = search.point_at_capacity(served, load, promises, found, section.seeds)
    beyond = () if at is None else _out_of_range(served, load, at.rate_rps, found.requests)
    return Sustained(side.name, served, limits, found, at, beyond, untold_note(side))


def _out_of_range(served: Deployment, load: search.Load, rate_rps: float, requests: int) -> tuple[Beyond, ...]:
    """Where the first seed's run at a rate passes the reach of its tables; not run where they have none."""
    if served.cost.reach == Reach():
        return ()
    records = engine.simulate(load.at(0, requests, rate_rps), served, keep_steps=MANY_STEPS)
    return metrics.beyond_reach(records, served)
