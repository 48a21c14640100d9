"""The time of a gateway: handed in, so that tests and replays have their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go back."""

    def __call__(self) -> float:
        """Now, in seconds from an arbitrary start."""
        ...


monotonic: Clock = time.monotonic
"""A real one. A jump of the wall clock does not move it."""
