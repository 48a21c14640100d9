"""Records that the scheduler exchanges with its driver: states of workers, decisions, statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

from lengthwise.gateway.request import Refusal

PASSTHROUGH_MODES = ("observe", "engine-priority", "engine-plugin")
"""Modes that dispatch requests at once, up to an engine's ``concurrency``."""


@dataclass(frozen=True, slots=True)
class Signals:
    """The load that an engine reports. A number that the engine does not report is None."""

    running: float | None = None  # requests in its batch
    waiting: float | None = None
    kv_used: float | None = None  # share of the KV cache in use
    preemptions: float | None = None  # since the engine started
    at_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state of a worker, as the fleet reports it to the scheduler."""

    name: str
    models: tuple[str, ...]
    up: bool = True  # whether it may be given requests (``EngineWorker.unavailable_reason`` is empty)
    # limit set by configuration, half-open circuit or ramp; None: adapted to signals (unlimited in passthrough modes)
    concurrency: int | None = None
    slots: int | None = None  # most sequences that the engine runs at once, if it reports them
    kv_tokens: int | None = None
    tokens_per_s: float | None = None
    signals: Signals = Signals()
    epoch: int = 0  # grows with every restart, which loses all requests in flight
    renamed_from: str = ""  # of a leaving worker: its name before a new worker took that name; "" none
    address: str = ""  # a renamed worker and a new one at the same address are one engine; "" unknown


@dataclass(slots=True)
class Phase:
    """A phase of one worker in mode rra: a prefill, then the decode iterations until the next prefill or until idle."""

    worker: str
    cause: str  # of its end: "steps" (all iterations done), "idle" (no request left), "stalled" (slow streams)
    started_s: float
    finished_s: float = float("nan")  # when the next phase began; if no request was left, time of the last token
    prefill_batch: int = 0  # requests of its prefill; ``decode_batch`` are those at the worker after the prefill
    prompt_tokens: int = 0
    decode_batch: int = 0
    decode_steps: int = 0  # iterations until its end
    remaining_batch: int = 0  # requests at the worker at its end
    overdue: int = 0  # requests dispatched after the prefill because they had waited ``max_wait_s``


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions to carry out now: expire, then preempt, then assign. ``phases`` are only reports."""

    expire: tuple[tuple[int, Refusal], ...] = ()  # requests that have waited too long, with the reason
    preempt: tuple[int, ...] = ()  # requests to abort at their worker and to return with their tokens so far
    assign: tuple[tuple[int, str], ...] = ()  # (request, worker) to dispatch, to slots that are free already
    phases: tuple[Phase, ...] = ()  # phases that have ended since the last decisions

    def __bool__(self) -> bool:
        return bool(self.expire or self.preempt or self.assign or self.phases)


@dataclass(slots=True)
class DispatchCounts:
    """The requests that a worker got since the start, each counted when it is first dispatched."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, probably cached there, by the prompts that the worker got before


@dataclass(frozen=True)
class WorkerNumbers:
    """Current numbers of a worker: requests in flight, the limit (None if unlimited), and predicted remaining work."""

    name: str
    up: bool
    in_flight: int
    limit: int | None
    backlog_s: float  # seconds of prefill and decode left
    backlog_tokens: float
    signals: Signals
    dispatched: DispatchCounts = field(default_factory=DispatchCounts)


@dataclass(frozen=True)
class Statistics:
    """Current numbers of the scheduler, for metrics, autoscaling and the admin page."""

    waiting: int
    waiting_bytes: int
    running: int
    oldest_wait_s: float
    backlog_tokens: float  # predicted remaining output tokens of waiting and running requests
    backlog_s: float  # seconds in which all workers together generate them
    predicted_wait_s: float  # predicted wait of a request that arrives now
    ordering: bool  # whether the order matters now: requests wait
    preemptions: int
    workers: tuple[WorkerNumbers, ...] = ()
    router: str = ""  # which chooses workers
