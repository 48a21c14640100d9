"""What is made in this folder can be imported by its own name; an engine of planted truth, and what it did."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # tests of studies import them


@pytest.fixture(scope="session")
def deployment():
    from planted_runs import LIMITS

    from lengthwise import engine

    return engine.deploy("llama-3-8b", "H100", limits=LIMITS)


@pytest.fixture(scope="session")
def run(deployment):
    from planted_runs import measured, requests

    return measured(requests(), deployment)


@pytest.fixture(scope="session")
def found(run, deployment):
    from planted_runs import MIN_COUNT

    from lengthwise.measure.calibration import calibrate

    return calibrate([run], deployment, fit=MIN_COUNT)
