"""The text of an answer so far, for predictors that read it."""

from __future__ import annotations

from lengthwise.gateway.relay._decoded import decoded
from lengthwise.gateway.relay._split import Splitter, TooLong, data_of, split

MOST_BYTES = 1 << 21
"""Of events that are kept until somebody asks; what comes behind is not read."""


class Heard:
    """Takes the events that go to a client, and reads them when it is asked."""

    __slots__ = ("_parts", "_size", "_splitter", "_texts")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._texts: list[str] = []
        self._size = 0
        self._splitter = Splitter()

    def take(self, events: bytes) -> None:
        """Some more."""
        if self._size < MOST_BYTES:
            self._size += len(events)
            self._parts.append(events)

    def text(self) -> str:
        """Of all that came."""
        parts, self._parts = self._parts, []
        try:
            for event in split(self._splitter.feed(b"".join(parts))):
                self._texts.append(_text_of(event))
        except TooLong:
            self._size = MOST_BYTES
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""


def _text_of(event: bytes) -> str:
    try:
        choices = decoded(data_of(event)).get("choices") or ()
        return "".join(one.get("text") or (one.get("delta") or {}).get("content") or "" for one in choices)
    except (ValueError, TypeError, AttributeError):
        return ""
