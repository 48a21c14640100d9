"""The page of fidelity is what the committed results say, however much of them there is."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest
from documents import ROOT

OTHERS = ("Vidur", "LLMServingSim 2", "Frontier", "BLIS", "SamuLLM", "AIConfigurator")


@pytest.fixture(scope="module")
def generator():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        yield importlib.import_module("generate_fidelity")
    finally:
        sys.path.remove(str(ROOT / "docs"))


def test_the_page_is_what_the_committed_results_say():
    script = [sys.executable, str(ROOT / "docs/generate_fidelity.py"), "--check"]
    done = subprocess.run(script, check=False, capture_output=True, timeout=60)
    assert done.returncode == 0, f"run: python docs/generate_fidelity.py\n{done.stdout.decode()}"


def row(name: str, value: float | None, **more: object) -> dict:
    usual = {"unit": "relative", "target": None, "better": "lower", "ci": None, "details": {}}
    return {"name": name, "value": value} | usual | more


def table(text: str, title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    part = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def glance(text: str) -> dict[str, list[str]]:
    """TTFT, TPOT and latency by what was measured."""
    return {cells[2]: cells[3:] for cells in table(text, "At a glance")}


def test_without_results_there_are_dashes_and_what_others_state(generator):
    text = generator.page([])
    rows = table(text, "At a glance")
    assert all(len(cells) == 6 for cells in rows)
    ours = [cells for cells in rows if cells[0] == "**lengthwise**"]
    assert len(ours) == 8
    assert all(cells[3:] == ["-", "-", "-"] for cells in ours)
    for name in OTHERS:
        assert any(name in cells[0] for cells in rows), name
    assert glance(text)["vLLM on H100"] == ["median 17.6 % (P99 29 %)", "median 7.1 % (ITL)", "median 6.7 %"]
    assert table(text, "Figures and aims") == []


def test_each_ground_truth_stands_in_its_columns_with_what_is_known_of_chance(generator):
    runs = {"held_out": ["a", "b", "c"], "range": [0.02, 0.5]}
    told = glance(
        generator.page(
            [
                row("fidelity.live.ttft_p50_error", 0.2, details=runs, target=0.1),
                row("fidelity.live.ttft_p95_error", 0.3, details=runs),
                row("fidelity.live.jct_p50_error", None),
                row("fidelity.recorded.tpot_mape", 0.012, ci=[0.01, 0.0155],
                    details={"llmservingsim_mape": 0.0064}),
                row("fidelity.silicon.tables.tpot_median_ape", 0.04, details={"interval": [0.03, 0.06]}),
                row("fidelity.gpu.h200.jct_p95_error", 0.07, details=runs),
            ]
        )
    )  # fmt: skip
    live = "P50 20 %, range [2, 50] over 3 runs; P95 30 %, range [2, 50] over 3 runs"
    assert told["vLLM on a CPU: 85 % of capacity, and another setting"] == [live, "-", "-"]
    assert told["three recorded vLLM runs on RTX 4090 and RTX PRO 6000"] == ["-", "1.2 % [1, 1.55]", "-"]
    assert told["the same three recorded runs, from its own summary files"] == ["-", "0.64 %", "-"]
    assert told["those of them that have tables"] == ["-", "median 4 % [3, 6]", "-"]
    assert told["transformers on a GPU (h200): 85 % of capacity"][2] == "P95 7 %, range [2, 50] over 3 runs"


def test_figures_say_whether_their_aim_is_met_and_sections_tell_the_rest(generator):
    runs = {"range": [0.05, 0.12], "held_out": ["a", "b"], "measured_s": {"a": 1.5, "b": 2.5}}
    text = generator.page(
        [
            row("fidelity.live.jct_p50_error", 0.08, target=0.1, details=runs),
            row("fidelity.live.tpot_p50_error", 0.08, target=0.05, details=None),
        ]
    )
    name, value, aim, met = table(text, "Figures and aims")[0]
    assert (value, aim, met) == ("8 %, range [5, 12] over 2 runs", "10 %", "met")
    assert name == "`fidelity.live.jct_p50_error`"
    assert table(text, "Figures and aims")[1][3] == "missed"
    section = text.partition("## A real engine on this machine")[2].partition("\n## ")[0]
    assert "measured s: a 1.5, b 2.5." in section
    assert not re.search(r"^range \[|, range \[0", section, re.MULTILINE)
