"""How far the measurements of a profile go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.cost.estimators._rows import Source
from lengthwise.cost.estimators._target import Target
from lengthwise.schema.cost_tables import Reach
from lengthwise.schema.profile import OPERATOR_PARTS, Profile


def reach_of(source: Source, target: Target) -> Reach:
    """The largest step that was measured: the smallest of the operators' own largest.

    Rows of the model's shard of the deployment's TP degree count, of all where that one was not measured;
    kernels of no model where there are none of a shard. None: nothing of the kind was measured.

    A request is as long as the longest sequence of either phase: of prompts what is cached before a chunk counts,
    of decodes the mean over the batch. Decodes of a window are cut to it, and measured at any length for that.
    """
    shard = source.shard
    own = shard.where(shard["tp"] == target.parallel.tp)
    rows = own if len(own) else shard

    def largest(part: str, value: str | Callable[[Profile], npt.NDArray[Any]]) -> int | None:
        told = _least_largest(rows, part, value)
        return _least_largest(source.kernels, part, value) if told is None else told

    tokens = _least_largest(rows, "layer", "tokens")
    lengths = (largest("prefill", _prompt_tokens), largest("decode", _sequence_tokens))
    return Reach(
        tokens=_least_largest(source.kernels, "gemm", "tokens") if tokens is None else tokens,
        seqs=largest("decode", "seqs"),
        chunk=largest("prefill", "chunk"),
        context=max((length for length in lengths if length is not None), default=None),
        kv_tokens=largest("decode", "kv_tokens"),
        prefix=largest("prefill", "context"),
    )


def _sequence_tokens(rows: Profile) -> npt.NDArray[Any]:
    """[n] Mean tokens of the sequences of decodes."""
    return np.asarray(rows["kv_tokens"] // np.maximum(rows["seqs"], 1))


def _prompt_tokens(rows: Profile) -> npt.NDArray[Any]:
    """[n] Tokens of the prompts up to the end of their chunks."""
    return np.asarray(rows["chunk"] + rows["context"])


def _least_largest(
    rows: Profile, part: str, value: str | Callable[[Profile], npt.NDArray[Any]]
) -> int | None:
    of = [rows.of(operator) for operator in rows.operators if OPERATOR_PARTS[operator] == part]
    return min(
        (int((own[value] if isinstance(value, str) else value(own)).max()) for own in of), default=None
    )
