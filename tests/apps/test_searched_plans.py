"""What is looked at is counted, never timed, and no more is spent than it may save."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import cluster_of, draw_of, ensemble, served, tasks_of

from lengthwise.apps.plan import METHODS, Effort, PlanOptions, Space, plan, what_if
from lengthwise.apps.plan.evaluate import simulate_plan, stages_of
from lengthwise.apps.plan.planner import (
    CHANGE_SHARE,
    DEFAULT,
    FINALIST_SHARE,
    MIN_SHARE,
    REQUEST_S,
    RUN_S,
    STAGE_S,
    MethodPlan,
    Search,
    SearchBudget,
    expected_cost_s,
    loaded_gpus,
    plan_json,
    search_results,
)
from lengthwise.schema.app import ModelPlan


def made(counts, seed=0, draws=2, gpus=4):
    rng = np.random.default_rng(seed)
    tasks, first = ensemble(counts, rng)
    space = Space(served(len(counts)), cluster_of(gpus))
    return tasks, [first, *(draw_of(tasks, rng) for _ in range(draws - 1))], space


def looked(counts, **options):
    tasks, draws, space = made(counts)
    worlds = stages_of(tasks, draws, space)
    found = {one.name: one for one in search_results(worlds, space, PlanOptions(clock=lambda: 0.0, **options))}
    return found, worlds


def test_a_purse_counts_looks_and_simulated_requests_from_when_it_was_opened():
    tasks, draws, space = made([60, 60])
    (world,) = stages_of(tasks, draws[:1], space)
    plans = (space.plans(0)[0], space.plans(1)[0])
    world.stage(world.start(), plans)
    budget = SearchBudget([world])
    assert budget.elapsed_s == 0.0
    world.stage(world.start(), plans)
    assert budget.elapsed_s == pytest.approx(STAGE_S)
    world.stage(world.start(), (space.plans(0)[1],))
    assert budget.elapsed_s > 2 * STAGE_S + RUN_S + 29 * REQUEST_S
    assert budget.allows(0.5, 1.0)
    assert not budget.allows(1.0, 1.0)
    assert not budget.allows(0.0, budget.elapsed_s)
    assert SearchBudget([world], elapsed_s=2.0).elapsed_s == pytest.approx(2.0)


def test_of_two_plans_that_end_alike_the_one_that_loads_less_is_taken():
    one, two, other = ModelPlan(0, "G", 1), ModelPlan(0, "G", 2), ModelPlan(1, "G", 1, 2)
    assert loaded_gpus(((one, other), (two,), (two,))) == 1 + 2 + 1
    assert loaded_gpus(((two,), (one, other), (two,))) == 2 + 2 + 1
    found, _ = looked([600, 500, 550, 520, 580], additional=("min", "min_no_preemption"))
    own = found[DEFAULT]
    alike = [one for one in found.values() if one.planned_s <= own.planned_s]
    assert loaded_gpus(own.planned) <= min(loaded_gpus(one.planned) for one in alike)


@pytest.mark.parametrize("name", ["samullm", "max"])
def test_what_a_method_costs_is_known_about_before_it_is_run(name):
    tasks, draws, space = made([300, 200, 400])
    (world,) = stages_of(tasks, draws[:1], space)
    before_s = expected_cost_s(world, name)
    found, _ = looked([300, 200, 400], method=name, additional=())
    assert 0.4 < before_s / found[name].cost_s < 3.0


def test_the_search_ends_where_it_would_cost_more_than_its_share_of_what_is_planned():
    counts = [400, 300, 500]
    poor, _ = looked(counts, additional=(), effort=Effort(share=0.0))
    rich, _ = looked(counts, additional=(), effort=Effort(share=1.0))
    assert poor["lengthwise"].cost_s < rich["lengthwise"].cost_s
    assert rich["lengthwise"].planned_s <= poor["lengthwise"].planned_s / (1 - MIN_SHARE)
    usual, _ = looked(counts, additional=())
    # Lists are looked at in any case; what comes after them is within the share, but for the plan that is under way.
    assert (
        usual["lengthwise"].cost_s - poor["lengthwise"].cost_s <= Effort().share * poor["lengthwise"].planned_s + 0.02
    )


def chained(counts, seed=0):
    """Each task of the second model waits for one of the first."""
    rng = np.random.default_rng(seed)
    first, second = counts
    tasks = tasks_of([0] * first + [1] * second, parents=[(first + i, i % first) for i in range(second)])
    return tasks, [draw_of(tasks, rng)], Space(served(2), cluster_of(4))


@pytest.mark.parametrize("waits", [True, False])
def test_algorithm_1_is_looked_at_where_models_wait_for_one_another(monkeypatch, waits):
    asked_for = []

    def run_method(search, name, through=Search.run_method):
        asked_for.append(name)
        return through(search, name)

    monkeypatch.setattr(Search, "run_method", run_method)
    tasks, draws, space = chained([300, 300]) if waits else made([300, 300], draws=1)
    worlds = stages_of(tasks, draws, space)
    search_results(worlds, space, PlanOptions(clock=lambda: 0.0, additional=(), effort=Effort(share=1.0)))
    assert ("samullm" in asked_for) is waits


def test_algorithm_1_is_paid_for_where_it_is_looked_at_and_else_is_for_comparison_alone():
    tasks, draws, space = chained([400, 300])

    def found(share):
        ticks = itertools.count()
        requested = PlanOptions(clock=lambda: float(next(ticks)), effort=Effort(share=share))
        return {one.name: one for one in search_results(stages_of(tasks, draws, space), space, requested)}

    poor, rich = found(0.0), found(1.0)
    assert list(poor) == list(rich) == ["lengthwise", *METHODS]
    paid = {name: rich[name].elapsed_s + rich[name].cost_s for name in METHODS}
    assert rich["lengthwise"].elapsed_s > paid["samullm"] + paid["min"]
    assert poor["lengthwise"].cost_s < rich["lengthwise"].cost_s - rich["samullm"].cost_s


def test_what_others_had_simulated_before_is_no_gift():
    tasks, draws, space = made([200, 150])
    name = "samullm_no_preemption"

    def found(*others):
        requested = PlanOptions(method=name, additional=others, clock=_Ticks())
        return {one.name: one for one in search_results(stages_of(tasks, draws, space), space, requested)}[name]

    alone, after = found(), found("samullm")
    assert after.planned == alone.planned
    assert after.elapsed_s < alone.elapsed_s, "most of it was there already"
    # A run that is simulated reads the clock twice, and takes one tick of it.
    assert after.search_s - after.elapsed_s == (alone.elapsed_s - after.elapsed_s) / 2
    assert alone.search_s == alone.elapsed_s


class _Ticks:
    """A clock that goes on by one whenever it is read."""

    def __init__(self):
        self._ticks = itertools.count()

    def __call__(self):
        return float(next(self._ticks))


@pytest.mark.parametrize("counts", [[20], [30, 10, 5], [200, 150], [500, 400, 300, 600]])
def test_end_to_end_nothing_is_lost_by_having_looked(counts):
    """In counted seconds: as those of a clock, but the same on every machine."""
    found, _ = looked(counts)
    whole_s = found["lengthwise"].planned_s + found["lengthwise"].cost_s
    for name in METHODS:
        assert found[name].planned_s + found[name].cost_s >= 0.995 * whole_s, name


def test_a_slow_clock_changes_no_plan():
    tasks, draws, space = made([120, 60, 200])
    args = (tasks, draws, served(3), space.cluster)
    ticks = itertools.count()
    slow = plan(*args, options=PlanOptions(clock=lambda: 1000.0 * next(ticks)))
    assert slow.planned == plan(*args, options=PlanOptions(clock=lambda: 0.0)).planned


def test_a_plan_that_is_hardly_sooner_than_a_quick_ways_is_not_taken_for_it():
    """On draws that were not planned with it would be as late, and what it cost is gone."""
    for counts in ([300], [500, 400, 300, 600], [100, 100, 100, 100]):
        found, _ = looked(counts)
        quick = min((found[name] for name in ("min", "min_no_preemption")), key=lambda one: one.planned_s)
        best = found["lengthwise"]
        sooner = best.planned_s < quick.planned_s * (1 - MIN_SHARE)
        less = loaded_gpus(best.planned) < loaded_gpus(quick.planned)
        assert best.planned == quick.planned or sooner or less


def started(tasks, draws, space, **options):
    """The first plan that the search reports, and what each method finds."""
    reported = []
    worlds = stages_of(tasks, draws, space)
    options = {"clock": _Ticks(), "additional": ("max", "min", "samullm"), **options}
    found = search_results(worlds, space, PlanOptions(**options), reported.append)
    (first,) = reported
    return first, {one.name: one for one in found}


@pytest.mark.parametrize(("make", "counts"), [(made, [400, 300, 500]), (made, [90, 40]), (chained, [300, 300])])
def test_what_begins_as_at_first_sight_costs_no_more_time_than_that(make, counts):
    first, found = started(*make(counts))
    own = found[DEFAULT]
    assert first.lead_s == first.search_s
    if own.planned[:1] == first.planned[:1]:
        assert own.lead_s == first.lead_s < own.search_s
    else:
        assert own.lead_s == own.search_s


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(5, 300), min_size=1, max_size=4),
    gpus=st.sampled_from([2, 4]),
    seed=st.integers(0, 1000),
)
def test_end_to_end_nothing_is_sooner_but_by_what_is_chance(counts, gpus, seed):
    tasks, draws, space = made(counts, seed=seed, draws=1, gpus=gpus)
    first, found = started(tasks, draws, space, clock=lambda: 0.0)
    own = found[DEFAULT]
    alike = own.planned[:1] == first.planned[:1]
    lead_s = first.cost_s if alike else own.cost_s
    for one in found.values():
        assert (own.planned_s + lead_s) <= (one.planned_s + one.cost_s) * (1.0 + CHANGE_SHARE) + 0.02


def test_engines_that_start_are_given_up_for_a_plan_that_is_worth_it_alone(monkeypatch):
    tasks, draws, space = made([300, 300], draws=1)
    (world,) = stages_of(tasks, draws, space)
    alone = tuple((plan,) for plan in (space.plans(0)[0], space.plans(1)[0]))
    companion = ((space.plans(0)[0], space.plans(1)[0]),)

    def chosen(gain):
        search = Search([world], space, PlanOptions(clock=lambda: 0.0))
        search.scores = {alone: 100.0, companion: 100.0 * (1.0 - gain)}
        first = MethodPlan(DEFAULT, alone, 100.0, 0.1, 0.0, 0.1, 0.1)
        best = MethodPlan(DEFAULT, companion, 100.0 * (1.0 - gain), 0.5, 0.0, 0.5, 0.5)
        return search.overlapped(first, best)

    assert chosen(2 * CHANGE_SHARE).planned == companion
    assert chosen(2 * CHANGE_SHARE).lead_s == 0.5
    assert chosen(CHANGE_SHARE / 2).planned == alone
    assert chosen(CHANGE_SHARE / 2).lead_s == 0.1


def test_more_samples_choose_between_plans_that_are_nearly_as_good():
    """As in routing on eight GPUs, where three samples chose a plan that was 0.9 % slower than the min-heuristic's."""
    tasks, draws, space = made([300, 200], draws=7)
    first, *more = stages_of(tasks, draws, space)
    narrow, wide = (tuple((space.plans(m)[k],) for m in (0, 1)) for k in (0, -1))
    ends_s = {one: np.mean([simulate_plan(s, one, ()).end_s for s in (first, *more)]) for one in (narrow, wide)}
    slow, fast = sorted(ends_s, key=ends_s.get, reverse=True)
    assert ends_s[slow] > 1.01 * ends_s[fast]

    def chosen(lead, more):
        search = Search([first], space, PlanOptions(clock=lambda: 0.0, effort=Effort(share=1.0)))
        search.scores = {slow: 100.0, fast: 100.0 * (1 + lead)}
        return search.best_finalist(MethodPlan(DEFAULT, slow, 100.0, 0.1, 0.0, 0.1, 0.1), iter(more))

    found = chosen(FINALIST_SHARE / 2, more)
    assert found.planned == fast
    assert found.cost_s > 0
    assert chosen(FINALIST_SHARE / 2, ()).planned == slow, "there is nothing to compare them on"
    assert chosen(FINALIST_SHARE * 2, more).planned == slow, "the few samples suffice"


def test_planning_that_outlasts_the_first_stage_holds_the_run_up():
    tasks, draws, space = made([60, 40], draws=1, gpus=2)
    reported = []
    ticks = itertools.count()
    slow = PlanOptions(clock=lambda: 1e6 * next(ticks), additional=())
    complete = plan(tasks, draws, space.models, space.cluster, options=slow, begin=reported.append)
    (own,) = complete.methods
    (first,) = reported
    assert first.planned[:1] == complete.planned[:1]
    assert own.lead_s == own.search_s - complete.stages[0].end_s > first.search_s


def test_makespans_carry_the_cost_models_error_and_what_ifs_share_it():
    tasks, draws, space = made([150, 200], draws=1)
    options = PlanOptions(additional=(), clock=lambda: 0.0, model_draws=16)
    problem = tasks, draws, space.models, space.cluster
    found = plan(*problem, options=options)
    own = found.makespan
    assert own.model_low < own.value < own.model_high
    assert plan(*problem, options=PlanOptions(additional=(), clock=lambda: 0.0)).makespan.value == own.value
    assert "draws" not in json.loads(plan_json(found))["makespan"]
    changes = {one.name: one for one in what_if(*problem, found, options=options)}
    disk = changes["disk_twice_as_fast"]
    assert disk.makespan.has_model_interval
    width_s = disk.difference.model_high - disk.difference.model_low
    assert width_s < 0.2 * (own.model_high - own.model_low), "the disk changes what the cost model does not estimate"
    assert changes["island_minus_2"].difference.model_low > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 10, 44, 53, 59])
def test_one_gpu_more_gives_no_slower_plan(seed):
    """Local improvement alone ended in a worse optimum on these: up to 15 % later with eight GPUs than with seven."""
    rng = np.random.default_rng(seed)
    counts = [int(n) for n in rng.integers(20, 1500, int(rng.integers(1, 6)))]
    tasks, first = ensemble(counts, rng)
    options = PlanOptions(additional=(), clock=lambda: 0.0)
    ends = [
        plan(tasks, [first], served(len(counts)), cluster_of(gpus), options=options).makespan.value
        for gpus in range(1, 9)
    ]
    assert all(later <= before * 1.001 for before, later in itertools.pairwise(ends)), ends
