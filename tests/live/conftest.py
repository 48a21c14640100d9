"""Real engines for tests that run them, and the benchmarks' circle, which the tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # the circle that the benchmarks measure is the one that is tested
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def engine_python():
    """The interpreter of the engines' own environment. A checked change must not pass without it."""
    found = ROOT / ".engines" / "vllm" / "bin" / "python"
    if not found.exists():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no {found.parents[1]}: make engine")
    return str(found)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, engine_python: str) -> Path:
    """A tiny model; beside it is vLLM's cache, without which the first engine of a folder starts 10 s later."""
    import _vllm

    return _vllm.make_model(tmp_path_factory.mktemp("models") / "tiny", "tiny")


@pytest.fixture(scope="session")
def torch():
    """The torch of this environment, which profiles the machine."""
    if os.environ.get("CI") == "true":
        import torch

        return torch
    return pytest.importorskip("torch", reason="no torch here: make torch")
