"""Every path, command and figure on the page of the papers exists, and every verdict is one of four."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

from lengthwise.cli.program import app

ROOT = Path(__file__).parents[2]
PARTS = tomllib.loads((ROOT / "docs" / "papers.toml").read_text("utf-8"))["row"]
PAPERS = ("ExeGPT", "SamuLLM", "ELIS", "Multi-Bin Batching", "Vidur")
FIGURES = {
    row["name"]: row
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    if not path.stem.endswith("-earlier")
    for row in map(json.loads, path.read_text("utf-8").splitlines())
}
COMMANDS = sorted({part["command"] for part in PARTS if "command" in part})


def test_every_paper_is_listed_and_printed():
    assert list(dict.fromkeys(part["paper"] for part in PARTS)) == list(PAPERS)
    page = (ROOT / "docs" / "papers.md").read_text("utf-8")
    for paper in PAPERS:
        assert f'tables.papers("{paper}")' in page


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part['paper']}: {part['item']}")
def test_a_part_has_a_place_a_result_and_a_verdict(part):
    assert set(part) <= {"paper", "item", "what", "where", "command", "stated", "figure", "ours", "verdict"}
    assert re.fullmatch(r"same|better|(differs|not done): .+", part["verdict"])
    for path in part["where"]:
        assert (ROOT / path).exists(), path
    if part["verdict"].startswith("not done"):
        return
    assert part["where"]
    if "figure" in part:
        assert part["figure"] in FIGURES


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_exists_with_its_options(command, monkeypatch):
    program, *words = shlex.split(command)
    if program == "lengthwise":
        found = get_command(app)
        while hasattr(found, "summaries"):
            step = next(one for one in (" ".join(words[:2]), words[0]) if one in found.summaries)
            found, words = found.get_command(None, step), words[len(step.split()) :]
        known = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known
        files = [word for word in words if "/" in word and not word.startswith("--") and "=" not in word]
        assert all((ROOT / word).exists() for word in files)
    elif program == "pytest":
        path, _, test = words[0].partition("::")
        assert (ROOT / path).exists()
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / path).read_text("utf-8")
    else:
        assert program in ("python", "make"), command
        if program == "make":
            assert f"\n{words[0]}:" in (ROOT / "Makefile").read_text("utf-8")
            return
        assert (ROOT / words[0]).exists()
        monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
        if "--only" in words:
            modules = import_module("_sections").MODULES[Path(words[0]).stem]
            wanted = words[words.index("--only") + 1].split(",")
            assert all(any(name == one or name.startswith(f"{one}.") for name in modules) for one in wanted), wanted


def value(name):
    return FIGURES[name]["value"]


def details(name):
    return FIGURES[name]["details"]


def span(values, digits=0):
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def medians(metric, first, last):
    """Return the medians in percent of measured deployments with ``first`` to ``last`` concurrent requests."""
    rows = details(f"fidelity.silicon.gpu_out.{metric}_median_ape")["by_concurrency"]
    several = {int(size.split()[0]): row["p50"] for size, row in rows.items() if row["points"] > 1}
    return [100 * median for size, median in several.items() if first <= size <= last]


def gains(method):
    names = [f"apps.{app}.{method}_over_{one}" for app in APPS for one in ("max", "min")]
    values = [value(f"{name}_{end}") for name in names for end in ("lowest", "highest")]
    return f"{min(values):.2f} to {max(values):.1f} times"


def stage(schedule, side):
    of = details(f"exegpt.variance.{schedule}.as_it_comes")[side]
    return f"{of['mean_s']:.2f} s, {100 * of['range']:.1f} %"


APPS = ("ensembling", "routing", "chain", "mixed")
TABLE_5 = list(details("elis.table5").values())
SHORTER = [100 * (1 - cell["ISRTF"] / cell["FCFS"]) for cell in TABLE_5]
CLOSED = [100 * (cell["FCFS"] - cell["ISRTF"]) / (cell["FCFS"] - cell["SJF"]) for cell in TABLE_5]
LATER = details("exegpt.drift.waa")["moves"][2]
NOT_MONOTONE = details("exegpt.nonmonotone_share")
RRA, SMALL = details("exegpt.gain_large_rra"), details("exegpt.gain_small_mid")
IDLE = details("apps.chain.idle_max_over_samullm")["ratios"]
ONE_MODEL = details("apps.one_model_1000_speedup")
TIGHTEST = value("exegpt.table6.3.1s") / value("exegpt.table6.none")
LMSYS = details("multibin.kept_by_bert_4_bins")["lmsys"]["4"]
WRITTEN = {  # texts of rows whose result is written by hand, by paper and the beginning of "what"
    ("ExeGPT", "WAA schedule kept while the mean"): f"{100 * (LATER['latency'] - 1):.0f} % higher",
    ("ExeGPT", "RRA's prefill times"): stage("paper_11.5s", "prefill"),
    ("ExeGPT", "WAA's prefill times"): stage("paper_5.9s", "prefill"),
    ("ExeGPT", "throughput kept under"): f"{100 * TIGHTEST:.0f} %",
    ("ExeGPT", "range of gains, large"): f"{RRA['min']:.1f} to {RRA['max']:.1f} times",
    ("ExeGPT", "largest gain, small"): f"{SMALL['max']:.1f} times",
    ("ExeGPT", "share of points of GPT-3 39B"): f"{100 * NOT_MONOTONE['latency']:.1f} % by latency",
    ("SamuLLM", "end-to-end gain of Algorithm 1"): gains("samullm"),
    ("SamuLLM", "the same, the planner of `app plan`"): gains("speedup"),
    ("SamuLLM", "idle GPU time"): f"max {span(IDLE, 1)} times, {sum(IDLE) / len(IDLE):.1f} on average",
    ("SamuLLM", "chatglm3-6b on one"): f"{ONE_MODEL['one_s']:.1f} s and {ONE_MODEL['eight_s']:.1f} s",
    ("ELIS", "largest reduction"): f"{max(SHORTER):.0f} %",
    ("ELIS", "reduction of mean JCT"): f"{sum(SHORTER) / 15:.0f} % mean, {max(SHORTER):.0f} % at most",
    ("ELIS", "reduction of JCT by batch"): span(details("elis.figure6").values()),
    ("ELIS", "FCFS, ISRTF and SJF"): f"{sum(CLOSED) / 15:.0f} % of the gap",
    ("ELIS", "peak rate"): f"({value('gateway.scale_50_over_10'):.2f} times)",
    ("Multi-Bin Batching", "gain with the predictor"): f"{100 * LMSYS['known']:.0f} % with known",
    ("Vidur", "trend of the error"): f"TTFT {span(medians('ttft', 1, 255))} % below 256 concurrent requests, "
    f"{span(medians('ttft', 256, 10**6))} % from there on; TPOT {span(medians('tpot', 1, 16_383))} % up to 16,383",
    ("Vidur", "simulator runs"): f"{details('search.paper.total_s')['simulations']:,} runs",
}


@pytest.mark.parametrize(("paper", "what"), WRITTEN, ids=map(": ".join, WRITTEN))
def test_a_result_in_words_has_the_saved_numbers(paper, what):
    rows = [one.get("ours") for one in PARTS if one["paper"] == paper and one["what"].startswith(what)]
    assert WRITTEN[paper, what] in rows[0]
