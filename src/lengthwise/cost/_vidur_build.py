"""From the rows of Vidur's profiles to cost tables, by either estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lengthwise.catalog import stage_layers
from lengthwise.cost import _forest, _monotone
from lengthwise.cost._profile_report import FitReport, OperatorFit
from lengthwise.cost._vidur_rows import Samples
from lengthwise.cost._vidur_rule import (
    ALL_REDUCE,
    ALL_REDUCE_LAUNCH_MS,
    CACHE_SAVE,
    CONTEXT_STEP_TOKENS,
    DECODE,
    HIGHEST_BATCH,
    ONCE_A_LAYER,
    PREFILL,
    SECOND_NORM,
    SEND_RECV,
    VIDUR_TOKENS,
    compose,
    equal_stages,
)
from lengthwise.schema.cost_tables import CostTables, Floats, Ints, grid_axis
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.model import ModelSpec

FOLDS = 5
LARGEST_KV_TOKENS = 2**24


@dataclass(frozen=True)
class Job:
    """What to build tables for."""

    model: ModelSpec
    pp: int
    limits: EngineLimits
    max_model_len: int
    source: str


def monotone_tables(samples: Mapping[str, Samples], job: Job) -> tuple[CostTables, FitReport]:
    """Tables by the rule PER_REQUEST from curves and surfaces that never fall."""
    limits, max_model_len = job.limits, job.max_model_len
    tokens = np.arange(max(limits.max_num_batched_tokens, limits.max_num_seqs) + 1.0)
    by_tokens = {name: _seconds(_fit(s)(tokens)) for name, s in samples.items() if s.x.ndim == 1}
    nothing = np.zeros(len(tokens))
    layer = sum((by_tokens.get(n, nothing) for n in (*ONCE_A_LAYER, SECOND_NORM, CACHE_SAVE)), nothing)
    comm = 2 * (by_tokens[ALL_REDUCE] + ALL_REDUCE_LAUNCH_MS / 1000) if ALL_REDUCE in by_tokens else nothing
    comm[0] = 0.0
    chunk = grid_axis(max(limits.max_num_batched_tokens, max_model_len)).astype(np.float64)[:, None]
    context = grid_axis(max_model_len).astype(np.float64)
    cached = grid_axis(min(limits.max_num_seqs * max_model_len, LARGEST_KV_TOKENS))
    tables = CostTables(
        layer_s=layer,
        comm_s=comm,
        first_s=nothing,
        send_s=by_tokens.get(SEND_RECV, nothing),
        head_s=np.zeros(limits.max_num_seqs + 1),
        host_s=np.zeros(limits.max_num_seqs + 1),
        prefill_s=_seconds(_fit_surface(samples[PREFILL], PREFILL)(chunk, context)),
        decode_s=_seconds(_decode_ms(samples[DECODE], grid_axis(limits.max_num_seqs), cached)),
        stage_layers=np.array(stage_layers(job.model, job.pp), dtype=np.int64),
        source=job.source,
    )
    fits = tuple(_cross_validated(name, sample) for name, sample in samples.items())
    return tables, FitReport("monotone", f"{FOLDS}-fold", fits)


def _fit(samples: Samples) -> _monotone.Curve:
    return _monotone.fit_curve(samples.x, samples.ms)


def _fit_surface(samples: Samples, name: str) -> _monotone.Surface:
    return _monotone.fit_surface(samples.x, samples.ms, quadratic=name == PREFILL)


def _decode_ms(samples: Samples, seqs: Ints, cached: Ints) -> Floats:
    """[sequences, KV tokens in all]: equal contexts were measured, so the mean one stands for all."""
    mean = cached[None, :] / np.maximum(seqs[:, None], 1)
    return _fit_surface(samples, DECODE)(seqs[:, None].astype(np.float64), mean)


def _cross_validated(name: str, samples: Samples) -> OperatorFit:
    """Every row predicted from the folds that it is not in; rows of one place share a fold."""
    _, place = np.unique(samples.x, axis=0, return_inverse=True)
    fold = np.random.default_rng(0).permutation(place.max() + 1)[place.ravel()] % FOLDS
    predicted = np.empty(len(samples.ms))
    for one in range(FOLDS):
        seen, unseen = fold != one, fold == one
        if not unseen.any() or not seen.any():
            continue
        train = Samples(samples.x[seen], samples.ms[seen])
        if samples.x.ndim == 1:
            predicted[unseen] = _fit(train)(samples.x[unseen])
        else:
            predicted[unseen] = _fit_surface(train, name)(samples.x[unseen, 0], samples.x[unseen, 1])
    return _errors(name, predicted, samples.ms)


def _errors(name: str, predicted: Floats, measured: Floats) -> OperatorFit:
    timed = measured > 0
    error = np.abs(predicted[timed] / measured[timed] - 1) if timed.any() else np.zeros(1)
    return OperatorFit(name, len(measured), float(np.median(error)), float(np.quantile(error, 0.95)))


def forest_tables(samples: Mapping[str, Samples], job: Job) -> tuple[CostTables, FitReport]:
    """Tables by the rule MERGED from Vidur's forests.

    Raises:
        MissingExtraError: scikit-learn is not installed.
        ProfileError: ``pp`` does not divide the layers.
    """
    stages = equal_stages(job.model, job.pp)
    largest = max(VIDUR_TOKENS, job.limits.max_num_batched_tokens)
    tokens = np.arange(1.0, largest + 1)
    contexts = np.arange(0.0, max(VIDUR_TOKENS, job.max_model_len) + CONTEXT_STEP_TOKENS, CONTEXT_STEP_TOKENS)
    batches = np.arange(1.0, max(HIGHEST_BATCH, job.limits.max_num_seqs) + 1)
    axes = {PREFILL: (contexts, tokens**2), DECODE: (batches, contexts)}
    ops, fits = {}, []
    for name, sample in samples.items():
        x = np.stack([sample.x[:, 1], sample.x[:, 0] ** 2], axis=1) if name == PREFILL else sample.x
        forest = _forest.fit_forest(x, sample.ms)
        fits.append(_errors(name, forest.oob_prediction_, sample.ms))
        ops[name] = _with_zero(_forest.predict(forest, *axes.get(name, (tokens,))), axis=int(name == PREFILL))
    return compose(ops, job.model, stages, job.source), FitReport("random_forest", "out of bag", tuple(fits))


def _with_zero(values: Floats, axis: int) -> Floats:
    """The values with a 0 for no tokens before them."""
    width = [(1, 0) if a == axis else (0, 0) for a in range(values.ndim)]
    return np.pad(values, width)


def _seconds(milliseconds: Floats) -> Floats:
    seconds = np.asarray(milliseconds / 1000.0, dtype=np.float64)
    seconds[0] = 0.0
    return seconds
