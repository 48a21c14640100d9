"""The compile cache: nothing stale is run, and no folder is taken for granted."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

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
        "_native.py",
        "_compiler.py",
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
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
    assert stamp_of(copy, monkeypatch) != before
    monkeypatch.undo()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"0.0 of {name}")
    assert stamp_of(copy, monkeypatch) != before


@pytest.mark.slow
def test_the_cache_is_written_to_the_configured_folder(tmp_path):
    value, stamp = run(ONE_POLICY, LENGTHWISE_CACHE_DIR=str(tmp_path))
    assert float(value) == 7.0
    assert _jit.source_stamp() == stamp
    written = sorted(path.suffix for path in (tmp_path / "compiled" / stamp).iterdir())
    assert written == [".code"]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.code")}
    assert run(ONE_POLICY, LENGTHWISE_CACHE_DIR=str(tmp_path)) == [value, stamp]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.code")} == times, "read, not written anew"


@pytest.mark.slow
def test_each_processor_has_its_own_code(tmp_path):
    """Two processors may share a home folder, and code for one may have instructions that the other lacks."""
    values = [
        run(ONE_POLICY, LENGTHWISE_CACHE_DIR=str(tmp_path), NUMBA_CPU_NAME=name)
        for name in ("generic", "x86-64-v2", "generic")
    ]
    assert values[0] == values[1] == values[2]
    assert len(list(tmp_path.rglob("*.code"))) == 2


def test_an_empty_name_is_no_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("LENGTHWISE_CACHE_DIR", str(tmp_path))
    assert _jit.cache_folder() == tmp_path / "compiled" / _jit.source_stamp()
    monkeypatch.setenv("LENGTHWISE_CACHE_DIR", "")
    assert _jit.cache_folder().is_absolute()


def test_code_from_the_cache_runs_without_the_compiler(tmp_path):
    program = "import sys\n" + ONE_POLICY + "print('numba' in sys.modules)"
    first, second = (run(program, LENGTHWISE_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert (first[-1], second[-1]) == ("True", "False")
    assert first[:-1] == second[:-1]


def test_a_second_simulation_does_not_import_the_compiler():
    """The kernel and all policies of a run come from the cache."""
    program = """
import sys
from lengthwise import Poisson, deploy, preset, simulate
records = simulate(preset("chat-1m").generate(50, Poisson(3.0), seed=0), deploy("llama-2-70b", "A100-80GB", tp=4))
print((records.requests.status == 0).all(), "numba" in sys.modules)
"""
    run(program)
    assert run(program) == ["True", "False"]


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
    compiled = sorted((tmp_path / "cache").rglob("*.code"))
    assert (float(value), run(ONE_POLICY, **where)) == (7.0, [value, stamp])
    assert compiled == sorted((tmp_path / "cache").rglob("*.code")), "read, not compiled"
    helper.write_text(HELPER.replace("1.0", "2.0"))
    doubled, stamp_after = run(ONE_POLICY, **where)
    assert float(doubled) == 14.0
    assert stamp_after != stamp


# The first run


@pytest.fixture
def uncompiled(monkeypatch, tmp_path):
    """A cache without the kernel; yields the programs that a background process was to run."""
    started = []
    monkeypatch.setenv("LENGTHWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_jit, "compile_detached", lambda program: started.append(program) or True)
    for place in ("lengthwise.engine", "lengthwise.engine.simulation"):
        monkeypatch.setattr(f"{place}.ready", lambda: False)
    return started


SMALL = """
workload = {preset = "chat-1m", num_requests = 20, request_rate = 80.0}
deployment = {model = "llama-3.1-8b", gpu = "H100", replicas = 2}
run = {seeds = 2, model_draws = 0}
"""


def test_an_empty_cache_gives_the_same_bytes_as_a_warm_one(uncompiled, monkeypatch, tmp_path):
    from lengthwise.config import loads
    from lengthwise.report import write_json
    from lengthwise.usecases import simulate

    def answer(name):
        outcomes = simulate.run(loads(SMALL), jobs=1, log_steps=True)
        write_json(tmp_path / name, [simulate.result_of(one) for one in outcomes])
        return (tmp_path / name).read_bytes(), outcomes[0].records

    first, by_reference = answer("first.json")
    assert len(uncompiled) == 1
    assert not list((tmp_path / "cache").rglob("*.code"))
    monkeypatch.undo()
    warm, by_kernel = answer("warm.json")
    assert first == warm
    assert (by_reference.steps.end_s == by_kernel.steps.end_s).all()


def test_logs_are_returned_of_runs_that_are_short_enough_in_both_engines():
    from lengthwise import Poisson, deploy, preset, simulate

    workload, deployed = preset("chat-1m").generate(20, Poisson(8.0)), deploy("llama-3.1-8b", "H100")
    steps = len(simulate(workload, deployed).steps.end_s)
    for rows in (0, steps - 1, steps):
        logs = [simulate(workload, deployed, max_log_steps=rows, engine=one) for one in ("kernel", "reference")]
        assert [one.steps is None for one in logs] == [one.gaps.gap_s is None for one in logs] == [rows < steps] * 2


def test_long_runs_and_policies_of_users_wait_for_the_kernel(uncompiled, monkeypatch):
    from lengthwise import Poisson, deploy, engine, policy, preset

    compiled = []
    monkeypatch.setattr("lengthwise.engine.simulation.compile_kernel", lambda: compiled.append(1))
    short, deployed = preset("chat-1m").generate(100, Poisson(8.0)), deploy("llama-3.1-8b", "H100")
    long = preset("chat-1m").generate(50_000, Poisson(8.0))

    @policy.rank
    def own(prompt_tokens):
        return prompt_tokens

    scheduler = dataclasses.replace(deployed.scheduler, rank=own)
    for workload, deployment, expected in (
        (short, deployed, "reference"),
        (long, deployed, "kernel"),
        (short, dataclasses.replace(deployed, scheduler=scheduler), "kernel"),
    ):
        assert engine.warm_up(lambda w=workload, d=deployment: engine.reference_s(w, d)) == expected
    assert (len(uncompiled), len(compiled)) == (1, 2)


def test_one_process_compiles_at_a_time(monkeypatch, tmp_path):
    monkeypatch.setenv("LENGTHWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("LENGTHWISE_COMPILE")
    monkeypatch.delenv("CI", raising=False)
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: started.append(1) or types.SimpleNamespace(wait=int))
    with _jit.compile_lock(wait_s=0) as first, _jit.compile_lock(wait_s=0) as second:
        assert (first, second) == (True, False)
        with _jit.compile_lock(wait_s=0.2) as third:  # a process at the lowest priority may hold it for minutes
            assert not third
        assert _jit.compile_detached("")  # which another process does already
        assert not started
    with _jit.compile_lock(wait_s=600) as again:
        assert again
    assert _jit.compile_detached("")
    assert len(started) == 1
    monkeypatch.setenv("LENGTHWISE_COMPILE", "wait")
    assert not _jit.compile_detached("")


@pytest.mark.slow
def test_the_first_command_uses_processes_and_prints_the_same(monkeypatch, tmp_path):
    (scenario := tmp_path / "s.toml").write_text(SMALL)
    command = [sys.executable, "-m", "lengthwise.cli", "simulate", str(scenario), "--jobs", "2", "--json", "-"]
    warm = subprocess.run(command, capture_output=True, check=True, timeout=300)
    for name in ("LENGTHWISE_COMPILE", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LENGTHWISE_CACHE_DIR", str(tmp_path / "cache"))
    with _jit.compile_lock(wait_s=600):  # so that the command starts no compilation
        first = subprocess.run(command, capture_output=True, check=True, timeout=300)
    assert first.stdout == warm.stdout
    assert b"reference engine gives the same answer" in first.stderr
    assert not list((tmp_path / "cache").rglob("*.code"))


@pytest.mark.slow
def test_a_detached_process_fills_the_cache_and_ends(monkeypatch, tmp_path):
    monkeypatch.setenv("LENGTHWISE_CACHE_DIR", str(tmp_path))
    for name in ("LENGTHWISE_COMPILE", "CI"):
        monkeypatch.delenv(name, raising=False)
    assert _jit.compile_detached(
        "from lengthwise import _jit\nwith _jit.compile_lock(wait_s=600):" + ONE_POLICY.replace("\n", "\n  ")
    )
    until = time.monotonic() + 120
    while not list(tmp_path.rglob("*.code")):
        assert time.monotonic() < until
        time.sleep(0.1)
    with _jit.compile_lock(wait_s=600) as is_over:
        assert is_over
