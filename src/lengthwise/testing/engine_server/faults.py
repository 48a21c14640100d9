"""What goes wrong with an emulated engine, and when: planned by the number of the request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lengthwise.schema.errors import InputError, UnknownNameError

KINDS = (
    "close",  # the connection is reset
    "die",  # the whole engine: all connections are reset, the port is closed (a process ends)
    "hang",  # no bytes any more, for seconds
    "stall",  # no bytes for seconds, then on
    "slow",  # seconds more before each piece
    "status",  # an HTTP error, at once
    "full",  # 503 as of a full queue, at once
    "error",  # an error as an event inside the stream
    "malformed",  # an event that is no JSON
    "split",  # every byte beyond ASCII, and every second one else, in a write of its own
    "no_done",  # the stream ends well, without its [DONE]
    "giant",  # a piece, or the whole of an answer that is not streamed, is longer by so many bytes
    "double_usage",  # the usage at the end comes twice
)
AT_ONCE = ("status", "full")
SILENT = ("close", "die", "hang", "stall")
ON_ALL = ("slow", "split", "no_done", "giant", "double_usage")
"""Not struck at one point: they change how pieces are written."""
LAST = -1
"""``after_tokens`` of what happens behind the last token and before [DONE]."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong in one answer.

    Attributes:
        kind: One of KINDS.
        after_tokens: When so many tokens have been sent; 0: before the first byte; LAST: before [DONE].
        seconds: How long it takes (hang, stall), or what each piece takes more (slow).
        status: Of "status".
        size: Bytes, of "giant".
        retry_after_s: Told with "status" and "full".
    """

    kind: str
    after_tokens: int = 0
    seconds: float = math.inf
    status: int = 500
    size: int = 1 << 20
    retry_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownNameError("fault", self.kind, KINDS)
        if self.after_tokens < LAST:
            raise InputError(f"after_tokens must be at least 0, or {LAST}; it is {self.after_tokens}")


@dataclass
class FaultPlan:
    """Which request meets which fault.

    Attributes:
        by_number: Of requests by their number since the start, from 0.
        coming: Of the next ones, in order; taken from here before ``always``.
        always: Of all others.
    """

    by_number: dict[int, Fault] = field(default_factory=dict)
    coming: list[Fault] = field(default_factory=list)
    always: Fault | None = None

    def take(self, number: int) -> Fault | None:
        """The fault of a request, which will not come again unless planned again."""
        if number in self.by_number:
            return self.by_number[number]
        return self.coming.pop(0) if self.coming else self.always


def read_plan(told: Mapping[str, Any]) -> FaultPlan:
    """A plan out of JSON: ``{"coming": [...], "by_number": {"3": {...}}, "always": {...} or null}``."""
    always = told.get("always")
    return FaultPlan(
        {int(number): Fault(**one) for number, one in told.get("by_number", {}).items()},
        [Fault(**one) for one in told.get("coming", ())],
        Fault(**always) if always else None,
    )
