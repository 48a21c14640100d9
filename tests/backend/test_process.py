"""A local engine is ready when it is handed out, reported when it is not, and gone afterwards with its children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lengthwise.backend.process import free_port, is_taken, local_engine
from lengthwise.schema.errors import EngineError, InputError, OutputError

SERVER = """
import http.server, os, signal, subprocess, sys, time
port, late_s, stubborn, health = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "1", sys.argv[4]
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(late_s)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == health else 404)
        self.end_headers()
    def log_message(self, *words):
        pass
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


@pytest.fixture
def log(tmp_path):
    return tmp_path / "engine.log"


def server(port, late_s=0.0, *, stubborn=False, health="/health"):
    return [sys.executable, "-c", SERVER, str(port), str(late_s), str(int(stubborn)), health]


def child_of(log: Path) -> int:
    return int(log.read_text().split()[1])


def is_gone(pid: int) -> bool:
    """Whether a process no longer runs; an unreaped zombie counts as gone."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not is_gone(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return is_gone(pid)


def test_each_port_is_another_one_that_is_free_and_that_no_system_gives_away():
    with ThreadPoolExecutor(4) as pool:
        ports = list(pool.map(lambda _: free_port(), range(200)))
    assert len(set(ports)) == 200
    assert max(ports) < 32_768
    with socket.socket() as door:
        door.bind(("127.0.0.1", taken := free_port()))
        door.listen()
        assert is_taken("127.0.0.1", taken)
        assert taken not in {free_port() for _ in range(200)}


@pytest.mark.slow
@pytest.mark.parametrize("health", ["/health", "/v1/models"])
def test_an_engine_is_ready_when_handed_out_and_gone_with_its_children(log, health):
    port = free_port()
    with local_engine(server(port, 0.3, health=health), port=port, log_path=log, ready_s=20) as engine:
        assert engine.is_alive
        assert 0.3 <= engine.ready_after_s < 20
        with urllib.request.urlopen(engine.url + health, timeout=5) as answer:
            assert answer.status == 200
        child = child_of(log)
        assert not is_gone(child)
    assert not engine.is_alive
    assert gone_within(child, 5)
    assert not is_taken("127.0.0.1", port)


def test_an_engine_has_its_own_process_group_and_the_session_of_its_starter(log):
    """Processors are shared between sessions: of another one it could leave its own client none for seconds."""
    port = free_port()
    with local_engine(server(port), port=port, log_path=log, ready_s=20) as engine:
        assert os.getpgid(engine.process.pid) == engine.process.pid
        assert os.getsid(engine.process.pid) == os.getsid(0)


def test_an_engine_that_ignores_the_request_to_end_is_killed(log):
    port = free_port()
    start = time.monotonic()
    with local_engine(server(port, stubborn=True), port=port, log_path=log, grace_s=0.3) as engine:
        child = child_of(log)
    assert engine.process.returncode == -signal.SIGKILL
    assert gone_within(child, 5)
    assert time.monotonic() - start < 15


def test_an_engine_that_dies_at_start_is_reported_with_its_last_output(log):
    code = "import sys; [print('line', i) for i in range(100)]; sys.exit('no such model')"
    with (
        pytest.raises(EngineError, match=r"status 1(.|\n)*line 99(.|\n)*no such model") as caught,
        local_engine([sys.executable, "-c", code], port=free_port(), log_path=log),
    ):
        pytest.fail("it never was ready")
    assert "line 10\n" not in str(caught.value)


def test_an_engine_that_starts_too_late_is_reported_and_stopped(log):
    port = free_port()
    with (
        pytest.raises(EngineError, match=r"ready within 0.5 s(.|\n)*child"),
        local_engine(server(port, 60), port=port, log_path=log, ready_s=0.5, grace_s=2),
    ):
        pytest.fail("it never was ready")
    assert gone_within(child_of(log), 5)


def test_an_engine_that_dies_later_is_seen(log):
    port = free_port()
    with local_engine(server(port), port=port, log_path=log) as engine:
        engine.check()
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.process.wait()
        with pytest.raises(EngineError, match="status -9"):
            engine.check()


def test_a_port_that_is_taken_is_refused_before_anything_starts(log):
    port = free_port()
    with local_engine(server(port), port=port, log_path=log):
        second = log.with_name("second.log")
        with (
            pytest.raises(EngineError, match=f"port {port} .* must be free"),
            local_engine(server(port), port=port, log_path=second),
        ):
            pytest.fail("it cannot listen there")
        assert not second.exists()


def test_a_missing_program_is_refused(log):
    with (
        pytest.raises(InputError, match="no-such-engine"),
        local_engine(["no-such-engine"], port=free_port(), log_path=log),
    ):
        pytest.fail("there is nothing to run")


def test_a_log_that_cannot_be_written_is_refused(log):
    with (
        pytest.raises(OutputError, match="cannot write"),
        local_engine(server(1), port=free_port(), log_path=log / "no" / "folder"),
    ):
        pytest.fail("there is nowhere to write")


def test_an_engine_ends_when_its_starter_is_killed(log, tmp_path):
    port = free_port()
    starter = f"""
import sys, time
from lengthwise.backend.process import local_engine
with local_engine({server(port)!r}, port={port}, log_path={str(log)!r}, grace_s=1) as engine:
    print(engine.process.pid, flush=True)
    time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    with owner.stdout:
        engine = int(owner.stdout.readline())
    child = child_of(log)
    owner.kill()
    owner.wait()
    assert gone_within(engine, 10)
    assert gone_within(child, 10)


def test_an_unresponsive_engine_ends_when_the_process_that_stops_it_is_killed(log):
    port = free_port()
    starter = f"""
import time
from lengthwise.backend.process import local_engine
asks = []
def pause(seconds):
    if asks:
        print("asked", flush=True)
    time.sleep(seconds)
with local_engine(
    {server(port, stubborn=True)!r}, port={port}, log_path={str(log)!r}, grace_s=2, pause=pause
) as engine:
    print(engine.process.pid, flush=True)
    asks.append(engine)
"""
    owner = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    with owner.stdout:
        engine = int(owner.stdout.readline())
        assert owner.stdout.readline() == "asked\n"
        child = child_of(log)
        owner.kill()
    assert owner.wait() == -signal.SIGKILL, "it was killed while the engine had its grace"
    assert gone_within(engine, 15)
    assert gone_within(child, 15)


def test_readiness_is_waited_for_on_the_clock_that_is_given(log):
    """Half an hour passes at once."""
    time_s = [0.0]

    def pause(seconds):
        time_s[0] += 600.0

    code = "import time; time.sleep(60)"
    start = time.monotonic()
    with (
        pytest.raises(EngineError, match="ready within 1800 s"),
        local_engine(
            [sys.executable, "-c", code],
            port=free_port(),
            log_path=log,
            ready_s=1800,
            grace_s=1,
            now=lambda: time_s[0],
            pause=pause,
        ),
    ):
        pytest.fail("it never was ready")
    assert time.monotonic() - start < 20
