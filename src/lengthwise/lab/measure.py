"""What one run tells: plain numbers by metric."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lengthwise import engine
from lengthwise.metrics import request_column
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Records, RequestRecords, Status
from lengthwise.schema.workload import Workload

Floats = npt.NDArray[np.float64]
WARM_SHARE = 0.2
"""Of the requests that a full queue serves, left out of its rate: the batch fills up."""


def at_rate(workload: Workload, rate_rps: float) -> Workload:
    """The same requests in the same order, their times stretched to a mean rate.

    Raises:
        InputError: They have no times that could be stretched.
    """
    workload.require_nobody_after("a lab")
    since_s = workload.arrival_s - workload.arrival_s[0]
    if workload.concurrency is not None or len(workload) < 2 or not since_s[-1] > 0:
        raise InputError(
            "a lab stretches arrivals to its loads, so requests must arrive one after the other; "
            "give the workload a request_rate (its value does not matter here) or arrivals of a kind with a rate"
        )
    return replace(workload, arrival_s=since_s * ((len(workload) - 1) / (since_s[-1] * rate_rps)))


def alone_s(workload: Workload, deployment: Deployment, how: str) -> Floats:
    """[n] seconds that each request takes with nobody else there; NaN for those that are refused."""
    one = replace(deployment, parallel=replace(deployment.parallel, replicas=1))
    single = replace(workload, arrival_s=np.zeros(len(workload)), concurrency=1)
    records = engine.simulate(single, one, keep_steps=0, engine=how)
    r = records.requests
    return np.asarray(r.finished_s - r.scheduled_s)


def saturated_rps(workload: Workload, deployment: Deployment, how: str) -> float:
    """Requests a second while none of the replicas' queues is ever empty: all arrive at once."""
    burst = replace(workload, arrival_s=np.zeros(len(workload)), concurrency=None)
    r = engine.simulate(burst, deployment, keep_steps=0, engine=how).requests
    ended = np.sort(r.finished_s[np.isfinite(r.finished_s)])
    if not len(ended):
        raise InputError("no request of the lab's workload can ever be served; look at lengthwise explain")
    busy = ended[ended <= np.nanmax(r.scheduled_s)]
    first = int(WARM_SHARE * len(busy))
    if len(busy) - first < 2:  # all run at once: no queue to speak of
        return len(ended) / float(ended[-1])
    return (len(busy) - 1 - first) / float(busy[-1] - busy[first])


def measured(records: Records, seats: int, alone: Floats) -> dict[str, float]:
    """The numbers of a run by the names of ``schema.lab.Cell``, the paired ones left out.

    Args:
        records: What the run left behind.
        seats: Requests that can run at a time on all replicas.
        alone: [n] seconds that each request takes alone.

    Raises:
        InputError: Nothing was served.
    """
    r = records.requests
    done = r.status == Status.FINISHED
    if not done.any():
        raise InputError(
            "no request of the lab's workload was served; raise timeout_s or look at lengthwise explain"
        )
    jct_s, wait_s = (request_column(r, name)[done] for name in ("jct_s", "waited_s"))
    slowdown = jct_s / alone[done]
    return {
        "jct.mean": float(jct_s.mean()),
        "jct.p50": float(np.quantile(jct_s, 0.5)),
        "jct.p99": float(np.quantile(jct_s, 0.99)),
        "ttft.mean": float(request_column(r, "ttft_s")[done].mean()),
        "wait.mean": float(wait_s.mean()),
        "wait.max": float(np.nanmax(r.waited_s)),
        "waiting_share": float(wait_s.sum() / jct_s.sum()),
        "found_full": _found_full(r, seats),
        "slowdown.mean": float(slowdown.mean()),
        "slowdown.p99": float(np.quantile(slowdown, 0.99)),
        "requests_per_s": float(done.sum() / records.end_s),
        "preemptions_per_request": float(r.preemptions.sum() / len(r.status)),
        "recomputed_tokens_per_request": _recomputed(records, r, done) / len(r.status),
        "served": float(done.mean()),
    }


def _found_full(r: RequestRecords, seats: int) -> float:
    """Share of requests that, when they arrive, find at least so many others under way."""
    gone_s = np.sort(np.where(np.isfinite(r.finished_s), r.finished_s, r.arrival_s))
    there = np.arange(len(gone_s)) - np.searchsorted(gone_s, r.arrival_s, side="right")
    return float((there >= seats).mean())


def _recomputed(records: Records, r: RequestRecords, done: npt.NDArray[np.bool_]) -> float:
    """Tokens computed beyond once each; the last output token is never computed on."""
    once = (r.prompt_tokens + np.maximum(r.output_tokens, 1) - 1)[done].sum()
    return max(0.0, float(records.totals.tokens.sum() - once))
