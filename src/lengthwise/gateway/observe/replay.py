"""The same requests under several orders, on engines as they were seen: by the simulator and its own policies.

Cuts of ``isrtf`` are decided by the takeover alone. The gateway asks besides whether a cut pays for itself, by prices
that it has learned of each engine (``core.look``): it makes fewer of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lengthwise import engine
from lengthwise.gateway.config import Order
from lengthwise.gateway.observe.service import NO_LIMIT, Service
from lengthwise.gateway.observe.trace import Floats, Ints, Trace
from lengthwise.schema.cost_tables import CostTables, Front, grid_axis
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.hardware import GpuSpec, LinkSpec, NodeSpec
from lengthwise.schema.model import AttentionSpec, FfnSpec, ModelSpec
from lengthwise.schema.prediction import Predictions
from lengthwise.schema.records import Status
from lengthwise.schema.workload import Workload

FCFS, SRTF, ISRTF, ORACLE = "fcfs", "srtf", "isrtf", "oracle"
ORDERS = (FCFS, SRTF, ISRTF, ORACLE)
STEP_TOKENS = 2048
BLOCK = 16
_LINK = LinkSpec("link", 1e9, 1e-6, "")
_NODE = NodeSpec("node", 8, _LINK, 8, _LINK, _LINK, "")
_GPU = GpuSpec("engine", {"bfloat16": 1e12}, 1e9, 1e11, 0.0, 0.0, 0.0, "", "")
_MODEL = ModelSpec("observed", 1, 64, 1000, AttentionSpec(4, 4, 16), FfnSpec(128), 1 << 40)


@dataclass(frozen=True)
class Replayed:
    """[n] seconds a request; NaN where it was not served.

    Attributes:
        jct_s: Arrival to end.
        waited_s: In queues in all, cuts included.
    """

    jct_s: Floats
    waited_s: Floats


def replay(workload: Workload, service: Service, name: str, order: Order = Order()) -> Replayed:  # noqa: B008 - frozen
    """A workload under one of ORDERS; ``oracle`` is told the true lengths."""
    if name == ORACLE:
        truth = workload.output_tokens.astype(float)
        workload = replace(workload, predicted_tokens=truth, predictions=None)
    records = engine.simulate(workload, _deployment(workload, service, scheduler(name, order)), keep_steps=0)
    r = records.requests
    served = r.status == Status.FINISHED
    return Replayed(
        np.where(served, r.finished_s - r.arrival_s, np.nan),
        np.where(served, r.waited_s, np.nan),
    )


def scheduler(name: str, order: Order) -> Scheduler:
    """One of ORDERS as the simulator's point on its axes, with the gateway's settings."""
    if name == FCFS:
        return Scheduler(router="central", memory="paged_by_chunk")
    takeover = order.takeover if name == ISRTF else "never"
    return Scheduler(
        rank="srtf",
        leave="longest_remaining",
        memory="paged_by_chunk",
        router="central",
        takeover=takeover,
        max_wait_s=order.max_wait_s,
        window_tokens=order.window_tokens,
    )


def workload_of(trace: Trace, window_tokens: int) -> Workload:
    """What arrived, with what was predicted of it."""
    return Workload(
        trace.arrival_s - trace.arrival_s[0],
        trace.prompt_tokens,
        trace.output_tokens,
        trace.predicted_tokens,
        predictions=_predictions(trace, window_tokens),
        name="observed",
    )


def resampled(workload: Workload, gaps_s: Floats, rows: Ints) -> Workload:
    """Some of the requests in that order, each so long after the one before as it came in truth."""
    gaps = gaps_s[rows]
    made = workload.predictions
    return Workload(
        np.cumsum(gaps) - gaps[0],
        workload.prompt_tokens[rows],
        workload.output_tokens[rows],
        predictions=None if made is None else made.take(rows),
        predicted_tokens=None if workload.predicted_tokens is None else workload.predicted_tokens[rows],
        name=workload.name,
    )


def _predictions(trace: Trace, window_tokens: int) -> Predictions:
    """A row a window: the last prediction that was there by then."""
    totals, lengths = [], []
    for first, output, again in zip(
        trace.predicted_tokens.tolist(), trace.output_tokens.tolist(), trace.again, strict=True
    ):
        values = [first]
        if again:
            values = _by_window(first, again, 1 + int(output) // window_tokens, window_tokens)
        totals += values
        lengths.append(len(values))
    start = np.concatenate([[0], np.cumsum(lengths)])
    total = np.clip(np.array(totals, float), 1.0, 1e9)
    so_far = np.arange(len(total)) - np.repeat(start[:-1], lengths)
    return Predictions(window_tokens, start, total, np.maximum(total - so_far * window_tokens, 1.0))


def _by_window(
    first: float, again: tuple[tuple[int, float], ...], windows: int, window_tokens: int
) -> list[float]:
    values, told, now = [], list(again), first
    for window in range(windows):
        while told and told[0][0] <= window * window_tokens:
            now = told.pop(0)[1]
        values.append(now)
    return values


def _deployment(workload: Workload, service: Service, scheduler: Scheduler) -> Deployment:
    longest = int((workload.prompt_tokens + workload.output_tokens).max()) + 1
    seats = service.seats or NO_LIMIT
    blocks = -(-longest // BLOCK)
    limits = EngineLimits(
        max_num_seqs=seats, max_num_batched_tokens=STEP_TOKENS + seats, block_size=BLOCK, watermark=0.0
    )
    return Deployment(
        _MODEL,
        _GPU,
        _NODE,
        Parallelism(1, 1, service.engines),
        limits,
        scheduler,
        _tables(service, STEP_TOKENS + seats),
        KvPlan(blocks * (min(seats, len(workload)) + 1), BLOCK, 0.0, 0.0, 0.0, 0.0),
        max_model_len=longest,
        name="engines as observed",
    )


def _tables(service: Service, most_tokens: int) -> CostTables:
    """Steps of the fitted seconds: what sequences and prompt tokens have in common by tokens, the rest apart."""
    nothing, two = np.zeros(2), np.arange(2.0)
    token_s = min(service.seq_s, service.prompt_s)
    chunks = grid_axis(most_tokens)
    return CostTables(
        layer_s=service.step_s + token_s * two,
        comm_s=nothing,
        first_s=nothing,
        send_s=nothing,
        head_s=(service.seq_s - token_s) * two,
        host_s=nothing,
        prefill_s=np.tile(((service.prompt_s - token_s) * chunks)[:, None], (1, 2)),
        decode_s=np.zeros((2, 2)),
        stage_layers=np.array([1]),
        source="fitted to what the gateway saw",
        front=Front(request_s=service.front_s),
    )
