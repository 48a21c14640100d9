"""Laws 2 to 4: requests, tokens and KV blocks are neither lost nor made."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from observers import INFINITY, LAW, entries, last_state, longest_output, never_fits, restarts_as_decode, run, watch
from worlds import deployments, workloads

from lengthwise.schema.records import Rejection, Status


def one_of_before(workload, mask):
    """Whether one of those that each request comes after is marked."""
    found = np.zeros(len(workload), bool)
    if workload.after is not None:
        child = np.repeat(np.arange(len(workload)), np.diff(workload.after.start))
        np.logical_or.at(found, child, mask[workload.after.parent])
    return found


LIMITS = st.sampled_from([INFINITY, INFINITY, 0.05, 0.5])


@LAW
@given(workloads(), deployments(), LIMITS)
def test_every_request_ends_in_exactly_one_bucket(workload, deployment, time_limit_s):
    records = run(workload, deployment, time_limit_s=time_limit_s)
    r = records.requests
    bucket = {status: r.status == status for status in Status}
    assert sum(mask.sum() for mask in bucket.values()) == len(workload)
    hopeless = never_fits(workload, deployment)
    seen = entries(deployment, records) <= time_limit_s
    behind = r.rejection == Rejection.PARENT_NOT_FINISHED
    if workload.concurrency is None:
        np.testing.assert_array_equal(bucket[Status.REJECTED] & ~behind, hopeless & seen)
    assert not (bucket[Status.REJECTED] & ~hopeless & ~behind).any()
    np.testing.assert_array_equal(behind, one_of_before(workload, bucket[Status.REJECTED] | bucket[Status.TIMED_OUT]))
    np.testing.assert_array_equal(bucket[Status.FINISHED], ~np.isnan(r.finished_s))
    assert (r.replica[bucket[Status.REJECTED]] == -1).all()
    assert np.isnan(r.scheduled_s[bucket[Status.REJECTED]]).all()
    late = bucket[Status.TIMED_OUT]
    assert (r.arrival_s[late] + deployment.limits.timeout_s <= records.end_s).all()
    if time_limit_s == INFINITY:
        assert not bucket[Status.UNFINISHED].any()


@LAW
@given(workloads(), deployments(), LIMITS)
def test_tokens_are_conserved(workload, deployment, time_limit_s):
    records = run(workload, deployment, time_limit_s=time_limit_s)
    r, longest = records.requests, longest_output(workload, deployment)
    finished = r.status == Status.FINISHED
    np.testing.assert_array_equal(r.output_tokens[finished], longest[finished])
    assert (r.output_tokens[~finished] < longest[~finished]).all()
    assert records.gaps.histogram.sum() == records.gaps.total
    assert records.gaps.count.sum() == records.gaps.total
    if not restarts_as_decode(deployment):
        started = ~np.isnan(r.first_token_s)
        np.testing.assert_array_equal(r.output_tokens > 0, started)
        assert records.gaps.total == r.output_tokens.sum() - started.sum()


@LAW
@given(workloads(), deployments())
def test_computed_tokens_are_those_of_the_steps(workload, deployment):
    records = run(workload, deployment)
    r, steps = records.requests, records.steps
    computed = steps.decode_seqs.sum() + steps.prefill_tokens.sum()
    assert records.totals.tokens.sum() == computed
    assert records.series.prefill_tokens.sum() == steps.prefill_tokens.sum()
    if not restarts_as_decode(deployment):
        assert records.series.output_tokens.sum() == r.output_tokens.sum()
    if not r.preemptions.any() and deployment.limits.timeout_s == INFINITY:
        served = r.status == Status.FINISHED
        assert computed == (r.prompt_tokens - r.cached_tokens + r.output_tokens - 1)[served].sum()


@LAW
@given(workloads(), deployments())
def test_blocks_in_use_stay_between_zero_and_all(workload, deployment):
    records = run(workload, deployment)
    steps, kv = records.steps, deployment.kv
    assert (steps.kv_blocks >= np.minimum(1, steps.decode_seqs + steps.prefill_seqs)).all()
    assert (steps.kv_blocks <= kv.num_blocks).all()
    assert (steps.kv_blocks * kv.block_size >= steps.decode_seqs + steps.prefill_tokens).all()


@LAW
@given(workloads(), deployments())
def test_all_blocks_are_free_at_the_end_of_the_kernel(workload, deployment):
    state = last_state(workload, deployment)
    assert (state.replicas["free_blocks"] == deployment.kv.num_blocks).all()
    assert (state.replicas["in_flight"] == 0).all()
    assert (state.replicas["partials"] == 0).all()
    assert (state.groups["members"] == 0).all()
    assert (state.groups["kv_tokens"] == 0).all()
    assert (state.block_needs == 0).all()
    assert (state.queues["length"] == 0).all()
    for load in (state.waiting, state.running, state.outstanding_tokens):
        assert (load == 0).all()


@LAW
@given(workloads(), deployments())
def test_the_reference_accounts_for_every_block_at_every_step(workload, deployment):
    watched = watch(workload, deployment)
    for rep in watched.replicas:
        assert rep.pool.free == deployment.kv.num_blocks
        assert rep.outstanding_tokens == 0
        assert not rep.running
        assert not rep.queue.waiting
