"""Policies of a user: a plain function runs compiled and interpreted with the same result."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from pathlib import Path

import numpy as np
import pytest
from test_kernel_agrees import assert_same
from worlds import GPU, MODEL, NODE, cost_tables

from lengthwise import config, policy
from lengthwise.engine import simulate
from lengthwise.policy import CHUNKED, DECODES_WAIT, batching, memory, rank, router
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.workload import Workload
from lengthwise.usecases import variants

EXAMPLES = Path(__file__).parents[2] / "examples"


@rank
def response_ratio(now_s, arrival_s, predicted_tokens):
    """Highest response ratio first, which changes while requests wait."""
    return -(now_s - arrival_s) / max(predicted_tokens, 1.0)


response_ratio_now = dataclasses.replace(response_ratio, name="response_ratio_now", every_step=True)


@rank
def min_served(generated_tokens, prompt_tokens):
    """A level a doubling of what a request was given so far, as in a feedback queue."""
    level, quantum = 0, 16
    while prompt_tokens + generated_tokens > quantum:
        level, quantum = level + 1, 2 * quantum
    return level


@rank
def preempt_the_unlucky(last_preemption, admission, priority):
    return 3 * last_preemption - admission + 10.0 * priority


@batching
def small_steps(decodes, num_waiting, in_flight, token_budget, max_num_seqs):
    """Half the budget while a queue stands, one admission a step."""
    budget = token_budget // 2 if num_waiting > 4 else token_budget
    return min(1 + in_flight, max_num_seqs), max(budget - decodes, 1), CHUNKED


@batching
def prompts_alone(num_running, max_num_seqs):
    return max_num_seqs - num_running // 2, 1 << 40, DECODES_WAIT


@memory
def by_prediction(context_tokens, predicted_tokens, block_size, free_blocks, num_running):
    """Room for the whole predicted output, if there is; the prompt alone on an empty replica."""
    blocks = int(context_tokens + predicted_tokens + block_size - 1) // block_size
    if blocks <= free_blocks:
        return blocks
    return 0 if num_running == 0 else -1


@router
def fewest_of_three(request_number, draw_a, draw_b, waiting, running):
    best = request_number % len(waiting)
    for draw in (draw_a, draw_b):
        other = int(draw * len(waiting))
        if waiting[other] + running[other] < waiting[best] + running[best]:
            best = other
    return best


def world(scheduler, replicas=2):
    rng = np.random.default_rng(5)
    n = 80
    output = rng.integers(1, 60, n)
    workload = Workload(
        np.sort(rng.uniform(0, 0.4, n)), rng.integers(1, 120, n), output,
        predicted_tokens=output * rng.uniform(0.5, 1.5, n), priority=rng.integers(0, 3, n),
    )  # fmt: skip
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=64)
    deployment = Deployment(
        MODEL, GPU, NODE, Parallelism(1, 1, replicas), limits, scheduler, cost_tables([4]),
        KvPlan(24, 16, 0.0, 0.0, 0.0, 0.0), max_model_len=300,
    )  # fmt: skip
    return workload, deployment


@pytest.mark.parametrize(
    "own",
    [
        {"rank": response_ratio},
        {"rank": response_ratio_now},
        {"rank": min_served},
        {"victim": preempt_the_unlucky},
        {"batching": small_steps},
        {"batching": prompts_alone, "memory": "reserve_max"},
        {"memory": by_prediction},
        {"router": fewest_of_three},
        {"rank": min_served, "victim": min_served, "batching": small_steps, "router": fewest_of_three},
    ],
    ids=lambda own: "-".join(getattr(value, "name", value) for value in own.values()),
)
def test_compiled_and_interpreted_run_alike(own):
    workload, deployment = world(Scheduler(**own))
    kernel, reference = (simulate(workload, deployment, engine=e) for e in ("kernel", "reference"))
    assert_same(kernel, reference)
    plain = simulate(*world(Scheduler(memory=own.get("memory", "paged") if "batching" in own else "paged")))
    assert not np.array_equal(kernel.requests.finished_s, plain.requests.finished_s), "the policy mattered"


def test_keys_recomputed_at_every_step_matter():
    once, anew = (simulate(*world(Scheduler(rank=r))) for r in (response_ratio, response_ratio_now))
    assert not np.array_equal(once.requests.finished_s, anew.requests.finished_s)


def test_a_decorator_stores_what_the_engine_needs():
    assert not response_ratio.builtin
    assert response_ratio.arguments == ("now_s", "arrival_s", "predicted_tokens")
    assert response_ratio.doc.startswith("Highest response ratio first")
    assert rank(every_step=True)(lambda now_s: now_s).every_step
    assert preempt_the_unlucky.doc == ""


def example(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [value for value in vars(module).values() if isinstance(value, policy.Policy)]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("policy_*.py")), ids=lambda path: path.stem)
def test_examples_run_compiled_and_interpreted(path):
    assert len(path.read_text().splitlines()) < 20
    (own,) = example(path)
    workload, deployment = world(Scheduler(**{own.axis: own}))
    kernel, reference = (simulate(workload, deployment, engine=e) for e in ("kernel", "reference"))
    assert_same(kernel, reference)


def test_aging_stands_between_shortest_first_and_first_come():
    """The mean of the shortest, without its tail."""
    workload, deployment = world(Scheduler(), replicas=1)
    (aging,) = example(EXAMPLES / "policy_aging.py")
    waits = {}
    for name, chosen in (("sjf", "sjf"), ("aging", aging), ("fcfs", "fcfs")):
        r = simulate(workload, dataclasses.replace(deployment, scheduler=Scheduler(rank=chosen))).requests
        waits[name] = r.scheduled_s - r.arrival_s
    assert waits["sjf"].mean() < waits["aging"].mean() < waits["fcfs"].mean()
    assert waits["aging"].max() < waits["sjf"].max()


def test_a_scenario_names_the_example():
    text = """
[workload]
num_requests = 30
request_rate = 20
isl = 200
osl = 50
predicted = "oracle"
[deployment]
model = "llama-3-8b"
gpu = "H100"
[scheduler]
rank = "policy_aging.py:aging_shortest_first"
"""
    (variant,) = variants.build(config.loads(text, folder=EXAMPLES))
    chosen = variant.deployment.scheduler.rank
    assert inspect.getsourcefile(chosen.function) == str(EXAMPLES / "policy_aging.py")
