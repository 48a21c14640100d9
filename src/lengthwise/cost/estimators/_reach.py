"""How far the measurements of a profile go."""

from __future__ import annotations

from lengthwise.cost.estimators._rows import Source
from lengthwise.cost.estimators._target import Target
from lengthwise.schema.cost_tables import Reach
from lengthwise.schema.profile import OPERATOR_PARTS, Profile


def reach_of(source: Source, target: Target) -> Reach:
    """The largest step that was measured: the smallest of the operators' own largest.

    Rows of the model's shard of the deployment's TP degree count, of all where that one was not measured;
    kernels of no model where there are none of a shard. None: nothing of the kind was measured.
    """
    shard = source.shard
    own = shard.where(shard["tp"] == target.parallel.tp)
    rows = own if len(own) else shard
    return Reach(
        tokens=_least_largest(rows, "layer", "tokens") or _least_largest(source.kernels, "gemm", "tokens"),
        seqs=_either(source, rows, "decode", "seqs"),
        chunk=_either(source, rows, "prefill", "chunk"),
        context=_either(source, rows, "prefill", "context"),
        kv_tokens=_either(source, rows, "decode", "kv_tokens"),
    )


def _either(source: Source, rows: Profile, part: str, column: str) -> int | None:
    return _least_largest(rows, part, column) or _least_largest(source.kernels, part, column)


def _least_largest(rows: Profile, part: str, column: str) -> int | None:
    of = [rows.of(operator) for operator in rows.operators if OPERATOR_PARTS[operator] == part]
    return min((int(own[column].max()) for own in of), default=None)
