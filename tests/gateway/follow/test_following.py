"""Following beside an event loop: a real process that plans, whatever becomes of it."""

from __future__ import annotations

import asyncio
import logging
import math
from functools import partial

import follow_worlds
import pytest
from scheduler_worlds import request

from lengthwise.gateway.config import Engine, GatewayConfig, Order, Phases
from lengthwise.gateway.replanning import ArrivalOrder, PlanTracker
from lengthwise.gateway.request import Outcome
from lengthwise.gateway.serve import Gateway
from lengthwise.schema.errors import InputError

FIRST, OTHER = Phases(2, 5), Phases(3, 7)


def followed(make, count=9, keep=None, **timeouts):
    """(following, what was kept) after so many requests that ended one after the other, alike but for their lengths."""
    retained = []

    async def retains(phases):
        retained.append(phases)

    async def work():
        now_s = iter(range(10_000))
        async with PlanTracker(make, FIRST, keep or retains, lambda: float(next(now_s)), **timeouts) as following:
            for number in range(count):
                q = request(number, 0.0, prompt_tokens=10 + number)
                following.on_admission(q)
                q.generated_tokens = 20 + number
                following.on_end(q, Outcome.FINISHED, float(number))
            async with asyncio.timeout(60):
                await following.wait_observed()
            return following

    with asyncio.Runner() as runner:
        return runner.run(work()), retained


def test_a_new_schedule_is_applied_and_logged(caplog):
    with caplog.at_level(logging.INFO, "lengthwise.gateway"):
        following, retained = followed(partial(follow_worlds.Report))
    now = following.state
    assert retained == [OTHER]
    assert (now.up, now.observed, now.changed, now.unchanged, now.failed) == (True, 9, 1, 0, 0)
    assert (now.evidence, now.false_positive_rate, now.schedule) == (9.0, 0.01, "RRA, B_E = 3")
    assert now.last == ("changed after 12 + 22",)
    assert "changed after 12 + 22" in caplog.text


def test_a_failed_plan_is_logged_the_schedule_stays_and_the_watch_continues(caplog):
    with caplog.at_level(logging.INFO, "lengthwise.gateway"):
        following, retained = followed(partial(follow_worlds.Report, "raises"))
    now = following.state
    assert retained == [OTHER]
    assert (now.up, now.observed, now.changed, now.failed) == (True, 9, 1, 1)
    stated = "replanning failed, the schedule stays as it is: ValueError: no such lengths"
    assert now.last == (stated,)
    assert [one.levelname for one in caplog.records if stated in one.message] == ["WARNING"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "timeouts", "states"),
    [
        (partial(follow_worlds.Report, "dies"), {}, "its process exited with 3"),
        (partial(follow_worlds.Report, "hangs"), {"plan_s": 0.5}, "it did not answer within 0.5 s"),
        (partial(follow_worlds.Report, "closes"), {"plan_s": 1.0}, "its process is alive but does not answer"),
        (follow_worlds.refused, {}, "ValueError: there is no such scenario"),
    ],
)
def test_a_follower_that_dies_leaves_the_schedule_unchanged(make, timeouts, states, caplog):
    following, retained = followed(make, **timeouts)
    now = following.state
    assert retained in ([], [OTHER])
    assert (now.up, now.error, now.failed) == (False, states, 1)
    assert now.last == (f"lengths are no longer observed, the schedule stays as it is: {states}",)
    assert states in caplog.text


def test_a_schedule_that_cannot_be_applied_ends_the_watch():
    async def refuses(phases):
        raise InputError(f"not {phases.prefill_batch}")

    following, _ = followed(partial(follow_worlds.Report), keep=refuses)
    assert following.state.error == "not 3"
    assert following.state.changed == 0


def test_lengths_are_reported_once_in_arrival_order_after_all_earlier_requests():
    order = ArrivalOrder()
    for number in range(5):
        order.on_arrival(number)
    assert order.on_end(2, (2, 20), 1.0) == []
    assert order.on_end(1, None, 2.0) == [], "it failed: nothing is known of its length"
    assert order.on_end(0, (1, 10), 3.0) == [(1, 10, 3.0), (2, 20, 3.0)]
    assert order.on_end(4, (5, 50), 4.0) == []
    assert order.on_end(3, (4, 40), 5.0) == [(4, 40, 5.0), (5, 50, 5.0)]


def test_only_a_schedule_of_phases_follows():
    config = GatewayConfig(engines=(Engine("http://a"),), order=Order("fcfs"))
    with pytest.raises(InputError, match="only mode rra has a schedule"):
        Gateway(config, make_replanner=follow_worlds.Report)


def test_nothing_is_known_before_the_start():
    async def work():
        return PlanTracker(follow_worlds.Report, FIRST, None, lambda: 0.0).state

    with asyncio.Runner() as runner:
        now = runner.run(work())
    assert (now.up, now.observed, now.last) == (True, 0, ())
    assert math.isnan(now.false_positive_rate)
