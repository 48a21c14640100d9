"""Held-out numbers against the intervals of simulations: what holds, what misses and on which side."""

from __future__ import annotations

import math
from dataclasses import replace

import _circle
import numpy as np
import pytest

from lengthwise import EngineLimits, Workload, deploy, simulate
from lengthwise.schema.cost_tables import CostEvidence, PartError
from lengthwise.schema.records import RunResult

N = 60


@pytest.fixture(scope="module")
def deployment():
    """Tables whose whole steps may be off by 10 %."""
    made = deploy("llama-3-8b", "H100", limits=EngineLimits(16, 2048, max_model_len=4096))
    return replace(made, cost=replace(made.cost, evidence=CostEvidence(errors=(PartError("step", 0.1),))))


def run_of(deployment, slower: float, *, load: str = "high", repeat: int = 0):
    """A run of an engine that takes ``slower`` times as long in every step."""
    rng = np.random.default_rng(1)
    arrival_s = np.cumsum(rng.exponential(0.2, N))
    workload = Workload(arrival_s - arrival_s[0], rng.integers(100, 900, N), rng.integers(20, 90, N))
    parts = ("layer_s", "comm_s", "embedding_s", "send_s", "head_s", "host_s", "prefill_s", "decode_s")
    cost = replace(deployment.cost, **{part: slower * getattr(deployment.cost, part) for part in parts})
    records = simulate(workload, replace(deployment, cost=cost))
    return _circle.Run("wide", load, repeat, RunResult(records, workload, "bench"))


@pytest.mark.parametrize(("slower", "side"), [(1.0, "satisfied"), (1.1, "satisfied"), (1.5, "above"), (0.6, "below")])
def test_an_engine_lies_within_the_interval_if_its_error_is_as_stated(deployment, slower, side):
    run = run_of(deployment, slower)
    found = _circle.intervals_of(deployment, run, 32, 0.95, sampling=False)
    assert _circle.counted({"wide-high-0": found})[side] == len(_circle.COUNTED)


def test_sampling_widens_and_no_error_leaves_the_number_alone(deployment):
    run, exact = (run_of(deployment, 1.0), replace(deployment, cost=replace(deployment.cost, evidence=CostEvidence())))
    alone = _circle.intervals_of(exact, run, 32, 0.95, sampling=False)
    for one in alone.values():
        assert one.low_s == pytest.approx(one.said_s)
        assert one.high_s == pytest.approx(one.said_s)
    model, both = (_circle.intervals_of(deployment, run, 32, 0.95, sampling=on) for on in (False, True))
    for metric, one in model.items():
        assert both[metric].low_s <= one.low_s < one.said_s < one.high_s <= both[metric].high_s
    tpot = model["tpot_p50"]
    assert math.log(tpot.high_s / tpot.low_s) == pytest.approx(2 * 1.96 * 0.1, rel=0.15)


def test_a_load_is_the_median_of_its_repeats():
    each = {
        f"wide-high-{k}": dict.fromkeys(_circle.COUNTED, _circle.Interval(s, 1.0, 1.0 - s / 10, 1.0 + s / 10))
        for k, s in enumerate((1.0, 1.05, 3.0))
    }
    (load,) = _circle.medians(each).values()
    assert load["jct_p50"] == _circle.Interval(1.05, 1.0, pytest.approx(0.895), pytest.approx(1.105))
    assert _circle.counted(each) == {"n": 15, "satisfied": 10, "below": 0, "above": 5}


def test_the_row_takes_blind_errors(deployment):
    held_out = [run_of(deployment, slower, repeat=k) for k, slower in enumerate((1.28, 1.3, 1.32))]
    stored = replace(deployment, cost=replace(deployment.cost, evidence=CostEvidence(errors=(PartError("step", 0.3),))))
    row = _circle.coverage_row({"wide": stored}, [PartError("step", 0.01)], held_out)
    details = row["details"]
    assert details["n"] == len(_circle.COUNTED)
    assert row["value"] == details["satisfied"] / 5
    assert row["ci"][0] <= row["value"] <= row["ci"][1]
    jct = details["each"]["wide-high"]["jct_p50"]
    assert jct[2] < jct[1] < jct[3] < jct[0]
    assert 1.0 < details["ends_apart"]["wide-high"] < 1.25
