"""What calibrations are timed on, and how what counters add is counted."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def modules():
    path = list(sys.path)
    sys.path.insert(0, BENCHMARKS)
    try:
        yield importlib.import_module("_calibrate_time"), importlib.import_module("_counters")
    finally:
        sys.path[:] = path


def run(load: str, repeat: int, n: int):
    return SimpleNamespace(load=load, repeat=repeat, measured=SimpleNamespace(workload=range(n)))


def test_whole_rounds_are_fitted_until_there_are_enough_requests(modules):
    of_time, _ = modules
    runs = [run(load, k, n) for k in range(2) for load, n in (("static", 60), ("half", 80), ("high", 120))]
    fitted, held = of_time.enough(runs, 300)
    assert (fitted, held) == (runs[:4], runs[4])
    fitted, held = of_time.enough(runs, 50)
    assert {one.load for one in fitted} == {"static", "half", "high"}
    assert (len(fitted), held) == (3, runs[3])
    assert of_time.enough(runs, 9000) == (runs[:-1], runs[-1])


def test_planted_runs_have_three_loads_counters_and_an_engine_that_nobody_names(modules):
    of_time, _ = modules
    case = of_time.planted()
    assert sum(len(one.workload) for one in case.runs) == of_time.REQUESTS
    assert all("metrics" in one.metadata and "engine" not in one.metadata for one in case.runs)
    assert len({one.workload.name for one in (*case.runs, case.satisfied)}) == 4


@pytest.mark.parametrize(
    ("notes", "masked_s", "report"),
    [
        (["dense masks were not looked for: vllm"], 0.0, ("nothing", "not looked for")),
        (["the server's own counters were fitted as well: 3"], 0.0, ("counters", "looked for")),
        ([], 1e-9, ("nothing", "found")),
    ],
)
def test_a_timed_calibration_says_what_it_looked_at_and_for(modules, notes, masked_s, report):
    of_time, _ = modules
    found = SimpleNamespace(notes=notes, tables=SimpleNamespace(masked_s=masked_s))
    assert (of_time.beside(found, None), of_time.masks(found)) == report
    assert of_time.beside(found, object()) == "a log of steps"


def test_the_figure_is_the_slowest_by_the_clock(modules):
    of_time, _ = modules
    cases = {"busy": {"cpu_s": 3.0, "wall_s": 9.0}, "isolated": {"cpu_s": 5.0, "wall_s": 5.0}}
    found = of_time.row(cases)
    assert (found["value"], found["details"]["slowest"]) == (9.0, "busy")
    assert found["details"]["cases"]["busy"]["cpu_s"] == 3.0


def told(of_counters, *off: float):
    return [of_counters.Report(x, x - 0.05, x + 0.05) for x in off]


def test_kinds_are_compared_run_by_run_and_only_a_difference_beyond_chance_ranks(modules):
    _, of = modules
    each = {
        "requests": told(of, 0.10, -0.12, 0.11, 0.13),
        "counters": told(of, 0.02, 0.04, -0.03, 0.05),
        "log": told(of, 0.05, -0.01, 0.06, 0.01),
    }
    runs = [{kind: {"work": of_kind[k]} for kind, of_kind in each.items()} for k in range(4)]
    row = of.row("work", runs, 1.3)
    kinds = row["details"]["kinds"]
    assert row["value"] == kinds["counters"]["error"] == pytest.approx(0.035)
    assert row["ci"] == [kinds["counters"]["low"], kinds["counters"]["high"]]
    assert row["ci"][0] < row["value"] < row["ci"][1]
    assert [kinds[kind]["satisfied"] for kind in of.KINDS] == [0, 4, 3]
    assert kinds["requests"]["width"] == pytest.approx(0.1)
    ranks = {pair: one["ranks"] for pair, one in row["details"]["differences"].items()}
    assert ranks == {"counters less requests": True, "log less requests": True, "counters less log": False}


def test_the_interval_of_a_mean_is_student_s(modules):
    _, of = modules
    mean, low, high = of.mean_interval([1.0, 2.0, 3.0])
    assert (mean, low, high) == pytest.approx((2.0, 2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5), abs=1e-3)
