"""Runs on emulated engines, real processes that speak HTTP, that tests share."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
import urllib.request

import numpy as np
from plan_world import cluster_of, tasks_of

from lengthwise.apps.launch import EngineConfig, EngineTimeouts, LocalLauncher, TaskRequest
from lengthwise.apps.ledger import open_ledger
from lengthwise.apps.run import (
    ClusterPlacer,
    Coordinator,
    Job,
    RequestSpec,
    RunPlan,
    Settings,
    identity_of,
    ledger_layout,
    new_owner,
)
from lengthwise.schema.app import ModelPlan

GPU = "A100-80GB"
SERVER = f"{sys.executable} -m lengthwise.testing.engine_server --host {{host}} --port {{port}} --model {{name}}"
QUICK = Settings(backoff_s=0.05, max_backoff_s=0.2, lease_s=5.0, save_s=0.1, linger_s=0.02)


def plan(model, dp=1, tp=1):
    return ModelPlan(model, GPU, dp, tp)


class Prompts:
    """Chat for even tasks, completions for odd ones; a child's prompt contains the outputs of its parents."""

    def __init__(self, tasks, version="v1", most=40, lengths=None, poison=()):
        self.tasks, self.version, self.most, self.lengths = tasks, version, most, lengths
        self.poison = dict.fromkeys(poison)

    def decide(self, task, outputs):
        tasks = self.tasks
        message = [outputs(int(p)) for p in tasks.parent[tasks.parent_start[task] : tasks.parent_start[task + 1]]]
        length = f"<out:{self.lengths[task]}>" if self.lengths is not None else ""
        words = f"task {task} {self.version} {' '.join(one.text for one in message if one)}{length}"
        body = {"max_tokens": self.most, "temperature": 0}
        body |= {"messages": [{"role": "user", "content": words}]} if task % 2 == 0 else {"prompt": words}
        reported = json.dumps([tasks.models[tasks.model[task]], body], sort_keys=True)
        api = "chat" if task % 2 == 0 else "completions"
        return RequestSpec(hashlib.sha256(reported.encode()).hexdigest(), TaskRequest(task, api, body))


def chained(rows=6):
    """Two models: each row asks the first, then the second, then the first again."""
    parents = [(3 * i + j, 3 * i + j - 1) for i in range(rows) for j in (1, 2)]
    return tasks_of([0, 1, 0] * rows, parents=parents)


def job_of(tasks, stages, *, gpus=2, decider=None, words="app", **more):
    layout = ledger_layout(tasks, np.full(len(tasks), 30.0))
    return Job(
        layout=layout,
        expected_tokens=np.full(len(tasks), 30.0),
        decider=decider or Prompts(tasks),
        run_plan=RunPlan(tuple(stages)),
        placer=ClusterPlacer(cluster_of(gpus), lambda plan, how: {"start": 5.0, "wake": 1.0}[how]),
        identity=identity_of(words, layout),
        owner=new_owner(),
        settings=more.pop("settings", QUICK),
        **more,
    )


def local(tmp_path, names, *, max_num_seqs=4, command=SERVER, more="--fixed-s 0.002", timeouts=None, **fields):
    return LocalLauncher(
        [
            EngineConfig(name, served=name, max_num_seqs=max_num_seqs, command=f"{command} {more}", **fields)
            for name in names
        ],
        tmp_path / "logs",
        timeouts=timeouts or EngineTimeouts(ready_s=60.0, grace_s=3.0, stall_s=20.0, request_s=60.0),
    )


async def play(job, ledger, launcher, during=None, monitor=None):
    """A run on the loop of this test; ``during(coordinator, launcher)`` runs beside it."""
    one = Coordinator(job, ledger, launcher, now_s=time.time, monitor=monitor, watch_s=0.05)
    companion = asyncio.create_task(during(one, launcher)) if during else None
    try:
        return await one.run()
    finally:
        if companion is not None:
            companion.cancel()
            for error in await asyncio.gather(companion, return_exceptions=True):
                if isinstance(error, Exception):
                    raise error


def answers(ledger, layout):
    """Every task's state and answer, in the application's order."""
    by_place = ledger.rows(0, len(layout.tasks))
    return [(by_place[int(p)].state, by_place[int(p)].output) for p in layout.place_of]


def undisturbed(tmp_path, tasks, names=("m0", "m1"), decider=None, **fields):
    """The answers of an undisturbed run with both models side by side."""
    job = job_of(tasks, [tuple(plan(m) for m in range(len(names)))], decider=decider)
    with open_ledger(tmp_path / "undisturbed.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, local(tmp_path / "undisturbed", names, **fields)))
        assert finished.exit_code == 0
        return answers(ledger, job.layout)


def engines(launcher):
    """(url, pid) of the processes that run."""
    return [(engine.server.url, process.local.process.pid) for engine, process, _ in launcher.running.values()]


def dispatchers(coordinator):
    """The coordinator's dispatchers, one for each model."""
    return coordinator.dispatchers


def active_requests(coordinator):
    """Requests that run in engines now."""
    return sum(dispatcher.active for dispatcher in dispatchers(coordinator))


def writer(coordinator):
    """What writes the coordinator's ledger."""
    return coordinator.writer


def post(url, path, body):
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read())


def reported(url):
    """What an engine saw."""
    with urllib.request.urlopen(f"{url}/emulator/log", timeout=10) as answer:
        return json.loads(answer.read())


async def until(fact, max_s=60.0):
    """ModelDependencies for a fact."""
    async with asyncio.timeout(max_s):
        while not fact():  # noqa: ASYNC110 - facts of other processes
            await asyncio.sleep(0.01)
