"""Quantities that follow from a model's shapes: parameters, bytes, and the split into pipeline stages."""

from __future__ import annotations

from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import FfnSpec, LinearAttentionSpec, ModelSpec, dtype_bytes, dtype_name

_SCALE_BYTES = {"int4": 2.5 / 128, "fp4": 1 / 16}
"""Bytes of scales per weight: GPTQ and AWQ have a 16-bit scale and a 4-bit zero per 128, NVFP4 an fp8 scale per 16."""


def parameters(spec: ModelSpec) -> int:
    """Return the number of weights of the model. A tied head does not count again."""
    decoder = sum(layer_parameters(spec, index) for index in range(spec.layers))
    encoder = spec.encoder_layers * encoder_layer_parameters(spec)
    stacks = 2 if spec.encoder_layers else 1
    return decoder + encoder + stacks * _norm(spec) + embedding_parameters(spec) + head_parameters(spec)


def active_parameters(spec: ModelSpec) -> int:
    """Return the number of weights that one token uses: all, except for experts to which it is not routed."""
    ffn = spec.ffn
    idle = (ffn.experts - ffn.experts_per_token) * _mlp(spec.hidden, ffn.expert_intermediate, ffn)
    return parameters(spec) - (spec.layers - ffn.dense_layers) * idle


def layer_parameters(spec: ModelSpec, index: int) -> int:
    """Return the weights of decoder layer ``index``, with all experts. Raises InputError for a wrong index."""
    if not 0 <= index < spec.layers:
        raise InputError(f"a layer of {spec.name} must be in 0..{spec.layers - 1}; it is {index}")
    linear = spec.attention.linear
    attention = _attention(spec) * (2 if spec.encoder_layers else 1)
    if linear is not None and not _is_spread(index, spec.caching_layers, spec.layers):
        attention = _linear_attention(linear, spec.hidden)
    norms = 3 if spec.encoder_layers else 2
    return attention + _ffn(spec, dense=_is_dense(spec, index)) + norms * _norm(spec)


def _is_dense(spec: ModelSpec, index: int) -> bool:
    if spec.ffn.interleaved:
        return not _is_spread(index, spec.layers - spec.ffn.dense_layers, spec.layers)
    return index < spec.ffn.dense_layers


def _is_spread(index: int, count: int, layers: int) -> bool:
    """Return whether layer ``index`` is one of ``count`` evenly spread layers, each the last of a period."""
    return (index + 1) * count // layers > index * count // layers


def encoder_layer_parameters(spec: ModelSpec) -> int:
    """Return the number of weights of one encoder layer, or 0 without an encoder."""
    if not spec.encoder_layers:
        return 0
    return _attention(spec) + _ffn(spec, dense=True) + 2 * _norm(spec)


def embedding_parameters(spec: ModelSpec) -> int:
    """Return the number of weights of the token embedding and of learned positions."""
    return (spec.vocab + spec.metadata.learned_positions) * spec.hidden


def head_parameters(spec: ModelSpec) -> int:
    """Return the number of weights of the LM head, or 0 if it is tied to the token embedding."""
    return 0 if spec.tied_embeddings else spec.vocab * spec.hidden


def weight_bytes(spec: ModelSpec, dtype: str | None = None) -> float:
    """Return the bytes of all weights, stored as ``dtype`` or, if None, as published.

    As in published checkpoints, formats below 16 bits apply only to the layers (with scales), and some of them only to
    routed experts (``dense_dtype``). Raises UnknownNameError if the dtype is unknown.
    """
    tables = embedding_parameters(spec) + head_parameters(spec)
    narrow = sum(_narrow_parameters(spec, index) for index in range(spec.layers))
    wide_bytes = (parameters(spec) - tables - narrow) * _layer_bytes(spec, dense_dtype(spec, dtype))
    return tables * _at_least_16_bit(dtype or spec.dtype) + wide_bytes + narrow * _layer_bytes(spec, dtype)


def dense_dtype(spec: ModelSpec, dtype: str | None = None) -> str:
    """Return the dtype of a layer's weights other than those of routed experts, in a checkpoint in ``dtype``.

    In models with experts, FP4 applies to the routed experts alone, as in gpt-oss and in NVIDIA's NVFP4 checkpoints of
    Kimi-K2 and Qwen3.5 (``hf_quant_config.json`` excludes attention and shared experts). With ``fp4_outputs`` output
    projections and MLPs are FP4, too. INT4 (AWQ, GPTQ) applies to all weights or, with ``int4_experts``, to experts.
    """
    name = dtype_name(dtype or spec.dtype)
    experts_only = name == "fp4" or (name == "int4" and spec.metadata.int4_experts)
    return "bfloat16" if experts_only and spec.ffn.experts else name


def layer_weight_bytes(spec: ModelSpec, index: int, dtype: str | None = None) -> float:
    """Return the bytes of decoder layer ``index`` with scales, stored as ``dtype`` or, if None, as published."""
    narrow = _narrow_parameters(spec, index)
    wide_bytes = (layer_parameters(spec, index) - narrow) * _layer_bytes(spec, dense_dtype(spec, dtype))
    return wide_bytes + narrow * _layer_bytes(spec, dtype)


def routed_weight_bytes(spec: ModelSpec, index: int, dtype: str | None = None) -> float:
    """Return the bytes of the routed experts of decoder layer ``index``, or 0 for a dense layer."""
    return _routed_parameters(spec, index) * _layer_bytes(spec, dtype)


def kv_bytes_per_token(spec: ModelSpec, dtype: str | None = None) -> float:
    """Return a token's bytes in all layers' KV cache. ``dtype`` None is the model's dtype with at least 16 bits."""
    attention = spec.attention
    latent, heads = attention.kv_lora_rank + attention.rope_head_dim, attention.head_dim + _v_head_dim(spec)
    elements = latent if attention.is_mla else attention.kv_heads * heads
    each = elements * (dtype_bytes(dtype) if dtype else _at_least_16_bit(spec.dtype))
    # The key of an indexer is stored in FP8 with a 32-bit scale whatever the cache's dtype.
    return spec.caching_layers * (each + (attention.index_head_dim + 4 if attention.index_heads else 0))


def state_bytes_per_sequence(spec: ModelSpec) -> float:
    """Return the bytes of one sequence's states in all layers of linear attention, or 0 without such layers."""
    linear = spec.attention.linear
    return linear.layers * linear.state_elements * _at_least_16_bit(spec.dtype) if linear else 0.0


def approximations(spec: ModelSpec, *, in_groups: bool = False) -> tuple[str, ...]:
    """Return a sentence for each way in which the model may differ from its checkpoint, or is simplified.

    ``in_groups``: the layers form KV cache groups (``schema.deployment.KvGroups``).
    """
    attention, found = spec.attention, []
    if kind := spec.metadata.untested_type:
        found.append(
            f"{spec.name}: no test covers a config.json of the type {kind}; its keys are read as those of other types. "
            "Compare the parameters in `lengthwise catalog models` with the published number."
        )
    if attention.window_tokens and attention.windowed_layers and not in_groups:
        found.append(
            f"{spec.name}: {attention.windowed_layers} of {spec.layers} layers have a window of "
            f"{attention.window_tokens:,} tokens; their attention is timed by it. Their KV cache is counted as if it "
            'kept all tokens; "Models and limits" lists where it is counted in groups.'
        )
    if attention.index_heads:
        found.append(
            f"{spec.name}: sparse attention is timed by the roofline alone: its indexer scores all cached tokens, "
            f"and attention reads at most {attention.index_top_k:,} of them."
        )
    if attention.linear:
        found.append(
            f"{spec.name}: {attention.linear.layers} of {spec.layers} layers have linear attention, timed by the "
            "roofline alone" + ("." if in_groups else "; memory for the states of max_num_seqs sequences is set aside.")
        )
    return tuple(found)


def stage_layers(spec: ModelSpec, pp: int, *, encoder: bool = False) -> list[int]:
    """Return the number of layers of each stage, split as in vLLM. Raises InputError if ``pp`` is invalid."""
    # The remainder goes, one layer each, to the stages before the last (which also has the head), from the end.
    layers = spec.encoder_layers if encoder else spec.layers
    if not 1 <= pp <= layers:
        raise InputError(f"pipeline stages (pp) of {spec.name} must be in 1..{layers}; it is {pp}")
    per_stage, rest = divmod(layers, pp)
    return [per_stage + (pp - 1 - rest <= stage < pp - 1) for stage in range(pp)]


def _linear_attention(linear: LinearAttentionSpec, hidden: int) -> int:
    value = linear.value_heads * linear.value_head_dim
    # Queries, keys, values and the output's gate; two gates per value head; the convolution; decay and time step of
    # each value head; the norm of the output.
    into = hidden * (linear.conv_channels + value + 2 * linear.value_heads)
    own = linear.conv_channels * linear.conv_kernel + 2 * linear.value_heads + linear.value_head_dim
    return into + own + value * hidden


def _attention(spec: ModelSpec) -> int:
    attention, hidden, v_head_dim = spec.attention, spec.hidden, _v_head_dim(spec)
    if attention.is_mla:  # DeepSeek-V2 (arXiv:2405.04434, section 2.1), with the norms of both latents
        query_width = attention.heads * (attention.head_dim + attention.rope_head_dim)
        rank, latent = attention.q_lora_rank, attention.kv_lora_rank
        query = hidden * rank + rank + rank * query_width if rank else hidden * query_width
        down = hidden * (latent + attention.rope_head_dim) + latent
        up = latent * attention.heads * (attention.head_dim + v_head_dim)
        # An indexer has query heads from the latent, one key with a LayerNorm, and a weight for each head.
        width, index_heads = attention.index_head_dim, attention.index_heads
        indexer = (rank or hidden) * index_heads * width + hidden * (width + index_heads) + 2 * width if width else 0
        return query + down + up + attention.heads * v_head_dim * hidden + indexer
    query, key = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    value, output = attention.kv_heads * v_head_dim, attention.heads * v_head_dim
    bias = query + key + value if attention.bias else 0
    # If only the projections into attention have a bias (Qwen2), the MLP has none either.
    bias += hidden if attention.bias and spec.ffn.bias else 0
    gate = output if attention.output_gate else 0
    return hidden * (query + gate + key + value + output) + bias


def _ffn(spec: ModelSpec, *, dense: bool) -> int:
    ffn, hidden = spec.ffn, spec.hidden
    if dense or not ffn.experts:
        return _mlp(hidden, ffn.intermediate, ffn)
    experts = ffn.experts * _mlp(hidden, ffn.expert_intermediate, ffn)
    shared = _mlp(hidden, ffn.shared_intermediate, ffn) if ffn.shared_intermediate else 0
    router = hidden * ffn.experts + (ffn.experts if ffn.bias else 0)
    return router + experts + shared


def _narrow_parameters(spec: ModelSpec, index: int) -> int:
    """Return the number of weights of a layer that have the checkpoint's dtype. All others have ``dense_dtype``."""
    outputs, attention, ffn = 0, spec.attention, spec.ffn
    if spec.metadata.fp4_outputs:
        width = ffn.intermediate if _is_dense(spec, index) else ffn.shared_intermediate
        outputs = attention.heads * _v_head_dim(spec) * spec.hidden + _mlp(spec.hidden, width, ffn)
    return _routed_parameters(spec, index) + outputs


def _routed_parameters(spec: ModelSpec, index: int) -> int:
    ffn = spec.ffn
    if not ffn.experts or _is_dense(spec, index):
        return 0
    return ffn.experts * _mlp(spec.hidden, ffn.expert_intermediate, ffn)


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
