"""The reference engine schedules as SGLang's own scheduler: equal steps in random worlds, compared one by one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from plugin_engines import ROOT
from radix_steps import signature

from lengthwise.engine import deploy
from lengthwise.engine._reference_state import RADIX_ORDERS
from lengthwise.engine.prefix_nodes import prefix_nodes
from lengthwise.engine.reference import Reference
from lengthwise.engine.setup import prepare
from lengthwise.schema.deployment import (
    PREFIX_POLICIES,
    RADIX_EVICTION_POLICIES,
    SCHEDULE_POLICIES,
    EngineLimits,
    Scheduler,
    SglangSettings,
)
from lengthwise.schema.records import Status
from lengthwise.schema.workload import SharedPrefixes, Workload

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WORLDS = int(os.environ.get("LENGTHWISE_SGLANG_WORLDS", "100"))
SEED = 0
SOURCES = Path(os.environ.get("LENGTHWISE_SGLANG", ROOT / ".engines" / "sglang-mem-cache"))
"""The part of SGLang's package that ``make engine`` unpacks."""


def world(seed):
    """Requests in a pool that a few of them fill, and every limit small enough to matter."""
    rng = np.random.default_rng(seed)
    exact, tight = rng.random() < 0.3, rng.random() < 0.7  # tight: memory is short, so that requests are retracted
    size = int(rng.choice([1, 4, 16]))
    tokens = int(rng.integers(120, 400 if tight else 600)) // size * size
    seqs = int(rng.integers(8, 30) if tight else rng.integers(1, 16))
    chunk = None if rng.random() < 0.25 else max(int(rng.integers(seqs, 120)), seqs + size) // size * size + size
    cached = seed % 2 == 1
    longest = max(4, tokens // (2 if not tight else 4 if cached else 8) - 2 * size)
    often = rng.uniform(0.3 if tight else 0.05, 1)
    shared = Sharing(rng, size, longest) if cached else None
    requests, arrival = [], 0
    for _ in range(int(rng.integers(5, 60))):
        arrival += int(rng.geometric(often)) - 1
        prompt = shared.prompt(requests) if shared else int(rng.integers(1, longest))
        # SGLang lowers a limit to what an empty pool has. With ignore_eos it reserves a little more, or would be stuck.
        most = tokens - -(-prompt // size) * size - size - 1 - exact * (size + 1)
        output = int(min(rng.geometric(1 / 60), most))
        times = rng.uniform(1, 1.4 if tight else 6)
        cap = most if rng.random() < 0.1 and not tight else int(min(np.ceil(output * times), most))
        ignore_eos = bool(exact and rng.random() < 0.7)
        requests.append([arrival, prompt, cap if ignore_eos else output, cap, ignore_eos])
    return {
        "page_size": size, "pages": tokens // size, "max_num_seqs": seqs, "chunked_prefill_size": chunk,
        "max_prefill_tokens": int(rng.integers(40, 400)), "mixed": bool(chunk is not None and rng.random() < 0.4),
        "conservativeness": float(rng.choice([0.0, 0.1, 0.3, 1.0, 1.6])),
        "policy": str(rng.choice([one for one in SCHEDULE_POLICIES if cached or one not in PREFIX_POLICIES])),
        "requests": requests, "overlap": bool(rng.random() < 0.5), "clip": int(rng.choice([20, 4096])),
        "cached": cached, "eviction": str(rng.choice(["lru", "lru", *RADIX_EVICTION_POLICIES])),
        "max_matched": int(rng.choice([3, 128])), "in_batch_tokens": size * int(rng.integers(1, 5)),
        "shuffle_seed": int(np.random.default_rng(SEED).integers(2**31)),
        "priority": rng.integers(0, 3, len(requests)).tolist(), **(shared.made(requests) if shared else {}),
    }  # fmt: skip


class Sharing:
    """Prompts that begin with documents in common, or with the prompt and the output of another request."""

    def __init__(self, rng, size, longest):
        self.rng, self.longest, self.block = rng, longest, size * int(rng.choice([1, 2]))
        self.starts, self.ids, self.turns = [0], [], []
        self.documents = rng.integers(0, 2, (int(rng.integers(1, 5)), 40)).tolist()

    def prompt(self, requests):
        """Return the prompt tokens of the next request."""
        rng, tokens, turn, ids = self.rng, int(self.rng.integers(1, self.longest)), -1, []
        if requests and rng.random() < 0.4:
            turn = int(rng.integers(len(requests)))
            if (before := sum(requests[turn][1:3])) < self.longest:
                tokens = before + int(rng.integers(1, self.longest - before + 1))
            else:
                turn = -1
        if turn < 0 and rng.random() < 0.8:
            ids = self.documents[int(rng.integers(len(self.documents)))][
                : int(rng.integers(0, tokens // self.block + 1))
            ]
        self.ids += ids
        self.starts.append(len(self.ids))
        self.turns.append(turn)
        return tokens

    def made(self, requests):
        """Return what a world has of its requests' tokens."""
        prefixes = SharedPrefixes(self.block, np.array(self.starts), np.array(self.ids, int), np.array(self.turns))
        _, prompt, output, *_ = (np.array(column) for column in zip(*requests, strict=True))
        nodes = prefix_nodes(prompt, output, prefixes, 1)
        shared = [self.block, self.starts, self.ids, self.turns]
        return {"tokens": [nodes.of(i).tolist() for i in range(len(requests))], "prefixes": shared}


class Recorder(Reference):
    """Records every step that is formed as ``sglang_steps.py`` prints it, until all requests have ended.

    ``entered`` are the numbers of the steps before which the requests entered the queue.
    """

    def __init__(self, setup, one):
        super().__init__(setup)
        (rep,), names = self.replicas, ("max_matched", "in_batch_tokens")
        own = {name: one[name] for name in names} | {"clip_tokens": one["clip"]}
        rep.sglang.limits = dataclasses.replace(rep.sglang.limits, **own)
        self.lines, self.retracted, self.entered, self.one = [], [], [], one
        if one["cached"]:
            size = one["page_size"]
            self.tokens = {
                node: tokens[k * size : (k + 1) * size]
                for i, tokens in enumerate(one["tokens"])
                for k, node in enumerate(setup.nodes.of(i).tolist())
            }

    def state(self):
        """What a line has of the memory after a step."""
        (rep,), size = self.replicas, self.one["page_size"]
        if not self.one["cached"]:
            return rep.pool.free * size, []
        tree = rep.pool
        tokens = {id(n): [t for page in n.pages for t in self.tokens[page]] for n in tree.segments()}
        segments = [[tokens[id(n)], n.holders, n.hits, n.priority] for n in tree.segments() if n.parent]
        leaves = [n for n in tree.segments() if n.parent and not n.children and not n.holders]
        order = [tokens[id(n)] for n in sorted(leaves, key=RADIX_ORDERS[self.one["eviction"]])]
        return tree.free * size, [(tree.free - tree.evictable) * size, signature(segments, order)]

    def _preempt(self, rep, step, q):
        super()._preempt(rep, step, q)
        self.retracted.append(q.index)

    def _enqueue(self, queue, q, now):
        super()._enqueue(queue, q, now)
        if q.index == len(self.entered):
            self.entered.append(len(self.lines))

    def _form(self, rep, now):
        self.note_memory()
        step = super()._form(rep, now)
        if (self.results["status"] != Status.FINISHED).any():
            kind = ("mixed" if step.decodes else "prefill") if step.prompts else "decode" if step.decodes else "idle"
            tokens = [[q.index, count] for q, count in step.prompts] + [[q.index, 1] for q in step.decodes]
            self.lines.append([kind, tokens, self.retracted, rep.sglang.ratio.now])
        self.retracted = []
        return step

    def note_memory(self):
        """Add the memory to the last step's line, once the step before it (with overlap) or the step has ended."""
        if self.lines and len(self.lines[-1]) == 4:
            free_tokens, tree = self.state()
            self.lines[-1][3:3] = [free_tokens]
            self.lines[-1] += tree


def own_steps(one):
    """The steps of the reference engine, each of one second, and how many requests found a prefix.

    The requests of the world then arrive by numbers of steps, as SGLang's functions take them.
    """
    arrival, prompt, output, cap, exact = (np.array(column) for column in zip(*one["requests"], strict=True))
    chunk, tokens = one["chunked_prefill_size"], one["pages"] * one["page_size"]
    limits = EngineLimits(
        max_num_seqs=one["max_num_seqs"], max_num_batched_tokens=chunk or 2048, block_size=one["page_size"],
        max_model_len=tokens, enable_prefix_caching=one["cached"], prefix_cache="sglang",
        radix_eviction_policy=one["eviction"],
    )  # fmt: skip
    settings = SglangSettings(
        one["conservativeness"], one["max_prefill_tokens"], chunk is not None, one["mixed"], one["policy"]
    )
    made = deploy(
        "llama-3.1-8b", "H100", limits=limits, num_blocks=one["pages"],
        scheduler=Scheduler("queue_order", sglang=settings, async_scheduling=one["overlap"]),
    )  # fmt: skip
    free = {
        f.name: getattr(made.cost, f.name) * 0.0
        for f in dataclasses.fields(made.cost)
        if f.name.endswith("_s") and f.name != "shared_s"
    }
    free["host_s"] = np.ones_like(made.cost.host_s)
    made = dataclasses.replace(made, cost=dataclasses.replace(made.cost, **free))
    workload = Workload(
        arrival.astype(float), prompt, output, priority=-np.array(one["priority"]), max_tokens=cap,
        ignore_eos=exact.astype(bool),
    )  # fmt: skip
    setup = prepare(workload, made, seed=SEED, limit_s=np.inf, compiled=False)
    if one["cached"]:
        block, *columns = one["prefixes"]
        shared = SharedPrefixes(block, *(np.array(column, int) for column in columns))
        setup = dataclasses.replace(setup, nodes=prefix_nodes(prompt, output, shared, one["page_size"]))
    engine = Recorder(setup, one)
    engine.run()
    engine.note_memory()
    for request, number in zip(one["requests"], engine.entered, strict=True):
        request[0] = number
    return engine.lines, int((engine.results["cached_tokens"] > 0).sum())


def sglang_steps(worlds, python):
    """The steps of SGLang's own functions in each world."""
    assert SOURCES.exists(), f"no {SOURCES}: make engine"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "worlds.json"
        path.write_text(json.dumps(worlds))
        words = [python, str(Path(__file__).parent / "sglang_steps.py"), str(SOURCES), str(path)]
        own = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        ran = subprocess.run(words, capture_output=True, text=True, timeout=3000, check=False, env=own)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return json.loads(ran.stdout.splitlines()[-1])


def compared(seeds, python):
    """Compare all steps of random worlds. Return the counts of kinds and retractions, and the steps that differ."""
    worlds = [world(seed) for seed in seeds]
    counts, different = Counter(), []
    simulated = list(map(own_steps, worlds))
    for seed, one, (own, hits), expected in zip(seeds, worlds, simulated, sglang_steps(worlds, python), strict=True):
        if isinstance(expected[-1], str):  # From here on SGLang computes a prompt incompletely, or it has stopped.
            del own[len(expected) - 1 :]
            counts[expected.pop()] += 1
        for number, (own_line, of_sglang) in enumerate(zip_longest(own, expected)):
            if own_line != of_sglang:
                different.append((seed, number, own_line, of_sglang))
        counts += Counter(line[0] for line in expected)
        counts["retractions"] += sum(len(line[2]) for line in expected)
        counts["steps"] += len(expected)
        counts["cached_steps"] += len(expected) * one["cached"]
        counts["overlapping_steps"] += len(expected) * one["overlap"]
        counts["overlapping_cached_steps"] += len(expected) * one["overlap"] * one["cached"]
        counts[f"{one['policy']}_steps"] += len(expected)
        counts["prefixes_found"] += hits
    return counts, different


def test_every_step_is_that_of_sglang(engine_python):
    counts, different = compared(range(WORLDS), engine_python)
    assert not different[:1]
    assert counts["steps"] > 50 * WORLDS
    kinds = ("prefill", "mixed", "decode", "idle", "retractions", "prefixes_found", "overlapping_cached_steps")
    assert min(counts[kind] for kind in kinds) > WORLDS / 2, counts
    assert min(counts[f"{policy}_steps"] for policy in SCHEDULE_POLICIES) > WORLDS, counts
