"""The table by policy, and the change against FCFS: what the report on the same traffic states, with its interval."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from admin_worlds import World

from lengthwise.gateway.admin.state import (
    MAX_TENANTS,
    MIN_INTERVAL_REQUESTS,
    Policies,
    change_against_fcfs,
    measured,
    simulated,
    times,
)
from lengthwise.gateway.observe import Change, Gain, OrderGain, OrderTimes, RecentRows, as_json, gain, of_rows
from lengthwise.gateway.request import Outcome
from lengthwise.gateway.telemetry import Row

CHANGE = Change(-0.2, -0.3, -0.1)
FOUND = Gain(
    "switch on", "", 300, 60.0, observed_jct_s=1.6, fcfs_jct_s=2.0,
    orders=(OrderGain("srtf", CHANGE, Change(0.1, -0.1, 0.3), 1.5, 9.0),),
    times=(OrderTimes("fcfs", (2.0, 1.0, 4.0, 8.0), (1.0, 0.0, 3.0, 6.0)),
           OrderTimes("srtf", (1.5, 0.8, 4.0, 9.0), (0.5, 0.0, 2.0, 7.0))),
)  # fmt: skip


def row(number: int, jct_s: float, *, outcome: Outcome = Outcome.FINISHED) -> Row:
    return Row(
        id=number, model="m", tenant="t", priority=0, arrival_s=float(number), prompt_tokens=1, max_tokens=9,
        predicted_tokens=1.0, source="prior", predicted_level=0.5, repredictions=(), output_tokens=1,
        queued_for_s=jct_s / 2, dispatched_s=number + jct_s / 2, first_token_s=number + jct_s,
        finished_s=number + jct_s, served_s=jct_s / 2, worker="w", preemptions=0, resumed_tokens=0, failovers=0,
        outcome=outcome.value,
    )  # fmt: skip


def rows(seed: int, n: int) -> list[Row]:
    """Bursts of 10 alike, 3 s in the mean."""
    rng = np.random.default_rng(seed)
    jct_s = rng.exponential(3.0, n) * np.repeat(rng.gamma(20.0, 0.05, -(-n // 10)), 10)[:n]
    return [row(number, seconds) for number, seconds in enumerate(jct_s.tolist())]


def test_numbers_are_those_of_the_requests_themselves() -> None:
    made = rows(1, 700)
    (served,) = measured("isrtf", made[::-1])
    assert (served["kind"], served["name"], served["count"]) == ("served", "isrtf", 700)
    for name, attribute in (("jct", "jct_s"), ("queue", "queued_for_s")):
        values = sorted(getattr(one, attribute) for one in made)
        assert served[name][0][0] == pytest.approx(np.mean(values))
        assert [one[0] for one in served[name][1:]] == pytest.approx([values[350], values[630], values[693]])
        assert all(low <= value <= high for value, low, high in served[name])


def test_the_tenants_with_most_requests_have_times_of_their_own() -> None:
    made = [replace(row(number, 1.0 + number), tenant=f"t{int(number**0.5)}") for number in range(200)]
    groups = {one["name"]: one["count"] for one in times(made) if one["name"].startswith("tenant")}
    assert len(groups) == MAX_TENANTS
    assert groups["tenant t13"] == 27  # of 2 k + 1 requests for each k up to 13
    assert min(groups.values()) == 13  # t6; t14 has 4
    assert not any(one["name"].startswith("tenant") for one in times(made[:1]))


def test_intervals_contain_the_truth_about_as_often_as_stated() -> None:
    """Of 200 worlds, of the mean."""
    covered = 0
    for seed in range(200):
        (served,) = measured("isrtf", rows(seed, 600), seed=seed)
        covered += served["jct"][0][1] <= 3.0 <= served["jct"][0][2]
    assert 178 <= covered <= 200


def test_few_requests_have_numbers_and_no_interval() -> None:
    (served,) = measured("srtf", rows(2, MIN_INTERVAL_REQUESTS - 1))
    assert np.isfinite(served["jct"][0][0])
    assert np.isnan(served["jct"][0][1:]).all()
    assert measured("srtf", []) == []


def test_the_table_is_recomputed_every_few_seconds_of_finished_requests() -> None:
    now_s = [100.0]
    policies = Policies(lambda: now_s[0], interval_s=5.0)
    made = rows(1, 70)
    assert policies.rows("isrtf", [*made, row(99, 1.0, outcome=Outcome.FAILED)], None)[0]["count"] == 70
    now_s[0] = 104.0
    assert policies.rows("isrtf", made[:10], None)[0]["count"] == 70
    now_s[0] = 105.0
    assert policies.rows("isrtf", made[:10], None)[0]["count"] == 10


def test_simulated_orders_are_listed_with_their_intervals() -> None:
    fcfs, srtf = simulated(as_json(FOUND))
    assert (fcfs["kind"], fcfs["name"], fcfs["count"], fcfs["mean_change"]) == ("simulated", "fcfs", 300, None)
    assert srtf["mean_change"] == [-0.2, -0.3, -0.1]
    assert [value for value, _, _ in srtf["queue"]] == [0.5, 0.0, 2.0, 7.0]
    assert simulated(None) == []
    assert simulated(as_json(Gain("not enough traffic", "", 3, 1.0))) == []


def test_the_change_is_that_of_the_order_in_use_or_of_the_one_that_could_be() -> None:
    used = change_against_fcfs("srtf", as_json(FOUND))
    assert used is not None
    assert (used["value"], used["low"], used["high"]) == (-0.2, -0.3, -0.1)
    assert (used["in_use"], used["is_known"], used["jct_s"], used["fcfs_s"]) == (True, True, 1.5, 2.0)
    possible = change_against_fcfs("observe", as_json(FOUND))
    assert possible is not None
    assert (possible["order"], possible["in_use"]) == ("srtf", False)


def test_the_change_is_unknown_where_engines_do_not_behave_as_fitted() -> None:
    found = as_json(FOUND) | {"observed_jct_s": 3.0}
    change = change_against_fcfs("srtf", found)
    assert change is not None
    assert not change["is_known"]
    assert change_against_fcfs("srtf", None) is None
    assert change_against_fcfs("srtf", as_json(Gain("not enough traffic", "", 3, 1.0))) is None


@pytest.mark.parametrize("mode", ["isrtf", "fcfs"])
def test_the_page_and_the_report_state_the_same_of_the_same_requests(mode: str) -> None:
    """Traffic that starts with the concurrency limit's ramp, which a slower shadow queue would mistake for waiting."""
    world = World(mode=mode)
    record = RecentRows()
    world.telemetry.timelines.subscribe(record.append)
    world.live(90, 4.5)
    report = gain(of_rows(record.rows), world.config.order, draws=20)
    world.app.state.monitor.estimate = as_json(report)
    state = world.app.state.now()
    order = report.order("isrtf" if mode == "isrtf" else "srtf")
    assert state["change"]["value"] == pytest.approx(order.mean.value, rel=1e-4)
    assert (state["change"]["low"], state["change"]["high"]) == pytest.approx(
        (order.mean.low, order.mean.high), rel=1e-4
    )
    assert state["change"]["requests"] == report.requests
    assert [one["name"] for one in state["policies"]] == [mode, "fcfs", "srtf", "isrtf", "oracle"]
    assert state["policies"][0]["jct"][0][0] > 0
