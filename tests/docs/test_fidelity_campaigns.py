"""No figure of fidelity is replaced in silence, and each share says what it is of."""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import replace

import pytest
from documents import ROOT
from generated_pages import imported


@pytest.fixture(scope="module")
def generator():
    with imported("generate_fidelity") as script:
        yield script


@pytest.fixture
def fidelity(tmp_path, monkeypatch):
    """The sections, of which results go to an empty folder."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        sections = importlib.import_module("fidelity").SECTIONS
        monkeypatch.setattr("_sections.RESULTS", tmp_path)
        yield replace(sections, name="some")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def campaign(error: float, load: float, retained: str, *, late: tuple[str, ...] = ()) -> list[dict]:
    """The rows of a circle: one load that was held out, of two repeats, and one that was learnt from."""
    usual = {"unit": "relative", "target": 0.1, "better": "lower", "ci": None, "retained": retained}
    names = ("a-static-0", "a-static-1", "a-high-0", "a-high-1")
    told = {
        "signed_by_load": {"a-high": {"calibrated": error, "repeats_spread": load / 10}},
        "signed_by_run": {name: {"calibrated": error, "measured_s": load + error} for name in names},
        "range": [error, error],
    }
    kinds = {
        "learnt_of": ["a-static-0", "a-static-1"],
        "warnings": {name: ["the worst 126.7 ms; median TTFT 3982.2 ms"] for name in late},
        "machine": {"cores": 2, "float32_gflops_one_thread": 85.2},
        "runs": {name: {"load_1m": load + at} for at, name in enumerate(names)},
    }
    name = "fidelity.live.jct_p50_error"
    calibration = {"name": "fidelity.live.calibration", "value": 3.0, "unit": "s", "details": kinds}
    return [{"name": name, "value": error, "details": told} | usual, usual | calibration | {"target": None}]


def times(measured: str, changed: str, *, frozen: bool) -> dict:
    return {"measured_at": measured, "code_changed_at": changed, "frozen": frozen}


def part(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_a_campaign_that_was_replaced_stands_beside_the_newer_one_with_its_machine(generator):
    old = campaign(0.145, 1.9, "2026-11-22T01:08+00:00", late=("a-static-0", "a-high-1"))
    new = campaign(0.041, 1.4, "2026-11-22T06:39+00:00", late=("a-static-0",))
    new[0]["details"] |= times("2026-11-22T05:24+00:00", "2026-11-22T06:01+00:00", frozen=False)
    text = generator.page(new, old)
    told = part(text, "A real engine on this machine")
    lines = [line for line in told.splitlines() if line.startswith("| 2026")]
    assert lines == [
        "| 2026-11-22 01:08 | - | - | - | 1.9 to 4.9 on 2 cores | 85 | 2 of 4 | 19 % | 14.5 % | - | - | - | - |",
        (
            "| 2026-11-22 06:39 | 2026-11-22 05:24 | 2026-11-22 06:01 | no "
            "| 1.4 to 4.4 on 2 cores | 85 | 1 of 4 | 14 % | 4.1 % | - | - | - | - |"
        ),
    ]
    assert "An earlier campaign (load average 1.9 to 4.9 on 2 cores) told other errors" in text
    assert "kept below: JCT P50 14.5 %." in text


def test_a_campaign_was_blind_only_where_its_code_is_older_than_its_runs(generator):
    old, new = campaign(0.145, 1.9, "2026-11-21T01:08"), campaign(0.041, 1.4, "2026-11-22T06:39")
    new[0]["details"] |= times("2026-11-22T05:24+00:00", "2026-11-22T04:10+00:00", frozen=True)
    text = generator.page(new, old)
    assert "| 2026-11-22 06:39 | 2026-11-22 05:24 | 2026-11-22 04:10 | yes |" in text
    assert "is the one by which these runs were measured, or older" in text


def test_without_an_earlier_campaign_nothing_is_said_of_one(generator):
    text = generator.page(campaign(0.041, 1.4, "2026-11-22T06:39+00:00"))
    assert "arlier campaign" not in text
    assert "Every campaign so far" not in text


def test_runs_with_doubts_are_named_by_load_and_by_what_they_were_for(generator):
    rows = campaign(0.041, 1.4, "", late=("a-static-0", "a-static-1", "a-high-1"))
    told = part(generator.page(rows), "A real engine on this machine")
    assert (
        "**3 of 4 runs carry doubts** (2 of 2 learnt from, 1 of 2 held out): a-high (1 of 2), a-static (2 of 2)."
        in told
    )
    assert "by up to 127 ms, where the median first token takes 4.0 s and more" in told


def test_a_share_says_of_how_many_values_and_pairs_it_is(generator):
    by_pair = {"m on x": {"n": 20, "coverage": 0.9}, "m on y": {"n": 10, "coverage": 0.6}}
    usual = {"unit": "share", "target": 0.9, "better": "higher"}
    rows = [
        usual | {"name": "fidelity.brackets.ttft_coverage", "value": 0.8, "ci": [0.6, 0.9],
                 "details": {"report": {"n": 30, "pairs": 2}, "by_pair": by_pair}},
        usual | {"name": "calibrate_coverage", "value": 1.0, "ci": None, "details": {"n": 36, "of_runs": 7}},
    ]  # fmt: skip
    told = part(generator.page(rows), "Do intervals hold")
    assert "`fidelity.brackets.ttft_coverage`: 80 % of 30 in 2 pairs [60 to 90]" in told
    assert "`calibrate_coverage`: 100 % of 36 in 7 runs (an older count:" in told
    rows[1]["details"] |= {"missing": {"n": 4, "satisfied": 3}, "by_parameter": {"work": {"n": 36, "satisfied": 36}}}
    told = part(generator.page(rows), "Do intervals hold")
    assert "of 36 in 7 runs (work 36 of 36; of what was not told, 3 of 4)" in told
    assert "| m on x | 90 % of 20 |" in told
    assert "| m on y | 60 % of 10 |" in told


def test_rows_of_a_version_that_is_not_known_are_refused(generator, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"name": "a", "version": 2}) + "\n")
    with pytest.raises(SystemExit, match=r"rows\.json must hold rows of version 1; a is of 2"):
        list(generator.results(path))


def saved(sections, path) -> list[tuple[str, float]]:
    text = path.read_text("utf-8") if path.exists() else ""
    rows = map(json.loads, text.splitlines())
    return [(row["name"].rpartition(".")[2], row["value"]) for row in rows]


def test_a_campaign_that_is_measured_anew_is_kept_as_an_earlier_one(fidelity, tmp_path):
    first, again, second = tmp_path / "1.json", tmp_path / "2.json", tmp_path / "3.json"
    rows = campaign(0.145, 1.9, "")
    better = json.loads(json.dumps(rows))
    better[0]["value"] = 0.1  # of the same runs, by newer code
    for path, told in ((first, rows), (again, better), (second, campaign(0.041, 1.4, ""))):
        path.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "retained"}) + "\n" for row in told))
    taken = fidelity.take(first)
    assert [math.isnan(row.target) for row in taken] == [False, True]
    fidelity.save(taken)
    fidelity.save(fidelity.take(again))
    assert saved(fidelity, fidelity.results) == [("calibration", 3.0), ("jct_p50_error", 0.1)]
    assert not fidelity.earlier.exists()
    fidelity.save(fidelity.take(second))
    assert saved(fidelity, fidelity.results) == [("calibration", 3.0), ("jct_p50_error", 0.041)]
    assert saved(fidelity, fidelity.earlier) == [("calibration", 3.0), ("jct_p50_error", 0.1)]
    versions = [json.loads(line)["version"] for line in fidelity.results.read_text().splitlines()]
    assert versions == [1, 1]


def test_the_campaigns_that_are_kept_are_none_of_the_page_s_own_figures(generator):
    now = {row["name"]: row for row in generator.results(generator.RESULTS)}
    before = list(generator.results(generator.EARLIER))
    assert before
    for row in before:
        assert row["retained"] < now[row["name"]]["retained"], row["name"]
