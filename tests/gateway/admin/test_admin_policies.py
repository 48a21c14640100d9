"""The table by policy: what requests had, what the shadow of FCFS gave them, what was simulated; with its intervals."""

from __future__ import annotations

import numpy as np
import pytest
from admin_worlds import World

from lengthwise.gateway.admin.state import MIN_INTERVAL_REQUESTS, Policies, measured, simulated
from lengthwise.gateway.observe import Change, Gain, OrderGain, OrderTimes, as_json
from lengthwise.gateway.telemetry import Pair


def pairs(seed: int, n: int, *, finished_s: float = 0.0) -> list[Pair]:
    """A third faster than the shadow in the mean, bursts of 10 alike."""
    rng = np.random.default_rng(seed)
    shadow = rng.exponential(3.0, n) * np.repeat(rng.gamma(20.0, 0.05, -(-n // 10)), 10)[:n]
    had = shadow * rng.gamma(4.0, 2.0 / 12.0, n)
    return [Pair(finished_s, a, a / 2, b, b / 2) for a, b in zip(had.tolist(), shadow.tolist(), strict=True)]


def test_numbers_are_those_of_the_requests_themselves() -> None:
    made = pairs(1, 700)
    had, shadow = measured("isrtf", made)
    assert (had["kind"], had["name"], had["count"]) == ("had", "isrtf", 700)
    assert (shadow["kind"], shadow["name"]) == ("shadow", "fcfs")
    columns = {"jct_s": had["jct"], "queued_for_s": had["queue"], "shadow_jct_s": shadow["jct"]}
    for name, reported in columns.items():
        values = sorted(getattr(pair, name) for pair in made)
        assert reported[0][0] == pytest.approx(np.mean(values))
        assert [one[0] for one in reported[1:]] == [values[350], values[630], values[693]]
        assert all(low <= value <= high for value, low, high in reported)
    value, low, high = had["mean_change"]
    assert value == pytest.approx(had["jct"][0][0] / shadow["jct"][0][0] - 1)
    assert low < value < high < 0


def test_intervals_contain_the_truth_about_as_often_as_stated() -> None:
    """Of 200 worlds, of the mean and of the change against the shadow."""
    mean = change = 0
    for seed in range(200):
        had, _ = measured("isrtf", pairs(seed, 600), seed=seed)
        mean += had["jct"][0][1] <= 2.0 <= had["jct"][0][2]
        change += had["mean_change"][1] <= -1 / 3 <= had["mean_change"][2]
    assert 178 <= mean <= 200
    assert 178 <= change <= 200


def test_few_requests_have_numbers_and_no_interval() -> None:
    had, _ = measured("srtf", pairs(2, MIN_INTERVAL_REQUESTS - 1))
    assert np.isfinite(had["jct"][0][0])
    assert np.isnan(had["jct"][0][1:]).all()
    assert np.isnan(had["mean_change"][1:]).all()
    assert measured("srtf", []) == []


def test_the_table_is_recomputed_every_few_seconds_over_the_last_minutes() -> None:
    now_s = [100.0]
    policies = Policies(lambda: now_s[0], 60.0, interval_s=5.0)
    old, new = pairs(1, 50, finished_s=30.0), pairs(2, 70, finished_s=90.0)
    assert policies.rows("isrtf", old + new, None)[0]["count"] == 70
    now_s[0] = 104.0
    assert policies.rows("isrtf", new[:10], None)[0]["count"] == 70
    now_s[0] = 105.0
    assert policies.rows("isrtf", new[:10], None)[0]["count"] == 10


def test_what_was_simulated_stands_below_with_its_intervals() -> None:
    change = Change(-0.2, -0.3, -0.1)
    found = Gain(
        "switch on", "", 300, 60.0,
        orders=(OrderGain("srtf", change, Change(0.1, -0.1, 0.3), 1.5, 9.0),),
        times=(OrderTimes("fcfs", (2.0, 1.0, 4.0, 8.0), (1.0, 0.0, 3.0, 6.0)),
               OrderTimes("srtf", (1.5, 0.8, 4.0, 9.0), (0.5, 0.0, 2.0, 7.0))),
    )  # fmt: skip
    fcfs, srtf = simulated(as_json(found))
    assert (fcfs["kind"], fcfs["name"], fcfs["count"], fcfs["mean_change"]) == ("simulated", "fcfs", 300, None)
    assert srtf["mean_change"] == [-0.2, -0.3, -0.1]
    assert [value for value, _, _ in srtf["queue"]] == [0.5, 0.0, 2.0, 7.0]
    assert simulated(None) == []
    assert simulated(as_json(Gain("not enough traffic", "", 3, 1.0))) == []


def test_the_state_reports_both_policies_over_the_same_requests() -> None:
    world = World().live(90, 4.5)
    had, shadow = world.app.state.now()["policies"]
    regret = world.telemetry.regret
    assert had["count"] == shadow["count"] == len(regret.pairs()) > 50
    assert had["jct"][0][0] - shadow["jct"][0][0] == pytest.approx(regret.mean_s(), abs=1e-4)
    assert had["queue"][0][0] > 0
