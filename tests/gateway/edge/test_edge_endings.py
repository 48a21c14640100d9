"""How connections end: who takes nothing is dropped, who still writes gets its answer."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import struct
import sys
import time

import pytest
from edge_serving import SECRET, Report, Script, Served, a_key, chat, config, everything, parsed

from lengthwise.gateway.edge.http_server import MAX_PIPELINED
from lengthwise.gateway.protocols import Listener

HEAD = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n".encode()
PAGE = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"


class Received(Listener):
    """What is refused."""

    def __init__(self):
        self.reasons = []

    def refused(self, reason, refusal, tenant, model):
        self.reasons.append((reason, refusal.status))


def until(message, within_s=20.0):
    end = time.monotonic() + within_s
    while not message():
        assert time.monotonic() < end
        time.sleep(0.01)


def reads_nothing(served, data):
    """A client with little room that sends, and reads no more than one byte of what comes."""
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect(("127.0.0.1", served.port))
    line.settimeout(10)
    line.sendall(data)
    assert line.recv(1) == b"H"
    return line


def asks_while_answered(served, line):
    """Sends a few requests more whenever those before are answered, until the answers are not taken any more."""
    state, port = served.server.server_state, line.getsockname()[1]
    (wire,) = (one for one in state.connections if one.client[1] == port)
    requested = 1
    while not wire.flow.write_paused:
        answered = state.total_requests
        line.sendall(PAGE * MAX_PIPELINED)
        requested += MAX_PIPELINED
        until(lambda so_far=answered: wire.flow.write_paused or state.total_requests >= so_far + MAX_PIPELINED)
        assert requested < 10_000


def request(body, extra=b""):
    return HEAD + extra + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("idle_s", [0.2, 75.0])
@pytest.mark.parametrize("extra", [b"", b"Connection: close\r\n"])
def test_non_streamed_answers_that_no_client_reads_are_dropped_with_their_connections(extra, idle_s):
    """The answer is written in one piece, and its request is over long before anybody has taken it."""
    piece = b"x" * (16 << 20)
    script = Script(answers=[Report([piece]) for _ in range(3)])
    in_use = sys.getrefcount(piece)
    body = json.dumps(chat()).encode()
    with Served(config(body_s=0.3, idle_s=idle_s, connections=3), script) as served:
        lines = [reads_nothing(served, request(body, extra)) for _ in range(3)]
        until(lambda: [answer.closed for answer in script.report] == [1, 1, 1])
        until(lambda: not served.server.server_state.connections)
        until(lambda: sys.getrefcount(piece) == in_use)
        assert (served.app.in_flight, served.app.body_budget.used_bytes) == (0, 0)
        assert served.submit(b"", path="/health", method="GET")[0] == 200
        for line in lines:
            line.close()


def test_a_client_that_sends_repeatedly_without_reading_loses_its_connection():
    with Served(config(a_key(), body_s=0.3, connections=3)) as served:
        lines = [reads_nothing(served, PAGE) for _ in range(3)]
        for line in lines:
            asks_while_answered(served, line)
        until(lambda: not served.server.server_state.connections and not served.server.server_state.tasks)
        assert served.submit(b"", path="/health", method="GET")[0] == 200
        for line in lines:
            line.close()


def test_a_non_streamed_answer_that_is_read_slowly_arrives_complete():
    piece = b"y" * (6 << 20)
    script = Script(answers=[Report([piece])])
    with Served(config(body_s=0.3, idle_s=0.2), script) as served:
        with contextlib.closing(reads_nothing(served, request(json.dumps(chat()).encode()))) as line:
            line.settimeout(5)
            got, started = 0, time.monotonic()
            while more := len(line.recv(65_536)):
                got += more
                time.sleep(max(0.0, started + got / 6e6 - time.monotonic()))
        assert got > len(piece)


@pytest.mark.parametrize("size", [1 << 20, 10 << 20])
def test_a_client_that_writes_all_before_reading_gets_the_body_too_large_error(size):
    with Served(config(a_key(), body_bytes=8 << 20)) as served:
        served.app.configure(config(a_key(), body_bytes=100_000))
        for _ in range(3):
            line = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
            stated = {"authorization": f"Bearer {SECRET}", "content-type": "application/json"}
            line.request("POST", "/v1/chat/completions", body=b"x" * size, headers=stated)
            answer = line.getresponse()
            assert (answer.status, answer.getheader("connection")) == (413, "close")
            assert json.loads(answer.read())["error"]["code"] == "body_too_large"
            line.close()
        until(lambda: not served.server.server_state.connections)


def test_a_client_above_the_connection_limit_is_refused_after_writing():
    received = Received()
    with Served(config(a_key(), connections=1), listener=received) as served, served.socket():
        until(lambda: served.server.server_state.connections)
        status, headers, body = parsed(served.raw(request(b" " * 3_000_000)))
        assert (status, headers["connection"], body["error"]["code"]) == (503, "close", "overloaded")
        until(lambda: received.reasons == [("connections", 503)])


def test_a_client_that_keeps_writing_after_its_refusal_counts_until_it_is_closed():
    with Served(config(a_key(), body_bytes=1000)) as served, served.socket() as line:
        line.sendall(HEAD + b"Content-Length: 99999999\r\n\r\n")
        assert line.recv(65_536).startswith(b"HTTP/1.1 413")
        assert line.recv(65_536) == b"", "nothing more will be said"
        assert len(served.server.server_state.connections) == 1
        with pytest.raises(OSError, match=r"reset|pipe"):
            line.sendall(b"x" * 99_999_999)
        until(lambda: not served.server.server_state.connections)


def test_a_client_that_is_silent_after_its_refusal_is_closed_soon():
    with Served(config(a_key(), body_bytes=1000)) as served, served.socket() as line:
        line.sendall(HEAD + b"Content-Length: 9999\r\n\r\n")
        assert everything(line).startswith(b"HTTP/1.1 413")
        until(lambda: not served.server.server_state.connections)


@pytest.mark.parametrize("sent", [b"POST /v1/chat", HEAD + b"Content-Length: 99\r\n\r\n{"])
def test_a_request_that_is_too_slow_is_reported_once(sent):
    received = Received()
    with Served(config(a_key(), body_s=0.2), listener=received) as served:
        raw = served.raw(sent)
        assert (raw.count(b"HTTP/1.1 "), parsed(raw)[0]) == (1, 408)
        until(lambda: not served.app.in_flight)
        assert received.reasons == [("slow", 408)]


@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_goes_after_its_answer_leaves_no_timer_behind(reset):
    """Each would hold its connection's memory for ``idle_s``."""
    with Served(config(idle_s=75.0)) as served, served.socket() as line:
        line.sendall(PAGE)
        assert line.recv(65_536).startswith(b"HTTP/1.1 200")
        (wire,) = served.connections
        until(lambda: wire.timeout_keep_alive_task is not None)
        if reset:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.close()
        until(lambda: not served.connections)
        until(lambda: wire.timeout_keep_alive_task is None)


def test_a_response_that_the_shutdown_cancels_ends_its_connection_without_a_traceback(caplog):
    answer = Report([b"data: 1\n\n", b"data: 2\n\n"], kind=b"text/event-stream", length=False, pause_s=600.0)
    with Served(config(a_key()), exchange=Script(answers=[answer])) as served, served.socket() as line:
        body = json.dumps(chat(stream=True)).encode()
        line.sendall(HEAD + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: answer.sent == 1)
        served.app.draining = True
        (task,) = served.server.server_state.tasks
        served.loop.call_soon_threadsafe(task.cancel)
        assert not everything(line).endswith(b"0\r\n\r\n")
        until(lambda: not served.connections)
        assert (answer.cancelled, answer.closed) == (True, 1)
    assert not [one for one in caplog.records if one.exc_info], caplog.text


@pytest.mark.parametrize("turns", range(5))
def test_a_client_that_connects_as_the_server_stops_loses_its_connection(turns):
    """Whatever turn of asyncio's loop it is in: the socket may be accepted and not yet have a transport."""

    async def work():
        server, listener = Served(config()).server, socket.create_server(("127.0.0.1", 0))
        server.capture_signals = contextlib.nullcontext
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        with socket.create_connection(listener.getsockname(), timeout=10) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.shutdown([listener])
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        server.should_exit = True
        await running

    asyncio.run(work())
