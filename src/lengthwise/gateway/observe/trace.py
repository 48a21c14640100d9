"""Columns of requests that have ended, the input of gain estimates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.telemetry import PrefixKey, Row, read_all
from lengthwise.statistics import Floats, Ints

Bools = npt.NDArray[np.bool_]
_ROUNDING_S = 1e-3  # tolerance of the order of times, which a journal rounds
_MAX_TOKENS = 10**9
_MAX_S = 1e11  # beyond it a double does not resolve microseconds


class Context(NamedTuple):
    """Session, prefixes and tenant of a request, and reports of its engine about the KV cache."""

    session: int  # hash of its name; 0: none
    prefix: tuple[PrefixKey, ...]
    cached_tokens: float  # cached prompt tokens; NaN: not reported
    kv_tokens: int  # size of the worker's KV cache; 0: not reported
    tenant: str = ""
    priority: int = 0  # priority class


@dataclass(frozen=True)
class Trace:
    """Requests with at least one output token, as columns [n] in order of arrival. Times start at an arbitrary zero."""

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    predicted_tokens: Floats  # as predicted before the first token
    dispatched_s: Floats  # first dispatch
    first_token_s: Floats  # NaN for responses in a single chunk
    finished_s: Floats
    queued_for_s: Floats
    is_uninterrupted: Bools  # whether there was no preemption and no failover; retries before output do not count
    worker: Ints  # index of ``workers``
    model: Ints  # index of ``models``
    repredictions: tuple[tuple[tuple[int, float], ...], ...]  # (tokens so far, total)
    contexts: tuple[Context, ...]
    models: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Time from the first arrival to the last one."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    @property
    def jct_s(self) -> Floats:
        """Observed time from arrival to finish."""
        return self.finished_s - self.arrival_s

    @property
    def decode_s(self) -> Floats:
        """Time from first token to finish, or NaN for responses in a single chunk."""
        return self.finished_s - self.first_token_s

    @property
    def decode_tokens(self) -> Floats:
        """Number of tokens after the first one."""
        return np.asarray(self.output_tokens - 1.0)

    def take(self, rows: Ints) -> Trace:
        """Return some of the requests, in the given order."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        numbers = rows.tolist()
        return replace(
            self,
            **columns,
            repredictions=tuple(self.repredictions[row] for row in numbers),
            contexts=tuple(self.contexts[row] for row in numbers),
        )


_COLUMNS = (
    "arrival_s", "prompt_tokens", "output_tokens", "predicted_tokens", "dispatched_s", "first_token_s", "finished_s",
    "queued_for_s", "is_uninterrupted", "worker", "model",
)  # fmt: skip


def of_rows(rows: Iterable[Row]) -> Trace:
    """Return rows as a trace. Rows without tokens or with invalid times are left out."""
    rows = sorted((row for row in rows if _is_valid(row)), key=lambda row: (row.arrival_s, row.id))
    models, workers = (
        {name: number for number, name in enumerate(dict.fromkeys(names))}
        for names in ([row.model for row in rows], [row.worker for row in rows])
    )
    times = ("arrival_s", "dispatched_s", "first_token_s", "finished_s", "queued_for_s")
    predicted = np.array([row.predicted_tokens for row in rows], np.float64)
    return Trace(
        **{name: np.array([getattr(row, name) for row in rows], np.float64) for name in times},
        prompt_tokens=np.maximum(np.array([row.prompt_tokens for row in rows], np.int64), 1),
        output_tokens=np.array([row.output_tokens for row in rows], np.int64),
        predicted_tokens=np.clip(np.nan_to_num(predicted, nan=256.0, posinf=1e9), 1.0, 1e9),  # must be finite
        is_uninterrupted=np.array([row.preemptions == 0 and row.failovers == 0 for row in rows], dtype=bool),
        worker=np.array([workers[row.worker] for row in rows], dtype=np.int64),
        model=np.array([models[row.model] for row in rows], dtype=np.int64),
        repredictions=tuple(row.repredictions for row in rows),
        contexts=tuple(
            Context(row.session, row.prefix, row.cached_tokens, row.kv_tokens, row.tenant, row.priority) for row in rows
        ),
        models=tuple(models),
        workers=tuple(workers),
    )


def of_journal(path: Path | str) -> Trace:
    """Return the requests of a journal and its older files. A pause between two runs is reduced to the median gap."""
    rows: list[Row] = []
    started_s: dict[int, float] = {}
    for run, row in read_all(path):
        if _is_valid(row):
            rows.append(row)
            started_s[run] = min(row.arrival_s, started_s.get(run, math.inf))  # rows come in order of finish
    return _without_pauses(of_rows(rows), sorted(set(started_s.values())))


def _without_pauses(trace: Trace, starts: Sequence[float]) -> Trace:
    if not starts or len(trace) < 3:
        return trace
    gaps = np.diff(trace.arrival_s)
    median_s = float(np.median(gaps))
    names = ("arrival_s", "dispatched_s", "first_token_s", "finished_s")
    columns = {name: getattr(trace, name).copy() for name in names}
    for start_s in starts:
        i = int(np.searchsorted(trace.arrival_s, start_s))
        if 0 < i < len(trace) and gaps[i - 1] > median_s:
            for values in columns.values():
                values[i:] -= gaps[i - 1] - median_s
    return replace(trace, **columns)


def _is_valid(row: Row) -> bool:
    started_s = row.dispatched_s if math.isnan(row.first_token_s) else row.first_token_s
    times = (row.arrival_s, row.dispatched_s, started_s, row.finished_s)
    return (
        all(before - _ROUNDING_S <= after for before, after in pairwise(times))
        and abs(row.arrival_s) <= _MAX_S
        and row.jct_s <= _MAX_S
        and -_ROUNDING_S <= row.queued_for_s <= row.jct_s + _ROUNDING_S
        and 1 <= row.output_tokens <= _MAX_TOKENS
        and row.prompt_tokens <= _MAX_TOKENS
    )


MIN_POOL = 50  # requests of the smallest pool that counts


def pools_of(trace: Trace) -> list[Trace]:
    """Split a trace into pools that share no worker and no model, without pools of fewer than MIN_POOL requests.

    If all pools are smaller, return the unsplit trace.
    """
    if not len(trace):
        return [trace]
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(trace.workers) + len(trace.models)
    edges = (np.ones(len(trace)), (trace.worker, trace.model + len(trace.workers)))
    _, labels = connected_components(coo_array(edges, shape=(n, n)), directed=False)
    pool = labels[trace.worker]
    parts = [trace.take(np.flatnonzero(pool == label)) for label in dict.fromkeys(pool.tolist())]
    return [part for part in parts if len(part) >= MIN_POOL] or [trace]


MIN_DECODE_TOKENS = 4  # tokens after the first that suffice to measure the time per token
MIN_STREAMED = 50  # streamed responses that suffice to estimate the others' time per token
_RARE = 0.01  # share of first tokens that engines may produce out of order


def is_measurable(trace: Trace) -> bool:
    """Return whether all responses were streamed, or at least MIN_STREAMED of enough tokens to measure the speed."""
    return not np.isnan(trace.first_token_s).any() or int(_is_paced(trace).sum()) >= MIN_STREAMED


def with_first_tokens(trace: Trace) -> tuple[Trace, Bools]:
    """Return the trace with missing first tokens estimated, and whether each one was observed ([n])."""
    is_observed = np.isfinite(trace.first_token_s)
    if is_observed.all():
        return trace, is_observed
    paced = _is_paced(trace)
    token_s = float(np.median(trace.decode_s[paced] / trace.decode_tokens[paced])) if paced.any() else 0.0
    estimated = np.maximum(trace.finished_s - token_s * trace.decode_tokens, trace.dispatched_s)
    return replace(trace, first_token_s=np.where(is_observed, trace.first_token_s, estimated)), is_observed


def max_concurrency_at_first_tokens(trace: Trace) -> int:
    """Return the largest number of requests at a worker at the first token of one of them, without the top 1 %."""
    counts = [1]  # engines start requests in order of dispatch, so that earlier unfinished ones run as well
    for worker in np.unique(trace.worker):
        rows = np.flatnonzero((trace.worker == worker) & trace.is_uninterrupted)
        rows = rows[np.argsort(trace.dispatched_s[rows], kind="stable")]
        finished_s, first_s = trace.finished_s[rows], trace.first_token_s[rows]
        counts += [1 + int((finished_s[:i] > first_s[i]).sum()) for i in np.flatnonzero(np.isfinite(first_s))]
    return int(np.quantile(counts, 1 - _RARE, method="lower"))


def _is_paced(trace: Trace) -> Bools:
    return np.asarray(trace.is_uninterrupted & (trace.decode_tokens >= MIN_DECODE_TOKENS) & (trace.decode_s > 0))
