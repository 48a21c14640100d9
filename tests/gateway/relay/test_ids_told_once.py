"""A client that asks for token ids is told each once, with the text that it completes, however often it is cut."""

from __future__ import annotations

import json

import pytest

from lengthwise.backend.openai import COMPLETIONS
from lengthwise.gateway.relay._dress import Wants
from lengthwise.gateway.relay._tracked import Tracked


def event(
    text: str, ids: list[int] | None, finish: str | None = None, prompt: list[int] | None = None
) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "token_ids": ids}
    if prompt is not None:
        choice["prompt_token_ids"] = prompt
    return (
        b"data: "
        + json.dumps({"id": "a", "object": "o", "created": 1, "model": "m", "choices": [choice]}).encode()
        + b"\n\n"
    )


def told(data: bytes) -> tuple[str, list[int]]:
    """Text and ids that a client has read."""
    text, ids = "", []
    for one in data.split(b"\n\n"):
        if not one or b"[DONE]" in one:
            continue
        (choice,) = json.loads(one.removeprefix(b"data: "))["choices"]
        text += choice["text"]
        ids += choice["token_ids"] or []
    return text, ids


def stream() -> Tracked:
    return Tracked(Wants(COMPLETIONS, stream=True, usage=False, usage_each=False, ids=True))


@pytest.mark.parametrize("usual", [0, 4])
def test_ids_that_are_ahead_of_the_text_come_with_the_text_that_they_complete(usual):
    """After several usual events their layout is known, and events pass another way."""
    one = stream()
    out = one.feed(event("a", [1], prompt=[7]))
    for k in range(usual):
        out += one.feed(event("b", [10 + k]))
    before = told(out)[1]
    held = one.feed(event("", [2])) + one.feed(event("", [3]))
    assert told(held) == ("", [])
    assert one.kept == len(before)
    assert told(one.feed(event("\u00e9", [4]))) == ("\u00e9", [2, 3, 4])
    assert one.kept == len(before) + 3


@pytest.mark.parametrize("last", [[5], [], None])
def test_ids_whose_text_never_comes_are_told_at_the_end(last):
    one = stream()
    one.feed(event("a", [1], prompt=[7]))
    out = (
        one.feed(event("", [2])) + one.feed(event("", last, finish="length")) + one.feed(b"data: [DONE]\n\n")
    )
    assert told(out) == ("", [2, *(last or [])])


def test_who_is_cut_at_half_a_character_is_told_no_id_twice():
    one = stream()
    out = one.feed(event("a", [1], prompt=[7])) + one.feed(event("", [2]))
    one.next_leg(one.kept)
    out += (
        one.feed(event("", [2])) + one.feed(event("\u00e9", [3])) + one.feed(event("c", [4], finish="length"))
    )
    assert told(out) == ("a\u00e9c", [1, 2, 3, 4])


def test_an_output_at_its_limit_tells_all_its_ids():
    one = stream()
    out = one.feed(event("a", [1], prompt=[7])) + one.feed(event("", [2]))
    assert told(out + one.at_limit()) == ("a", [1, 2])
