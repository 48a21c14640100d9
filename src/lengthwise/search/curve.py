"""Load curves: a deployment's numbers at several rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from lengthwise.schema.deployment import Deployment
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Point
from lengthwise.search.capacity import Capacity, lower_end
from lengthwise.search.limits import Promises, good_rate_rps, good_share
from lengthwise.search.load import Load
from lengthwise.search.points import mean_point, values_of
from lengthwise.search.trials import Effort
from lengthwise.search.window import Window, observe

FRACTIONS = (0.25, 0.5, 0.7, 0.85, 1.0, 1.1, 1.25)
"""Of the operating rate; those above it show what a looser limit would buy."""


def point_at(
    rate_rps: float,
    deployment: Deployment,
    load: Load,
    promises: Promises,
    requests: int,
    seeds: Iterable[int],
    level: float,
    effort: Effort,
) -> Point:
    """A deployment's numbers at one rate, means over seeds."""
    windows = []
    for seed in seeds:
        workload = load.at(seed, requests, rate_rps)
        windows.append(observe(workload, deployment, seed))
        effort.simulations += 1
        effort.requests += len(workload)
    return point_of(rate_rps, windows, promises, level)


def point_of(rate_rps: float, windows: list[Window], promises: Promises, level: float) -> Point:
    """The numbers of windows of several seeds; whether the limits hold is judged on all of them together."""
    runs = [_values(window, promises) for window in windows]
    strains = np.array([list(promises.strains(window).values()) for window in windows])
    held = not promises.limits or bool(strains.mean(axis=0).max() <= 1)
    return Point(rate_rps, mean_point(runs, level), held)


def curve(at: Point, measure: Callable[[float, float], Point]) -> tuple[Point, ...]:
    """Points at FRACTIONS of the operating point's rate, in that order, itself among them.

    ``measure`` is given a rate and a share of the operating point's requests: at a lower rate a run of as
    many seconds has fewer, and beside the operating point half as long a run will do.
    """
    return tuple(at if share == 1 else measure(at.rate_rps * share, share / 2) for share in FRACTIONS)


def _values(window: Window, promises: Promises) -> dict[str, float]:
    values = values_of(window, promises.guard_s, promises.quantiles)
    if promises.slo is not None:
        values["goodput"] = good_share(window, promises.slo, promises.guard_s)
        values["good_requests_per_s"] = good_rate_rps(window, promises.slo)
    return values


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """The estimate in another unit."""
    return Estimate(estimate.value * factor, estimate.half_width * factor)


def point_at_capacity(
    deployment: Deployment, load: Load, promises: Promises, found: Capacity, seeds: int, level: float = 0.95
) -> Point | None:
    """All numbers at the lower end of a capacity's interval; None where nothing holds."""
    rate = lower_end(found)
    if not rate > 0:
        return None
    some = range(min(seeds, load.seeds or seeds))
    return point_at(rate, deployment, load, promises, found.requests, some, level, found.effort)
