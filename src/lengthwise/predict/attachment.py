"""Predictions for a complete workload, in the form that the engine reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lengthwise.predict.contract import Ints, Predictor, Prompts, partial
from lengthwise.predict.distribution import Floats, LengthDistribution
from lengthwise.predict.oracle import Truthful, luck_of
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Predictions, Workload

_CHUNK_ROWS = 1 << 15  # bounds the memory of predictions for any workload
_MAX_TOKENS = 1e10
_TAIL_LEVELS = np.array([0.9125, 0.9375, 0.9625, 0.9875])
_TAIL_WEIGHT = 0.5

Statistic = Callable[[LengthDistribution, Floats], Floats]
"""Maps distributions [n] and tokens so far [n] to predicted total lengths [n]."""


def attach(
    workload: Workload,
    predictor: Predictor | Truthful,
    *,
    window_tokens: int = 50,
    statistic: str = "mean",
    update_predictions: bool = True,
    seed: int = 0,
    model: str | None = None,
) -> Workload:
    """Return the workload with the predictor's lengths of each request, updated after every window of tokens.

    A predictor that is not truthful sees prompt tokens and, if the workload's ``extra`` has these columns, the texts
    "prompt" and the names "model" (else ``model`` for all). After w windows it sees the part of the text "output" that
    corresponds to w * window_tokens of its tokens (ELIS: 50). Requests that still run are predicted window by window,
    one row per request: the true length decides only which requests still run, which a scheduler observes as well. A
    predictor whose class has ``predicts_once = True`` (later predictions condition the first one on the tokens so far)
    predicts once per request. Without ``update_predictions`` there is only the prediction before the first token.

    The statistic of the distribution, given the tokens so far, is "mean"; "median"; a quantile such as "q0.9"; or
    "tail_inflated", the average of the mean and of the mean of the longest tenth (an expectation inflated by its tail,
    as TIE proposes against long requests that look short). ``seed`` is that of an oracle's errors: one draw per
    request, the same at all its windows. It raises InputError if the statistic is unknown, the window is not positive,
    or the predictor returns no distribution per request.
    """
    if window_tokens < 1:
        raise InputError(f"window_tokens must be at least 1; it is {window_tokens}")
    total_of = statistic_of(statistic)
    n = len(workload)
    rows = -(-workload.output_tokens // window_tokens) if update_predictions else np.ones(n, np.int64)
    start = np.concatenate([[0], np.cumsum(rows)])
    total, index = np.empty(start[-1]), np.empty(start[-1])
    for at, so_far, predicted in _predictions(workload, predictor, start, window_tokens, seed, model):
        total[at], index[at] = total_of(predicted, so_far.astype(float)), predicted.gittins(so_far)
    predictions = Predictions(window_tokens, start, total, index)
    return replace(workload, predicted_tokens=predictions.first_tokens, predictions=predictions)


def statistic_of(name: str) -> Statistic:
    """Return the function of a statistic, or raise InputError if there is no such statistic."""
    if name == "mean":
        return lambda predicted, so_far: so_far + predicted.remaining(so_far)
    if name == "tail_inflated":
        return _tail_inflated
    found = re.fullmatch(r"q(0?\.\d+)", "q0.5" if name == "median" else name)
    if found is None:
        raise InputError(
            f'a statistic is "mean", "median", a quantile such as "q0.9", or "tail_inflated"; it is {name!r}'
        )
    level = float(found[1])
    return lambda predicted, so_far: predicted.quantile_given(level, so_far)


def _tail_inflated(predicted: LengthDistribution, so_far: Floats) -> Floats:
    tail = np.mean([predicted.quantile_given(level, so_far) for level in _TAIL_LEVELS], axis=0)
    mean = so_far + predicted.remaining(so_far)
    return np.asarray((1 - _TAIL_WEIGHT) * mean + _TAIL_WEIGHT * np.maximum(tail, mean))


def _predictions(
    workload: Workload, predictor: Predictor | Truthful, start: Ints, window_tokens: int, seed: int, model: str | None
) -> Iterator[tuple[Ints, Ints, LengthDistribution]]:
    """Yield rows, their tokens so far, and their distributions, which may include lengths that have passed."""
    n = len(workload)
    if isinstance(predictor, Truthful):
        luck = luck_of(seed, n)
        for requests, at in _spans(start, 0, n):
            so_far = (at - start[requests]) * window_tokens
            yield at, so_far, predictor.peek(workload.output_tokens[requests], so_far, luck[requests])
    elif getattr(predictor, "predicts_once", False):
        for part in _chunks(np.arange(n)):
            predicted = _checked_prediction(predictor, _prompts(workload, part, model), np.zeros(len(part), np.int64))
            for requests, at in _spans(start, int(part[0]), int(part[-1]) + 1):
                yield at, (at - start[requests]) * window_tokens, predicted.take(requests - part[0])
    else:
        # Window by window, so that each call has a request once: a predictor must not count repeated prompts.
        running, window = np.arange(n), 0
        while len(running):
            for part in _chunks(running):
                so_far = np.full(len(part), window * window_tokens, np.int64)
                output = _column(workload, "output", part)
                known = partial(_prompts(workload, part, model), output, workload.output_tokens[part], so_far)
                yield start[part] + window, so_far, _checked_prediction(predictor, known, so_far)
            window += 1
            running = running[start[running] + window < start[running + 1]]


def _checked_prediction(predictor: Predictor, prompts: Prompts, so_far: Ints) -> LengthDistribution:
    predicted: Any = predictor.predict(prompts, so_far)
    name = type(predictor).__name__
    if not isinstance(predicted, LengthDistribution) or len(predicted) != len(prompts):
        size = f" of {len(predicted)}" if hasattr(predicted, "__len__") else ""
        raise InputError(
            f"predict of {name} must return a LengthDistribution with a row a request ({len(prompts)}); it returned "
            f"{type(predicted).__name__}{size}; wrap it in lengthwise.predict.Guarded to use plain lengths"
        )
    largest = float(predicted.tokens[:, -1].max(initial=0))
    if largest > _MAX_TOKENS:
        raise InputError(
            f"predicted lengths must be at most {_MAX_TOKENS:.0e} tokens; {name} predicts {largest:.3g}; "
            "wrap it in lengthwise.predict.Guarded to replace such rows by a prior"
        )
    return predicted


def _prompts(workload: Workload, rows: Ints, model: str | None) -> Prompts:
    models = _column(workload, "model", rows)
    return Prompts(
        len(rows),
        text=_column(workload, "prompt", rows),
        prompt_tokens=workload.prompt_tokens[rows],
        model=[model] * len(rows) if models is None and model is not None else models,
    )


def _column(workload: Workload, name: str, rows: Ints) -> list[str] | None:
    column: Any = workload.extra.get(name)
    return None if column is None else ["" if column[row] is None else str(column[row]) for row in rows]


def _chunks(requests: Ints) -> Iterator[Ints]:
    return (requests[first : first + _CHUNK_ROWS] for first in range(0, len(requests), _CHUNK_ROWS))


def _spans(start: Ints, first: int, end: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield the request of each row, and the rows, of consecutive requests with about _CHUNK_ROWS rows."""
    while first < end:
        last = int(np.searchsorted(start, start[first] + _CHUNK_ROWS, side="right")) - 1
        last = min(max(first + 1, last), end)
        requests = np.repeat(np.arange(first, last), np.diff(start[first : last + 1]))
        yield requests, np.arange(start[first], start[last])
        first = last
