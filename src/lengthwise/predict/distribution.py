"""A length as a distribution: quantiles, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]

LEVELS: Floats = np.array(
    [0, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8,
     0.85, 0.9, 0.95, 0.975, 0.99, 1.0]
)  # fmt: skip
_TAIL = 3.0
"""Shape of the Pareto tail taken for what has outlived its distribution: half as much again to come."""


@dataclass(frozen=True)
class LengthDistribution:
    """Output lengths of n requests as quantiles, linear between them.

    Attributes:
        tokens: [n, q] float64, not decreasing along a row, at least 1: the quantiles.
        levels: [q] float64, increasing from 0 (the least length) to 1 (the greatest).
    """

    tokens: Floats
    levels: Floats

    def __len__(self) -> int:
        return len(self.tokens)

    def __post_init__(self) -> None:
        levels, tokens = np.asarray(self.levels, float), np.asarray(self.tokens, float)
        if levels.ndim != 1 or len(levels) < 2 or levels[0] != 0 or levels[-1] != 1 or (np.diff(levels) <= 0).any():
            raise InputError(f"levels must increase from 0 to 1; they are {levels}")
        if tokens.ndim != 2 or tokens.shape[1] != len(levels):
            raise InputError(
                f"tokens must have a row a request and a column a level ({len(levels)}); shape {tokens.shape}"
            )
        good = np.isfinite(tokens).all(axis=1) & (tokens[:, 0] >= 1) & (np.diff(tokens, axis=1) >= 0).all(axis=1)
        if not good.all():
            row = int(np.argmin(good))
            raise InputError(
                f"predicted lengths must be finite, at least 1 and not decrease; request {row} has {tokens[row]}"
            )
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "tokens", tokens)

    @classmethod
    def of(cls, tokens: npt.ArrayLike, levels: npt.ArrayLike = LEVELS) -> LengthDistribution:
        """From raw quantiles of any source: sorted, and raised to at least 1; NaN is an error."""
        rows = np.sort(np.atleast_2d(np.asarray(tokens, float)), axis=1)
        return cls(np.maximum(rows, 1.0), np.asarray(levels, float))

    @classmethod
    def point(cls, tokens: npt.ArrayLike) -> LengthDistribution:
        """Certainty: each length is the one given, [n]."""
        values = np.maximum(np.asarray(tokens, float), 1.0)
        return cls(np.repeat(values[:, None], 2, axis=1), np.array([0.0, 1.0]))

    @property
    def mean(self) -> Floats:
        """[n] expected length, tokens."""
        middle = (self.tokens[:, 1:] + self.tokens[:, :-1]) / 2
        return np.asarray(middle @ np.diff(self.levels))

    @property
    def median(self) -> Floats:
        """[n] the length that half exceed, tokens."""
        return self.quantile(0.5)

    def quantile(self, level: npt.ArrayLike) -> Floats:
        """[n] the quantile at ``level``, one for all or one a request."""
        p = np.clip(np.broadcast_to(np.asarray(level, float), (len(self),)), 0.0, 1.0)
        right = np.clip(np.searchsorted(self.levels, p, side="left"), 1, len(self.levels) - 1)
        low, high = self.levels[right - 1], self.levels[right]
        rows = np.arange(len(self))
        a, b = self.tokens[rows, right - 1], self.tokens[rows, right]
        return np.asarray(a + (b - a) * (p - low) / (high - low))

    def cdf(self, tokens: npt.ArrayLike) -> Floats:
        """[n] the probability of a length of at most ``tokens``, one for all or one a request."""
        x = np.broadcast_to(np.asarray(tokens, float), (len(self),))
        right = (self.tokens <= x[:, None]).sum(axis=1)
        inner = np.clip(right, 1, len(self.levels) - 1)
        rows = np.arange(len(self))
        a, b = self.tokens[rows, inner - 1], self.tokens[rows, inner]
        share = np.where(b > a, (x - a) / np.where(b > a, b - a, 1.0), 1.0)
        inside = self.levels[inner - 1] + np.clip(share, 0, 1) * np.diff(self.levels)[inner - 1]
        return np.where(right == 0, 0.0, np.where(right == len(self.levels), 1.0, inside))

    def given(self, tokens_so_far: npt.ArrayLike) -> LengthDistribution:
        """The distributions of those lengths that are above ``tokens_so_far`` (survival).

        What has outlived its whole distribution gets a Pareto tail of shape 3 from there on: half as
        many tokens again are expected, however wrong the distribution was.
        """
        so_far = np.broadcast_to(np.asarray(tokens_so_far, float), (len(self),))
        reached = np.where(so_far > 0, self.cdf(so_far), 0.0)
        outlived = (so_far > 0) & (so_far >= self.tokens[:, -1])
        known = np.where(outlived, 0.0, reached)
        columns = [self.quantile(known + (1 - known) * level) for level in self.levels]
        tokens = np.maximum(np.column_stack(columns), (so_far + (so_far > 0))[:, None])
        if outlived.any():
            levels = np.minimum(self.levels, 0.99)
            tail = so_far[:, None] * (1 - levels[None, :]) ** (-1 / _TAIL)
            tokens = np.where(outlived[:, None], np.maximum(tail, so_far[:, None] + 1), tokens)
        return LengthDistribution(np.maximum.accumulate(np.maximum(tokens, 1.0), axis=1), self.levels)

    def remaining(self, tokens_so_far: npt.ArrayLike = 0) -> Floats:
        """[n] expected tokens still to come after ``tokens_so_far``, at least 1."""
        return np.maximum(self.given(tokens_so_far).mean - np.asarray(tokens_so_far, float), 1.0)

    def gittins(self, tokens_so_far: npt.ArrayLike = 0) -> Floats:
        """[n] the Gittins index in tokens, smallest first: the least expected work per chance of an end.

        min over d of E[min(X - a, d) | X > a] / P(X - a <= d | X > a) at age a (Gittins 1979; for
        M/G/1 the order of least mean sojourn time: Aalto, Ayesta and Righter 2009), taken over the
        quantiles.
        """
        a = np.broadcast_to(np.asarray(tokens_so_far, float), (len(self),))
        after = self.given(a).tokens - a[:, None]
        steps = np.diff(self.levels)
        ended = self.levels[1:]
        work = np.cumsum((after[:, 1:] + after[:, :-1]) / 2 * steps, axis=1) + after[:, 1:] * (1 - ended)
        return np.maximum((work / ended).min(axis=1), 1.0)

    def sample(self, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """[n] int64, one length each."""
        return np.maximum(np.rint(self.quantile(rng.random(len(self)))), 1).astype(np.int64)

    def take(self, rows: Any) -> LengthDistribution:
        """Those of some of the requests."""
        return LengthDistribution(self.tokens[rows], self.levels)
