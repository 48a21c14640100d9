"""Attention over a prompt's chunk and over cached contexts, by the first of torch's kernels that takes it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lengthwise.measure.operators._kernel import Kernel
from lengthwise.measure.operators._memory import translated
from lengthwise.measure.operators._site import Site
from lengthwise.measure.operators.points import NoRoomError, Operator, Point
from lengthwise.schema.errors import ProfileError

_ORDER = {
    "cuda": ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"),
    "cpu": ("FLASH_ATTENTION", "MATH"),
}


class Attention:
    """Builds kernels of operators of kind PREFILL and DECODE."""

    def __init__(self, site: Site) -> None:
        self._memory, self._model, self._shard_bytes = site.memory, site.model, site.shard_bytes
        self._torch = site.memory.torch
        self._attend = self._torch.nn.functional.scaled_dot_product_attention

    def prefill(self, operator: Operator, chunk: int, context: int) -> Kernel:
        """One prompt's chunk after its cached context; a window sees its last keys alone."""
        shape, window = operator.shape, operator.shape.get("window", 0)
        keys = chunk + (min(context, window) if window else context)
        is_mla, heads, kv_heads = self._model.attention.is_mla, shape["heads"], shape["kv_heads"]
        width = shape["head_dim"]
        value = (self._model.attention.v_head_dim or width) if is_mla else width
        mask = self._mask(chunk, keys, window)

        def ready(backend: str) -> tuple[Callable[[int], object], int]:
            self._require_scores(backend, heads * chunk * keys)
            expand = heads // kv_heads if backend != "FLASH_ATTENTION" else 1
            q = self._memory.real(1, chunk, heads, width).transpose(1, 2)
            count = self._copies(operator, keys * kv_heads * (width + value))
            ks = [self._heads(1, keys, kv_heads, width, expand) for _ in range(count)]
            vs = [self._heads(1, keys, kv_heads, value, expand) for _ in range(count)]
            more: dict[str, Any] = {"is_causal": True} if mask is True else {"attn_mask": mask}
            if kv_heads * expand != heads:
                more["enable_gqa"] = True
            return lambda i: self._attend(q, ks[i], vs[i], **more), count

        return self._first(ready, "expanded heads" if heads != kv_heads else "")

    def decode(self, point: Point) -> Kernel:
        """One new token of each sequence over contexts read in place.

        The heads that share keys are the queries of one head, so that none is copied. With a skew, one
        long context goes beside equal short ones, in a call of its own.
        """
        shape, (seqs, kv_tokens) = point.operator.shape, point.at
        heads, kv_heads, width = shape["heads"], shape["kv_heads"], shape["head_dim"]
        is_mla = self._model.attention.is_mla
        value = self._model.attention.kv_lora_rank if is_mla else width
        groups = _lengths(seqs, kv_tokens, point.skew)

        def ready(backend: str) -> tuple[Callable[[int], object], int]:
            self._require_scores(backend, heads * kv_tokens)
            count = self._copies(point.operator, kv_tokens * kv_heads * width * (1 if is_mla else 2))
            parts = []
            for many, length in groups:
                q = self._memory.real(many, kv_heads, heads // kv_heads, width)
                ks = [self._heads(many, length, kv_heads, width, 1) for _ in range(count)]
                if is_mla:
                    vs = [k[..., :value] for k in ks]  # the latent is key and value
                else:
                    vs = [self._heads(many, length, kv_heads, width, 1) for _ in range(count)]
                parts.append((q, ks, vs))
            return lambda i: [self._attend(q, ks[i], vs[i]) for q, ks, vs in parts], count

        return self._first(ready, "")

    def _heads(self, batch: int, length: int, heads: int, width: int, expand: int) -> Any:
        """[batch, heads, length, width] as a cache keeps it: token after token."""
        one = self._memory.real(batch, length, heads, width).transpose(1, 2)
        return one.repeat_interleave(expand, dim=1) if expand > 1 else one

    def _copies(self, operator: Operator, elements: int) -> int:
        each = elements * self._memory.dtype.itemsize
        whole = self._shard_bytes(operator.tps[0]) + operator.times * each
        return min(16, self._memory.copies(each, whole))

    def _mask(self, chunk: int, keys: int, window: int) -> Any:
        """True: causal from the first key on; None: all see all; else what sees what."""
        torch, device = self._torch, self._memory.device
        if window and keys > window:
            self._memory.require(2.0 * chunk * keys)
            seen = torch.ones(chunk, keys, dtype=torch.bool, device=device)
            return seen.tril(keys - chunk).triu(keys - chunk - window + 1)
        if chunk == 1:
            return None
        if chunk == keys:
            return True
        if device == "cuda":
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(chunk, keys)
        self._memory.require(2.0 * chunk * keys)
        return torch.ones(chunk, keys, dtype=torch.bool).tril(keys - chunk)

    def _require_scores(self, backend: str, scores: int) -> None:
        if backend == "MATH":
            self._memory.require(3.0 * 4 * scores)

    def _first(self, ready: Callable[[str], tuple[Callable[[int], object], int]], word: str) -> Kernel:
        """The kernel by the first backend that takes these shapes."""
        for backend in _ORDER[self._memory.device]:
            scope = self._scope(backend)
            try:
                with scope():
                    run, count = translated(self._torch, partial(ready, backend))
                    translated(self._torch, partial(run, 0))
                    if self._memory.device == "cuda":
                        self._torch.cuda.synchronize()
            except NoRoomError:
                raise
            except (RuntimeError, TypeError, ValueError):
                continue
            told = f"torch sdpa {backend.lower()}"
            return Kernel(
                run, count, f"{told}, {word}" if word and backend != "FLASH_ATTENTION" else told, scope
            )
        raise ProfileError(
            f"no attention kernel of torch takes {self._memory.dtype} on {self._memory.device}"
        )

    def _scope(self, backend: str) -> Callable[[], Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        @contextmanager
        def scope() -> Iterator[None]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why other kernels do not take these shapes
                with sdpa_kernel([getattr(SDPBackend, backend)]):
                    yield

        return scope


def _lengths(seqs: int, kv_tokens: int, skew: int) -> list[tuple[int, int]]:
    """(sequences, context) of groups with ``kv_tokens`` in all, the longest ``skew`` times the mean."""
    mean = max(1, kv_tokens // seqs)
    longest = skew * mean
    if skew <= 1 or seqs < 2 or seqs * mean - longest < seqs - 1:
        return [(seqs, mean)]
    return [(1, longest), (seqs - 1, (seqs * mean - longest) // (seqs - 1))]
