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
    json.loads(line)["name"]
    for path in (ROOT / "benchmarks" / "results").glob("*.json")
    for line in path.read_text("utf-8").splitlines()
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
    assert not ("figure" in part and "ours" in part)
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
