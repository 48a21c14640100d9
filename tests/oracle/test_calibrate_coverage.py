"""How often a calibration's intervals hold what was planted is counted as the runs reported it, each run once."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from lengthwise.measure.calibration.result import Parameter

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:
    _intervals, _planted = map(importlib.import_module, ("_intervals", "_planted"))
finally:
    sys.path.remove(BENCHMARKS)


def found(**parameters: tuple[float, float, bool]):
    """A calibration with these parameters: raw ends, and whether they are determined; widened to hold 1."""
    made = tuple(
        Parameter(name, name, "x", 1.0, min(low, 1.0), max(high, 1.0), 1.0, reported, 0.1, bare=(low, high))
        for name, (low, high, reported) in parameters.items()
    )
    return type("Found", (), {"parameters": made})()


def test_a_widened_interval_is_counted_as_the_runs_reported_it():
    planted = _planted.PLANTED["work"]
    assert _planted.satisfied(found(work=(planted, 2.0, True))) == {"work": (True, True)}
    assert _planted.satisfied(found(work=(planted + 0.1, 2.0, True))) == {"work": (True, False)}
    assert _planted.satisfied(found(decode=(1.1, 2.0, True))) == {"decode": (True, False)}  # nothing was planted: 1


def test_undetermined_parameters_are_counted_separately():
    runs = {1: {"work": (True, True), "decode": (False, False)}, 2: {"work": (True, False), "decode": (True, True)}}
    row = _planted.coverage_row(runs)
    assert row["value"] == pytest.approx(2 / 3)
    details = row["details"]
    assert (details["n"], details["satisfied"], details["of_runs"]) == (3, 2, 2)
    assert details["missing"] == {"n": 1, "satisfied": 0}
    assert {name: (of["n"], of["satisfied"]) for name, of in details["by_parameter"].items()} == {
        "work": (2, 1),
        "decode": (1, 1),
    }
    low, high = row["ci"]
    assert low < 2 / 3 < high


@pytest.mark.parametrize(
    ("hits", "n", "ends"), [(0, 10, (0.0, 0.3085)), (10, 10, (0.6915, 1.0)), (5, 10, (0.1871, 0.8129))]
)
def test_the_exact_interval_is_that_of_clopper_and_pearson(hits, n, ends):
    assert _intervals.exact_interval(hits, n) == pytest.approx(ends, abs=1e-4)
