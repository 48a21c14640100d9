"""Operators whose seconds depend on rows alone: GEMMs, norms, activations, rotary embedding, cache, sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lengthwise.measure.operators._kernel import Kernel
from lengthwise.measure.operators._site import Site
from lengthwise.measure.operators.points import Operator
from lengthwise.schema.profile import PRODUCTS

_EPS = 1e-5
_SLOTS_A_ROW = 4  # slots of the cache for a row that writes one
NORMS = frozenset({"input norm", "post-attention norm", "final norm"})


class Rows:
    """Builds kernels of operators of kind ROWS."""

    def __init__(self, site: Site) -> None:
        self._memory, self._model, self._shard_bytes = site.memory, site.model, site.shard_bytes
        self._torch = site.memory.torch
        self._f = self._torch.nn.functional

    def build(self, operator: Operator, rows: int) -> Kernel:
        """The kernel of an operator over so many rows."""
        name, shape = operator.name, dict(operator.shape)
        if name in PRODUCTS:
            return self._gemm(operator, rows)
        if name in NORMS:
            return self._norm(rows, shape["n"])
        builders: dict[str, Callable[[], Kernel]] = {
            "rope": lambda: self._rope(rows, shape["heads"] + shape["kv_heads"], shape["head_dim"]),
            "kv write": lambda: self._kv_write(rows, shape["kv_heads"] * shape["head_dim"]),
            "activation": lambda: self._activation(rows, shape["n"]),
            "shared activation": lambda: self._activation(rows, shape["n"]),
            "expert activation": lambda: self._activation(rows * shape["topk"], shape["n"]),
            "embedding": lambda: self._embedding(operator, rows),
            "sampler": lambda: self._sampler(rows, shape["n"]),
            "router": lambda: self._router(operator, rows),
        }
        return builders[name]()

    def weights(self, operator: Operator, *shape: int) -> list[Any]:
        """Copies of an operator's weights."""
        return self._memory.cold(operator.key, self._shard_bytes(operator.tps[0]), *shape)

    def _gemm(self, operator: Operator, rows: int) -> Kernel:
        weights = self.weights(operator, operator.shape["n"], operator.shape["k"])
        x, linear = self._memory.real(rows, operator.shape["k"]), self._f.linear
        bias = self._memory.real(operator.shape["n"]) if self._has_bias(operator.name) else None
        return Kernel(lambda i: linear(x, weights[i], bias), len(weights))

    def _has_bias(self, name: str) -> bool:
        attention, ffn = self._model.attention, self._model.ffn
        return (name == "qkv projection" and attention.bias) or (name in {"mlp up", "mlp down"} and ffn.bias)

    def _norm(self, rows: int, hidden: int) -> Kernel:
        """With the residual added first, as engines fuse them."""
        x, residual, weight = (
            self._memory.real(rows, hidden),
            self._memory.real(rows, hidden),
            self._memory.real(hidden),
        )
        bias = self._memory.real(hidden) if self._model.facts.norm_bias else None
        if bias is not None:
            return Kernel(lambda _: self._f.layer_norm(x + residual, (hidden,), weight, bias, _EPS))
        return Kernel(lambda _: self._f.rms_norm(x + residual, (hidden,), weight, _EPS))

    def _rope(self, rows: int, heads: int, width: int) -> Kernel:
        x = self._memory.real(rows, heads, width)
        cos, sin, half = self._memory.real(rows, 1, width), self._memory.real(rows, 1, width), width // 2
        cat = self._torch.cat

        def run(_: int) -> object:
            return x * cos + cat((-x[..., half:], x[..., :half]), dim=-1) * sin

        return Kernel(run)

    def _kv_write(self, rows: int, width: int) -> Kernel:
        """Keys and values (of MLA: one latent) scattered to slots all over the cache."""
        tensors = 1 if self._model.attention.is_mla else 2
        slots = self._torch.randperm(_SLOTS_A_ROW * rows, generator=self._memory.generator)[:rows]
        slots = slots.to(self._memory.device)
        caches = [self._memory.real(_SLOTS_A_ROW * rows, width) for _ in range(tensors)]
        news = [self._memory.real(rows, width) for _ in range(tensors)]

        def run(_: int) -> None:
            for cache, new in zip(caches, news, strict=True):
                cache.index_copy_(0, slots, new)

        return Kernel(run)

    def _activation(self, rows: int, width: int) -> Kernel:
        if not self._model.ffn.gated:
            x = self._memory.real(rows, width)
            return Kernel(lambda _: self._f.gelu(x))
        x = self._memory.real(rows, 2 * width)
        return Kernel(lambda _: self._f.silu(x[:, :width]) * x[:, width:])

    def _embedding(self, operator: Operator, rows: int) -> Kernel:
        vocab, hidden = operator.shape["k"], operator.shape["n"]
        tables = self.weights(operator, vocab, hidden)
        ids = self._memory.whole(vocab, rows)
        return Kernel(lambda i: self._f.embedding(ids, tables[i]), len(tables))

    def _sampler(self, rows: int, vocab: int) -> Kernel:
        """Temperature, softmax and one draw a row by exponential noise, in float32."""
        logits = self._memory.real(rows, vocab)
        self._memory.require(4.0 * 4 * rows * vocab)

        def run(_: int) -> object:
            chances = (logits.float() / 0.8).softmax(dim=-1)
            noise = self._torch.empty_like(chances).exponential_()
            return (chances / noise).argmax(dim=-1)

        return Kernel(run)

    def _router(self, operator: Operator, rows: int) -> Kernel:
        shape, linear = operator.shape, self._f.linear
        weights = self.weights(operator, shape["experts"], shape["k"])
        x = self._memory.real(rows, shape["k"])

        def run(i: int) -> object:
            return linear(x, weights[i]).float().softmax(dim=-1).topk(shape["topk"], dim=-1)

        return Kernel(run, len(weights))
