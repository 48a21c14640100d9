"""Answers that are passed on as they come: streamed, and whole."""

from __future__ import annotations

from lengthwise.gateway.relay import _scan as scan
from lengthwise.gateway.relay._alike import Alike
from lengthwise.gateway.relay._split import Splitter, TooLong
from lengthwise.gateway.relay._trouble import TOLD_INSIDE, Trouble, too_long

HELD_BYTES = 1 << 16


class Held:
    """Keeps back what says nothing yet (a role), so that an engine that fails before it speaks costs nothing.

    Comments, which keep a connection alive, pass.
    """

    __slots__ = ("_parts", "_size", "open")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self.open = False

    def pass_on(self, events: bytes, *, speaks: bool) -> bytes:
        """What may go to the client now."""
        if self.open:
            return events
        if not speaks and self._size + len(events) <= HELD_BYTES:
            if not self._parts and not scan.EVENT.search(events):
                return events
            self._parts.append(events)
            self._size += len(events)
            return b""
        self.open = True
        return b"".join([*self._parts, events])

    def rest(self) -> bytes:
        """What was kept back."""
        rest, self._parts, self.open = b"".join(self._parts), [], True
        return rest


class Plain:
    """A stream of which not a byte is changed; its tokens are counted by usage where told, else by events.

    Attributes:
        count: Tokens so far.
        why: The finish reason.
        complete: Whether all choices have ended.
        finished: Whether the stream said that it is at its end.
        trouble: What the engine told inside the stream.
        told: Whether the client has been told by the engine itself.

    Args:
        choices: How many there are.
    """

    resumable = False

    def __init__(self, choices: int = 1) -> None:
        self.count = 0
        self.why = ""
        self.complete = self.finished = self.told = False
        self.trouble: Trouble | None = None
        self._splitter, self._held, self._alike = Splitter(), Held(), Alike()
        self._raw = False
        self._running = choices

    @property
    def sent(self) -> bool:
        """Whether the client has got something that cannot be taken back."""
        return self._held.open

    def feed(self, data: bytes) -> bytes:
        """What goes to the client."""
        words = 1 if self._alike.fits(data) else self._alike.fitting(data)
        if words and not self._splitter.kept:
            self.count += words
            return data
        if self._raw:
            return data
        try:
            whole = self._splitter.feed(data)
        except TooLong:
            self._raw = True
            self._alike.forget()
            return self._held.rest() + self._splitter.rest()
        return self._told(whole, whole) if whole else b""

    def end(self) -> bytes:
        """What is left when the engine has closed; sets ``trouble`` where it was not at its end."""
        rest = self._splitter.rest()
        if self._raw:  # nobody looked for its end; the connection's is all there is
            self.complete = self.finished = True
            return rest
        out = self._told(rest, rest + b"\n\n") if rest else rest
        if not self.complete:
            self.trouble = self.trouble or Trouble("closed early", "the stream ended without its end")
            return b""
        return self._held.rest() + out if not self._held.open else out

    def _told(self, events: bytes, scanned: bytes) -> bytes:
        words = len(scan.TEXT.findall(scanned))
        self.count += words
        counted = b'"completion_tokens"' in scanned
        if counted and (told := scan.USAGE.findall(scanned)):
            self.count = int(told[-1])
        ends = scan.FINISH.findall(scanned)
        if ends:
            self._running -= len(ends)
            self.why = ends[-1].decode()
        self.finished = self.finished or scan.at_end(scanned)
        self.complete = self.finished or self._running <= 0
        if b"error" in scanned and scan.ERROR.search(scanned):
            self.trouble = Trouble(TOLD_INSIDE, scanned[:300].decode("utf-8", "replace"))
            if not self.sent:
                return b""
            self.told = True
        out = self._held.pass_on(events, speaks=bool(words) or self.complete)
        if words == 1 and not (counted or ends or self.finished or self.trouble):
            self._alike.learn(events, scan.TEXT)
        return out


class Whole:
    """An answer that comes at once, unchanged.

    Args:
        most_bytes: Longest one that is held.
        short: Whether a longer one can only be the engine's fault.
    """

    resumable = sent = False

    def __init__(self, most_bytes: int, *, short: bool = True) -> None:
        self.count = 0
        self.why = ""
        self.complete = self.finished = False
        self.trouble: Trouble | None = None
        self._parts: list[bytes] = []
        self._size, self._most_bytes, self._short = 0, most_bytes, short

    def feed(self, data: bytes) -> bytes:
        """Nothing yet; sets ``trouble`` where it is too long."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > self._most_bytes:
            self._parts.clear()
            self.trouble = too_long(self._most_bytes, engine=self._short)
        return b""

    def end(self) -> bytes:
        """All of it."""
        body = b"".join(self._parts)
        told = scan.found(scan.USAGE, b'"usage"', body)
        self.count = int(told[1]) if told else 1
        end = scan.found(scan.FINISH, b'"finish_reason"', body)
        self.why = end[1].decode() if end else ""
        self.complete = self.finished = True
        return body
