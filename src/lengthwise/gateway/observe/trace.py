"""Requests that passed, as columns: what a look back needs of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.telemetry import Row, read_all

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
ROUNDED_S = 1e-3
"""Times in a journal are rounded, each by itself."""
MAX_TOKENS = 10**9
MOST_S = 1e11
"""Of a clock: beyond it no time is told to the microsecond or so."""


@dataclass(frozen=True)
class Trace:
    """[n] columns in order of arrival, of requests that got at least one token.

    Attributes:
        arrival_s: From any start.
        prompt_tokens: At least 1.
        output_tokens: That came.
        predicted_tokens: Before the first token.
        dispatched_s: First sent to an engine.
        first_token_s: As seen by the gateway; NaN of answers that came whole.
        finished_s: As seen by the gateway.
        queued_for_s: In the gateway's queue.
        complete: Whether it ran at one engine from dispatch to end.
        worker: Number of its engine.
        model: Number of its model.
        again: What was predicted later: (tokens that had come, total).
        models: Their names.
        workers: Their names.
    """

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    predicted_tokens: Floats
    dispatched_s: Floats
    first_token_s: Floats
    finished_s: Floats
    queued_for_s: Floats
    complete: Bools
    worker: Ints
    model: Ints
    retry: tuple[tuple[tuple[int, float], ...], ...]
    models: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """First arrival to last."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    @property
    def jct_s(self) -> Floats:
        """Arrival to end, as it was."""
        return self.finished_s - self.arrival_s

    def take(self, rows: Ints) -> Trace:
        """Some of the requests, in that order."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        again = tuple(self.retry[row] for row in rows.tolist())
        return Trace(**columns, retry=again, models=self.models, workers=self.workers)


_COLUMNS = (
    "arrival_s", "prompt_tokens", "output_tokens", "predicted_tokens", "dispatched_s", "first_token_s", "finished_s",
    "queued_for_s", "complete", "worker", "model",
)  # fmt: skip


def of_rows(rows: Iterable[Row]) -> Trace:
    """The trace of rows in any order; those that got no token are left out."""
    kept = sorted((row for row in rows if _counts(row)), key=lambda row: (row.arrival_s, row.id))
    models, workers = _numbers(row.model for row in kept), _numbers(row.worker for row in kept)

    def column(name: str, kind: type = float) -> npt.NDArray[np.generic]:
        return np.array([getattr(row, name) for row in kept], dtype=kind)

    return Trace(
        arrival_s=_floats(column("arrival_s")),
        prompt_tokens=np.maximum(column("prompt_tokens", np.int64), 1).astype(np.int64),
        output_tokens=column("output_tokens", np.int64).astype(np.int64),
        predicted_tokens=_believable(_floats(column("predicted_tokens"))),
        dispatched_s=_floats(column("dispatched_s")),
        first_token_s=_floats(column("first_token_s")),
        finished_s=_floats(column("finished_s")),
        queued_for_s=_floats(column("queued_for_s")),
        complete=np.array([row.preemptions == 0 and row.failovers == 0 for row in kept], dtype=bool),
        worker=np.array([workers[row.worker] for row in kept], dtype=np.int64),
        model=np.array([models[row.model] for row in kept], dtype=np.int64),
        retry=tuple(row.retry for row in kept),
        models=tuple(models),
        workers=tuple(workers),
    )


def of_journal(path: Path | str) -> Trace:
    """The trace of a journal and of the older files beside it; a pause between two runs counts as a usual gap.

    Raises:
        InputError: It is no journal, or cannot be read.
    """
    rows: list[Row] = []
    started_s: dict[int, float] = {}
    for run, row in read_all(path):
        if _counts(row):
            rows.append(row)
            started_s[run] = min(row.arrival_s, started_s.get(run, math.inf))  # rows come in order of their ends
    return _closed_up(of_rows(rows), sorted(set(started_s.values())))


def _closed_up(trace: Trace, starts: Sequence[float]) -> Trace:
    """Without the pauses before ``starts``: all times after one are earlier by it."""
    if not starts or len(trace) < 3:
        return trace
    gaps = np.diff(trace.arrival_s)
    usual_s = float(np.median(gaps))
    columns = {name: getattr(trace, name).copy() for name in ("arrival_s", *_LATER)}
    for start_s in starts:
        i = int(np.searchsorted(trace.arrival_s, start_s))
        if 0 < i < len(trace) and gaps[i - 1] > usual_s:
            for values in columns.values():
                values[i:] -= gaps[i - 1] - usual_s
    rest = {name: getattr(trace, name) for name in _COLUMNS if name not in columns}
    return Trace(**columns, **rest, retry=trace.retry, models=trace.models, workers=trace.workers)


_LATER = ("dispatched_s", "first_token_s", "finished_s")


def _counts(row: Row) -> bool:
    """Whether it got a token, and its times are in order: nothing of a damaged journal is simulated."""
    started_s = row.dispatched_s if math.isnan(row.first_token_s) else row.first_token_s
    times = (row.arrival_s, row.dispatched_s, started_s, row.finished_s)
    in_order = all(before - ROUNDED_S <= after for before, after in pairwise(times))
    if not (
        in_order
        and abs(row.arrival_s) <= MOST_S
        and row.jct_s <= MOST_S
        and -ROUNDED_S <= row.queued_for_s <= row.jct_s + ROUNDED_S
    ):
        return False
    return 1 <= row.output_tokens <= MAX_TOKENS and row.prompt_tokens <= MAX_TOKENS


def _believable(predicted: Floats) -> Floats:
    """What a policy may be given: finite, from 1, below any limit of ours."""
    return np.clip(np.nan_to_num(predicted, nan=256.0, posinf=1e9), 1.0, 1e9)


def _floats(values: npt.NDArray[np.generic]) -> Floats:
    return values.astype(np.float64)


def _numbers(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


LEAST = 50
"""Smaller pools say nothing and are left out."""


def pools_of(trace: Trace) -> list[Trace]:
    """The parts of a trace, joined where an engine serves several models or a model runs on several engines.

    All of it where no part is large enough.
    """
    lead = list(range(len(trace.workers)))

    def leader(worker: int) -> int:
        while lead[worker] != worker:
            worker = lead[worker]
        return worker

    for model in np.unique(trace.model):
        workers = np.unique(trace.worker[trace.model == model]).tolist()
        for other in workers[1:]:
            lead[leader(other)] = leader(workers[0])
    pool = np.array([leader(worker) for worker in trace.worker.tolist()])
    parts = [trace.take(np.flatnonzero(pool == one)) for one in np.unique(pool)]
    return [part for part in parts if len(part) >= LEAST] or [trace]


LEAST_MORE = 4
"""So many tokens after the first tell a pace."""
MIN_SEEN = 50
"""Answers whose pace was seen, before that of others is taken from them."""
RARE = 0.01
"""Of first tokens: of those that an engine began out of order."""


def tells(trace: Trace) -> bool:
    """Whether enough answers were streamed to know what engines did, or all of them were."""
    unseen = np.isnan(trace.first_token_s)
    return not unseen.any() or int(_paced(trace).sum()) >= MIN_SEEN


def completed(trace: Trace) -> tuple[Trace, Bools]:
    """The trace with first tokens where none was seen, estimated; and [n] where one was.

    From the end back, as many tokens at a pace that the engines had, but not before the request was sent.
    """
    seen = np.isfinite(trace.first_token_s)
    if seen.all():
        return trace, seen
    paced = _paced(trace)
    pace_s = float(np.median(_seconds(trace)[paced] / _more(trace)[paced])) if paced.any() else 0.0
    estimated = np.maximum(trace.finished_s - pace_s * _more(trace), trace.dispatched_s)
    return replace(trace, first_token_s=np.where(seen, trace.first_token_s, estimated)), seen


def joined(trace: Trace) -> int:
    """The most requests that ran at an engine when a first token was seen, but for one first token in a hundred.

    Engines begin in order: who was sent there before, and has not ended by then, runs as well.
    """
    at = [1]
    for worker in np.unique(trace.worker):
        mine = np.flatnonzero((trace.worker == worker) & trace.complete)
        mine = mine[np.argsort(trace.dispatched_s[mine], kind="stable")]
        finished_s, first_s = trace.finished_s[mine], trace.first_token_s[mine]
        at += [1 + int((finished_s[:i] > first_s[i]).sum()) for i in np.flatnonzero(np.isfinite(first_s))]
    return int(np.quantile(at, 1 - RARE, method="lower"))


def _paced(trace: Trace) -> Bools:
    return np.asarray(trace.complete & (_more(trace) >= LEAST_MORE) & (_seconds(trace) > 0))


def _more(trace: Trace) -> Floats:
    return np.asarray(trace.output_tokens - 1.0)


def _seconds(trace: Trace) -> Floats:
    """NaN where no first token was seen."""
    return trace.finished_s - trace.first_token_s
