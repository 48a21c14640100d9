"""A schedule kept before real engines: a gateway (of phases: in mode rra) and the load generator side by side."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lengthwise import measure
from lengthwise.backend.openai import Abilities, Client, Server
from lengthwise.gateway.background import beside
from lengthwise.gateway.config import Dispatch, Engine, Forecasting, GatewayConfig, Listen, Order
from lengthwise.gateway.decisions import Phase
from lengthwise.gateway.follow import Followed, Following, Make, News
from lengthwise.gateway.listener import Listener
from lengthwise.gateway.phasing import Phases
from lengthwise.gateway.seats import seats
from lengthwise.gateway.telemetry import Row
from lengthwise.scenario.following import Adapted, Follow, follower_maker, seated
from lengthwise.scenario.requests import requests
from lengthwise.scenario.scenario import Scenario
from lengthwise.scenario.schedule_loads import SPARE, ScheduleLoad
from lengthwise.scenario.schedule_outcomes import ScheduleOutcome, requests_to_count, schedule_outcome
from lengthwise.scenario.schedule_plans import PlannedRun, planned_run
from lengthwise.scenario.schedule_splits import play_split, split_requests
from lengthwise.schema.errors import InputError
from lengthwise.schema.measured import Measured
from lengthwise.schema.schedule_row import ScheduleRow
from lengthwise.schema.workload import Workload

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
    news: tuple[tuple[float, News], ...] = ()
    followed: Followed | None = None
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
    there = _seats(planned.row, planned.phases, servers, 1 if follow is None else MORE_SEATS)
    planned = replace(planned, phases=seated(planned.phases, there))
    make = None if follow is None else _followed(scenario, planned, workload, servers, follow, there)
    heard, each = _Phases(), math.ceil(planned.row.decode_batch) + SPARE * planned.row.encode_batch
    concurrency = load.at_once(each * len(engines), len(workload))
    with beside(_config(planned, engines, api_key, admin_port), (heard,), follow=make) as gateway:
        if gateway.gateway.admin_port is not None:
            on_admin(gateway.gateway.admin_port)
        following, server = gateway.gateway.following, Server(gateway.url)
        measured = measure.bench(
            server, workload, rate_rps=load.rate_rps, concurrency=concurrency, seed=load.seed, told=load.told,
            abilities=None if following is None else _probed(server, following),
        )  # fmt: skip
        gateway.call(gateway.gateway.drain())
        if following is not None:
            gateway.call(following.settled(), within_s=_PLAN_S)
    rows = tuple(sorted(gateway.rows, key=lambda row: row.arrival_s)[-len(workload) :])
    news = () if following is None else tuple(following.told)
    planned, since_s = _last(planned, news)
    since = [row for row in rows if row.arrival_s >= since_s]
    outcome = schedule_outcome(planned, heard.all, since, len(engines))
    state = None if following is None else following.state
    return ScheduleRun(outcome, planned, measured, tuple(heard.all), rows, news, state, len(engines))


def schedule_requests(
    scenario: Scenario, planned: PlannedRun, engines: int = 1, seed: int | None = None
) -> Workload:
    """The scenario's requests; where it does not say how many, as many as fill enough phases to count.

    Raises:
        InputError: They cannot be read.
    """
    section = scenario.workload
    if section.num_requests is None and not section.is_replay:
        enough = split_requests if planned.phases is None else requests_to_count
        number = enough(planned.row, engines)
        scenario = scenario.model_copy(
            update={"workload": section.model_copy(update={"num_requests": number})}
        )
    return requests(scenario, seed)


class _Phases(Listener):
    """Keeps all phases."""

    def __init__(self) -> None:
        self.all: list[Phase] = []

    def phase(self, phase: Phase) -> None:
        """One is over."""
        self.all.append(phase)


def _followed(
    scenario: Scenario,
    planned: PlannedRun,
    workload: Workload,
    servers: Sequence[Server],
    follow: Follow,
    there: int,
) -> Make:
    """What makes the follower, now that it is known which schedule runs, and with how many seats.

    Prompts are watched where the gateway is sent token ids and so can count them: of texts it estimates the tokens,
    and an estimate that is off would look like a move.
    """
    counted = "prompt" not in workload.extra and all(_abilities(one).token_ids for one in servers)
    watch = follow.watch if counted else replace(follow.watch, sides=("outputs",))
    return follower_maker(scenario, planned, replace(follow, watch=watch, seats=there))


def _last(planned: PlannedRun, news: Sequence[tuple[float, News]]) -> tuple[PlannedRun, float]:
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


def _seats(row: ScheduleRow, phases: Phases, servers: Sequence[Server], times: int) -> int:
    """So many requests every engine runs at once; up to so many times the schedule's it is looked for."""
    most = phases.most_in_flight or row.encode_batch
    there = times * most
    for server in servers:
        found = seats(server, times * most)
        there = min(there, found)
        for what, needed in (("B_E", row.encode_batch), ("B_D", math.ceil(row.decode_batch))):
            if found < needed:
                raise InputError(
                    f"the schedule is {row.words}, with {what} = {needed} requests at once; the engine {server.url} "
                    f"runs {found} at once: raise its limit (vLLM: --max-num-seqs {most}), or plan with fewer"
                )
    return there


def _probed(server: Server, following: Following) -> Abilities:
    """What the gateway and its engines can do, asked by requests that say nothing of lengths."""
    following.paused = True
    try:
        return _abilities(server)
    finally:
        following.paused = False


def _abilities(server: Server) -> Abilities:
    """What a server can do, asked by some tiny requests."""

    async def asked() -> Abilities:
        async with Client(server) as client:
            await client.probe()
            return client.abilities

    return asyncio.run(asked())


def _config(
    planned: PlannedRun, engines: Sequence[str], api_key: str | None, admin_port: int | None
) -> GatewayConfig:
    return GatewayConfig(
        engines=tuple(
            Engine(url, name=f"engine {number}", api_key=api_key) for number, url in enumerate(engines, 1)
        ),
        order=Order("rra", max_wait_s=math.inf),
        dispatch=Dispatch(phases=planned.phases),
        forecasting=Forecasting(predictor="none", learn=False),
        listen=Listen(port=0, admin_port=admin_port),
    )


__all__ = ["ScheduleLoad", "ScheduleRun", "run_schedule", "schedule_requests"]
