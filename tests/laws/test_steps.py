"""Laws 9 and 10: a step keeps the limits of its engine, and its parts add up."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from observers import LAW, run
from worlds import PHASES, deployments, workloads

from lengthwise.policy import resolve

PARTS = (
    "layer_s",
    "comm_s",
    "prefill_attention_s",
    "decode_attention_s",
    "host_s",
    "head_s",
    "embedding_s",
    "send_s",
    "swap_s",
)


def with_batching(deployment, batching):
    scheduler = dataclasses.replace(deployment.scheduler, batching=batching)
    return dataclasses.replace(deployment, scheduler=scheduler)


@LAW
@given(workloads(), deployments())
def test_a_step_holds_no_more_sequences_than_allowed(workload, deployment):
    steps, limits = run(workload, deployment).steps, deployment.limits
    seqs = steps.decode_seqs + steps.prefill_seqs
    assert (seqs >= 1).all()
    assert (seqs <= (limits.max_step_seqs or limits.max_num_seqs)).all()
    assert (steps.prefill_tokens >= steps.prefill_seqs).all()
    assert (steps.waiting <= len(workload)).all()


@LAW
@given(workloads(), deployments())
def test_no_more_sequences_are_resident_than_allowed(workload, deployment):
    r = run(workload, deployment).requests
    stayed = (r.preemptions == 0) & ~np.isnan(r.finished_s)
    for replica in range(deployment.parallel.replicas):
        own = stayed & (r.replica == replica)
        came_s, left_s = np.sort(r.scheduled_s[own]), np.sort(r.finished_s[own])
        num_running = np.arange(1, own.sum() + 1) - np.searchsorted(left_s, came_s, side="right")
        assert (num_running <= deployment.limits.max_num_seqs).all()


@LAW
@given(workloads(), deployments(), st.sampled_from(["chunked", "unified", "vidur_sarathi"]))
def test_chunks_keep_to_the_token_budget(workload, deployment, batching):
    steps = run(workload, with_batching(deployment, batching)).steps
    tokens = steps.decode_seqs + steps.prefill_tokens
    assert (tokens <= np.maximum(deployment.limits.max_num_batched_tokens, steps.decode_seqs)).all()


@LAW
@given(workloads(), deployments(), st.sampled_from(["static", "prefill_first", "vidur_vllm", *PHASES]))
def test_decodes_wait_for_prompts_where_the_policy_requires_it(workload, deployment, batching):
    steps = run(workload, with_batching(deployment, batching)).steps
    assert (np.minimum(steps.decode_seqs, steps.prefill_seqs) == 0).all()


@LAW
@given(workloads(), deployments(), st.sampled_from(PHASES))
def test_a_phase_prefills_no_more_than_its_share(workload, deployment, batching):
    new, _, micro = resolve("batching", batching).parameters
    stages = len(deployment.cost.stage_layers)
    prefills = min(min(micro, stages) if micro else stages, new)
    steps = run(workload, with_batching(deployment, batching)).steps
    assert (steps.prefill_seqs <= -(-new // prefills)).all()


@LAW
@given(workloads(), deployments())
def test_parts_add_up_to_stage_time(workload, deployment):
    records = run(workload, deployment)
    totals, steps, pp = records.totals, records.steps, deployment.parallel.pp
    stages_s = sum(getattr(totals, part) for part in PARTS)
    if pp == 1:
        np.testing.assert_allclose(stages_s, totals.busy_s, rtol=1e-9, atol=1e-12)
        span_s = np.bincount(steps.replica, steps.end_s - steps.start_s, deployment.parallel.replicas)
        np.testing.assert_allclose(span_s, totals.busy_s, rtol=1e-9, atol=1e-12)
    assert (totals.busy_s <= stages_s * (1 + 1e-9) + 1e-12).all()
    assert (stages_s <= pp * totals.busy_s * (1 + 1e-9) + 1e-12).all()
    assert (totals.busy_s <= records.end_s * (1 + 1e-9)).all()
    np.testing.assert_allclose(records.series.step_s.sum(), totals.busy_s.sum(), rtol=1e-9)
    assert totals.steps.sum() == len(steps.start_s)
