"""One operator: every estimator tried on unseen points, one of them taken."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.cost._profile_report import OperatorFit, RegionFit
from lengthwise.cost.estimators._folds import REGIONS, Held, held_out, joined_halves
from lengthwise.cost.estimators._learners import LEARNERS, Fitted, usable
from lengthwise.cost.estimators._points import Points
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.errors import ProfileError

SEVERAL = ("auto", "all")
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
        fitted: Tells seconds.
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
    fitted: Fitted
    rows: int
    log_sd: float | None
    compared: tuple[RegionFit, ...]
    error: tuple[float, float] | None
    carried: bool
    is_made_up: bool = False

    def summary(self) -> OperatorFit | None:
        """The errors inside (beyond, where nothing was inside); None where they cannot be told."""
        return None if self.error is None else OperatorFit(self.operator, self.rows, *self.error)


def judge(points: Points, estimator: str, *, beyond: bool, carried: Collection[str] = ()) -> Judged:
    """The estimator asked for, or (SEVERAL) the one with the smallest error on unseen points.

    Args:
        points: What was measured.
        estimator: Of LEARNERS, or of SEVERAL.
        beyond: The tables go beyond the points; then errors beyond count as much as those inside.
        carried: What the tables have another of (FAR_FACTORS): then only physics may speak.

    Raises:
        ProfileError: The estimator cannot learn from these points.
    """
    names = _candidates(points, estimator, elsewhere=bool(carried))
    held = {name: held_out(name, LEARNERS[name], points) for name in names} if len(points) > 2 else {}
    compared = tuple(fit for name, of in held.items() for fit in _regions(points.operator, name, of))
    picked = _best(held, beyond=beyond) if held else names[0]
    told = nested_choice(held, beyond=beyond) if held else None
    counted = _counted(told, beyond=beyond or bool(carried)) if told else np.zeros(0)
    log_sd = _rms(counted) if len(counted) >= LEAST_HELD else None
    if log_sd is not None:
        log_sd *= math.prod(FAR_FACTORS[what] for what in carried)
    inside = _counted(told, beyond=False) if told else np.zeros(0)
    error = _errors(inside) if len(inside) >= LEAST_HELD and not carried else None
    fitted = LEARNERS[picked](points)
    return Judged(points.operator, picked, fitted, len(points), log_sd, compared, error, bool(carried))


def made_up(judged: Judged) -> Judged:
    """The same without any error: how far made-up points lie from each other says nothing of a device."""
    return replace(judged, log_sd=None, compared=(), error=None, is_made_up=True)


def nested_choice(held: Mapping[str, Held], *, beyond: bool) -> Held:
    """Held-out points, each half told by the estimator that is best on the other half.

    The best of several on some points looks better on these than it is; on others it has no such luck.
    """
    chosen = [
        _best({name: of.of_half(1 - half) for name, of in held.items()}, beyond=beyond) for half in (0, 1)
    ]
    return joined_halves(held[chosen[0]], held[chosen[1]])


def _best(held: Mapping[str, Held], *, beyond: bool) -> str:
    return min(held, key=lambda name: _score(held[name], beyond=beyond))


def _candidates(points: Points, estimator: str, *, elsewhere: bool) -> list[str]:
    if elsewhere:
        if estimator not in (*SEVERAL, "physics"):
            raise ProfileError(
                f"{points.operator} was measured for another shard, model or GPU, of which only the estimator "
                f"physics can speak; {estimator} was asked for. Use physics or auto, or measure this one."
            )
        return ["physics"]
    if estimator in SEVERAL:
        names = [
            name for name in LEARNERS if usable(name, points) and (name != "forest" or estimator == "all")
        ]
        return names if len(points) >= _FEW_ROWS else ["physics"]
    return [estimator] if usable(estimator, points) else ["physics"]


def _score(held: Held, *, beyond: bool) -> float:
    """Root mean square of the log errors inside; with those beyond, half and half."""
    inside, outside = _rms(held.inside), _rms(held.beyond)
    scores = [inside, outside] if beyond else [inside]
    known = [score for score in scores if np.isfinite(score)]
    return float(np.mean(known)) if known else float("inf")


def _counted(held: Held, *, beyond: bool) -> Floats:
    """Log errors inside; with those beyond where these count, or alone where nothing is inside."""
    return np.concatenate([held.inside, held.beyond]) if beyond or not len(held.inside) else held.inside


def _rms(log_ratio: Floats) -> float:
    return float(np.sqrt(np.mean(log_ratio**2))) if len(log_ratio) else float("nan")


def _regions(operator: str, estimator: str, held: Held) -> list[RegionFit]:
    groups = [(name, held.log_ratio[held.region == i]) for i, name in enumerate(REGIONS)]
    groups.insert(len(REGIONS) - 1, ("inside", held.inside))
    return [
        RegionFit(operator, estimator, name, len(ratio), *_errors(ratio))
        for name, ratio in groups
        if len(ratio)
    ]


def _errors(log_ratio: Floats) -> tuple[float, float]:
    """(median, 95th percentile) of |said / measured - 1|."""
    error = np.abs(np.expm1(-log_ratio))
    return float(np.median(error)), float(np.quantile(error, 0.95))
