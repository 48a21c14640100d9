"""The code stays within the limits of docs/house.md: words of the field, deep modules, no import cycles."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "metrics.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("metrics_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_limits_hold(tool):
    metrics, found = tool.measure()
    assert set(tool.LIMITS) <= set(metrics)
    above = {name: (metrics[name], limit) for name, limit in tool.LIMITS.items() if metrics[name] > limit}
    examples = {kind: [place for place, _ in counts.most_common(20)] for kind, counts in found.items()}
    assert not above, f"(measured, limit); make metrics ARGS=--words=40 lists all words, such as {examples}"


def test_identifiers_are_split_into_words(tool):
    assert tool.words("KVCacheManager_maxTokens") == ["cache", "manager", "max", "tokens"]


def test_a_foreign_word_and_a_banned_name_are_found(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    module = tmp_path / "example.py"
    module.write_text("def zwrgl(request):\n    told = request\n    return told\n", "utf-8")
    found = tool.vocabulary([module], [])
    assert found["foreign"]["zwrgl"] == 1
    assert [place.rpartition(" ")[2] for place in found["identifiers"]] == ["told"]


def test_a_script_has_no_banned_name_and_a_dashboard_no_banned_phrase(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    script, dashboard = tmp_path / "script.py", tmp_path / "dashboard.json"
    script.write_text("zwrgl = told = 1\n", "utf-8")
    dashboard.write_text('{"title": "Who goes next", "text": "nobody"}\n', "utf-8")
    found = tool.vocabulary([], [dashboard], [script])
    assert found["identifiers"].keys() == {"script.py:1 told"}
    assert found["phrases"].keys() == {"dashboard.json:1"}
    assert not found["foreign"]


def test_cycles_are_found(tool):
    assert tool.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
