"""What a GPU of each stage holds: weights, cache and activations, by the planner's own counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.catalog import embedding_parameters, encoder_layer_parameters
from lengthwise.cost import plan_memory
from lengthwise.cost.memory import HOST_LINK_BYTES_PER_S
from lengthwise.schedule.controls import Cluster
from lengthwise.schedule.layout import Role, Stage
from lengthwise.schema.deployment import EngineLimits, KvPlan, Parallelism
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.units import dtype_bytes

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Shares:
    """Bytes on one GPU of a stage of some tensor-parallel degree.

    Attributes:
        layer_bytes: A decoder layer's weights, mean over the layers.
        encoder_bytes: The encoder's weights that go with a decoder layer; 0 for decoder-only models.
        embedding_bytes: The token table of a first stage.
        head_bytes: The head of a last stage; a tied one's own copy, unless its stage is also the first.
        tied: Whether the head is tied.
        kv_layer_bytes: One token's cache in a layer.
        token_bytes: Activations of a token in a visit.
        seq_bytes: Logits of a sequence in a visit.
    """

    layer_bytes: float
    encoder_bytes: float
    embedding_bytes: float
    head_bytes: float
    tied: bool
    kv_layer_bytes: float
    token_bytes: float
    seq_bytes: float

    def weight_bytes(self, layers: int, role: Role, *, first: bool, last: bool) -> float:
        """Weights of a stage; an encoder-decoder's encode or decode stage holds its own stack alone."""
        own = self.layer_bytes + self.encoder_bytes
        if self.encoder_bytes and role != "both":
            own = self.encoder_bytes if role == "encode" else self.layer_bytes
        head = last and not (self.encoder_bytes and role == "encode") and not (self.tied and first)
        return layers * own + first * self.embedding_bytes + head * self.head_bytes


def shares_of(model: ModelSpec, cluster: Cluster, tp: int) -> Shares:
    """The shares of one degree, out of ``cost.plan_memory``.

    Raises:
        InputError: ``tp`` does not divide the heads.
    """
    one = _plan(model, cluster, tp, 1, 1)
    width = dtype_bytes(model.dtype)
    wide = max(2.0, width) / tp
    embedding, head = embedding_parameters(model) * wide, model.vocab * model.hidden * wide
    encoder = model.encoder_layers * encoder_layer_parameters(model) * width / tp
    layers = one.weight_bytes - embedding - encoder - (0.0 if model.tied_embeddings else head)
    return Shares(
        layer_bytes=layers / model.layers,
        encoder_bytes=encoder / model.layers,
        embedding_bytes=embedding,
        head_bytes=head,
        tied=model.tied_embeddings,
        kv_layer_bytes=one.kv_bytes_per_block / one.block_size / model.layers,
        token_bytes=_plan(model, cluster, tp, 2, 1).activation_bytes - one.activation_bytes,
        seq_bytes=_plan(model, cluster, tp, 1, 2).activation_bytes - one.activation_bytes,
    )


def usable_bytes(model: ModelSpec, cluster: Cluster) -> float:
    """What a GPU offers for weights, cache and activations, all GPUs talking to each other."""
    stages = min(cluster.gpus, model.layers)
    limits = EngineLimits(gpu_memory_utilization=cluster.gpu_memory_utilization)
    plan = plan_memory(model, cluster.gpu, Parallelism(pp=stages), limits, model.max_model_len, num_blocks=1)
    return plan.usable_bytes


def stage_bytes(
    shares: dict[int, Shares],
    stages: tuple[Stage, ...],
    kv_tokens: Floats,
    held_bytes_per_token: float | None,
    tokens: Floats,
    seqs: Floats,
) -> tuple[Floats, float]:
    """([n] bytes on the fullest GPU of the stages, weights on the GPU that holds most of them).

    Args:
        shares: By degree.
        stages: A pipeline.
        kv_tokens: [n] tokens whose cache is held.
        held_bytes_per_token: What one of them takes on each GPU; None: the stage's layers of cache.
        tokens: [n] tokens of the largest visit.
        seqs: [n] sequences of the largest visit.
    """
    fullest, heaviest = np.zeros(len(kv_tokens)), 0.0
    last = len(stages) - 1
    kinds = dict.fromkeys((stage, place == 0, place == last) for place, stage in enumerate(stages))
    for stage, is_first, is_last in kinds:
        share = shares[stage.tp]
        weights = share.weight_bytes(stage.layers, stage.role, first=is_first, last=is_last)
        held = stage.layers * share.kv_layer_bytes if held_bytes_per_token is None else held_bytes_per_token
        activations = tokens * share.token_bytes + seqs * share.seq_bytes
        fullest = np.maximum(fullest, weights + held * kv_tokens + activations)
        heaviest = max(heaviest, weights)
    return fullest, heaviest


def handed_bytes_per_token(model: ModelSpec) -> float | None:
    """What an encoder-decoder hands over of a prompt's token: the encoder's output; None: the layers' cache."""
    return model.hidden * max(2.0, dtype_bytes(model.dtype)) if model.encoder_layers else None


def handover_s(
    model: ModelSpec, shares: dict[int, Shares], stages: tuple[Stage, ...], tokens: float
) -> float:
    """Seconds that a prompt's handover holds the busiest GPU's link to host memory, in one direction."""
    handed = handed_bytes_per_token(model)
    if handed is not None:
        return tokens * handed / HOST_LINK_BYTES_PER_S
    return tokens * layer_cache_bytes(shares, stages) / HOST_LINK_BYTES_PER_S


def layer_cache_bytes(shares: dict[int, Shares], stages: tuple[Stage, ...]) -> float:
    """What a token's cache takes on the GPU of a pipeline that holds most of it."""
    return max(stage.layers * shares[stage.tp].kv_layer_bytes for stage in stages)


def _plan(model: ModelSpec, cluster: Cluster, tp: int, tokens: int, seqs: int) -> KvPlan:
    limits = EngineLimits(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    return plan_memory(model, cluster.gpu, Parallelism(tp=tp), limits, model.max_model_len, num_blocks=1)


__all__ = [
    "Shares",
    "handed_bytes_per_token",
    "handover_s",
    "layer_cache_bytes",
    "shares_of",
    "stage_bytes",
    "usable_bytes",
]
