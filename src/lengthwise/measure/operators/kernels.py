"""Kernels: calls of an operator with its tensors, ready to be timed."""

from __future__ import annotations

import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from lengthwise.measure.operators.points import LostError, NoRoomError, Operator, Point
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.profile import PRODUCTS
from lengthwise.schema.specs import ModelSpec


@dataclass(frozen=True)
class Kernel:
    """A call of one operator at one point. ``run`` takes the number of the copy of its tensors to use."""

    run: Callable[[int], object]
    copies: int = 1  # number of copies of the tensors, so that caches do not hold them
    backend: str = "torch"
    scope: Callable[[], AbstractContextManager[object]] = nullcontext  # context in which it runs
    on_host: bool = False  # whether the host's clock times it, including the wait for the device


T = TypeVar("T")
_BLOCK = 1 << 18
_SHARE = 0.6  # of free memory that a tensor may take: torch needs some for results
_WEIGHTS_SHARE = 0.25
_CPU_CACHE_BYTES = 32 << 20
_NO_ROOM = ("out of memory", "t allocate", "alloc_failed")
MAX_COPIES = 64


class Memory:
    """Makes tensors of one dtype on one device ("cpu" or "cuda"). ``seed`` determines their content."""

    def __init__(self, torch: Any, device: str, dtype: Any, seed: int) -> None:
        self.torch, self.device, self.dtype = torch, device, dtype
        self.cache_bytes = _last_cache_bytes(torch, device)
        self.generator = torch.Generator(device="cpu").manual_seed(seed)
        block = torch.rand(_BLOCK, generator=self.generator) - 0.5
        self._block = (block / 8).to(device=device, dtype=dtype)
        self._weights: OrderedDict[str, list[Any]] = OrderedDict()
        self._max_weights_bytes = _WEIGHTS_SHARE * self.free_bytes()

    def real(self, *shape: int) -> Any:
        """Return a tensor of small random numbers."""
        self.require(math.prod(shape) * self.dtype.itemsize)
        tensor = self.torch.empty(shape, device=self.device, dtype=self.dtype)
        flat = tensor.view(-1)
        blocks = len(flat) // _BLOCK * _BLOCK
        flat[:blocks].view(-1, _BLOCK).copy_(self._block)
        flat[blocks:].copy_(self._block[: len(flat) - blocks])
        return tensor

    def integers(self, below: int, *shape: int) -> Any:
        """Return a tensor of random integers from 0 to ``below`` - 1."""
        return self.torch.randint(below, shape, generator=self.generator).to(self.device)

    def cold_weights(self, key: str, model_bytes: float, *shape: int) -> list[Any]:
        """Return copies of a weight, which a kernel uses in turn.

        Their number is large enough that caches contain a copy no more often than in a model. Equal keys share copies.
        """
        if key in self._weights:
            self._weights.move_to_end(key)
            return self._weights[key]
        copies = self.copies(math.prod(shape) * self.dtype.itemsize, model_bytes)
        self._weights[key] = [self.real(*shape) for _ in range(copies)]
        sizes = [sum(one.nbytes for one in each) for each in self._weights.values()]
        while len(self._weights) > 1 and self._max_weights_bytes < sum(sizes[-len(self._weights) :]):
            self._weights.popitem(last=False)
        return self._weights[key]

    def copies(self, each_bytes: float, model_bytes: float) -> int:
        """Return the number of copies with which a kernel misses the caches as often as a model's layers do."""
        target = min(2.0 * self.cache_bytes, max(model_bytes, each_bytes))
        return max(1, min(MAX_COPIES, math.ceil(target / max(each_bytes, 1.0))))

    def require(self, needed_bytes: float) -> None:
        """Raise NoRoomError if a CPU lacks free memory, because allocating too much kills the process."""
        if self.device == "cpu" and needed_bytes > _SHARE * (free := self.free_bytes()):
            raise NoRoomError(f"{needed_bytes / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")

    def drop_weights(self) -> None:
        """Drop all cached weights."""
        self._weights.clear()

    def free_bytes(self) -> float:
        """Return the free memory of the device."""
        if self.device == "cuda":
            return float(self.torch.cuda.mem_get_info()[0])
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        except (OSError, StopIteration):
            pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
            return float(pages * os.sysconf("SC_PAGE_SIZE")) / 2 if pages else 4e9


def _last_cache_bytes(torch: Any, device: str) -> int:
    if device == "cuda":
        return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)) or 50 << 20
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii").strip()
        return int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return _CPU_CACHE_BYTES


def call_torch(torch: Any, call: Callable[[], T]) -> T:
    """Return the result of ``call``. Raises NoRoomError if memory is short, or LostError if the GPU fails for good."""
    try:
        return call()
    except MemoryError as error:
        raise NoRoomError("out of memory") from error
    except RuntimeError as error:
        text = str(error)
        if is_lost(torch):
            raise LostError((text.splitlines() or ["it does not answer"])[0][:200]) from error
        if isinstance(error, torch.cuda.OutOfMemoryError) or any(w in text.lower() for w in _NO_ROOM):
            raise NoRoomError("out of memory") from error
        raise


def is_lost(torch: Any) -> bool:
    """Return whether every later GPU call of this process fails, as after a fault in a kernel."""
    if not torch.cuda.is_initialized():
        return False
    for _ in range(2):  # the first call may report an earlier, passing error
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            continue
        return False
    return True


_EPS = 1e-5
_SLOTS_PER_ROW = 4  # slots of the KV cache for a row that writes one
_SDPA_ORDER = {
    "cuda": ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"),
    "cpu": ("FLASH_ATTENTION", "MATH"),
}


class Kernels:
    """Builds the kernels of a model's operators. ``shard_bytes`` returns a GPU's bytes of weights by TP degree."""

    def __init__(self, memory: Memory, model: ModelSpec, shard_bytes: Callable[[int], float]) -> None:
        self._memory, self._model, self._shard_bytes = memory, model, shard_bytes
        self._torch = memory.torch
        self._f = memory.torch.nn.functional

    def rows(self, operator: Operator, rows: int) -> Kernel:  # noqa: C901, PLR0911 - one case an operator
        """Return the kernel of an operator of kind ROWS for this number of rows."""
        name, shape, real = operator.name, operator.shape, self._memory.real
        attention, ffn, f = self._model.attention, self._model.ffn, self._f
        if name == "host":
            return _host(self._memory, rows)
        if name in {"experts up", "experts down"}:
            return self._experts(operator, rows)
        if name in PRODUCTS:
            weights = self._weights(operator, shape["n"], shape["k"])
            biased = (name == "qkv projection" and attention.bias) or (name in {"mlp up", "mlp down"} and ffn.bias)
            x, bias = real(rows, shape["k"]), real(shape["n"]) if biased else None
            return Kernel(lambda i: f.linear(x, weights[i], bias), len(weights))
        match name:
            case "input norm" | "post-attention norm" | "final norm":
                return self._norm(rows, shape["n"])
            case "rope":
                heads, width = shape["heads"] + shape["kv_heads"], shape["head_dim"]
                x, cos, sin = real(rows, heads, width), real(rows, 1, width), real(rows, 1, width)
                half, cat = width // 2, self._torch.cat
                return Kernel(lambda _: x * cos + cat((-x[..., half:], x[..., :half]), dim=-1) * sin)
            case "kv write":
                return self._kv_write(rows, shape["kv_heads"] * shape["head_dim"])
            case "activation" | "shared activation":
                return self._activation(rows, shape["n"])
            case "expert activation":
                return self._activation(rows * shape["topk"], shape["n"])
            case "embedding":
                tables = self._weights(operator, shape["k"], shape["n"])
                ids = self._memory.integers(shape["k"], rows)
                return Kernel(lambda i: f.embedding(ids, tables[i]), len(tables))
            case "sampler":
                return self._sampler(rows, shape["n"])
            case "router":
                weights, x = self._weights(operator, shape["experts"], shape["k"]), real(rows, shape["k"])
                topk = shape["topk"]
                return Kernel(
                    lambda i: f.linear(x, weights[i]).float().softmax(dim=-1).topk(topk, dim=-1), len(weights)
                )
        raise KeyError(name)

    def _weights(self, operator: Operator, *shape: int) -> list[Any]:
        return self._memory.cold_weights(operator.key, self._shard_bytes(operator.tps[0]), *shape)

    def _norm(self, rows: int, hidden: int) -> Kernel:
        real = self._memory.real
        x, residual, weight = real(rows, hidden), real(rows, hidden), real(hidden)
        if not self._model.metadata.norm_bias:
            return Kernel(lambda _: self._f.rms_norm(x + residual, (hidden,), weight, _EPS))
        bias = real(hidden)
        return Kernel(lambda _: self._f.layer_norm(x + residual, (hidden,), weight, bias, _EPS))

    def _kv_write(self, rows: int, width: int) -> Kernel:
        tensors = 1 if self._model.attention.is_mla else 2
        slots = self._torch.randperm(_SLOTS_PER_ROW * rows, generator=self._memory.generator)[:rows]
        slots = slots.to(self._memory.device)
        caches = [self._memory.real(_SLOTS_PER_ROW * rows, width) for _ in range(tensors)]
        new = [self._memory.real(rows, width) for _ in range(tensors)]

        def run(_: int) -> None:
            for cache, values in zip(caches, new, strict=True):
                cache.index_copy_(0, slots, values)

        return Kernel(run)

    def _activation(self, rows: int, width: int) -> Kernel:
        if not self._model.ffn.gated:
            x = self._memory.real(rows, width)
            return Kernel(lambda _: self._f.gelu(x))
        x = self._memory.real(rows, 2 * width)
        return Kernel(lambda _: self._f.silu(x[:, :width]) * x[:, width:])

    def _sampler(self, rows: int, vocab: int) -> Kernel:
        logits = self._memory.real(rows, vocab)
        self._memory.require(4.0 * 4 * rows * vocab)

        def run(_: int) -> object:
            probabilities = (logits.float() / 0.8).softmax(dim=-1)
            noise = self._torch.empty_like(probabilities).exponential_()
            return (probabilities / noise).argmax(dim=-1)

        return Kernel(run)

    def _experts(self, operator: Operator, tokens: int) -> Kernel:
        torch, memory, shape = self._torch, self._memory, operator.shape
        is_up = operator.name == "experts up"
        gate = 2 if self._model.ffn.gated else 1
        n, k = (gate * shape["n"], shape["k"]) if is_up else (shape["k"], shape["n"])
        weights = self._weights(operator, shape["experts"], n, k)
        chosen = torch.rand(tokens, shape["experts"], generator=memory.generator)
        chosen = chosen.topk(shape["topk"], dim=1).indices.reshape(-1)
        rows = (torch.argsort(chosen, stable=True) // shape["topk"]).to(memory.device)  # tokens, sorted by expert
        ends = [int(end) for end in torch.bincount(chosen, minlength=shape["experts"]).cumsum(0).tolist()]
        multiply, backend = _grouped_product(memory, weights, ends, n)
        if is_up:
            x = memory.real(tokens, k)
            return Kernel(lambda i: multiply(x.index_select(0, rows), weights[i]), len(weights), backend)
        x = memory.real(len(rows), k)
        return Kernel(
            lambda i: x.new_zeros(tokens, n).index_add_(0, rows, multiply(x, weights[i])), len(weights), backend
        )

    def prefill(self, operator: Operator, chunk: int, context: int) -> Kernel:
        """Return the attention kernel of a chunk of new tokens after cached ones. A window uses only the last keys."""
        shape, window = operator.shape, operator.shape.get("window", 0)
        keys = chunk + (min(context, window) if window else context)
        is_mla, heads, kv_heads = self._model.attention.is_mla, shape["heads"], shape["kv_heads"]
        width = shape["head_dim"]
        value = (self._model.attention.v_head_dim or width) if is_mla else width
        mask = self._mask(chunk, keys, window)

        def ready(backend: str) -> tuple[Callable[[int], object], int]:
            if backend == "MATH":
                self._memory.require(3.0 * 4 * heads * chunk * keys)
            expand = heads // kv_heads if backend != "FLASH_ATTENTION" else 1
            q = self._memory.real(1, chunk, heads, width).transpose(1, 2)
            count = self._kv_copies(operator, keys * kv_heads * (width + value))
            ks = [self._kv(1, keys, kv_heads, width, expand) for _ in range(count)]
            vs = [self._kv(1, keys, kv_heads, value, expand) for _ in range(count)]
            more: dict[str, Any] = {"is_causal": True} if mask is True else {"attn_mask": mask}
            if kv_heads * expand != heads:
                more["enable_gqa"] = True
            return lambda i: self._f.scaled_dot_product_attention(q, ks[i], vs[i], **more), count

        return self._first_backend(ready, "expanded heads" if heads != kv_heads else "")

    def decode(self, point: Point) -> Kernel:
        """Return the attention kernel of a decode step: each sequence has one new token, and its context is cached."""
        shape, (seqs, kv_tokens) = point.operator.shape, point.at
        heads, kv_heads, width = shape["heads"], shape["kv_heads"], shape["head_dim"]
        is_mla = self._model.attention.is_mla
        value = self._model.attention.kv_lora_rank if is_mla else width
        # Heads that share keys are queries of one head, so that no keys are copied. With a skew, one context is so many
        # times the mean, in a call of its own; the others are equal.
        mean = max(1, kv_tokens // seqs)
        rest = seqs * mean - point.skew * mean
        groups = [(seqs, mean)]
        if point.skew > 1 and seqs > 1 and rest >= seqs - 1:
            groups = [(1, point.skew * mean), (seqs - 1, rest // (seqs - 1))]

        def ready(backend: str) -> tuple[Callable[[int], object], int]:
            if backend == "MATH":
                self._memory.require(3.0 * 4 * heads * kv_tokens)
            count = self._kv_copies(point.operator, kv_tokens * kv_heads * width * (1 if is_mla else 2))
            parts = []
            for many, length in groups:
                q = self._memory.real(many, kv_heads, heads // kv_heads, width)
                ks = [self._kv(many, length, kv_heads, width, 1) for _ in range(count)]
                vs = ks if is_mla else [self._kv(many, length, kv_heads, width, 1) for _ in range(count)]
                parts.append((q, ks, [v[..., :value] for v in vs]))  # a latent is key and value
            attend = self._f.scaled_dot_product_attention
            return lambda i: [attend(q, ks[i], vs[i]) for q, ks, vs in parts], count

        return self._first_backend(ready, "")

    def _kv(self, batch: int, length: int, heads: int, width: int, expand: int) -> Any:
        one = self._memory.real(batch, length, heads, width).transpose(1, 2)
        return one.repeat_interleave(expand, dim=1) if expand > 1 else one

    def _kv_copies(self, operator: Operator, elements: int) -> int:
        each_bytes = elements * self._memory.dtype.itemsize
        model_bytes = self._shard_bytes(operator.tps[0]) + operator.times * each_bytes
        return min(16, self._memory.copies(each_bytes, model_bytes))

    def _mask(self, chunk: int, keys: int, window: int) -> Any:
        """Return a mask, or True for plain causal attention, or None if the chunk may attend to all keys."""
        torch, device = self._torch, self._memory.device
        if not (window and keys > window):
            if chunk == 1:
                return None
            if chunk == keys:
                return True
            if device == "cuda":
                from torch.nn.attention.bias import causal_lower_right

                return causal_lower_right(chunk, keys)
        self._memory.require(2.0 * chunk * keys)
        mask = torch.ones(chunk, keys, dtype=torch.bool, device=device).tril(keys - chunk)
        return mask.triu(keys - chunk - window + 1) if window and keys > window else mask

    def _first_backend(self, ready: Callable[[str], tuple[Callable[[int], object], int]], note: str) -> Kernel:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        @contextmanager
        def scope(backend: str) -> Iterator[None]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # reasons why other backends do not support these shapes
                with sdpa_kernel([getattr(SDPBackend, backend)]):
                    yield

        for backend in _SDPA_ORDER[self._memory.device]:
            try:
                with scope(backend):
                    run, count = call_torch(self._torch, partial(ready, backend))
                    call_torch(self._torch, partial(run, 0))
                    if self._memory.device == "cuda":
                        self._torch.cuda.synchronize()
            except NoRoomError:
                raise
            except (RuntimeError, TypeError, ValueError):
                continue
            suffix = f", {note}" if note and backend != "FLASH_ATTENTION" else ""
            return Kernel(run, count, f"torch sdpa {backend.lower()}{suffix}", partial(scope, backend))
        raise ProfileError(f"no attention kernel of torch takes {self._memory.dtype} on {self._memory.device}")


def _grouped_product(memory: Memory, weights: list[Any], ends: list[int], width: int) -> tuple[Any, str]:
    torch = memory.torch
    bounds = [(e, a, b) for e, (a, b) in enumerate(pairwise([0, *ends])) if b > a]

    def one_by_one(x: Any, weight: Any) -> Any:
        out = x.new_empty(len(x), width)
        for expert, first, last in bounds:
            torch.mm(x[first:last], weight[expert].t(), out=out[first:last])
        return out

    if memory.device != "cuda" or not hasattr(torch, "_grouped_mm"):
        return one_by_one, "torch, a GEMM an expert"
    offsets = torch.tensor(ends, device=memory.device, dtype=torch.int32)

    def grouped(x: Any, weight: Any) -> Any:
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets)  # noqa: SLF001 - tried before use

    try:
        call_torch(torch, lambda: grouped(memory.real(ends[-1], weights[0].shape[2]), weights[0]))
        torch.cuda.synchronize()
    except (NoRoomError, LostError):
        raise
    except Exception:  # noqa: BLE001 - not supported on this device, for this dtype or shape
        return one_by_one, "torch, a GEMM an expert"
    return grouped, "torch grouped_mm"


_BLOCK_TOKENS, _CONTEXT, _STOP = 16, 1024, -1

HOST_NOTE = (
    "host: conversion of lists to tensors, copies to and from the device, an append and a stop check per sequence, but "
    "no scheduler, detokenizer or HTTP: a lower bound of a real engine's time, which a calibration finds"
)


def _host(memory: Memory, seqs: int) -> Kernel:
    torch, device = memory.torch, memory.device
    outputs: list[list[int]] = [[0] for _ in range(seqs)]
    blocks = [list(range(i, i + _CONTEXT // _BLOCK_TOKENS)) for i in range(seqs)]
    sampled = memory.integers(1000, seqs)

    def run(_: int) -> object:
        lengths = [_CONTEXT + len(one) % _BLOCK_TOKENS for one in outputs]
        table = torch.tensor(blocks, dtype=torch.int32)
        slots = [row[-1] * _BLOCK_TOKENS + n % _BLOCK_TOKENS for row, n in zip(blocks, lengths, strict=True)]
        columns = torch.tensor([[one[-1] for one in outputs], lengths, slots], dtype=torch.int64)
        on_device = (columns.to(device), table.to(device))
        alive = 0
        for one, token in zip(outputs, sampled.tolist(), strict=True):
            one.append(token)
            alive += token != _STOP
            if len(one) > _CONTEXT:
                one[:] = one[-1:]
        return on_device, alive

    return Kernel(run, on_host=True)
