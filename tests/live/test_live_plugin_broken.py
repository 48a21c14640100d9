"""A plug-in that fails inside a real vLLM: reported once, and the engine goes on in its own order."""

from __future__ import annotations

import subprocess

import pytest
from plugin_engines import ROOT, Job, burst, lengthwise, vllm

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BROKEN = '''
"""The plug-in with an error in it, from the second ordering on."""

from lengthwise.gateway.plugin import LengthScheduler
from lengthwise.gateway.plugin.length_scheduler import Registry

plain, calls = Registry.in_order, []


def in_order(self, waiting):
    calls.append(1)
    if len(calls) >= 2:
        raise AttributeError("a changed engine")
    return plain(self, waiting)


Registry.in_order = in_order
BrokenScheduler = LengthScheduler
'''
CHECKS = """
import sys

import lengthwise.gateway.plugin
assert not {"vllm", "numba", "polars", "aiohttp"} & set(sys.modules), "importing it imports as little as it can"

from importlib import import_module

from lengthwise.gateway.plugin import vllm_adapter as check
from vllm import __version__
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

for stock in (AsyncScheduler, Scheduler):
    assert not list(check.class_warnings(stock, Request)), list(check.class_warnings(stock, Request))
assert not list(check.version_warnings(__version__, trusted=False)), __version__
del Scheduler._preempt_request
assert list(check.class_warnings(AsyncScheduler, Request)) == ["its scheduler has no method _preempt_request"]
print("checked", __version__)
"""


def test_the_checks_find_this_vllm_as_it_should_be_and_a_changed_one_not(engine_python):
    env = {"PYTHONPATH": str(ROOT / "src"), "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [engine_python, "-c", CHECKS], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "checked 0." in ran.stdout


def test_a_failure_in_a_running_engine_leaves_it_its_own_order(tmp_path, engine_python, tiny):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "broken_plugin.py").write_text(BROKEN)
    words = ("--max-num-seqs", "2", "--scheduler-cls", "broken_plugin.BrokenScheduler")
    log = tmp_path / "broken.log"
    with vllm(engine_python, tiny, log, *words, path=(tmp_path / "path",)) as engine:
        assert "lengthwise orders this engine" in log.read_text()
        many = [Job(f"m{k}", 4 + k % 7, lengthwise(40 - k)) for k in range(40)]
        first = burst(engine.url, many)
        assert len(first.finished) == 40
        assert first.refusals == {}
        assert log.read_text().count("from now on this engine keeps its own order") == 1
        long = tuple(Job(f"long{k}", 60, lengthwise(60)) for k in range(5))
        short = [Job(f"short{k}", 5, lengthwise(5)) for k in range(3)]
        found = burst(engine.url, short, head=long)
        assert max(found.finished.index(f"short{k}") for k in range(3)) > 4
        assert log.read_text().count("from now on this engine keeps its own order") == 1
        engine.check()
