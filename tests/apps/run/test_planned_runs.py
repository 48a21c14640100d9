"""A plan made and run: the coordinator in virtual time takes as long as the planner predicts, by the same rule."""

from __future__ import annotations

import numpy as np
import pytest
from plan_world import FAST_DISK, cluster_of, draw_of, ensemble, served, tasks_of
from simulated_world import fresh

from lengthwise.apps.launch import Lengths, SimulatedLauncher
from lengthwise.apps.ledger import State
from lengthwise.apps.plan import PlanOptions, Space, SwitchTimes, plan
from lengthwise.apps.run import (
    ClusterPlacer,
    DrawDecider,
    Planned,
    RunTasks,
    expected_tokens,
    job_of,
    run_plan_of,
    run_simulated,
)


def independent(rng):
    return ensemble((900, 500, 700, 300), rng)


def crowded(rng):
    return ensemble((700, 500, 600, 400), rng, mean=300.0)


def chained(rng):
    tasks = tasks_of([0, 1, 2] * 120, parents=[(3 * i + j, 3 * i + j - 1) for i in range(120) for j in (1, 2)])
    return tasks, draw_of(tasks, rng)


def ran(tmp_path, tasks, draw, *, method="lengthwise", gpus=4, monitor=None, times=FAST_DISK):
    """(plan, end of the run) of one draw, planned with and run."""
    models, cluster = served(len(tasks.models), "opt-1.3b", "llama-2-13b"), cluster_of(gpus)
    made = plan(tasks, [draw], models, cluster, times=times, options=PlanOptions(method=method, additional=()))
    space = Space(models, cluster, times)
    placer = ClusterPlacer(cluster, space.seconds)
    work = RunTasks(tasks, DrawDecider(tasks, draw), expected_tokens([draw]), "planned")
    job = job_of(work, Planned(run_plan_of(made), placer))
    launcher = SimulatedLauncher(tasks.models, space.deployment, Lengths.of(tasks, draw), space.seconds, space.sleeps)
    tmp_path.mkdir(exist_ok=True)
    with fresh(tmp_path, method) as ledger:
        return made, run_simulated(job, ledger, launcher, monitor=monitor, watch_s=5.0)


@pytest.mark.parametrize("world", [independent, chained])
def test_a_run_of_one_model_after_another_takes_as_long_as_planned(tmp_path, world):
    tasks, draw = world(np.random.default_rng(5))
    made, finished = ran(tmp_path, tasks, draw, method="max")
    assert finished.of(State.DONE) == len(tasks)
    assert finished.seconds == pytest.approx(made.makespan.value, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("world", [independent, chained])
@pytest.mark.parametrize("method", ["lengthwise", "min", "samullm"])
@pytest.mark.parametrize("seed", [5, 6])
def test_a_run_takes_as_long_as_planned_where_replicas_join_late_too(tmp_path, world, method, seed):
    """Who stands goes on meanwhile, and who joins takes a share of what is left, in both."""
    tasks, draw = world(np.random.default_rng(seed))
    made, finished = ran(tmp_path, tasks, draw, method=method)
    assert finished.of(State.DONE) == len(tasks)
    assert finished.seconds == pytest.approx(made.makespan.value, rel=0.05)


@pytest.mark.parametrize(("method", "gpus"), [("lengthwise", 2), ("lengthwise", 8), ("min", 4), ("samullm", 4)])
def test_where_memory_is_short_it_is_a_little_off(tmp_path, method, gpus):
    """The planner takes an answer that had to make room as one that grows all the while."""
    tasks, draw = crowded(np.random.default_rng(13))
    made, finished = ran(tmp_path, tasks, draw, method=method, gpus=gpus)
    assert finished.of(State.DONE) == len(tasks)
    assert 0.93 * made.makespan.value < finished.seconds < 1.12 * made.makespan.value


def leaving(models, **seconds):
    """Switch times of one-GPU and two-GPU replicas: ready after 10 s, and the given seconds for other switches."""
    hows = {"start": 10.0, **seconds}
    return SwitchTimes(
        {(f"m{m}", "A100-80GB", tp, 1, how): s for m in range(models) for tp in (1, 2) for how, s in hows.items()}
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lengthwise", "max", "samullm"])
@pytest.mark.parametrize("seconds", [{"stop": 6.0}, {"stop": 3.0, "sleep": 4.0, "wake": 1.0}])
def test_engines_that_leave_are_waited_for_in_the_plan_as_in_the_run(tmp_path, method, seconds):
    tasks, draw = independent(np.random.default_rng(5))
    made, finished = ran(tmp_path, tasks, draw, method=method, gpus=2, times=leaving(4, **seconds))
    assert finished.of(State.DONE) == len(tasks)
    assert finished.seconds == pytest.approx(made.makespan.value, rel=0.05)


def test_each_engine_that_makes_room_for_another_delays_it_by_its_stop_and_the_last_ones_delay_nothing(tmp_path):
    tasks, draw = independent(np.random.default_rng(5))
    (at_once, ran_at_once), (later, ran_later) = (
        ran(tmp_path / str(s), tasks, draw, method="max", gpus=2, times=leaving(4, stop=s)) for s in (0.0, 6.0)
    )
    reported = [{round(one.seconds, 9) for one in stage.switches} for stage in later.stages]
    assert reported == [{10.0}, {16.0}, {16.0}, {16.0}]
    assert later.makespan.value == pytest.approx(at_once.makespan.value + 3 * 6.0)
    assert ran_later.seconds == pytest.approx(ran_at_once.seconds + 3 * 6.0, rel=1e-3)


def test_progress_never_goes_back_and_its_estimate_comes_true(tmp_path):
    tasks, draw = independent(np.random.default_rng(6))
    seen = []
    _, finished = ran(tmp_path, tasks, draw, monitor=seen.append)
    shares = [progress.share for progress in seen]
    assert shares == sorted(shares)
    assert {one.state for one in seen[-1].models} <= {"finished", "runs", "starts", "waits"}
    half = next(progress for progress in seen if progress.share > 0.5)
    assert half.at_s + half.left_s[0] == pytest.approx(finished.seconds, rel=0.3)
    assert half.left_s[1] <= half.left_s[0] <= half.left_s[2]
    done = [sum(one.completed for one in progress.models) for progress in seen]
    assert done == sorted(done)
    assert all(one.total == sum(one.states.values()) for progress in seen for one in progress.models)
