"""Figures of one operator: seconds over one axis, a line for each of a few values of what else varies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.cost.profiles import OperatorView, ProfileView
from lengthwise.schema.profile import OPERATOR_PARTS, Profile

Figure = dict[str, Any]
LINES = 7
FEWEST = 3
_MOST = 120


def line_figure(view: ProfileView, one: OperatorView) -> Figure | None:
    """The figure of an operator; None where no line of it has points enough."""
    rows = view.profile.where(np.isin(np.arange(len(view.profile)), one.rows))
    rows, said = _one_shape(rows, one)
    part = OPERATOR_PARTS[one.operator]
    x, axis, lines = _AXES[part if part in _AXES else "gemm"](rows)
    curves = _curves(x, rows["seconds"], lines)
    if not curves:
        return None
    shard = f"TP {one.tp}" if one.tp else one.dtype
    return {
        "id": f"lines-{one.operator.replace(' ', '-')}-{one.tp}-{one.dtype or 'any'}",
        "kind": "lines",
        "title": f"{one.operator.capitalize()}{', ' * bool(shard)}{shard}",
        "said": said,
        "x": axis,
        "curves": curves,
    }


def _one_shape(rows: Profile, one: OperatorView) -> tuple[Profile, str]:
    """Of attention kernels of no model, those of the shape, cache and window that was measured most."""
    if one.tp or OPERATOR_PARTS[one.operator] not in ("prefill", "decode"):
        return rows, ""
    names = ("heads", "kv_heads", "head_dim", "window")
    shapes = np.stack([rows[name] for name in names], axis=1)
    found, which, counts = np.unique(shapes, axis=0, return_inverse=True, return_counts=True)
    best = int(np.flatnonzero(counts == counts.max())[-1])
    caches, many = np.unique(rows["kv_dtype"], return_counts=True)
    cache = caches[int(np.argmax(many))]
    heads, kv, width, window = found[best].tolist()
    text = (
        f"{_plural(heads, 'head')} of {width}, {kv} for keys and values, cache in {cache or 'the same dtype'}"
    )
    text += f", window {window:,}" if window else ""
    return rows.where((which.ravel() == best) & (rows["kv_dtype"] == cache)), text


Lines = tuple[npt.NDArray[Any], str, list[str]]


def _prefill(rows: Profile) -> Lines:
    if rows["context"].any():
        return rows["chunk"], "tokens of the chunk", [f"context {c:,}" for c in rows["context"].tolist()]
    return rows["chunk"], "tokens of a prompt", [_plural(n, "prompt") for n in rows["seqs"].tolist()]


def _decode(rows: Profile) -> Lines:
    mean = np.rint(rows["kv_tokens"] / np.maximum(rows["seqs"], 1)).astype(int)
    equal = rows["skew"] <= 1
    return rows["seqs"], "sequences", [
        f"context {c:,}" if same else "" for c, same in zip(mean.tolist(), equal.tolist(), strict=True)
    ]  # fmt: skip


def _bytes(rows: Profile) -> Lines:
    who = zip(rows["gpus"].tolist(), rows["backend"].tolist(), strict=True)
    return rows["bytes"], "bytes", [f"{gpus} GPUs {backend}".strip() for gpus, backend in who]


def _shapes(rows: Profile) -> Lines:
    if rows["experts"].any():
        each = (rows[name].tolist() for name in ("topk", "experts", "n", "k"))
        return rows["tokens"], "tokens", [
            f"{t} of {e}, {n:,} x {k:,}" for t, e, n, k in zip(*each, strict=True)
        ]  # fmt: skip
    pairs = zip(rows["n"].tolist(), rows["k"].tolist(), strict=True)
    return rows["tokens"], "tokens", [f"n {n:,}, k {k:,}" for n, k in pairs]


_AXES: dict[str, Callable[[Profile], Lines]] = {
    "prefill": _prefill,
    "decode": _decode,
    "comm": _bytes,
    "send": _bytes,
    "gemm": _shapes,
}


def _curves(x: npt.NDArray[Any], seconds: npt.NDArray[np.float64], lines: list[str]) -> list[dict[str, Any]]:
    """A few lines with the most points, in order of their one number, else from the fastest to the slowest."""
    names = np.array(lines, dtype=np.str_)
    found, which, counts = np.unique(names, return_inverse=True, return_counts=True)
    usable = [i for i in range(len(found)) if found[i] and counts[i] >= FEWEST]
    usable = [i for i in usable if counts[i] * 2 >= max(counts[j] for j in usable)]
    usable.sort(key=lambda i: (float(np.median(seconds[which == i])), str(found[i])))
    if len(usable) > LINES:
        usable = [usable[i] for i in np.linspace(0, len(usable) - 1, LINES).round().astype(int)]
    usable.sort(key=lambda i: _number(str(found[i])))
    return [_curve(str(found[i]), x[which == i], seconds[which == i]) for i in usable]


def _number(name: str) -> int:
    """The number in a line's name; 0 where there are several, which leaves the order as it is."""
    words = [word.replace(",", "") for word in name.split()]
    digits = [int(word) for word in words if word.isdigit()]
    return digits[0] if len(digits) == 1 else 0


def _curve(name: str, x: npt.NDArray[Any], seconds: npt.NDArray[np.float64]) -> dict[str, Any]:
    places, which = np.unique(x, return_inverse=True)
    order = np.argsort(which.ravel(), kind="stable")
    groups = np.split(seconds[order], np.cumsum(np.bincount(which.ravel()))[:-1])
    kept = np.unique(np.linspace(0, len(places) - 1, min(_MOST, len(places))).astype(int))
    return {"name": name, "x": numbers(places[kept]), "y": numbers([np.median(groups[i]) for i in kept])}


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def numbers(values: Any) -> list[float | None]:
    """Numbers with five digits; what is not finite becomes null, a gap in the curve."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in np.asarray(values, float).tolist()]
