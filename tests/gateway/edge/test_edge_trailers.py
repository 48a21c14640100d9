"""What comes behind a chunked body is no header: a proxy that looks at heads alone has not seen it."""

from __future__ import annotations

import json

import pytest
from edge_serving import SECRET, Served, a_key, chat, config, everything, parsed

from lengthwise.gateway import edge

BODY = json.dumps(chat()).encode()
KEY = f"Authorization: Bearer {SECRET}\r\n".encode()


def requested(served, head: bytes, trailer: bytes, *, at_once: bool) -> int:
    """The status for a request with so much more in its head, and behind its body."""
    start = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    first = start + head + b"Transfer-Encoding: chunked\r\n\r\n"
    rest = b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(BODY), BODY, trailer)
    if at_once:
        return parsed(served.raw(first + rest))[0]
    with served.socket() as line:
        for piece in (first, rest):
            line.sendall(piece)
        return parsed(line.recv(1 << 16))[0]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_key_behind_a_body_is_none(served, at_once):
    assert requested(served, KEY, b"", at_once=at_once) == 200
    assert requested(served, b"", KEY, at_once=at_once) == 401


def test_nothing_behind_a_body_names_a_session_or_a_request(served):
    trailer = b"X-Session-Id: theirs\r\nX-Request-Id: theirs\r\nX-Request-Timeout-S: 0\r\n"
    assert requested(served, KEY + b"X-Session-Id: mine\r\n", trailer, at_once=True) == 200
    last = served.script.client_request[-1]
    assert (last.client.session, last.body) == ("mine", BODY)
    assert dict(last.headers)["X-Request-Id"] != "theirs"


def test_an_address_behind_a_body_is_not_believed():
    proxied = Served(config(a_key()))
    proxied.server = edge.server(proxied.app, config().limits, drain_s=1, proxies="127.0.0.1")
    with proxied:
        head = KEY + b"X-Forwarded-For: 10.0.0.1\r\n"
        assert requested(proxied, head, b"X-Forwarded-For: 10.0.0.2\r\n", at_once=True) == 200
        assert proxied.script.client_request[-1].client.address == "10.0.0.1"


@pytest.mark.parametrize("trailer", [b"X: " + b"a" * (1 << 20), b"X: a\r\n" * (1 << 18)], ids=["long", "many"])
@pytest.mark.parametrize("method", [b"POST", b"GET"])
def test_trailers_have_the_limit_of_a_head(served, method, trailer):
    """httptools joins a long header piece by piece, which takes quadratic time."""
    path = b"/v1/chat/completions" if method == b"POST" else b"/health"
    head = b"%s %s HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\n\r\n" % (method, path, KEY)
    with served.socket() as line:
        line.sendall(head + b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY))
        came = b""
        if method == b"GET":  # the answer does not wait for the body
            while not came.endswith(b"}"):
                came += line.recv(1 << 16)
        try:
            for at in range(0, len(trailer), 1 << 14):
                line.sendall(trailer[at : at + (1 << 14)])
        except OSError:
            pass
        else:
            came += everything(line)
            assert b"HTTP/1.1 431 " in came
            assert b"connection: close" in came


def test_a_body_of_many_small_chunks_is_no_trailer(served):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + KEY
    body = json.dumps(chat(user="x" * 100_000)).encode()
    chunks = b"".join([b"1;%b\r\n%c\r\n" % (b"e" * 9, one) for one in body])
    raw = served.raw(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nX: " + b"a" * 9000 + b"\r\n\r\n")
    assert parsed(raw)[0] == 200
