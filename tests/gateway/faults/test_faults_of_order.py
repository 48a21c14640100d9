"""What must hold of a whole gateway whatever is predicted, requested, or reported by a clock."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from fault_predictors import Bad
from fault_world import Report, ask, body, config_of, engine
from relay_world import Ledger, run, until

from lengthwise.gateway.config import Order
from lengthwise.gateway.length_prediction import LengthPredictor
from lengthwise.gateway.length_prediction.length_predictor import Oracle
from lengthwise.gateway.request import Request
from lengthwise.gateway.serve import Gateway


class Waits(Ledger):
    """Keeps the requests that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    def on_end(self, request, outcome, now_s, detail="") -> None:
        super().on_end(request, outcome, now_s, detail)
        self.requests.append(request)


def knowing(config, clock, late) -> Oracle:
    return Oracle(config, clock, late, length=lambda request, _: float(request.max_tokens))


async def many(port: int, sizes: list[int]) -> list[Report]:
    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(ask(session, port, body(size)) for size in sizes))


@pytest.mark.parametrize("how", ["raises", "nan", "zero", "huge", "adversarial"])
def test_a_bad_predictor_fails_no_request(how):
    async def work() -> None:
        ledger = Waits()
        async with engine(seqs=2) as one:
            config = config_of(one, concurrency=2, order=Order(window_tokens=10, max_wait_s=0.5))

            def length_predictor(settings, clock, late):
                return LengthPredictor(settings, clock, late, predictor=Bad(how), place="inline")

            async with Gateway(config, listeners=(ledger,), make_predictor=length_predictor) as gateway:
                reported = await many(gateway.port, [40, 5, 5, 20, 5, 30, 5, 5])
            assert all(answer.complete for answer in reported)
            assert max(request.dispatch.preemptions for request in ledger.requests) <= config.order.max_preemptions
            await one.idle()

    run(work)


@pytest.mark.slow
def test_a_slow_predictor_is_not_waited_for(stalls):
    async def work() -> None:
        async with engine() as one:
            config = config_of(one)

            def length_predictor(settings, clock, late):
                return LengthPredictor(settings, clock, late, predictor=Bad("slow"), place="process")

            async with Gateway(config, make_predictor=length_predictor) as gateway:
                started = time.perf_counter()
                reported = await many(gateway.port, [5, 5, 5])
                assert time.perf_counter() - started < 0.3 + stalls.lost_s
                state = gateway.length_predictor.state()
            assert all(answer.complete for answer in reported)
            assert state["sources"]["prior"] == 3

    run(work)


def test_a_long_one_is_served_in_time_however_many_short_ones_come():
    async def work() -> None:
        ledger, order = Waits(), Order(window_tokens=10, max_wait_s=0.4)
        async with engine(seqs=1) as one:
            config = config_of(one, concurrency=1, order=order)
            async with (
                Gateway(config, listeners=(ledger,), make_predictor=knowing) as gateway,
                aiohttp.ClientSession() as session,
            ):
                over = asyncio.Event()

                async def flood() -> None:
                    while not over.is_set():
                        assert (await ask(session, gateway.port, body(3))).complete

                shorts = [asyncio.ensure_future(flood()) for _ in range(6)]
                await until(lambda: len(ledger.requests) > 10)
                async with asyncio.timeout(60):
                    assert (await ask(session, gateway.port, body(100, "long"))).complete
                over.set()
                await asyncio.gather(*shorts)
        long = next(request for request in ledger.requests if request.max_tokens == 100)
        behind_s = 8 * max(0.1, *(r.dispatch.queued_for_s / 6 for r in ledger.requests if r.max_tokens == 3))
        assert long.dispatch.queued_for_s < order.max_wait_s + behind_s

    run(work)


@pytest.mark.slow
def test_a_storm_of_cuts_is_capped():
    async def work() -> None:
        ledger, order = (
            Waits(),
            Order(window_tokens=5, preemptions_per_s=2.0, max_preemptions=2, preemption="worth(factor=1)"),
        )
        async with engine(seqs=1) as one:
            config = config_of(one, concurrency=1, order=order)
            async with Gateway(config, listeners=(ledger,), make_predictor=knowing) as gateway:
                started = time.perf_counter()
                long = asyncio.ensure_future(many(gateway.port, [200, 190, 180]))
                await until(lambda: one.slots_in_use == 1)
                for _ in range(12):
                    assert all(answer.complete for answer in await many(gateway.port, [2]))
                reported = await long
                duration_s = time.perf_counter() - started
                cuts = gateway.driver.statistics().preemptions
            uncut = await many(one.port, [200, 190, 180])  # of the engine itself
        assert all(answer.complete for answer in reported)
        assert 1 <= cuts <= 2 + 2.0 * duration_s
        assert max(request.dispatch.preemptions for request in ledger.requests) <= order.max_preemptions
        assert [answer.text for answer in reported] == [answer.text for answer in uncut]

    run(work)


def test_a_clock_jump_harms_no_request(monkeypatch):
    async def work() -> None:
        jumped_s = [0.0]

        def clock() -> float:
            return time.monotonic() + jumped_s[0]

        async with engine(seqs=2) as one:
            config = config_of(one, concurrency=2)
            async with Gateway(config, clock=clock, make_predictor=knowing) as gateway:
                asking = asyncio.ensure_future(many(gateway.port, [60, 50, 40, 30, 20]))
                await until(lambda: one.slots_in_use == 2)
                real = time.time
                monkeypatch.setattr(time, "time", lambda: real() - 86_400.0)  # no code reads the wall clock
                jumped_s[0] = 86_400.0  # and the gateway's own may jump ahead: a machine that slept
                assert all(answer.complete for answer in await asking)
                assert all(answer.complete for answer in await many(gateway.port, [3, 3]))
                assert gateway.driver.num_requests == 0

    run(work)


@pytest.mark.slow
def test_after_five_thousand_requests_no_slot_is_leaked():
    async def work() -> None:
        count, left = 5_000, iter(range(5_000))
        ledger = Ledger()
        async with engine(seqs=64, step_s=0.001) as one:
            config = config_of(one, concurrency=64)
            async with Gateway(config, listeners=(ledger,), make_predictor=knowing) as gateway:

                async def client() -> None:
                    async with aiohttp.ClientSession() as session:
                        for number in left:
                            what = body(2 + number % 5, stream=number % 3 != 0)
                            asking = asyncio.ensure_future(ask(session, gateway.port, what))
                            if number % 7 == 0:  # the client goes, at any moment
                                await asyncio.sleep((number % 11) * 0.001)
                                asking.cancel()
                            await asyncio.gather(asking, return_exceptions=True)

                await asyncio.gather(*(client() for _ in range(32)))
                await until(lambda: gateway.driver.num_requests == 0)
                numbers = gateway.driver.statistics()
                assert (numbers.waiting, numbers.running, numbers.waiting_bytes) == (0, 0, 0)
                assert gateway.fleet.workers()[0].session.connector.pool.busy == set()
                await one.idle()
        assert sum(ledger.outcomes.values()) <= count
        assert sum(ledger.outcomes.values()) > count - count // 7

    asyncio.run(work())
