"""Requests sent behind one another on one connection, before the first is answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time

import pytest
from edge_serving import SECRET, Report, Script, Served, a_key, chat, config, everything, parsed

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


def until(true, within_s=60.0):
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


@pytest.mark.parametrize(("second", "answered"), [(HEALTH, 2), (REQUESTED, 2), (CHUNKED, 1)])
def test_garbage_gets_its_error_after_all_earlier_responses(served, script, caplog, second, answered):
    """Also behind the head of a second request, whose body it then breaks."""
    script.answers.append(streamed(20))
    with caplog.at_level(logging.ERROR), served.socket() as line:
        line.sendall(REQUESTED)
        raw = b""
        while raw.count(b"data: ") < 3:
            raw += line.recv(65536)
        line.sendall(second + GARBAGE)
        raw += everything(line)
        first, more = raw.split(LAST, 1)
        assert first.count(b"data: ") == 20, "the first is whole"
        assert first.count(b"HTTP/1.1") == 1, "no second head within it"
        assert (more.count(b"HTTP/1.1 200"), more.count(b"HTTP/1.1 400")) == (answered - 1, 1)
        until(lambda: not served.connections)
    assert [reported.closed for reported in script.report] == [1] * len(script.client_request)
    assert len(script.client_request) == 1 + (second == REQUESTED)
    assert not caplog.records


@pytest.mark.parametrize("first", [HEALTH, HEALTH.replace(b"GET", b"HEAD"), REQUESTED])
@pytest.mark.parametrize("more", [0, 1, 3])
def test_requests_before_garbage_are_all_answered(served, caplog, first, more):
    with caplog.at_level(logging.ERROR):
        raw = served.raw(first + HEALTH * more + GARBAGE)
        assert (raw.count(b"HTTP/1.1 200"), raw.count(b"HTTP/1.1 400")) == (1 + more, 1)
        *_, last = raw.split(b"HTTP/1.1 ")
        status, headers, body = parsed(b"HTTP/1.1 " + last)
        assert (status, headers["connection"], body["error"]["code"]) == (400, "close", "invalid_http")
        until(lambda: not served.connections)
    assert not caplog.records


def test_a_last_response_is_followed_by_no_error(served, caplog):
    last = HEALTH.replace(b"Host: x", b"Host: x\r\nConnection: close")
    with caplog.at_level(logging.WARNING, "asyncio"):
        for data in (last + GARBAGE, HEALTH + last + GARBAGE):
            raw = served.raw(data)
            assert b"HTTP/1.1 400" not in raw
            assert raw.endswith(b'{"status":"ok"}')
        until(lambda: not served.connections)
    assert not caplog.records


def test_a_client_that_leaves_behind_garbage_ends_its_request(served, script):
    script.answers.append(asyncio.Event())
    with served.socket() as line:
        line.sendall(REQUESTED + CHUNKED + GARBAGE)
        until(lambda: script.client_request)
    until(lambda: script.waiting_cancelled == 1 and not served.connections)
