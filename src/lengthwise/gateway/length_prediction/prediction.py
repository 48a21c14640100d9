"""Rows of quantiles, queries to predictors, and a runner of predictors on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.request import MAX_TOKENS, LengthPrediction
from lengthwise.predict.contract import Prompts
from lengthwise.predict.distribution import LEVELS, LengthDistribution, pareto_tail
from lengthwise.predict.empirical import Constant
from lengthwise.predict.in_session import EARLIER_TURNS
from lengthwise.predict.wrappers import Guarded
from lengthwise.statistics import Floats

_MEDIAN, _P80, _P90 = (int(np.searchsorted(LEVELS, p)) for p in (0.5, 0.8, 0.9))
_TAIL = pareto_tail([1.0], LEVELS)[0]
_WIDTHS = np.diff(LEVELS, prepend=0.0, append=1.0)
_WEIGHTS: Floats = (_WIDTHS[1:] + _WIDTHS[:-1]) / 2  # [25] weights of the quantiles in the mean
STATISTICS: dict[str, Callable[[Floats], float]] = {
    "mean": lambda row: float((row * _WEIGHTS).sum()),
    "median": lambda row: float(row[_MEDIAN]),
    "p80": lambda row: float(row[_P80]),
    "p90": lambda row: float(row[_P90]),
}


@dataclass(frozen=True, slots=True)
class CorrectedPrediction(LengthPrediction):
    """A prediction with the quantiles from which it is derived."""

    raw: Floats | None = None  # [25] quantiles as the predictor returned them
    unbounded: Floats | None = None  # [25] corrected quantiles, before the limits of the request are applied
    initial_total_tokens: float = 0.0  # ``total_tokens`` as predicted before the first token


def condition(row: Floats, tokens_so_far: int) -> Floats:
    """Return the quantiles ``row`` [25] under the condition that the length is above ``tokens_so_far``."""
    if tokens_so_far <= 0:
        return row
    if tokens_so_far >= row[-1]:
        return np.asarray(np.maximum(tokens_so_far * _TAIL, tokens_so_far + 1))
    reached = float(np.interp(tokens_so_far, row, LEVELS))
    remaining = np.interp(reached + (1 - reached) * LEVELS, LEVELS, row)
    return np.maximum(remaining, tokens_so_far + 1)


MAX_CHARS = 1 << 19  # of a longer text, which could delay other requests, a predictor gets only both ends
_FALLBACK = Constant(2 * MAX_TOKENS)
_SAMPLE = (
    "Write a detailed guide about how to plan a three day trip to Rome with a small budget. Include ten tips, a list "
    "of museums, what to eat and where to stay, and explain why each of them is worth the time. "
) * 4
_WARMUP, _REPEATS = 3, 15


@dataclass(frozen=True, slots=True)
class Query:
    """Input of a predictor for one request."""

    text: str  # of the prompt
    prompt_tokens: int
    model: str
    so_far: int = 0  # generated tokens
    output: str = ""  # text of the generated tokens; "" if unknown
    earlier_tokens: tuple[int, ...] = ()  # lengths of the session's last outputs, the latest one last


@dataclass(frozen=True)
class PredictedRows:
    """Predictions for n queries."""

    rows: Floats  # [n, 25] quantiles at LEVELS
    valid: npt.NDArray[np.bool_]  # [n] whether each row is usable
    faults: dict[str, int] = field(default_factory=dict)  # numbers of unusable rows by kind of fault
    error: str | None = None  # description of the last fault


def truncate_text(text: str | None) -> str:
    """Return the text that a predictor gets: complete up to MAX_CHARS, otherwise both ends, or "" for None."""
    if text is None or len(text) <= MAX_CHARS:
        return text or ""
    return f"{text[: MAX_CHARS // 2]} {text[-MAX_CHARS // 2 :]}"


def predict_rows(predictor: Any, queries: Sequence[Query]) -> PredictedRows:
    """Run a predictor on queries and check the result. An exception or an invalid row counts as a fault."""
    n = len(queries)
    result: Any = None
    failure: Exception | None = None

    def replay_result(*_: Any) -> Any:
        if failure is not None:
            raise failure
        return result

    try:
        text, prompt_lengths, models, tokens_so_far, output = (
            [getattr(query, name) for query in queries]
            for name in ("text", "prompt_tokens", "model", "so_far", "output")
        )
        prompt_tokens = np.array(prompt_lengths, np.int64)
        prompts = Prompts(n, text, prompt_tokens, models, output if any(output) else None, _earlier_tokens(queries))
        so_far: Any = np.array(tokens_so_far, np.int64) if max(tokens_so_far, default=0) else 0
        try:
            result = predictor.predict(prompts, so_far)
        except Exception as error:  # noqa: BLE001 - any predictor may run here
            failure = error
        if isinstance(so_far, int) and _is_checked(result, n):
            return PredictedRows(result.tokens, np.ones(n, bool))
        replayed_predictor: Any = SimpleNamespace(predict=replay_result)
        rows = (guard := Guarded(replayed_predictor, _FALLBACK, MAX_TOKENS)).predict(prompts, so_far).tokens
    except Exception as error:  # noqa: BLE001 - even checking may fail, such as for lack of memory
        return PredictedRows(np.ones((n, len(LEVELS))), np.zeros(n, bool), {"raised": n}, _location(error))
    faults = {kind: count for kind, count in guard.faults_.items() if count}
    cause = guard.last_error_ and (_location(failure) if failure else "no numbers")
    return PredictedRows(rows, rows[:, 0] <= MAX_TOKENS, faults, cause)


def _earlier_tokens(queries: Sequence[Query]) -> Floats | None:
    if not any(query.earlier_tokens for query in queries):
        return None
    found = np.full((len(queries), EARLIER_TURNS), np.nan)
    for row, query in zip(found, queries, strict=True):
        if query.earlier_tokens:
            row[-len(query.earlier_tokens) :] = query.earlier_tokens
    return found


def _is_checked(value: Any, n: int) -> bool:
    """Return whether a result is a LengthDistribution, which is valid by itself, of n rows up to MAX_TOKENS."""
    return (
        isinstance(value, LengthDistribution)
        and value.levels is LEVELS
        and value.tokens.shape == (n, len(LEVELS))
        and bool((value.tokens[:, -1] <= MAX_TOKENS).all())
    )


def _location(error: BaseException) -> str:
    """Return type and place of an exception, without its message, which may contain a prompt."""
    last = extract_tb(error.__traceback__)[-1:]
    at = f" at {Path(last[0].filename).name}:{last[0].lineno}" if last else ""
    return f"{type(error).__name__}{at}"


def measure_latency_s(predictor: Any) -> float:
    """Return the least seconds of 15 predictions for a prompt of 812 bytes, after 3 others, or inf if one fails."""
    query, best_s = Query(_SAMPLE, 180, "unknown"), float("inf")
    for repeat in range(_WARMUP + _REPEATS):
        start_s = time.perf_counter()
        if not predict_rows(predictor, [query]).valid.all():
            return float("inf")
        if repeat >= _WARMUP:
            best_s = min(best_s, time.perf_counter() - start_s)
    return best_s


PendingRow = asyncio.Future[Floats | None]  # [25] quantiles, or None if there is no usable row; never an exception


class FaultCounter:
    """Counts faults by kind, and stores the last error."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self.last_error: str | None = None

    def add(self, faults: Mapping[str, int], error: str | None = None) -> None:
        """Add numbers of faults by kind, and the error if there is one."""
        self.faults.update(faults)
        if error is not None:
            self.last_error = error[:500]


def resolve(pending: Iterable[PendingRow], predicted: PredictedRows | None = None) -> None:
    """Set the result of each pending row to its predicted row, or to None if there is no valid one."""
    for index, row in enumerate(pending):
        if not row.done():
            row.set_result(predicted.rows[index] if predicted and predicted.valid[index] else None)


_MAX_BATCH = 16  # queries of a batch; others wait for the next tick, so that other tasks run in between
_QUIET_TICKS = 2  # ticks of the event loop without a new query after which a batch starts


class InlineRunner:
    """Runs a predictor on the event loop. This is fast, but nothing can stop a predictor that hangs."""

    needs_deadline = False  # whether a query needs a deadline, because its result may take long

    def __init__(self, predictor: Any, faults: FaultCounter) -> None:
        self.predictor, self.faults = predictor, faults
        self._queue: list[tuple[Query, PendingRow]] = []
        self._quiet = 0

    async def stop(self) -> None:
        """Resolve all pending queries with None."""
        resolve(row for _, row in self._queue)
        self._queue = []

    def submit(self, query: Query) -> PendingRow:
        """Queue a query. Its row is ready a few ticks of the event loop later."""
        loop = asyncio.get_running_loop()
        if not self._queue:
            loop.call_soon(self._gather)
        self._quiet = 0
        row: PendingRow = loop.create_future()
        self._queue.append((query, row))
        return row

    def _gather(self) -> None:
        if self._quiet < _QUIET_TICKS and len(self._queue) < _MAX_BATCH:
            self._quiet += 1
            asyncio.get_running_loop().call_soon(self._gather)
        else:
            self._run_batch()

    def _run_batch(self) -> None:
        batch, self._queue = self._queue[:_MAX_BATCH], self._queue[_MAX_BATCH:]
        if self._queue:
            asyncio.get_running_loop().call_soon(self._run_batch)
        batch = [pair for pair in batch if not pair[1].done()]
        if batch:
            predicted = predict_rows(self.predictor, [query for query, _ in batch])
            self.faults.add(predicted.faults, predicted.error)
            resolve([row for _, row in batch], predicted)
