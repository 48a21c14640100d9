"""Operator profiles: a page, and JSON files of a profile and of its comparison with another one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.cost.profiles import OperatorView, ProfileCheck, ProfileView
from lengthwise.report.curves import Array, Figure, json_numbers
from lengthwise.report.formatting import UNKNOWN, amount, counted, percent
from lengthwise.report.html_page import TableCell, write_page
from lengthwise.report.json_file import json_text, plain
from lengthwise.schema.profile import OPERATOR_PARTS, Profile

AXES = {  # labels of an operator's axes, in the order of the text
    "tokens": "tokens", "seqs": "sequences", "chunk": "chunk", "context": "context", "kv_tokens": "KV tokens",
    "n": "n", "k": "k", "heads": "heads", "kv_heads": "KV heads", "head_dim": "head width", "window": "window",
    "experts": "experts", "topk": "topk", "gpus": "gpus", "bytes": "bytes",
}  # fmt: skip
PANELS: dict[str, tuple[str, ...]] = {  # operators over tokens that share a figure
    "Matrix products": (
        "qkv projection", "output projection", "mlp up", "mlp down", "lm head", "latent projection",
        "query projection", "kv up-projection", "router", "experts up", "experts down", "fused moe", "moe block",
        "shared mlp up", "shared mlp down",
    ),
    "Memory-bound operators": (
        "input norm", "post-attention norm", "norms", "residual add", "rope", "kv write", "activation",
        "expert activation", "shared activation", "embedding", "final norm", "sampler", "host",
    ),
}  # fmt: skip
ROOFLINE_GROUPS = {
    "Matrix products and small kernels": ("layer", "embedding", "head"),
    "Prefill attention": ("prefill",),
    "Decode attention": ("decode",),
    "Mixed attention": ("mixed",),
    "GEMM": ("gemm",),
}
VIEW_FIELDS = ("operator", "tp", "dtype", "points", "axes", "seconds", "spread", "gaps", "median", "best")
LINES = 7  # largest number of lines of a figure
MIN_POINTS = 3  # smallest number of points of a line
MAX_CURVE_POINTS, MAX_MAP_POINTS, MAX_ROOFLINE_POINTS = 120, 1500, 250


def axes_text(view: OperatorView) -> str:
    """Return the ranges of an operator's axes ("chunk 16 to 2,048, context 0 to 16,384")."""
    ranges = [(label, *view.axes[name]) for name, label in AXES.items() if name in view.axes]
    return ", ".join(f"{label} {low:,}" + ("" if low == high else f" to {high:,}") for label, low, high in ranges)


def time_text(seconds: float) -> str:
    """Return a time in us, ms or s ("8.35 us")."""
    if not math.isfinite(seconds):
        return UNKNOWN
    scale, unit = (1e6, "us") if abs(seconds) < 1e-3 else (1e3, "ms") if abs(seconds) < 1 else (1.0, "s")
    return f"{amount(seconds * scale)} {unit}"


def share_text(share: float | None) -> str:
    """Return a share as a percentage, or a dash if it is unknown."""
    return UNKNOWN if share is None else percent(share)


def _shard(view: OperatorView) -> str:
    return f"TP {view.tp}" if view.tp else "kernel"


def write_profile_html(path: Path | str, view: ProfileView, *, heading: str = "") -> None:
    """Write a self-contained HTML page of a profile."""
    metadata = view.profile.metadata
    parts = [metadata.gpu, metadata.model or "kernels of no model", metadata.engine, f"from {metadata.source}"]
    parts += [f"measured {metadata.measured}"] if metadata.measured else []
    parts += [f"license {metadata.license}"] if metadata.license else []
    for key, value in metadata.machine.items():
        if isinstance(value, str | int | float) and 0 < len(str(value)) <= 40:
            parts.append(f"{key.replace('_', ' ')}: {value}")
    operators = [
        [
            one.operator,
            TableCell(_shard(one), one.dtype),
            TableCell(axes_text(one), css="sizes"),
            f"{len(one.rows):,}",
            f"{time_text(one.seconds[0])} to {time_text(one.seconds[1])}",
            percent(one.spread),
            share_text(one.median.roofline if one.median else None),
            share_text(one.best.roofline if one.best else None),
        ]
        for one in view.operators
    ]
    drawn = _figures(view)
    write_page(
        path,
        "profile",
        data=drawn,
        heading=heading or metadata.name or "A profile",
        metadata=[*filter(None, parts), f"{len(view.profile):,} points"],
        operators=operators,
        figures_of=drawn,
        gaps=_gap_rows(view.operators),
        notes=metadata.notes,
    )


def _gap_rows(operators: Sequence[OperatorView]) -> list[tuple[Sequence[str], str]]:
    by_gaps: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for one in operators:
        if one.gaps:
            by_gaps.setdefault(tuple(map(str, one.gaps)), {}).setdefault(one.operator, []).append(_shard(one))
    return [
        (gaps, "; ".join(f"{operator} ({', '.join(shards)})" for operator, shards in shards_of.items()))
        for gaps, shards_of in by_gaps.items()
    ]


def _figures(view: ProfileView) -> dict[str, list[Figure]]:
    attention, kernels, maps = [], [], []
    for one in view.operators:
        part = OPERATOR_PARTS[one.operator]
        is_kernel = part in ("gemm", "comm", "send") or (one.tp == 0 and one.operator == "fused moe")
        if part in ("prefill", "decode"):
            attention.append(_line_figure(view, one))
            if one.tp:
                maps.append(_map_figure(view, one))
        elif is_kernel:
            kernels.append(_line_figure(view, one))
    return {
        "tokens": _token_figures(view),
        "attention": [figure for figure in attention if figure["curves"]],
        "kernels": [figure for figure in kernels if figure["curves"]],
        "roofline": _roofline(view),
        "maps": maps,
    }


def _token_figures(view: ProfileView) -> list[Figure]:
    shards = sorted({(one.tp, one.dtype) for one in view.operators if one.tp > 0})
    has_dtypes = len({dtype for _, dtype in shards}) > 1
    made = []
    for tp, dtype in shards:
        for number, (title, names) in enumerate(PANELS.items()):
            own = [o for o in view.operators if (o.tp, o.dtype) == (tp, dtype) and o.operator in names]
            curves = []
            for one in sorted(own, key=lambda o: names.index(o.operator)):
                tokens, seconds = view.profile["tokens"][one.rows], view.profile["seconds"][one.rows]
                curves.append(_curve(one.operator, tokens, seconds, np.geomspace, 160))
            if curves:
                name = f"tokens-{tp}-{dtype or 'any'}-{number}"
                heading = f"{title}, TP {tp}{f', {dtype}' if has_dtypes else ''}"
                made.append({"id": name, "kind": "lines", "title": heading, "x": "tokens", "curves": curves})
    return made


def _curve(name: str, x: Array, seconds: Array, spacing: Any = np.linspace, points: int = MAX_CURVE_POINTS) -> Figure:
    """Return the median of ``seconds`` at up to ``points`` values of ``x``."""
    places, which = np.unique(x, return_inverse=True)
    chosen = np.arange(len(places))
    if len(places) > points:
        chosen = np.unique(spacing(1, len(places), points).astype(int) - 1)
    order = np.argsort(which.ravel(), kind="stable")
    groups = np.split(seconds[order], np.cumsum(np.bincount(which.ravel()))[:-1])
    return {"name": name, "x": json_numbers(places[chosen]), "y": json_numbers(np.median(groups[i]) for i in chosen)}


def _line_figure(view: ProfileView, one: OperatorView) -> Figure:
    """Return a figure of an operator's times over the main axis. It has no curves if no line has enough points."""
    rows, shape = _frequent_shape(view.profile.where(np.isin(np.arange(len(view.profile)), one.rows)), one)
    x, axis, names = _lines(rows, OPERATOR_PARTS[one.operator])
    found, which, counts = np.unique(np.array(names, dtype=np.str_), return_inverse=True, return_counts=True)
    usable = [i for i in range(len(found)) if found[i] and counts[i] >= MIN_POINTS]
    usable = [i for i in usable if counts[i] * 2 >= max(counts[j] for j in usable)]
    usable.sort(key=lambda i: (float(np.median(rows["seconds"][which == i])), str(found[i])))
    if len(usable) > LINES:
        usable = [usable[i] for i in np.linspace(0, len(usable) - 1, LINES).round().astype(int)]
    usable.sort(key=lambda i: _only_number(str(found[i])))
    shard = f"TP {one.tp}" if one.tp else one.dtype
    return {
        "id": f"lines-{one.operator.replace(' ', '-')}-{one.tp}-{one.dtype or 'any'}",
        "kind": "lines",
        "title": ", ".join(filter(None, (one.operator.capitalize(), shard))),
        "note": shape,
        "x": axis,
        "curves": [_curve(str(found[i]), x[which == i], rows["seconds"][which == i]) for i in usable],
    }


def _frequent_shape(rows: Profile, one: OperatorView) -> tuple[Profile, str]:
    """Return the rows of an attention kernel's most frequently measured shape, and this shape as text."""
    if one.tp or OPERATOR_PARTS[one.operator] not in ("prefill", "decode"):
        return rows, ""
    shapes = np.stack([rows[name] for name in ("heads", "kv_heads", "head_dim", "window")], axis=1)
    found, which, counts = np.unique(shapes, axis=0, return_inverse=True, return_counts=True)
    best = int(np.flatnonzero(counts == counts.max())[-1])
    caches, cache_counts = np.unique(rows["kv_dtype"], return_counts=True)
    cache = caches[int(np.argmax(cache_counts))]
    heads, kv_heads, width, window = found[best].tolist()
    text = f"{counted(heads, 'head')} of {width}, {kv_heads} for keys and values, cache in {cache or 'the same dtype'}"
    text += f", window {window:,}" if window else ""
    return rows.where((which.ravel() == best) & (rows["kv_dtype"] == cache)), text


def _lines(rows: Profile, part: str) -> tuple[npt.NDArray[Any], str, list[str]]:
    """Return (x, label of x, the curve to which each row belongs, by name). Rows with the name "" are not drawn."""

    def each(*names: str) -> Any:
        return zip(*(rows[name].tolist() for name in names), strict=True)

    if part == "prefill":
        if rows["context"].any():
            return rows["chunk"], "tokens of the chunk", [f"context {c:,}" for (c,) in each("context")]
        return rows["chunk"], "tokens of a prompt", [counted(n, "prompt") for (n,) in each("seqs")]
    if part == "decode":
        contexts = _mean_context(rows["kv_tokens"], rows["seqs"]).astype(int).tolist()
        is_equal = (rows["skew"] <= 1).tolist()
        names = [f"context {c:,}" if equal else "" for c, equal in zip(contexts, is_equal, strict=True)]
        return rows["seqs"], "sequences", names
    if part in ("comm", "send"):
        return rows["bytes"], "bytes", [f"{gpus} GPUs {backend}".strip() for gpus, backend in each("gpus", "backend")]
    if rows["experts"].any():
        shapes = each("topk", "experts", "n", "k")
        return rows["tokens"], "tokens", [f"{t} of {e}, {n:,} x {k:,}" for t, e, n, k in shapes]
    return rows["tokens"], "tokens", [f"n {n:,}, k {k:,}" for n, k in each("n", "k")]


def _mean_context(kv_tokens: Array, seqs: Array) -> Array:
    return np.asarray(np.rint(kv_tokens / np.maximum(seqs, 1)))


def _only_number(name: str) -> int:
    numbers = [int(word) for word in name.replace(",", "").split() if word.isdigit()]
    return numbers[0] if len(numbers) == 1 else 0


def _map_figure(view: ProfileView, one: OperatorView) -> Figure:
    columns = {name: view.profile[name][one.rows].astype(float) for name in ("seqs", "chunk", "context", "kv_tokens")}
    x, y, axes = columns["chunk"], columns["context"], ("tokens of the chunk", "cached context, tokens")
    if OPERATOR_PARTS[one.operator] == "decode":
        x, y = columns["seqs"], _mean_context(columns["kv_tokens"], columns["seqs"])
        axes = ("sequences", "mean context, tokens")
    places = np.unique(np.stack([x, y], axis=1), axis=0)
    if len(places) > MAX_MAP_POINTS:
        places = places[np.linspace(0, len(places) - 1, MAX_MAP_POINTS).astype(int)]
    return {
        "id": f"map-{one.operator.replace(' ', '-')}-{one.tp}-{one.dtype or 'any'}",
        "kind": "map",
        "title": f"{one.operator.capitalize()}, TP {one.tp}",
        "x": axes[0],
        "y": axes[1],
        "points": {"x": json_numbers(places[:, 0]), "y": json_numbers(places[:, 1])},
        "gaps": [[bound for _, low, high in gap.axes for bound in (low, high)] for gap in one.gaps],
    }


def _roofline(view: ProfileView) -> list[Figure]:
    work = view.work
    if work is None:
        return []
    with np.errstate(invalid="ignore", divide="ignore"):
        x, y = work.flops / work.bytes, work.flops / view.profile["seconds"]
    known = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
    parts = np.array([OPERATOR_PARTS[name] for name in view.profile["operator"].tolist()])
    curves = []
    for title, group in ROOFLINE_GROUPS.items():
        rows = np.flatnonzero(known & np.isin(parts, group))
        if len(rows):
            rows = rows[np.linspace(0, len(rows) - 1, min(MAX_ROOFLINE_POINTS, len(rows))).astype(int)]
            curves.append({"name": title, "x": json_numbers(x[rows]), "y": json_numbers(y[rows])})
    figure = {
        "id": "roofline",
        "kind": "roofline",
        "title": f"Measured rows under the roofs of the {view.profile.metadata.gpu}",
        "curves": curves,
        "peaks": json_numbers(np.unique(work.peak_flops[known])),
        "bandwidth": work.bandwidth,
    }
    return [figure] if curves else []


def profile_json(view: ProfileView) -> str:
    """Return a profile's operators as the text of a JSON file."""
    operators: list[Mapping[str, Any]] = []
    for one in view.operators:
        gaps = [{name: [low, high] for name, low, high in gap.axes} for gap in one.gaps]
        fields = vars(one) | {"points": len(one.rows), "gaps": gaps}
        operators.append({name: fields[name] for name in VIEW_FIELDS})
    described = {"metadata": view.profile.metadata, "rows": len(view.profile), "operators": operators}
    return json_text("profile_view", described)


def check_json(found: ProfileCheck) -> str:
    """Return all operators that a check compared, and how many changed, as the text of a JSON file."""
    return json_text("profile_check", {"changed": len(found.changed), **plain(found)})
