"""The bottleneck: the resource that limits a deployment first, inferred from its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from lengthwise.metrics import Counts, Hardware, Summary
from lengthwise.report.formatting import buckets, percent, seconds
from lengthwise.report.result import Result, scenario_of
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.records import Records

# Thresholds of the diagnosis. Shares are of time, of requests or of a peak.
IDLE_SHARE = 0.4
OVERHEAD_SHARE = 0.3
KV_FULL_SHARE = 0.9
PREEMPTED_SHARE = 0.05
AT_LIMIT_SHARE = 0.9
CLOSED_LOOP_SHARE = 0.5  # if more arrivals come at the moment of a completion, the load is a closed loop
REQUEUED_SHARE = 0.1  # with more preemptions per request, the time before the first admission is not the complete wait
LONG_WAIT_SHARE = 0.25  # if queues take a larger share of the JCT, the deployment does not keep up with its load
SHORT_RUN_JCTS = 5  # in mean JCTs; a shorter run shows no steady load: it consists of its start and its end
NEAR_ROOF_SHARE = 0.3  # below this utilization neither compute nor bandwidth is the bottleneck
REJECTED_SHARE = 0.5
UNSERVED_SHARE = 0.01  # if more requests have no answer, the report first warns about them
PARTS = {  # parts of a step's time
    "linear": "linear layers",
    "prefill_attention": "prefill attention",
    "decode_attention": "decode attention",
    "head": "head and sampling",
    "embedding": "the embedding",
    "communication": "communication",
    "send": "transfers between pipeline stages",
    "swap": "swapping KV blocks",
    "host": "the host",
}
Span = tuple[float, float]  # a time in seconds, and the upper end of its interval


@dataclass(frozen=True)
class HardwareBottleneck:
    """The resource that limits a variant, with the evidence."""

    # idle, imbalance, prefill replicas, KV memory, limits, host, network, pipeline, memory bandwidth, compute, kernels
    # or unknown
    resource: str
    description: str
    warning: str = ""  # on requests that were not served; precedes everything else


def bound_by(bottleneck: HardwareBottleneck) -> str:
    """Return the words that precede the resource in a sentence: "bound by", or "not bound," if there is none."""
    return "not bound," if bottleneck.resource in {"idle", "unknown"} else "bound by"


def bottleneck_of(result: Result) -> HardwareBottleneck:
    """Infer a variant's bottleneck from the summary, the limits and the load."""
    if result.deployment is None:
        warning = unserved(result.summary.counts)
        return HardwareBottleneck(
            "unknown", "The time of a measured engine's steps cannot be seen from outside.", warning
        )
    return what_binds(
        result.summary,
        max_batch_seqs=max(one.limits.max_num_seqs / one.parallel.pp for one in result.deployment.replica_groups),
        reserves=result.deployment.scheduler.reserves_ahead,
        load="open" if is_open_loop(result) and result.summary.is_steady else "closed",
        preempts_only_for_memory=result.deployment.scheduler.preemption == "never",
        queued_for_s=mean_queued_for_s(result.records),
        front_s=_front_s(result.deployment.cost),
        prefill_ranks=0 if result.deployment.decode is None else result.deployment.parallel.ranks,
    )


def _front_s(cost: CostTables) -> Span:
    """Return the delay of a request in front of the engine, and the upper end of its 90 % interval."""
    spreads = [e.log_sd if e.slow_log_sd is None else e.slow_log_sd for e in cost.evidence.errors if e.part == "front"]
    return cost.front.request_s, cost.front.request_s * math.exp(1.645 * max(spreads, default=0.0))


def mean_queued_for_s(records: Records) -> float:
    """Return the mean seconds of requests in the front end, in bins and in queues; NaN if none was scheduled."""
    r = records.requests
    queued_for_s = r.queued_for_s[np.isfinite(r.scheduled_s)]
    return float(queued_for_s.mean()) if len(queued_for_s) else math.nan


def is_open_loop(result: Result) -> bool:
    """Return whether requests arrive independently of completions, and not all at once."""
    r = result.records.requests
    later_s = r.arrival_s[r.arrival_s > r.arrival_s.min()]
    if len(later_s) == 0 or "concurrency" in scenario_of(result).get("workload", {}):
        return False
    return float(np.isin(later_s, r.finished_s).mean()) < CLOSED_LOOP_SHARE


def unserved(counts: Counts) -> str:
    """Return a sentence about requests that were not served, or "" if nearly all were."""
    missing = counts.arrivals - counts.finished
    if missing <= UNSERVED_SHARE * counts.arrivals:
        return ""
    outcomes = ", ".join(buckets(counts)[1:])
    if not counts.finished:
        return f"No request was served ({outcomes})."
    return f"{percent(missing / counts.arrivals)} of requests were not served ({outcomes}); latencies cover the rest."


def what_binds(
    summary: Summary,
    *,
    max_batch_seqs: float = math.inf,
    reserves: bool = False,
    load: str = "open",
    preempts_only_for_memory: bool = True,
    queued_for_s: float = math.nan,
    front_s: Span = (0.0, 0.0),
    prefill_ranks: int = 0,
) -> HardwareBottleneck:
    """Return the resource that limits a deployment's speed, and whether the deployment keeps up with its load.

    The first cause that applies is returned:

    - Most requests were rejected.
    - Requests wait for prefill replicas (the first ``prefill_ranks``) that are always busy, and the KV cache is not
      full.
    - The GPUs are idle, or only some are, while requests wait for the others.
    - The KV cache is full.
    - Requests wait although batches could grow, because admission reserves KV memory (with ``reserves``).
    - Host, network or pipeline bubbles take the time.
    - Memory bandwidth or compute, whichever is nearer its peak, or the kernels if both are far from their peaks.

    A deployment can fall behind an "open" ``load``, but not behind a "closed" loop; at the load "capacity" it has no
    room for more. Without ``preempts_only_for_memory`` preemptions do not count.
    """
    h, counts, warning = summary.hardware, summary.counts, unserved(summary.counts)
    wait_s = max(summary.queueing_delay_s.mean.value - front_s[0], 0.0)
    is_queueing = wait_s > summary.ttft_s.mean.value / 2
    if counts.rejected and counts.rejected >= REJECTED_SHARE * counts.arrivals:
        _, resource, reason = max(
            (counts.rejected_over_kv_memory, "KV memory", "even an idle replica's memory policy refuses the prompts"),
            (counts.rejected_too_long, "limits", "prompts reach max_model_len"),
            (counts.rejected_over_token_budget, "limits", "prompts exceed max_num_batched_tokens"),
            key=lambda cause: cause[0],
        )
        return HardwareBottleneck(resource, f"Most requests are rejected: {reason}.", warning)
    if h is None or not h.busy_share.value > 0:
        return HardwareBottleneck("unknown", "Nothing is known about the hardware.", warning)
    busy, is_short = h.busy_share.value, summary.window_s.value < SHORT_RUN_JCTS * summary.jct_s.mean.value
    has_room = reserves and is_queueing and h.batch_seqs.value < AT_LIMIT_SHARE * max_batch_seqs
    resource, reason = _overhead(
        h, summary, preempts_only_for_memory=preempts_only_for_memory, waits_for_reserved=has_room
    ) or _roof(
        h, _batch_advice(h, max_batch_seqs, can_take_more=not (warning or load == "capacity"), is_queueing=is_queueing)
    )
    shares = [share.value for share in h.replica_busy_share]
    busiest, sides = max(shares, default=busy), ""
    if 0 < prefill_ranks < len(shares):
        prefill, decode = fmean(shares[:prefill_ranks]), fmean(shares[prefill_ranks:])
        sides = f" Steps run {percent(prefill)} of the time on prefill replicas, {percent(decode)} on decode replicas."
    if sides and is_queueing and prefill > AT_LIMIT_SHARE and resource != "KV memory":
        resource = "prefill replicas"
        reason = (
            f"requests wait for prefill replicas, and more of them would shorten the queue; of both sides, {reason}"
        )
    elif busy < 1 - IDLE_SHARE and busiest > AT_LIMIT_SHARE and is_queueing:
        resource = "imbalance"
        reason = (
            f"the busiest replica runs steps {percent(busiest)} of the time, the mean of all is {percent(busy)}; a "
            "router by load (least_outstanding), or with P/D other numbers of replicas, would divide the work better; "
            f"while busy, {reason}"
        )
    elif busy < 1 - IDLE_SHARE:
        resource = "idle"
        room = (
            ""
            if warning or is_short or load == "capacity" or not summary.is_steady
            else ", so there is room for more load"
        )
        reason = f"no step runs {percent(1 - busy)} of the time{room}; while busy, {reason}"
    queue = _queue(
        summary, wait_s, queued_for_s, front_s, can_keep_up=load == "open" and not warning, is_short=is_short
    )
    return HardwareBottleneck(resource, f"{reason[0].upper()}{reason[1:]}.{queue}{sides}", warning)


def _overhead(
    h: Hardware, summary: Summary, *, preempts_only_for_memory: bool, waits_for_reserved: bool
) -> tuple[str, str] | None:
    """Return (resource, evidence), or None if nothing but memory bandwidth and compute takes the time."""
    busy = h.busy_share.value
    kv_share = h.kv_utilization.value / busy
    preempted = summary.counts.preemptions / max(1, summary.counts.arrivals)
    if kv_share > KV_FULL_SHARE or (preempted > PREEMPTED_SHARE and preempts_only_for_memory):
        return "KV memory", (
            f"the KV cache is {percent(kv_share)} full, with {preempted:.2g} preemptions per request; "
            "more KV memory or fewer concurrent sequences would help"
        )
    if waits_for_reserved:
        return "KV memory", (
            f"admission reserves KV memory for tokens that are still to come: requests wait while {percent(kv_share)} "
            f"of it is in use and batches have {h.batch_seqs.value:.3g} sequences; a lower reservation or more KV "
            "memory would help"
        )
    share = {name: e.value / busy for name, e in h.time_shares.items()}
    taken, resource, reason = max(
        (share["host"], "host", "the host (scheduling, input preparation) takes {} of the time"),
        (share["communication"] + share["send"], "network", "communication between GPUs takes {} of the time"),
        (share["idle"] - (1 - busy) / busy, "pipeline", "pipeline bubbles take {} of the stages' time"),
        key=lambda cause: cause[0],
    )
    if not taken > OVERHEAD_SHARE:
        return None
    mfu, mbu = _utilization(h)
    far = f", and neither roof is near (compute {percent(mfu)}, memory bandwidth {percent(mbu)})"
    return resource, f"{reason.format(percent(taken))}{far if max(mfu, mbu) < NEAR_ROOF_SHARE else ''}"


def _utilization(h: Hardware) -> tuple[float, float]:
    return h.mfu.value / h.busy_share.value, h.mbu.value / h.busy_share.value


def _roof(h: Hardware, batch_advice: str) -> tuple[str, str]:
    """Return (resource, evidence) for memory bandwidth or compute, or for the kernels if neither is near its peak."""
    mfu, mbu = _utilization(h)
    bandwidth, compute = f"{percent(mbu)} of the memory bandwidth", f"{percent(mfu)} of the peak compute"
    if max(mfu, mbu) < NEAR_ROOF_SHARE:
        shares = {name: h.time_shares[name].value / h.busy_share.value for name in PARTS if name in h.time_shares}
        largest = sorted(shares, key=lambda name: -shares[name])[:2]
        parts = " and ".join(f"{PARTS[name]} ({percent(shares[name])})" for name in largest if shares[name] >= 0.01)
        return "kernels", (
            f"neither roof is near: steps use {bandwidth} and {compute}, and most of their time goes to {parts}; "
            "small kernels and launches do not reach more"
        )
    if mbu >= mfu:
        resource, reason = "memory bandwidth", f"steps use {bandwidth} and {compute}{batch_advice}"
    else:
        resource = "compute"
        reason = f"steps use {compute} and {bandwidth}; a narrower dtype or more GPUs would help"
    if max(mfu, mbu) > 1:
        reason += (
            ". More than 100 % exceeds the catalog's peak: the costs describe faster hardware than this entry, "
            "or caches serve what counts as memory traffic"
        )
    return resource, reason


def _batch_advice(h: Hardware, max_batch_seqs: float, *, can_take_more: bool, is_queueing: bool) -> str:
    shares_reads = "would share the reads of the weights"
    if h.batch_seqs.value >= AT_LIMIT_SHARE * max_batch_seqs:
        return f"; batches are at max_num_seqs, and larger ones {shares_reads}"
    if h.busy_share.value >= 1 - IDLE_SHARE and is_queueing:
        return f"; larger batches {shares_reads}"
    return "" if not can_take_more else f"; the load sets the batch, and more load per replica {shares_reads}"


def _queue(
    summary: Summary, wait_s: float, queued_for_s: float, front_s: Span, *, can_keep_up: bool, is_short: bool
) -> str:
    jct_s, queued_for_s = summary.jct_s.mean.value, queued_for_s - front_s[0]
    front = f", after {seconds(front_s[0])} in front of the engine (Queueing is the sum)" if front_s[0] > 0 else ""
    requeued = summary.counts.preemptions / max(1, summary.counts.arrivals) > REQUEUED_SHARE
    if requeued and queued_for_s > wait_s:
        share = percent(min(1.0, queued_for_s / jct_s))
        parts = f"{seconds(wait_s)} before they are first scheduled, the rest after preemptions"
        return f" Requests wait {seconds(queued_for_s)} on average, {share} of their JCT: {parts}{front}."
    if wait_s > summary.ttft_s.mean.value / 2:
        share = percent(min(1.0, wait_s / summary.ttft_s.mean.value))
        return f" Requests wait {seconds(wait_s)} on average before they are scheduled, {share} of their TTFT{front}."
    if not wait_s >= 0:
        return ""
    if can_keep_up and not requeued and not queued_for_s > LONG_WAIT_SHARE * jct_s and not is_short:
        if (slow_s := summary.queueing_delay_s.mean.model_high - front_s[1]) > LONG_WAIT_SHARE * jct_s:
            slowest = f"but up to {seconds(slow_s)} within the cost model's error: it may not keep up with the load."
            return f" Requests wait {seconds(wait_s)} on average{front}, {slowest}"
        return f" It keeps up with the load: requests wait {seconds(wait_s)} on average{front}."
    length = f" The run takes {summary.window_s.value / jct_s:.2g} mean JCTs: too short to show a steady load."
    return f" Requests wait {seconds(wait_s)} on average before they are scheduled{front}.{length if is_short else ''}"
