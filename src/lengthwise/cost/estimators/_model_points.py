"""Points of operators of a model's shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lengthwise.cost._efficiency import Work
from lengthwise.cost._operators import Operators
from lengthwise.cost.estimators._points import Points, batched, joined, points, prefill_padding
from lengthwise.cost.estimators._target import Target, roofline_work
from lengthwise.cost.roofline import HostOverhead
from lengthwise.schema.profile import OPERATOR_PARTS, Profile

Columns = Mapping[str, Any]


def shard_points(operator: str, columns: Columns, target: Target) -> Points | None:
    """Points at columns named as a profile's, for the target's TP; None: the model has no such operator."""
    part = OPERATOR_PARTS[operator]
    if part == "prefill":
        return _prefill(operator, columns, target)
    if part == "decode":
        return _decode(operator, columns, target)
    tokens = np.asarray(columns["tokens"], dtype=np.float64)
    works = _works(part, target.operators())
    if works is None:
        return None
    work, empty = (roofline_work(works(at), operator) for at in (tokens, np.zeros_like(tokens)))
    share = target.share(operator)
    if work is None or empty is None or not share:
        return None
    given = {
        "axes": [tokens],
        "shape": [target.parallel.tp],
        "batch": tokens,
        "padded": tokens,
        "total": tokens,
        "seconds": columns.get("seconds", np.nan),
    }
    return points(operator, (work.times(1 / share), empty.times(1 / share)), given, len(tokens))


def rows_points(operator: str, rows: Profile, source: Target) -> Points | None:
    """The points of a profile's rows, of all TP degrees that they have and the model can be cut into."""
    found = []
    for tp in rows.tensor_parallel:
        if source.model.attention.heads % tp == 0:
            own = rows.where((rows["tp"] == tp) & (rows["skew"] <= 1))
            found.append(shard_points(operator, own.columns, source.with_tp(tp)))
    there = [one for one in found if one is not None and len(one)]
    return joined(there) if there else None


def _works(part: str, ops: Operators) -> Callable[[Any], list[Work]] | None:
    host = HostOverhead()
    known: dict[str, Callable[[Any], list[Work]]] = {
        "layer": ops.layer,
        "first": ops.first,
        "head": ops.head,
        "host": lambda seqs: [Work("host", latency_s=host.step_s + host.sequence_s * seqs)],
    }
    return known.get(part)


def _prefill(operator: str, columns: Columns, target: Target) -> Points | None:
    chunk, context = (np.asarray(columns[name], dtype=np.float64) for name in ("chunk", "context"))
    prompts = np.maximum(np.asarray(columns.get("seqs", 1.0), dtype=np.float64), 1.0)
    ops, share = target.operators(), target.share(operator)
    work = roofline_work(ops.prefill(chunk, context), operator)
    if work is None or not share:
        return None
    work = work.times(1 / share)
    found = points(
        operator,
        (work, prefill_padding(work, chunk, ops.kernels.curves.prefill.pad_tokens)),
        {
            "axes": [chunk, context] if (prompts == 1).all() else [prompts, chunk, context],
            "shape": [target.parallel.tp],
            "batch": prompts,
            "padded": prompts * (context + chunk),
            "total": prompts * (context + chunk),
            "seconds": columns.get("seconds", np.nan),
        },
        len(chunk),
    )
    return batched(found, prompts)


def _decode(operator: str, columns: Columns, target: Target) -> Points | None:
    seqs, kv = (np.asarray(columns[name], dtype=np.float64) for name in ("seqs", "kv_tokens"))
    ops, share = target.operators(), target.share(operator)
    work = roofline_work(ops.decode(seqs, kv), operator)
    empty = roofline_work(ops.decode(np.zeros_like(seqs), np.zeros_like(kv)), operator)
    if work is None or empty is None or not share:
        return None
    skew = np.maximum(np.asarray(columns.get("skew", 1.0), dtype=np.float64), 1.0)
    given = {
        "axes": [seqs, kv / np.maximum(seqs, 1)],
        "shape": [target.parallel.tp],
        "batch": seqs,
        "padded": kv * skew,
        "total": kv,
        "seconds": columns.get("seconds", np.nan),
    }
    return points(operator, (work.times(1 / share), empty.times(1 / share)), given, len(seqs))
