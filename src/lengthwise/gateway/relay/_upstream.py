"""One request to one engine: opened, read, and stopped at any moment."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lengthwise.gateway.config import Care
from lengthwise.gateway.relay._line import BrokenError, Line
from lengthwise.gateway.relay._lines import Lines
from lengthwise.gateway.relay._trouble import MALFORMED, STALLED, Full, Interrupted, Trouble

DRAIN_S = 0.25
CLIENT, SLOW = "client gone", "slow reader"
_ERROR_BYTES = 1 << 16


class Call:
    """A POST to an engine.

    Its limits are on silence: ``first_byte_s`` until anything comes, then ``stall_s`` between two pieces;
    a client that takes nothing for ``stall_s`` is given up likewise. One timer serves a whole answer.

    Args:
        care: The limits.
    """

    __slots__ = (
        "_care", "_closed", "_connecting", "_limit", "_line", "_lines", "_loop", "_reading", "_since_s", "_timer",
        "_why",
    )  # fmt: skip

    def __init__(self, care: Care) -> None:
        self._care = care
        self._loop = asyncio.get_running_loop()
        self._lines: Lines | None = None
        self._line: Line | None = None
        self._connecting: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._why = ""
        self._closed = self._reading = False
        self._since_s, self._limit = 0.0, care.first_byte_s

    async def open(self, session: Any, path: str, body: bytes, headers: Iterable[tuple[str, str]]) -> None:
        """Sends it and returns once status and headers are there.

        Raises:
            Trouble: No connection, or no answer.
            Interrupted: ``interrupt`` was called.
        """
        self._lines = lines = lines_of(session)
        head = lines.head(path, headers, len(body))
        self._since_s, self._reading = self._loop.time(), True
        self._timer = self._loop.call_later(min(self._limit, self._care.stall_s), self._look)
        self._line = lines.kept() or await self._connected()
        try:
            if not await self._sent(head, body):  # an idle connection that was closed meanwhile
                lines.give_back(self._line)
                self._line = await self._connected()
                await self._sent(head, body)
        except BrokenError as error:
            if self._why:
                raise self._stopped("no answer", self._care.first_byte_s) from None
            raise Trouble(MALFORMED if error.garbage else "closed early", str(error)) from None
        self._reading = False
        self._since_s = self._loop.time()

    async def _connected(self) -> Line:
        assert self._lines is not None
        try:
            async with asyncio.timeout(None) as self._connecting:
                return await self._lines.opened()
        except TimeoutError:
            if self._why:
                raise self._stopped("no answer", self._care.first_byte_s) from None
            raise Trouble("no connection", f"within {self._care.connect_s:g} s") from None
        except OSError as error:
            ours = error.errno in (errno.EMFILE, errno.ENFILE)
            raise Trouble("no connection", str(error), engine=not ours) from None
        finally:
            self._connecting = None

    async def _sent(self, head: bytes, body: bytes) -> bool:
        """Whether an answer comes; False where a connection that was used before turned out to be closed."""
        line = self._line
        assert line is not None
        try:
            line.send(head, body)
            await line.answered()
        except BrokenError as error:
            if line.used and not error.spoke and not self._why:
                return False
            raise
        return True

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._line.status if self._line is not None else 0

    @property
    def headers(self) -> Mapping[str, str]:
        """The answer's headers, their names in lower case."""
        return self._line.headers if self._line is not None else {}

    async def read(self, tap: Callable[[bytes], bool] | None = None) -> bytes | None:
        """The next piece, b"" at the end, None after ``stir``.

        Args:
            tap: Offered each piece as it comes; while it takes them this waits on.

        Raises:
            Trouble: The connection broke, or nothing came for too long.
            Interrupted: ``interrupt`` was called.
        """
        if self._why:
            raise self._stopped()
        line = self._line
        assert line is not None
        self._since_s, self._reading = self._loop.time(), True
        line.tap = tap
        try:
            data = await line.read()
        except BrokenError as error:
            if self._why:
                raise self._stopped() from None
            raise Trouble("closed early", str(error)) from None
        finally:
            self._reading = False
        if self._why:
            raise self._stopped()
        self._since_s, self._limit = self._loop.time(), self._care.stall_s
        return data

    def stir(self) -> None:
        """Wakes who reads, although there is nothing for it."""
        if self._line is not None:
            self._line.stir()

    async def rest(self, most_bytes: int = _ERROR_BYTES) -> bytes:
        """What is left of the answer, up to a bound; raises as ``read``."""
        parts, size = [], 0
        while size < most_bytes and (data := await self.read()):
            parts.append(data)
            size += len(data)
        return b"".join(parts)[:most_bytes]

    @property
    def at_end(self) -> bool:
        """Whether all of the answer has been read."""
        return self._line is not None and self._line.at_end

    async def drain(self) -> None:
        """Lets an answer that is complete end, so that its connection can be used again."""
        self._limit = DRAIN_S
        line = self._line
        try:
            async with asyncio.timeout(DRAIN_S):
                while line is not None and await line.read():
                    pass
        except (TimeoutError, BrokenError):  # the answer was complete
            pass
        finally:
            self.close()

    def interrupt(self, why: str) -> None:
        """Stops reading: what waits for the engine raises Interrupted (or Trouble, when it stalled)."""
        if self._closed or self._why:
            return
        self._why = why
        if self._connecting is not None:
            self._connecting.reschedule(self._loop.time())
        elif self._line is not None:
            self._line.abort(why)

    def close(self) -> None:
        """Gives the connection back, or closes it where the answer is not at its end: engines abort then."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._line is not None and self._lines is not None:
            self._lines.give_back(self._line)

    def _look(self) -> None:
        """Looks, now and then, how long it has been silent."""
        now_s = self._loop.time()
        if self._line is not None and self._line.tapped_s > self._since_s:
            self._since_s, self._limit = self._line.tapped_s, self._care.stall_s
        limit_s = self._limit if self._reading else self._care.stall_s
        rest_s = self._since_s + limit_s - now_s
        if rest_s > 0.001:
            self._timer = self._loop.call_later(min(rest_s, self._care.stall_s), self._look)
            return
        self._timer = None
        self.interrupt(STALLED if self._reading else SLOW)

    def _stopped(self, silent: str = STALLED, limit_s: float | None = None) -> Exception:
        if self._why == STALLED:
            return Trouble(silent, f"nothing came for {limit_s or self._limit:g} s")
        return Interrupted(self._why)


def lines_of(session: Any) -> Lines:
    """The lines of a session that ``open_session`` made; raises Trouble where it is closed."""
    connector = session.connector
    if connector is None or session.closed:
        raise Trouble("no connection", "the engine is not used any more", engine=False)
    lines: Lines = connector.lines
    return lines


def full(headers: Mapping[str, str]) -> Full:
    """What a 503 or 429 of an engine says."""
    try:
        return Full(min(60.0, max(0.0, float(headers.get("retry-after", "")))))
    except ValueError:
        return Full(None)
