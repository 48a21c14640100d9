"""A replica of a system other than RRA and WAA: its stages, what its memory leaves for the cache, its deployment."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.schedule._prepared import Setting
from lengthwise.schedule.layout import Layout, rra_layout
from lengthwise.schedule.memory import stage_bytes
from lengthwise.schema.cost_tables import Front
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.errors import InputError

BLOCK_TOKENS = 16
ENDLESS_BLOCKS = 10**7
"""Blocks where memory was counted before: none is ever short."""


@dataclass(frozen=True)
class Replica:
    """``pp`` stages of ``tp`` GPUs each, ``replicas`` times over."""

    tp: int
    pp: int
    replicas: int
    layout: Layout


def replicas_of(setting: Setting) -> tuple[Replica, ...]:
    """All ways to cut a cluster into equal replicas of equal stages that use every GPU, large degrees first."""
    gpus, node = setting.cluster.gpus, setting.cluster.node.gpus
    found = []
    for tp in sorted(setting.tables, reverse=True):
        if tp > node or gpus % tp:
            continue
        for pp in (stages for stages in range(1, gpus // tp + 1) if gpus // tp % stages == 0):
            layout = _even(setting.model.layers, tp, pp)
            if layout.stages:
                found.append(Replica(tp, pp, gpus // tp // pp, layout))
    return tuple(found)


def cache_tokens(setting: Setting, layout: Layout, step_tokens: float, step_seqs: float) -> int:
    """Tokens whose cache fits beside the weights and what a step's activations take; 0: none does."""
    left, last = math.inf, len(layout.stages) - 1
    shares = setting.sizes(layout.stages)
    for place, stage in enumerate(layout.stages):
        share = shares[stage.tp]
        weights = share.weight_bytes(stage.layers, stage.role, first=place == 0, last=place == last)
        activations = step_tokens * share.token_bytes + step_seqs * share.seq_bytes
        left = min(
            left, (setting.usable_bytes - weights - activations) / (stage.layers * share.kv_layer_bytes)
        )
    return max(0, math.floor(left))


def memory_share(
    setting: Setting, layout: Layout, held_tokens: float, step_tokens: float, step_seqs: float
) -> float:
    """What the fullest GPU needs over what it has."""
    columns = (np.array([float(value)]) for value in (held_tokens, step_tokens, step_seqs))
    kv, tokens, seqs = columns
    needed, _ = stage_bytes(setting.sizes(layout.stages), layout.stages, kv, None, tokens, seqs)
    return float(needed[0] / setting.usable_bytes)


def deployed(
    setting: Setting, of: Replica, batch: int, budget: int, scheduler: Scheduler, blocks: int
) -> Deployment:
    """One of the replicas: ``batch`` sequences resident, an even part of them in each stage's step.

    Its tables are the estimator's of that degree, without what stands before the engine: the queue is full anyway.
    """
    cluster, limits = setting.cluster, _limits(of, batch, budget)
    layers = np.array([stage.layers for stage in of.layout.stages], dtype=np.int64)
    return Deployment(
        model=setting.model,
        gpu=cluster.gpu,
        node=cluster.node,
        parallel=Parallelism(of.tp, of.pp),
        limits=limits,
        scheduler=scheduler,
        cost=replace(setting.tables[of.tp], stage_layers=layers, front=Front()),
        kv=KvPlan(blocks, BLOCK_TOKENS, 0.0, 0.0, _block_bytes(setting, of.layout), setting.usable_bytes),
        max_model_len=longest_tokens(setting),
    )


def longest_tokens(setting: Setting) -> int:
    """Tokens of the longest request of the task."""
    return setting.task.max_prompt_tokens + setting.task.max_output_tokens


def longest_blocks(setting: Setting) -> int:
    """Blocks that its cache takes."""
    return -(-longest_tokens(setting) // BLOCK_TOKENS)


def step_seqs(of: Replica, batch: int) -> int:
    """Sequences of one step: as many batches are in flight as there are stages."""
    return -(-batch // of.pp)


def _limits(of: Replica, batch: int, budget: int) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=batch,
        max_num_batched_tokens=max(budget, 1),
        block_size=BLOCK_TOKENS,
        max_step_seqs=step_seqs(of, batch),
    )


def _block_bytes(setting: Setting, layout: Layout) -> float:
    """What a block takes on the GPU that holds most layers of it."""
    shares = setting.sizes(layout.stages)
    each = (stage.layers * shares[stage.tp].kv_layer_bytes for stage in layout.stages)
    return BLOCK_TOKENS * max(each)


def _even(layers: int, tp: int, pp: int) -> Layout:
    try:
        return rra_layout(layers, tp * pp, tp, pp if tp > 1 else 0)
    except InputError:  # more stages than layers
        return Layout(())


__all__ = [
    "BLOCK_TOKENS",
    "ENDLESS_BLOCKS",
    "Replica",
    "cache_tokens",
    "deployed",
    "longest_blocks",
    "longest_tokens",
    "memory_share",
    "replicas_of",
    "step_seqs",
]
