"""What of a model sits on one GPU."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lengthwise.catalog import (
    embedding_parameters,
    encoder_layer_parameters,
    kv_bytes_per_token,
    layer_weight_bytes,
    stage_layers,
)
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import InputError
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.units import dtype_bytes

DEGREES = (1, 2, 4, 8, 16)


def usable_degrees(model: ModelSpec) -> list[int]:
    """Tensor-parallel degrees that divide the attention heads."""
    return [tp for tp in DEGREES if model.attention.heads % tp == 0]


def require_degree(model: ModelSpec, tp: int) -> None:
    """Nothing, if ``tp`` divides the heads.

    Raises:
        InputError: It does not; the message lists those that do.
    """
    if tp < 1 or model.attention.heads % tp:
        raise InputError(
            f"tp must divide the {model.attention.heads} attention heads of {model.name}; it is {tp}. "
            f"Use one of {', '.join(map(str, usable_degrees(model)))}."
        )


@dataclass(frozen=True)
class Shard:
    """One GPU's share of a layer under tensor parallelism, and of a stage."""

    model: ModelSpec
    parallel: Parallelism
    weight_dtype: str
    kv_dtype: str | None

    @property
    def heads(self) -> float:
        """Query heads of this GPU."""
        return self.model.attention.heads / self.parallel.tp

    @property
    def kv_heads(self) -> int:
        """KV heads of this GPU; with more GPUs than heads each GPU holds a copy of one."""
        return max(1, -(-self.model.attention.kv_heads // self.parallel.tp))

    @property
    def v_dim(self) -> int:
        """Width of a head's value."""
        return self.model.attention.v_head_dim or self.model.attention.head_dim

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token's cache in one layer on this GPU; an MLA latent is on every GPU."""
        layer = kv_bytes_per_token(self.model, self.kv_dtype) / self.model.layers
        if self.model.attention.is_mla:
            return layer
        return layer * self.kv_heads / self.model.attention.kv_heads

    @property
    def layers(self) -> list[int]:
        """[PP] decoder layers of each stage."""
        return stage_layers(self.model, self.parallel.pp)

    def stage_weight_bytes(self) -> Floats:
        """[PP] bytes of weights on one GPU of each stage.

        Layers are split evenly over the GPUs but for what each holds whole (replicated KV heads,
        MLA's down-projections, the router). The first stage also holds the embedding, the last one
        the head (its own copy of a tied one when there are several stages).
        """
        model, tp = self.model, self.parallel.tp
        width = dtype_bytes(self.weight_dtype)
        bounds = np.concatenate([[0], np.cumsum(self.layers)])
        layer = [layer_weight_bytes(model, i, self.weight_dtype) for i in range(model.layers)]
        stages = np.array([sum(layer[a:b]) / tp for a, b in pairwise(bounds)], dtype=np.float64)
        stages += np.array(self.layers) * self._whole_parameters() * width * (1 - 1 / tp)
        stages += self._encoder_bytes(width)
        table = model.vocab * model.hidden * max(2.0, width) / tp
        stages[0] += embedding_parameters(model) * max(2.0, width) / tp
        stages[-1] += 0.0 if model.tied_embeddings and self.parallel.pp == 1 else table
        return stages

    def _encoder_bytes(self, width: float) -> Floats:
        if not self.model.encoder_layers:
            return np.zeros(self.parallel.pp)
        layers = np.array(stage_layers(self.model, self.parallel.pp, encoder=True), dtype=np.float64)
        return layers * encoder_layer_parameters(self.model) * width / self.parallel.tp

    def _whole_parameters(self) -> float:
        """Weights of a layer of which every GPU holds more than its even share, as if held whole."""
        model, attention, tp = self.model, self.model.attention, self.parallel.tp
        router = model.hidden * model.ffn.experts
        if attention.is_mla:
            query = model.hidden * attention.q_lora_rank
            return router + query + model.hidden * (attention.kv_lora_rank + attention.rope_head_dim)
        if tp == 1:
            return router
        surplus = self.kv_heads - attention.kv_heads / tp
        return router + model.hidden * surplus * (attention.head_dim + self.v_dim) / (1 - 1 / tp)


def shard_of(model: ModelSpec, parallel: Parallelism, limits: EngineLimits) -> Shard:
    """The shard of a deployment.

    Raises:
        InputError: ``tp`` does not divide the heads, or there are more stages than layers.
    """
    require_degree(model, parallel.tp)
    stage_layers(model, parallel.pp)
    return Shard(model, parallel, limits.weight_dtype or model.dtype, limits.kv_dtype)
