"""Models, GPUs, links and nodes by the numbers that determine cost and memory, and dtypes."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.schema.errors import UnknownNameError


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer; MHA, GQA and MQA differ only in ``kv_heads``.

    ``kv_lora_rank`` > 0 means MLA (DeepSeek): the cache stores one latent of ``kv_lora_rank + rope_head_dim`` numbers
    per token, shared by all heads.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window_tokens: int | None = None
    windowed_layers: int = 0
    v_head_dim: int | None = None
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    bias: bool = False

    @property
    def is_mla(self) -> bool:
        """Return whether the cache stores latents instead of keys and values."""
        return self.kv_lora_rank > 0

    @property
    def is_gqa(self) -> bool:
        """Return whether several query heads share a key-value head."""
        return self.heads > self.kv_heads


@dataclass(frozen=True)
class FfnSpec:
    """The feed-forward network of one layer; ``experts`` == 0 is dense.

    The first ``dense_layers`` layers are dense with ``intermediate``; in the others every token uses
    ``experts_per_token`` of ``experts`` (each ``expert_intermediate`` wide) and a shared expert of
    ``shared_intermediate`` (0: none).
    """

    intermediate: int
    gated: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    bias: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model other than its main shapes.

    ``learned_positions`` is the number of rows of a learned position table (OPT, GPT-3; 0: none). With ``norm_bias``,
    norms are LayerNorms with a bias, otherwise RMSNorms.
    """

    dtype: str = "bfloat16"
    learned_positions: int = 0
    norm_bias: bool = False
    published_params: float | None = None
    source: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """The shapes of a transformer.

    ``layers`` counts decoder layers; an encoder-decoder has ``encoder_layers`` more, and cross-attention in every
    decoder layer.
    """

    name: str
    layers: int
    hidden: int
    vocab: int
    attention: AttentionSpec
    ffn: FfnSpec
    max_model_len: int
    tied_embeddings: bool = False
    encoder_layers: int = 0
    metadata: ModelFacts = ModelFacts()

    @property
    def dtype(self) -> str:
        """Return the dtype of the published weights."""
        return self.metadata.dtype


@dataclass(frozen=True)
class GpuSpec:
    """A GPU (or a CPU socket) by its data sheet.

    ``peak_flops`` maps a dtype (as spelled by ``dtype_name``) to dense FLOP/s without sparsity; ``memory_bytes`` is
    what the driver reports; ``bandwidth_bytes_per_s`` is that of the memory; ``price_per_hour_usd`` is an on-demand
    price from ``price_source``.
    """

    name: str
    peak_flops: dict[str, float]
    memory_bytes: float
    bandwidth_bytes_per_s: float
    tdp_w: float
    idle_w: float
    price_per_hour_usd: float
    price_source: str
    source: str
    aliases: tuple[str, ...] = ()

    def flops(self, dtype: str) -> float:
        """Return the peak FLOP/s for weights of this dtype; formats without hardware support run as bf16."""
        for name in (dtype, "bfloat16", "float16", "float32"):
            if name in self.peak_flops:
                return self.peak_flops[name]
        raise KeyError(dtype)


@dataclass(frozen=True)
class LinkSpec:
    """A link: bandwidth in one direction for one GPU, and the latency of one message."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    source: str


@dataclass(frozen=True)
class NodeSpec:
    """A machine: its GPUs and the links between them.

    ``link`` connects the GPUs of one ``link_group`` (2 for pairwise NVLink, all GPUs for NVSwitch); ``fallback_link``
    connects the groups of a node; ``network`` connects nodes.
    """

    name: str
    gpus: int
    link: LinkSpec
    link_group: int
    fallback_link: LinkSpec
    network: LinkSpec
    source: str
    aliases: tuple[str, ...] = ()

    def link_for(self, gpus: int) -> LinkSpec:
        """Return the slowest link within a group of this many neighbouring GPUs."""
        if gpus <= self.link_group:
            return self.link
        return self.fallback_link if gpus <= self.gpus else self.network


KIB, MIB, GIB = 2**10, 2**20, 2**30
GB, TFLOP = 1e9, 1e12

DTYPE_BYTES: dict[str, float] = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5,
    "int4": 0.5,
}
_ALIASES = {
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "w8a8": "int8",
    "w4a16": "int4",
    "awq": "int4",
    "gptq": "int4",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
}


def dtype_name(name: str) -> str:
    """Return the standard name of a dtype ("bf16" -> "bfloat16"); raise UnknownNameError."""
    name = _ALIASES.get(name.lower(), name.lower())
    if name not in DTYPE_BYTES:
        raise UnknownNameError("dtype", name, [*DTYPE_BYTES, *_ALIASES])
    return name


def dtype_bytes(name: str) -> float:
    """Return the bytes of one element, without the scales of block formats; raise UnknownNameError."""
    return DTYPE_BYTES[dtype_name(name)]
