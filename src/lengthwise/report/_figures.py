"""What the page's figures show: plain data, which the page's script hands to plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lengthwise.report._curves import CDFS, levels, over_time, quantile_curve
from lengthwise.report._rows import latency_unit
from lengthwise.report.result import Result

Figure = dict[str, Any]

POINTS_IN_ALL = 4000
"""A figure's points over all variants; with many variants each curve gets fewer."""

PANELS = {
    "batch": ("Batch size", "sequences in a step", ""),
    "waiting": ("Queue", "requests waiting", ""),
    "kv": ("KV cache", "share of blocks held", ".0%"),
    "output": ("Output", "tokens a second", ""),
}

PARTS = {
    "linear": "Linear layers",
    "prefill_attention": "Prefill attention",
    "decode_attention": "Decode attention",
    "head": "Head and sampling",
    "embedding": "Embedding",
    "communication": "Communication",
    "send": "Stage to stage",
    "swap": "KV swap",
    "host": "Host",
    "idle": "Idle",
}
"""Where the time went, in the order of the bars."""


def figures(results: Sequence[Result]) -> dict[str, list[Figure]]:
    """Figures by section of the page: "latency", "time" and "shares"."""
    points = max(40, min(300, POINTS_IN_ALL // len(results)))
    bins = min(150, points)
    return {
        "latency": [f for name in CDFS if (f := _cdf(results, name, points))["curves"]],
        "time": _panels(results, bins),
        "shares": _shares(results),
    }


def _cdf(results: Sequence[Result], name: str, points: int) -> Figure:
    at = levels(points)
    curves = [(i, quantile_curve(r, name, at)) for i, r in enumerate(results)]
    drawn = [(i, c) for i, c in curves if c is not None]
    shown_s = np.concatenate([c for _, c in drawn]) if drawn else np.ones(1)
    scale, unit = latency_unit(name, results)
    return {
        "id": f"cdf-{name.removesuffix('_s')}",
        "kind": "cdf",
        "title": CDFS[name],
        "unit": unit,
        "log": _wide(shown_s),
        "curves": [{"variant": i, "x": _short(c * scale), "y": _short(at)} for i, c in drawn],
        "limits": _limits(results, name, scale),
    }


def _wide(values: Any) -> bool:
    """Whether values span so much that only a logarithmic axis shows them all."""
    positive = values[values > 0]
    return len(positive) > 0 and float(positive.max()) > 20 * float(np.quantile(positive, 0.05))


def _limits(results: Sequence[Result], name: str, scale: float) -> list[float]:
    """SLO limits on this latency, each once."""
    goodputs = [r.summary.goodput for r in results]
    limits = {g.slo.limits[name] for g in goodputs if g is not None and name in g.slo.limits}
    return sorted(limit * scale for limit in limits)


def _panels(results: Sequence[Result], points: int) -> list[Figure]:
    columns = [over_time(r, points) for r in results]
    return [
        {
            "id": f"time-{key}",
            "kind": "time",
            "title": title,
            "unit": unit,
            "format": fmt,
            "curves": [
                {"variant": i, "x": _short(c["time_s"]), "y": _short(c[key])} for i, c in enumerate(columns)
            ],
        }
        for key, (title, unit, fmt) in PANELS.items()
        if any(np.isfinite(c[key]).any() for c in columns)
    ]


def _shares(results: Sequence[Result]) -> list[Figure]:
    told = [r for r in results if r.summary.hardware is not None]
    if not told:
        return []
    shares = [r.summary.hardware.time_shares for r in told if r.summary.hardware is not None]
    parts = [
        {"part": part, "label": label, "x": _short([s[part].value for s in shares])}
        for part, label in PARTS.items()
        if any(s[part].value > 0 for s in shares)
    ]
    return [{"id": "shares", "kind": "shares", "title": "", "names": [r.name for r in told], "parts": parts}]


def _short(values: Any) -> list[float | None]:
    """Numbers with five digits; what is not finite becomes null, a gap in the curve."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in np.asarray(values, float).tolist()]
