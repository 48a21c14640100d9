"""What the benchmark of applications works out itself: gains over pairs of draws, errors over runs, files it writes."""

from __future__ import annotations

import importlib
import json
import sys
from types import SimpleNamespace

import pytest
from documents import ROOT

from lengthwise.schema.app import AppMethod
from lengthwise.schema.estimate import Estimate


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def made_of(ours_s, theirs_s, *, search_s=(1.0, 0.0)):
    """A plan of two methods."""
    methods = [
        AppMethod(name, Estimate(sum(ends) / len(ends)), 0.0, took, 1, 1.0, tuple(ends))
        for name, ends, took in zip(("lengthwise", "max"), (ours_s, theirs_s), search_s, strict=True)
    ]
    return SimpleNamespace(method="lengthwise", methods=methods), methods


def test_a_gain_holds_the_search_and_draws_that_are_long_for_both_tell_nothing(benchmark):
    paired = benchmark("_apps_study").paired
    made, (_, other) = made_of((99.0, 199.0, 399.0), (200.0, 400.0, 800.0))
    low, high = paired(other, made)
    assert low == pytest.approx(2.0)
    assert high == pytest.approx(2.0)


def test_a_gain_that_draws_disagree_on_has_an_interval_about_the_ratio_of_means(benchmark):
    paired = benchmark("_apps_study").paired
    made, (_, other) = made_of((100.0, 100.0, 100.0), (110.0, 120.0, 130.0), search_s=(0.0, 0.0))
    low, high = paired(other, made)
    assert (low + high) / 2 == pytest.approx(1.2)
    assert high - 1.2 == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)  # Student's t, two degrees of freedom


def test_one_draw_has_no_interval_and_neither_has_a_plan_over_itself(benchmark):
    paired = benchmark("_apps_study").paired
    made, (_, other) = made_of((100.0,), (110.0,))
    assert paired(other, made) is None
    made, (mine, _) = made_of((100.0, 90.0), (110.0, 120.0))
    assert paired(mine, made) is None


def test_the_gain_over_the_greedy_is_of_all_kept_cases(benchmark, tmp_path, monkeypatch):
    greedy = benchmark("_apps_greedy")
    gains = {"chain": (1.0, 0.5), "mixed": (4.0, 2.0)}
    rows = [
        {
            "name": f"apps.{study}.cases",
            "details": {
                "cases": [{"case": str(n), "methods": {"samullm": {"gain": gain}}} for n, gain in enumerate(each)]
            },
        }
        for study, each in gains.items()
    ]
    kept = tmp_path / "apps.json"
    kept.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"name": "apps.search_s"}]))
    monkeypatch.setattr(greedy, "RESULTS", kept)
    found = greedy.figures(tmp_path, fast=False)
    assert found["apps.better_over_greedy"]["value"] == pytest.approx(4 ** (1 / 4))
    assert found["apps.better_over_greedy_lowest"] == {"value": 0.5, "details": {"case": "chain: 1"}}
    kept.write_text(json.dumps({"name": "apps.search_s"}) + "\n")
    with pytest.raises(FileNotFoundError, match="--save"):
        greedy.figures(tmp_path, fast=False)


def test_the_error_before_live_engines_is_of_runs_whichever_way_they_are_off(benchmark):
    row = benchmark("_apps_live").row([{"errors": [0.1, -0.1]}, {"errors": [0.2, -0.2]}], "paper", "of a sample")
    assert row["value"] == pytest.approx(0.15)
    low, high = row["ci"]
    assert low == pytest.approx(0.15 - (high - 0.15))
    assert high - 0.15 == pytest.approx(3.182 * 0.0577 / 2, rel=1e-3)
    assert benchmark("_apps_live").row([{"errors": [-0.1]}], "paper", "")["ci"] is None


def test_the_live_application_is_one_that_can_be_loaded_with_lengths_known_or_not(benchmark, tmp_path, monkeypatch):
    from lengthwise.config.app_file import load_app

    live = benchmark("_apps_live")
    monkeypatch.setattr(live, "require", lambda: "python")
    place = live.Place(tmp_path)
    (tmp_path / "models").mkdir()
    place.write("run", ["Why?", "How?"], ())
    place.write("known", ["Why?", "How?"], [3, 40])
    file = load_app(place.app("run", 2))
    assert [one.name for one in file.loaded] == list(live.MODELS)
    assert [one.max_num_seqs for one in file.loaded] == list(live.SEATS.values())
    assert file.cluster.gpus == 2
    assert file.app.calls[0].report.output_tokens == ""
    known = load_app(place.app("known", 1, known=True))
    assert known.app.calls[0].report.output_tokens == "tokens"
    assert [int(one["tokens"]) for one in known.rows.rows] == [3, 40]
