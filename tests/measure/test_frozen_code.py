"""Whether code was frozen before runs were measured is told by what the code is, whatever its commits are called."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
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
    dates = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when, "PATH": os.environ["PATH"], "HOME": str(folder)}
    done = subprocess.run(["git", *words], cwd=folder, env=names | dates, capture_output=True, text=True, check=True)
    return done.stdout


def unhashed(measured: str | None) -> dict:
    return {"measured_at": measured, "measured_code_sha256": None}


@pytest.mark.parametrize(("measured", "frozen"), [(BEFORE, False), (BETWEEN, True), (LATER, True), (None, False)])
def test_without_a_hash_of_their_code_runs_must_be_younger_than_the_last_change(history, measured, frozen):
    told = _frozen.metadata(unhashed(measured))
    assert told == unhashed(measured) | {
        "code_sha256": _frozen.code_sha256(),
        "code_changed_at": CHANGED[:16] + "+00:00",
        "frozen": frozen,
    }


def test_runs_are_of_the_code_whose_content_is_the_same_whatever_its_history(history, tmp_path):
    kept = _frozen.of_measuring()
    assert _frozen.metadata(kept)["frozen"] is True
    git(tmp_path, "commit", "-q", "--amend", "-m", "rewritten", when=LATER)  # the old name is of no commit
    assert _frozen.metadata(kept)["frozen"] is True
    (tmp_path / "src/lengthwise/engine/a.py").write_text("other")
    told = _frozen.metadata(kept)
    assert (told["frozen"], told["code_sha256"] == kept["measured_code_sha256"]) == (False, False)
    assert told["code_changed_at"] >= kept["measured_at"]  # now, since no commit holds it


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("src/lengthwise/policy/ranks.py", True),
        ("src/lengthwise/schema/records.py", True),
        ("src/lengthwise/metrics/columns.py", True),
        ("src/lengthwise/measure/calibrate/_fit.py", True),
        ("src/lengthwise/cost/data/hosts.toml", True),
        ("benchmarks/_circle_rows.py", True),
        ("benchmarks/_live.py", True),
        ("benchmarks/_device.py", True),
        ("benchmarks/engines/continuous_batching.py", True),
        ("src/lengthwise/_jit.py", True),
        ("src/lengthwise/backend/openai_protocol.py", True),
        ("src/lengthwise/catalog/data/gpus.toml", True),
        ("src/lengthwise/measure/load/bench.py", True),
        ("src/lengthwise/workload/readers.py", True),
        ("src/lengthwise/backend/kubernetes.py", False),
        ("src/lengthwise/schema/app.py", False),
        ("src/lengthwise/engine/__pycache__/a.pyc", False),
        ("src/lengthwise/gateway/app.py", False),
        ("benchmarks/_silicon.py", False),
    ],
)
def test_all_that_decides_over_an_error_counts_and_nothing_else(history, tmp_path, path, counts):
    before = _frozen.code_sha256()
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("new")
    assert (_frozen.code_sha256() != before) is counts


def test_what_is_named_as_code_is_there():
    for of in _frozen.CODE:
        assert list(_frozen.ROOT.glob(of)), of


def test_no_part_of_a_campaign_is_forgotten():
    """What is imported for it from the folder of benchmarks, but for what writes rows down."""
    told, ahead = set(), ["_live"]
    while ahead:
        name = ahead.pop()
        if name not in told:
            told.add(name)
            words = ast.parse((_frozen.ROOT / "benchmarks" / f"{name}.py").read_text("utf-8"))
            ahead += [one for one in imported(words) if (_frozen.ROOT / "benchmarks" / f"{one}.py").exists()]
    known = {path.stem for path in _frozen._files()}
    assert told - known == {"_frozen", "_harness"}


def imported(words: ast.Module) -> set[str]:
    of = [node for node in ast.walk(words) if isinstance(node, ast.Import | ast.ImportFrom)]
    plain = {alias.name for node in of if isinstance(node, ast.Import) for alias in node.names}
    return plain | {str(node.module) for node in of if isinstance(node, ast.ImportFrom)}


def test_where_nobody_has_a_history_code_is_known_by_its_content_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(_frozen, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert _frozen.metadata(unhashed(LATER))["code_changed_at"] is None
    assert _frozen.metadata(unhashed(LATER))["frozen"] is False
    assert _frozen.metadata(_frozen.of_measuring())["frozen"] is True


def live_row(**details: object) -> dict:
    return {"name": "fidelity.live_transformers.jct_p50_error", "details": details}


def test_what_a_kept_row_knows_of_its_code_is_not_forgotten(history):
    known = {"code": "0123456789", "measured_at": BEFORE, "code_changed_at": CHANGED, "frozen": False}
    told = _frozen.restated(live_row(**known, fresh=True))
    assert told == known | {"measured_code_sha256": None, "code_sha256": None}
    assert _frozen.restated(live_row(**told)) == told
    other = {"name": "profile.cv_median_error", "details": {"code": history}}
    assert _frozen.restated(other) == other["details"]


def test_a_kept_row_learns_what_its_campaign_keeps_and_only_of_its_own(history, tmp_path):
    folder = tmp_path / "benchmarks" / "results" / "live" / "transformers"
    folder.mkdir(parents=True)
    kept = {"measured_at": BETWEEN, "measured_code_sha256": "a" * 64}
    (folder / "device.json").write_text(json.dumps(kept))
    told = _frozen.restated(live_row(code_sha256="a" * 64, code_changed_at=LATER))
    assert (told["measured_at"], told["frozen"]) == (BETWEEN, True)
    assert _frozen.restated(live_row(code_sha256="b" * 64, code_changed_at=BEFORE))["frozen"] is False
    other = _frozen.restated(live_row(code_sha256="a" * 64, code_changed_at=LATER, measured_at=BEFORE))
    assert (other["measured_code_sha256"], other["frozen"]) == (None, False)


def test_kept_intervals_are_told_their_widths(history):
    each = {"high": {"tpot_p50": [0.1, 0.11, 0.08, 0.12]}}
    row = {"name": "fidelity.live.interval_coverage", "details": {"level": 0.95, "each": each}}
    assert _restated.of_kept(row)["widths"]["widest_times"] == pytest.approx(1.5)
    assert "widths" not in _restated.of_kept({"name": "fidelity.live.jct_p50_error", "details": {"each": each}})


def test_the_committed_rows_know_of_their_code_and_lose_nothing_when_restated():
    kept = _frozen.ROOT / "benchmarks" / "results" / "fidelity.json"
    rows = list(map(json.loads, kept.read_text("utf-8").splitlines()))
    live = [row for row in rows if row["name"].rpartition(".")[0] in _frozen.RETAINED]
    assert len(live) > 10
    for row in live:
        details = row["details"]
        assert details["measured_at"], row["name"]
        assert details["code_changed_at"], row["name"]
        assert len(details["code_sha256"]) == 64, row["name"]
        assert details == _frozen.restated(row), row["name"]


def test_no_page_names_a_commit_that_may_be_nowhere():
    readme = (_frozen.ROOT / "benchmarks" / "results" / "live" / "README.md").read_text("utf-8")
    assert not re.findall(r"\(([0-9a-f]{7,40})\)", readme)
