"""The records between the scheduler driver and the scheduler: states of workers, decisions, statistics."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.gateway.request import Refusal

PASSTHROUGH_MODES = ("observe", "engine-priority", "engine-plugin")
"""Modes in which requests are dispatched at once, up to an engine's ``concurrency``."""


@dataclass(frozen=True, slots=True)
class Signals:
    """Load that an engine reports; None where it does not."""

    running: float | None = None  # requests in its batch
    waiting: float | None = None
    kv_used: float | None = None  # share of the KV cache in use
    preemptions: float | None = None  # since its start
    at_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker as reported to the scheduler."""

    name: str
    models: tuple[str, ...]
    up: bool = True  # whether it may be given requests (healthy, circuit closed, not draining)
    concurrency: int | None = None  # a fixed limit; None: adapted from signals, unlimited where the engine orders
    slots: int | None = None  # most sequences that it runs at once, if it reports them (llama.cpp's slots)
    kv_tokens: int | None = None
    tokens_per_s: float | None = None
    signals: Signals = Signals()
    epoch: int = 0  # grows with every restart: whatever was in flight before is lost
    renamed_from: str = ""  # former name of a worker that drains since another engine took it; "": it stays
    address: str = ""  # a leaving worker and its successor at the same address are one engine; "" unknown


@dataclass(slots=True)
class Phase:
    """A phase of mode rra, reported when the next one begins or no request is left."""

    worker: str
    cause: str  # "steps" (all iterations done), "idle" (no request left) or "stalled" (slow streams not awaited)
    started_s: float
    finished_s: float = float("nan")  # when the next phase began; where no request was left, at the last token
    prefill_batch: int = 0  # requests of its prefill; ``decode_batch`` those at the worker after it
    prompt_tokens: int = 0
    decode_batch: int = 0
    decode_steps: int = 0  # iterations until its end
    remaining_batch: int = 0  # requests at the worker at its end
    overdue: int = 0  # requests dispatched within it since they had waited ``max_wait_s``


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions to carry out now, in this order."""

    expire: tuple[tuple[int, Refusal], ...] = ()  # requests that have waited too long, with the reason
    preempt: tuple[int, ...] = ()  # requests to abort at their worker and to return with their tokens so far
    # (request, worker) to dispatch, each to a slot that is free already, not one that ``preempt`` will free.
    assign: tuple[tuple[int, str], ...] = ()
    phases: tuple[Phase, ...] = ()  # phases that finished since the last decisions

    def __bool__(self) -> bool:
        return bool(self.expire or self.preempt or self.assign or self.phases)


@dataclass(frozen=True)
class WorkerNumbers:
    """Current numbers of a worker: requests in flight, limit (None: none), predicted backlog."""

    name: str
    up: bool
    in_flight: int
    limit: int | None
    backlog_s: float
    backlog_tokens: float
    signals: Signals


@dataclass(frozen=True)
class Statistics:
    """Current numbers of the scheduler, for metrics, autoscaling and the admin page."""

    waiting: int
    waiting_bytes: int
    running: int
    oldest_wait_s: float
    backlog_tokens: float  # predicted output tokens still to come, waiting and running
    backlog_s: float  # seconds for them at the rate of all workers together
    predicted_wait_s: float  # predicted wait of a request that arrives now
    ordering: bool  # whether the order matters now: requests wait
    preemptions: int
    workers: tuple[WorkerNumbers, ...] = ()
