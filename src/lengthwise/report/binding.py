"""What binds: the resource that a deployment runs out of first, from its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lengthwise.metrics import Counts, Hardware, Summary
from lengthwise.report.formatting import percent, seconds
from lengthwise.report.result import Result, asked
from lengthwise.schema.records import Records

IDLE_SHARE = 0.4
WASTE_SHARE = 0.3
KV_FULL = 0.9
PREEMPTED = 0.05
AT_LIMIT = 0.9
RELEASED = 0.5
MOVED = 0.1
"""From so many preemptions a request on, the time before the first admission is not the wait."""
LONG_WAIT = 0.25
"""Nor does what spends so large a share of the JCT in queues keep up."""
NEAR_ROOF = 0.3
"""A roof of which steps use less does not bind; what takes their time does."""

PARTS = {
    "linear": "linear layers",
    "prefill_attention": "prefill attention",
    "decode_attention": "decode attention",
    "head": "head and sampling",
    "embedding": "the embedding",
    "communication": "communication",
    "send": "sending from stage to stage",
    "swap": "swapping KV blocks",
    "host": "the host",
}
"""Shares of a step's time, in words."""

REFUSED = 0.5
UNSERVED = 0.01
"""From this share of requests on, those without an answer are the first thing to say."""


@dataclass(frozen=True)
class Binding:
    """The ``resource`` that binds and, in one ``description``, why.

    The resource is "idle", "KV memory", "limits", "host", "network", "pipeline",
    "memory bandwidth", "compute", "kernels" (neither roof is near) or "unknown". ``warning`` comes
    before all else: it says which requests were not served, and is empty where nearly all were.
    """

    resource: str
    description: str
    warning: str = ""


def bound_by(binding: Binding) -> str:
    """The words before the resource: "bound by", or that nothing binds."""
    return "not bound," if binding.resource in {"idle", "unknown"} else "bound by"


def binding_of(result: Result) -> Binding:
    """What binds a variant, told from its summary, its limits and whether its load was its own."""
    if result.deployment is None:
        warning = unserved(result.summary.counts)
        return Binding("unknown", "What a measured engine spends its time on is not seen from outside.", warning)
    limits = result.deployment.limits
    step_seqs = limits.max_num_seqs / result.deployment.parallel.pp
    stays = result.deployment.scheduler.takeover == "never"
    return what_binds(
        result.summary,
        max_batch_seqs=step_seqs,
        offered=is_offered(result),
        evicts_for_memory=stays,
        queued_for_s=waited_in_all(result.records),
    )


def waited_in_all(records: Records) -> float:
    """Mean seconds in queues, after evictions, too, of those that were ever scheduled; NaN without any."""
    r = records.requests
    queued_for_s = r.queued_for_s[np.isfinite(r.scheduled_s)]
    return float(queued_for_s.mean()) if len(queued_for_s) else math.nan


def what_binds(
    summary: Summary,
    *,
    max_batch_seqs: float = math.inf,
    offered: bool = True,
    evicts_for_memory: bool = True,
    queued_for_s: float = math.nan,
) -> Binding:
    """What keeps a deployment from serving faster, told from its summary, and whether it keeps up.

    Asked in this order: were most requests refused, are the GPUs idle, is the KV cache full, is
    the step's time spent on the host, the network or pipeline bubbles; else the roof that is
    nearer while busy, bandwidth (MBU) or compute (MFU), or neither if both are far. Where requests were left unserved,
    nothing is said of keeping up or of room.

    Args:
        summary: The numbers of the variant.
        max_batch_seqs: Sequences that a step may hold, where that is known.
        offered: Whether requests came at a rate of their own; a closed loop never falls behind.
        evicts_for_memory: Whether only a lack of memory preempts; False where requests take others' places.
        queued_for_s: Mean time in queues in all, where that is known: before the first admission and after evictions.
    """
    h, warning = summary.hardware, unserved(summary.counts)
    if h is None or not h.busy_share.value > 0:
        return _refused(summary, warning) or Binding("unknown", "Nothing is known of the hardware.", warning)
    if (refused := _refused(summary, warning)) is not None:
        return refused
    resource, reason = _in_use(h, summary, evicts_for_memory=evicts_for_memory) or _roof(
        h, _suggestion(summary, h, max_batch_seqs, warning)
    )
    if h.busy_share.value < 1 - IDLE_SHARE:
        resource = "idle"
        reason = f"no step is in flight {percent(1 - h.busy_share.value)} of the time{_room(warning)}, {reason}"
    queue = _queue(summary, queued_for_s, can_keep_up=offered and not warning)
    return Binding(resource, f"{reason[0].upper()}{reason[1:]}.{queue}", warning)


def unserved(counts: Counts) -> str:
    """A sentence on requests that were not served, "" where nearly all were."""
    missing = counts.arrivals - counts.finished
    if missing <= UNSERVED * counts.arrivals:
        return ""
    buckets = {"rejected": counts.rejected, "timed out": counts.timed_out, "unfinished": counts.unfinished}
    why = ", ".join(f"{n:,} {name}" for name, n in buckets.items() if n)
    if not counts.finished:
        return f"No request was served ({why})."
    return f"{percent(missing / counts.arrivals)} of requests were not served ({why}); latencies are of the rest."


def is_offered(result: Result) -> bool:
    """Whether requests came at times of their own, rather than all at once or as others ended."""
    r = result.records.requests
    later = r.arrival_s[r.arrival_s > r.arrival_s.min()]
    if len(later) == 0 or "concurrency" in asked(result).get("workload", {}):
        return False
    return float(np.isin(later, r.finished_s).mean()) < RELEASED


def _refused(summary: Summary, warning: str) -> Binding | None:
    """What refused most of the requests; None where most were let in."""
    c = summary.counts
    if c.rejected < REFUSED * c.arrivals:
        return None
    why = [
        (c.rejected_over_kv_memory, "KV memory", "prompts need more KV memory than a replica has"),
        (c.rejected_too_long, "limits", "prompts reach max_model_len"),
        (c.rejected_over_token_budget, "limits", "prompts are above max_num_batched_tokens"),
    ]
    _, resource, reason = max(why, key=lambda item: item[0])
    return Binding(resource, f"Most requests are rejected: {reason}.", warning)


def _room(warning: str) -> str:
    return "; while busy" if warning else ", so there is room for more load; while busy"


def _in_use(h: Hardware, summary: Summary, *, evicts_for_memory: bool) -> tuple[str, str] | None:
    busy = h.busy_share.value
    share = {name: e.value / busy for name, e in h.time_shares.items()}
    held = h.kv_utilization.value / busy
    preempted = summary.counts.preemptions / max(1, summary.counts.arrivals)
    if held > KV_FULL or (preempted > PREEMPTED and evicts_for_memory):
        return "KV memory", (
            f"the KV cache is {percent(held)} full and {percent(preempted)} of the requests are preempted; "
            "more KV memory or fewer sequences at a time would help"
        )
    wastes = {
        "host": (share["host"], "the host (scheduling, input preparation) takes {} of the time"),
        "network": (share["communication"] + share["send"], "communication between GPUs takes {} of the time"),
        "pipeline": ((h.time_shares["idle"].value - (1 - busy)) / busy, "pipeline bubbles take {} of the stages' time"),
    }
    resource, (waste, reason) = max(wastes.items(), key=lambda item: item[1][0])
    return (resource, f"{reason.format(percent(waste))}{_far(h)}") if waste > WASTE_SHARE else None


def _used(h: Hardware) -> tuple[float, float]:
    """Shares of the peak compute and of the memory bandwidth that steps use while busy."""
    return h.mfu.value / h.busy_share.value, h.mbu.value / h.busy_share.value


def _far(h: Hardware) -> str:
    """That neither roof is near; "" where one is."""
    mfu, mbu = _used(h)
    if not max(mfu, mbu) < NEAR_ROOF:
        return ""
    return f", and neither roof is near (compute {percent(mfu)}, memory bandwidth {percent(mbu)})"


def _kernels(h: Hardware) -> tuple[str, str]:
    """What takes the time of steps that are far from both roofs: the two largest parts."""
    mfu, mbu = _used(h)
    shares = {name: h.time_shares[name].value / h.busy_share.value for name in PARTS if name in h.time_shares}
    most = sorted(shares, key=lambda name: -shares[name])[:2]
    takes = " and ".join(f"{PARTS[name]} ({percent(shares[name])})" for name in most if shares[name] >= 0.01)
    return "kernels", (
        f"neither roof is near: steps use {percent(mbu)} of the memory bandwidth and {percent(mfu)} of the peak "
        f"compute, and most of their time goes to {takes}; small kernels and launches do not reach more"
    )


def _roof(h: Hardware, advice: str) -> tuple[str, str]:
    mfu, mbu = _used(h)
    if max(mfu, mbu) < NEAR_ROOF:
        return _kernels(h)
    resource, reason = _nearer(mfu, mbu, advice)
    if max(mfu, mbu) > 1:
        reason += (
            ". More than 100 % is above the catalog's peak: the costs are of faster hardware than this entry tells, "
            "or caches serve what it counts as memory traffic"
        )
    return resource, reason


def _nearer(mfu: float, mbu: float, advice: str) -> tuple[str, str]:
    if mbu >= mfu:
        return "memory bandwidth", (
            f"steps use {percent(mbu)} of the memory bandwidth and {percent(mfu)} of the peak compute{advice}"
        )
    return "compute", (
        f"steps use {percent(mfu)} of the peak compute and {percent(mbu)} of the memory bandwidth; "
        "a narrower dtype or more GPUs would help"
    )


def _suggestion(summary: Summary, h: Hardware, max_batch_seqs: float, warning: str) -> str:
    """How more sequences could share the reading of weights: by what keeps the batch small."""
    share = "would share the reading of weights"
    if h.batch_seqs.value >= AT_LIMIT * max_batch_seqs:
        return f"; batches are at max_num_seqs, and larger ones {share}"
    if h.busy_share.value >= 1 - IDLE_SHARE and _waits(summary):
        return f"; larger batches {share}"
    return "" if warning else f"; the load sets the batch, and more load per replica {share}"


def _waits(summary: Summary) -> bool:
    """Whether waiting makes more than half of the TTFT."""
    return summary.queueing_delay_s.mean.value > summary.ttft_s.mean.value / 2


def _queue(summary: Summary, queued_for_s: float, *, can_keep_up: bool) -> str:
    """How long requests wait, and whether the deployment keeps up."""
    wait, ttft = summary.queueing_delay_s.mean.value, summary.ttft_s.mean.value
    moved = summary.counts.preemptions / max(1, summary.counts.arrivals) > MOVED
    if moved and queued_for_s > wait:
        share = percent(min(1.0, queued_for_s / summary.jct_s.mean.value))
        return (
            f" Requests wait {seconds(queued_for_s)} in all on average, {share} of their JCT: {seconds(wait)} before they "
            "are scheduled, the rest after evictions."
        )
    if _waits(summary):
        share = percent(min(1.0, wait / ttft))
        return f" Requests wait {seconds(wait)} on average before they are scheduled, {share} of their TTFT."
    if not wait >= 0:
        return ""
    long = moved or queued_for_s > LONG_WAIT * summary.jct_s.mean.value
    keeps_up = can_keep_up and not long
    head = "It keeps up with the load: requests" if keeps_up else "Requests"
    of = "" if keeps_up else " before they are scheduled"
    return f" {head} wait {seconds(wait)} on average{of}."
