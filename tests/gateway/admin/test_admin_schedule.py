"""The schedule of phases on the admin page: the schedule in use, how it follows lengths, the last report."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from admin_worlds import Served, World
from browser import screen, until

from lengthwise.gateway.config import Dispatch, Order, Phases
from lengthwise.gateway.replanning import ReplanningState

PHASES = Phases(6, 5, decode_batch=34.0, mean_prompt_tokens=300.0, threshold=0.1, max_requests=44)
NOW = ReplanningState(
    True, "", 812, 3.25, 0.01, "RRA, B_E = 6, N_D = 5", 1, 2, 0, ("outputs moved", "Changed to RRA"), 970.0
)


def retains(now: ReplanningState | None) -> World:
    """A gateway in mode rra at 1,000 s."""
    world = World()
    config = replace(world.config, order=Order("rra", max_wait_s=math.inf), dispatch=Dispatch(phases=PHASES))
    world.app.configure(config)
    if now is not None:
        world.telemetry.metrics.tracker = lambda: now
    return world


def test_the_state_contains_the_schedule_and_its_adaptation():
    reported = retains(NOW).app.state.now()["schedule"]
    assert reported["phases"]["prefill_batch"] == 6
    follows = reported["follows"]
    assert (follows["evidence"], follows["alarm"], follows["observed"]) == (3.25, 100.0, 812)
    assert (follows["changed"], follows["unchanged"], follows["failed"]) == (1, 2, 0)
    assert (follows["last"], follows["last_ago_s"]) == (["outputs moved", "Changed to RRA"], 30.0)
    assert retains(None).app.state.now()["schedule"]["follows"] is None
    assert World().app.state.now()["schedule"] is None


@pytest.mark.browser
@pytest.mark.parametrize(
    ("now", "states"),
    [
        (NOW, "812 requests observed: evidence of drift 3.25; an alarm needs 100. Schedule changed 1 time"),
        (
            replace(NOW, up=False, error="its process ended with 3"),
            "no longer follows the output lengths: its process ended with 3.",
        ),
        (replace(NOW, false_positive_rate=math.nan), "Drift detection of output lengths has not started."),
        (None, "The schedule is fixed"),
    ],
)
def test_the_page_shows_the_schedule(driver, now, states):
    with Served(retains(now).app) as served:
        screen(driver, 1280, "light")
        driver.get(served.url)
        until(driver, "return Number(document.body.dataset.drawn || 0) >= 1")
        read = "return document.getElementById(arguments[0]).textContent"
        assert not driver.execute_script("return document.getElementById('schedule-section').hidden")
        assert "B_E = 6 · N_D = 5 · decode batch 34" in driver.execute_script(read, "schedule-now")
        assert states in driver.execute_script(read, "schedule-follows")
        message = driver.execute_script(read, "schedule-events")
        assert message == ("" if now is None else "outputs movedChanged to RRA")
