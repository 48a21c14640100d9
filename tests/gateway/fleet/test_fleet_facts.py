from __future__ import annotations

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from fleet_world import CARE, config_of, engines, fleet_of, run, until

from lengthwise.gateway.config import Engine, Order
from lengthwise.gateway.fleet.engine_probe import LARGER, SMALLER, probe_metadata
from lengthwise.gateway.notices import probe_notices
from lengthwise.testing.engine_server import EngineSpec, Fault, Limits

SMALL = Limits(max_num_seqs=4, block_size=16, num_blocks=1024)
PRIORITY = Order(mode="engine-priority")


def by_priority(kind):
    return EngineSpec(kind=kind, limits=Limits(max_num_seqs=4, num_blocks=1024, by_priority=True))


def test_each_kind_of_engine_is_recognized_by_its_own_metadata():
    async def work():
        specs = [EngineSpec(kind=kind, limits=SMALL) for kind in ("vllm", "sglang", "llama.cpp", "openai")]
        async with (
            engines(*specs) as servers,
            fleet_of(config_of(*(Engine(s.url) for s in servers))) as (fleet, received),
        ):
            vllm, sglang, llama, plain = (fleet.worker(s.url.removeprefix("http://")) for s in servers)
            assert [w.kind for w in (vllm, sglang, llama, plain)] == ["vllm", "sglang", "llama.cpp", "openai"]
            assert vllm.capabilities.version
            assert vllm.capabilities.token_ids_each
            assert vllm.capabilities.token_id_prompts
            assert vllm.capabilities.max_model_len == sglang.capabilities.max_model_len == 8192
            assert llama.capabilities.max_model_len == 8192
            assert (sglang.metadata.slots, llama.metadata.slots) == (4, 4)
            assert (sglang.metadata.kv_tokens, llama.metadata.kv_tokens) == (1024 * 16, 4 * 8192)
            assert (vllm.metadata.slots, plain.metadata.slots) == (None, None)  # they do not tell
            assert received.ups() == 4
            assert fleet.models() == ("toy",)
            assert fleet.ready()
            assert "toy" in vllm.capabilities.models
            assert "another" not in vllm.capabilities.models
            assert received.last[llama.name].slots == 4

    run(work)


def test_an_engine_is_sent_one_tiny_prompt_at_most_and_none_where_that_is_off():
    async def work():
        async with engines(EngineSpec(), EngineSpec()) as (requested, unasked):
            entries = Engine(requested.url), Engine(unasked.url, probe=False)
            async with fleet_of(config_of(*entries)) as (fleet, received):
                assert received.ups() == 2
                assert [entry.sent_tokens for entry in requested.log.entries] == [2]
                assert not unasked.log.entries
                able = fleet.worker(unasked.url.removeprefix("http://")).capabilities
                assert not able.token_ids_each
                assert able.models == ("toy",)

    run(work)


@pytest.mark.parametrize(
    ("spec", "sign", "words"),
    [
        (by_priority("vllm"), SMALLER, "is unknown"),
        (EngineSpec(kind="vllm"), 0, "accepts no priorities"),  # it refuses one
        (by_priority("sglang"), LARGER, ""),
        (EngineSpec(kind="sglang"), 0, "accepts no priorities"),
        (EngineSpec(kind="llama.cpp"), 0, "accepts no priorities"),
    ],
)
def test_priority_support_and_direction_are_detected(spec, sign, words):
    async def work():
        async with engines(spec) as (server,), fleet_of(config_of(Engine(server.url), order=PRIORITY)) as (fleet, _):
            worker = fleet.workers()[0]
            assert worker.priority_sign == sign
            assert worker.metadata.prompted
            assert words in worker.priority_notice()
            assert bool(worker.priority_notice()) == bool(words)
            assert sum(entry.sent_tokens for entry in server.log.entries) <= 2

    run(work)


@pytest.mark.parametrize("policy", ["priority", "fcfs"])
def test_a_vllm_in_development_mode_reports_its_policy_directly(policy):
    async def info(_):
        return web.json_response({"vllm_config": {"scheduler_config": {"policy": policy}}})

    async def models(_):
        return web.json_response({"data": [{"id": "m", "owned_by": "vllm"}]})

    async def work():
        app = web.Application()
        app.router.add_get("/server_info", info)
        app.router.add_get("/v1/models", models)
        async with TestServer(app) as server:
            engine = Engine(str(server.make_url("")), probe=False)
            async with ClientSession() as session:
                metadata = await probe_metadata(engine, session, priority=True)
                assert metadata.orders_by_priority is (policy == "priority")
                assert (await probe_metadata(engine, session, priority=False)).orders_by_priority is None

    run(work)


def test_what_an_engine_lists_of_its_models_is_passed_on_less_its_paths_and_permissions():
    row = {"id": "m", "object": "model", "created": 7, "owned_by": "vllm", "max_model_len": 4096}
    rows = [row | {"root": "/models/m", "permission": [{}]}, row | {"id": "lora", "parent": "m", "created": "now"}]

    async def models(_):
        return web.json_response({"data": [*rows, {"owned_by": "nobody"}, 7]})

    async def work():
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_get("/health", models)
        async with TestServer(app) as server:
            engine = Engine(str(server.make_url("")), probe=False)
            async with fleet_of(config_of(engine)) as (fleet, _):
                common = {"owned_by": "vllm", "max_model_len": 4096}
                assert fleet.entries() == {"m": common | {"created": 7}, "lora": common | {"parent": "m"}}

    run(work)


def test_what_is_minded_about_engines_is_known_before_the_start():
    async def work():
        async with engines(EngineSpec()) as (server,):
            entries = Engine(server.url, name="refuses"), Engine("http://127.0.0.1:1", name="nobody")
            reported = await probe_notices(config_of(*entries, order=PRIORITY))
            assert len(reported) == 2
            assert reported[0].startswith("refuses accepts no priorities")
            assert reported[1].startswith("nobody could not be probed")

    run(work)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llama.cpp", "openai"])
def test_a_preempting_mode_before_a_nonpreemptible_engine_is_warned_about(kind):
    async def work():
        async with engines(EngineSpec(kind=kind)) as (server,):
            entries = Engine(server.url, generation_defaults="none")
            reported = await probe_notices(config_of(entries, order=Order(mode="windowed")))
            assert ["no request is preempted there" in text for text in reported] == [True] * (kind != "vllm")

    run(work)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Fault("hang"), Fault("full"), Fault("stall", 1)])
def test_an_engine_that_did_not_answer_the_probe_prompt_is_probed_again_soon(monkeypatch, fault):
    monkeypatch.setattr("lengthwise.gateway.fleet.engine_probe.PROMPT_TIMEOUT_S", 0.2)
    monkeypatch.setattr("lengthwise.gateway.fleet.worker.MIN_PROMPT_WAIT_S", 0.01)

    async def work():
        async with engines(by_priority("vllm")) as (server,):
            server.faults.incoming = [fault] * 3
            async with fleet_of(config_of(Engine(server.url), order=PRIORITY)) as (fleet, received):
                worker = fleet.workers()[0]
                assert received.ups() == 1, "meanwhile it serves"
                assert not worker.capabilities.token_ids_each
                assert "has not answered yet" in worker.priority_notice()
                await until(lambda: worker.capabilities.token_ids_each)
                assert worker.metadata.prompted
                assert "is unknown" in worker.priority_notice()
                assert len(server.log.entries) == 4, "it is not asked once it has answered"

    run(work)


def test_priorities_are_probed_only_where_they_matter():
    async def work():
        async with engines(by_priority("vllm")) as (server,), fleet_of(config_of(Engine(server.url))) as (fleet, _):
            assert fleet.workers()[0].priority_sign == 0

    run(work)


def test_a_wrong_key_excludes_an_engine_with_the_reason_and_a_right_one_admits_it():
    async def work():
        spec = EngineSpec(api_key="right")
        async with engines(spec, spec) as (one, two):
            entries = (Engine(one.url, name="wrong", api_key="no"), Engine(two.url, name="right", api_key="right"))
            async with fleet_of(config_of(*entries, resilience=CARE)) as (fleet, received):
                assert [received.last[name].up for name in ("wrong", "right")] == [False, True]
                assert "API key" in fleet.worker("wrong").unavailable_reason(0.0)

    run(work)


def test_a_model_that_is_not_an_engine_at_all_is_down_not_an_error():
    async def work():
        async with fleet_of(config_of(Engine("http://127.0.0.1:1", name="nobody"))) as (fleet, received):
            assert not received.last["nobody"].up
            assert "connection refused" in fleet.worker("nobody").unavailable_reason(0.0)
            assert not fleet.ready()

    run(work)
