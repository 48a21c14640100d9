"""Requests sent behind one another on one connection, before the first is answered."""

from __future__ import annotations

import contextlib
import json
import logging
import time

import pytest
from edge_serving import SECRET, Report, Script, Served, a_key, chat, config, everything

BODY = json.dumps({**chat(), "stream": True}).encode()
REQUESTED = (
    f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n"
).encode() + BODY
CHUNKED = (
    f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n"
    "Transfer-Encoding: chunked\r\n\r\n"
).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
GARBAGE = b"\x00\x01 no request at all\r\n\r\n"
LAST = b"\r\n0\r\n\r\n"


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def served(script):
    with Served(config(a_key()), script) as server:
        yield server


def streamed(pieces=200):
    reported = [b'data: {"choices":[{"index":0,"delta":{"content":"%d"}}]}\n\n' % k for k in range(pieces)]
    return Report(reported, kind=b"text/event-stream", length=False, pause_s=0.01)


def until(true, within_s=5.0):
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_connection_has_so_many_requests_waiting_and_no_more(served):
    """Each takes a hundred times the memory of its bytes, and no key is asked for before it is its turn."""
    requested, head = 4000, HEALTH[:-2] + b"A: "
    one = head + b"a" * (60 - len(head)) + b"\r\n\r\n"
    assert len(one) == 64, "no read ends within a head"
    with served.socket() as line:
        with contextlib.suppress(OSError):
            line.sendall(one * requested)
        raw = everything(line)
    assert raw.count(b"HTTP/1.1 200") < requested / 10
    until(lambda: not served.connections)


def test_a_few_are_answered_all(served):
    with served.socket() as line:
        line.sendall(HEALTH * 15 + HEALTH.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        assert everything(line).count(b"HTTP/1.1 200") == 16


@pytest.mark.parametrize("second", [HEALTH, REQUESTED, CHUNKED])
def test_garbage_behind_a_second_request_breaks_the_first_off_and_nothing_runs_into_it(served, script, caplog, second):
    script.answers.append(streamed())
    with caplog.at_level(logging.ERROR), served.socket() as line:
        line.sendall(REQUESTED)
        raw = b""
        while raw.count(b"data: ") < 3:
            raw += line.recv(65536)
        line.sendall(second + GARBAGE)
        raw += everything(line)
        assert raw.count(b"HTTP/1.1") == 1, "no second head within the stream"
        assert not raw.endswith(LAST), "it does not look whole"
        until(lambda: script.report[0].closed == 1 and not served.connections)
    assert len(script.client_request) == 1
    assert not caplog.records


def test_garbage_behind_unstarted_requests_ends_all_of_them_and_fills_no_log(served, script, caplog):
    with caplog.at_level(logging.ERROR):
        for first in (HEALTH, REQUESTED):
            raw = served.raw(first + HEALTH + GARBAGE)
            assert raw.count(b"HTTP/1.1") <= 1
            raw = served.raw(first + GARBAGE)
            assert raw.count(b"HTTP/1.1") <= 1
        until(lambda: not served.connections and all(reported.closed for reported in script.report))
    assert not caplog.records
