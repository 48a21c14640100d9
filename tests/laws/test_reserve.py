"""Laws of memory that is reserved by predicted length, by the rules of vLLM v1, SGLang and TensorRT-LLM."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lengthwise.engine import simulate
from lengthwise.policy.reservation import GAIN, OWN_RULE, STEP, MemoryGate, adapted_margin
from lengthwise.schema.cost_tables import Front
from lengthwise.schema.deployment import (
    Deployment,
    EngineLimits,
    KvPlan,
    Parallelism,
    Scheduler,
    SglangSettings,
    TrtllmSettings,
)
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Status
from lengthwise.schema.workload import UNCAPPED, Workload

sys.path.insert(0, str(Path(__file__).parent))
from test_kernel_agrees import assert_same
from worlds import GPU, MODEL, NODE, cost_tables, sglang_worlds, trtllm_worlds, vllm_worlds

EXAMPLES = int(os.environ.get("LENGTHWISE_EXAMPLES", "60"))
TRTLLM = TrtllmSettings("MAX_UTILIZATION")
LAW = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
WORLDS = st.one_of(vllm_worlds(), sglang_worlds(), trtllm_worlds())


def reserving(world, share: float | None = None) -> tuple[Workload, Deployment]:
    """Return the world with memory reserved, where only a lack of memory preempts, and a request enters on arrival."""
    workload, deployment = world
    scheduler = deployment.scheduler
    assume(not scheduler.reserves_max_tokens)
    made = dataclasses.replace(
        scheduler, reserve=True, preemption="never", binning=None, max_preemptions_per_request=math.inf,
        max_recompute_share=scheduler.max_recompute_share if share is None else share,
    )  # fmt: skip
    return workload, dataclasses.replace(
        deployment, scheduler=made, cost=dataclasses.replace(deployment.cost, front=Front())
    )


@LAW
@given(WORLDS)
def test_at_a_share_of_zero_no_request_is_preempted_more_than_twice_whatever_is_predicted(world):
    """The first preemption raises the margin for good. Before it, a request is admitted by its prediction."""
    workload, deployment = reserving(world, 0.0)
    assert simulate(workload, deployment, engine="kernel").requests.preemptions.max() <= 2


@LAW
@given(WORLDS, st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.05, 0.2, math.inf]))
def test_preemptions_stay_within_their_budget_whatever_is_predicted(world, budget, share):
    """Each raises the budget's margin by STEP, up to the limits; those that run then may be preempted, too."""
    workload, deployment = reserving(world, share)
    scheduler = dataclasses.replace(deployment.scheduler, max_preemptions_per_request=budget)
    limited = dataclasses.replace(deployment, scheduler=scheduler)
    preemptions = simulate(workload, limited, engine="kernel").requests.preemptions.sum()
    each = (1 - OWN_RULE) / STEP + 2 * deployment.limits.max_num_seqs
    assert preemptions <= budget * len(workload) + each * deployment.parallel.replicas * deployment.parallel.dp


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10))), st.floats(0.01, 2), st.floats(0, 1), st.floats(1e-3, 1))
def test_recomputation_takes_at_most_the_share_of_idle_time_and_what_the_margin_stores(steps, share, first, rate):
    margin, total_spent_s, total_idle_s = first, 0.0, 0.0
    for spent_s, idle_s in steps:
        margin = adapted_margin(margin, share, spent_s, idle_s, rate)
        assert margin >= OWN_RULE
        total_spent_s, total_idle_s = total_spent_s + spent_s, total_idle_s + idle_s
    assert total_spent_s <= share * (total_idle_s + (margin - first) / (GAIN * rate)) * (1 + 1e-9) + 1e-6


@pytest.mark.parametrize("by", ["steps", "runs"])
@LAW
@given(st.data())
def test_a_closed_gate_leaves_memory_idle_for_as_long_as_recomputation_pays_for_and_half_a_turnover(by, data):
    """In steps after which the gate is closed, by the sum over a run, in times in which its tokens fill the cache."""
    share, adapted, own = data.draw(st.floats(0.05, 2.0)), [], MemoryGate.adapt

    def adapt(gate: MemoryGate, spent_s: float, idle_s: float, turnovers_per_s: float, finished: int = 0) -> None:
        own(gate, spent_s, idle_s, turnovers_per_s, finished)
        adapted.append((gate, gate.margin, spent_s * turnovers_per_s, idle_s * turnovers_per_s))

    if by == "steps":
        gate = MemoryGate(share, math.inf, lambda _: (0.0, 0, 0))
        for step in data.draw(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3), st.floats(1e-3, 1)))):
            adapt(gate, *step)
    else:
        workload, deployment = reserving(data.draw(WORLDS), share)
        with mock.patch.object(MemoryGate, "adapt", adapt):
            simulate(workload, deployment, engine="reference")
    for gate in {id(one[0]): one[0] for one in adapted}.values():
        rows = [one[1:] for one in adapted if one[0] is gate]
        idle = sum(idle for margin, _, idle in rows if margin > OWN_RULE)
        assert idle <= sum(spent for _, spent, _ in rows) / share + (0.0 - OWN_RULE) / GAIN + 1e-6


@LAW
@given(st.one_of(vllm_worlds(), trtllm_worlds()))
def test_where_recomputation_costs_nothing_the_rule_is_the_engines_own(world):
    workload, deployment = reserving(world, math.inf)
    own = dataclasses.replace(deployment, scheduler=dataclasses.replace(deployment.scheduler, reserve=False))
    assert_same(*(simulate(workload, one, engine="kernel", seed=1) for one in (deployment, own)))


@LAW
@given(WORLDS)
def test_exact_lengths_cause_no_preemption_at_a_share_of_zero_where_sequences_decode_in_step(world):
    workload, deployment = reserving(world, 0.0)
    limits = dataclasses.replace(
        deployment.limits, max_num_batched_tokens=1 << 20, max_step_seqs=None, max_in_flight=None, watermark=None
    )
    made = dataclasses.replace(deployment, limits=limits)
    if deployment.scheduler.sglang:
        own = dataclasses.replace(deployment.scheduler.sglang, max_prefill_tokens=1 << 20)
        made = dataclasses.replace(made, scheduler=dataclasses.replace(made.scheduler, sglang=own))
    if not made.scheduler.engine_rules:
        made = dataclasses.replace(made, parallel=dataclasses.replace(made.parallel, pp=1), cost=cost_tables([2]))
    exact = dataclasses.replace(workload, predictions=None, predicted_tokens=workload.output_tokens.astype(float))
    assert simulate(exact, made, engine="kernel").requests.preemptions.sum() == 0


@LAW
@given(WORLDS)
def test_a_replica_with_a_request_is_never_idle(world):
    workload, deployment = reserving(world)
    assume(workload.after is None and workload.concurrency is None)
    limits = dataclasses.replace(deployment.limits, timeout_s=float("inf"))
    one = dataclasses.replace(deployment.parallel, replicas=1)
    records = simulate(workload, dataclasses.replace(deployment, limits=limits, parallel=one), engine="kernel")
    found, steps = records.requests, records.steps
    served = found.status == Status.FINISHED
    assert (served | (found.status == Status.REJECTED)).all()
    ends = np.maximum.accumulate(steps.end_s)
    for k in np.flatnonzero(steps.start_s[1:] > ends[:-1]):
        unfinished = served & (workload.arrival_s < steps.start_s[k + 1]) & (found.finished_s > ends[k])
        assert not unfinished.any()


@LAW
@given(WORLDS, st.sampled_from([0.0, 5.0]))
def test_without_reserve_the_share_changes_nothing(world, share):
    workload, deployment = world
    off = [
        dataclasses.replace(
            deployment, scheduler=dataclasses.replace(deployment.scheduler, reserve=False, max_recompute_share=one)
        )
        for one in (0.2, share)
    ]
    assert_same(*(simulate(workload, one, engine="kernel", seed=1) for one in off))


ENGINES = pytest.mark.parametrize("engine", ["reference", "kernel"])
RULES = pytest.mark.parametrize(
    "rules",
    [{"batching": "unified", "memory": "paged_by_chunk"}, {"sglang": SglangSettings()}, {"trtllm": TRTLLM}],
    ids=["vllm_v1", "sglang", "trtllm"],
)


def small(tokens: int, size: int = 1, **scheduler) -> Deployment:
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=512, block_size=size)
    return Deployment(
        MODEL, GPU, NODE, Parallelism(1, 1, 1), limits, Scheduler(reserve=True, **scheduler), cost_tables([2]),
        KvPlan(tokens // size, size, 0.0, 0.0, 0.0, 0.0), max_model_len=tokens,
    )  # fmt: skip


def requests(count: int, predicted: float, output: int, limit: int, prompt: int = 8) -> Workload:
    columns = (np.full(count, prompt), np.full(count, output))
    return Workload(
        np.zeros(count), *columns, predicted_tokens=np.full(count, predicted), max_tokens=np.full(count, limit)
    )


@ENGINES
@RULES
def test_as_many_requests_run_at_a_time_as_the_predicted_peak_allows(engine, rules):
    """Each needs 8 + 16 tokens: 100 // 24 = 4 of 8 fit beside each other, although a limit alone takes 72."""
    records = simulate(requests(12, 16, 16, 64), small(100, max_recompute_share=0.0, **rules), engine=engine)
    assert (records.requests.scheduled_s == 0).sum() == 4
    assert records.requests.preemptions.sum() == 0


@ENGINES
@RULES
def test_wrong_lengths_preempt_until_limits_are_reserved(engine, rules):
    """Outputs of 90 tokens are predicted to have one."""
    short = requests(200, 1, 90, 90)
    preemptions = [
        simulate(short, small(300, max_recompute_share=share, **rules), engine=engine).requests.preemptions.sum()
        for share in (0.0, 0.2, math.inf)
    ]
    assert preemptions[0] <= 2 * 8
    assert preemptions[0] <= preemptions[1] < preemptions[2] / 2
    assert preemptions[2] > 100
    open_gate = small(300, max_recompute_share=math.inf, max_preemptions_per_request=0.25, **rules)
    within = simulate(short, open_gate, engine=engine).requests.preemptions.sum()
    assert 0.25 * 200 / 2 < within <= 0.25 * 200 + 2 / STEP + 2 * 8


@ENGINES
@RULES
def test_a_request_whose_limit_exceeds_the_cache_runs_alone(engine, rules):
    alone = small(100, max_recompute_share=0.0, **rules)
    found = simulate(requests(3, 5000, 20, UNCAPPED), alone, engine=engine).requests
    assert found.scheduled_s[1:].tolist() == found.finished_s[:-1].tolist()


WRONG = [
    ({"batching": "mixed", "memory": "reserve_max"}, "the batching is 'mixed' and the memory policy 'reserve_max'"),
    ({"memory": "paged"}, "the memory policy 'paged'"),
    ({"trtllm": TrtllmSettings()}, 'takes the place of GUARANTEED_NO_EVICT.*"MAX_UTILIZATION"'),
    ({"sglang": SglangSettings(), "max_recompute_share": -0.1}, "max_recompute_share must be at least 0; it is -0.1"),
    ({"max_preemptions_per_request": math.nan}, "max_preemptions_per_request must be at least 0; it is nan"),
]


@pytest.mark.parametrize(("given_axes", "report"), WRONG)
def test_wrong_settings_are_named(given_axes, report):
    with pytest.raises(InputError, match=report):
        Scheduler(reserve=True, **given_axes)


@RULES
def test_lengths_must_be_predicted(rules):
    work = dataclasses.replace(requests(1, 5, 5, 5), predicted_tokens=None)
    with pytest.raises(InputError, match=r'reserve = true needs predicted output lengths.*"oracle"'):
        simulate(work, small(100, **rules))
