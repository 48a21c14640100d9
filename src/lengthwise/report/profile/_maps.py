"""Where in the plane of a shard's attention points were measured, and where not."""

from __future__ import annotations

import numpy as np

from lengthwise.cost.profiles import OperatorView, ProfileView
from lengthwise.report.profile._lines import Figure, numbers
from lengthwise.schema.profile import OPERATOR_PARTS

_MOST = 1500


def map_figure(view: ProfileView, one: OperatorView) -> Figure | None:
    """Points and gaps over (chunk, context) or (sequences, mean context); None for other operators."""
    part = OPERATOR_PARTS[one.operator]
    if not one.tp or part not in ("prefill", "decode"):
        return None
    columns = {
        name: view.profile[name][one.rows].astype(float) for name in ("seqs", "chunk", "context", "kv_tokens")
    }
    x, y, axes = columns["chunk"], columns["context"], ("tokens of the chunk", "cached context, tokens")
    if part == "decode":
        x, y = columns["seqs"], np.rint(columns["kv_tokens"] / np.maximum(columns["seqs"], 1))
        axes = ("sequences", "mean context, tokens")
    places = np.unique(np.stack([x, y], axis=1), axis=0)
    if len(places) > _MOST:
        places = places[np.linspace(0, len(places) - 1, _MOST).astype(int)]
    return {
        "id": f"map-{one.operator.replace(' ', '-')}-{one.tp}-{one.dtype or 'any'}",
        "kind": "map",
        "title": f"{one.operator.capitalize()}, TP {one.tp}",
        "x": axes[0],
        "y": axes[1],
        "points": {"x": numbers(places[:, 0]), "y": numbers(places[:, 1])},
        "gaps": [[bound for _, low, high in gap.axes for bound in (low, high)] for gap in one.gaps],
    }
