"""An engine dies with all that it has: every stream goes on elsewhere, and what may kill engines has to be paid for."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from relay_world import idle, run, until, world
from scripted_engine import Fault, Scripted, answer, encode

from lengthwise.gateway.config import ResilienceConfig
from lengthwise.gateway.relay.failures import MAX_OWNER_RETRIES, MAX_OWNERS, STALLED, RetryBudget, UpstreamError
from lengthwise.gateway.request import Outcome
from lengthwise.gateway.scheduling import WorkerState

BODY = {"model": "m", "prompt": "p 40", "max_tokens": 40, "stream": True, "temperature": 0}
STREAMS = 64


def states(*names: str) -> list[WorkerState]:
    return [WorkerState(name, ("m",), concurrency=STREAMS) for name in names]


def text_of(reply) -> str:
    return reply.text if reply.parts[1:] else json.loads(reply.body)["choices"][0]["text"]


@pytest.mark.parametrize("stream", [True, False])
def test_all_requests_of_a_dead_engine_finish_completely_elsewhere(stream):
    async def work() -> None:
        dying, other = engines = [Scripted(step_s=0.02), Scripted()]
        async with world(engines, cap=STREAMS) as w:
            w.driver.fleet_changed(states("w0"))
            tasks = [asyncio.ensure_future(w.submit({**BODY, "stream": stream})) for _ in range(STREAMS)]
            await until(lambda: len([one for one in dying.seen if one.sent > 3]) == STREAMS)
            w.driver.fleet_changed(states("w0", "w1"))
            await dying.kill()
            replies = await asyncio.gather(*tasks)
            assert {text_of(reply) for reply in replies} == {answer(encode("p 40"), 40)[1]}
            assert not stream or {reply.events[-1] for reply in replies} == {"[DONE]"}
            assert len(other.seen) == STREAMS
            assert w.ledger.outcomes == {Outcome.FINISHED: STREAMS}
            assert w.relay.retry_budget.used == 0
            await until(lambda: idle(w))

    run(work)


def spend(budget: RetryBudget) -> None:
    """Leaves nothing to anybody."""
    for owner in ("a", "b"):
        while budget.take(owner):
            pass


@pytest.mark.parametrize(("used", "engines_lost"), [(False, 3), (True, 2)])
def test_what_broke_one_engine_has_to_be_paid_for_and_breaks_three_at_most(used, engines_lost):
    async def work() -> None:
        engines = [Scripted([Fault("die", 12)] * 9) for _ in range(6)]
        async with world(engines) as w:
            if used:
                spend(w.relay.retry_budget)
            reply = await w.submit(BODY)
            assert reply.events[-1]["error"]["code"] == "engine_failed"
            assert sum(len(engine.seen) for engine in engines) == engines_lost

    run(work)


def test_only_the_first_engine_that_breaks_off_is_left_for_free():
    budget = RetryBudget(0.2)
    spend(budget)

    def free(error: UpstreamError, *, failures: int = 1, output_started: bool = True) -> bool:
        return budget.take_for(error, "c", failures=failures, output_started=output_started)

    for reason in ("no connection", "closed early", STALLED):
        assert free(UpstreamError(reason))
        assert not free(UpstreamError(reason), failures=2)
        assert not free(UpstreamError(reason, engine_fault=False)), "it is the gateway's own"
    assert not free(UpstreamError(STALLED), output_started=False), "it may be overloaded"
    assert not free(UpstreamError("http 500", status=500))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 1.0])
def test_one_owner_leaves_half_of_it_to_the_others(share):
    draws = random.Random(7)
    for steps in (0, 3, 30, 300, 3000):
        budget = RetryBudget(share)
        for _ in range(steps):
            if draws.random() < 0.3:
                budget.deposit("a")
            else:
                budget.take("a")
        assert budget.used <= MAX_OWNER_RETRIES + share * steps
        assert [budget.take("b") for _ in range(5)] == [True] * 5


def test_a_tenant_regains_its_retry_budget_with_its_own_requests():
    budget = RetryBudget(0.5)
    while budget.take("a"):
        pass
    for _ in range(2):
        budget.deposit("b")
    assert not budget.take("a")
    for _ in range(2):
        budget.deposit("a")
    assert budget.take("a")
    assert not budget.take("a")


def test_of_owners_without_number_few_are_remembered():
    """An owner whose budget is not full is remembered until MAX_OWNERS such owners have retried after it."""
    for others, forgotten in ((MAX_OWNERS - 1, False), (MAX_OWNERS, True)):
        budget = RetryBudget(1.0)
        exhaust(budget, "a")
        for owner in range(others):
            budget.deposit("")
            assert budget.take(owner)
        assert budget.take("a") == forgotten


def test_owners_whose_budget_is_full_again_are_not_counted():
    budget = RetryBudget(1.0)
    exhaust(budget, "a")
    for owner in range(3 * MAX_OWNERS):
        assert budget.take(owner)
        budget.deposit(owner)
    assert not budget.take("a")


def exhaust(budget, owner):
    """Take all retries of an owner. Deposits of another fill the budget that all share."""
    for _ in range(int(MAX_OWNER_RETRIES)):
        assert budget.take(owner)
        budget.deposit("")
    assert not budget.take(owner)


def test_one_tenant_whose_requests_always_fail_does_not_spend_the_retries_of_others():
    async def work() -> None:
        engines = [Scripted([Fault("500")] * 500) for _ in range(2)]
        async with world(engines, resilience=ResilienceConfig(retry_share=0.1)) as w:
            failed = [await w.submit(BODY, tenant=7) for _ in range(40)]
            assert {reply.status for reply in failed} == {502}
            assert w.relay.retry_budget.used <= MAX_OWNER_RETRIES + 0.1 * 40
            engines[0].plan, engines[1].plan = [Fault("500")], []
            replies = [await w.submit(BODY, tenant=8) for _ in range(2)]
            assert [reply.status for reply in replies] == [200, 200]
            assert engines[0].plan == [], "one of them was sent to another engine"
            assert w.ledger.outcomes == {Outcome.FAILED: 40, Outcome.FINISHED: 2}

    run(work)
