"""What binds: the resource that a deployment runs out of first, from its numbers."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.metrics import Hardware, Summary
from lengthwise.report._numbers import percent, seconds

IDLE_SHARE = 0.4
WASTE_SHARE = 0.3
KV_FULL = 0.9
PREEMPTED = 0.05


@dataclass(frozen=True)
class Binding:
    """The ``resource`` that binds and, in one ``sentence``, why.

    The resource is "idle", "KV memory", "host", "network", "pipeline", "memory bandwidth",
    "compute" or "unknown".
    """

    resource: str
    sentence: str


def bound_by(binding: Binding) -> str:
    """The words before the resource: "bound by", or that nothing binds."""
    return "not bound," if binding.resource in {"idle", "unknown"} else "bound by"


def what_binds(summary: Summary) -> Binding:
    """What keeps a deployment from serving faster, told from its summary, and whether it keeps up.

    Asked in this order: are the GPUs idle, is the KV cache full, is the step's time spent on
    the host, the network or pipeline bubbles; else the roof that is nearer while busy,
    bandwidth (MBU) or compute (MFU).
    """
    h = summary.hardware
    if h is None or not h.busy_share.value > 0:
        return Binding("unknown", "Nothing is known of the hardware.")
    resource, reason = _in_use(h, summary) or _roof(h)
    if h.busy_share.value < 1 - IDLE_SHARE:
        idle = percent(1 - h.busy_share.value)
        reason = (
            f"no step is in flight {idle} of the time, so there is room for more load; while busy, {reason}"
        )
        resource = "idle"
    return Binding(resource, f"{reason[0].upper()}{reason[1:]}.{_queue(summary)}")


def _in_use(h: Hardware, summary: Summary) -> tuple[str, str] | None:
    busy = h.busy_share.value
    share = {name: e.value / busy for name, e in h.time_shares.items()}
    held = h.kv_utilization.value / busy
    preempted = summary.counts.preemptions / max(1, summary.counts.arrived)
    if held > KV_FULL or preempted > PREEMPTED:
        return "KV memory", (
            f"the KV cache is {percent(held)} full and {percent(preempted)} of the requests are preempted; "
            "more KV memory or fewer sequences at a time would help"
        )
    wastes = {
        "host": (share["host"], "the host (scheduling, input preparation) takes {} of the time"),
        "network": (
            share["communication"] + share["send"],
            "communication between GPUs takes {} of the time",
        ),
        "pipeline": (
            (h.time_shares["idle"].value - (1 - busy)) / busy,
            "pipeline bubbles take {} of the stages' time",
        ),
    }
    resource, (waste, reason) = max(wastes.items(), key=lambda item: item[1][0])
    return (resource, reason.format(percent(waste))) if waste > WASTE_SHARE else None


def _roof(h: Hardware) -> tuple[str, str]:
    mfu, mbu = h.mfu.value / h.busy_share.value, h.mbu.value / h.busy_share.value
    if mbu >= mfu:
        return "memory bandwidth", (
            f"steps use {percent(mbu)} of the memory bandwidth and {percent(mfu)} of the peak compute; "
            "larger batches would share the reading of weights"
        )
    return "compute", (
        f"steps use {percent(mfu)} of the peak compute and {percent(mbu)} of the memory bandwidth; "
        "a narrower dtype or more GPUs would help"
    )


def _queue(summary: Summary) -> str:
    """Whether the deployment keeps up: whether waiting makes more than half of the TTFT."""
    wait, ttft = summary.queueing_delay_s.mean.value, summary.ttft_s.mean.value
    if wait > ttft / 2:
        share = percent(min(1.0, wait / ttft))
        return f" Requests wait {seconds(wait)} on average before they are scheduled, {share} of their TTFT."
    return f" It keeps up with the load: requests wait {seconds(wait)} on average." if wait >= 0 else ""
