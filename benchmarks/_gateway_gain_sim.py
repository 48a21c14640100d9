"""What the simulator says of the same traffic under the same policies, on engines fitted to runs under FCFS.

Cuts are decided by the bare takeover; the gateway's learned price of a cut is not in the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from _gateway_gain_load import Floats

from lengthwise import engine
from lengthwise.gateway.config import Order
from lengthwise.gateway.observe import replay
from lengthwise.gateway.observe.replay import Service
from lengthwise.gateway.observe.trace import Trace
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.records import RequestRecords, Status
from lengthwise.schema.workload import Workload

_TIMES = 4
"""Windows are simulated so often, each time with the share of them that ended with a cut the time before."""


def service_of(traces: Sequence[Trace], batch: int, engines: int) -> Service:
    """The engines, fitted to seconds at an engine under FCFS: least squares of relative errors, their sum kept.

    At an engine's own clip, tokens come to the gateway in heaps where cores are scarce: only when a request was
    sent and when it ended is used. Relative errors weigh short requests as much as long ones, but a fit to them lies
    low; all together the fitted engines work as long as the real ones did.

        at the engine = front_s + step_s tokens + seq_s tokens x (others that run, in the mean) + prompt_s prompt
    """
    from scipy.optimize import nnls

    rows = np.concatenate([_rows(trace) for trace in traces])
    seconds = np.concatenate([trace.finished_s - trace.dispatched_s for trace in traces])
    scaled = rows / seconds[:, None]
    size = scaled.max(axis=0)
    found = nnls(scaled / size, np.ones(len(seconds)))[0] / size
    found *= seconds.sum() / (rows @ found).sum()
    front_s, step_s, seq_s, prompt_s = found.tolist()
    error = float(np.median(np.abs(rows @ found / seconds - 1)))
    return Service(max(step_s, 1e-6), seq_s, prompt_s, front_s, batch, engines, math.nan, error)


def pace(trace: Trace, service: Service) -> float:
    """Seconds at engines of requests that were not cut over what the fitted engines take; the median."""
    said = _rows(trace) @ np.array([service.front_s, service.step_s, service.seq_s, service.prompt_s])
    whole = trace.complete if trace.complete.any() else np.ones(len(trace), bool)
    return float(np.median(((trace.finished_s - trace.dispatched_s) / said)[whole]))


def _rows(trace: Trace) -> Floats:
    """[n, 4] one, tokens, tokens x sequences that ran beside it (itself included), prompt."""
    beside = np.array([_mean_running(trace, i) for i in range(len(trace))])
    one = np.ones(len(trace))
    return np.stack([one, trace.output_tokens, trace.output_tokens * beside, trace.prompt_tokens], axis=1)


def _mean_running(trace: Trace, i: int) -> float:
    """Requests at its engine while it was there."""
    there = np.minimum(trace.finished_s, trace.finished_s[i]) - np.maximum(trace.dispatched_s, trace.dispatched_s[i])
    there = there[trace.worker == trace.worker[i]]
    return float(np.maximum(there, 0).sum() / (trace.finished_s[i] - trace.dispatched_s[i]))


def simulated(made: Workload, service: Service, order: Order, *, knows: bool) -> Floats:
    """[n] JCT; ``knows``: lengths are known beforehand."""
    if knows:
        truth = made.output_tokens.astype(float)
        made = replace(made, predicted_tokens=truth, predictions=None)
    if order.mode != "windowed":
        r = _requests(made, service, order)
        return np.asarray(r.finished_s - r.arrival_s)
    share = 1.0
    for _ in range(_TIMES):  # dearer windows make longer queues, which make more of them
        r = _requests(made, cut_by_windows(service, made, order.window_tokens, share), order)
        share = share_with_a_queue(r.arrival_s, r.finished_s, (service.max_num_seqs or 1) * service.engines)
    return np.asarray(r.finished_s - r.arrival_s)


def _requests(made: Workload, service: Service, order: Order) -> RequestRecords:
    deployment = replay.deployment_of(made, service, scheduler_of(order))
    r = engine.simulate(made, deployment, keep_steps=0).requests
    assert (r.status == Status.FINISHED).all()
    return r


def cut_by_windows(service: Service, made: Workload, window_tokens: int, share: float) -> Service:
    """Engines of whose windows a share ends with a cut: what a sending takes is spread over the windows' tokens.

    A cut request is sent as a new one, prompt and all tokens so far; half of the output is there in the mean. The
    gateway cuts at the end of a window only where somebody waits.
    """
    context = float(made.prompt_tokens.mean() + made.output_tokens.mean() / 2)
    sending_s = service.front_s + service.prompt_s * context
    return replace(service, step_s=service.step_s + share * sending_s / window_tokens)


def share_with_a_queue(arrival_s: Floats, finished_s: Floats, max_num_seqs: int) -> float:
    """Of the time of all seats that are taken, the share during which somebody waits: more are there than seats."""
    at_s = np.concatenate([arrival_s, finished_s])
    turn = np.argsort(at_s, kind="stable")
    there = np.cumsum(np.repeat([1, -1], [len(arrival_s), len(finished_s)])[turn])[:-1]
    taken_s = np.diff(at_s[turn]) * np.minimum(there, max_num_seqs)
    return float(taken_s[there > max_num_seqs].sum() / taken_s.sum())


def scheduler_of(order: Order) -> Scheduler:
    """A gateway's order on the simulator's axes."""
    if order.mode == "fcfs":
        return Scheduler(router="central", memory="paged_by_chunk")
    takeover = {"isrtf": order.takeover, "windowed": "by_rank"}.get(order.mode, "never")
    return Scheduler(
        rank=order.rank or "srtf",
        leave="longest_remaining",
        batching="windowed" if order.mode == "windowed" else "unified",
        memory="paged" if order.mode == "windowed" else "paged_by_chunk",
        router="central",
        takeover=takeover,
        max_wait_s=order.max_wait_s if order.max_wait_s > 0 else math.inf,
        window_tokens=order.window_tokens,
    )
