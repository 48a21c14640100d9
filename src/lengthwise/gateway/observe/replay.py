"""Replay recorded requests under several orders: the simulator serves them on engines fitted to the observations.

Under ``isrtf`` the compiled simulator preempts by the preemption policy alone. The gateway preempts less often, because
it also compares the gain of a preemption with the costs that it has observed at each worker. A ``VirtualGateway`` would
do the same, but is a thousand times slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from lengthwise import engine
from lengthwise.engine.continuous_batching import BatchSequence, ContinuousBatch, Limits, SequenceOrder
from lengthwise.engine.step_time import step_time
from lengthwise.gateway.config import Admission, Dispatch, Order
from lengthwise.gateway.core import Scheduler as GatewayScheduler
from lengthwise.gateway.observe.trace import (
    MIN_DECODE_TOKENS,
    Bools,
    Trace,
    max_concurrency_at_first_tokens,
    with_first_tokens,
)
from lengthwise.gateway.request import Client, LengthPrediction, Request
from lengthwise.gateway.scheduling import WorkerState
from lengthwise.schema.cost_tables import CostEvidence, CostTables, Front, grid_axis
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.records import Status
from lengthwise.schema.specs import AttentionSpec, FfnSpec, GpuSpec, LinkSpec, ModelSpec, NodeSpec
from lengthwise.schema.workload import Predictions, Workload
from lengthwise.statistics import Floats, Ints

_FULL_SHARE = 1e-3  # least share of the busy time in which max_num_seqs requests run at once
MIN_WAITED_SHARE = 0.02  # share of the total JCT; with less waiting, no limit of the engines was reached
_NO_LIMIT = 4096
_ROUNDS = 30  # of iteratively reweighted least squares
_EXACT = 0.02  # relative errors below it count squared, larger ones linearly, so that stalls count less


@dataclass(frozen=True)
class Service:
    """Speed and limits of a pool of equal engines, fitted to the requests that they served."""

    step_s: float  # seconds of a step without sequences and prompt tokens
    seq_s: float  # further seconds per sequence
    prompt_s: float  # further seconds per prompt token
    front_s: float  # seconds of network and parsing for request and response
    max_num_seqs: int | None  # concurrency limit of an engine; None: never reached
    engines: int  # number in use at the same time; a renamed engine counts once
    waited_share: float  # share of the total JCT in which requests waited for a slot
    error: float  # median relative error of the seconds from first token to finish


def fit(trace: Trace) -> Service:
    """Fit the speed and limits of a pool of engines to the requests that it served."""
    concurrency = max_concurrency_at_first_tokens(trace)
    trace, is_observed = with_first_tokens(trace)
    max_num_seqs = max_num_seqs_of(trace) if is_observed.all() else concurrency
    in_flight = _in_flight_at_dispatch(trace)
    decode_rows, decode_s = _decode_equations(trace, is_observed)
    # Until the first token: the request's first step, after on average half of the running step.
    steps = np.where(in_flight > 0, 1.5, 1.0)
    start_s = trace.first_token_s - trace.dispatched_s
    usable = (in_flight < max_num_seqs) & trace.is_uninterrupted & is_observed & (start_s > 0)
    start_rows = np.column_stack([steps, steps * (in_flight + 1), trace.prompt_tokens, np.ones(len(trace))])[usable]
    coefficients = _fit_absolute(np.vstack([decode_rows, start_rows]), np.concatenate([decode_s, start_s[usable]]))
    step_s, seq_s, prompt_s, front_s = (float(x) for x in coefficients)
    error = float(np.median(np.abs(decode_rows @ coefficients / decode_s - 1))) if len(decode_s) else math.nan
    running = np.minimum(in_flight + 1, max_num_seqs)
    expected_s = front_s + steps * (step_s + seq_s * running) + prompt_s * trace.prompt_tokens
    engine_queue_s = np.maximum(start_s - expected_s, 0.0) * (in_flight >= max_num_seqs)
    share = float((trace.queued_for_s + engine_queue_s).sum() / max(trace.jct_s.sum(), 1e-12))
    limit = max_num_seqs if share >= MIN_WAITED_SHARE else None
    return Service(max(step_s, 1e-9), seq_s, prompt_s, front_s, limit, engines_of(trace), share, error)


def max_num_seqs_of(trace: Trace) -> int:
    """Return the largest number of requests that a worker ran at once for a relevant share of its busy time."""
    maximum = 1
    for worker in np.unique(trace.worker):
        rows = (trace.worker == worker) & trace.is_uninterrupted & (trace.finished_s > trace.first_token_s)
        times = np.concatenate([trace.first_token_s[rows], trace.finished_s[rows]])
        changes = np.repeat([1, -1], int(rows.sum()))
        order = np.lexsort((changes, times))
        running, durations = np.cumsum(changes[order])[:-1], np.diff(times[order])
        if len(running):
            seconds = np.bincount(running, weights=durations)
            seconds[0] = 0.0
            at_least = np.cumsum(seconds[::-1])[::-1]
            maximum = max(maximum, int(np.flatnonzero(at_least >= _FULL_SHARE * max(at_least[0], 1e-12))[-1]))
    return maximum


def engines_of(trace: Trace) -> int:
    """Return the median number of workers in use. A worker is in use from the first to the last dispatch to it."""
    in_use = np.zeros(len(trace), np.int64)
    for worker in np.unique(trace.worker):
        dispatched_s = trace.dispatched_s[trace.worker == worker]
        in_use += (trace.dispatched_s >= dispatched_s.min()) & (trace.dispatched_s <= dispatched_s.max())
    return max(1, round(float(np.median(in_use)))) if len(in_use) else 1


def _in_flight_at_dispatch(trace: Trace) -> Ints:
    in_flight = np.zeros(len(trace), np.int64)
    for worker in np.unique(trace.worker):
        rows = np.flatnonzero(trace.worker == worker)
        dispatched_s = trace.dispatched_s[rows]
        started = np.searchsorted(np.sort(dispatched_s), dispatched_s, side="left")
        finished = np.searchsorted(np.sort(trace.finished_s[rows]), dispatched_s, side="right")
        in_flight[rows] = np.maximum(started - finished, 0)
    return in_flight


def _decode_equations(trace: Trace, is_observed: Bools) -> tuple[Floats, Floats]:
    """Return rows [n, 4] (steps, tokens of all sequences, prompt tokens, 0) during n decodes, and their seconds [n]."""
    rows, seconds = [], []
    for worker in np.unique(trace.worker):
        own = trace.take(np.flatnonzero(trace.worker == worker))
        start_s, end_s = own.first_token_s, own.finished_s
        usable = own.is_uninterrupted & is_observed[trace.worker == worker] & (own.decode_tokens >= MIN_DECODE_TOKENS)
        usable &= end_s > start_s
        order = np.argsort(start_s, kind="stable")
        prompts, firsts = np.concatenate([[0.0], np.cumsum(own.prompt_tokens[order])]), start_s[order]
        computed = prompts[np.searchsorted(firsts, end_s, "right")] - prompts[np.searchsorted(firsts, start_s, "right")]
        tokens = _tokens_between(start_s, end_s, own.decode_tokens)
        rows.append(np.column_stack([own.decode_tokens, tokens, computed, np.zeros(len(own))])[usable])
        seconds.append((end_s - start_s)[usable])
    return np.vstack(rows).astype(float), np.concatenate(seconds)


def _tokens_between(start_s: Floats, end_s: Floats, tokens: Floats) -> Floats:
    """Return, for each request ([n]), the tokens of all requests from its start to its end, generated evenly."""
    durations = np.maximum(end_s - start_s, 1e-9)
    times = np.concatenate([start_s, start_s + durations])
    slopes = np.concatenate([tokens / durations, -tokens / durations])
    order = np.argsort(times, kind="stable")
    at, rate = times[order], np.cumsum(slopes[order])
    total = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(at))])
    return np.asarray(np.interp(start_s + durations, at, total) - np.interp(start_s, at, total))


def _fit_absolute(rows: Floats, seconds: Floats) -> Floats:
    """Return the non-negative coefficients that minimize absolute errors relative to the fitted seconds.

    Errors relative to the observed seconds would give most weight to tokens that arrived in a burst (microseconds in
    total), so that the fit would tend to 0. Squared errors would give most weight to stalls. With absolute errors, as
    with a median, outliers count little.
    """
    if not len(seconds):
        return np.array([1e-3, 0.0, 0.0, 0.0])
    from scipy.optimize import nnls

    size = np.maximum(np.abs(rows).max(axis=0), 1e-12)
    coefficients, scale, weight = np.zeros(4), np.full(len(rows), float(np.median(seconds))), np.ones(len(rows))
    for _ in range(_ROUNDS):
        by = weight / scale
        coefficients = nnls(rows / size * by[:, None], seconds * by)[0] / size
        fitted = rows @ coefficients
        scale = np.maximum(fitted, max(float(np.quantile(fitted, 0.1)), 1e-9))
        weight = 1 / np.sqrt(np.maximum(np.abs(fitted - seconds) / scale, _EXACT))
    return np.asarray(coefficients)


FCFS, SRTF, ISRTF, ORACLE, WINDOWED = "fcfs", "srtf", "isrtf", "oracle", "windowed"
ORDERS = (FCFS, SRTF, ISRTF, ORACLE)
_STEP_TOKENS = 2048
_MAX_TOKENS = 1 << 20
_MATCHES = 3  # fixed-point iterations
_MIN_TIMER_S = 0.001  # least delay of the scheduler's timer, as in a live gateway
_BLOCK_SIZE = 16
_LINK = LinkSpec("link", 1e9, 1e-6, "")
_NODE = NodeSpec("node", 8, _LINK, 8, _LINK, _LINK, "")
_GPU = GpuSpec("engine", {"bfloat16": 1e12}, 1e9, 1e11, 0.0, 0.0, 0.0, "", "")
_MODEL = ModelSpec("observed", 1, 64, 1000, AttentionSpec(4, 4, 16), FfnSpec(128), 1 << 40)


@dataclass(frozen=True)
class Replayed:
    """JCT and total queueing time of each request ([n]) in a simulation. Both are NaN if the request was not served."""

    jct_s: Floats
    queued_for_s: Floats
    ttft_s: Floats | None = None  # of a ``VirtualGateway``


def replay(workload: Workload, service: Service, name: str, order: Order = Order()) -> Replayed:  # noqa: B008 - frozen
    """Simulate a workload under the order ``name``, one of ORDERS. Only ORACLE knows the true lengths."""
    if name == ORACLE:
        lengths = workload.output_tokens.astype(float)
        workload = replace(workload, predicted_tokens=lengths, predictions=None)
    r = engine.simulate(workload, deployment_of(workload, service, scheduler(name, order)), max_log_steps=0).requests
    served = r.status == Status.FINISHED
    return Replayed(np.where(served, r.finished_s - r.arrival_s, np.nan), np.where(served, r.queued_for_s, np.nan))


@dataclass(frozen=True)
class Withheld:
    """How often an engine withholds text until a later token, because a character or stop string is incomplete."""

    share: float = 0.0  # share of tokens whose text is withheld
    again: float = 0.0  # share of the tokens after those whose text is withheld as well


class VirtualGateway:
    """Serves a workload with the gateway's own scheduler in front of fitted engines, in virtual time.

    The scheduler decides as in a live gateway, also about preemptions, with the costs that it learns from the times of
    tokens. What a preemption costs follows from the engines: an engine starts its next step before the gateway reads
    the tokens of the last one, so that the victim's slot is empty during that step. The request that takes the slot,
    and later the victim, go to the engine anew, and the victim's prompt and output are computed again. A preemption
    waits while the text of the victim's last tokens is incomplete. ``tenants`` are the tenants of the requests.
    """

    def __init__(
        self,
        workload: Workload,
        service: Service,
        order: Order,
        withheld: Withheld | None = None,
        seed: int = 0,
        *,
        tenants: Sequence[int] = (),
    ) -> None:
        d, n = deployment_of(workload, service, scheduler(FCFS, order)), len(workload)
        limits, seconds = Limits.of(d), step_time(d.cost)
        self._engines = {f"w{k}": ContinuousBatch(limits, seconds) for k in range(service.engines)}
        self._workload, self._order, self._front_s = workload, order, service.front_s
        self._tenants = tenants or [0] * n
        self._scheduler = GatewayScheduler(order, Admission(max_queued=n, max_queued_per_tenant=n), Dispatch())
        concurrency = service.max_num_seqs or n
        states = [WorkerState(name, ("m",), concurrency=concurrency) for name in self._engines]
        self._scheduler.update_workers(-math.inf, states)
        self._arrivals = [(float(s), i) for i, s in enumerate(workload.arrival_s)]
        self._requests: dict[int, Request] = {}
        self._sequences: dict[int, tuple[ContinuousBatch, BatchSequence]] = {}
        self._sent: list[tuple[float, int]] = []  # heap of (arrival at the engine, request)
        self._tokens: list[int] = []  # requests with a token at this instant
        self._finished_s = np.full(n, math.nan)
        self._first_token_s = np.full(n, math.nan)
        self._queued_for_s = np.full(n, math.nan)
        self._now_s, self._dispatches = -math.inf, 0
        self._withheld, self._random = withheld or Withheld(), np.random.default_rng(seed)
        # Requests to be preempted at their next token with complete text, and those that have it now.
        self._interrupted, self._leaving = set[int](), list[int]()

    def run(self) -> Replayed:
        """Serve all requests."""
        arrivals, wake_s = iter([*self._arrivals, (math.inf, -1)]), math.inf
        arrival = next(arrivals)
        while True:
            step_s = min(batch.next_s() for batch in self._engines.values())
            self._now_s = now_s = min(arrival[0], wake_s, step_s, self._sent[0][0] if self._sent else math.inf)
            if now_s == math.inf:
                break
            for batch in self._engines.values():
                batch.advance(now_s)
            tokens, self._tokens = self._tokens, []
            for request in tokens:
                self._on_token(request)
            while arrival[0] <= now_s:
                self._arrive(arrival[1])
                arrival = next(arrivals)
            self._schedule()
            leaving, self._leaving = self._leaving, []
            for request in leaving:
                self._preempt(request)
            self._schedule()
            while self._sent and self._sent[0][0] <= now_s:
                batch, sequence = self._sequences[heappop(self._sent)[1]]
                batch.enter(sequence)
            wake_s = max(self._scheduler.next_s(now_s), now_s + _MIN_TIMER_S)
        arrival_s = self._workload.arrival_s
        return Replayed(self._finished_s - arrival_s, self._queued_for_s, self._first_token_s - arrival_s)

    def _schedule(self) -> None:
        while decisions := self._scheduler.schedule(self._now_s):
            for request in decisions.preempt:
                if self._random.random() < self._withheld.share:
                    self._interrupted.add(request)
                else:
                    self._preempt(request)
            for request, worker in decisions.assign:
                self._send(request, worker)

    def _arrive(self, i: int) -> None:
        request = Request(i, self._now_s, "m", int(self._workload.prompt_tokens[i]), _MAX_TOKENS)
        request.client = Client(self._tenants[i])
        request.preemptible, request.length_prediction = True, self._prediction(i, 0)
        self._requests[i] = request
        refusal = self._scheduler.offer(self._now_s, request)
        assert refusal is None, refusal

    def _prediction(self, i: int, generated: int) -> LengthPrediction:
        predicted, predictions = self._workload.predicted_tokens, self._workload.predictions
        if predictions is not None:
            start, end = predictions.start[i : i + 2].tolist()
            row = min(start + generated // predictions.window_tokens, end - 1)
            return LengthPrediction(float(predictions.total_tokens[row]), at_tokens=generated)
        assert predicted is not None, "requests are ordered by predicted lengths"
        return LengthPrediction(float(predicted[i]), at_tokens=generated)

    def _on_token(self, i: int) -> None:
        request, now_s = self._requests[i], self._now_s
        generated = request.generated_tokens + 1
        self._scheduler.on_progress(now_s, i, generated)
        if generated == 1:
            self._first_token_s[i] = now_s
        if generated == self._workload.output_tokens[i]:
            self._interrupted.discard(i)
            self._finished_s[i], self._queued_for_s[i] = now_s, request.dispatch.queued_for_s
            self._scheduler.remove(now_s, i)
        elif generated % self._order.window_tokens == 0 and self._order.mode != FCFS:
            self._scheduler.repredict(now_s, i, self._prediction(i, generated))
        if i in self._interrupted and self._random.random() >= self._withheld.again:
            self._interrupted.remove(i)
            self._leaving.append(i)

    def _send(self, i: int, worker: str) -> None:
        request, at_s = self._requests[i], self._now_s + self._front_s
        left = int(self._workload.output_tokens[i]) - request.generated_tokens

        def on_token(_: float) -> bool:
            self._tokens.append(i)
            return sequence.generated == left

        order = SequenceOrder(self._dispatches, at_s)
        sequence = BatchSequence(order, request.prompt_tokens + request.generated_tokens, on_token=on_token)
        self._dispatches += 1
        self._sequences[i] = self._engines[worker], sequence
        heappush(self._sent, (at_s, i))

    def _preempt(self, i: int) -> None:
        batch, sequence = self._sequences.pop(i)
        if (one := next((one for one in self._sent if one[1] == i), None)) is not None:
            self._sent.remove(one)
            heapify(self._sent)
        else:
            batch.abort(sequence, self._now_s)
        self._scheduler.requeue(self._now_s, i, self._requests[i].generated_tokens)


def matched(service: Service, workloads: Sequence[Workload], at_engine_s: float) -> Service:
    """Return a service with which a first-come-first-served gateway has requests at engines for ``at_engine_s``.

    A request that takes the slot of another one waits for the engine's next step. ``fit`` counts this wait among the
    costs of a request, so that they are too high for a ``VirtualGateway``, which has the wait as well. The seconds of
    network and parsing become as long as the observed mean over the workloads' requests needs; if the wait alone is
    too long, all costs are scaled.
    """
    observed = replace(service, front_s=0.0)
    for _ in range(_MATCHES):
        runs = [VirtualGateway(workload, observed, Order(FCFS, max_wait_s=math.inf)).run() for workload in workloads]
        simulated_s = float(np.concatenate([run.jct_s - run.queued_for_s for run in runs]).mean())
        front_s = observed.front_s + at_engine_s - simulated_s
        scale = min(1.0, at_engine_s / simulated_s) if front_s < 0 else 1.0
        costs = {name: scale * getattr(observed, name) for name in ("step_s", "seq_s", "prompt_s")}
        observed = replace(observed, front_s=max(front_s, 0.0), **costs)
    return observed


def scheduler(name: str, order: Order) -> Scheduler:
    """Return the order ``name``, one of ORDERS, as a scheduler of the simulator with the gateway's settings."""
    fcfs = Scheduler(router="central", memory="paged_by_chunk")
    if name == FCFS:
        return fcfs
    preemption, interval = order.preemption if name == ISRTF else "never", order.window_tokens
    srtf = replace(fcfs, rank="srtf", victim="longest_remaining", max_wait_s=order.max_wait_s)
    return replace(srtf, preemption=preemption, preemption_interval_steps=interval)


def workload_of(trace: Trace, window_tokens: int) -> Workload:
    """Return the recorded requests as a workload, with one prediction per window of tokens."""
    totals, counts = [], []
    columns = (trace.predicted_tokens.tolist(), trace.output_tokens.tolist(), trace.repredictions)
    for first, output, repredictions in zip(*columns, strict=True):
        values = [first]
        if repredictions:
            tokens = np.maximum.accumulate([-1, *(at for at, _ in repredictions)])
            predictions = [first, *(total for _, total in repredictions)]
            windows = np.arange(1 + int(output) // window_tokens) * window_tokens
            values = [predictions[i - 1] for i in np.searchsorted(tokens, windows, side="right")]
        totals += values
        counts.append(len(values))
    start = np.concatenate([[0], np.cumsum(counts)])
    total = np.clip(np.array(totals, float), 1.0, 1e9)
    generated = (np.arange(len(total)) - np.repeat(start[:-1], counts)) * window_tokens
    return Workload(
        trace.arrival_s - trace.arrival_s[0],
        trace.prompt_tokens,
        trace.output_tokens,
        trace.predicted_tokens,
        predictions=Predictions(window_tokens, start, total, np.maximum(total - generated, 1.0)),
        name="observed",
    )


def resampled(workload: Workload, gaps_s: Floats, rows: Ints) -> Workload:
    """Return the workload of the requests ``rows``, each with its original gap after the previous arrival."""
    gaps = gaps_s[rows]
    return workload.take(rows, np.cumsum(gaps) - gaps[0])


def deployment_of(
    workload: Workload,
    service: Service,
    scheduler: Scheduler,
    *,
    caches_prefixes: bool = False,
    kv_tokens: int | None = None,
) -> Deployment:
    """Return the fitted engines as a deployment with ``kv_tokens`` of KV memory for each engine.

    By default the memory is enough for the requests in flight or, if engines cache prefixes, for the complete workload.
    """
    max_model_len = int((workload.prompt_tokens + workload.output_tokens).max()) + 1
    max_num_seqs = service.max_num_seqs or _NO_LIMIT
    max_tokens = _STEP_TOKENS + max_num_seqs
    num_blocks = -(-max_model_len // _BLOCK_SIZE) * (min(max_num_seqs, len(workload)) + 1)
    if kv_tokens is not None:
        num_blocks = max(kv_tokens, max_model_len) // _BLOCK_SIZE + 1
    elif caches_prefixes:
        num_blocks += int((-(-(workload.prompt_tokens + workload.output_tokens) // _BLOCK_SIZE)).sum())
    # The table by tokens has the cost that sequences and prompt tokens have in common, other tables the rest.
    zeros, two = np.zeros(2), np.arange(2.0)
    token_s = min(service.seq_s, service.prompt_s)
    chunks = grid_axis(max_tokens)
    costs = CostTables(
        layer_s=service.step_s + token_s * two,
        comm_s=zeros,
        embedding_s=zeros,
        send_s=zeros,
        head_s=(service.seq_s - token_s) * two,
        host_s=zeros,
        prefill_s=np.tile(((service.prompt_s - token_s) * chunks)[:, None], (1, 2)),
        decode_s=np.zeros((2, 2)),
        stage_layers=np.array([1]),
        evidence=CostEvidence("fitted to the gateway's observations"),
        front=Front(request_s=service.front_s),
    )
    limits = EngineLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        block_size=_BLOCK_SIZE,
        watermark=0.0,
        enable_prefix_caching=caches_prefixes,
    )
    kv_plan, parallelism = KvPlan(num_blocks, _BLOCK_SIZE, 0.0, 0.0, 0.0, 0.0), Parallelism(1, 1, service.engines)
    hardware, name = (_MODEL, _GPU, _NODE, parallelism), "engines as observed"
    return Deployment(*hardware, limits, scheduler, costs, kv_plan, max_model_len=max_model_len, name=name)
