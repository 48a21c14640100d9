"""Which steps of an engine's log are of requests that are fitted to.

One engine serves the runs that are held out as well, and its log tells of them all. A run's steps are those between two
moments at which nothing was under way whose prompts' tokens and decodes add up to the run's, to the token. Where
that is so at several places, or nowhere (a prefix cache, lost places, aborted requests), they are those of its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibrate._log_clock import SLACK_S, since_s, span_s, utc_s, within
from lengthwise.measure.calibrate._runs import Run, until_s
from lengthwise.measure.calibrate.iterations import Iterations
from lengthwise.schema.records import Status

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def fitted_steps(log: Iterations, runs: Sequence[Run]) -> Mask | None:
    """[m] which steps are of requests that are fitted to; None where neither tokens nor times tell any run's.

    Args:
        log: Steps, or cells of them, of which none can be told.
        runs: All that are fitted to or held out.
    """
    if (log.steps != 1).any():
        return None
    at_s = utc_s(log, runs)
    found, told = np.zeros(len(log), dtype=np.bool_), at_s is not None
    for run in runs:
        if not run.fit.any():
            continue
        own = _by_tokens(log, run, runs, at_s)
        told = told or bool(own)
        for first, last in own:
            found[first : first + _before_held(log, run, first, last)] = True
        if not own and at_s is not None:
            found |= _by_clock(run, runs, at_s)
    return found if told else None


def _by_tokens(log: Iterations, run: Run, runs: Sequence[Run], at_s: Floats | None) -> list[tuple[int, int]]:
    """First step and that behind the last, of the run and its repeats; empty where another run may be meant."""
    places, alike = _places(log, run), [other for other in runs if _sums(other) == _sums(run)]
    second_s = None if at_s is None else since_s(run, at_s)
    if second_s is not None:
        near = within(second_s, span_s(run)[0] - SLACK_S, span_s(run)[1] + SLACK_S)
        places, alike = [(a, b) for a, b in places if near[a] and near[b - 1]], [run]
    if len(places) == len(alike) == 1:
        return places
    apart = all(b <= c for (_, b), (c, _) in pairwise(places))
    whole = not any(other.held.any() for other in alike)
    return places if apart and whole and len(places) <= len(alike) else []


def _places(log: Iterations, run: Run) -> list[tuple[int, int]]:
    """All between two moments at which nothing was under way whose tokens add up to the run's."""
    r = run.measured.records.requests
    if not (r.status[np.isfinite(r.arrival_s)] == Status.FINISHED).all():
        return []
    prompts, decodes = _sums(run)
    free = np.append(np.flatnonzero((log.decode_seqs == 0) & (log.prefill_seqs > 0)), len(log))
    computed, made = _sofar(log.prefill_tokens)[free], _sofar(log.decode_seqs)[free]
    radix = made[-1] + decodes + 1
    sofar = computed * radix + made
    wanted = sofar + prompts * radix + decodes
    at = np.minimum(np.searchsorted(sofar, wanted), len(free) - 1)
    found = [(int(free[a]), int(free[at[a]])) for a in np.flatnonzero(sofar[at] == wanted)]
    if len(found) > 1:  # a long prompt's next step without others looks like a beginning, too
        found = [(a, b) for a, b in found if a == 0 or log.decode_seqs[a - 1] > 0]
    return found


def _sums(run: Run) -> tuple[int, int]:
    """Tokens of a run's prompts, and its decodes: a prompt's last step gives the first token."""
    return int(run.workload.prompt_tokens.sum()), int((run.workload.output_tokens - 1).sum())


def _sofar(each: Floats) -> Ints:
    return np.concatenate([[0], np.cumsum(np.round(each).astype(np.int64))])


def _before_held(log: Iterations, run: Run, first: int, last: int) -> int:
    """How many of a run's steps surely were over when its first held-out request was due."""
    if not run.held.any():
        return last - first
    made = np.cumsum(log.decode_seqs[first:last])
    return int(np.searchsorted(made, _decodes_by(run, until_s(run)), side="left"))


def _decodes_by(run: Run, at_s: float) -> int:
    """Tokens that clients surely had by then, first ones left out."""
    r, tokens = run.measured.records.requests, run.measured.tokens
    if tokens is not None and len(tokens.at_s) and tokens.tokens.min() >= 1:
        return int(tokens.tokens[tokens.at_s <= at_s].sum() - (r.first_token_s <= at_s).sum())
    return int((r.output_tokens[r.finished_s <= at_s] - 1).sum())


def _by_clock(run: Run, runs: Sequence[Run], at_s: Floats) -> Mask:
    """[m] steps in the run's time that cannot be of held-out requests."""
    own_s = since_s(run, at_s)
    if own_s is None:
        return np.zeros(len(at_s), dtype=np.bool_)
    begin_s, end_s = span_s(run)
    found = within(own_s, begin_s, end_s + SLACK_S)
    for other in runs:
        second_s = since_s(other, at_s) if other.held.any() else None
        if second_s is not None:
            begin_s, end_s = span_s(other)
            found &= ~within(second_s, max(begin_s, until_s(other)) - SLACK_S, end_s + SLACK_S)
    return found
