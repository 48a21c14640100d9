"""Objectives at the largest rate that holds the limits: requests per dollar, energy."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from lengthwise.schema.deployment import Deployment
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Choice, Point, Standing
from lengthwise.search.bounds import ceiling
from lengthwise.search.capacity import Capacity, capacity, rough_capacity
from lengthwise.search.capacity import scout as scout_capacity
from lengthwise.search.curve import curve, point_at, scaled
from lengthwise.search.load import Load
from lengthwise.search.objectives import Question

CURVE_SEEDS = 4
SCOUTED_SHARE = 0.95
"""A scouted configuration is looked at a little below its rough capacity."""


def bound(choice: Choice, deployment: Deployment, load: Load, question: Question) -> Choice:
    """With the objective that no schedule beats, or REJECTED where a limit breaks even when idle."""
    top = ceiling(deployment, load.sample(), question.promises.limits)
    if top.impossible:
        metric, reason = next(iter(top.impossible.items()))
        return replace(choice, standing=Standing.REJECTED, reason=reason, region=f"breaks {metric} when idle")
    best = math.nan
    if question.objective.name == "requests_per_dollar":
        best = top.rate_rps * 3600 / choice.price_per_hour_usd
    return replace(choice, bound=best, bound_rps=top.rate_rps)


def scout(choice: Choice, deployment: Deployment, load: Load, question: Question) -> Choice:
    """With a rough capacity, and its numbers there."""
    found = scout_capacity(deployment, load, question.promises)
    if not found.rate_rps.value > 0:
        return _rejected(choice, found)
    rate = SCOUTED_SHARE * found.rate_rps.value
    at = point_at(
        rate, deployment, load, question.promises, found.requests, range(1), question.level, found.effort
    )
    return _with(choice, found, at, question, Standing.SCOUTED)


def rank(choice: Choice, deployment: Deployment, load: Load, question: Question) -> Choice:
    """With its capacity to the precision that was asked for, and its load curve."""
    found = capacity(
        deployment,
        load,
        question.promises,
        precision=question.precision,
        seeds=question.seeds,
        level=question.level,
    )
    if not found.rate_rps.value > 0:
        return _rejected(choice, found)
    measure = partial(
        point_at,
        deployment=deployment,
        load=load,
        promises=question.promises,
        requests=found.requests,
        seeds=range(min(CURVE_SEEDS, question.seeds, load.seeds or CURVE_SEEDS)),
        level=question.level,
        effort=found.effort,
    )
    at = measure(found.rate_rps.low)
    return replace(_with(choice, found, at, question, Standing.RANKED), points=curve(at, measure))


def _with(choice: Choice, found: Capacity, at: Point, question: Question, standing: Standing) -> Choice:
    if question.objective.name == "energy":
        objective = at.values["energy_j_per_output_token"]
    else:
        objective = scaled(found.rate_rps, 3600 / choice.price_per_hour_usd)
    return replace(
        choice,
        standing=standing,
        objective=objective if standing is Standing.RANKED else Estimate(objective.value),
        capacity_rps=found.rate_rps,
        bound_rps=found.ceiling.rate_rps,
        at=at,
        points=(at,),
        binds=found.binds,
        simulations=choice.simulations + found.effort.simulations,
        requests=choice.requests + found.effort.requests,
    )


def _rejected(choice: Choice, found: Capacity) -> Choice:
    return replace(
        choice,
        standing=Standing.REJECTED,
        reason=f"{found.binds} breaks at every rate that was tried, down to {found.ceiling.rate_rps:.3g}/s x 0.001",
        region=f"breaks {found.binds} at any rate",
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
    return replace(
        choice,
        objective=Estimate(value),
        simulations=choice.simulations + found.effort.simulations,
        requests=choice.requests + found.effort.requests,
    )
