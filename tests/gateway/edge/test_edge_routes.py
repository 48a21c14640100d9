"""What is served where, and errors in OpenAI's form, over a real server."""

from __future__ import annotations

import json

import pytest
from edge_serving import SECRET, Script, Served, a_key, chat, config, parsed, sha

from lengthwise.gateway.apis import APIS
from lengthwise.gateway.edge import Fault, Tenants
from lengthwise.gateway.protocols import Listener
from lengthwise.gateway.request import Refusal
from lengthwise.gateway.telemetry import Telemetry


def test_a_chat_goes_to_the_exchange_untouched_and_its_answer_back(served):
    body = json.dumps(chat(temperature=0.5, unknown={"a": [1]})).encode()
    status, headers, answer = served.submit(
        body, x_request_id="mine-1", x_session_id="s-7", x_vllm_priority="-9", x_data_parallel_rank="0",
        x_request_priority="1", traceparent=f"00-{'a' * 32}-{'b' * 16}-01", accept="*/*", cookie="c=1",
    )  # fmt: skip
    requested = served.script.client_request[-1]
    assert (status, headers["x-request-id"]) == (200, "mine-1")
    assert answer["choices"][0]["message"]["content"] == "Hi there"
    assert (requested.body, requested.text, requested.client.session, requested.client.tenant) == (
        body,
        "Say hi",
        "s-7",
        1,
    )
    assert dict(requested.headers) == {
        "Content-Type": "application/json", "X-Request-Id": "mine-1", "Accept": "*/*", "X-Session-Id": "s-7",
        "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
    }  # fmt: skip
    assert requested.client.address == "127.0.0.1"
    assert served.script.report[-1].closed == 1


def test_a_stream_comes_in_events(served):
    status, headers, events = served.submit(chat(stream=True))
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    assert headers["transfer-encoding"] == "chunked"
    assert events.count(b"data: ") == 3
    assert events.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        *[
            ("POST", path, 404, "unknown_url")
            for path in (
                "/", "/metrics", "/sleep", "/v1/sleep", "/v1/moderations", "/v1/chat/completions/", "//v1/completions",
                "/v1/chat/../../sleep", "/v1/chat/%2e%2e/completions", "/v1%2Fcompletions", "/v1/%63ompletions",
                "/V1/completions", "/v1/completions;x=1", "/v1/chat/completions/%2e%2e/%2e%2e/sleep",
            )
        ],
        ("GET", "/v1/models/", 404, "unknown_url"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
        ("GET", "/v1/models/../../sleep", 404, "model_not_found"),
        ("GET", "/v1/models/%2e%2e%2fsleep", 404, "model_not_found"),
        ("POST", "http://169.254.169.254/v1/completions", 400, "bad_target"),
        ("POST", "http://x/sleep", 400, "bad_target"),
        ("OPTIONS", "*", 400, "bad_target"),
    ],
)  # fmt: skip
def test_only_listed_addresses_are_served(served, method, path, status, code):
    before = len(served.script.client_request)
    got, headers, body = served.submit(chat(), path=path, method=method)
    assert (got, body["error"]["code"]) == (status, code)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (status != 405) or headers["allow"]
    assert len(served.script.client_request) == before


def test_queries_are_neither_needed_nor_passed_on(served):
    assert served.submit(chat(), path="/v1/chat/completions?api-version=1&x=../sleep")[0] == 200


def test_head_returns_the_headers_of_get(served):
    _, get, body = served.submit(b"", path="/v1/models", method="GET")
    status, head, nothing = served.submit(b"", path="/v1/models", method="HEAD")
    assert (status, nothing) == (200, b"")
    assert head["content-length"] == get["content-length"]
    assert [model["id"] for model in body["data"]] == ["tiny", "org/large"]


@pytest.mark.parametrize("path", ["/v1/models/org/large", "/v1/models/org%2Flarge"])
def test_a_model_with_a_slash_is_found(served, path):
    assert served.submit(b"", path=path, method="GET")[2]["id"] == "org/large"


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"authorization": "Bearer nope"}, 401, "invalid_api_key"),
        ({"authorization": "Basic eDp5"}, 401, "invalid_api_key"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        ({"content-type": "application/json; charset=latin-1"}, 415, "unsupported_media_type"),
        ({"content-encoding": "gzip"}, 415, "unsupported_media_type"),
        ({"content-type": "application/json;charset=UTF-8", "x-request-id": "a b"}, 200, None),
        ({"content-type": "application/json\r\ncontent-type: text/plain"}, 400, "duplicate_header"),
    ],
)
def test_headers_decide(served, headers, status, code):
    got, reported, body = served.submit(chat(), **headers)
    assert (got, body.get("error", {}).get("code")) == (status, code)
    assert reported["x-request-id"].startswith("req-")


def test_a_missing_key_is_requested_and_the_secret_is_not_repeated(served):
    status, headers, body = served.submit(chat(), secret=None)
    assert (status, headers["www-authenticate"], body["error"]["code"]) == (401, "Bearer", "missing_api_key")
    assert b"sk-wrong-one" not in json.dumps(served.submit(chat(), secret="sk-wrong-one")[2]).encode()


def test_a_model_is_listed_as_its_engine_lists_it():
    entries = {"tiny": {"created": 7, "owned_by": "vllm", "max_model_len": 4096}}
    with Served(config(), entries=lambda: entries) as served:
        found = {one["id"]: one for one in served.submit(b"", path="/v1/models", method="GET")[2]["data"]}
        assert found["tiny"] == {"id": "tiny", "object": "model"} | entries["tiny"]
        assert found["org/large"]["owned_by"] == "lengthwise"
        assert served.submit(b"", path="/v1/models/tiny", method="GET")[2] == found["tiny"]


def test_a_key_sees_its_models_alone():
    with Served(config(a_key(models=("tiny",)))) as served:
        entries = served.submit(b"", path="/v1/models", method="GET")[2]["data"]
        hidden, missing = (served.submit(chat(model=name))[2] for name in ("org/large", "no-model"))
        assert [model["id"] for model in entries] == ["tiny"]
        assert served.submit(b"", path="/v1/models/org/large", method="GET")[0] == 404
        assert served.submit(chat())[0] == 200
        assert json.dumps(hidden).replace("org/large", "no-model") == json.dumps(missing)
        assert len(served.script.client_request) == 1


def test_the_rate_limit_of_a_key_is_reported_and_enforced():
    with Served(config(a_key(rate_rps=0.001, burst=2))) as served:
        left = [served.submit(chat())[1]["x-ratelimit-remaining-requests"] for _ in range(2)]
        status, headers, body = served.submit(chat())
        assert (left, status) == (["1", "0"], 429)
        assert body["error"]["code"] == "rate_limit_exceeded"
        assert 900 < int(headers["retry-after"]) <= 1000


def test_what_the_exchange_refuses_and_what_fails_in_it():
    class NotServedError(Exception):
        refusal = Refusal(429, "wait", "The queue is too long.", 12.3)

    received = []

    class Ear(Listener):
        def refused(self, reason, refusal, tenant, model):
            received.append(reason)

    script = Script(answers=[NotServedError(), RuntimeError("a secret prompt"), Fault(429, "wait", "Later.")])
    with Served(config(), script, listener=Ear()) as served:
        status, headers, body = served.submit(chat(), secret=None)
        assert (status, headers["retry-after"], body["error"]["message"]) == (429, "13", "The queue is too long.")
        status, headers, body = served.submit(chat(), secret=None)
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert "secret" not in json.dumps(body)
        assert received == [], "the exchange tells of its own"
        assert served.submit(chat(), secret=None)[1]["retry-after"] == "1"
        assert served.app.in_flight == 0


def test_refusals_before_a_key_is_accepted_are_of_no_tenant():
    config_of = config(a_key(rate_rps=0.001, burst=1))
    telemetry = Telemetry(config_of, tenants=(tenants := Tenants()))
    with Served(config_of, listener=telemetry, tenants=tenants) as served:
        assert served.submit(chat(), secret=None)[0] == 401
        assert served.submit(chat(), secret="sk-wrong")[0] == 401
        assert parsed(served.raw(b"no HTTP\r\n\r\n"))[0] == 400
        assert [served.submit(chat())[0] for _ in range(2)] == [200, 429]
    refused = ("refused", "other")
    assert telemetry.metrics.requests == {(*refused, "unauthenticated"): 3, (*refused, "acme"): 1}
    anonymous = Telemetry(config())
    with Served(config(), listener=anonymous) as served:
        assert served.submit(chat(messages=[]), secret=None)[0] == 400
    assert anonymous.metrics.requests == {(*refused, "anonymous"): 1}


def test_readiness_and_draining():
    up = []
    received = []

    class Ear(Listener):
        def refused(self, reason, refusal, tenant, model):
            received.append((reason, refusal.status))

    with Served(config(), ready=lambda: bool(up), listener=Ear()) as served:
        assert served.submit(b"", path="/ready", method="GET", secret=None)[0] == 503
        up.append(1)
        assert served.submit(b"", path="/ready", method="GET", secret=None)[0] == 200
        served.app.draining = True
        status, headers, _ = served.submit(b"", path="/ready", method="GET", secret=None)
        assert (status, headers["retry-after"]) == (503, "1")
        assert served.submit(b"", path="/health", method="GET", secret=None)[0] == 200
        status, headers, body = served.submit(chat(), secret=None)
        assert (status, body["error"]["code"], headers["connection"]) == (503, "draining", "close")
    assert received == [("not_ready", 503), ("not_ready", 503), ("draining", 503)]


def test_other_keys_hold_from_the_next_request_on(served):
    with Served(config(a_key())) as own:
        assert own.submit(chat())[0] == 200
        own.app.configure(config(a_key(sha256=sha("sk-new")), messages=1))
        assert own.submit(chat())[0] == 401
        two = chat(messages=[{"role": "user", "content": "a"}] * 2)
        assert own.submit(two, secret="sk-new")[2]["error"]["param"] == "messages"
    assert SECRET not in repr(own.app.__dict__)


def test_a_keys_limits_and_errors_in_the_form_of_the_api_hold_on_every_route():
    names = [name for name in APIS if not APIS[name].is_form]
    with Served(config(*(a_key(tenant=name, sha256=sha(name), rate_rps=0.001, burst=5) for name in names))) as served:
        for name in names:
            given = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi"}
            given |= {"query": "hi", "documents": ["hi"]}
            wrong = (given | {"model": "none"}, given | {"priority": 3}, b'{"model": "tiny", ', b'{"stream": true}')
            wrong += (given | {"background": True, "max_tokens": 0, "input": {"a": 1}, "documents": 5, "model": 7},)
            kinds = []
            for status, body in zip((404, 400, 400, 400, 400, 429), (*wrong, given), strict=True):
                got, _, answer = served.submit(body, path=APIS[name].path, secret=None, x_api_key=name)
                assert got == status
                kinds.append(answer["error"]["type"])
                assert answer.get("type") == ("error" if APIS[name].is_anthropic else None)
            assert kinds[-1] == ("rate_limit_error" if APIS[name].is_anthropic else "requests")
            status, _, answer = served.submit(given, path=APIS[name].path, secret="sk-wrong")
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert not served.script.client_request


MODEL = b'Content-Disposition: form-data; name="model"\r\n\r\ntiny'


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([MODEL], 200),
        ([b'Content-Type: text/plain\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny'], 200),
        ([MODEL] * 2, 400),
        ([MODEL, b"X: y\r\n\r\nz"], 400),
        ([b'Content-Disposition: form-data; name="model"; name="other"\r\n\r\ntiny'], 400),
        ([b"Content-Disposition: form-data; name=model\r\n\r\ntiny"], 400),
        ([b'Content-Disposition: form-data; name="priority"\r\n\r\n1'], 400),
        ([b'Content-Disposition: form-data; name="Model"\r\n\r\ntiny'], 400),
        ([b'Content-Disposition: form-data; name="model"\r\n\r\nnone'], 404),
        ([MODEL, b'Content-Disposition: form-data; name="a"; filename="\\"; filename*=b\r\n\r\n1'], 400),
        ([MODEL + b"\n--b\n" + MODEL.replace(b"\r", b"")], 400),  # for a parser that ends lines with LF
        ([], 400),
    ],
)
def test_a_form_passes_only_if_no_engine_can_read_another_model_in_it(served, parts, status):
    body = b"".join([b"--b\r\n" + part + b"\r\n" for part in parts]) + b"--b--\r\n"
    path, kind = "/v1/audio/transcriptions", "multipart/form-data; boundary=b"
    assert served.submit(body, path=path, content_type=kind)[0] == status
    assert served.submit(b"before" + body, path=path, content_type=kind)[0] == 400
    for wrong in ("multipart/form-data", 'multipart/form-data; boundary="b'):
        assert served.submit(body, path=path, content_type=wrong)[0] == 415
    if status == 200:
        assert dict(served.script.client_request[-1].headers)["Content-Type"] == kind
        assert served.script.client_request[-1].body == body
