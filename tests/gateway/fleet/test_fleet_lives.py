"""Engines that come, go, fail, sleep, restart: what is reported of them to the scheduler."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from fleet_world import CARE, DISPATCH, Received, config_of, engines, fleet_of, run, until
from kube_api import KubeApi, endpoint, endpoint_slice
from relay_world import pause

from lengthwise.gateway.config import Discovery, Dispatch, Engine, GatewayConfig, ResilienceConfig
from lengthwise.gateway.fleet import Fleet
from lengthwise.schema.errors import InputError
from lengthwise.testing.engine_server import EngineServer, EngineSpec
from lengthwise.testing.engine_server.server import close_runner

SPEC = EngineSpec(model="m")


def named(server, name="e", **more):
    return Engine(server.url, name=name, **more)


class Report:
    """A server whose /metrics, models and health are set by hand."""

    def __init__(self, metrics=b"# TYPE x gauge\n"):
        self.metrics, self.models, self.status = metrics, ["m"], 200
        self.port = 0
        self.hang = asyncio.Event()
        self.hang.set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self):
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_):
        self.hang.set()
        await close_runner(self._runner)

    async def _health(self, _):
        await self.hang.wait()
        return web.Response(status=self.status)

    async def _metrics(self, _):
        return web.Response(body=self.metrics)

    async def _version(self, _):
        return web.json_response({"version": "0"})

    async def _models(self, _):
        return web.json_response({"data": [{"id": name, "owned_by": "vllm"} for name in self.models]})


def test_no_engine_is_up_before_its_first_good_check():
    async def work():
        server = EngineServer(SPEC)
        server.healthy = False
        async with server, fleet_of(config_of(named(server))) as (_, received):
            assert not received.last["e"].up
            server.healthy = True
            await until(lambda: received.ups() == 1)
            assert received.last["e"].models == ("m",)
            assert received.last["e"].concurrency is None  # no slow start of what is new
            assert received.last["e"].epoch == 0

    run(work)


def test_signals_follow_what_the_engine_does():
    async def work():
        async with engines(SPEC) as (server,), fleet_of(config_of(named(server))) as (fleet, received):
            worker = fleet.worker("e")
            body = {"model": "m", "prompt": "a b c", "max_tokens": 200, "ignore_eos": True}
            url = f"{worker.url}/v1/completions"

            async def ask():
                async with worker.session.post(url, json=body) as answer:
                    await answer.read()

            tasks = [asyncio.create_task(ask()) for _ in range(3)]
            await until(lambda: received.last["e"].signals.running == 3)
            await asyncio.gather(*tasks)
            assert max(states[0].tokens_per_s or 0 for states in received.all) > 50
            await until(lambda: received.last["e"].signals.running == 0)

    run(work)


def test_signals_of_an_engine_that_reports_no_more_are_forgotten():
    async def work():
        server = Report(b"# TYPE x gauge\nvllm:num_requests_waiting 3\n")
        async with server, fleet_of(config_of(named(server, probe=False))) as (_, received):
            await until(lambda: received.last["e"].signals.waiting == 3)
            server.metrics = b"\x00\xff{{{{ vllm: garbage\n" * 1000
            await until(lambda: received.last["e"].signals.waiting is None)
            assert received.last["e"].up
            server.metrics = b"vllm:num_requests_waiting 4\n"
            await until(lambda: received.last["e"].signals.waiting == 4)
            server.status = 503
            await until(lambda: not received.last["e"].up)
            await until(lambda: received.last["e"].signals.waiting is None)  # stale

    run(work)


def test_a_restart_makes_a_new_epoch_and_a_slow_start(monkeypatch):
    monkeypatch.setattr("lengthwise.gateway.fleet.worker.RAMP_S", 0.15)

    async def work():
        async with engines(SPEC) as (server,), fleet_of(config_of(named(server))) as (_fleet, received):
            await server.die()
            await until(lambda: received.ups() == 0)
            await server.restart()
            await until(lambda: received.ups() == 1)
            state = received.last["e"]
            assert (state.epoch, state.concurrency) == (1, 1)
            await until(lambda: received.last["e"].concurrency is None)
            caps = [states[0].concurrency for states in received.all if states[0].up and states[0].epoch]
            assert sorted(set(caps[:-1]) - {None}) == [1, 2, 4]
            assert received.last["e"].epoch == 1

    run(work)


def test_a_restart_between_checks_is_recognized_by_the_process_start_time():
    async def work():
        server = Report(b"# TYPE x gauge\nprocess_start_time_seconds 100\n")
        async with server, fleet_of(config_of(named(server, probe=False))) as (fleet, received):
            await until(lambda: fleet.worker("e").sample is not None)
            server.metrics = b"# TYPE x gauge\nprocess_start_time_seconds 200\n"
            await until(lambda: received.last["e"].epoch == 1 and received.last["e"].up)

    run(work)


def test_a_port_that_was_closed_for_a_moment_is_no_restart_if_the_process_is_the_same():
    async def work():
        server = Report(b"# TYPE x gauge\nprocess_start_time_seconds 100\n")
        async with server, fleet_of(config_of(named(server, probe=False))) as (fleet, received):
            await until(lambda: fleet.worker("e").sample is not None)
            await server.__aexit__()
            await until(lambda: received.ups() == 0)
            await server.__aenter__()
            await until(lambda: received.ups() == 1)
            assert received.last["e"].epoch == 0

    run(work)


def test_a_sleeping_engine_gets_nothing_until_it_wakes():
    async def work():
        line = b'# TYPE x gauge\nvllm:engine_sleep_state{sleep_state="awake"} %d\n'
        async with Report(line % 1) as server, fleet_of(config_of(named(server, probe=False))) as (fleet, received):
            assert received.ups() == 1
            server.metrics = line % 0
            await until(lambda: received.ups() == 0)
            assert fleet.worker("e").unavailable_reason(0.0) == "sleeping"
            server.metrics = line % 1
            await until(lambda: received.ups() == 1)
            assert received.last["e"].epoch == 0

    run(work)


@pytest.mark.slow
def test_a_slow_health_check_does_not_take_a_busy_engine_down_but_silence_does(stalls):
    async def work():
        resilience = ResilienceConfig(health_every_s=0.12, connect_s=0.1, drain_s=0.3)
        async with (
            Report() as server,
            fleet_of(config_of(named(server, probe=False), resilience=resilience)) as (fleet, received),
        ):
            server.hang.clear()
            for _ in range(60):
                fleet.succeeded("e")
                await asyncio.sleep(0.02)
            assert received.ups() == 1 or stalls.lost_s > 0.05, "a stall is silence, too"
            await until(lambda: received.ups() == 0)
            server.hang.set()
            await until(lambda: received.ups() == 1)
            assert received.last["e"].epoch == 0

    run(work)


def test_models_that_come_later_are_seen(monkeypatch):
    monkeypatch.setattr("lengthwise.gateway.fleet.worker.MODELS_EVERY_S", 0.2)

    async def work():
        async with Report() as server, fleet_of(config_of(named(server, probe=False))) as (fleet, received):
            server.models = ["m", "adapter"]
            await until(lambda: received.last["e"].models == ("m", "adapter"))
            assert "adapter" in fleet.worker("e").capabilities.models

    run(work)


def test_failures_open_the_circuit_and_one_trial_closes_it(monkeypatch):
    monkeypatch.setattr("lengthwise.gateway.fleet.worker.RAMP_S", 0.15)

    async def work():
        async with engines(SPEC) as (server,), fleet_of(config_of(named(server))) as (fleet, received):
            for _ in range(CARE.failures):
                assert received.ups() == 1
                fleet.record_broken_response("e", "http 500")
                await asyncio.sleep(0)
            await until(lambda: received.ups() == 0)
            await until(lambda: received.ups() == 1)
            assert received.last["e"].concurrency == 1  # half-open
            fleet.record_broken_response("e", "http 500")
            await until(lambda: received.ups() == 0)
            await until(lambda: received.ups() == 1)
            fleet.succeeded("e")
            await until(lambda: received.last["e"].concurrency is None)
            assert received.last["e"].epoch == 0
            fleet.record_broken_response("nobody", "http 500")
            fleet.succeeded("nobody")

    run(work)


def test_a_connection_that_fails_is_looked_into_at_once():
    async def work():
        slow = ResilienceConfig(health_every_s=30.0, connect_s=1.0)
        async with engines(SPEC) as (server,), fleet_of(config_of(named(server), resilience=slow)) as (fleet, received):
            assert received.ups() == 1
            await server.die()
            fleet.record_broken_response("e", "no connection")
            await until(lambda: received.ups() == 0, 2.0)

    run(work)


def test_an_engine_that_fails_far_more_than_its_peers_is_ejected_and_returns():
    async def work():
        resilience = ResilienceConfig(health_every_s=0.15, failures=1000, open_s=0.3)
        async with engines(SPEC, SPEC) as (one, two):
            config = config_of(named(one, "good"), named(two, "bad"), resilience=resilience)
            async with fleet_of(config) as (fleet, received):
                for _ in range(20):
                    fleet.record_broken_response("bad", "stalled")
                    fleet.succeeded("bad")
                    fleet.succeeded("good")
                await until(lambda: not received.last["bad"].up)
                assert received.last["good"].up
                assert fleet.worker("bad").unavailable_reason(0.0) == "worse than its peers"
                await until(lambda: received.last["bad"].up)

    run(work)


def test_all_gone_and_back():
    async def work():
        async with engines(SPEC, SPEC) as servers:
            config = config_of(*(named(s, f"e{k}") for k, s in enumerate(servers)))
            async with fleet_of(config) as (fleet, received):
                for server in servers:
                    await server.die()
                await until(lambda: received.ups() == 0)
                assert not fleet.ready()
                assert fleet.models() == ("m",)
                for server in servers:
                    await server.restart()
                await until(lambda: received.ups() == 2)

    run(work)


def found_at(*ports, **conditions):
    """A slice whose engines are on loopback, distinguished by their ports: one slice a port."""
    return [
        endpoint_slice(f"s{port}", [endpoint("127.0.0.1", pod=f"e-{port}", **conditions)], port=port) for port in ports
    ]


def on_kube(api, **extra):
    discovery = Discovery(endpoint_slices="default/engines:http", api_url=api.url)
    return GatewayConfig(discovery=discovery, resilience=CARE, dispatch=DISPATCH, **extra)


def test_engines_of_a_service_scale_to_zero_and_back():
    async def work():
        async with KubeApi() as api, engines(SPEC, SPEC) as servers, fleet_of(on_kube(api)) as (fleet, received):
            ports = [server.port for server in servers]
            for item in found_at(*ports):
                api.put(item)
            await until(lambda: received.ups() == 2)
            for port in ports:
                api.delete(f"s{port}")
            await until(lambda: received.ups() == 0)
            await until(lambda: received.last == {} and not fleet.workers())
            for item in found_at(*ports):
                api.put(item)
            await until(lambda: received.ups() == 2)

    run(work)


def test_flapping_endpoints_lose_no_worker():
    async def work():
        async with KubeApi() as api, engines(SPEC) as (server,), fleet_of(on_kube(api)) as (fleet, received):
            for item in found_at(server.port):
                api.put(item)
            await until(lambda: received.ups() == 1)
            worker, started = fleet.worker(f"e-{server.port}"), len(received.all)
            for _ in range(10):
                for item in found_at(server.port, ready=False):
                    api.put(item)
                await asyncio.sleep(0.02)
                api.delete(f"s{server.port}")
                await asyncio.sleep(0.02)
                for item in found_at(server.port):
                    api.put(item)
                await asyncio.sleep(0.02)
            await until(lambda: received.ups() == 1)
            assert fleet.worker(worker.name) is worker  # the same, with its connections
            assert {state.epoch for states in received.all[started:] for state in states} == {0}
            assert all(len(states) == 1 for states in received.all[started:])  # never gone
            assert {state.concurrency for states in received.all[started:] for state in states} == {None}

    run(work)


def test_a_terminating_endpoint_drains_at_once_and_stays_while_it_is_listed():
    async def work():
        async with KubeApi() as api, engines(SPEC) as (server,), fleet_of(on_kube(api)) as (fleet, received):
            for item in found_at(server.port):
                api.put(item)
            await until(lambda: received.ups() == 1)
            for item in found_at(server.port, ready=False, serving=True, terminating=True):
                api.put(item)
            await until(lambda: received.ups() == 0)
            await asyncio.sleep(2 * CARE.drain_s)
            name = f"e-{server.port}"
            assert fleet.worker(name).unavailable_reason(0.0) == "draining"
            await server.die()
            api.delete(f"s{server.port}")
            await until(lambda: received.last == {})
            with pytest.raises(KeyError):
                fleet.worker(name)

    run(work)


def test_an_unlisted_engine_stays_until_its_last_request_has_finished():
    async def work():
        flying = {"now": 2}
        async with (
            KubeApi() as api,
            engines(SPEC) as (server,),
            fleet_of(on_kube(api), num_in_flight=lambda _: flying["now"]) as (fleet, received),
        ):
            for item in found_at(server.port):
                api.put(item)
            await until(lambda: received.ups() == 1)
            api.delete(f"s{server.port}")
            await until(lambda: received.ups() == 0)
            await asyncio.sleep(3 * CARE.drain_s)
            assert fleet.workers()
            flying["now"] = 0
            await until(lambda: not fleet.workers())

    run(work)


def test_engines_behind_a_name_are_found_where_they_listen():
    async def work():
        hosts = ("127.0.0.1", "127.0.0.2")
        async with EngineServer(SPEC, host=hosts[0]) as one, EngineServer(SPEC, host=hosts[1], port=one.port):
            discovery = Discovery(dns=f"localhost:{one.port}", every_s=0.1)
            entries = Engine(f"http://127.0.0.2:{one.port}", name="entries")
            async with fleet_of(config_of(entries, discovery=discovery)) as (_fleet, received):
                place = f"127.0.0.1:{one.port}"
                await until(lambda: place in received.last and received.last[place].up and received.last["entries"].up)

    run(work)


def test_another_configuration_leaves_alone_what_stays_and_a_bad_one_changes_nothing():
    async def work():
        async with engines(SPEC, SPEC, SPEC) as (one, two, three):
            first = config_of(named(one, "a"), named(two, "b"))
            async with fleet_of(first) as (fleet, received):
                retained = fleet.worker("a")
                with pytest.raises(InputError, match="'a' occurs twice"):
                    await fleet.configure(config_of(named(three, "a"), named(two, "a")))
                with pytest.raises(InputError, match="host:port"):
                    await fleet.configure(config_of(named(three, "c"), discovery=Discovery(dns="nowhere")))
                assert {worker.name for worker in fleet.workers()} == {"a", "b"}
                await fleet.configure(config_of(named(one, "a"), named(three, "b")))
                await until(lambda: received.ups() == 2 and received.last["b"].epoch == 1)
                assert fleet.worker("a") is retained
                assert fleet.worker("b").url == three.url

    run(work)


def test_changes_are_reported_together():
    async def work():
        async with engines(*([SPEC] * 8)) as servers:
            config = config_of(
                *(named(s, f"e{k}") for k, s in enumerate(servers)), dispatch=Dispatch(adapt_every_s=0.05)
            )
            async with fleet_of(config) as (fleet, received):
                loop = asyncio.get_running_loop()
                before, started_s = len(received.all), loop.time()
                for _ in range(100):
                    fleet.record_broken_response("e0", "http 500")
                    fleet.record_broken_response("e1", "http 500")
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert len(received.all) == before + 1
                await pause(0.6)
                assert len(received.all) - before <= 20 * (loop.time() - started_s) + 15  # 8 engines tell 160

    run(work)


def test_two_engines_of_one_name_are_refused_before_anything_begins():
    fleet = Fleet(config_of(Engine("http://127.0.0.1:1")), on_change=Received())
    assert fleet.states() == ()
    with pytest.raises(InputError, match="twice"):
        Fleet(config_of(Engine("http://a:1"), Engine("http://a:1/v1")))
