"""Bodies that cost more than they weigh, and clients that take more than their share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import random
import socket
import threading
import time
import tracemalloc

import pytest
from edge_serving import SECRET, Report, Script, Served, a_key, chat, config, parsed, sha
from hypothesis import example, given
from hypothesis import strategies as st

from lengthwise.gateway.config import Key, Limits
from lengthwise.gateway.edge.auth import Caller
from lengthwise.gateway.edge.client_request import BodyShape, RequestParser
from lengthwise.gateway.edge.errors import Fault
from lengthwise.schema.errors import InputError

OPEN = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]'
HEAD = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n".encode()
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=25,
)
MANY = 1 << 30


def of(body, api="chat", limits=None):
    return RequestParser(limits or Limits()).parse(api, body, Caller(None, 0), {}, "r-1", 5.0)


def refused(body, api="chat"):
    with pytest.raises(Fault) as caught:
        of(body, api)
    assert caught.value.status == 400
    return caught.value.code


def until(message, within_s=60.0):
    end = time.monotonic() + within_s
    while not message():
        assert time.monotonic() < end
        time.sleep(0.01)


def made_of(value):
    """Lists and objects, texts, and members of lists and objects; a text's own commas count for nothing."""
    if isinstance(value, dict):
        inner = [made_of(one) for one in value.values()]
        own = (1, len(value), max(0, len(value) - 1))
    elif isinstance(value, list):
        inner = [made_of(one) for one in value]
        own = (1, 0, max(0, len(value) - 1))
    else:
        return (0, int(isinstance(value, str)), 0)
    return tuple(map(sum, zip(own, *inner, strict=True)))


@given(JSON, st.booleans())
@example(['"', '\\"[', "\\", "[{", ",],", {"a,b": ["\\\\", '\\\\"']}], False)
def test_what_a_body_is_made_of_is_counted_exactly(value, ascii_only):
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    objects, texts, commas = made_of(value)
    most = {"levels": MANY, "objects": objects, "texts": texts, "values": commas + 1}
    assert BodyShape(**most).exceeded(body) == ""
    for name in ("objects", "texts", "values"):
        if most[name] > (name == "values"):
            assert BodyShape(**most | {name: most[name] - 1}).exceeded(body) == name


def test_pieces_of_a_long_body_are_cut_behind_what_a_backslash_stands_before():
    for shift in range(4):
        body = b'["' + b"x" * shift + b'\\\\\\",[' * 200_000 + b'",[1,2]]'
        assert json.loads(body)
        assert BodyShape(2, 2, 1, 3).exceeded(body) == ""
        assert BodyShape(1, 2, 1, 3).exceeded(body) == "levels"
        assert BodyShape(2, 2, 1, 2).exceeded(body) == "values"


def test_a_body_has_at_most_so_many_fields_and_no_more_are_read():
    many = [b'"f%d":0' % k for k in range(254)]
    assert of(b",".join([OPEN, *many]) + b"}").model == "tiny"
    assert refused(b",".join([OPEN, *many, b'"one":0']) + b"}") == "too_many_fields"
    assert refused(b",".join([OPEN, *many, b'"one":0', b'"model":"b"']) + b"}") == "too_many_fields"


@pytest.mark.parametrize(
    ("api", "start", "member", "end"),
    [
        ("chat", b'{"model":"m","messages":[', b'{"role":""}', b"]}"),
        ("chat", b'{"model":"m","messages":[{"role":"u","content":[', b'"a"', b"]}]}"),
        ("chat", b'{"model":"m","messages":[{"role":"u","content":[', b"{}", b"]}]}"),
        ("chat", OPEN + b',"z":[', b"[]", b"]}"),
        ("chat", OPEN + b',"stop":[', b'"a"', b"]}"),
        ("chat", OPEN + b',"vllm_xargs":{', b'"a":0', b"}}"),
        ("chat", OPEN + b',"priority":[', b"{}", b"]}"),
        ("completions", b'{"model":"m","prompt":[', b"[1]", b"]}"),
        ("completions", b'{"model":"m","prompt":[', b"1", b"]}"),
    ],
)
def test_a_body_of_a_million_small_things_is_refused_before_they_are_made(api, start, member, end):
    assert refused(start + b",".join([member] * 1_100_000) + end, api) == "too_many_values"


def test_large_bodies_that_are_meant_so_are_taken():
    ids = b'{"model":"m","prompt":[' + b",".join([b"31415"] * 1_000_000) + b"]}"
    assert of(ids, "completions").prompt_tokens == 1_000_000
    code = '{"a": [1, 2], "b\\": ["}, ' * 200_000
    assert of(json.dumps(chat(messages=[{"role": "user", "content": code}])).encode()).text == code
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [call]}
    assert of(json.dumps(chat(messages=[turn] * 4096)).encode()).model == "tiny"


def test_a_long_body_is_parsed_off_the_event_loop_and_its_client_may_disconnect(monkeypatch):
    script, submitted = Script(), []
    body = json.dumps(chat(messages=[{"role": "user", "content": "[,\\" * 600_000}])).encode()
    with Served(config(a_key()), script) as served:
        assert served.submit(body)[0] == 200
        assert served.submit(body[:-1])[2]["error"]["code"] == "invalid_json"
        assert script.client_request[0].body == body
        started, gate, submit = threading.Event(), threading.Event(), served.app.parser_thread.submit
        submit(lambda: (started.set(), gate.wait(60)))
        assert started.wait(60)
        monkeypatch.setattr(served.app.parser_thread, "submit", lambda *work: submitted.append(1) or submit(*work))
        with served.socket() as line:
            line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: submitted)
        until(lambda: served.app.body_budget.used_bytes == 0)
        gate.set()
        assert served.submit(chat())[0] == 200
        assert len(script.client_request) == 2, "who left is not asked for"


def test_requests_share_a_budget_and_give_back_what_they_had():
    script = Script(answers=[gate := asyncio.Event()])
    keys = a_key(), a_key(tenant="others", sha256=sha("sk-other"))
    with Served(config(*keys, body_bytes=60_000, body_budget_bytes=200_000), script) as served:
        with served.socket() as waiting, served.socket() as reading:
            body = json.dumps(chat(z="x" * 50_000)).encode()
            waiting.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: script.client_request)
            in_use = script.client_request[0].memory_bytes
            assert 2 * len(body) < in_use < 2.1 * len(body), "once as it came and once parsed"
            other = HEAD.replace(SECRET.encode(), b"sk-other")
            reading.sendall(other + b"Content-Length: 50000\r\n\r\n{" + b" " * 45_000)
            until(lambda: served.app.body_budget.used_bytes == in_use + 45_001)
            third = json.dumps(chat(z="x" * 55_000)).encode()
            status, headers, reported = served.submit(third, secret="sk-other")
            assert (status, reported["error"]["code"], headers["retry-after"]) == (429, "body_share_exceeded", "1")
            assert headers["connection"] == "close"
            assert served.app.body_budget.used_bytes == in_use + 45_001
            served.loop.call_soon_threadsafe(gate.set)
            assert waiting.recv(65_536).startswith(b"HTTP/1.1 200")
            until(lambda: served.app.body_budget.used_bytes == 45_001)
            assert served.submit(body)[0] == 200
        until(lambda: served.app.body_budget.used_bytes == 0)
        assert not served.app.body_budget.used_by


def test_a_small_client_is_also_refused_when_the_body_budget_is_exhausted():
    keys = [a_key(tenant=f"t{k}", sha256=sha(f"sk-{k}")) for k in range(6)]
    with Served(config(*keys, body_bytes=60_000, body_budget_bytes=200_000)) as served:
        with contextlib.ExitStack() as lines:
            for k in range(4):
                line = lines.enter_context(served.socket())
                head = HEAD.replace(SECRET.encode(), b"sk-%d" % k)
                line.sendall(head + b"Content-Length: 49000\r\n\r\n{" + b" " * 47_000)
            until(lambda: served.app.body_budget.used_bytes == 4 * 47_001)
            body = json.dumps(chat(z="x" * 14_000)).encode()
            status, headers, reported = served.submit(body, secret="sk-4")
            assert (status, reported["error"]["code"], headers["retry-after"]) == (503, "overloaded", "1")
            head = HEAD.replace(SECRET.encode(), b"sk-4")
            chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
            assert parsed(served.raw(head + chunked))[0] == 503, "where no length is declared too"
            small = json.dumps(chat(z="x" * 9_000)).encode()
            assert served.submit(small, secret="sk-5")[0] == 503, "it came, but what it holds does not fit"
            assert served.submit(chat(), secret="sk-5")[0] == 200, "a small one fits"
        until(lambda: served.app.body_budget.used_bytes == 0)


def test_without_keys_an_address_has_a_quarter_and_a_request_alone_fits_always():
    script = Script(answers=[gate := asyncio.Event()])
    with Served(config(body_bytes=60_000, body_budget_bytes=80_000), script) as served:
        with served.socket() as waiting:
            body = json.dumps(chat(z="x" * 50_000)).encode()
            waiting.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: script.client_request)
            assert served.app.body_budget.used_bytes > 80_000
            assert served.submit(chat(), secret=None)[2]["error"]["code"] == "body_share_exceeded"
            served.loop.call_soon_threadsafe(gate.set)
            assert waiting.recv(65_536).startswith(b"HTTP/1.1 200")
        until(lambda: served.app.body_budget.used_bytes == 0)
        assert served.submit(chat(), secret=None)[0] == 200


def test_a_request_reserves_its_body_budget_until_its_answer_has_finished():
    answer = Report([b"data: x\n\n"] * 1000, kind=b"text/event-stream", pause_s=0.02, length=False)
    with Served(config(), script := Script(answers=[answer])) as served:
        with served.socket() as line:
            body = json.dumps(chat(stream=True)).encode()
            line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: answer.sent > 2)
            assert served.app.body_budget.used_bytes == script.client_request[0].memory_bytes > len(body)
            assert served.app.in_flight == 1
        until(lambda: served.app.body_budget.used_bytes == 0)


def long_prompt(text):
    return json.dumps(chat(messages=[{"role": "user", "content": text}]), ensure_ascii=False).encode()


def with_tools(tools):
    return json.dumps(chat(tools=tools), separators=(",", ":")).encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("api", "body", "most"),
    [
        ("chat", long_prompt('hello, wor"' * 70_000), 1.1),
        ("chat", long_prompt("\U0001f600" + "hello wor " * 80_000), 1.1),
        ("chat", long_prompt("\u4f60\u597d, " * 100_000), 1.8),
        ("chat", json.dumps(chat(suffix="\U0001f600" + "a" * 500_000)).encode(), 1.1),
        ("chat", with_tools([{"a": k} for k in range(30_000)]), 1.3),
        ("chat", with_tools([[]] * 30_000), 2.5),
        ("chat", with_tools({f"k{k}": 1.5 for k in range(60_000)}), 1.3),
        ("chat", long_prompt("Tell me a joke. " * 40), 1.5),
        ("completions", b'{"model":"tiny","prompt":%s}' % str(list(range(99_000, 299_000))).encode(), 1.5),
        ("completions", b'{"model":"tiny","prompt":[%s]}' % b",".join([b"9"] * 300_000), 5),
    ],
)
def test_what_a_request_holds_is_never_more_than_is_counted_and_not_much_less(api, body, most):
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        request = of(bytes(bytearray(body)), api)
        request.fields()
        gc.collect()
        in_use = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert in_use <= request.memory_bytes + 2048, "the record of a request is no part of it"
    assert request.memory_bytes <= most * in_use


def test_a_budget_holds_at_least_one_body():
    with pytest.raises(InputError, match="body_budget_bytes must be at least body_bytes"):
        Limits(body_bytes=10, body_budget_bytes=9)


def test_a_key_has_so_many_requests_in_and_no_more():
    script = Script(answers=[gate := asyncio.Event(), gate])
    with Served(config(a_key(concurrency=2, rate_rps=0.001, burst=3)), script) as served:
        with served.socket() as one, served.socket() as two:
            body = json.dumps(chat()).encode()
            for line in (one, two):
                line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: len(script.client_request) == 2)
            status, headers, reported = served.submit(chat())
            assert (status, reported["error"]["code"]) == (429, "concurrency_limit_exceeded")
            assert headers["retry-after"] == "1"
            served.loop.call_soon_threadsafe(gate.set)
            assert one.recv(65_536).startswith(b"HTTP/1.1 200")
            assert two.recv(65_536).startswith(b"HTTP/1.1 200")
        assert served.submit(chat())[0] == 200, "a refusal took nothing of the rate"
        assert served.submit(chat())[2]["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("most", [0, -1, 1.5, True])
def test_a_concurrency_is_an_integer(most):
    with pytest.raises(InputError, match="concurrency"):
        Key("a", "", concurrency=most)


def one_of_many(served, dice):
    """A client that does what clients do; the answer that it gets does not matter here."""
    body = json.dumps(chat(stream=dice.random() < 0.5, z="x" * dice.choice([0, 0, 20_000, 300_000]))).encode()
    if dice.random() < 0.15:
        body = body.replace(b"tiny", dice.choice([b"none", b'a"', b""]))
    reported = len(body) if dice.random() < 0.8 else dice.choice([len(body) + 500, 10**7])
    cut = dice.choice([len(body), len(body), dice.randrange(len(body))])
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as line, contextlib.suppress(OSError):
        line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % reported + body[:cut])
        if dice.random() < 0.6:
            line.settimeout(dice.choice([0.01, 0.7]))
            line.recv(65_536)
        if dice.random() < 0.3:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")


def test_nothing_is_retained_for_clients_that_vanish_are_refused_or_are_late():
    script, dice = Script(), random.Random(7)
    stream = [b"data: x\n\n"] * 20
    limits = config(a_key(concurrency=6), body_s=0.3, body_bytes=400_000, body_budget_bytes=700_000, connections=60)
    with Served(limits, script) as served:
        for k in range(8):
            script.answers += [
                Report(stream, kind=b"text/event-stream", pause_s=0.01, length=False),
                RuntimeError("as planned") if k % 4 == 0 else Report([b"{}"]),
            ]
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(12) as crowd:
            list(crowd.map(lambda seed: one_of_many(served, random.Random(seed)), dice.sample(range(9999), 150)))
        (caller,) = served.app.keys.callers.values()
        until(lambda: not served.app.in_flight and not served.server.server_state.connections)
        assert (served.app.body_budget.used_bytes, caller.open) == (0, 0)
        script.answers.clear()  # what was planned for those who came too late
        assert served.submit(chat())[0] == 200


def test_a_head_that_comes_drop_by_drop_is_cut_off_on_a_connection_that_was_used_too(impatient):
    with impatient.socket() as line:
        body = json.dumps(chat()).encode()
        line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert line.recv(65_536).startswith(b"HTTP/1.1 200")
        got, sent = b"", 0
        line.settimeout(0.05)
        with contextlib.suppress(ConnectionError):
            while not got and sent < 200:
                line.sendall(HEAD[sent % len(HEAD) :][:1])
                sent += 1
                with contextlib.suppress(TimeoutError):
                    got = line.recv(65_536)
        assert parsed(got)[0] == 408
        assert sent < 100


def test_other_limits_hold_from_the_next_request_on():
    with Served(of_config := config(a_key())) as served:
        other = dataclasses.replace(of_config, limits=Limits(body_bytes=10, body_budget_bytes=10))
        served.loop.call_soon_threadsafe(served.app.configure, other)
        until(lambda: served.app.body_budget.max_bytes == 10)
        assert served.submit(chat())[0] == 413


@pytest.mark.parametrize("size", [10, 70_000, 200_000, 2_000_000])
def test_a_client_that_disconnects_while_waiting_is_noticed_whatever_the_body_length(size):
    """The end of a long body may fill what is read ahead; the gateway must go on reading, or it sees no end."""
    script = Script(answers=[asyncio.Event()])
    body = json.dumps(chat(z="x" * size)).encode()
    with Served(config(a_key(concurrency=1)), script) as served:
        with served.socket() as line:
            line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until(lambda: script.client_request)
        until(lambda: script.waiting_cancelled == 1)
        until(lambda: not served.app.in_flight)
        assert served.app.body_budget.used_bytes == 0
        assert served.submit(chat())[0] == 200


def test_connections_of_an_address_are_limited_unless_it_is_a_trusted_proxy():
    limits = config(connections_per_address=3)
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    for proxies, expected in ((None, 429), ("10.0.0.0/8", 429), ("127.0.0.1", 200), ("*", 200)):
        with Served(limits, proxies=proxies) as served, contextlib.ExitStack() as stack:
            lines = [stack.enter_context(served.socket()) for _ in range(3)]
            for line in lines:
                line.sendall(head)
                assert line.recv(4096).startswith(b"HTTP/1.1 200")
            assert parsed(served.raw(head.replace(b"x\r\n", b"x\r\nConnection: close\r\n", 1)))[0] == expected
            lines.pop().close()
            until(lambda: len(served.connections) <= 2)
            assert parsed(served.raw(head.replace(b"x\r\n", b"x\r\nConnection: close\r\n", 1)))[0] == 200


def test_requests_of_an_address_are_limited_by_the_address_that_a_trusted_proxy_names():
    now_s = 100.0
    limits = config(rate_per_address=0.3)  # three at once
    for proxies, first, second in (("127.0.0.1", "203.0.113.5", "203.0.113.6"), (None, "203.0.113.5", None)):
        with Served(limits, proxies=proxies, clock=lambda: now_s) as served:  # noqa: B023

            def status(forwarded):
                return served.submit(chat(), x_forwarded_for=forwarded)[0]

            assert [status(first) for _ in range(4)] == [200, 200, 200, 429]
            forged = f"198.51.100.9, {first}"  # a client names an address itself, and its proxy adds the true one
            assert status(forged) == 429
            if second is not None:
                assert status(second) == 200
            _, headers, body = served.submit(chat(), x_forwarded_for=first)
            assert (headers["retry-after"], body["error"]["code"]) == ("4", "rate_limit_exceeded")
            assert served.submit(b"", path="/health", method="GET")[0] == 200
            now_s += 3.4
            assert [status(first) for _ in range(2)] == [200, 429]
