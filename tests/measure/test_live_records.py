"""Runs of real engines that are kept can be looked at again, without an engine, in the order they were measured."""

from __future__ import annotations

import os
from pathlib import Path

import _live as live
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RETAINED = BENCHMARKS / "results" / "live"


@pytest.mark.parametrize(("engine", "settings"), [("vllm", ("WIDE", "NARROW")), ("transformers", ("FIFO",))])
def test_retained_runs_come_round_by_round_whatever_their_files_times(engine, settings, tmp_path):
    files = sorted((RETAINED / engine).glob("*.measured.parquet"))
    for at, path in enumerate(files):
        (tmp_path / path.name).write_bytes(path.read_bytes())
        os.utime(tmp_path / path.name, (len(files) - at, len(files) - at))
    for name in ("profile.parquet", "device.json", "small.json"):
        (tmp_path / name).write_bytes((RETAINED / engine / name).read_bytes())
    circle = live.Circle(tmp_path / "out", tmp_path / "work", live.FULL, again=tmp_path)
    for setting in settings:
        runs = circle.saved_runs(getattr(live, setting))
        assert [(run.load, run.repeat) for run in runs] == [
            (load, repeat) for repeat in range(3) for load in ("static", "half", "high")
        ]
        assert all(len(run.measured.workload) == len(run.measured.records.requests.arrival_s) for run in runs)
        assert not any(run.measured.is_simulated for run in runs)
    assert len(circle.profile) > 100
    assert circle.deployment(live.WIDE).gpu.name == circle.machine["cpu"]
