"""Server-sent events cut at their ends, their bytes unchanged."""

from __future__ import annotations

import re

from lengthwise.backend.sse import SseReader

MOST_BYTES = 1 << 20
"""Of an event that is not at its end yet."""
_ONE = re.compile(rb".*?(?:\n\n|\n\r\n?|\r\r\n?)", re.DOTALL)
_ENDS = (b"\n\n", b"\n\r", b"\r\r")


class TooLong(Exception):  # noqa: N818
    """An event that does not end within ``MOST_BYTES``."""


class Splitter:
    """Holds back what is not a whole event yet, so that an answer never stops in the middle of one.

    Lines may end in LF, CR LF or CR. All that goes in comes out, in order and unchanged.

    Attributes:
        kept: What is held back now.
    """

    __slots__ = ("_most", "kept")

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.kept, self._most = b"", most_bytes

    def feed(self, chunk: bytes) -> bytes:
        """The whole events that are there now.

        Raises:
            TooLong: An event is too long; ``rest`` holds what came of it.
        """
        if not self.kept and chunk.endswith(b"\n\n"):
            return chunk
        data = self.kept + chunk
        end = _last_end(data, max(0, len(self.kept) - 2))
        self.kept = data[end:]
        if len(self.kept) > self._most:
            self.kept = data
            raise TooLong
        return data[:end]

    def rest(self) -> bytes:
        """What came and is no whole event; it is forgotten here."""
        rest, self.kept = self.kept, b""
        return rest


def split(whole: bytes) -> list[bytes]:
    """Whole events one by one; joined they are the same bytes."""
    if b"\r" in whole:
        events: list[bytes] = _ONE.findall(whole)
        done = sum(map(len, events))
        return events if done == len(whole) else [*events, whole[done:]]
    parts = whole.split(b"\n\n")
    last = parts.pop()
    events = [part + b"\n\n" for part in parts]
    return [*events, last] if last else events


def data_of(event: bytes) -> str:
    """The data of one whole event: "" where it has none (a comment, a keep-alive)."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2].decode("utf-8", "replace")
    found = SseReader(1 << 30).feed(event)
    return found[0].data if found else ""


def _last_end(data: bytes, start: int) -> int:
    """The place behind the last blank line, 0 where there is none; none ends before ``start`` + 2."""
    end = 0
    for mark in _ENDS:
        at = data.rfind(mark, start) + 2
        if at >= 2:
            end = max(end, at)
    return end + 1 if end and data[end - 1 : end + 1] == b"\r\n" else end
