"""Where to cut service times into bins."""

from __future__ import annotations

import numpy as np

from lengthwise.schema.errors import InputError
from lengthwise.theory.sampled import SampledTimes
from lengthwise.theory.service import ExponentialTimes, Floats, ServiceTimes, UniformTimes

MOST_CELLS = 1500
"""Cuts are learned among so many cells of a distribution at most: the work grows with their square."""


def checked_counts(batch: int, bins: int = 1) -> None:
    """Raises InputError where a batch or a number of bins makes no sense."""
    checked_count("batch", batch)
    checked_count("bins", bins)


def checked_count(name: str, value: int) -> None:
    """Raises InputError where a number of things, by this name, makes no sense."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1; it is {value}")


def equal_mass(times: ServiceTimes, bins: int) -> Floats:
    """[k - 1] cuts that leave the same share of requests in every bin (of a sample, as nearly as ties allow)."""
    checked_counts(1, bins)
    return times.quantile(np.arange(1, bins) / bins)


def uniform_optimal(times: UniformTimes, bins: int) -> Floats:
    """[k - 1] cuts l_i = low + (i / k)(high - low), the best of uniform times (Lemma 4.1)."""
    checked_counts(1, bins)
    return times.low_s + (times.high_s - times.low_s) * np.arange(1, bins) / bins


def exponential_steps(batch: int, bins: int) -> Floats:
    """[k - 1] x_1 .. x_{k-1}: x_{k-1} = ln H_B, and downwards x_i = ln(1 + x_{i+1}) (Lemma A.1)."""
    checked_counts(batch, bins)
    steps = np.zeros(bins - 1)
    following = np.sum(1 / np.arange(1, batch + 1)) - 1
    for i in range(bins - 2, -1, -1):
        steps[i] = following = np.log1p(following)
    return steps


def exponential_recursion(times: ExponentialTimes, batch: int, bins: int) -> Floats:
    """[k - 1] cuts (x_1 + .. + x_i) / rate, which minimise the bound of Appendix A.4 (Lemma A.1)."""
    return np.cumsum(exponential_steps(batch, bins)) / times.rate_per_s


def learned(times: ServiceTimes, batch: int, bins: int) -> Floats:
    """[k - 1] cuts with the least expected batch time, for any distribution.

    Minimises the sum over bins of P(bin) E[max of a batch in the bin] by dynamic programming over the
    distribution's cells (at most ``MOST_CELLS``); never worse than equal masses. Fewer distinct values
    than bins leave bins empty: their cuts repeat.
    """
    checked_counts(batch, bins)
    values, weights = times.cells(MOST_CELLS)
    picked = _best_ends(_segment_costs(values, weights, batch), bins)
    cuts = _between(values, picked, times)
    cuts = np.pad(cuts, (0, bins - 1 - len(cuts)), constant_values=float(values[-1]))
    even = equal_mass(times, bins)
    return min((cuts, even), key=lambda c: _batch_s(times, c, batch))


def _segment_costs(values: Floats, weights: Floats, batch: int) -> Floats:
    """[m + 1, m + 1] mass x E[max] of one bin of the cells a .. b - 1; infinite where a >= b.

    With F the distribution within the bin, E[max] = v_b - sum F_j^B (v_{j+1} - v_j). The sum follows
    the bin's growing end: R(b + 1) = (R(b) + gap) (mass(b) / mass(b + 1))^B, which never underflows.
    """
    m = len(values)
    costs = np.full((m + 1, m + 1), np.inf)
    mass, held = np.zeros(m), np.zeros(m)  # by first cell of the bin
    for b in range(1, m + 1):
        grown = mass[:b] + weights[b - 1]
        gap = values[b - 1] - values[b - 2] if b > 1 else 0.0
        held[:b] = (held[:b] + gap) * (mass[:b] / grown) ** batch
        mass[:b] = grown
        costs[:b, b] = grown * (values[b - 1] - held[:b])
    return costs


def _best_ends(costs: Floats, bins: int) -> list[int]:
    """Ends (exclusive cells) of the bins but the last, along the cheapest way of at most ``bins`` steps."""
    least = costs[0].copy()
    ways = []
    for _ in range(min(bins, len(costs) - 1) - 1):
        through = least[:, None] + costs
        back = np.argmin(through, axis=0)
        least = through[back, np.arange(len(costs))]
        ways.append(back)
    ends, at = [], len(costs) - 1
    for back in reversed(ways):
        at = int(back[at])
        ends.append(at)
    return ends[::-1]


def _between(values: Floats, ends: list[int], times: ServiceTimes) -> Floats:
    """Cuts after those cells: at the last value of a sample's cell, else between two cells."""
    if isinstance(times, SampledTimes) and len(values) < MOST_CELLS:
        return np.array([values[end - 1] for end in ends])
    return np.array([(values[end - 1] + values[end]) / 2 for end in ends])


def _batch_s(times: ServiceTimes, cuts_s: Floats, batch: int) -> float:
    masses = times.masses(cuts_s)
    one = np.eye(len(masses))
    return float(sum(p * times.expected_max_s(cuts_s, one[i], batch) for i, p in enumerate(masses) if p > 0))
