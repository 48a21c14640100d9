"""Every forwarded route, through the whole gateway before an emulated engine."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re

import aiohttp
import pytest
from relay_world import run, until

from lengthwise.gateway.apis import APIS, CHUNKS
from lengthwise.gateway.config import Engine, GatewayConfig, Listen, Order, PredictionConfig
from lengthwise.gateway.serve import Gateway, background_gateway
from lengthwise.testing.engine_server import EngineServer, EngineSpec, Fault, FaultPlan, LinearSteps, in_thread

SPEC = EngineSpec(model="m", steps=LinearSteps(fixed_s=0.002))
UNKNOWN = {"unknown_field": {"a": [1, None]}}
FORM, BOUNDARY = "multipart/form-data; boundary=xYz", b"--xYz"
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "tell me <out:12>"}]}]
BODIES = {
    "chat": {"messages": MESSAGES},
    "completions": {"prompt": "tell me <out:12>", "max_tokens": 40},
    "responses": {"input": [{"type": "message", "role": "user", "content": "tell me <out:12>"}], "instructions": "Be"},
    "messages": {"messages": MESSAGES, "system": "Be brief", "max_tokens": 40},
    "embeddings": {"input": ["one", [3, 4, 5]]},
    **{name: {"query": "one", "documents": ["two", "one and two"]} for name in ("rerank", "/v2/rerank", "/rerank")},
    "messages/count_tokens": {"messages": MESSAGES, "system": "Be brief"},
    "/tokenize": {"prompt": "tell me"},
    "/detokenize": {"tokens": [300, 301]},
}
STREAMED = ("chat", "completions", "responses", "messages")
ALL = [(api, False) for api in APIS if api != "audio/speech"] + [(api, True) for api in STREAMED]


def form(**fields):
    parts = [b'Content-Disposition: form-data; name="%b"\r\n\r\n%b' % (k.encode(), v) for k, v in fields.items()]
    parts.append(
        b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n\0\r\n1'
    )
    return b"".join([BOUNDARY + b"\r\n" + part + b"\r\n" for part in parts]) + BOUNDARY + b"--\r\n"


def body_of(api, *, stream=False, **fields):
    """(body, media type)"""
    if APIS[api].is_form:
        return form(model=b"m", **{name: str(value).encode() for name, value in fields.items()}), FORM
    if stream:
        usage = {"stream_options": {"include_usage": True}} if APIS[api].events == CHUNKS else {}
        fields |= {"stream": True, **usage}
    return json.dumps({"model": "m", **BODIES[api], **fields}), "application/json"


def post(url, api, body, media_type="application/json", **headers):
    """(status, media type, body)"""
    with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)) as line:
        line.request("POST", APIS[api].path, body, {"Content-Type": media_type, "X-Request-Id": "r-1", **headers})
        answer = line.getresponse()
        return answer.status, answer.headers["content-type"], answer.read()


def config_of(*engines, mode="srtf", **order):
    return GatewayConfig(
        engines=tuple(Engine(one.url, name=f"e{k}", concurrency=1, probe=False) for k, one in enumerate(engines)),
        listen=Listen(port=0, admin_port=None),
        prediction=PredictionConfig(predictor="none"),
        order=Order(mode=mode, **order),
    )


def untimed(answer):
    status, media_type, body = answer
    return status, media_type, re.sub(rb'"created(_at)?": ?\d+', b"", body)


@pytest.fixture(scope="module")
def world():
    server = EngineServer(SPEC)
    with in_thread(server), background_gateway(config_of(server)) as gateway:
        yield server, gateway


@pytest.mark.parametrize(("api", "stream"), ALL)
def test_the_answer_is_the_engines_to_the_byte_and_its_tokens_are_counted(world, api, stream):
    server, gateway = world
    body, media_type = body_of(api, stream=stream, **UNKNOWN)
    straight, through = (untimed(post(url, api, body, media_type)) for url in (server.url, gateway.url))
    assert straight[0] == 200
    assert through == straight
    if APIS[api].queued:
        entry, row = server.log.entries[-1], gateway.rows[-1]
        assert "unknown_field" in entry.body
        assert row.output_tokens == (entry.output_tokens if APIS[api].generates else 0)
        assert row.prompt_tokens == len(entry.prompt_ids) or APIS[api].is_form


@pytest.mark.parametrize("api", ["responses", "messages", "embeddings", "/detokenize", "audio/speech"])
def test_errors_of_the_engine_pass_unchanged(world, api):
    server, gateway = world
    wrong = {"responses": {"input": []}, "messages": {"messages": MESSAGES}, "/detokenize": {"tokens": ["x", "y"]}}
    body = json.dumps({"model": "m", "input": [], **wrong.get(api, {})})
    straight, through = (post(url, api, body) for url in (server.url, gateway.url))
    assert straight[0] in (400, 404)
    assert through == straight


def shown(events):
    return [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_a_stream_that_no_engine_can_continue_ends_with_an_error_that_its_client_knows(api):
    """Before the first output the request moves on to the other engine."""
    servers = EngineServer(SPEC), EngineServer(SPEC)
    with in_thread(*servers), background_gateway(config_of(*servers)) as gateway:
        complete = shown(post(gateway.url, api, *body_of(api, stream=True))[2])
        for after_tokens in (0, 3):
            broken = FaultPlan(incoming=[Fault("close", after_tokens)])
            servers[0].faults, servers[1].faults = broken, broken
            events = shown(post(gateway.url, api, *body_of(api, stream=True))[2])
            if after_tokens == 0:
                assert [event["type"] for event in events] == [event["type"] for event in complete]
                continue
            error = events[-1]["error"]
            assert "The engine" in error["message"]
            assert error["type"] == ("api_error" if api == "messages" else "server_error")
            assert events[-1].get("type") == ("error" if api == "messages" else None)
            assert len(events) < len(complete)


def test_tokenization_moves_on_to_the_next_engine_if_one_dies():
    servers = EngineServer(SPEC), EngineServer(SPEC)
    with in_thread(*servers) as running, background_gateway(config_of(*servers)) as gateway:
        running.call(servers[0].die())
        assert [post(gateway.url, "/tokenize", *body_of("/tokenize"))[0] for _ in range(3)] == [200] * 3
        running.call(servers[1].die())
        status, _, body = post(gateway.url, "messages/count_tokens", *body_of("messages/count_tokens"))
        assert status in (502, 503)
        assert json.loads(body)["error"]["type"] in ("api_error", "overloaded_error")


def test_the_order_decides_only_the_start_where_no_engine_can_continue():
    """Mode windowed would interrupt a chat every five tokens to let the others run."""

    async def work():
        async with (
            EngineServer(SPEC) as server,
            Gateway(config_of(server, mode="windowed", window_tokens=5)) as gateway,
            aiohttp.ClientSession() as session,
        ):
            await until(gateway.fleet.ready)

            async def ask(api, **fields):
                url = f"http://127.0.0.1:{gateway.port}{APIS[api].path}"
                async with session.post(url, json=json.loads(body_of(api, **fields)[0])) as answer:
                    return answer.status, await answer.read()

            requests = [asyncio.ensure_future(ask("responses", input="tell me <out:100>", stream=True))]
            await until(lambda: len(server.log.entries) == 1 and server.log.entries[0].sent_tokens > 5)
            requests += [asyncio.ensure_future(ask(api)) for api in ("messages", "embeddings")]
            await until(lambda: gateway.driver.statistics().waiting == 2)
            assert (await ask("/tokenize"))[0] == 200  # it needs no slot
            assert gateway.driver.statistics().waiting == 2
            assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 3
            assert [entry.api for entry in server.log.entries] == ["responses", "embeddings", "messages"]
            assert gateway.driver.statistics().preemptions == 0

    run(work)


@pytest.mark.slow
def test_the_official_clients(world):
    import anthropic
    import openai

    _, gateway = world
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as client:
        response = client.responses.create(model="m", input="tell me <out:9>")
        assert (response.status, response.usage.output_tokens) == ("completed", 9)
        with client.responses.stream(model="m", input="tell me <out:9>") as stream:
            assert stream.get_final_response().output_text == response.output_text
        assert len(client.embeddings.create(model="m", input=["a", "b"]).data) == 2
        sound = ("a.wav", b"\0\1", "audio/wav")
        assert client.audio.transcriptions.create(model="m", file=sound).text
    with anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0) as client:
        request = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "tell me <out:9>"}]}
        message = client.messages.create(**request)
        assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 9)
        with client.messages.stream(**request) as stream:
            assert stream.get_final_message().content[0].text == message.content[0].text
        assert client.messages.count_tokens(model="m", messages=request["messages"]).input_tokens > 3
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**request | {"model": "none"})
