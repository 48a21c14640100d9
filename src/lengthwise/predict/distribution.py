"""A length as a distribution: quantiles, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.statistics import kaplan_meier

Floats = npt.NDArray[np.float64]

LEVELS: Floats = np.array(
    [0, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8,
     0.85, 0.9, 0.95, 0.975, 0.99, 1.0]
)  # fmt: skip
TAIL_SHAPE = 3.0
"""Shape of the Pareto tail taken for what has outlived all that is known: half as much again to come."""
_MOST_LEVEL = 0.99
_ROWS = 1 << 13  # at a time: the temporaries stay in the cache, and a million requests in memory


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
        tokens = np.asarray(self.tokens, float)
        levels = _of_levels(self.levels)
        if tokens.ndim != 2 or tokens.shape[1] != len(levels):
            raise InputError(
                f"tokens must have a row a request and a column a level ({len(levels)}); shape {tokens.shape}"
            )
        good = (tokens[:, 0] >= 1) & np.isfinite(tokens[:, -1]) & (tokens[:, 1:] >= tokens[:, :-1]).all(axis=1)
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
        rows = np.maximum(np.sort(np.atleast_2d(np.asarray(tokens, float)), axis=1), 1.0)
        if levels is LEVELS and rows.shape[1] == len(LEVELS) and np.isfinite(rows[:, -1]).all():
            return cls._of_checked(rows, LEVELS)  # NaN would have been sorted to the end
        return cls(rows, np.asarray(levels, float))

    @classmethod
    def _of_checked(cls, tokens: Floats, levels: Floats) -> LengthDistribution:
        made = object.__new__(cls)
        object.__setattr__(made, "tokens", tokens)
        object.__setattr__(made, "levels", levels)
        return made

    @classmethod
    def point(cls, tokens: npt.ArrayLike) -> LengthDistribution:
        """Certainty: each length is the one given, [n]."""
        values = np.maximum(np.asarray(tokens, float), 1.0)
        return cls(np.repeat(values[:, None], 2, axis=1), np.array([0.0, 1.0]))

    @property
    def mean(self) -> Floats:
        """[n] expected length, tokens."""
        weights = _LEVEL_WEIGHTS if self.levels is LEVELS else _weights(self.levels)
        return np.asarray((self.tokens * weights).sum(axis=1))  # a product of matrices would round by batch size

    @property
    def median(self) -> Floats:
        """[n] the length that half exceed, tokens."""
        return self.quantile(0.5)

    def quantile(self, level: npt.ArrayLike) -> Floats:
        """[n] the quantile at ``level``, one for all or one a request."""
        p = np.clip(np.broadcast_to(np.asarray(level, float), (len(self),)), 0.0, 1.0)
        return self._at(p[:, None])[:, 0]

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

    def at(self, levels: npt.ArrayLike = LEVELS) -> LengthDistribution:
        """The same distributions told by their quantiles at other levels, from 0 to 1."""
        wanted = np.asarray(levels, float)
        if wanted.shape == self.levels.shape and (wanted == self.levels).all():
            return self
        return LengthDistribution(self._at(np.broadcast_to(wanted, (len(self), len(wanted)))), wanted)

    def given(self, tokens_so_far: npt.ArrayLike) -> LengthDistribution:
        """The distributions of those lengths that are above ``tokens_so_far`` (survival).

        Told at its own levels and LEVELS. What has outlived its whole distribution gets a Pareto
        tail of shape 3 from there on: half as many tokens again are expected, however wrong the
        distribution was. Any age of a row leaves the other rows' answers as they are.
        """
        a = self._ages(tokens_so_far)
        if not (a > 0).any():
            return self
        outlived = self._outlived(a)
        levels = self.levels if self.levels is LEVELS else np.union1d(self.levels, LEVELS)
        reached = np.where((a > 0) & ~outlived, self.cdf(a), 0.0)
        tokens = np.empty((len(self), len(levels)))
        for rows in _chunks(len(self)):
            known = reached[rows, None]
            tokens[rows] = self.take(rows)._at(known + (1 - known) * levels)  # noqa: SLF001 - its own
        np.maximum(tokens, (a + (a > 0))[:, None], out=tokens)
        if outlived.any():
            tokens[outlived] = np.maximum(pareto_tail(a[outlived], levels), a[outlived, None] + 1)
        return LengthDistribution(np.maximum.accumulate(tokens, axis=1), levels)

    def quantile_given(self, level: float, tokens_so_far: npt.ArrayLike) -> Floats:
        """[n] the quantile of those lengths that are above ``tokens_so_far``, without all of ``given``."""
        a = self._ages(tokens_so_far)
        outlived = self._outlived(a)
        known = np.where((a > 0) & ~outlived, self.cdf(a), 0.0)
        tokens = np.where(outlived, pareto_tail(a, [level])[:, 0], self.quantile(known + (1 - known) * level))
        return np.maximum(tokens, a + (a > 0))

    def remaining(self, tokens_so_far: npt.ArrayLike = 0) -> Floats:
        """[n] expected tokens still to come after ``tokens_so_far``, at least 1: E[X - a | X > a]."""
        return self._by_rows(tokens_so_far, _remaining, 1 / (TAIL_SHAPE - 1))

    def gittins(self, tokens_so_far: npt.ArrayLike = 0) -> Floats:
        """[n] the Gittins index in tokens, smallest first: the least expected work per chance of an end.

        min over d of E[min(X - a, d) | X > a] / P(X - a <= d | X > a) at age a (Gittins 1979; for
        M/G/1 the order of least mean sojourn time: Aalto, Ayesta and Righter 2009). Between two
        quantiles the hazard grows, so that the least value is at one of them. For what has outlived
        its distribution: 1 / hazard of the Pareto tail, a / 3.
        """
        return self._by_rows(tokens_so_far, _gittins, 1 / TAIL_SHAPE)

    def sample(self, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """[n] int64, one length each."""
        return np.maximum(np.rint(self.quantile(rng.random(len(self)))), 1).astype(np.int64)

    def take(self, rows: Any) -> LengthDistribution:
        """Those of some of the requests."""
        return self._of_checked(self.tokens[rows], self.levels)  # rows of what was checked need no second look

    def _ages(self, tokens_so_far: npt.ArrayLike) -> Floats:
        return np.broadcast_to(np.asarray(tokens_so_far, float), (len(self),))

    def _outlived(self, a: Floats) -> npt.NDArray[np.bool_]:
        return np.asarray((a > 0) & (a >= self.tokens[:, -1]))

    def _at(self, p: Floats) -> Floats:
        """[n, m] quantiles at the levels [n, m], each row its own."""
        right = np.clip(np.searchsorted(self.levels, p, side="left"), 1, len(self.levels) - 1)
        low = self.levels[right - 1]
        share = (p - low) / (self.levels[right] - low)
        flat = self.tokens.reshape(-1)
        right += np.arange(len(self))[:, None] * len(self.levels)
        a, b = flat[right - 1], flat[right]
        # The second form is exact at the right end, the first at the left one: quantiles never cross.
        return np.where(share < 0.5, a + (b - a) * share, b - (b - a) * (1 - share))

    def _by_rows(self, tokens_so_far: npt.ArrayLike, request: Callable[..., Floats], tail: float) -> Floats:
        a = self._ages(tokens_so_far)
        steps, out = np.diff(self.levels), np.empty(len(self))
        for rows in _chunks(len(self)):
            out[rows] = request(self.tokens[rows], a[rows, None], steps)
        return np.maximum(np.where(self._outlived(a), a * tail, out), 1.0)


def pareto_tail(tokens: npt.ArrayLike, levels: npt.ArrayLike) -> Floats:
    """[n, q] quantiles of what is known to be above ``tokens`` [n] and nothing else; cut at level 0.99."""
    cut = np.minimum(np.asarray(levels, float), _MOST_LEVEL)
    return np.asarray(np.asarray(tokens, float)[:, None] * (1 - cut) ** (-1 / TAIL_SHAPE))


def _after(tokens: Floats, a: Floats, steps: Floats) -> tuple[Floats, Floats]:
    """[n, q] quantiles not below the age, and [n, q - 1] probability between them."""
    clipped = np.maximum(tokens, a)
    gaps, whole = np.diff(clipped, axis=1), np.diff(tokens, axis=1)
    share = np.divide(gaps, whole, out=(tokens[:, 1:] > a).astype(float), where=whole > 0)
    return clipped, share * steps


def _remaining(tokens: Floats, a: Floats, steps: Floats) -> Floats:
    clipped, mass = _after(tokens, a, steps)
    work = (((clipped[:, 1:] + clipped[:, :-1]) / 2 - a) * mass).sum(axis=1)
    alive = mass.sum(axis=1)
    return np.asarray(np.divide(work, alive, out=np.zeros(len(work)), where=alive > 0))


def _gittins(tokens: Floats, a: Floats, steps: Floats) -> Floats:
    clipped, mass = _after(tokens, a, steps)
    ended = np.cumsum(mass, axis=1)
    alive = ended[:, -1:]
    before = (clipped[:, :1] - a) * alive
    work = before + np.cumsum(np.diff(clipped, axis=1) * (alive - ended + mass / 2), axis=1)
    index = np.divide(work, ended, out=np.full(work.shape, np.inf), where=ended > 0)
    return np.asarray(np.where(alive[:, 0] > 0, index.min(axis=1), 0.0))


def _of_levels(levels: npt.ArrayLike) -> Floats:
    """The levels as an array; InputError where they do not increase from 0 to 1."""
    if levels is LEVELS:
        return LEVELS
    given = np.asarray(levels, float)
    if given.ndim != 1 or len(given) < 2 or given[0] != 0 or given[-1] != 1 or not _grows(given):
        raise InputError(f"levels must increase from 0 to 1; they are {given}")
    return given


def _weights(levels: Floats) -> Floats:
    """[q] what the quantile of each level counts in the mean."""
    widths = np.diff(levels, prepend=0.0, append=1.0)
    return np.asarray((widths[1:] + widths[:-1]) / 2)


_LEVEL_WEIGHTS = _weights(LEVELS)


def _chunks(n: int) -> list[slice]:
    return [slice(start, start + _ROWS) for start in range(0, n, _ROWS)]


def _grows(levels: Floats) -> bool:
    return bool((np.diff(levels) > 0).all())


FloatArray = npt.NDArray[np.float64]

_MAX_OBSERVED_LEVEL = 0.99


def length_quantiles(lengths: npt.ArrayLike, censored: npt.ArrayLike, levels: FloatArray) -> FloatArray:
    """[q] quantiles of lengths, some of them cut.

    Beyond the last length that was seen to its end, if longer ones were cut, lies a Pareto tail of
    shape 3 from the greatest length on: nobody saw how long those are, and they are not left out.
    """
    seen, cdf = kaplan_meier(lengths, censored)
    reached = float(cdf[-1]) if len(cdf) else 0.0
    inside = np.searchsorted(cdf, np.minimum(levels, reached) - 1e-12) if len(cdf) else np.zeros(len(levels), int)
    most = float(np.max(np.asarray(lengths, float)))
    known = seen[np.minimum(inside, len(seen) - 1)] if len(seen) else np.full(len(levels), most)
    if reached >= 1 - 1e-12:
        return np.asarray(known)
    beyond = np.clip((levels - reached) / (1 - reached), 0, _MAX_OBSERVED_LEVEL)
    tail = most * (1 - beyond) ** (-1 / TAIL_SHAPE)
    return np.where(levels > reached, tail, known)


def mean_length(lengths: npt.ArrayLike, censored: npt.ArrayLike) -> float:
    """The mean of lengths, some of them cut, with the same tail: half as much again as the greatest."""
    seen, cdf = kaplan_meier(lengths, censored)
    mass = np.diff(cdf, prepend=0.0)
    beyond = 1 - (float(cdf[-1]) if len(cdf) else 0.0)
    most = float(np.max(np.asarray(lengths, float)))
    return float(seen @ mass) + beyond * most * TAIL_SHAPE / (TAIL_SHAPE - 1)
