"""Defines models, GPUs, links and nodes by the numbers that determine cost and memory, and dtypes."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.schema.errors import UnknownNameError


@dataclass(frozen=True)
class LinearAttentionSpec:
    """Layers of gated linear attention (Gated DeltaNet): each sequence has a state of fixed size, not cached tokens."""

    layers: int  # spread evenly among the layers with attention over cached tokens
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        """Return the number of channels of the causal convolution over queries, keys and values."""
        return 2 * self.key_heads * self.key_head_dim + self.value_heads * self.value_head_dim

    @property
    def state_elements(self) -> int:
        """Return the size of one sequence's state in one layer (recurrence and convolution), in elements."""
        recurrence = self.value_heads * self.key_head_dim * self.value_head_dim
        return recurrence + self.conv_channels * (self.conv_kernel - 1)


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one layer. MHA, GQA and MQA differ only in ``kv_heads``."""

    heads: int
    kv_heads: int
    head_dim: int
    window_tokens: int | None = None  # of sliding-window attention; None: no layer has a window
    windowed_layers: int = 0  # number of layers with the window
    v_head_dim: int | None = None  # size of a value head; None: ``head_dim``
    q_lora_rank: int = 0  # of MLA: rank of the compressed queries; 0: queries are not compressed
    # Above 0: MLA (DeepSeek), where heads share a cached latent of ``kv_lora_rank + rope_head_dim`` numbers a token.
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    bias: bool = False
    output_gate: bool = False  # whether the query projection also computes a gate for each output (Qwen3-Next)
    # DeepSeek sparse attention (V3.2): an indexer with a cached key per token chooses the tokens that are attended to.
    index_heads: int = 0
    index_head_dim: int = 0
    index_top_k: int = 2048  # cached tokens that the indexer chooses for each query
    linear: LinearAttentionSpec | None = None

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
    """The feed-forward network of one layer. It is dense if ``experts`` is 0."""

    intermediate: int  # width of a dense layer
    gated: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0  # width of an expert
    shared_intermediate: int = 0  # width of a shared expert, which every token uses too; 0: none
    dense_layers: int = 0  # number of dense layers of an MoE model
    interleaved: bool = False  # True: dense layers are spread evenly among the MoE layers; False: they come first
    bias: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """Further facts about a model."""

    dtype: str = "bfloat16"
    learned_positions: int = 0  # rows of a learned position table (OPT, GPT-3); 0: none
    norm_bias: bool = False  # True: norms are LayerNorms with a bias; False: RMSNorms
    published_params: float | None = None
    fp4_outputs: bool = False  # whether checkpoints in FP4 quantize output projections and all MLPs, not only experts
    int4_experts: bool = False  # whether checkpoints in INT4 quantize only routed experts
    mtp_modules: int = 0  # published modules of multi-token prediction
    chunked_attention: bool = False  # whether layers with a window see the current chunk of as many tokens (Llama 4)
    untested_type: str = ""  # ``model_type`` of a config.json that no test covers
    source: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """The shapes of a transformer."""

    name: str
    layers: int  # decoder layers
    hidden: int
    vocab: int
    attention: AttentionSpec
    ffn: FfnSpec
    max_model_len: int
    tied_embeddings: bool = False
    encoder_layers: int = 0  # of an encoder-decoder, which also has cross-attention in every decoder layer
    metadata: ModelFacts = ModelFacts()

    @property
    def dtype(self) -> str:
        """Return the dtype of the published weights."""
        return self.metadata.dtype

    @property
    def caching_layers(self) -> int:
        """Return the number of decoder layers that cache keys and values. Layers of linear attention do not."""
        return self.layers - (self.attention.linear.layers if self.attention.linear else 0)


@dataclass(frozen=True)
class GpuSpec:
    """The properties of a GPU (or a CPU socket) from its data sheet."""

    name: str
    peak_flops: dict[str, float]  # dense FLOP/s, without sparsity, by dtype (as spelled by ``dtype_name``)
    memory_bytes: float  # as the driver reports it
    bandwidth_bytes_per_s: float  # of the memory
    tdp_w: float
    idle_w: float
    price_per_hour_usd: float  # on demand, from ``price_source``
    price_source: str
    source: str
    aliases: tuple[str, ...] = ()
    is_cpu: bool = False  # its kernels have no tiles of thread blocks to fill

    @property
    def is_nvidia(self) -> bool:
        """Return whether the GPU is NVIDIA's, by its name."""
        return not (self.is_cpu or self.name.startswith(("CPU", "MI", "TPU", "Gaudi")))

    def flops(self, dtype: str) -> float:
        """Return the peak FLOP/s with weights of this dtype, or of bfloat16, float16 or float32 if it has none."""
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
    """A machine: its GPUs and the links between them."""

    name: str
    gpus: int
    link: LinkSpec  # between the GPUs of one ``link_group``
    link_group: int  # 2 for pairwise NVLink, all GPUs for NVSwitch
    fallback_link: LinkSpec  # between the groups of a node
    network: LinkSpec  # between nodes
    source: str
    aliases: tuple[str, ...] = ()
    gpus_per_host: int | None = None  # of each host where a node's links join several hosts; None: one host has all

    @property
    def host_gpus(self) -> int:
        """Return the number of GPUs of one host, which runs the processes of an engine for them."""
        return self.gpus if self.gpus_per_host is None else self.gpus_per_host

    def link_for(self, gpus: int) -> LinkSpec:
        """Return the slowest link that connects this many neighbouring GPUs."""
        if gpus <= self.link_group:
            return self.link
        return self.fallback_link if gpus <= self.gpus else self.network


KIB, MIB, GIB = 2**10, 2**20, 2**30
GB, TFLOP = 1e9, 1e12

DTYPE_BYTES: dict[str, float] = {
    "float32": 4.0,
    **dict.fromkeys(("float16", "bfloat16"), 2.0),
    **dict.fromkeys(("fp8", "int8"), 1.0),
    **dict.fromkeys(("fp4", "int4"), 0.5),
}
_ALIASES = {
    "fp32": "float32",
    **dict.fromkeys(("fp16", "half"), "float16"),
    "bf16": "bfloat16",
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2"), "fp8"),
    "w8a8": "int8",
    **dict.fromkeys(("w4a16", "awq", "gptq"), "int4"),
    **dict.fromkeys(("nvfp4", "mxfp4"), "fp4"),
}


def dtype_name(name: str) -> str:
    """Return the standard name of a dtype: "bf16" becomes "bfloat16". An unknown one raises UnknownNameError."""
    name = _ALIASES.get(name.lower(), name.lower())
    if name not in DTYPE_BYTES:
        raise UnknownNameError("dtype", name, [*DTYPE_BYTES, *_ALIASES])
    return name


def dtype_bytes(name: str) -> float:
    """Return the bytes of one element, without the scales of block formats. Raises UnknownNameError."""
    return DTYPE_BYTES[dtype_name(name)]
