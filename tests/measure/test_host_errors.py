"""How far the host of calibrated tables may be off: as far as its step and its sequences are, by what they take."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lengthwise import EngineLimits, deploy
from lengthwise.measure.calibration.parameters import part_errors
from lengthwise.measure.calibration.result import Parameter
from lengthwise.schema.cost_tables import CostEvidence, PartError

SEQS = 32
BEFORE = 0.3


@pytest.fixture(scope="module")
def tables():
    cost = deploy("llama-3-8b", "H100", limits=EngineLimits(SEQS, 2048, max_model_len=4096)).cost
    assert len(cost.host_s) == SEQS + 1
    return replace(cost, evidence=CostEvidence(errors=(PartError("host", BEFORE),)))


def seconds(name: str, value: float, log_sd: float, *, report: bool = True) -> Parameter:
    low, high = (value * math.exp(1.96 * side * log_sd) for side in (-1, 1))
    return Parameter(name, name, "s", value, low, high, value, report, 0.1)


def host_of(tables, *found: Parameter) -> float:
    return {e.part: e.log_sd for e in part_errors(tables, found, {}, 0.01, 0.01)}["host"]


def test_where_sequences_take_all_the_time_their_spread_is_the_hosts(tables):
    """A step of next to nothing may be off by any factor."""
    found = seconds("host_step", 1e-6, 0.9), seconds("host_sequence", 2e-3, 0.2)
    assert host_of(tables, *found) == pytest.approx(0.2, rel=0.01)


def test_a_step_that_is_known_does_not_hide_sequences_that_are_not(tables):
    step_s, sequence_s = 1e-3, 1e-3
    found = seconds("host_step", step_s, 0.02), seconds("host_sequence", sequence_s, 0.8)
    whole_s = step_s + SEQS * sequence_s
    reported = np.hypot(0.02 * step_s, 0.8 * SEQS * sequence_s) / whole_s
    assert host_of(tables, *found) == pytest.approx(reported)


def test_a_large_step_counts_for_a_single_request(tables):
    found = seconds("host_step", 1e-3, 0.6), seconds("host_sequence", 1e-4, 0.1)
    assert host_of(tables, *found) == pytest.approx(np.hypot(0.6 * 1e-3, 0.1 * 1e-4) / 1.1e-3)


def test_undetermined_errors_keep_the_previous_value(tables):
    unreported = seconds("host_step", 1e-3, 0.9, report=False), seconds("host_sequence", 0.0, 0.0, report=False)
    assert host_of(tables, *unreported) == pytest.approx(BEFORE)
    assert host_of(tables, seconds("client", 1e-3, 0.1)) == pytest.approx(BEFORE)
