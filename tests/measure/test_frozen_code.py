"""Whether code was frozen before runs were measured depends on its content, whatever its commits are called."""

from __future__ import annotations

import json
import re

import _harness
import pytest


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout with one file of the engine."""
    file = tmp_path / "src/lengthwise/engine/a.py"
    file.parent.mkdir(parents=True)
    file.write_text("one")
    monkeypatch.setattr(_harness, "ROOT", tmp_path)
    return tmp_path


def test_runs_are_of_frozen_code_while_its_content_is_the_same(root):
    measured = _harness.of_measuring()
    assert _harness.origin(measured) == measured | _harness.making() | {"frozen": True}
    (root / "src/lengthwise/engine/a.py").write_text("other")
    found = _harness.origin(measured)
    assert (found["frozen"], found["code_sha256"] == measured["measured_code_sha256"]) == (False, False)


def test_runs_without_a_hash_of_their_code_are_not_frozen(root):
    (root / "device.json").write_text(json.dumps({"measured_at": "2026-03-01T10:00:00+00:00"}))
    measured = _harness.measured_by(root)
    assert measured == {"measured_at": "2026-03-01T10:00:00+00:00", "measured_code_sha256": None}
    assert _harness.origin(measured)["frozen"] is False


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("src/lengthwise/policy/ranks.py", True),
        ("src/lengthwise/catalog/data/gpus.toml", True),
        ("benchmarks/engines/continuous_batching.py", True),
        ("src/lengthwise/engine/__pycache__/a.pyc", False),
        ("benchmarks/results/fidelity.json", False),
        ("benchmarks/README.md", False),
    ],
)
def test_code_and_data_count_and_no_results(root, path, counts):
    before = _harness.code_sha256()
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text("new")
    assert (_harness.code_sha256() != before) is counts


def test_the_committed_rows_record_their_code():
    saved = _harness.ROOT / "benchmarks" / "results" / "fidelity.json"
    rows = list(map(json.loads, saved.read_text("utf-8").splitlines()))
    live = [row for row in rows if row["name"].startswith("fidelity.live")]
    assert len(live) > 10
    for row in live:
        assert row["details"]["measured_at"], row["name"]
        assert len(row["details"]["code_sha256"]) == 64, row["name"]
        assert isinstance(row["details"]["frozen"], bool), row["name"]


def test_no_page_names_a_commit_that_may_be_nowhere():
    readme = (_harness.ROOT / "benchmarks" / "results" / "live" / "README.md").read_text("utf-8")
    assert not re.findall(r"\(([0-9a-f]{7,40})\)", readme)
