"""Predicted lengths for a complete workload, in the form that the engine reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lengthwise.predict.contract import Ints, Predictor, Prompts, with_output
from lengthwise.predict.distribution import Floats, LengthDistribution
from lengthwise.predict.in_session import earlier_tokens
from lengthwise.predict.oracle import Truthful, uniform_draws
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
    """Return the workload with predicted output lengths for each request.

    Each request gets one prediction per window: before its first token, and again after every ``window_tokens``
    generated tokens (ELIS: 50). Without ``update_predictions``, it has only the one before its first token.

    A predictor sees the prompt tokens and some columns of the workload's ``extra``, if it has them: the texts "prompt"
    and the names "model" (otherwise ``model`` names the model of all requests). By "session" and "turn", it sees the
    lengths of earlier outputs of the session, which the prompt of a later turn contains. In later windows, it also sees
    the text "output" up to the tokens generated so far. Each call predicts the requests that still run, one row per
    request. The true length decides only which requests still run, and a scheduler observes that as well. A
    ``Truthful`` predictor sees the true lengths instead. A predictor whose class has ``predicts_once = True`` predicts
    once per request; its later predictions condition the first one on the tokens so far.

    ``statistic`` names the statistic of the conditioned distribution that becomes the predicted length: "mean",
    "median", a quantile such as "q0.9", or "tail_inflated", the average of the mean and of the mean of the longest
    tenth (TIE proposes such a statistic for long requests that look short). ``seed`` is the seed of a truthful
    predictor's errors: one draw per request, the same in all windows. Raises InputError if the statistic is unknown,
    the window is not positive, or the predictor does not return one distribution per request of at most 1e10 tokens.
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
    """Return the function that computes a statistic of ``attach``. Raises InputError if the name is unknown."""
    if name == "mean":
        return lambda predicted, so_far: so_far + predicted.remaining(so_far)
    if name == "tail_inflated":
        return _tail_inflated
    found = re.fullmatch(r"q(0?\.\d+)", "q0.5" if name == "median" else name)
    if found is None:
        message = f'a statistic is "mean", "median", a quantile such as "q0.9", or "tail_inflated"; it is {name!r}'
        raise InputError(message)
    level = float(found[1])
    return lambda predicted, so_far: predicted.quantile_given(level, so_far)


def _tail_inflated(predicted: LengthDistribution, so_far: Floats) -> Floats:
    tail = np.mean([predicted.quantile_given(level, so_far) for level in _TAIL_LEVELS], axis=0)
    mean = so_far + predicted.remaining(so_far)
    return np.asarray((1 - _TAIL_WEIGHT) * mean + _TAIL_WEIGHT * np.maximum(tail, mean))


def _predictions(
    workload: Workload, predictor: Predictor | Truthful, start: Ints, window_tokens: int, seed: int, model: str | None
) -> Iterator[tuple[Ints, Ints, LengthDistribution]]:
    """Yield chunks of predictions: their rows, tokens so far, and distributions before conditioning on these tokens."""
    n = len(workload)
    earlier = None if isinstance(predictor, Truthful) else earlier_tokens(workload)
    if isinstance(predictor, Truthful):
        uniform = uniform_draws(seed, n)
        for requests, at in _spans(start, 0, n):
            so_far = (at - start[requests]) * window_tokens
            yield at, so_far, predictor.peek(workload.output_tokens[requests], so_far, uniform[requests])
    elif getattr(predictor, "predicts_once", False):
        for part in _chunks(np.arange(n)):
            predicted = _checked_prediction(
                predictor, _prompts(workload, part, model, earlier), np.zeros(len(part), np.int64)
            )
            for requests, at in _spans(start, int(part[0]), int(part[-1]) + 1):
                yield at, (at - start[requests]) * window_tokens, predicted.take(requests - part[0])
    else:
        # Window by window, so that a call has each request once: a predictor must not see repeated prompts.
        running, window = np.arange(n), 0
        while len(running):
            for part in _chunks(running):
                so_far = np.full(len(part), window * window_tokens, np.int64)
                output = _column(workload, "output", part)
                known = with_output(
                    _prompts(workload, part, model, earlier), output, workload.output_tokens[part], so_far
                )
                yield start[part] + window, so_far, _checked_prediction(predictor, known, so_far)
            window += 1
            running = running[start[running] + window < start[running + 1]]


def _checked_prediction(predictor: Predictor, prompts: Prompts, so_far: Ints) -> LengthDistribution:
    predicted: Any = predictor.predict(prompts, so_far)
    name = type(predictor).__name__
    if not isinstance(predicted, LengthDistribution) or len(predicted) != len(prompts):
        size = f" of {len(predicted)}" if hasattr(predicted, "__len__") else ""
        raise InputError(
            f"predict of {name} must return a LengthDistribution of one row per request ({len(prompts)}); it "
            f"returned {type(predicted).__name__}{size}; wrap it in lengthwise.predict.Guarded to use plain lengths"
        )
    largest = float(predicted.tokens[:, -1].max(initial=0))
    if largest > _MAX_TOKENS:
        raise InputError(
            f"predicted lengths must be at most {_MAX_TOKENS:.0e} tokens; {name} predicts {largest:.3g}; "
            "wrap it in lengthwise.predict.Guarded to replace such rows by a prior"
        )
    return predicted


def _prompts(workload: Workload, rows: Ints, model: str | None, earlier: Floats | None) -> Prompts:
    models = _column(workload, "model", rows)
    return Prompts(
        len(rows),
        text=_column(workload, "prompt", rows),
        prompt_tokens=workload.prompt_tokens[rows],
        model=[model] * len(rows) if models is None and model is not None else models,
        earlier_tokens=None if earlier is None else earlier[rows],
    )


def _column(workload: Workload, name: str, rows: Ints) -> list[str] | None:
    column: Any = workload.extra.get(name)
    return None if column is None else ["" if column[row] is None else str(column[row]) for row in rows]


def _chunks(requests: Ints) -> Iterator[Ints]:
    return (requests[first : first + _CHUNK_ROWS] for first in range(0, len(requests), _CHUNK_ROWS))


def _spans(start: Ints, first: int, end: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield about _CHUNK_ROWS rows of predictions at a time: (the request of each row, the rows)."""
    while first < end:
        last = int(np.searchsorted(start, start[first] + _CHUNK_ROWS, side="right")) - 1
        last = min(max(first + 1, last), end)
        requests = np.repeat(np.arange(first, last), np.diff(start[first : last + 1]))
        yield requests, np.arange(start[first], start[last])
        first = last
