"""Lengths as they turn out: what was planned with, put right by what was seen, cut-off answers included."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from lengthwise.workload import Marginal

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LEVELS = 4096
PRIOR_ANSWERS = 20.0
"""For so many answers that were seen stands what was planned with."""
_RATIO_ANSWERS = 5.0
ENDLESS = 2**40
"""Of a model of which nothing is known: longer than any limit."""


@dataclass(frozen=True, eq=False)
class Spread:
    """A distribution of lengths.

    Attributes:
        values: [k] tokens, ascending.
        beyond: [k] share that is longer than each; nothing behind the last.
    """

    values: Floats
    beyond: Floats

    @classmethod
    def of(cls, marginal: Marginal | None) -> Spread:
        """What is planned with; None: as long as may be."""
        if marginal is None:
            return cls(np.array([float(ENDLESS)]), np.zeros(1))
        tokens = np.maximum(np.rint(marginal.quantile((np.arange(LEVELS) + 0.5) / LEVELS)), 1.0)
        values, counts = np.unique(tokens, return_counts=True)
        return cls(values, 1.0 - np.cumsum(counts) / LEVELS)

    def longer_than(self, tokens: npt.ArrayLike) -> Floats:
        """Share that is longer."""
        place = np.searchsorted(self.values, tokens, side="right")
        return np.asarray(np.concatenate([[1.0], self.beyond])[place])

    def drawn(self, level: Floats, above: Ints) -> Ints:
        """[n] lengths of answers that already have so many tokens; twice as many where none was thought so long."""
        left = self.longer_than(above)
        place = np.searchsorted(-self.beyond, -(left * (1.0 - level)), side="left")
        tokens = self.values[np.minimum(place, len(self.values) - 1)]
        return np.where(left > 0, np.maximum(tokens, above + 1), 2 * np.maximum(above, 1)).astype(np.int64)

    def mean(self, most: float) -> float:
        """Of lengths that are cut at a limit."""
        mass = -np.diff(self.beyond, prepend=1.0)
        return float((np.minimum(self.values, most) * mass).sum())


@dataclass(frozen=True, eq=False)
class Seen:
    """Answers of one model.

    Attributes:
        ended: [n] tokens of those that ended by themselves.
        cut: [m] tokens that others have at least: they go on, or came to their limit.
    """

    ended: Floats
    cut: Floats

    def at_risk(self, tokens: Floats) -> Floats:
        """[k] how many were seen to have at least so many tokens."""
        parts = (np.sort(self.ended), np.sort(self.cut))
        return np.asarray(
            sum(len(part) - np.searchsorted(part, tokens, side="left") for part in parts), float
        )


def updated(prior: Spread, seen: Seen) -> Spread:
    """The distribution after what was seen: Kaplan-Meier's, with what was planned with as ``PRIOR_ANSWERS`` answers.

    (The mean of a beta-Stacy process, Walker and Muliere 1997.) What was planned with has its hazards scaled as those
    seen were (proportional hazards): long answers are not seen to end before they could. What no one was seen to end
    at, and nothing was planned for, ends at twice the longest.
    """
    ended, expected, _ = _against(prior, seen)
    prior = Spread(prior.values, prior.beyond ** ((ended + _RATIO_ANSWERS) / (expected + _RATIO_ANSWERS)))
    values = np.union1d(prior.values, seen.ended)
    before = np.concatenate([[1.0], prior.longer_than(values)])
    ends = np.bincount(np.searchsorted(values, seen.ended), minlength=len(values))
    weight = PRIOR_ANSWERS * -np.diff(before)
    risk = PRIOR_ANSWERS * before[:-1] + seen.at_risk(values)
    hazard = np.divide(weight + ends, risk, out=np.zeros(len(values)), where=risk > 0)
    beyond = np.cumprod(1.0 - np.clip(hazard, 0.0, 1.0))
    if beyond[-1] > 1.0 / LEVELS:
        longest = 2.0 * max(values[-1], seen.cut.max(initial=0.0))
        return Spread(np.append(values, longest), np.append(beyond, 0.0))
    return Spread(values, np.append(beyond[:-1], 0.0))


def has_moved(prior: Spread, seen: Seen, chance: float) -> bool:
    """Whether answers end otherwise than planned, wrongly said with at most this chance.

    Answers that ended less those that should have by the tokens written so far, the cut ones' too, are a martingale
    (the one-sample log-rank test); Bernstein's inequality holds it.
    """
    ended, expected, variance = _against(prior, seen)
    loud = math.log(2.0 / chance)
    return abs(ended - expected) > loud / 3 + math.sqrt(loud * loud / 9 + 2.0 * variance * loud)


def _against(prior: Spread, seen: Seen) -> tuple[int, float, float]:
    """Answers that ended, those that should have by the tokens that were written, and the variance of those."""
    before = np.concatenate([[1.0], prior.beyond])[:-1]
    hazard = np.clip(-np.diff(prior.beyond, prepend=1.0) / np.maximum(before, 1e-12), 0.0, 1.0)
    risk = seen.at_risk(prior.values)
    return len(seen.ended), float((hazard * risk).sum()), float((hazard * (1.0 - hazard) * risk).sum())
