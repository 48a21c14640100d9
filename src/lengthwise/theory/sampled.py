"""Service times that were seen, as theory needs them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.theory.service import Floats, checked_cuts


@dataclass(frozen=True, eq=False)
class SampledTimes:
    """Service times that were seen (or cells of any distribution), each as likely as the others.

    Attributes:
        values_s: [n] positive seconds, in any order.
    """

    values_s: npt.ArrayLike

    def __post_init__(self) -> None:
        values = np.sort(np.asarray(self.values_s, float).ravel())
        if len(values) == 0 or not (np.isfinite(values).all() and values[0] > 0):
            shown = "none" if len(values) == 0 else f"{values[0]:g} to {values[-1]:g}"
            raise InputError(f"sampled service times must be finite and above 0, at least one; got {shown}")
        object.__setattr__(self, "values_s", values)

    @classmethod
    def from_quantiles(
        cls, levels: npt.ArrayLike, values_s: npt.ArrayLike, count: int = 2000
    ) -> SampledTimes:
        """``count`` cells of a distribution that is linear between its quantiles."""
        at = (np.arange(count) + 0.5) / count
        return cls(np.interp(at, np.asarray(levels, float), np.asarray(values_s, float)))

    @property
    def mean_s(self) -> float:
        """Mean of the sample."""
        return float(self._sorted.mean())

    @property
    def second_moment(self) -> float:
        """Mean square of the sample."""
        return float(np.mean(self._sorted**2))

    def quantile(self, level: npt.ArrayLike) -> Floats:
        """The least values that at least the shares ``level`` of the sample stay at or below."""
        place = np.ceil(np.asarray(level, float) * len(self._sorted) - 1e-9).astype(int) - 1
        return np.asarray(self._sorted[np.clip(place, 0, len(self._sorted) - 1)])

    def masses(self, cuts_s: npt.ArrayLike) -> Floats:
        """[k] the share of the sample in each bin."""
        return np.diff(self._counts(cuts_s)) / len(self._sorted)

    def expected_max_s(self, cuts_s: npt.ArrayLike, shares: npt.ArrayLike, batch: int) -> float:
        """Sum of value x (F^batch - F before^batch), drawn with replacement."""
        counts = np.diff(self._counts(cuts_s))
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(counts > 0, np.asarray(shares, float) / counts, 0.0)
        reached = np.minimum(np.cumsum(np.repeat(each, counts)), 1.0)
        reached[-1] = 1.0
        return float(self._sorted @ np.diff(reached**batch, prepend=0.0))

    def cells(self, count: int) -> tuple[Floats, Floats]:
        """The distinct values, or, where they are more, ``count`` runs of the sample at their means."""
        values, counts = self._distinct
        if len(values) <= count:
            return values, counts / counts.sum()
        runs = np.array_split(self._sorted, count)
        return np.array([run.mean() for run in runs]), np.array([len(run) for run in runs]) / len(
            self._sorted
        )

    @cached_property
    def _distinct(self) -> tuple[Floats, npt.NDArray[np.int64]]:
        values, counts = np.unique(self._sorted, return_counts=True)
        return values, counts

    @property
    def _sorted(self) -> Floats:
        values: Floats = self.values_s  # type: ignore[assignment]  # made so by __post_init__
        return values

    def _counts(self, cuts_s: npt.ArrayLike) -> npt.NDArray[np.int64]:
        inner = np.searchsorted(self._sorted, checked_cuts(cuts_s), side="right")
        return np.concatenate(([0], inner, [len(self._sorted)])).astype(np.int64)
