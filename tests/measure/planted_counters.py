"""What vLLM's ``/metrics`` would have reported of a simulated engine, and its log of steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from planted_runs import measured

from lengthwise import engine
from lengthwise.measure.calibration import Iterations
from lengthwise.measure.calibration.iteration_log import YEAR_S, second_of_year
from lengthwise.measure.calibration.parameters import apply
from lengthwise.schema.records import RunResult, TokenTimes

EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SHIFT_S = 1000.0
"""As of the clock of ``planted_runs.measured``."""


def simulated(workload, deployment, truth):
    """The records of an engine with these parameters, each of its steps kept."""
    cost = apply(deployment.cost, truth)
    return engine.simulate(workload, replace(deployment, cost=cost), max_log_steps=10**6)


def scraped(workload, deployment, truth, period_s, noise=0.01, seed=0, answer_s=0.0):
    """The measured run of an engine with these parameters that keeps its counters of every ``period_s``."""
    records = simulated(workload, deployment, truth)
    run = measured(workload, deployment, truth, noise=noise, seed=seed)
    return replace(run, metadata={"metrics": metrics(records, period_s, answer_s)})


def streamed(workload, deployment, truth, period_s, late_s=1e-3, seed=0, answer_s=0.0, front_s=0.0):
    """The same, with each token's time at a client that has it late, by so much on average.

    ``front_s`` is how long each request was on its way to the engine.
    """
    records = simulated(workload, deployment, truth)
    tokens = token_times(records, late_s, np.random.default_rng(seed))
    r, shown = records.requests, replace(records, steps=None, end_s=records.end_s + SHIFT_S + 1)
    reported = replace(
        r,
        arrival_s=r.arrival_s + SHIFT_S - front_s,
        first_token_s=tokens.at_s[tokens.start[:-1]],
        finished_s=tokens.at_s[tokens.start[1:] - 1],
    )
    metadata = {"metrics": metrics(records, period_s, answer_s)}
    return RunResult(replace(shown, requests=reported), workload, "bench", metadata, tokens=tokens)


def token_times(records, late_s, rng):
    """When each token came: a request that runs gets one in each step."""
    r, end_s = records.requests, records.steps.end_s
    start = np.concatenate([[0], np.cumsum(r.output_tokens)])
    first = np.searchsorted(end_s, r.first_token_s - 1e-9)
    step = np.concatenate([at + np.arange(n) for at, n in zip(first, r.output_tokens, strict=True)])
    np.testing.assert_allclose(end_s[step[start[1:] - 1]], r.finished_s)
    at_s = end_s[step] + SHIFT_S + rng.exponential(late_s, len(step))
    for a, b in pairwise(start):
        at_s[a:b] = np.maximum.accumulate(at_s[a:b])
    return TokenTimes(start, at_s, np.ones(len(step), dtype=np.int64))


def metrics(records, period_s, answer_s=0.0):
    """Columns as ``bench(scrape=True)`` keeps them; the server counts when half of an answer's time is over."""
    steps, r = records.steps, records.requests
    asked_s = np.arange(0.3 * period_s, records.end_s + period_s, period_s)
    at_s = asked_s + answer_s / 2
    through = np.searchsorted(steps.end_s, r.first_token_s - 1e-9)
    first = np.bincount(through, minlength=len(steps.end_s))
    prompts = np.bincount(through, weights=r.prompt_tokens, minlength=len(steps.end_s))
    made = steps.decode_seqs + first
    tokens = made + prompts
    finished = np.searchsorted(steps.end_s, at_s, side="right")

    def sofar(each):
        return np.concatenate([[0.0], np.cumsum(each)])[finished].tolist()

    running = [int(((r.scheduled_s <= t) & (t < r.finished_s)).sum()) for t in at_s]
    columns = {
        "at_s": (asked_s + SHIFT_S).tolist(),
        "took_s": np.full(len(at_s), answer_s).tolist(),
        "vllm:num_requests_running": running,
        "vllm:num_preemptions_total": [0.0] * len(at_s),
        "vllm:generation_tokens_total": sofar(made),
        "vllm:time_to_first_token_seconds_count": sofar(first),
        "vllm:iteration_tokens_total_count": sofar(made > 0),
        "vllm:iteration_tokens_total_sum": sofar(tokens),
    }
    buckets = {edge: sofar((made > 0) & (tokens <= edge)) for edge in EDGES}
    return columns | {f'vllm:iteration_tokens_total_bucket{{le="{edge:g}"}}': n for edge, n in buckets.items()}


def logged(workload, deployment, truth, unseen_s, started=None):
    """The engine's log of steps, by a clock that does not see ``unseen_s`` of the host's.

    ``began`` is when by the engine's local time, which stands on each line to the second; None: on none.
    """
    steps = simulated(workload, deployment, truth).steps
    at_s = None if started is None else np.floor((second_of_year(started) + steps.end_s) % YEAR_S)
    return Iterations(
        prefill_seqs=steps.prefill_seqs.astype(float),
        prefill_tokens=steps.prefill_tokens.astype(float),
        decode_seqs=steps.decode_seqs.astype(float),
        kv_share=steps.kv_blocks / deployment.kv.num_blocks,
        seconds=steps.end_s - steps.start_s - unseen_s,
        steps=np.ones(len(steps.end_s), dtype=np.int64),
        at_s=at_s,
    )
