"""Pages that a script writes: the script, rows of results to hand to it, and the tables it writes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from documents import ROOT


@contextmanager
def imported(script: str) -> Iterator[ModuleType]:
    """A script of the folder of documents, by its name."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        yield importlib.import_module(script)
    finally:
        sys.path.remove(str(ROOT / "docs"))


def check_committed(script: str) -> None:
    """Raises AssertionError where the page is not what the committed results say."""
    command = [sys.executable, str(ROOT / f"docs/{script}.py"), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, timeout=60)
    assert done.returncode == 0, f"run: python docs/{script}.py\n{done.stdout.decode()}{done.stderr.decode()}"


def row(name: str, value: float | None, **more: object) -> dict:
    """A row of results: unit-less, without an aim, smaller is better, unless it is said."""
    usual = {"unit": "", "target": None, "better": "lower", "ci": None, "details": {}}
    return {"name": name, "value": value} | usual | more


def table(text: str, title: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    part = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def by_first(text: str, title: str) -> dict[str, list[str]]:
    """The same, the other cells of each row by the first."""
    return {first: rest for first, *rest in table(text, title)}
