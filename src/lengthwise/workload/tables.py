"""How long one side of a request is: distributions given by a table of what was seen or published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lengthwise.workload._checks import require
from lengthwise.workload._two_slope import two_slope_table

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Quantiles:
    """A quantile table with straight lines between its points.

    Attributes:
        levels: Shares of requests, from 0 to 1, increasing.
        tokens: The length at each level, not decreasing; the first is the shortest, the last the longest.
    """

    levels: Sequence[float] | Floats
    tokens: Sequence[float] | Floats

    def __post_init__(self) -> None:
        levels, tokens = np.asarray(self.levels, float), np.asarray(self.tokens, float)
        require(levels.shape == tokens.shape and levels.ndim == 1, "a quantile table needs a length a level")
        require(
            len(levels) > 1 and levels[0] == 0 and levels[-1] == 1 and bool((np.diff(levels) > 0).all()),
            f"levels must increase from 0 to 1; they are {list(self.levels)[:8]}",
        )
        require(
            bool(np.isfinite(tokens).all()) and bool((np.diff(tokens) >= 0).all()) and tokens[0] >= 0,
            f"the lengths of a quantile table must not decrease; they are {list(self.tokens)[:8]}",
        )

    @classmethod
    def from_mean_median_p90(
        cls, mean: float, median: float, p90: float, *, low: float = 1.0, high: float
    ) -> Quantiles:
        """A smooth table that has these three statistics, tokens, within ``low`` to ``high``.

        It is a log-normal through median and p90 whose tail above p90 is stretched or shortened until
        the mean is right; where even no tail leaves the mean too large, a normal treated in the same
        way. The bounds cut it.

        Raises:
            InputError: No such distribution has this mean.
        """
        return cls(*two_slope_table(mean, median, p90, low, high))

    def quantile(self, u: Floats) -> Floats:
        """[n] tokens."""
        tokens: Floats = np.interp(u, np.asarray(self.levels, float), np.asarray(self.tokens, float))
        return tokens


@dataclass(frozen=True, eq=False)
class Empirical:
    """The empirical distribution of lengths seen, each drawn as often as it was seen.

    Attributes:
        tokens: [m] lengths in any order.
        weights: [m] how often each was seen; None counts each once.
    """

    tokens: Sequence[float] | Floats | npt.NDArray[np.int64]
    weights: Sequence[float] | Floats | None = None

    def __post_init__(self) -> None:
        tokens = np.asarray(self.tokens, float)
        require(tokens.ndim == 1 and tokens.size > 0, "an empirical distribution needs at least one length")
        require(bool((tokens >= 0).all()) and bool(np.isfinite(tokens).all()), "lengths must not be negative")
        if self.weights is not None:
            weights = np.asarray(self.weights, float)
            require(weights.shape == tokens.shape, "weights must be one a length")
            require(bool((weights >= 0).all()) and 0 < weights.sum() < np.inf, "weights must sum above 0")

    def quantile(self, u: Floats) -> Floats:
        """[n] tokens, each one of those seen."""
        tokens, cdf = self._steps
        if cdf is None:
            return tokens[np.minimum((u * len(tokens)).astype(np.int64), len(tokens) - 1)]
        return tokens[np.minimum(np.searchsorted(cdf, u, side="right"), len(tokens) - 1)]

    @cached_property
    def _steps(self) -> tuple[Floats, Floats | None]:
        tokens = np.asarray(self.tokens, float)
        if self.weights is None:
            return np.sort(tokens), None
        order = np.argsort(tokens, kind="stable")
        order = order[np.asarray(self.weights, float)[order] > 0]
        cdf = np.cumsum(np.asarray(self.weights, float)[order])
        return tokens[order], cdf / cdf[-1]
