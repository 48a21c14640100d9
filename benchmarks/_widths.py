"""How wide intervals are and what that costs: a share of values that are held tells neither."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Each = Mapping[str, Mapping[str, Sequence[float]]]
"""By load, then by metric: measured, said, low, high, in seconds."""


def of_each(each: Each, level: float) -> dict[str, Any]:
    """How many times its lower end the upper one of an interval is, the widest of them by name, and their score.

    Scores and errors are in logs, so that seconds of all metrics count alike.
    """
    named = {f"{metric} of {load}": ends for load, of in each.items() for metric, ends in of.items()}
    times = {name: high / low for name, (_, _, low, high) in named.items()}
    widest = max(times, key=lambda name: times[name])
    measured, _, low, high = named[widest]
    logs = [[math.log(seconds) for seconds in ends] for ends in named.values()]
    score = statistics.fmean(interval_score(one[0], one[2], one[3], level) for one in logs)
    error = statistics.fmean(abs(one[1] - one[0]) for one in logs)
    return {
        "median_times": round(statistics.median(times.values()), 2),
        "widest": widest,
        "widest_times": round(times[widest], 2),
        "widest_from": round(low / measured, 3),
        "widest_to": round(high / measured, 3),
        "interval_score": round(score, 4),
        "point_error": round(error, 4),
        "score_over_error": round(score / error, 2) if error > 0 else None,
        "sharp_score_over_error": round(sharp(level), 2),
    }


def interval_score(value: float, low: float, high: float, level: float) -> float:
    """The width, and ``2 / (1 - level)`` times as much as the value lies outside (Gneiting and Raftery 2007, 6.2)."""
    outside = max(0.0, low - value) + max(0.0, value - high)
    return high - low + 2 / (1 - level) * outside


def sharp(level: float) -> float:
    """The score over the mean absolute error where errors are normal and intervals exactly as wide as they need be.

    The expected score is ``4 pdf(z) / (1 - level)`` standard deviations, the error ``sqrt(2 / pi)``.
    """
    normal = statistics.NormalDist()
    at = normal.inv_cdf(0.5 + level / 2)
    return 4 * normal.pdf(at) / (1 - level) / math.sqrt(2 / math.pi)
