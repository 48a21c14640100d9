"""Runs of an engine whose truth is known, for tests of what is calibrated on them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lengthwise import engine
from lengthwise.measure.calibration.parameters import apply
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.records import RunResult
from lengthwise.schema.workload import Workload

LIMITS = EngineLimits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=8192)
TRUTH = {"work": 1.3, "host_step": 2e-3}
MIN_COUNT = ("work", "host_step")
NOISE = 0.02


def requests(rate=6.0, n=120, seed=0, prompt=(200, 3000), output=(50, 400)):
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1 / rate, n))
    return Workload(
        arrival_s - arrival_s[0], rng.integers(*prompt, n), rng.integers(*output, n), name=f"{rate} a second"
    )


def measured(workload, deployment, truth=TRUTH, client_s=0.0, noise=NOISE, seed=0):
    """What an engine with these parameters would have been measured to do, by a clock of its own."""
    rng = np.random.default_rng(seed + 100)
    records = engine.simulate(workload, replace(deployment, cost=apply(deployment.cost, truth)))
    r = records.requests
    ttft = (r.first_token_s - r.arrival_s + client_s) * np.exp(noise * rng.standard_normal(len(workload)))
    rest = (r.finished_s - r.first_token_s) * np.exp(noise * rng.standard_normal(len(workload)))
    shift = 1000.0
    reported = replace(
        r,
        arrival_s=r.arrival_s + shift,
        scheduled_s=np.full(len(workload), np.nan),
        first_token_s=r.arrival_s + shift + ttft,
        finished_s=r.arrival_s + shift + ttft + rest,
    )
    end_s = float(np.nanmax(reported.finished_s))
    told_records = replace(records, requests=reported, steps=None, end_s=end_s, name=workload.name)
    return RunResult(told_records, workload, "bench")


def errors(calibration, metric, statistic):
    return [s for s in calibration.scores if (s.metric, s.statistic) == (metric, statistic)]
