"""``lengthwise serve`` as a user starts, reloads and ends it."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from lengthwise import EngineLimits, deploy
from lengthwise.backend.launch import gateway_toml
from lengthwise.cli.log import KeyValueFormatter
from lengthwise.engine import mix
from lengthwise.gateway import config as reported
from lengthwise.gateway.notices import is_loopback, notices
from lengthwise.policy import scheduler as named
from lengthwise.testing.engine_server import EngineServer, EngineSpec, emulated, in_thread

KEY = "sk-a-client"
BODY = {"model": "toy", "prompt": "hello", "max_tokens": 4}


@contextmanager
def served(*arguments, cwd: Path, program: tuple[str, ...] = ("-m", "lengthwise.cli")):
    """A gateway as a process, started; its standard output so far is in ``head``, the log in ``log``."""
    log = cwd / "log"
    command = [sys.executable, *program, "serve", *map(str, arguments)]
    with log.open("w") as errors:
        process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        yield process, log
    finally:
        process.kill()
        process.communicate(timeout=60)


def head_of(process) -> str:
    """What it prints until it is up."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "curl" in line:
            break
    return "".join(lines)


def port_of(head: str) -> int:
    return int(re.search(r"clients +http://127.0.0.1:(\d+)/v1", head)[1])


def ask(port: int, key: str | None = None, body: dict = BODY) -> int:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def wait_for(log: Path, text: str) -> str:
    import time

    for _ in range(400):
        if text in log.read_text():
            return log.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{text!r} is not in {log.read_text()}")


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def file_of(engine: str, *, mode: str = "isrtf", more: str = "") -> str:
    return f'order = "{mode}"\nengines = ["{engine}"]\n[listen]\nport = 0\nadmin_port = "none"\n{more}'


@pytest.mark.slow
def test_a_gateway_starts_is_read_again_and_ends(tmp_path):
    path = tmp_path / "gateway.toml"
    with in_thread(EngineServer(EngineSpec())) as running:
        url = running.servers[0].url
        path.write_text(file_of(url))
        with served(path, cwd=tmp_path) as (process, log):
            head = head_of(process)
            assert "mode isrtf" in head
            assert "no key needed" in head
            assert re.search(r"engine +127.0.0.1:\d+ +vllm +toy +up", head)
            port = port_of(head)
            assert ask(port) == 200

            path.write_text(file_of(url, more=f'[[keys]]\ntenant = "a"\nsha256 = "{digest(KEY)}"\n'))
            process.send_signal(signal.SIGHUP)
            wait_for(log, "configuration was reloaded")
            assert ask(port) == 401
            assert ask(port, KEY) == 200

            path.write_text(file_of(url, more="[limits]\ndepht = 3\n"))
            process.send_signal(signal.SIGHUP)
            assert "did you mean limits.depth?" in wait_for(log, "stays as it was")
            path.write_text(file_of(url, mode="fcfs"))
            process.send_signal(signal.SIGHUP)
            wait_for(log, "order.mode cannot change while the gateway runs")
            assert (ask(port), ask(port, KEY)) == (401, 200)

            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
            assert KEY not in log.read_text()


@pytest.mark.slow
def test_the_file_of_a_launch_folder_serves_both_groups_and_the_faster_engine_gets_more(tmp_path):
    """The emulated engines have four times the step times of an H100 and of an L40S, beside which a stall is short."""
    limits = EngineLimits(max_model_len=2048)
    scheduler = replace(named("vllm_v1"), router="shortest_expected_delay")
    d = mix([deploy("llama-3.1-8b", gpu, limits=limits, scheduler=scheduler) for gpu in ("H100", "L40S")])
    servers = [EngineServer(emulated(side, speed=0.25, model="toy")) for side in d.sides]
    path, body = tmp_path / "gateway.toml", BODY | {"max_tokens": 16, "min_tokens": 16, "ignore_eos": True}
    with in_thread(*servers) as running:
        urls = {role: [one.url] for role, one in zip(("group-0", "group-1"), running.servers, strict=True)}
        path.write_text(gateway_toml(d, urls, host="127.0.0.1", admin_port=9000))
        with served(path, "--port", 0, "--admin-port", "none", cwd=tmp_path) as (process, _):
            head = head_of(process)
            assert "mode fcfs" in head
            assert len(re.findall(r"group-[01]-0 +vllm +toy +up", head)) == 2
            port = port_of(head)
            with ThreadPoolExecutor(16) as pool:
                assert set(pool.map(lambda _: ask(port, body=body), range(96))) == {200}
        fast, slow = (one.log.count("finished") for one in running.servers)
    assert fast + slow >= 96  # and the probes
    assert fast > slow > 0


_SIGNALLED = """
import os, sys
from lengthwise import config
from lengthwise.cli import main

def signalled(*arguments):
    os.kill(os.getpid(), int(sys.argv[1]))
    del config.load_gateway  # the next line imports the true one
    return config.load_gateway(*arguments)

config.load_gateway = signalled
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("number", "logged"),
    [(signal.SIGHUP, "the configuration was reloaded"), (signal.SIGTERM, "stopped before the gateway had started")],
)
def test_a_signal_during_the_imports_waits_for_the_gateway(tmp_path, number, logged):
    path = tmp_path / "gateway.toml"
    path.write_text(file_of("http://127.0.0.1:1"))
    with served(path, cwd=tmp_path, program=("-c", _SIGNALLED, str(int(number)))) as (process, log):
        wait_for(log, logged)
        if number != signal.SIGTERM:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0


@pytest.mark.parametrize("options", [("--set", "order.max_wait_s=-1"), ("--check",)])
def test_a_command_without_a_gateway_blocks_no_signal_afterwards(cli, options):
    cli("serve", "--engine", "http://127.0.0.1:1", *options)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_logs_are_json_and_warnings_are_among_them(tmp_path):
    with in_thread(EngineServer(EngineSpec())) as running:
        options = ("--engine", running.servers[0].url, "--mode", "engine-priority", "--port", 0)
        with served(*options, "--admin-port", "none", "--log-json", cwd=tmp_path) as (process, log):
            wait_for(log, "accepts no priorities")
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=60)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    (started,) = [record for record in records if record["event"] == "started"]
    assert started["mode"] == "engine-priority"
    assert list(started["engines"].values()) == ["vllm"]
    assert "warning" in {record["level"] for record in records if "priorities" in record["event"]}
    assert out == ""


def test_a_gateway_without_an_engine_reports_what_to_do(cli):
    finished = cli("serve")
    assert finished.code == 2
    assert "needs an engine: give --engine" in finished.err


def test_an_occupied_port_is_reported(cli):
    import socket

    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        finished = cli("serve", "--engine", "http://127.0.0.1:9", "--port", door.getsockname()[1])
    assert finished.code == 2
    assert "the port must be free" in finished.err


def test_check_prints_an_equivalent_file(cli, tmp_path):
    from lengthwise.config import load_gateway

    given = ("--engine", "http://a:1", "--mode", "bins", "--host", "0.0.0.0", "--set", "order.bins=4")
    finished = cli("serve", *given, "--journal", "day.jsonl", "--check")
    assert finished.code == 0
    assert "there are no keys, and the gateway listens on 0.0.0.0" in finished.err
    path = tmp_path / "again.toml"
    path.write_text(finished.out)
    config = load_gateway(path).config
    assert (config.order.mode, config.order.bins, config.listen.host) == ("bins", 4, "0.0.0.0")
    assert config.listen.journal == str(Path("day.jsonl").absolute())


@pytest.mark.parametrize("arguments", [("--mode", "fifo"), ("--admin-port", "some"), ("--set", "order")])
def test_what_cannot_be_used_ends_with_2(cli, arguments):
    finished = cli("serve", "--engine", "http://a:1", *arguments, "--check")
    assert finished.code == 2
    assert finished.err.startswith("error: ")


def test_a_key_is_hashed_as_the_gateway_does(cli, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{KEY}\n"))
    finished = cli("serve", "--hash-key")
    assert finished.out == f"{digest(KEY)}\n"
    for nothing in ("", "\n", "clé\n", "one\ntwo\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(nothing))
        assert cli("serve", "--hash-key").code == 2


def test_a_look_back_at_what_is_no_journal(cli, tmp_path):
    finished = cli("serve", "--report", tmp_path / "none.jsonl")
    assert finished.code == 2
    assert "none.jsonl" in finished.err


@pytest.mark.parametrize(
    "ignored",
    [
        ["--engine", "http://a:1"], ["--check"], ["--log-json"], ["--log-level", "error"], ["--log-requests"],
        ["--port", "1"], ["--admin-port", "1"], ["--host", "::"], ["--journal", "j"], ["--mode", "srtf"],
    ],
)  # fmt: skip
def test_what_a_look_back_would_ignore_is_refused(ignored, cli, tmp_path):
    finished = cli("serve", "--report", tmp_path / "day.jsonl", *ignored)
    assert finished.code == 2
    assert f"{ignored[0]}: does not go with --report, which takes only CONFIG, --set" in finished.err
    assert cli("serve", "--hash-key", *ignored).code == 2


def test_a_look_back_at_a_journal(cli, tmp_path):
    """Of a few requests, made through a gateway that observes."""
    journal = tmp_path / "day.jsonl"
    with in_thread(EngineServer(EngineSpec())) as running:
        options = ("--engine", running.servers[0].url, "--mode", "observe", "--journal", journal)
        with served(*options, "--port", 0, "--admin-port", "none", cwd=tmp_path) as (process, _):
            port = port_of(head_of(process))
            assert {ask(port) for _ in range(3)} == {200}
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
    elsewhere = tmp_path / "elsewhere.toml"  # of the machine that wrote the journal
    elsewhere.write_text('engines = ["http://a:1"]\n[listen]\njournal = "not/here/day.jsonl"\n')
    finished = cli("serve", elsewhere, "--report", journal, "--json", tmp_path / "gain.json")
    assert finished.code == 0, finished.err
    assert finished.out.startswith("Verdict: ")
    assert json.loads((tmp_path / "gain.json").read_text())["requests"] == 3
    options = ("serve", elsewhere, "--report", journal, "--json", tmp_path / "routers.json", "--router")
    finished = cli(*options, "all")
    assert finished.code == 0, finished.err
    assert finished.out.startswith("3 requests got a response so far; at least 200 are needed.")
    assert json.loads((tmp_path / "routers.json").read_text())["format"] == "lengthwise.routing_gain"
    assert "Did you mean: cache_aware" in cli(*options, "cache-aware").err
    assert "Did you mean: round_robin" in cli(*options, "all", "--router", "round-robin").err
    refused = cli(*options, "least_tokens", "--router", "cache_aware").err
    assert refused.startswith("error: router 'cache_aware' chooses by prefixes that prompts share, and the journal has")
    assert "goes with --report; the router of a gateway" in cli("serve", "--router", "cache_aware").err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mode", "isrft"], "the command line: --mode: must be 'observe', 'fcfs', "),
        (["--mode", "isrft"], "; it is 'isrft'; did you mean 'isrtf'?"),
        (["--admin-port", "nowhere"], "the command line: --admin-port: must be"),
        (["--journal", "no/such/folder/j"], "the command line: --journal: must be a file that can be written"),
        (["--set", "order.mode=isrft"], "the command line: --set order.mode: must be 'observe'"),
        (["--mode", "srtf", "--set", "order.mode=isrft"], "the command line: --set order.mode: must be 'observe'"),
    ],
)
def test_what_cannot_be_used_is_called_as_it_was_given(options, message, cli):
    finished = cli("serve", "--engine", "http://localhost:1", *options, "--check")
    assert finished.code == 2
    assert message in finished.err


@pytest.mark.parametrize("given", ["trace=collector", "proxies=lb.local", "journal=no/such/folder/j"])
def test_problems_that_would_fail_the_start_are_reported_first(given, cli):
    """Nothing has started: no port is bound, no request is sent to an engine."""
    finished = cli("serve", "--engine", "http://localhost:1", "--set", f"listen.{given}")
    assert (finished.code, finished.out) == (2, "")
    assert len(finished.err.splitlines()) == 1
    assert f"--set listen.{given.partition('=')[0]}: " in finished.err


def config(**listen) -> reported.GatewayConfig:
    return reported.GatewayConfig(engines=(reported.Engine("http://a:1"),), listen=reported.Listen(**listen))


def test_warnings_are_of_what_is_open():
    assert notices(config()) == []
    assert "no keys" in notices(config(host="0.0.0.0"))[0]
    fair = reported.Order(fairness="vtc")
    for concurrency in (None, 4):
        key = reported.Key("acme", "0" * 64, concurrency=concurrency)
        warned = notices(reported.GatewayConfig((reported.Engine("http://a:1"),), keys=(key,), order=fair))
        assert any("concurrency for the keys of acme" in text for text in warned) is (concurrency is None)
    assert notices(config(host="0.0.0.0", tls=reported.Tls("c", "k", "ca"))) == []
    assert "admin port" in notices(config(admin_host="::"))[0]
    users = (reported.AdminUser("olga", "0" * 64),)
    assert "without TLS" in notices(config(admin_host="::", admins=users))[0]
    assert notices(config(admin_host="::", admins=users, admin_tls=reported.Tls("c", "k"))) == []
    assert notices(config(admin_host="::", admin_port=None)) == []
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "0.0.0.0")] == [
        True, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["observe", "engine-priority", "engine-plugin"])
def test_a_cap_on_an_engine_that_should_have_none_is_warned_about(mode):
    order, listen = reported.Order(mode=mode), reported.Listen(journal="day.jsonl")
    for engine in (reported.Engine("http://a:1", concurrency=4), reported.Engine("http://a:1")):
        entries = reported.GatewayConfig((engine,), order=order, listen=listen)
        found = reported.GatewayConfig(
            discovery=reported.Discovery(dns="a:1", engine=engine), order=order, listen=listen
        )
        warned = [*notices(entries), *notices(found)]
        assert ["concurrency is set" in text for text in warned] == [True, True] * (engine.concurrency is not None)
    assert notices(reported.GatewayConfig((reported.Engine("http://a:1", concurrency=4),))) == []


@pytest.mark.parametrize("mode", ["windowed", "isrtf"])
def test_a_mode_that_was_slower_than_fcfs_is_warned_about(mode):
    config = reported.GatewayConfig((reported.Engine("http://a:1"),), order=reported.Order(mode=mode))
    warned = [text for text in notices(config) if "slower than fcfs" in text]
    assert len(warned) == (mode == "windowed")
    assert all(re.findall(r"[\d.]+ ?%", text) == ["2.0 %"] for text in warned)  # of one empty step in 51


def test_an_engine_in_development_mode_is_warned_about():
    import asyncio

    from aiohttp import web
    from aiohttp.test_utils import TestServer

    from lengthwise.backend.openai_protocol import Capabilities
    from lengthwise.gateway.fleet.engine_probe import EngineMetadata
    from lengthwise.gateway.fleet.worker import EngineWorker
    from lengthwise.gateway.notices import engine_notices

    async def requested(*, dev: bool) -> list[str]:
        async def awake(_):
            return web.json_response({"is_sleeping": False})

        app = web.Application()
        if dev:
            app.router.add_get("/is_sleeping", awake)
        async with TestServer(app) as server:
            worker = EngineWorker(
                reported.Engine(str(server.make_url("")).rstrip("/")), reported.ResilienceConfig(), reported.Dispatch()
            )
            worker.identified, worker.metadata = True, EngineMetadata(Capabilities(engine="vllm"))
            try:
                return await engine_notices([worker], "srtf")
            finally:
                await worker.session.close()

    assert asyncio.run(requested(dev=False)) == []
    (text,) = asyncio.run(requested(dev=True))
    assert "VLLM_SERVER_DEV_MODE" in text


def test_a_line_of_the_text_log_is_one_line_whatever_a_client_names():
    record = logging.LogRecord("lengthwise.gateway", logging.INFO, "", 0, "request of %s", ("a\nb\x1b[2J",), None)
    record.model = "m\r\n04:00:00 WARNING forged"
    line = KeyValueFormatter().format(record)
    assert not any(ord(character) < 32 for character in line)
    assert "a\\x0ab\\x1b[2J" in line
