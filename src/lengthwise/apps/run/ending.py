"""How a run ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from lengthwise.apps.ledger.contracts import State
from lengthwise.apps.run.progress import Event
from lengthwise.apps.run.reuse import Reused
from lengthwise.apps.run.silence import Silent
from lengthwise.schema.errors import EngineError


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        how: "done", "stopped" (asked to by a signal or its caller), "cancelled" (by another process) or "failed" (its
            engines did).
        counts: Tasks by (call, model) and state.
        seconds: Until nothing was left to do, or it was stopped, on its clock; engines are ended behind that.
        resumed: Whether it went on with what stood in the ledger.
        reused: What was taken from before the application changed; None: it had not, or there was nothing.
        engines: What answered, by model.
        events: Switches and what went wrong with engines, with seconds from the start.
        silent: Engines that should have answered when it ended, and did not.
        error: What its engines failed of, in words.
    """

    how: str
    counts: dict[tuple[int, int, State], int]
    seconds: float
    resumed: bool
    reused: Reused | None = None
    engines: dict[int, tuple[str, ...]] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    silent: tuple[Silent, ...] = ()
    error: str = ""

    def of(self, state: State) -> int:
        """Tasks in a state."""
        return sum(tasks for (_, _, one), tasks in self.counts.items() if one == state)

    @property
    def exit_code(self) -> int:
        """0: all answered or skipped; 1: some are dead or blocked; 130: it was stopped."""
        if self.how != "done":
            return 130
        return 1 if self.of(State.DEAD) + self.of(State.BLOCKED) else 0


class EnginesFailedError(EngineError):
    """Engines of a run did not start, or died again and again.

    Attributes:
        ended: How the run ended by that; what was answered before is kept.
    """

    def __init__(self, ended: Ended) -> None:
        super().__init__(ended.error)
        self.ended = ended
