"""A whole gateway on loopback: real ports, a real end."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import socket
import ssl
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trustme
from relay_world import IDS, FixedFleet, FixedWorker, Report, pause, run, until
from scripted_engine import Scripted, answer, encode

from lengthwise.gateway import edge
from lengthwise.gateway import serve as serve_module
from lengthwise.gateway.config import (
    Admission,
    Engine,
    GatewayConfig,
    Key,
    Limits,
    Listen,
    Order,
    PredictionConfig,
    ResilienceConfig,
    Tls,
)
from lengthwise.gateway.protocols import Listener
from lengthwise.gateway.relay import open_session
from lengthwise.gateway.serve import Gateway, serve
from lengthwise.schema.errors import InputError
from lengthwise.testing.engine_server import EngineServer

BODY = {"model": "m", "prompt": "p 50", "max_tokens": 50, "stream": True}


def config_of(engine: Scripted, **named) -> GatewayConfig:
    return GatewayConfig(
        engines=(Engine(engine.url),), listen=Listen(port=0, admin_port=None), order=Order(window_tokens=10), **named
    )


@asynccontextmanager
async def fleet_of(config, clock, on_change, *, num_in_flight):
    sessions = [open_session(engine, config.resilience) for engine in config.engines]
    workers = [
        FixedWorker(f"w{k}", engine.url, IDS, session)
        for k, (engine, session) in enumerate(zip(config.engines, sessions, strict=True))
    ]
    fleet = FixedFleet(workers, 4)
    on_change(fleet.states())
    yield fleet
    for session in sessions:
        await session.close()


class Oracle(Report, Listener):
    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None


def gateway(config: GatewayConfig) -> Gateway:
    return Gateway(config, make_fleet=fleet_of, make_predictor=lambda *_: Oracle())


async def ask(port: int, body: dict, path: str = "/v1/completions") -> tuple[int, dict, bytes]:
    import aiohttp

    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}{path}", json=body) as reported,
    ):
        return reported.status, dict(reported.headers), await reported.read()


async def look(port: int, path: str) -> int:
    import aiohttp

    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as reported:
        return reported.status


def test_a_stream_passes_through_the_complete_gateway():
    async def work() -> None:
        async with Scripted() as engine, gateway(config_of(engine)) as g:
            status, headers, body = await ask(g.port, BODY)
            assert status == 200
            assert headers["Content-Type"].startswith("text/event-stream")
            assert body.endswith(b"data: [DONE]\n\n")
            assert body.count(b'"text":') == 50
            assert await look(g.port, "/ready") == 200
            assert (await ask(g.port, {**BODY, "model": "other"}))[0] == 404

    run(work)


@pytest.mark.parametrize("value", [b"1e400", b"9" * 5000, b'"\\ud800"'])
def test_a_value_that_cannot_be_parsed_is_the_clients_error(value, caplog):
    async def work() -> None:
        import aiohttp

        data = json.dumps(BODY).encode()[:-1] + b', "temperature": ' + value + b"}"
        async with Scripted() as engine, gateway(config_of(engine)) as g, aiohttp.ClientSession() as session:
            headers = {"Content-Type": "application/json"}
            url = f"http://127.0.0.1:{g.port}/v1/completions"
            async with session.post(url, data=data, headers=headers) as reported:
                assert (reported.status, (await reported.json())["error"]["code"]) == (400, "invalid_json")
            assert sum(g.telemetry.metrics.refusals.values()) == 1
            assert not engine.seen

    run(work)
    assert not [one for one in caplog.records if one.levelno > logging.INFO]


def test_the_admin_port_serves_the_metrics_and_the_client_port_does_not():
    async def work() -> None:
        async with Scripted() as engine:
            config = replace(config_of(engine), listen=Listen(port=0, admin_port=0))
            async with Gateway(config) as g:  # with the real fleet and length_predictor
                assert g.admin_port not in (None, 0, g.port)
                assert await look(g.admin_port, "/metrics") == 200
                assert await look(g.port, "/metrics") == 404

    run(work)


def test_the_admin_page_shows_how_priorities_are_handled():
    async def work() -> None:
        import aiohttp

        async with EngineServer() as engine:  # first come, first served: it refuses priorities
            config = GatewayConfig(
                engines=(Engine(engine.url),),
                listen=Listen(port=0, admin_port=0),
                order=Order("engine-priority"),
                prediction=PredictionConfig(predictor="none"),
            )
            async with Gateway(config) as g, aiohttp.ClientSession() as session:
                await g.fleet.wait_checked(10.0)
                async with session.get(f"http://127.0.0.1:{g.admin_port}/state.json") as reported:
                    (worker,) = (await reported.json())["workers"]
                assert worker["up"]
                assert "accepts no priorities" in worker["cause"]

    run(work)


def test_a_drain_finishes_running_requests_and_refuses_new_ones():
    async def work() -> None:
        async with Scripted(step_s=0.01) as engine:
            async with gateway(config_of(engine)) as g:
                under_way = asyncio.ensure_future(ask(g.port, BODY))
                await until(lambda: len(engine.seen) == 1)
                drained = asyncio.ensure_future(g.drain())
                await pause(0.02)
                assert await look(g.port, "/ready") == 503
                assert await look(g.port, "/health") == 200
                status, headers, _ = await ask(g.port, BODY)
                assert (status, "Retry-After" in headers) == (503, True)
                assert await drained
                assert (await under_way)[2].endswith(b"data: [DONE]\n\n")
            assert engine.seen[0].how == "finished"

    run(work)


def test_a_gateway_that_lingers_closes_connections_with_its_answers_and_serves_one_more_request_on_open_ones():
    async def work() -> None:
        import aiohttp

        async with Scripted() as engine:
            config = config_of(engine, resilience=ResilienceConfig(linger_s=0.05))
            async with gateway(config) as g, aiohttp.ClientSession() as session:

                async def ask_again() -> tuple[int, str]:
                    async with session.post(f"http://127.0.0.1:{g.port}/v1/completions", json=BODY) as reported:
                        await reported.read()
                        return reported.status, reported.headers.get("Connection", "")

                assert await ask_again() == (200, "")
                g.app.closing = True
                assert await look(g.port, "/ready") == 503
                status, headers, _ = await ask(g.port, BODY)
                assert (status, headers["Connection"]) == (200, "close")
                drained = asyncio.ensure_future(g.drain())
                await until(lambda: g.app.draining)
                assert (await ask(g.port, BODY))[0] == 503
                assert await ask_again() == (200, "close")
                assert await ask_again() == (503, "close")
                assert await drained

    run(work)


def test_the_body_budget_is_freed_once_a_stream_has_started():
    async def work() -> None:
        import aiohttp

        async with Scripted(step_s=0.02) as engine, gateway(config_of(engine)) as g:
            url, long = f"http://127.0.0.1:{g.port}/v1/completions", BODY | {"user": "u" * 100_000}
            async with aiohttp.ClientSession() as session, session.post(url, json=long) as reported:
                assert engine.seen[0].body == long | {"return_token_ids": True}
                await until(lambda: 0 < g.app.body_budget.used_bytes < 5000)
                assert (await reported.read()).count(b'"text":') == 50
            await until(lambda: g.app.body_budget.used_bytes == 0)

    run(work)


def test_an_immediate_stop_answers_waiting_requests_and_aborts_the_engine(caplog):
    async def work() -> None:
        async with Scripted(step_s=0.05) as engine:
            async with gateway(config_of(engine, resilience=ResilienceConfig(drain_s=0.1))) as g:
                under_way = [asyncio.ensure_future(ask(g.port, BODY | {"stream": k > 0})) for k in range(4)]
                await until(lambda: len(engine.seen) == 4 and all(one.sent > 2 for one in engine.seen))
                waiting = [asyncio.ensure_future(ask(g.port, BODY)) for _ in range(3)]
                await until(lambda: g.driver.statistics().waiting == 3)
                assert not await g.drain()
            for status, headers, body in await asyncio.gather(*waiting):
                assert (status, headers.get("Retry-After")) == (503, "1")
                assert json.loads(body)["error"]["code"] == "draining"
            for k, (status, _, body) in enumerate(await asyncio.gather(*under_way)):
                *_, last = body.removesuffix(b"\n\n").split(b"\n\n")
                assert (status, json.loads(last.removeprefix(b"data: "))["error"]["code"]) == (
                    200 if k else 503,
                    "stopped",
                )
                assert b"[DONE]" not in body
            await until(lambda: all(one.how == "aborted" for one in engine.seen))

    run(work)
    assert not [one for one in caplog.records if one.exc_info], caplog.text


def test_an_occupied_port_is_reported_before_anything_starts():
    async def work() -> None:
        with socket.socket() as door:
            door.bind(("127.0.0.1", 0))
            door.listen()
            async with Scripted() as engine:
                config = replace(config_of(engine), listen=Listen(port=door.getsockname()[1], admin_port=None))
                with pytest.raises(InputError, match="port must be free"):
                    async with gateway(config):
                        pass

    run(work)


def test_keys_and_limits_change_while_it_runs_and_ports_do_not():
    async def work() -> None:
        async with Scripted() as engine, gateway(config_of(engine)) as g:
            keyed = replace(g.config, keys=(Key("t", "0" * 64),), limits=Limits(n=1))
            await g.configure(keyed)
            assert (await ask(g.port, BODY))[0] == 401
            with pytest.raises(InputError, match="listen"):
                await g.configure(replace(keyed, listen=Listen(port=1)))
            assert g.config is keyed

    run(work)


def test_tenants_keep_their_names_when_keys_come_and_go():
    """In the metrics and in what they were served: both are kept by number."""

    def key(name: str) -> Key:
        return Key(name, hashlib.sha256(name.encode()).hexdigest())

    async def asked_by(port: int, name: str) -> int:
        import aiohttp

        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {name}"}) as session,
            session.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY) as reported,
        ):
            await reported.read()
            return reported.status

    async def work() -> None:
        async with Scripted() as engine:
            config = config_of(engine, keys=(key("alpha"), key("beta")))
            async with gateway(config) as g:
                assert [await asked_by(g.port, name) for name in ("alpha", "beta")] == [200, 200]
                await g.configure(replace(config, keys=(key("beta"), key("gamma"), key("delta"))))
                for name in ("beta", "gamma", "gamma", "gamma", "delta"):
                    assert await asked_by(g.port, name) == 200
                counts = {tenant: count for (_, _, tenant), count in g.telemetry.metrics.requests.items()}
                assert counts == {"alpha": 1, "beta": 2, "gamma": 3, "delta": 1}
                service = [g.scheduler.service.of(number) for number in range(1, 5)]
                # a new tenant starts level with the tenant served last: 1, 1 + 2, 3 + 3, 6 + 1
                assert [served / service[0] for served in service] == [1.0, 3.0, 6.0, 7.0]

    run(work)


def test_order_and_queue_limits_change_at_runtime_but_the_mode_does_not(monkeypatch):
    async def work() -> None:
        async with Scripted(step_s=0.02) as engine, gateway(config_of(engine)) as g:
            before = g.config
            asking = [asyncio.ensure_future(ask(g.port, BODY)) for _ in range(5)]
            await until(lambda: g.driver.statistics().waiting == 1)
            other = replace(before, order=replace(before.order, max_wait_s=5.0), admission=Admission(max_queued=1))
            await g.configure(other)
            status, _, body = await ask(g.port, BODY)
            assert status == 429, body
            for name, wrong in (("mode", "fcfs"), ("preemption", "nonsense")):
                with pytest.raises(InputError, match=name):
                    await g.configure(replace(before, order=replace(other.order, **{name: wrong})))
            monkeypatch.setattr(g.fleet, "configure", lambda _: pytest.fail("the engines changed before the check"))
            with pytest.raises(InputError, match="nonsense"):
                await g.configure(replace(other, dispatch=replace(before.dispatch, router="nonsense")))
            assert g.config is other
            assert (await ask(g.port, BODY))[0] == 429
            assert all(status == 200 for status, _, _ in await asyncio.gather(*asking))

    run(work)


def test_after_a_stop_signal_all_requests_are_served(monkeypatch):
    from lengthwise.gateway import serve as door

    monkeypatch.setattr(door, "Gateway", gateway)
    reported: list[tuple[int, bytes]] = []

    async def engine_and_client(port: int, engine: Scripted) -> None:
        status, _, body = await ask(port, BODY)
        reported.append((status, body))

    import threading

    ready, ports = threading.Event(), []
    engine = Scripted(step_s=0.005)

    def client() -> None:
        async def work() -> None:
            async with engine:
                started.set()
                if not await asyncio.to_thread(ready.wait, 60):
                    return
                asking = asyncio.ensure_future(engine_and_client(ports[0], engine))
                try:
                    await until(lambda: len(engine.seen) == 1)
                finally:  # else the gateway would serve for ever
                    os.kill(os.getpid(), signal.SIGTERM)
                await asking

        asyncio.run(work())

    started = threading.Event()
    thread = threading.Thread(target=client)
    thread.start()
    assert started.wait(60)

    def on_ready(port: int, _: int | None) -> None:
        ports.append(port)
        ready.set()

    serve(config_of(engine), ready=on_ready)
    thread.join(60)
    assert reported[0][0] == 200
    assert reported[0][1].endswith(b"data: [DONE]\n\n")
    assert answer(encode("p 50"), 50)[1]


def started_under(monkeypatch, during_start, error: Exception | None = None) -> list[str]:
    """What happens in a gateway that gets signals while its fleet starts, and whose reload fails with ``error``."""
    from lengthwise.gateway import serve as door

    happened: list[str] = []

    @asynccontextmanager
    async def fleet(config, clock, on_change, *, num_in_flight):
        for number in during_start:
            assert signal.getsignal(number) is not signal.SIG_DFL, "without a handler it would kill the process"
            os.kill(os.getpid(), number)
        await pause(0.01)
        async with fleet_of(config, clock, on_change, num_in_flight=num_in_flight) as made:
            happened.append("fleet")
            yield made

    def reload() -> GatewayConfig:
        happened.append("reloaded")
        os.kill(os.getpid(), signal.SIGTERM)
        if error is not None:
            raise error
        return config

    config = GatewayConfig(engines=(Engine("http://127.0.0.1:1"),), listen=Listen(port=0, admin_port=None))
    monkeypatch.setattr(door, "Gateway", lambda of: Gateway(of, make_fleet=fleet, make_predictor=lambda *_: Oracle()))
    serve(config, ready=lambda *_: happened.append("ready"), reload=reload)
    return happened


def test_a_signal_while_it_starts_ends_it(monkeypatch):
    assert started_under(monkeypatch, [signal.SIGTERM]) == []


def test_it_is_not_ready_before_a_signal_would_drain_it(monkeypatch):
    """Between the first connection and the end of the start, a signal stops the gateway at once."""
    statuses: list[bytes] = []

    async def ask(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        statuses.append((await reader.read())[9:12])
        writer.close()

    make_server = edge.server

    def probed(*fixed, **options):
        made = make_server(*fixed, **options)
        startup = made.startup

        async def listen(sockets):
            await startup(sockets)
            made.started = False  # the gateway's start goes on when this is true
            await ask(sockets[0].getsockname()[1])
            made.started = True

        made.startup = listen
        return made

    async def work() -> None:
        config = GatewayConfig(engines=(Engine("http://127.0.0.1:1"),), listen=Listen(port=0, admin_port=None))
        async with Gateway(config, make_fleet=fleet_of, make_predictor=lambda *_: Oracle()) as gateway:
            await ask(gateway.port)

    monkeypatch.setattr(edge, "server", probed)
    asyncio.run(work())
    assert statuses == [b"503", b"200"]


def test_a_reload_while_it_starts_comes_after_the_start(monkeypatch):
    assert started_under(monkeypatch, [signal.SIGHUP]) == ["fleet", "ready", "reloaded"]


def test_a_reload_that_fails_unexpectedly_is_logged_and_changes_nothing(monkeypatch, caplog):
    assert started_under(monkeypatch, [signal.SIGHUP], RecursionError("deep")) == ["fleet", "ready", "reloaded"]
    assert "the configuration stays as it was" in caplog.text


def test_clients_are_served_last_so_that_ready_means_all_is_up(monkeypatch):
    served, make_server = [], edge.server

    def server(app, *arguments, **options):
        served.append(type(app).__name__)
        return make_server(app, *arguments, **options)

    async def work() -> None:
        async with Scripted() as engine:
            config = replace(config_of(engine), listen=Listen(port=0, admin_port=0))
            async with gateway(config) as g:
                assert await look(g.port, "/ready") == 200

    monkeypatch.setattr(edge, "server", server)
    run(work)
    assert served == ["AdminApp", "App"]


async def half_asked(port: int, sent: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """A connection on which so many bytes of a request were sent, and the rest."""
    data = json.dumps(BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    complete = head.encode() + b"\r\n\r\n" + data
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(complete[: sent % len(complete)])
    await writer.drain()
    await pause(0.05)  # it has been read there
    return reader, writer, complete[sent % len(complete) :]


def test_a_request_whose_body_is_incomplete_at_the_stop_signal_is_served():
    async def work() -> None:
        async with Scripted() as engine, gateway(config_of(engine)) as g:
            reader, writer, rest = await half_asked(g.port, -10)
            drained = asyncio.ensure_future(g.drain())
            await pause(0.05)
            assert not drained.done()
            writer.write(rest)
            reported = await reader.readuntil(b"data: [DONE]\n\n")
            assert reported.startswith(b"HTTP/1.1 200")
            assert await drained
            writer.close()

    run(work)


@pytest.mark.parametrize(("sent", "rest_comes"), [(-10, False), (30, True)])
def test_a_request_that_misses_the_drain_deadline_gets_a_clean_503(sent, rest_comes):
    """Its body does not come any more; or it was still in its head when all others had ended."""

    async def work() -> None:
        async with Scripted() as engine:
            async with gateway(config_of(engine, resilience=ResilienceConfig(drain_s=0.1))) as g:
                reader, writer, rest = await half_asked(g.port, sent)
                assert await g.drain() is rest_comes
                stopping = asyncio.ensure_future(g.stop())
                await pause(0.05)
                if rest_comes:
                    writer.write(rest)
                reported = await reader.read()
                assert reported.startswith(b"HTTP/1.1 503")
                assert b"retry-after:" in reported.lower()
                assert b"draining" in reported
                await stopping
                writer.close()
            assert not engine.seen

    run(work)


def issued(folder):
    """Another authority's certificate in the files; returns who trusts it."""
    ca = trustme.CA()
    cert = ca.issue_cert("localhost")
    cert.private_key_pem.write_to_path(str(folder / "key.pem"))
    cert.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return context


async def is_trusted(port, context):
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    except ssl.SSLCertVerificationError:
        return False
    writer.close()
    return True


def test_a_renewed_certificate_is_shown_once_its_file_changes_or_the_configuration_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(serve_module, "CHECK_EVERY_S", 0.02)

    async def work() -> None:
        before = issued(tmp_path)
        tls = Tls(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"), None)
        async with Scripted() as engine:
            config = replace(config_of(engine), listen=Listen(port=0, admin_port=None, tls=tls))
            async with gateway(config) as g:
                assert await is_trusted(g.port, before)
                after = issued(tmp_path)
                async with asyncio.timeout(60):
                    while not await is_trusted(g.port, after):  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                assert not await is_trusted(g.port, before)
                (tmp_path / "key.pem").write_text("half of a ke")
                with pytest.raises(InputError, match=r"must be readable and belong together .*cert\.pem"):
                    await g.configure(config)
                assert await is_trusted(g.port, after)
                counts = g.telemetry.metrics.counts
                await until(lambda: counts["certificates_failed"] == 1)
                assert counts["certificates"] >= 1
                last = issued(tmp_path)
                await g.configure(config)
                assert await is_trusted(g.port, last)

    run(work)
