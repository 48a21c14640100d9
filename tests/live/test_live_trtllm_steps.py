"""The reference engine schedules as TensorRT-LLM's own scheduler: equal steps in random worlds, compared one by one."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from plugin_engines import ROOT

from lengthwise.engine import deploy
from lengthwise.engine.reference import Reference
from lengthwise.engine.setup import prepare
from lengthwise.schema.deployment import EngineLimits, Scheduler, TrtllmSettings
from lengthwise.schema.workload import Workload

WORLDS = int(os.environ.get("LENGTHWISE_TRTLLM_WORLDS", "300"))
SOURCES = Path(os.environ.get("LENGTHWISE_TRTLLM", ROOT / ".engines" / "TensorRT-LLM"))
"""A clone of TensorRT-LLM: its package index has no sources, so that ``make engine`` cannot fetch them."""
RECORDED = Path(__file__).parent / "trtllm_steps.json.gz"
"""Steps of TensorRT-LLM's scheduler in the first worlds: ``python test_live_trtllm_steps.py`` records them again."""


def world(seed):
    """Requests in a pool that a few of them fill, and every limit small enough to matter."""
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 4, 16]))
    blocks = int(rng.integers(120, 500)) // size
    seqs, tokens = int(rng.integers(2, 30)), blocks * size
    policy = str(rng.choice(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "MAX_UTILIZATION"]))
    chunking = str(rng.choice(["", "FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]))
    budget = max(int(rng.integers(8, 150)), seqs, size)
    longest, often = max(4, tokens // int(rng.choice([2, 4, 10]))), rng.uniform(0.1, 1)
    if not chunking:  # TensorRT-LLM stops where a prompt, or a paused request, is longer than a step.
        budget = max(budget, tokens if policy == "MAX_UTILIZATION" else longest)
    requests, arrival = [], 0
    for _ in range(int(rng.integers(5, 60))):
        arrival += int(rng.geometric(often)) - 1
        prompt = int(rng.integers(1, longest))
        output = int(min(rng.geometric(1 / 40), tokens - prompt))
        cap = int(min(np.ceil(output * rng.uniform(1, rng.choice([1.0, 2.0, 6.0]))), tokens - prompt))
        requests.append([arrival, prompt, output, cap])
    return {
        "block_size": size, "blocks": blocks, "max_num_seqs": seqs, "max_num_tokens": budget, "policy": policy,
        "chunking": chunking, "requests": requests,
    }  # fmt: skip


class Recorder(Reference):
    """Records every step as ``trtllm_steps.py`` prints it."""

    def __init__(self, setup):
        super().__init__(setup)
        self.lines, self.paused = [], []

    def _preempt(self, rep, step, q):
        super()._preempt(rep, step, q)
        self.paused.append(q.index)

    def _launch(self, rep, step):
        super()._launch(rep, step)
        while len(self.lines) < step.start_s:
            self.lines.append([[], [], [], rep.s.params.total_blocks])
        prompts, decodes = [[q.index, count] for q, count in step.prompts], [q.index for q in step.decodes]
        self.lines.append([sorted(prompts), sorted(decodes), sorted(self.paused), None])
        self.paused = []

    def _end_step(self, rep, now):
        has_ended = super()._end_step(rep, now)
        if has_ended:
            self.lines[-1][3] = rep.pool.free
        return has_ended


def own_steps(one):
    """The steps of the reference engine, each of one second."""
    arrival, prompt, output, cap = (np.array(column) for column in zip(*one["requests"], strict=True))
    limits = EngineLimits(
        max_num_seqs=one["max_num_seqs"], max_num_batched_tokens=one["max_num_tokens"], block_size=one["block_size"],
        max_model_len=one["blocks"] * one["block_size"],
    )  # fmt: skip
    chunking = one["chunking"]
    settings = TrtllmSettings(one["policy"], bool(chunking), chunking or "FIRST_COME_FIRST_SERVED")
    made = deploy("llama-3.1-8b", "H100", limits=limits, num_blocks=one["blocks"], scheduler=Scheduler(trtllm=settings))
    free = {
        f.name: getattr(made.cost, f.name) * 0.0
        for f in dataclasses.fields(made.cost)
        if f.name.endswith("_s") and f.name != "shared_s"
    }
    free["host_s"] = np.ones_like(made.cost.host_s)
    made = dataclasses.replace(made, cost=dataclasses.replace(made.cost, **free))
    workload = Workload(arrival.astype(float), prompt, output, max_tokens=cap)
    engine = Recorder(prepare(workload, made, seed=0, limit_s=np.inf, compiled=False))
    engine.run()
    return engine.lines


def trtllm_steps(worlds, python=sys.executable):
    """The steps of TensorRT-LLM's own classes in each world."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "worlds.json"
        path.write_text(json.dumps(worlds))
        words = [python, str(Path(__file__).parent / "trtllm_steps.py"), str(SOURCES), str(path)]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=3000, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return json.loads(ran.stdout.splitlines()[-1])


def compared(seeds, python):
    """Compare all steps of random worlds. Return their number, and those of their parts, and the steps that differ."""
    worlds = [world(seed) for seed in seeds]
    return compared_with(worlds, trtllm_steps(worlds, python))


def compared_with(worlds, steps_of_trtllm):
    counts, different = Counter(), []
    for number, (one, expected) in enumerate(zip(worlds, steps_of_trtllm, strict=True)):
        prompt_of = [spec[1] for spec in one["requests"]]
        for step, (found, of_trtllm) in enumerate(zip_longest(own_steps(one), expected, fillvalue=[[]] * 4)):
            if found != of_trtllm:
                different.append((number, step, found, of_trtllm))
            prompts, decodes, paused, _ = found
            counts["chunks"] += sum(tokens < prompt_of[i] for i, tokens in prompts)
            counts["mixed"] += bool(prompts and decodes)
            counts["paused"] += len(paused)
        counts["steps"] += len(expected)
    return counts, different


def test_recorded_steps_are_those_of_trtllm():
    counts, different = compared_with(*json.loads(gzip.decompress(RECORDED.read_bytes())))
    assert different == []
    assert min(counts[kind] for kind in ("steps", "chunks", "mixed", "paused")) > 200, counts


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(not SOURCES.exists(), reason=f"no {SOURCES}: clone TensorRT-LLM, or set LENGTHWISE_TRTLLM")
def test_every_step_is_that_of_trtllm():
    counts, different = compared(range(WORLDS), sys.executable)
    assert different == []
    assert counts["steps"] > 200 * WORLDS
    assert min(counts[kind] for kind in ("chunks", "mixed", "paused")) > WORLDS / 2, counts


if __name__ == "__main__":
    first = [world(seed) for seed in range(30)]
    RECORDED.write_bytes(gzip.compress(json.dumps([first, trtllm_steps(first)]).encode(), mtime=0))
