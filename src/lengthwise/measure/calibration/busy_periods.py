"""Finds busy periods, in which a vLLM server always had work, by scrapes of the server's counters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from lengthwise.measure.calibration.measured_runs import Mask, Run, holdout_start_s
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
    """A server's counters at [n] scrapes of its metrics, in order of time. All but ``running`` are cumulative."""

    at_s: Floats  # on the records' clock: the middle of the scrape, or when its last counted token was received
    uncertainty_s: Floats  # half of the duration of the scrape, or 0
    steps: Floats  # steps that produced a token
    tokens: Floats  # generated tokens, and tokens of prompts whose last chunk is computed
    generated: Floats  # generated tokens, including first ones
    first: Floats  # first tokens
    running: Floats  # running requests
    preempted: Floats  # preemptions
    edges: Floats  # [b] upper bounds of the buckets of ``cumulative``
    cumulative: Floats  # [n, b] steps with at most this many ``tokens``

    def __len__(self) -> int:
        return len(self.at_s)

    def select(self, rows: Mask) -> Counters:
        """Return only the scrapes for which ``rows`` is true."""
        columns = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "edges"}
        return Counters(**columns, edges=self.edges)


def counters_of(metrics: Mapping[str, Any]) -> Counters | str:
    """Return the counters in a run's recorded metrics, or the reason why they cannot be used."""

    def optional(name: str) -> Floats:
        return np.nan_to_num(np.asarray(metrics[name], np.float64)) if name in metrics else np.zeros(scrapes)

    missing = [name for name in NEEDED.values() if name not in metrics]
    bounds = sorted((float(found[1]), name) for name in metrics if (found := _BUCKET.match(name)))
    if missing or not bounds:
        return f"they lack {', '.join(missing) or 'the buckets of vllm:iteration_tokens_total'}"
    scrapes = len(metrics["at_s"])
    if optional(DRAFTS).max(initial=0.0) > 0:
        return "the engine drafts tokens, so that they do not show how many requests a step decodes for"
    columns = {field: np.asarray(metrics[name], np.float64) for field, name in NEEDED.items()}
    columns["uncertainty_s"] = optional(DURATION) / 2
    columns["at_s"] = columns["at_s"] + columns["uncertainty_s"]
    columns["preempted"] = optional(PREEMPTED)
    columns["cumulative"] = np.column_stack([np.asarray(metrics[name], np.float64) for _, name in bounds])
    complete = np.isfinite(np.column_stack(list(columns.values()))).all(axis=1)
    return Counters(**{k: c[complete] for k, c in columns.items()}, edges=np.array([bound for bound, _ in bounds]))


def at_token_times(counters: Counters, tokens: TokenTimes | None) -> Counters:
    """Return the counters with each scrape moved to the time of the last token that it counts.

    A scrape falls anywhere within a step, but tokens arrive when a step ends, after a nearly constant delay. The new
    time is when the client received the last counted token. If times of tokens are unknown, the counters are unchanged.
    """
    if tokens is None or not len(counters) or not len(tokens.at_s) or tokens.tokens.min() < 1:
        return counters
    received_s = np.repeat(tokens.at_s, tokens.tokens)
    received_s = np.sort(received_s[np.isfinite(received_s)])
    count = np.round(counters.generated - counters.generated[0]) + (received_s <= counters.at_s[0]).sum()
    known = (count >= 1) & (count <= len(received_s))
    last_s = received_s[np.clip(count, 1, len(received_s)).astype(np.int64) - 1]
    return replace(counters, at_s=last_s, uncertainty_s=np.zeros(len(counters))).select(known)


FOREIGN_TOKENS = 0.02  # more tokens than the run's own, by this share, show that other clients used the server
EXTRA_STEPS = 0.1  # more steps than the run's tokens need, by this share, show that steps were counted repeatedly


def foreign_load(run: Run, counters: Counters) -> str:
    """Return a reason why the counters appear to include other clients' requests, or "" if they do not."""
    if not len(counters):
        return ""
    r = run.measured.records.requests
    columns = (counters.generated, counters.tokens, counters.steps, counters.preempted)
    generated, tokens, steps, preempted = (float(column[-1] - column[0]) for column in columns)
    for verb, counted, own in (
        ("generated", generated, float(r.output_tokens.sum())),
        ("computed in prompts", tokens - generated, float(r.prompt_tokens.sum())),
    ):
        if counted > own * (1 + FOREIGN_TOKENS):
            return f"the server {verb} {counted:,.0f} tokens during the run, but its requests have only {own:,.0f}"
    if preempted == 0 and steps > (limit := max_steps(r)) * (1 + EXTRA_STEPS):
        return (
            f"it counted {steps:,.0f} steps, but the tokens of the run need at most {limit:,.0f}: several HTTP fronts "
            "(--api-server-count) each counted the steps that have a request of theirs, other clients used the "
            "server, or the client was late to read its answers"
        )
    return ""


def max_steps(r: RequestRecords) -> float:
    """Return the largest possible number of steps that produce tokens, or inf if a started request did not finish."""
    # A step gives one token to every decoding request. Until the request that finishes last has finished, there are
    # thus as many steps as that request receives tokens. While none decodes, the next first token is a step.
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
    """The [m] periods of one run in which the engine always had requests to compute, in order of time."""

    end_s: Floats
    seconds: Floats
    steps: Floats  # steps that produced a token
    prompts: Floats  # computed prompts
    prompt_tokens: Floats
    decodes: Floats  # decoded tokens: one per decoding sequence and step
    kv_tokens: Floats  # mean KV tokens of decoding requests, by their responses
    edges: Floats  # [b] upper bounds of the tokens of a step
    counts: Floats  # [m, b + 1] steps by bucket of tokens; the last bucket is above all bounds

    def __len__(self) -> int:
        return len(self.seconds)


def busy_periods_of(run: Run, counters: Counters, limits: EngineLimits) -> BusyPeriods | str:
    """Return a run's busy periods before its first held-out request is due, or the reason why there are none."""
    r = run.measured.records.requests
    if reason := foreign_load(run, counters):
        return reason
    counters = at_token_times(counters, run.measured.tokens)
    # Running requests but no step since the last scrape: both scrapes fell within one step.
    counters = counters.select((np.diff(counters.steps, prepend=-1.0) != 0) | (counters.running <= 0))
    if np.isfinite(holdout_start_s(run)) and not (counters.at_s[1:] <= holdout_start_s(run)).any():
        return "its first held-out request was due before the second scrape: hold out a separate run"
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
        return f"its requests do not show {MIN_STEPS} steps between two scrapes during which it was always busy"
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
    """Return whether fitted requests always kept the engine busy, for each interval between scrapes ([n - 1])."""
    start, end = counters.at_s[:-1], counters.at_s[1:]
    r, late_s = run.measured.records.requests, run.measured.client_s
    done = (r.status == Status.FINISHED) & np.isfinite(r.first_token_s) & np.isfinite(r.finished_s)
    if int(run.workload.prompt_tokens.max(initial=0)) <= max_tokens:
        sent_s = (r.arrival_s + (0.0 if late_s is None else np.nan_to_num(late_s)))[done]
        fastest_s = float(np.min(r.first_token_s[done] - sent_s, initial=np.inf))
        engine_s = sent_s + max(0.0, fastest_s)
    else:  # steps are not counted if they only compute a prompt's earlier chunks: a request must decode
        engine_s = r.first_token_s[done]
    order = np.argsort(engine_s)
    free_s = np.concatenate([[-np.inf], np.maximum.accumulate(r.finished_s[done][order])])
    taken_s = np.append(engine_s[order], np.inf)
    idle = np.column_stack([free_s, taken_s])[free_s < taken_s]
    overlaps = (idle[:, 0] < end[:, None]) & (idle[:, 1] > start[:, None])
    fitted = (end > start) & (end <= holdout_start_s(run))
    running = (counters.running[:-1] > 0) & (counters.running[1:] > 0)
    progress = (np.diff(counters.steps) > 0) & (np.diff(counters.generated) >= 0)
    return np.asarray(~overlaps.any(axis=1) & fitted & running & progress & (np.diff(counters.preempted) == 0))


def _kv_tokens(r: RequestRecords, start_s: Floats, end_s: Floats) -> Floats:
    done = (r.status == Status.FINISHED) & (r.finished_s > r.first_token_s)
    first, last = r.first_token_s[done], r.finished_s[done]
    rate = (r.output_tokens[done] - 1) / (last - first)
    start, end = np.clip(start_s[:, None], first, last), np.clip(end_s[:, None], first, last)
    middle = r.prompt_tokens[done] + 1 + rate * ((start + end) / 2 - first)
    return np.asarray((middle * (end - start)).sum(axis=1) / (end_s - start_s))
