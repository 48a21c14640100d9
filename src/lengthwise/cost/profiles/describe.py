"""What a profile holds: for each operator and shard its ranges, its noise, its gaps, its share of the roofline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import catalog
from lengthwise.cost.memory import shard_of, usable_degrees
from lengthwise.cost.operator_work import Kernels, Operators, Work, kernels_of
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import UnknownNameError
from lengthwise.schema.profile import OPERATOR_PARTS, WHOLE_COLUMNS, Profile
from lengthwise.schema.specs import DTYPE_BYTES, GpuSpec, ModelSpec, dtype_name

STEP_TOKENS, STEP_SEQS, UNKNOWN_LENGTH = 8192, 256, 8192
"""Largest step, largest batch, and longest request where the model does not tell."""

MAX_DISTANCE = 2.05
"""Neighbours that are this many times apart leave a gap; doubling grids do not."""

CELL = 4
"""A cell of the plane of attention spans this factor along either axis."""


@dataclass(frozen=True)
class Gap:
    """A range without a point: for each axis its name, the lowest and the highest value."""

    axes: tuple[tuple[str, int, int], ...]

    def __str__(self) -> str:
        return " with ".join(f"{name} {low:,} to {high:,}" for name, low, high in self.axes)


def gaps(rows: Profile, longest: int | None) -> tuple[Gap, ...]:
    """The gaps of one operator on one shard; none for kernels of no model, which have no end.

    Args:
        rows: Of one operator and TP degree.
        longest: Tokens of the model's longest request; None: not known.
    """
    if not len(rows) or not (rows["tp"] > 0).all():
        return ()
    part, longest = OPERATOR_PARTS[rows.operators[0]], longest or UNKNOWN_LENGTH
    if part == "prefill":
        fits = (rows["chunk"], rows["context"])
        ends = (min(STEP_TOKENS, longest), longest)
        return tuple(_plane(("chunk", "context"), *fits, *ends, sum_at_most=longest))
    if part == "decode":
        mean = rows["kv_tokens"] / np.maximum(rows["seqs"], 1)
        return tuple(_plane(("sequences", "mean context"), rows["seqs"], mean, STEP_SEQS, longest))
    if part in ("head", "host"):
        return tuple(_line("sequences", rows["tokens"], STEP_SEQS))
    return tuple(_line("tokens", rows["tokens"], STEP_TOKENS)) if part in ("layer", "first") else ()


def _line(name: str, values: npt.NDArray[np.int64], last: int) -> Iterator[Gap]:
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


def _plane(
    names: tuple[str, str],
    x: Floats | npt.NDArray[np.int64],
    y: Floats | npt.NDArray[np.int64],
    x_last: int,
    y_last: int,
    sum_at_most: int | None = None,
) -> Iterator[Gap]:
    """Cells of a grid of powers without a point, those beside each other as one."""
    x_edges, y_edges = _edges(x_last), _edges(y_last)
    there = np.zeros((len(x_edges) - 1, len(y_edges) - 1), dtype=bool)
    column = np.searchsorted(x_edges, x, side="left") - 1
    row = np.maximum(np.searchsorted(y_edges, y, side="left") - 1, 0)
    inside = (column >= 0) & (column < there.shape[0]) & (row < there.shape[1])
    there[column[inside], row[inside]] = True
    if sum_at_most is not None:  # a cell whose smallest step is too long is none
        there |= x_edges[:-1, None] + y_edges[None, :-1] + 1 > sum_at_most
    runs = [tuple(_runs(~there[i])) for i in range(len(there))]
    open_: dict[tuple[int, int], int] = {}
    for i in range(len(runs) + 1):
        now = set(runs[i]) if i < len(runs) else set()
        for run in sorted(set(open_) - now):
            first = open_.pop(run)
            yield _cell(names, x_edges, y_edges, (first, i), run)
        for run in now - set(open_):
            open_[run] = i


def _cell(
    names: tuple[str, str], x: npt.NDArray[np.int64], y: npt.NDArray[np.int64], i: tuple[int, int], j: tuple[int, int]
) -> Gap:
    low = 0 if j[0] == 0 else int(y[j[0]]) + 1
    return Gap(((names[0], int(x[i[0]]) + 1, int(x[i[1]])), (names[1], low, int(y[j[1]]))))


def _edges(last: int) -> npt.NDArray[np.int64]:
    """0, then 16, 64, 256 ... to the last value: cells are (edge, next edge], the last one of more than a doubling."""
    inner = [0, 4 * CELL]
    while inner[-1] * CELL < last:
        inner.append(inner[-1] * CELL)
    return np.array([*(edge for edge in inner if 2 * edge < last), last], dtype=np.int64)


def _runs(missing: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of neighbours that are missing."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], missing.astype(int), [0]])))
    yield from ((int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True))


_NARROW = {"fp8_block": "fp8", "fp8_static": "fp8", "int8_wo": "int8", "int4_wo": "int4", "w4a16_mxfp4": "int4"}
_SHARES: dict[str, tuple[tuple[str, float], ...]] = {
    "input norm": (("norms", 0.5),),
    "post-attention norm": (("norms", 0.5),),
    "residual add": (("norms", 0.375),),
    "fused moe": (("experts up", 1.0), ("expert activation", 1.0), ("experts down", 1.0)),
}
"""A profile's operator in the roofline's, where the names differ: two norms move eight hidden sizes a token, a
residual three."""


@dataclass(frozen=True)
class RowWork:
    """[n] FLOPs and bytes of each row, NaN where they are not known, and the peaks of its device."""

    flops: Floats
    bytes: Floats
    peak_flops: Floats
    bandwidth: float

    def min_s(self) -> Floats:
        """[n] seconds that the data sheet allows at best."""
        return np.asarray(np.maximum(self.flops / self.peak_flops, self.bytes / self.bandwidth))


def known_gpu(name: str) -> GpuSpec | None:
    """The catalog's device of this name; None where it has none."""
    try:
        return catalog.gpu(name)
    except UnknownNameError:
        return None


def known_model(name: str) -> ModelSpec | None:
    """The catalog's model of this name; None where it has none."""
    try:
        return catalog.model(name) if name else None
    except UnknownNameError:
        return None


def row_work(profile: Profile, gpu: GpuSpec | None = None, model: ModelSpec | None = None) -> RowWork | None:
    """The work of a profile's rows; None where the device is not given and the catalog does not know it."""
    gpu, model = gpu or known_gpu(profile.metadata.gpu), model or known_model(profile.metadata.model)
    if gpu is None:
        return None
    n = len(profile)
    work = RowWork(np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan), gpu.bandwidth_bytes_per_s)
    # "norms" beside single norms is something else, such as a norm of queries and keys
    single = bool({"input norm", "post-attention norm"} & set(profile.operators))
    for operator in profile.operators:
        for rows, tp, dtype in _operator_groups(profile, operator):
            if operator == "norms" and single:
                continue
            columns = {name: profile[name][rows].astype(np.float64) for name in _NUMBERS}
            found = _of_kernel(operator, columns, gpu, dtype) if tp == 0 else None
            if tp > 0 and model is not None and tp in usable_degrees(model):
                found = _of_shard(operator, columns, _operators(model, gpu, tp, dtype))
            if found is not None:
                work.flops[rows], work.bytes[rows] = found.flops, found.bytes
                work.peak_flops[rows] = _peak(gpu, dtype, OPERATOR_PARTS[operator])
    return work


_NUMBERS = (
    "tokens", "seqs", "chunk", "context", "kv_tokens", "n", "k", "heads", "kv_heads", "head_dim", "window",
    "experts", "topk",
)  # fmt: skip


def _operator_groups(profile: Profile, operator: str) -> list[tuple[Any, int, str]]:
    """Rows of an operator that share TP and dtype."""
    rows = np.flatnonzero(profile["operator"] == operator)
    _, tp = np.unique(profile["tp"][rows], return_inverse=True)
    _, dtype = np.unique(profile["dtype"][rows], return_inverse=True)
    code = tp * (dtype.max() + 1) + dtype
    found = []
    for one in np.unique(code):
        own = rows[code == one]
        found.append((own, int(profile["tp"][own[0]]), str(profile["dtype"][own[0]])))
    return found


def _known(dtype: str) -> str:
    try:
        return dtype_name(_NARROW.get(dtype, dtype)) if dtype else "bfloat16"
    except UnknownNameError:
        return ""


def _peak(gpu: GpuSpec, dtype: str, part: str) -> float:
    name = _known(dtype)
    wide = name in ("", "int4") or (part in ("prefill", "decode", "mixed", "head") and name != "float32")
    return gpu.flops("bfloat16" if wide else name)


def _operators(model: ModelSpec, gpu: GpuSpec, tp: int, dtype: str) -> Operators | None:
    name = _known(dtype) if dtype else model.dtype
    if not name:
        return None
    shard = shard_of(model, Parallelism(tp), EngineLimits(weight_dtype=name))
    return Operators(shard, kernels_of(gpu, name), catalog.default_node(gpu, tp))


def _of_shard(operator: str, columns: Mapping[str, Floats], ops: Operators | None) -> Work | None:
    part = OPERATOR_PARTS[operator]
    if ops is None or part in ("comm", "send", "host"):
        return None
    tokens, seqs = columns["tokens"], np.maximum(columns["seqs"], 1)
    if part == "mixed":
        decodes = _part(ops.decode(columns["seqs"], columns["kv_tokens"]), "decode attention", ops)
        prompts = _part(ops.prefill(columns["chunk"], columns["context"]), "prefill attention", ops)
        return _sum([w for w in (decodes, prompts) if w is not None]) if decodes and prompts else None
    if part == "prefill":
        work = _part(ops.prefill(columns["chunk"], columns["context"]), operator, ops)
        return work.times(seqs) if work else None
    if part == "decode":
        return _part(ops.decode(columns["seqs"], columns["kv_tokens"]), operator, ops)
    works = {"layer": ops.layer, "first": ops.first, "head": ops.head}[part](tokens)
    if operator == "logits gather":
        return None
    return _part(works, operator, ops)


def _part(works: list[Work], operator: str, ops: Operators) -> Work | None:
    """An operator's work in a layer that has it, where the roofline counts a mean layer's."""
    by_name = {work.name: work for work in works}
    wanted = _SHARES.get(operator, ((operator, 1.0),))
    found = [by_name[name].times(share) for name, share in wanted if name in by_name]
    share = _layers_with(operator, ops.shard.model)
    return _sum(found).times(1 / share) if len(found) == len(wanted) and share else None


def _sum(works: list[Work]) -> Work:
    return Work("", flops=sum(work.flops for work in works), bytes=sum(work.bytes for work in works))


def _layers_with(operator: str, model: ModelSpec) -> float:
    """The share of a model's layers that have the operator."""
    ffn, attention = model.ffn, model.attention
    dense = ffn.dense_layers / model.layers if ffn.experts else 1.0
    windowed = attention.windowed_layers / model.layers if attention.window_tokens else 0.0
    if operator in ("mlp up", "activation", "mlp down"):
        return dense
    if operator in ("router", "fused moe") or operator.startswith(("expert", "shared")):
        return 1 - dense
    if operator.endswith("window attention"):
        return windowed
    return 1 - windowed if operator in ("prefill attention", "decode attention") else 1.0


def _of_kernel(operator: str, c: Mapping[str, Floats], gpu: GpuSpec, dtype: str) -> Work | None:
    name = _known(dtype)
    if not name:
        return None
    kernels, width = kernels_of(gpu, name), max(2.0, DTYPE_BYTES[name])
    if operator == "gemm":
        return _gemm(kernels, c)
    if operator == "fused moe":
        return _experts(kernels, c)
    if OPERATOR_PARTS[operator] == "prefill":
        seen = np.where(c["window"] > 0, c["window"], np.inf)
        grown = np.clip(seen - c["context"], 0, c["chunk"])
        pairs = grown * (c["context"] + (grown + 1) / 2)
        pairs += np.where(c["chunk"] > grown, (c["chunk"] - grown) * np.minimum(seen, 2.0**40), 0)
        keys = c["chunk"] + np.minimum(c["context"], seen)
        return _attention(c, pairs * c["seqs"], keys * c["seqs"], c["chunk"] * c["seqs"], width)
    if OPERATOR_PARTS[operator] == "decode":
        seen = np.where(c["window"] > 0, c["window"] * c["seqs"], np.inf)
        keys = np.minimum(c["kv_tokens"], seen)
        return _attention(c, keys, keys, c["seqs"], width)
    return None


def _gemm(kernels: Kernels, c: Mapping[str, Floats]) -> Work:
    works = kernels.gemm("", c["tokens"], c["n"], c["k"])  # type: ignore[arg-type]
    return Work("", flops=works.flops, bytes=works.bytes)


def _experts(kernels: Kernels, c: Mapping[str, Floats]) -> Work:
    """Gated experts that tokens choose evenly."""
    rows = c["tokens"] * c["topk"]
    share = np.clip(c["topk"] / np.maximum(c["experts"], 1), 0, 1 - 1e-9)
    hit = c["experts"] * -np.expm1(c["tokens"] * np.log1p(-share))
    up = kernels.grouped_gemm("", rows, hit, 2 * c["n"], c["k"])  # type: ignore[arg-type]
    down = kernels.grouped_gemm("", rows, hit, c["k"], c["n"])  # type: ignore[arg-type]
    return _sum([up, down])


def _attention(c: Mapping[str, Floats], pairs: Floats, keys: Floats, queries: Floats, width: float) -> Work:
    heads = 2 * c["head_dim"] * width
    moved = keys * c["kv_heads"] * heads + queries * c["heads"] * heads
    return Work("", flops=4 * c["heads"] * c["head_dim"] * pairs, bytes=moved)


_AXES = tuple(name for name in WHOLE_COLUMNS if name not in ("tp", "repeats"))


@dataclass(frozen=True)
class Share:
    """What rows reach of the data sheet's peak, as shares: of FLOP/s, of bytes a second, of the nearer of both."""

    flops: float
    bandwidth: float
    roofline: float


@dataclass(frozen=True)
class OperatorView:
    """One operator of one shard (``tp`` 0: a kernel of no model) in one dtype.

    Attributes:
        operator: Its name in the profile.
        tp: The shard.
        dtype: Of its weights or activations.
        rows: Indices of its rows in the profile.
        axes: Lowest and highest value of each column that is not 0 throughout.
        seconds: The shortest and the longest time.
        spread: The median of the distance between quartiles over the time; NaN where none is told.
        gaps: Where a step of the model would lie and nothing was measured.
        median: The median row's share of the data sheet's peak; None where it is not known.
        best: The best row's.
    """

    operator: str
    tp: int
    dtype: str
    rows: npt.NDArray[np.int64]
    axes: dict[str, tuple[int, int]]
    seconds: tuple[float, float]
    spread: float
    gaps: tuple[Gap, ...]
    median: Share | None
    best: Share | None


@dataclass(frozen=True)
class ProfileView:
    """A profile, what is in it, and the work of its rows (None: the device is neither given nor in the catalog)."""

    profile: Profile
    operators: tuple[OperatorView, ...]
    work: RowWork | None


def describe_profile(profile: Profile, gpu: GpuSpec | None = None, model: ModelSpec | None = None) -> ProfileView:
    """What a profile holds, in the order of its operators, shards and dtypes.

    ``gpu`` and ``model`` are what was measured, where the profile names none that the catalog knows.
    """
    model = model or known_model(profile.metadata.model)
    work, longest = row_work(profile, gpu, model), model.max_model_len if model else None
    return ProfileView(profile, tuple(_view(profile, rows, work, longest) for rows in _groups(profile)), work)


def _groups(profile: Profile) -> Iterator[npt.NDArray[np.int64]]:
    for operator in profile.operators:
        own = np.flatnonzero(profile["operator"] == operator)
        tps, dtypes = profile["tp"][own], profile["dtype"][own]
        for tp in np.unique(tps):
            for dtype in np.unique(dtypes[tps == tp]):
                yield own[(tps == tp) & (dtypes == dtype)]


def _view(profile: Profile, rows: npt.NDArray[np.int64], work: RowWork | None, longest: int | None) -> OperatorView:
    own = profile.where(_mask(len(profile), rows))
    seconds = own["seconds"]
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = own["spread_s"] / seconds
    known = spread[np.isfinite(spread)]
    median, best = _shares(work, rows, seconds) if work is not None else (None, None)
    return OperatorView(
        operator=str(own["operator"][0]),
        tp=int(own["tp"][0]),
        dtype=str(own["dtype"][0]),
        rows=rows,
        axes={name: (int(own[name].min()), int(own[name].max())) for name in _AXES if own[name].any()},
        seconds=(float(seconds.min()), float(seconds.max())),
        spread=float(np.median(known)) if len(known) else float("nan"),
        gaps=gaps(own, longest),
        median=median,
        best=best,
    )


def _mask(n: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    mask = np.zeros(n, dtype=bool)
    mask[rows] = True
    return mask


def _shares(work: RowWork, rows: npt.NDArray[np.int64], seconds: Floats) -> tuple[Share | None, Share | None]:
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = work.min_s()[rows] / seconds
    known = np.flatnonzero(np.isfinite(shares))
    if not len(known):
        return None, None
    order = known[np.argsort(shares[known], kind="stable")]
    return tuple(  # type: ignore[return-value]
        _share(work, int(rows[one]), float(seconds[one]), float(shares[one]))
        for one in (order[len(order) // 2], order[-1])
    )


def _share(work: RowWork, row: int, seconds: float, roofline: float) -> Share:
    flops = float(work.flops[row] / seconds / work.peak_flops[row])
    return Share(flops, float(work.bytes[row] / seconds / work.bandwidth), roofline)


SHORTEST_S, LONGEST_S = 1e-8, 60.0
ABOVE_PEAK = 10


def warnings(profile: Profile) -> list[str]:
    """Notes on absurd rows: shorter than 10 ns, longer than a minute, or ten times the device's peak."""
    seconds = profile["seconds"]
    found = [
        _note(profile, seconds < SHORTEST_S, "take less than 10 ns: is the unit right?"),
        _note(profile, seconds > LONGEST_S, "take more than a minute: is the unit right?"),
    ]
    work = row_work(profile)
    if work is not None:
        with np.errstate(invalid="ignore"):
            fast = (seconds >= SHORTEST_S) & (work.min_s() > ABOVE_PEAK * seconds)
        found.append(_note(profile, fast, f"are more than {ABOVE_PEAK} times faster than the device's peak"))
    return [note for note in found if note]


def _note(profile: Profile, rows: npt.NDArray[np.bool_], what: str) -> str:
    count = int(rows.sum())
    if not count:
        return ""
    first = int(np.flatnonzero(rows)[0])
    names = ", ".join(sorted(set(profile["operator"][rows].tolist())))
    return f"{count:,} rows {what} ({names}; the first: row {first}, {profile['seconds'][first]:.3g} s)"
