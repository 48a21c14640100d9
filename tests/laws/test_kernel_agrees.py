"""Law 1: the compiled kernel and the plain reference agree to the last bit."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lengthwise.engine import deploy, simulate
from lengthwise.policy import scheduler
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import PolicyError
from lengthwise.schema.records import Records
from lengthwise.schema.workload import Workload

sys.path.insert(0, str(Path(__file__).parent))
from worlds import (
    async_worlds,
    deployments,
    hybrid_worlds,
    overlapping_worlds,
    priority_worlds,
    rank_worlds,
    sglang_worlds,
    speculation_worlds,
    threshold_worlds,
    trtllm_worlds,
    vllm_worlds,
    workloads,
)

EXAMPLES = int(os.environ.get("LENGTHWISE_EXAMPLES", "100"))
OF_ENGINES = max(1, EXAMPLES * 3 // 5)
"""Examples of the rules of each engine."""


def outcome(engine: str, workload: Any, deployment: Any, **options: Any) -> Records | str:
    """The records, or the message of the policy's error."""
    try:
        return simulate(workload, deployment, engine=engine, **options)
    except PolicyError as error:
        return str(error)


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Equal to the last bit, through all columns."""
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name), f"{where}.{field.name}")
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype, where
        np.testing.assert_array_equal(a, b, err_msg=where)
    else:
        assert a == b, where


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads(), deployments(), st.sampled_from([float("inf"), float("inf"), 0.5]), st.integers(0, 3))
def test_kernel_and_reference_agree(workload, deployment, time_limit_s, seed):
    options = {"time_limit_s": time_limit_s, "seed": seed}
    reference = outcome("reference", workload, deployment, **options)
    kernel = outcome("kernel", workload, deployment, **options)
    assert_same(kernel, reference)


@settings(max_examples=OF_ENGINES, deadline=None, suppress_health_check=list(HealthCheck))
@given(sglang_worlds(), st.sampled_from([float("inf"), float("inf"), 0.5]), st.integers(0, 3))
def test_kernel_and_reference_agree_by_sglangs_rules(world, time_limit_s, seed):
    options = {"time_limit_s": time_limit_s, "seed": seed}
    assert_same(outcome("kernel", *world, **options), outcome("reference", *world, **options))


@settings(max_examples=OF_ENGINES, deadline=None, suppress_health_check=list(HealthCheck))
@given(overlapping_worlds(), st.sampled_from([float("inf"), float("inf"), 0.5]), st.integers(0, 3))
def test_kernel_and_reference_agree_by_sglangs_rules_with_overlap(world, time_limit_s, seed):
    options = {"time_limit_s": time_limit_s, "seed": seed}
    assert_same(outcome("kernel", *world, **options), outcome("reference", *world, **options))


@settings(max_examples=OF_ENGINES, deadline=None, suppress_health_check=list(HealthCheck))
@given(trtllm_worlds(), st.sampled_from([float("inf"), float("inf"), 0.5]), st.integers(0, 3))
def test_kernel_and_reference_agree_by_trtllms_rules(world, time_limit_s, seed):
    options = {"time_limit_s": time_limit_s, "seed": seed}
    assert_same(outcome("kernel", *world, **options), outcome("reference", *world, **options))


@settings(max_examples=OF_ENGINES, deadline=None, suppress_health_check=list(HealthCheck))
@given(async_worlds(grouped=True), st.sampled_from([float("inf"), float("inf"), 0.5]), st.integers(0, 3))
def test_kernel_and_reference_agree_under_asynchronous_scheduling(world, time_limit_s, seed):
    options = {"time_limit_s": time_limit_s, "seed": seed}
    assert_same(outcome("kernel", *world, **options), outcome("reference", *world, **options))


@settings(max_examples=OF_ENGINES, deadline=None, suppress_health_check=list(HealthCheck))
@given(priority_worlds(), st.integers(0, 3))
def test_kernel_and_reference_agree_by_vllms_priority(world, seed):
    assert_same(outcome("kernel", *world, seed=seed), outcome("reference", *world, seed=seed))


@settings(max_examples=OF_ENGINES, deadline=None, suppress_health_check=list(HealthCheck))
@given(vllm_worlds(), st.sampled_from([float("inf"), float("inf"), 0.5]), st.integers(0, 3))
def test_kernel_and_reference_agree_on_memory_reserved_by_predicted_length(world, time_limit_s, seed):
    options = {"time_limit_s": time_limit_s, "seed": seed}
    assert_same(outcome("kernel", *world, **options), outcome("reference", *world, **options))


@settings(max_examples=OF_ENGINES, deadline=None, suppress_health_check=list(HealthCheck))
@given(threshold_worlds(), st.sampled_from([float("inf"), float("inf"), 0.5]), st.integers(0, 3))
def test_kernel_and_reference_agree_on_several_prompts_in_part(world, time_limit_s, seed):
    options = {"time_limit_s": time_limit_s, "seed": seed}
    assert_same(outcome("kernel", *world, **options), outcome("reference", *world, **options))


def test_kernel_and_reference_agree_where_a_step_ahead_preempts_all_decodes():
    chosen = dataclasses.replace(scheduler("vllm_v1"), async_scheduling=True, long_prefill_token_threshold=1)
    limits = EngineLimits(max_num_seqs=2, max_num_batched_tokens=2, block_size=1, max_model_len=64)
    made = deploy("llama-3.1-8b", "H100", limits=limits, scheduler=chosen, num_blocks=65)
    workload = Workload(np.zeros(3), np.array([45, 22, 53]), np.array([10, 19, 11]))
    records = [outcome(engine, workload, made) for engine in ("kernel", "reference")]
    assert records[0].requests.preemptions.sum() > 0
    assert_same(*records)


@settings(max_examples=OF_ENGINES, deadline=None, suppress_health_check=list(HealthCheck))
@given(hybrid_worlds(), st.sampled_from([float("inf"), float("inf"), 0.5]), st.integers(0, 3))
def test_kernel_and_reference_agree_on_kv_cache_groups(world, time_limit_s, seed):
    options = {"time_limit_s": time_limit_s, "seed": seed}
    assert_same(outcome("kernel", *world, **options), outcome("reference", *world, **options))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(rank_worlds(), st.sampled_from([float("inf"), float("inf"), 0.5]), st.integers(0, 3))
def test_kernel_and_reference_agree_on_data_parallel_ranks(world, time_limit_s, seed):
    options = {"time_limit_s": time_limit_s, "seed": seed}
    assert_same(outcome("kernel", *world, **options), outcome("reference", *world, **options))


@settings(max_examples=OF_ENGINES, deadline=None, suppress_health_check=list(HealthCheck))
@given(speculation_worlds(), st.sampled_from([float("inf"), float("inf"), 0.5]), st.integers(0, 3))
def test_kernel_and_reference_agree_under_speculation(world, time_limit_s, seed):
    options = {"time_limit_s": time_limit_s, "seed": seed}
    assert_same(outcome("kernel", *world, **options), outcome("reference", *world, **options))
