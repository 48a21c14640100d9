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
from lengthwise import _jit, engine

pytestmark = pytest.mark.skipif(_jit.DISABLED, reason="nothing is compiled")

ONE_POLICY = """
from lengthwise._jit import source_stamp
from lengthwise.policy import compiled, known
print(compiled(known("rank")["srtf"])(0.0, 0.0, 1, 3, 10.0, 7.0, 7.0, 0.0, 0, 0, 0, 0.0, 0), source_stamp())
"""
ONE_RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from worlds import GPU, MODEL, NODE, cost_tables
from lengthwise.engine import simulate
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.workload import Workload
deployment = Deployment(MODEL, GPU, NODE, Parallelism(), EngineLimits(), Scheduler(), cost_tables([4]),
                        KvPlan(100, 16, 0, 0, 0, 0), max_model_len=300)
print(simulate(Workload(np.zeros(3), np.full(3, 9), np.full(3, 7)), deployment).totals.tokens[0])
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


def test_the_cache_goes_where_it_is_told(tmp_path):
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


def test_a_broken_cache_file_is_made_anew(tmp_path):
    value, _ = run(ONE_POLICY, LENGTHWISE_CACHE_DIR=str(tmp_path))
    (index,) = tmp_path.rglob("*.nbi")
    shutil.copy(index, index.with_suffix(".old"))
    (data,) = tmp_path.rglob("*.nbc")
    data.unlink()
    assert run(ONE_POLICY, LENGTHWISE_CACHE_DIR=str(tmp_path))[0] == value
    assert data.exists()


@pytest.mark.slow
def test_a_helper_edited_in_another_file_is_compiled_anew(copy, tmp_path):
    """The copy runs the machine code of its sources until a file that the kernel calls into changes."""
    laws = str(Path(__file__).parents[1] / "laws")
    where = {"package": copy, "LENGTHWISE_CACHE_DIR": str(tmp_path / "cache")}
    engine.warm_up()
    compiled = tmp_path / "cache" / _jit.cache_folder().relative_to(_jit.cache_folder().parents[1])
    shutil.copytree(_jit.cache_folder(), compiled)
    kernel = sorted(compiled.glob("*run*"))
    assert run(ONE_RUN, laws, **where) == [str(3 * (9 + 7 - 1))]
    assert kernel == sorted(compiled.glob("*run*")), "the kernel was not compiled"
    flow = copy / "engine" / "_kernel_steps.py"
    text = flow.read_text()
    assert "rep.tokens += w.decodes + w.prompt_tokens\n" in text
    flow.write_text(
        text.replace("rep.tokens += w.decodes + w.prompt_tokens\n", "rep.tokens += 2 * (w.decodes + w.prompt_tokens)\n")
    )
    assert run(ONE_RUN, laws, **where) == [str(2 * 3 * (9 + 7 - 1))]
