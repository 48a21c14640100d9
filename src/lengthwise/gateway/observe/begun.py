"""When engines began answers that came whole: nobody saw a first token, but others' tokens tell their pace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lengthwise.gateway.observe.trace import Bools, Floats, Trace

LEAST_MORE = 4
"""So many tokens after the first tell a pace."""
LEAST_SEEN = 50
"""Answers whose pace was seen, before that of others is taken from them."""
RARE = 0.01
"""Of first tokens: of those that an engine began out of order."""


def tells(trace: Trace) -> bool:
    """Whether enough answers were streamed to know what engines did, or all of them were."""
    unseen = np.isnan(trace.first_token_s)
    return not unseen.any() or int(_paced(trace).sum()) >= LEAST_SEEN


def completed(trace: Trace) -> tuple[Trace, Bools]:
    """The trace with first tokens where none was seen, estimated; and [n] where one was.

    From the end back, as many tokens at a pace that the engines had, but not before the request was sent.
    """
    seen = np.isfinite(trace.first_token_s)
    if seen.all():
        return trace, seen
    paced = _paced(trace)
    pace_s = float(np.median(_seconds(trace)[paced] / _more(trace)[paced])) if paced.any() else 0.0
    estimated = np.maximum(trace.ended_s - pace_s * _more(trace), trace.dispatched_s)
    return replace(trace, first_token_s=np.where(seen, trace.first_token_s, estimated)), seen


def joined(trace: Trace) -> int:
    """The most requests that ran at an engine when a first token was seen, but for one first token in a hundred.

    Engines begin in order: who was sent there before, and has not ended by then, runs as well.
    """
    at = [1]
    for worker in np.unique(trace.worker):
        mine = np.flatnonzero((trace.worker == worker) & trace.whole)
        mine = mine[np.argsort(trace.dispatched_s[mine], kind="stable")]
        ended_s, first_s = trace.ended_s[mine], trace.first_token_s[mine]
        at += [1 + int((ended_s[:i] > first_s[i]).sum()) for i in np.flatnonzero(np.isfinite(first_s))]
    return int(np.quantile(at, 1 - RARE, method="lower"))


def _paced(trace: Trace) -> Bools:
    return np.asarray(trace.whole & (_more(trace) >= LEAST_MORE) & (_seconds(trace) > 0))


def _more(trace: Trace) -> Floats:
    return np.asarray(trace.output_tokens - 1.0)


def _seconds(trace: Trace) -> Floats:
    """NaN where no first token was seen."""
    return trace.ended_s - trace.first_token_s
