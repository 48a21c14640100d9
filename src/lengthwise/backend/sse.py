"""Server-sent events out of bytes, however they are cut."""

from __future__ import annotations

from dataclasses import dataclass

MOST_BYTES = 1 << 24
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its data lines joined by newlines, its type ("message" where none is given), its id."""

    data: str
    event: str = "message"
    id: str = ""


class SseReader:
    """Turns the bytes of a stream into events as soon as the blank line behind each has come.

    By the rules of the HTML standard: lines end in LF, CR LF or CR; a line that begins with a colon is a
    comment; several data lines are one text; what is not UTF-8 is replaced; an event that is cut off by the
    end of the stream is none. It knows nothing of what the events mean.

    Args:
        most_bytes: A line, or the data of an event, may not be longer.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._rest = bytearray()
        self._after_cr = False
        self._begun = False
        self._data: list[str] = []
        self._size = 0
        self._type = self._id = ""
        self._most = most_bytes

    @property
    def unfinished(self) -> bool:
        """Whether bytes have come that make no whole event yet."""
        return bool(self._rest or self._data)

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that these bytes complete.

        Raises:
            ValueError: A line or an event is longer than ``most_bytes``.
        """
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        self._rest += chunk
        if len(self._rest) + self._size > self._most:
            raise ValueError(f"an event is longer than {self._most} bytes")
        if b"\n" not in chunk and b"\r" not in chunk:
            return []
        lines = bytes(self._rest).splitlines(keepends=True)
        self._rest = bytearray() if lines[-1].endswith((b"\n", b"\r")) else bytearray(lines.pop())
        self._after_cr = bool(lines) and not self._rest and lines[-1].endswith(b"\r")
        return [event for line in lines if (event := self._line(line.rstrip(b"\r\n"))) is not None]

    def _line(self, line: bytes) -> Event | None:
        if not self._begun:
            line, self._begun = line.removeprefix(_BOM), True
        if not line:
            return self._dispatched()
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" ").decode("utf-8", "replace"))
            self._size += len(line)
        elif name == b"event":
            self._type = value.removeprefix(b" ").decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self._id = value.removeprefix(b" ").decode("utf-8", "replace")
        return None

    def _dispatched(self) -> Event | None:
        data, kind = self._data, self._type or "message"
        self._data, self._type, self._size = [], "", 0
        return Event("\n".join(data), kind, self._id) if data else None
