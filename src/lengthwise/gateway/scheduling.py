"""The records between the scheduler driver and the scheduler: states of workers, decisions, statistics."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.gateway.request import Rejection

PASSTHROUGH_MODES = ("observe", "engine-priority", "engine-plugin")
"""Modes in which requests are dispatched at once, up to an engine's ``in_flight``."""


@dataclass(frozen=True, slots=True)
class Signals:
    """Load that an engine reports; None where it does not.

    Attributes:
        running: Requests in its batch.
        kv_used: Share of the KV cache in use.
        preemptions: Since its start.
    """

    running: float | None = None
    waiting: float | None = None
    kv_used: float | None = None
    preemptions: float | None = None
    at_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker as reported to the scheduler.

    Attributes:
        up: Whether it may be given requests (healthy, circuit closed, not draining).
        in_flight: A fixed limit, or None: adapted from signals, and unlimited where the engine orders.
        slots: Most sequences it runs at once (llama.cpp's slots, vLLM's max_num_seqs); None unknown.
        epoch: Grows with every restart: whatever was in flight before is lost.
        renamed_from: Former name, with the same epoch: requests in flight stay in flight; "" not renamed.
        address: Workers at one address, one of them leaving (``renamed_from``), are one engine; "" unknown.
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
    """A finished phase of mode rra.

    Attributes:
        cause: "steps" (all iterations done), "idle" (no request left) or "stalled" (not waiting for slow streams).
        finished_s: When the next phase could begin, or no request was left.
        prefill_batch: Requests of its prefill; ``decode_batch`` those at the worker after it.
        decode_steps: Iterations until its end.
        left_batch: Requests at the worker at its end.
        overdue: Requests dispatched within it since they had waited ``max_wait_s``.
    """

    worker: str
    cause: str
    started_s: float
    finished_s: float
    prefill_batch: int
    prompt_tokens: int
    decode_batch: int
    decode_steps: int
    left_batch: int
    overdue: int = 0


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions to carry out now, in this order.

    Attributes:
        expire: Requests that have waited too long, with the reason.
        preempt: Requests to abort at their worker and to return with their tokens so far.
        assign: (request, worker) to dispatch; only where there is room before the preemptions have ended.
        phases: Phases that finished since the last decisions.
    """

    expire: tuple[tuple[int, Rejection], ...] = ()
    preempt: tuple[int, ...] = ()
    assign: tuple[tuple[int, str], ...] = ()
    phases: tuple[Phase, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.expire or self.preempt or self.assign or self.phases)


@dataclass(frozen=True)
class WorkerNumbers:
    """Current numbers of a worker: requests in flight, limit (``cap``; None: none), predicted backlog."""

    name: str
    up: bool
    in_flight: int
    cap: int | None
    backlog_token_s: float
    backlog_tokens: float
    signals: Signals


@dataclass(frozen=True)
class Statistics:
    """Current numbers of the scheduler, for metrics, autoscaling and the admin page.

    Attributes:
        backlog_tokens: Predicted output tokens still to come, waiting and running.
        backlog_s: Seconds for them at the rate of all workers together.
        predicted_wait_s: Predicted wait of a request that arrives now.
        ordering: Whether the order matters now: requests wait.
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
    workers: tuple[WorkerNumbers, ...] = ()
