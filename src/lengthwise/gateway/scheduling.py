"""What the hub asks of a scheduler (``core.Scheduler``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lengthwise.gateway.config import Admission, Dispatch, Order
from lengthwise.gateway.request import LengthPrediction, Rejection, Request

PASSTHROUGH_MODES = ("observe", "engine-priority", "engine-plugin")
"""Modes in which requests are sent at once, up to an engine's ``in_flight``: it orders them, or nobody does."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What an engine tells of itself; None where it does not.

    Attributes:
        running: Requests in its batch.
        waiting: Requests in its own queue.
        kv_used: Share of the KV cache in use.
        preemptions: Counted since it started.
        at_s: When it was asked.
    """

    running: float | None = None
    waiting: float | None = None
    kv_used: float | None = None
    preemptions: float | None = None
    at_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker as the scheduler sees it.

    Attributes:
        name: Unique.
        models: Names that it serves.
        up: Whether it may be given requests (healthy, circuit closed, not draining).
        in_flight: A fixed cap, or None: adapted from signals, and none at all where the engine orders.
        slots: The most it runs at once, where it tells (llama.cpp's slots, vLLM's max_num_seqs); None unknown.
        kv_tokens: KV tokens it holds, where it tells.
        tokens_per_s: Output tokens a second it was last seen to make in all; None unknown.
        signals: What it told last.
        epoch: Grows when it came back: whatever was in flight before is not any more.
        was: How it was called before, with the same epoch: what was in flight there still is; "" never otherwise.
        place: Where it is: one that leaves (``was``) and one at the same place are one engine; "" unknown.
    """

    name: str
    models: tuple[str, ...]
    up: bool = True
    in_flight: int | None = None
    slots: int | None = None
    kv_tokens: int | None = None
    tokens_per_s: float | None = None
    signals: Signals = Signals()
    epoch: int = 0
    renamed_from: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of mode rra that is over, as it was.

    Attributes:
        worker: Whose.
        cause: What ended it: "steps" all iterations were there, "idle" nobody was left, "stalled" the slowest were not
            waited for any longer.
        started_s: Its encoding began.
        finished_s: The next one could begin, or nobody was left.
        encode_batch: Requests of its encoding.
        prompt_tokens: Of these.
        decode_batch: Requests at the worker after its encoding.
        decode_steps: Iterations counted until its end.
        left_batch: Requests at the worker at its end.
        overdue: Requests that were sent in its midst since they had waited too long.
    """

    worker: str
    cause: str
    started_s: float
    finished_s: float
    encode_batch: int
    prompt_tokens: int
    decode_batch: int
    decode_steps: int
    left_batch: int
    overdue: int = 0


@dataclass(frozen=True, slots=True)
class Decisions:
    """What is to be done now, in this order.

    Attributes:
        expire: Requests that wait in vain.
        cut: Requests to be aborted at their worker and brought back with their tokens so far.
        assign: (request, worker): to be sent. Sent before the cuts have ended only where there is room.
        phases: Phases that are over since the last decisions.
    """

    expire: tuple[tuple[int, Rejection], ...] = ()
    cut: tuple[int, ...] = ()
    assign: tuple[tuple[int, str], ...] = ()
    phases: tuple[Phase, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.expire or self.cut or self.assign or self.phases)


@dataclass(frozen=True)
class WorkerNumbers:
    """A worker now: requests in flight, cap (None: none), predicted backlog."""

    name: str
    up: bool
    in_flight: int
    cap: int | None
    backlog_token_s: float
    backlog_tokens: float
    signals: Signals


@dataclass(frozen=True)
class Statistics:
    """The scheduler now, for metrics, autoscaling and the admin page.

    Attributes:
        waiting: Requests in the queue.
        waiting_bytes: Their bodies.
        running: Requests at workers.
        oldest_wait_s: Of who waits.
        backlog_tokens: Predicted output tokens still to come, waiting and running.
        backlog_s: Seconds in which all workers together would make them (token-seconds over throughput).
        predicted_wait_s: What a request that arrives now would wait.
        ordering: Whether order matters now: somebody waits.
        cuts: Preemptions so far.
        workers: One each.
    """

    waiting: int
    waiting_bytes: int
    running: int
    oldest_wait_s: float
    backlog_tokens: float
    backlog_s: float
    predicted_wait_s: float
    ordering: bool
    preemptions: int
    workers: tuple[WorkerNumbers, ...] = field(default=())


class Scheduler(Protocol):
    """What the hub asks of ``gateway.core.Scheduler``."""

    def offer(self, now_s: float, request: Request) -> Rejection | None: ...  # noqa: D102
    def reforecast(self, now_s: float, id: int, length_prediction: LengthPrediction) -> None: ...  # noqa: A002, D102
    def progressed(self, now_s: float, id: int, generated_tokens: int) -> None: ...  # noqa: A002, D102
    def mark_nonpreemptible(self, now_s: float, id: int) -> None: ...  # noqa: A002, D102
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
