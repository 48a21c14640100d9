"""simulate(): its options, and input that cannot be simulated."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from worlds import GPU, MODEL, NODE, cost_tables

from lengthwise import policy
from lengthwise.engine import ready, simulate
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.records import Status
from lengthwise.schema.workload import Workload

ENGINES = ("kernel", "reference")
DEPLOYMENT = Deployment(
    MODEL, GPU, NODE, Parallelism(1, 1, 2), EngineLimits(max_num_seqs=4), Scheduler(router="random"),
    cost_tables([4]), KvPlan(100, 16, 0.0, 0.0, 0.0, 0.0), max_model_len=300, name="two tiny replicas",
)  # fmt: skip
WORKLOAD = Workload(np.arange(40) / 200, np.full(40, 50), np.arange(40) % 9 + 1)
TOO_LONG = dataclasses.replace(WORKLOAD, prompt_tokens=np.where(np.arange(40) % 10 == 7, 300, 50))


@pytest.mark.parametrize("engine", ENGINES)
def test_records_state_their_origin(engine):
    records = simulate(WORKLOAD, DEPLOYMENT, seed=3, engine=engine)
    assert (records.seed, records.name) == (3, "two tiny replicas")
    assert (records.requests.status == Status.FINISHED).all()
    np.testing.assert_array_equal(records.requests.prompt_tokens, WORKLOAD.prompt_tokens)
    assert records.gaps.edges_s[0] == 0
    assert (np.diff(records.gaps.edges_s) > 0).all()
    assert len(records.gaps.edges_s) == len(records.gaps.histogram) + 1


def test_the_seed_is_of_the_routers_alone():
    replica = {seed: simulate(WORKLOAD, DEPLOYMENT, seed=seed).requests.replica for seed in (0, 0, 1)}
    assert not np.array_equal(replica[0], replica[1])
    plain = dataclasses.replace(DEPLOYMENT, scheduler=Scheduler())
    a, b = (simulate(WORKLOAD, plain, seed=seed).requests.finished_s for seed in (0, 1))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("engine", ENGINES)
def test_strict_names_the_first_request_that_never_fits(engine):
    records = simulate(TOO_LONG, DEPLOYMENT, engine=engine)
    assert np.flatnonzero(records.requests.status == Status.REJECTED).tolist() == [7, 17, 27, 37]
    with pytest.raises(InputError, match="4 of 40 requests can never fit; the first is request 7 with 300 prompt"):
        simulate(TOO_LONG, DEPLOYMENT, strict=True, engine=engine)
    assert simulate(WORKLOAD, DEPLOYMENT, strict=True, engine=engine).end_s > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_time_limit_leaves_the_rest_unfinished(engine):
    complete = simulate(WORKLOAD, DEPLOYMENT, engine=engine)
    limit_s = float(np.median(complete.requests.finished_s))
    r = simulate(WORKLOAD, DEPLOYMENT, time_limit_s=limit_s, engine=engine).requests
    assert (r.status[complete.requests.finished_s <= limit_s] == Status.FINISHED).all()
    cut = complete.requests.finished_s > limit_s
    assert (r.status[cut] == Status.UNFINISHED).all()
    assert (r.output_tokens[cut] < WORKLOAD.output_tokens[cut]).all()
    assert r.output_tokens[cut].any(), "some of it had come"
    unseen = WORKLOAD.arrival_s > limit_s
    assert (r.replica[unseen] == -1).all()


@pytest.mark.parametrize("limit_s", [0, -1.0, math.nan])
def test_a_time_limit_that_is_none(limit_s):
    with pytest.raises(InputError, match="time_limit_s must be above 0"):
        simulate(WORKLOAD, DEPLOYMENT, time_limit_s=limit_s)


def test_an_unknown_engine():
    with pytest.raises(UnknownNameError, match=r"no engine named 'kernl'. Did you mean: kernel"):
        simulate(WORKLOAD, DEPLOYMENT, engine="kernl")


def test_the_log_is_complete_or_absent():
    complete = simulate(WORKLOAD, DEPLOYMENT)
    steps = len(complete.steps.start_s)
    assert len(simulate(WORKLOAD, DEPLOYMENT, max_log_steps=steps).steps.start_s) == steps
    for max_log_steps in (0, 1, steps - 1):
        brief = simulate(WORKLOAD, DEPLOYMENT, max_log_steps=max_log_steps)
        assert brief.steps is None
        assert brief.gaps.gap_s is None
        assert brief.gaps.count is None
        np.testing.assert_array_equal(brief.gaps.histogram, complete.gaps.histogram)
        assert (brief.gaps.sum_s, brief.gaps.max_s) == (complete.gaps.sum_s, complete.gaps.max_s)


def test_gaps_lie_in_their_bins():
    gaps = simulate(WORKLOAD, DEPLOYMENT).gaps
    where = np.searchsorted(gaps.edges_s, gaps.gap_s, side="right") - 1
    np.testing.assert_array_equal(np.bincount(where, gaps.count, len(gaps.histogram)), gaps.histogram)
    assert gaps.sum_s == pytest.approx(gaps.gap_s @ gaps.count)
    assert gaps.max_s == gaps.gap_s[-1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cache_that_holds_no_longest_sequence(engine):
    small = dataclasses.replace(DEPLOYMENT, kv=dataclasses.replace(DEPLOYMENT.kv, num_blocks=18))
    with pytest.raises(InputError, match="must hold one sequence of max_model_len 300 tokens; it holds 288"):
        simulate(WORKLOAD, small, engine=engine)


@pytest.mark.parametrize("limits", [{"max_num_seqs": 0}, {"max_step_seqs": -1}, {"max_num_batched_tokens": 0}])
def test_limits_below_one(limits):
    with pytest.raises(InputError, match="must be a whole number of at least 1"):
        EngineLimits(**limits)


def test_outputs_end_at_the_longest_sequence():
    long = dataclasses.replace(WORKLOAD, output_tokens=np.full(40, 10_000))
    r = simulate(long, DEPLOYMENT).requests
    assert (r.status == Status.FINISHED).all()
    assert (r.output_tokens == 300 - 50).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_give_up(engine):
    slow = dataclasses.replace(DEPLOYMENT, limits=EngineLimits(max_num_seqs=1, timeout_s=0.02))
    r = simulate(WORKLOAD, slow, engine=engine).requests
    gone = r.status == Status.TIMED_OUT
    assert gone.any()
    assert (r.status == Status.FINISHED).any()
    assert np.isnan(r.finished_s[gone]).all()
    assert (r.scheduled_s - r.arrival_s < 0.02)[~np.isnan(r.scheduled_s)].all()


def test_the_kernel_is_ready_after_a_run():
    simulate(WORKLOAD, DEPLOYMENT)
    assert ready()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("router", ["round_robin", "central"])
def test_the_last_block_of_all_is_used(router, engine):
    """A swapped request that fits, but not with a spare block on top, must not go in and out for ever."""
    scheduler = dataclasses.replace(policy.scheduler("vllm_v0"), preemption_mode="swap", router=router)
    full = dataclasses.replace(
        DEPLOYMENT, parallel=Parallelism(), scheduler=scheduler, max_model_len=64,
        kv=dataclasses.replace(DEPLOYMENT.kv, num_blocks=4),
    )  # fmt: skip
    r = simulate(Workload(np.zeros(1), np.array([10]), np.array([54])), full, engine=engine).requests
    assert r.status.tolist() == [Status.FINISHED]
    assert r.output_tokens.tolist() == [54]
