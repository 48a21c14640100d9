"""Perturbs cost tables by the error of the cost model, with a small, fixed design of draws for the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import or_
from statistics import NormalDist
from zlib import crc32

import numpy as np

from lengthwise import catalog
from lengthwise.cost import roofline_note
from lengthwise.schema.cost_tables import NOT_MEASURED, CostTables, Floats, Front, PartError
from lengthwise.schema.deployment import Deployment

DRAWS = 16  # perturbed copies of the tables
LEVEL = 0.9  # of the intervals that follow from them
MAX_REPEATED_REQUESTS = 50_000  # larger runs are not repeated with perturbed tables by default
_NAMES = ("layer", "comm", "embedding", "send", "head", "host", "prefill", "decode", "masked", "shared")
PARTS = {name: f"{name}_s" for name in _NAMES}  # of a step; the front end has an error, too
CONTEXT = "context"  # prefill attention beyond that of the same chunk without context
FIT_ERROR_LIMIT = 0.2  # results warn of the fit of an operator whose median error on held-out rows is larger
_DESIGNS = 200
_Part = tuple[str, int]  # a part, and the index of its error (rarely more than one)


def perturbed(tables: CostTables, draws: int = DRAWS, seed: int = 0) -> list[CostTables]:
    """Return ``draws`` copies of the tables, each part times a log-normal factor; no copies if no error is known."""
    return [made for (made,) in _perturbed([tables], draws, seed)]


def perturbed_degrees(
    tables: Mapping[int, CostTables], draws: int = DRAWS, seed: int = 0
) -> list[dict[int, CostTables]]:
    """Return perturbed tables of several tensor-parallel degrees. In each draw, a part has one error at all degrees."""
    return [dict(zip(tables, made, strict=True)) for made in _perturbed(list(tables.values()), draws, seed)]


def comparable_deployments(deployment: Deployment, draws: int = DRAWS) -> list[Deployment]:
    """Return the deployment and ``draws`` copies with perturbed cost tables.

    In each draw, deployments of the same model and GPU have the same errors, so that they can be compared draw by draw.
    Both sides of a disaggregated deployment share them, too, if they have the same GPU, and each group of replicas has
    those of its own GPU. If no error is known, there are no copies.
    """
    if deployment.groups:
        return _mixed_draws(deployment, [comparable_deployments(one, draws) for one in deployment.replica_groups])
    if not draws or not any(_errors(side.cost, side.cost.evidence.errors) for side in deployment.sides):
        return [deployment]
    made = [
        [_scaled(side.cost, side.cost.evidence.errors, one) for one in _normals(side, draws)]
        for side in deployment.sides
    ]
    return [deployment, *(_with_tables(deployment, tables) for tables in zip(*made, strict=True))]


def _normals(deployment: Deployment, draws: int) -> list[dict[_Part, float]]:
    """Return the standard normal values of all parts in each draw, which are those of the model and the GPU."""
    seed = crc32(f"{deployment.model.name} on {deployment.gpu.name}".encode())
    columns = (*(part for part in PARTS if part != "shared"), "step", "front")
    designs = [design(draws, len(columns), seed + index) for index in range(2)]
    rows = [np.stack([one[row] for one in designs]).T.tolist() for row in range(draws)]
    context, shared = (design(draws, 1, seed + offset)[:, 0].tolist() for offset in (2, 3))
    normals = ({(part, k): z for part, pair in zip(columns, row) for k, z in enumerate(pair)} for row in rows)  # noqa: B905
    more = ({(CONTEXT, 0): z, ("shared", 0): shared_z} for z, shared_z in zip(context, shared, strict=True))
    return list(map(or_, normals, more))


def _with_tables(deployment: Deployment, tables: Sequence[CostTables]) -> Deployment:
    """Return the deployment with the tables of each side."""
    made = replace(deployment, cost=tables[0])
    return made if made.decode is None else replace(made, decode=replace(made.decode, cost=tables[1]))


def perturbed_deployments(deployment: Deployment, draws: int = DRAWS) -> list[Deployment]:
    """Return ``draws`` copies of the deployment with perturbed tables, also on the decode side and in all groups.

    Sides with the same GPU have the same errors, sides with different ones have errors of their own.
    """
    if deployment.groups:  # Equal tables of several groups have equal errors.
        return _mixed_draws(deployment, [perturbed_deployments(one, draws) for one in deployment.replica_groups])
    sides = deployment.sides
    made = [perturbed(side.cost, draws, int(side.gpu != deployment.gpu)) for side in sides]
    most = max(map(len, made))
    return [
        _with_tables(deployment, [(drawn or [side.cost] * most)[draw] for side, drawn in zip(sides, made, strict=True)])
        for draw in range(most)
    ]


def _mixed_draws(deployment: Deployment, by_group: Sequence[Sequence[Deployment]]) -> list[Deployment]:
    """Return the deployment of each draw from those of its groups; a group without known errors has no draws."""
    count, made = max(map(len, by_group)), []
    for draw in range(count):
        first, *others = (
            copies[draw] if len(copies) == count else group
            for copies, group in zip(by_group, deployment.replica_groups, strict=True)
        )
        made.append(replace(first, groups=tuple(others)))
    return made


def _perturbed(tables: Sequence[CostTables], draws: int, seed: int) -> list[list[CostTables]]:
    errors = [error for one in tables for error in _errors(one, one.evidence.errors)]
    for one in tables:
        if one.other:
            other = one.other.tables
            errors += _errors(other, other.evidence.errors or one.evidence.errors)
    parts = list(dict.fromkeys(part for part, _ in errors))
    if not parts or not draws:
        return []
    rows = (dict(zip(parts, row, strict=True)) for row in design(draws, len(parts), seed).tolist())
    return [[_scaled(one, one.evidence.errors, normal) for one in tables] for normal in rows]


def _errors(tables: CostTables, errors: Sequence[PartError]) -> list[tuple[_Part, PartError]]:
    """Return the nonzero errors of parts that take any time (one GPU has no collectives, one stage sends nothing)."""
    found: list[tuple[_Part, PartError]] = []
    for error in errors:
        used = tables.front != Front() if error.part == "front" else error.part == "step"
        used = used or (error.part == CONTEXT and bool((tables.prefill_s != tables.prefill_s[:, :1]).any()))
        used = used or (error.part in PARTS and bool(np.any(getattr(tables, PARTS[error.part]))))
        if used and max(error.log_sd, error.slow_log_sd or 0.0) > 0:
            found.append(((error.part, sum(part[0] == error.part for part, _ in found)), error))
    return found


def _scaled(tables: CostTables, default: Sequence[PartError], normal: Mapping[_Part, float]) -> CostTables:
    errors = _errors(tables, tables.evidence.errors or default)
    factor, front = dict.fromkeys(PARTS, 1.0), tables.front
    context = 1.0 if any(error.part == CONTEXT for _, error in errors) else None
    for key, error in errors:
        z = normal.get(key, 0.0)
        sd = error.log_sd if z < 0 or error.slow_log_sd is None else error.slow_log_sd
        by = float(np.exp(sd * z))
        if error.part == "front":
            front = Front(front.request_s * by, front.serial_s * float(np.exp(error.log_sd * z)))
            continue
        if context is not None and error.part in {CONTEXT, "step"}:
            context *= by
        for part in PARTS if error.part == "step" else {error.part} - {CONTEXT}:
            factor[part] *= by
    given = [part for part, by in factor.items() if by != 1.0 and getattr(tables, PARTS[part]) is not None]
    seconds = {PARTS[part]: getattr(tables, PARTS[part]) * factor[part] for part in given}
    if context is not None:
        own_s = tables.prefill_s[:, :1]
        seconds["prefill_s"] = own_s * factor["prefill"] + (tables.prefill_s - own_s) * context
    other = tables.other
    if other is not None:
        other = replace(other, tables=_scaled(other.tables, tables.evidence.errors, normal))
    return replace(tables, **seconds, front=front, other=other)


def hardware_note(deployment: Deployment) -> str:
    """Return a sentence on what the roofline does not know of the hardware. It is empty for other cost sources."""
    roofline = f"roofline of {deployment.model.name} on {deployment.gpu.name}"
    source = deployment.cost.evidence.source
    return roofline_note(deployment.gpu) if source.startswith(roofline) and "calibrated" not in source else ""


def fit_warning(tables: CostTables) -> str:
    """Return a sentence that warns of operators that fit their profile badly. It is empty if there are none."""
    every = [*tables.evidence.fit, *(tables.other.tables.evidence.fit if tables.other else ())]
    worst: dict[str, float] = {}
    for one in every:
        worst[one.operator] = max(one.median, worst.get(one.operator, 0.0))
    poor = {name: median for name, median in worst.items() if median > FIT_ERROR_LIMIT}
    if not poor:
        return ""
    named = ", ".join(f"{name} by {median:.0%}" for name, median in sorted(poor.items(), key=lambda one: -one[1]))
    return (
        f"The cost tables fit their profile badly: held-out rows are off by more than {FIT_ERROR_LIMIT:.0%} at the "
        f"median ({named}). Do not rely on step times before `lengthwise profile fit` shows smaller errors."
    )


FP8_BLOCK = 128  # weights in each direction that share one scale in the FP8 checkpoints of DeepSeek, Qwen3 and others


def _fp8_block_note(deployment: Deployment) -> str:
    """Return a note if GPUs divide an MLP between blocks of FP8 weights with one scale, which vLLM refuses."""
    model, parallel = deployment.model, deployment.parallel
    if (deployment.limits.weight_dtype or model.dtype) != "fp8":
        return ""
    ffn, sharing = model.ffn, parallel.tp * parallel.dp // parallel.ep  # GPUs that divide an expert
    divided = {
        "an expert": (ffn.expert_intermediate if ffn.experts else 0, sharing, " Set ep = tp x dp, or a smaller tp."),
        "an MLP": (0 if ffn.experts and not ffn.dense_layers else ffn.intermediate, parallel.tp, " Set a smaller tp."),
    }
    for name, (columns, gpus, advice) in divided.items():
        if columns % FP8_BLOCK == 0 and columns % (FP8_BLOCK * gpus):
            return (
                f"vLLM refuses FP8 weights with one scale for {FP8_BLOCK} x {FP8_BLOCK} of them here: {name} of "
                f"{model.name} has {columns / gpus:g} columns on each of {gpus} GPUs, which is no multiple of "
                f"{FP8_BLOCK}.{advice} Checkpoints with one scale for a tensor or a channel load."
            )
    return ""


def _unlike_sides_note(deployment: Deployment) -> str:
    """Return a note if prefill and decode replicas have two kinds of GPU, whose KV transfer is not checked."""
    gpus = [side.gpu for side in deployment.sides]
    if deployment.decode is None or len({gpu.name for gpu in gpus}) == 1:
        return ""
    is_mixed = len({gpu.is_nvidia for gpu in gpus}) > 1
    vendors = ", here with an engine built for each of two vendors" if is_mixed else ""
    return (
        "KV transfer between two kinds of GPU depends on their attention backends and KV layouts, which lengthwise "
        f"does not check{vendors}."
    )


def deployment_notes(deployment: Deployment) -> tuple[str, ...]:
    """Return caveats on a deployment's costs as sentences: bad fits, rows not measured, simplified attention."""
    tables = [side.cost for side in deployment.sides]
    notes = [*map(hardware_note, deployment.sides), *map(fit_warning, tables)]
    if any(NOT_MEASURED in one.evidence.source for one in tables):
        notes.append(f"The cost tables rest on {NOT_MEASURED}: their source says which.")
    notes += map(_fp8_block_note, deployment.sides)
    notes.append(_unlike_sides_note(deployment))
    if deployment.model.attention.linear and deployment.limits.enable_prefix_caching and not deployment.kv.groups:
        notes.append(
            f"Prefix cache of {deployment.model.name}: hits are those of the layers with full attention. vLLM also "
            "needs states that it saved at block boundaries, and finds less: the hits are optimistic."
        )
    notes += catalog.approximations(deployment.model, in_groups=deployment.kv.groups is not None)
    return tuple(dict.fromkeys(note for note in notes if note))


@lru_cache(maxsize=64)
def design(draws: int, parts: int, seed: int = 0) -> Floats:
    """Return [draws, parts] standard normal values whose columns are evenly spread and hardly correlated.

    Each column has the normal quantiles of evenly spaced midpoints in random order (a Latin hypercube). Of 200 such
    designs, the least correlated is taken.
    """
    normal = NormalDist()  # of the standard library: importing scipy.special takes 0.2 s
    midpoints = np.array([normal.inv_cdf((number + 0.5) / draws) for number in range(draws)])
    rng = np.random.default_rng(seed)
    made = (np.column_stack([rng.permutation(midpoints) for _ in range(parts)]) for _ in range(_DESIGNS))

    def correlation(values: Floats) -> float:
        return float(np.abs(np.atleast_2d(np.corrcoef(values.T)) - np.eye(parts)).max())

    best: Floats = min(made, key=correlation)
    best.setflags(write=False)
    return best
