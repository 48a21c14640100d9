"""What engines do with requests, fitted to what was seen: seconds a step, and how many requests run at once.

A step takes ``step_s + seq_s x (sequences) + prompt_s x (prompt tokens in it)``. Summed over the steps from a
request's first token to its end, with n its further tokens, K the tokens that all requests at its engine got
meanwhile and P the prompt tokens that were computed meanwhile:

    end - first token            = step_s n + seq_s K + prompt_s P
    first token - sent to engine = front_s + steps (step_s + seq_s x (running)) + prompt_s x (its prompt)

of answers whose first token was seen, the latter where a seat was free; steps is 1, its own, and where others ran 1.5:
half of one is waited for in the mean. All four are one problem of least relative errors with coefficients from 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lengthwise.gateway.observe.begun import LEAST_MORE, completed, joined
from lengthwise.gateway.observe.trace import Bools, Floats, Ints, Trace

FULL_SHARE = 1e-3
"""So much of the time at least that many requests ran at once: the seats."""
NOBODY_WAITS = 0.02
"""Of all JCT; where less is waited for, no limit of the engines was met."""
NO_LIMIT = 4096
ROUNDS = 30
"""Of least squares, each weighed by the one before."""
EXACT = 0.02
"""Relative errors below it weigh as their squares, others as they are: a stall must not count as its square."""


@dataclass(frozen=True)
class Service:
    """A pool of like engines.

    Attributes:
        step_s: Of any step.
        seq_s: More for each sequence in it.
        prompt_s: More for each prompt token in it.
        front_s: On the way to the engine and back.
        seats: Requests that ran at once at an engine, where that was a limit; else None.
        engines: How many served at a time: names of engines that came and went one after the other are one.
        waited_share: Of all JCT, before a seat was free.
        error: Median relative error of the seconds from first token to end.
    """

    step_s: float
    seq_s: float
    prompt_s: float
    front_s: float
    seats: int | None
    engines: int
    waited_share: float
    error: float


def fit(trace: Trace) -> Service:
    """The service of a trace whose engines all serve the same."""
    met = joined(trace)
    trace, seen = completed(trace)
    seats = seats_of(trace) if seen.all() else met
    found = _found(trace)
    a, a_s = _decoding(trace, seen)
    b, b_s = _starting(trace, found, seats, seen)
    coefficients = _least_deviations(np.vstack([a, b]), np.concatenate([a_s, b_s]))
    step_s, seq_s, prompt_s, front_s = (float(x) for x in coefficients)
    error = float(np.median(np.abs(a @ coefficients / a_s - 1))) if len(a_s) else math.nan
    running = np.minimum(found + 1, seats)
    start_s = front_s + _steps(found) * (step_s + seq_s * running) + prompt_s * trace.prompt_tokens
    late_s = np.maximum(trace.first_token_s - trace.dispatched_s - start_s, 0.0) * (found >= seats)
    share = float((trace.waited_s + late_s).sum() / max(trace.jct_s.sum(), 1e-12))
    limit = seats if share >= NOBODY_WAITS else None
    return Service(max(step_s, 1e-9), seq_s, prompt_s, front_s, limit, engines_of(trace), share, error)


def seats_of(trace: Trace) -> int:
    """The most requests that an engine ran at once for a noticeable share of its busy time."""
    most = 1
    for worker in np.unique(trace.worker):
        mine = (trace.worker == worker) & trace.whole & (trace.ended_s > trace.first_token_s)
        most = max(most, _usual_most(trace.first_token_s[mine], trace.ended_s[mine]))
    return most


def engines_of(trace: Trace) -> int:
    """The engines that were given requests when one was sent, each from its first to its last: the median."""
    given = np.zeros(len(trace), np.int64)
    for worker in np.unique(trace.worker):
        sent_s = trace.dispatched_s[trace.worker == worker]
        given += (trace.dispatched_s >= sent_s.min()) & (trace.dispatched_s <= sent_s.max())
    return max(1, round(float(np.median(given)))) if len(given) else 1


def _usual_most(from_s: Floats, to_s: Floats) -> int:
    times = np.concatenate([from_s, to_s])
    steps = np.concatenate([np.ones(len(from_s)), -np.ones(len(to_s))])
    order = np.lexsort((steps, times))
    there, lasts = np.cumsum(steps[order])[:-1], np.diff(times[order])
    if not len(there):
        return 1
    held = np.bincount(there.astype(np.int64), weights=lasts)
    held[0] = 0.0
    at_least = np.cumsum(held[::-1])[::-1]
    return max(1, int(np.flatnonzero(at_least >= FULL_SHARE * max(at_least[0], 1e-12))[-1]))


def _found(trace: Trace) -> Ints:
    """[n] requests at the engine that each one was sent to, when it was sent."""
    found = np.zeros(len(trace), np.int64)
    for worker in np.unique(trace.worker):
        mine = np.flatnonzero(trace.worker == worker)
        sent, ended = np.sort(trace.dispatched_s[mine]), np.sort(trace.ended_s[mine])
        at = trace.dispatched_s[mine]
        before = np.searchsorted(sent, at, side="left")
        found[mine] = np.maximum(before - np.searchsorted(ended, at, side="right"), 0)
    return found


def _decoding(trace: Trace, seen: Bools) -> tuple[Floats, Floats]:
    """Rows (n, K, P, 0) and seconds from first token to end, of requests that ran through."""
    rows, seconds = [], []
    for worker in np.unique(trace.worker):
        there = np.flatnonzero(trace.worker == worker)
        from_s, to_s = trace.first_token_s[there], trace.ended_s[there]
        more = trace.output_tokens[there] - 1
        good = (trace.whole & seen)[there] & (more >= LEAST_MORE) & (to_s > from_s)
        tokens = _grown(from_s, to_s, more.astype(float))
        order = np.argsort(from_s, kind="stable")
        prompts = np.concatenate([[0.0], np.cumsum(trace.prompt_tokens[there][order])])
        firsts = from_s[order]
        computed = (
            prompts[np.searchsorted(firsts, to_s, "right")]
            - prompts[np.searchsorted(firsts, from_s, "right")]
        )
        rows.append(np.column_stack([more, tokens, computed, np.zeros(len(there))])[good])
        seconds.append((to_s - from_s)[good])
    return np.vstack(rows).astype(float), np.concatenate(seconds)


def _grown(from_s: Floats, to_s: Floats, tokens: Floats) -> Floats:
    """[n] tokens that all got from ``from_s`` to ``to_s``, each at its own even pace."""
    lasts = np.maximum(to_s - from_s, 1e-9)
    times = np.concatenate([from_s, from_s + lasts])
    slopes = np.concatenate([tokens / lasts, -tokens / lasts])
    order = np.argsort(times, kind="stable")
    at, pace = times[order], np.cumsum(slopes[order])
    grown = np.concatenate([[0.0], np.cumsum(pace[:-1] * np.diff(at))])
    return np.asarray(np.interp(from_s + lasts, at, grown) - np.interp(from_s, at, grown))


def _starting(trace: Trace, found: Ints, seats: int, seen: Bools) -> tuple[Floats, Floats]:
    """Rows (1.5, 1.5 x running, prompt, 1) and seconds to the first token, where a seat was free."""
    seconds = trace.first_token_s - trace.dispatched_s
    good = (found < seats) & trace.whole & seen & (seconds > 0)
    steps = _steps(found)
    rows = np.column_stack([steps, steps * (found + 1), trace.prompt_tokens, np.ones(len(trace))])
    return rows[good].astype(float), seconds[good]


def _steps(found: Ints) -> Floats:
    """Until the first token: its own step, and half of another's where others run."""
    return np.where(found > 0, 1.5, 1.0)


def _least_deviations(rows: Floats, seconds: Floats) -> Floats:
    """Coefficients from 0, of least absolute errors relative to what is fitted.

    Relative to what was seen, tokens that came in a bunch (a few microseconds for all of them) would weigh most
    and pull the fit to 0; squared, stalls would. Hence half of the requests decide, whatever the others show.
    """
    if not len(seconds):
        return np.array([1e-3, 0.0, 0.0, 0.0])
    from scipy.optimize import nnls

    size = np.maximum(np.abs(rows).max(axis=0), 1e-12)
    solved, scale, weight = np.zeros(4), np.full(len(rows), float(np.median(seconds))), np.ones(len(rows))
    for _ in range(ROUNDS):
        by = weight / scale
        solved = nnls(rows / size * by[:, None], seconds * by)[0] / size
        fitted = rows @ solved
        scale = np.maximum(fitted, max(float(np.quantile(fitted, 0.1)), 1e-9))
        weight = 1 / np.sqrt(np.maximum(np.abs(fitted - seconds) / scale, EXACT))
    return np.asarray(solved)
