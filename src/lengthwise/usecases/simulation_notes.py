"""Options of a simulation that have no effect."""

from __future__ import annotations

from collections.abc import Sequence

from lengthwise.usecases.variants import Variant


def ineffective_options(variants: Sequence[Variant], seeds: int) -> list[str]:
    """Return a note, each once, for requests or seeds beyond a replay and for schedulers without their input."""
    found = []
    for variant in variants:
        section = variant.scenario.workload
        if section.is_replay and (replayed := len(variant.workload(0))) < (section.num_requests or 0):
            found.append(
                f"num_requests is {section.num_requests:,}, but the replayed trace has {replayed:,}; so many were run"
            )
    if seeds > 1 and not any(variant.is_random for variant in variants):
        found.append("a replay is deterministic: further seeds change nothing, so one was run")
    for variant in variants:
        scheduler, policy = variant.deployment.scheduler, variant.scenario.scheduler.policy
        if scheduler.binning == "one":
            found.append(f'{policy} has one bin; set scheduler.binning = "learned(k=8)" and a [predictor] for more')
        if scheduler.rank == "vtc" and variant.workload(0).tenant is None:
            found.append("vtc without tenants is first come, first served; set workload.tenants")
    return list(dict.fromkeys(found))
