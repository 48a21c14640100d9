"""The same requests under several orders, on engines as they were seen: by the simulator and its own policies.

Cuts of ``isrtf`` are decided by the takeover alone. The gateway asks besides whether a cut pays for itself, by prices
that it has learned of each engine (``core.look``): it makes fewer of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from lengthwise import engine
from lengthwise.gateway.config import Order
from lengthwise.gateway.observe.trace import LEAST_MORE, Bools, Floats, Ints, Trace, completed, joined
from lengthwise.schema.cost_tables import CostTables, Front, grid_axis
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.records import Status
from lengthwise.schema.specs import AttentionSpec, FfnSpec, GpuSpec, LinkSpec, ModelSpec, NodeSpec
from lengthwise.schema.workload import Predictions, Workload

FULL_SHARE = 1e-3
"""So much of the time at least that many requests ran at once: the seats."""
MIN_WAITED_SHARE = 0.02
"""Of all JCT; where less is waited for, no limit of the engines was met."""
NO_LIMIT = 4096
ROUNDS = 30
"""Of least squares, each weighed by the one before."""
EXACT = 0.02
"""Relative errors below it weigh as their squares, others as they are: a stall must not count as its square."""


@dataclass(frozen=True)
class Service:
    """A pool of like engines.

    Attributes:
        step_s: Of any step.
        seq_s: More for each sequence in it.
        prompt_s: More for each prompt token in it.
        front_s: On the way to the engine and back.
        max_num_seqs: Requests that ran at once at an engine, where that was a limit; else None.
        engines: How many served at a time: names of engines that came and went one after the other are one.
        waited_share: Of all JCT, before a seat was free.
        error: Median relative error of the seconds from first token to end.
    """

    step_s: float
    seq_s: float
    prompt_s: float
    front_s: float
    max_num_seqs: int | None
    engines: int
    waited_share: float
    error: float


def fit(trace: Trace) -> Service:
    """The service of a trace whose engines all serve the same."""
    met = joined(trace)
    trace, seen = completed(trace)
    max_num_seqs = max_num_seqs_of(trace) if seen.all() else met
    found = _found(trace)
    a, a_s = _decoding(trace, seen)
    b, b_s = _starting(trace, found, max_num_seqs, seen)
    coefficients = _least_deviations(np.vstack([a, b]), np.concatenate([a_s, b_s]))
    step_s, seq_s, prompt_s, front_s = (float(x) for x in coefficients)
    error = float(np.median(np.abs(a @ coefficients / a_s - 1))) if len(a_s) else math.nan
    running = np.minimum(found + 1, max_num_seqs)
    start_s = front_s + _steps(found) * (step_s + seq_s * running) + prompt_s * trace.prompt_tokens
    late_s = np.maximum(trace.first_token_s - trace.dispatched_s - start_s, 0.0) * (found >= max_num_seqs)
    share = float((trace.queued_for_s + late_s).sum() / max(trace.jct_s.sum(), 1e-12))
    limit = max_num_seqs if share >= MIN_WAITED_SHARE else None
    return Service(max(step_s, 1e-9), seq_s, prompt_s, front_s, limit, engines_of(trace), share, error)


def max_num_seqs_of(trace: Trace) -> int:
    """The most requests that an engine ran at once for a noticeable share of its busy time."""
    most = 1
    for worker in np.unique(trace.worker):
        mine = (trace.worker == worker) & trace.complete & (trace.finished_s > trace.first_token_s)
        most = max(most, _usual_most(trace.first_token_s[mine], trace.finished_s[mine]))
    return most


def engines_of(trace: Trace) -> int:
    """The engines that were given requests when one was sent, each from its first to its last: the median."""
    given = np.zeros(len(trace), np.int64)
    for worker in np.unique(trace.worker):
        sent_s = trace.dispatched_s[trace.worker == worker]
        given += (trace.dispatched_s >= sent_s.min()) & (trace.dispatched_s <= sent_s.max())
    return max(1, round(float(np.median(given)))) if len(given) else 1


def _usual_most(from_s: Floats, to_s: Floats) -> int:
    times = np.concatenate([from_s, to_s])
    steps = np.concatenate([np.ones(len(from_s)), -np.ones(len(to_s))])
    order = np.lexsort((steps, times))
    there, lasts = np.cumsum(steps[order])[:-1], np.diff(times[order])
    if not len(there):
        return 1
    held = np.bincount(there.astype(np.int64), weights=lasts)
    held[0] = 0.0
    at_least = np.cumsum(held[::-1])[::-1]
    return max(1, int(np.flatnonzero(at_least >= FULL_SHARE * max(at_least[0], 1e-12))[-1]))


def _found(trace: Trace) -> Ints:
    """[n] requests at the engine that each one was sent to, when it was sent."""
    found = np.zeros(len(trace), np.int64)
    for worker in np.unique(trace.worker):
        mine = np.flatnonzero(trace.worker == worker)
        sent, ended = np.sort(trace.dispatched_s[mine]), np.sort(trace.finished_s[mine])
        at = trace.dispatched_s[mine]
        before = np.searchsorted(sent, at, side="left")
        found[mine] = np.maximum(before - np.searchsorted(ended, at, side="right"), 0)
    return found


def _decoding(trace: Trace, seen: Bools) -> tuple[Floats, Floats]:
    """Rows (n, K, P, 0) and seconds from first token to end, of requests that ran through."""
    rows, seconds = [], []
    for worker in np.unique(trace.worker):
        there = np.flatnonzero(trace.worker == worker)
        from_s, to_s = trace.first_token_s[there], trace.finished_s[there]
        more = trace.output_tokens[there] - 1
        good = (trace.complete & seen)[there] & (more >= LEAST_MORE) & (to_s > from_s)
        tokens = _increments(from_s, to_s, more.astype(float))
        order = np.argsort(from_s, kind="stable")
        prompts = np.concatenate([[0.0], np.cumsum(trace.prompt_tokens[there][order])])
        firsts = from_s[order]
        computed = prompts[np.searchsorted(firsts, to_s, "right")] - prompts[np.searchsorted(firsts, from_s, "right")]
        rows.append(np.column_stack([more, tokens, computed, np.zeros(len(there))])[good])
        seconds.append((to_s - from_s)[good])
    return np.vstack(rows).astype(float), np.concatenate(seconds)


def _increments(from_s: Floats, to_s: Floats, tokens: Floats) -> Floats:
    """[n] tokens that all got from ``from_s`` to ``to_s``, each at its own even pace."""
    lasts = np.maximum(to_s - from_s, 1e-9)
    times = np.concatenate([from_s, from_s + lasts])
    slopes = np.concatenate([tokens / lasts, -tokens / lasts])
    order = np.argsort(times, kind="stable")
    at, pace = times[order], np.cumsum(slopes[order])
    grown = np.concatenate([[0.0], np.cumsum(pace[:-1] * np.diff(at))])
    return np.asarray(np.interp(from_s + lasts, at, grown) - np.interp(from_s, at, grown))


def _starting(trace: Trace, found: Ints, max_num_seqs: int, seen: Bools) -> tuple[Floats, Floats]:
    """Rows (1.5, 1.5 x running, prompt, 1) and seconds to the first token, where a seat was free."""
    seconds = trace.first_token_s - trace.dispatched_s
    good = (found < max_num_seqs) & trace.complete & seen & (seconds > 0)
    steps = _steps(found)
    rows = np.column_stack([steps, steps * (found + 1), trace.prompt_tokens, np.ones(len(trace))])
    return rows[good].astype(float), seconds[good]


def _steps(found: Ints) -> Floats:
    """Until the first token: its own step, and half of another's where others run."""
    return np.where(found > 0, 1.5, 1.0)


def _least_deviations(rows: Floats, seconds: Floats) -> Floats:
    """Coefficients from 0, of least absolute errors relative to what is fitted.

    Relative to what was seen, tokens that came in a bunch (a few microseconds for all of them) would weigh most
    and pull the fit to 0; squared, stalls would. Hence half of the requests decide, whatever the others show.
    """
    if not len(seconds):
        return np.array([1e-3, 0.0, 0.0, 0.0])
    from scipy.optimize import nnls

    size = np.maximum(np.abs(rows).max(axis=0), 1e-12)
    solved, scale, weight = np.zeros(4), np.full(len(rows), float(np.median(seconds))), np.ones(len(rows))
    for _ in range(ROUNDS):
        by = weight / scale
        solved = nnls(rows / size * by[:, None], seconds * by)[0] / size
        fitted = rows @ solved
        scale = np.maximum(fitted, max(float(np.quantile(fitted, 0.1)), 1e-9))
        weight = 1 / np.sqrt(np.maximum(np.abs(fitted - seconds) / scale, EXACT))
    return np.asarray(solved)


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
        queued_for_s: In queues in all, cuts included.
    """

    jct_s: Floats
    queued_for_s: Floats


def replay(workload: Workload, service: Service, name: str, order: Order = Order()) -> Replayed:  # noqa: B008 - frozen
    """A workload under one of ORDERS; ``oracle`` is told the true lengths."""
    if name == ORACLE:
        truth = workload.output_tokens.astype(float)
        workload = replace(workload, predicted_tokens=truth, predictions=None)
    records = engine.simulate(workload, _deployment(workload, service, scheduler(name, order)), keep_steps=0)
    r = records.requests
    served = r.status == Status.FINISHED
    return Replayed(np.where(served, r.finished_s - r.arrival_s, np.nan), np.where(served, r.queued_for_s, np.nan))


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
        trace.predicted_tokens.tolist(), trace.output_tokens.tolist(), trace.retry, strict=True
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


def _by_window(first: float, retry: tuple[tuple[int, float], ...], windows: int, window_tokens: int) -> list[float]:
    values, told, now = [], list(retry), first
    for window in range(windows):
        while told and told[0][0] <= window * window_tokens:
            now = told.pop(0)[1]
        values.append(now)
    return values


def _deployment(workload: Workload, service: Service, scheduler: Scheduler) -> Deployment:
    longest = int((workload.prompt_tokens + workload.output_tokens).max()) + 1
    max_num_seqs = service.max_num_seqs or NO_LIMIT
    blocks = -(-longest // BLOCK)
    limits = EngineLimits(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=STEP_TOKENS + max_num_seqs, block_size=BLOCK, watermark=0.0
    )
    return Deployment(
        _MODEL,
        _GPU,
        _NODE,
        Parallelism(1, 1, service.engines),
        limits,
        scheduler,
        _tables(service, STEP_TOKENS + max_num_seqs),
        KvPlan(blocks * (min(max_num_seqs, len(workload)) + 1), BLOCK, 0.0, 0.0, 0.0, 0.0),
        max_model_len=longest,
        name="engines as observed",
    )


def _tables(service: Service, max_tokens: int) -> CostTables:
    """Steps of the fitted seconds: what sequences and prompt tokens have in common by tokens, the rest apart."""
    nothing, two = np.zeros(2), np.arange(2.0)
    token_s = min(service.seq_s, service.prompt_s)
    chunks = grid_axis(max_tokens)
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
