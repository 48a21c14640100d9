"""What all journeys share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.relay._budget import Budget
from lengthwise.gateway.relay._seams import Fleet, Worker
from lengthwise.gateway.request import Request

if TYPE_CHECKING:
    from lengthwise.gateway.relay._journey import Journey


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all journeys share.

    Attributes:
        fleet: The engines.
        config: The gateway's.
        budget: Of retries.
        hinted: A body with what the engine is told besides.
        window: Called when a request's output passed a window.
        spawn: Runs something beside.
        hears: Whether the text of answers is kept, for a predictor that reads it.
    """

    fleet: Fleet
    config: GatewayConfig
    budget: Budget
    hinted: Callable[[Request, Worker, bytes], bytes]
    window: Callable[[Journey], None]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    hears: bool = False
