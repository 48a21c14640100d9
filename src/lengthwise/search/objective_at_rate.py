"""Objectives at a given rate: the cost or the GPUs that hold it, goodput, energy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lengthwise.schema.deployment import Deployment
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Choice, Point, Status
from lengthwise.search.bounds import ceiling
from lengthwise.search.capacity_search import MIN_REQUESTS, Effort, Trials, curve, point_at, run_length
from lengthwise.search.capacity_search import scout as scout_capacity
from lengthwise.search.limits import AT_RATE, Question
from lengthwise.search.load import Load

CURVE_SEEDS = 4
MANY = 3
"""So many times the replicas that one alone asks for do not help: then something else is lacking."""

LENGTHS = 8
"""Runs of a ranked configuration are so many times longer than a scouting one."""


def bound(choice: Choice, deployment: Deployment, load: Load, question: Question) -> Choice:
    """With the objective that no schedule beats, or REJECTED where no number of replicas holds."""
    rate = _rate(question)
    top = ceiling(deployment, load.sample(), question.promises.limits)
    if top.impossible:
        metric, reason = next(iter(top.impossible.items()))
        return replace(choice, status=Status.REJECTED, reason=reason, region=f"breaks {metric} when idle")
    if not _finds_replicas(choice, question):
        if question.objective.name in AT_RATE and top.rate_rps < rate:
            reason = f"it serves at most {top.rate_rps:.3g} requests a second"
            return replace(choice, status=Status.REJECTED, reason=reason, region="cannot serve the rate")
        best = _objective(deployment, question) if question.objective.name in AT_RATE else math.nan
        return replace(choice, bound=best, bound_rps=top.rate_rps)
    least = math.ceil(rate / top.rate_rps)
    sized = _resized(deployment, least)
    if sized.parallel.gpus > question.max_gpus:
        return _too_many(choice, sized, question)
    return replace(choice, bound=_objective(sized, question), bound_rps=top.rate_rps)


def scout(choice: Choice, deployment: Deployment, load: Load, question: Question, least: float = math.nan) -> Choice:
    """A rough number of replicas and one run there."""
    del least  # bounds tell enough: replicas are whole
    effort = Effort()
    if _finds_replicas(choice, question):
        alone = scout_capacity(deployment, load, question.promises)
        effort = alone.effort
        if not alone.rate_rps.value > 0:
            return _broken(choice, alone.binds, effort, "at any rate")
        deployment = _resized(deployment, math.ceil(_rate(question) / alone.rate_rps.value))
        if deployment.parallel.gpus > question.max_gpus:
            return _spent(_too_many(choice, deployment, question), effort)
    return _measured(choice, deployment, load, question, effort, range(1), 1, Status.SCOUTED)


def rank(choice: Choice, deployment: Deployment, load: Load, question: Question, least: float = math.nan) -> Choice:
    """The fewest replicas that hold the rate (where they are asked for), and the load curve."""
    del least  # nothing is saved by knowing less
    effort, certain = Effort(), True
    seeds = range(min(question.seeds, load.seeds or question.seeds))
    if _finds_replicas(choice, question):
        size = _Sizing(deployment, load, question, seeds, effort)
        replicas, certain = size.fewest(max(choice.gpus // deployment.parallel.gpus, 1))
        deployment = _resized(deployment, replicas)
        if deployment.parallel.gpus > question.max_gpus:
            return _spent(_too_many(choice, deployment, question), effort)
    ranked = _measured(choice, deployment, load, question, effort, seeds, LENGTHS, Status.RANKED)
    if ranked.status is Status.RANKED and question.objective.name in AT_RATE:
        step = _objective(deployment, question) / deployment.parallel.replicas
        off = 0.0 if certain or not _finds_replicas(choice, question) else step
        ranked = replace(ranked, objective=Estimate(ranked.objective.value, off))
    return ranked


@dataclass(frozen=True)
class _Sizing:
    """How many replicas hold a rate."""

    deployment: Deployment
    load: Load
    question: Question
    seeds: range
    effort: Effort

    def fewest(self, guess: int) -> tuple[int, bool]:
        """The fewest replicas that hold, and whether the seeds leave no doubt of it."""
        replicas, low, high, step = guess, 0, 0, 1
        strains: dict[int, tuple[float, float]] = {}
        last = min(max(1, self.question.max_gpus // self.deployment.parallel.gpus), MANY * (guess + 1))
        while not high or high - low > 1:
            strains[replicas] = self._strain(replicas)
            if strains[replicas][0] <= 1:
                high = replicas
            elif replicas > last:
                return replicas, False  # it is not replicas that it lacks
            else:
                low = replicas
            replicas = (low + high) // 2 if low and high else max(1, high - step) if high else low + step
            step *= 2
        sure = [abs(strain - 1) > half for r, (strain, half) in strains.items() if r in (low, high)]
        return (high or low), all(sure)

    def _strain(self, replicas: int) -> tuple[float, float]:
        rate = _rate(self.question)
        deployment = _resized(self.deployment, replicas)
        requests = _requests(deployment, self.load, self.question, LENGTHS)
        trials = Trials(deployment, self.load, self.question.promises, requests, self.seeds, self.effort)
        strain = trials.strain(rate)
        return strain, trials.warning(rate, self.question.level)


def _measured(
    choice: Choice,
    deployment: Deployment,
    load: Load,
    question: Question,
    effort: Effort,
    seeds: range,
    lengths: int,
    status: Status,
) -> Choice:
    """The choice with its numbers at the rate; REJECTED if they break a limit."""
    requests = _requests(deployment, load, question, lengths)

    def measure(rate_rps: float, share: float = 1.0, most: int = CURVE_SEEDS) -> Point:
        few = max(MIN_REQUESTS, int(requests * share))
        return point_at(rate_rps, deployment, load, question.promises, few, seeds[:most], question.level, effort)

    at = measure(_rate(question), most=len(seeds))
    sized = replace(choice, gpus=deployment.parallel.gpus, price_per_hour_usd=deployment.price_per_hour_usd)
    if not at.satisfied and (status is Status.RANKED or not _finds_replicas(choice, question)):
        return _broken(replace(sized, at=at, points=(at,)), _worst(at, question), effort, "at the rate")
    points: tuple[Point, ...] = (at,)
    if status is Status.RANKED:
        points = curve(at, measure)
    objective = _read(at, deployment, question)
    return _spent(
        replace(
            sized,
            status=status,
            objective=objective if status is Status.RANKED else Estimate(objective.value),
            at=at,
            points=points,
            binds=_worst(at, question),
        ),
        effort,
    )


def _worst(at: Point, question: Question) -> str:
    """The limit nearest to its bound at a point."""
    limits = question.promises.limits
    if not limits:
        return "throughput"

    def used(metric: str, bound: float, at_least: bool) -> float:
        value = at.value(metric)
        return bound / max(value, 1e-12) if at_least else value / bound

    return max(limits, key=lambda limit: used(limit.metric, limit.bound, limit.at_least)).metric


def _read(at: Point, deployment: Deployment, question: Question) -> Estimate:
    if question.objective.name == "goodput":
        return at.values["good_requests_per_s"]
    if question.objective.name == "energy":
        return at.values["energy_j_per_output_token"]
    return Estimate(_objective(deployment, question), 0.0)


def _objective(deployment: Deployment, question: Question) -> float:
    return float(
        deployment.parallel.gpus if question.objective.name == "fewest_gpus" else deployment.price_per_hour_usd
    )


def _requests(deployment: Deployment, load: Load, question: Question, lengths: int) -> int:
    top = ceiling(deployment, load.sample(), question.promises.limits)
    return run_length(replace(top, rate_rps=_rate(question)), question.promises) * lengths


def _rate(question: Question) -> float:
    assert question.rate_rps is not None  # the question has checked it
    return question.rate_rps


def _finds_replicas(choice: Choice, question: Question) -> bool:
    return question.objective.name in AT_RATE and choice.settings.get("deployment.replicas", "auto") == "auto"


def _resized(deployment: Deployment, replicas: int) -> Deployment:
    return replace(deployment, parallel=replace(deployment.parallel, replicas=replicas))


def _too_many(choice: Choice, deployment: Deployment, question: Question) -> Choice:
    return replace(
        choice,
        gpus=deployment.parallel.gpus,
        price_per_hour_usd=deployment.price_per_hour_usd,
        status=Status.REJECTED,
        reason=f"the rate takes {deployment.parallel.gpus} GPUs, and there may be {question.max_gpus}",
        region=f"takes more than {question.max_gpus} GPUs",
    )


def _broken(choice: Choice, metric: str, effort: Effort, where: str) -> Choice:
    rejected = replace(
        choice, status=Status.REJECTED, reason=f"{metric} breaks {where}", region=f"breaks {metric} {where}"
    )
    return _spent(rejected, effort)


def _spent(choice: Choice, effort: Effort) -> Choice:
    return replace(
        choice, simulations=choice.simulations + effort.simulations, requests=choice.requests + effort.requests
    )
