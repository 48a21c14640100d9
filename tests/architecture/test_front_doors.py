"""Every door opens, on what it says, and not on more than that."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import lengthwise

ROOT = Path(lengthwise.__file__).parent
ROOMS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
HEAVY = ("numba", "llvmlite", "numpy", "scipy", "polars", "pydantic", "typer", "rich", "plotly", "sklearn")


def in_a_new_process(code):
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.split()


def imported_by(statement):
    """Which heavy packages a statement imports."""
    return in_a_new_process(f"import sys\n{statement}\nprint(*(m for m in {HEAVY!r} if m in sys.modules))")


def test_the_front_door_imports_nothing_heavy():
    assert imported_by("import lengthwise") == []


def test_looking_at_the_front_door_imports_nothing_heavy():
    assert imported_by("import lengthwise; dir(lengthwise); lengthwise.__all__") == []


def test_the_heavy_names_are_those_that_would_be_seen():
    assert "numpy" in imported_by("from lengthwise import Workload")


def test_nouns_policies_and_costs_do_without_the_compiler():
    rooms = "import lengthwise.schema.deployment, lengthwise.catalog, lengthwise.metrics, lengthwise.policy"
    assert not {"numba", "llvmlite", "polars", "pydantic"} & set(imported_by(rooms))


def test_the_command_line_opens_without_what_only_commands_need():
    assert not {"numba", "polars", "plotly", "sklearn"} & set(imported_by("import lengthwise.cli"))


def test_front_door_is_sorted_and_every_name_resolves():
    assert lengthwise.__all__ == sorted(lengthwise.__all__)
    assert len(set(lengthwise.__all__)) == len(lengthwise.__all__)
    for name in lengthwise.__all__:
        assert getattr(lengthwise, name) is not None, name


def test_dir_lists_the_front_door():
    assert set(lengthwise.__all__) <= set(dir(lengthwise))
    assert lengthwise.__version__


def test_front_door_has_no_name_that_it_does_not_list():
    assert set(lengthwise._HOMES) == set(lengthwise.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = lengthwise.nonsense


@pytest.mark.parametrize("room", ROOMS)
def test_doors_of_rooms(room):
    door = importlib.import_module(f"lengthwise.{room}")
    assert door.__doc__, f"{room}/__init__.py must say what the room is for"
    names = list(getattr(door, "__all__", []))
    assert names in (sorted(names), sorted(names, key=isort_key))
    assert len(set(names)) == len(names)
    for name in names:
        assert hasattr(door, name), name
        assert not name.startswith("_"), name


def isort_key(name):
    """Constants, then classes, then the rest: the order of ruff's RUF022."""
    group = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return group, name


@pytest.mark.parametrize("name", [n for n in lengthwise.__all__ if n[0].islower()])
def test_functions_of_the_front_door_say_what_comes_out(name):
    assert (getattr(lengthwise, name).__doc__ or "").strip(), name
