"""Schedules in the event engine: drawn lengths, a queue that is never empty."""

from __future__ import annotations

import numpy as np

from lengthwise.engine import simulate
from lengthwise.engine.step_time import CostReader
from lengthwise.schedule import Controls, Estimator, Strategy
from lengthwise.schedule.simulation import concurrency_limit, deployment_of
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.records import Records, RequestRecords
from lengthwise.schema.workload import Workload

LATER = 4
"""A run leaves its first fourth out, and its last eighth, beside which the queue runs dry."""
NEAR, NEAR_TOKENS = 0.01, 2
"""Requests whose output is so near the quantile, and takes as many phases, count for its latency."""


def played(of: Estimator, controls: Controls, count: int, seed: int) -> tuple[float, float]:
    """(requests a second, mean latency of an output of the quantile) of the schedule in the engine."""
    deployment = deployment_of(of, controls)
    output, records = run(of, deployment, count, seed, concurrency_limit(of, controls))
    started_s = encodings_begin_s(records.requests, deployment)
    from_s, to_s = started_s[count // LATER], started_s[-count // (2 * LATER)]
    inside = (started_s >= from_s) & (started_s < to_s)
    long = inside & _as_long(of, controls, output)
    assert long.sum() > 5
    return float(inside.sum() / (to_s - from_s)), float((records.requests.finished_s - started_s)[long].mean())


def run(
    of: Estimator, deployment: Deployment, count: int, seed: int, concurrency: int | None = None, *, keep_steps: int = 0
) -> tuple[np.ndarray, Records]:
    """([n] output tokens, what became of the requests)."""
    rng, task = np.random.default_rng(seed), of.setting.task
    prompt, output = (rng.choice(len(pmf), count, p=pmf) for pmf in (task.prompt_pmf, task.output_pmf))
    workload = Workload(np.zeros(count), prompt, output, concurrency=concurrency)
    return output, simulate(workload, deployment, keep_steps=keep_steps)


def _as_long(of: Estimator, controls: Controls, output: np.ndarray) -> np.ndarray:
    """Whose output is near the quantile and takes as many phases."""
    setting = of.setting
    quantile = setting.task.output_quantile(setting.assumptions.level)
    near = np.abs(output - quantile) <= NEAR * quantile
    if controls.strategy is not Strategy.RRA:
        return near | (np.abs(output - quantile) <= NEAR_TOKENS)
    phases = -(-(output - setting.assumptions.encode_output_tokens) // controls.decode_steps)
    return near & (phases == -(-setting.iterations // controls.decode_steps))


def encodings_begin_s(requests: RequestRecords, deployment: Deployment) -> np.ndarray:
    """When each request's batch came into the first stage; WAA's may be formed while others are before it."""
    if deployment.decode is None:
        return requests.scheduled_s
    formed_s, batch = np.unique(requests.scheduled_s, return_inverse=True)
    first_s, _ = encode_stages_s(requests, deployment.cost)
    begin_s, free_s = np.empty(len(formed_s)), 0.0
    for i, formed in enumerate(formed_s.tolist()):
        begin_s[i] = max(formed, free_s)
        free_s = begin_s[i] + first_s[i]
    return begin_s[batch]


def encode_stages_s(requests: RequestRecords, cost: CostTables) -> tuple[np.ndarray, np.ndarray]:
    """([batches] seconds in the first stage, in the slowest one) of batches in the order in which they were formed."""
    batch = np.unique(requests.scheduled_s, return_inverse=True)[1]
    order = np.argsort(batch, kind="stable")
    batches = np.split(requests.prompt_tokens[order], np.cumsum(np.bincount(batch))[:-1])
    reader = CostReader(cost)
    stages = [reader.step(0, 0, [(tokens, 0) for tokens in one.tolist()]).stages_s for one in batches]
    return np.array([one[0] for one in stages]), np.array([max(one) for one in stages])
