"""Intervals of errors between two runs hold the truth about as often as they say, whatever the load."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lengthwise.engine import deploy, simulate
from lengthwise.metrics import compare
from lengthwise.metrics.bootstrap import MIN_BLOCKS, blocks_of, lag_correlation, sample_of
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.records import RunResult
from lengthwise.schema.workload import Workload

Q = np.array([0.5, 0.95])
CAPACITY_RPS = 10.8
KEYS = [f"{metric}.{stat}" for metric in ("ttft", "tpot", "tbt", "jct") for stat in ("mean", "p95")]


def walk(seed: int, n: int, keep: float) -> np.ndarray:
    """Seconds whose logs keep so much of the one before."""
    noise, log = np.random.default_rng(seed).normal(0, 0.3, n), np.zeros(n)
    for i in range(1, n):
        log[i] = keep * log[i - 1] + noise[i]
    return np.exp(log)


def test_blocks_are_longer_and_intervals_wider_the_longer_neighbours_are_alike():
    cuts = [
        blocks_of(sample_of(walk(1, 900, keep)), sample_of(walk(2, 900, 0.0)), Q, 0.9, paired=False)[0]
        for keep in (0.0, 0.9, 0.98)
    ]
    assert cuts[0].count == 30
    assert [cut.count for cut in cuts] == sorted((cut.count for cut in cuts), reverse=True)
    assert MIN_BLOCKS <= cuts[-1].count < 30
    assert 1 < cuts[0].widening[0] < 1.4
    assert cuts[-1].widening[0] > 1.4
    assert all((cut.widening[1:] >= cut.widening[0]).all() for cut in cuts)


def test_what_runs_share_does_not_make_their_blocks_alike():
    shared = walk(1, 900, 0.98)
    own = shared * np.exp(np.random.default_rng(2).normal(0, 0.1, 900))
    cut, _ = blocks_of(sample_of(own), sample_of(shared), Q, 0.9, paired=True)
    alone, _ = blocks_of(sample_of(own), sample_of(shared), Q, 0.9, paired=False)
    assert cut.count == 30
    assert cut.widening[0] < alone.widening[0]


def test_lag_correlation_is_the_lag_one_correlation_with_what_few_rows_hide():
    rows = np.random.default_rng(0).normal(size=(4000, 1))
    smooth = rows[1:] + rows[:-1]
    assert lag_correlation(smooth)[0] == pytest.approx(0.5, abs=0.05)
    short = np.mean([lag_correlation(smooth[i : i + 10])[0] for i in range(0, 3900, 10)])
    assert short == pytest.approx(0.5, abs=0.12)


def run(rate_rps: float, seed: int, n: int = 150, speed: float = 1.0) -> RunResult:
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1 / rate_rps, n))
    workload = Workload(arrival_s - arrival_s[0], rng.integers(200, 3000, n), rng.integers(50, 400, n))
    served = deploy("llama-3-8b", "H100", limits=EngineLimits(64, 2048, max_model_len=8192))
    cost = replace(served.cost, layer_s=served.cost.layer_s * speed)
    return RunResult(simulate(workload, replace(served, cost=cost)), workload, "simulate")


def test_a_run_that_only_drifts_has_no_interval_and_a_warning():
    base, n = run(3.0, 0), 150
    r = base.records.requests
    late_s = np.linspace(0, 30, n)  # a queue that grows and grows
    moved = replace(r, first_token_s=r.first_token_s + late_s, finished_s=r.finished_s + late_s)
    drifting = replace(base, records=replace(base.records, requests=moved, end_s=base.records.end_s + 30))
    found = compare(drifting, run(3.0, 1))
    assert not found["ttft.mean"].has_interval
    assert found["tpot.mean"].has_interval
    assert any("TTFT, JCT drift through the run" in warning for warning in found.warnings)
    assert not any("drift" in warning for warning in compare(base, run(3.0, 1)).warnings)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_intervals_of_simulated_pairs_hold_the_truth(load):
    """Of 30 pairs of short runs at each load; means and tails, of the same requests and of others."""
    rate = load * CAPACITY_RPS
    own = [run(rate, 1000 + i) for i in range(30)]
    others = [run(rate, 5000 + i, speed=1.15) for i in range(30)]
    same = [run(rate, 1000 + i, speed=1.15) for i in range(30)]
    shares = []
    for other in (others, same):
        found = [compare(a, b, level=0.9, draws=200) for a, b in zip(own, other, strict=True)]
        for key in KEYS:
            known = [one[key] for one in found]
            truth = np.mean([x.a for x in known]) / np.mean([x.b for x in known]) - 1
            shares.append(np.mean([x.low <= truth <= x.high for x in known if x.has_interval]))
            assert np.mean([x.has_interval for x in known]) > 0.5
    assert np.mean(shares) >= 0.85
    assert min(shares) >= 0.7
    assert np.mean(np.array(shares) >= 0.8) >= 0.8
