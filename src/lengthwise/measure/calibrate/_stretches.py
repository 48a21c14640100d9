"""Stretches of a run in which the engine was busy throughout: so many steps, and the seconds that they took together.

A server's counters say at two moments how many steps there were, and of what. Where the engine idled in between, the
seconds are not those of the steps. It did not where at every moment one request at least was in its hands: sent, and
as long ago as the quickest first token of the run took (by then it is through the HTTP front), and not answered yet.

A step that only computes a part of a prompt gives no token, and vLLM does not count it. Where prompts are longer than a
step some request must therefore decode at every moment. What a preempted request computes again is not counted either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibrate._counters import Counters, joined, timed_by
from lengthwise.measure.calibrate._own_counts import not_own
from lengthwise.measure.calibrate._runs import Run, until_s
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.records import RequestRecords, Status

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
LEAST_STEPS = 20
"""Of fewer steps the ends, which fall somewhere within a step, blur the mean by more than a fiftieth."""
MOST_UNSURE = 0.05
"""Share of a stretch by which its ends may be unsure, since the server took its time to answer."""


@dataclass(frozen=True)
class Stretches:
    """[m] busy stretches of one run, in order.

    Attributes:
        end_s: By the clock of the run's records.
        seconds: How long.
        steps: Steps that gave a token.
        prompts: Prompts that came through.
        prompt_tokens: Their computed tokens.
        decodes: Tokens of requests whose prompt was through before; a sequence decodes one a step.
        kv_tokens: Mean tokens of running requests, by the answers that came.
        edges: [b] upper bounds of the tokens of a step.
        counts: [m, b + 1] steps by tokens (a first token counts beside its prompt's); the last are beyond all bounds.
    """

    end_s: Floats
    seconds: Floats
    steps: Floats
    prompts: Floats
    prompt_tokens: Floats
    decodes: Floats
    kv_tokens: Floats
    edges: Floats
    counts: Floats

    def __len__(self) -> int:
        return len(self.seconds)


def stretches_of(run: Run, counters: Counters, limits: EngineLimits) -> Stretches | str:
    """The busy stretches of a run before its first held-out request was due; else in words why there are none."""
    r = run.measured.records.requests
    if why := not_own(run, counters):
        return why
    counters = joined(timed_by(counters, run.measured.tokens))
    if np.isfinite(until_s(run)) and not (counters.at_s[1:] <= until_s(run)).any():
        return "its first held-out request was due before there were two looks: hold out a run of its own"
    ends = _ends(counters, _good(run, counters, limits.max_num_batched_tokens))
    if not ends:
        return (
            f"never between two looks was it busy throughout for {LEAST_STEPS} steps, as far as requests tell"
        )
    first, last = (np.array(side) for side in zip(*ends, strict=True))

    def grew(column: Floats) -> Floats:
        return np.asarray(column[last] - column[first])

    steps, prompts, generated = grew(counters.steps), grew(counters.first), grew(counters.generated)
    upto = np.column_stack([grew(column) for column in counters.upto.T])
    return Stretches(
        end_s=counters.at_s[last],
        seconds=grew(counters.at_s),
        steps=steps,
        prompts=prompts,
        prompt_tokens=np.maximum(0.0, grew(counters.tokens) - generated),
        decodes=np.maximum(0.0, generated - prompts),
        kv_tokens=_kv_tokens(r, counters.at_s[first], counters.at_s[last]),
        edges=counters.edges,
        counts=np.diff(np.column_stack([np.zeros(len(steps)), upto, steps])),
    )


def _ends(counters: Counters, good: Mask) -> list[tuple[int, int]]:
    """Looks at which stretches begin and end: neighbours that were busy in between, as many as it takes."""
    found, first = [], 0
    for last in range(1, len(counters)):
        if not good[last - 1]:
            first = last
            continue
        seconds = counters.at_s[last] - counters.at_s[first]
        unsure = (counters.unsure_s[first] + counters.unsure_s[last]) / seconds
        if counters.steps[last] - counters.steps[first] >= LEAST_STEPS and unsure <= MOST_UNSURE:
            found.append((first, last))
            first = last
    return found


def _good(run: Run, counters: Counters, most_tokens: int) -> Mask:
    """[n - 1] whether between a look and the next only counted steps of the fitted part of the run took time."""
    begin, end = counters.at_s[:-1], counters.at_s[1:]
    short = int(run.workload.prompt_tokens.max(initial=0)) <= most_tokens
    idle = _idle(run.measured.records.requests, run.measured.client_s, decoding=not short)
    met = (idle[:, 0] < end[:, None]) & (idle[:, 1] > begin[:, None])
    fitted = (end > begin) & (end <= until_s(run))
    running = (counters.running[:-1] > 0) & (counters.running[1:] > 0)
    grew = (np.diff(counters.steps) > 0) & (np.diff(counters.generated) >= 0)
    return np.asarray(~met.any(axis=1) & fitted & running & grew & (np.diff(counters.preempted) == 0))


def _idle(r: RequestRecords, late_s: Floats | None, *, decoding: bool) -> Floats:
    """[gaps, 2] when no request of the run was surely in the engine's hands (or decoding): from, to."""
    done = (r.status == Status.FINISHED) & np.isfinite(r.first_token_s) & np.isfinite(r.finished_s)
    sent_s = (r.arrival_s + (0.0 if late_s is None else np.nan_to_num(late_s)))[done]
    quickest_s = float(np.min(r.first_token_s[done] - sent_s, initial=np.inf))
    begin = r.first_token_s[done] if decoding else sent_s + max(0.0, quickest_s)
    order = np.argsort(begin)
    free_s = np.concatenate([[-np.inf], np.maximum.accumulate(r.finished_s[done][order])])
    taken_s = np.append(begin[order], np.inf)
    return np.column_stack([free_s, taken_s])[free_s < taken_s]


def _kv_tokens(r: RequestRecords, begin_s: Floats, end_s: Floats) -> Floats:
    """[m] mean over stretches of the tokens of requests between their first token and their last."""
    done = (r.status == Status.FINISHED) & (r.finished_s > r.first_token_s)
    start, stop = r.first_token_s[done], r.finished_s[done]
    rate = (r.output_tokens[done] - 1) / (stop - start)
    begin = np.clip(begin_s[:, None], start, stop)
    end = np.clip(end_s[:, None], start, stop)
    middle = r.prompt_tokens[done] + 1 + rate * ((begin + end) / 2 - start)
    return np.asarray((middle * (end - begin)).sum(axis=1) / (end_s - begin_s))
