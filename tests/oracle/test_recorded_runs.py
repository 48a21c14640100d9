"""Recorded runs of vLLM on GPUs are predicted from kernels that were profiled on the same GPUs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
OTHER = [0.0] * 5


@pytest.fixture(scope="module")
def recorded():
    sys.path.insert(0, BENCHMARKS)
    try:
        yield importlib.import_module("_recorded")
    finally:
        sys.path.remove(BENCHMARKS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "bounds"),
    [
        (0, {"ttft": 0.05, "tpot": 0.03, "latency": 0.04}),
        (1, {"ttft": 0.07, "tpot": 0.015, "latency": 0.035}),
        (2, {"ttft": 0.025, "tpot": 0.02, "latency": 0.015}),
    ],
    ids=["rtx4090", "rtxpro6000", "rtxpro6000-tp2"],
)
def test_a_recorded_run_stays_under_its_bounds(shared, recorded, number, bounds):
    root = shared("data/profiles/llmservingsim/measured_runs").parents[3]
    reported = recorded.of_run(root, recorded.RUNS[number], draws=0)
    assert {name: reported[name]["mape"] for name in bounds} == {
        name: pytest.approx(0.0, abs=most) for name, most in bounds.items()
    }


def test_intervals_know_that_neighbours_wait_for_each_other(recorded):
    """Errors of a hundred requests in a row alike: drawn singly they would seem to be known much better."""
    rng = np.random.default_rng(0)
    measured = rng.lognormal(0, 0.2, 300)
    drift = np.repeat([0.02, 0.2, 0.1], 100)
    mixed = rng.permutation(drift)
    width = {}
    for name, errors in (("in a row", drift), ("mixed", mixed)):
        reported = recorded.compared(measured, measured * (1 + errors), OTHER, 300)
        low, high = np.quantile(reported["draws"], [0.025, 0.975])
        assert low < reported["mape"] < high
        width[name] = high - low
    assert width["in a row"] > 1.35 * width["mixed"]
    assert recorded.compared(measured, measured, OTHER, 300)["draws"] == [0.0] * 300
    assert recorded.compared(measured, measured, OTHER, 0)["draws"] == []


def test_the_other_simulators_errors_are_read_from_its_own_summary(shared, recorded):
    folder = shared("data/profiles/llmservingsim/measured_runs/RTXPRO6000/Qwen3-32B")
    assert recorded.summary(folder)["ttft"][0] == pytest.approx(37369.5 / 36905.2 - 1, abs=1e-4)
