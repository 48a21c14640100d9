"""Predictions of a whole workload, as the engine reads them."""

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

_ROWS = 1 << 15  # at a time: a chunk of predictions fits the memory whatever the workload
_MOST_TOKENS = 1e10
"""A tail of what outlived everything may be long; nothing is longer than this."""
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
    update_predictions: bool = True,
    seed: int = 0,
    model: str | None = None,
) -> Workload:
    """The same workload with what the predictor says of each request, and says again at every window.

    A predictor that is not truthful sees prompt tokens and, where the workload has such columns in
    ``extra``, the texts "prompt" and the names "model". Of an "output" it sees, after w windows, the
    share of the text that w * window_tokens are of its tokens. It is asked window by window of the
    requests that reach it, a row a request: the true length decides who still runs, which a scheduler sees
    too, and nothing more. A predictor whose class says ``asks_once = True`` (its later words are
    its first one, given the tokens so far) is asked once a request.

    Args:
        workload: The requests.
        predictor: Trained, or an oracle.
        window_tokens: Tokens between two predictions (ELIS: 50).
        statistic: What the predicted length is of the distribution, given the tokens so far: "mean";
            "median"; a quantile such as "q0.9"; "tail_inflated", half of the mean and half of the mean of
            the longest tenth (an expectation inflated by its tail, as TIE proposes against long
            requests that look short).
        update_predictions: Or only before the first token.
        seed: Of an oracle's errors; one draw a request, the same at all its windows.
        model: Who will answer, where the workload has no column that says so.

    Raises:
        InputError: The statistic is unknown, the window is not positive, or what the predictor answers is no
            distribution a request.
    """
    if window_tokens < 1:
        raise InputError(f"window_tokens must be at least 1; it is {window_tokens}")
    ask = statistic_of(statistic)
    n = len(workload)
    rows = -(-workload.output_tokens // window_tokens) if update_predictions else np.ones(n, np.int64)
    start = np.concatenate([[0], np.cumsum(rows)])
    total, index = np.empty(start[-1]), np.empty(start[-1])
    for at, so_far, posterior in _beliefs(workload, predictor, start, window_tokens, seed, model):
        total[at], index[at] = ask(posterior, so_far.astype(float)), posterior.gittins(so_far)
    predictions = Predictions(window_tokens, start, total, index)
    return replace(workload, predicted_tokens=predictions.first_tokens, predictions=predictions)


def statistic_of(name: str) -> Statistic:
    """The function of a statistic's name; InputError where there is none such."""
    if name == "mean":
        return lambda posterior, so_far: so_far + posterior.remaining(so_far)
    if name == "tail_inflated":
        return _tail_inflated
    found = _QUANTILE.fullmatch("q0.5" if name == "median" else name)
    if found is None:
        raise InputError(
            f'a statistic is "mean", "median", a quantile such as "q0.9", or "tail_inflated"; it is {name!r}'
        )
    level = float(found[1])
    return lambda posterior, so_far: posterior.quantile_given(level, so_far)


def _tail_inflated(posterior: LengthDistribution, so_far: Floats) -> Floats:
    tail = np.mean([posterior.quantile_given(level, so_far) for level in _TAIL_LEVELS], axis=0)
    mean = so_far + posterior.remaining(so_far)
    return np.asarray((1 - _TAIL_WEIGHT) * mean + _TAIL_WEIGHT * np.maximum(tail, mean))


def _beliefs(
    workload: Workload, predictor: Predictor | Truthful, start: Ints, window_tokens: int, seed: int, model: str | None
) -> Iterator[tuple[Ints, Ints, LengthDistribution]]:
    """Some rows, their tokens so far, and what the predictor says at each; what has passed may not be ruled out."""
    if isinstance(predictor, Truthful):
        luck = luck_of(seed, len(workload))
        for requests, at in _spans(start, 0, len(workload)):
            so_far = (at - start[requests]) * window_tokens
            yield at, so_far, predictor.peek(workload.output_tokens[requests], so_far, luck[requests])
    elif getattr(predictor, "predicts_once", False):
        for once in _chunks(np.arange(len(workload))):
            said = _message(predictor, _prompts(workload, once, model), np.zeros(len(once), np.int64))
            for requests, at in _spans(start, int(once[0]), int(once[-1]) + 1):
                yield at, (at - start[requests]) * window_tokens, said.take(requests - once[0])
    else:
        yield from _window_by_window(workload, predictor, start, window_tokens, model)


def _window_by_window(
    workload: Workload, predictor: Predictor, start: Ints, window_tokens: int, model: str | None
) -> Iterator[tuple[Ints, Ints, LengthDistribution]]:
    """A predictor must not count how often a prompt comes: each call has a request once."""
    running, window = np.arange(len(workload)), 0
    while len(running):
        for part in _chunks(running):
            so_far = np.full(len(part), window * window_tokens, np.int64)
            known = partial(
                _prompts(workload, part, model), _column(workload, "output", part), workload.output_tokens[part], so_far
            )
            yield start[part] + window, so_far, _message(predictor, known, so_far)
        window += 1
        running = running[start[running] + window < start[running + 1]]


def _message(predictor: Predictor, prompts: Prompts, so_far: Ints) -> LengthDistribution:
    """The answer, if it is one."""
    said: Any = predictor.predict(prompts, so_far)
    if not isinstance(said, LengthDistribution) or len(said) != len(prompts):
        came = f"{type(said).__name__} of {len(said)}" if hasattr(said, "__len__") else type(said).__name__
        raise InputError(
            f"predict of {type(predictor).__name__} must return a LengthDistribution with a row a request "
            f"({len(prompts)}); it returned {came}; wrap it in lengthwise.predict.Guarded to use plain lengths"
        )
    most = float(said.tokens[:, -1].max(initial=0))
    if most > _MOST_TOKENS:
        raise InputError(
            f"predicted lengths must be at most {_MOST_TOKENS:.0e} tokens; {type(predictor).__name__} said {most:.3g}; "
            "wrap it in lengthwise.predict.Guarded to leave such rows to a prior"
        )
    return said


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


def _chunks(requests: Ints) -> Iterator[Ints]:
    return (requests[first : first + _ROWS] for first in range(0, len(requests), _ROWS))


def _spans(start: Ints, first: int, end: int) -> Iterator[tuple[Ints, Ints]]:
    """The request of each row, and the rows, of some requests at a time: about so many rows."""
    while first < end:
        last = int(np.searchsorted(start, start[first] + _ROWS, side="right")) - 1
        last = min(max(first + 1, last), end)
        yield (
            np.repeat(np.arange(first, last), np.diff(start[first : last + 1])),
            np.arange(start[first], start[last]),
        )
        first = last
