"""What can be measured: operators with their shapes and ranges, and points of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import ModelSpec

ROWS, PREFILL, DECODE, MESSAGE = "rows", "prefill", "decode", "message"
"""Kinds of operators by what their seconds depend on: rows through it (tokens or sequences), (chunk, context),
(sequences, KV tokens), bytes of a message."""


@dataclass(frozen=True)
class Reach:
    """How far the points go.

    Attributes:
        tokens: Most tokens of a step.
        seqs: Most sequences of a step.
        context: Longest request.
        kv_tokens: Most cached tokens that one decode step reads.
    """

    tokens: int
    seqs: int
    context: int
    kv_tokens: int


@dataclass(frozen=True)
class Operator:
    """One operator on one device's shard.

    Attributes:
        name: Of schema.profile.OPERATOR_PARTS.
        kind: ROWS, PREFILL, DECODE or MESSAGE.
        tps: The TP degrees whose shards have these very shapes; it is measured once for all of them.
        largest: Of each coordinate; of decode attention also of one sequence's context.
        times: How often a step runs it.
        shape: Columns of the profile that describe it: n, k, heads...
    """

    name: str
    kind: str
    tps: tuple[int, ...]
    largest: tuple[int, ...]
    times: float = 1.0
    shape: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        """Its name in a file of points: unique within a measurement."""
        gpus = self.shape.get("gpus", 0)
        return f"{self.name} over {gpus}" if gpus else f"{self.name} @ tp {self.tps[0]}"

    def work(self, at: tuple[int, ...]) -> float:
        """What its seconds at most grow with, in no unit: to tell a large point from a small one."""
        if self.kind == PREFILL:
            return at[0] * (at[1] + at[0]) + 64.0 * at[0]
        return float(at[1] + 16 * at[0]) if self.kind == DECODE else float(at[0])


@dataclass(frozen=True)
class Point:
    """One place at which an operator is measured; ``skew`` is the longest over the mean context."""

    operator: Operator
    at: tuple[int, ...]
    skew: int = 1

    @property
    def key(self) -> tuple[str, tuple[int, ...], int]:
        """Unique within a measurement."""
        return self.operator.key, self.at, self.skew

    @property
    def work(self) -> float:
        """See Operator.work."""
        return self.operator.work(self.at)


class SkippedError(Exception):
    """A point cannot be measured on this device; the rest can."""


class NoRoomError(SkippedError):
    """The device has no memory for a point."""


class LostError(Exception):
    """The device answers nothing any more until this process ends; ``outcomes`` were measured before."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.outcomes: list[Any] = []


def unmeasured(model: ModelSpec) -> tuple[str, ...]:
    """What of a model's step no operator of ours covers, a sentence each."""
    notes = []
    if model.encoder_layers:
        notes.append(
            "cross-attention and its projections were not measured, nor what an encoder is deeper than the "
            "decoder: fill them from the roofline"
        )
    if model.attention.is_mla:
        notes.append("expanding the latents of a prompt's cached context was not measured: see kv up-projection")
    return tuple(notes)


HEADS_OF_STEP = ("final norm", "lm head", "sampler", "host")


def operators_of(model: ModelSpec, tps: Sequence[int], reach: Reach) -> tuple[Operator, ...]:
    """All operators to measure; shards of the same shapes are one operator of several degrees.

    Raises:
        InputError: A degree does not divide the heads.
    """
    merged: dict[tuple[object, ...], Operator] = {}
    for tp in sorted(set(tps)):
        for one in _Shard(model, tp, reach).operators():
            key = (one.name, one.kind, one.largest, tuple(sorted(one.shape.items())))
            before = merged.get(key)
            merged[key] = one if before is None else replace(before, tps=(*before.tps, tp))
    return tuple(merged.values())


class _Shard:
    """One device's share: the same shapes as in the cost model's roofline."""

    def __init__(self, model: ModelSpec, tp: int, reach: Reach) -> None:
        attention = model.attention
        if tp < 1 or attention.heads % tp:
            able = [n for n in (1, 2, 4, 8, 16) if attention.heads % n == 0]
            raise InputError(
                f"tp must divide the {attention.heads} attention heads of {model.name}; it is {tp}. "
                f"Use one of {', '.join(map(str, able))}."
            )
        self.model, self.tp, self.reach = model, tp, reach
        self.heads = attention.heads // tp
        self.kv_heads = max(1, -(-attention.kv_heads // tp))
        self.v_dim = attention.v_head_dim or attention.head_dim

    def operators(self) -> Iterator[Operator]:
        """Those of a layer, then those of a step."""
        hidden, layers = self.model.hidden, self.model.layers
        yield self._rows("input norm", layers, n=hidden)
        yield self._rows("post-attention norm", layers, n=hidden)
        yield from self._latent() if self.model.attention.is_mla else self._projections()
        yield from self._ffn()
        yield from self._attention()
        yield self._rows("embedding", 1, n=hidden, k=-(-self.model.vocab // self.tp))
        yield self._rows("final norm", 1, n=hidden)
        yield self._rows("lm head", 1, n=-(-self.model.vocab // self.tp), k=hidden)
        yield self._rows("sampler", 1, n=self.model.vocab)
        yield self._rows("host", 1)

    def _rows(self, name: str, times: float, **shape: int) -> Operator:
        largest = self.reach.seqs if name in HEADS_OF_STEP else self.reach.tokens
        return Operator(name, ROWS, (self.tp,), (largest,), times, shape)

    def _projections(self) -> Iterator[Operator]:
        attention, hidden, layers = self.model.attention, self.model.hidden, self.model.layers
        wide = (self.heads + self.kv_heads) * attention.head_dim + self.kv_heads * self.v_dim
        yield self._rows("qkv projection", layers, n=wide, k=hidden)
        heads = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": attention.head_dim}
        if not self.model.metadata.learned_positions:
            yield self._rows("rope", layers, **heads)
        yield self._rows("kv write", layers, kv_heads=self.kv_heads, head_dim=attention.head_dim)
        yield self._rows("output projection", layers, n=hidden, k=self.heads * self.v_dim)

    def _latent(self) -> Iterator[Operator]:
        attention, hidden, layers = self.model.attention, self.model.hidden, self.model.layers
        latent, rank = attention.kv_lora_rank + attention.rope_head_dim, attention.q_lora_rank
        width = attention.head_dim + attention.rope_head_dim
        yield self._rows("latent projection", layers, n=rank + latent, k=hidden)
        yield self._rows("query projection", layers, n=self.heads * width, k=rank or hidden)
        rope = attention.rope_head_dim or attention.head_dim
        yield self._rows("rope", layers, heads=self.heads, kv_heads=1, head_dim=rope)
        up = self.heads * (attention.head_dim + self.v_dim)
        yield self._rows("kv up-projection", layers, n=up, k=attention.kv_lora_rank)
        yield self._rows("kv write", layers, kv_heads=1, head_dim=latent)
        yield self._rows("output projection", layers, n=hidden, k=self.heads * self.v_dim)

    def _ffn(self) -> Iterator[Operator]:
        ffn, layers = self.model.ffn, self.model.layers
        dense = ffn.dense_layers if ffn.experts else layers
        if dense:
            yield from self._mlp("", dense, ffn.intermediate)
        if not ffn.experts:
            return
        sparse = layers - dense
        hidden, width = self.model.hidden, -(-ffn.expert_intermediate // self.tp)
        few = {"experts": ffn.experts, "topk": ffn.experts_per_token, "n": width, "k": hidden}
        for name in ("router", "experts up", "expert activation", "experts down"):
            yield self._rows(name, sparse, **few)
        if ffn.shared_intermediate:
            yield from self._mlp("shared ", sparse, ffn.shared_intermediate)

    def _mlp(self, prefix: str, times: int, intermediate: int) -> Iterator[Operator]:
        width, into, hidden = -(-intermediate // self.tp), 2 if self.model.ffn.gated else 1, self.model.hidden
        yield self._rows(f"{prefix}mlp up", times, n=into * width, k=hidden)
        yield self._rows(f"{prefix}activation", times, n=width)
        yield self._rows(f"{prefix}mlp down", times, n=hidden, k=width)

    def _attention(self) -> Iterator[Operator]:
        attention, layers = self.model.attention, self.model.layers
        windowed = min(attention.windowed_layers, layers) if attention.window_tokens else 0
        if layers - windowed:
            yield from self._attention_pair("", layers - windowed, 0)
        if windowed:
            yield from self._attention_pair("window ", windowed, attention.window_tokens or 0)

    def _attention_pair(self, word: str, times: int, window: int) -> Iterator[Operator]:
        attention, reach = self.model.attention, self.reach
        shape = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": attention.head_dim}
        if attention.is_mla:
            shape["head_dim"] += attention.rope_head_dim
            shape["kv_heads"] = self.heads
        if window:
            shape["window"] = window
        prompt = (min(reach.tokens, reach.context), max(0, reach.context - 1))
        yield Operator(f"prefill {word}attention", PREFILL, (self.tp,), prompt, times, shape)
        if attention.is_mla:
            shape = {**shape, "kv_heads": 1, "head_dim": attention.kv_lora_rank + attention.rope_head_dim}
        longest = min(window or reach.context, reach.context)
        cached = (reach.seqs, min(reach.kv_tokens, reach.seqs * longest), longest)
        yield Operator(f"decode {word}attention", DECODE, (self.tp,), cached, times, shape)
