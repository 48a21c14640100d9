"""One operator: every estimator tried on unseen points, one of them taken."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lengthwise.cost.estimators.learners import LEARNERS, FitResult, Learner, usable
from lengthwise.cost.estimators.points import Points
from lengthwise.cost.tables import OperatorFit, RegionFit
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.errors import ProfileError

FOLDS = 10
_MOST_ROWS = 4000
_LEAST_SHAPES = 4
_SLOW = ("forest",)
_SLOW_FOLDS = 4
REGIONS = ("small", "medium", "large", "out_of_range")


@dataclass(frozen=True)
class Validation:
    """What an estimator said of points that were held out.

    ``log_ratio`` [n] is log(measured / said), ``region`` [n] the index into REGIONS: thirds of the points
    between the outermost by their size, and the points beyond those that were learnt from. ``half`` [n] is 0 or
    1, the same of a place for every estimator: they are chosen by one half and told on the other.
    """

    log_ratio: Floats
    region: npt.NDArray[np.int64]
    half: npt.NDArray[np.int64]

    @property
    def inside(self) -> Floats:
        """Of points that have measured neighbours on all sides."""
        return np.asarray(self.log_ratio[self.region < len(REGIONS) - 1], dtype=np.float64)

    @property
    def out_of_range(self) -> Floats:
        """Of the largest third, told by the others."""
        return np.asarray(self.log_ratio[self.region == len(REGIONS) - 1], dtype=np.float64)

    def of_half(self, half: int) -> Validation:
        """The points of one half."""
        own = self.half == half
        return Validation(self.log_ratio[own], self.region[own], self.half[own])


def joined_halves(first: Validation, second: Validation) -> Validation:
    """The first half of one estimator with the second half of another."""
    parts = (first.of_half(0), second.of_half(1))
    columns = ([getattr(part, name) for part in parts] for name in ("log_ratio", "region", "half"))
    return Validation(*(np.concatenate(column) for column in columns))


def held_out(name: str, learner: Learner, points: Points) -> Validation:
    """What the learner says of every interior place without its rows, and of the largest third without all of it.

    Each place that is no extreme of an axis is told from the others: places are dealt out in turn along the
    axes to FOLDS folds, so that a place is held out while its neighbours stay, as if it were left out alone. The
    edges of every axis are never held out inside: what lies at them is only told as beyond.
    """
    points = thinned(points)
    places = points.places()
    size = points.roofline
    inner = interior(points)
    fold = _dealt(points, _SLOW_FOLDS if name in _SLOW else FOLDS)
    said = np.full(len(points), np.nan)
    for one in range(fold.max() + 1):
        hidden = inner & (fold == one)
        if hidden.any() and (~hidden).any():
            said[hidden] = learner(points.take(~hidden))(points.take(hidden))
    rows = np.flatnonzero(inner & np.isfinite(said))
    third = np.searchsorted(np.quantile(size[rows], [1 / 3, 2 / 3]), size[rows]) if len(rows) else rows
    outside, told = _out_of_range(learner, points, places, size)
    log_ratio = np.log(points.seconds[np.concatenate([rows, outside])] / np.concatenate([said[rows], told]))
    region = np.concatenate([third, np.full(len(outside), len(REGIONS) - 1)])
    half = _dealt(points, FOLDS)[np.concatenate([rows, outside])] % 2
    return Validation(log_ratio, region.astype(np.int64), half)


def thinned(points: Points) -> Points:
    """The timed points; if they are many, every so many shapes whole, so that neighbours along the axes stay."""
    points = points.take(points.seconds > 0)
    if len(points) <= _MOST_ROWS:
        return points
    step = -(-len(points) // _MOST_ROWS)
    shapes, kind = np.unique(points.shape, axis=0, return_inverse=True)
    kept = kind.ravel() if len(shapes) >= _LEAST_SHAPES * step else points.places()
    return points.take(kept % step == 0)


def interior(points: Points) -> npt.NDArray[np.bool_]:
    """[n] whether a point lies between the first and the last of its shape on every axis that varies."""
    inner = np.ones(len(points), dtype=bool)
    _, kind = np.unique(points.shape, axis=0, return_inverse=True)
    for one in np.unique(kind.ravel()):
        rows = kind.ravel() == one
        for axis in points.axes[rows].T:
            if axis.min() < axis.max():
                inner[rows] &= (axis > axis.min()) & (axis < axis.max())
    return inner


def _dealt(points: Points, folds: int) -> npt.NDArray[np.int64]:
    """[n] a fold by rank on every axis: neighbours along an axis never share one."""
    turn = np.zeros(len(points), dtype=np.int64)
    columns = [*points.shape.T, *points.axes.T]
    for step, column in zip((1, 3, 7, 9, 11, 13, 17, 19), columns[::-1], strict=False):
        turn += step * np.unique(column, return_inverse=True)[1].ravel()
    return np.asarray(turn % folds, dtype=np.int64)


def _out_of_range(
    learner: Learner, points: Points, places: npt.NDArray[np.int64], size: Floats
) -> tuple[npt.NDArray[np.int64], Floats]:
    """(rows, said) of the largest third of the places, from the smaller ones."""
    by_place = np.zeros(places.max() + 1)
    by_place[places] = size
    if len(by_place) < 6:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    large = by_place[places] > np.quantile(by_place, 2 / 3)
    said = learner(points.take(~large))(points.take(large))
    return np.flatnonzero(large), said


MULTIPLE = ("auto", "all")
"""Take the best of several by held-out points; "all" tries the forest, too, which takes a minute."""

_FEW_ROWS = 8
LEAST_HELD = 3
"""Fewer held-out points than this tell no error."""

FAR_FACTORS = {"tp": 1.6, "model": 1.5, "gpu": 2.3}
"""How many times its error where it was measured (beyond the points, too) physics has on another TP degree, model
or GPU: the 75th percentile over operators that were measured on both sides. Of LLMServingSim's kernels of vLLM
(RTX 4090, RTX PRO 6000), Vidur's (A100, H100, A40; six models) and AIConfigurator's (A100, H100, H200, B200):

=======  =======  ======  ===============  ===============  ================================
carried  carries  median  75th percentile  90th percentile  root-mean-square error: own, there
=======  =======  ======  ===============  ===============  ================================
tp          1262    1.21             1.56             2.07  0.13, 0.17
model       1496    1.16             1.50             1.84  0.12, 0.14
gpu          482    1.68             2.31             3.55  0.16, 0.32
=======  =======  ======  ===============  ===============  ================================

The worst is the embedding on another GPU (9.4 at the 75th percentile); attention and products
of matrices there are at 1.8 and less. Several at once multiply."""


@dataclass(frozen=True)
class Judged:
    """An operator's estimator, learnt from all points, and how far it is off.

    Attributes:
        operator: Its name.
        estimator: The one taken: the best on all held-out points.
        fit_result: Tells seconds.
        rows: Points that it learnt from.
        log_sd: Of log(measured / said) on held-out points, inside, or with those beyond where the tables go on
            beyond the points; each half told by the estimator that the other half chose. None: too few to tell.
        compared: The errors of every estimator that was tried.
        error: (median, 95th percentile) of the relative error on the same points; None: too few to tell, or the
            points are of another shard, model or GPU, whose errors are not those here.
        carried: The points are of another shard, model or GPU.
        is_made_up: Some of the points were made up and not measured.
    """

    operator: str
    estimator: str
    fit_result: FitResult
    rows: int
    log_sd: float | None
    compared: tuple[RegionFit, ...]
    error: tuple[float, float] | None
    carried: bool
    is_made_up: bool = False

    def summary(self) -> OperatorFit | None:
        """The errors inside (beyond, where nothing was inside); None where they cannot be told."""
        return None if self.error is None else OperatorFit(self.operator, self.rows, *self.error)


def judge(points: Points, estimator: str, *, out_of_range: bool, carried: Collection[str] = ()) -> Judged:
    """The estimator asked for, or (SEVERAL) the one with the smallest error on unseen points.

    Args:
        points: What was measured.
        estimator: Of LEARNERS, or of SEVERAL.
        out_of_range: The tables go beyond the points; then errors beyond count as much as those inside.
        carried: What the tables have another of (FAR_FACTORS): then only physics may speak.

    Raises:
        ProfileError: The estimator cannot learn from these points.
    """
    names = _candidates(points, estimator, elsewhere=bool(carried))
    held = {name: held_out(name, LEARNERS[name], points) for name in names} if len(points) > 2 else {}
    compared = tuple(fit for name, of in held.items() for fit in _regions(points.operator, name, of))
    picked = _best(held, out_of_range=out_of_range) if held else names[0]
    told = nested_choice(held, out_of_range=out_of_range) if held else None
    counted = _counted(told, out_of_range=out_of_range or bool(carried)) if told else np.zeros(0)
    log_sd = _rms(counted) if len(counted) >= LEAST_HELD else None
    if log_sd is not None:
        log_sd *= math.prod(FAR_FACTORS[what] for what in carried)
    inside = _counted(told, out_of_range=False) if told else np.zeros(0)
    error = _errors(inside) if len(inside) >= LEAST_HELD and not carried else None
    fitted = LEARNERS[picked](points)
    return Judged(points.operator, picked, fitted, len(points), log_sd, compared, error, bool(carried))


def made_up(evaluated: Judged) -> Judged:
    """The same without any error: how far made-up points lie from each other says nothing of a device."""
    return replace(evaluated, log_sd=None, compared=(), error=None, is_made_up=True)


def nested_choice(validation: Mapping[str, Validation], *, out_of_range: bool) -> Validation:
    """Held-out points, each half told by the estimator that is best on the other half.

    The best of several on some points looks better on these than it is; on others it has no such luck.
    """
    chosen = [
        _best({name: of.of_half(1 - half) for name, of in validation.items()}, out_of_range=out_of_range)
        for half in (0, 1)
    ]
    return joined_halves(validation[chosen[0]], validation[chosen[1]])


def _best(validation: Mapping[str, Validation], *, out_of_range: bool) -> str:
    return min(validation, key=lambda name: _score(validation[name], out_of_range=out_of_range))


def _candidates(points: Points, estimator: str, *, elsewhere: bool) -> list[str]:
    if elsewhere:
        if estimator not in (*MULTIPLE, "physics"):
            raise ProfileError(
                f"{points.operator} was measured for another shard, model or GPU, of which only the estimator "
                f"physics can speak; {estimator} was asked for. Use physics or auto, or measure this one."
            )
        return ["physics"]
    if estimator in MULTIPLE:
        names = [name for name in LEARNERS if usable(name, points) and (name != "forest" or estimator == "all")]
        return names if len(points) >= _FEW_ROWS else ["physics"]
    return [estimator] if usable(estimator, points) else ["physics"]


def _score(validation: Validation, *, out_of_range: bool) -> float:
    """Root mean square of the log errors inside; with those beyond, half and half."""
    inside, outside = _rms(validation.inside), _rms(validation.out_of_range)
    scores = [inside, outside] if out_of_range else [inside]
    known = [score for score in scores if np.isfinite(score)]
    return float(np.mean(known)) if known else float("inf")


def _counted(validation: Validation, *, out_of_range: bool) -> Floats:
    """Log errors inside; with those beyond where these count, or alone where nothing is inside."""
    return (
        np.concatenate([validation.inside, validation.out_of_range])
        if out_of_range or not len(validation.inside)
        else validation.inside
    )


def _rms(log_ratio: Floats) -> float:
    return float(np.sqrt(np.mean(log_ratio**2))) if len(log_ratio) else float("nan")


def _regions(operator: str, estimator: str, validation: Validation) -> list[RegionFit]:
    groups = [(name, validation.log_ratio[validation.region == i]) for i, name in enumerate(REGIONS)]
    groups.insert(len(REGIONS) - 1, ("inside", validation.inside))
    return [RegionFit(operator, estimator, name, len(ratio), *_errors(ratio)) for name, ratio in groups if len(ratio)]


def _errors(log_ratio: Floats) -> tuple[float, float]:
    """(median, 95th percentile) of |said / measured - 1|."""
    error = np.abs(np.expm1(-log_ratio))
    return float(np.median(error)), float(np.quantile(error, 0.95))
