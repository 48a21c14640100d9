"""The emulated engine: deterministic text, vLLM's doors, its own time."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys

import aiohttp
import numpy as np
import pytest

from lengthwise import deploy, simulate
from lengthwise.backend.openai import Client
from lengthwise.backend.openai_protocol import Server
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload
from lengthwise.testing.engine_server import EngineServer, EngineSpec, Limits, LinearSteps, decode, emulated, encode
from lengthwise.testing.engine_server.completions import BEGIN, END, ToyModel

QUICK = LinearSteps(0.0005, 0.0, 0.0)
SAMPLE = "Write a poem: é, 中文 🙂!\r\n\t<out:5> and <out:007>\x00 ~\x7f"


def served(test, spec=None, **options):
    """Runs ``await test(session, server)`` against a server."""

    async def run():
        spec_ = spec or EngineSpec(steps=QUICK)
        async with EngineServer(spec_, **options) as server, aiohttp.ClientSession() as session:
            out = await test(session, server)
            await server.idle()
            return out

    return asyncio.run(run())


async def ask(session, server, path="/v1/completions", headers=None, **body):
    body = {"model": "toy", "prompt": "hello"} | body if path.endswith("/completions") else body
    async with session.post(server.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def events(session, server, path="/v1/completions", **body):
    """The data of a stream's events; [DONE] must be the last."""
    body = {"model": "toy", "stream": True} | body
    async with session.post(server.url + path, json=body) as answer:
        text = (await answer.read()).decode()
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert found.pop() == "[DONE]"
    return [json.loads(one) for one in found]


def test_text_and_ids_are_the_same_thing():
    assert decode(encode(SAMPLE)) == SAMPLE
    mind, written = ToyModel("toy", [*encode(SAMPLE), BEGIN]), []
    mind.fixed = 400
    while not written or written[-1] != END:
        written.append(mind.next())
        mind.read(written[-1:])
    assert len(written) == 400
    text = decode(written)
    assert "\ufffd" not in text
    assert any(ord(c) > 127 for c in text)
    assert encode(text) == written[:-1]


def test_other_models_and_other_prompts_give_other_text():
    def text(model, prompt):
        mind, ids = ToyModel(model, [*encode(prompt), BEGIN]), []
        for _ in range(20):
            ids.append(mind.next(may_end=False))
            mind.read(ids[-1:])
        return tuple(ids)

    assert len({text(m, p) for m in ("a", "b", "ab") for p in ("x", "y")}) == 6


def test_a_cut_anywhere_does_not_show():
    """Prompt ids and generated ids, asked for again, go on with the very same text and end."""

    async def test(session, server):
        complete = (await ask(session, server, prompt="tell me <out:60>", max_tokens=200, return_token_ids=True))[1]
        choice = complete["choices"][0]
        prompt, ids = choice["prompt_token_ids"], choice["token_ids"]
        assert len(ids) == complete["usage"]["completion_tokens"] == 60
        assert choice["finish_reason"] == "stop"
        for cut in range(1, 60):
            first = (await ask(session, server, prompt=prompt, max_tokens=cut))[1]["choices"][0]
            rest = (await ask(session, server, prompt=prompt + ids[:cut], max_tokens=200, return_token_ids=True))[1]
            assert first["finish_reason"] == "length"
            assert rest["choices"][0]["token_ids"] == ids[cut:]
            assert first["text"] + rest["choices"][0]["text"] == choice["text"]

    served(test)


def test_a_drawn_end_is_the_same_after_a_cut():
    async def test(session, server):
        lengths = set()
        for i in range(5):
            choice = (await ask(session, server, prompt=f"p{i}", max_tokens=4000, return_token_ids=True))[1]["choices"][
                0
            ]
            ids = choice["token_ids"]
            again = choice["prompt_token_ids"] + ids[: len(ids) // 2]
            rest = (await ask(session, server, prompt=again, max_tokens=4000, return_token_ids=True))[1]
            assert rest["choices"][0]["token_ids"] == ids[len(ids) // 2 :]
            lengths.add(len(ids))
        assert len(lengths) > 2

    served(test)


def test_a_stream_contains_everything_that_vllm_sends():
    async def test(session, server):
        options = {"include_usage": True, "continuous_usage_stats": True}
        got = await events(
            session, server, prompt="hi", max_tokens=9, ignore_eos=True, return_token_ids=True, stream_options=options
        )
        choices = [e["choices"][0] for e in got[:-1]]
        assert choices[0]["prompt_token_ids"] == [*encode("hi"), BEGIN]
        assert all("prompt_token_ids" not in c for c in choices[1:])
        ids = [i for c in choices for i in c["token_ids"]]
        assert len(ids) == 9
        reported = [e["usage"]["completion_tokens"] for e in got]
        assert reported == [*itertools.accumulate(len(c["token_ids"]) for c in choices), 9]
        assert got[-1]["choices"] == []
        assert choices[-1]["finish_reason"] == "length"
        complete = (await ask(session, server, prompt="hi", max_tokens=9, ignore_eos=True))[1]["choices"][0]
        assert "".join(c["text"] for c in choices) == complete["text"]
        assert server.log.entries[0].output_ids == ids
        assert server.log.entries[0].sent_tokens == 9

    served(test)


def test_chats_choices_stops_and_intervals():
    async def test(session, server):
        messages = [{"role": "user", "content": [{"type": "text", "text": "hi <out:30>"}]}]
        path = "/v1/chat/completions"
        got = await events(session, server, path, messages=messages, n=2)
        assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        texts = [
            "".join(c["delta"].get("content", "") for e in got for c in e["choices"] if c["index"] == i)
            for i in range(2)
        ]
        assert texts[0] != texts[1]
        complete = (await ask(session, server, path, messages=messages, model="toy", logprobs=True, n=2))[1]
        assert [c["message"]["content"] for c in complete["choices"]] == texts
        assert len(complete["choices"][0]["logprobs"]["content"]) == 30
        stop = texts[0][8:11]
        got = await events(session, server, path, messages=messages, stop=[stop])
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in got)
        assert text == texts[0][: texts[0].index(stop)]
        assert got[-1]["choices"][0]["stop_reason"] == stop
        started = [*messages, {"role": "assistant", "content": texts[0][:4]}]
        rest = (await ask(session, server, path, messages=started, model="toy", continue_final_message=True))[1]
        assert texts[0][:4] + rest["choices"][0]["message"]["content"] == texts[0]
        got = await events(session, server, prompt="x", max_tokens=21, ignore_eos=True, stream_interval=10)
        assert [len(e["choices"][0]["text"]) > 0 for e in got] == [True] * 3

    served(test)


def test_what_is_wrong_is_refused_as_vllm_refuses():
    async def test(session, server):
        for fields, status in (
            ({"model": "other"}, 404),
            ({"prompt": [1, "x"]}, 400),
            ({"prompt": None}, 400),
            ({"max_tokens": 0}, 400),
            ({"max_tokens": 9000}, 400),
            ({"ignore_eos": "neither"}, 400),
            ({"echo": True}, 400),
            ({"priority": 3}, 400),
            ({"stop": [""]}, 400),
        ):
            got, body = await ask(session, server, **fields)
            assert (got, body["error"]["code"]) == (status, status), fields
        async with session.post(server.url + "/v1/completions", data=b"{") as answer:
            assert answer.status == 400
        assert [e.finished for e in server.log.entries] == ["refused"] * 10

    served(test)


def test_a_full_queue_is_503_and_priority_is_scheduled_first():
    """The first takes the only slot until all others have come."""
    limits = Limits(max_num_seqs=1, max_num_queued_reqs=3, by_priority=True)
    spec = EngineSpec(limits=limits, steps=LinearSteps(0.002, 0, 0))

    async def test(session, server):
        async def one(priority, tokens=3, headers=None):
            fields = {"max_tokens": tokens, "ignore_eos": True, "priority": priority}
            return (await ask(session, server, headers=headers, **fields))[0]

        async def entered(count):
            while server.slots_in_use < count:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.001)

        first = asyncio.create_task(one(0, tokens=8000))
        await entered(1)
        tasks = []
        for reported, header in ((5, {}), (4, {}), (9, {"X-Vllm-Priority": "-1"})):
            tasks.append(asyncio.create_task(one(reported, headers=header)))
            await entered(1 + len(tasks))
        assert await one(0) == 503
        first.cancel()
        assert [await task for task in tasks] == [200] * 3
        order = sorted(server.log.entries[1:4], key=lambda e: e.finished_s)
        assert [e.number for e in order] == [3, 2, 1]

    served(test, spec)


@pytest.mark.parametrize(
    ("kind", "engine"), [("vllm", "vllm"), ("sglang", "sglang"), ("llama.cpp", "llama.cpp"), ("openai", "")]
)
def test_probes_find_the_kind(kind, engine):
    async def test(_, server):
        async with Client(Server(server.url)) as client:
            able = await client.probe()
        assert able.engine == engine
        assert able.token_id_prompts is True
        assert able.token_ids_each is (kind == "vllm")
        assert able.metrics is (kind != "openai")
        assert able.ignore_eos is (None if kind == "openai" else True)

    served(test, EngineSpec(steps=QUICK, kind=kind))


def test_metrics_keys_and_aborts():
    spec = EngineSpec(steps=LinearSteps(0.02, 0, 0), limits=Limits(max_num_seqs=2), api_key="secret")

    async def test(session, server):
        assert (await ask(session, server))[0] == 401
        key = {"Authorization": "Bearer secret"}
        fields = {"max_tokens": 500, "ignore_eos": True, "headers": key}
        tasks = [asyncio.create_task(ask(session, server, request_id=f"r{i}", **fields)) for i in range(4)]
        while server.slots_in_use < 4:  # noqa: ASYNC110 - the engine is looked at
            await asyncio.sleep(0.005)
        while server.clocked.batch.running < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        async with session.get(server.url + "/metrics") as answer:
            text = await answer.text()
        assert 'vllm:num_requests_running{engine="0",model_name="toy"} 2.0' in text
        assert 'vllm:num_requests_waiting{engine="0",model_name="toy"} 2.0' in text
        assert 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="4097"} 1.0' in text
        assert server.slots_in_use == 4
        path = "/inference/v1/abort_requests"
        assert (await ask(session, server, path, headers=key, request_ids=["r0", "r3"]))[0] == 200
        got = (await tasks[0])[1]["choices"][0]
        assert got["finish_reason"] == "abort"
        await tasks[3]
        for task in tasks[1:3]:  # and these clients leave
            task.cancel()
        await server.idle()
        assert server.aborts == 4
        assert server.clocked.batch.free_blocks == spec.limits.num_blocks

    served(test, spec)


def test_the_emulated_engine_matches_the_simulator(stalls):
    """Arrivals as they came, simulated: equal engine times. Half of the clients see theirs within 50 ms of it."""
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=300)
    deployed = deploy("opt-125m", "A100-80GB", limits=limits, num_blocks=30)
    spec = emulated(deployed, model="toy", speed=0.25)
    rng = np.random.default_rng(5)
    prompts, outputs = rng.integers(1, 120, 40), rng.integers(1, 60, 40)
    late = []

    async def test(session, server):
        async def one(i):
            await asyncio.sleep(0.4 * i / 40)
            ids = [65] * int(prompts[i])
            await ask(session, server, prompt=ids, max_tokens=int(outputs[i]), ignore_eos=True)
            late.append(asyncio.get_running_loop().time())

        started_s = asyncio.get_running_loop().time() - server.clocked.now_s() / spec.speed
        await asyncio.gather(*(one(i) for i in range(40)))
        assert server.clocked.batch.preemptions > 0
        due = sorted(started_s + entry.finished_s / spec.speed for entry in server.log.entries)
        gaps = np.array(sorted(late)) - np.array(due)
        assert gaps.min() > -1e-6
        assert np.median(gaps) < 0.05 + stalls.lost_s
        return server.log.entries

    entries = served(test, spec)
    workload = Workload(
        np.array([e.arrival_s for e in entries]),
        np.array([len(e.prompt_ids) for e in entries]),
        np.array([e.body["max_tokens"] for e in entries]),
    )
    records = simulate(workload, deployed, engine="reference").requests
    assert np.array([e.finished_s for e in entries]) == pytest.approx(records.finished_s, rel=1e-12)


def test_as_a_process():
    command = [sys.executable, "-m", "lengthwise.testing.engine_server", "--count", "2", "--fixed-s", "0.0005"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            urls = json.loads(process.stdout.readline())["urls"]

            async def exchange():
                async with aiohttp.ClientSession() as session:
                    texts = []
                    for url in urls:
                        body = {"model": "toy", "prompt": "hello", "max_tokens": 5, "ignore_eos": True}
                        async with session.post(f"{url}/v1/completions", json=body) as answer:
                            texts.append((await answer.json())["choices"][0]["text"])
                    plan = {"incoming": [{"kind": "die"}]}
                    async with session.post(f"{urls[0]}/emulator/faults", json=plan) as answer:
                        assert answer.status == 200
                    with pytest.raises(aiohttp.ClientError):
                        await session.post(f"{urls[0]}/v1/completions", json=body)
                    return texts

            texts = asyncio.run(exchange())
            assert texts[0] == texts[1]
            assert process.wait(timeout=60) == 137
        finally:
            process.kill()


def test_an_invalid_spec_is_reported_with_the_problem():
    with pytest.raises(InputError, match="speed must be above 0"):
        EngineSpec(speed=0)
    with pytest.raises(InputError, match="no kind of engine named 'vlm'"):
        EngineSpec(kind="vlm")
    with pytest.raises(InputError, match="Lower it, or give more num_blocks"):
        EngineSpec(limits=Limits(num_blocks=4))
