"""The generated parts of the documents agree with the code and with benchmarks/results."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from documents import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.glob("*.md") if "[[[cog" in path.read_text("utf-8"))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], check=False, capture_output=True, text=True, timeout=120, cwd=ROOT
    )


@pytest.mark.parametrize("page", PAGES)
def test_tables_agree_with_the_results(page):
    done = run("-m", "cogapp", "-P", "--check", "--diff", "-I", "docs", page)
    assert done.returncode == 0, f"run: make tables\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def test_the_reference_agrees_with_the_code():
    done = run("docs/generate_reference.py", "--check")
    assert done.returncode == 0, f"run: make tables\n{done.stderr[-2000:]}"


def test_every_page_of_measurements_has_tables():
    guides = ("guide-agents", "guide-gateway", "guide-memory-by-length", "guide-split-models", "guide-which-deployment")
    names = ("apps", "benchmarks", "exegpt", "fidelity", "gateway", *guides, "lengths", "papers")
    assert [f"docs/{name}.md" for name in names] == PAGES


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import tables

    return tables


@pytest.mark.parametrize(
    ("value", "interval", "more", "expected"),
    [
        (0.9, None, True, "met, no interval"),
        (0.9, [0.7, 1.0], True, "borderline"),
        (0.9, [0.85, 1.0], True, "met"),
        (0.5, [0.4, 0.9], True, "**missed**"),
        (0.5, [0.4, 0.6], False, "met"),
        (0.79, [0.7, 0.9], False, "borderline"),
    ],
)
def test_a_verdict_counts_the_complete_interval(tables, value, interval, more, expected):
    row = {"name": "figure", "value": value, "ci": interval}
    assert tables.verdict(row, 0.8, more=more) == expected


def test_coverage_must_include_the_nominal_level(tables):
    row = {"name": "interval_coverage", "value": 1.0, "ci": [0.97, 1.0]}
    assert tables.verdict(row, 0.95, more=True) == "**missed**"
    assert tables.verdict({**row, "ci": [0.9, 1.0]}, 0.95, more=True) == "consistent"


def test_a_median_that_meets_its_aim_names_the_loads_that_do_not(tables):
    loads = {"half": {"calibrated": -0.05}, "high": {"calibrated": 0.2}}
    row = {"name": "error", "value": 0.06, "ci": [0.05, 0.07], "details": {"signed_by_load": loads}}
    assert tables.verdict(row, 0.1, more=False) == "met by the median, 1 of 2 loads"


def test_details_of_a_figure_are_printed_and_a_wrong_name_lists_the_figures():
    shown = run("docs/show_results.py", "fidelity", "fidelity.live.jct_p50_error")
    assert shown.returncode == 0
    assert "narrow-high" in shown.stdout
    wrong = run("docs/show_results.py", "fidelity", "fidelity.live.nothing")
    assert wrong.returncode == 2
    assert "fidelity.live.jct_p50_error" in wrong.stderr


def test_every_missed_aim_of_applications_is_on_the_page():
    page = (ROOT / "docs" / "apps.md").read_text("utf-8")
    lines = (ROOT / "benchmarks" / "results" / "apps.json").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if None not in (row["value"], row["target"])]
    missed = [row["name"] for row in rows if (row["value"] < row["target"]) == (row["better"] == "higher")]
    assert [name for name in missed if f"`{name}`" not in page] == []
    assert [row["name"] for row in rows if row["ci"] and row["ci"][0] == row["ci"][1]] == [], "one run has no range"
