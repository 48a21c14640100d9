"""Records that the scheduler exchanges with its driver: worker states, decisions, statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

from lengthwise.gateway.request import Refusal

PASSTHROUGH_MODES = ("observe", "engine-priority", "engine-plugin")
"""Modes that dispatch every request at once, unless ``concurrency`` limits the requests at an engine."""


@dataclass(frozen=True, slots=True)
class Signals:
    """The load that an engine reports. A number that the engine does not report is None."""

    running: float | None = None  # requests in its batch
    waiting: float | None = None  # requests in the engine's own queue
    kv_used: float | None = None  # share of the KV cache in use
    preemptions: float | None = None  # since the engine started
    at_s: float = float("-inf")  # time of the report on the gateway's clock; -inf: no report


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The state of a worker, as the fleet reports it to the scheduler."""

    name: str
    models: tuple[str, ...]
    up: bool = True  # whether it may receive requests (``EngineWorker.unavailable_reason`` is empty)
    # limit set by configuration, half-open circuit or ramp; None: adapted (PASSTHROUGH_MODES: none; rra: schedule's)
    concurrency: int | None = None
    slots: int | None = None  # maximum number of sequences that the engine runs at once; None: not reported
    kv_tokens: int | None = None  # size of its KV cache; None: not reported
    tokens_per_s: float | None = None  # output rate between its last two reports; None: unknown
    signals: Signals = Signals()
    epoch: int = 0  # grows with every restart, which loses all requests in flight
    renamed_from: str = ""  # former name of a worker that drains, if a new worker has taken that name; "" none
    address: str = ""  # URL; a renamed worker and a new worker with the same URL are one engine; "" unknown


@dataclass(slots=True)
class Phase:
    """A phase of one worker in mode rra: a prefill, then the decode iterations until the next prefill or until idle."""

    worker: str
    cause: str  # cause of its end: "steps" (all iterations done), "idle" (no request left), "stalled" (slow streams)
    started_s: float
    finished_s: float = float("nan")  # start of the next phase, or time of the last token if no request is left
    prefill_batch: int = 0  # requests of its prefill
    prompt_tokens: int = 0  # of its prefill
    decode_batch: int = 0  # requests at the worker after the prefill
    decode_steps: int = 0  # iterations until its end
    remaining_batch: int = 0  # requests at the worker at its end
    overdue: int = 0  # requests dispatched after the prefill because they had waited ``max_wait_s``


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions to carry out now, in the order of the fields, except for ``phases``, which are only reports."""

    expire: tuple[tuple[int, Refusal], ...] = ()  # (id of a request that has waited too long, answer to its client)
    preempt: tuple[int, ...] = ()  # ids of requests to abort at their worker and to requeue with their tokens so far
    assign: tuple[tuple[int, str], ...] = ()  # (id of a request, name of the worker to which it is dispatched)
    phases: tuple[Phase, ...] = ()  # phases that have ended since the last decisions

    def __bool__(self) -> bool:
        return bool(self.expire or self.preempt or self.assign or self.phases)


@dataclass(slots=True)
class DispatchCounts:
    """Requests dispatched to a worker since the start. Only the first dispatch of a request counts."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that the worker had probably cached, judged by earlier prompts


@dataclass(frozen=True)
class WorkerStatistics:
    """Current numbers of a worker."""

    name: str
    up: bool
    in_flight: int  # requests at the worker
    limit: int | None  # maximum number of requests at the worker; None: no limit
    backlog_s: float  # predicted seconds of prefill and decode left
    backlog_tokens: float  # predicted remaining output tokens
    signals: Signals
    dispatched: DispatchCounts = field(default_factory=DispatchCounts)


@dataclass(frozen=True)
class SharedState:
    """State of a shared queue at one of its gateways."""

    shared: bool  # False: there is no leader, so that this gateway orders only its own requests
    leads: bool  # whether this gateway schedules the requests of all
    gateway: str  # name of this gateway
    leader: str  # name of the gateway that leads, "" if none does
    gateways: int  # gateways that are alive, with this one
    epoch: int  # larger at each later leader


@dataclass(frozen=True)
class Statistics:
    """Current numbers of the scheduler, for metrics, autoscaling and the admin page."""

    waiting: int  # requests in the queue and in bins
    waiting_bytes: int  # size of their bodies
    running: int  # requests at workers
    oldest_wait_s: float
    backlog_tokens: float  # predicted remaining output tokens of waiting and running requests
    backlog_s: float  # seconds in which all workers together generate them
    predicted_wait_s: float  # predicted wait of a request that arrives now
    ordering: bool  # whether requests wait, so that their order matters
    preemptions: int  # since the start
    workers: tuple[WorkerStatistics, ...] = ()
    router: str = ""  # name of the router
    shared_queue: SharedState | None = None  # None: no shared queue is configured
