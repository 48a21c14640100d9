"""Learn from finished outputs, by model: corrections of quantiles, priors, and drift of lengths."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from itertools import islice
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.length_prediction.prediction import CorrectedPrediction
from lengthwise.gateway.request import MAX_TOKENS
from lengthwise.predict.distribution import LEVELS, TAIL_SHAPE
from lengthwise.statistics import Floats, kaplan_meier, ranked_cdf

Bools = npt.NDArray[np.bool_]


def recent_weights(n: int, half_life: float) -> Floats:
    """Return the weights of n values ([n]), oldest first. They halve with every ``half_life`` further values."""
    return np.asarray(0.5 ** (np.arange(n - 1, -1, -1) / half_life))


def quantiles(values: Floats, censored: Bools, weight: Floats, levels: Floats, tail: float) -> Floats:
    """Return quantiles [k]: entry j is the quantile of column j of ``values`` [n, k] at ``levels[j]``.

    If ``values`` is [n, 1], all quantiles are of its column. ``censored`` [n] marks values that are lower bounds
    (weighted Kaplan-Meier). Levels beyond the last uncensored value are taken from an exponential tail, which starts at
    the largest value and has the mean ``tail``.
    """
    ranked, cdf = ranked_cdf(values, censored, weight)
    top = cdf[-1]
    place = np.minimum((cdf < np.minimum(levels, top) - 1e-12).sum(axis=0), len(values) - 1)
    inside = ranked[place, np.arange(ranked.shape[1])] if ranked.shape[1] > 1 else ranked[place, 0]
    beyond = np.clip((levels - top) / np.maximum(1 - top, 1e-12), 0, 0.99)
    return np.asarray(np.where(levels > top + 1e-9, ranked[-1] - np.log1p(-beyond) * tail, inside))


def cumulative_share(values: Floats, censored: Bools, at: Floats) -> Floats:
    """Return, for each entry of ``at`` [m], the share of ``values`` [n] up to it ([m]), by Kaplan-Meier."""
    observed, cdf = kaplan_meier(values, censored)
    return np.concatenate([[0.0], cdf])[np.searchsorted(observed, at, side="right")]


REFERENCE, DRIFT_WINDOW, ALPHA = 512, 128, 0.001


class Drift:
    """Detects drift by comparing each window of residuals with a reference sample.

    A residual is log(length / predicted median), before any correction. The reference sample consists of the first
    REFERENCE residuals. Every further DRIFT_WINDOW residuals are tested against it by the Kolmogorov-Smirnov statistic
    or, with censored outputs, by the log-rank test (Mantel 1966). Without drift a test raises an alarm with probability
    ALPHA at most (asymptotically), which is one false alarm in DRIFT_WINDOW / ALPHA = 128,000 requests. After an alarm
    its window starts a new reference.
    """

    def __init__(self) -> None:
        self.tests = self.alarms = self.seen = 0
        self.last_at: int | None = None
        self._reference: list[tuple[float, bool]] = []
        self._new: list[tuple[float, bool]] = []

    def add(self, residual: float, *, censored: bool) -> bool:
        """Add a residual. Return whether it completes a window with drift."""
        self.seen += 1
        if len(self._reference) < REFERENCE:
            self._reference.append((residual, censored))
            return False
        self._new.append((residual, censored))
        if len(self._new) < DRIFT_WINDOW:
            return False
        new, self._new = self._new, []
        self.tests += 1
        (x, x_censored), (y, y_censored) = (np.array(sample).T for sample in (self._reference, new))
        if not differ(x, x_censored > 0, y, y_censored > 0, ALPHA):
            return False
        self.alarms += 1
        self.last_at, self._reference = self.seen, new
        return True

    def state(self) -> dict[str, Any]:
        """Return the state for the admin page."""
        return {
            "tests": self.tests,
            "alarms": self.alarms,
            "ended_since": None if self.last_at is None else self.seen - self.last_at,
            "false_alarms_a_test": ALPHA,
        }


def differ(x: Floats, x_censored: Bools, y: Floats, y_censored: Bools, alpha: float) -> bool:
    """Return whether two samples differ significantly in distribution, with a false-alarm rate of ``alpha``."""
    if x_censored.any() or y_censored.any():
        return abs(log_rank(x, x_censored, y, y_censored)) > NormalDist().inv_cdf(1 - alpha / 2)
    critical = math.sqrt(-math.log(alpha / 2) / 2 * (len(x) + len(y)) / (len(x) * len(y)))
    return kolmogorov_smirnov(x, y) > critical


def kolmogorov_smirnov(x: Floats, y: Floats) -> float:
    """Return the largest difference between the empirical distributions of two samples."""
    both = np.concatenate([x, y])
    first, second = (np.searchsorted(np.sort(part), both, side="right") / len(part) for part in (x, y))
    return float(np.abs(first - second).max())


def log_rank(x: Floats, x_censored: Bools, y: Floats, y_censored: Bools) -> float:
    """Return the log-rank statistic: observed minus expected uncensored values of ``y``, in standard deviations."""
    value, events = np.concatenate([x, y]), ~np.concatenate([x_censored, y_censored])
    of_y = np.arange(len(value)) >= len(x)
    times = np.unique(value[events])
    at_risk = len(value) - np.searchsorted(np.sort(value), times)
    at_risk_y = len(y) - np.searchsorted(np.sort(y), times)
    at = np.searchsorted(times, value[events])
    deaths = np.bincount(at, minlength=len(times))
    deaths_y = np.bincount(at, of_y[events], minlength=len(times))
    share = at_risk_y / np.maximum(at_risk, 1)
    variance = deaths * share * (1 - share) * (at_risk - deaths) / np.maximum(at_risk - 1, 1)
    return float((deaths_y - deaths * share).sum() / math.sqrt(max(float(variance.sum()), 1e-12)))


WINDOW, HALF_LIFE = 512, 256.0  # stored outputs, and number of further outputs after which a weight is halved
_LOW, _MEDIAN, _HIGH = (int(np.searchsorted(LEVELS, p)) for p in (0.1, 0.5, 0.9))
_MIN_SPREAD = 0.05
_MIN_OUTPUTS, _SHRINK = 8, 8.0  # outputs before the first correction, and for which the scale's weight is a half
_SHAPE_FROM, _SHAPE_FULL = 32, 96  # the conformal correction's share grows from 0 to 1 between these numbers of outputs
_COVERED = (0.1, 0.5, 0.8, 0.9)


class Ring:
    """The last WINDOW rows of numbers, oldest first."""

    def __init__(self, columns: int) -> None:
        self._rows, self._end, self.count = np.empty((2 * WINDOW, columns)), 0, 0

    def add(self, row: Any) -> None:
        """Append a row. If there are more than WINDOW rows, drop the oldest one."""
        if self._end == len(self._rows):
            rows = self.rows.copy()
            self._rows[: len(rows)], self._end = rows, len(rows)
        self._rows[self._end] = row
        self._end += 1
        self.count = min(self.count + 1, WINDOW)

    def truncate(self, last: int) -> None:
        """Drop all rows but the last ``last`` ones."""
        self.count = min(self.count, last)

    @property
    def rows(self) -> Floats:
        """Return the rows [count, columns], oldest first."""
        return self._rows[self._end - self.count : self._end]


class ModelCorrection:
    """Corrects the predictions for one model, by the lengths of its last outputs.

    The correction is renewed after ``every`` finished outputs, and earlier while there are few. At first a quantile q_p
    becomes q_p exp(m), where m is the median of log(length / predicted median), shrunk towards 0 while outputs are few.
    Later it becomes q_p exp(s z_p), where s = log(q_0.9 / q_0.1) is the spread of the prediction, and z_p is the
    p-quantile of log(length / q_p) / s over the last outputs. The share of lengths up to a quantile then equals its
    level (split conformal prediction, Romano, Patterson and Candes 2019; with decaying weights, Barber, Candes, Ramdas
    and Tibshirani 2023). Truncated outputs are censored.
    """

    def __init__(self, every: int) -> None:
        self.every, self.finished, self.corrections = every, 0, 0
        self.scale, self.shape_share = 0.0, 0.0
        self.drift = Drift()
        self._shift: Floats | None = None
        self._new = 0
        self._residuals = Ring(len(LEVELS) + 2)  # log(length / each quantile); the predictor's spread; censored
        self._levels = Ring(2)  # level of the length in the corrected prediction; censored

    def corrected(self, raw: Floats) -> Floats:
        """Return the corrected quantiles [25] for the predictor's quantiles ``raw``."""
        if self._shift is None:
            return raw
        moved = (1 - self.shape_share) * self.scale + self.shape_share * _spread(raw) * self._shift
        row = np.maximum.accumulate(raw * np.exp(np.minimum(np.maximum(moved, -8.0), 8.0)))
        return np.minimum(np.maximum(row, 1.0), MAX_TOKENS)

    def observe(self, raw: Floats, unbounded: Floats, tokens: int, *, censored: bool) -> bool:
        """Learn from an output of ``tokens`` tokens. Return whether lengths have drifted.

        ``raw`` [25] are the quantiles of the predictor, ``unbounded`` [25] the corrected ones.
        """
        row = np.empty(len(LEVELS) + 2)
        residuals = np.log(tokens / raw, out=row[:-2])
        row[-2], row[-1] = _spread(raw), censored
        self._residuals.add(row)
        self._levels.add((np.interp(tokens, unbounded, LEVELS), censored))
        self.finished += 1
        self._new += 1
        drifted = self.drift.add(float(residuals[_MEDIAN]), censored=censored)
        if drifted:
            self._residuals.truncate(DRIFT_WINDOW)
            self._levels.truncate(0)
        if drifted or self._new >= min(self.every, max(_MIN_OUTPUTS, self._residuals.count // 2)):
            self._correct()
        return drifted

    def coverage(self) -> dict[str, float]:
        """Return the share of outputs up to the predicted quantile, by level of the quantile, or {} without outputs."""
        if not self._levels.count:
            return {}
        level, censored = self._levels.rows.T
        shares = cumulative_share(level, censored > 0, np.array(_COVERED))
        return {f"{level:g}": float(share) for level, share in zip(_COVERED, shares, strict=True)}

    def state(self) -> dict[str, Any]:
        """Return the state for the admin page."""
        return {
            "finished": self.finished,
            "scale": float(np.exp(self.scale)),
            "calibrated_share": self.shape_share,
            "coverage": self.coverage(),
            "coverage_of": self._levels.count,
            "drift": self.drift.state(),
        }

    def _correct(self) -> None:
        self._new, n = 0, self._residuals.count
        if n < _MIN_OUTPUTS:
            return
        rows = self._residuals.rows
        residuals, spread, censored = rows[:, :-2], rows[:, -2:-1], rows[:, -1] > 0
        weight = recent_weights(n, HALF_LIFE)
        median = quantiles(residuals[:, [_MEDIAN]], censored, weight, np.array([0.5]), 1 / TAIL_SHAPE)
        self.scale = float(median[0]) * (n / (n + _SHRINK))
        self.shape_share = min(max((n - _SHAPE_FROM) / (_SHAPE_FULL - _SHAPE_FROM), 0.0), 1.0)
        effective = float(weight.sum() ** 2 / (weight**2).sum())
        # Conformal levels are shifted outwards by one sample.
        above, below = LEVELS * (effective + 1) / effective, LEVELS - (1 - LEVELS) / effective
        levels = np.where(LEVELS >= 0.5, np.minimum(1, above), np.maximum(0, below))
        tail = 1 / (TAIL_SHAPE * float(np.median(spread)))
        self._shift = quantiles(residuals / spread, censored, weight, levels, tail)
        self.corrections += 1


def _spread(raw: Floats) -> float:
    return max(math.log(raw.item(_HIGH) / raw.item(_LOW)), _MIN_SPREAD)


_MIN_LENGTHS = 8
UNKNOWN: Floats = 200.0 * np.exp(1.1 * np.array([NormalDist().inv_cdf(min(max(p, 0.002), 0.998)) for p in LEVELS]))
"""Quantiles [25] while there are too few outputs: of a log-normal about as wide as the lengths of chats."""


class Lengths:
    """Collects output lengths. ``row`` are their quantiles [25], or None while there are too few lengths."""

    def __init__(self, every: int) -> None:
        self._every, self._new, self._lengths = every, 0, Ring(2)
        self.row: Floats | None = None

    def add(self, tokens: int, *, censored: bool) -> None:
        """Add the length of an output."""
        self._lengths.add((math.log(tokens), censored))
        self._new += 1
        count = self._lengths.count
        if count >= _MIN_LENGTHS and self._new >= min(self._every, max(_MIN_LENGTHS, count // 2)):
            self._new = 0
            log, is_censored = self._lengths.rows.T
            weight = recent_weights(count, HALF_LIFE)
            row = np.exp(quantiles(log[:, None], is_censored > 0, weight, LEVELS, 1 / TAIL_SHAPE))
            self.row = np.maximum.accumulate(np.maximum(row, 1.0))


MAX_MODELS = 64
_RANKED, _MAX_REPORTED = 256, 16


class Learner:
    """Learns from finished outputs, separately by model, for the MAX_MODELS models that were used last."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._models: OrderedDict[str, tuple[ModelCorrection, Lengths]] = OrderedDict()
        self._all = Lengths(every)
        self._ranked: deque[tuple[float, int]] = deque(maxlen=_RANKED)
        self.finished = 0

    def corrected(self, model: str, raw: Floats) -> Floats:
        """Return the quantiles ``raw`` [25], corrected for the model, or unchanged for a model with too few outputs."""
        known = self._models.get(model)
        return raw if known is None else known[0].corrected(raw)

    def prior(self, model: str) -> Floats:
        """Return quantiles [25] of the model's lengths, or with too few outputs of all models' lengths, or UNKNOWN."""
        known = self._models.get(model)
        if known is not None and known[1].row is not None:
            return known[1].row
        return UNKNOWN if self._all.row is None else self._all.row

    def observe(self, model: str, prediction: CorrectedPrediction, tokens: int, *, censored: bool) -> bool:
        """Learn from an output that finished or reached its limit. Return whether lengths have drifted."""
        if model not in self._models:
            self._models[model] = (ModelCorrection(self._every), Lengths(self._every))
            if len(self._models) > MAX_MODELS:
                self._models.popitem(last=False)
        self._models.move_to_end(model)
        learned, lengths = self._models[model]
        self.finished += 1
        lengths.add(tokens, censored=censored)
        self._all.add(tokens, censored=censored)
        if prediction.raw is None or prediction.unbounded is None:
            return False
        if not censored:
            self._ranked.append((prediction.initial_total_tokens, tokens))
        return learned.observe(prediction.raw, prediction.unbounded, tokens, censored=censored)

    def tau(self) -> float | None:
        """Return Kendall's tau-b of predicted and true lengths of the last outputs, or None if it is undefined."""
        if len(self._ranked) < 2:
            return None
        predicted, true = np.array(self._ranked).T
        rows, columns = np.triu_indices(len(predicted), 1)
        a, b = np.sign(predicted[rows] - predicted[columns]), np.sign(true[rows] - true[columns])
        norm = float(np.sqrt((a**2).sum() * (b**2).sum()))
        return float((a * b).sum()) / norm if norm else None

    def state(self) -> dict[str, Any]:
        """Return the state for the admin page, with the 16 models that had the latest outputs."""
        latest = islice(reversed(self._models.items()), _MAX_REPORTED)
        return {
            "finished": self.finished,
            "tau": self.tau(),
            "tau_of": len(self._ranked),
            "models": {name: learned.state() for name, (learned, _) in latest},
        }
