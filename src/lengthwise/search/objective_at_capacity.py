"""Objectives at the largest rate that holds the limits: requests per dollar, energy."""

from __future__ import annotations

import math
from dataclasses import replace

from lengthwise.schema.deployment import Deployment
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Choice, Point, Status
from lengthwise.search.bounds import ceiling
from lengthwise.search.capacity_search import (
    FLOOR_SHARE,
    MIN_REQUESTS,
    Capacity,
    breaks_at,
    capacity,
    curve,
    lower_end,
    point_at,
    rough_capacity,
    scaled,
)
from lengthwise.search.capacity_search import scout as scout_capacity
from lengthwise.search.limits import Question
from lengthwise.search.load import Load

CURVE_SEEDS = 4
STEPS_DOWN, STEP_DOWN = 5, 0.985
SCOUTED_SHARE = 0.95
"""A scouted configuration is looked at a little below its rough capacity."""


def bound(choice: Choice, deployment: Deployment, load: Load, question: Question) -> Choice:
    """With the objective that no schedule beats, or REJECTED where a limit breaks even when idle."""
    top = ceiling(deployment, load.sample(), question.promises.limits)
    if top.impossible:
        metric, reason = next(iter(top.impossible.items()))
        return replace(choice, status=Status.REJECTED, reason=reason, region=f"breaks {metric} when idle")
    best = math.nan
    if question.objective.name == "requests_per_dollar":
        best = top.rate_rps * 3600 / choice.price_per_hour_usd
    return replace(choice, bound=best, bound_rps=top.rate_rps)


def scout(choice: Choice, deployment: Deployment, load: Load, question: Question, least: float = math.nan) -> Choice:
    """With a rough capacity, and its numbers there; PRUNED where it breaks a limit at the ``least`` objective."""
    rate = least * choice.price_per_hour_usd / 3600
    if question.objective.name == "requests_per_dollar" and rate < choice.bound_rps:
        seen = breaks_at(rate, deployment, load, question.promises)
        if seen.binds:
            return _below(choice, seen, least, question)
    found = scout_capacity(deployment, load, question.promises)
    if not found.rate_rps.value > 0:
        return _rejected(choice, found)
    rate = SCOUTED_SHARE * found.rate_rps.value
    at = point_at(rate, deployment, load, question.promises, found.requests, range(1), question.level, found.effort)
    return _with(choice, found, at, question, Status.SCOUTED)


def rank(choice: Choice, deployment: Deployment, load: Load, question: Question, least: float = math.nan) -> Choice:
    """With its capacity to the precision that was asked for, and its load curve; SCOUTED if below ``least``."""
    asked = question.objective.name == "requests_per_dollar" and not math.isnan(least)
    least_rps = least * choice.price_per_hour_usd / 3600 if asked else 0.0
    found = capacity(
        deployment,
        load,
        question.promises,
        precision=question.precision,
        seeds=question.seeds,
        level=question.level,
        least_rps=least_rps,
    )
    if not found.rate_rps.value > 0:
        return _rejected(choice, found)
    if not found.rate_rps.has_interval and found.rate_rps.value < least_rps:
        rough = Estimate(found.rate_rps.value * 3600 / choice.price_per_hour_usd)
        return _spent(replace(choice, objective=rough, capacity_rps=found.rate_rps, binds=found.binds), found)
    seeds = range(min(CURVE_SEEDS, question.seeds, load.seeds or CURVE_SEEDS))

    def measure(rate_rps: float, share: float = 1.0) -> Point:
        requests = max(MIN_REQUESTS, int(found.requests * share))
        return point_at(rate_rps, deployment, load, question.promises, requests, seeds, question.level, found.effort)

    at = measure(lower_end(found))
    for _ in range(STEPS_DOWN):
        if not at.satisfied:  # chance had it at the crossing; the operating point is one that holds
            at = measure(at.rate_rps * STEP_DOWN)
    return replace(_with(choice, found, at, question, Status.RANKED), points=curve(at, measure))


def _with(choice: Choice, found: Capacity, at: Point, question: Question, status: Status) -> Choice:
    if question.objective.name == "energy":
        objective = at.values["energy_j_per_output_token"]
    else:
        objective = scaled(found.rate_rps, 3600 / choice.price_per_hour_usd)
    known = replace(
        choice,
        status=status,
        objective=objective if status is Status.RANKED else Estimate(objective.value),
        capacity_rps=found.rate_rps,
        bound_rps=found.ceiling.rate_rps,
        at=at,
        points=(at,),
        binds=found.binds,
    )
    return _spent(known, found)


def _rejected(choice: Choice, found: Capacity) -> Choice:
    lowest = found.ceiling.rate_rps * FLOOR_SHARE
    rejected = replace(
        choice,
        status=Status.REJECTED,
        reason=f"{found.binds} breaks at every rate that was tried, down to {lowest:.3g} requests a second",
        region=f"breaks {found.binds} at any rate",
    )
    return _spent(rejected, found)


def _below(choice: Choice, seen: Capacity, least: float, question: Question) -> Choice:
    unit = question.objective.unit
    pruned = replace(
        choice,
        bound=least,
        reason=f"it breaks {seen.binds} already at the rate that would give {least:.4g} {unit}",
        region=f"breaks {seen.binds} far below the best",
        binds=seen.binds,
    )
    return _spent(pruned, seen)


def _spent(choice: Choice, found: Capacity) -> Choice:
    return replace(
        choice,
        simulations=choice.simulations + found.effort.simulations,
        requests=choice.requests + found.effort.requests,
    )


def shift(choice: Choice, deployment: Deployment, load: Load, question: Question) -> Choice:
    """A rough objective: capacity on a few seeds, from what is known of it."""
    found = rough_capacity(deployment, load, question.promises, choice.capacity_rps.value)
    rate = found.rate_rps.value
    value = rate * 3600 / choice.price_per_hour_usd if rate > 0 else math.nan
    if question.objective.name == "energy" and choice.at is not None:
        value = choice.objective.value  # known at the asked bound only
    return _spent(replace(choice, objective=Estimate(value)), found)
