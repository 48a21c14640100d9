"""The tables that a calibration ends in: the same again, what they simulate, how far they reach and may be off."""

from __future__ import annotations

import numpy as np
import pytest
from planted_runs import LIMITS, MIN_COUNT

from lengthwise import cost, engine
from lengthwise.measure.calibration import calibrate
from lengthwise.measure.calibration.parameters import part_errors
from lengthwise.measure.calibration.result import Parameter


@pytest.mark.slow
def test_equal_inputs_give_equal_answers(run, found, deployment, tmp_path):
    again = calibrate([run], deployment, fit=MIN_COUNT)
    assert again.parameters == found.parameters
    for name, one in (("a.npz", found), ("b.npz", again)):
        cost.save(one.tables, tmp_path / name)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_a_saved_calibration_changes_what_is_simulated(run, found, deployment, tmp_path):
    cost.save(found.tables, tmp_path / "cost.npz")
    loaded = engine.deploy("llama-3-8b", "H100", limits=LIMITS, cost=f"tables:{tmp_path / 'cost.npz'}")
    jct = [
        np.median(r.finished_s - r.arrival_s)
        for r in (engine.simulate(run.workload, d).requests for d in (deployment, loaded))
    ]
    other = np.median(run.records.requests.finished_s - run.records.requests.arrival_s)
    assert abs(jct[1] / other - 1) < 0.03 < abs(jct[0] / other - 1)


def test_tables_know_how_far_the_runs_reached_and_how_far_they_are_off(run, found):
    reach = found.tables.evidence.reach
    w = run.workload
    assert reach.tokens == 2048
    assert 1 < reach.seqs <= 64
    assert reach.context <= (w.prompt_tokens + w.output_tokens).max()
    assert reach.kv_tokens >= reach.context - 400
    errors = {e.part: e.log_sd for e in found.tables.evidence.errors}
    assert 0.005 <= errors["step"] <= found.log_sd
    work = found["work"]
    assert errors["layer"] == pytest.approx(np.log(work.high / work.low) / 3.92)
    assert errors["host"] > 0.02  # what its interval leaves open, determined or not
    assert "calibrated" in found.tables.evidence.source


def test_errors_of_parts_are_those_of_intervals_and_steps_have_the_rest(deployment):
    def parameter(name, low, high, *, determined=True, unit="x"):
        return Parameter(name, name, unit, 1.0, low, high, 1.0, determined, 0.1)

    found = [
        parameter("work", 1 / 1.04, 1.04),
        parameter("decode", 0.5, 2.0, determined=False),
        parameter("host_step", 1e-3, 2e-3, unit="s"),
        parameter("client", 0.0, 1e-3, unit="s"),
    ]
    reported = part_errors(deployment.cost, found, {"work": 0.8}, 0.03, 0.05)
    sd = {e.part: e.log_sd for e in reported}
    assert sd["layer"] == pytest.approx(np.log(1.04) / 1.96)
    assert sd["decode"] == pytest.approx(np.log(2) / 1.96)
    assert sd["prefill"] == pytest.approx(0.04)  # times to the first token are off by more
    assert sd["host"] == pytest.approx(np.hypot(np.log(2) / 3.92, 0.04))
    assert sd["step"] == pytest.approx(np.sqrt(0.03**2 - (0.8 * sd["layer"]) ** 2))
    assert "client" not in sd
