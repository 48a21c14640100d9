"""Cost tables that are a little off: a small, fixed design of how wrong the parts of a step may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from lengthwise.cost import roofline_note
from lengthwise.schema.cost_tables import CostTables, Floats, Front, PartError
from lengthwise.schema.deployment import Deployment

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
    "masked": "masked_s",
}
"""The parts of a step; beside them there is "front", a request's way into the engine."""
_DESIGNS = 200


def perturbed(cost: CostTables, draws: int = DRAWS, seed: int = 0) -> list[CostTables]:
    """``draws`` times the tables, their parts multiplied by log-normal factors; none without errors.

    The factors are a Latin hypercube: each part takes every one of ``draws`` evenly likely values once,
    in an order that makes parts as independent as so few draws can be. Equal input gives equal bytes.
    """
    return [made for (made,) in _changed([cost], draws, seed)]


def perturbed_degrees(
    tables: Mapping[int, CostTables], draws: int = DRAWS, seed: int = 0
) -> list[dict[int, CostTables]]:
    """The same of tables of several tensor-parallel degrees: a part is as far off in one of them as in the others."""
    return [dict(zip(tables, made, strict=True)) for made in _changed(list(tables.values()), draws, seed)]


def _changed(tables: Sequence[CostTables], draws: int, seed: int) -> list[list[CostTables]]:
    """[draws][tables] all of them off by the same normal value a part."""
    errors = [error for cost in tables for error in _errors(cost)]
    errors += [
        error for cost in tables if cost.other for error in _errors(cost.other, cost.other.errors or cost.errors)
    ]
    parts = list(dict.fromkeys(part for part, _ in errors))
    if not parts or not draws:
        return []
    rows = (dict(zip(parts, row, strict=True)) for row in design(draws, len(parts), seed).tolist())
    return [[_scaled(cost, cost.errors, normal) for cost in tables] for normal in rows]


_Part = tuple[str, int]
"""A part, and which of its errors it is, of which there is rarely more than one."""


def _errors(cost: CostTables, given: Sequence[PartError] | None = None) -> list[tuple[_Part, PartError]]:
    """The errors, its own or those given, of parts that take any time in these tables."""
    told: list[tuple[_Part, PartError]] = []
    for error in cost.errors if given is None else given:
        if max(error.log_sd, error.slow_log_sd or 0.0) > 0 and _is_used(cost, error):
            told.append(((error.part, sum(part[0] == error.part for part, _ in told)), error))
    return told


def perturbed_deployments(deployment: Deployment, draws: int = DRAWS) -> list[Deployment]:
    """``draws`` times the deployment, its tables (and those of a decode side, of the same design) a little off."""
    made = [replace(deployment, cost=cost) for cost in perturbed(deployment.cost, draws)]
    there = deployment.decode
    if there is None:
        return made
    others = perturbed(there.cost, draws) or [there.cost] * len(made)
    return [replace(one, decode=replace(there, cost=cost)) for one, cost in zip(made, others, strict=True)]


def _is_used(cost: CostTables, error: PartError) -> bool:
    """Whether the part takes any time here: one GPU has no collectives, one stage sends nothing."""
    if error.part == "front":
        return cost.front != Front()
    return error.part == "step" or bool(np.any(getattr(cost, PARTS[error.part])))


def _scaled(cost: CostTables, given: Sequence[PartError], normal: Mapping[_Part, float]) -> CostTables:
    """The tables, and those of their other degree, by their own errors; those without any by the given ones."""
    factor, front = dict.fromkeys(PARTS, 1.0), cost.front
    for key, error in _errors(cost, cost.errors or given):
        z = normal.get(key, 0.0)
        if error.part == "front":
            queue_s = front.queue_s * float(np.exp(error.log_sd * z))
            front = Front(front.request_s * _factor(error, z), queue_s)
            continue
        for part in PARTS if error.part == "step" else (error.part,):
            factor[part] *= _factor(error, z)
    seconds = {PARTS[part]: getattr(cost, PARTS[part]) * by for part, by in factor.items() if by != 1.0}
    other = None if cost.other is None else _scaled(cost.other, cost.errors, normal)
    return replace(cost, **seconds, front=front, other=other)


def _factor(error: PartError, z: float) -> float:
    """What a part is multiplied by that is ``z`` standard deviations slower than said."""
    sd = error.log_sd if z < 0 or error.slow_log_sd is None else error.slow_log_sd
    return float(np.exp(sd * z))


def hardware_note(deployment: Deployment) -> str:
    """What the roofline does not know of the hardware, a sentence; empty where costs come from elsewhere."""
    roofline = f"roofline of {deployment.model.name} on {deployment.gpu.name}"
    source = deployment.cost.source
    return roofline_note(deployment.gpu) if source.startswith(roofline) and "calibrated" not in source else ""


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
