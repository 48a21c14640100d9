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
class FitReport:
    """Cross-validated errors by operator; ``method`` says on which rows ("5-fold", "out of bag")."""

    estimator: str
    method: str
    operators: tuple[OperatorFit, ...]
