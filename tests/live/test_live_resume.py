"""Cut and resumed on a real vLLM: the answer does not show it; a request whose client goes is aborted there."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gateway" / "relay"))

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LONG, TRIES = 300, 8
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<a>"


@pytest.fixture(scope="module")
def url(tmp_path_factory, engine_python, tiny):
    from plugin_engines import vllm

    folder = tmp_path_factory.mktemp("resume")
    (folder / "chat.jinja").write_text(TEMPLATE)
    with vllm(
        engine_python,
        tiny,
        folder / "log",
        "--max-num-seqs",
        "4",
        "--generation-config",
        "vllm",
        "--chat-template",
        str(folder / "chat.jinja"),
    ) as engine:
        yield engine.url


def body(api: str, name: str, tokens: int, **more: object) -> dict[str, object]:
    text = f"hello {name} {tokens}"
    message = {"prompt": text} if api == "completions" else {"messages": [{"role": "user", "content": text}]}
    return {"model": "m", "max_tokens": tokens, "stream": True, "ignore_eos": True, **message, **more}


class Client:
    """Asks the engine itself, or a gateway that has one place there and gives it to the shorter."""

    def __init__(self, url: str) -> None:
        from relay_world import Ledger, Report

        from lengthwise.gateway.config import Engine, GatewayConfig, Listen, Order
        from lengthwise.gateway.protocols import Listener
        from lengthwise.gateway.serve import Gateway

        class Oracle(Report, Listener):
            async def __aenter__(self):
                return self

            async def __aexit__(self, *_):
                return None

        order = Order(window_tokens=10, preemptions_per_s=1000.0, max_preemptions=50, preemption="worth(factor=1)")
        config = GatewayConfig(
            engines=(Engine(url, concurrency=1, generation_defaults="none"),),
            listen=Listen(port=0, admin_port=None),
            order=order,
        )
        self.ledger, self.url = Ledger(), url
        self.gateway = Gateway(config, make_predictor=lambda *_: Oracle(), listeners=(self.ledger,))

    async def request(self, what: dict[str, object], api: str, *, direct: bool = False) -> list[dict]:
        root = self.url if direct else f"http://127.0.0.1:{self.gateway.port}"
        path = "/v1/completions" if api == "completions" else "/v1/chat/completions"
        reported = (await self.post(root + path, what)).decode()
        assert reported.endswith("data: [DONE]\n\n")
        return [json.loads(one[6:]) for one in reported.split("\n\n") if one.startswith("data: {")]

    async def post(self, url: str, what: dict[str, object]) -> bytes:
        import aiohttp

        async with aiohttp.ClientSession() as session, session.post(url, json=what) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.read()

    async def known(self) -> None:
        """Returns once the engine has shown that it tells token ids; a cold one may need to be asked twice."""
        async with asyncio.timeout(90):
            while not self.gateway.fleet.workers()[0].capabilities.token_ids_each:  # noqa: ASYNC110 - the engine is asked
                await asyncio.sleep(0.05)

    async def cut(self, what: dict[str, object], api: str) -> list[dict]:
        """The answer while short requests come and take its place; again where a busy engine made no cut worth it."""
        await self.known()
        for _ in range(TRIES):
            before = self.ledger.cause.count("preemption")
            long = asyncio.ensure_future(self.request(what, api))
            for k in range(40):  # as many within a quick engine's 0.3 s as within a slow one's 20
                await asyncio.sleep(0.03)
                if long.done():
                    break
                await self.request(body(api, f"s{k}", 3), api)
            events = await long
            if self.ledger.cause.count("preemption") - before >= 2:
                return events
        pytest.fail(f"none of {TRIES} answers was cut twice")


def text(events: list[dict]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_greedy_output_is_identical_cut_and_uncut(url, api):
    async def work() -> None:
        client = Client(url)
        what = body(api, "long", LONG, temperature=0, stream_options={"include_usage": True})
        async with client.gateway:
            cut, uncut = await client.cut(what, api), await client.request(what, api, direct=True)
        assert text(cut) == text(uncut) != ""
        assert cut[-1]["usage"] == uncut[-1]["usage"]
        assert set(cut[5]) == set(uncut[5])

    asyncio.run(work())


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_greedy_output_is_identical_where_a_chunk_holds_several_tokens(url, api):
    """A cut then comes in the middle of what the engine has not sent yet."""

    async def work() -> None:
        client = Client(url)
        what = body(api, "long", LONG, temperature=0, stream_interval=7, stream_options={"include_usage": True})
        async with client.gateway:
            cut, uncut = await client.cut(what, api), await client.request(what, api, direct=True)
        assert len(uncut) < LONG / 3, "the engine streams token by token"
        assert text(cut) == text(uncut) != ""
        assert cut[-1]["usage"] == uncut[-1]["usage"]

    asyncio.run(work())


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_sampled_text_is_that_of_its_tokens_wherever_it_was_cut(url, api):
    async def work() -> None:
        client = Client(url)
        what = body(api, "long", LONG, temperature=1.0, return_token_ids=True, skip_special_tokens=False)
        async with client.gateway:
            events = await client.cut(what, api)
        choices = [choice for event in events for choice in event["choices"]]
        ids = [one for choice in choices for one in choice.get("token_ids") or ()]
        prompt = events[0].get("prompt_token_ids") or choices[0]["prompt_token_ids"]
        assert len(ids) == LONG
        head, complete = [
            json.loads(await client.post(url + "/detokenize", {"model": "m", "tokens": tokens}))["prompt"]
            for tokens in (prompt, prompt + ids)
        ]
        assert text(events).rstrip("\ufffd") == complete[len(head) :].rstrip("\ufffd")

    asyncio.run(work())


def test_a_client_that_goes_is_aborted_at_the_engine(url):
    import aiohttp

    async def running(session: aiohttp.ClientSession) -> float:
        async with session.get(url + "/metrics") as reported:
            lines = (await reported.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))

    async def work() -> None:
        client = Client(url)
        async with client.gateway, aiohttp.ClientSession() as session:
            asking = asyncio.ensure_future(client.request(body("completions", "stopped", 1000), "completions"))
            async with asyncio.timeout(10):
                while not await running(session):  # noqa: ASYNC110 - the engine is asked
                    await asyncio.sleep(0.05)
            asking.cancel()
            async with asyncio.timeout(2):
                while await running(session):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert client.gateway.driver.num_requests == 0

    asyncio.run(work())
