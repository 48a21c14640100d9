"""Chooses the estimator of an operator by errors on held-out points."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.cost.estimators.fitters import FITTERS, Fitter, Predictor, can_fit
from lengthwise.cost.estimators.points import Points
from lengthwise.cost.tables import OperatorFit, RegionFit
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.errors import ProfileError

FOLDS, FOREST_FOLDS = 10, 4
_MAX_ROWS = 4000
_MIN_SHAPES = 4
REGIONS = ("small", "medium", "large", "out_of_range")


@dataclass(frozen=True)
class Validation:
    """Errors of an estimator on held-out points."""

    log_ratio: Floats  # [n] log(measured / predicted)
    region: npt.NDArray[np.int64]  # [n] index into REGIONS: thirds by size, or beyond the fitted points
    half: npt.NDArray[np.int64]  # [n] 0 or 1 by place: one half chooses the estimator, the other reports its errors

    @property
    def inside(self) -> Floats:
        """Return the log ratios of the points that have measured neighbours on all sides."""
        return np.asarray(self.log_ratio[self.region < len(REGIONS) - 1], dtype=np.float64)

    @property
    def out_of_range(self) -> Floats:
        """Return the log ratios of the largest third of the points, predicted from the other points."""
        return np.asarray(self.log_ratio[self.region == len(REGIONS) - 1], dtype=np.float64)

    def of_half(self, half: int) -> Validation:
        """Return the errors on the points of one half (0 or 1) of the held-out points."""
        own = self.half == half
        return Validation(self.log_ratio[own], self.region[own], self.half[own])

    def counted(self, *, out_of_range: bool) -> Floats:
        """Return the log ratios that count for the error of a fit.

        These are the ratios inside. With ``out_of_range``, or if there are none inside, ratios out of range are added.
        """
        if out_of_range or not len(self.inside):
            return np.concatenate([self.inside, self.out_of_range])
        return self.inside

    def score(self, *, out_of_range: bool) -> float:
        """Return the score by which estimators are compared. The smallest score is the best.

        The score is the root mean square of the log ratios inside. With ``out_of_range``, it is the mean of the
        root mean squares inside and out of range.
        """
        scores = [_rms(self.inside), _rms(self.out_of_range)] if out_of_range else [_rms(self.inside)]
        known = [score for score in scores if np.isfinite(score)]
        return float(np.mean(known)) if known else float("inf")


def cross_validate(name: str, fitter: Fitter, points: Points) -> Validation:
    """Return the errors of an estimator on points to which it was not fitted.

    A place is a combination of shape and sizes. Places inside the measured range are predicted from other places, fold
    by fold; the largest third of the places is also predicted from the rest.
    """
    points = _sample(points)
    places, size, inner = points.places(), points.roofline, interior(points)
    # Neighbours of a held-out place are not held out with it; places at the edge of an axis are never held out here.
    fold = _folds(points, FOREST_FOLDS if name == "forest" else FOLDS)
    predicted = np.full(len(points), np.nan)
    for number in range(fold.max() + 1):
        hidden = inner & (fold == number)
        if hidden.any() and (~hidden).any():
            predicted[hidden] = fitter(points.take(~hidden))(points.take(hidden))
    rows = np.flatnonzero(inner & np.isfinite(predicted))
    third = np.searchsorted(np.quantile(size[rows], [1 / 3, 2 / 3]), size[rows]) if len(rows) else rows

    outside, extrapolated = np.zeros(0, dtype=np.int64), np.zeros(0)
    by_place = np.zeros(places.max() + 1)
    by_place[places] = size
    if len(by_place) >= 6:
        large = by_place[places] > np.quantile(by_place, 2 / 3)
        outside, extrapolated = np.flatnonzero(large), fitter(points.take(~large))(points.take(large))

    both = np.concatenate([rows, outside])
    log_ratio = np.log(points.seconds[both] / np.concatenate([predicted[rows], extrapolated]))
    region = np.concatenate([third, np.full(len(outside), len(REGIONS) - 1)])
    return Validation(log_ratio, region.astype(np.int64), _folds(points, FOLDS)[both] % 2)


def _sample(points: Points) -> Points:
    points = points.take(points.seconds > 0)
    if len(points) <= _MAX_ROWS:
        return points
    stride = -(-len(points) // _MAX_ROWS)
    shapes, shape = np.unique(points.shape, axis=0, return_inverse=True)
    group = shape.ravel() if len(shapes) >= _MIN_SHAPES * stride else points.places()
    return points.take(group % stride == 0)


def interior(points: Points) -> npt.NDArray[np.bool_]:
    """Return [n] whether a point is strictly inside the range of its shape on every axis that varies."""
    inner = np.ones(len(points), dtype=bool)
    shape = np.unique(points.shape, axis=0, return_inverse=True)[1].ravel()
    for number in np.unique(shape):
        rows = shape == number
        for axis in points.axes[rows].T:
            if axis.min() < axis.max():
                inner[rows] &= (axis > axis.min()) & (axis < axis.max())
    return inner


def _folds(points: Points, folds: int) -> npt.NDArray[np.int64]:
    """Return the fold of each point, an array of shape [n]. Neighbours along an axis never share a fold."""
    turn = np.zeros(len(points), dtype=np.int64)
    for step, column in zip((1, 3, 7, 9, 11, 13, 17, 19), points.features.T[::-1], strict=False):
        turn += step * np.unique(column, return_inverse=True)[1].ravel()
    return np.asarray(turn % folds, dtype=np.int64)


SELECTIONS = ("auto", "all")  # by held-out points; "all" tries the forest, too, which takes a minute
_MIN_ROWS = 8
MIN_HELD_OUT = 3  # with fewer held-out points, the error is unknown
TRANSFER_FACTORS = {"tp": 1.6, "model": 1.5, "gpu": 2.3}
"""Error of physics on another TP degree, model or GPU, divided by its error where it was measured.

The 75th percentile over operators measured on both sides (1,262, 1,496 and 482 transfers; medians 1.21, 1.16, 1.68):
LLMServingSim's kernels of vLLM (RTX 4090, RTX PRO 6000), Vidur's (A100, H100, A40; six models) and AIConfigurator's
(A100, H100, H200, B200). The worst is the embedding on another GPU (9.4); attention and matrix products are at 1.8 or
less. Factors of several transfers multiply."""


@dataclass(frozen=True)
class ValidatedFit:
    """The estimator chosen for an operator, fitted to all points, and its error."""

    operator: str
    estimator: str
    predict: Predictor
    rows: int
    # Root mean square of log(measured / predicted) on held-out points, inside, and out of range if the tables
    # extrapolate; each half is predicted by the estimator that the other half chose. None: too few points.
    log_sd: float | None
    compared: tuple[RegionFit, ...]
    error: tuple[float, float] | None  # (median, 95th percentile), None: too few points, or ``is_transferred``
    is_transferred: bool  # the points belong to another shard, model or GPU
    is_made_up: bool = False

    def summary(self) -> OperatorFit | None:
        """Return the errors of the fit for a report, or None if they are unknown."""
        return None if self.error is None else OperatorFit(self.operator, self.rows, *self.error)


def fit_validated(
    points: Points, estimator: str, *, out_of_range: bool, transfers: Collection[str] = ()
) -> ValidatedFit:
    """Fit an estimator to the points of an operator, and measure its error on held-out points.

    For a name of SELECTIONS, the estimator with the smallest error is fitted. If there are too few points to choose,
    or to fit the requested estimator, this function fits "physics". ``transfers`` are keys of TRANSFER_FACTORS in which
    the tables differ from the points; then only physics can predict. Raises ProfileError if another one is requested.
    """
    if transfers and estimator not in (*SELECTIONS, "physics"):
        raise ProfileError(
            f"{points.operator} was measured for another shard, model or GPU, which only the estimator physics "
            f"can predict; {estimator} was requested. Use physics or auto, or measure this one."
        )
    names = ["physics"]
    if not transfers and estimator in SELECTIONS and len(points) >= _MIN_ROWS:
        names = [name for name in FITTERS if can_fit(name, points) and (name != "forest" or estimator == "all")]
    elif not transfers and estimator not in SELECTIONS and can_fit(estimator, points):
        names = [estimator]

    chosen, compared, log_sd, error = names[0], list[RegionFit](), None, None
    if len(points) > 2:
        validations = {name: cross_validate(name, FITTERS[name], points) for name in names}
        chosen = _best(validations, out_of_range=out_of_range)
        for name, own in validations.items():
            groups = [(region, own.log_ratio[own.region == i]) for i, region in enumerate(REGIONS)]
            groups.insert(len(REGIONS) - 1, ("inside", own.inside))
            fits = ((region, len(ratio), *_errors(ratio)) for region, ratio in groups if len(ratio))
            compared += [RegionFit(points.operator, name, *fit) for fit in fits]
        validation = nested_choice(validations, out_of_range=out_of_range)
        counted = validation.counted(out_of_range=out_of_range or bool(transfers))
        if len(counted) >= MIN_HELD_OUT:
            log_sd = _rms(counted) * math.prod(TRANSFER_FACTORS[transfer] for transfer in transfers)
        inside = validation.counted(out_of_range=False)
        error = _errors(inside) if len(inside) >= MIN_HELD_OUT and not transfers else None
    return ValidatedFit(
        points.operator, chosen, FITTERS[chosen](points), len(points), log_sd, tuple(compared), error, bool(transfers)
    )


def nested_choice(validations: Mapping[str, Validation], *, out_of_range: bool) -> Validation:
    """Return the held-out errors. The estimator of each half of the points is the best one on the other half."""
    halves = []  # on the points that chose it, an estimator looks better than it is
    for half in (0, 1):
        other = {name: validation.of_half(1 - half) for name, validation in validations.items()}
        halves.append(validations[_best(other, out_of_range=out_of_range)].of_half(half))
    columns = ([getattr(half, name) for half in halves] for name in ("log_ratio", "region", "half"))
    return Validation(*(np.concatenate(column) for column in columns))


def _best(validations: Mapping[str, Validation], *, out_of_range: bool) -> str:
    return min(validations, key=lambda name: validations[name].score(out_of_range=out_of_range))


def _rms(log_ratio: Floats) -> float:
    return float(np.sqrt(np.mean(log_ratio**2))) if len(log_ratio) else float("nan")


def _errors(log_ratio: Floats) -> tuple[float, float]:
    """Return (median, 95th percentile) of |predicted / measured - 1|."""
    error = np.abs(np.expm1(-log_ratio))
    return float(np.median(error)), float(np.quantile(error, 0.95))
