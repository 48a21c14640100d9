"""What a vLLM server's counters said whenever it was asked during a run: the scrape that its records keep."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibration.measured_runs import Run, until_s
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.records import RequestRecords, Status, TokenTimes

Floats = npt.NDArray[np.float64]

STEPS, TOKENS = "vllm:iteration_tokens_total_count", "vllm:iteration_tokens_total_sum"
GENERATED, FIRST = "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count"
RUNNING = "vllm:num_requests_running"
NEEDED = {"at_s": "at_s", "steps": STEPS, "tokens": TOKENS, "generated": GENERATED, "first": FIRST, "running": RUNNING}
TOOK, PREEMPTED, DRAFTED = "duration_s", "vllm:num_preemptions_total", "vllm:spec_decode_num_drafts_total"
_BUCKET = re.compile(r'^vllm:iteration_tokens_total_bucket\{le="([^"]+)"\}$')


@dataclass(frozen=True)
class Counters:
    """[n] looks at a server's counters, in order.

    Attributes:
        at_s: When, by the clock of the run's records: half-way between question and answer, or when the last token came
            that was counted (``timed_by``).
        unsure_s: How far from it the moment may lie at which the server counted.
        steps: Steps that gave a token, so far.
        tokens: Tokens that were made, and those of prompts that were computed, counted when their prompt was through.
        generated: Tokens that were made, a prompt's first one included.
        first: Prompts that were through.
        running: Requests that run.
        preempted: Requests that lost their place, so far.
        edges: [b] upper bounds of the buckets below.
        upto: [n, b] steps of at most so many ``tokens``, so far.
    """

    at_s: Floats
    unsure_s: Floats
    steps: Floats
    tokens: Floats
    generated: Floats
    first: Floats
    running: Floats
    preempted: Floats
    edges: Floats
    upto: Floats

    def __len__(self) -> int:
        return len(self.at_s)

    def taken(self, rows: npt.NDArray[np.bool_]) -> Counters:
        """Some of the looks."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "edges"}
        return Counters(**{name: column[rows] for name, column in columns.items()}, edges=self.edges)


def counters_of(metrics: Mapping[str, Any]) -> Counters | str:
    """The looks that tell everything; else in words why these columns cannot be fitted to."""
    missing = [name for name in NEEDED.values() if name not in metrics]
    bounds = sorted((float(found[1]), name) for name in metrics if (found := _BUCKET.match(name)))
    if missing or not bounds:
        return f"they lack {', '.join(missing) or 'the buckets of vllm:iteration_tokens_total'}"
    if _optional(metrics, DRAFTED).max(initial=0.0) > 0:
        return "the engine drafts tokens, so that they do not tell how many requests a step decodes for"
    columns = {field: _floats(metrics[name]) for field, name in NEEDED.items()}
    columns["unsure_s"] = _optional(metrics, TOOK) / 2
    columns["at_s"] = columns["at_s"] + columns["unsure_s"]
    columns["preempted"] = _optional(metrics, PREEMPTED)
    upto = np.column_stack([_floats(metrics[name]) for _, name in bounds])
    told = np.isfinite(np.column_stack([*columns.values(), upto])).all(axis=1)
    kept = {field: column[told] for field, column in columns.items()}
    return Counters(**kept, edges=np.array([bound for bound, _ in bounds]), upto=upto[told])


def timed_by(counters: Counters, tokens: TokenTimes | None) -> Counters:
    """The looks, each at the moment when its client had the last of the tokens that were counted.

    A look falls somewhere within a step, a token comes at the end of one, later than the engine made it by as much at
    every look. Where tokens' times or numbers are not known the looks stay where they were. Before its first token a
    look says nothing, and is left out.
    """
    if tokens is None or not len(counters) or not len(tokens.at_s) or tokens.tokens.min() < 1:
        return counters
    came_s = np.repeat(tokens.at_s, tokens.tokens)
    came_s = np.sort(came_s[np.isfinite(came_s)])
    made = np.round(counters.generated - counters.generated[0]) + (came_s <= counters.at_s[0]).sum()
    known = (made >= 1) & (made <= len(came_s))
    last_s = came_s[np.clip(made, 1, len(came_s)).astype(np.int64) - 1]
    return replace(counters, at_s=last_s, unsure_s=np.zeros(len(counters))).taken(known)


def joined(counters: Counters) -> Counters:
    """Without looks that saw somebody run but no step since the look before: both fell within one step."""
    news = np.diff(counters.steps, prepend=-1.0) != 0
    return counters.taken(news | (counters.running <= 0))


def _floats(column: Any) -> Floats:
    """The column; NaN where it was not told."""
    return np.asarray(column, dtype=np.float64)


def _optional(metrics: Mapping[str, Any], name: str) -> Floats:
    """The column, 0 where it was not told."""
    if name not in metrics:
        return np.zeros(len(metrics["at_s"]))
    return np.nan_to_num(_floats(metrics[name]))


OTHERS_TOKENS = 0.02
"""Tokens that are not of the run's requests, relative to theirs: beyond that somebody else used the server."""
TWICE = 0.1
"""Steps beyond those that the run's tokens allow, relative to these: beyond that some were counted more than once."""


def not_own(run: Run, counters: Counters) -> str:
    """In words why they do not; empty where they do, as far as tokens tell."""
    if not len(counters):
        return ""
    r = run.measured.records.requests
    made, tokens, steps, lost = (
        float(column[-1] - column[0])
        for column in (counters.generated, counters.tokens, counters.steps, counters.preempted)
    )
    for what, theirs, ours in (
        ("made", made, float(r.output_tokens.sum())),
        ("computed in prompts", tokens - made, float(r.prompt_tokens.sum())),
    ):
        if theirs > ours * (1 + OTHERS_TOKENS):
            return f"the server {what} {theirs:,.0f} tokens meanwhile, of which {ours:,.0f} are of the run's requests"
    if lost == 0 and steps > (most := most_steps(r)) * (1 + TWICE):
        return (
            f"it counted {steps:,.0f} steps, where those that decode got a token of {most:,.0f}: each of several HTTP "
            "fronts (--api-server-count) counts a step in which it has a request, others used the server, or the "
            "client was late to read its answers"
        )
    return ""


def most_steps(r: RequestRecords) -> float:
    """Steps that gave a token; infinite where a request began and did not finish.

    A step gives one to every request that decodes. So from some moment on there are as many as the request gets that
    decodes then and ends last, until its end; where nobody decodes it is the step of the next first token.
    """
    begun = r.output_tokens > 0
    finished = (r.status == Status.FINISHED) & np.isfinite(r.first_token_s) & np.isfinite(r.finished_s)
    if not finished[begun].all():
        return float("inf")
    order = np.argsort(r.first_token_s[begun], kind="stable")
    columns = (r.first_token_s, r.finished_s, r.output_tokens - 1)
    waiting = list(zip(*(column[begun][order].tolist() for column in columns), strict=True))[::-1]
    steps, at_s, last = 0.0, -np.inf, (-np.inf, -np.inf, 0)
    while waiting or last[1] > at_s:
        while waiting and waiting[-1][0] <= at_s:
            last = max(last, waiting.pop(), key=lambda each: each[1])
        if last[1] > at_s:
            steps += last[2] * (last[1] - at_s) / (last[1] - last[0])
            at_s = last[1]
        elif waiting:
            steps, at_s = steps + 1, waiting[-1][0]
    return steps


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
        return f"never between two looks was it busy throughout for {LEAST_STEPS} steps, as far as requests tell"
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


def _good(run: Run, counters: Counters, max_tokens: int) -> Mask:
    """[n - 1] whether between a look and the next only counted steps of the fitted part of the run took time."""
    begin, end = counters.at_s[:-1], counters.at_s[1:]
    short = int(run.workload.prompt_tokens.max(initial=0)) <= max_tokens
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
