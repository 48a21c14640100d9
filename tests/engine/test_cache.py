"""The compile cache: nothing stale is run, and no folder is taken for granted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest

import lengthwise
from lengthwise import _jit

pytestmark = pytest.mark.skipif(_jit.DISABLED, reason="nothing is compiled")

ONE_POLICY = """
from lengthwise._jit import source_stamp
from lengthwise.policy import compiled, known
print(compiled(known("rank")["srtf"])(0.0, 0.0, 1, 3, 10.0, 7.0, 7.0, 0.0, 0, 0, 0, 0.0, 0), source_stamp())
"""
HELPER = """
from lengthwise._jit import jit

@jit
def scaled(tokens):
    return tokens * 1.0
"""


@pytest.fixture
def copy(tmp_path):
    """The package, copied to where it may be edited."""
    package = tmp_path / "sources" / "lengthwise"
    shutil.copytree(Path(lengthwise.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    return package


def run(program, *arguments, package=None, **env):
    """Return the output of a program in its own process, on the copied package if there is one."""
    environment = os.environ | env | ({"PYTHONPATH": str(package.parent)} if package else {})
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def stamp_of(package, monkeypatch):
    monkeypatch.setattr(_jit, "__file__", str(package / "_jit.py"))
    return _jit.source_stamp.__wrapped__()


@pytest.mark.parametrize(
    "edited",
    [
        "_jit.py",
        "engine/kernel.py",
        "engine/_kernel_groups.py",
        "engine/_kernel_queue.py",
        "engine/_kernel_steps.py",
        "engine/kernel_layout.py",
        "cost/_lookup.py",
        "policy/ranks.py",
        "policy/contracts.py",
        "schema/records.py",
    ],
)
def test_an_edit_of_any_jitted_file_changes_the_stamp(copy, edited, monkeypatch):
    before = stamp_of(copy, monkeypatch)
    assert before == stamp_of(copy, monkeypatch)
    with (copy / edited).open("a") as file:
        file.write("\n# an edit\n")
    assert stamp_of(copy, monkeypatch) != before


def test_a_rename_changes_the_stamp(copy, monkeypatch):
    before = stamp_of(copy, monkeypatch)
    (copy / "engine" / "_kernel_steps.py").rename(copy / "engine" / "_kernel_strides.py")
    assert stamp_of(copy, monkeypatch) != before


def test_flags_that_change_code_change_the_stamp(copy, monkeypatch):
    before = stamp_of(copy, monkeypatch)
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", 1)
    assert stamp_of(copy, monkeypatch) != before
    monkeypatch.undo()
    monkeypatch.setattr(numba, "__version__", "0.0")
    assert stamp_of(copy, monkeypatch) != before


@pytest.mark.slow
def test_the_cache_is_written_to_the_configured_folder(tmp_path):
    value, stamp = run(ONE_POLICY, LENGTHWISE_CACHE_DIR=str(tmp_path))
    assert float(value) == 7.0
    assert _jit.source_stamp() == stamp
    written = sorted(path.suffix for path in (tmp_path / "compiled" / stamp).iterdir())
    assert written == [".nbc", ".nbi"]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")}
    assert run(ONE_POLICY, LENGTHWISE_CACHE_DIR=str(tmp_path)) == [value, stamp]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")} == times, "read, not written anew"


def test_an_empty_name_is_no_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("LENGTHWISE_CACHE_DIR", str(tmp_path))
    assert _jit.cache_folder() == tmp_path / "compiled" / _jit.source_stamp()
    monkeypatch.setenv("LENGTHWISE_CACHE_DIR", "")
    assert _jit.cache_folder().is_absolute()


def test_a_broken_cache_file_is_recreated(tmp_path):
    value, _ = run(ONE_POLICY, LENGTHWISE_CACHE_DIR=str(tmp_path))
    (index,) = tmp_path.rglob("*.nbi")
    shutil.copy(index, index.with_suffix(".old"))
    (data,) = tmp_path.rglob("*.nbc")
    data.unlink()
    assert run(ONE_POLICY, LENGTHWISE_CACHE_DIR=str(tmp_path))[0] == value
    assert data.exists()


@pytest.mark.slow
def test_a_helper_edited_in_another_file_is_recompiled(copy, tmp_path):
    """Machine code of a policy is used again until the file of a helper that it calls changes."""
    ranks, helper = copy / "policy" / "ranks.py", copy / "policy" / "scale.py"
    helper.write_text(HELPER)
    text = ranks.read_text().replace("    return remaining_tokens\n", "    return scaled(remaining_tokens)\n", 1)
    first = "from lengthwise.policy.contracts import rank\n"
    ranks.write_text(text.replace(first, first + "from lengthwise.policy.scale import scaled\n"))
    assert "scaled(remaining_tokens)" in ranks.read_text()
    where = {"package": copy, "LENGTHWISE_CACHE_DIR": str(tmp_path / "cache")}
    value, stamp = run(ONE_POLICY, **where)
    compiled = sorted((tmp_path / "cache").rglob("*.nb?"))
    assert (float(value), run(ONE_POLICY, **where)) == (7.0, [value, stamp])
    assert compiled == sorted((tmp_path / "cache").rglob("*.nb?")), "read, not compiled"
    helper.write_text(HELPER.replace("1.0", "2.0"))
    doubled, stamp_after = run(ONE_POLICY, **where)
    assert float(doubled) == 14.0
    assert stamp_after != stamp
