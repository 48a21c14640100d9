"""Laws 5 to 8: the clock, causes before effects, no idling beside work, first come first served."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from observers import LAW, busy_intervals, covered, entries, may_get_stuck, run
from worlds import deployments, workloads

from lengthwise.schema.records import Status


@LAW
@given(workloads(), deployments())
def test_steps_of_a_replica_are_ordered(workload, deployment):
    records = run(workload, deployment)
    steps, pp = records.steps, deployment.parallel.pp
    assert (np.diff(steps.start_s) >= 0).all()
    for replica in range(deployment.parallel.replicas):
        start_s, end_s = (column[steps.replica == replica] for column in (steps.start_s, steps.end_s))
        assert (end_s > start_s).all()
        assert (np.diff(end_s) > 0).all()
        assert (start_s[pp:] >= end_s[:-pp]).all(), "more than pp steps in flight"
    r = records.requests
    gave_up_s = r.arrival_s[r.status == Status.TIMED_OUT] + deployment.limits.timeout_s
    entered_s = entries(deployment, records)
    lasted = [*steps.end_s, *entered_s[~np.isnan(entered_s)]]
    if deployment.scheduler.binning is not None:  # a client may give up in a bin while nothing runs
        assert records.end_s in (max(lasted), max([*lasted, *gave_up_s]))
    else:
        assert records.end_s == max(lasted)


@LAW
@given(workloads(), deployments())
def test_causes_come_before_effects(workload, deployment):
    records = run(workload, deployment)
    r, steps = records.requests, records.steps
    chain = (r.arrival_s, entries(deployment, records), r.scheduled_s, r.first_token_s, r.finished_s)
    for earlier, later in itertools.pairwise(chain):
        known = ~np.isnan(later)
        assert not np.isnan(earlier[known]).any()
        assert (earlier[known] <= later[known]).all()
    assert (r.scheduled_s < r.first_token_s)[~np.isnan(r.first_token_s)].all()
    assert np.isin(r.scheduled_s[~np.isnan(r.scheduled_s)], steps.start_s).all()
    for replica in range(deployment.parallel.replicas):
        own = (r.replica == replica) & (r.status == Status.FINISHED)
        assert np.isin(r.finished_s[own], steps.end_s[steps.replica == replica]).all()
    one = (r.status == Status.FINISHED) & (r.output_tokens == 1)
    np.testing.assert_array_equal(r.first_token_s[one], r.finished_s[one])


@LAW
@given(workloads(), deployments())
def test_a_closed_loop_holds_its_concurrency(workload, deployment):
    assume(workload.concurrency is not None)
    assume(deployment.limits.timeout_s == float("inf"))
    records = run(workload, deployment)
    r = records.requests
    left_s = np.where(r.status == Status.REJECTED, entries(deployment, records), r.finished_s)
    first = min(workload.concurrency, len(workload))
    assert (r.arrival_s[:first] == 0).all()
    np.testing.assert_array_equal(r.arrival_s[first:], np.sort(left_s)[: len(workload) - first])


@LAW
@given(workloads(), deployments())
def test_a_replica_with_work_is_never_idle(workload, deployment):
    assume(not may_get_stuck(deployment))
    assume(deployment.scheduler.binning is None)  # those in a bin wait for their batch
    records = run(workload, deployment)
    r, replicas = records.requests, deployment.parallel.replicas
    entry_s = entries(deployment, records)
    busy = [busy_intervals(records, replica) for replica in range(replicas)]
    central = deployment.scheduler.router == "central"
    for i in np.flatnonzero(r.status == Status.FINISHED):
        scheduled_s, finished_s = r.scheduled_s[i], r.finished_s[i]
        if central:
            assert all(covered(intervals, entry_s[i], scheduled_s) for intervals in busy)
        else:
            assert covered(busy[r.replica[i]], entry_s[i], finished_s)
        if r.preemptions[i] == 0:
            assert covered(busy[r.replica[i]], scheduled_s, finished_s)


@LAW
@given(workloads(), deployments(), st.sampled_from(["fcfs", "fcfs_preempted_first"]))
def test_first_come_first_served_never_overtakes(workload, deployment, rank):
    scheduler = dataclasses.replace(deployment.scheduler, rank=rank, binning=None)  # full bins are scheduled first
    r = run(workload, dataclasses.replace(deployment, scheduler=scheduler)).requests
    queues = [r.replica == replica for replica in range(deployment.parallel.replicas)]
    if scheduler.router == "central":
        queues = [r.replica >= 0]
    came = np.lexsort((np.arange(len(workload)), r.arrival_s))
    for queue in queues:
        scheduled_s = r.scheduled_s[came[queue[came]]]
        assert (np.diff(scheduled_s[~np.isnan(scheduled_s)]) >= 0).all()


@LAW
@given(workloads(), deployments())
def test_all_waiting_time_is_reported(workload, deployment):
    r = run(workload, deployment).requests
    done = r.status == Status.FINISHED
    first_wait_s = (r.scheduled_s - r.arrival_s)[done]
    assert (r.queued_for_s[done] >= first_wait_s).all()
    assert (r.queued_for_s[done] <= (r.finished_s - r.arrival_s)[done]).all()
    once = r.preemptions[done] == 0
    np.testing.assert_array_equal(r.queued_for_s[done][once], first_wait_s[once])
