"""One call of an operator, ready to run, whatever times it."""

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
    """Runs one operator at one place.

    Attributes:
        run: Takes which of the copies of cold tensors to use.
        copies: How many there are.
        backend: Whose kernel it is, for the profile.
        scope: What must hold while it runs.
        on_host: Whether the host's time counts, and ends in waiting for the device.
    """

    run: Callable[[int], object]
    copies: int = 1
    backend: str = "torch"
    scope: Callable[[], AbstractContextManager[object]] = nullcontext
    on_host: bool = False


T = TypeVar("T")
_BLOCK = 1 << 18
_SHARE = 0.6  # of free memory: torch needs some for results
_WEIGHTS_SHARE = 0.25
_CPU_CACHE_BYTES = 32 << 20
_NO_ROOM = ("out of memory", "t allocate", "alloc_failed")
MOST_COPIES = 64


class Memory:
    """Makes tensors of one dtype on one device.

    Args:
        torch: The module.
        device: "cpu" or "cuda".
        dtype: Of weights and activations.
        seed: Of what tensors hold.
    """

    def __init__(self, torch: Any, device: str, dtype: Any, seed: int) -> None:
        self.torch, self.device, self.dtype = torch, device, dtype
        self.cache_bytes = _last_cache_bytes(torch, device)
        self.generator = torch.Generator(device="cpu").manual_seed(seed)
        block = torch.rand(_BLOCK, generator=self.generator) - 0.5
        self._block = (block / 8).to(device=device, dtype=dtype)
        self._weights: OrderedDict[str, list[Any]] = OrderedDict()
        self._may_keep_bytes = _WEIGHTS_SHARE * self.free_bytes()

    def real(self, *shape: int) -> Any:
        """Random numbers of modest size."""
        self.require(math.prod(shape) * self.dtype.itemsize)
        tensor = self.torch.empty(shape, device=self.device, dtype=self.dtype)
        flat = tensor.view(-1)
        whole = len(flat) // _BLOCK * _BLOCK
        flat[:whole].view(-1, _BLOCK).copy_(self._block)
        flat[whole:].copy_(self._block[: len(flat) - whole])
        return tensor

    def complete(self, below: int, *shape: int) -> Any:
        """Random whole numbers from 0 up to, without, ``below``."""
        return self.torch.randint(below, shape, generator=self.generator).to(self.device)

    def cold(self, key: str, of_model_bytes: float, *shape: int) -> list[Any]:
        """Copies of weights, so many that the caches hold them no better than they hold a model's.

        Args:
            key: Whose weights; made once, and kept as long as there is room.
            of_model_bytes: What passes through the caches between two uses in a model.
            shape: Of one copy.
        """
        if key in self._weights:
            self._weights.move_to_end(key)
            return self._weights[key]
        copies = self.copies(math.prod(shape) * self.dtype.itemsize, of_model_bytes)
        made = [self.real(*shape) for _ in range(copies)]
        self._weights[key] = made
        while len(self._weights) > 1 and self._kept_bytes() > self._may_keep_bytes:
            self._weights.popitem(last=False)
        return made

    def copies(self, each_bytes: float, of_model_bytes: float) -> int:
        """How many copies do what a model's other layers do to the caches."""
        wanted = min(2.0 * self.cache_bytes, max(of_model_bytes, each_bytes))
        return max(1, min(MOST_COPIES, math.ceil(wanted / max(each_bytes, 1.0))))

    def require(self, needed_bytes: float) -> None:
        """Nothing, if there is room on a CPU, where asking for too much kills the process.

        Raises:
            NoRoomError: There is not.
        """
        if self.device == "cpu" and needed_bytes > _SHARE * (free := self.free_bytes()):
            raise NoRoomError(f"{needed_bytes / 1e9:.1f} GB are wanted, {free / 1e9:.1f} GB are free")

    def drop_weights(self) -> None:
        """Forgets all weights that are kept."""
        self._weights.clear()

    def free_bytes(self) -> float:
        """Memory of the device that nobody uses."""
        if self.device == "cuda":
            return float(self.torch.cuda.mem_get_info()[0])
        return _free_host_bytes()

    def _kept_bytes(self) -> int:
        return sum(one.nbytes for copies in self._weights.values() for one in copies)


def translated(torch: Any, call: Callable[[], T]) -> T:
    """What the call returns; torch's ways of having no memory become one.

    Raises:
        NoRoomError: The device or the host has no memory.
        LostError: An error of a GPU that stays until the process ends.
    """
    try:
        return call()
    except MemoryError as error:
        raise NoRoomError("out of memory") from error
    except RuntimeError as error:
        told = str(error)
        if is_lost(torch):
            raise LostError((told.splitlines() or ["it does not answer"])[0][:200]) from error
        if isinstance(error, torch.cuda.OutOfMemoryError) or any(w in told.lower() for w in _NO_ROOM):
            raise NoRoomError("out of memory") from error
        raise


def is_lost(torch: Any) -> bool:
    """Whether a GPU in use answers no more: what a kernel broke stays broken until the process ends.

    Asked twice, since the first answer may be of an error that passes.
    """
    if not torch.cuda.is_initialized():
        return False
    for _ in range(2):
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            continue
        return False
    return True


def _free_host_bytes() -> float:
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


@dataclass(frozen=True)
class Site:
    """What all builders of kernels share.

    Attributes:
        memory: Where tensors come from.
        model: Whose operators.
        shard_bytes: By TP degree, the weights of a whole shard, which pass through the caches.
    """

    memory: Memory
    model: ModelSpec
    shard_bytes: Callable[[int], float]


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
        bias = self._memory.real(hidden) if self._model.metadata.norm_bias else None
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
        ids = self._memory.complete(vocab, rows)
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
            return Kernel(run, count, f"{told}, {word}" if word and backend != "FLASH_ATTENTION" else told, scope)
        raise ProfileError(f"no attention kernel of torch takes {self._memory.dtype} on {self._memory.device}")

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


EXPERT_OPERATORS = frozenset({"experts up", "experts down"})


def build_experts(operator: Operator, tokens: int, memory: Memory, rows: Rows, into: int) -> Kernel:
    """The kernel over so many tokens, each sent to ``topk`` experts evenly at random.

    Up has ``into`` times the experts' width (2: gated) and gathers the tokens' rows by expert first; down
    adds the results to the tokens at last.
    """
    shape = operator.shape
    is_up = operator.name == "experts up"
    n, k = (into * shape["n"], shape["k"]) if is_up else (shape["k"], shape["n"])
    weights = rows.weights(operator, shape["experts"], n, k)
    who, ends = _routing(memory, tokens, shape["experts"], shape["topk"])
    multiply, backend = _multiply(memory, weights, ends, n)
    if is_up:
        x = memory.real(tokens, k)
        return Kernel(lambda i: multiply(x.index_select(0, who), weights[i]), len(weights), backend)
    x = memory.real(len(who), k)

    def down(i: int) -> object:
        out = x.new_zeros(tokens, n)
        return out.index_add_(0, who, multiply(x, weights[i]))

    return Kernel(down, len(weights), backend)


def _routing(memory: Memory, tokens: int, experts: int, topk: int) -> tuple[Any, list[int]]:
    """The token of each row, rows sorted by expert; and where each expert's rows end."""
    torch = memory.torch
    chosen = torch.rand(tokens, experts, generator=memory.generator).topk(topk, dim=1).indices.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    ends = torch.bincount(chosen, minlength=experts).cumsum(0).tolist()
    return (order // topk).to(memory.device), [int(end) for end in ends]


def _multiply(memory: Memory, weights: list[Any], ends: list[int], width: int) -> tuple[Any, str]:
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
        translated(torch, lambda: grouped(memory.real(ends[-1], weights[0].shape[2]), weights[0]))
        torch.cuda.synchronize()
    except (NoRoomError, LostError):
        raise
    except Exception:  # noqa: BLE001 - not of this device, dtype or shape
        return one_by_one, "torch, a GEMM an expert"
    return grouped, "torch grouped_mm"


_BLOCK_TOKENS, _CONTEXT, _STOP = 16, 1024, -1

HOST_NOTE = (
    "host: lists to tensors, to the device, sampled tokens back, an append and a stop check a sequence; no "
    "scheduler, detokeniser or HTTP: a lower bound of a real engine's, which a calibration must find"
)


def build_host(memory: Memory, seqs: int) -> Kernel:
    """One step's bookkeeping of so many sequences with contexts of 1,024 tokens."""
    torch, device = memory.torch, memory.device
    outputs: list[list[int]] = [[0] for _ in range(seqs)]
    blocks = [list(range(i, i + _CONTEXT // _BLOCK_TOKENS)) for i in range(seqs)]
    sampled = memory.complete(1000, seqs)

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
