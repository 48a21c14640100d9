"""How ranges, times and shares of a profile read."""

from __future__ import annotations

import math

from lengthwise.cost.profiles import OperatorView
from lengthwise.report._numbers import UNKNOWN, percent, rounded

_NAMES = {"seqs": "sequences", "kv_tokens": "KV tokens", "kv_heads": "KV heads", "head_dim": "head width"}
_SAID = (
    "tokens", "seqs", "chunk", "context", "kv_tokens", "n", "k", "heads", "kv_heads", "head_dim", "window",
    "experts", "topk", "gpus", "bytes",
)  # fmt: skip


def axes_text(view: OperatorView) -> str:
    """The ranges of an operator's axes ("chunk 16 to 2,048, context 0 to 16,384")."""
    return ", ".join(_range(_NAMES.get(name, name), *view.axes[name]) for name in _SAID if name in view.axes)


def _range(name: str, low: int, high: int) -> str:
    return f"{name} {low:,}" if low == high else f"{name} {low:,} to {high:,}"


def time_text(seconds: float) -> str:
    """A time with the unit that suits it, from microseconds on ("8.35 us")."""
    if not math.isfinite(seconds):
        return UNKNOWN
    scale, unit = (1e6, "us") if abs(seconds) < 1e-3 else (1e3, "ms") if abs(seconds) < 1 else (1.0, "s")
    return f"{rounded(seconds * scale, math.nan)[0]} {unit}"


def share_text(share: float | None) -> str:
    """A share as a percentage; what is not known is a dash."""
    return UNKNOWN if share is None else percent(share)


def shard_text(view: OperatorView) -> str:
    """Which shard an operator belongs to."""
    return f"TP {view.tp}" if view.tp else "kernel"
