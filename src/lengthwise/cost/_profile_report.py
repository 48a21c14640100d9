"""How good a fit is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OperatorFit:
    """How well an operator's unseen rows are predicted: relative errors over ``rows`` rows."""

    name: str
    rows: int
    median_error: float
    p95_error: float


@dataclass(frozen=True)
class RegionFit:
    """One estimator's relative errors on an operator's unseen rows in one region.

    ``region`` is "small", "medium", "large" (thirds, between the measured points), "inside" (all three) or
    "beyond" (the largest third, told by the rest: what extrapolation costs).
    """

    operator: str
    estimator: str
    region: str
    rows: int
    median_error: float
    p95_error: float


@dataclass(frozen=True)
class FitReport:
    """Cross-validated errors by operator; ``method`` says on which rows ("5-fold", "out of bag").

    Attributes:
        estimator: What was asked for.
        method: How the rows that were not seen were chosen.
        operators: The errors of the estimator that the tables use.
        compared: Every estimator that was tried, by operator and region.
        picked: (operator, estimator) of the tables.
        filled: What the profile lacks and where it was taken from.
        notes: What a reader must know: extrapolation, rows left out, how far sums are off.
    """

    estimator: str
    method: str
    operators: tuple[OperatorFit, ...]
    compared: tuple[RegionFit, ...] = ()
    picked: tuple[tuple[str, str], ...] = ()
    filled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
