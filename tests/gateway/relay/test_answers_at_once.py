"""An answer that comes at once shows no first token: no estimate of the time to first token uses it."""

from __future__ import annotations

import pytest
from relay_world import BARE, IDS, run, world
from scripted_engine import Scripted

from lengthwise.gateway.core.ranking import PREFILL_WEIGHT
from lengthwise.gateway.fleet.fleet import FirstTokenListener

BODY = {"model": "m", "prompt": "one two", "max_tokens": 60}
COMPLETE, STREAM = BODY | {"presence_penalty": 0.5}, BODY | {"stream": True}
UNLEARNED = 200 * PREFILL_WEIGHT / 4


@pytest.mark.parametrize("capabilities", [BARE, IDS])
def test_of_mixed_traffic_only_streams_teach_what_a_start_takes(capabilities):
    """Nine starts are enough to learn of: there are two, and twelve answers that come whole."""

    async def work() -> None:
        async with world([Scripted()], capabilities=capabilities) as w:
            (worker,) = w.scheduler.worker_pool
            for _ in range(2):
                for _ in range(6):
                    assert (await w.submit(COMPLETE)).status == 200
                await w.submit(STREAM)
            assert worker.cost.recompute_steps(200, 4) == UNLEARNED
            for _ in range(8):
                await w.submit(STREAM)
            assert worker.cost.recompute_steps(200, 4) != UNLEARNED

    run(work)


def test_engine_comparison_and_first_token_times_use_streams_alone():
    async def work() -> None:
        compared: list[str] = []
        async with world([Scripted()], capabilities=BARE) as w:
            w.driver.listeners.add(FirstTokenListener(lambda name, seconds: compared.append(name)))
            for body in (COMPLETE, STREAM, COMPLETE, STREAM, COMPLETE):
                await w.submit(body)
            reported = [number for what, number in w.ledger.events if what == "first_token"]
            assert reported == [2, 4]
            assert compared == ["w0", "w0"]
            assert [w.ledger.tokens_of[number] for number in (1, 3, 5)] == [60] * 3

    run(work)


def test_a_non_streamed_request_that_is_fetched_as_a_stream_has_a_first_token():
    async def work() -> None:
        async with world([Scripted()], capabilities=IDS) as w:
            await w.submit(BODY)
            assert ("first_token", 1) in w.ledger.events

    run(work)
