"""How much later than stated requests may reach an engine widens the intervals of first tokens, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lengthwise import config
from lengthwise.cost import HostOverhead
from lengthwise.cost.model_error import perturbed
from lengthwise.cost.roofline_tables import ENGINE_HOSTS, FRONT_SLOW_S, slow_front_log_sd
from lengthwise.engine import deploy
from lengthwise.measure.calibration.parameters import part_errors
from lengthwise.measure.calibration.result import Parameter
from lengthwise.schema.cost_tables import CostEvidence, CostTables, Front, PartError
from lengthwise.usecases import simulate, variants

SLOW = slow_front_log_sd(Front(ENGINE_HOSTS["vllm"].request_s), FRONT_SLOW_S)

REQUESTED = """
[workload]
isl = 300
osl = 60
num_requests = 150
request_rate = 4
[deployment]
model = "llama-3-8b"
gpu = "H100"
host = "vllm"
"""


def without(cost: CostTables, front: PartError | None) -> CostTables:
    """The tables with another error of their front, in the same place; None: with none."""
    errors = (front if error.part == "front" else error for error in cost.evidence.errors)
    stated = tuple(error for error in errors if error is not None)
    return replace(cost, evidence=replace(cost.evidence, errors=stated))


def outcome(front: PartError) -> simulate.VariantOutcome:
    requested = config.loads(REQUESTED)
    (variant,) = variants.build(requested)
    cost = without(variant.deployment.cost, front)
    variant = replace(variant, deployment=replace(variant.deployment, cost=cost))
    (one,) = simulate.run(requested, variants=[variant], jobs=1)
    return one


@pytest.fixture(scope="module")
def cost() -> CostTables:
    return deploy("llama-3-8b", "H100", host="vllm").cost


def test_first_tokens_may_come_later_than_stated_and_times_between_tokens_stay() -> None:
    even, leaning = (outcome(PartError("front", 0.7, slow)).summary for slow in (None, SLOW))
    first, wider = even.ttft_s.mean, leaning.ttft_s.mean
    assert wider.value == first.value
    assert wider.model_low == pytest.approx(first.model_low, rel=1e-9)
    assert wider.model_high - wider.value > 2 * (first.model_high - first.value)
    for statistic in ("mean", "p50", "p99"):
        reported, again = (getattr(one.tpot_s, statistic) for one in (even, leaning))
        assert (reported.value, reported.model_low, reported.model_high) == pytest.approx(
            (again.value, again.model_low, again.model_high), rel=1e-9
        )


def test_what_ships_is_the_same_every_time() -> None:
    assert repr(outcome(PartError("front", 0.7, SLOW)).summary) == repr(
        simulate.run(config.loads(REQUESTED), jobs=1)[0].summary
    )


def test_only_the_slow_half_of_the_draws_moves_and_only_the_delay(cost: CostTables) -> None:
    even = perturbed(without(cost, PartError("front", 0.7)))
    off = perturbed(cost)
    for a, b in zip(even, off, strict=True):
        assert np.array_equal(a.layer_s, b.layer_s)
        assert a.front.serial_s == b.front.serial_s
        slow = a.front.request_s > cost.front.request_s
        logs = [math.log(one.front.request_s / cost.front.request_s) for one in (a, b)]
        assert logs[1] == pytest.approx(logs[0] * (SLOW / 0.7 if slow else 1), rel=1e-9)
    assert sum(one.front.request_s > cost.front.request_s for one in off) == len(off) / 2


def test_a_front_without_a_spread_behaves_as_if_none_were_given(cost: CostTables) -> None:
    none = perturbed(without(cost, None))
    for still in (PartError("front", 0.0), PartError("front", 0.0, 0.0)):
        for a, b in zip(none, perturbed(without(cost, still)), strict=True):
            assert a.front == b.front == cost.front
            assert all(
                np.array_equal(getattr(a, name), getattr(b, name))
                for name in ("layer_s", "host_s", "head_s", "prefill_s", "decode_s")
            )
    assert perturbed(without(cost, PartError("front", 0.0, 0.5)))[0].front.serial_s == cost.front.serial_s


def test_equal_spreads_on_both_sides_are_one_spread(cost: CostTables) -> None:
    one, both = (perturbed(without(cost, PartError("front", 0.7, slow))) for slow in (None, 0.7))
    assert [drawn.front for drawn in one] == [drawn.front for drawn in both]


def test_a_front_in_seconds_leans_too_and_none_has_no_error() -> None:
    reported = deploy("llama-3-8b", "H100", host=HostOverhead(request_s=0.01)).cost.evidence.errors
    assert reported[-1] == PartError("front", 0.7, slow_front_log_sd(Front(0.01), FRONT_SLOW_S))
    assert all(error.slow_log_sd is None for error in reported[:-1])
    assert all(error.part != "front" for error in deploy("llama-3-8b", "H100").cost.evidence.errors)


@pytest.mark.parametrize(("report", "log_sd"), [(True, 0.1), (False, 0.7)])
def test_a_calibrated_front_does_not_lean(cost: CostTables, report: bool, log_sd: float) -> None:
    low, high = (0.03 * math.exp(side * 1.96 * 0.1) for side in (-1, 1))
    client = Parameter("client", "", "s", 0.03, low, high, prior=0.02, determined=report, effect=0.1)
    errors = part_errors(cost, [client], {}, 0.05, 0.05)
    (front,) = (error for error in errors if error.part == "front")
    assert front.log_sd == pytest.approx(log_sd)
    assert front.slow_log_sd is None
    calibrated = replace(cost, front=Front(0.03, cost.front.serial_s), evidence=CostEvidence(errors=errors))
    off = perturbed(calibrated)
    logs = np.log([drawn.front.request_s / 0.03 for drawn in off])
    assert logs.max() == pytest.approx(-logs.min(), rel=1e-9)
