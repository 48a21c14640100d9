"""Predicted lengths as rows of quantiles, predictor queries, and predictors on the event loop."""

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

from lengthwise.gateway.request import MAX_TOKENS, Floats, LengthPrediction
from lengthwise.predict.contract import Prompts
from lengthwise.predict.distribution import LEVELS, LengthDistribution, pareto_tail
from lengthwise.predict.empirical import Constant
from lengthwise.predict.wrappers import Guarded

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
    """Prediction with its origin."""

    raw: Floats | None = None  # [25] before correction, without limits
    complete: Floats | None = None  # [25] after correction, without limits
    first_tokens: float = 0.0  # the statistic before the first token


def condition(row: Floats, tokens_so_far: int) -> Floats:
    """Return [25] quantiles of the lengths above ``tokens_so_far``, as ``LengthDistribution.given`` for one row."""
    if tokens_so_far <= 0:
        return row
    if tokens_so_far >= row[-1]:
        return np.asarray(np.maximum(tokens_so_far * _TAIL, tokens_so_far + 1))
    reached = float(np.interp(tokens_so_far, row, LEVELS))
    remaining = np.interp(reached + (1 - reached) * LEVELS, LEVELS, row)
    return np.maximum(remaining, tokens_so_far + 1)


MAX_CHARS = 1 << 19  # of a longer text both ends are shown to the predictor, so that it cannot delay other requests
_FALLBACK = Constant(2 * MAX_TOKENS)
_SAMPLE = (
    "Write a detailed guide about how to plan a three day trip to Rome with a small budget. Include ten tips, a list "
    "of museums, what to eat and where to stay, and explain why each of them is worth the time. "
) * 4
_WARMUP, _REPEATS = 3, 15


@dataclass(frozen=True, slots=True)
class Query:
    """Input of a predictor for one request; ``output`` is the text of the ``so_far`` tokens, "" if unknown."""

    text: str
    prompt_tokens: int
    model: str
    so_far: int = 0
    output: str = ""


@dataclass(frozen=True)
class PredictedRows:
    """Quantiles [n, 25] at LEVELS for n queries; only rows with ``valid`` [n] are usable, ``faults`` counts others."""

    rows: Floats
    valid: npt.NDArray[np.bool_]
    faults: dict[str, int] = field(default_factory=dict)
    error: str | None = None


def truncate_text(text: str | None) -> str:
    """Return the text as a predictor gets it; "" without one."""
    if text is None or len(text) <= MAX_CHARS:
        return text or ""
    return f"{text[: MAX_CHARS // 2]} {text[-MAX_CHARS // 2 :]}"


def predict_rows(predictor: Any, queries: Sequence[Query]) -> PredictedRows:
    """Return a predictor's rows, each checked; an exception or an invalid result counts as a fault."""
    n = len(queries)
    value: Any = None
    failure: Exception | None = None

    def repeat(*_: Any) -> Any:
        if failure is not None:
            raise failure
        return value

    try:
        text, prompt_lengths, models, ages, output = (
            [getattr(query, name) for query in queries]
            for name in ("text", "prompt_tokens", "model", "so_far", "output")
        )
        prompt_tokens = np.array(prompt_lengths, np.int64)
        prompts = Prompts(n, text, prompt_tokens, models, output if any(output) else None)
        so_far: Any = np.array(ages, np.int64) if max(ages, default=0) else 0
        try:
            value = predictor.predict(prompts, so_far)
        except Exception as error:  # noqa: BLE001 - any predictor may run here
            failure = error
        if isinstance(so_far, int) and _is_checked(value, n):
            return PredictedRows(value.tokens, np.ones(n, bool))
        outcome: Any = SimpleNamespace(predict=repeat)
        rows = (guard := Guarded(outcome, _FALLBACK, MAX_TOKENS)).predict(prompts, so_far).tokens
    except Exception as error:  # noqa: BLE001 - even checking may fail, such as for lack of memory
        return PredictedRows(np.ones((n, len(LEVELS))), np.zeros(n, bool), {"raised": n}, _location(error))
    faults = {kind: count for kind, count in guard.faults_.items() if count}
    cause = guard.last_error_ and (_location(failure) if failure else "no numbers")
    return PredictedRows(rows, rows[:, 0] <= MAX_TOKENS, faults, cause)


def _is_checked(value: Any, n: int) -> bool:
    """Return whether a result is a checked distribution within MAX_TOKENS, which needs no guard."""
    return (
        isinstance(value, LengthDistribution)
        and value.levels is LEVELS
        and value.tokens.shape == (n, len(LEVELS))
        and bool((value.tokens[:, -1] <= MAX_TOKENS).all())
    )


def _location(error: BaseException) -> str:
    """Return the type and place of an exception, without its message, which may contain a prompt."""
    last = extract_tb(error.__traceback__)[-1:]
    at = f" at {Path(last[0].filename).name}:{last[0].lineno}" if last else ""
    return f"{type(error).__name__}{at}"


def measure_latency_s(predictor: Any) -> float:
    """Return the seconds of a warm predictor for one prompt of about 700 bytes; inf if it fails."""
    query, best_s = Query(_SAMPLE, 180, "unknown"), float("inf")
    for repeat in range(_WARMUP + _REPEATS):
        start_s = time.perf_counter()
        if not predict_rows(predictor, [query]).valid.all():
            return float("inf")
        if repeat >= _WARMUP:
            best_s = min(best_s, time.perf_counter() - start_s)
    return best_s


PendingRow = asyncio.Future[Floats | None]  # [25] quantiles, or None without a usable row; never an exception


class FaultCounter:
    """Faults by kind, and the last error."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self.last_error: str | None = None

    def add(self, faults: Mapping[str, int], error: str | None = None) -> None:
        """Add counts of faults."""
        self.faults.update(faults)
        if error is not None:
            self.last_error = error[:500]


def resolve(pending: Iterable[PendingRow], predicted: PredictedRows | None = None) -> None:
    """Give pending rows their results; None without any."""
    for index, row in enumerate(pending):
        if not row.done():
            row.set_result(predicted.rows[index] if predicted and predicted.valid[index] else None)


_MAX_BATCH = 16  # queries of one batch; more wait for the next tick of the loop, so that other tasks run in between
_QUIET_TICKS = 2  # ticks of the loop without a query, after which the batch starts


class InlineRunner:
    """Run a predictor on the event loop: fast and trusted, because nothing can stop one that hangs."""

    waits = False
    """Whether a result needs a deadline."""

    def __init__(self, predictor: Any, faults: FaultCounter) -> None:
        self.predictor, self.faults = predictor, faults
        self._queue: list[tuple[Query, PendingRow]] = []
        self._quiet = 0

    async def stop(self) -> None:
        """Resolve all waiting queries without a result."""
        resolve(row for _, row in self._queue)
        self._queue = []

    def submit(self, query: Query) -> PendingRow:
        """Start a prediction, which is ready in this tick of the loop or soon after."""
        loop = asyncio.get_running_loop()
        if not self._queue:
            loop.call_soon(self._gather)
        self._quiet = 0
        row: PendingRow = loop.create_future()
        self._queue.append((query, row))
        return row

    def _gather(self) -> None:
        """Start the batch when no more queries come, or it is full."""
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
