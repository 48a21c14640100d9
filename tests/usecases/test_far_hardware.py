"""A scenario on unmeasured hardware reports it, with intervals as wide as that."""

from __future__ import annotations

from pathlib import Path

import pytest

from lengthwise.config import loads
from lengthwise.usecases.simulate import run

CPU = Path(__file__).parents[2] / "examples" / "gpus" / "cpu.toml"
TEXT = """
[workload]
isl = 100
osl = 20
num_requests = 60
request_rate = 0.5
[deployment]
model = "llama-3.2-1b"
gpu = "{gpu}"
"""


def widths(gpu):
    (outcome,) = run(loads(TEXT.format(gpu=gpu)))
    tpot = outcome.summary.tpot_s.mean
    return tpot.model_high / tpot.model_low, " ".join(outcome.notes)


@pytest.mark.slow
def test_a_cpu_that_a_user_describes_has_an_interval_of_several_times():
    near, silent = widths("H100")
    far, reported = widths(CPU)
    assert near < 2.5
    assert far > 5
    assert "Nothing was measured on EPYC-9654" in reported
    assert "measured on" not in silent
