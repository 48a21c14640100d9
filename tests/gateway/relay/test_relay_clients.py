"""Clients that go, read slowly, or come by the thousand: nothing is left of them."""

from __future__ import annotations

import asyncio
import json

import pytest
from relay_world import BARE, IDS, idle, pause, requested, run, until, world
from scripted_engine import Fault, Scripted

from lengthwise.gateway.config import ResilienceConfig
from lengthwise.gateway.request import Outcome

BODY = {"model": "m", "prompt": "p 400", "max_tokens": 400, "stream": True}


@pytest.mark.parametrize("capabilities", [IDS, BARE])
def test_gone_while_it_waits(capabilities):
    async def work() -> None:
        async with world([Scripted(step_s=0.002)], cap=1, capabilities=capabilities) as w:
            first = asyncio.ensure_future(w.submit(BODY))
            await until(lambda: len(w.engines[0].seen) == 1)
            second = asyncio.ensure_future(w.submit({**BODY, "max_tokens": 900, "prompt": "p 900"}))
            await until(lambda: w.driver.num_requests == 2)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            assert w.driver.num_requests == 1
            assert w.ledger.outcomes == {Outcome.CLIENT_GONE: 1}
            await first
            assert len(w.engines[0].seen) == 1

    run(work)


@pytest.mark.parametrize("stream", [True, False])
def test_gone_before_the_first_byte(stream: bool):
    async def work() -> None:
        async with world([Scripted(plan=[Fault("hang")])], cap=1) as w:
            task = asyncio.ensure_future(w.submit({**BODY, "stream": stream}))
            await until(lambda: len(w.engines[0].seen) == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: w.engines[0].seen[0].how == "aborted")
            await until(lambda: idle(w))
            assert w.ledger.outcomes == {Outcome.CLIENT_GONE: 1}

    run(work)


@pytest.mark.parametrize("by", ["aclose", "cancel", "aclose from outside"])
@pytest.mark.parametrize("capabilities", [IDS, BARE])
def test_gone_in_the_middle_the_engine_sees_the_abort(capabilities, by: str):
    async def work() -> None:
        async with world([Scripted(step_s=0.002)], cap=1, capabilities=capabilities) as w:
            answer = await w.relay.serve(requested(BODY))
            parts = aiter(answer)
            await anext(parts)
            if by == "aclose":
                await answer.aclose()
            elif by == "cancel":
                task = asyncio.ensure_future(anext(parts))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                task = asyncio.ensure_future(_all(parts))
                await pause(0.01)
                await answer.aclose()
                await task
            await parts.aclose()
            await until(lambda: w.engines[0].seen[0].how == "aborted")
            await until(lambda: idle(w))
            assert w.ledger.outcomes == {Outcome.CLIENT_GONE: 1}

    run(work)


async def _all(parts) -> list[bytes]:
    return [part async for part in parts]


def test_gone_while_it_waits_again_after_a_cut():
    from test_relay_cut import EAGER

    async def work() -> None:
        async with world([Scripted(step_s=0.002)], cap=1, order=EAGER) as w:
            answer = await w.relay.serve(requested(BODY))
            parts = asyncio.ensure_future(_all(aiter(answer)))
            await until(lambda: w.ledger.tokens_of[1] > 30)
            others = [
                asyncio.ensure_future(w.submit({**BODY, "prompt": f"{k} 20", "max_tokens": 20})) for k in range(9)
            ]
            await until(lambda: "preemption" in w.ledger.cause)
            await answer.aclose()
            await parts
            await asyncio.gather(*others)
            await until(lambda: idle(w))
            assert w.ledger.outcomes == {Outcome.CLIENT_GONE: 1, Outcome.FINISHED: 9}

    run(work)


def test_a_client_that_reads_too_slowly_is_dropped():
    async def work() -> None:
        async with world([Scripted(step_s=0.001)], resilience=ResilienceConfig(stall_s=0.2)) as w:
            answer = await w.relay.serve(requested(BODY))
            parts = aiter(answer)
            await anext(parts)
            await pause(0.6)
            rest = await _all(parts)
            assert b"[DONE]" not in b"".join(rest)
            await until(lambda: idle(w))
            assert w.ledger.outcomes == {Outcome.CLIENT_GONE: 1}

    run(work)


def test_a_slow_reader_delays_no_other_request():
    async def work() -> None:
        async with world([Scripted()]) as w:
            answer = await w.relay.serve(requested({**BODY, "max_tokens": 20_000}))
            parts = aiter(answer)
            await anext(parts)
            other = await w.submit({**BODY, "max_tokens": 5, "prompt": "q 5"})
            assert other.status == 200
            await answer.aclose()
            await parts.aclose()
            assert w.engines[0].seen[0].sent < 20_000
            await until(lambda: idle(w))

    run(work)


@pytest.mark.slow
def test_after_two_thousand_requests_of_all_kinds_nothing_is_left():
    async def one(w, k: int) -> None:
        body = {**BODY, "prompt": f"{k} {k % 9}", "max_tokens": 1 + k % 9, "stream": k % 3 > 0}
        task = asyncio.ensure_future(w.submit(body))
        if k % 5 == 0:
            await asyncio.sleep(0.001 * (k % 7))
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def work() -> None:
        kinds = {1: "die", 2: "500", 3: "error", 4: "garbage"}
        plan = [Fault(kinds.get(k % 10, "503"), k % 4 - 1) if k % 10 < 5 and (k % 10 or not k % 500) else None
                for k in range(3000)]  # fmt: skip
        engines = [Scripted(plan=list(plan)), Scripted(plan=list(plan[3:]))]
        async with world(engines, cap=8) as w:
            for start in range(0, 2000, 50):
                await asyncio.gather(*(one(w, k) for k in range(start, start + 50)))
            await until(lambda: idle(w), 10)
            assert sum(w.ledger.outcomes.values()) == 2000 - _never_arrived(w)
            assert w.driver.num_requests == 0
            for worker in w.fleet.workers():
                assert not worker.session.connector.pool.busy

    run(work)


def _never_arrived(w) -> int:
    """Cancelled before they were let in."""
    return 2000 - sum(name == "on_admission" for name, _ in w.ledger.events)


def test_a_large_body_is_sent_completely():
    async def work() -> None:
        async with world([Scripted()]) as w:
            body = {**BODY, "prompt": "x" * 700_000, "max_tokens": 1, "stream": False}
            reply = await w.submit(body)
            assert reply.status == 200
            assert w.engines[0].seen[0].raw == json.dumps(body).encode()

    run(work)
