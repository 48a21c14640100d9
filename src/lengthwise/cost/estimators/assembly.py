"""Cost tables from fitted operators; what was not measured comes from the roofline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lengthwise.cost.estimators.cross_validation import Judged
from lengthwise.cost.estimators.learners import Interpolated, fit_tables
from lengthwise.cost.estimators.points import NAMES, Points, Target, kernel_points, shard_points
from lengthwise.cost.memory import Shard, shard_of
from lengthwise.cost.operator_work import Kernels, Operators, Work, kernels_of
from lengthwise.cost.roofline_tables import LARGEST_KV_TOKENS, HostOverhead, roofline_errors, with_front_error
from lengthwise.schema.cost_tables import CostTables, Floats, PartError, grid_axis
from lengthwise.schema.profile import OPERATOR_PARTS, Profile
from lengthwise.schema.specs import NodeSpec

_IN_ATTENTION = "kv write"
_PARTS = ("layer", "comm", "first", "send", "head", "host", "prefill", "decode")


@dataclass
class _Part:
    """A part's seconds on its axes, and whose they are."""

    seconds: Floats
    of: list[tuple[float, float]] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)

    def add(self, seconds: Floats, log_sd: float, filled: str = "") -> None:
        self.seconds = self.seconds + seconds
        self.of.append((float(seconds.mean()), log_sd))
        if filled:
            self.filled.append(filled)

    @property
    def log_sd(self) -> float:
        """Sum over operators of (share of the part's time) x (their log_sd), as if all erred one way."""
        total = sum(seconds for seconds, _ in self.of)
        return sum(seconds * sd for seconds, sd in self.of) / total if total > 0 else 0.0


class Assembly:
    """Tables of one deployment.

    Args:
        target: The deployment.
        ops: Its operators: the roofline's, or with measured kernels of no model.
        shard: By operator, what was learnt of the model's shard.
        kernels: By operator, what was learnt of kernels of no model, for their errors.
        host: Overhead of the host where the profile has none.
    """

    def __init__(
        self,
        target: Target,
        ops: Operators,
        shard: Mapping[str, Judged],
        kernels: Mapping[str, Judged],
        host: HostOverhead,
    ) -> None:
        self.target, self.ops, self.shard, self.kernels, self.host = target, ops, shard, kernels, host
        self.parts: dict[str, _Part] = {}
        told = roofline_errors(target.model, target.gpu, target.weight_dtype)
        self.roofline = {error.part: error.log_sd for error in told}

    def tables(self) -> CostTables:
        """The tables, their errors by part."""
        limits, longest = self.target.limits, self.target.max_model_len
        tokens = np.arange(max(limits.max_num_batched_tokens, limits.max_num_seqs) + 1.0)
        seqs = np.arange(limits.max_num_seqs + 1.0)
        chunk = grid_axis(max(limits.max_num_batched_tokens, longest)).astype(np.float64)
        context = grid_axis(longest).astype(np.float64)
        batch = grid_axis(limits.max_num_seqs).astype(np.float64)
        cached = grid_axis(min(limits.max_num_seqs * longest, LARGEST_KV_TOKENS)).astype(np.float64)
        prompts = {"chunk": chunk[:, None], "context": context[None, :]}
        decodes = {"seqs": batch[:, None], "kv_tokens": cached[None, :]}
        ops = self.ops
        by_part: dict[str, tuple[Callable[..., list[Work]], dict[str, Floats]]] = {
            "layer": (ops.layer, {"tokens": tokens}),
            "comm": (ops.all_reduces, {"tokens": tokens}),
            "first": (ops.first, {"tokens": tokens}),
            "send": (ops.send, {"tokens": tokens}),
            "head": (ops.head, {"tokens": seqs}),
            "host": (self._host, {"tokens": seqs}),
            "prefill": (ops.prefill, prompts),
            "decode": (ops.decode, decodes),
        }
        seconds: dict[str, Any] = {f"{part}_s": self._part(part, *asked) for part, asked in by_part.items()}
        stages = np.array(ops.shard.layers, dtype=np.int64)
        errors = with_front_error(self.errors(), self.host.front)
        return CostTables(**seconds, stage_layers=stages, errors=errors, front=self.host.front)

    def errors(self) -> tuple[PartError, ...]:
        """A PartError for each part that takes any time."""
        named = [(name, self.parts[name]) for name in _PARTS]
        return tuple(PartError(name, part.log_sd) for name, part in named if part.seconds.any())

    def filled(self) -> tuple[str, ...]:
        """Operators that the roofline filled in, by part."""
        return tuple(f"{name}: {', '.join(part.filled)}" for name, part in self.parts.items() if part.filled)

    def _part(self, part: str, works: Callable[..., list[Work]], axes: dict[str, Floats]) -> Floats:
        shape = np.broadcast_shapes(*(axis.shape for axis in axes.values()))
        flat = {name: np.broadcast_to(axis, shape).ravel() for name, axis in axes.items()}
        self.parts[part] = own = _Part(np.zeros(shape))
        left = self._measured(part, flat, own, shape)
        for work in works(*axes.values()):
            rest = left.get(work.name, 1.0)
            if rest > 0:
                sd, filled = self._error_of(work, part)
                own.add(np.broadcast_to(rest * work.seconds, shape), sd, filled)
        own.seconds[0] = own.seconds[0] if part == "host" else 0.0
        return np.ascontiguousarray(own.seconds)

    def _measured(self, part: str, flat: dict[str, Floats], own: _Part, shape: tuple[int, ...]) -> dict[str, float]:
        """Adds what was learnt of the shard; what is left of the roofline's operators, by name."""
        left: dict[str, float] = {}
        for operator, judged in self.shard.items():
            points = shard_points(operator, flat, self.target) if OPERATOR_PARTS[operator] == part else None
            if points is None:
                continue
            seconds = judged.fit_result(points).reshape(shape) * self.target.share(operator)
            own.add(seconds, self._sd(judged, part))
            for name, share in NAMES.get(operator, ((operator, 1.0),)):
                left[name] = left.get(name, 1.0) - share
        if "kv write" not in self.shard and any(OPERATOR_PARTS[o] == "prefill" for o in self.shard):
            left[_IN_ATTENTION] = 0.0
        return left

    def _error_of(self, work: Work, part: str) -> tuple[float, str]:
        """(log_sd, name if the roofline filled it in) of an operator that no shard was measured for."""
        name = "all-reduce" if "all-reduce" in work.name else work.name
        judged = self.kernels.get(name) or self.kernels.get(name.replace("window ", ""))
        is_measured = not np.any(work.compute_s) and not np.any(work.memory_s) and not np.any(work.network_s)
        if judged is None and is_measured and work.name != "host":
            judged = self.kernels.get("gemm") or self.kernels.get("gemm wide")
        return (self._sd(judged, part), "") if judged is not None else (self.roofline[part], work.name)

    def _sd(self, evaluated: Judged, part: str) -> float:
        """What is known of its error; else the widest that anything of the part has, the roofline among them."""
        if evaluated.log_sd is not None:
            return evaluated.log_sd
        known = [one.log_sd for name, one in self.shard.items() if OPERATOR_PARTS[name] == part]
        return max([self.roofline[part], *(sd for sd in known if sd is not None)])

    def _host(self, seqs: Floats) -> list[Work]:
        return [Work("host", latency_s=self.host.step_s + self.host.sequence_s * seqs)]


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
        found = kernel_points("gemm", {"tokens": tokens, "n": float(n), "k": float(k)}, _plain(kernels), _NO_NODE)
        return measured(work, judged.fit_result(found) if found is not None else work.seconds, m)


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
        self.fit_result, self.target = kernels, target
        shard: Shard = shard_of(target.model, target.parallel, target.limits)
        plain = kernels_of(target.gpu, shard.weight_dtype)
        products = {wide: kernels[n] for wide, n in ((False, "gemm"), (True, "gemm wide")) if n in kernels}
        fitted = FittedKernels(plain.gpu, plain.weight_dtype, plain.wide_bytes, plain.curves, products)
        super().__init__(shard, fitted if products else plain, target.node)

    def _measured(self, work: Work, operator: str, columns: Mapping[str, Any], like: Any) -> Work:
        judged = self.fit_result.get(operator)
        if judged is None:
            return work
        found = kernel_points(operator, columns, _plain(self.kernels), self.node)
        return work if found is None else measured(work, judged.fit_result(found), like)

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
        if "fused moe" not in self.fit_result:
            return works
        columns = {
            "tokens": np.atleast_1d(np.asarray(tokens, dtype=np.float64)),
            "experts": float(ffn.experts),
            "topk": float(ffn.experts_per_token),
            "n": ffn.expert_intermediate / self.tp,
            "k": float(self.model.hidden),
        }
        work = self._measured(Work("fused moe"), "fused moe", columns, tokens)
        return [work, *(w for w in works if w.name not in ("experts up", "expert activation", "experts down"))]

    def _all_reduce(self, name: str, elements: Any) -> Work:
        work = super()._all_reduce(name, elements)
        sizes = np.asarray(elements, dtype=np.float64) * self.wide
        columns = {"bytes": np.atleast_1d(sizes).ravel(), "gpus": float(self.tp)}
        return self._measured(work, "all-reduce", columns, sizes)

    def _known(self, name: str) -> str:
        """A window's own measurements, or those of full attention."""
        return name if name in self.fit_result else name.replace("window ", "")

    def _heads(self, window: int | None) -> dict[str, float]:
        attention, shard = self.model.attention, self.shard
        heads = {"heads": float(shard.heads), "kv_heads": float(shard.kv_heads)}
        return {**heads, "head_dim": float(attention.head_dim), "window": float(window or 0)}


_NO_NODE: NodeSpec = None  # type: ignore[assignment]  # products of matrices ask no link


_FOLDS = 5
_MOST_ROWS = 4000
_MIN_ROWS = 20
_USUAL_CHUNKS = (64, 4096)
_SKEWED = (1.5, 4.0)


@dataclass(frozen=True)
class MixedBatchCost:
    """Decode attention in a step with prompts.

    Attributes:
        fit_result: Seconds of the decodes beside a prompt, at points of "decode attention".
        summed: Median relative error of (prompt alone) + (decodes alone) on held-out steps with both.
        disaggregated: The same with the decodes' own seconds beside a prompt.
    """

    fit_result: Interpolated
    summed: float
    disaggregated: float


def fit_beside(rows: Profile, prompts: Judged, decodes: Judged, target: Target) -> MixedBatchCost | None:
    """What is left of steps with both when the prompt's own attention is taken away; None: too little to tell.

    Rows of chunks of 64 to 4,096 tokens count, where there are some: the usual ones of mixed steps.
    """
    rows = rows.where(rows["skew"] <= 1)
    usual = (rows["chunk"] >= _USUAL_CHUNKS[0]) & (rows["chunk"] <= _USUAL_CHUNKS[1])
    rows = rows.where(usual) if usual.sum() >= _MIN_ROWS else rows
    rows = rows.where(np.arange(len(rows)) % (-(-max(len(rows), 1) // _MOST_ROWS)) == 0)
    if len(rows) < _MIN_ROWS:
        return None
    prompt = shard_points("prefill attention", {"chunk": rows["chunk"], "context": rows["context"]}, target)
    asked = {"seqs": rows["seqs"], "kv_tokens": rows["kv_tokens"]}
    decode = shard_points("decode attention", asked, target)
    if prompt is None or decode is None:
        return None
    prompt_s, isolated_s = prompts.fit_result(prompt), decodes.fit_result(decode)
    left = replace(decode, seconds=np.maximum(rows["seconds"] - prompt_s, isolated_s))
    held = _held_out(left)
    summed = _median_error(prompt_s + isolated_s, rows["seconds"])
    return MixedBatchCost(fit_tables(left), summed, _median_error(prompt_s + held, rows["seconds"]))


def factors(additional: MixedBatchCost, decodes: Judged, seqs: Floats, cached: Floats, target: Target) -> Floats:
    """[sequences, KV tokens] how many times as long decodes take beside a prompt, at least as long."""
    shape = np.broadcast_shapes(seqs.shape, cached.shape)
    asked = {"seqs": np.broadcast_to(seqs, shape).ravel(), "kv_tokens": np.broadcast_to(cached, shape).ravel()}
    points = shard_points("decode attention", asked, target)
    if points is None:
        return np.ones(shape)
    ratio = additional.fit_result(points) / np.maximum(decodes.fit_result(points), 1e-12)
    factor = np.maximum(ratio, 1.0).reshape(shape)
    factor[0] = 1.0
    return np.ascontiguousarray(factor)


def skewed(rows: Profile, decodes: Judged, target: Target) -> tuple[int, float] | None:
    """(rows, median of measured / said - 1) of decodes of unequal lengths; None: none were measured.

    Rows of which the longest is one and a half to four times the mean count.
    """
    rows = rows.where((rows["skew"] > _SKEWED[0]) & (rows["skew"] <= _SKEWED[1]))
    if not len(rows):
        return None
    asked = {"seqs": rows["seqs"], "kv_tokens": rows["kv_tokens"]}
    points = shard_points("decode attention", asked, target)
    if points is None:
        return None
    return len(rows), float(np.median(rows["seconds"] / decodes.fit_result(points))) - 1


def _held_out(left: Points) -> Floats:
    """Seconds at each place, from the others."""
    places = left.places()
    fold = np.random.default_rng(0).permutation(places.max() + 1)[places] % _FOLDS
    said = np.empty(len(left))
    for one in range(_FOLDS):
        said[fold == one] = fit_tables(left.take(fold != one))(left.take(fold == one))
    return said


def _median_error(predicted: Floats, measured: Floats) -> float:
    return float(np.median(np.abs(predicted / measured - 1)))
