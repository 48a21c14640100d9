"""The laws where some replicas only prefill and others only decode."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from observers import INFINITY, LAW, entries, last_state, longest_output, may_get_stuck, restarts_as_decode, run, watch
from sides import disaggregated
from test_kernel_agrees import assert_same
from worlds import GPU, MODEL, NODE, cost_tables, workloads

from lengthwise.policy import scheduler
from lengthwise.schema.deployment import DecodeSide, Deployment, EngineLimits, KvPlan, KVTransfer, Parallelism
from lengthwise.schema.records import Status
from lengthwise.schema.workload import Workload

LIMITS = st.sampled_from([INFINITY, INFINITY, 0.05, 0.5])


@LAW
@given(workloads(), disaggregated(), LIMITS)
def test_requests_and_tokens_are_conserved_over_both_sides(workload, deployment, time_limit_s):
    records = run(workload, deployment, time_limit_s=time_limit_s)
    r, longest = records.requests, longest_output(workload, deployment)
    bucket = {status: r.status == status for status in Status}
    assert sum(mask.sum() for mask in bucket.values()) == len(workload)
    finished = bucket[Status.FINISHED]
    np.testing.assert_array_equal(finished, ~np.isnan(r.finished_s))
    np.testing.assert_array_equal(r.output_tokens[finished], longest[finished])
    assert (r.output_tokens[~finished] < longest[~finished]).all()
    assert time_limit_s < INFINITY or not bucket[Status.UNFINISHED].any()
    if not restarts_as_decode(deployment):
        started = ~np.isnan(r.first_token_s)
        np.testing.assert_array_equal(r.output_tokens > 0, started)
        assert records.gaps.total == r.output_tokens.sum() - started.sum()


@LAW
@given(workloads(), disaggregated())
def test_each_side_does_its_own_part(workload, deployment):
    records = run(workload, deployment)
    r, steps, first = records.requests, records.steps, deployment.parallel.ranks
    prefill, decode = steps.replica < first, deployment.decode
    recomputes = decode.kv_transfer.kv_load_failure_policy == "recompute"
    is_local = r.prompt_tokens <= decode.max_local_prefill_length
    assert (steps.decode_seqs[prefill] == 0).all()
    assert decode.prefills or recomputes or (steps.prefill_seqs[~prefill] == 0).all()
    assert records.totals.tokens.sum() == steps.decode_seqs.sum() + steps.prefill_tokens.sum()
    done = r.status == Status.FINISHED
    if not restarts_as_decode(deployment):
        once = done & (r.preemptions == 0)
        if decode.max_prefill_queue_size is None and not recomputes:
            stays = once & ~is_local & (r.output_tokens == 1)
            np.testing.assert_array_equal(r.replica[once] < first, stays[once])
            if once.all():
                assert steps.prefill_tokens[~prefill].sum() == r.prompt_tokens[is_local].sum()
        if once.all() and not recomputes:
            assert steps.prefill_tokens.sum() == r.prompt_tokens.sum()
            assert steps.decode_seqs.sum() == (r.output_tokens - 1).sum()


@LAW
@given(workloads(), disaggregated())
def test_no_side_holds_more_than_it_has(workload, deployment):
    steps, decode = run(workload, deployment).steps, deployment.decode
    prefill = steps.replica < deployment.parallel.ranks
    for own, kv, limits in ((prefill, deployment.kv, deployment.limits), (~prefill, decode.kv, decode.limits)):
        assert (steps.kv_blocks[own] <= kv.num_blocks).all()
        assert (steps.kv_blocks[own] >= 1).all()
        seqs = (steps.decode_seqs + steps.prefill_seqs)[own]
        assert (seqs <= (limits.max_step_seqs or limits.max_num_seqs)).all()


@LAW
@given(workloads(), disaggregated())
def test_everything_is_free_at_the_end_of_both_sides(workload, deployment):
    state, decode = last_state(workload, deployment), deployment.decode
    blocks = [deployment.kv.num_blocks] * deployment.parallel.ranks
    blocks += [decode.kv.num_blocks] * decode.parallel.ranks
    np.testing.assert_array_equal(state.replicas["free_blocks"], blocks)
    for column in ("in_flight", "partials", "incoming"):
        assert (state.replicas[column] == 0).all()
    for counts in (state.groups["members"], state.block_needs, state.queues["length"], state.waiting, state.running):
        assert (counts == 0).all()
    assert (state.outstanding_tokens == 0).all()
    assert state.counters[0]["events"] == 0


@pytest.mark.slow
@LAW
@given(workloads(), disaggregated())
def test_the_reference_accounts_for_every_block_of_both_sides(workload, deployment):
    for rep in watch(workload, deployment).replicas:
        assert rep.pool.free == rep.s.params.total_blocks
        assert rep.outstanding_tokens == 0
        assert not rep.running
        assert not rep.queue.waiting


@LAW
@given(workloads(), disaggregated())
def test_time_goes_on_and_causes_come_first(workload, deployment):
    records = run(workload, deployment)
    r, steps, decode = records.requests, records.steps, deployment.decode
    flights = [deployment.limits.max_in_flight or deployment.parallel.pp] * deployment.parallel.ranks
    flights += [decode.limits.max_in_flight or decode.parallel.pp] * decode.parallel.ranks
    for replica, most in enumerate(flights):
        start_s, end_s = (column[steps.replica == replica] for column in (steps.start_s, steps.end_s))
        assert (end_s > start_s).all()
        assert (np.diff(end_s) > 0).all()
        assert (start_s[most:] >= end_s[:-most]).all(), "more steps in flight than may be"
    done = r.status == Status.FINISHED
    chain = (entries(deployment, records), r.scheduled_s, r.first_token_s, r.finished_s)
    assert all((a[done] <= b[done]).all() for a, b in itertools.pairwise(chain))
    handed = done & (r.output_tokens > 1) & (r.preemptions == 0) & (r.prompt_tokens > decode.max_local_prefill_length)
    recomputes = decode.kv_transfer.kv_load_failure_policy == "recompute"
    if decode.max_prefill_queue_size is None and not recomputes and not restarts_as_decode(deployment):
        link = decode.kv_transfer
        min_s = link.fixed_s + r.prompt_tokens * link.token_s / max(1, link.layers)
        assert (r.finished_s >= r.first_token_s + min_s)[handed].all()
    assert (r.queued_for_s[done] <= (r.finished_s - r.arrival_s)[done] * (1 + 1e-12)).all()


@LAW
@given(workloads(), disaggregated(), st.sampled_from([0.05, 0.2, 1.0]), st.integers(0, 2**32 - 1))
def test_no_decision_of_either_side_depends_on_an_output_still_to_come(workload, deployment, at_s, seed):
    workload = dataclasses.replace(workload, prefixes=None)  # the prompt of a later turn contains the output
    before = run(workload, deployment, time_limit_s=at_s)
    running = before.requests.status == Status.UNFINISHED
    assume(running.any())
    other = before.requests.output_tokens + np.random.default_rng(seed).integers(1, 300, len(workload))
    changed = dataclasses.replace(workload, output_tokens=np.where(running, other, workload.output_tokens))
    assert_same(run(changed, deployment, time_limit_s=at_s), before)


@LAW
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=4), st.integers(1, 8), st.sampled_from(["fcfs", "fair", "none"]),
    st.sampled_from([0.0, 0.003]), st.floats(0.0, 0.01), st.integers(1, 3),
)  # fmt: skip
def test_a_transfer_layer_by_layer_hides_behind_the_last_step_of_its_prompt(
    prompts, layers, sharing, fixed_s, token_s, output
):
    link, n = KVTransfer(fixed_s, token_s, 1.0, sharing=sharing), len(prompts)
    limits, kv = EngineLimits(max_num_seqs=8, max_num_batched_tokens=100), KvPlan(400, 16, 0.0, 0.0, 0.0, 0.0)
    side = DecodeSide(Parallelism(), limits, cost_tables([3]), kv, link)
    after = Deployment(
        MODEL, GPU, NODE, Parallelism(), limits, scheduler("vllm_v1"), cost_tables([2]), kv, 2000, decode=side
    )
    early = dataclasses.replace(
        after, decode=dataclasses.replace(side, kv_transfer=dataclasses.replace(link, layers=layers))
    )
    workload = Workload(1000.0 * np.arange(n), np.array(prompts), np.full(n, output))  # one at a time
    found, expected = run(workload, early), run(workload, after)
    steps, moved_s = expected.steps, token_s * np.array(prompts)
    last = [np.flatnonzero(steps.end_s == first_s)[0] for first_s in expected.requests.first_token_s]
    saved_s = np.minimum((steps.end_s - steps.start_s)[last], moved_s - moved_s / layers) * (output > 1)
    np.testing.assert_array_equal(found.requests.first_token_s, expected.requests.first_token_s)
    np.testing.assert_allclose(expected.requests.finished_s - found.requests.finished_s, saved_s, rtol=1e-6, atol=1e-6)


@LAW
@given(workloads(), disaggregated())
def test_same_input_same_bytes_on_both_sides(workload, deployment):
    assert_same(run(workload, deployment), run(workload, deployment))


@LAW
@given(workloads(), disaggregated())
def test_decode_replicas_that_prefill_all_prompts_are_equal_replicas(workload, deployment):
    """With one decode replica, which any router chooses, the prefill side then does nothing."""
    decode = deployment.decode
    assume(decode.parallel.dp == 1)
    alone = dataclasses.replace(decode.parallel, replicas=1)
    cost = dataclasses.replace(decode.cost, front=deployment.cost.front)
    decode = dataclasses.replace(decode, parallel=alone, cost=cost, max_local_prefill_length=2**31 - 1)
    deployment = dataclasses.replace(deployment, decode=decode)
    equal = dataclasses.replace(deployment.decoding(), decode=None)
    equal = dataclasses.replace(equal, scheduler=dataclasses.replace(equal.scheduler, router="round_robin"))
    assume(not may_get_stuck(deployment) and not may_get_stuck(equal))
    found, expected = run(workload, deployment), run(workload, equal)
    assert (found.steps.replica >= deployment.parallel.ranks).all()
    for name in ("status", "output_tokens", "preemptions"):
        np.testing.assert_array_equal(getattr(found.requests, name), getattr(expected.requests, name))
    for name in ("first_token_s", "finished_s"):
        np.testing.assert_allclose(getattr(found.requests, name), getattr(expected.requests, name), rtol=1e-9)
    assert found.steps.prefill_tokens.sum() == expected.steps.prefill_tokens.sum()
