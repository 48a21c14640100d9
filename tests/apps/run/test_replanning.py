"""A run whose lengths differ from the planned ones is replanned and ends earlier, without false alarms."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from plan_world import FAST_DISK, cluster_of, served, tasks_of
from simulated_world import World, fresh
from simulated_world import plan as model_plan

from lengthwise.apps.launch import Lengths, SimulatedLauncher
from lengthwise.apps.ledger import State
from lengthwise.apps.plan import PlanOptions, Space, plan
from lengthwise.apps.plan.draws import draw
from lengthwise.apps.run import (
    ClusterPlacer,
    DrawDecider,
    Planned,
    RunTasks,
    Settings,
    expected_tokens,
    job_of,
    run_plan_of,
    run_simulated,
)
from lengthwise.apps.run.replanning import (
    LengthDistribution,
    ObservedLengths,
    Replanner,
    has_changed,
    observed_lengths,
    remaining,
    updated,
)
from lengthwise.schema.app import Coins
from lengthwise.schema.errors import DoesNotFitError

LONGEST = 2048


class Geometric:
    """Lengths with this mean."""

    def __init__(self, mean):
        self.mean = mean

    def quantile(self, level):
        return np.maximum(np.ceil(np.log1p(-np.asarray(level)) / np.log1p(-1 / self.mean)), 1.0)


def world(counts, parents=()):
    return tasks_of([m for m, n in enumerate(counts) for _ in range(n)], most=1500, parents=parents)


@cache
def planned(counts, means):
    """(tasks, draws, space, plan) of models with so many requests whose answers are so long on average."""
    tasks = world(counts)
    lengths, longest = [Geometric(mean) for mean in means], [LONGEST] * len(means)
    space = Space(served(len(means), "opt-1.3b", "llama-2-13b"), cluster_of(4), FAST_DISK)
    draws, truth = ([draw(tasks, lengths, longest, (kind, k)) for k in range(n)] for kind, n in ((0, 2), (1, 8)))
    options = PlanOptions(additional=())
    made = plan(tasks, draws, space.models, space.cluster, true_draws=truth, times=FAST_DISK, options=options)
    return tasks, draws, space, made


def ran(tmp_path, counts, means, *, true=None, seed=0, replans=3, monitor=None):
    """The end of a run that was planned with lengths of these means, and may have others."""
    tasks, draws, space, made = planned(counts, means)
    longest = [LONGEST] * len(means)
    comes = draw(tasks, [Geometric(mean) for mean in true or means], longest, (2, seed))
    work = RunTasks(tasks, DrawDecider(tasks, comes), expected_tokens(draws), "drifts")
    placer = ClusterPlacer(space.cluster, space.seconds)
    job = job_of(work, Planned(run_plan_of(made), placer), Settings(replans=replans))
    lengths = [Geometric(mean) for mean in means]
    anew = Replanner(job.layout.tasks, lengths, longest, space, made.planned, made.reserve)
    launcher = SimulatedLauncher(tasks.models, space.deployment, Lengths.of(tasks, comes), space.seconds)
    with fresh(tmp_path, f"{seed}-{replans}") as ledger:
        return run_simulated(replace(job, replan=anew), ledger, launcher, monitor=monitor)


def reported(completed, what):
    return [event.description for event in completed.events if event.what == what]


MOVED = {
    "four models, one much longer": ((1000, 1000, 1000, 1000), (100, 100, 100, 100), (100, 100, 100, 1000)),
    "the long one is short, a short one long": ((4000, 2000, 2000), (300, 60, 60), (60, 60, 400)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MOVED))
def test_much_longer_answers_trigger_replanning_which_finishes_earlier(tmp_path, name):
    counts, means, true = MOVED[name]
    retained = ran(tmp_path, counts, means, true=true, replans=0)
    anew = ran(tmp_path, counts, means, true=true)
    assert not reported(retained, "replan")
    assert not reported(retained, "keep")
    assert 1 <= len(reported(anew, "replan")) <= 3
    assert "answers are not as long as planned" in reported(anew, "replan")[0]
    assert anew.of(State.DONE) == retained.of(State.DONE) == sum(counts)
    assert anew.seconds < 0.9 * retained.seconds


@pytest.mark.slow
def test_the_remaining_time_follows_the_new_plan(tmp_path):
    """By the lengths of the first plan almost all is done when the long answers have hardly started."""
    counts, means, true = MOVED["four models, one much longer"]
    seen = []
    finished = ran(tmp_path, counts, means, true=true, monitor=seen.append)
    (anew_s, *_) = [event.at_s for event in finished.events if event.what == "replan"]
    later = [one for one in seen if one.left_s and anew_s < one.at_s < 0.9 * finished.seconds]
    assert later
    for one in (later[0], later[len(later) // 2]):
        assert one.at_s + one.left_s[0] == pytest.approx(finished.seconds, rel=0.35)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(300, 300), (400, 200, 200)])
def test_lengths_as_planned_trigger_no_replanning(tmp_path, counts):
    """Over 30 draws; the share that is stated for lengths is 1 % of runs."""
    ends = [ran(tmp_path, counts, (100,) * len(counts), seed=seed) for seed in range(30)]
    alarms = [about for finished in ends for about in reported(finished, "replan") + reported(finished, "keep")]
    assert not [about for about in alarms if "as long as planned" in about]
    assert not [about for finished in ends for about in reported(finished, "replan")]


@pytest.mark.slow
def test_replanning_happens_at_most_as_often_as_allowed(tmp_path):
    counts, means, true = MOVED["four models, one much longer"]
    finished = ran(tmp_path, counts, means, true=true, replans=1)
    assert len(reported(finished, "replan")) == 1


def cut_off(rng, mean, n, longest=800):
    """What is seen of answers of this mean, each looked at when it has a random number of tokens."""
    tokens = Geometric(mean).quantile(rng.random(n))
    looked = rng.integers(1, longest, n)
    return ObservedLengths(tokens[tokens <= looked], looked[tokens > looked].astype(float))


def test_lengths_as_planned_are_rarely_reported_as_changed_and_others_always():
    rng, prior = np.random.default_rng(1), LengthDistribution.of(Geometric(120))
    message = [has_changed(prior, cut_off(rng, 120, n), 0.05) for n in (30, 300, 3000) for _ in range(400)]
    assert np.mean(message) <= 0.05
    assert all(has_changed(prior, cut_off(rng, mean, 600), 1e-4) for mean in (70, 200) for _ in range(50))


@pytest.mark.parametrize("mean", [60, 120, 500])
def test_lengths_are_put_right_by_answers_that_are_cut_off(mean):
    """Short answers end first: their mean alone would be far too small."""
    rng, prior = np.random.default_rng(2), LengthDistribution.of(Geometric(120))
    seen = cut_off(rng, mean, 4000, longest=200)
    assert updated(prior, seen).mean(1500) == pytest.approx(mean, rel=0.2)
    if mean == 500:
        assert seen.completed.mean() < 0.3 * mean


def test_where_nothing_was_seen_what_was_planned_with_stays():
    prior = LengthDistribution.of(Geometric(120))
    same = updated(prior, ObservedLengths(np.zeros(0), np.zeros(0)))
    assert same.values.tolist() == prior.values.tolist()
    assert same.survival == pytest.approx(prior.survival)


def test_the_remaining_work_excludes_finished_tasks_and_continues_from_existing_tokens():
    tasks = replace(
        tasks_of([0, 1, 0, 1], parents=[(1, 0), (3, 2)]),
        random_draw=np.array([-1, 0, -1, 0]),
        coins=Coins(np.array([0.5]), np.array([-1])),
    )
    finished = [(0, State.DONE, 30, 77), (3, State.DONE, 40, 10), (2, State.DONE, 30, 9)]
    rest = remaining(tasks, finished, {1: 12})
    assert rest.tasks.model.tolist() == [1]
    assert rest.tasks.prompt_tokens.tolist() == [30 + 77 + 12]
    assert rest.tasks.max_tokens.tolist() == [512 - 12]
    assert rest.tasks.parent.tolist() == []
    assert rest.tasks.coins.chance.tolist() == [1.0]
    spreads = [LengthDistribution.of(Geometric(60)), LengthDistribution.of(Geometric(60))]
    one = rest.draw(spreads, [LONGEST] * 2, 3)
    assert one.present.tolist() == [True]
    assert 1 <= one.output_tokens[0] <= 500
    seen = observed_lengths(tasks, finished, {1: 12}, [LONGEST] * 2)
    assert [sorted(one.completed.tolist()) for one in seen] == [[9.0, 77.0], [10.0]]
    assert [one.censored.tolist() for one in seen] == [[], [12.0]]


def test_where_no_plan_can_be_made_the_run_goes_on_by_the_one_it_has(tmp_path):
    world = World(tasks_of([0] * 40 + [1] * 40), [(model_plan(0),), (model_plan(1),)])
    run_plan = replace(world.run_plan, ends_s=(0.5, 1.0))

    def broken(deviation):
        raise DoesNotFitError("model m0 fits no GPUs")

    with fresh(tmp_path) as ledger:
        finished = world.run(ledger, run_plan=run_plan, replan=broken)
    assert finished.of(State.DONE) == 80
    assert any("model m0 fits no GPUs" in about for about in reported(finished, "keep"))
    assert not reported(finished, "replan")


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [0.0, 500.0])
def test_an_engine_that_loads_longer_than_planned_is_no_reason_to_replan(tmp_path, late_s):
    """The plan's clock stands still while an engine is overdue: the work itself takes as long as planned."""
    world = World(tasks_of([0] * 2000 + [1] * 2000), [(model_plan(0),), (model_plan(1),)], gpus=1, mean=200.0)
    world.seconds = lambda _, how: 20.0 + late_s if how == "start" else 0.0
    world.planned_seconds = lambda _, how: 20.0 if how == "start" else 0.0
    seen = []
    with fresh(tmp_path, "planned") as ledger:
        seconds = world.run(ledger).seconds - 2 * late_s
    for name, factor, expected in (("planned", 1.0, False), ("slow", 0.5, True)):
        seen.clear()
        run_plan = replace(world.run_plan, ends_s=(factor * seconds / 2, factor * seconds))
        with fresh(tmp_path, name + "again") as ledger:
            world.run(ledger, run_plan=run_plan, replan=lambda deviation: seen.append(deviation.is_off_time))
        assert any(seen) is expected, name
