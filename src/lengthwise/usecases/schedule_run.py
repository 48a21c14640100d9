"""A schedule kept before real engines: a gateway (of phases: in mode rra) and the load generator side by side."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lengthwise import measure
from lengthwise.backend.openai import Client
from lengthwise.backend.openai_protocol import Abilities, Server
from lengthwise.config.scenario import Scenario
from lengthwise.gateway.concurrency_probe import probe_max_num_seqs
from lengthwise.gateway.config import Dispatch, Engine, Forecasting, GatewayConfig, Listen, Order, Phases
from lengthwise.gateway.protocols import Listener
from lengthwise.gateway.replanning import ReplanningState, ReplannerFactory, ReplanEvent, PlanTracker
from lengthwise.gateway.scheduling import Phase
from lengthwise.gateway.serve import background_gateway
from lengthwise.gateway.telemetry import Row
from lengthwise.report.schedule_text import tokens_said
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Measured
from lengthwise.schema.schedule import ScheduleRow
from lengthwise.schema.workload import Workload
from lengthwise.usecases.bench import requests
from lengthwise.usecases.schedule_adaptation import Adapted, Follow, follower_maker, seated
from lengthwise.usecases.schedule_plan import PlannedRun, planned_run

Floats = npt.NDArray[np.float64]
LEVEL = 0.95
"""Of the intervals."""
_WARM = 0.25
"""Share of the time in which batches fill, left out."""
_MOST_CORRELATION = 0.8
FEWEST_PHASES, MIN_REQUESTS = 3, 1000
"""Phases that an interval takes; requests of a run for which nothing else is said."""
_PHASES = 30
"""Of an engine that are to count: a mean's interval is then a third of a phase's deviation wide on each side."""


@dataclass(frozen=True)
class SeenNumber:
    """A number as it was observed, with its interval; NaN where too little was seen to say.

    Attributes:
        name: What it is.
        unit: In which unit; "" a count.
        planned: What was planned; NaN: nothing.
        value: What was observed.
        low: Lower end of its 95 % interval.
        high: Upper end.
    """

    name: str
    unit: str
    planned: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ScheduleOutcome:
    """A schedule as it ran.

    Attributes:
        seen: Numbers beside the plan's.
        phases: Phases that were counted: with a full queue, after batches had filled.
        all_phases: All there were.
        completed: Why phases ended: how many of each.
        requests: Requests whose latency counts.
        bound_s: Latency that was to be held; infinite: none.
        satisfied: Whether it was; None: too few requests to say.
        significant: Whether the whole interval says so.
    """

    seen: tuple[SeenNumber, ...]
    phases: int
    all_phases: int
    completed: dict[str, int]
    requests: int
    bound_s: float
    satisfied: bool | None
    significant: bool


def schedule_outcome(
    planned: PlannedRun, phases: Sequence[Phase], rows: Sequence[Row], engines: int
) -> ScheduleOutcome:
    """What phases and requests were in the time in which the queue was full and batches had filled.

    Args:
        planned: The plan, of one engine. Its latency is held against the quantile of all latencies at the share of the
            outputs that are no longer: who has more tokens to come is served no sooner.
        phases: As the gateway told them.
        rows: Requests that are over.
        engines: That served.
    """
    row, (from_s, to_s) = planned.row, window(rows)
    steady = [one for one in phases if from_s <= one.started_s <= to_s]
    served = [one for one in rows if one.outcome == "finished" and from_s <= one.dispatched_s <= to_s]
    latency = quantile([one.served_s for one in served], planned.share)
    seen = [
        SeenNumber("encode batch, B_E", "", row.encode_batch, *mean(_of(steady, "encode_batch"))),
        SeenNumber("decode iterations, N_D", "", row.decode_steps, *mean(_of(steady, "decode_steps"))),
        SeenNumber("decode batch, B_D", "", row.decode_batch, *mean(_of(steady, "decode_batch"))),
        SeenNumber("cycle", "s", row.cycle_s, *mean(np.array([one.finished_s - one.started_s for one in steady]))),
        SeenNumber("throughput", "requests/s", engines * row.throughput_rps, *_rate(steady)),
        SeenNumber(f"latency of {tokens_said(planned.bound_tokens)}", "s", row.latency_s, *latency),
    ]
    held, sure = held_within(planned.bound_s, latency)
    ended: defaultdict[str, int] = defaultdict(int)
    for one in phases:
        ended[one.cause] += 1
    return ScheduleOutcome(tuple(seen), len(steady), len(phases), dict(ended), len(served), planned.bound_s, held, sure)


def requests_to_count(row: ScheduleRow, engines: int = 1) -> int:
    """Requests that fill enough phases to count, behind those in which batches fill, at so many engines."""
    counted, filling = _PHASES * row.encode_batch / (1 - _WARM), (row.decode_batch + row.encode_batch) / _WARM
    return max(MIN_REQUESTS, engines * math.ceil(max(counted, filling)))


def mean(values: Floats) -> tuple[float, float, float]:
    """The mean of consecutive phases and its t interval, wider where neighbours are alike (Skart, 2011)."""
    n = len(values)
    if n == 0:
        return math.nan, math.nan, math.nan
    center = float(values.mean())
    if n < FEWEST_PHASES:
        return center, math.nan, math.nan
    half = _half_width(values - center, n)
    return center, center - half, center + half


def _half_width(off: Floats, n: int) -> float:
    """Of a mean from what values are off it."""
    from scipy.special import stdtrit

    square = float((off**2).sum())
    if square == 0:
        return 0.0
    r = min(max(float((off[1:] * off[:-1]).sum()) / square, 0.0), _MOST_CORRELATION)
    return float(stdtrit(n - 1, 0.5 + LEVEL / 2)) * math.sqrt(square / (n - 1) / n * (1 + r) / (1 - r))


def _rate(phases: Iterable[Phase]) -> tuple[float, float, float]:
    """Requests a second of all workers: of each what its phases encoded over the time that they took."""
    by_worker: defaultdict[str, list[Phase]] = defaultdict(list)
    for one in phases:
        by_worker[one.worker].append(one)
    rate, square = 0.0, 0.0
    for of in by_worker.values():
        new = _of(of, "encode_batch") + _of(of, "overdue")
        duration_s = np.array([one.finished_s - one.started_s for one in of])
        mine = float(new.sum() / duration_s.sum())
        rate += mine
        square += (
            (_half_width(new - mine * duration_s, len(of)) * len(of) / float(duration_s.sum())) ** 2
            if len(of) >= FEWEST_PHASES
            else math.nan
        )
    half = math.sqrt(square) if by_worker else math.nan
    return (rate, rate - half, rate + half) if by_worker else (math.nan, math.nan, math.nan)


def quantile(values: Sequence[float], level: float) -> tuple[float, float, float]:
    """A quantile and the order statistics that hold it; infinite where none is high enough."""
    from scipy.stats import binom

    n, ascending = len(values), sorted(values)
    if n == 0:
        return math.nan, math.nan, math.nan
    rank = min(n, max(1, math.ceil(level * n)))
    low = int(binom.ppf((1 - LEVEL) / 2, n, level))
    high = int(binom.ppf((1 + LEVEL) / 2, n, level)) + 1
    return ascending[rank - 1], ascending[max(low, 1) - 1], ascending[high - 1] if high <= n else math.inf


def held_within(bound_s: float, latency: tuple[float, float, float]) -> tuple[bool | None, bool]:
    """Whether a latency with its interval is within a bound, None: unknown; and whether all of the interval says so."""
    value, low, high = latency
    if math.isinf(bound_s):
        return True, True
    if math.isnan(value):
        return None, False
    return value <= bound_s, high <= bound_s or low > bound_s


def window(rows: Sequence[Row]) -> tuple[float, float]:
    """From when batches had filled until the last request had come: behind it the queue runs empty."""
    if not rows:
        return math.inf, -math.inf
    first_s, last_s = min(one.arrival_s for one in rows), max(one.arrival_s for one in rows)
    return first_s + _WARM * (last_s - first_s), last_s


def _of(phases: Iterable[Phase], name: str) -> Floats:
    return np.array([getattr(one, name) for one in phases], np.float64)


SPARE = 3
"""Encodings that wait beside those who are served, so that the queue is never short of one."""


@dataclass(frozen=True)
class ScheduleLoad:
    """How requests come to a schedule: in a closed loop that keeps its queue full, unless otherwise said.

    Attributes:
        concurrency: Requests that are in at a time; None: as many as keep the queue full.
        rate_rps: Requests a second instead, Poisson: the queue may run empty.
        seed: Of prompts and arrivals.
        report: Called with the requests that ended and the requests in all.
    """

    concurrency: int | None = None
    rate_rps: float | None = None
    seed: int = 0
    report: Callable[[int, int], None] = lambda *_: None

    def at_once(self, filling: int, requests: int) -> int | None:
        """Requests that are in at a time, where so many keep the queue full; None: they come at a rate."""
        if self.concurrency is None and self.rate_rps is None:
            return min(requests, filling)
        return self.concurrency


_TIMES = 4
"""As many requests as there are at once are played so often: the first quarter of the time does not count."""
_SPANS, _FEWEST_ENDS = 20, 10
"""Spans of time that a mean's interval is from, and requests that end in each at least."""


def split_in_flight(row: ScheduleRow) -> int:
    """Requests that a pair of sides has under way: a decode batch, an encoding that joins it, and one that is made."""
    return math.ceil(row.decode_batch) + 2 * row.encode_batch


def split_requests(row: ScheduleRow, routers: int = 1) -> int:
    """Requests of which enough are served with a full queue, behind those that fill it, by so many pairs."""
    return max(MIN_REQUESTS, _TIMES * _filling(row) * routers)


def _filling(row: ScheduleRow) -> int:
    """Requests that are in at a time where a pair's queue is never short."""
    return split_in_flight(row) + SPARE * row.encode_batch


def play_split(
    planned: PlannedRun,
    routers: Sequence[str],
    workload: Workload,
    load: ScheduleLoad,
    *,
    api_key: str | None,
    admin_port: int | None,
    on_admin: Callable[[int], None],
) -> tuple[ScheduleOutcome, Measured, tuple[Row, ...]]:
    """What came of a split schedule, with the client's records and the gateway's rows.

    Args:
        planned: The schedule; its phases are None.
        routers: Addresses before pairs of engines, of which one encodes and one decodes; each keeps the whole schedule.
        workload: Requests to play.
        load: How they come.
        api_key: Of the routers.
        admin_port: Of a page and metrics meanwhile; None: none.
        on_admin: Called with the port once they are there.
    """
    in_flight = split_in_flight(planned.row)
    concurrency = load.at_once(_filling(planned.row) * len(routers), len(workload))
    with background_gateway(_split_gateway_config(in_flight, routers, api_key, admin_port)) as gateway:
        if gateway.gateway.admin_port is not None:
            on_admin(gateway.gateway.admin_port)
        measured = measure.bench(
            Server(gateway.url), workload, rate_rps=load.rate_rps, concurrency=concurrency, seed=load.seed,
            report=load.report,
        )  # fmt: skip
        gateway.call(gateway.gateway.drain())
    rows = tuple(sorted(gateway.rows, key=lambda row: row.arrival_s)[-len(workload) :])
    return split_outcome(planned, rows, len(routers)), measured, rows


def split_outcome(planned: PlannedRun, rows: Sequence[Row], routers: int) -> ScheduleOutcome:
    """What throughput and latency were in the time in which the queue was full and batches had filled.

    Args:
        planned: The plan, of one pair. Its latency is held against the quantile of all latencies at the share of the
            outputs that are no longer.
        rows: Requests that are over.
        routers: Pairs that served.
    """
    row = planned.row
    # Where all are let in at once, nobody ever waited: the queue was at no time full.
    from_s, to_s = window(rows if len(rows) > routers * split_in_flight(row) else ())
    done = [one for one in rows if one.outcome == "finished"]
    served = [one for one in done if from_s <= one.dispatched_s <= to_s]
    latency = quantile([one.served_s for one in served], planned.share)
    rate, under_way = _spans(done, from_s, to_s)
    planned_rps = routers * row.throughput_rps
    seen = (
        SeenNumber("requests under way", "", math.nan, *mean(under_way)),
        SeenNumber("throughput", "requests/s", planned_rps, *mean(rate)),
        SeenNumber(f"latency of {tokens_said(planned.bound_tokens)}", "s", row.latency_s, *latency),
    )
    held, sure = held_within(planned.bound_s, latency)
    return ScheduleOutcome(seen, 0, 0, {}, len(served), planned.bound_s, held, sure)


def _spans(done: Sequence[Row], from_s: float, to_s: float) -> tuple[Floats, Floats]:
    """Of equal spans of time: requests a second that ended, and requests at engines in the mean."""
    sent_s = np.array([one.dispatched_s for one in done], np.float64)
    finished_s = np.array([one.finished_s for one in done], np.float64)
    within = int(((finished_s >= from_s) & (finished_s < to_s)).sum())
    if within == 0:
        return np.zeros(0), np.zeros(0)
    edges_s = np.linspace(from_s, to_s, max(1, min(_SPANS, within // _FEWEST_ENDS)) + 1)
    low_s, high_s = edges_s[:-1, None], edges_s[1:, None]
    rate = ((finished_s >= low_s) & (finished_s < high_s)).sum(axis=1) / np.diff(edges_s)
    there_s = np.clip(np.minimum(finished_s, high_s) - np.maximum(sent_s, low_s), 0.0, None).sum(axis=1)
    return rate.astype(np.float64), there_s / np.diff(edges_s)


def _split_gateway_config(
    in_flight: int, routers: Sequence[str], api_key: str | None, admin_port: int | None
) -> GatewayConfig:
    """As the ``gateway.toml`` of a split has it: nothing is asked of a router but requests."""
    return GatewayConfig(
        engines=tuple(
            Engine(url, name=f"pair {number}", kind="openai", api_key=api_key, in_flight=in_flight, probe=False)
            for number, url in enumerate(routers, 1)
        ),
        order=Order("fcfs", max_wait_s=math.inf),
        prediction=Forecasting(predictor="none", learn=False),
        listen=Listen(port=0, admin_port=admin_port),
    )


MORE_SEATS = 2
"""A schedule that follows lengths may come to have so many times the requests at an engine, if that runs them."""
_PLAN_S = 300.0


@dataclass(frozen=True)
class ScheduleRun:
    """A run: what it showed, the client's records, and what the gateway told.

    Attributes:
        outcome: Of the schedule that was kept last, since it was.
        planned: That schedule.
        measured: The client's records.
        phases: All of them; none of a split schedule.
        rows: All requests.
        news: What came of lengths that moved, with when on the gateway's clock.
        followed: How lengths were followed at the end; None: they were not.
        engines: How many kept it.
    """

    outcome: ScheduleOutcome
    planned: PlannedRun
    measured: Measured
    phases: tuple[Phase, ...]
    rows: tuple[Row, ...]
    news: tuple[tuple[float, ReplanEvent], ...] = ()
    followed: ReplanningState | None = None
    engines: int = 1


def run_schedule(
    scenario: Scenario,
    engines: Sequence[str],
    planned: PlannedRun | None = None,
    workload: Workload | None = None,
    *,
    load: ScheduleLoad = ScheduleLoad(),
    follow: Follow | None = None,
    api_key: str | None = None,
    admin_port: int | None = None,
    on_admin: Callable[[int], None] = lambda _: None,
) -> ScheduleRun:
    """What came of a schedule that a gateway keeps before engines, held against its plan.

    Args:
        scenario: Whose schedule; what it deploys is looked at for the plan alone, the engines stay as they are.
        engines: Addresses of OpenAI-compatible servers, each of which keeps the whole schedule; of a split one of
            routers, each before a pair of engines.
        planned: The schedule; None: the scenario is planned.
        workload: Requests to play; None: the scenario's, as ``schedule_requests`` has them.
        load: How they come.
        follow: Has the schedule follow their lengths; None: it stays.
        api_key: Of the engines.
        admin_port: Of a page and metrics meanwhile, 0: any; None: none.
        on_admin: Called with the port once they are there.

    Raises:
        InputError: An engine is not there, runs fewer requests at once than the schedule has, no schedule can be kept
            before engines, or a split one was to follow lengths.
    """
    planned = planned_run(scenario) if planned is None else planned
    workload = schedule_requests(scenario, planned, len(engines)) if workload is None else workload
    if planned.phases is None:
        _require_not_followed(planned, follow)
        outcome, measured, rows = play_split(
            planned, engines, workload, load, api_key=api_key, admin_port=admin_port, on_admin=on_admin
        )
        return ScheduleRun(outcome, planned, measured, (), rows, engines=len(engines))
    servers = [Server(url, api_key=api_key) for url in engines]
    there = _max_num_seqs(planned.row, planned.phases, servers, 1 if follow is None else MORE_SEATS)
    planned = replace(planned, phases=seated(planned.phases, there))
    make = None if follow is None else _followed(scenario, planned, workload, servers, follow, there)
    heard, each = _Phases(), math.ceil(planned.row.decode_batch) + SPARE * planned.row.encode_batch
    concurrency = load.at_once(each * len(engines), len(workload))
    with background_gateway(_config(planned, engines, api_key, admin_port), (heard,), follow=make) as gateway:
        if gateway.gateway.admin_port is not None:
            on_admin(gateway.gateway.admin_port)
        following, server = gateway.gateway.tracker, Server(gateway.url)
        measured = measure.bench(
            server, workload, rate_rps=load.rate_rps, concurrency=concurrency, seed=load.seed, report=load.report,
            capabilities=None if following is None else _probed(server, following),
        )  # fmt: skip
        gateway.call(gateway.gateway.drain())
        if following is not None:
            gateway.call(following.stable(), timeout_s=_PLAN_S)
    rows = tuple(sorted(gateway.rows, key=lambda row: row.arrival_s)[-len(workload) :])
    news = () if following is None else tuple(following.events)
    planned, since_s = _last(planned, news)
    since = [row for row in rows if row.arrival_s >= since_s]
    outcome = schedule_outcome(planned, heard.all, since, len(engines))
    state = None if following is None else following.state
    return ScheduleRun(outcome, planned, measured, tuple(heard.all), rows, news, state, len(engines))


def schedule_requests(scenario: Scenario, planned: PlannedRun, engines: int = 1, seed: int | None = None) -> Workload:
    """The scenario's requests; where it does not say how many, as many as fill enough phases to count.

    Raises:
        InputError: They cannot be read.
    """
    section = scenario.workload
    if section.num_requests is None and not section.is_replay:
        enough = split_requests if planned.phases is None else requests_to_count
        number = enough(planned.row, engines)
        scenario = scenario.model_copy(update={"workload": section.model_copy(update={"num_requests": number})})
    return requests(scenario, seed)


class _Phases(Listener):
    """Keeps all phases."""

    def __init__(self) -> None:
        self.all: list[Phase] = []

    def phase(self, phase: Phase) -> None:
        """One is over."""
        self.all.append(phase)


def _followed(
    scenario: Scenario, planned: PlannedRun, workload: Workload, servers: Sequence[Server], follow: Follow, remote: int
) -> ReplannerFactory:
    """What makes the follower, now that it is known which schedule runs, and with how many seats.

    Prompts are watched where the gateway is sent token ids and so can count them: of texts it estimates the tokens,
    and an estimate that is off would look like a move.
    """
    counted = "prompt" not in workload.extra and all(_abilities(one).token_ids for one in servers)
    watch = follow.monitor if counted else replace(follow.monitor, sides=("outputs",))
    return follower_maker(scenario, planned, replace(follow, monitor=watch, max_num_seqs=remote))


def _last(planned: PlannedRun, news: Sequence[tuple[float, ReplanEvent]]) -> tuple[PlannedRun, float]:
    """The schedule that was kept last, and since when."""
    since_s = -math.inf
    for at_s, one in news:
        if isinstance(one.more, Adapted):
            planned, since_s = one.more.planned, at_s
    return planned, since_s


def _require_not_followed(planned: PlannedRun, follow: Follow | None) -> None:
    """Nothing, unless a split schedule is to follow lengths.

    Raises:
        InputError: It is.
    """
    if follow is not None:
        raise InputError(
            f"only a schedule of phases (rra) can follow lengths while it runs; this one is {planned.row.words}. "
            "`lengthwise schedule watch` says of recorded requests when another one would be better"
        )


def _max_num_seqs(row: ScheduleRow, phases: Phases, servers: Sequence[Server], times: int) -> int:
    """So many requests every engine runs at once; up to so many times the schedule's it is looked for."""
    most = phases.max_in_flight or row.encode_batch
    there = times * most
    for server in servers:
        found = probe_max_num_seqs(server, times * most)
        there = min(there, found)
        for what, needed in (("B_E", row.encode_batch), ("B_D", math.ceil(row.decode_batch))):
            if found < needed:
                raise InputError(
                    f"the schedule is {row.words}, with {what} = {needed} requests at once; the engine {server.url} "
                    f"runs {found} at once: raise its limit (vLLM: --max-num-seqs {most}), or plan with fewer"
                )
    return there


def _probed(server: Server, tracker: PlanTracker) -> Abilities:
    """What the gateway and its engines can do, asked by requests that say nothing of lengths."""
    tracker.paused = True
    try:
        return _abilities(server)
    finally:
        tracker.paused = False


def _abilities(server: Server) -> Abilities:
    """What a server can do, asked by some tiny requests."""

    async def asked() -> Abilities:
        async with Client(server) as client:
            await client.probe()
            return client.capabilities

    return asyncio.run(asked())


def _config(planned: PlannedRun, engines: Sequence[str], api_key: str | None, admin_port: int | None) -> GatewayConfig:
    return GatewayConfig(
        engines=tuple(Engine(url, name=f"engine {number}", api_key=api_key) for number, url in enumerate(engines, 1)),
        order=Order("rra", max_wait_s=math.inf),
        dispatch=Dispatch(phases=planned.phases),
        prediction=Forecasting(predictor="none", learn=False),
        listen=Listen(port=0, admin_port=admin_port),
    )
