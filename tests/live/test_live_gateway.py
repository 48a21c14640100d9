"""The whole gateway before a real vLLM, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from contextlib import asynccontextmanager

import aiohttp
import pytest

from lengthwise.gateway.config import Engine, GatewayConfig, Key, Listen, Order

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<a>"
SLOTS, QUEUE = 2, 1
MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.fixture(scope="module")
def url(tmp_path_factory, engine_python, tiny):
    from plugin_engines import vllm

    folder = tmp_path_factory.mktemp("gateway")
    (folder / "chat.jinja").write_text(TEMPLATE)
    with vllm(
        engine_python,
        tiny,
        folder / "log",
        "--max-num-seqs",
        str(SLOTS),
        "--max-num-queued-reqs",
        str(QUEUE),
        "--chat-template",
        str(folder / "chat.jinja"),
    ) as engine:
        yield engine.url


@asynccontextmanager
async def served(url: str, *, concurrency: int = SLOTS, **named):
    """A gateway, and a client of it that never tries again by itself."""
    from openai import AsyncOpenAI

    from lengthwise.gateway.serve import Gateway

    config = GatewayConfig(
        engines=(Engine(url, name="engine", concurrency=concurrency, generation_defaults="none"),),
        listen=Listen(port=0, admin_port=None),
        **named,
    )
    async with Gateway(config) as gateway:
        assert await gateway.fleet.wait_checked(30.0)
        base = f"http://127.0.0.1:{gateway.port}/v1"
        async with AsyncOpenAI(base_url=base, api_key="k", max_retries=0, timeout=120.0) as client:
            yield gateway, client


def direct(url: str):
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=120.0)


async def chat(client, *, stream: bool, tokens: int = 24) -> tuple[str, str, int]:
    """(text, finish reason, output tokens)"""
    requested = {"model": "m", "messages": MESSAGES, "max_tokens": tokens, "temperature": 0}
    fixed = {"ignore_eos": True}
    if not stream:
        reported = await client.chat.completions.create(**requested, extra_body=fixed)
        choice = reported.choices[0]
        return choice.message.content, choice.finish_reason, reported.usage.completion_tokens
    text, reason, count = "", "", 0
    options = {"include_usage": True}
    async for part in await client.chat.completions.create(
        **requested, stream=True, stream_options=options, extra_body=fixed
    ):
        for choice in part.choices:
            text, reason = text + (choice.delta.content or ""), choice.finish_reason or reason
        count = part.usage.completion_tokens if part.usage else count
    return text, reason, count


async def completion(client, prompt: str, *, stream: bool, tokens: int = 24) -> tuple[str, str, int]:
    """(text, finish reason, output tokens); the length is fixed, so that the gateway knows it."""
    requested = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    fixed = {"ignore_eos": True, "min_tokens": tokens}
    if not stream:
        reported = await client.completions.create(**requested, extra_body=fixed)
        return reported.choices[0].text, reported.choices[0].finish_reason, reported.usage.completion_tokens
    text, reason, count = "", "", 0
    options = {"include_usage": True}
    async for part in await client.completions.create(
        **requested, stream=True, stream_options=options, extra_body=fixed
    ):
        for choice in part.choices:
            text, reason = text + choice.text, choice.finish_reason or reason
        count = part.usage.completion_tokens if part.usage else count
    return text, reason, count


async def metric(url: str, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as reported:
        lines = (await reported.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_the_official_client_gets_from_the_gateway_what_it_gets_from_the_engine(url):
    async def work() -> None:
        async with served(url) as (_, client), direct(url) as engine:
            assert [one.id for one in (await client.models.list()).data] == ["m"]
            for stream in (False, True):
                through, straight = await chat(client, stream=stream), await chat(engine, stream=stream)
                assert through == straight
                assert through[1:] == ("length", 24)
                through = await completion(client, "the sea", stream=stream)
                assert through == await completion(engine, "the sea", stream=stream)
                assert through[1:] == ("length", 24)

    asyncio.run(work())


BODIES = {
    "/v1/responses": {"input": "the sea", "max_output_tokens": 24, "instructions": "Be brief.", "ignore_eos": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 24, "system": "Be brief."},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "the sea"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/embeddings": {"input": "the sea"},  # of which this model has none
    "/rerank": {"query": "the sea", "documents": ["a"]},
}


def joined(body: bytes) -> list[object]:
    """The events of a stream, the text in one piece: a busy engine joins the text of several tokens."""
    events: list[object] = []
    text = ""
    for event in body.split(b"\n\n"):
        name, _, data = event.partition(b"\ndata: ")
        fields = json.loads(data) if data else {}
        fields.pop("sequence_number", None)
        delta = fields.get("delta")
        piece = delta if isinstance(delta, str) else (delta or {}).get("text") or ""
        text += piece
        events += [] if piece else [(name, fields)]
    return [*events, text]


def test_every_route_answers_as_the_engine_apart_from_ids_and_times(url):
    unlike = re.compile(rb'(?<=")(?:resp|msg|chatcmpl)[_-][\w-]+|(?<="created_at":)\d+')

    async def work() -> None:
        async with served(url) as (gateway, _), aiohttp.ClientSession() as session:
            rows = []
            gateway.telemetry.timelines.subscribe(rows.append)

            async def ask(base: str, path: str, stream: bool) -> tuple[int, str, bytes]:
                body = {"model": "m", "temperature": 0, **BODIES[path], **({"stream": True} if stream else {})}
                async with session.post(base + path, json=body) as answer:
                    return answer.status, answer.headers["content-type"], await answer.read()

            for path, stream in [*((path, False) for path in BODIES), ("/v1/responses", True), ("/v1/messages", True)]:
                status, media_type, straight = await ask(url, path, stream)
                through = await ask(f"http://127.0.0.1:{gateway.port}", path, stream)
                assert through[:2] == (status, media_type)
                assert joined(unlike.sub(b"0", through[2])) == joined(unlike.sub(b"0", straight))
                if path in ("/v1/responses", "/v1/messages"):
                    found = re.findall(rb'"output_tokens": ?(\d+)', straight)
                    assert (status, int(found[-1])) == (200, rows[-1].output_tokens)
                    assert rows[-1].outcome == "finished"
                    assert stream == straight.startswith(b"event: ")
            assert all(worker.up for worker in gateway.driver.statistics().workers)

    asyncio.run(work())


def test_the_official_clients_of_responses_and_messages(url):
    from anthropic import AsyncAnthropic

    request = {"model": "m", "messages": MESSAGES, "max_tokens": 24, "extra_body": {"temperature": 0}}

    async def work() -> None:
        async with (
            served(url) as (gateway, client),
            AsyncAnthropic(base_url=f"http://127.0.0.1:{gateway.port}", api_key="k", max_retries=0) as anthropic,
        ):
            response = await client.responses.create(model="m", input="the sea", max_output_tokens=24, temperature=0)
            kind, final = "", None
            stream = await client.responses.create(
                model="m", input="the sea", max_output_tokens=24, temperature=0, stream=True
            )
            async for event in stream:
                kind, final = event.type, getattr(event, "response", None)
            assert final is not None, kind
            assert (final.output_text, final.usage.output_tokens) == (
                response.output_text, response.usage.output_tokens,
            )  # fmt: skip
            message = await anthropic.messages.create(**request)
            async with anthropic.messages.stream(**request) as streamed:
                last = await streamed.get_final_message()
            assert (last.content[0].text, last.stop_reason) == (message.content[0].text, message.stop_reason)
            assert last.usage.output_tokens == message.usage.output_tokens

    asyncio.run(work())


def test_errors_are_those_that_the_official_client_knows(url):
    import openai

    async def work() -> None:
        async with served(url) as (gateway, client):
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="nobody", messages=MESSAGES)
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model="m", prompt="x", max_tokens=5, temperature=-3.0)
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model="m", prompt="x " * 3000, max_tokens=900)
            assert gateway.driver.num_requests == 0
        keys = (Key("a", hashlib.sha256(b"other").hexdigest()),)
        async with served(url, keys=keys) as (_, client):
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
            right = client.with_options(api_key="other")
            assert (await completion(right, "the sea", stream=False))[2] == 24

    asyncio.run(work())


@pytest.mark.parametrize("stream", [True, False])
def test_greedy_output_is_identical_direct_through_the_gateway_and_cut(url, stream):
    order = Order(preemption="by_rank", window_tokens=10, preemptions_per_s=1000.0, max_preemptions=50)
    tokens = 400

    async def work() -> None:
        async with served(url, concurrency=1, order=order) as (gateway, client), direct(url) as engine:
            straight = await completion(engine, "the long one", stream=stream, tokens=tokens)
            assert await completion(client, "the long one", stream=stream, tokens=tokens) == straight
            cuts = gateway.driver.statistics().preemptions
            long = asyncio.ensure_future(completion(client, "the long one", stream=stream, tokens=tokens))
            for k in range(20):
                await asyncio.sleep(0.1)
                if long.done():
                    break
                await completion(client, f"short {k}", stream=stream, tokens=3)
            assert await long == straight
            assert gateway.driver.statistics().preemptions - cuts >= 2

    asyncio.run(work())


def test_a_client_that_goes_frees_its_place_at_the_engine(url):
    async def work() -> None:
        async with served(url) as (gateway, client):
            stream = await client.completions.create(
                model="m", prompt="stopped", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            assert await metric(url, "vllm:num_requests_running") == 1
            await stream.close()
            async with asyncio.timeout(10):
                while await metric(url, "vllm:num_requests_running"):  # noqa: ASYNC110 - the engine is asked
                    await asyncio.sleep(0.05)
            async with asyncio.timeout(10):
                while gateway.driver.num_requests:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

    asyncio.run(work())


def test_an_engine_with_a_full_queue_is_no_failure_and_every_request_is_served(url):
    many = 4 * (SLOTS + QUEUE)

    async def work() -> None:
        before = await metric(url, "vllm:admission_rejections_total")
        async with served(url, concurrency=many) as (gateway, client):
            requested = (completion(client, f"number {k}", stream=True, tokens=40) for k in range(many))
            answers = await asyncio.gather(*requested)
            assert [count for _, _, count in answers] == [40] * many
            async with aiohttp.ClientSession() as session:
                body = {"model": "m", "messages": MESSAGES, "max_tokens": 40, "stream": True}

                async def message() -> bytes:
                    async with session.post(f"http://127.0.0.1:{gateway.port}/v1/messages", json=body) as answer:
                        return await answer.read()

                messages = await asyncio.gather(*(message() for _ in range(SLOTS + QUEUE + 2)))
                assert [one.count(b"event: message_stop") for one in messages] == [1] * (SLOTS + QUEUE + 2)
            assert all(worker.up for worker in gateway.driver.statistics().workers)
        assert await metric(url, "vllm:admission_rejections_total") > before

    asyncio.run(work())
