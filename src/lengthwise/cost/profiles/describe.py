"""Describes a profile: ranges, noise, gaps and roofline shares of each operator and shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lengthwise import catalog
from lengthwise.cost.estimators.points import kernel_work
from lengthwise.cost.memory import shard_of, usable_degrees
from lengthwise.cost.operator_work import Operators, Work, kernels_of, layer_share, profile_work, total_work
from lengthwise.schema.cost_tables import Floats, Ints
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import UnknownNameError
from lengthwise.schema.profile import OPERATOR_PARTS, WHOLE_COLUMNS, Profile
from lengthwise.schema.specs import GpuSpec, ModelSpec, dtype_name

STEP_TOKENS, STEP_SEQS, UNKNOWN_LENGTH = 8192, 256, 8192  # largest step, batch, request
MAX_DISTANCE = 2.05  # neighbours that are more times apart leave a gap; grids that double do not
CELL = 4  # a cell of the plane of attention spans this factor along either axis


@dataclass(frozen=True)
class Gap:
    """A range of sizes that was not measured: (name, lowest value, highest value) of each axis."""

    axes: tuple[tuple[str, int, int], ...]

    def __str__(self) -> str:
        return " with ".join(f"{name} {low:,} to {high:,}" for name, low, high in self.axes)


def find_gaps(rows: Profile, longest: int | None) -> tuple[Gap, ...]:
    """Return the gaps of one operator on one shard, up to requests of ``longest`` tokens (8,192 if None).

    Model-independent kernels have none, as their range has no end.
    """
    if not len(rows) or not (rows["tp"] > 0).all():
        return ()
    part, longest = OPERATOR_PARTS[rows.operators[0]], longest or UNKNOWN_LENGTH
    if part == "prefill":
        axes = (("chunk", rows["chunk"], min(STEP_TOKENS, longest)), ("context", rows["context"], longest))
        return tuple(_plane_gaps(*axes, max_sum=longest))
    if part == "decode":
        mean = rows["kv_tokens"] / np.maximum(rows["seqs"], 1)
        return tuple(_plane_gaps(("sequences", rows["seqs"], STEP_SEQS), ("mean context", mean, longest)))
    if part in ("head", "host"):
        return tuple(_line_gaps("sequences", rows["tokens"], STEP_SEQS))
    return tuple(_line_gaps("tokens", rows["tokens"], STEP_TOKENS)) if part in ("layer", "embedding") else ()


def _line_gaps(name: str, values: Ints, last: int) -> Iterator[Gap]:
    points = np.unique(values[values > 0])
    if not len(points):
        return
    if points[0] > MAX_DISTANCE:
        yield Gap(((name, 1, int(points[0]) - 1),))
    for low, high in pairwise(points):
        if high / low > MAX_DISTANCE and low < last:
            yield Gap(((name, int(low) + 1, int(high) - 1),))
    if points[-1] < last:
        yield Gap(((name, int(points[-1]) + 1, last),))


_Axis = tuple[str, Floats | Ints, int]


def _plane_gaps(x_axis: _Axis, y_axis: _Axis, max_sum: int | None = None) -> Iterator[Gap]:
    """Yield the cells of a plane without points, up to x + y = ``max_sum``. Neighbouring cells form one gap."""
    (x_name, x, x_last), (y_name, y, y_last) = x_axis, y_axis
    x_edges, y_edges = _edges(x_last), _edges(y_last)
    covered = np.zeros((len(x_edges) - 1, len(y_edges) - 1), dtype=bool)
    column = np.searchsorted(x_edges, x, side="left") - 1
    row = np.maximum(np.searchsorted(y_edges, y, side="left") - 1, 0)
    inside = (column >= 0) & (column < covered.shape[0]) & (row < covered.shape[1])
    covered[column[inside], row[inside]] = True
    if max_sum is not None:
        covered |= x_edges[:-1, None] + y_edges[None, :-1] + 1 > max_sum
    started: dict[tuple[int, int], int] = {}
    for i in range(len(covered) + 1):
        runs: set[tuple[int, int]] = set()
        if i < len(covered):
            changes = np.flatnonzero(np.diff(np.concatenate([[0], (~covered[i]).astype(int), [0]])))
            runs = {(int(first), int(stop)) for first, stop in zip(changes[::2], changes[1::2], strict=True)}
        for first, stop in sorted(set(started) - runs):
            x_range = (x_name, int(x_edges[started.pop((first, stop))]) + 1, int(x_edges[i]))
            yield Gap((x_range, (y_name, 0 if first == 0 else int(y_edges[first]) + 1, int(y_edges[stop]))))
        for run in runs - set(started):
            started[run] = i


def _edges(last: int) -> Ints:
    """Return the cell edges 0, 16, 64, 256 ... and ``last``, where the last cell spans at least a doubling."""
    powers = [0, *(CELL**n for n in range(2, 32))]
    return np.array([*(edge for edge in powers if 2 * edge < last), last], dtype=np.int64)


_NARROW = {"fp8_block": "fp8", "fp8_static": "fp8", "int8_wo": "int8", "int4_wo": "int4", "w4a16_mxfp4": "int4"}
_SIZES = (
    "tokens", "seqs", "chunk", "context", "kv_tokens", "n", "k", "heads", "kv_heads", "head_dim", "window",
    "experts", "topk",
)  # fmt: skip


@dataclass(frozen=True)
class RowWork:
    """FLOPs and bytes [n] of each row (NaN if unknown), and the peaks of the device."""

    flops: Floats
    bytes: Floats
    peak_flops: Floats
    bandwidth: float

    def min_s(self) -> Floats:
        """Return [n] the shortest time of each row that the data sheet allows, in seconds."""
        return np.asarray(np.maximum(self.flops / self.peak_flops, self.bytes / self.bandwidth))


def known_model(name: str) -> ModelSpec | None:
    """Return the catalog's model of this name, or None if the catalog has none."""
    try:
        return catalog.model(name) if name else None
    except UnknownNameError:
        return None


def row_work(profile: Profile, gpu: GpuSpec | None = None, model: ModelSpec | None = None) -> RowWork | None:
    """Return FLOPs and bytes of a profile's rows, or None if the device is neither given nor in the catalog."""
    gpu, model = gpu or catalog.find_gpu(profile.metadata.gpu), model or known_model(profile.metadata.model)
    if gpu is None:
        return None
    n = len(profile)
    work = RowWork(np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan), gpu.bandwidth_bytes_per_s)
    # If single norms were measured, "norms" is another operator, such as a norm of queries and keys.
    has_single_norms = bool({"input norm", "post-attention norm"} & set(profile.operators))
    for rows in _groups(profile):
        operator, tp, dtype = (profile[name][rows[0]] for name in ("operator", "tp", "dtype"))
        try:
            name = dtype_name(_NARROW.get(dtype, dtype)) if dtype else ""
        except UnknownNameError:
            continue
        if operator == "norms" and has_single_norms:
            continue
        c = {size: profile[size][rows].astype(np.float64) for size in _SIZES}
        if tp == 0:
            found = _kernel_work(operator, c, gpu, name or "bfloat16")
        elif model is not None and tp in usable_degrees(model):
            shard = shard_of(model, Parallelism(int(tp)), EngineLimits(weight_dtype=name or model.dtype))
            kernels = kernels_of(gpu, name or model.dtype)
            found = _shard_work(operator, c, Operators(shard, kernels, catalog.default_node(gpu, int(tp))))
        else:
            continue
        if found is not None:
            work.flops[rows], work.bytes[rows] = found.flops, found.bytes
            is_16_bit = OPERATOR_PARTS[operator] in ("prefill", "decode", "mixed", "head") and name != "float32"
            work.peak_flops[rows] = gpu.flops("bfloat16" if is_16_bit or name in ("", "int4") else name)
    return work


def _groups(profile: Profile) -> Iterator[Ints]:
    for operator in profile.operators:
        own = np.flatnonzero(profile["operator"] == operator)
        tps, dtypes = profile["tp"][own], profile["dtype"][own]
        for tp in np.unique(tps):
            for dtype in np.unique(dtypes[tps == tp]):
                yield own[(tps == tp) & (dtypes == dtype)]


def _shard_work(operator: str, c: dict[str, Floats], ops: Operators) -> Work | None:
    part, model = OPERATOR_PARTS[operator], ops.shard.model

    def in_its_layers(works: list[Work], name: str) -> Work | None:
        found, share = profile_work(works, name), layer_share(model, name)
        return found.times(1 / share) if found is not None and share else None

    if part == "mixed":
        decodes = in_its_layers(ops.decode(c["seqs"], c["kv_tokens"]), "decode attention")
        prompts = in_its_layers(ops.prefill(c["chunk"], c["context"]), "prefill attention")
        return total_work(operator, [decodes, prompts]) if decodes and prompts else None
    if part == "prefill":
        work = in_its_layers(ops.prefill(c["chunk"], c["context"]), operator)
        return work.times(np.maximum(c["seqs"], 1)) if work else None
    if part == "decode":
        return in_its_layers(ops.decode(c["seqs"], c["kv_tokens"]), operator)
    by_tokens = {"layer": ops.layer, "embedding": ops.embedding, "head": ops.head}
    if part not in by_tokens or operator == "logits gather":
        return None
    if operator == "moe block":
        return total_work(operator, ops.experts(c["tokens"], c["experts"])) if model.ffn.experts else None
    return in_its_layers(by_tokens[part](c["tokens"]), operator)


def _kernel_work(operator: str, c: dict[str, Floats], gpu: GpuSpec, dtype: str) -> Work | None:
    kernels = kernels_of(gpu, dtype)
    if operator == "fused moe":  # without the activation, which fused kernels do not write to memory
        rows = c["tokens"] * c["topk"]
        share = np.clip(c["topk"] / np.maximum(c["experts"], 1), 0, 1 - 1e-9)
        hit = c["experts"] * -np.expm1(c["tokens"] * np.log1p(-share))
        up = kernels.grouped_gemm("", rows, hit, 2 * c["n"], c["k"])
        return total_work(operator, [up, kernels.grouped_gemm("", rows, hit, c["k"], c["n"])])
    with np.errstate(divide="ignore", invalid="ignore"):  # times of rows without heads are not used
        works = kernel_work(operator, c, kernels, None)
    if works is None:
        return None
    return works[0].times(c["seqs"]) if operator.startswith("prefill") else works[0]


@dataclass(frozen=True)
class Share:
    """Shares of the data sheet's peaks that a row reaches: FLOP/s, bandwidth, and roofline (the larger of both)."""

    flops: float
    bandwidth: float
    roofline: float


@dataclass(frozen=True)
class OperatorView:
    """One operator of one shard (``tp`` 0: a model-independent kernel) in one dtype."""

    operator: str
    tp: int
    dtype: str  # of its weights or activations
    rows: npt.NDArray[np.int64]  # row numbers in the profile
    axes: dict[str, tuple[int, int]]  # lowest and highest value of each column that is not always 0
    seconds: tuple[float, float]  # shortest and longest
    spread: float  # median of (distance between quartiles / time); NaN: unknown
    gaps: tuple[Gap, ...]  # ranges of the model's steps without a measurement
    median: Share | None  # of the median row; None if its work is unknown
    best: Share | None  # of the best row


@dataclass(frozen=True)
class ProfileView:
    """A profile with operators and the work of rows. The work is None if the device is unknown."""

    profile: Profile
    operators: tuple[OperatorView, ...]
    work: RowWork | None


def describe_profile(profile: Profile, gpu: GpuSpec | None = None, model: ModelSpec | None = None) -> ProfileView:
    """Return ranges, noise, gaps and roofline shares of a profile's operators.

    ``gpu`` and ``model`` are the measured ones. If None, the catalog looks them up by the profile's names.
    """
    model = model or known_model(profile.metadata.model)
    work, longest = row_work(profile, gpu, model), model.max_model_len if model else None
    return ProfileView(profile, tuple(_view(profile, rows, work, longest) for rows in _groups(profile)), work)


def _view(profile: Profile, rows: Ints, work: RowWork | None, longest: int | None) -> OperatorView:
    own = profile.where(np.isin(np.arange(len(profile)), rows))
    seconds = own["seconds"]
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = own["spread_s"] / seconds
        shares = np.full(len(rows), np.nan) if work is None else work.min_s()[rows] / seconds

    def share(index: int) -> Share:
        assert work is not None
        row, time = rows[index], float(seconds[index])
        flops = float(work.flops[row] / time / work.peak_flops[row])
        return Share(flops, float(work.bytes[row] / time / work.bandwidth), float(shares[index]))

    timed = np.flatnonzero(np.isfinite(shares))
    order = timed[np.argsort(shares[timed], kind="stable")]
    known = spread[np.isfinite(spread)]
    names = [name for name in WHOLE_COLUMNS if name not in ("tp", "repeats") and own[name].any()]
    return OperatorView(
        operator=str(own["operator"][0]),
        tp=int(own["tp"][0]),
        dtype=str(own["dtype"][0]),
        rows=rows,
        axes={name: (int(own[name].min()), int(own[name].max())) for name in names},
        seconds=(float(seconds.min()), float(seconds.max())),
        spread=float(np.median(known)) if len(known) else float("nan"),
        gaps=find_gaps(own, longest),
        median=share(order[len(order) // 2]) if len(order) else None,
        best=share(order[-1]) if len(order) else None,
    )


MIN_S, MAX_S = 1e-8, 60.0
ABOVE_PEAK = 10


def warnings(profile: Profile) -> list[str]:
    """Return notes on implausible rows: below 10 ns, above a minute, or ten times faster than the device's peak."""
    seconds, work = profile["seconds"], row_work(profile)
    implausible = {
        "take less than 10 ns: is the unit right?": seconds < MIN_S,
        "take more than a minute: is the unit right?": seconds > MAX_S,
    }
    if work is not None:
        with np.errstate(invalid="ignore"):
            fast = (seconds >= MIN_S) & (work.min_s() > ABOVE_PEAK * seconds)
        implausible[f"are more than {ABOVE_PEAK} times faster than the device's peak"] = fast
    notes = []
    for problem, rows in implausible.items():
        if rows.any():
            first, names = np.flatnonzero(rows)[0], ", ".join(sorted(set(profile["operator"][rows].tolist())))
            notes.append(f"{rows.sum():,} rows {problem} ({names}; the first: row {first}, {seconds[first]:.3g} s)")
    return notes
