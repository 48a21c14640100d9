"""What people deploy: MoE with data and expert parallelism, hybrid layers, P/D, and speculative decoding.

``silicon``, ``brackets`` and ``mtp`` read the folder ``shared`` and compare with measured deployments
(../docs/fidelity.md); ``hybrid`` and ``eplb`` need ``make engine``. ``pd_search`` times a search, ``ranks8`` an engine.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import _vllm
from _harness import ROOT, machine, making, summary
from _sections import Sections

sys.path += [str(ROOT / "tests" / name) for name in ("live", "oracle")]  # what vLLM places, and what others measured


def pd_search(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return the CPU seconds of ``lengthwise search`` for xPyD of DeepSeek-V3 on 64 H200; two cores take fewer."""
    command = [sys.executable, "-m", "lengthwise.cli", "search", str(ROOT / "examples/buy-disaggregated.toml"), "-q"]
    runs = []
    for _ in range(1 if quick else 3):
        before_s, _ = sum(os.times()[2:4]), subprocess.run([*command, "--jobs", "2"], check=True)
        runs.append(sum(os.times()[2:4]) - before_s)
    return {"deploy.pd_search_s": summary(runs) | {"machine": machine()}}


def eplb(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return how many slots of random loads have another expert than the one that vLLM's EPLB places there."""
    slots, different = importlib.import_module("test_live_eplb").compared(range(9 if quick else 2000), _vllm.require())
    return {"deploy.eplb_equal": {"value": different, "slots": slots}}


def speculation(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return the median error of EAGLE's speed-up on an H100, by requests and batch."""
    found = importlib.import_module("test_speculation_measured").speedups((1, 8) if quick else (1, 8, 16, 32, 64, 128))
    return {"spec.speedup_error": summary([one["error"] for one in found.values()]) | {"by_batch": found}}


SECTIONS = Sections("deployments", __doc__, (), making)

if __name__ == "__main__":
    SECTIONS.main()
