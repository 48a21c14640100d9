"""Held-out numbers against the intervals of simulations: what holds, what misses and on which side."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lengthwise import EngineLimits, Workload, deploy, simulate
from lengthwise.schema.cost_tables import CostEvidence, PartError
from lengthwise.schema.records import RunResult

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
N = 60


@pytest.fixture(scope="module")
def modules():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("_circle"), importlib.import_module("_circle")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def deployment():
    """Tables whose whole steps may be off by 10 %."""
    made = deploy("llama-3-8b", "H100", limits=EngineLimits(16, 2048, max_model_len=4096))
    return replace(made, cost=replace(made.cost, evidence=CostEvidence(errors=(PartError("step", 0.1),))))


def run_of(circle, deployment, slower: float, *, load: str = "high", repeat: int = 0):
    """A run of an engine that takes ``slower`` times as long in every step."""
    rng = np.random.default_rng(1)
    arrival_s = np.cumsum(rng.exponential(0.2, N))
    workload = Workload(arrival_s - arrival_s[0], rng.integers(100, 900, N), rng.integers(20, 90, N))
    parts = ("layer_s", "comm_s", "first_s", "send_s", "head_s", "host_s", "prefill_s", "decode_s")
    cost = replace(deployment.cost, **{part: slower * getattr(deployment.cost, part) for part in parts})
    records = simulate(workload, replace(deployment, cost=cost))
    return circle.Run("wide", load, repeat, RunResult(records, workload, "bench"))


@pytest.mark.parametrize(("slower", "side"), [(1.0, "satisfied"), (1.1, "satisfied"), (1.5, "above"), (0.6, "below")])
def test_an_engine_lies_within_the_interval_if_its_error_is_as_stated(modules, deployment, slower, side):
    circle, coverage = modules
    run = run_of(circle, deployment, slower)
    found = coverage.intervals_of(deployment, run, 32, 0.95, sampling=False)
    assert coverage.counted({"wide-high-0": found})[side] == len(coverage.COUNTED)


def test_sampling_widens_and_no_error_leaves_the_number_alone(modules, deployment):
    circle, coverage = modules
    run, exact = (
        run_of(circle, deployment, 1.0),
        replace(deployment, cost=replace(deployment.cost, evidence=CostEvidence())),
    )
    alone = coverage.intervals_of(exact, run, 32, 0.95, sampling=False)
    for one in alone.values():
        assert one.low_s == pytest.approx(one.said_s)
        assert one.high_s == pytest.approx(one.said_s)
    model, both = (coverage.intervals_of(deployment, run, 32, 0.95, sampling=on) for on in (False, True))
    for metric, one in model.items():
        assert both[metric].low_s <= one.low_s < one.said_s < one.high_s <= both[metric].high_s
    tpot = model["tpot_p50"]
    assert math.log(tpot.high_s / tpot.low_s) == pytest.approx(2 * 1.96 * 0.1, rel=0.15)


def test_a_load_is_the_median_of_its_repeats(modules):
    _, coverage = modules
    each = {
        f"wide-high-{k}": dict.fromkeys(coverage.COUNTED, coverage.Interval(s, 1.0, 1.0 - s / 10, 1.0 + s / 10))
        for k, s in enumerate((1.0, 1.05, 3.0))
    }
    (load,) = coverage.medians(each).values()
    assert load["jct_p50"] == coverage.Interval(1.05, 1.0, pytest.approx(0.895), pytest.approx(1.105))
    assert coverage.counted(each) == {"n": 15, "satisfied": 10, "below": 0, "above": 5}


def test_the_row_takes_blind_errors(modules, deployment):
    circle, coverage = modules
    held_out = [run_of(circle, deployment, slower, repeat=k) for k, slower in enumerate((1.28, 1.3, 1.32))]
    stored = replace(deployment, cost=replace(deployment.cost, evidence=CostEvidence(errors=(PartError("step", 0.3),))))
    row = coverage.coverage_row({"wide": stored}, [PartError("step", 0.01)], held_out)
    details = row["details"]
    assert details["n"] == len(coverage.COUNTED)
    assert row["value"] == details["satisfied"] / 5
    assert row["ci"][0] <= row["value"] <= row["ci"][1]
    jct = details["each"]["wide-high"]["jct_p50"]
    assert jct[2] < jct[1] < jct[3] < jct[0]
    assert 1.0 < details["ends_apart"]["wide-high"] < 1.25
