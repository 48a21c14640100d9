"""Reads a model's shapes from a Hugging Face ``config.json``, by keys rather than by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.specs import AttentionSpec, FfnSpec, ModelFacts, ModelSpec, dtype_name

_TEXT_PARTS = ("text_config", "language_config", "llm_config")

_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    # transformers writes only values that differ from the class, so these may be absent from a file.
    "gemma": {"head_dim": 256},
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208}
    | {"max_position_embeddings": 131_072, "sliding_window": 4096, "sliding_window_pattern": 6, "rms_norm_eps": 1e-6},
    "qwen": {"hidden_act": "silu"},
}

_UNTIED_BY_CLASS = (  # types whose class does not tie head and embedding by default
    *("codellama", "deepseek_v2", "deepseek_v3", "gpt_neox", "gptj", "internlm", "internlm2", "llama"),
    *("mistral", "mixtral", "olmo", "phi", "phi3", "qwen", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    "stablelm",
)


class ConfigKeys:
    """Reads keys of a config and collects the missing ones, which ``check`` reports together."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where = where  # the config's file or name, for errors
        parts = [config[key] for key in _TEXT_PARTS if isinstance(config.get(key), Mapping)]
        table = {**config, **(parts[0] if parts else {})}
        self.model_type = str(table.get("model_type", ""))
        self._table: dict[str, Any] = {**_CLASS_DEFAULTS.get(self.model_type, {}), **table}
        self._missing: list[str] = []

    def has(self, *names: str) -> bool:
        """Return whether one of these keys is present, even as null."""
        return any(name in self._table for name in names)

    def find(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these keys that is not null, else ``default``."""
        values = (self._table[name] for name in names if self._table.get(name) is not None)
        return next(values, default)

    def _require(self, is_valid: bool, names: tuple[str, ...], kind: str, value: Any) -> None:
        if not is_valid:
            key = next(name for name in names if self._table.get(name) is not None)
            raise InputError(f"{self.where}: {key} must be a {kind}; it is {value!r}")

    def count(self, *names: str, default: int = 0) -> int:
        """Return the first of these keys as a whole number, else ``default``; raise InputError for another type."""
        value = self.find(*names, default=default)
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        self._require(is_whole and not isinstance(value, bool) and value >= 0, names, "whole number", value)
        return int(value)

    def as_list(self, *names: str) -> list[Any]:
        """Return the first of these keys as a list, else an empty one; raise InputError for another type."""
        value = self.find(*names, default=[])
        self._require(isinstance(value, list), names, "list", value)
        return list(value)

    def need(self, quantity: str, *names: str) -> int:
        """Return ``count``, at least 1; a missing key gives 1 and is reported by ``check``."""
        value = self.count(*names)
        if not value:
            self._missing.append(f"{quantity} (looked for {', '.join(names)})")
        return value or 1

    def check(self) -> None:
        """Raise InputError if keys were missing; the message names every accepted alternative."""
        if self._missing:
            lacking, keys = "; ".join(self._missing), ", ".join(sorted(self._table)) or "none"
            raise InputError(f"{self.where} must give the shapes of a model; it lacks {lacking}. Its keys are {keys}")


_BY_NAME = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "fp4", "nvfp4": "fp4"}
_BY_BITS = {("int", 4): "int4", ("int", 8): "int8", ("float", 4): "fp4", ("float", 8): "fp8"}


def weight_dtype(keys: ConfigKeys) -> str:
    """Return the canonical dtype of the weights (quantised: of the layers); bfloat16 if the config has none."""
    table = keys.find("quantization_config")
    if not isinstance(table, Mapping):
        named = str(keys.find("dtype", "torch_dtype", default="bfloat16")).removeprefix("torch.")
        try:
            return dtype_name("bfloat16" if named == "auto" else named)
        except UnknownNameError as error:
            raise InputError(f"{keys.where}: {error}") from error
    methods = [str(table.get(key, "")).lower() for key in ("quant_method", "quant_algo")]
    for prefix, dtype in _BY_NAME.items():
        if any(method.startswith(prefix) for method in methods):
            return dtype
    kind, bits = "int", table.get("bits") or table.get("w_bit") or 0
    if groups := table.get("config_groups"):
        weights = next(iter(groups.values())).get("weights") or {}
        kind, bits = str(weights.get("type", "int")), weights.get("num_bits") or 0
    elif table.get("load_in_4bit") or table.get("load_in_8bit"):
        bits = 4 if table.get("load_in_4bit") else 8
    if (kind, bits) not in _BY_BITS:
        raise InputError(
            f"{keys.where}: quantization_config must be fp8, awq, gptq, compressed-tensors, bitsandbytes, mxfp4 "
            f"or modelopt with 4 or 8 bits; it is {dict(table)}. Remove it and set weight_dtype"
        )
    return _BY_BITS[kind, bits]


_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers", *_LAYERS)
_ENCODER_LAYERS = ("encoder_layers", "num_layers", "num_hidden_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HEAD_DIM = ("head_dim", "d_kv", "kv_channels", "attention_head_dim")
_FFN = ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "ffn_hidden_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_top_k")
_ACTIVATION = ("feed_forward_proj", "hidden_act", "activation_function", "hidden_activation", "activation")
_FOUR_TIMES_HIDDEN = ("n_inner", "n_embd", "n_embed", "alibi", "new_decoder_architecture")  # GPT-2, BLOOM, Falcon
_BIASED_ATTENTION = {"qwen", "qwen2", "qwen2_moe", "qwen2_vl"}
_BIASED = {"bart", "bloom", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "phi"}


def parse(config: Mapping[str, Any], name: str, where: str) -> ModelSpec:
    """Return the shapes that a config describes; ``where`` names the config in errors."""
    keys = ConfigKeys(config, where)
    hidden = keys.need("the hidden size", *_HIDDEN)
    layers = keys.need("the number of layers", *_DECODER_LAYERS)
    has_encoder = bool(keys.find("is_encoder_decoder", default=keys.has("num_decoder_layers")))
    longest = keys.need("the longest context", *_POSITIONS)
    spec = ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        vocab=keys.need("the vocabulary", "vocab_size", "padded_vocab_size"),
        attention=_attention(keys, hidden, layers),
        ffn=_ffn(keys, hidden, layers),
        # Relative positions have no end (T5): the trained length holds for each side.
        max_model_len=2 * longest if keys.has("relative_attention_num_buckets") else longest,
        tied_embeddings=bool(keys.find("tie_word_embeddings", default=keys.model_type not in _UNTIED_BY_CLASS)),
        encoder_layers=keys.count(*_ENCODER_LAYERS) if has_encoder else 0,
        metadata=ModelFacts(
            dtype=weight_dtype(keys),
            learned_positions=_learned_positions(keys),
            norm_bias=_has_layer_norm(keys),
            source=where,
        ),
    )
    keys.check()
    return spec


def _attention(keys: ConfigKeys, hidden: int, layers: int) -> AttentionSpec:
    heads = keys.need("the attention heads", *_HEADS)
    kv_heads = keys.count(*_KV_HEADS, default=heads)
    if keys.find("multi_query") and not keys.find("new_decoder_architecture"):
        kv_heads = 1  # Falcon-7B lists all heads as num_kv_heads although it shares one
    window, windowed = keys.count("sliding_window"), 0
    is_shorter = window < keys.count(*_POSITIONS, default=window + 1)  # a window no shorter than the model is none
    if window and is_shorter and keys.find("use_sliding_window") is not False:
        windowed = max(0, layers - keys.count("max_window_layers"))
        if types := keys.as_list("layer_types"):
            windowed = sum(kind == "sliding_attention" for kind in types)
        elif period := keys.count("sliding_window_pattern", "_sliding_window_pattern"):
            windowed = layers - layers // period
    has_bias = keys.model_type in _BIASED_ATTENTION | _BIASED
    bias = keys.find("attention_bias", "qkv_bias", "add_qkv_bias", "use_bias", "enable_bias", "bias", default=has_bias)
    latent = keys.count("kv_lora_rank")
    head_dim = keys.count("qk_nope_head_dim") if latent else keys.count(*_HEAD_DIM)
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        window_tokens=window if windowed else None,
        windowed_layers=windowed,
        v_head_dim=keys.count("v_head_dim") or None if latent else None,
        q_lora_rank=keys.count("q_lora_rank") if latent else 0,
        kv_lora_rank=latent,
        rope_head_dim=keys.count("qk_rope_head_dim") if latent else 0,
        bias=bool(bias),
    )


def _ffn(keys: ConfigKeys, hidden: int, layers: int) -> FfnSpec:
    intermediate = 4 * hidden
    if keys.find(*_FFN) or not keys.has(*_FOUR_TIMES_HIDDEN):
        width = keys.need("the MLP's width", *_FFN)
        # Qwen (1) gives the width of gate and up projection together.
        intermediate = width // 2 if keys.model_type == "qwen" else width
    bias = keys.find("mlp_bias", "use_bias", "enable_bias", "bias", default=keys.model_type in _BIASED)
    dense = FfnSpec(intermediate=intermediate, gated=_is_gated(keys), bias=bool(bias))
    experts = keys.count(*_EXPERTS)
    expert_width = keys.count("moe_intermediate_size", default=intermediate)
    shared = keys.count("n_shared_experts", "num_shared_experts") * expert_width
    if experts <= 1:
        return dense
    return replace(
        dense,
        experts=experts,
        experts_per_token=keys.need("the experts a token visits", *_EXPERTS_PER_TOKEN),
        expert_intermediate=expert_width,
        shared_intermediate=keys.count("shared_expert_intermediate_size", default=shared),
        dense_layers=_dense_layers(keys, layers),
    )


def _dense_layers(keys: ConfigKeys, layers: int) -> int:
    """Return how many layers of an MoE model are dense, wherever they are."""
    if isinstance(keys.find("moe_layer_freq"), list):
        return sum(not is_sparse for is_sparse in keys.as_list("moe_layer_freq"))
    step = keys.count("decoder_sparse_step", "moe_layer_freq", default=1) or 1
    return max(keys.count("first_k_dense_replace"), len(keys.as_list("mlp_only_layers")), layers - layers // step)


_UNGATED_FAMILIES = ("gpt", "opt", "phi", "bloom", "mpt", "falcon", "starcoder", "t5", "codegen", "bert")


def _is_gated(keys: ConfigKeys) -> bool:
    """Return whether the MLP has three matrices, as for silu, Gemma's GELU and "gated-..." activations."""
    activation = str(keys.find(*_ACTIVATION, default="")).lower()
    if not activation:  # only older families are not gated
        return keys.model_type.startswith("phi3") or not keys.model_type.startswith(_UNGATED_FAMILIES)
    gated = ("silu", "swish", "swiglu", "geglu", "gegelu", "gated", "xielu")
    return keys.model_type.startswith("gemma") or activation.startswith(gated)


def _learned_positions(keys: ConfigKeys) -> int:
    if keys.has("word_embed_proj_dim", "do_layer_norm_before"):
        return keys.count("max_position_embeddings") + 2  # OPT's table starts at 2
    has_none = keys.has("rotary_dim", "relative_attention_num_buckets", "rotary_pct")
    return 0 if has_none else keys.count("n_positions")


def _has_layer_norm(keys: ConfigKeys) -> bool:
    """Return whether norms have a bias, by the name of their epsilon, which T5 and Qwen use for an RMSNorm, too."""
    if keys.has("rms_norm_eps", "relative_attention_num_buckets") or keys.model_type == "qwen":
        return False
    names = ("layer_norm_eps", "layer_norm_epsilon", "layer_norm_elementwise_affine", "do_layer_norm_before")
    return keys.has(*names, "norm_epsilon")
