"""From a Hugging Face ``config.json`` to a model's shapes, by keys rather than by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.specs import AttentionSpec, FfnSpec, ModelFacts, ModelSpec, dtype_name

_TEXT_PARTS = ("text_config", "language_config", "llm_config")

_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    # transformers writes only what differs from the class, so these may be absent from a file.
    "gemma": {"head_dim": 256},
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rms_norm_eps": 1e-6,
    },
    "qwen": {"hidden_act": "silu"},
}

_UNTIED_BY_CLASS = (
    *("codellama", "deepseek_v2", "deepseek_v3", "gpt_neox", "gptj", "internlm", "internlm2", "llama"),
    *("mistral", "mixtral", "olmo", "phi", "phi3", "qwen", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    "stablelm",
)
"""Types whose class leaves head and embedding apart where a file does not say."""


class ConfigKeys:
    """Answers what a config says; what it lacks is gathered and reported once by ``check``.

    Args:
        config: The parsed ``config.json``; the text part of a multimodal one is used.
        where: What errors call it: its file or its name.
    """

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where = where
        parts = [config[key] for key in _TEXT_PARTS if isinstance(config.get(key), Mapping)]
        table = {**config, **(parts[0] if parts else {})}
        self.model_type = str(table.get("model_type", ""))
        self._table: dict[str, Any] = {**_CLASS_DEFAULTS.get(self.model_type, {}), **table}
        self._missing: list[str] = []

    def has(self, *names: str) -> bool:
        """Whether one of these keys is there, even as null."""
        return any(name in self._table for name in names)

    def find(self, *names: str, default: Any = None) -> Any:
        """The first of these keys that holds something, else ``default``."""
        values = (self._table[name] for name in names if self._table.get(name) is not None)
        return next(values, default)

    def count(self, *names: str, default: int = 0) -> int:
        """The first of these keys as a whole number, else ``default``.

        Raises:
            InputError: It holds something else.
        """
        value = self.find(*names, default=default)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < 0:
            raise InputError(f"{self.where}: {self._first(names)} must be a whole number; it is {value!r}")
        return int(value)

    def as_list(self, *names: str) -> list[Any]:
        """The first of these keys as a list, else an empty one.

        Raises:
            InputError: It holds something else.
        """
        value = self.find(*names, default=[])
        if not isinstance(value, list):
            raise InputError(f"{self.where}: {self._first(names)} must be a list; it is {value!r}")
        return value

    def need(self, what: str, *names: str) -> int:
        """Like ``count``, of at least 1; when absent 1, which ``check`` reports as missing."""
        value = self.count(*names)
        if not value:
            self._missing.append(f"{what} (looked for {', '.join(names)})")
        return value or 1

    def is_tied(self) -> bool:
        """Whether head and embedding share weights; what transformers does when the key is absent."""
        return bool(self.find("tie_word_embeddings", default=self.model_type not in _UNTIED_BY_CLASS))

    def check(self) -> None:
        """Does nothing when all that was needed was there.

        Raises:
            InputError: Something was missing; the message names every alternative looked for.
        """
        if self._missing:
            raise InputError(
                f"{self.where} must give the shapes of a model; it lacks {'; '.join(self._missing)}. "
                f"Its keys are {', '.join(sorted(self._table)) or 'none'}"
            )

    def _first(self, names: tuple[str, ...]) -> str:
        return next(name for name in names if self._table.get(name) is not None)


_BY_NAME = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "fp4", "nvfp4": "fp4"}
_BY_BITS = {("int", 4): "int4", ("int", 8): "int8", ("float", 4): "fp4", ("float", 8): "fp8"}


def weight_dtype(keys: ConfigKeys) -> str:
    """The one spelling of the weights' dtype; a quantised one is that of the layers.

    A config that names none is taken as bfloat16, in which engines load such weights.

    Raises:
        InputError: The dtype or the way of quantising is none that is known.
    """
    quantised = keys.find("quantization_config")
    if isinstance(quantised, Mapping):
        return _quantised(quantised, keys.where)
    named = str(keys.find("dtype", "torch_dtype", default="bfloat16")).removeprefix("torch.")
    try:
        return dtype_name("bfloat16" if named == "auto" else named)
    except UnknownNameError as error:
        raise InputError(f"{keys.where}: {error}") from error


def _quantised(table: Mapping[str, Any], where: str) -> str:
    said = [str(table.get(key, "")).lower() for key in ("quant_method", "quant_algo")]
    if known := [dtype for name, dtype in _BY_NAME.items() if any(word.startswith(name) for word in said)]:
        return known[0]
    dtype = _BY_BITS.get(_kind_and_bits(table))
    if dtype is None:
        raise InputError(
            f"{where}: quantization_config must be fp8, awq, gptq, compressed-tensors, bitsandbytes, mxfp4 "
            f"or modelopt with 4 or 8 bits; it is {dict(table)}. Remove it and set weight_dtype"
        )
    return dtype


def _kind_and_bits(table: Mapping[str, Any]) -> tuple[str, int]:
    """What a weight is ("int" or "float") and its bits (0: not said)."""
    if groups := table.get("config_groups"):
        weights = next(iter(groups.values())).get("weights") or {}
        return str(weights.get("type", "int")), weights.get("num_bits") or 0
    if table.get("load_in_4bit") or table.get("load_in_8bit"):
        return "int", 4 if table.get("load_in_4bit") else 8
    return "int", table.get("bits") or table.get("w_bit") or 0


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

_FOUR_TIMES_HIDDEN = ("n_inner", "n_embd", "n_embed", "alibi", "new_decoder_architecture")
"""Keys of families (GPT-2, BLOOM, Falcon) that leave the MLP's width to be 4 x hidden."""

_BIASED_ATTENTION = {"qwen", "qwen2", "qwen2_moe", "qwen2_vl"}
_BIASED = {"bart", "bloom", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "phi"}


def parse(config: Mapping[str, Any], name: str, where: str) -> ModelSpec:
    """The shapes that a config describes; ``where`` names it in errors.

    Raises:
        InputError: Needed keys are missing or hold something else than they should.
    """
    keys = ConfigKeys(config, where)
    hidden = keys.need("the hidden size", *_HIDDEN)
    layers = keys.need("the number of layers", *_DECODER_LAYERS)
    spec = ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        vocab=keys.need("the vocabulary", "vocab_size", "padded_vocab_size"),
        attention=_attention(keys, hidden, layers),
        ffn=_ffn(keys, hidden, layers),
        max_model_len=_max_model_len(keys),
        tied_embeddings=keys.is_tied(),
        encoder_layers=keys.count(*_ENCODER_LAYERS) if _has_encoder(keys) else 0,
        metadata=_metadata(keys, where),
    )
    keys.check()
    return spec


def _has_encoder(keys: ConfigKeys) -> bool:
    return bool(keys.find("is_encoder_decoder", default=keys.has("num_decoder_layers")))


def _attention(keys: ConfigKeys, hidden: int, layers: int) -> AttentionSpec:
    heads = keys.need("the attention heads", *_HEADS)
    window, windowed = _window(keys, layers)
    bias = keys.find("attention_bias", "qkv_bias", "add_qkv_bias", "use_bias", "enable_bias", "bias")
    latent = keys.count("kv_lora_rank")
    head_dim = keys.count("qk_nope_head_dim") if latent else keys.count(*_HEAD_DIM)
    return AttentionSpec(
        heads=heads,
        kv_heads=_kv_heads(keys, heads),
        head_dim=head_dim or hidden // heads,
        window_tokens=window,
        windowed_layers=windowed,
        v_head_dim=keys.count("v_head_dim") or None if latent else None,
        q_lora_rank=keys.count("q_lora_rank") if latent else 0,
        kv_lora_rank=latent,
        rope_head_dim=keys.count("qk_rope_head_dim") if latent else 0,
        bias=bool(bias) if bias is not None else keys.model_type in _BIASED_ATTENTION | _BIASED,
    )


def _kv_heads(keys: ConfigKeys, heads: int) -> int:
    # Falcon-7B lists all heads as num_kv_heads although it shares one.
    if keys.find("multi_query") and not keys.find("new_decoder_architecture"):
        return 1
    return keys.count(*_KV_HEADS, default=heads)


def _window(keys: ConfigKeys, layers: int) -> tuple[int | None, int]:
    """The sliding window and how many layers have it; a window no shorter than the model is none."""
    window = keys.count("sliding_window")
    if not window or keys.find("use_sliding_window") is False:
        return None, 0
    if window >= keys.count(*_POSITIONS, default=window + 1):
        return None, 0
    windowed = _windowed_layers(keys, layers)
    return (window, windowed) if windowed else (None, 0)


def _windowed_layers(keys: ConfigKeys, layers: int) -> int:
    if types := keys.as_list("layer_types"):
        return sum(kind == "sliding_attention" for kind in types)
    if period := keys.count("sliding_window_pattern", "_sliding_window_pattern"):
        return layers - layers // period
    return max(0, layers - keys.count("max_window_layers"))


def _ffn(keys: ConfigKeys, hidden: int, layers: int) -> FfnSpec:
    experts = keys.count(*_EXPERTS)
    intermediate = _intermediate(keys, hidden)
    expert_width = keys.count("moe_intermediate_size", default=intermediate)
    bias = keys.find("mlp_bias", "use_bias", "enable_bias", "bias")
    shared = keys.count("n_shared_experts", "num_shared_experts") * expert_width
    sparse = experts > 1
    return FfnSpec(
        intermediate=intermediate,
        gated=_is_gated(keys),
        experts=experts if sparse else 0,
        experts_per_token=keys.need("the experts a token visits", *_EXPERTS_PER_TOKEN) if sparse else 0,
        expert_intermediate=expert_width if sparse else 0,
        shared_intermediate=keys.count("shared_expert_intermediate_size", default=shared) if sparse else 0,
        dense_layers=_dense_layers(keys, layers) if sparse else 0,
        bias=bool(bias) if bias is not None else keys.model_type in _BIASED,
    )


def _intermediate(keys: ConfigKeys, hidden: int) -> int:
    if not keys.find(*_FFN) and keys.has(*_FOUR_TIMES_HIDDEN):
        return 4 * hidden
    width = keys.need("the MLP's width", *_FFN)
    # Qwen (1) writes the width of gate and up projection together.
    return width // 2 if keys.model_type == "qwen" else width


def _dense_layers(keys: ConfigKeys, layers: int) -> int:
    """How many layers of an MoE model are dense; of dense ones further back only the number is kept."""
    if isinstance(keys.find("moe_layer_freq"), list):
        return sum(not is_sparse for is_sparse in keys.as_list("moe_layer_freq"))
    as_list = len(keys.as_list("mlp_only_layers"))
    step = keys.count("decoder_sparse_step", "moe_layer_freq", default=1) or 1
    return max(keys.count("first_k_dense_replace"), as_list, layers - layers // step)


_PLAIN_FAMILIES = ("gpt", "opt", "phi", "bloom", "mpt", "falcon", "starcoder", "t5", "codegen", "bert")


def _is_gated(keys: ConfigKeys) -> bool:
    """SwiGLU and the like have three matrices; silu, Gemma's GELU and "gated-..." say so.

    A config that does not name its activation has its family's: only older families are plain.
    """
    activation = str(keys.find(*_ACTIVATION, default="")).lower()
    if not activation:
        return keys.model_type.startswith("phi3") or not keys.model_type.startswith(_PLAIN_FAMILIES)
    gated = ("silu", "swish", "swiglu", "geglu", "gegelu", "gated", "xielu")
    return keys.model_type.startswith("gemma") or activation.startswith(gated)


def _max_model_len(keys: ConfigKeys) -> int:
    longest = keys.need("the longest context", *_POSITIONS)
    # Relative positions have no end (T5): the trained length holds for each side.
    return 2 * longest if keys.has("relative_attention_num_buckets") else longest


def _metadata(keys: ConfigKeys, where: str) -> ModelFacts:
    return ModelFacts(
        dtype=weight_dtype(keys),
        learned_positions=_learned_positions(keys),
        norm_bias=_has_layer_norm(keys),
        source=where,
    )


def _learned_positions(keys: ConfigKeys) -> int:
    if keys.has("word_embed_proj_dim", "do_layer_norm_before"):
        return keys.count("max_position_embeddings") + 2  # OPT's table starts at 2
    if keys.has("rotary_dim", "relative_attention_num_buckets", "rotary_pct"):
        return 0
    return keys.count("n_positions")


def _has_layer_norm(keys: ConfigKeys) -> bool:
    """LayerNorm with a bias, as its epsilon's name tells; T5 and Qwen use that name for an RMSNorm."""
    if keys.has("rms_norm_eps", "relative_attention_num_buckets") or keys.model_type == "qwen":
        return False
    return keys.has("layer_norm_eps", "layer_norm_epsilon", "layer_norm_elementwise_affine") or (
        keys.has("do_layer_norm_before", "norm_epsilon")
    )
