"""Whether code was frozen before runs were measured depends on its content, whatever its commits are called."""

from __future__ import annotations

import ast
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
        ("src/lengthwise/schema/records.py", True),
        ("src/lengthwise/metrics/columns.py", True),
        ("src/lengthwise/measure/calibrate/_fit.py", True),
        ("src/lengthwise/cost/data/hosts.toml", True),
        ("benchmarks/_intervals.py", True),
        ("benchmarks/_live.py", True),
        ("benchmarks/_circle.py", True),
        ("benchmarks/engines/continuous_batching.py", True),
        ("src/lengthwise/_jit.py", True),
        ("src/lengthwise/_compiler.py", True),
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
def test_all_that_decides_over_an_error_counts_and_nothing_else(root, path, counts):
    before = _harness.code_sha256()
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text("new")
    assert (_harness.code_sha256() != before) is counts


def test_paths_named_as_code_exist():
    for of in _harness.CODE:
        assert list(_harness.ROOT.glob(of)), of


def test_no_part_of_a_campaign_is_forgotten():
    """What is imported for it from the folder of benchmarks, but for what writes rows down."""
    reported, ahead = set(), ["_live"]
    while ahead:
        name = ahead.pop()
        if name not in reported:
            reported.add(name)
            words = ast.parse((_harness.ROOT / "benchmarks" / f"{name}.py").read_text("utf-8"))
            ahead += [one for one in imported(words) if (_harness.ROOT / "benchmarks" / f"{one}.py").exists()]
    known = {path.stem for path in _harness.code_files()}
    assert reported - known == {"_harness"}


def imported(words: ast.Module) -> set[str]:
    of = [node for node in ast.walk(words) if isinstance(node, ast.Import | ast.ImportFrom)]
    plain = {alias.name for node in of if isinstance(node, ast.Import) for alias in node.names}
    return plain | {str(node.module) for node in of if isinstance(node, ast.ImportFrom)}


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
