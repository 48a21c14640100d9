"""Laws 9, 10, 72 and 73: a step keeps the limits of its engine, and its parts add up."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observers import LAW, run
from worlds import PHASES, deployments, threshold_worlds, workloads

from lengthwise.engine import deploy, simulate
from lengthwise.policy import resolve, scheduler
from lengthwise.schema.deployment import EngineLimits, Scheduler
from lengthwise.schema.errors import InputError, PolicyError
from lengthwise.schema.workload import Workload

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


def with_scheduler(deployment, **settings):
    return dataclasses.replace(deployment, scheduler=dataclasses.replace(deployment.scheduler, **settings))


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
    steps = run(workload, with_scheduler(deployment, batching=batching)).steps
    tokens = steps.decode_seqs + steps.prefill_tokens
    assert (tokens <= np.maximum(deployment.limits.max_num_batched_tokens, steps.decode_seqs)).all()


@LAW
@given(workloads(), deployments(), st.sampled_from(["static", "prefill_first", "vidur_vllm", *PHASES]))
def test_decodes_wait_for_prompts_where_the_policy_requires_it(workload, deployment, batching):
    steps = run(workload, with_scheduler(deployment, batching=batching)).steps
    assert (np.minimum(steps.decode_seqs, steps.prefill_seqs) == 0).all()


@LAW
@given(workloads(), deployments(), st.sampled_from(PHASES))
def test_a_phase_prefills_no_more_than_its_share(workload, deployment, batching):
    new, _, micro = resolve("batching", batching).parameters
    stages = len(deployment.cost.stage_layers)
    prefills = min(min(micro, stages) if micro else stages, new)
    steps = run(workload, with_scheduler(deployment, batching=batching)).steps
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


@LAW
@given(threshold_worlds())
def test_a_step_has_a_chunk_of_each_prompt_unless_a_request_is_alone(world):
    workload, deployment = world
    steps = run(workload, deployment).steps
    alone = (steps.decode_seqs == 0) & (steps.prefill_seqs == 1) & (steps.waiting == 0)
    most = deployment.scheduler.long_prefill_token_threshold * steps.prefill_seqs
    assert (steps.prefill_tokens <= most)[~alone].all()


@LAW
@given(threshold_worlds())
def test_a_threshold_that_no_prompt_exceeds_changes_nothing(world):
    workload, deployment = world
    highest, none = (
        run(workload, with_scheduler(deployment, long_prefill_token_threshold=tokens))
        for tokens in (deployment.max_model_len, 0)
    )
    for name in ("scheduled_s", "first_token_s", "finished_s", "preemptions"):
        np.testing.assert_array_equal(getattr(highest.requests, name), getattr(none.requests, name))


@pytest.mark.parametrize(
    ("limits", "policies", "message"),
    [
        ({"max_step_seqs": 3}, {}, "is not modelled with max_step_seqs yet"),
        ({"max_in_flight": 1}, {}, "is not modelled with max_in_flight yet"),
        (
            {"enable_prefix_caching": True, "prefix_cache": "sglang"},
            {},
            'is not modelled with prefix_cache "sglang" yet',
        ),
        ({}, {"preemption_mode": "swap"}, "is not modelled with preemption_mode 'swap' yet"),
        ({}, {"batching": "prefill_first"}, "is not modelled with batching 'prefill_first' yet"),
        ({}, {"victim": "longest_remaining"}, "is not modelled with victim 'longest_remaining' yet"),
        ({"max_model_len": 63}, {}, "must be at most max_model_len, 63 tokens; it is 64"),
        ({"max_num_batched_tokens": 100}, {}, "needs a max_num_batched_tokens of at least max_num_seqs, 256"),
    ],
)
def test_what_a_threshold_does_not_cover_is_refused_by_name(limits, policies, message):
    chosen = dataclasses.replace(scheduler("vllm_v1"), long_prefill_token_threshold=64, **policies)
    made = deploy("llama-3.1-8b", "H100", limits=EngineLimits(**limits), scheduler=chosen)
    workload = Workload(np.zeros(2), np.ones(2, np.int64), np.ones(2, np.int64), predicted_tokens=np.ones(2))
    with pytest.raises((InputError, PolicyError), match=f"long_prefill_token_threshold {message}"):
        simulate(workload, made)


@pytest.mark.parametrize("tokens", [-1, 0.5, None])
def test_a_threshold_is_a_number_of_tokens(tokens):
    with pytest.raises(InputError, match="long_prefill_token_threshold must be a whole number of tokens, or 0"):
        Scheduler(long_prefill_token_threshold=tokens)
