"""Clusters, models and tasks that tests of the planner share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lengthwise import catalog
from lengthwise.apps.plan.space import Served, SwitchRates, SwitchTimes
from lengthwise.schema.app import Cluster, Machine, TaskDraw, Tasks

FAST_DISK = SwitchTimes(rates=SwitchRates(engine_start_s=7.0, disk_bytes_per_s=3.7e9))
"""Loading that is short beside the work of small tests."""


def cluster_of(*gpus, group=2, kinds=("A100-80GB",)):
    """Machines of so many GPUs, in islands of ``group``; kinds go round."""
    node = replace(catalog.node("dgx-a100"), link_group=group)
    return Cluster(
        tuple(
            Machine(replace(catalog.gpu("A100-80GB"), name=kinds[i % len(kinds)]), replace(node, gpus=n), n)
            for i, n in enumerate(gpus)
        )
    )


def tasks_of(models, *, prompt=30, most=512, known=None, parents=()):
    """Tasks of the models in this order, one each entry, with ``parents`` as (child, parent) pairs."""
    n, k = len(models), max(models) + 1
    pairs = sorted(parents)
    child = np.array([c for c, _ in pairs], np.int64)
    zeros = np.zeros(n, np.int64)
    return Tasks(
        calls=tuple(f"c{m}" for m in range(k)),
        models=tuple(f"m{m}" for m in range(k)),
        call=np.array(models, np.int64),
        model=np.array(models, np.int64),
        row=np.arange(n),
        round=zeros,
        index=zeros,
        prompt_tokens=np.full(n, prompt, np.int64),
        max_tokens=np.full(n, most, np.int64),
        known_tokens=zeros,
        parent_start=np.searchsorted(child, np.arange(n + 1)).astype(np.int64),
        parent=np.array([p for _, p in pairs], np.int64),
        shown=np.ones(len(pairs), np.int64),
        random_draw=np.full(n, -1, np.int64),
    )


def draw_of(tasks, rng, *, mean=120.0, most=512):
    """Geometric outputs; prompts grow by what parents put into them."""
    n = len(tasks)
    output = np.minimum(rng.geometric(1 / mean, n), most).astype(np.int64)
    prompt = tasks.prompt_tokens.copy()
    child = np.repeat(np.arange(n), np.diff(tasks.parent_start))
    np.add.at(prompt, child, output[tasks.parent] * tasks.shown)
    return TaskDraw(np.ones(n, bool), np.minimum(prompt, 3000), output)


def ensemble(counts, rng, **kw):
    """(tasks, draw) of independent models with so many requests each."""
    tasks = tasks_of([m for m, n in enumerate(counts) for _ in range(n)])
    return tasks, draw_of(tasks, rng, **kw)


def served(n, *names):
    """So many models of these shapes in turn, small ones by default."""
    names = names or ("opt-6.7b", "llama-2-13b", "opt-1.3b")
    return [Served(f"m{i}", names[i % len(names)]) for i in range(n)]
