"""Learns from the lengths that finish here, model by model."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from itertools import islice
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.length_prediction.prediction import Belief
from lengthwise.gateway.request import MAX_TOKENS, Floats
from lengthwise.predict.distribution import LEVELS, TAIL_SHAPE
from lengthwise.statistics import kaplan_meier, ranked_cdf

Bools = npt.NDArray[np.bool_]


def recent_weights(n: int, half_life: float) -> Floats:
    """[n] weights of n values, the oldest first: after ``half_life`` more they count half."""
    return np.asarray(0.5 ** (np.arange(n - 1, -1, -1) / half_life))


def quantiles(values: Floats, cut: Bools, weight: Floats, levels: Floats, tail: float) -> Floats:
    """[k] of column k of ``values`` [n, k] (or of the one column [n, 1]) the quantile at ``levels`` [k].

    Cut values are at least what they are (Kaplan and Meier, weighted). Beyond the last that was seen to its
    end lies an exponential tail of mean ``tail`` from the greatest value on.
    """
    ranked, cdf = ranked_cdf(values, cut, weight)
    reached = cdf[-1]
    place = (cdf < np.minimum(levels, reached) - 1e-12).sum(axis=0)
    place = np.minimum(place, len(values) - 1)
    inside = ranked[place, np.arange(ranked.shape[1])] if ranked.shape[1] > 1 else ranked[place, 0]
    missing = np.maximum(1 - reached, 1e-12)
    beyond = np.clip((levels - reached) / missing, 0, 0.99)
    return np.asarray(np.where(levels > reached + 1e-9, ranked[-1] - np.log1p(-beyond) * tail, inside))


def reached(values: Floats, cut: Bools, at: Floats) -> Floats:
    """[m] the share of ``values`` [n] that is at most each of ``at``, cut ones by Kaplan and Meier."""
    observed, cdf = kaplan_meier(values, cut)
    return np.concatenate([[0.0], cdf])[np.searchsorted(observed, at, side="right")]


REFERENCE, DRIFT_WINDOW, ALPHA = 512, 128, 0.001


class Drift:
    """Compares each window of misses with the first ones.

    A miss is the logarithm of the length over its prediction, before any correction. Every ``window`` of them
    is tested against the first ``reference``: by the statistic of Kolmogorov and Smirnov, or, where outputs
    were cut, by the log-rank test (Mantel 1966). While nothing changes a test alarms with probability
    ``alpha`` at most (asymptotically): one false alarm in window / alpha requests, 128,000 by default. After an
    alarm the window becomes the beginning of a new reference.

    Args:
        reference: Misses that are compared with.
        window: Misses of one test.
        alpha: Of one test.
    """

    def __init__(self, reference: int = REFERENCE, window: int = DRIFT_WINDOW, alpha: float = ALPHA) -> None:
        self.reference, self.window, self.alpha = reference, window, alpha
        self.tests = self.alarms = self.seen = 0
        self.last_at: int | None = None
        self._known: list[tuple[float, bool]] = []
        self._new: list[tuple[float, bool]] = []

    def add(self, miss: float, *, cut: bool) -> bool:
        """One more; whether it completes a window that has drifted."""
        self.seen += 1
        if len(self._known) < self.reference:
            self._known.append((miss, cut))
            return False
        self._new.append((miss, cut))
        if len(self._new) < self.window:
            return False
        new, self._new = self._new, []
        self.tests += 1
        if not differ(*_columns(self._known), *_columns(new), self.alpha):
            return False
        self.alarms += 1
        self.last_at, self._known = self.seen, new
        return True

    def state(self) -> dict[str, Any]:
        """For people."""
        return {
            "tests": self.tests,
            "alarms": self.alarms,
            "finished_since": None if self.last_at is None else self.seen - self.last_at,
            "false_alarms_a_test": self.alpha,
        }


def differ(x: Floats, x_cut: Bools, y: Floats, y_cut: Bools, alpha: float) -> bool:
    """Whether two samples are of different distributions, at a false-alarm rate of ``alpha``."""
    if x_cut.any() or y_cut.any():
        return abs(log_rank(x, x_cut, y, y_cut)) > NormalDist().inv_cdf(1 - alpha / 2)
    least = math.sqrt(-math.log(alpha / 2) / 2 * (len(x) + len(y)) / (len(x) * len(y)))
    return kolmogorov_smirnov(x, y) > least


def kolmogorov_smirnov(x: Floats, y: Floats) -> float:
    """The greatest distance of two empirical distributions."""
    both = np.concatenate([x, y])
    ranks = (np.searchsorted(np.sort(part), both, side="right") / len(part) for part in (x, y))
    first, second = ranks
    return float(np.abs(first - second).max())


def log_rank(x: Floats, x_cut: Bools, y: Floats, y_cut: Bools) -> float:
    """Ends of ``y`` seen over those expected if both were alike, in standard deviations; about normal then."""
    value, ends = np.concatenate([x, y]), ~np.concatenate([x_cut, y_cut])
    of_y = np.arange(len(value)) >= len(x)
    times = np.unique(value[ends])
    left = len(value) - np.searchsorted(np.sort(value), times)
    left_y = len(y) - np.searchsorted(np.sort(y), times)
    at = np.searchsorted(times, value[ends])
    dead = np.bincount(at, minlength=len(times))
    dead_y = np.bincount(at, of_y[ends], minlength=len(times))
    share = left_y / np.maximum(left, 1)
    spread = dead * share * (1 - share) * (left - dead) / np.maximum(left - 1, 1)
    return float((dead_y - dead * share).sum() / math.sqrt(max(float(spread.sum()), 1e-12)))


def _columns(pairs: list[tuple[float, bool]]) -> tuple[Floats, Bools]:
    return np.array([miss for miss, _ in pairs]), np.array([cut for _, cut in pairs], bool)


WINDOW, HALF_LIFE = 512, 256.0
"""Finished requests that are remembered, and after how many more one counts half."""
_LOW, _MEDIAN, _HIGH = (int(np.searchsorted(LEVELS, p)) for p in (0.1, 0.5, 0.9))
_MIN_SPREAD = 0.05
_MIN_OUTPUTS, _SHRINK = 8, 8.0
"""From so many on a model's scale is corrected; with so many the correction is trusted by half."""
_SHAPE_FROM, _SHAPE_WHOLLY = 32, 96
"""Between so many its quantiles are moved more and more as conformal prediction says."""
_COVERED = (0.1, 0.5, 0.8, 0.9)


class Ring:
    """The last rows of numbers, oldest first.

    Args:
        columns: Of a row.
        most: Rows that are kept.
    """

    def __init__(self, columns: int, most: int = WINDOW) -> None:
        self._rows, self._at, self.count = np.empty((2 * most, columns)), 0, 0
        self._most = most

    def add(self, row: Any) -> None:
        """One more; the oldest goes where there are too many."""
        if self._at == len(self._rows):
            kept = self.rows.copy()
            self._rows[: len(kept)], self._at = kept, len(kept)
        self._rows[self._at] = row
        self._at += 1
        self.count = min(self.count + 1, self._most)

    def keep(self, last: int) -> None:
        """Forgets all but the last."""
        self.count = min(self.count, last)

    @property
    def rows(self) -> Floats:
        """[count, columns] as they came."""
        return self._rows[self._at - self.count : self._at]


class Learned:
    """Corrects one model's predictions by how they missed.

    A quantile q_p becomes q_p exp(m) first: m is the median of log(length / predicted median), drawn to 0
    while there are few. With more, q_p exp(s z_p): s = log(q_0.9 / q_0.1) is the predictor's own doubt, z_p
    the p-quantile of log(length / q_p) / s over the last outputs, so that each quantile is exceeded as often
    as it says (split conformal prediction, Romano, Patterson and Candes 2019; with weights that forget,
    Barber, Candes, Ramdas and Tibshirani 2023). Cut outputs count as longer than seen.

    Args:
        every: Finished requests between two corrections, once there are many.
    """

    def __init__(self, every: int) -> None:
        self.every, self.finished, self.corrections = every, 0, 0
        self.scale, self.shape_share = 0.0, 0.0
        self.drift = Drift()
        self._shift: Floats | None = None
        self._misses = Ring(len(LEVELS) + 2)
        """log length / each quantile; the predictor's doubt; whether it was cut."""
        self._places = Ring(2)
        """Where in what was believed the length fell; whether it was cut."""
        self._new = 0

    def corrected(self, raw: Floats) -> Floats:
        """[25] the predictor's quantiles as this model's outputs have them."""
        if self._shift is None:
            return raw
        moved = (1 - self.shape_share) * self.scale + self.shape_share * _warning(raw) * self._shift
        row = np.maximum.accumulate(raw * np.exp(np.minimum(np.maximum(moved, -8.0), 8.0)))
        return np.minimum(np.maximum(row, 1.0), MAX_TOKENS)

    def finished_with(self, raw: Floats, complete: Floats, tokens: int, *, cut: bool) -> bool:
        """Learns from an output; whether its lengths have drifted with it."""
        row = np.empty(len(LEVELS) + 2)
        misses = np.log(tokens / raw, out=row[:-2])
        row[-2], row[-1] = _warning(raw), cut
        self._misses.add(row)
        self._places.add((np.interp(tokens, complete, LEVELS), cut))
        self.finished += 1
        self._new += 1
        drifted = self.drift.add(float(misses[_MEDIAN]), cut=cut)
        if drifted:
            self._misses.keep(self.drift.window)
            self._places.keep(0)
        if drifted or self._new >= min(self.every, max(_MIN_OUTPUTS, self._misses.count // 2)):
            self._correct()
        return drifted

    def coverage(self) -> dict[str, float]:
        """Share of lengths at most each quantile that was told; nothing before there is some."""
        if not self._places.count:
            return {}
        place, cut = self._places.rows.T
        shares = reached(place, cut > 0, np.array(_COVERED))
        return {f"{level:g}": float(share) for level, share in zip(_COVERED, shares, strict=True)}

    def state(self) -> dict[str, Any]:
        """For people."""
        return {
            "finished": self.finished,
            "scale": float(np.exp(self.scale)),
            "calibrated_share": self.shape_share,
            "coverage": self.coverage(),
            "coverage_of": self._places.count,
            "drift": self.drift.state(),
        }

    def _correct(self) -> None:
        self._new = 0
        n = self._misses.count
        if n < _MIN_OUTPUTS:
            return
        rows = self._misses.rows
        misses, doubt, cut = rows[:, :-2], rows[:, -2:-1], rows[:, -1] > 0
        weight = recent_weights(n, HALF_LIFE)
        each = float(weight.sum() ** 2 / (weight**2).sum())
        self.scale = float(quantiles(misses[:, [_MEDIAN]], cut, weight, np.array([0.5]), 1 / TAIL_SHAPE)[0]) * (
            n / (n + _SHRINK)
        )
        self.shape_share = min(max((n - _SHAPE_FROM) / (_SHAPE_WHOLLY - _SHAPE_FROM), 0.0), 1.0)
        self._shift = _conformal(misses / doubt, cut, weight, each, float(np.median(doubt)))
        self.corrections += 1


def _conformal(scores: Floats, cut: Bools, weight: Floats, n: float, warning: float) -> Floats:
    """[25] of each level the score that so many do not exceed, on the safe side by one sample."""
    safe = np.where(LEVELS >= 0.5, np.minimum(1, LEVELS * (n + 1) / n), np.maximum(0, LEVELS - (1 - LEVELS) / n))
    return quantiles(scores, cut, weight, safe, 1 / (TAIL_SHAPE * warning))


def _warning(raw: Floats) -> float:
    return max(math.log(raw.item(_HIGH) / raw.item(_LOW)), _MIN_SPREAD)


_MEDIAN_TOKENS, _SPREAD = 200.0, 1.1
"""Before anything has finished: a log-normal about as wide as lengths of chats are."""
_MIN_LENGTHS = 8


def _unknown() -> Floats:
    z = np.array([NormalDist().inv_cdf(min(max(float(p), 0.002), 0.998)) for p in LEVELS])
    return np.asarray(_MEDIAN_TOKENS * np.exp(_SPREAD * z))


UNKNOWN: Floats = _unknown()
"""[25] quantiles of a length of which nothing at all is known."""


class Lengths:
    """Lengths of outputs, cut ones counted as longer than seen.

    Args:
        every: Finished requests between two looks, once there are many.
    """

    def __init__(self, every: int) -> None:
        self._every, self._new = every, 0
        self._seen = Ring(2)
        self.row: Floats | None = None
        """[25] their quantiles; None before there are some."""

    def add(self, tokens: int, *, cut: bool) -> None:
        """One more."""
        self._seen.add((math.log(tokens), cut))
        self._new += 1
        if self._seen.count >= _MIN_LENGTHS and self._new >= min(self._every, max(_MIN_LENGTHS, self._seen.count // 2)):
            self._new = 0
            log, is_cut = self._seen.rows.T
            weight = recent_weights(len(log), HALF_LIFE)
            row = np.exp(quantiles(log[:, None], is_cut > 0, weight, LEVELS, 1 / TAIL_SHAPE))
            self.row = np.maximum.accumulate(np.maximum(row, 1.0))


MOST_MODELS = 64
_RANKED, _SHOWN = 256, 16


class Learner:
    """Corrections by model, what stands in by model, and how well the order was predicted.

    Args:
        every: Finished requests of a model between two corrections.
        most_models: Of more, the one that was longest without a finished request is forgotten.
    """

    def __init__(self, every: int, most_models: int = MOST_MODELS) -> None:
        self._every, self._most = every, most_models
        self._models: OrderedDict[str, tuple[Learned, Lengths]] = OrderedDict()
        self._all = Lengths(every)
        self._ranked: deque[tuple[float, int]] = deque(maxlen=_RANKED)
        self.finished = 0

    def corrected(self, model: str, raw: Floats) -> Floats:
        """[25] the predictor's quantiles, as this model's outputs have them; a new model's as they are."""
        known = self._models.get(model)
        return raw if known is None else known[0].corrected(raw)

    def prior(self, model: str) -> Floats:
        """[25] lengths of this model's outputs, else of all, else of what is known of none."""
        known = self._models.get(model)
        if known is not None and known[1].row is not None:
            return known[1].row
        return UNKNOWN if self._all.row is None else self._all.row

    def finished_with(self, model: str, posterior: Belief, tokens: int, *, cut: bool) -> bool:
        """Learns from an output that ended by itself or at its limit; whether lengths have drifted with it."""
        learned, lengths = self._of(model)
        self.finished += 1
        lengths.add(tokens, cut=cut)
        self._all.add(tokens, cut=cut)
        if posterior.raw is None or posterior.complete is None:
            return False
        if not cut:
            self._ranked.append((posterior.first_tokens, tokens))
        return learned.finished_with(posterior.raw, posterior.complete, tokens, cut=cut)

    def tau(self) -> float | None:
        """Kendall's tau-b of predicted and true lengths over the last outputs; None before there are some."""
        if len(self._ranked) < 2:
            return None
        said, true = np.array(self._ranked).T
        rows, columns = np.triu_indices(len(said), 1)
        a, b = np.sign(said[rows] - said[columns]), np.sign(true[rows] - true[columns])
        spread = float(np.sqrt((a**2).sum() * (b**2).sum()))
        return float((a * b).sum()) / spread if spread else None

    def state(self) -> dict[str, Any]:
        """For people: the models that finished last first."""
        latest = islice(reversed(self._models.items()), _SHOWN)
        return {
            "finished": self.finished,
            "tau": self.tau(),
            "tau_of": len(self._ranked),
            "models": {name: learned.state() for name, (learned, _) in latest},
        }

    def _of(self, model: str) -> tuple[Learned, Lengths]:
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = (Learned(self._every), Lengths(self._every))
            if len(self._models) > self._most:
                self._models.popitem(last=False)
        self._models.move_to_end(model)
        return known
