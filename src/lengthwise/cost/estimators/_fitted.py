"""The roofline's operators with measured seconds where a profile has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lengthwise.cost._efficiency import Kernels, Work, kernels_of
from lengthwise.cost._operators import Operators
from lengthwise.cost._shard import Shard, shard_of
from lengthwise.cost.estimators._judge import Judged
from lengthwise.cost.estimators._kernel_points import kernel_points
from lengthwise.cost.estimators._target import Target
from lengthwise.schema.hardware import NodeSpec


@dataclass(frozen=True)
class FittedKernels(Kernels):
    """A GPU whose products of matrices were measured, in the layers' dtype or in 16 bits (``wide``)."""

    products: Mapping[bool, Judged] = field(default_factory=dict)

    def gemm(self, name: str, m: Any, n: float, k: float, *, wide: bool = False) -> Work:
        """An [m, k] by [k, n] product as it was measured."""
        work = super().gemm(name, m, n, k, wide=wide)
        judged = self.products.get(wide)
        if judged is None:
            return work
        tokens = np.atleast_1d(np.asarray(m, dtype=np.float64))
        kernels = kernels_of(self.gpu, "bfloat16") if wide else self
        found = kernel_points(
            "gemm", {"tokens": tokens, "n": float(n), "k": float(k)}, _plain(kernels), _NO_NODE
        )
        return measured(work, judged.fitted(found) if found is not None else work.seconds, m)


def measured(work: Work, seconds: Any, like: Any) -> Work:
    """The work with these seconds, all told as latency."""
    seconds = np.asarray(seconds).reshape(np.shape(like))
    return replace(work, compute_s=0.0, memory_s=0.0, network_s=0.0, latency_s=seconds)


def _plain(kernels: Kernels) -> Kernels:
    return Kernels(kernels.gpu, kernels.weight_dtype, kernels.wide_bytes, kernels.curves)


class FittedOperators(Operators):
    """A deployment's operators with measured attention, experts and collectives of no model.

    Args:
        target: The deployment.
        kernels: By operator, what was learnt of kernels of no model; "gemm" and "gemm wide" are products.
    """

    def __init__(self, target: Target, kernels: Mapping[str, Judged]) -> None:
        self.fitted, self.target = kernels, target
        shard: Shard = shard_of(target.model, target.parallel, target.limits)
        plain = kernels_of(target.gpu, shard.weight_dtype)
        products = {wide: kernels[n] for wide, n in ((False, "gemm"), (True, "gemm wide")) if n in kernels}
        fitted = FittedKernels(plain.gpu, plain.weight_dtype, plain.wide_bytes, plain.curves, products)
        super().__init__(shard, fitted if products else plain, target.node)

    def _measured(self, work: Work, operator: str, columns: Mapping[str, Any], like: Any) -> Work:
        judged = self.fitted.get(operator)
        if judged is None:
            return work
        found = kernel_points(operator, columns, _plain(self.kernels), self.node)
        return work if found is None else measured(work, judged.fitted(found), like)

    def _prefill(self, name: str, chunk: Any, context: Any, window: int | None) -> Work:
        work = super()._prefill(name, chunk, context, window)
        if self._is_mla or self.model.encoder_layers:
            return work
        chunks, contexts = np.broadcast_arrays(np.asarray(chunk, float), np.asarray(context, float))
        columns = {"seqs": 1.0, "chunk": chunks.ravel(), "context": contexts.ravel(), **self._heads(window)}
        return self._measured(work, self._known(name), columns, chunks)

    def _decode(self, name: str, seqs: Any, keys: Any) -> Work:
        work = super()._decode(name, seqs, keys)
        if self._is_mla:
            return work
        batch, cached = np.broadcast_arrays(np.asarray(seqs, float), np.asarray(keys, float))
        columns = {"seqs": batch.ravel(), "kv_tokens": cached.ravel(), **self._heads(None)}
        return self._measured(work, self._known(name), columns, batch)

    def _moe(self, tokens: Any) -> list[Work]:
        works = super()._moe(tokens)
        ffn = self.model.ffn
        if "fused moe" not in self.fitted:
            return works
        columns = {
            "tokens": np.atleast_1d(np.asarray(tokens, dtype=np.float64)),
            "experts": float(ffn.experts),
            "topk": float(ffn.experts_per_token),
            "n": ffn.expert_intermediate / self.tp,
            "k": float(self.model.hidden),
        }
        work = self._measured(Work("fused moe"), "fused moe", columns, tokens)
        return [
            work,
            *(w for w in works if w.name not in ("experts up", "expert activation", "experts down")),
        ]

    def _all_reduce(self, name: str, elements: Any) -> Work:
        work = super()._all_reduce(name, elements)
        sizes = np.asarray(elements, dtype=np.float64) * self.wide
        columns = {"bytes": np.atleast_1d(sizes).ravel(), "gpus": float(self.tp)}
        return self._measured(work, "all-reduce", columns, sizes)

    def _known(self, name: str) -> str:
        """A window's own measurements, or those of full attention."""
        return name if name in self.fitted else name.replace("window ", "")

    def _heads(self, window: int | None) -> dict[str, float]:
        attention, shard = self.model.attention, self.shard
        heads = {"heads": float(shard.heads), "kv_heads": float(shard.kv_heads)}
        return {**heads, "head_dim": float(attention.head_dim), "window": float(window or 0)}


_NO_NODE: NodeSpec = None  # type: ignore[assignment]  # products of matrices ask no link
