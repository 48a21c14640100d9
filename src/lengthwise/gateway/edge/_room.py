"""Room for bodies: all that are being read, or belong to requests under way, share one budget of bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from types import TracebackType
from typing import Self

from lengthwise.gateway.edge.faults import Fault

_AGAIN_S = 1.0
_CLOSE = [(b"connection", b"close")]
SHARES = 4
"""One holder may have so much of the room: one in four."""


class Room:
    """The budget.

    Args:
        most_bytes: Of all requests together; may be changed at any time.

    Attributes:
        held_bytes: Of the requests that are in.
        held_by: The same by holder.
    """

    __slots__ = ("held_by", "held_bytes", "most_bytes")

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.held_bytes = most_bytes, 0
        self.held_by: Counter[Hashable] = Counter()


class Part:
    """What one request has of the room; given back at the end of its ``with``.

    Args:
        room: Of all.
        holder: Whose request: a key, or an address where there are none.
    """

    __slots__ = ("_held_bytes", "_holder", "_room")

    def __init__(self, room: Room, holder: Hashable = "") -> None:
        self._room, self._holder, self._held_bytes = room, holder, 0

    def __enter__(self) -> Self:
        """Nothing yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives all back."""
        room = self._room
        room.held_bytes -= self._held_bytes
        room.held_by[self._holder] -= self._held_bytes
        if not room.held_by[self._holder]:
            del room.held_by[self._holder]
        self._held_bytes = 0

    def require(self, size_bytes: int) -> None:
        """Raises a Fault if so much more would not fit now; nothing is taken. A request that is alone fits always.

        Raises:
            Fault: 429, the holder has its share; 503, there is no room.
        """
        room = self._room
        others = room.held_by[self._holder] - self._held_bytes
        if others and others + self._held_bytes + size_bytes > room.most_bytes // SHARES:
            message = "Your requests under way hold as many bytes as one client may; send the request again."
            raise Fault(429, "bodies", message, code="body_share_exceeded", headers=_CLOSE)
        if room.held_bytes > self._held_bytes and room.held_bytes + size_bytes > room.most_bytes:
            message = "The gateway holds as many bodies as it may; send the request again."
            raise Fault(503, "bodies", message, code="overloaded", headers=_CLOSE, retry_after_s=_AGAIN_S)

    def take(self, size_bytes: int) -> None:
        """So much more is held; raises a Fault if it does not fit."""
        self.require(size_bytes)
        self._held_bytes += size_bytes
        self._room.held_bytes += size_bytes
        self._room.held_by[self._holder] += size_bytes

    def let_go(self, size_bytes: int) -> None:
        """No more than so much is held from now on."""
        less = max(0, self._held_bytes - size_bytes)
        self._held_bytes -= less
        self._room.held_bytes -= less
        self._room.held_by[self._holder] -= less

    def hold(self, size_bytes: int) -> None:
        """So much is held in all from now on; raises a Fault if it does not fit."""
        self.take(size_bytes - self._held_bytes)
