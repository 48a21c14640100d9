"""The layout that a stream's events share finds what a scan of each of them finds."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from lengthwise.backend.openai_protocol import CHAT
from lengthwise.gateway.relay import sse
from lengthwise.gateway.relay.responses import TrackedStream, UntrackedStream
from lengthwise.gateway.relay.sse import EventTemplate, ResponseOptions

FRAME = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
TEXTS = [
    " word",
    "x",
    "é",
    "日本",
    "𝄞",
    "\\",
    '"',
    '\\"',
    "a\\",
    "\n",
    "\r\n\n",
    "data: [DONE]",
    '","text":"x',
    "",
    "}",
    "]",
]
ENDS = (None, None, None, None, None, "stop", "abort")


def event(draws: random.Random, *, ids: bool, sep: tuple[str, str]) -> bytes:
    """One of all kinds, most of them plain words."""
    usual = draws.random() < 0.7
    text = draws.choice(TEXTS[:4] if usual else TEXTS)
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    if not usual:
        choice["finish_reason"] = draws.choice(ENDS)
        if draws.random() < 0.2:
            choice["delta"] = draws.choice([{"reasoning_content": text}, {"tool_calls": [{"index": 0}]}, {}])
    if ids:
        choice["token_ids"] = [draws.randrange(10**5) for _ in range(1 if usual else draws.randrange(4))]
    chunk = FRAME | {"choices": [choice]}
    if not usual and draws.random() < 0.2:
        chunk |= draws.choice([
            {"usage": {"prompt_tokens": 1, "completion_tokens": draws.randrange(9), "total_tokens": 9}},
            {"error": {"message": "no"}}, {"created": 2}, {"prompt_token_ids": [1, 2]},
        ])  # fmt: skip
    return b"data: " + json.dumps(chunk, separators=sep, ensure_ascii=draws.random() < 0.1).encode() + b"\n\n"


def chunks(draws: random.Random, data: bytes) -> list[bytes]:
    """The same bytes as they may come: event by event, some together, or cut anywhere."""
    events = [one + b"\n\n" for one in data.split(b"\n\n")[:-1]]
    if draws.random() < 0.5:
        return events
    cuts = sorted(draws.sample(range(len(data)), 12)) if draws.random() < 0.5 else []
    at = [0, *(cuts or [sum(map(len, events[:k])) for k in range(3, len(events), 3)]), len(data)]
    return [data[a:b] for a, b in pairwise(at) if a < b]


class Scanned(EventTemplate):
    """Nothing is alike: every event is scanned."""

    def learn(self, event, text, *, ids=False):
        pass


def reported(state, pieces: list[bytes]):
    out = []
    for piece in pieces:
        out.append(state.feed(piece))
        if state.error is not None:
            break
    metadata = (state.count, state.finish_reason, state.output_complete, state.finished, state.sent, str(state.error))
    if isinstance(state, TrackedStream):
        metadata += (
            state.flushed_tokens,
            state.uncertain_tokens,
            state.trackable,
            state.prompt_ids,
            state.last_ids(1 << 20),
        )
    return out, metadata


@pytest.mark.parametrize("sep", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("kind", ["plain", "plain with ids", "tracked", "tracked, ids shown"])
def test_what_goes_on_and_what_is_counted_is_the_same_as_without_it(kind, sep):
    def made():
        if kind.startswith("plain"):
            return UntrackedStream()
        return TrackedStream(ResponseOptions(CHAT, stream=True, usage=False, usage_each=False, ids="shown" in kind))

    fitted = 0
    for seed in range(150):
        draws = random.Random(seed)
        ids = kind != "plain"
        data = b"".join(event(draws, ids=ids, sep=sep) for _ in range(24))
        if ids:
            data = data.replace(b'"choices"', b'"prompt_token_ids":[7,8],"choices"', 1)
        pieces = chunks(draws, data)
        fast, slow = made(), made()
        slow.template = Scanned()
        assert reported(fast, pieces) == reported(slow, pieces), seed
        fitted += fast.template.num_matches
    assert fitted > 300


def test_an_event_cut_short_or_with_another_line_in_it_does_not_fit():
    total = b'data: {"choices":[{"delta":{"content":" word"},"token_ids":[12]}]}\n\n'
    alike = EventTemplate()
    alike.learn(total, sse.CONTENT)
    assert alike.matches(total.replace(b" word", b'a\\"b\\\\').replace(b"[12]", b"[1, 2,3]"))
    assert alike.ids == b"1, 2,3"
    assert not any(alike.matches(total[:end]) for end in range(len(total)))
    for text in (b"", b"a\nb", b"a\r", b'a"b', b"a\\", b'"'):
        assert not alike.matches(total.replace(b" word", text)), text
    for ids in (b"", b",", b" ", b"1]", b"[1", b"x", b"-1"):
        assert not alike.matches(total.replace(b"12", ids)), ids


def test_a_stream_whose_layout_changes_with_every_event_is_soon_only_scanned():
    alike = EventTemplate()
    events = [b'data: {"n":%d,"choices":[{"text":"x"}]}\n\n' % n for n in range(40)]
    for one in events:
        assert not alike.matches(one)
        alike.learn(one, sse.TEXT)
    assert not alike.matches(events[-1])


@pytest.mark.parametrize("ids", [b"5", b"5,6", b"5, 6"])
def test_ids_are_taken_out_as_a_scan_takes_them_out(ids):
    one = b'data: {"choices":[{"delta":{"content":"a"},"token_ids":[%b],"x":[1]}]}\n\n' % ids
    alike = EventTemplate()
    alike.learn(one, sse.CONTENT, ids=True)
    assert alike.matches(one)
    assert alike.without_ids(one) == sse.without_ids(one)
