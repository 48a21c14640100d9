"""Scores of predicted distributions against lengths, some of them cut, and of resampled prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.predict._holdout import by_prompt
from lengthwise.predict._known import Known
from lengthwise.predict.contract import Ints, Prompts
from lengthwise.predict.distribution import Floats, LengthDistribution
from lengthwise.schema.estimate import Estimate

BINS = (2, 4, 8)
_PINBALL = np.round(np.arange(0.05, 0.96, 0.05), 2)
_MOST_RANKED = 4000
"""Kendall's tau of a resample takes at most so many requests, drawn from it."""


def groups(prompts: Prompts, n: int) -> Ints:
    """[n] the number of each request's prompt; where nobody kept texts, each is its own."""
    if prompts.text is None:
        return np.arange(n)
    return by_prompt(prompts.text)[1]


def resampled(group: Ints, draws: int, seed: int) -> list[Ints]:
    """Rows of so many bootstrap samples over groups, a group always whole."""
    distinct, group = np.unique(group, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(len(distinct) + 1))
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(distinct), (draws, len(distinct)))
    return [np.concatenate([order[starts[g] : starts[g + 1]] for g in one]) for one in drawn]


def of_all(
    said: LengthDistribution, known: Known, model: npt.NDArray[Any], again: Sequence[Ints]
) -> dict[str, Estimate]:
    """Every score with its interval."""
    columns = _Columns(said, known, model)
    names = [*_SCORES, "tau_within", *(f"{what}_{k}" for k in BINS for what in ("accuracy", "within_one"))]
    return {name: _estimate(columns, name, again) for name in names}


def of_some(
    said: LengthDistribution, known: Known, again: Sequence[Ints], names: Sequence[str]
) -> dict[str, Estimate]:
    """Some scores with their intervals."""
    columns = _Columns(said, known, np.zeros(len(said), object))
    return {name: _estimate(columns, name, again) for name in names}


def points(said: LengthDistribution, known: Known, model: npt.NDArray[Any]) -> dict[str, float]:
    """Scores without intervals, for many small groups."""
    columns = _Columns(said, known, model)
    everyone = np.arange(len(said))
    return {name: columns.score(name, everyone) for name in _SCORES}


class _Columns:
    """What scores are made of, a value a request, all up to the horizon."""

    def __init__(self, said: LengthDistribution, known: Known, model: npt.NDArray[Any]) -> None:
        self.actual, self.weight, end = known.tokens, known.weight, known.horizon
        self.median = np.minimum(whole(said.median), end)
        self.mean = np.minimum(whole(known.mean(said)), end)
        low, high = whole(said.quantile(0.05)), whole(said.quantile(0.95))
        self.covered = known.below(said, np.rint(high), 0.95) - known.below(said, np.rint(low) - 1, 0.05)
        self.width = high - low
        errors = [(self.actual - np.minimum(whole(said.quantile(p)), end), p) for p in _PINBALL]
        self.pinball = np.mean([np.maximum(p * e, (p - 1) * e) for e, p in errors], axis=0)
        self.model = np.unique(model.astype(str), return_inverse=True)[1].reshape(-1)
        self.bins: dict[int, Floats] = {}
        for k in BINS:
            edges = known.quantiles(np.arange(1, k) / k)
            off = np.searchsorted(edges, np.rint(self.median), side="right") - np.searchsorted(
                edges, self.actual, side="right"
            )
            self.bins[k] = np.abs(off).astype(float)

    def score(self, name: str, rows: Ints) -> float:
        if name in _SCORES:
            return _SCORES[name](self, rows)
        if name == "tau_within":
            found = [kendall(self.median[r], self.actual[r]) for r in _by(self.model[rows], rows)]
            return float(np.nanmean(found)) if np.isfinite(found).any() else float("nan")
        what, _, k = name.rpartition("_")
        return self.over(self.bins[int(k)] <= (0 if what == "accuracy" else 1), rows)

    def over(self, values: npt.NDArray[Any], rows: Ints) -> float:
        """The weighted mean over some rows."""
        return float(np.average(values[rows], weights=self.weight[rows]))

    def told(self, predicted: Floats, actual: Floats, rows: Ints) -> float:
        return r2(predicted[rows], actual[rows], self.weight[rows])


def kendall(predicted: Floats, actual: Floats) -> float:
    """Kendall's tau-b: the share of pairs in the right order less that in the wrong one; NaN where all are equal."""
    from scipy.stats import kendalltau

    if len(actual) < 2 or np.ptp(predicted) == 0 or np.ptp(actual) == 0:
        return float("nan")
    return float(kendalltau(predicted, actual).statistic)


def r2(predicted: Floats, actual: Floats, weight: Floats | None = None) -> float:
    """The share of the variance that is told; NaN where there is none."""
    w = np.ones(len(actual)) if weight is None else weight
    total = float((w * (actual - np.average(actual, weights=w)) ** 2).sum())
    return 1 - float((w * (actual - predicted) ** 2).sum()) / total if total > 0 else float("nan")


def whole(tokens: Floats) -> Floats:
    """Lengths without the error of rounding: what is a whole number but for a millionth is it."""
    near = np.rint(tokens)
    return np.where(np.abs(tokens - near) < 1e-6, near, tokens)


def _by(group: Ints, rows: Ints) -> list[Ints]:
    order = np.argsort(group, kind="stable")
    return [rows[part] for part in np.split(order, np.flatnonzero(np.diff(group[order])) + 1)]


def _estimate(columns: _Columns, name: str, again: Sequence[Ints]) -> Estimate:
    value = columns.score(name, np.arange(len(columns.actual)))
    ranked = name.startswith("tau")
    if not again or not np.isfinite(value):
        return Estimate(value)
    seen = [columns.score(name, rows[:: -(-len(rows) // _MOST_RANKED)] if ranked else rows) for rows in again]
    return Estimate(value, 1.96 * float(np.nanstd(seen)))


_SCORES: dict[str, Callable[[_Columns, Ints], float]] = {
    "mae": lambda c, r: c.over(np.abs(c.actual - c.median), r),
    "rmse": lambda c, r: float(np.sqrt(c.over((c.actual - c.mean) ** 2, r))),
    "r2": lambda c, r: c.told(c.mean, c.actual, r),
    "log_r2": lambda c, r: c.told(np.log(c.median), np.log(c.actual), r),
    "bias": lambda c, r: c.over(c.mean - c.actual, r),
    "tau": lambda c, r: kendall(c.median[r], c.actual[r]),
    "coverage90": lambda c, r: c.over(c.covered, r),
    "width90": lambda c, r: c.over(c.width, r),
    "pinball": lambda c, r: c.over(c.pinball, r),
}
