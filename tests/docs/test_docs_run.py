"""What the documents tell a reader to run does run, in their order, in an empty folder with the examples."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from documents import DOCUMENTS, ROOT, blocks, name
from typer.core import TyperGroup

from lengthwise import config
from lengthwise.cli import main
from lengthwise.cli.program import app
from lengthwise.usecases import variants

RUNNABLE = ("python", "sh", "toml")
WITH_BLOCKS = [d for d in DOCUMENTS if any(b.language in RUNNABLE for b in blocks(d))]
UsageError: Any = typer.BadParameter.__base__
SMALL = ("--set", "workload.num_requests=40", "--seeds", "2")
SMALL_SEARCH = tuple(
    word
    for setting in ("precision=0.3", "seeds=2", "sensitivity=false", "top=1")
    for word in ("--set", f"search.{setting}")
)
SMALL_AGENTS = ("--set", "search.space.gpu_memory_utilization=[0.9]")
SMALL_SCHEDULE = ("--set", "run.model_draws=0")
SMALL_APP = ("--set", "inputs.rows=20")
SMALL_LAB = ("--set", "workload.num_requests=40", "--seeds", "2")
SMALL_EXAMPLE = ("--requests", "40", "--batches", "16", "--workloads", "bwb-4k")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the examples in it, where a reader would stand."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("document", WITH_BLOCKS, ids=name)
def test_blocks_run(document, place, capsys):
    names = {"__name__": "documentation"}
    for block in blocks(document):
        where = f"{name(document)}, line {block.line}"
        if block.title is not None:
            (place / block.title).write_text(block.text)
        elif block.language == "python" and block.runs:
            exec(compile(block.text, where, "exec"), names)
        elif block.language == "sh":
            for line in block.text.splitlines():
                run_line(line, where, runs=block.runs)
    for module in [m for m, v in sys.modules.items() if str(getattr(v, "__file__", "")).startswith(str(place))]:
        del sys.modules[module]


def run_line(line, where, *, runs):
    """Runs one command of a document, made small; those that set up or test are only known to exist."""
    words = shlex.split(line, comments=True)
    match words:
        case []:
            return
        case ["lengthwise", *arguments] if runs:
            assert main(small(arguments)) == 0, f"{where}: {line}"
        case ["lengthwise", *arguments]:
            parse(arguments, f"{where}: {line}")
        case ["pip", "install", wanted]:
            assert set(extras_in(wanted)) <= set(declared_extras()), f"{where}: {line}"
        case ["python", script, *arguments] if runs and script.startswith("examples/"):
            command = [sys.executable, script, *arguments, *SMALL_EXAMPLE]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        case ["make", *targets]:
            assert targets, where
            assert all(target in makefile_targets() for target in targets if "=" not in target), f"{where}: {line}"
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), f"{where}: {line}"
        case _:
            raise AssertionError(f"{where}: it is not known how to check {line!r}")


def parse(arguments, where):
    """What needs a server or a GPU is at least a command with such options and so many arguments."""
    command, rest = typer.main.get_command(app), list(arguments)
    context = typer.Context(command, info_name="lengthwise")
    try:
        while isinstance(command, TyperGroup):
            _, command, rest = command.resolve_command(context, rest)
            context = typer.Context(command, parent=context, info_name=command.name)
        command.parse_args(context, rest)
    except UsageError as error:
        if "does not exist" not in error.message:  # a file that the reader has and we do not
            raise AssertionError(f"{where}: {error.message}") from error


def extras_in(requirement):
    return re.findall(r"[a-z]+", requirement.partition("[")[2].partition("]")[0])


def declared_extras():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def small(arguments):
    """The same command over few requests."""
    more = {
        "simulate": SMALL,
        "capacity": SMALL_SEARCH,
        "search": SMALL_SEARCH,
        "lab": SMALL_LAB,
        "schedule": SMALL_SCHEDULE,
    }
    if arguments[:2] in (["app", "plan"], ["app", "run"]) and arguments[2].startswith("examples/"):
        return [*arguments, *SMALL_APP]
    if arguments[:2] == ["search", "examples/buy-agents.toml"]:
        arguments = [*arguments, *SMALL_AGENTS]
    return [*arguments, *more.get(arguments[0], ())]


def makefile_targets():
    """What make can be asked for."""
    return re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_make_targets_in_prose_exist(document):
    for target in re.findall(r"`make ([a-z-]+)", document.read_text(encoding="utf-8")):
        assert target in makefile_targets(), target


@pytest.mark.parametrize("path", sorted(p for p in (ROOT / "examples").iterdir()
                                        if p.suffix in {".toml", ".yaml"} and not p.name.startswith("gateway")),
                         ids=lambda p: p.name)  # fmt: skip
def test_examples_are_scenarios_that_build(path):
    assert variants.build(config.load(path))


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("gateway*")), ids=lambda p: p.name)
def test_examples_of_gateways_can_be_started(path, monkeypatch):
    monkeypatch.setenv("ENGINE_API_KEY", "any")
    assert main(["serve", str(path), "--check"]) == 0


def test_the_table_of_the_readme_is_what_is_simulated(capsys):
    """Numbers of the README are those of its simulation, within the intervals that it prints."""
    assert main(["simulate", str(ROOT / "examples/chat-70b.toml")]) == 0
    printed = table_rows(capsys.readouterr().out)
    (shown,) = (b for b in blocks(ROOT / "README.md") if b.language == "text" and "vLLM v1" in b.text)
    rows = table_rows(shown.text)
    assert len(rows) >= 3
    for label, cells in rows.items():
        for (value, half_width), (now, _) in zip(cells, printed[label], strict=True):
            assert abs(value - now) <= half_width, f"{label}: README says {cells}, the demo {printed[label]}"


def table_rows(text):
    """{label: [(value, half-width)]} of a table in box characters, model intervals left out."""
    rows = {}
    for line in text.splitlines():
        parts = [re.sub(r" \(.*\)", "", part).strip() for part in line.split("│")[1:-1]]
        if len(parts) > 1 and "±" in parts[1]:
            rows[parts[0]] = [tuple(float(x.replace(",", "")) for x in p.split("±")) for p in parts[1:]]
    return rows


def test_a_broken_command_is_noticed(place, capsys):
    with pytest.raises(AssertionError, match="somewhere"):
        run_line("lengthwise simulate examples/nothing.toml", "somewhere", runs=True)
    with pytest.raises(AssertionError, match="somewhere"):
        run_line("make nonsense", "somewhere", runs=True)
    assert Path("examples").is_dir()
