"""Capacity: the largest rate that each variant of a scenario sustains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lengthwise import engine, metrics, search
from lengthwise.config.scenario import Scenario
from lengthwise.config.search_space import limits_of
from lengthwise.config.sections import SearchSection
from lengthwise.cost import model_error
from lengthwise.metrics import Extrapolation
from lengthwise.report.json_file import json_text
from lengthwise.schema.cost_tables import Reach
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.metric_names import metric_of, split
from lengthwise.schema.plan import Limit, Point
from lengthwise.search import Capacity
from lengthwise.usecases.requests import search_load
from lengthwise.usecases.simulate import MAX_LOGGED_STEPS, front_note, group_text, slo_of
from lengthwise.usecases.variants import deployment, location_note, unchecked_tables_note

Progress = Callable[[int, int], None]
_SIDES = {"ttft": "prefill", "queueing_delay": "prefill", "tpot": "decode", "tbt": "decode"}
"""The side that determines a latency, if prefill and decode replicas are separate; both determine the others."""


@dataclass(frozen=True)
class VariantCapacity:
    """The largest request rate that a variant sustains within its limits, and all metrics at that rate."""

    name: str
    deployment: Deployment
    limits: tuple[Limit, ...]
    capacity: Capacity
    at: Point | None  # metrics at the lower end of the capacity's interval; None if no rate meets the limits
    # Quantities in which a run at that rate exceeds the range of the measurements behind the cost tables.
    extrapolations: tuple[Extrapolation, ...] = ()
    # A warning that the file of cost tables does not record its origin, or "".
    tables_note: str = ""
    requests_per_session: float = 1.0  # mean
    rejections: str = ""  # a warning that the engine rejects requests of the load's sample, with the reason

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on limits and sessions, and warnings about steps, front end and cost tables."""
        is_unlimited = self.capacity.binds == "throughput" and self.at is not None
        free = "No limit binds: at a higher rate the queue would grow without end." if is_unlimited else ""
        front = front_note(self.deployment.cost, self.capacity.rate_rps.value)
        extrapolated = (f"At capacity {one.description}." for one in self.extrapolations)
        sessions = self.capacity.rate_rps.value / self.requests_per_session
        per_session = (
            f"A session has {self.requests_per_session:.3g} requests on average, so that the capacity is "
            f"{sessions:.3g} sessions a second."
            if self.requests_per_session > 1 and self.at is not None
            else ""
        )
        rejected = f"{self.rejections}." if self.rejections else ""
        sides = self._sides_note() if self.deployment.decode is not None else ""
        least = next(
            iter(self.capacity.ceiling.impossible.values()), f"{self.capacity.excess} at the lowest rate tried"
        )
        none = "" if self.at is not None else f"No rate meets the limits: {least}."
        caveats = (self.tables_note, *model_error.deployment_notes(self.deployment))
        notes = (none, rejected, sides, self._groups_note(), free, per_session, front, *caveats)
        return (*extrapolated, *(note for note in notes if note))

    def _sides_note(self) -> str:
        """Return the bounds of the parts of a disaggregated deployment, and which side the limit that binds is of."""
        parts, decode = self.capacity.ceiling.parts, self.deployment.decode
        assert decode is not None
        known = ", ".join(f"{name} {rate:.3g}" for name, rate in parts.items() if math.isfinite(rate))
        side = _SIDES.get(split(self.capacity.binds)[0], "")
        label = metric_of(self.capacity.binds).label
        whose = f"{label}, which binds, is a latency of the {side} side; the " if side else "The "
        return (
            f"{self.deployment.parallel.replicas}P{decode.parallel.replicas}D: {whose}bounds of the parts without "
            f"preemptions, in requests/s: {known}. The {min(parts, key=lambda name: parts[name])} has the smallest."
        )

    def _groups_note(self) -> str:
        """Return the bounds of groups of unlike replicas, also per dollar, or "" if all replicas are alike."""
        groups, parts = self.deployment.replica_groups, self.capacity.ceiling.parts
        if len(groups) == 1:
            return ""
        rates = [rate for name, rate in parts.items() if name.startswith("group ")]
        known = ", ".join(
            f"{group_text(group)} {rate:.3g} ({3600 * rate / group.price_per_hour_usd:,.0f} requests per dollar)"
            for group, rate in zip(groups, rates, strict=True)
        )
        return f"Bounds of the groups of replicas, in requests/s: {known}. The router's share of each is not in them."


def capacities(
    scenario: Scenario, *, jobs: int | None = None, progress: Progress = lambda *_: None
) -> list[VariantCapacity]:
    """Return the capacity of every variant: the largest request rate within the limits of [search].

    If none of them bounds the wait, 99 % of the requests must be scheduled within 5 s. ``jobs`` is the number of seeds
    that are simulated at a time, by default one for each CPU.
    """
    effective = scenario.variant_scenarios()
    found = []
    progress(0, len(effective))
    with ThreadPoolExecutor(jobs or search.available_cpus()) as pool:
        for expanded in effective:
            with location_note(scenario, expanded):
                found.append(capacity_of(expanded, pool))
            progress(len(found), len(effective))
    return found


def capacity_of(expanded: Scenario, pool: ThreadPoolExecutor) -> VariantCapacity:
    """Return the capacity of a scenario without variants. ``pool`` simulates its seeds."""
    section = expanded.search or SearchSection()
    limits = search.with_stability(limits_of(section))
    slo_limits, served, load = search.SloLimits(limits, slo_of(expanded)), deployment(expanded), search_load(expanded)
    engine.warm_up()  # otherwise all threads would wait for the first to compile it
    found = search.capacity(served, load, slo_limits, precision=section.precision, seeds=section.seeds, each=pool.map)
    draws = model_error.DRAWS if expanded.run.model_draws is None else expanded.run.model_draws
    at = search.point_at_capacity(served, load, slo_limits, found, section.seeds)
    found = found if at is None else found.lowered_to(at.rate_rps)
    found = search.with_model_error(found, served, load, slo_limits, draws, pool.map)
    if at is not None:
        question = search.Question(search.objective("requests_per_dollar"), slo_limits, model_draws=draws)
        at = search.AtCapacity(served, load, question).with_model_error(at, found.effort)
    extrapolations: tuple[Extrapolation, ...] = ()
    if at is not None and served.cost.evidence.reach != Reach():
        records = engine.simulate(load.at(0, found.requests, at.rate_rps), served, max_log_steps=MAX_LOGGED_STEPS)
        extrapolations = metrics.beyond_reach(records, served)
    note, per_session = unchecked_tables_note(expanded), load.requests_per_session
    _, rejected = search.rejections(served, load.sample())
    return VariantCapacity(expanded.name, served, limits, found, at, extrapolations, note, per_session, rejected)


def capacities_json(found: Sequence[VariantCapacity]) -> str:
    """Return the capacities as the text of a JSON file."""
    return json_text("capacity", {"capacities": [_capacity_fields(sustained) for sustained in found]})


def _capacity_fields(sustained: VariantCapacity) -> dict[str, Any]:
    def numbers(estimate: Estimate) -> Any:
        names = ("value", "half_width", "model_low", "model_high")
        return {name: getattr(estimate, name) for name in names}

    capacity, at = sustained.capacity, sustained.at
    return {
        "name": sustained.name,
        "limits": sustained.limits,
        "requests_per_s": numbers(capacity.rate_rps),
        "binds": capacity.binds,
        "ceiling_requests_per_s": capacity.ceiling.rate_rps,
        "ceilings_of_parts": capacity.ceiling.parts,
        "requests_a_run": capacity.requests,
        "simulations": capacity.effort.simulations,
        "requests": capacity.effort.requests,
        "notes": sustained.notes,
        "beyond_reach": sustained.extrapolations,
        "at": None
        if at is None
        else {"requests_per_s": at.rate_rps, "metrics": {name: numbers(metric) for name, metric in at.values.items()}},
    }
