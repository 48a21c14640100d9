"""Runs in virtual time that tests share."""

from __future__ import annotations

import numpy as np
from plan_world import cluster_of, draw_of, served, tasks_of

from lengthwise.apps.launch import Lengths, SimulatedLauncher
from lengthwise.apps.ledger import open_ledger
from lengthwise.apps.plan.space import Space
from lengthwise.apps.run import (
    ClusterPlacer,
    DrawDecider,
    Job,
    RunPlan,
    Settings,
    identity_of,
    ledger_layout,
    new_owner,
    run_simulated,
)
from lengthwise.schema.app import ModelPlan

GPU = "A100-80GB"


def plan(model, dp=1, tp=1):
    return ModelPlan(model, GPU, dp, tp)


class World:
    """Tasks, a draw and a plan on a cluster; ``run`` plays them."""

    def __init__(self, tasks, stages, *, gpus=4, seed=0, draw=None, reserve=(), mean=60.0, seconds=None):
        rng = np.random.default_rng(seed)
        self.tasks = tasks
        self.draw = draw or draw_of(tasks, rng, mean=mean)
        self.space = Space(served(len(tasks.models), "opt-1.3b"), cluster_of(gpus))
        self.run_plan = RunPlan(tuple(stages), reserve)
        self.seconds = seconds or (lambda plan, how: {"start": 20.0, "wake": 2.0, "stop": 1.0, "sleep": 0.5}[how])
        self.layout = ledger_layout(tasks, np.full(len(tasks), mean))
        self.expected = np.full(len(tasks), mean)
        self.sleeps = lambda _: False
        self.planned_seconds = self.seconds  # of loading, by the plan

    def job(self, **more):
        retained = {
            "decider": DrawDecider(self.tasks, self.draw),
            "identity": identity_of("app", self.layout),
            "owner": new_owner(),
            "settings": Settings(),
            "run_plan": self.run_plan,
        } | more
        return Job(
            layout=self.layout,
            expected_tokens=self.expected,
            placer=ClusterPlacer(self.space.cluster, self.planned_seconds),
            **retained,
        )

    def launcher(self):
        return SimulatedLauncher(
            self.tasks.models, self.space.deployment, Lengths.of(self.tasks, self.draw), self.seconds, self.sleeps
        )

    def run(self, ledger, *, launcher=None, monitor=None, watch_s=5.0, from_s=0.0, started=None, **more):
        return run_simulated(
            self.job(**more),
            ledger,
            launcher or self.launcher(),
            monitor=monitor,
            from_s=from_s,
            watch_s=watch_s,
            started=started,
        )


def fresh(tmp_path, name="ledger.sqlite"):
    return open_ledger(tmp_path / name)


__all__ = ["World", "fresh", "plan", "tasks_of"]
