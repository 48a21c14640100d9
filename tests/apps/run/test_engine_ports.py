"""Launchers that choose ports at the same time, and programs that take a chosen port."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lengthwise.apps.launch.local import EngineTimeouts, Process
from lengthwise.backend import Launch

ENGINE = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words):
        pass
http.server.HTTPServer.allow_reuse_port = True  # as vLLM: another process of the user can listen at the same port
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
LAUNCHER = """
import os, pathlib, sys
os.getpid = lambda: 1  # as in two containers that share a network
from lengthwise.apps.launch.local import EngineTimeouts, Process
from lengthwise.backend import Launch

def launch(port):
    print(port, flush=True)
    sys.stdin.readline()
    return Launch((sys.executable, "-c", sys.argv[1], str(port)), {})

process = Process(launch, pathlib.Path(sys.argv[2]), EngineTimeouts(ready_s=120.0, grace_s=1.0))
print(process.start_blocking(), process.local.process.pid, flush=True)
sys.stdin.readline()
process.stop_blocking()
"""


def test_two_launchers_that_choose_ports_at_the_same_time_start_two_engines(tmp_path):
    """Both choose before either engine listens."""
    commands = [[sys.executable, "-c", LAUNCHER, ENGINE, str(tmp_path / name)] for name in "ab"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    launchers = [subprocess.Popen(command, **pipes) for command in commands]
    try:
        ports = [one.stdout.readline().strip() for one in launchers]
        for one in launchers:
            one.stdin.write("\n")
        found = [one.stdout.readline().split() for one in launchers]
        assert len(set(ports)) == 2
        assert [url.rpartition(":")[2] for url, _ in found] == ports
        assert len({pid for _, pid in found}) == 2
    finally:
        for one in launchers:
            one.communicate("\n")


@pytest.mark.parametrize("words", ["[Errno 98] Address already in use", "couldn't bind HTTP server socket"])
def test_an_engine_whose_port_another_program_takes_starts_again_at_another_port(tmp_path, words):
    ports = []

    def launch(port):
        ports.append(port)
        code = ENGINE if len(ports) > 1 else f"import sys; sys.exit({words!r})"
        return Launch((sys.executable, "-c", code, str(port)), {})

    process = Process(launch, tmp_path / "log", EngineTimeouts(ready_s=120.0, grace_s=1.0))
    assert process.start_blocking() == f"http://127.0.0.1:{ports[-1]}"
    process.stop_blocking()
    assert len(set(ports)) == 2
