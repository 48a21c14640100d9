"""What a fleet finds out about a real vLLM, and what it sees of its restart."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def started(tmp_path_factory, engine_python, tiny):
    """Starts the engine, as often as one likes, on one port."""
    from plugin_engines import vllm

    from lengthwise.backend.process import free_port

    folder = tmp_path_factory.mktemp("fleet")
    port = free_port()
    words = ("--max-num-seqs", "2", "--scheduling-policy", "priority")
    return lambda: vllm(engine_python, tiny, folder / "log", *words, port=port)


def test_a_real_vllm_is_recognized_watched_and_seen_to_restart(started):
    from lengthwise.gateway.config import Dispatch, Engine, GatewayConfig, Order, ResilienceConfig
    from lengthwise.gateway.fleet import Fleet

    async def watched(stack):
        first = stack.enter_context(started())
        config = GatewayConfig(
            engines=(Engine(first.url, name="e"),),
            order=Order(mode="engine-priority"),
            resilience=ResilienceConfig(health_every_s=0.3),
            dispatch=Dispatch(adapt_every_s=0.2),
        )
        received = []
        async with Fleet(config, on_change=lambda states: received.append(states[0])) as fleet:
            assert await fleet.wait_checked(60)
            worker = fleet.worker("e")
            able = worker.capabilities
            assert (worker.kind, able.models, able.max_model_len) == ("vllm", ("m",), 1024)
            assert able.version
            assert able.token_id_prompts
            assert able.token_ids_each
            assert worker.priority_sign == 1
            assert worker.metadata.kv_tokens > 1024
            await asyncio.gather(*(_submit(worker) for _ in range(5)))
            assert max(state.signals.running or 0 for state in received) == 2
            assert max(state.signals.waiting or 0 for state in received) >= 1
            assert max(state.tokens_per_s or 0 for state in received) > 1
            assert {state.epoch for state in received} == {0}
            await asyncio.to_thread(stack.close)
            await _until(lambda: not received[-1].up)
            await asyncio.to_thread(stack.enter_context, started())
            await _until(lambda: received[-1].up)
            assert received[-1].epoch == 1

    with ExitStack() as stack:
        asyncio.run(watched(stack))


async def _submit(worker):
    body = {"model": "m", "prompt": "hello", "max_tokens": 400, "ignore_eos": True}
    async with worker.session.post(f"{worker.url}/v1/completions", json=body) as answer:
        assert answer.status == 200
        await answer.read()


async def _until(true, max_s=120.0):
    async with asyncio.timeout(max_s):
        while not true():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.05)
