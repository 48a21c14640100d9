"""Public names resolve, are sorted, and load nothing heavy before their first use."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import lengthwise

ROOT = Path(lengthwise.__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
HEAVY = ("numba", "llvmlite", "numpy", "scipy", "polars", "pydantic", "typer", "rich", "plotly", "sklearn")


def in_a_new_process(code):
    """Return the words that a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.split()


def imported_by(statement):
    """Return the heavy packages that a statement imports."""
    return in_a_new_process(f"import sys\n{statement}\nprint(*(m for m in {HEAVY!r} if m in sys.modules))")


def test_importing_lengthwise_imports_nothing_heavy():
    assert imported_by("import lengthwise") == []


def test_listing_the_public_names_imports_nothing_heavy():
    assert imported_by("import lengthwise; dir(lengthwise); lengthwise.__all__") == []


def test_imported_by_sees_heavy_packages():
    assert "numpy" in imported_by("from lengthwise import Workload")


def test_records_policies_and_costs_do_not_import_the_compiler():
    statement = "import lengthwise.schema.deployment, lengthwise.catalog, lengthwise.metrics, lengthwise.policy"
    assert not {"numba", "llvmlite", "polars", "pydantic"} & set(imported_by(statement))


def test_the_command_line_imports_no_library_of_a_single_command():
    assert not {"numba", "polars", "plotly", "sklearn"} & set(imported_by("import lengthwise.cli"))


def test_public_names_are_sorted_and_resolve():
    assert lengthwise.__all__ == sorted(lengthwise.__all__)
    assert len(set(lengthwise.__all__)) == len(lengthwise.__all__)
    for name in lengthwise.__all__:
        assert getattr(lengthwise, name) is not None, name


def test_dir_lists_the_public_names():
    assert set(lengthwise.__all__) <= set(dir(lengthwise))
    assert lengthwise.__version__


def test_no_public_name_is_unlisted():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = lengthwise.nonsense


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_of_a_package(name):
    package = importlib.import_module(f"lengthwise.{name}")
    assert package.__doc__, f"{name}/__init__.py must state the package's purpose"
    names = list(getattr(package, "__all__", []))
    assert names in (sorted(names), sorted(names, key=isort_key))
    assert len(set(names)) == len(names)
    for public in names:
        assert hasattr(package, public), public
        assert not public.startswith("_"), public


def isort_key(name):
    """Constants, then classes, then the rest: the order of ruff's RUF022."""
    group = 0 if name.isupper() else 1 if name[:1].isupper() else 2
    return group, name


@pytest.mark.parametrize("name", [n for n in lengthwise.__all__ if n[0].islower()])
def test_functions_of_the_public_api_describe_their_result(name):
    assert (getattr(lengthwise, name).__doc__ or "").strip(), name
