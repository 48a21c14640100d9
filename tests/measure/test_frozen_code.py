"""Whether code was frozen before runs were measured is asked of the repository's own history."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:
    _frozen, _restated = map(importlib.import_module, ("_frozen", "_restated"))
finally:
    sys.path.remove(BENCHMARKS)

BEFORE, CHANGED, BETWEEN, LATER = (f"2026-03-0{day}T10:00:00+00:00" for day in (1, 2, 3, 4))


@pytest.fixture
def history(tmp_path, monkeypatch):
    """Two commits: one that touches the engine, and one that does not."""
    git(tmp_path, "init", "-q")
    for path, when in (("src/lengthwise/engine/a.py", CHANGED), ("docs/b.md", LATER)):
        file = tmp_path / path
        file.parent.mkdir(parents=True)
        file.write_text(when)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-q", "-m", "one", when=when)
    monkeypatch.setattr(_frozen, "ROOT", tmp_path)
    return git(tmp_path, "rev-parse", "--short=10", "HEAD").strip()


def git(folder: Path, *words: str, when: str = BEFORE) -> str:
    names = {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    dates = {
        "GIT_AUTHOR_DATE": when,
        "GIT_COMMITTER_DATE": when,
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
    }
    done = subprocess.run(
        ["git", *words], cwd=folder, env=names | dates, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    ("measured", "frozen"), [(BEFORE, False), (BETWEEN, True), (LATER, True), (None, False)]
)
def test_only_changes_of_what_decides_over_an_error_count(history, measured, frozen):
    told = _frozen.facts(history, measured)
    assert told == {"measured_at": measured, "code_changed_at": CHANGED[:16] + "+00:00", "frozen": frozen}


@pytest.mark.parametrize("code", ["unknown", "-dirty", "0000000000"])
def test_code_that_nobody_knows_is_not_frozen(history, code):
    code = history + code if code == "-dirty" else code
    assert _frozen.facts(code, LATER) == {"measured_at": LATER, "code_changed_at": None, "frozen": False}


def test_a_kept_row_is_asked_anew_and_what_was_claimed_of_it_is_gone(history, tmp_path):
    folder = tmp_path / "benchmarks" / "results" / "live" / "transformers"
    folder.mkdir(parents=True)
    row = {"name": "fidelity.live_transformers.jct_p50_error", "details": {"code": history, "fresh": True}}
    assert _frozen.restated(row)["frozen"] is False
    (folder / "device.json").write_text(json.dumps({"measured_at": BETWEEN}))
    assert _frozen.restated(row) == {"code": history} | _frozen.facts(history, BETWEEN)
    row["details"]["measured_at"] = BEFORE  # of its own campaign
    assert _frozen.restated(row)["frozen"] is False
    other = {"name": "profile.cv_median_error", "details": {"code": history}}
    assert _frozen.restated(other) == other["details"]


def test_kept_intervals_are_told_their_widths(history):
    each = {"high": {"tpot_p50": [0.1, 0.11, 0.08, 0.12]}}
    row = {"name": "fidelity.live.interval_coverage", "details": {"level": 0.95, "each": each}}
    assert _restated.of_kept(row)["widths"]["widest_times"] == pytest.approx(1.5)
    assert "widths" not in _restated.of_kept(
        {"name": "fidelity.live.jct_p50_error", "details": {"each": each}}
    )


def test_the_committed_rows_say_of_themselves_what_history_says():
    kept = _frozen.ROOT / "benchmarks" / "results" / "fidelity.json"
    rows = list(map(json.loads, kept.read_text("utf-8").splitlines()))
    live = [
        row for row in rows if row["name"].rpartition(".")[0] in _frozen.KEPT and "code" in row["details"]
    ]
    assert live
    for row in live:
        assert "fresh" not in row["details"]
        changed = _frozen.facts(row["details"]["code"], row["details"]["measured_at"])["code_changed_at"]
        if changed is not None:  # a checkout without its history
            assert row["details"] == _frozen.restated(row), row["name"]
