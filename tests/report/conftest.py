"""Fixtures: the toy server, studies made by hand, a browser."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lengthwise.metrics import Slo, combine, summarize
from lengthwise.report import Result

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from browser import driver  # noqa: E402 - a fixture; its folder is on the path now

__all__ = ["driver"]


@pytest.fixture(scope="session")
def toy() -> ModuleType:
    """The toy server's module: ``records(...)``, ``deployment(...)``."""
    return module(Path(__file__).parents[1] / "metrics" / "toy.py", "lengthwise_toy_server")


def module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="session")
def results(toy: ModuleType) -> list[Result]:
    """Two variants at three seeds; names and scenarios hold what HTML must escape."""
    return [
        result(toy, "roomy <b>&</b>", 'name = "</script><script>alert(1)</script>"', max_seqs=32),
        result(toy, "narrow", "", max_seqs=4),
    ]


def result(toy: ModuleType, name: str, text: str, **options: int) -> Result:
    deployment, slo = toy.deployment(), Slo(ttft_s=0.5, jct_s=3.0)
    runs = [toy.records(200, seed=seed, **options) for seed in (1, 2, 3)]
    summaries = [summarize(run, deployment, slo=slo) for run in runs]
    return Result(name, combine(summaries), runs[0], deployment, text, summaries)


@pytest.fixture(scope="session")
def studies() -> ModuleType:
    """The module that makes studies by hand: ``study(...)``, ``plan(...)``."""
    return module(Path(__file__).with_name("studies.py"), "lengthwise_studies")
