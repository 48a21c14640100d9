"""Predictions of a whole workload, as the engine reads them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lengthwise.predict.contract import Ints, Predictor, Prompts, partial
from lengthwise.predict.distribution import Floats, LengthDistribution
from lengthwise.predict.oracle import Truthful, luck_of
from lengthwise.schema.errors import InputError
from lengthwise.schema.prediction import Predictions
from lengthwise.schema.workload import Workload

_ROWS = 1 << 15  # at a time: a chunk of predictions fits the memory whatever the workload
_QUANTILE = re.compile(r"q(0?\.\d+)")
_TAIL_LEVELS = np.array([0.9125, 0.9375, 0.9625, 0.9875])
_TAIL_WEIGHT = 0.5

Statistic = Callable[[LengthDistribution, Floats], Floats]
"""Of beliefs [n] and tokens so far [n], the predicted whole lengths [n]."""


def attach(
    workload: Workload,
    predictor: Predictor | Truthful,
    *,
    window_tokens: int = 50,
    statistic: str = "mean",
    repredict: bool = True,
    seed: int = 0,
    model: str | None = None,
) -> Workload:
    """The same workload with what the predictor says of each request, and says again at every window.

    A predictor that is not truthful sees prompt tokens and, where the workload has such columns in
    ``extra``, the texts "prompt" and the names "model". Of an "output" it sees, after w windows, the
    share of the text that w * window_tokens are of its tokens. The true length decides how many
    rows a request has, nothing more. A predictor whose class says ``asks_once = True`` (its later words are
    its first one, given the tokens so far) is asked once a request.

    Args:
        workload: The requests.
        predictor: Trained, or an oracle.
        window_tokens: Tokens between two predictions (ELIS: 50).
        statistic: What the predicted length is of the distribution, given the tokens so far: "mean";
            "median"; a quantile such as "q0.9"; "tail_inflated", half of the mean and half of the mean of
            the longest tenth (an expectation inflated by its tail, as TIE proposes against long
            requests that look short).
        repredict: Or only before the first token.
        seed: Of an oracle's errors; one draw a request, the same at all its windows.
        model: Who will answer, where the workload has no column that says so.

    Raises:
        InputError: The statistic is unknown, the window is not positive, or the predictor cannot be used.
    """
    if window_tokens < 1:
        raise InputError(f"window_tokens must be at least 1; it is {window_tokens}")
    ask = statistic_of(statistic)
    n = len(workload)
    rows = -(-workload.output_tokens // window_tokens) if repredict else np.ones(n, np.int64)
    start = np.concatenate([[0], np.cumsum(rows)])
    total, index = np.empty(start[-1]), np.empty(start[-1])
    luck = luck_of(seed, n)
    for first, last in _spans(start):
        requests = np.repeat(np.arange(first, last), rows[first:last])
        at = np.arange(start[first], start[last])
        so_far = (at - start[requests]) * window_tokens
        belief = _belief(workload, predictor, requests, so_far, luck, model)
        total[at], index[at] = ask(belief, so_far.astype(float)), belief.gittins(so_far)
    predictions = Predictions(window_tokens, start, total, index)
    return replace(workload, predicted_tokens=predictions.first_tokens, predictions=predictions)


def statistic_of(name: str) -> Statistic:
    """The function of a statistic's name; InputError where there is none such."""
    if name == "mean":
        return lambda belief, so_far: so_far + belief.remaining(so_far)
    if name == "tail_inflated":
        return _tail_inflated
    found = _QUANTILE.fullmatch("q0.5" if name == "median" else name)
    if found is None:
        raise InputError(
            f'a statistic is "mean", "median", a quantile such as "q0.9", or "tail_inflated"; it is {name!r}'
        )
    level = float(found[1])
    return lambda belief, so_far: belief.quantile_given(level, so_far)


def _tail_inflated(belief: LengthDistribution, so_far: Floats) -> Floats:
    tail = np.mean([belief.quantile_given(level, so_far) for level in _TAIL_LEVELS], axis=0)
    mean = so_far + belief.remaining(so_far)
    return np.asarray((1 - _TAIL_WEIGHT) * mean + _TAIL_WEIGHT * np.maximum(tail, mean))


def _belief(
    workload: Workload,
    predictor: Predictor | Truthful,
    requests: Ints,
    so_far: Ints,
    luck: Floats,
    model: str | None,
) -> LengthDistribution:
    """What the predictor says at each row; what has passed may not be ruled out yet."""
    if isinstance(predictor, Truthful):
        return predictor.peek(workload.output_tokens[requests], so_far, luck[requests])
    if getattr(predictor, "asks_once", False):
        once, back = np.unique(requests, return_inverse=True)
        return predictor.predict(_prompts(workload, once, model), 0).take(back)
    known = partial(
        _prompts(workload, requests, model),
        _column(workload, "output", requests),
        workload.output_tokens[requests],
        so_far,
    )
    return predictor.predict(known, so_far)


def _prompts(workload: Workload, rows: Ints, model: str | None) -> Prompts:
    named = _column(workload, "model", rows)
    return Prompts(
        len(rows),
        text=_column(workload, "prompt", rows),
        prompt_tokens=workload.prompt_tokens[rows],
        model=[model] * len(rows) if named is None and model is not None else named,
    )


def _column(workload: Workload, name: str, rows: Ints) -> list[str] | None:
    column: Any = workload.extra.get(name)
    return None if column is None else ["" if column[row] is None else str(column[row]) for row in rows]


def _spans(start: Ints) -> list[tuple[int, int]]:
    """Requests first to last - 1 of each chunk: about so many rows, at least one request."""
    spans, first = [], 0
    while first < len(start) - 1:
        last = int(np.searchsorted(start, start[first] + _ROWS, side="right")) - 1
        spans.append((first, max(first + 1, last)))
        first = spans[-1][1]
    return spans
