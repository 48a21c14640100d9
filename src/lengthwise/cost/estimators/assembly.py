"""Assembles cost tables from fitted operators; the roofline supplies the operators that were not measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lengthwise.cost.estimators.cross_validation import ValidatedFit
from lengthwise.cost.estimators.fitters import Interpolated, fit_tables
from lengthwise.cost.estimators.points import Target, kernel_points, shard_points
from lengthwise.cost.memory import shard_of
from lengthwise.cost.operator_work import PROFILE_OPERATORS, Kernels, Operators, Work, kernels_of, layer_share
from lengthwise.cost.roofline_tables import LARGEST_KV_TOKENS, HostOverhead, roofline_errors, with_front_error
from lengthwise.schema.cost_tables import CostEvidence, CostTables, Floats, PartError, grid_axis
from lengthwise.schema.profile import OPERATOR_PARTS, Profile

Fits = Mapping[str, ValidatedFit]


@dataclass
class _Part:
    seconds: Floats
    errors: list[tuple[float, float]] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)

    def add(self, seconds: Floats, log_sd: float) -> None:
        self.seconds = self.seconds + seconds
        self.errors.append((float(seconds.mean()), log_sd))

    @property
    def log_sd(self) -> float:
        """Return the mean error of the operators, weighted by their seconds, as if all had the same sign."""
        total = sum(seconds for seconds, _ in self.errors)
        return sum(seconds * sd for seconds, sd in self.errors) / total if total > 0 else 0.0


class Assembly:
    """Builds the cost tables of one deployment from the fits of its operators.

    ``shard`` are the fits of the model's operators, ``kernels`` the fits of model-independent kernels ("gemm" and "gemm
    wide" are matrix products). ``host`` has the front end, and the host overhead of a step if the profile has none.
    """

    def __init__(self, target: Target, shard: Fits, kernels: Fits, host: HostOverhead) -> None:
        self.target, self.shard, self.kernels, self.host = target, shard, kernels, host
        self.parts: dict[str, _Part] = {}
        errors = roofline_errors(target.model, target.gpu, target.weight_dtype)
        self.roofline = {error.part: error.log_sd for error in errors}

    def tables(self) -> CostTables:
        """Return the cost tables, with the errors of their parts."""
        limits, longest = self.target.limits, self.target.max_model_len
        tokens = np.arange(max(limits.max_num_batched_tokens, limits.max_num_seqs) + 1.0)
        seqs = np.arange(limits.max_num_seqs + 1.0)
        chunk = grid_axis(max(limits.max_num_batched_tokens, longest)).astype(np.float64)
        context = grid_axis(longest).astype(np.float64)
        ops = FittedOperators(self.target, self.kernels)
        by_part: dict[str, tuple[Callable[..., list[Work]], dict[str, Floats]]] = {
            "layer": (ops.layer, {"tokens": tokens}),
            "comm": (ops.all_reduces, {"tokens": tokens}),
            "embedding": (ops.embedding, {"tokens": tokens}),
            "send": (ops.send, {"tokens": tokens}),
            "head": (ops.head, {"tokens": seqs}),
            "host": (self.host.work, {"tokens": seqs}),
            "prefill": (ops.prefill, {"chunk": chunk[:, None], "context": context[None, :]}),
            "decode": (ops.decode, decode_axes(self.target)),
        }
        seconds: dict[str, Any] = {f"{part}_s": self._seconds(part, *axes) for part, axes in by_part.items()}
        errors = tuple(PartError(name, part.log_sd) for name, part in self.parts.items() if part.seconds.any())
        stages = np.array(ops.shard.layers, dtype=np.int64)
        front = self.host.front
        evidence = CostEvidence(errors=with_front_error(errors, front))
        return CostTables(**seconds, stage_layers=stages, evidence=evidence, front=front)

    def filled(self) -> tuple[str, ...]:
        """Return a text for each part of a step that lists the operators which the roofline supplied."""
        return tuple(f"{name}: {', '.join(part.filled)}" for name, part in self.parts.items() if part.filled)

    def _seconds(self, name: str, works: Callable[..., list[Work]], axes: dict[str, Floats]) -> Floats:
        shape = np.broadcast_shapes(*(axis.shape for axis in axes.values()))
        columns = {axis: np.broadcast_to(values, shape).ravel() for axis, values in axes.items()}
        self.parts[name] = part = _Part(np.zeros(shape))
        remaining: dict[str, float] = {}
        for operator, fit in self.shard.items():
            points = shard_points(operator, columns, self.target) if OPERATOR_PARTS[operator] == name else None
            if points is None:
                continue
            seconds = fit.predict(points).reshape(shape) * layer_share(self.target.model, operator)
            part.add(seconds, self._log_sd(fit, name))
            for replaced, share in PROFILE_OPERATORS.get(operator, ((operator, 1.0),)):
                remaining[replaced] = remaining.get(replaced, 1.0) - share
        if "kv write" not in self.shard and any(OPERATOR_PARTS[o] == "prefill" for o in self.shard):
            remaining["kv write"] = 0.0  # measured attention kernels write the cache
        for work in works(*axes.values()):
            rest = remaining.get(work.name, 1.0)
            if rest > 0:
                kernel = self._kernel(work)
                part.filled += [work.name] if kernel is None else []
                log_sd = self.roofline[name] if kernel is None else self._log_sd(kernel, name)
                part.add(np.broadcast_to(rest * work.seconds, shape), log_sd)
        part.seconds[0] = part.seconds[0] if name == "host" else 0.0
        return np.ascontiguousarray(part.seconds)

    def _kernel(self, work: Work) -> ValidatedFit | None:
        """Return the fit that gives the time of an operator's ``work``, or None if the roofline gives it."""
        name = "all-reduce" if "all-reduce" in work.name else work.name
        fit = self.kernels.get(name) or self.kernels.get(name.replace("window ", ""))
        # ``FittedOperators`` returns measured times as latency only.
        is_measured = not np.any(work.compute_s) and not np.any(work.memory_s) and not np.any(work.network_s)
        if fit is None and is_measured and work.name != "host":
            fit = self.kernels.get("gemm") or self.kernels.get("gemm wide")
        return fit

    def _log_sd(self, fit: ValidatedFit, part: str) -> float:
        """Return the error of a fit. An unknown error counts as the largest in the part, including the roofline's."""
        if fit.log_sd is not None:
            return fit.log_sd
        known = [one.log_sd for name, one in self.shard.items() if OPERATOR_PARTS[name] == part]
        return max([self.roofline[part], *(sd for sd in known if sd is not None)])


def decode_axes(target: Target) -> dict[str, Floats]:
    """Return the axes of the decode table: sequences [b, 1] and KV tokens [1, k]."""
    seqs = target.limits.max_num_seqs
    cached = grid_axis(min(seqs * target.max_model_len, LARGEST_KV_TOKENS))
    return {"seqs": grid_axis(seqs).astype(np.float64)[:, None], "kv_tokens": cached.astype(np.float64)[None, :]}


@dataclass(frozen=True)
class FittedKernels(Kernels):
    """A GPU's kernels with measured matrix products. ``products[True]`` is the fit of products with 16-bit weights."""

    products: Mapping[bool, ValidatedFit] = field(default_factory=dict)

    def gemm(self, name: str, m: Any, n: Any, k: Any, *, wide: bool = False) -> Work:
        """Return the work of an [m, k] by [k, n] product, with its measured time if there is one."""
        work = super().gemm(name, m, n, k, wide=wide)
        if wide not in self.products:
            return work
        plain = Kernels(self.gpu, self.weight_dtype, self.wide_bytes, self.curves)
        kernels = kernels_of(self.gpu, "bfloat16") if wide else plain
        columns = {"tokens": np.atleast_1d(np.asarray(m, dtype=np.float64)), "n": float(n), "k": float(k)}
        points = kernel_points("gemm", columns, kernels, None)
        assert points is not None
        return measured(work, self.products[wide].predict(points), m)


def measured(work: Work, seconds: Any, shape_of: Any) -> Work:
    """Return ``work`` with measured seconds, in the shape of ``shape_of``, in place of the roofline's.

    All seconds count as latency, since a measurement does not separate compute from memory.
    """
    seconds = np.asarray(seconds).reshape(np.shape(shape_of))
    return replace(work, compute_s=0.0, memory_s=0.0, network_s=0.0, latency_s=seconds)


class FittedOperators(Operators):
    """A deployment's operators with measured times of attention, experts, matrix products and collectives."""

    def __init__(self, target: Target, fits: Fits) -> None:
        self.fits = fits
        shard = shard_of(target.model, target.parallel, target.limits)
        plain = kernels_of(target.gpu, shard.weight_dtype)
        products = {wide: fits[name] for wide, name in ((False, "gemm"), (True, "gemm wide")) if name in fits}
        kernels = FittedKernels(plain.gpu, plain.weight_dtype, plain.wide_bytes, plain.curves, products=products)
        super().__init__(shard, kernels, target.node)
        self.plain = plain

    def _measured(self, work: Work, operator: str, columns: Mapping[str, Any], shape_of: Any) -> Work:
        if operator not in self.fits:
            operator = operator.replace("window ", "")  # full attention stands in for unmeasured window attention
        if operator not in self.fits:
            return work
        points = kernel_points(operator, columns, self.plain, self.node)
        return work if points is None else measured(work, self.fits[operator].predict(points), shape_of)

    def _prefill(self, name: str, chunk: Any, context: Any, window: int | None) -> Work:
        work = super()._prefill(name, chunk, context, window)
        if self.is_mla or self.model.encoder_layers:
            return work
        chunks, contexts = np.broadcast_arrays(np.asarray(chunk, float), np.asarray(context, float))
        columns = {"seqs": 1.0, "chunk": chunks.ravel(), "context": contexts.ravel(), **self._heads(window or 0)}
        return self._measured(work, name, columns, chunks)

    def _decode(self, name: str, seqs: Any, keys: Any) -> Work:
        work = super()._decode(name, seqs, keys)
        if self.is_mla:
            return work
        batch, cached = np.broadcast_arrays(np.asarray(seqs, float), np.asarray(keys, float))
        columns = {"seqs": batch.ravel(), "kv_tokens": cached.ravel(), **self._heads(0)}
        return self._measured(work, name, columns, batch)

    def _moe(self, tokens: Any) -> list[Work]:
        works = super()._moe(tokens)
        ffn = self.model.ffn
        if "fused moe" not in self.fits:
            return works
        columns: dict[str, Any] = {"tokens": np.atleast_1d(np.asarray(tokens, dtype=np.float64))}
        columns |= {"experts": float(ffn.experts), "topk": float(ffn.experts_per_token)}
        columns |= {"n": ffn.expert_intermediate / self.tp, "k": float(self.model.hidden)}
        work = self._measured(Work("fused moe"), "fused moe", columns, tokens)
        return [work, *(w for w in works if w.name not in ("experts up", "expert activation", "experts down"))]

    def _all_reduce(self, name: str, elements: Any) -> Work:
        work = super()._all_reduce(name, elements)
        sizes = np.asarray(elements, dtype=np.float64) * self.wide
        columns = {"bytes": np.atleast_1d(sizes).ravel(), "gpus": float(self.tp)}
        return self._measured(work, "all-reduce", columns, sizes)

    def _heads(self, window: int) -> dict[str, float]:
        attention, shard = self.model.attention, self.shard
        heads = {"heads": float(shard.heads), "kv_heads": float(shard.kv_heads)}
        return {**heads, "head_dim": float(attention.head_dim), "window": float(window)}


_FOLDS = 5
_MIN_ROWS, _MAX_ROWS = 20, 4000
_COMMON_CHUNKS = (64, 4096)
_UNEQUAL = (1.5, 4.0)


@dataclass(frozen=True)
class MixedBatchCost:
    """The time of decode attention in a mixed step, which computes prompts and decodes.

    Both errors are medians of relative errors on held-out mixed steps.
    """

    predict: Interpolated  # returns seconds of decodes next to a prompt, at points of "decode attention"
    sum_error: float  # error of (prompt alone) + (decodes alone)
    mixed_error: float  # error of (prompt alone) + (decodes next to a prompt)


def fit_mixed_batches(
    rows: Profile, prompts: ValidatedFit, decodes: ValidatedFit, target: Target
) -> MixedBatchCost | None:
    """Fit the time of decode attention next to a prompt. Return None if there are fewer than 20 rows.

    It is the measured time of the step less the predicted time of its prompt, but at least that of the decodes alone.
    """
    rows = rows.where(rows["skew"] <= 1)
    # If enough rows have chunks of common sizes, only those rows are used.
    common = (rows["chunk"] >= _COMMON_CHUNKS[0]) & (rows["chunk"] <= _COMMON_CHUNKS[1])
    rows = rows.where(common) if common.sum() >= _MIN_ROWS else rows
    rows = rows.where(np.arange(len(rows)) % (-(-max(len(rows), 1) // _MAX_ROWS)) == 0)
    if len(rows) < _MIN_ROWS:
        return None
    prompt = shard_points("prefill attention", {name: rows[name] for name in ("chunk", "context")}, target)
    decode = shard_points("decode attention", {name: rows[name] for name in ("seqs", "kv_tokens")}, target)
    if prompt is None or decode is None:
        return None
    prompt_s, decode_s = prompts.predict(prompt), decodes.predict(decode)
    rest = replace(decode, seconds=np.maximum(rows["seconds"] - prompt_s, decode_s))
    places = rest.places()
    fold = np.random.default_rng(0).permutation(places.max() + 1)[places] % _FOLDS
    held_out_s = np.empty(len(rest))
    for number in range(_FOLDS):
        held_out_s[fold == number] = fit_tables(rest.take(fold != number))(rest.take(fold == number))
    sum_error, mixed_error = (
        float(np.median(np.abs((prompt_s + seconds) / rows["seconds"] - 1))) for seconds in (decode_s, held_out_s)
    )
    return MixedBatchCost(fit_tables(rest), sum_error, mixed_error)


def mixed_batch_factors(mixed: MixedBatchCost, decodes: ValidatedFit, target: Target) -> Floats:
    """Return [sequences, KV tokens] the factors, at least 1, by which a prompt in the step slows decode attention."""
    axes = decode_axes(target)
    shape = np.broadcast_shapes(*(axis.shape for axis in axes.values()))
    columns = {name: np.broadcast_to(axis, shape).ravel() for name, axis in axes.items()}
    points = shard_points("decode attention", columns, target)
    if points is None:
        return np.ones(shape)
    ratio = mixed.predict(points) / np.maximum(decodes.predict(points), 1e-12)
    factor = np.maximum(ratio, 1.0).reshape(shape)
    factor[0] = 1.0
    return np.ascontiguousarray(factor)


def unequal_lengths_error(rows: Profile, decodes: ValidatedFit, target: Target) -> tuple[int, float] | None:
    """Return (rows, median of measured / predicted - 1) of decodes whose longest context is 1.5 to 4 times the mean."""
    rows = rows.where((rows["skew"] > _UNEQUAL[0]) & (rows["skew"] <= _UNEQUAL[1]))
    points = shard_points("decode attention", {name: rows[name] for name in ("seqs", "kv_tokens")}, target)
    if not len(rows) or points is None:
        return None
    return len(rows), float(np.median(rows["seconds"] / decodes.predict(points))) - 1
