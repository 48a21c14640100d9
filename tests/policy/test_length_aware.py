"""Length-aware schedulers on cases small enough to follow by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from worlds import GPU, MODEL, NODE

from lengthwise import policy
from lengthwise.engine import simulate
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.workload import Predictions, Workload

pytestmark = pytest.mark.parametrize("engine", ["kernel", "reference"])


def place(seqs=1, layer_s=(1.0, 1.0), blocks=64, max_model_len=400, memory="paged", **axes):
    """A replica on which a step takes a second, or by its tokens what ``layer_s`` specifies."""
    layer_s = np.array(layer_s)
    one, no = np.zeros(len(layer_s)), np.zeros(2)
    cost = CostTables(layer_s, one, one, one, no, no, np.zeros((2, 2)), np.zeros((2, 2)), np.array([1]))
    limits = EngineLimits(max_num_seqs=seqs, max_num_batched_tokens=512, watermark=0.0)
    scheduler = Scheduler(**{"batching": "unified", "memory": memory} | axes)
    kv = KvPlan(blocks, 16, 0, 0, 0, 0)
    return Deployment(MODEL, GPU, NODE, Parallelism(), limits, scheduler, cost, kv, max_model_len)


def requests(*rows, predicted=None, **more):
    """(arrival, prompt, output) of each; predicted right unless specified otherwise."""
    arrival, prompt, output = map(np.array, zip(*rows, strict=True))
    given = {} if "predictions" in more else {"predicted_tokens": output if predicted is None else predicted}
    return Workload(arrival, prompt, output, **given, **more)


LONG_THEN_SHORT = requests((0.0, 4, 20), (5.5, 4, 2))


def run(workload, deployment, engine):
    return simulate(workload, deployment, engine=engine).requests


def test_by_rank_gives_the_slot_to_the_better_ranked_request(engine):
    """The long one has 6 tokens at 6 s; the short one takes its place and is done at 8."""
    waits = run(LONG_THEN_SHORT, place(rank="srtf"), engine)
    assert waits.finished_s.tolist() == [20, 22]
    takes = run(LONG_THEN_SHORT, place(rank="srtf", preemption="by_rank"), engine)
    assert takes.finished_s.tolist() == [22, 8]
    assert takes.preemptions.tolist() == [1, 0]


def test_no_request_yields_to_a_worse_ranked_one(engine):
    nearly_done = requests((0.0, 4, 7), (5.5, 4, 2))
    assert run(nearly_done, place(rank="srtf", preemption="by_rank"), engine).preemptions.tolist() == [0, 0]


@pytest.mark.parametrize(("output", "moves"), [(20, 1), (9, 0)])
def test_worth_it_weighs_the_steps_saved(engine, output, moves):
    """Recomputing takes one step from one request: 12 steps saved are worth it, 1 step is not."""
    r = run(requests((0.0, 4, output), (5.5, 4, 2)), place(rank="srtf", preemption="is_improvement"), engine)
    assert r.preemptions.tolist() == [moves, 0]


DEAR = 1.0 + 5.0 * np.arange(-1, 15)  # 10 tokens to compute again: 46 times a step of one


@pytest.mark.parametrize(("preemption", "moves"), [("by_rank", 1), ("is_improvement", 0), ("worth(factor=0.1)", 1)])
def test_worth_it_does_not_pay_more_for_computing_again_than_it_saves(engine, preemption, moves):
    later = requests((0.0, 4, 20), (21.5, 4, 2))  # 16 s for the prompt, then a token a second
    r = run(later, place(layer_s=np.maximum(DEAR, 1.0), rank="srtf", preemption=preemption), engine)
    assert r.preemptions.tolist() == [moves, 0]


def test_worth_preempts_no_request_more_often_than_allowed(engine):
    many = requests((0.0, 4, 60), *((5.5 + 6 * i, 4, 2) for i in range(5)))
    for most in (0, 1, 3):
        r = run(many, place(rank="srtf", preemption=f"worth(factor=0, max_preemptions={most})"), engine)
        assert r.preemptions.tolist() == [most, 0, 0, 0, 0, 0]


def test_the_multilevel_queue_takes_a_slot_when_a_level_is_used_up(engine):
    """Level 0 ends after 4 tokens: at 6 s the newcomer is scheduled first; at 3 s it is not."""
    levels = {"rank": "mlfq(quantum=4, levels=3)", "preemption": "by_rank"}
    assert run(LONG_THEN_SHORT, place(**levels), engine).finished_s[1] == 8
    early = requests((0.0, 4, 20), (2.5, 4, 2))
    assert run(early, place(**levels, preemption_interval_steps=1), engine).preemptions[0] == 1
    assert run(early, place(**levels, preemption_interval_steps=1), engine).scheduled_s[1] == 4
    big = requests((0.0, 4, 20), (5.5, 100, 2))  # a prompt of 100 joins at level 1, where the other came first
    assert run(big, place(**levels, preemption_interval_steps=1), engine).scheduled_s[1] == 12


def test_levels_and_where_a_prompt_joins(engine):
    made = policy.resolve("rank", "mlfq(quantum=4, levels=3)")
    key = (policy.compiled if engine == "kernel" else policy.interpreted)(made)
    level = {
        (p, g): int(key(0.0, 7.0, p, g, 0.0, 1.0, 1.0, 0.0, 0, 0, 0, 0.0, 0) // 1e9)
        for p in (1, 100, 200)
        for g in (0, 3, 4, 11, 12, 500)
    }
    assert [level[1, g] for g in (0, 3, 4, 11, 12, 500)] == [0, 0, 1, 1, 2, 2]
    assert [level[p, 0] for p in (1, 100, 200)] == [0, 1, 2]
    assert level[100, 12] == 2


def test_tenants_of_unequal_demand_are_served_alike(engine):
    """Thirty requests of one tenant came before ten of the other: they take turns while both wait."""
    rows = [(0.0, 4, 3)] * 40
    tenant = np.repeat([0, 1], [30, 10])
    fair = run(requests(*rows, tenant=tenant), place(rank="vtc"), engine)
    first = tenant[np.argsort(fair.scheduled_s, kind="stable")][:20]
    assert first.sum() == 10
    assert run(requests(*rows, tenant=tenant), place(rank="fcfs"), engine).scheduled_s[30] == 90


def test_tenants_share_the_slots_of_one_step(engine):
    """Service is charged at once: four slots each, though one tenant's requests came first."""
    tenant = np.repeat([0, 1], 8)
    r = run(requests(*[(0.0, 4, 30)] * 16, tenant=tenant), place(seqs=8, rank="vtc"), engine)
    assert tenant[r.scheduled_s == 0].sum() == 4


def test_a_tenant_accumulates_no_credit_while_it_requests_little(engine):
    """One long answer is little service; then twenty requests come, and the others are not shut out."""
    rows = [(0.0, 4, 300)] + [(0.0, 30, 4)] * 60 + [(90.5, 30, 4)] * 20
    tenant = np.repeat([1, 0, 1], [1, 60, 20])
    r = run(requests(*rows, tenant=tenant, predicted=np.full(81, 4)), place(seqs=2, rank="vtc"), engine)
    later = np.argsort(r.scheduled_s, kind="stable")
    later = later[r.scheduled_s[later] > 90.5][:12]
    assert 5 <= tenant[later].sum() <= 7


def test_bins_make_batches_of_like_length(engine):
    mixed = requests((0.0, 4, 5), (0.0, 4, 50), (0.0, 4, 5), (0.0, 4, 50))
    batches = run(mixed, place(2, rank="completed_batches", batching="static"), engine)
    assert batches.finished_s.tolist() == [5, 50, 55, 100]
    axes = {"rank": "completed_batches", "batching": "static_bins", "binning": "bins(boundaries=[10])"}
    binned = run(mixed, place(2, **axes), engine)
    assert binned.finished_s.tolist() == [5, 55, 5, 55]


def test_a_bin_waits_for_company_but_not_for_ever(engine):
    """Alone in its bin until 3 s, and no longer than a bound on all waiting; at once when nothing else comes."""
    two = requests((0.0, 4, 5), (9.0, 4, 5))
    axes = {"rank": "completed_batches", "batching": "static_bins", "binning": "one"}
    assert run(two, place(2, **axes, batch_wait_s=3.0), engine).scheduled_s.tolist() == [3, 12]
    assert run(two, place(2, **axes, batch_wait_s=3.0, max_wait_s=2.0), engine).scheduled_s.tolist() == [2, 11]
    assert run(two, place(2, **axes), engine).scheduled_s.tolist() == [9, 9]
    assert run(requests((1.0, 4, 5)), place(2, **axes), engine).scheduled_s.tolist() == [1]


@pytest.mark.parametrize(("batching", "together"), [("static", True), ("static_bins", False)])
def test_one_batch_is_never_mixed_with_the_next(engine, batching, together):
    """A batch that left its bin half empty runs alone, though there is a slot for one of the next."""
    rows = requests((0.0, 4, 50), (0.0, 4, 50), (1.0, 4, 5), (2.0, 4, 50), (2.0, 4, 50))
    axes = {"rank": "completed_batches", "binning": "bins(boundaries=[10])", "batch_wait_s": 0.0}
    r = run(rows, place(2, batching=batching, **axes), engine)
    assert r.scheduled_s[:3].tolist() == [0, 0, 50]
    assert (r.scheduled_s[3] == 50) == together


def test_elis_reforms_its_batch_after_fifty_steps_or_a_completion(engine):
    """Algorithm 1: a shorter request comes at 5.5 s; it has a slot at 50 s, or when another ends."""
    elis = dataclasses.asdict(policy.scheduler("elis"))
    alone = run(requests((0.0, 4, 120), (5.5, 4, 30)), place(**elis), engine)
    assert alone.scheduled_s.tolist() == [0, 50]
    assert alone.preemptions.tolist() == [1, 0]
    assert alone.finished_s.tolist() == [150, 80]
    ends = run(requests((0.0, 4, 120), (0.0, 4, 10), (5.5, 4, 30)), place(2, **elis), engine)
    assert ends.scheduled_s.tolist() == [0, 0, 10]
    assert ends.preemptions.tolist() == [0, 0, 0]


def test_elis_routes_to_the_replica_with_the_fewest_requests_and_preempts_the_lowest_priority(engine):
    """Long and short requests alternate: in turn, one replica would get all long ones."""
    elis = policy.scheduler("elis")
    assert (elis.router, elis.victim) == ("least_outstanding", "longest_remaining")
    rows = requests(*[(10.0 * k, 4, 100 if k % 2 == 0 else 5) for k in range(12)])
    by_load, in_turn = (
        run(rows, dataclasses.replace(place(1, **axes), parallel=Parallelism(replicas=2)), engine)
        for axes in (dataclasses.asdict(elis), dataclasses.asdict(elis) | {"router": "round_robin"})
    )
    jct_s = [(one.finished_s - one.arrival_s).mean() for one in (by_load, in_turn)]
    assert jct_s[0] < 0.8 * jct_s[1]


def test_elis_repredicts_at_every_window(engine):
    """Who looked short at first and turns out long gives way at the next window."""
    made = Predictions(50, np.array([0, 3, 4]), np.array([20.0, 160.0, 160.0, 30.0]), np.ones(4))
    elis = dataclasses.asdict(policy.scheduler("elis"))
    r = run(requests((0.0, 4, 120), (5.5, 4, 30), predictions=made), place(**elis), engine)
    assert r.scheduled_s.tolist() == [0, 50]
    once = requests((0.0, 4, 120), (5.5, 4, 30), predicted=np.array([20.0, 30.0]))
    assert run(once, place(**elis), engine).scheduled_s.tolist() == [0, 120]


@pytest.mark.parametrize(("retry", "scheduled_s"), [(None, 7), (60.0, 60)])
def test_the_predicted_peak_follows_what_is_predicted_now(engine, retry, scheduled_s):
    """The first is thought to end after 10 tokens, at 5 tokens perhaps after 60: then two do not fit."""
    later = 10.0 if retry is None else retry
    made = Predictions(5, np.array([0, 12, 13]), np.array([10.0, *[later] * 11, 60.0]), np.ones(13))
    rows = requests((0.0, 10, 60), (6.5, 10, 5), predictions=made)
    memory = {"memory": "predicted_peak", "blocks": 5, "max_model_len": 80}
    r = run(rows, place(2, **memory, batching="mixed"), engine)
    assert r.scheduled_s.tolist() == [0, scheduled_s]


def test_an_overdue_request_is_scheduled_first_and_stays(engine):
    """Short requests keep coming; the long one waits 10 s, then holds its slot to its end."""
    short = [(float(i), 4, 3) for i in range(40)]
    rows = requests(*sorted([(0.5, 4, 30), *short]))
    served = run(rows, place(rank="srtf", preemption="by_rank"), engine)
    assert served.scheduled_s[1] > 100
    bounded = run(rows, place(rank="srtf", preemption="by_rank", max_wait_s=10.0), engine)
    assert bounded.scheduled_s[1] == 11
    assert bounded.preemptions[1] == 0


def test_an_aged_request_is_passed_only_for_a_while(engine):
    """27 tokens longer at 3 tokens a second: no request that came 9 s later is scheduled first."""
    rows = requests((0.0, 4, 3), (0.5, 4, 30), *((i + 0.6, 4, 3) for i in range(30)))
    r = run(rows, place(rank="aged(weight=3)"), engine)
    passed = np.flatnonzero(r.scheduled_s < r.scheduled_s[1])
    assert r.arrival_s[passed].max() <= 0.5 + 9
    assert len(passed) > 5
