"""Examples of the help fit a terminal."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

from lengthwise import cli

MODULES = [f"lengthwise.cli.{found.name}" for found in pkgutil.iter_modules(cli.__path__) if found.name != "__main__"]


def examples(module: str) -> list[str]:
    reported = getattr(importlib.import_module(module), "EXAMPLES", "")
    return [line for line in reported.splitlines() if line.startswith("  lengthwise ")]


def test_commands_have_examples() -> None:
    assert len([module for module in MODULES if examples(module)]) >= 8


@pytest.mark.parametrize("module", MODULES)
def test_examples_are_at_most_100_columns_wide(module) -> None:
    assert [line for line in examples(module) if len(line) > 100] == []


@pytest.mark.parametrize("module", MODULES)
def test_files_named_in_examples_exist(module) -> None:
    root = Path(__file__).parents[2]
    named = [word for line in examples(module) for word in line.split() if word.startswith("examples/")]
    assert [word for word in named if not (root / word).exists()] == []
