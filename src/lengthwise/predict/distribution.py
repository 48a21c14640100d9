"""Distributions of output lengths as quantiles, and the statistics that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
"""Shape of the Pareto tail beyond a known distribution: the expected length is 1.5 times the tokens so far."""
MAX_TAIL_LEVEL = 0.99  # quantiles of a Pareto tail above this level equal the one at it
_CHUNK_ROWS = 1 << 13  # temporaries of a chunk stay in the cache


@dataclass(frozen=True)
class LengthDistribution:
    """Output lengths of n requests as quantiles; between two levels they are interpolated linearly.

    ``tokens`` [n, q] are the quantiles, at least 1 and nondecreasing along each row. ``levels`` [q] are their levels,
    which increase from 0 (the smallest length) to 1 (the largest). Raises InputError if one of these does not hold.
    """

    tokens: Floats
    levels: Floats

    def __len__(self) -> int:
        return len(self.tokens)

    def __post_init__(self) -> None:
        tokens, levels = np.asarray(self.tokens, float), np.asarray(self.levels, float)
        is_valid = levels.ndim == 1 and len(levels) > 1 and levels[0] == 0 and levels[-1] == 1
        if levels is not LEVELS and not (is_valid and (np.diff(levels) > 0).all()):
            raise InputError(f"levels must increase from 0 to 1; they are {levels}")
        if tokens.ndim != 2 or tokens.shape[1] != len(levels):
            raise InputError(
                f"tokens must have one row per request and one column per level ({len(levels)}); shape {tokens.shape}"
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
        """Return the distributions with these quantiles, sorted and raised to at least 1; NaN raises InputError."""
        rows = np.maximum(np.sort(np.atleast_2d(np.asarray(tokens, float)), axis=1), 1.0)
        if levels is LEVELS and rows.shape[1] == len(LEVELS) and np.isfinite(rows[:, -1]).all():
            return cls._unchecked(rows, LEVELS)  # sorting moves NaN to the end
        return cls(rows, np.asarray(levels, float))

    @classmethod
    def _unchecked(cls, tokens: Floats, levels: Floats) -> LengthDistribution:
        made = object.__new__(cls)
        object.__setattr__(made, "tokens", tokens)
        object.__setattr__(made, "levels", levels)
        return made

    @classmethod
    def point(cls, tokens: npt.ArrayLike) -> LengthDistribution:
        """Return n distributions, each with all its mass at one of the lengths ``tokens`` [n]."""
        values = np.maximum(np.asarray(tokens, float), 1.0)
        return cls(np.repeat(values[:, None], 2, axis=1), np.array([0.0, 1.0]))

    @property
    def mean(self) -> Floats:
        """Return the expected total lengths [n] in tokens; unlike ``remaining``, they include the tokens so far."""
        weights = _MEAN_WEIGHTS if self.levels is LEVELS else _mean_weights(self.levels)
        return np.asarray((self.tokens * weights).sum(axis=1))  # a matrix product would round by batch size

    @property
    def median(self) -> Floats:
        """Return the median total lengths [n] in tokens."""
        return self.quantile(0.5)

    def quantile(self, level: npt.ArrayLike) -> Floats:
        """Return the quantiles [n] at ``level``, a scalar or [n]."""
        p = np.clip(np.broadcast_to(np.asarray(level, float), (len(self),)), 0.0, 1.0)
        return self._quantiles(p[:, None])[:, 0]

    def cdf(self, tokens: npt.ArrayLike) -> Floats:
        """Return the probabilities [n] that the length is at most ``tokens``, a scalar or [n]."""
        x = np.broadcast_to(np.asarray(tokens, float), (len(self),))
        right = (self.tokens <= x[:, None]).sum(axis=1)
        inner = np.clip(right, 1, len(self.levels) - 1)
        rows = np.arange(len(self))
        a, b = self.tokens[rows, inner - 1], self.tokens[rows, inner]
        share = np.where(b > a, (x - a) / np.where(b > a, b - a, 1.0), 1.0)
        inside = self.levels[inner - 1] + np.clip(share, 0, 1) * np.diff(self.levels)[inner - 1]
        return np.where(right == 0, 0.0, np.where(right == len(self.levels), 1.0, inside))

    def at(self, levels: npt.ArrayLike = LEVELS) -> LengthDistribution:
        """Return the same distributions with their quantiles at other levels, which increase from 0 to 1."""
        requested = np.asarray(levels, float)
        if requested.shape == self.levels.shape and (requested == self.levels).all():
            return self
        return LengthDistribution(self._quantiles(np.broadcast_to(requested, (len(self), len(requested)))), requested)

    def given(self, tokens_so_far: npt.ArrayLike) -> LengthDistribution:
        """Return the distributions of the total lengths, given that they exceed ``tokens_so_far``.

        A distribution whose smallest length is at least ``tokens_so_far`` + 1 keeps its quantiles. If a request has
        tokens so far, the levels of the result are the union of the present ones and LEVELS. A request that has reached
        its largest length gets a Pareto tail of shape 3, cut at its 99 % quantile. Rows do not affect each other.
        """
        a = self._so_far(tokens_so_far)
        if not (a > 0).any():
            return self
        is_beyond = self._is_beyond(a)
        levels = self.levels if self.levels is LEVELS else np.union1d(self.levels, LEVELS)
        passed = np.where((a > 0) & ~is_beyond, self.cdf(a), 0.0)
        tokens = np.empty((len(self), len(levels)))
        for rows in self._chunks():
            share = passed[rows, None]
            tokens[rows] = self.take(rows)._quantiles(share + (1 - share) * levels)  # noqa: SLF001 - of this class
        np.maximum(tokens, (a + (a > 0))[:, None], out=tokens)
        if is_beyond.any():
            tokens[is_beyond] = np.maximum(pareto_tail(a[is_beyond], levels), a[is_beyond, None] + 1)
        return LengthDistribution(np.maximum.accumulate(tokens, axis=1), levels)

    def quantile_given(self, level: float, tokens_so_far: npt.ArrayLike) -> Floats:
        """Return one quantile [n] of the lengths above ``tokens_so_far``; this is cheaper than ``given``."""
        a = self._so_far(tokens_so_far)
        is_beyond = self._is_beyond(a)
        passed = np.where((a > 0) & ~is_beyond, self.cdf(a), 0.0)
        tokens = np.where(is_beyond, pareto_tail(a, [level])[:, 0], self.quantile(passed + (1 - passed) * level))
        return np.maximum(tokens, a + (a > 0))

    def remaining(self, tokens_so_far: npt.ArrayLike = 0) -> Floats:
        """Return the expected remaining tokens [n] at age a: E[X - a | X > a], at least 1; a / 2 in the Pareto tail."""
        return self._by_chunks(tokens_so_far, _remaining, 1 / (TAIL_SHAPE - 1))

    def gittins(self, tokens_so_far: npt.ArrayLike = 0) -> Floats:
        """Return the Gittins ranks [n] in tokens, at least 1: the smallest expected work per probability of completion.

        The rank at age a is the minimum over d of E[min(X - a, d) | X > a] / P(X - a <= d | X > a) (Gittins 1979).
        Serving the smallest rank first minimizes the mean sojourn time in an M/G/1 queue (Aalto, Ayesta and Righter
        2009). The hazard rate grows between two quantiles, so that the minimum is at a quantile. A request that has
        reached its largest predicted length has the inverse hazard rate of the Pareto tail, a / 3.
        """
        return self._by_chunks(tokens_so_far, _gittins, 1 / TAIL_SHAPE)

    def sample(self, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return one random length for each request, [n] int64."""
        return np.maximum(np.rint(self.quantile(rng.random(len(self)))), 1).astype(np.int64)

    def take(self, rows: Any) -> LengthDistribution:
        """Return the distributions of the requests with the indices ``rows``."""
        return self._unchecked(self.tokens[rows], self.levels)

    def _so_far(self, tokens_so_far: npt.ArrayLike) -> Floats:
        return np.broadcast_to(np.asarray(tokens_so_far, float), (len(self),))

    def _is_beyond(self, a: Floats) -> npt.NDArray[np.bool_]:
        return np.asarray((a > 0) & (a >= self.tokens[:, -1]))

    def _chunks(self) -> Iterator[slice]:
        return (slice(start, start + _CHUNK_ROWS) for start in range(0, len(self), _CHUNK_ROWS))

    def _quantiles(self, p: Floats) -> Floats:
        """Return the quantiles [n, m] at the levels ``p`` [n, m]."""
        right = np.clip(np.searchsorted(self.levels, p, side="left"), 1, len(self.levels) - 1)
        low = self.levels[right - 1]
        share = (p - low) / (self.levels[right] - low)
        flat = self.tokens.reshape(-1)
        right += np.arange(len(self))[:, None] * len(self.levels)
        a, b = flat[right - 1], flat[right]
        # The second form is exact at the right end, the first at the left one: quantiles never cross.
        return np.where(share < 0.5, a + (b - a) * share, b - (b - a) * (1 - share))

    def _by_chunks(self, tokens_so_far: npt.ArrayLike, statistic: Callable[..., Floats], tail: float) -> Floats:
        """Return a statistic of each row, [n]; beyond its largest length, ``tail`` times the tokens so far."""
        a = self._so_far(tokens_so_far)
        steps, out = np.diff(self.levels), np.empty(len(self))
        for rows in self._chunks():
            tokens, so_far = self.tokens[rows], a[rows, None]
            clipped = np.maximum(tokens, so_far)
            remaining, total = np.diff(clipped, axis=1), np.diff(tokens, axis=1)
            share = np.divide(remaining, total, out=(tokens[:, 1:] > so_far).astype(float), where=total > 0)
            out[rows] = statistic(clipped, so_far, share * steps)
        return np.maximum(np.where(self._is_beyond(a), a * tail, out), 1.0)


def _mean_weights(levels: Floats) -> Floats:
    widths = np.diff(levels, prepend=0.0, append=1.0)
    return np.asarray((widths[1:] + widths[:-1]) / 2)


_MEAN_WEIGHTS = _mean_weights(LEVELS)


def _remaining(clipped: Floats, a: Floats, mass: Floats) -> Floats:
    work = (((clipped[:, 1:] + clipped[:, :-1]) / 2 - a) * mass).sum(axis=1)
    alive = mass.sum(axis=1)
    return np.asarray(np.divide(work, alive, out=np.zeros(len(work)), where=alive > 0))


def _gittins(clipped: Floats, a: Floats, mass: Floats) -> Floats:
    finished = np.cumsum(mass, axis=1)
    alive = finished[:, -1:]
    before = (clipped[:, :1] - a) * alive
    work = before + np.cumsum(np.diff(clipped, axis=1) * (alive - finished + mass / 2), axis=1)
    index = np.divide(work, finished, out=np.full(work.shape, np.inf), where=finished > 0)
    return np.asarray(np.where(alive[:, 0] > 0, index.min(axis=1), 0.0))


def pareto_tail(tokens: npt.ArrayLike, levels: npt.ArrayLike) -> Floats:
    """Return quantiles [n, q] of Pareto tails of shape 3 that start at ``tokens``; levels are capped at 0.99."""
    capped = np.minimum(np.asarray(levels, float), MAX_TAIL_LEVEL)
    return np.asarray(np.asarray(tokens, float)[:, None] * (1 - capped) ** (-1 / TAIL_SHAPE))


def length_quantiles(lengths: npt.ArrayLike, censored: npt.ArrayLike, levels: Floats) -> Floats:
    """Return the quantiles [q] of the distribution of observed lengths.

    A length with ``censored`` is a lower bound of the true one (Kaplan-Meier). If no uncensored length exceeds the
    largest lower bound, the remaining mass becomes a Pareto tail of shape 3, which starts at that bound.
    """
    seen, cdf = kaplan_meier(lengths, censored)
    known_share = float(cdf[-1]) if len(cdf) else 0.0
    largest = float(np.max(np.asarray(lengths, float)))
    if len(cdf):
        inside = np.searchsorted(cdf, np.minimum(levels, known_share) - 1e-12)
        known = seen[np.minimum(inside, len(seen) - 1)]
    else:
        known = np.full(len(levels), largest)
    if known_share >= 1 - 1e-12:
        return np.asarray(known)
    beyond = np.clip((levels - known_share) / (1 - known_share), 0, MAX_TAIL_LEVEL)
    return np.where(levels > known_share, largest * (1 - beyond) ** (-1 / TAIL_SHAPE), known)


def mean_length(lengths: npt.ArrayLike, censored: npt.ArrayLike) -> float:
    """Return the mean of observed lengths; ``censored`` ones are lower bounds, as for ``length_quantiles``."""
    seen, cdf = kaplan_meier(lengths, censored)
    beyond = 1 - (float(cdf[-1]) if len(cdf) else 0.0)
    largest = float(np.max(np.asarray(lengths, float)))
    return float(seen @ np.diff(cdf, prepend=0.0)) + beyond * largest * TAIL_SHAPE / (TAIL_SHAPE - 1)
