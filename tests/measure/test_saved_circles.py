"""Runs of real engines that are kept, calibrated and simulated again: no engine, no noise, hence close bounds."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import _circle
import _live as live
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RETAINED = BENCHMARKS / "results"
FIGURE = 0.01
"""A figure (the median over loads) may be so far from the one that is saved: what another order of sums may move."""
LOAD = 0.05
"""And the median of a load. BLAS kernels of other CPUs end the search at parameters that differ by up to 1 %, far
within their intervals; near capacity this moves a median by up to 4 points."""


def saved(prefix: str) -> dict[str, dict]:
    """The committed rows of a circle's errors, by metric."""
    rows = map(json.loads, (RETAINED / "fidelity.json").read_text("utf-8").splitlines())
    own = {row["name"].removeprefix(f"{prefix}."): row for row in rows if row["name"].startswith(f"{prefix}.")}
    return {name.removesuffix("_error"): row for name, row in own.items() if name.endswith("_error")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefix", "engine", "settings"),
    [("fidelity.live", "vllm", ("WIDE", "NARROW")), ("fidelity.live_transformers", "transformers", ("FIFO",))],
)
def test_retained_runs_are_predicted_as_well_as_the_page_states(prefix, engine, settings, tmp_path):
    circle = live.Circle(tmp_path, tmp_path, live.FULL, again=RETAINED / "live" / engine)
    of = [getattr(live, name) for name in settings]
    runs = {setting.name: circle.saved_runs(setting) for setting in of}
    split = circle.split([run for each in runs.values() for run in each], of[0])
    tables = split.calibrated().tables
    errors: dict[str, dict[str, float]] = {}
    for setting in of:
        errors |= _circle.errors(circle.deployment(setting), tables, runs[setting.name])
    rows = saved(prefix)
    assert rows.keys() == _circle.METRICS.keys()
    reported = {
        metric: _circle.by_load({name: of[metric] for name, of in errors.items()}, split.held_out, metric)
        for metric in rows
    }
    moved = list(otherwise(rows, reported))
    assert not moved, "; ".join(moved)


def otherwise(rows, report):
    """In words, what is further off than it was saved, or nearer. ``report``: by metric, each load's signed error."""
    for metric, row in rows.items():
        was = {load: of["calibrated"] for load, of in row["details"]["signed_by_load"].items()}
        assert report[metric].keys() == was.keys()
        figure = statistics.median(map(abs, report[metric].values()))
        if abs(figure - row["value"]) > FIGURE:
            yield f"{metric}: {figure:.2%} off, saved {row['value']:.2%}"
        for load, error in report[metric].items():
            if abs(abs(error) - abs(was[load])) > LOAD:
                yield f"{metric} of {load}: {abs(error):.2%} off, saved {abs(was[load]):.2%}"


@pytest.mark.parametrize(
    ("more", "found"), [(0.0, False), (0.005, False), (-0.005, False), (0.06, True), (-0.06, True)]
)
def test_errors_that_move_by_points_are_found_and_no_others(more, found):
    rows = saved("fidelity.live")
    for row in rows.values():  # none so small that it cannot shrink by points
        each = row["details"]["signed_by_load"].values()
        for of in each:
            of["calibrated"] = abs(of["calibrated"]) + 0.1
        row["value"] = statistics.median(of["calibrated"] for of in each)
    reported = {
        metric: {load: of["calibrated"] + more for load, of in row["details"]["signed_by_load"].items()}
        for metric, row in rows.items()
    }
    moved = list(otherwise(rows, reported))
    assert len(moved) == (sum(1 + len(of) for of in reported.values()) if found else 0)
