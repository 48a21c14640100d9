"""A model as its shapes: what the cost and memory of serving it follow from."""

from __future__ import annotations

from dataclasses import dataclass


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
    facts: ModelFacts = ModelFacts()

    @property
    def dtype(self) -> str:
        """The published weights' dtype."""
        return self.facts.dtype
