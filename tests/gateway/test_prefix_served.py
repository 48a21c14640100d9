"""Prompts that begin alike go to one engine, through the whole gateway; tenants' prompts are kept apart."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import defaultdict
from dataclasses import replace

import aiohttp
import pytest
from relay_world import run, until

from lengthwise.gateway.config import Dispatch, Engine, GatewayConfig, Key, Limits, Listen, PredictionConfig
from lengthwise.gateway.edge.auth import Caller
from lengthwise.gateway.edge.client_request import RequestParser
from lengthwise.gateway.observe import of_journal, routing_gain, routing_text
from lengthwise.gateway.request import NO_PREFIX, PrefixHasher
from lengthwise.gateway.serve import Gateway
from lengthwise.testing.engine_server import EngineServer, EngineSpec, LinearSteps
from lengthwise.workload import read

SYSTEM = "You answer questions on the files of the archive, in the words of these files. " * 50
IDS = list(range(1, 900))
SPEC = EngineSpec(model="m", steps=LinearSteps(fixed_s=0.002))


def key(tenant):
    return Key(tenant=tenant, sha256=hashlib.sha256(tenant.encode()).hexdigest())


def config_of(*engines, **dispatch):
    return GatewayConfig(
        engines=tuple(Engine(one.url, name=f"e{k}", concurrency=8) for k, one in enumerate(engines)),
        listen=Listen(port=0, admin_port=0),
        prediction=PredictionConfig(predictor="none"),
        dispatch=Dispatch(**dispatch),
        keys=(key("red"), key("blue")),
    )


async def ask(session, port, prompt, *, tenant="red", tokens=5, streamed=False):
    chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
    path = "chat/completions" if chat else "completions"
    message = {"messages": prompt} if chat else {"prompt": prompt}
    body = {"model": "m", "max_tokens": tokens, "ignore_eos": True, "stream": streamed} | message
    url, headers = f"http://127.0.0.1:{port}/v1/{path}", {"Authorization": f"Bearer {tenant}"}
    async with session.post(url, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.read() if streamed else json.loads(await answer.read())


async def hits(session, port):
    async with session.get(f"http://127.0.0.1:{port}/metrics") as reported:
        lines = (await reported.text()).splitlines()
    (found,) = (float(one.split()[1]) for one in lines if one.startswith("lengthwise_prefix_hits_total "))
    return found


def chat(question):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefixes", "first", "then", "tenant", "follows"),
    [
        ("tenant", SYSTEM + "who?", SYSTEM + "when?", "red", True),
        ("tenant", chat("who?"), chat("when, and where?"), "red", True),
        ("tenant", IDS, [*IDS, 7, 8], "red", True),
        ("tenant", [IDS], [[*IDS, 7, 8]], "red", True),
        ("tenant", SYSTEM, SYSTEM, "blue", False),
        ("shared", SYSTEM, SYSTEM, "blue", True),
        ("none", SYSTEM, SYSTEM, "red", False),
        ("tenant", SYSTEM, "Else: " + SYSTEM, "red", False),
    ],
)
def test_prompts_with_a_common_prefix_go_where_it_was_computed(prefixes, first, then, tenant, follows):
    async def work():
        async with (
            EngineServer(SPEC) as one,
            EngineServer(SPEC) as two,
            Gateway(config_of(one, two, prefixes=prefixes)) as gateway,
            aiohttp.ClientSession() as session,
        ):
            await until(lambda: gateway.fleet.ready() and len(gateway.scheduler.worker_pool.up) == 2)
            requested = [server.log.count("finished") for server in (one, two)]
            busy = asyncio.ensure_future(ask(session, gateway.port, "hold on", tokens=400))
            await until(lambda: one.slots_in_use == 1)
            await ask(session, gateway.port, first)  # the other one is idle
            await busy
            await ask(session, gateway.port, then, tenant=tenant)
            served = [server.log.count("finished") - n for server, n in zip((one, two), requested, strict=True)]
            assert served == ([1, 2] if follows else [2, 1])
            assert await hits(session, gateway.admin_port) == follows

    run(work)


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [(SYSTEM, True), ([SYSTEM], True), ([SYSTEM, SYSTEM], False), ([IDS, IDS], False), ("a", False)],
)
def test_several_prompts_in_one_body_yield_no_prefix_hashes(prompt, begins):
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    prefix_hasher = PrefixHasher(b"secret")
    reported = RequestParser(Limits(), prefix_hasher).parse("completions", body, Caller(None, 3), {}, "r", 0.0)
    assert bool(reported.prefix.keys) == begins
    if begins:
        assert reported.prefix == prefix_hasher.of_text(SYSTEM, reported.prompt_tokens, model="m", tenant=3)
    assert RequestParser(Limits()).parse("completions", body, Caller(None, 3), {}, "r", 0.0).prefix is NO_PREFIX


@pytest.mark.slow
def test_a_prefix_router_keeps_shared_prompts_together_and_its_journal_answers_for_others(tmp_path):
    """Three engines, thirteen system prompts: from the gateway to the journal, and back as a workload."""
    systems = [f"You are clerk number {n} of the archive of secrets. " * 60 for n in range(13)]
    journal = tmp_path / "day.jsonl"

    async def work():
        async with (
            EngineServer(SPEC) as one,
            EngineServer(SPEC) as two,
            EngineServer(SPEC) as three,
            Gateway(
                replace(
                    config_of(one, two, three, router="uncached_load"),
                    listen=Listen(port=0, admin_port=0, journal=str(journal)),
                    keys=(),
                )
            ) as gateway,
            aiohttp.ClientSession() as session,
        ):
            await until(lambda: gateway.fleet.ready() and len(gateway.scheduler.worker_pool.up) == 3)
            for number, system in enumerate(systems):
                await ask(session, gateway.port, f"{system} question {number}")
            for turn in range(18):
                await asyncio.gather(
                    *(ask(session, gateway.port, f"{one} question {turn}", streamed=True) for one in systems)
                )

    run(work)
    assert not any(word in journal.read_text() for word in ("clerk", "archive", "secrets", "question"))
    workload, trace = read(journal), of_journal(journal)
    assert len(workload) == len(trace) == 13 * 19
    start, ids = workload.prefixes.start, workload.prefixes.block_ids
    assert len({tuple(ids[start[i] : start[i] + 20]) for i in range(len(workload))}) == 13
    engines = defaultdict(list)
    for context, worker in zip(trace.contexts, trace.worker.tolist(), strict=True):
        engines[context.prefix[0][1]].append(worker)
    assert len({usual_of(workers)[0] for workers in engines.values()}) == 3, "all engines have some of the prompts"
    alone = sum(usual_of(workers)[1] for workers in engines.values())
    assert alone >= 0.9 * len(trace)
    found = routing_gain(trace, ["uncached_load", "round_robin"], draws=20)
    by_name = {one.name: one for one in found.routers}
    assert by_name["uncached_load"].cached_share > by_name["round_robin"].cached_share
    assert "Assumptions:" in routing_text(found)


def usual_of(values):
    return max(((one, values.count(one)) for one in set(values)), key=lambda pair: pair[1])
