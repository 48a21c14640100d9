"""Raw bytes at a real server: smuggling, floods, slow and vanishing clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import pytest
from edge_serving import SECRET, Report, Script, Served, chat, config, everything, parsed

BODY = json.dumps(chat()).encode()
HEAD = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n".encode()
SMUGGLED = b"GET /v1/models/smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD_1_0 = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")


def complete(body=BODY, extra=b""):
    return HEAD + extra + b"Content-Length: %d\r\n\r\n" % len(body) + body


def until(message, within_s=20.0):
    end = time.monotonic() + within_s
    while not message():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "extra",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + SMUGGLED,
        b"Content-Length: 0\r\nContent-Length: 44\r\n\r\n" + SMUGGLED,
        b"Content-Length: 0, 44\r\n\r\n" + SMUGGLED,
        b"Content-Length: +5\r\n\r\n" + SMUGGLED,
        b"Content-Length : 5\r\n\r\n" + SMUGGLED,
        b"Content-Length: 5\r\n 0\r\n\r\n" + SMUGGLED,
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
        b"Transfer-Encoding: chunked\r\n\r\n5;\n\r\n" + SMUGGLED,
        b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffff\r\n" + SMUGGLED,
        b"X-A: a\rX-Priority: 1\r\n\r\n" + SMUGGLED,
        b"X-A: a\x00b\r\n\r\n" + SMUGGLED,
        b"X A: b\r\n\r\n" + SMUGGLED,
    ],
)
def test_requests_of_two_lengths_are_one_error_and_nothing_more(served, extra):
    before = len(served.script.client_request)
    raw = served.raw(HEAD + extra)
    assert raw.count(b"HTTP/1.1 ") == 1, raw
    status, headers, body = parsed(raw)
    assert (status, headers["connection"], body["error"]["type"]) == (400, "close", "invalid_request_error")
    assert b"smuggled" not in raw
    assert len(served.script.client_request) == before


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "bad_host"),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400, "bad_host"),
        (b"GET /health HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", 400, "bad_host"),
        (b"GET /health HTTP/1.1\r\nHost: a b/c@d\r\n\r\n", 400, "bad_host"),
        (b"GET /health HTTP/1.1\r\nHost: a/b\r\n\r\n", 400, "bad_host"),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431, "headers_too_large"),
        (b"GET /health\r\n\r\n", 505, "http_version"),
        (b"GET /health HTTP/0.9\r\nHost: a\r\n\r\n", 505, "http_version"),
        (b"GET /health HTTP/1.2\r\nHost: a\r\n\r\n", 505, "http_version"),
        (b"GET /health HTTP/2.0\r\nHost: a\r\n\r\n", 505, "http_version"),
        (b"GET /health HTTP/3.0\r\nHost: a\r\n\r\n", 505, "http_version"),
        (b"GET /health HTTPS\r\nHost: a\r\n\r\n", 400, "invalid_http"),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED, 400, "bad_transfer_encoding"),
        (HEAD_1_0 + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED, 400, "bad_transfer_encoding"),
    ],
)
def test_a_request_without_one_host_or_with_other_framing_is_an_error(served, head, status, code):
    raw = served.raw(head)
    assert raw.count(b"HTTP/1.1 ") == 1
    reported, headers, body = parsed(raw)
    assert (reported, headers["connection"], body["error"]["code"]) == (status, "close", code)


@pytest.mark.parametrize("stream", [False, True])
def test_an_http_1_0_client_gets_a_body_without_chunked_framing(served, stream):
    body = json.dumps(chat(stream=stream)).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nAuthorization: Bearer {SECRET}\r\nExpect: 100-continue\r\n".encode()
    raw = served.raw(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    status, headers, reported = parsed(raw)
    assert (status, headers["connection"]) == (200, "close")
    assert "transfer-encoding" not in headers
    assert ("content-length" in headers) is not stream
    if stream:
        assert reported == b"".join(served.script.report[-1].pieces)
    else:
        assert reported["choices"][0]["message"]["content"] == "Hi there"
    assert served.raw(b"GET /health HTTP/1.0\r\n\r\n").endswith(b'{"status":"ok"}')


def test_pipelined_requests_are_answered_in_order(served):
    last = complete(extra=b"X-Request-Id: two\r\nConnection: close\r\n")
    raw = served.raw(complete(extra=b"X-Request-Id: one\r\n") + last)
    assert raw.count(b"HTTP/1.1 200") == 2
    assert raw.index(b"x-request-id: one") < raw.index(b"x-request-id: two")


def test_a_chunked_body_is_a_body(served):
    chunks = b"".join(b"%x\r\n%s\r\n" % (1, BODY[i : i + 1]) for i in range(len(BODY))) + b"0\r\n\r\n"
    raw = served.raw(HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunks)
    assert parsed(raw)[0] == 200
    assert served.script.client_request[-1].body == BODY


def test_an_upgrade_that_is_offered_is_not_taken(served, caplog):
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    raw = served.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\n" + SMUGGLED)
    assert (parsed(raw)[0], parsed(raw)[1]["connection"], raw.count(b"HTTP/1.1 ")) == (200, "close", 1)
    status, _, body = parsed(served.raw(complete(extra=offer)))
    assert (status, body["error"]["code"]) == (400, "upgrade_not_offered")
    served.raw(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n")
    assert "uvicorn[standard]" not in caplog.text


@pytest.mark.parametrize(
    "head",
    [
        b"X-Long: " + b"a" * 9000 + b"\r\n\r\n",
        b"X-Long: " + b"a" * 400_000,
        b"".join(b"X-%d: %s\r\n" % (i, b"b" * 300) for i in range(39)) + b"\r\n",
        b"".join(b"X-%d: b\r\n" % i for i in range(60)) + b"\r\n",
        b"".join(b"X-%d: b\r\n" % i for i in range(200_000)),
    ],
)
def test_heads_have_an_end(served, head):
    status, headers, body = parsed(served.raw(HEAD + head))
    assert (status, body["error"]["code"]) == (431, "headers_too_large")
    assert headers["connection"] == "close"


@pytest.mark.parametrize("report", [True, False])
def test_bodies_have_an_end(served, report):
    big = json.dumps(chat(z="x" * 250_000)).encode()
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(big), big)
    before = len(served.script.client_request)
    status, _, body = parsed(served.raw(complete(big) if report else HEAD + chunked))
    assert (status, body["error"]["code"]) == (413, "body_too_large")
    assert len(served.script.client_request) == before


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"POST /v1/chat", HEAD, HEAD + b"Content-Length: 99\r\n\r\n{"])
def test_what_comes_too_slowly_is_cut_off(impatient, stalls, sent):
    started = time.monotonic()
    raw = impatient.raw(sent)
    assert 0.2 < time.monotonic() - started < 4 + stalls.lost_s
    assert parsed(raw)[0] == 408


def test_dripping_bytes_do_not_help(impatient, stalls):
    with impatient.socket() as line:
        started = time.monotonic()
        line.sendall(HEAD + b"Content-Length: 5000\r\n\r\n{")
        with contextlib.suppress(OSError):
            while time.monotonic() - started < 20:
                line.sendall(b" ")
                time.sleep(0.1)
        assert time.monotonic() - started < 4 + stalls.lost_s


def test_connections_are_counted():
    with Served(config(connections=3)) as served:
        in_use = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(3)]
        until(lambda: len(served.server.server_state.connections) == 3)
        status, headers, body = parsed(served.raw(b""))
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "overloaded", "1")
        for line in in_use:
            line.close()
        until(lambda: not served.server.server_state.connections)
        assert served.submit(b"", path="/health", method="GET")[0] == 200


def test_a_client_that_disconnects_while_waiting_is_dropped():
    script = Script()
    with Served(config(), script) as served:
        script.answers = [asyncio.Event()]
        with served.socket() as line:
            line.sendall(complete())
            until(lambda: script.client_request)
            assert served.app.in_flight == 1
        until(lambda: script.waiting_cancelled == 1)
        until(lambda: served.app.in_flight == 0)


def test_a_client_that_disconnects_mid_stream_stops_the_stream():
    script = Script()
    answer = Report([b"data: x\n\n"] * 1000, kind=b"text/event-stream", pause_s=0.02, length=False)
    with Served(config(), script) as served:
        script.answers = [answer]
        with served.socket() as line:
            line.sendall(complete(json.dumps(chat(stream=True)).encode()))
            until(lambda: answer.sent > 2)
        until(lambda: answer.closed)
        assert answer.cancelled
        assert answer.sent < 100
        assert served.app.in_flight == 0


def test_a_client_that_disconnects_mid_body_is_forgotten(served):
    before = len(served.script.client_request)
    with served.socket() as line:
        line.sendall(HEAD + b"Content-Length: 99\r\n\r\n{")
    assert served.submit(chat())[0] == 200
    assert len(served.script.client_request) == before + 1


def test_a_stalled_reader_blocks_the_answer_and_is_dropped():
    piece = b"x" * 65_536
    answer = Report([piece] * 2000, kind=b"text/event-stream", length=False)
    with Served(config(body_s=0.5), Script(answers=[answer])) as served, served.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        line.sendall(complete(json.dumps(chat(stream=True)).encode()))
        until(lambda: answer.closed, 8)
        assert answer.sent < 1000, "it must not be buffered"
        assert served.app.in_flight == 0


def test_a_slow_reader_gets_all_of_it():
    pieces = [bytes([65 + i % 26]) * 30_000 for i in range(100)]
    answer = Report(pieces, length=True)
    with Served(config(body_s=0.5), Script(answers=[answer])) as served, served.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        line.sendall(complete(extra=b"Connection: close\r\n"))
        got = b""
        while piece := line.recv(65_536):
            got += piece
            time.sleep(0.01)
        assert got.partition(b"\r\n\r\n")[2] == b"".join(pieces)


@pytest.mark.parametrize("length", [True, False])
def test_an_answer_that_breaks_off_is_not_taken_for_a_complete_one(length, caplog):
    answer = Report([b"{"], length=False)
    answer.pieces.append(RuntimeError("broken"))
    if length:
        answer.headers.append((b"content-length", b"10"))
    with Served(config(), Script(answers=[answer])) as served, served.socket() as line:
        line.sendall(complete())
        raw = everything(line)
        assert not raw.endswith(b"0\r\n\r\n")
        assert len(raw.partition(b"\r\n\r\n")[2]) < 10
        assert answer.closed == 1
        assert served.submit(chat(), secret=None)[0] == 200


def test_headers_of_an_answer_that_belong_to_a_connection_stay_behind():
    answer = Report([b"{}"])
    answer.headers += [(b"Connection", b"close"), (b"Server", b"engine"), (b"X-Request-Id", b"its"), (b"x-it", b"1")]
    with Served(config(), Script(answers=[answer])) as served, served.socket() as line:
        line.sendall(complete(extra=b"X-Request-Id: mine\r\n"))
        head = line.recv(65_536)
        assert b"engine" not in head
        assert b"its" not in head
        assert b"close" not in head
        assert b"x-it: 1" in head


class Late(Report):
    """An answer whose first piece comes when the client has the head."""

    head_came = False

    async def __aiter__(self):
        while not self.head_came:  # noqa: ASYNC110 - the client is in another thread
            await asyncio.sleep(0.01)
        yield self.pieces[0]


def test_a_head_goes_with_the_first_piece_or_alone_where_that_is_late():
    late = Late([b"data: x\n\n"], kind=b"text/event-stream", length=False)
    with Served(config(), Script(answers=[late])) as served, served.socket() as line:
        line.sendall(complete())
        assert line.recv(65_536).endswith(b"\r\n\r\n")
        late.head_came, got = True, b""
        while not got.endswith(b"0\r\n\r\n"):
            got += line.recv(65_536)
        assert got.startswith(b"9\r\ndata: x")
        line.sendall(complete())
        assert b"Hi there" in line.recv(65_536)


def test_an_expect_continue_request_is_answered(served):
    with served.socket() as line:
        line.sendall(HEAD + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        assert line.recv(65_536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        line.sendall(BODY)
        assert parsed(everything(line))[0] == 200


def test_garbage_does_not_fill_the_log():
    import logging

    from lengthwise.gateway.edge.http_server import RateLimitedWarnings

    def reported(text, at_s, level=logging.WARNING):
        record = logging.LogRecord("uvicorn.error", level, "", 0, text, (), None)
        record.created = at_s
        return seldom.filter(record)

    seldom = RateLimitedWarnings()
    assert [reported("Invalid HTTP request received.", 100.0 + k) for k in range(12)] == [
        k in (0, 10) for k in range(12)
    ]
    assert reported("something else", 101.0)
    assert reported("an error", 101.0, logging.ERROR)
    assert not reported("an error", 102.0, logging.ERROR)


def test_requests_that_fail_in_the_gateway_do_not_fill_the_log(served, caplog):
    """Whatever a client sends to provoke them: one line for each kind of error."""
    one, other = (type(f"{name}{id(caplog)}", (Exception,), {}) for name in ("One", "Other"))
    served.script.answers += [one("a"), one("b"), one("c"), other("d")]
    assert [served.submit(chat())[0] for _ in range(4)] == [500] * 4
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a", "d"]


def test_an_idle_connection_stays_open_for_its_time_and_is_then_closed():
    with Served(config(idle_s=0.6)) as served, served.socket() as line:
        for pause_s in (0.0, 0.2):
            time.sleep(pause_s)
            line.sendall(complete())
            assert line.recv(65_536).startswith(b"HTTP/1.1 200")
        started = time.monotonic()
        assert line.recv(1) == b"", "closed, and nothing said"
        assert time.monotonic() - started > 0.4


def test_an_idle_connection_stays_open_longer_than_in_pools_and_proxies():
    """Closed earlier by the server than by who asks, a request may meet the close."""
    with Served(config()) as served:
        assert served.keep_alive_s > 60
