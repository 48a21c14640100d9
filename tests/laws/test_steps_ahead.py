"""Laws 65 to 67: asynchronous scheduling. A step is formed before its predecessor ends."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from observers import LAW, run
from worlds import async_worlds, overlapping_worlds

from lengthwise.engine import deploy, simulate
from lengthwise.policy import scheduler
from lengthwise.schema.deployment import EngineLimits, KVOffloading, Scheduler
from lengthwise.schema.errors import InputError, PolicyError
from lengthwise.schema.records import Status
from lengthwise.schema.workload import Workload

AHEAD = dataclasses.replace(scheduler("vllm_v1"), async_scheduling=True)


def of_eos(workload, requests, max_model_len):
    """Which finished requests end by EOS: before their max_tokens and before max_model_len."""
    limit = np.inf if workload.max_tokens is None else workload.max_tokens
    limit = np.minimum(limit, max_model_len - workload.prompt_tokens)
    return (requests.status == Status.FINISHED) & (requests.output_tokens < limit)


@LAW
@given(async_worlds())
def test_only_an_end_by_eos_wastes_a_token(world):
    workload, deployment = world
    limits = dataclasses.replace(deployment.limits, enable_prefix_caching=False)
    records = run(workload, dataclasses.replace(deployment, limits=limits))
    requests, steps = records.requests, records.steps
    assume(not requests.preemptions.any())
    done = requests.status == Status.FINISHED
    decoded = (requests.output_tokens[done] - 1).sum() + of_eos(workload, requests, deployment.max_model_len).sum()
    assert steps.decode_seqs.sum() == decoded
    assert steps.prefill_tokens.sum() == workload.prompt_tokens[done].sum()


@LAW
@given(st.one_of(async_worlds(), overlapping_worlds()), st.booleans())
def test_at_most_one_step_is_formed_ahead(world, hide_host):
    workload, deployment = world
    made = dataclasses.replace(deployment.scheduler, hide_host=hide_host)
    steps = run(workload, dataclasses.replace(deployment, scheduler=made)).steps
    for replica in range(deployment.parallel.replicas):
        start_s, end_s = steps.start_s[steps.replica == replica], steps.end_s[steps.replica == replica]
        assert (np.diff(end_s) > 0).all()
        assert (start_s[2:] >= end_s[:-2]).all()


@LAW
@given(overlapping_worlds())
def test_by_sglangs_rules_only_an_end_by_eos_wastes_a_token(world):
    """Its next step may compute prompts, and then nothing is wasted."""
    workload, deployment = world
    limits = dataclasses.replace(deployment.limits, enable_prefix_caching=False)
    by_entry = dataclasses.replace(deployment.scheduler.sglang, schedule_policy="fcfs")
    made = dataclasses.replace(deployment.scheduler, sglang=by_entry)
    records = run(workload, dataclasses.replace(deployment, limits=limits, scheduler=made))
    requests = records.requests
    assume(not requests.preemptions.any())
    done = requests.status == Status.FINISHED
    wasted = records.steps.decode_seqs.sum() - (requests.output_tokens[done] - 1).sum()
    assert 0 <= wasted <= of_eos(workload, requests, deployment.max_model_len).sum()
    assert records.steps.prefill_tokens.sum() == workload.prompt_tokens[done].sum()


@LAW
@given(st.one_of(async_worlds(), overlapping_worlds()))
def test_one_request_at_a_time_takes_as_long_as_without(world):
    workload, deployment = world
    serial = Workload(
        np.zeros(len(workload)), workload.prompt_tokens, workload.output_tokens,
        predicted_tokens=np.ones(len(workload)), priority=np.zeros(len(workload), np.int64), concurrency=1,
        max_tokens=workload.output_tokens,
    )  # fmt: skip
    assume((serial.prompt_tokens + serial.output_tokens <= deployment.max_model_len).all())
    has_tree = deployment.scheduler.sglang is not None and deployment.limits.enable_prefix_caching
    limits = dataclasses.replace(deployment.limits, enable_prefix_caching=has_tree)
    plain = dataclasses.replace(deployment.scheduler, async_scheduling=False, hide_host=False)
    ahead = dataclasses.replace(deployment.scheduler, hide_host=False)
    one, other = (
        run(serial, dataclasses.replace(deployment, limits=limits, scheduler=made)).requests for made in (plain, ahead)
    )
    np.testing.assert_array_equal(one.finished_s, other.finished_s)
    np.testing.assert_array_equal(one.first_token_s, other.first_token_s)


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_step_with_a_hidden_host_takes_the_longer_of_both_times(factor):
    made = deploy("llama-3.1-8b", "H100", limits=EngineLimits(max_num_seqs=4))
    cost = dataclasses.replace(made.cost, host_s=np.zeros_like(made.cost.host_s))
    workload = Workload(np.zeros(1), np.ones(1, np.int64), np.full(1, 400))
    gpu_s = tpot_s(workload, dataclasses.replace(made, cost=cost, scheduler=AHEAD))
    host_s = factor * gpu_s
    cost = dataclasses.replace(cost, host_s=np.full_like(cost.host_s, host_s))
    made = dataclasses.replace(made, cost=cost)
    hidden = tpot_s(workload, dataclasses.replace(made, scheduler=dataclasses.replace(AHEAD, hide_host=True)))
    assert hidden == pytest.approx(max(host_s, gpu_s), rel=0.01)
    assert tpot_s(workload, dataclasses.replace(made, scheduler=AHEAD)) == pytest.approx(host_s + gpu_s, rel=0.01)


def tpot_s(workload, deployment):
    """Mean seconds between the tokens of the only request."""
    requests = simulate(workload, deployment).requests
    return (requests.finished_s[0] - requests.first_token_s[0]) / (requests.output_tokens[0] - 1)


@pytest.mark.parametrize(
    ("limits", "policies", "named"),
    [
        ({"timeout_s": 3.0}, {}, "timeout_s"),
        ({"max_step_seqs": 3}, {}, "max_step_seqs"),
        ({"max_in_flight": 1}, {}, "max_in_flight"),
        ({"enable_prefix_caching": True, "prefix_cache": "sglang"}, {}, 'prefix_cache "sglang"'),
        ({"enable_prefix_caching": True, "kv_offloading": KVOffloading(100.0)}, {}, "kv_offloading"),
        ({}, {"preemption_mode": "swap"}, "preemption_mode 'swap'"),
        ({}, {"batching": "prefill_first"}, "batching 'prefill_first'"),
        ({}, {"preemption": "by_rank"}, "preemption 'by_rank'"),
        ({}, {"victim": "priority"}, "victim 'priority'"),
        ({}, {"memory": "predicted_peak"}, "memory 'predicted_peak'"),
    ],
)
def test_what_it_does_not_cover_is_refused_by_name(limits, policies, named):
    chosen = dataclasses.replace(AHEAD, **policies)
    made = deploy("llama-3.1-8b", "H100", limits=EngineLimits(**limits), scheduler=chosen)
    workload = Workload(np.zeros(2), np.ones(2, np.int64), np.ones(2, np.int64), predicted_tokens=np.ones(2))
    with pytest.raises((InputError, PolicyError), match=f"async_scheduling is not modelled with {named} yet"):
        simulate(workload, made)


def test_a_pipeline_is_refused():
    made = deploy("llama-3.1-8b", "H100", pp=2, scheduler=AHEAD)
    with pytest.raises(InputError, match="async_scheduling is not modelled with pipeline parallelism yet"):
        simulate(Workload(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64)), made)


def test_a_host_is_hidden_behind_another_step_only():
    with pytest.raises(InputError, match="hide_host needs async_scheduling = true"):
        Scheduler(hide_host=True)
