"""Profiles with a law that is known, for tests of what learns from them."""

from __future__ import annotations

from typing import Any

import numpy as np

from lengthwise import catalog
from lengthwise.cost.estimators.points import Points, Target, combined, shard_points
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.profile import OPERATOR_PARTS, Profile, ProfileFacts

MODEL, GPU = catalog.model("llama-3.1-8b"), catalog.gpu("H100")
NODE = catalog.default_node(GPU, 8)
LIMITS = EngineLimits(max_num_seqs=64, max_num_batched_tokens=1024)
LONGEST = 4096
FACTORS = np.array([1.4, 0.6, 1.25, 1.0, 2.0, 1.5])
LAYER = ("norms", "qkv projection", "rope", "output projection", "mlp up", "activation", "mlp down", "kv write")
OPERATORS = (*LAYER, "embedding", "final norm", "lm head", "sampler", "prefill attention", "decode attention")
TOKENS = np.unique(np.geomspace(1, 2048, 28).round()).astype(int)


def target(tp: int = 1, **changes: Any) -> Target:
    return Target(MODEL, GPU, NODE, Parallelism(tp), LIMITS, changes.get("longest", LONGEST))


def places(operator: str, tokens: np.ndarray = TOKENS) -> dict[str, np.ndarray]:
    """Columns of a grid of the operator's own axes."""
    part = OPERATOR_PARTS[operator]
    if part == "prefill":
        chunk, context = (x.ravel() for x in np.meshgrid([16, 64, 256, 512, 1024, 2048], [0, 256, 1024, 4096, 8192]))
        return {"chunk": chunk, "context": context, "seqs": np.ones_like(chunk)}
    if part == "decode":
        seqs, mean = (x.ravel() for x in np.meshgrid([1, 4, 16, 64, 128], [64, 256, 1024, 4096, 8192]))
        return {"seqs": seqs, "kv_tokens": seqs * mean, "skew": np.ones(len(seqs))}
    return {"tokens": tokens}


def planted(operator: str, tp: int = 1, noise: float = 0.0, tokens: np.ndarray = TOKENS) -> Points:
    """Points whose seconds are the roofline's parts times FACTORS, and noise of a fixed seed."""
    columns = places(operator, tokens)
    found = shard_points(operator, columns, target(tp))
    assert found is not None
    seconds = combined(found.parts, FACTORS)
    wobble = np.exp(noise * np.random.default_rng(len(operator) + tp).standard_normal(len(seconds)))
    again = shard_points(operator, {**columns, "seconds": seconds * wobble}, target(tp))
    assert again is not None
    return again


def profile(
    degrees: tuple[int, ...] = (1,),
    *,
    operators: tuple[str, ...] = OPERATORS,
    noise: float = 0.0,
    dtype: str = "bfloat16",
    gpu: str = "H100",
    model: str = "llama-3.1-8b",
    more: tuple[dict[str, Any], ...] = (),
) -> Profile:
    """A profile of planted operators; ``more`` are rows as they are."""
    rows = []
    for tp in degrees:
        for operator in operators:
            columns, seconds = places(operator), planted(operator, tp, noise).seconds
            for i, measured in enumerate(seconds):
                rows.append(
                    {"operator": operator, "tp": tp, "dtype": dtype, "seconds": measured}
                    | {name: column[i] for name, column in columns.items()}
                )
    rows += list(more)
    names = sorted({name for row in rows for name in row})
    text = ("operator", "dtype", "kv_dtype", "backend")
    columns = {name: np.array([row.get(name, "" if name in text else 0) for row in rows]) for name in names}
    return Profile(ProfileFacts("made", "lengthwise", gpu, model), columns)
