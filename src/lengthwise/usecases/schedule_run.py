"""Runs a schedule on real engines: a gateway (in mode rra if the schedule has phases) and the load generator."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import measure
from lengthwise.backend.openai import Client
from lengthwise.backend.openai_protocol import Capabilities, Server
from lengthwise.config.scenario import Scenario
from lengthwise.gateway.concurrency_probe import probe_max_num_seqs
from lengthwise.gateway.config import Dispatch, Engine, GatewayConfig, Listen, Order, Phases, PredictionConfig
from lengthwise.gateway.protocols import Listener
from lengthwise.gateway.replanning import ReplanEvent, ReplannerFactory, ReplanningState
from lengthwise.gateway.scheduling import Phase
from lengthwise.gateway.serve import background_gateway
from lengthwise.gateway.telemetry import Row
from lengthwise.report.formatting import counted
from lengthwise.report.json_file import json_text
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import RunResult
from lengthwise.schema.schedule import ScheduleRow
from lengthwise.schema.workload import Workload
from lengthwise.statistics import batch_half_width
from lengthwise.usecases.bench import requests
from lengthwise.usecases.schedule_adaptation import Adapted, FollowOptions, follower_factory, limited
from lengthwise.usecases.schedule_plan import PlannedRun, planned_run

Floats = npt.NDArray[np.float64]
Interval = tuple[float, float, float]  # (value, low, high); NaN where there is too little data
UNKNOWN = (math.nan, math.nan, math.nan)
LEVEL = 0.95  # confidence level of the intervals
MIN_PHASES, MIN_REQUESTS = 3, 1000  # phases that an interval needs; least requests of a run whose number is not given
SPARE_BATCHES = 3  # prefill batches that wait besides the running requests: the queue always has a complete one
ADAPTED_SEQS = 2  # a schedule that follows lengths may use up to this multiple of the planned requests at an engine
_WARM_UP = 0.25  # share of the time in which batches fill; it is left out
_COUNTED_PHASES = 30  # phases per engine: the half-width of a mean is then a third of a phase's standard deviation
_SPLIT_ROUNDS = 4  # a split schedule's requests over those in flight; the first quarter of the time does not count
_SPANS, _MIN_FINISHED = 20, 10  # time spans that a mean's interval comes from, and requests that finish in each
_REPLAN_S = 300.0


@dataclass(frozen=True)
class ObservedNumber:
    """An observed number with its 95 % interval, and the planned number."""

    name: str
    unit: str
    planned: float  # NaN if the plan has none
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ScheduleOutcome:
    """What was observed while a schedule ran."""

    seen: tuple[ObservedNumber, ...]
    phases: int
    all_phases: int
    completed: dict[str, int]
    requests: int
    bound_s: float  # the latency bound; infinite: none
    satisfied: bool | None  # whether the latency is within it; None: too few requests
    significant: bool


def schedule_outcome(
    planned: PlannedRun, phases: Sequence[Phase], rows: Sequence[Row], engines: int
) -> ScheduleOutcome:
    """Return what was observed while the queue was full, after the batches had filled.

    The planned latency is for outputs of one length. It is compared with the quantile ``planned.share`` of all
    latencies, about the share of outputs up to that length, because longer outputs do not finish earlier.
    """
    row, (from_s, to_s) = planned.row, counted_span_s(rows)
    steady = [one for one in phases if from_s <= one.started_s <= to_s]
    served_s = [r.served_s for r in rows if r.outcome == "finished" and from_s <= r.dispatched_s <= to_s]
    latency = quantile(served_s, planned.share)
    cycle_s = np.array([one.finished_s - one.started_s for one in steady])
    seen = (
        ObservedNumber("prefill batch, B_E", "", row.prefill_batch, *mean(_column(steady, "prefill_batch"))),
        ObservedNumber("decode iterations, N_D", "", row.decode_steps, *mean(_column(steady, "decode_steps"))),
        ObservedNumber("decode batch, B_D", "", row.decode_batch, *mean(_column(steady, "decode_batch"))),
        ObservedNumber("cycle", "s", row.cycle_s, *mean(cycle_s)),
        ObservedNumber("throughput", "requests/s", engines * row.throughput_rps, *_rate(steady)),
        ObservedNumber(f"latency of {counted(planned.bound.tokens, 'token')}", "s", row.latency_s, *latency),
    )
    causes = dict(Counter(one.cause for one in phases))
    bound_s = planned.bound.limit_s
    return ScheduleOutcome(
        seen, len(steady), len(phases), causes, len(served_s), bound_s, *within_bound(bound_s, latency)
    )


def requests_to_count(row: ScheduleRow, engines: int = 1) -> int:
    """Return how many requests a run needs, so that enough phases are measured after the batches have filled."""
    counted = _COUNTED_PHASES * row.prefill_batch / (1 - _WARM_UP)
    filling = (row.decode_batch + row.prefill_batch) / _WARM_UP
    return max(MIN_REQUESTS, engines * math.ceil(max(counted, filling)))


def mean(values: Floats) -> Interval:
    """Return the mean of consecutive values with a t interval that allows for correlated neighbours (Skart, 2011)."""
    if not len(values):
        return UNKNOWN
    center = float(values.mean())
    if len(values) < MIN_PHASES:
        return center, math.nan, math.nan
    half = float(batch_half_width(values[:, None], center, LEVEL)[0])
    return center, center - half, center + half


def _rate(phases: Iterable[Phase]) -> Interval:
    """Return the sum of the workers' rates. A rate is the requests of a worker's phases divided by their seconds."""
    by_worker: defaultdict[str, list[Phase]] = defaultdict(list)
    for one in phases:
        by_worker[one.worker].append(one)
    if not by_worker:
        return UNKNOWN
    rate, variance = 0.0, 0.0
    for own in by_worker.values():
        new = _column(own, "prefill_batch") + _column(own, "overdue")
        duration_s = np.array([one.finished_s - one.started_s for one in own])
        own_rate = float(new.sum() / duration_s.sum())
        rate += own_rate
        residuals = (new - own_rate * duration_s)[:, None]
        half = batch_half_width(residuals, 0.0, LEVEL)[0] / duration_s.mean() if len(own) >= MIN_PHASES else math.nan
        variance += float(half) ** 2
    half = math.sqrt(variance)
    return rate, rate - half, rate + half


def quantile(values: Sequence[float], level: float) -> Interval:
    """Return a quantile with an interval from order statistics. With too few values, the upper end is infinite."""
    from scipy.stats import binom

    n, ascending = len(values), sorted(values)
    if n == 0:
        return UNKNOWN
    rank = min(n, max(1, math.ceil(level * n)))
    low = int(binom.ppf((1 - LEVEL) / 2, n, level))
    high = int(binom.ppf((1 + LEVEL) / 2, n, level)) + 1
    return ascending[rank - 1], ascending[max(low, 1) - 1], ascending[high - 1] if high <= n else math.inf


def within_bound(bound_s: float, latency: Interval) -> tuple[bool | None, bool]:
    """Return whether a latency is within a bound (None if unknown), and whether the complete interval agrees."""
    value, low, high = latency
    if math.isinf(bound_s):
        return True, True
    if math.isnan(value):
        return None, False
    return value <= bound_s, high <= bound_s or low > bound_s


def counted_span_s(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the (start, end) of the measured time: from when the batches have filled to the last arrival."""
    if not rows:
        return math.inf, -math.inf
    first_s, last_s = min(one.arrival_s for one in rows), max(one.arrival_s for one in rows)
    return first_s + _WARM_UP * (last_s - first_s), last_s


def _column(phases: Iterable[Phase], name: str) -> Floats:
    return np.array([getattr(one, name) for one in phases], np.float64)


@dataclass(frozen=True)
class ScheduleLoad:
    """How requests arrive. By default a closed loop keeps the queue full."""

    concurrency: int | None = None  # requests in the system at a time; None: as many as keep the queue full
    rate_rps: float | None = None  # requests a second instead, Poisson: the queue may run empty
    seed: int = 0
    report: Callable[[int, int], None] = lambda *_: None

    def bench(
        self, gateway: str, workload: Workload, filling: int, capabilities: Capabilities | None = None
    ) -> RunResult:
        """Send the requests to a gateway. ``filling`` is the number of concurrent requests that keep its queue full."""
        concurrency = self.concurrency
        if concurrency is None and self.rate_rps is None:
            concurrency = min(len(workload), filling)
        settings = measure.LoadSettings(rate_rps=self.rate_rps, concurrency=concurrency, seed=self.seed)
        return measure.bench(Server(gateway), workload, settings, capabilities=capabilities, report=self.report)


def split_in_flight(row: ScheduleRow) -> int:
    """Return the number of requests in flight at a pair of engines, one of which prefills and the other decodes.

    The number is the sum of a decode batch, the prefill batch that joins it, and the next prefill batch.
    """
    return math.ceil(row.decode_batch) + 2 * row.prefill_batch


def split_requests(row: ScheduleRow, routers: int = 1) -> int:
    """Return how many requests suffice to measure a split schedule, including the requests that fill all queues."""
    return max(MIN_REQUESTS, _SPLIT_ROUNDS * _split_filling(row) * routers)


def _split_filling(row: ScheduleRow) -> int:
    return split_in_flight(row) + SPARE_BATCHES * row.prefill_batch


def split_outcome(planned: PlannedRun, rows: Sequence[Row], routers: int) -> ScheduleOutcome:
    """Return the observed throughput and latency of a split schedule, whose plan is for one pair of engines."""
    row = planned.row
    # If all requests are admitted at once, none waits: the queue is never full.
    from_s, to_s = counted_span_s(rows if len(rows) > routers * split_in_flight(row) else ())
    finished = [one for one in rows if one.outcome == "finished"]
    served_s = [one.served_s for one in finished if from_s <= one.dispatched_s <= to_s]
    latency = quantile(served_s, planned.share)
    rate, in_flight = _over_spans(finished, from_s, to_s)
    seen = (
        ObservedNumber("requests in flight", "", math.nan, *mean(in_flight)),
        ObservedNumber("throughput", "requests/s", routers * row.throughput_rps, *mean(rate)),
        ObservedNumber(f"latency of {counted(planned.bound.tokens, 'token')}", "s", row.latency_s, *latency),
    )
    bound_s = planned.bound.limit_s
    return ScheduleOutcome(seen, 0, 0, {}, len(served_s), bound_s, *within_bound(bound_s, latency))


def _over_spans(finished: Sequence[Row], from_s: float, to_s: float) -> tuple[Floats, Floats]:
    """Return finished requests per second and mean requests in flight, in equal spans of time.

    Both arrays have the shape [spans].
    """
    dispatched_s = np.array([one.dispatched_s for one in finished], np.float64)
    finished_s = np.array([one.finished_s for one in finished], np.float64)
    count = int(((finished_s >= from_s) & (finished_s < to_s)).sum())
    if count == 0:
        return np.zeros(0), np.zeros(0)
    edges_s = np.linspace(from_s, to_s, max(1, min(_SPANS, count // _MIN_FINISHED)) + 1)
    low_s, high_s, span_s = edges_s[:-1, None], edges_s[1:, None], np.diff(edges_s)
    rate = ((finished_s >= low_s) & (finished_s < high_s)).sum(axis=1) / span_s
    busy_s = np.clip(np.minimum(finished_s, high_s) - np.maximum(dispatched_s, low_s), 0.0, None).sum(axis=1)
    return rate.astype(np.float64), busy_s / span_s


@dataclass(frozen=True)
class ScheduleRun:
    """A complete run: its outcome, the client's records, and what the gateway recorded."""

    outcome: ScheduleOutcome
    planned: PlannedRun
    measured: RunResult
    phases: tuple[Phase, ...]
    rows: tuple[Row, ...]
    # Decisions after changes of lengths, each with its time on the gateway's clock.
    replans: tuple[tuple[float, ReplanEvent], ...] = ()
    # State of the replanner at the end; None: the schedule did not follow lengths.
    followed: ReplanningState | None = None
    engines: int = 1


def warnings(done: ScheduleRun) -> list[str]:
    """Return the client's warnings, and warnings about phases or concurrency that differ from the plan."""
    outcome, row, found = done.outcome, done.planned.row, list(done.measured.warnings)
    uncertain = any(math.isnan(number.low) for number in outcome.seen)
    if done.planned.phases is None:
        limit, concurrent = done.engines * split_in_flight(row), outcome.seen[0].value
        if concurrent < 0.9 * limit:
            found.append(
                f"{concurrent:.3g} requests were concurrent on average, of {limit} in the schedule: too few requests "
                "arrived (--concurrency, --requests), or latency is lower than planned"
            )
        if uncertain:
            found.append(
                f"numbers without an interval: too few requests count, {outcome.requests}; play more "
                f"(--requests {split_requests(row, done.engines)})"
            )
        return found
    steps = {number.name: number.value for number in outcome.seen}["decode iterations, N_D"]
    if steps > 1.1 * row.decode_steps + 1:
        found.append(
            f"phases had {steps:.3g} iterations on average, not {row.decode_steps}: too few requests arrived "
            "(--concurrency), or this machine was too busy to follow the engines' tokens"
        )
    if uncertain:
        found.append(
            f"numbers without an interval: too few phases count, {outcome.phases}, and {MIN_PHASES} of each "
            f"engine are needed; play more requests (--requests {requests_to_count(row, done.engines)})"
        )
    return found


def bound_sentence(done: ScheduleRun) -> str:
    """Return a sentence on whether the latency bound held."""
    outcome, planned = done.outcome, done.planned
    if math.isinf(planned.bound.limit_s):
        return "There was no bound to meet."
    bound = f"The bound of {planned.bound.limit_s:g} s"
    if outcome.satisfied is None:
        return f"{bound} was not tested: no request was served with a full queue. Play more requests (--requests)."
    latency = outcome.seen[-1]
    high = f"{latency.high:.3g}" if math.isfinite(latency.high) else "?"
    measured = (
        f"{100 * planned.share:.3g} % of {outcome.requests:,} requests, the share of a bound for outputs of "
        f"{counted(planned.bound.tokens, 'token')}, were served within {latency.value:.3g} s "
        f"[{latency.low:.3g} to {high}]"
    )
    caveat = "" if outcome.significant else ", but the interval includes the bound: play more (--requests) to be sure"
    return f"{bound} {'held' if outcome.satisfied else 'did not hold'}: {measured}{caveat}."


def schedule_run_json(done: ScheduleRun) -> str:
    """Return the results of a run as the text of a JSON file."""
    planned = done.planned
    replans = [
        {
            "at_s": at_s,
            "message": one.message,
            "failed": one.failed,
            "schedule": one.schedule,
            "phases": one.phases,
            "adaptation": one.more.adaptation if isinstance(one.more, Adapted) else None,
        }
        for at_s, one in done.replans
    ]
    fields = {
        "answer": bound_sentence(done), "schedule": planned.row, "phases": planned.phases,
        "bound_tokens": planned.bound.tokens, "share": planned.share, "source": planned.source,
        "outcome": done.outcome, "warnings": warnings(done), "followed": done.followed, "news": replans,
    }  # fmt: skip
    return json_text("schedule_run", fields)


class _PhaseRecorder(Listener):
    def __init__(self) -> None:
        self.phases: list[Phase] = []

    def phase(self, phase: Phase) -> None:
        self.phases.append(phase)


@dataclass(frozen=True)
class AdminPage:
    """Options of the gateway's admin port. Port 0 takes any free port. ``on_start`` is called with the actual port."""

    port: int
    on_start: Callable[[int], None] = lambda _: None


def run_schedule(
    scenario: Scenario,
    engines: Sequence[str],
    planned: PlannedRun | None = None,
    workload: Workload | None = None,
    *,
    load: ScheduleLoad = ScheduleLoad(),
    follow: FollowOptions | None = None,
    api_key: str | None = None,
    admin: AdminPage | None = None,
) -> ScheduleRun:
    """Run a schedule with a gateway in front of engines, and compare the observed numbers with the planned ones.

    Args:
        scenario: Scenario of the schedule. Its deployment is only used for planning. The engines stay as they are.
        engines: Addresses of OpenAI-compatible servers, each of which runs the complete schedule. For a split schedule,
            these are addresses of routers, each in front of a pair of engines.
        planned: The schedule. If None, the scenario is planned.
        workload: Requests to send, by default the result of ``schedule_requests``.
        follow: Options with which the schedule follows the requests' lengths. If None, the schedule does not change.
        admin: Options of the admin page and metrics during the run. If None, there is no such page.
    """
    planned = planned_run(scenario) if planned is None else planned
    row, phases, number = planned.row, planned.phases, len(engines)
    workload = schedule_requests(scenario, planned, number) if workload is None else workload
    recorder, make_replanner = _PhaseRecorder(), None
    if phases is None:
        if follow is not None:
            raise InputError(
                f"only a schedule of phases (rra) can follow lengths while it runs; this one is {row.words}. "
                "`lengthwise schedule watch` reports of recorded requests when another one would be better"
            )
        fixed: dict[str, Any] = {"kind": "openai", "concurrency": split_in_flight(row), "probe": False}
        workers = [Engine(url, name=f"pair {at}", api_key=api_key, **fixed) for at, url in enumerate(engines, 1)]
        mode, filling = "fcfs", _split_filling(row)
    else:
        servers = [Server(url, api_key=api_key) for url in engines]
        runs = _probed_seqs(row, phases, servers, 1 if follow is None else ADAPTED_SEQS)
        planned = replace(planned, phases=limited(phases, runs))
        if follow is not None:
            # Prompts are only watched if they are sent as token ids. Otherwise the gateway estimates their tokens,
            # and a wrong estimate would look like a change.
            counted = "prompt" not in workload.extra and all(_capabilities(one).token_id_prompts for one in servers)
            monitor = follow.monitor if counted else replace(follow.monitor, sides=("outputs",))
            make_replanner = follower_factory(scenario, planned, replace(follow, monitor=monitor, max_num_seqs=runs))
        workers = [Engine(url, name=f"engine {at}", api_key=api_key) for at, url in enumerate(engines, 1)]
        mode, filling = "rra", math.ceil(row.decode_batch) + SPARE_BATCHES * row.prefill_batch
    config = GatewayConfig(
        engines=tuple(workers),
        order=Order(mode, max_wait_s=math.inf),
        dispatch=Dispatch(phases=planned.phases),
        prediction=PredictionConfig(predictor="none", learn=False),
        listen=Listen(port=0, admin_port=None if admin is None else admin.port),
    )
    return _run_with_gateway(planned, config, workload, load, filling * number, recorder, make_replanner, admin)


def _run_with_gateway(
    planned: PlannedRun,
    config: GatewayConfig,
    workload: Workload,
    load: ScheduleLoad,
    filling: int,
    recorder: _PhaseRecorder,
    make_replanner: ReplannerFactory | None,
    admin: AdminPage | None,
) -> ScheduleRun:
    with background_gateway(config, (recorder,), make_replanner=make_replanner) as gateway:
        if admin is not None and gateway.gateway.admin_port is not None:
            admin.on_start(gateway.gateway.admin_port)
        following, capabilities = gateway.gateway.tracker, None
        if following is not None:
            following.paused = True  # the probe's requests are not typical lengths
            try:
                capabilities = _capabilities(Server(gateway.url))
            finally:
                following.paused = False
        measured = load.bench(gateway.url, workload, filling, capabilities)
        gateway.call(gateway.gateway.drain())
        if following is not None:
            gateway.call(following.wait_observed(), timeout_s=_REPLAN_S)
    rows = tuple(sorted(gateway.rows, key=lambda row: row.arrival_s)[-len(workload) :])
    engines = len(config.engines)
    if planned.phases is None:
        return ScheduleRun(split_outcome(planned, rows, engines), planned, measured, (), rows, engines=engines)
    replans = () if following is None else tuple(following.events)
    since_s = -math.inf
    for at_s, one in replans:
        if isinstance(one.more, Adapted):
            planned, since_s = one.more.planned, at_s
    recent = [row for row in rows if row.arrival_s >= since_s]
    outcome = schedule_outcome(planned, recorder.phases, recent, engines)
    state = None if following is None else following.state
    return ScheduleRun(outcome, planned, measured, tuple(recorder.phases), rows, replans, state, engines)


def schedule_requests(scenario: Scenario, planned: PlannedRun, engines: int = 1, seed: int | None = None) -> Workload:
    """Return the scenario's requests. If the scenario sets no number, return enough to measure it."""
    section = scenario.workload
    if section.num_requests is None and not section.is_replay:
        enough = split_requests if planned.phases is None else requests_to_count
        changed = section.model_copy(update={"num_requests": enough(planned.row, engines)})
        scenario = scenario.model_copy(update={"workload": changed})
    return requests(scenario, seed)


def _probed_seqs(row: ScheduleRow, phases: Phases, servers: Sequence[Server], times: int) -> int:
    """Return how many requests every engine runs at once. Probing stops at ``times`` times the schedule's number."""
    scheduled = phases.max_requests or row.prefill_batch
    smallest = times * scheduled
    for server in servers:
        found = probe_max_num_seqs(server, times * scheduled)
        smallest = min(smallest, found)
        for batch, needed in (("B_E", row.prefill_batch), ("B_D", math.ceil(row.decode_batch))):
            if found < needed:
                raise InputError(
                    f"the schedule is {row.words}, with {batch} = {needed} requests at once; the engine {server.url} "
                    f"runs {found} at once: raise its limit (vLLM: --max-num-seqs {scheduled}), or plan with fewer"
                )
    return smallest


def _capabilities(server: Server) -> Capabilities:
    async def probed() -> Capabilities:
        async with Client(server) as client:
            await client.probe()
            return client.capabilities

    return asyncio.run(probed())
