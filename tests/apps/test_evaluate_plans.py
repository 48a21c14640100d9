"""The room's door: plans, what they take over draws, what GPUs do meanwhile, and what else would bring."""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import cluster_of, draw_of, ensemble, served

from lengthwise.apps.plan import (
    METHODS,
    Effort,
    PlanOptions,
    SwitchTimes,
    plan,
    what_if,
    write_plan,
    write_switch_times,
)
from lengthwise.apps.plan.evaluate import simulate_plan, stages_of
from lengthwise.apps.plan.planner import MIN_SHARE
from lengthwise.apps.plan.space import Space, SwitchRates
from lengthwise.catalog import model, weight_bytes
from lengthwise.config.app_file import read_plan
from lengthwise.schema.app import ModelPlan
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.estimate import Estimate

SMALL = Effort(width=2, beam_tasks=2e5, improve_tasks=1e5)


def asked_of(counts, seed=0, draws=2, true=3, gpus=4, **kw):
    rng = np.random.default_rng(seed)
    tasks, first = ensemble(counts, rng)
    more = [draw_of(tasks, rng) for _ in range(draws - 1 + true)]
    requested = PlanOptions(effort=SMALL, clock=lambda: 0.0, **kw)
    args = (tasks, [first, *more[: draws - 1]], served(len(counts)), cluster_of(gpus))
    return args, {"true_draws": more[draws - 1 :], "options": requested}


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(0, 2), st.sampled_from([None, 0.5, 0.9]))
def test_the_default_is_never_worse_than_any_other_on_the_draws_planned_with(counts, seed, quantile):
    """Of all that it can afford; of the others it takes what saves more than it costs."""
    args, more = asked_of(counts, seed, quantile=quantile)
    reported = plan(*args, **more)
    scores = {one.name: one.planned_s for one in reported.methods}
    assert set(scores) == {"lengthwise", *METHODS}
    assert scores["lengthwise"] <= min(scores["min"], scores["min_no_preemption"]) + 1e-9
    assert scores["lengthwise"] <= min(scores.values()) * 1.02
    rich = replace(more["options"], effort=replace(SMALL, share=1.0))
    scores = {one.name: one.planned_s for one in plan(*args, **{**more, "options": rich}).methods}
    assert scores["lengthwise"] <= min(scores.values()) / (1 - MIN_SHARE)


@settings(max_examples=10)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.sampled_from(["samullm", "min", "lengthwise"]))
def test_spans_cover_every_gpu_and_second_once_and_idle_time_adds_up(counts, method):
    args, more = asked_of(counts, method=method, additional=())
    reported = plan(*args, **more)
    end_s = reported.stages[-1].end_s
    for gpu in range(4):
        own = [s for s in reported.spans if s.gpu == gpu]
        assert own[0].start_s == 0.0
        assert own[-1].end_s == end_s
        assert all(a.end_s == b.start_s for a, b in itertools.pairwise(own))
    ran = sum(s.end_s - s.start_s for s in reported.spans if s.what == "run")
    assert ran + sum(reported.idle_s.values()) == pytest.approx(4 * end_s)
    assert reported.idle_s["load"] > 0
    assert reported.stages[0].start_s == 0.0
    assert all(a.end_s == b.start_s for a, b in zip(reported.stages, reported.stages[1:], strict=False))


def test_a_replica_is_shown_to_load_until_it_is_ready_over_the_ends_of_stages():
    args, more = asked_of([50, 400, 3], gpus=4, method="min", additional=())
    reported = plan(*args, **more)
    over = [(stage, one) for stage in reported.stages for one in stage.switches
            if stage.start_s + one.seconds > stage.end_s]  # fmt: skip
    assert over
    for stage, one in over:
        until_s = stage.start_s + one.seconds
        ran = [s for s in reported.spans if s.gpu in one.replica and s.what == "run" and s.start_s >= stage.start_s]
        assert all(s.start_s >= until_s - 1e-9 for s in ran if s.model == one.model)


def test_the_same_input_gives_the_same_plan_and_the_makespan_is_of_draws_that_were_not_planned_with():
    args, more = asked_of([120, 60, 200])
    reported, again = plan(*args, **more), plan(*args, **more)
    assert reported == again
    assert len(reported.makespans_s) == 3
    assert reported.makespan.value == pytest.approx(np.mean(reported.makespans_s))
    assert reported.makespan.half_width > 0
    assert reported.quantiles_s[0.05] <= reported.quantiles_s[0.5] <= reported.quantiles_s[0.95]
    assert reported.tokens == tuple(int(args[1][0].output_tokens[args[0].model == m].sum()) for m in range(3))
    assert any("assumed" in note for note in reported.notes)


@pytest.mark.slow
def test_more_gpus_help_and_a_faster_disk_saves_loading():
    args, more = asked_of([400, 300, 500], true=4)
    reported = plan(*args, **more)
    found = {one.name: one for one in what_if(*args, reported, **more)}
    assert set(found) == {"island_plus_2", "gpus_plus_1", "island_minus_2", "disk_twice_as_fast"}
    assert found["island_plus_2"].difference.value < 0 < found["island_minus_2"].difference.value
    assert found["island_plus_2"].difference.value < found["gpus_plus_1"].difference.value <= 0
    assert found["disk_twice_as_fast"].difference.value < 0
    for one in found.values():
        assert one.makespan.value - reported.makespan.value == pytest.approx(one.difference.value)


def test_invalid_planning_input_is_reported():
    args, more = asked_of([5])
    with pytest.raises(InputError, match="at least one draw"):
        plan(args[0], [], *args[2:])
    with pytest.raises(InputError, match="a model for each"):
        plan(*args[:2], [], args[3])
    with pytest.raises(UnknownNameError, match="samullm"):
        plan(*args, options=replace(more["options"], method="samulm"))
    with pytest.raises(InputError, match="quantile"):
        plan(*args, options=replace(more["options"], quantile=1.0))


def test_assumed_switch_times_are_near_those_of_the_paper():
    def start_s(name):
        return SwitchTimes().seconds(name, weight_bytes(model(name)), ModelPlan(0, "A100-80GB", 1, 1), "start")

    assert start_s("llama-2-13b") == pytest.approx(30, rel=0.1)  # section 2: 30 s estimated, 35 s measured
    assert start_s("opt-6.7b") == pytest.approx(11, rel=0.5)  # section 5.1: 11 s, of the smallest of nine models

    assert SwitchRates().seconds(13e9, 1, "wake") < 1


def test_measured_switch_times_are_written_and_used(tmp_path):
    table = {('a "b"', "G", 2, 1, "start"): 12.25, ('a "b"', "G", 2, 1, "wake"): 0.5, ("c", "G", 1, 2, "start"): 3.0}
    times = SwitchTimes(table)
    write_switch_times(tmp_path / "times.toml", times)
    rows = tomllib.loads((tmp_path / "times.toml").read_text())["replica"]
    assert {(row["model"], row["gpu"], row["tp"], row["pp"], row["how"]): row["seconds"] for row in rows} == table
    plan_ = ModelPlan(0, "G", 3, 2, 1)
    assert times.seconds('a "b"', 1e9, plan_, "wake") == 0.5
    assert times.can_wake('a "b"', plan_)
    assert times.seconds("c", 1e9, ModelPlan(0, "G", 1, 1, 2), "wake") == 3.0  # it does not sleep
    with pytest.raises(UnknownNameError):
        times.seconds("c", 1e9, plan_, "hop")


def test_engines_that_sleep_are_woken_where_they_are_and_that_is_sooner():
    args, more = asked_of([400, 300, 500], gpus=2, method="samullm", additional=())
    cold = plan(*args, **more, times=SwitchTimes())
    warm = plan(*args, **more, times=SwitchTimes(wakes=True))
    ways = [s.how for stage in warm.stages for s in stage.switches]
    assert {s.how for stage in cold.stages for s in stage.switches} == {"start"}
    if "wake" in ways:
        assert warm.idle_s["load"] < cold.idle_s["load"]


def test_a_model_that_had_nothing_to_do_when_it_was_planned_runs_when_it_has():
    args, more = asked_of([50, 80])
    tasks, draws, models, cluster = args
    without = [replace(one, present=one.present & (tasks.model == 0)) for one in draws]
    reported = plan(tasks, without, models, cluster, **more)
    assert {p.model for plans in reported.planned for p in plans} == {0}
    assert [p.model for p in reported.reserve] == [1]
    both = plan(*args, **more)
    assert reported.makespan.value >= both.makespan.value * 0.99  # it ran, though behind the plan


def test_gpus_of_two_kinds_in_two_machines_take_plans_of_their_own():
    args, more = asked_of([200, 150, 100], method="lengthwise", additional=("samullm", "min"))
    cluster = cluster_of(2, 2, kinds=("A100-80GB", "other"))
    reported = plan(*args[:3], cluster, **more)
    kinds = [cluster.machines[int(m)].gpu.name for m in cluster.machine_of]
    for stage in reported.stages:
        for p in stage.plans:
            assert all(kinds[g] == p.gpu for r in stage.placement[p.model] for g in r)
    assert {p.gpu for stage in reported.stages for p in stage.plans} == {"A100-80GB", "other"}


def test_runs_that_were_forgotten_are_simulated_again_to_the_same_plan(monkeypatch):
    args, more = asked_of([120, 60, 200], method="samullm", additional=())
    reported = plan(*args, **more)
    monkeypatch.setattr("lengthwise.apps.plan.stages.MAX_CACHED_TASKS", 300)
    assert plan(*args, **more) == reported


def test_a_plan_comes_back_from_its_file(tmp_path):
    args, more = asked_of([60, 90])
    reported = plan(*args, **more)
    reported = replace(reported, what_ifs=what_if(*args, reported, **more))
    write_plan(tmp_path / "plan.json", reported)
    assert read_plan(tmp_path / "plan.json") == reported
    one = replace(reported, makespan=Estimate(1.0))
    write_plan(tmp_path / "plan.json", one)
    assert not read_plan(tmp_path / "plan.json").makespan.has_interval
    for text in ("{}", "[]", "nothing", '{"format": "lengthwise application plan 1"}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InputError, match="plan"):
            read_plan(tmp_path / "bad.json")


def test_where_a_changed_plan_restarts_all_replicas_growing_one_costs_a_start():
    args, _ = asked_of([200, 900], true=1)
    grown = ((ModelPlan(0, "A100-80GB", 1), ModelPlan(1, "A100-80GB", 1)), (ModelPlan(1, "A100-80GB", 2),))
    ends = {}
    for restarts_all in (False, True):
        space = Space(args[2], args[3], SwitchTimes(restarts_all=restarts_all))
        run = simulate_plan(stages_of(args[0], args[1][:1], space)[0], grown, ())
        ends[restarts_all] = run.end_s
        assert [one.how for one in run.stages[1].switches] == ["start"] * (2 if restarts_all else 1)
    start_s = Space(args[2], args[3]).seconds(grown[1][0], "start")
    assert ends[False] < ends[True] <= ends[False] + start_s
