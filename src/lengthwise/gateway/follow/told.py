"""Who follows lengths, and what it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lengthwise.gateway.phasing import Phases

Lengths = tuple[int, int, float]
"""(prompt tokens, output tokens, seconds since the watch began when it and all that came before it had ended)"""


@dataclass(frozen=True)
class News:
    """What came of lengths that moved.

    Attributes:
        said: In sentences.
        phases: The schedule to be kept from now on; None: it stays.
        schedule: What is kept then, in words; "" as before.
        failed: Whether it could not be planned anew.
        more: What its maker has to say besides; it can be pickled.
    """

    said: tuple[str, ...]
    phases: Phases | None = None
    schedule: str = ""
    failed: bool = False
    more: Any = None


class Follower(Protocol):
    """Watches lengths and plans anew when they moved; it lives in a process of its own, where it may take its time."""

    @property
    def evidence(self) -> float:
        """What speaks for a move now; news are due where it reaches ``1 / false_alarms``."""

    @property
    def false_alarms(self) -> float:
        """Probability of ever an alarm while lengths do not change."""

    def observe(self, prompt_tokens: int, output_tokens: int, at_s: float) -> News | None:
        """One more request, in the order of arrival; news if it makes them due."""


Make = Callable[[], Follower]
"""Makes the follower; it can be pickled."""


@dataclass(frozen=True)
class Followed:
    """How lengths are followed now.

    Attributes:
        up: Whether somebody watches; before the watch has begun, too.
        trouble: Why nobody does; "" somebody does.
        observed: Requests told.
        evidence: As ``Follower.evidence`` was last.
        false_alarms: As the follower says; NaN until it has begun.
        schedule: What is kept, in words; "" what the gateway was told first.
        changed: How often B_E or N_D were changed.
        left: How often the schedule was left as it was.
        failed: How often it could not be planned anew.
        last: What was said last; () nothing.
        last_s: When, on the gateway's clock; NaN never.
    """

    up: bool
    trouble: str
    observed: int
    evidence: float
    false_alarms: float
    schedule: str
    changed: int
    left: int
    failed: int
    last: tuple[str, ...]
    last_s: float
