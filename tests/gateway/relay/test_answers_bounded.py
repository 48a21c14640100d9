"""Answers that have to be held are bounded, and each leg of a request is named for itself."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web
from relay_world import IDS, FixedWorker, requested, run, world
from scripted_engine import Fault as ScriptedFault
from scripted_engine import Scripted

from lengthwise.gateway.config import Engine, GatewayConfig, Listen, Order, PredictionConfig, ResilienceConfig
from lengthwise.gateway.fleet import Fleet
from lengthwise.gateway.relay import open_session
from lengthwise.gateway.relay.relay import resumable_tokens
from lengthwise.gateway.relay.responses import AssembledResponse, TrackedStream
from lengthwise.gateway.relay.sse import ResponseOptions
from lengthwise.gateway.serve import Gateway
from lengthwise.testing.engine_server import EngineServer, EngineSpec, Fault
from lengthwise.testing.engine_server.server import close_runner

CARE = ResilienceConfig(health_every_s=0.3, answer_bytes=200_000)
IN_USE = {"model": "toy", "prompt": "tell", "max_tokens": 40, "ignore_eos": True}


class Noting(Fleet):
    """A fleet that notes of what its engines were blamed for."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.blamed = []

    def record_broken_response(self, name, cause):
        self.blamed.append(cause)
        super().record_broken_response(name, cause)


@asynccontextmanager
async def before(engine, mode):
    config = GatewayConfig(
        engines=(Engine(engine.url),),
        order=Order(mode, window_tokens=10),
        prediction=PredictionConfig(predictor="none"),
        resilience=CARE,
        listen=Listen(port=0, admin_port=None),
    )
    async with (
        Gateway(config, make_fleet=Noting) as gateway,
        ClientSession(f"http://127.0.0.1:{gateway.port}") as client,
    ):
        await gateway.fleet.wait_checked(10)

        async def ask(**fields):
            async with client.post("/v1/completions", json=IN_USE | fields) as answer:
                return answer.status, await answer.json()

        yield gateway, ask


@pytest.mark.parametrize("mode", ["fcfs", "isrtf"])
def test_an_answer_beyond_the_bound_is_the_fault_of_the_engine_and_the_next_one_is_served(mode):
    """With ``isrtf`` the answer is fetched as a stream and put together here; with ``fcfs`` it comes whole."""

    async def work():
        async with EngineServer(EngineSpec(speed=50.0)) as engine, before(engine, mode) as (gateway, ask):
            assert (await ask())[0] == 200
            engine.faults.incoming = [Fault("giant", after_tokens=5, size=300_000)]
            status, reported = await ask()
            assert (status, reported["error"]["code"]) == (502, "answer_too_long")
            assert "200000 bytes" in reported["error"]["message"]
            assert len(engine.log.entries) - 1 == 2, "no other engine gets the request (one was the probe)"
            assert gateway.fleet.blamed == ["answer too long"]
            engine.faults.incoming = [Fault("giant", after_tokens=5, size=100_000)]
            status, reported = await ask()
            assert status == 200
            assert len(reported["choices"][0]["text"]) > 100_000
            await engine.idle()

    run(work)


@pytest.mark.parametrize("fields", [{"n": 2}, {"logprobs": 1}])
def test_a_client_that_requests_much_cannot_bring_an_engine_down(fields):
    async def work():
        async with EngineServer(EngineSpec(speed=50.0)) as engine, before(engine, "fcfs") as (gateway, ask):
            engine.faults.always = Fault("giant", size=300_000)
            assert [(await ask(**fields))[0] for _ in range(4)] == [502] * 4
            assert gateway.fleet.blamed == []

    run(work)


def event(text, ids):
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize("one", [event("x" * 1000, [1]), event("", [1] * 30), event("a", [1])])
def test_what_is_put_together_of_a_stream_that_never_ends_is_bounded(one):
    state = AssembledResponse(
        ResponseOptions("completions", stream=False, usage=False, usage_each=False, ids=False), 50_000
    )
    fed = 0
    while state.error is None:
        assert state.feed(one) == b""
        fed += 1
        assert fed * 10 < 50_000
    assert (state.error.code, state.error.engine_fault) == ("answer_too_long", True)


def test_request_ids_are_unique_per_engine_and_the_client_keeps_its_own():
    async def work():
        dies = ScriptedFault("die", 5)
        async with world([Scripted(plan=[dies, None]), Scripted(plan=[dies, None])]) as w:
            own = replace_headers(requested({"model": "m", "prompt": "go", "max_tokens": 30, "stream": True}))
            answer = await w.relay.serve(own)
            got = b"".join([part async for part in answer])
            await answer.aclose()
            assert got.endswith(b"data: [DONE]\n\n")
            seen = [one.headers["x-request-id"] for engine in w.engines for one in engine.seen]
            assert sorted(seen) == ["own", "own-2", "own-3"]
            assert {one.headers["traceparent"] for engine in w.engines for one in engine.seen} == {"00-1"}
            assert own.headers[0] == ("X-Request-Id", "own")

    run(work)


def replace_headers(one):
    one.headers = [("X-Request-Id", "own"), ("traceparent", "00-1")]
    return one


@asynccontextmanager
async def reporting(answer):
    """An engine that answers any POST so."""
    app = web.Application()
    app.router.add_post("/{any:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await close_runner(runner)


async def kept_by(url):
    """Tokens kept of a chunk with two, where the engine at an address alone knows of the last one's text."""
    session = open_session(Engine(url), ResilienceConfig())
    state = TrackedStream(ResponseOptions("completions", stream=True, usage=False, usage_each=False, ids=True))
    state.feed(event("ab", [5, 6]))
    try:
        return await resumable_tokens(state, FixedWorker("w", url, IDS, session), "m")
    finally:
        await session.close()


def test_a_text_of_tokens_is_not_followed_elsewhere_nor_read_without_end():
    hits = []

    async def half(request):
        hits.append(request.path)
        return web.json_response({"prompt": "\ufffd" if len(hits) == 1 else "a"})

    async def endless(_):
        return web.json_response({"prompt": "\ufffd", "more": "x" * 70_000})

    async def work():
        async with reporting(half) as url:
            assert await kept_by(url) == 1
            assert hits == ["/detokenize"] * 2
            hits.clear()

            async def elsewhere(_):
                raise web.HTTPTemporaryRedirect(f"{url}/detokenize")

            async with reporting(elsewhere) as other:
                assert await kept_by(other) == 2, "without an answer it is believed"
            assert not hits
        async with reporting(endless) as url:
            assert await kept_by(url) == 2

    run(work)
