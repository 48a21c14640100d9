"""One call of an operator, ready to run, whatever times it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """Runs one operator at one place.

    Attributes:
        run: Takes which of the copies of cold tensors to use.
        copies: How many there are.
        backend: Whose kernel it is, for the profile.
        scope: What must hold while it runs.
        on_host: Whether the host's time counts, and ends in waiting for the device.
    """

    run: Callable[[int], object]
    copies: int = 1
    backend: str = "torch"
    scope: Callable[[], AbstractContextManager[object]] = nullcontext
    on_host: bool = False
