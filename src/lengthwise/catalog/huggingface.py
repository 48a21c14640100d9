"""Reads a model's shapes from a Hugging Face ``config.json``, by keys rather than by architecture.

Every key must be read here, be known not to change shapes (``_NEUTRAL``), or have a value that turns it off (null,
false, 0, empty). Any other key that looks like a shape is an error, because parameters would be counted wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.specs import AttentionSpec, FfnSpec, LinearAttentionSpec, ModelFacts, ModelSpec, dtype_name

_TEXT_PARTS = ("text_config", "language_config", "llm_config")

_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    # transformers writes only values that differ from the class, so these may be absent from a file.
    "gemma": {"head_dim": 256},
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208}
    | {"max_position_embeddings": 131_072, "sliding_window": 4096, "sliding_window_pattern": 6, "rms_norm_eps": 1e-6},
    "llama4_text": {"interleave_moe_layer_step": 1, "attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    "qwen": {"hidden_act": "silu"},
    "qwen3_next": {"full_attention_interval": 4, "attn_output_gate": True},
}

_UNTIED_BY_CLASS = (  # types whose class does not tie head and embedding by default
    *("codellama", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "gpt_neox", "gpt_oss"),
    *("gptj", "internlm", "internlm2", "kimi_k2", "llama", "llama4_text", "minimax_m2", "mistral", "mixtral", "olmo"),
    *("phi", "phi3", "qwen", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "stablelm"),
)

TESTED_TYPES = frozenset(
    ("deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma", "gemma2", "gemma3_text", "glm4_moe", "glm_moe_dsa", "gpt2",
     "gpt_bigcode", "gpt_oss", "internlm", "kimi_k2", "llama", "llama4_text", "minimax_m2", "mistral", "mixtral", "opt",
     "phi", "phi3", "qwen", "qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "t5")
)  # fmt: skip
"""Types whose shapes a test compares with a published config.json or its number of parameters."""
_NEUTRAL = re.compile(
    # Patterns of whole words of a key, between underscores; keys that start with one are internal to transformers.
    r"(^|_)("
    r"(token|tokens|tokenizer|bos|eos|pad|length|len|seqlen|position|positions|context)"  # tokens and lengths
    r"|(rope|rotary|yarn|dropout|pdrop|drop|layerdrop|init|initializer|std|eps|epsilon|norm|layernorm|rmsnorm|layer_norm)"
    r"|(softcap|softcapping|softmax|scale|scaling|scalar|temperature|temp|logit|logits|clip|limit|beta|alpha)"
    r"|(loss|aux|jitter|coef|dtype|fp32|fp16|bf16|cache|flash|sdpa|version|label|labels|summary|runner|parallel)"
    r"|(image|vision|video|audio|mm|nextn|mtp|topk|scoring|routing|routed_scaling|ngram|beam|beams|suppress)"
    r")(_|$)"
    r"|^(_.*|architectures|auto_map|task_specific_params|quantization_bit|chunk_size_feed_forward|pruned_heads)$"
    r"|^(n_group|topk_group|num_expert_group|ep_size|pretraining_tp|tensor_parallel_degree|seq_aux|top_k|top_p|seed)$"
    r"|^(embedding|residual|attention|logits|lm_head)_multiplier$"
    r"|^(full_attn_mod|interpolate_factor|multi_query_attention|reorder_and_upcast_attn|(moe_)?router_.*)$"
    r"|^(num_return_sequences|max_batch_size|offset_alibi|skip_bias_add(_qkv)?|relative_attention_max_distance)$"
    r"|^(layer_switch|dim_model_base)$"
)

_SHAPE_WORDS = frozenset(
    ("attention", "attn", "block", "blocks", "channels", "chunk", "compress", "conv", "depth", "dim", "dims", "every",
     "expand", "expansion", "expert", "experts", "ff", "ffn", "freq", "frequency", "gate", "groups", "head", "heads",
     "hidden", "intermediate", "interval", "kernel", "layer", "layers", "linear", "lora", "mamba", "memory", "mixer",
     "mlp", "moe", "multiplier", "num", "pattern", "period", "rank", "ratio", "share", "shared", "size", "sizes",
     "skip", "sparse", "ssm", "state", "step", "steps", "stride", "width", "window")
)  # fmt: skip


class ConfigKeys:
    """Reads keys of a config, and collects missing and unknown keys for the error of ``check``."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where = where  # the config's file or name, for errors
        parts = [config[key] for key in _TEXT_PARTS if isinstance(config.get(key), Mapping)]
        table = {**config, **(parts[0] if parts else {})}
        self.model_type = str(table.get("model_type", ""))
        self._table: dict[str, Any] = {**_CLASS_DEFAULTS.get(self.model_type, {}), **table}
        self._given = parts[0] if parts else config  # keys outside the part for text belong to other modalities
        self._missing: list[str] = []
        self._read: set[str] = set(_TEXT_PARTS)

    def has(self, *names: str) -> bool:
        """Return whether one of these keys is present, even as null."""
        self._read.update(names)
        return any(name in self._table for name in names)

    def find(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these keys that is not null, or else ``default``."""
        self._read.update(names)
        values = (self._table[name] for name in names if self._table.get(name) is not None)
        return next(values, default)

    def _require(self, is_valid: bool, names: tuple[str, ...], kind: str, value: Any) -> None:
        if not is_valid:
            key = next(name for name in names if self._table.get(name) is not None)
            raise InputError(f"{self.where}: {key} must be a {kind}; it is {value!r}")

    def count(self, *names: str, default: int = 0) -> int:
        """Return the value of ``find`` as a whole number from 0 to 10^9. Raises InputError for any other value."""
        value = self.find(*names, default=default)
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        is_valid = is_whole and not isinstance(value, bool) and 0 <= value <= _LARGEST_COUNT
        self._require(is_valid, names, f"whole number of at most {_LARGEST_COUNT:,}", value)
        return int(value)

    def as_list(self, *names: str) -> list[Any]:
        """Return the value of ``find`` as a list, or else an empty list. Raises InputError for another type."""
        value = self.find(*names, default=[])
        self._require(isinstance(value, list), names, "list", value)
        return list(value)

    def need(self, quantity: str, *names: str) -> int:
        """Return ``count``, at least 1. If the key is missing, return 1, and ``check`` reports ``quantity``."""
        if self.find(*names) is None:
            self._missing.append(f"{quantity} (looked for {', '.join(names)})")
        value = self.count(*names, default=1)
        self._require(value > 0, names, "whole number of at least 1", value)
        return value

    def accept_repeat(self, name: str, value: int) -> None:
        """Accept a key that repeats what follows from other keys, if the key has that ``value``."""
        self._read.update({name} if self._table.get(name) == value else ())

    def check(self) -> None:
        """Raise InputError if keys are missing, or if unknown keys look like shapes. The message names the keys."""
        if self._missing:
            lacking, keys = "; ".join(self._missing), ", ".join(sorted(self._table)) or "none"
            raise InputError(f"{self.where} must give the shapes of a model; it lacks {lacking}. Its keys are {keys}")
        unread = {key: value for key, value in self._given.items() if key not in self._read}
        if unknown := list(_shapes_in(unread)):
            named = f" of type {self.model_type}" if self.model_type else ""
            raise InputError(
                f"every key of {self.where} that changes the shapes of a model{named} must be known; not known are "
                f"{', '.join(unknown)}. Parameters and cost would be wrong. If a key changes no shapes, remove it from "
                "a copy of the file; otherwise use a model of the catalog that is alike"
            )


def _shapes_in(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield "key = value" for keys that look like shapes: by name, or as whole numbers above 1 or lists of numbers."""
    for key, value in table.items():
        if value in (None, False, 0, "", [], {}) or _NEUTRAL.search(key):
            continue
        is_named = not _SHAPE_WORDS.isdisjoint(key.lower().split("_"))
        if isinstance(value, Mapping):
            yield from _shapes_in(value, f"{prefix}{key}.")
            continue
        if isinstance(value, str):
            is_shape = is_named and "pattern" in key
        elif isinstance(value, list):
            is_shape = is_named or all(isinstance(one, int | float) for one in value)
        else:
            is_shape = is_named or (isinstance(value, int) and value > 1)
        if is_shape:
            text = repr(value)
            yield f"{prefix}{key} = {text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + '...'}"


_LONGEST_VALUE = 40
_LARGEST_COUNT = 10**9


_BY_NAME = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "fp4", "nvfp4": "fp4"}
_BY_BITS = {("int", 4): "int4", ("int", 8): "int8", ("float", 4): "fp4", ("float", 8): "fp8"}


def weight_dtype(keys: ConfigKeys) -> str:
    """Return the canonical dtype of the weights (of the layers if quantised), or bfloat16 if none is given."""
    table = keys.find("quantization_config", "compression_config")
    stored = keys.find("dtype", "torch_dtype", default="bfloat16")
    if not isinstance(table, Mapping):
        named = str(stored).removeprefix("torch.")
        try:
            return dtype_name("bfloat16" if named == "auto" else named)
        except UnknownNameError as error:
            raise InputError(f"{keys.where}: {error}") from error
    methods = [str(table.get(key, "")).lower() for key in ("quant_method", "quant_algo")]
    for prefix, dtype in _BY_NAME.items():
        if any(method.startswith(prefix) for method in methods):
            return dtype
    kind, bits = "int", table.get("bits") or table.get("w_bit") or 0
    if isinstance(groups := table.get("config_groups"), Mapping) and groups:
        weights = next((one.get("weights") for one in groups.values() if isinstance(one, Mapping)), None) or {}
        kind, bits = str(weights.get("type", "int")), weights.get("num_bits") or 0
    elif table.get("load_in_4bit") or table.get("load_in_8bit"):
        bits = 4 if table.get("load_in_4bit") else 8
    if not isinstance(bits, int) or (kind, bits) not in _BY_BITS:
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
_BIASED = {"bart", "bloom", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "opt", "phi"}
_FULL, _LINEAR = "full_attention", "linear_attention"
_WINDOWED = ("sliding_attention", "chunked_attention")


def parse(config: Mapping[str, Any], name: str, where: str) -> ModelSpec:
    """Return the model that a config describes. ``where`` names the config in errors."""
    keys = ConfigKeys(config, where)
    hidden = keys.need("the hidden size", *_HIDDEN)
    layers = keys.need("the number of layers", *_DECODER_LAYERS)
    has_encoder = bool(keys.find("is_encoder_decoder", default=keys.has("num_decoder_layers")))
    longest = keys.need("the longest context", *_POSITIONS)
    attention = _attention(keys, hidden, layers)
    spec = ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        vocab=keys.need("the vocabulary", "vocab_size", "padded_vocab_size"),
        attention=attention,
        ffn=_ffn(keys, hidden, layers),
        # Relative positions have no end (T5): the trained length holds for each side.
        max_model_len=2 * longest if keys.has("relative_attention_num_buckets") else longest,
        tied_embeddings=bool(keys.find("tie_word_embeddings", default=keys.model_type not in _UNTIED_BY_CLASS)),
        encoder_layers=keys.count(*_ENCODER_LAYERS) if has_encoder else 0,
        metadata=ModelFacts(
            dtype=weight_dtype(keys),
            learned_positions=_learned_positions(keys),
            norm_bias=_has_layer_norm(keys),
            chunked_attention=attention.windowed_layers > 0 and keys.count("attention_chunk_size") > 0,
            untested_type="" if keys.model_type in TESTED_TYPES else keys.model_type,
            source=where,
        ),
    )
    keys.check()
    return spec


def _attention(keys: ConfigKeys, hidden: int, layers: int) -> AttentionSpec:
    heads = keys.need("the attention heads", *_HEADS)
    kv_heads = keys.need("the KV heads", *_KV_HEADS) if keys.find(*_KV_HEADS) is not None else heads
    keys.has("new_decoder_architecture")
    if keys.find("multi_query") and not keys.find("new_decoder_architecture"):
        kv_heads = 1  # Falcon-7B lists all heads as num_kv_heads although it shares one
    if heads % kv_heads:
        raise InputError(f"{keys.where}: the KV heads must divide the attention heads; they are {kv_heads} of {heads}")
    kinds = _layer_kinds(keys, layers)
    window, windowed = _window(keys, kinds, layers)
    has_bias = keys.model_type in _BIASED_ATTENTION | _BIASED
    bias = keys.find("attention_bias", "qkv_bias", "add_qkv_bias", "use_bias", "enable_bias", "bias", default=has_bias)
    keys.has("no_bias")  # Qwen (1) sets it, although its attention has a bias
    keys.accept_repeat("encoder_attention_heads", heads)
    spec = AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=keys.count(*_HEAD_DIM) or hidden // heads,
        window_tokens=window if windowed else None,
        windowed_layers=windowed,
        bias=bool(bias),
        output_gate=bool(keys.find("attn_output_gate", default=False)),
        linear=_linear_attention(keys, kinds.count(_LINEAR)),
    )
    return _latent(keys, spec) if keys.count("kv_lora_rank") else spec


def _latent(keys: ConfigKeys, spec: AttentionSpec) -> AttentionSpec:
    width, rope = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim")
    keys.accept_repeat("qk_head_dim", width + rope)
    return replace(
        spec,
        head_dim=width or spec.head_dim,
        v_head_dim=keys.count("v_head_dim") or None,
        q_lora_rank=keys.count("q_lora_rank"),
        kv_lora_rank=keys.count("kv_lora_rank"),
        rope_head_dim=rope,
        index_heads=keys.count("index_n_heads"),
        index_head_dim=keys.count("index_head_dim"),
        index_top_k=keys.count("index_topk", default=spec.index_top_k),
    )


def _layer_kinds(keys: ConfigKeys, layers: int) -> list[str]:
    kinds = [str(kind) for kind in keys.as_list("layer_types")]
    if (period := keys.count("full_attention_interval")) and not kinds:
        kinds = [_LINEAR if (index + 1) % period else _FULL for index in range(layers)]
    # MiniMax: 1 is attention over all keys, 0 is a linear attention that is not supported.
    kinds += ["lightning_attention" for kind in keys.as_list("attn_type_list") if kind != 1]
    if unknown := sorted(set(kinds) - {_FULL, _LINEAR, *_WINDOWED}):
        known = ", ".join((_FULL, *_WINDOWED, _LINEAR))
        raise InputError(
            f"the layers of {keys.where} must be of {known}; some are of {', '.join(unknown)}. Their parameters and "
            "cost are not known: use a model of the catalog that is alike"
        )
    return kinds


def _window(keys: ConfigKeys, kinds: list[str], layers: int) -> tuple[int, int]:
    """Return (tokens of the sliding window or chunk, number of layers with one)."""
    no_rope, every = keys.as_list("no_rope_layers"), keys.count("no_rope_layer_interval")
    first, period = keys.count("max_window_layers"), keys.count("sliding_window_pattern", "_sliding_window_pattern")
    chunk, window = keys.count("attention_chunk_size"), keys.count("sliding_window", "sliding_window_size")
    is_used = keys.find("use_sliding_window") is not False
    window = chunk or window
    is_shorter = window < keys.count(*_POSITIONS, default=window + 1)  # a longer window has no effect
    if not (window and is_shorter and (chunk or is_used)):
        return 0, 0
    if kinds:
        return window, sum(kind in _WINDOWED for kind in kinds)
    if chunk:  # Llama 4: layers with rotary positions see their chunk alone
        return window, sum(map(bool, no_rope)) if no_rope else layers - layers // (every or layers + 1)
    return window, layers - layers // period if period else max(0, layers - first)


def _linear_attention(keys: ConfigKeys, layers: int) -> LinearAttentionSpec | None:
    if not layers:
        return None
    heads = ("linear_num_key_heads", "linear_num_value_heads")
    names = (*heads, "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
    return LinearAttentionSpec(layers, *(keys.need("the heads of linear attention", name) for name in names))


def _ffn(keys: ConfigKeys, hidden: int, layers: int) -> FfnSpec:
    intermediate = 4 * hidden
    if keys.count(*_EXPERTS) > 1 and keys.find(*_FFN) is None:  # no layer is dense (Qwen3.5)
        intermediate = keys.need("the experts' width", "moe_intermediate_size")
    elif keys.find(*_FFN) or not keys.has(*_FOUR_TIMES_HIDDEN):
        width = keys.need("the MLP's width", *_FFN)
        # Qwen (1) gives the width of gate and up projection together.
        intermediate = width // 2 if keys.model_type == "qwen" else width
    bias = keys.find("mlp_bias", "use_bias", "enable_bias", "bias", default=keys.model_type in _BIASED)
    keys.accept_repeat("encoder_ffn_dim", intermediate)
    experts = keys.count(*_EXPERTS)
    keys.has(*_EXPERTS_PER_TOKEN)
    per_token = keys.need("the experts a token visits", *_EXPERTS_PER_TOKEN) if experts > 1 else 0
    expert_width = keys.count("moe_intermediate_size", default=intermediate)
    is_llama4 = keys.model_type == "llama4_text"  # each expert layer has a shared expert of the experts' width
    shared = keys.count("n_shared_experts", "num_shared_experts", default=int(is_llama4)) * expert_width
    shared = keys.count("shared_expert_intermediate_size", "shared_intermediate_size", default=shared)
    intermediate = keys.count("intermediate_size_mlp", default=intermediate)
    dense_layers, interleaved = _dense_layers(keys, layers)
    dense = FfnSpec(intermediate=intermediate, gated=_is_gated(keys), bias=bool(bias))
    if experts <= 1:
        return dense
    return replace(
        dense,
        experts=experts,
        experts_per_token=per_token,
        expert_intermediate=expert_width,
        shared_intermediate=shared,
        dense_layers=dense_layers,
        interleaved=interleaved,
    )


def _dense_layers(keys: ConfigKeys, layers: int) -> tuple[int, bool]:
    """Return (how many layers of an MoE model are dense, whether they are spread among the others)."""
    first, listed = keys.count("first_k_dense_replace"), keys.as_list("mlp_only_layers")
    with_experts, kinds = keys.as_list("moe_layers"), keys.as_list("mlp_layer_types")
    frequency = keys.find("moe_layer_freq")
    steps = ("decoder_sparse_step", "interleave_moe_layer_step")
    step = keys.count(*steps, default=1) or 1
    if isinstance(frequency, list):
        return sum(not is_sparse for is_sparse in frequency), False
    if kinds:
        return sum(kind == "dense" for kind in kinds), False
    if with_experts:
        dense = layers - len(with_experts)
        return dense, min(with_experts) < dense
    step = max(step, keys.count("moe_layer_freq", default=1))
    alternating = layers - layers // step
    return max(first, len(listed), alternating), alternating > max(first, len(listed))


_UNGATED_FAMILIES = ("gpt", "opt", "phi", "bloom", "mpt", "falcon", "starcoder", "t5", "codegen", "bert")


def _is_gated(keys: ConfigKeys) -> bool:
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
    """Return whether norms have a bias, by the name of epsilon. T5 and Qwen have RMSNorm despite that name."""
    if keys.has("rms_norm_eps", "relative_attention_num_buckets") or keys.model_type == "qwen":
        return False
    names = ("layer_norm_eps", "layer_norm_epsilon", "layer_norm_elementwise_affine", "do_layer_norm_before")
    return keys.has(*names, "norm_epsilon")
