"""Mode engine-priority on a real vLLM: its priority queue, with priorities of the gateway; and one without it."""

from __future__ import annotations

import asyncio

import pytest
from plugin_engines import Job, burst, bursting, taken, vllm

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LONG, SHORT = 150, 12
SHAPE = ("--max-num-seqs", "2")


def through_a_gateway(url: str) -> tuple[object, int, list[str]]:
    """Long requests, then short ones, sent through a gateway; how the engine was known, and what it warned of."""
    from lengthwise.gateway.config import Engine, GatewayConfig, Listen, Order, PredictionConfig
    from lengthwise.gateway.notices import engine_notices
    from lengthwise.gateway.serve import Gateway

    config = GatewayConfig(
        engines=(Engine(url, name="it"),),
        listen=Listen(port=0, admin_port=None),
        order=Order(mode="engine-priority"),
        prediction=PredictionConfig(predictor="none"),
    )
    first, then = [Job(f"long{k}", LONG) for k in range(5)], [Job(f"short{k}", SHORT) for k in range(4)]

    async def work():
        async with Gateway(config) as gateway:
            assert await gateway.fleet.wait_checked(20.0)
            it = gateway.fleet.worker("it")
            warned = await engine_notices([it], "engine-priority")
            async with taken(url, 2, 900, {"priority": -(1 << 31) + 1}) as max_num_seqs:
                found = await bursting(
                    f"http://127.0.0.1:{gateway.port}", then, tuple(first), max_num_seqs=max_num_seqs
                )
            return found, it.priority_sign, warned

    return asyncio.run(work())


@pytest.fixture(scope="module")
def fcfs(tiny, engine_python):
    """What an engine that takes no priorities answers."""
    with vllm(engine_python, tiny, tiny.parent / "fcfs.log", *SHAPE) as engine:
        reported = [Job("zero", 3, {"priority": 0}), Job("one", 3, {"priority": 1}), Job("none", 3)]
        return burst(engine.url, reported), through_a_gateway(engine.url)


def test_an_engine_without_priority_scheduling_accepts_priorities_silently(fcfs):
    """What vLLM's documentation refuses, 0.32 lets pass: a client cannot observe it from outside."""
    requested, _ = fcfs
    assert requested.refusals == {}
    assert sorted(requested.finished) == ["none", "one", "zero"]


def test_its_order_stays_that_of_arrival_and_all_are_answered(fcfs):
    found, sign, warned = fcfs[1]
    assert sign == 1  # it took one
    assert (found.refusals, len(found.finished)) == ({}, 9)
    assert max(found.finished.index(f"short{k}") for k in range(4)) > 4
    assert len(warned) == 1
    assert "whether it orders by them is unknown" in warned[0]
    assert "--scheduling-policy priority" in warned[0]


@pytest.fixture(scope="module")
def url(tiny, engine_python, fcfs):
    words = (*SHAPE, "--scheduling-policy", "priority")
    with vllm(engine_python, tiny, tiny.parent / "priority.log", *words) as engine:
        yield engine.url


def test_smaller_priorities_go_first_whenever_they_came(url):
    values = [5, -3, (1 << 31) - 1, 0, -(1 << 31) + 1, 2]
    jobs = [Job(f"p{value}", 20, {"priority": value}) for value in values]
    busy = tuple(Job(f"busy{k}", 400, {"priority": -(1 << 31) + 1}) for k in range(2))
    found = burst(url, jobs, head=busy)
    assert found.refusals == {}
    waited = [name for name in found.finished if name.startswith("p")]
    # Two slots: a request two places before another never ends after it.
    wanted = [f"p{value}" for value in sorted(values)]
    assert all(abs(waited.index(name) - wanted.index(name)) <= 1 for name in wanted)


def test_the_gateway_has_short_ones_answered_before_long_ones_that_wait(url):
    found, sign, _ = through_a_gateway(url)
    assert (sign, found.refusals) == (1, {})
    assert set(found.finished[:4]) == {f"short{k}" for k in range(4)}
