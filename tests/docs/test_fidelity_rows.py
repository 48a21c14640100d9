"""Rows of the fidelity benchmark say which way is better, and in what unit, whatever made them."""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import replace

import pytest
from documents import ROOT


@pytest.fixture(scope="module")
def fidelity():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("fidelity").SECTIONS
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_of_errors_and_seconds_less_is_better_without_being_told(fidelity):
    told = {name: fidelity.row(name, {"value": 0.1}) for name in ("a.ttft_mape", "b.tpot_median_ape", "c.run_s")}
    assert [(row.unit, row.better) for row in told.values()] == [("relative", "lower")] * 2 + [("s", "lower")]
    rate = fidelity.row("d.tokens_per_s", {"value": 9.0})
    assert (rate.unit, rate.better) == ("1/s", "higher")
    assert fidelity.row("e.calibration", {"value": 3.0, "unit": "s"}).better == "lower"
    aimed = fidelity.row("fidelity.recorded.ttft_mape", {"value": 0.03})
    assert (aimed.target, aimed.better) == (0.0199, "lower")


def test_relabelling_keeps_what_was_measured(fidelity, tmp_path, monkeypatch):
    monkeypatch.setattr("_sections.RESULTS", tmp_path)
    mine = replace(fidelity, name="some")
    old = {"name": "fidelity.calibrated.ttft_mape", "value": 0.0158, "unit": "", "target": None, "better": "higher"}
    live = {"name": "fidelity.x_error", "value": 0.2, "unit": "relative", "target": 0.1, "better": "lower"}
    mine.results.write_text("".join(json.dumps(row | {"details": {"n": 3}}) + "\n" for row in (old, live)))
    mine.relabel()
    first, second = map(json.loads, mine.results.read_text().splitlines())
    assert first == old | {"unit": "relative", "better": "lower", "details": {"n": 3}}
    assert second == live | {"details": {"n": 3}}


def test_relabelling_gives_rows_the_interval_that_their_own_runs_tell(fidelity, tmp_path, monkeypatch):
    monkeypatch.setattr("_sections.RESULTS", tmp_path)
    mine = replace(fidelity, name="some")
    row = {"name": "fidelity.calibrated.ttft_mape", "value": 0.1, "unit": "relative", "target": None, "better": "lower"}
    runs = {"runs": {"one": {"p50": [0.3, 0.1, 0.05, 0.2]}}}
    given = [row | {"ci": None, "details": runs}, row | {"ci": [0.09, 0.11], "details": runs}]
    mine.results.write_text("".join(json.dumps(one) + "\n" for one in given))
    mine.relabel()
    assert [json.loads(line)["ci"] for line in mine.results.read_text().splitlines()] == [[0.05, 0.2], [0.09, 0.11]]


def test_no_committed_row_takes_an_error_or_seconds_for_better_when_larger(fidelity):
    rows = list(map(json.loads, fidelity.results.read_text("utf-8").splitlines()))
    assert rows
    for row in rows:
        target, better, unit = fidelity.stated(row["name"], row["unit"])
        assert (row["unit"], row["better"]) == (unit, better), row["name"]
        assert math.isnan(target) or row["target"] == target, row["name"]


def test_every_row_keeps_by_what_code_and_when_it_was_made(fidelity, tmp_path, monkeypatch, capsys):
    """But one that knows better: a campaign's rows keep the code that measured."""
    monkeypatch.setattr("_sections.RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["some", "--save", "--json"])
    given = {"a": {"value": 1.0}, "b": {"value": 2.0, "details": {"code_sha256": "its own"}}}
    own = {"x": lambda: [fidelity.row(name, told) for name, told in given.items()]}
    mine = replace(fidelity, name="some", modules={}, own=lambda *_: own)
    mine.main()
    capsys.readouterr()
    first, second = map(json.loads, mine.results.read_text().splitlines())
    assert first["retained"]
    assert len(first["details"]["code_sha256"]) == 64
    assert first["details"]["code_changed_at"]
    assert second["details"]["code_sha256"] == "its own"
