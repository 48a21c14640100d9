"""Rows of the fidelity benchmark that are calibrations: one run of each, rerun, agrees with the kept row."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from lengthwise.engine import deploy
from lengthwise.schema.deployment import EngineLimits

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = {
    row["name"]: row
    for row in map(json.loads, (BENCHMARKS / "results" / "fidelity.json").read_text("utf-8").splitlines())
}


@pytest.fixture(scope="module")
def benchmark():
    """A module of the benchmarks by name."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_a_recorded_run_calibrated_on_its_first_half_has_the_errors_in_its_rows(shared, benchmark):
    recorded = benchmark("_recorded")
    run = recorded.RUNS[0]
    root = shared("data/profiles/llmservingsim/measured_runs").parents[3]
    found = recorded.calibration(root, run)
    for name, metric in recorded.LATENCIES.items():
        reported = {s.statistic: (s.before, s.after, s.low, s.high) for s in found.scores if s.metric == metric}
        retained = ROWS[f"fidelity.calibrated.{name}_mape"]["details"]["runs"][run.name]
        assert reported.keys() == retained.keys()
        for statistic, ends in reported.items():
            assert ends == pytest.approx(retained[statistic], abs=2e-3), (metric, statistic)


def test_intervals_of_planted_runs_hold_as_often_as_their_level_states(benchmark):
    """Which parts a calibration determines depends on its search; of those, at most one interval misses its value."""
    planted = benchmark("_planted")
    deployment = deploy("llama-3-8b", "H100", limits=EngineLimits(64, 2048, max_model_len=8192))
    retained = ROWS["calibrate_coverage"]["details"]["runs"]
    missed = next(run for run, held_out in retained.items() if not all(held_out.values()))
    for run in ("1", missed):
        found = planted.satisfied(planted.covered(deployment, int(run)))
        holds = [held_out for reported, held_out in found.values() if reported]
        assert len(holds) >= 2
        assert sum(not held_out for held_out in holds) <= 1
