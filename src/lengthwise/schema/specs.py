"""A model as its shapes: what the cost and memory of serving it follow from."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.schema.errors import UnknownNameError


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention. MHA, GQA and MQA differ in ``kv_heads`` alone.

    ``kv_lora_rank`` > 0 makes it MLA (DeepSeek): the cache holds one latent of
    ``kv_lora_rank + rope_head_dim`` numbers a token, shared by all heads.
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
        """Whether the cache holds latents rather than keys and values."""
        return self.kv_lora_rank > 0

    @property
    def is_gqa(self) -> bool:
        """Whether several query heads share a key-value head."""
        return self.heads > self.kv_heads


@dataclass(frozen=True)
class FfnSpec:
    """One layer's feed-forward part. ``experts`` == 0 is dense.

    ``dense_layers`` first layers are dense with ``intermediate``; in the others every
    token visits ``experts_per_token`` of ``experts`` (each ``expert_intermediate`` wide)
    and a shared one of ``shared_intermediate`` (0: none).
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
    """What is known of a model beside its shapes.

    ``learned_positions`` counts rows of a learned position table (OPT, GPT-3; 0: none);
    ``norm_bias`` says that norms are LayerNorms with a bias rather than RMSNorms.
    """

    dtype: str = "bfloat16"
    learned_positions: int = 0
    norm_bias: bool = False
    published_params: float | None = None
    source: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """A transformer by its shapes; no weights.

    ``layers`` counts decoder layers; an encoder-decoder has ``encoder_layers`` more and
    cross-attention in every decoder layer. ``dtype`` is the published weights' dtype.
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
        """The published weights' dtype."""
        return self.metadata.dtype


@dataclass(frozen=True)
class GpuSpec:
    """One accelerator (or a CPU socket) from its data sheet.

    ``peak_flops`` maps a dtype's one spelling (units.dtype_name) to dense FLOP/s, without
    sparsity; ``memory_bytes`` is what the driver offers; ``bandwidth_bytes_per_s`` is the
    memory's; ``price_per_hour_usd`` is one on-demand price with ``price_source``.
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
        """Peak FLOP/s for weights of this dtype; formats without units of their own run as bf16."""
        for name in (dtype, "bfloat16", "float16", "float32"):
            if name in self.peak_flops:
                return self.peak_flops[name]
        raise KeyError(dtype)


@dataclass(frozen=True)
class LinkSpec:
    """A link: bytes a second in one direction for one GPU, and the latency of one message."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    source: str


@dataclass(frozen=True)
class NodeSpec:
    """A machine: how many GPUs, and what joins them.

    ``link`` joins GPUs of one ``link_group`` (2 for pairwise NVLink, all of them for
    NVSwitch); ``fallback_link`` joins the groups inside the node; ``network`` joins nodes.
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
        """The slowest link inside a group of so many neighbouring GPUs."""
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
    """The one spelling of a dtype ("bf16" -> "bfloat16"); raises UnknownNameError."""
    name = _ALIASES.get(name.lower(), name.lower())
    if name not in DTYPE_BYTES:
        raise UnknownNameError("dtype", name, [*DTYPE_BYTES, *_ALIASES])
    return name


def dtype_bytes(name: str) -> float:
    """Bytes of one element, scales of block formats left out; raises UnknownNameError."""
    return DTYPE_BYTES[dtype_name(name)]
