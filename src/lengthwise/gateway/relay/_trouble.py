"""What can come between a request and its answer."""

from __future__ import annotations

TOLD_INSIDE = "server error"
"""The reason of what an engine tells of itself within a stream."""
MALFORMED = "malformed"
"""The reason of what is no JSON, or no HTTP."""
_OFF, STALLED = ("no connection", "closed early"), "stalled"


class Trouble(Exception):  # noqa: N818
    """An engine failed a request.

    Attributes:
        reason: A few words that repeat: "no connection", "closed early", "stalled", "http 500", ...
        detail: What it said.
        status: Its HTTP status, 0 where there is none.
        engine: Whether it is the engine's failure (and not, say, of the request).
        code: What the client is told where asking another engine would be of no use, "" where it may be.
    """

    def __init__(
        self, reason: str, detail: str = "", *, status: int = 0, engine: bool = True, code: str = ""
    ) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.status, self.engine, self.code = reason, detail, status, engine, code

    @property
    def is_told(self) -> bool:
        """Whether the engine itself says so, by an HTTP status or within its stream: the request may be at fault."""
        return bool(self.status) or self.reason == TOLD_INSIDE

    def breaks_all(self, *, spoke: bool) -> bool:
        """Whether whatever else the engine has under way breaks with it: it is gone, or silent after it had spoken."""
        return self.engine and (self.reason in _OFF or (self.reason == STALLED and spoke))


def too_long(most_bytes: int, *, engine: bool) -> Trouble:
    """An answer that has to be held, and is longer than what is held of one."""
    detail = f"its answer has more than {most_bytes} bytes"
    return Trouble("answer too long", detail, engine=engine, code="answer_too_long")


class Full(Exception):  # noqa: N818
    """The engine takes no more now (503, 429): it did not fail.

    Attributes:
        retry_after_s: When it wants to be asked again, if it told.
    """

    def __init__(self, retry_after_s: float | None = None) -> None:
        super().__init__("the engine's queue is full")
        self.retry_after_s = retry_after_s


class Interrupted(Exception):  # noqa: N818
    """We stopped reading.

    Attributes:
        why: "cut", "worker gone", "client gone" or "slow reader".
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Final(Exception):  # noqa: N818
    """There will be no (further) answer.

    Attributes:
        status: To be told where nothing has been sent yet.
        reason: One word for programs.
        message: For people.
        retry_after_s: When to come again.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.retry_after_s = status, reason, message, retry_after_s
