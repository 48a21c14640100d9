"""The makespan of an offline batch: all requests are there at once."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from lengthwise import engine
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Choice, Status
from lengthwise.search.bounds import ceiling
from lengthwise.search.capacity_search import point_of
from lengthwise.search.limits import Promises, Question
from lengthwise.search.load import Load
from lengthwise.search.measurement import Window, mean_point


def bound(choice: Choice, deployment: Deployment, load: Load, question: Question) -> Choice:
    """With the shortest time in which any schedule would be done, of any seed."""
    batches = [load.batch(seed, question.requests) for seed in _seeds(load, question)]
    rates = [ceiling(deployment, batch).rate_rps for batch in batches]
    shortest_s = min(len(batch) / rate for batch, rate in zip(batches, rates, strict=True))
    return replace(choice, bound=shortest_s, bound_rps=max(rates))


def scout(choice: Choice, deployment: Deployment, load: Load, question: Question, least: float = math.nan) -> Choice:
    """One seed."""
    del least  # one run tells the makespan
    return _run(choice, deployment, load, question, range(1), Status.SCOUTED)


def rank(choice: Choice, deployment: Deployment, load: Load, question: Question, least: float = math.nan) -> Choice:
    """The mean over seeds."""
    del least  # nothing is saved by knowing less
    return _run(choice, deployment, load, question, _seeds(load, question), Status.RANKED)


def _seeds(load: Load, question: Question) -> range:
    return range(min(question.seeds, load.seeds or question.seeds))


def _run(
    choice: Choice, deployment: Deployment, load: Load, question: Question, seeds: range, status: Status
) -> Choice:
    windows = []
    for seed in seeds:
        records = engine.simulate(load.batch(seed, question.requests), deployment, seed=seed, keep_steps=0)
        windows.append(Window(deployment, records, None, -1.0, records.end_s))
    ends = [{"makespan": window.end_s} for window in windows]
    makespan = mean_point(ends, question.level)["makespan"]
    requests = len(windows[0].records.requests.arrival_s)
    at = point_of(requests / makespan.value, windows, Promises(()), question.level)
    broken = [limit for limit in question.promises.limits if not limit.is_satisfied(at.value(limit.metric))]
    done = replace(
        choice,
        status=Status.REJECTED if broken else status,
        reason=f"{broken[0].metric} is {at.value(broken[0].metric):.3g}" if broken else "",
        region=f"breaks {broken[0].metric}" if broken else "",
        objective=makespan if status is Status.RANKED else Estimate(makespan.value),
        at=at,
        points=(at,),
        binds="throughput",
        simulations=choice.simulations + len(windows),
        requests=choice.requests + len(windows) * requests,
    )
    served = at.value("served")
    if np.isfinite(served) and served < 1:
        reason = f"{1 - served:.1%} of the requests can never fit"
        done = replace(done, status=Status.REJECTED, reason=reason, region="does not serve all requests")
    return done
