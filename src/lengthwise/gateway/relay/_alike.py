"""What the events of one stream have in common: mostly the text alone is new, and the token ids."""

from __future__ import annotations

import re

from lengthwise.gateway.relay import _scan as scan
from lengthwise.gateway.relay._split import split

_TEXT = re.compile(rb'[^"\\\r\n]+')
_ESCAPED = re.compile(rb'(?:[^"\\\r\n]+|\\[^\r\n])+')
"""Of a JSON string, to its end; no line ends in it, so that nothing of the stream's own can stand there."""
_NUMBERS = re.compile(rb"\d[\d, ]*")
_TRIES, _ENOUGH = 8, 4
"""So many layouts are learned in vain; one that has fitted so often was not."""


class Alike:
    """The layout of events that add text and say nothing else: what a scan finds in one, it finds in all of them.

    To compare an event with it takes an eighth of the instructions of a scan.

    Attributes:
        ids: Token ids of the event that ``fits`` has seen last, as they stand in JSON.
    """

    __slots__ = ("_after", "_before", "_between", "_fitted", "_ids_at", "_left", "ids")

    def __init__(self) -> None:
        self._before = self._between = self._after = self.ids = b""
        self._fitted, self._ids_at, self._left = 0, 0, _TRIES

    def learn(self, event: bytes, text: re.Pattern[bytes], *, ids: bool = False) -> None:
        """Takes the layout of an event.

        Args:
            event: One whose scan found one text, no end, no usage and no error.
            text: What finds the beginning of its text.
            ids: Whether only one with token ids is worth it.
        """
        if self._fitted >= _ENOUGH:
            self._left = _TRIES
        self._before, self._fitted = b"", 0
        if not self._left:
            return
        self._left -= 1
        begins = text.search(event)
        ends = _ESCAPED.match(event, begins.end()) if begins else None
        added = list(scan.ADDED.finditer(event))
        if begins is None or ends is None or len(added) > 1 or (added and added[0].start() < ends.end()):
            return
        numbers = _NUMBERS.match(event, added[0].end(1) + 1) if added else None
        if numbers is None and (added or ids):
            return
        self._between = event[ends.end() : numbers.start()] if numbers else b""
        self._before, self._after = event[: begins.end()], event[(numbers or ends).end() :]

    def forget(self) -> None:
        """Nothing fits from now on."""
        self._before, self._fitted, self._left = b"", 0, 0

    def fits(self, event: bytes) -> bool:
        """Whether nothing but its text, and its token ids, differs from what was learned."""
        before, between = self._before, self._between
        if not before or not event.startswith(before):
            return False
        at = len(before)
        found = _TEXT.match(event, at)
        if found is None or event.startswith(b"\\", found.end()):
            found = _ESCAPED.match(event, at)
            if found is None:
                return False
        at = found.end()
        if between:
            if not event.startswith(between, at):
                return False
            at = self._ids_at = at + len(between)
            self.ids = ids = event[at : event.find(b"]", at)]
            if not ids.isdigit() and not _NUMBERS.fullmatch(ids):
                return False
            at += len(ids)
        if event[at:] != self._after:
            return False
        self._fitted += 1
        return True

    def fitting(self, events: bytes) -> int:
        """How many events these are, where there are several and all of them fit; else 0."""
        before = self._before
        if not before or not events.startswith(before) or events.find(before, 1) < 0:
            return 0
        parts = split(events)
        return len(parts) if all(map(self.fits, parts)) else 0

    def without_ids(self, event: bytes) -> bytes:
        """The event that ``fits`` has seen last with no token ids, as ``scan.without_ids``."""
        at = self._ids_at
        return event[: at - 1] + b"null" + event[at + len(self.ids) + 1 :]
