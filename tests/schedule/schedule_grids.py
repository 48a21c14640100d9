"""Random instances of the search for a schedule, on whole grids that can be looked through."""

from __future__ import annotations

import numpy as np

from lengthwise.schedule.optimizer import Perf, Tolerances, Variable, evaluate_grid

SHAPES = [(1,), (2,), (9,), (40,), (1, 7), (6, 9), (13, 4), (5, 4, 6), (3, 1, 5), (4, 3, 3, 4), (3, 2, 4, 2, 3)]


class Grid:
    """Latency and throughput on a grid, and the variables that lead to it in mixed directions."""

    def __init__(self, latency_s, throughput_rps):
        self.latency_s, self.throughput_rps = latency_s, throughput_rps
        self.variables = [
            Variable(f"x{axis}", tuple(range(3, 3 + 2 * length, 2)), rising=axis % 2 == 0)
            for axis, length in enumerate(latency_s.shape)
        ]
        self.requested = []

    def perf(self, points):
        self.requested += [tuple(point) for point in points.tolist()]
        places = (points - 3) // 2
        for axis in range(1, points.shape[1], 2):
            places[:, axis] = self.latency_s.shape[axis] - 1 - places[:, axis]
        at = tuple(places.T)
        return Perf(self.latency_s[at], self.throughput_rps[at])


def monotone(rng, shape, kind):
    """Values that no step upwards lowers."""
    if kind == "flat":
        return np.full(shape, 2.0)
    steps = rng.exponential(size=shape)
    if kind == "steps":  # long plateaus and many ties
        steps = (rng.random(shape) < 0.15).astype(float)
    for axis in range(len(shape)):
        steps = np.cumsum(steps, axis=axis)
    return 1 + (np.floor(steps) if kind == "steps" else steps)


def shaken(rng, values, share):
    """As monotone as before, up to this share between any two points."""
    return values * (1 + share * rng.random(values.shape))


def smooth(rng, shape):
    """A latency and a throughput as a schedule's: batches that fill up, times that grow."""
    axes = np.meshgrid(*[(np.arange(n) + 1) / n for n in shape], indexing="ij")
    throughput, latency = np.ones(shape), np.full(shape, 0.02)
    for axis in axes:
        throughput = throughput * (axis + rng.uniform(0, 0.5)) ** rng.uniform(0.05, 1)
        latency = latency + rng.uniform(0.1, 1) * axis ** rng.uniform(0.3, 2)
    return latency, throughput


def min_tolerances(perf, variables):
    """The minimum tolerances under which branch and bound is exact, over every pair of feasible points."""
    grid = evaluate_grid(perf, variables)
    feasible = np.isfinite(grid.latency_s)

    def excess(values):
        highest = np.where(feasible, values, 0.0)
        for axis, variable in enumerate(variables):
            if variable.rising is not None:
                highest = np.maximum.accumulate(highest, axis=axis)
        above = feasible & (highest > values)
        with np.errstate(divide="ignore"):
            return float((highest[above] / values[above] - 1).max(initial=0.0))

    return Tolerances(excess(grid.throughput_rps), excess(grid.latency_s))
