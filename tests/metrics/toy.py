"""A small continuous-batching server in plain Python: records for tests that need no engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.records import Records, ReplicaTotals, RequestRecords, Status, StepRecords, TimeSeries, TokenGaps
from lengthwise.schema.specs import AttentionSpec, FfnSpec, GpuSpec, LinkSpec, ModelSpec, NodeSpec

BLOCK, BLOCKS, BIN_S = 16, 600, 0.25
HOST_S, LAYER_S, COMM_S, HEAD_S = 0.004, 0.010, 0.002, 0.001


def edges_s() -> Any:
    low = 2.0 ** (-20 + np.arange(44))
    return np.concatenate([[0.0], (low[:, None] * (1 + np.arange(128) / 128)).ravel(), [2.0**24]])


def deployment(**changes: Any) -> Deployment:
    """A 7B model on one GPU with round numbers."""
    model = ModelSpec("toy-7b", 32, 4096, 32000, AttentionSpec(32, 32, 128), FfnSpec(11008), 4096)
    gpu = GpuSpec("ToyGPU", {"bfloat16": 3e14}, 8e10, 2e12, 400.0, 60.0, 2.0, "test", "test")
    link = LinkSpec("link", 3e11, 5e-6, "test")
    zeros = np.zeros(2)
    cost = CostTables(*[zeros] * 6, np.zeros((2, 2)), np.zeros((2, 2)), np.array([32]))  # type: ignore[arg-type]
    fields = {
        "model": model,
        "gpu": gpu,
        "node": NodeSpec("node", 8, link, 8, link, link, "test"),
        "parallel": Parallelism(),
        "limits": EngineLimits(),
        "scheduler": Scheduler(),
        "cost": cost,
        "kv": KvPlan(BLOCKS, BLOCK, 1.35e10, 1e9, BLOCK * 524288, 7.2e10),
        "max_model_len": 4096,
        "name": "toy",
    }
    return Deployment(**{**fields, **changes})


class _Server:
    def __init__(self) -> None:
        self.steps: list[tuple[float, ...]] = []
        self.gaps: list[float] = []
        self.kv_read = self.pairs = 0.0


def records(
    n: int = 600, *, rate: float = 6.0, seed: int = 1, name: str = "toy", max_seqs: int = 32, odd: bool = True
) -> Records:
    """One replica serves Poisson arrivals; ``odd`` rejects, times out and leaves some unfinished."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate, n))
    arrival -= arrival[0]
    prompt = rng.integers(20, 800, n)
    output = np.maximum(1, rng.geometric(1 / 60, n))
    status = np.full(n, Status.FINISHED, dtype=np.int8)
    scheduled, first, finished = (np.full(n, np.nan) for _ in range(3))
    produced = np.zeros(n, dtype=np.int64)
    server, running, now = _Server(), [], 0.0
    if odd:
        status[n // 3] = Status.REJECTED
        status[n // 2] = Status.TIMED_OUT
    waiting = [i for i in range(n) if status[i] == Status.FINISHED]
    last = np.zeros(n)
    stop = arrival[-1] + 2.0 if odd else np.inf
    while (waiting or running) and now < stop:
        if not running and arrival[waiting[0]] > now:
            now = float(arrival[waiting[0]])
        queue = int(np.searchsorted(arrival[waiting], now, side="right"))
        admitted = waiting[: min(2, queue, max_seqs - len(running))]
        waiting = waiting[len(admitted) :]
        tokens = int(prompt[admitted].sum())
        context = prompt[running] + produced[running]
        seconds = HOST_S + LAYER_S + COMM_S + HEAD_S + 4e-5 * tokens + 2e-7 * context.sum()
        blocks = int(np.ceil((context + 1) / BLOCK).sum() + np.ceil(prompt[admitted] / BLOCK).sum())
        server.kv_read += context.sum()
        server.pairs += context.sum() + float((prompt[admitted] ** 2 / 2).sum())
        end = now + seconds
        server.steps.append((now, end, 0, len(running), len(admitted), tokens, blocks, queue - len(admitted)))
        scheduled[admitted] = now
        for i in (*running, *admitted):
            produced[i] += 1
            if produced[i] == 1:
                first[i] = end
            else:
                server.gaps.append(end - last[i])
            last[i] = end
        done = [i for i in (*running, *admitted) if produced[i] == output[i]]
        finished[done] = end
        running = [i for i in (*running, *admitted) if i not in done]
        now = end
    status[(status == Status.FINISHED) & np.isnan(finished)] = Status.UNFINISHED
    requests = RequestRecords(
        arrival,
        prompt,
        produced,
        status,
        np.where(np.isnan(scheduled), -1, 0).astype(np.int32),
        scheduled,
        first,
        finished,
        (rng.random(n) < 0.02).astype(np.int32),
        np.nan_to_num(scheduled - arrival),
        rejection=np.zeros(len(arrival), np.int8),
    )
    return _records(requests, server, now, seed, name)


def _records(requests: RequestRecords, server: _Server, end_s: float, seed: int, name: str) -> Records:
    rows = np.array(server.steps)
    floats, ints = rows[:, :2].T.copy(), rows[:, 2:].astype(np.int64).T.copy()
    steps = StepRecords(floats[0], floats[1], *ints)
    gap_s, count = np.unique(np.array(server.gaps), return_counts=True)
    gaps = TokenGaps(
        np.histogram(server.gaps, edges_s())[0],
        edges_s(),
        len(server.gaps),
        float(np.sum(server.gaps)),
        float(np.max(server.gaps)),
        gap_s,
        count,
    )
    length = steps.end_s - steps.start_s
    m = len(length)
    tokens = steps.prefill_tokens + steps.decode_seqs
    attention = 2e-7 * server.kv_read
    totals = ReplicaTotals(
        *(np.array([x]) for x in (m, int(tokens.sum()), server.pairs, server.kv_read, length.sum())),
        *(np.array([x]) for x in (length.sum() - m * (HOST_S + COMM_S + HEAD_S) - attention, m * COMM_S)),
        *(np.array([x]) for x in (0.4 * attention, 0.6 * attention, m * HOST_S, m * HEAD_S, 0.0, 0.0, 0.0)),
        np.array([(steps.kv_blocks * length).sum()]),
    )
    return Records(requests, steps, gaps, totals, _series(steps, length, end_s), end_s, seed, name)


def _series(steps: StepRecords, length: Any, end_s: float) -> TimeSeries:
    bins = int(end_s / BIN_S) + 1
    where = (steps.end_s / BIN_S).astype(int)
    seqs = steps.decode_seqs + steps.prefill_seqs
    weights = (length, seqs * length, steps.waiting * length, steps.kv_blocks * length, steps.prefill_tokens, seqs)
    return TimeSeries(BIN_S, *(np.bincount(where, w, bins) for w in weights))
