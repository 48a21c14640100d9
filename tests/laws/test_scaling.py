"""Laws 15 to 18: what happens to time when costs, arrivals, replicas or GPUs change."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from observers import LAW, run
from worlds import FAMILIES, deployments, workloads

from lengthwise.schema.cost_tables import CostTables, Front
from lengthwise.schema.deployment import Deployment, Scheduler
from lengthwise.schema.workload import Workload

ADDS_SECONDS = {"priority", *FAMILIES, "mlfq(quantum=64, levels=6)"}
"""Orders that add seconds to tokens, or to a large number: no scale, or another rounding."""

SECONDS = (
    "busy_s",
    "layer_s",
    "comm_s",
    "prefill_attention_s",
    "decode_attention_s",
    "host_s",
    "head_s",
    "embedding_s",
    "send_s",
    "swap_s",
    "kv_block_s",
)
POWERS = st.sampled_from([2.0**-9, 0.125, 0.5, 2.0, 64.0])


def slower(deployment: Deployment, factor: float) -> Deployment:
    """All costs times a power of two, which no rounding touches."""
    return dataclasses.replace(
        deployment,
        cost=slower_tables(deployment.cost, factor),
        kv=dataclasses.replace(deployment.kv, swap_s_per_block=deployment.kv.swap_s_per_block * factor),
    )


def slower_tables(cost: CostTables, factor: float) -> CostTables:
    seconds = {f.name: getattr(cost, f.name) for f in dataclasses.fields(cost) if f.name.endswith("_s")}
    tables = {name: table * factor for name, table in seconds.items() if table is not None}
    front = Front(cost.front.request_s * factor, cost.front.serial_s * factor)
    other = cost.other and dataclasses.replace(cost.other, tables=slower_tables(cost.other.tables, factor))
    return dataclasses.replace(cost, **tables, front=front, other=other)


def later(workload: Workload, factor: float) -> Workload:
    after = workload.after and dataclasses.replace(workload.after, delay_s=workload.after.delay_s * factor)
    return dataclasses.replace(workload, arrival_s=workload.arrival_s * factor, after=after)


def one_at_a_time(deployment: Deployment, replicas: int) -> Deployment:
    """The textbook's queue with so many servers: one line, first come first served, a request a server.

    A prefix cache would make service depend on the server.
    """
    alone = {"max_num_seqs": 1, "max_step_seqs": None, "enable_prefix_caching": False, "kv_offloading": None}
    return dataclasses.replace(
        deployment,
        parallel=dataclasses.replace(deployment.parallel, replicas=replicas),
        limits=dataclasses.replace(deployment.limits, timeout_s=float("inf"), **alone),
        scheduler=Scheduler(rank="fcfs", batching="chunked", memory="paged", router="central"),
    )


@LAW
@given(workloads(), deployments(), POWERS)
def test_time_has_no_scale(workload, deployment, factor):
    s = deployment.scheduler
    assume(not {s.rank, s.victim} & ADDS_SECONDS)
    scheduler = dataclasses.replace(s, max_wait_s=s.max_wait_s * factor, batch_wait_s=s.batch_wait_s * factor)
    limits = dataclasses.replace(deployment.limits, timeout_s=deployment.limits.timeout_s * factor)
    stretched = dataclasses.replace(slower(deployment, factor), limits=limits, scheduler=scheduler)
    a, b = run(workload, deployment), run(later(workload, factor), stretched)
    for field in dataclasses.fields(a.requests):
        before, after = getattr(a.requests, field.name), getattr(b.requests, field.name)
        np.testing.assert_array_equal(after, before * factor if field.name.endswith("_s") else before)
    for column in SECONDS:
        np.testing.assert_array_equal(getattr(b.totals, column), getattr(a.totals, column) * factor)
    np.testing.assert_array_equal(b.steps.end_s, a.steps.end_s * factor)
    np.testing.assert_array_equal(b.steps.kv_blocks, a.steps.kv_blocks)
    np.testing.assert_array_equal(b.gaps.gap_s, a.gaps.gap_s * factor)
    assert b.end_s == a.end_s * factor


@LAW
@given(workloads(), deployments(), st.integers(1, 4))
def test_another_server_delays_no_request(workload, deployment, replicas):
    assume(workload.concurrency is None and workload.after is None)
    few = run(workload, one_at_a_time(deployment, replicas)).requests
    many = run(workload, one_at_a_time(deployment, replicas + 1)).requests
    for column in ("scheduled_s", "first_token_s", "finished_s"):
        assert not (getattr(many, column) > getattr(few, column)).any()


@LAW
@given(workloads(), deployments(), st.integers(1, 3), st.sampled_from([0.5, 0.125]))
def test_faster_servers_delay_no_request(workload, deployment, replicas, factor):
    assume(workload.concurrency is None and workload.after is None)
    slow = one_at_a_time(deployment, replicas)
    a, b = run(workload, slow).requests, run(workload, slower(slow, factor)).requests
    for column in ("scheduled_s", "first_token_s", "finished_s"):
        assert not (getattr(b, column) > getattr(a, column)).any()


@LAW
@given(workloads(), deployments())
def test_more_of_one_kind_of_request_is_no_less_work(workload, deployment):
    """One server, one request at a time: a longer output ends no request sooner."""
    assume(workload.concurrency is None and workload.after is None)
    single = one_at_a_time(deployment, 1)
    longer = dataclasses.replace(workload, output_tokens=workload.output_tokens + 1)
    a, b = run(workload, single).requests, run(longer, single).requests
    assert not (b.finished_s < a.finished_s).any()
    assert not (b.scheduled_s < a.scheduled_s).any()


@pytest.mark.slow
@LAW
@given(workloads(), deployments())
def test_replicas_in_turn_are_separate_servers(workload, deployment):
    """Round robin: what one replica does is what it would do alone with its share of the requests."""
    assume(workload.concurrency is None)
    assume(deployment.parallel.replicas > 1)
    assume(deployment.cost.front.serial_s == 0)  # one front for all of them
    # Tenants' service is counted over all replicas, and bins gather before the router.
    workload = dataclasses.replace(workload.without_dependencies(), predictions=None, tenant=None)
    scheduler = dataclasses.replace(deployment.scheduler, router="round_robin", binning=None)
    together = dataclasses.replace(deployment, scheduler=scheduler)
    alone = dataclasses.replace(together, parallel=dataclasses.replace(deployment.parallel, replicas=1))
    both = run(workload, together).requests
    for replica in range(deployment.parallel.replicas):
        share = np.arange(len(workload)) % deployment.parallel.replicas == replica
        if not share.any():
            continue
        single = run(workload.take(np.flatnonzero(share)), alone).requests
        for column in ("scheduled_s", "first_token_s", "finished_s", "output_tokens", "preemptions", "status"):
            np.testing.assert_array_equal(getattr(single, column), getattr(both, column)[share])
