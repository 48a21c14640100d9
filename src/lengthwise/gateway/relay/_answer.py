"""What a client is answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from lengthwise.gateway.relay._trouble import Final

Headers = list[tuple[bytes, bytes]]
EVENTS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Outlet(Protocol):
    """Where pieces of an answer can go at once (``edge``: the client's connection)."""

    def takes(self) -> bool: ...
    def pass_on(self, piece: bytes) -> None: ...


class Answer:
    """Status and headers at once, the body as it comes.

    Attributes:
        status: Of HTTP.
        headers: Content-type at least.
    """

    __slots__ = ("_close", "_first", "_next", "_pass_to", "headers", "status")

    def __init__(
        self,
        status: int,
        headers: Headers,
        first: bytes,
        following: Callable[[], Awaitable[bytes | None]] | None = None,
        close: Callable[[], None] | None = None,
        pass_to: Callable[[Outlet], None] | None = None,
    ) -> None:
        self.status, self.headers = status, headers
        self._first: bytes | None = first
        self._next, self._close, self._pass_to = following, close, pass_to

    def __aiter__(self) -> Answer:
        """Itself: it can be read once."""
        return self

    async def __anext__(self) -> bytes:
        """The next piece of the body."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            piece = None if self._next is None else await self._next()
        except BaseException:
            await self.aclose()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def pass_to(self, outlet: Outlet) -> None:
        """Pieces go there as soon as they come, past who iterates, while it takes them.

        All that were iterated over must be out.
        """
        if self._pass_to is not None:
            self._pass_to(outlet)

    async def aclose(self) -> None:
        """Ends it, in whatever state; the engine aborts what it still does for it."""
        if self._close is not None:
            self._close()


def whole(status: int, body: bytes, kind: str = "application/json") -> Answer:
    """One that is all there."""
    return Answer(
        status, [(b"content-type", kind.encode("latin-1")), (b"content-length", b"%d" % len(body))], body
    )


def error_of(final: Final) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = "server_error" if final.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(final), "type": kind, "param": None, "code": final.reason}}


def failed(final: Final) -> Answer:
    """For a request that nothing has been sent of."""
    import msgspec

    answer = whole(final.status, msgspec.json.encode(error_of(final)))
    if final.retry_after_s is not None:
        answer.headers.append((b"retry-after", b"%d" % max(1, round(final.retry_after_s))))
    return answer


def error_event(final: Final) -> bytes:
    """For a stream that cannot go on."""
    import msgspec

    return b"data: " + msgspec.json.encode(error_of(final)) + b"\n\n"
