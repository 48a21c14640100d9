"""What the page's figures draw, as plain numbers: section by section, a list of figures each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lengthwise.cost.profiles import OperatorView, ProfileView
from lengthwise.report.profile._lines import Figure, line_figure, numbers
from lengthwise.report.profile._maps import map_figure
from lengthwise.schema.profile import OPERATOR_PARTS

PANELS: dict[str, tuple[str, ...]] = {
    "Matrix products": (
        "qkv projection", "output projection", "mlp up", "mlp down", "lm head", "latent projection",
        "query projection", "kv up-projection", "router", "experts up", "experts down", "fused moe",
        "shared mlp up", "shared mlp down",
    ),
    "What only moves bytes": (
        "input norm", "post-attention norm", "norms", "residual add", "rope", "kv write", "activation",
        "expert activation", "shared activation", "embedding", "final norm", "sampler", "host",
    ),
}  # fmt: skip
"""Operators over tokens that share a figure."""

KINDS = {
    "layer": "Matrix products and small kernels",
    "prefill": "Prefill attention",
    "decode": "Decode attention",
    "mixed": "Mixed attention",
    "gemm": "GEMM",
}
_GROUPS = {"first": "layer", "head": "layer"}
_SAMPLED = 250


def figures(view: ProfileView) -> dict[str, list[Figure]]:
    """Figures by section: "tokens", "attention", "kernels", "roofline" and "maps"."""
    roofline = _roofline(view)
    return {
        "tokens": list(_by_tokens(view)),
        "attention": [
            figure
            for one in view.operators
            if OPERATOR_PARTS[one.operator] in ("prefill", "decode") and (figure := line_figure(view, one))
        ],
        "kernels": [
            figure
            for one in view.operators
            if OPERATOR_PARTS[one.operator] in ("gemm", "comm", "send") or (one.tp == 0 and _moe(one))
            if (figure := line_figure(view, one))
        ],
        "roofline": [roofline] if roofline else [],
        "maps": [figure for one in view.operators if (figure := map_figure(view, one))],
    }


def _moe(one: OperatorView) -> bool:
    return one.operator == "fused moe"


def _by_tokens(view: ProfileView) -> Iterator[Figure]:
    """A figure a panel and shard, a curve an operator: medians where a place was measured again."""
    shards = sorted({(one.tp, one.dtype) for one in view.operators if one.tp > 0})
    several = len({dtype for _, dtype in shards}) > 1
    for tp, dtype in shards:
        for at, (title, names) in enumerate(PANELS.items()):
            own = [o for o in view.operators if (o.tp, o.dtype) == (tp, dtype) and o.operator in names]
            curves = [_curve(view, one) for one in sorted(own, key=lambda o: names.index(o.operator))]
            if curves:
                yield {
                    "id": f"tokens-{tp}-{dtype or 'any'}-{at}",
                    "kind": "lines",
                    "title": f"{title}, TP {tp}{f', {dtype}' if several else ''}",
                    "x": "tokens",
                    "curves": curves,
                }


def _curve(view: ProfileView, one: OperatorView) -> dict[str, Any]:
    tokens, seconds = view.profile["tokens"][one.rows], view.profile["seconds"][one.rows]
    x = np.unique(tokens)
    most = 160
    if len(x) > most:
        x = x[np.unique(np.geomspace(1, len(x), most).astype(int) - 1)]
    y = [np.median(seconds[tokens == value]) for value in x]
    return {"name": one.operator, "x": numbers(x), "y": numbers(y)}


def _roofline(view: ProfileView) -> Figure | None:
    """FLOP/s over FLOPs a byte: a point a row, by kind of operator, under the roofs of the data sheet."""
    work = view.work
    if work is None:
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        x, y = work.flops / work.bytes, work.flops / view.profile["seconds"]
    known = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
    parts = np.array([OPERATOR_PARTS[name] for name in view.profile["operator"].tolist()])
    curves = []
    for kind, title in KINDS.items():
        group = [kind, *(part for part, into in _GROUPS.items() if into == kind)]
        rows = np.flatnonzero(known & np.isin(parts, group))
        if len(rows):
            rows = rows[np.linspace(0, len(rows) - 1, min(_SAMPLED, len(rows))).astype(int)]
            curves.append({"name": title, "x": numbers(x[rows]), "y": numbers(y[rows])})
    if not curves:
        return None
    return {
        "id": "roofline",
        "kind": "roofline",
        "title": f"Rows under the roofs of the {view.profile.facts.gpu}",
        "curves": curves,
        "peaks": numbers(np.unique(work.peak_flops[known])),
        "bandwidth": work.bandwidth,
    }
