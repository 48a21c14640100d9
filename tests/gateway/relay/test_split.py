"""Streams are cut at the ends of events, however they come; the slow obvious reader is the judge."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.backend.openai_protocol import Event, SseReader
from lengthwise.gateway.relay.sse import EventSplitter, EventTooLongError, event_data, split_events

EOL = st.sampled_from([b"\n", b"\r\n", b"\r"])
LINE = st.one_of(
    st.sampled_from([b"", b"", b"data: x", b"data:y", b"data", b": keep-alive", b"event: error", b"id: 1", b"[DONE]"]),
    st.text(max_size=8).map(
        lambda text: b"data: " + text.replace("\r", "").replace("\n", "").encode("utf-8", "replace")
    ),
    st.binary(max_size=6).map(lambda junk: junk.replace(b"\r", b"").replace(b"\n", b"")),
)
STREAM = st.lists(st.tuples(LINE, EOL).map(lambda both: both[0] + both[1]), max_size=20).map(b"".join)
CUTS = st.lists(st.integers(0, 200), max_size=8)


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    return [stream[a:b] for a, b in itertools.pairwise(places)]


def judged(stream: bytes) -> list[Event]:
    return SseReader().feed(stream)


@given(STREAM, CUTS)
def test_all_bytes_come_out_unchanged_and_events_complete(stream: bytes, cuts: list[int]):
    splitter = EventSplitter()
    out = [splitter.feed(piece) for piece in pieces(stream, cuts)]
    rest = splitter.flush()
    assert b"".join(out) + rest == stream
    reported: list[str] = []
    for complete in out:
        for event in split_events(complete):
            reported += [found.data for found in SseReader().feed(event.removeprefix(b"\xef\xbb\xbf"))]
    assert reported == [event.data for event in judged(stream.removeprefix(b"\xef\xbb\xbf"))][: len(reported)]
    later = [found.data for found in SseReader().feed(rest + b"\n")]
    assert reported + later == [event.data for event in judged(stream.removeprefix(b"\xef\xbb\xbf") + b"\n")]


@given(STREAM)
def test_events_joined_are_the_stream_and_each_has_its_data(stream: bytes):
    splitter = EventSplitter()
    complete = splitter.feed(stream)
    events = split_events(complete)
    assert b"".join(events) == complete
    assert [data for event in events if (data := event_data(event))] == [
        event.data for event in judged(complete) if event.data
    ]


def test_an_event_without_end_is_bounded():
    splitter = EventSplitter(max_bytes=1000)
    for _ in range(83):
        splitter.feed(b"data: 123456")
    with pytest.raises(EventTooLongError):
        splitter.feed(b"data: 123456")
    assert len(splitter.flush()) < 1100


def test_the_common_case_copies_nothing():
    chunk = b'data: {"a":1}\n\n'
    assert EventSplitter().feed(chunk) is chunk
