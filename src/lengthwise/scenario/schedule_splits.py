"""A schedule that splits encoding and decoding kept before engines that do: as many requests under way as planned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from lengthwise import measure
from lengthwise.backend.openai import Server
from lengthwise.gateway.background import beside
from lengthwise.gateway.config import Engine, Forecasting, GatewayConfig, Listen, Order
from lengthwise.gateway.telemetry import Row
from lengthwise.report.schedule import tokens_said
from lengthwise.scenario.schedule_loads import SPARE, ScheduleLoad
from lengthwise.scenario.schedule_outcomes import (
    FEWEST_REQUESTS,
    Floats,
    ScheduleOutcome,
    SeenNumber,
    held_within,
    mean,
    quantile,
    window,
)
from lengthwise.scenario.schedule_plans import PlannedRun
from lengthwise.schema.measured import Measured
from lengthwise.schema.schedule_row import ScheduleRow
from lengthwise.schema.workload import Workload

_TIMES = 4
"""As many requests as there are at once are played so often: the first quarter of the time does not count."""
_SPANS, _FEWEST_ENDS = 20, 10
"""Spans of time that a mean's interval is from, and requests that end in each at least."""


def split_in_flight(row: ScheduleRow) -> int:
    """Requests that a pair of sides has under way: a decode batch, an encoding that joins it, and one that is made."""
    return math.ceil(row.decode_batch) + 2 * row.encode_batch


def split_requests(row: ScheduleRow, routers: int = 1) -> int:
    """Requests of which enough are served with a full queue, behind those that fill it, by so many pairs."""
    return max(FEWEST_REQUESTS, _TIMES * _filling(row) * routers)


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
    with beside(_config(in_flight, routers, api_key, admin_port)) as gateway:
        if gateway.gateway.admin_port is not None:
            on_admin(gateway.gateway.admin_port)
        measured = measure.bench(
            Server(gateway.url), workload, rate_rps=load.rate_rps, concurrency=concurrency, seed=load.seed,
            told=load.told,
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
    ended_s = np.array([one.ended_s for one in done], np.float64)
    within = int(((ended_s >= from_s) & (ended_s < to_s)).sum())
    if within == 0:
        return np.zeros(0), np.zeros(0)
    edges_s = np.linspace(from_s, to_s, max(1, min(_SPANS, within // _FEWEST_ENDS)) + 1)
    low_s, high_s = edges_s[:-1, None], edges_s[1:, None]
    rate = ((ended_s >= low_s) & (ended_s < high_s)).sum(axis=1) / np.diff(edges_s)
    there_s = np.clip(np.minimum(ended_s, high_s) - np.maximum(sent_s, low_s), 0.0, None).sum(axis=1)
    return rate.astype(np.float64), there_s / np.diff(edges_s)


def _config(
    in_flight: int, routers: Sequence[str], api_key: str | None, admin_port: int | None
) -> GatewayConfig:
    """As the ``gateway.toml`` of a split has it: nothing is asked of a router but requests."""
    return GatewayConfig(
        engines=tuple(
            Engine(
                url, name=f"pair {number}", kind="openai", api_key=api_key, in_flight=in_flight, probe=False
            )
            for number, url in enumerate(routers, 1)
        ),
        order=Order("fcfs", max_wait_s=math.inf),
        forecasting=Forecasting(predictor="none", learn=False),
        listen=Listen(port=0, admin_port=admin_port),
    )


__all__ = ["play_split", "split_in_flight", "split_outcome", "split_requests"]
