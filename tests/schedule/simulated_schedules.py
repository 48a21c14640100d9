"""Schedules in the event engine: lengths of requests, a saturated queue, and the middle of a run.

The benchmark of ExeGPT's evaluation imports it, too.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import signal, stats

from lengthwise.engine import simulate
from lengthwise.engine.step_time import CostReader
from lengthwise.schedule.simulation import concurrency_limit, deployment_of
from lengthwise.schema.workload import Workload

HALF_LIFE = 200
"""Requests after which half of the similarity of neighbours is lost where they are not mixed."""


def independent(task, count, seed):
    """Draw [count] prompts and outputs of a task, independently."""
    rng = np.random.default_rng(seed)
    return tuple(rng.choice(len(pmf), count, p=pmf) for pmf in (task.prompt_pmf, task.output_pmf))


def correlated(task, correlation, count, seed, *, mixed):
    """Draw [count] prompts and outputs of a task by a Gaussian copula; unmixed, similar requests follow each other."""
    rng = np.random.default_rng(seed)
    prompt, other = rng.standard_normal((2, count))
    both = np.array([prompt, correlation * prompt + math.sqrt(1 - correlation**2) * other])
    if not mixed:  # the order of prompts follows a slowly moving series
        series = signal.lfilter([1.0], [1.0, -(0.5 ** (1 / HALF_LIFE))], rng.standard_normal(count))
        both = both[:, np.argsort(prompt)[np.argsort(np.argsort(series))]]
    pmfs = (task.prompt_pmf, task.output_pmf)
    return tuple(np.searchsorted(np.cumsum(pmf), stats.norm.cdf(z)) for pmf, z in zip(pmfs, both, strict=True))


def simulated(of, controls, lengths, threshold=None, max_log_steps=0):
    """Return (deployment, records) of a schedule with a queue that never empties."""
    deployment = deployment_of(of, controls, threshold=threshold)
    workload = Workload(np.zeros(len(lengths[0])), *lengths, concurrency=concurrency_limit(of, controls))
    return deployment, simulate(workload, deployment, max_log_steps=max_log_steps)


def window(started_s):
    """Return the span without the first quarter of requests and the last eighth, next to which the queue runs empty."""
    return started_s[len(started_s) // 4], started_s[-len(started_s) // 8]


def in_window(of, controls, lengths, threshold=None):
    """Return outputs, seconds from the first stage to the end, and requests per second of those in the window."""
    deployment, records = simulated(of, controls, lengths, threshold)
    r = records.requests
    started_s = r.scheduled_s
    if deployment.decode is not None:  # WAA may form a batch while earlier ones are in front
        formed_s, batch = np.unique(r.scheduled_s, return_inverse=True)
        first_s, _ = prefill_stages_s(r, deployment.cost)
        before_s = np.concatenate([[0.0], np.cumsum(first_s)[:-1]])
        started_s = (before_s + np.maximum.accumulate(formed_s - before_s))[batch]
    from_s, to_s = window(started_s)
    inside = (started_s >= from_s) & (started_s < to_s)
    return lengths[1][inside], (r.finished_s - started_s)[inside], inside.sum() / (to_s - from_s)


def prefill_stages_s(requests, cost):
    """Return [batches] seconds in the first stage and in the slowest one, in the order in which they were formed."""
    batch = np.unique(requests.scheduled_s, return_inverse=True)[1]
    order = np.argsort(batch, kind="stable")
    batches = np.split(requests.prompt_tokens[order], np.cumsum(np.bincount(batch))[:-1])
    reader = CostReader(cost)
    stages = [reader.step(0, 0, [(tokens, 0) for tokens in one.tolist()]).stages_s for one in batches]
    return np.array([one[0] for one in stages]), np.array([max(one) for one in stages])
