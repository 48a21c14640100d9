"""Mode rra over real HTTP: a whole gateway before emulated engines of known step time, clients in a closed loop."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from dataclasses import replace

import pytest
from relay_world import run

from lengthwise.backend.openai_protocol import Server
from lengthwise.gateway.concurrency_probe import RequestTimes, max_concurrent, probe_max_num_seqs
from lengthwise.gateway.config import (
    Dispatch,
    Engine,
    GatewayConfig,
    Listen,
    Order,
    Phases,
    PredictionConfig,
    ResilienceConfig,
)
from lengthwise.gateway.notices import notices
from lengthwise.gateway.protocols import Listener
from lengthwise.gateway.serve import Gateway, background_gateway
from lengthwise.schema.errors import EngineError, InputError
from lengthwise.testing.engine_server import EngineServer, EngineSpec, Limits, LinearSteps, in_thread

STEP_S = 0.05


class Received(Listener):
    def __init__(self):
        self.phases = []

    def phase(self, phase):
        self.phases.append(phase)


def engine(*, max_num_seqs=64, step_s=STEP_S, steps=None):
    steps = steps or LinearSteps(step_s, 0.0, 0.0)
    return EngineServer(EngineSpec("m", limits=Limits(max_num_seqs, 4096), steps=steps))


def config_of(*urls, phases, **named) -> GatewayConfig:
    return GatewayConfig(
        engines=tuple(Engine(url, name=f"e{number}") for number, url in enumerate(urls)),
        order=Order("rra", max_wait_s=math.inf),
        dispatch=Dispatch(phases=phases),
        prediction=PredictionConfig(predictor="none", learn=False),
        listen=Listen(port=0, admin_port=0),
        resilience=ResilienceConfig(drain_s=5.0),
        **named,
    )


async def settled(gateway):
    await gateway.fleet.wait_checked(20.0)
    while not gateway.driver.statistics().workers[0].up:  # noqa: ASYNC110 - the fleet is looked at
        await asyncio.sleep(0.02)


async def loop_of(port, clients, lengths, *, stream=True):
    """Closed loop: so many clients, each asks the next when it has its answer."""
    import aiohttp

    left = iter(lengths)
    url = f"http://127.0.0.1:{port}/v1/completions"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client():
            for tokens in left:
                body = {"model": "m", "prompt": "p " * 10, "max_tokens": tokens, "stream": stream}
                async with session.post(url, json=body | {"ignore_eos": True, "min_tokens": tokens}) as reported:
                    assert reported.status == 200, await reported.text()
                    await reported.read()

        await asyncio.gather(*(client() for _ in range(clients)))


class RecordedSteps(LinearSteps):
    """Steps of STEP_S. ``prompts`` has the number of prompts of each."""

    def __init__(self):
        super().__init__(STEP_S, 0.0, 0.0)
        self.prompts = []

    def __call__(self, decodes, kv_tokens, prompts):
        self.prompts.append(len(prompts))
        return super().__call__(decodes, kv_tokens, prompts)


@pytest.mark.slow
def test_phases_are_those_of_the_schedule_as_counted_and_at_the_engine():
    prefill_batch, decode_steps = 3, 4
    received, steps = Received(), RecordedSteps()

    async def work() -> None:
        async with engine(steps=steps) as server:
            config = config_of(server.url, phases=Phases(prefill_batch, decode_steps))
            async with Gateway(config, listeners=(received,)) as gateway:
                await settled(gateway)
                before = len(steps.prompts)
                lengths = [9 + 3 * (n % 4) for n in range(27)]
                await loop_of(gateway.port, 20, lengths)
                ran = steps.prompts[before:]
                metrics = await text_of(gateway.admin_port)
        full = [one for one in received.phases if one.cause == "steps"][:6]
        assert {one.prefill_batch for one in full} == {prefill_batch}
        assert statistics.median_low(one.decode_steps for one in full) == decode_steps
        assert all(one.decode_steps >= decode_steps for one in full)
        at = [n for n, prompts in enumerate(ran) if prompts]
        cycles = [(ran[a], b - a) for a, b in itertools.pairwise(at)][2:7]  # the first may come in two steps
        assert cycles.count((prefill_batch, decode_steps)) >= 4, cycles
        assert 'lengthwise_phase_plan{parameter="decode_steps"} 4.0' in metrics
        assert f'lengthwise_phase_prefill_batch_requests_count{{worker="e0"}} {len(received.phases)}.0' in metrics
        assert 'lengthwise_phases_total{cause="steps",worker="e0"}' in metrics

    run(work)


async def text_of(port):
    import aiohttp

    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as reported:
        return await reported.text()


@pytest.mark.parametrize("stream", [True, False])
def test_a_non_streamed_request_is_served_too(stream):
    async def work() -> None:
        phases = Phases(2, 5)
        async with engine(step_s=0.005) as server, Gateway(config_of(server.url, phases=phases)) as gateway:
            await settled(gateway)
            async with asyncio.timeout(60):
                await loop_of(gateway.port, 7, [3, 12, 6, 9] * 5, stream=stream)
            assert server.log.max_concurrent <= 7

    run(work)


def test_a_drain_lets_requests_that_wait_for_a_phase_finish():
    async def work() -> None:
        phases = Phases(1, 30)
        async with engine(step_s=0.01) as server, Gateway(config_of(server.url, phases=phases)) as gateway:
            await settled(gateway)
            loop = asyncio.ensure_future(loop_of(gateway.port, 4, [12] * 4))
            while gateway.driver.num_requests < 4:  # noqa: ASYNC110 - the hub is looked at
                await asyncio.sleep(0.01)
            assert await gateway.drain()
            await loop

    run(work)


def test_an_engine_that_dies_gives_its_requests_to_the_other_in_its_phases():
    async def work() -> None:
        async with engine(step_s=0.01) as one, engine(step_s=0.01) as other:
            config = config_of(one.url, other.url, phases=Phases(2, 6))
            async with Gateway(config) as gateway:
                await settled(gateway)
                loop = asyncio.ensure_future(loop_of(gateway.port, 10, [15] * 40))
                while one.log.count("finished") < 4:  # noqa: ASYNC110 - the engine is looked at
                    await asyncio.sleep(0.01)
                await one.die()
                async with asyncio.timeout(60):
                    await loop
                assert one.log.count("finished") + other.log.count("finished") >= 40

    run(work)


def test_a_schedule_changes_while_it_runs_and_is_reported_as_planned():
    async def work() -> None:
        async with engine(step_s=0.005) as server:
            config = config_of(server.url, phases=Phases(2, 5))
            async with Gateway(config) as gateway:
                await settled(gateway)
                await gateway.configure(replace(config, dispatch=Dispatch(phases=Phases(3, 7))))
                await loop_of(gateway.port, 6, [4] * 6)
                assert 'lengthwise_phase_plan{parameter="prefill_batch"} 3.0' in await text_of(gateway.admin_port)
                with pytest.raises(InputError, match=r"order\.mode cannot change"):
                    await gateway.configure(replace(config, order=Order("fcfs")))

    run(work)


def test_a_bound_on_waiting_is_warned_of():
    config = config_of("http://a", phases=Phases(2, 5))
    assert not any("phase" in text for text in notices(config))
    bounded = replace(config, order=Order("rra", max_wait_s=60.0))
    assert any("within a phase" in text for text in notices(bounded))


def test_a_background_gateway_reports_its_requests_and_stops():
    received = Received()
    with in_thread(engine(step_s=0.005)) as up:
        config = config_of(up.servers[0].url, phases=Phases(2, 3))
        with background_gateway(config, (received,)) as running:
            asyncio.run(loop_of(running.gateway.port, 3, [6] * 6))
            assert running.call(running.gateway.drain())
        assert sorted(row.output_tokens for row in running.rows) == [6] * 6
        assert sum(one.prefill_batch for one in received.phases) == 6


def test_an_unreachable_engine_is_reported():
    config = config_of("http://127.0.0.1:9", phases=Phases(2, 3))
    with pytest.raises(EngineError, match="must be up and serve"), background_gateway(config, start_timeout_s=5.0):
        pass


def test_an_occupied_port_is_reported():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = GatewayConfig(
            engines=(Engine("http://127.0.0.1:9"),), listen=Listen(port=taken.getsockname()[1], admin_port=None)
        )
        with pytest.raises(InputError, match="must be free"), background_gateway(config):
            pass


@pytest.mark.parametrize(("active", "desired", "found"), [(5, 12, 5), (12, 12, 12), (64, 12, 12)])
def test_slots_are_found_by_probing(stalls, active, desired, found):
    """A client that stalls reads the ends of the first requests together with the tokens of later ones."""
    with in_thread(engine(max_num_seqs=active, step_s=0.004)) as up:
        server = Server(up.servers[0].url)
        assert stalls.without(lambda: probe_max_num_seqs(server, desired)) == found


def test_a_late_client_is_not_taken_for_a_full_engine():
    early, late = RequestTimes(0.0, 0.1, 0.2), RequestTimes(0.3, 0.4, 0.5)
    assert max_concurrent([early, late]) == 2, "it was sent when the first was over: nothing is known against it"
    assert max_concurrent([early, RequestTimes(0.05, 0.4, 0.5)]) == 1, "it waited for the end of the first"
