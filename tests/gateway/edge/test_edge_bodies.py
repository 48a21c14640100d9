"""What is read of bodies, and which are refused."""

from __future__ import annotations

import json
import statistics

import pytest
from edge_serving import a_key, config
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lengthwise.gateway.apis import APIS
from lengthwise.gateway.config import Limits
from lengthwise.gateway.edge.auth import Caller
from lengthwise.gateway.edge.client_request import BodyShape, RequestParser, ascii_tokens, estimate_prompt_tokens
from lengthwise.gateway.edge.errors import Fault
from lengthwise.predict.sample_files import read
from lengthwise.schema.workload import estimated_tokens

LIMITS = Limits(messages=6, n=4, max_tokens=1000, depth=8)
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=25,
)


def of(body, api="chat", headers=None, limits=LIMITS, key=None):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return RequestParser(limits).parse(api, body, Caller(key, 0), headers or {}, "r-1", 5.0)


def chat(**fields):
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


def prompt(**fields):
    return {"model": "m", "prompt": "hi", **fields}


def taken_or_refused(body, limits, api="chat"):
    try:
        return of(body, api, limits=limits)
    except Fault as fault:
        return fault


def deeper_than(body, levels):
    found = BodyShape(levels, 1 << 30, 1 << 30, 1 << 30).exceeded(body)
    assert found in ("", "levels")
    return bool(found)


def depth_of(value):
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(NESTED, st.booleans(), st.sampled_from([None, 1]))
@example(['"', '\\"[', "\\", "[{", "]"], False, None)
@example([[[["\\\\"]]], '\\\\"'], False, None)
def test_depth_is_that_of_what_is_decoded(value, ascii_only, indent):
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    depth = depth_of(value)
    assert not deeper_than(body, depth)
    assert depth == 0 or deeper_than(body, depth - 1)


@given(st.binary(max_size=60) | st.text('[]{}"\\,:1a', max_size=60).map(str.encode))
def test_nesting_depth_is_computed_without_an_error(body):
    deeper_than(body, 2)
    try:
        depth = depth_of(json.loads(body))
    except (ValueError, RecursionError):
        return
    assert deeper_than(body, 2) == (depth > 2)


def test_depth_over_several_pieces_of_a_long_body():
    wide = b"[" + b",".join([b'"]["', b"[1]"] * 200_000) + b"]"
    assert not deeper_than(wide, 2)
    assert deeper_than(wide, 1)
    assert deeper_than(b"[" * 3_000_000, 32)


@given(NESTED)
def test_a_body_of_any_json_is_taken_or_refused_by_name(value):
    for body in (value, chat(extra=value), chat(messages=value), chat(model=value), chat(stop=value, n=value)):
        outcome = taken_or_refused(body, Limits(depth=12))
        if isinstance(outcome, Fault):
            assert outcome.status == 400
            assert json.loads(outcome.body)["error"]["message"]
        else:
            assert outcome.fields() == json.loads(outcome.body)


@settings(max_examples=15)
@given(NESTED, NESTED)
def test_a_body_of_any_route_is_taken_or_refused_by_name(value, other):
    names = ("input", "messages", "system", "metadata", "query", "documents", "instructions", "tools", "tokens")
    for api in (name for name, one in APIS.items() if not one.is_form):
        body = {"model": "m", "messages": chat()["messages"], "input": value, "query": other, "documents": value}
        for name in names:
            outcome = taken_or_refused({**body, name: value}, Limits(depth=12), api)
            if isinstance(outcome, Fault):
                assert outcome.status == 400
            else:
                assert outcome.fields() == json.loads(outcome.body)


@given(st.binary(max_size=80))
def test_a_body_of_any_bytes_is_refused_in_words(body):
    with pytest.raises(Fault) as caught:
        of(b'{"model": "m", "messages": ' + body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"[]", "invalid_type"),
        (b"null", "invalid_type"),
        (b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}', "invalid_utf8"),
        (b'{"model":"m","z":"\xed\xa0\x80","messages":[{"role":"u"}]}', "invalid_utf8"),
        (b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}', "invalid_json"),
        (b'{"model":"m","messages":[{"role":"user"}],"temperature":NaN}', "invalid_json"),
        (b'{"model":"m","messages":[{"role":"user"}],"temperature":Infinity}', "invalid_json"),
        (b'{"model":"m","messages":[{"role":"user"}],"n":1e999}', "invalid_type"),
        (b'{"model":"m","messages":[{"role":"user"}],"n":' + b"9" * 9000 + b"}", "invalid_type"),
        (b'{"model":"m","messages":[{"role":"user"}]} {}', "invalid_json"),
        (b'\xef\xbb\xbf{"model":"m","messages":[{"role":"user"}]}', "invalid_json"),
        (b'{"model":"m","messages":[{"role":"user"}],"z":' + b"[" * 9 + b"]" * 9 + b"}", "too_deep"),
        (b'{"model":"m","z":' + b"[" * 2_000_000, "too_deep"),
        (b'{"model":"a","model":"b","messages":[{"role":"user"}]}', "duplicate_field"),
        (b'{"model":"a","mod\\u0065l":"b","messages":[{"role":"user"}]}', "duplicate_field"),
        (b'{"model":"a","Model":"b","messages":[{"role":"user"}]}', "misspelt_field"),
        ('{"model":"a","\u017ftream":true,"messages":[{"role":"user"}]}'.encode(), "misspelt_field"),
        (b'{"priority":null,"model":"a","messages":[{"role":"user"}],"priority":-5}', "field_not_allowed"),
        (b'{"priority":-5,"model":"a","messages":[{"role":"user"}],"priority":null}', "duplicate_field"),
    ],
)
def test_bodies_that_are_no_good(body, code):
    with pytest.raises(Fault) as caught:
        of(body)
    assert (caught.value.status, caught.value.code) == (400, code)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(model=3), "model"),
        (chat(model=""), "model"),
        (chat(model="m" * 257), "model"),
        (chat(messages=[]), "messages"),
        (chat(messages=[{"role": "user", "content": "x"}] * 7), "messages"),
        (chat(messages=[{"role": "user", "content": 3}]), "messages[0].content"),
        (chat(n=0), "n"),
        (chat(n=5), "n"),
        (chat(n=1.5), "n"),
        (chat(n=True), "n"),
        (chat(n=10**400), "n"),
        (chat(max_tokens=1001), "max_tokens"),
        (chat(max_tokens=-1), "max_tokens"),
        (chat(max_tokens=5, max_completion_tokens=1001), "max_completion_tokens"),
        (chat(stop=["x"] * 65), "stop"),
        (chat(stop=3), "stop"),
        (chat(top_logprobs=21), "top_logprobs"),
        (chat(stream="yes"), "stream"),
        (chat(user=7), "user"),
        (chat(priority=-1), "priority"),
        (chat(kv_transfer_params={"remote_host": "10.0.0.1"}), "kv_transfer_params"),
        (chat(bootstrap_host="10.0.0.1"), "bootstrap_host"),
    ],
)
def test_a_field_that_is_wrong_is_named(body, param):
    with pytest.raises(Fault) as caught:
        of(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []}, {"prompt": [1, "a"]}, {"prompt": [[]]}, {"prompt": [[1], []]}, {"prompt": ["x"] * 7},
        {"prompt": None}, {"prompt": [True]}, {"best_of": 9}, {"logprobs": 50}, {"logprobs": -1},
    ],
)  # fmt: skip
def test_prompts_that_are_no_good(fields):
    with pytest.raises(Fault) as caught:
        of(prompt(**fields), "completions")
    assert caught.value.status == 400


def test_what_is_read_of_a_chat():
    body = chat(max_tokens=7, max_completion_tokens=9.0, n=2, stream=True, user="u-1", priority=0, tools=[{"stop": 1}])
    headers = {b"x-stainless-read-timeout": b"600", b"traceparent": b"no\r\nX-Priority: 1"}
    taken = of(body, headers=headers, key=a_key(priority=3))
    assert (taken.model, taken.stream, taken.max_tokens, taken.choices, taken.client.session) == (
        "m",
        True,
        9,
        2,
        "u-1",
    )
    assert (taken.client.priority, taken.arrival_s, taken.client.deadline_s) == (3, 5.0, 605.0)
    assert taken.body == json.dumps(body).encode()
    assert taken.headers == [("Content-Type", "application/json"), ("X-Request-Id", "r-1")]


def test_nulls_count_as_absent_fields():
    nulls = dict.fromkeys(("n", "max_tokens", "stream", "stop", "user", "logprobs", "top_logprobs", "priority"))
    taken = of(chat(**nulls))
    assert (taken.max_tokens, taken.choices, taken.stream, taken.client.session) == (None, 1, False, "")


@pytest.mark.parametrize(
    ("given_prompt", "tokens", "n", "text"),
    [([5, 6, 7], 3, 2, ""), ([[5, 6], [7]], 3, 4, ""), (["a b", "c"], 4, 4, "a b\n\nc"), ("a b", 2, 2, "a b")],
)
def test_what_is_read_of_prompts(given_prompt, tokens, n, text):
    taken = of(prompt(prompt=given_prompt, n=2), "completions")
    assert (taken.choices, taken.text) == (n, text)
    assert taken.prompt_tokens == tokens or text


def test_a_chat_is_the_text_that_predictors_were_trained_on(tmp_path):
    parts = [
        {"type": "text", "text": "What is "},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text", "text": "this?"},
    ]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    file = tmp_path / "logged.jsonl"
    answered = [*messages, {"role": "assistant", "content": "A cat."}]
    file.write_text(json.dumps({"messages": answered}) + "\n")
    assert of(chat(messages=messages)).text == read(file).prompts.text[0] == "Be brief.\n\nWhat is this?"


@given(st.text(st.characters(max_codepoint=127), max_size=300))
def test_tokens_of_ascii_are_those_of_the_estimate(text):
    assert ascii_tokens(text) == estimate_prompt_tokens(text) == estimated_tokens(text)


@pytest.mark.parametrize("word", ["hello, world 12 ", "sch\u00f6ne Gr\u00fc\u00dfe, "])
def test_tokens_of_a_long_text_are_estimated_from_slices(word):
    assert estimate_prompt_tokens(word * 20_000) == pytest.approx(estimated_tokens(word * 20_000), rel=0.02)


def test_limits_of_the_configuration_hold():
    assert config(n=3).limits.n == 3
    with pytest.raises(Fault, match="from 1 to 3"):
        of(chat(n=4), limits=config(n=3).limits)


def test_choices_times_prompts_are_bounded():
    limits = Limits(n=8)
    assert of(prompt(prompt=["a"] * 16, n=8), api="completions", limits=limits).choices == 128
    with pytest.raises(Fault, match="128 outputs"):
        of(prompt(prompt=["a"] * 17, n=8), api="completions", limits=limits)
    with pytest.raises(Fault, match="128 outputs"):
        of(prompt(prompt=[[1, 2]] * 129), api="completions", limits=limits)


@pytest.mark.parametrize("name", ["lengthwise_predicted", "lengthwise_class", "lengthwise_later"])
@pytest.mark.parametrize("escaped", [False, True])
def test_clients_cannot_set_fields_that_the_gateway_sends_to_engines(name, escaped):
    body = json.dumps(chat(vllm_xargs={"other": 1, name: 2})).encode()
    with pytest.raises(Fault) as refused:
        of(body.replace(b"lengthwise", b"\\u006cengthwise") if escaped else body)
    assert refused.value.param == f"vllm_xargs.{name}"
    assert of(chat(vllm_xargs={"other": 1})).body


@pytest.mark.parametrize("number", ["1e400", "-1E+400", "9" * 5000, "9" * 250 + "e99"])
@pytest.mark.parametrize("prompt", ['"hi"', "[1,2]"])
@pytest.mark.parametrize("form", ['"temperature":%s', '"foo":{"a":[%s]}', '"stream":true,"seed":%s'])
def test_a_number_beyond_a_double_is_refused_in_any_field(number, form, prompt):
    body = '{"model":"m","prompt":' + prompt + "," + form % number + "}"
    with pytest.raises(Fault) as caught:
        of(body.encode(), api="completions")
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_what_only_looks_like_a_large_number_is_taken():
    of(prompt(prompt="1e400 " + "9" * 5000, seed=1.0e10, temperature=1e-300), api="completions")


WORDS = "some words of a text " * 5000


@pytest.mark.parametrize(
    "body",
    [
        chat(tools=[{"type": "function", "function": {"name": "f", "description": WORDS}}]),
        chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": WORDS}}]}]),
        chat(messages=[{"role": "user", "content": "hi", "name": WORDS}]),
        chat(chat_template_kwargs={"system": WORDS}),
        prompt(suffix=WORDS),
    ],
    ids=["tools", "arguments", "name", "template", "suffix"],
)
def test_text_outside_of_messages_counts_as_prompt(body):
    tokens = of(body, api="chat" if "messages" in body else "completions").prompt_tokens
    assert tokens == pytest.approx(estimated_tokens(WORDS), rel=0.05)


def test_blanks_where_samples_were_once_taken_hide_no_text():
    size, part = 1 << 14, WORDS * 20
    dense, blank = part[: 1 << 20], " " * size
    text = blank + dense + blank + dense + blank
    estimates = [estimate_prompt_tokens(text) for _ in range(25)]  # of random slices, of which a few meet a blank
    assert statistics.median(estimates) == pytest.approx(estimated_tokens(text), rel=0.15)


def test_an_image_counts_no_text():
    parts = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:" + "A" * 100_000}}]
    assert of(chat(messages=[{"role": "user", "content": parts}])).prompt_tokens < 10
