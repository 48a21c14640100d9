"""The reference engine schedules as vLLM's Scheduler and AsyncScheduler: equal steps in random worlds, one by one."""

from __future__ import annotations

import os
from collections import Counter
from itertools import zip_longest

import numpy as np
import pytest
from plugin_engines import ROOT
from test_live_prefix_steps import random_world, recorded, vllm_steps

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WORLDS = int(os.environ.get("LENGTHWISE_VLLM_WORLDS", "60"))
SOURCES = ROOT / ".engines" / "vllm" / "bin" / "python"
KINDS = ({}, {"policy": "priority"}, {"async_scheduling": True})


def world(seed):
    """A world whose outputs end by EOS or by ``max_tokens``; every third one is scheduled asynchronously.

    Every other world computes long prompts in chunks side by side.
    """
    made, rng = random_world(seed), np.random.default_rng([seed, 4])
    share = rng.choice([0.0, 0.5, 1.0])
    for one in made["requests"]:
        room, longer = made["max_model_len"] - one["prompt"], rng.random() < share
        one["max_tokens"] = int(min(one["output"] + rng.integers(1, 40) * longer, room))
        one["priority"] = int(rng.integers(0, 3))
    threshold = int(rng.choice([1, 5, 16, 40])) if seed % 2 else 0
    return made | KINDS[seed % len(KINDS)] | {"long_prefill_token_threshold": threshold}


def compared(seeds, _python=None):
    """Compare all steps of random worlds. Return the counts of kinds and preemptions, and the steps that differ."""
    worlds = [world(seed) for seed in seeds]
    counts, different = Counter(), []
    for seed, one, expected in zip(seeds, worlds, vllm_steps(worlds, str(SOURCES)), strict=True):
        found, _ = recorded(one)
        different += [
            (seed, number, *pair) for number, pair in enumerate(zip_longest(found, expected)) if pair[0] != pair[1]
        ]
        kind = "async" if "async_scheduling" in one else one.get("policy", "fcfs")
        threshold = one["long_prefill_token_threshold"]
        side_by_side = sum(sum(tokens == threshold > 1 for _, tokens in line[2]) > 1 for line in expected)
        counts += Counter({
            kind: len(expected),
            "steps with a threshold": len(expected) * (threshold > 0),
            "steps with several prompts at the threshold": side_by_side,
            f"{kind} preemptions": sum(len(line[3]) for line in expected),
            "cached": sum(tokens > 0 for line in expected for _, tokens in line[4]),
            "steps": len(expected),
        })  # fmt: skip
    return counts, different


def test_every_step_is_that_of_vllm():
    counts, different = compared(range(WORLDS))
    assert not different[:1]
    assert counts["steps"] > 50 * WORLDS
    assert min(counts.values()) > WORLDS / 2, counts
