"""What prompts in a step do to its decodes: measured in steps that hold both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lengthwise.cost.estimators._judge import Judged
from lengthwise.cost.estimators._learners import Interpolated, fit_tables
from lengthwise.cost.estimators._model_points import shard_points
from lengthwise.cost.estimators._points import Points
from lengthwise.cost.estimators._target import Target
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.profile import Profile

_FOLDS = 5
_MOST_ROWS = 4000
_LEAST_ROWS = 20
_USUAL_CHUNKS = (64, 4096)
_SKEWED = (1.5, 4.0)


@dataclass(frozen=True)
class Beside:
    """Decode attention in a step with prompts.

    Attributes:
        fitted: Seconds of the decodes beside a prompt, at points of "decode attention".
        summed: Median relative error of (prompt alone) + (decodes alone) on held-out steps with both.
        apart: The same with the decodes' own seconds beside a prompt.
    """

    fitted: Interpolated
    summed: float
    apart: float


def fit_beside(rows: Profile, prompts: Judged, decodes: Judged, target: Target) -> Beside | None:
    """What is left of steps with both when the prompt's own attention is taken away; None: too little to tell.

    Rows of chunks of 64 to 4,096 tokens count, where there are some: the usual ones of mixed steps.
    """
    rows = rows.where(rows["skew"] <= 1)
    usual = (rows["chunk"] >= _USUAL_CHUNKS[0]) & (rows["chunk"] <= _USUAL_CHUNKS[1])
    rows = rows.where(usual) if usual.sum() >= _LEAST_ROWS else rows
    rows = rows.where(np.arange(len(rows)) % (-(-max(len(rows), 1) // _MOST_ROWS)) == 0)
    if len(rows) < _LEAST_ROWS:
        return None
    prompt = shard_points("prefill attention", {"chunk": rows["chunk"], "context": rows["context"]}, target)
    asked = {"seqs": rows["seqs"], "kv_tokens": rows["kv_tokens"]}
    decode = shard_points("decode attention", asked, target)
    if prompt is None or decode is None:
        return None
    prompt_s, alone_s = prompts.fitted(prompt), decodes.fitted(decode)
    left = replace(decode, seconds=np.maximum(rows["seconds"] - prompt_s, alone_s))
    held = _held_out(left)
    summed = _median_error(prompt_s + alone_s, rows["seconds"])
    return Beside(fit_tables(left), summed, _median_error(prompt_s + held, rows["seconds"]))


def factors(beside: Beside, decodes: Judged, seqs: Floats, cached: Floats, target: Target) -> Floats:
    """[sequences, KV tokens] how many times as long decodes take beside a prompt, at least as long."""
    shape = np.broadcast_shapes(seqs.shape, cached.shape)
    asked = {
        "seqs": np.broadcast_to(seqs, shape).ravel(),
        "kv_tokens": np.broadcast_to(cached, shape).ravel(),
    }
    points = shard_points("decode attention", asked, target)
    if points is None:
        return np.ones(shape)
    ratio = beside.fitted(points) / np.maximum(decodes.fitted(points), 1e-12)
    factor = np.maximum(ratio, 1.0).reshape(shape)
    factor[0] = 1.0
    return np.ascontiguousarray(factor)


def skewed(rows: Profile, decodes: Judged, target: Target) -> tuple[int, float] | None:
    """(rows, median of measured / said - 1) of decodes of unequal lengths; None: none were measured.

    Rows of which the longest is one and a half to four times the mean count.
    """
    rows = rows.where((rows["skew"] > _SKEWED[0]) & (rows["skew"] <= _SKEWED[1]))
    if not len(rows):
        return None
    asked = {"seqs": rows["seqs"], "kv_tokens": rows["kv_tokens"]}
    points = shard_points("decode attention", asked, target)
    if points is None:
        return None
    return len(rows), float(np.median(rows["seconds"] / decodes.fitted(points))) - 1


def _held_out(left: Points) -> Floats:
    """Seconds at each place, from the others."""
    places = left.places()
    fold = np.random.default_rng(0).permutation(places.max() + 1)[places] % _FOLDS
    said = np.empty(len(left))
    for one in range(_FOLDS):
        said[fold == one] = fit_tables(left.take(fold != one))(left.take(fold == one))
    return said


def _median_error(said: Floats, measured: Floats) -> float:
    return float(np.median(np.abs(said / measured - 1)))
