"""What follows from a model's shapes: parameters, bytes, and the cut into pipeline stages."""

from __future__ import annotations

from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import FfnSpec, ModelSpec, dtype_bytes, dtype_name

_SCALE_BYTES = {"int4": 2.5 / 128, "fp4": 1 / 16}
"""Scales a weight: GPTQ and AWQ keep an fp16 scale and a 4-bit zero for 128, NVFP4 an fp8 scale for 16."""


def parameters(spec: ModelSpec) -> int:
    """All weights of the model, a tied head counted once."""
    decoder = sum(layer_parameters(spec, index) for index in range(spec.layers))
    encoder = spec.encoder_layers * encoder_layer_parameters(spec)
    stacks = 2 if spec.encoder_layers else 1
    return decoder + encoder + stacks * _norm(spec) + embedding_parameters(spec) + head_parameters(spec)


def active_parameters(spec: ModelSpec) -> int:
    """Weights that one token visits: of the experts, only those it is routed to.

    Embedding and head count in full, as in the published "A3B" and "37B activated" figures.
    """
    ffn = spec.ffn
    idle = (ffn.experts - ffn.experts_per_token) * _mlp(spec.hidden, ffn.expert_intermediate, ffn)
    return parameters(spec) - (spec.layers - ffn.dense_layers) * idle


def layer_parameters(spec: ModelSpec, index: int) -> int:
    """Weights of decoder layer ``index``, counted from 0; all experts of it.

    Raises:
        InputError: There is no such layer.
    """
    if not 0 <= index < spec.layers:
        raise InputError(f"a layer of {spec.name} must be in 0..{spec.layers - 1}; it is {index}")
    attention = _attention(spec) * (2 if spec.encoder_layers else 1)
    norms = 3 if spec.encoder_layers else 2
    return attention + _ffn(spec, dense=index < spec.ffn.dense_layers) + norms * _norm(spec)


def encoder_layer_parameters(spec: ModelSpec) -> int:
    """Weights of one encoder layer; 0 for a model that has no encoder."""
    if not spec.encoder_layers:
        return 0
    return _attention(spec) + _ffn(spec, dense=True) + 2 * _norm(spec)


def embedding_parameters(spec: ModelSpec) -> int:
    """Rows of the token table and of learned positions, times the hidden size."""
    return (spec.vocab + spec.metadata.learned_positions) * spec.hidden


def head_parameters(spec: ModelSpec) -> int:
    """Weights of the LM head; 0 when it shares the token table."""
    return 0 if spec.tied_embeddings else spec.vocab * spec.hidden


def weight_bytes(spec: ModelSpec, dtype: str | None = None) -> float:
    """Bytes of all weights, stored as ``dtype`` (None: as published).

    A format under 16 bits covers the layers alone, with its scales; embedding and head stay at
    16 bits, as in published FP8, AWQ and GPTQ checkpoints.

    Raises:
        UnknownNameError: There is no such dtype.
    """
    tables = embedding_parameters(spec) + head_parameters(spec)
    layers = parameters(spec) - tables
    return tables * _at_least_16_bit(dtype or spec.dtype) + layers * _layer_bytes(spec, dtype)


def layer_weight_bytes(spec: ModelSpec, index: int, dtype: str | None = None) -> float:
    """Bytes of decoder layer ``index`` stored as ``dtype`` (None: as published), scales included.

    Raises:
        InputError: There is no such layer.
        UnknownNameError: There is no such dtype.
    """
    return layer_parameters(spec, index) * _layer_bytes(spec, dtype)


def kv_bytes_per_token(spec: ModelSpec, dtype: str | None = None) -> float:
    """Bytes that one token adds to the KV cache over all (decoder) layers.

    Keys and values of every KV head, or one latent a layer for MLA. Layers with a sliding
    window count too: it is what a token inside the window holds. ``dtype`` None takes the
    weights' dtype, or 16 bits where the weights are narrower.

    Raises:
        UnknownNameError: There is no such dtype.
    """
    attention = spec.attention
    if attention.is_mla:
        elements = attention.kv_lora_rank + attention.rope_head_dim
    else:
        elements = attention.kv_heads * (attention.head_dim + _v_head_dim(spec))
    return spec.layers * elements * (dtype_bytes(dtype) if dtype else _at_least_16_bit(spec.dtype))


def cross_kv_bytes_per_token(spec: ModelSpec, dtype: str | None = None) -> float:
    """Bytes that one encoder token holds for cross-attention in all decoder layers; 0 without encoder.

    Raises:
        UnknownNameError: There is no such dtype.
    """
    return kv_bytes_per_token(spec, dtype) if spec.encoder_layers else 0.0


def stage_layers(spec: ModelSpec, pp: int, *, encoder: bool = False) -> list[int]:
    """Layers of each of ``pp`` pipeline stages, as vLLM cuts them.

    An even cut; what remains goes one layer each to the stages before the last one, backwards:
    the last stage also holds the head, and the first, which holds the embedding, is served last.
    ``encoder`` cuts the encoder's layers instead of the decoder's.

    Raises:
        InputError: ``pp`` is below 1 or above the number of layers.
    """
    layers = spec.encoder_layers if encoder else spec.layers
    if not 1 <= pp <= layers:
        raise InputError(f"pipeline stages (pp) of {spec.name} must be in 1..{layers}; it is {pp}")
    even, rest = divmod(layers, pp)
    return [even + (pp - 1 - rest <= stage < pp - 1) for stage in range(pp)]


def _attention(spec: ModelSpec) -> int:
    attention, hidden = spec.attention, spec.hidden
    if attention.is_mla:
        return _latent_attention(spec)
    query = attention.heads * attention.head_dim
    key = attention.kv_heads * attention.head_dim
    value = attention.kv_heads * _v_head_dim(spec)
    output = attention.heads * _v_head_dim(spec)
    bias = query + key + value if attention.bias else 0
    # Where only the projections into attention have a bias (Qwen2), the MLP has none either.
    bias += hidden if attention.bias and spec.ffn.bias else 0
    return hidden * (query + key + value + output) + bias


def _latent_attention(spec: ModelSpec) -> int:
    """MLA as in DeepSeek-V2 (arXiv:2405.04434, section 2.1), with the norms of both latents."""
    attention, hidden = spec.attention, spec.hidden
    query_width = attention.heads * (attention.head_dim + attention.rope_head_dim)
    rank = attention.q_lora_rank
    query = hidden * rank + rank + rank * query_width if rank else hidden * query_width
    latent = attention.kv_lora_rank
    down = hidden * (latent + attention.rope_head_dim) + latent
    up = latent * attention.heads * (attention.head_dim + _v_head_dim(spec))
    return query + down + up + attention.heads * _v_head_dim(spec) * hidden


def _ffn(spec: ModelSpec, *, dense: bool) -> int:
    ffn, hidden = spec.ffn, spec.hidden
    if dense or not ffn.experts:
        return _mlp(hidden, ffn.intermediate, ffn)
    experts = ffn.experts * _mlp(hidden, ffn.expert_intermediate, ffn)
    shared = _mlp(hidden, ffn.shared_intermediate, ffn) if ffn.shared_intermediate else 0
    return hidden * ffn.experts + experts + shared


def _mlp(hidden: int, intermediate: int, ffn: FfnSpec) -> int:
    into = 2 if ffn.gated else 1
    return (into + 1) * hidden * intermediate + (into * intermediate + hidden if ffn.bias else 0)


def _norm(spec: ModelSpec) -> int:
    return spec.hidden * (2 if spec.metadata.norm_bias else 1)


def _v_head_dim(spec: ModelSpec) -> int:
    return spec.attention.v_head_dim or spec.attention.head_dim


def _layer_bytes(spec: ModelSpec, dtype: str | None) -> float:
    name = dtype_name(dtype or spec.dtype)
    return dtype_bytes(name) + _SCALE_BYTES.get(name, 0.0)


def _at_least_16_bit(dtype: str) -> float:
    return max(dtype_bytes(dtype), 2.0)
