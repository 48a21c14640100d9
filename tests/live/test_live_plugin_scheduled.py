"""vLLM's own scheduler classes under the plug-in, plain and asynchronous, without a model: no token lost or doubled."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from plugin_engines import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def worlds(engine_python, tiny):
    import _vllm

    words = [engine_python, str(Path(__file__).parent / "scheduled.py"), str(tiny)]
    env = {**_vllm.QUIET, "VLLM_CACHE_ROOT": str(tiny.parent / "cache"), "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(words, env=env, capture_output=True, text=True, timeout=380, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_under_cuts_want_of_memory_and_aborts_every_token_comes_once(worlds, kind):
    own = {name: world for name, world in worlds.items() if name.startswith(kind)}
    assert len(own) == 7
    for name, world in own.items():
        assert world["ordered"], name
        assert (world["wrong"], world["unfinished"]) == ([], []), name
        assert world["finished"] == world["expected"] > 30, name
        assert world["free_blocks"] == 23, name  # all but vLLM's own null block
        assert (world["cuts"] > 0) == ("worth" in name), name
        assert (world["preemptions"] > 0) == ("exact" not in name), name


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_memory_reserved_by_wrong_lengths_is_soon_reserved_by_limits(worlds, kind):
    """A request's limit is its length here. At a share of 0 the first preemption raises the margin for good."""
    assert 0 < worlds[f"{kind} reserve short"]["preemptions"] <= 2 * 4
    assert worlds[f"{kind} reserve short"]["margin"] == float("inf")
    assert worlds[f"{kind} reserve exact"]["margin"] == 0.0


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_the_margin_adapts_to_the_times_of_steps(worlds, kind):
    adapting = worlds[f"{kind} reserve adapting"]
    assert adapting["margin"] not in (0.0, float("inf"))
    assert adapting["margin"] >= -1
    assert adapting["preemptions"] > 0
