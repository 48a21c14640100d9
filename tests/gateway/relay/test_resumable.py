"""Which requests a cut cannot change, and why the others are left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.gateway.relay import resume_conflict
from lengthwise.gateway.relay.engine_request import RULES, continuation, insert_fields

PLAIN = {"model": "m", "prompt": "p", "max_tokens": 5}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "p"}]}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        {"n": 1, "best_of": 1, "stop": None, "logprobs": False, "echo": False, "tools": []},
        {"response_format": {"type": "text"}, "tool_choice": "none", "suffix": ""},
        {"seed": 5, "temperature": 0},
        {"min_tokens": 3, "ignore_eos": True, "stop_token_ids": [7], "logit_bias": {"5": -100}},
        {"prompt": [1, 2, 3]},
        {"stream_options": {"include_usage": True}, "user": "u", "metadata": {}, "something_new": None},
    ],
)
def test_what_counts_on_the_next_token_alone_can_be_cut(fields):
    assert resume_conflict({**PLAIN, **fields}) is None


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"presence_penalty": 0.1}, "not prompt tokens"),
        ({"frequency_penalty": -0.1}, "not prompt tokens"),
        ({"repetition_penalty": 1.1}, "engines differ"),
        ({"n": 2}, "share a request"),
        ({"best_of": 3}, "share a request"),
        ({"stop": ["\n"]}, "before a preemption"),
        ({"stop": "x"}, "before a preemption"),
        ({"logprobs": 0}, "offsets"),
        ({"logprobs": True}, "offsets"),
        ({"echo": True}, "prompt"),
        ({"suffix": "x"}, "after the output"),
        ({"seed": 5}, "random"),
        ({"seed": 5, "temperature": 0.5}, "random"),
        ({"response_format": {"type": "json_object"}}, "grammar"),
        ({"guided_regex": "a+"}, "grammar"),
        ({"structured_outputs": {"json": {}}}, "grammar"),
        ({"tools": [{"type": "function"}]}, "tool calls"),
        ({"bad_words": ["x"]}, "before a preemption"),
        ({"truncate_prompt_tokens": 5}, "tokens so far"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [[1], [2]]}, "several prompts"),
        ({"something_new": 1}, "is unknown"),
    ],
)
def test_what_does_not_is_left_alone_with_its_reason(fields, cause):
    assert cause in resume_conflict({**PLAIN, **fields})


def test_pictures_are_left_alone_and_text_in_parts_is_not():
    part = {"type": "text", "text": "p"}
    assert resume_conflict({**CHAT, "messages": [{"role": "user", "content": [part]}]}) is None
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert "only text" in resume_conflict({**CHAT, "messages": [{"role": "user", "content": [part, picture]}]})


def test_every_rule_lets_its_absence_pass():
    assert resume_conflict({**PLAIN, **dict.fromkeys(RULES)}) is None


@given(
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=4),
    st.sampled_from([b"", b" ", b"\n "]),
)
def test_spliced_fields_are_present_and_all_else_is_unchanged(fields, space: bytes):
    import json

    fields.pop("added", None)
    body = space + json.dumps(fields).encode().replace(b"{", b"{" + space, 1)
    assert json.loads(insert_fields(body, {"added": [1]})) == {**fields, "added": [1]}


def test_a_continuation_is_what_is_left():
    import json

    body = json.loads(continuation({**PLAIN, "min_tokens": 9, "seed": 1}, b"1,2", b"3,4,5", 3, 2))
    assert body["prompt"] == [1, 2, 3, 4, 5]
    assert (body["max_tokens"], body["min_tokens"], body["seed"]) == (2, 6, 1)
    assert "min_tokens" not in json.loads(continuation({**PLAIN, "min_tokens": 3}, b"1", b"3,4,5", 3, 2))
