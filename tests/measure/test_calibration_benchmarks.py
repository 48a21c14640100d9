"""What calibrations are timed on, and how what counters add is counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import _planted
import pytest


def run(load: str, repeat: int, n: int):
    return SimpleNamespace(load=load, repeat=repeat, measured=SimpleNamespace(workload=range(n)))


def test_complete_rounds_are_fitted_until_there_are_enough_requests():
    runs = [run(load, k, n) for k in range(2) for load, n in (("static", 60), ("half", 80), ("high", 120))]
    fitted, held_out = _planted.enough(runs, 300)
    assert (fitted, held_out) == (runs[:4], runs[4])
    fitted, held_out = _planted.enough(runs, 50)
    assert {one.load for one in fitted} == {"static", "half", "high"}
    assert (len(fitted), held_out) == (3, runs[3])
    assert _planted.enough(runs, 9000) == (runs[:-1], runs[-1])


def test_planted_runs_have_three_loads_counters_and_an_unnamed_engine():
    case = _planted.planted_case()
    assert sum(len(one.workload) for one in case.runs) == _planted.TIMED_REQUESTS
    assert all("metrics" in one.metadata and "engine" not in one.metadata for one in case.runs)
    assert len({one.workload.name for one in (*case.runs, case.held_out)}) == 4


@pytest.mark.parametrize(
    ("notes", "masked_s", "report"),
    [
        (["dense masks were not looked for: vllm"], 0.0, ("nothing", "not looked for")),
        (["the server's own counters were fitted as well: 3"], 0.0, ("counters", "looked for")),
        ([], 1e-9, ("nothing", "found")),
    ],
)
def test_a_timed_calibration_reports_what_it_used_and_searched_for(notes, masked_s, report):
    found = SimpleNamespace(notes=notes, tables=SimpleNamespace(masked_s=masked_s))
    assert tuple(_planted.noted(found, None).values()) == report
    assert _planted.noted(found, object()) == {"beside_them": "a log of steps", "masks": report[1]}


def test_the_figure_is_the_slowest_by_the_clock(monkeypatch):
    timed = iter([{"cpu_s": 3.0, "wall_s": 9.0}, {"cpu_s": 5.0, "wall_s": 5.0}, {"cpu_s": 1.0, "wall_s": 1.0}])
    monkeypatch.setattr(_planted, "timed", lambda _: next(timed))
    for name in ("planted_case", "saved_case"):
        monkeypatch.setattr(_planted, name, lambda *_: None)
    found = _planted.times(Path(), quick=False)["calibrate_300_s"]
    assert (found["value"], found["details"]["slowest"]) == (9.0, "simulated, with counters")
    assert found["details"]["cases"]["vLLM on a CPU"]["cpu_s"] == 5.0


def reports(*off: float):
    return [(x, x - 0.05, x + 0.05) for x in off]


def test_errors_are_means_over_runs_by_input():
    each = {
        "requests": reports(0.10, -0.12, 0.11, 0.13),
        "counters": reports(0.02, 0.04, -0.03, 0.05),
        "log": reports(0.05, -0.01, 0.06, 0.01),
    }
    runs = [{kind: {"work": of_kind[k]} for kind, of_kind in each.items()} for k in range(4)]
    row = _planted.counters_row("work", runs, 1.3)
    kinds = row["details"]["kinds"]
    assert row["value"] == kinds["counters"]["error"] == pytest.approx(0.035)
    assert row["ci"] == [kinds["counters"]["low"], kinds["counters"]["high"]]
    assert row["ci"][0] < row["value"] < row["ci"][1]
    assert [kinds[kind]["satisfied"] for kind in _planted.KINDS] == [0, 4, 3]
    assert kinds["requests"]["width"] == pytest.approx(0.1)
