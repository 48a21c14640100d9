"""A request as the scheduler knows it, what is predicted of it, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.leading import NOTHING, Leading

Floats = npt.NDArray[np.float64]
MOST_TOKENS = float(1 << 20)


class Outcome(StrEnum):
    """The bucket in which a request ends; every request is in exactly one, and they add up to what arrived."""

    FINISHED = "finished"
    REFUSED = "refused"
    """Not let in: limits, rate, queue full, predicted wait (429, 503)."""
    REJECTED = "rejected"
    """The engine said no (4xx): the client's own fault, passed on."""
    FAILED = "failed"
    """No engine could finish it."""
    CLIENT_GONE = "client_gone"
    EXPIRED = "expired"
    """It waited while no engine was there, or beyond its own deadline."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is predicted of an output's whole length; never the true one.

    Attributes:
        total_tokens: The statistic that orders (tokens so far included).
        source: "predictor", "prior" (late, failed or none), "told" (the client fixed it), "oracle" (tests).
        quantiles: [25] float64 at ``predict.LEVELS``, or None where only the statistic is known.
        at_tokens: The tokens that had been generated when it was made.
    """

    total_tokens: float
    source: str = "prior"
    quantiles: Floats | None = None
    at_tokens: int = 0

    def remaining_tokens(self, generated_tokens: int) -> float:
        """What is still to come, at least 1."""
        return max(1.0, self.total_tokens - generated_tokens)


NO_FORECAST = Forecast(256.0)


@dataclass(slots=True, eq=False)
class Request:
    """One request, live: the edge makes it, the scheduler alone changes what is below the line.

    Attributes:
        id: Unique in this process, in order of arrival.
        arrival_s: When its body had come, on the gateway's clock.
        model: The name that the client asked for.
        prompt_tokens: Counted or estimated from the text.
        max_tokens: The longest output it asked for (the limit's, where it did not).
        tenant: Number of the tenant (0: anonymous).
        priority: Class; smaller goes first.
        body_bytes: What it holds of the queue's bytes.
        session: Requests of one session like the same engine; "" none.
        leading: How its prompt begins: others that begin alike like the same engine.
        resumable: Whether a cut cannot change its answer.
        forecast: What is predicted now.
        deadline_s: When the client gives up unless its answer has begun, on the gateway's clock; inf unknown.
        told_tokens: The length that the client fixed (``forecast.told_tokens``); 0: none.
        choices: Outputs that were asked for; lengths are learnt from one alone.
        at_once: Whether its engine tells nothing of its answer before the end: what comes first is all, no first token.
        whole: Whether its client gets the answer in one piece, at its end (it is not streamed).
    """

    id: int
    arrival_s: float
    model: str
    prompt_tokens: int
    max_tokens: int
    tenant: int = 0
    priority: int = 0
    body_bytes: int = 0
    session: str = ""
    leading: Leading = NOTHING
    resumable: bool = False
    forecast: Forecast = NO_FORECAST
    deadline_s: float = float("inf")
    told_tokens: int = 0
    choices: int = 1
    at_once: bool = False
    whole: bool = False
    # Of the scheduler:
    generated_tokens: int = 0
    worker: str = ""
    """Where it runs; "" while it waits."""
    waited_s: float = 0.0
    """In the queue, in all, up to its last dispatch."""
    queued_s: float = field(default=float("nan"))
    """When it joined the queue last."""
    dispatched_s: float = field(default=float("nan"))
    preemptions: int = 0
    cached_tokens: int = 0
    """Of its prompt, believed to be in the cache of the worker that it was sent to last."""
    avoid: frozenset[str] = frozenset()
    """Workers that failed it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not served: an HTTP status, what to tell, and when to come again (None: nothing to say)."""

    status: int
    reason: str
    message: str
    retry_after_s: float | None = None
