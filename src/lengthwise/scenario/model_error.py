"""Cost tables that are a little off: a small, fixed design of how wrong the parts of a step may be."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from lengthwise.schema.cost_tables import CostTables, Floats, PartError

DRAWS = 16
LEVEL = 0.9
LARGEST_RUN = 50_000
"""Requests of a run up to which it is repeated without being asked."""

PARTS = {
    "layer": "layer_s",
    "comm": "comm_s",
    "first": "first_s",
    "send": "send_s",
    "head": "head_s",
    "host": "host_s",
    "prefill": "prefill_s",
    "decode": "decode_s",
}
_DESIGNS = 200


def perturbed(cost: CostTables, draws: int = DRAWS, seed: int = 0) -> list[CostTables]:
    """``draws`` times the tables, their parts multiplied by log-normal factors; none without errors.

    The factors are a Latin hypercube: each part takes every one of ``draws`` evenly likely values once,
    in an order that makes parts as independent as so few draws can be. Equal input gives equal bytes.
    """
    errors = [error for error in cost.errors if error.log_sd > 0 and _is_used(cost, error)]
    if not errors or not draws:
        return []
    normal = design(draws, len(errors), seed)
    return [_scaled(cost, errors, row) for row in normal]


def _is_used(cost: CostTables, error: PartError) -> bool:
    """Whether the part takes any time here: one GPU has no collectives, one stage sends nothing."""
    return error.part == "step" or bool(np.any(getattr(cost, PARTS[error.part])))


def _scaled(cost: CostTables, errors: list[PartError], normal: Floats) -> CostTables:
    factor = dict.fromkeys(PARTS, 1.0)
    for error, z in zip(errors, normal.tolist(), strict=True):
        for part in PARTS if error.part == "step" else (error.part,):
            factor[part] *= float(np.exp(error.log_sd * z))
    tables = {PARTS[part]: getattr(cost, PARTS[part]) * by for part, by in factor.items() if by != 1.0}
    return replace(cost, **tables)


@lru_cache(maxsize=16)
def design(draws: int, parts: int, seed: int = 0) -> Floats:
    """[draws, parts] standard normal values: a Latin hypercube of middles, the least correlated of 200."""
    from scipy.special import ndtri

    middles = ndtri((np.arange(draws) + 0.5) / draws)
    rng = np.random.default_rng(seed)
    made = (np.column_stack([rng.permutation(middles) for _ in range(parts)]) for _ in range(_DESIGNS))
    best: Floats = min(made, key=_correlation)
    best.setflags(write=False)
    return best


def _correlation(values: Floats) -> float:
    """The largest correlation of any two columns."""
    if values.shape[1] < 2:
        return 0.0
    return float(np.abs(np.corrcoef(values.T) - np.eye(values.shape[1])).max())
