"""A whole gateway whose schedule follows lengths, over real HTTP: the real planner in its own process."""

from __future__ import annotations

import asyncio
import json
import logging
import random

import aiohttp
import pytest
from follow_worlds import planned_small
from test_phases_served import Received, config_of, engine, loop_of, settled, text_of

from lengthwise.gateway.config import Phases
from lengthwise.gateway.serve import Gateway
from lengthwise.schedule import Monitor
from lengthwise.usecases import schedule_adaptation


def lengths(gateway, after=150, before=250):
    """Outputs as planned, then others until the schedule has changed, then some more of these."""
    dice = random.Random(3)
    yield from (dice.randint(2, 16) for _ in range(before))
    while gateway.tracker.state.changed == 0 and gateway.tracker.state.up:
        yield dice.randint(20, 34)
    yield from (dice.randint(20, 34) for _ in range(after))


def counted(some, into):
    for one in some:
        into.append(one)
        yield one


async def page(port):
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/state.json") as reported:
        return json.loads(await reported.read())


@pytest.mark.slow
def test_a_served_schedule_follows_its_traffic_and_reports_it(caplog):
    requested, planned = planned_small()
    watch = Monitor(sides=("outputs",))  # prompts are texts here, of which a gateway only estimates tokens
    make = schedule_adaptation.follower_factory(
        requested, planned, schedule_adaptation.FollowOptions(watch, max_num_seqs=100)
    )
    received, asked_for = Received(), []

    async def work():
        async with engine(max_num_seqs=100, step_s=0.005) as server:
            config = config_of(server.url, phases=planned.phases)
            async with Gateway(config, listeners=(received,), make_replanner=make) as gateway:
                await settled(gateway)
                await loop_of(gateway.port, 100, counted(lengths(gateway), asked_for))
                await gateway.tracker.wait_observed()
                return (
                    await text_of(gateway.admin_port),
                    await page(gateway.admin_port),
                    gateway.tracker,
                    gateway.config.dispatch.phases,
                )

    with caplog.at_level(logging.INFO, "lengthwise.gateway"):
        metrics, state, following, phases = asyncio.run(work())
    now = following.state
    assert (now.changed, now.failed, now.error) == (1, 0, "")
    assert now.observed == len(asked_for), "no request was lost"
    ((changed_s, news),) = following.events
    assert isinstance(phases, Phases)
    assert phases == news.phases != planned.phases
    complete = [one for one in received.phases if one.started_s > changed_s and one.cause == "steps"]
    assert complete[5:], "phases went on"
    assert min(one.decode_steps for one in complete) >= phases.decode_steps
    full = [one for one in complete if one.prefill_batch == phases.prefill_batch]
    assert len(full) >= len(complete[5:]) / 2
    assert f'lengthwise_phase_plan{{parameter="prefill_batch"}} {phases.prefill_batch}.0' in metrics
    assert 'lengthwise_plans_total{result="changed"} 1.0' in metrics
    assert "lengthwise_lengths_alarm 100.0" in metrics
    assert state["schedule"]["phases"]["decode_steps"] == phases.decode_steps
    assert state["schedule"]["follows"]["last"] == list(news.message)
    assert "outputs changed" in caplog.text
