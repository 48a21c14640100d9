"""Busy periods of a vLLM server: steps and tokens between scrapes of its counters during a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from lengthwise.measure.calibration.measured_runs import Mask, Run, until_s
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.records import Floats, RequestRecords, Status, TokenTimes

NEEDED = {
    "at_s": "at_s",
    "steps": "vllm:iteration_tokens_total_count",
    "tokens": "vllm:iteration_tokens_total_sum",
    "generated": "vllm:generation_tokens_total",
    "first": "vllm:time_to_first_token_seconds_count",
    "running": "vllm:num_requests_running",
}
DURATION, PREEMPTED, DRAFTS = "took_s", "vllm:num_preemptions_total", "vllm:spec_decode_num_drafts_total"
_BUCKET = re.compile(r'^vllm:iteration_tokens_total_bucket\{le="([^"]+)"\}$')


@dataclass(frozen=True)
class Counters:
    """[n] scrapes of a server's counters, in order; counts are totals so far."""

    at_s: Floats  # by the records' clock: the middle of the scrape, or the last counted token's time (``timed_by``)
    uncertainty_s: Floats
    steps: Floats  # that produced a token
    tokens: Floats  # generated, and of prompts whose last chunk is computed
    generated: Floats  # tokens, first ones included
    first: Floats
    running: Floats
    preempted: Floats
    edges: Floats  # [b] upper bounds of the buckets of ``cumulative``
    cumulative: Floats  # [n, b] steps of at most so many ``tokens``

    def __len__(self) -> int:
        return len(self.at_s)

    def taken(self, rows: Mask) -> Counters:
        """Return the scrapes of these rows."""
        columns = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "edges"}
        return Counters(**columns, edges=self.edges)


def counters_of(metrics: Mapping[str, Any]) -> Counters | str:
    """Return the scrapes that hold all counters; else a sentence on why these columns are unusable."""

    def optional(name: str) -> Floats:
        return np.nan_to_num(np.asarray(metrics[name], np.float64)) if name in metrics else np.zeros(scrapes)

    missing = [name for name in NEEDED.values() if name not in metrics]
    bounds = sorted((float(found[1]), name) for name in metrics if (found := _BUCKET.match(name)))
    if missing or not bounds:
        return f"they lack {', '.join(missing) or 'the buckets of vllm:iteration_tokens_total'}"
    scrapes = len(metrics["at_s"])
    if optional(DRAFTS).max(initial=0.0) > 0:
        return "the engine drafts tokens, so that they do not tell how many requests a step decodes for"
    columns = {field: np.asarray(metrics[name], np.float64) for field, name in NEEDED.items()}
    columns["uncertainty_s"] = optional(DURATION) / 2
    columns["at_s"] = columns["at_s"] + columns["uncertainty_s"]
    columns["preempted"] = optional(PREEMPTED)
    columns["cumulative"] = np.column_stack([np.asarray(metrics[name], np.float64) for _, name in bounds])
    complete = np.isfinite(np.column_stack(list(columns.values()))).all(axis=1)
    return Counters(**{k: c[complete] for k, c in columns.items()}, edges=np.array([bound for bound, _ in bounds]))


def timed_by(counters: Counters, tokens: TokenTimes | None) -> Counters:
    """Return the scrapes, if tokens have times and counts, at those of the last counted token."""
    if tokens is None or not len(counters) or not len(tokens.at_s) or tokens.tokens.min() < 1:
        return counters
    # A scrape falls somewhere within a step; tokens arrive at its end, always later by about the same.
    received_s = np.repeat(tokens.at_s, tokens.tokens)
    received_s = np.sort(received_s[np.isfinite(received_s)])
    count = np.round(counters.generated - counters.generated[0]) + (received_s <= counters.at_s[0]).sum()
    known = (count >= 1) & (count <= len(received_s))
    last_s = received_s[np.clip(count, 1, len(received_s)).astype(np.int64) - 1]
    return replace(counters, at_s=last_s, uncertainty_s=np.zeros(len(counters))).taken(known)


FOREIGN_TOKENS = 0.02  # tokens beyond the run's own, as a share of them, that show that other clients used the server
EXTRA_STEPS = 0.1  # share of steps beyond those that the run's tokens allow: some were counted repeatedly


def foreign_load(run: Run, counters: Counters) -> str:
    """Return why the counters include more than the run's requests; empty if tokens show nothing of the kind."""
    if not len(counters):
        return ""
    r = run.measured.records.requests
    columns = (counters.generated, counters.tokens, counters.steps, counters.preempted)
    generated, tokens, steps, preempted = (float(column[-1] - column[0]) for column in columns)
    for verb, counted, own in (
        ("made", generated, float(r.output_tokens.sum())),
        ("computed in prompts", tokens - generated, float(r.prompt_tokens.sum())),
    ):
        if counted > own * (1 + FOREIGN_TOKENS):
            return f"the server {verb} {counted:,.0f} tokens meanwhile, of which {own:,.0f} are of the run's requests"
    if preempted == 0 and steps > (limit := max_steps(r)) * (1 + EXTRA_STEPS):
        return (
            f"it counted {steps:,.0f} steps, where those that decode got a token of {limit:,.0f}: each of several HTTP "
            "fronts (--api-server-count) counts a step in which it has a request, others used the server, or the "
            "client was late to read its answers"
        )
    return ""


def max_steps(r: RequestRecords) -> float:
    """Return an upper bound on steps that produced a token; infinite where a request started and did not finish."""
    # A step gives one token to every decoding request. From some moment on there are hence as many steps as the request
    # that finishes last gets tokens, until it finishes; while none decodes, the next first token is a step.
    started = r.output_tokens > 0
    finished = (r.status == Status.FINISHED) & np.isfinite(r.first_token_s) & np.isfinite(r.finished_s)
    if not finished[started].all():
        return float("inf")
    order = np.argsort(r.first_token_s[started], kind="stable")
    columns = (r.first_token_s, r.finished_s, r.output_tokens - 1)
    waiting = list(zip(*(column[started][order].tolist() for column in columns), strict=True))[::-1]
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


MIN_STEPS = 20  # the ends of a period fall somewhere within a step, which blurs the mean of 20 steps by a fiftieth
MAX_UNCERTAINTY = 0.05  # share of a period by which its ends may be uncertain because the server answered slowly


@dataclass(frozen=True)
class BusyPeriods:
    """[m] busy periods of one run, in order."""

    end_s: Floats
    seconds: Floats
    steps: Floats  # that produced a token
    prompts: Floats  # computed ones
    prompt_tokens: Floats
    decodes: Floats  # tokens of requests whose prompt was computed before: one a sequence and step
    kv_tokens: Floats  # mean tokens of running requests, by the responses received
    edges: Floats  # [b] upper bounds of the tokens of a step
    counts: Floats  # [m, b + 1] steps by tokens; the last are beyond all bounds

    def __len__(self) -> int:
        return len(self.seconds)


def busy_periods_of(run: Run, counters: Counters, limits: EngineLimits) -> BusyPeriods | str:
    """Return a run's busy periods before its first held-out request; else a sentence on why there are none."""
    r = run.measured.records.requests
    if reason := foreign_load(run, counters):
        return reason
    counters = timed_by(counters, run.measured.tokens)
    # Running requests but no step since the last scrape: both scrapes fell within one step.
    counters = counters.taken((np.diff(counters.steps, prepend=-1.0) != 0) | (counters.running <= 0))
    if np.isfinite(until_s(run)) and not (counters.at_s[1:] <= until_s(run)).any():
        return "its first held-out request was due before there were two looks: hold out a run of its own"
    busy = _busy(run, counters, limits.max_num_batched_tokens)
    ends, start = [], 0
    for end in range(1, len(counters)):
        if not busy[end - 1]:
            start = end
            continue
        uncertainty = counters.uncertainty_s[start] + counters.uncertainty_s[end]
        share = uncertainty / (counters.at_s[end] - counters.at_s[start])
        if counters.steps[end] - counters.steps[start] >= MIN_STEPS and share <= MAX_UNCERTAINTY:
            ends.append((start, end))
            start = end
    if not ends:
        return f"never between two looks was it busy throughout for {MIN_STEPS} steps, as far as requests tell"
    first, last = (np.array(side) for side in zip(*ends, strict=True))

    def increase(column: Floats) -> Floats:
        return np.asarray(column[last] - column[first])

    steps, prompts, generated = increase(counters.steps), increase(counters.first), increase(counters.generated)
    cumulative = np.column_stack([increase(column) for column in counters.cumulative.T])
    return BusyPeriods(
        end_s=counters.at_s[last],
        seconds=increase(counters.at_s),
        steps=steps,
        prompts=prompts,
        prompt_tokens=np.maximum(0.0, increase(counters.tokens) - generated),
        decodes=np.maximum(0.0, generated - prompts),
        kv_tokens=_kv_tokens(r, counters.at_s[first], counters.at_s[last]),
        edges=counters.edges,
        counts=np.diff(np.column_stack([np.zeros(len(steps)), cumulative, steps])),
    )


def _busy(run: Run, counters: Counters, max_tokens: int) -> Mask:
    """Return [n - 1] whether only counted steps of the fitted part of the run took time between two scrapes."""
    start, end = counters.at_s[:-1], counters.at_s[1:]
    r, late_s = run.measured.records.requests, run.measured.client_s
    done = (r.status == Status.FINISHED) & np.isfinite(r.first_token_s) & np.isfinite(r.finished_s)
    if int(run.workload.prompt_tokens.max(initial=0)) <= max_tokens:
        sent_s = (r.arrival_s + (0.0 if late_s is None else np.nan_to_num(late_s)))[done]
        fastest_s = float(np.min(r.first_token_s[done] - sent_s, initial=np.inf))
        engine_s = sent_s + max(0.0, fastest_s)
    else:  # a chunk that does not finish its prompt is not counted: only decoding requests are certain steps
        engine_s = r.first_token_s[done]
    order = np.argsort(engine_s)
    free_s = np.concatenate([[-np.inf], np.maximum.accumulate(r.finished_s[done][order])])
    taken_s = np.append(engine_s[order], np.inf)
    idle = np.column_stack([free_s, taken_s])[free_s < taken_s]
    overlaps = (idle[:, 0] < end[:, None]) & (idle[:, 1] > start[:, None])
    fitted = (end > start) & (end <= until_s(run))
    running = (counters.running[:-1] > 0) & (counters.running[1:] > 0)
    progress = (np.diff(counters.steps) > 0) & (np.diff(counters.generated) >= 0)
    return np.asarray(~overlaps.any(axis=1) & fitted & running & progress & (np.diff(counters.preempted) == 0))


def _kv_tokens(r: RequestRecords, start_s: Floats, end_s: Floats) -> Floats:
    """Return [m] the mean over periods of the tokens of requests between their first token and their last."""
    done = (r.status == Status.FINISHED) & (r.finished_s > r.first_token_s)
    first, last = r.first_token_s[done], r.finished_s[done]
    rate = (r.output_tokens[done] - 1) / (last - first)
    start, end = np.clip(start_s[:, None], first, last), np.clip(end_s[:, None], first, last)
    middle = r.prompt_tokens[done] + 1 + rate * ((start + end) / 2 - first)
    return np.asarray((middle * (end - start)).sum(axis=1) / (end_s - start_s))
