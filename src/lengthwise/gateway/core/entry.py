"""A request between its offer and its end, as the scheduler keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from lengthwise.gateway.request import Forecast, Request

PREFILL_WEIGHT = 0.1
"""What a prompt token costs of an output token: a batch computes prompts about ten times as fast."""


class State(Enum):
    """Where a request is; it is in exactly one."""

    GATHERING = "gathering"
    """In a bin that is not full."""
    WAITING = "waiting"
    RUNNING = "running"
    CUT = "cut"
    """Still at its worker, to be aborted and brought back."""
    LOST = "lost"
    """Its worker is gone; the caller brings it back or fails it."""


@dataclass(slots=True, eq=False)
class Entry:
    """A live request with what the scheduler must remember of it.

    Attributes:
        request: The caller's; the fields below its line are changed here alone.
        slot: Its row of the columns.
        state: Where it is.
        predicted: Predicted length of the whole output, from 0 to what the client asked for at most.
        overdue: It has waited too long and goes before all who have not.
        remaining: Predicted tokens still to come, at least 1.
        worker: Where it is or was last; "" never sent.
        work: What it adds to its worker's backlog: tokens still to come and its prompt's cost.
        kv_tokens: What it will hold at its worker.
        charged: Output tokens that its tenant was charged for.
        admissions: How often it was sent.
        boundary: Generated tokens at which its window is over.
        settled: Generated tokens below which it is not cut again.
        batch: Number of the completed bin it left in; 0 none.
        kept: Whether it cannot be cut where it is: its engine could not go on with it elsewhere.
        heard_s: When tokens of it came last, where it is; NaN none have.
        cut_s: When it was last to be brought back.
        late_tokens: What is to come of it if it has come far into its forecast; NaN nobody has asked.
    """

    request: Request
    slot: int = -1
    state: State = State.WAITING
    predicted: float = 0.0
    overdue: bool = False
    remaining: float = 1.0
    worker: str = ""
    work: float = 0.0
    kv_tokens: float = 0.0
    charged: float = 0.0
    admissions: int = 0
    boundary: int = 0
    settled: int = 0
    batch: int = 0
    kept: bool = False
    heard_s: float = math.nan
    cut_s: float = math.nan
    late_tokens: float = math.nan

    def believe(self, forecast: Forecast) -> None:
        """Takes a forecast, bounded by what was asked for: no prediction can do more harm than that."""
        request = self.request
        request.forecast, self.late_tokens = forecast, math.nan
        most = float(max(1, request.max_tokens))
        total = forecast.total_tokens
        self.predicted = min(max(total, 0.0), most) if total == total else most  # noqa: PLR0124  NaN
        self.settle()

    def renamed(self, before: str, now: str) -> None:
        """A worker is called otherwise; of who is there it is told by the worker itself."""
        q = self.request
        if before in q.avoid:
            q.avoid = q.avoid - {before} | {now}
        if self.worker == before and self.state not in (State.RUNNING, State.CUT):
            self.worker = now

    def settle(self) -> None:
        """What follows from the prediction and the tokens so far."""
        request = self.request
        self.remaining = max(1.0, self.predicted - request.generated_tokens)
        context = request.prompt_tokens + request.generated_tokens
        self.work = self.remaining + PREFILL_WEIGHT * context
        self.kv_tokens = context + self.remaining
