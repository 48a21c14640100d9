"""Server-sent events come out alike however their bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.backend.openai_protocol import Event, SseReader

TEXT = st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), max_size=12)
END = st.sampled_from(["\n", "\r\n", "\r"])


@st.composite
def streams(draw):
    """Bytes of a stream and the events in it."""
    events, out, end = [], [], draw(END)
    for _ in range(draw(st.integers(0, 5))):
        lines = draw(st.lists(TEXT, min_size=1, max_size=3))
        kind = draw(st.sampled_from(["", "ping"]))
        out += [f": {draw(TEXT)}{end}"] if draw(st.booleans()) else []
        out += [f"event: {kind}{end}"] if kind else []
        space = draw(st.sampled_from(["", " "]))
        # Without the space, a text that begins with one would lose it.
        out += [f"data:{space if not line.startswith(' ') else ' '}{line}{end}" for line in lines]
        out.append(end)
        events.append(Event("\n".join(lines), kind or "message"))
    return "".join(out).encode(), events


@given(streams(), st.lists(st.integers(0, 400), max_size=8))
def test_events_do_not_depend_on_where_the_bytes_are_cut(stream, cuts):
    data, events = stream
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    reader = SseReader()
    got = [e for a, b in itertools.pairwise(edges) for e in reader.feed(data[a:b])]
    assert got == events


@given(streams())
def test_byte_by_byte_is_the_same(stream):
    data, events = stream
    reader = SseReader()
    assert [e for i in range(len(data)) for e in reader.feed(data[i : i + 1])] == events


def test_comments_ids_and_unknown_fields_are_no_data():
    reader = SseReader()
    assert reader.feed(b"\xef\xbb\xbf: hi\nretry: 3\nid: 7\ndata\ndata: x\n\n") == [Event("\nx", id="7")]


def test_what_is_cut_off_is_no_event():
    reader = SseReader()
    assert reader.feed(b"data: complete\n\ndata: cut\n") == [Event("complete")]


def test_a_line_without_end_is_refused():
    reader = SseReader(max_bytes=100)
    reader.feed(b"data: " + b"x" * 90)
    with pytest.raises(ValueError, match="longer than 100"):
        reader.feed(b"xxxxxx")
