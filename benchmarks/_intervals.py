"""Summaries of errors and 95 % intervals, of shares, of groups that belong together, and of repeated runs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Repeat = tuple[Floats, Floats]
"""[draws] seconds of one run, measured and simulated."""

DRAWS, DRAWS_OF_A_RUN, BLOCKS = 4000, 400, 12
"""Draws of repeats, draws within a run, and the number of blocks of neighbouring requests of a run."""
GROUP_DRAWS, MIN_GROUPS = 10_000, 5
"""Fewer groups have no interval: draws of two or three of them have little information."""
SUMMARY_DRAWS = 500
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95)


class Interval(NamedTuple):
    """A measured number in seconds, its prediction, and both ends of the interval."""

    measured_s: float
    said_s: float
    low_s: float
    high_s: float

    def rounded(self) -> list[float]:
        return [float(f"{s:.4g}") for s in self]


def sides(intervals: Sequence[Interval]) -> dict[str, int]:
    """Return the number of intervals, of those that contain the measured number, and of misses on each side."""
    below, above = sum(o.measured_s < o.low_s for o in intervals), sum(o.measured_s > o.high_s for o in intervals)
    return {"n": len(intervals), "satisfied": len(intervals) - below - above, "below": below, "above": above}


def exact_interval(hits: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of independent trials (Clopper and Pearson, 1934): never too narrow."""
    from scipy.stats import binomtest

    return tuple(map(float, binomtest(hits, n).proportion_ci()))


def share_interval(groups: Mapping[Any, Sequence[bool]], seed: int = 0) -> tuple[float, float] | None:
    """Return the 95 % interval of the share of hits; None where draws do not differ, as of one group alone.

    A cluster bootstrap (Davison and Hinkley 1997, 3.8): members of a group share the error of their model, so that
    complete groups are drawn. Of few groups such an interval is rough, and rather too narrow.
    """
    hits, sizes = (np.array([of(groups[key]) for key in sorted(groups)]) for of in (sum, len))
    often = np.random.default_rng(seed).multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), GROUP_DRAWS)
    low, high = np.quantile((often @ hits) / (often @ sizes), [0.025, 0.975])
    return (float(low), float(high)) if low < high else None


def of_run(measured_s: Floats, simulated_s: Floats, q: float, seed: int) -> Repeat:
    """Return [draws] quantiles of a run's requests; complete blocks of neighbours are drawn, the same on both sides.

    Requests that follow each other wait for each other. Seconds are [n] in the order of arrival, NaN without a value.
    """
    rng = np.random.default_rng(seed)
    blocks = np.array_split(np.arange(len(measured_s)), min(BLOCKS, len(measured_s)))
    found = []
    for _ in range(DRAWS_OF_A_RUN):
        rows = np.concatenate([blocks[k] for k in rng.integers(len(blocks), size=len(blocks))])
        sides = [side[rows][np.isfinite(side[rows])] for side in (measured_s, simulated_s)]
        if all(map(len, sides)):
            found.append([np.quantile(side, q) for side in sides])
    drawn = np.array(found).reshape(-1, 2)
    return drawn[:, 0], drawn[:, 1]


def of_repeats(loads: Mapping[str, Sequence[Repeat]], value: float) -> tuple[float, float] | None:
    """Return the interval of the median over loads of their absolute errors; None where a load was measured once.

    Repeats of a load are drawn, and of each of them one of its own draws; a load's error is that of the medians.
    Of few repeats such an interval is rough, and rather too narrow.
    """
    if not loads or min(map(len, loads.values())) < 2:
        return None
    rng = np.random.default_rng(0)
    errors = []
    for repeats in loads.values():
        which = rng.integers(len(repeats), size=(DRAWS, len(repeats)))
        at = rng.random(which.shape)
        seconds = np.empty((2, *which.shape))
        for k, repeat in enumerate(repeats):
            own = which == k
            rows = (at[own] * len(repeat[0])).astype(np.int64)
            seconds[:, own] = repeat[0][rows], repeat[1][rows]
        measured_s, simulated_s = np.median(seconds, axis=2)
        errors.append(simulated_s / measured_s - 1)
    low, high = np.quantile(np.median(np.abs(errors), axis=0), [0.025, 0.975])
    return min(float(low), value), max(float(high), value)


def of_scores(runs: Mapping[str, Mapping[str, Sequence[float]]]) -> tuple[float, float] | None:
    """Return the interval of a mean of absolute errors, each (before, after, low, high), as if all were off together.

    Statistics of one run are of the same requests: as independent ones they would even out what they share.
    """
    ends = [of[2:] for scores in runs.values() for of in scores.values()]
    if not ends or any(len(of) != 2 for of in ends):
        return None
    nearest = [0.0 if low <= 0 <= high else min(abs(low), abs(high)) for low, high in ends]
    return float(np.mean(nearest)), float(np.mean([max(abs(low), abs(high)) for low, high in ends]))


def described(error: Floats) -> dict[str, Any]:
    """Return count, MAPE, bias and quantiles of absolute errors."""
    if not len(error):
        return {"points": 0}
    numbers = {"mape": np.abs(error).mean(), "bias": np.median(error)}
    numbers |= {f"p{round(100 * q)}": np.quantile(np.abs(error), q) for q in QUANTILES}
    return {"points": len(error)} | {name: round(float(number), 4) for name, number in numbers.items()}


def summary(error: Floats, clusters: Sequence[Any]) -> dict[str, Any]:
    """Return the median of absolute errors with an interval over complete clusters, and their description."""
    size, rng = np.abs(error), np.random.default_rng(0)
    groups = [size[[c == name for c in clusters]] for name in sorted(set(clusters))]
    draws = rng.integers(len(groups), size=(SUMMARY_DRAWS, len(groups)))
    medians = [np.median(np.concatenate([groups[i] for i in drawn])) for drawn in draws]
    interval = [round(float(q), 4) for q in np.quantile(medians, [0.025, 0.975])]
    return {"value": round(float(np.median(size)), 4), "interval": interval, **described(error)}


def by(keys: Sequence[str], error: Floats) -> dict[str, dict[str, Any]]:
    """Return the description of the errors of each key."""
    return {name: described(error[np.array(keys) == name]) for name in sorted(set(keys))}
