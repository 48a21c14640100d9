"""What the hub asks of a scheduler (``core.Scheduler``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lengthwise.gateway.config import Admission, Dispatch, Order
from lengthwise.gateway.decisions import Decisions, Statistics, WorkerState
from lengthwise.gateway.request import Forecast, Refusal, Request


class Scheduler(Protocol):
    """What the hub asks of ``gateway.core.Scheduler``."""

    def offer(self, now_s: float, request: Request) -> Refusal | None: ...  # noqa: D102
    def reforecast(self, now_s: float, id: int, forecast: Forecast) -> None: ...  # noqa: A002, D102
    def progressed(self, now_s: float, id: int, generated_tokens: int) -> None: ...  # noqa: A002, D102
    def uncuttable(self, now_s: float, id: int) -> None: ...  # noqa: A002, D102
    def returned(  # noqa: D102
        self,
        now_s: float,
        id: int,  # noqa: A002
        generated_tokens: int,
        *,
        avoid: str = "",
    ) -> None: ...
    def queue_full(  # noqa: D102
        self,
        now_s: float,
        worker: str,
        id: int,  # noqa: A002
        hold_s: float = 0.0,
    ) -> None: ...
    def left(self, now_s: float, id: int) -> None: ...  # noqa: A002, D102
    def workers(self, now_s: float, states: Sequence[WorkerState]) -> tuple[int, ...]: ...  # noqa: D102
    def configure(  # noqa: D102
        self, now_s: float, order: Order, admission: Admission, dispatch: Dispatch
    ) -> None: ...
    def decide(self, now_s: float) -> Decisions: ...  # noqa: D102
    def next_s(self, now_s: float) -> float: ...  # noqa: D102
    def statistics(self, now_s: float) -> Statistics: ...  # noqa: D102
    def position(self, id: int) -> int | None: ...  # noqa: A002, D102
