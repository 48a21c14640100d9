"""One request's predicted length as a row of quantiles, and what follows from it in microseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lengthwise.gateway.request import MOST_TOKENS, Floats, Forecast
from lengthwise.predict.distribution import LEVELS, pareto_tail

_MEDIAN, _P80, _P90 = (int(np.searchsorted(LEVELS, p)) for p in (0.5, 0.8, 0.9))
_TAIL = pareto_tail([1.0], LEVELS)[0]

Statistic = Callable[[Floats], float]


def _weights() -> Floats:
    """[q] what each quantile counts in the mean."""
    widths = np.diff(LEVELS, prepend=0.0, append=1.0)
    return np.asarray((widths[1:] + widths[:-1]) / 2)


_WEIGHTS = _weights()
STATISTICS: dict[str, Statistic] = {
    "mean": lambda row: float((row * _WEIGHTS).sum()),
    "median": lambda row: float(row[_MEDIAN]),
    "p80": lambda row: float(row[_P80]),
    "p90": lambda row: float(row[_P90]),
}


@dataclass(frozen=True, slots=True)
class Belief(Forecast):
    """A forecast with what it was made from, so that it can be made again and learnt from.

    Attributes:
        raw: [25] the predictor's own quantiles before the first token; None where it had none to give.
        whole: [25] the same as they were corrected and believed, no limit applied; None where nothing is known.
        first_tokens: The statistic before the first token.
    """

    raw: Floats | None = None
    whole: Floats | None = None
    first_tokens: float = 0.0


def given(row: Floats, tokens_so_far: int) -> Floats:
    """[25] quantiles of the lengths above ``tokens_so_far``, as ``LengthDistribution.given`` for one row."""
    if tokens_so_far <= 0:
        return row
    if tokens_so_far >= row[-1]:
        return np.asarray(np.maximum(tokens_so_far * _TAIL, tokens_so_far + 1))
    reached = float(np.interp(tokens_so_far, row, LEVELS))
    left = np.interp(reached + (1 - reached) * LEVELS, LEVELS, row)
    return np.maximum(left, tokens_so_far + 1)


def sound(row: Floats) -> bool:
    """Whether a row is a distribution: finite, at least 1, not decreasing, not absurd."""
    return bool(row[0] >= 1 and row[-1] <= MOST_TOKENS and (row[1:] >= row[:-1]).all())


def within(row: Floats, least: float, most: float) -> Floats:
    """[25] the row, no value below ``least`` (at least 1) nor above ``most``."""
    return np.minimum(np.maximum(row, max(1.0, least)), max(1.0, most))
