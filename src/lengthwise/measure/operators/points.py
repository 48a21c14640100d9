"""Operators of a model with their shapes and largest sizes, and points at which to measure them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import ModelSpec

ROWS, PREFILL, DECODE, MESSAGE = "rows", "prefill", "decode", "message"
"""Kinds by coordinates: rows (tokens or sequences); (chunk, context); (sequences, KV tokens); message bytes."""


@dataclass(frozen=True)
class Reach:
    """Largest sizes to measure: tokens and sequences of a step, tokens of a request, cached tokens of a decode step."""

    tokens: int
    seqs: int
    context: int
    kv_tokens: int


@dataclass(frozen=True)
class Operator:
    """One operator of a model, with its shapes on one device."""

    name: str
    kind: str
    tps: tuple[int, ...]  # TP degrees whose shards have these shapes, so that one measurement suffices; 0: collectives
    largest: tuple[int, ...]  # maximum of each coordinate; for decode attention also of one sequence's context
    times: float = 1.0  # executions per step
    shape: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        """Unique name within a measurement, for the file of points."""
        gpus = self.shape.get("gpus", 0)
        return f"{self.name} over {gpus}" if gpus else f"{self.name} @ tp {self.tps[0]}"


@dataclass(frozen=True)
class Point:
    """The sizes at which an operator is measured. ``skew`` is the longest context divided by the mean context."""

    operator: Operator
    at: tuple[int, ...]
    skew: int = 1

    @property
    def key(self) -> tuple[str, tuple[int, ...], int]:
        """Unique key within a measurement."""
        return self.operator.key, self.at, self.skew

    @property
    def work(self) -> float:
        """Amount of work, without a unit. Between two points, seconds grow at most by the ratio of their work."""
        if self.operator.kind == PREFILL:
            return self.at[0] * (self.at[1] + self.at[0]) + 64.0 * self.at[0]
        return float(self.at[1] + 16 * self.at[0]) if self.operator.kind == DECODE else float(self.at[0])


class SkippedError(Exception):
    """This device cannot measure the point, but it can measure others."""


class NoRoomError(SkippedError):
    """The device lacks memory for the point."""


class LostError(Exception):
    """The device fails until this process ends. ``outcomes`` has the results of points measured before."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.outcomes: list[Any] = []


def unmeasured(model: ModelSpec) -> tuple[str, ...]:
    """Return a sentence on each part of the model's step that no measured operator covers."""
    notes = []
    if model.encoder_layers:
        parts = "cross-attention, its projections, and encoder layers in excess of the decoder's"
        notes.append(f"{parts} were not measured: fill them from the roofline")
    if model.attention.is_mla:
        notes.append("expanding the latents of a prompt's cached context was not measured: see kv up-projection")
    return tuple(notes)


PER_SEQUENCE = ("final norm", "lm head", "sampler", "host")


def operators_of(model: ModelSpec, tps: Sequence[int], reach: Reach) -> tuple[Operator, ...]:
    """Return all operators to measure. TP degrees whose shards have the same shapes share an operator."""
    merged: dict[tuple[object, ...], Operator] = {}
    for tp in sorted(set(tps)):
        if tp < 1 or model.attention.heads % tp:
            valid = [str(n) for n in (1, 2, 4, 8, 16) if model.attention.heads % n == 0]
            heads = f"{model.attention.heads} attention heads of {model.name}"
            raise InputError(f"tp must divide the {heads}; it is {tp}. Use one of {', '.join(valid)}.")
        for operator in (*_rows_operators(model, tp, reach), *_attention_operators(model, tp, reach)):
            key = (operator.name, operator.kind, operator.largest, tuple(sorted(operator.shape.items())))
            before = merged.get(key)
            merged[key] = operator if before is None else replace(before, tps=(*before.tps, tp))
    return tuple(merged.values())


def _rows_operators(model: ModelSpec, tp: int, reach: Reach) -> Iterator[Operator]:
    attention, ffn, hidden, layers = model.attention, model.ffn, model.hidden, model.layers
    heads, kv_heads = attention.heads // tp, max(1, -(-attention.kv_heads // tp))
    v_dim, caching = attention.v_head_dim or attention.head_dim, model.caching_layers
    gate = heads * v_dim if attention.output_gate else 0

    def rows(name: str, times: float, **shape: int) -> Operator:
        largest = reach.seqs if name in PER_SEQUENCE else reach.tokens
        return Operator(name, ROWS, (tp,), (largest,), times, shape)

    def mlp(prefix: str, times: int, intermediate: int) -> Iterator[Operator]:
        width = -(-intermediate // tp)
        yield rows(f"{prefix}mlp up", times, n=(2 if ffn.gated else 1) * width, k=hidden)
        yield rows(f"{prefix}activation", times, n=width)
        yield rows(f"{prefix}mlp down", times, n=hidden, k=width)

    yield rows("input norm", layers, n=hidden)
    yield rows("post-attention norm", layers, n=hidden)
    if attention.is_mla:
        latent, rank = attention.kv_lora_rank + attention.rope_head_dim, attention.q_lora_rank
        yield rows("latent projection", layers, n=rank + latent, k=hidden)
        width = attention.head_dim + attention.rope_head_dim
        yield rows("query projection", layers, n=heads * width, k=rank or hidden)
        rope = attention.rope_head_dim or attention.head_dim
        yield rows("rope", layers, heads=heads, kv_heads=1, head_dim=rope)
        yield rows("kv up-projection", layers, n=heads * (attention.head_dim + v_dim), k=attention.kv_lora_rank)
        yield rows("kv write", layers, kv_heads=1, head_dim=latent)
    else:
        width = (heads + kv_heads) * attention.head_dim + kv_heads * v_dim
        yield rows("qkv projection", caching, n=width + gate, k=hidden)
        if not model.metadata.learned_positions:
            yield rows("rope", caching, heads=heads, kv_heads=kv_heads, head_dim=attention.head_dim)
        yield rows("kv write", caching, kv_heads=kv_heads, head_dim=attention.head_dim)
    yield rows("output projection", caching, n=hidden, k=heads * v_dim)
    dense = ffn.dense_layers if ffn.experts else layers
    if dense:
        yield from mlp("", dense, ffn.intermediate)
    if ffn.experts:
        width = -(-ffn.expert_intermediate // tp)
        shape = {"experts": ffn.experts, "topk": ffn.experts_per_token, "n": width, "k": hidden}
        for name in ("router", "experts up", "expert activation", "experts down"):
            yield rows(name, layers - dense, **shape)
        if ffn.shared_intermediate:
            yield from mlp("shared ", layers - dense, ffn.shared_intermediate)
    yield rows("embedding", 1, n=hidden, k=-(-model.vocab // tp))
    yield rows("final norm", 1, n=hidden)
    yield rows("lm head", 1, n=-(-model.vocab // tp), k=hidden)
    yield rows("sampler", 1, n=model.vocab)
    yield rows("host", 1)


def _attention_operators(model: ModelSpec, tp: int, reach: Reach) -> Iterator[Operator]:
    attention = model.attention
    heads, kv_heads = attention.heads // tp, max(1, -(-attention.kv_heads // tp))
    windowed = min(attention.windowed_layers, model.layers) if attention.window_tokens else 0
    for word, layers, window in (
        ("", model.caching_layers - windowed, 0),
        ("window ", windowed, attention.window_tokens or 0),
    ):
        if not layers:
            continue
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": attention.head_dim}
        if attention.is_mla:
            shape |= {"kv_heads": heads, "head_dim": attention.head_dim + attention.rope_head_dim}
        if window:
            shape["window"] = window
        prompt = (min(reach.tokens, reach.context), max(0, reach.context - 1))
        yield Operator(f"prefill {word}attention", PREFILL, (tp,), prompt, layers, shape)
        if attention.is_mla:
            shape = {**shape, "kv_heads": 1, "head_dim": attention.kv_lora_rank + attention.rope_head_dim}
        longest = min(window or reach.context, reach.context)
        cached = (reach.seqs, min(reach.kv_tokens, reach.seqs * longest), longest)
        yield Operator(f"decode {word}attention", DECODE, (tp,), cached, layers, shape)
