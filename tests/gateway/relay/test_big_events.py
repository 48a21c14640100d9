"""An event too long to be looked into passes, and the gateway lives."""

import asyncio
import json

import pytest
from aiohttp import ClientSession, ClientTimeout, web
from relay_world import run, world
from scripted_engine import Fault, Scripted, answer, encode

from lengthwise.gateway.config import Engine, GatewayConfig, Listen, Order, PredictionConfig
from lengthwise.gateway.relay.responses import UntrackedStream
from lengthwise.gateway.serve import Gateway
from lengthwise.testing.engine_server.server import close_runner


@pytest.mark.parametrize("size", [500_000, 1_300_000, 4_000_000])
def test_a_stream_with_a_huge_event_ends_when_its_connection_does(size):
    state = UntrackedStream()
    data = b'data: {"choices":[{"index":0,"text":"' + b"x" * size + b'"}]}\n\ndata: [DONE]\n\n'
    pieces = [data[at : at + 65_536] for at in range(0, len(data), 65_536)]
    out = b"".join(state.feed(piece) for piece in pieces) + state.end()
    assert out == data
    assert state.output_complete
    assert state.finished
    assert state.error is None


async def models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})


async def healthy(_: web.Request) -> web.Response:
    return web.Response()


async def huge(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    size = int((await request.json())["user"])
    await answer.write(b'data: {"choices":[{"index":0,"text":"' + b"x" * size + b'","finish_reason":null}]}\n\n')
    end = b'data: {"choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    await answer.write(end)
    await answer.write_eof()
    return answer


async def sizes_through_a_gateway(*sizes: int) -> list[int]:
    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", healthy)
    app.router.add_post("/v1/completions", huge)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine = Engine(str(site.name), probe=False)
    config = GatewayConfig(
        engines=(engine,),
        order=Order("fcfs"),
        prediction=PredictionConfig(predictor="none"),
        listen=Listen(port=0, admin_port=None),
    )
    came = []
    async with Gateway(config) as gateway, ClientSession(timeout=ClientTimeout(total=60)) as client:
        await gateway.fleet.wait_checked(10)
        url = f"http://127.0.0.1:{gateway.port}/v1/completions"
        for size in sizes:
            body = {"model": "m", "prompt": "hi", "stream": True, "user": str(size)}
            async with client.post(url, json=body) as answer:
                came.append(len(await answer.read()) - size)
    await close_runner(runner)
    return came


def test_big_events_pass_the_complete_gateway_and_the_next_request_is_served():
    found = asyncio.run(sizes_through_a_gateway(10, 4_000_000, 10))
    assert found[0] == found[1] == found[2]


LONG = "x" * 400_000


@pytest.mark.slow
@pytest.mark.parametrize("metadata", [{}, {"stream": False}, {"return_token_ids": True}])
def test_prompt_ids_above_one_mib_pass_and_the_answer_continues_elsewhere(metadata: dict):
    """The engine tells them in its first event, and again where the answer goes on."""

    async def work() -> None:
        engines = [Scripted(plan=[Fault("die", 2)]), Scripted()]
        async with world(engines, order=Order("isrtf", window_tokens=2)) as w:
            reply = await w.submit({"model": "m", "prompt": LONG, "max_tokens": 4, "stream": True, **metadata})
            assert reply.status == 200
            text = reply.text
            if not metadata.get("stream", True):
                text = json.loads(reply.body)["choices"][0]["text"]
            assert text == answer(encode(LONG), 4)[1]
            assert [name for name, _ in w.fleet.faults] == ["w0"]

    run(work)
