"""The engine schedules as vLLM does, step by step: requests, tokens, preemptions, cached tokens and free blocks."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from plugin_engines import ROOT

from lengthwise import catalog
from lengthwise.cost.memory import group_layers, plan_memory
from lengthwise.engine import deploy
from lengthwise.engine._reference_state import Link
from lengthwise.engine.reference import Reference
from lengthwise.engine.setup import prepare
from lengthwise.policy import scheduler
from lengthwise.schema.deployment import EngineLimits, KVOffloading, KVStorage, Parallelism
from lengthwise.schema.specs import AttentionSpec, FfnSpec, LinearAttentionSpec, ModelFacts, ModelSpec
from lengthwise.schema.speculation import Speculation
from lengthwise.schema.workload import After, SharedPrefixes, Workload

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WORLDS = int(os.environ.get("LENGTHWISE_PREFIX_WORLDS", "30"))


def random_world(seed):
    """A world of short requests with prefixes in common, for a pool that is often too small."""
    rng = np.random.default_rng(seed)
    n, size, max_model_len = int(rng.integers(5, 60)), int(rng.choice([4, 16])), int(rng.choice([100, 300]))
    block_tokens = size * int(rng.choice([1, 1, 2]))
    chains = int(rng.choice([2, 5, 100]))
    requests = []
    for i in range(n):
        parent = i - chains if rng.random() < 0.8 else -1
        turn = parent if parent >= 0 and rng.random() < 0.7 else -1
        own, before = int(rng.integers(1, max_model_len // 3)), 0
        if turn >= 0:
            before = requests[turn]["prompt"] + requests[turn]["output"]
        prompt, output = before + own, int(rng.integers(1, 30))
        if prompt + output >= max_model_len:
            parent, turn, prompt = -1, -1, own
        ids = rng.integers(0, 3, rng.integers(0, prompt // block_tokens + 1)) if turn < 0 else []
        requests.append({
            "arrival": int(rng.integers(0, 3 * n)) if parent < 0 else 0,
            "parent": parent, "previous_turn": turn, "delay": int(rng.choice([0, 0, 1, 7])),
            "prompt": prompt, "output": output, "block_ids": [int(k) for k in ids],
        })  # fmt: skip
    arrivals = sorted(one["arrival"] for one in requests)
    for one, arrival in zip(requests, arrivals, strict=True):
        one["arrival"] = arrival
    return {
        "block_size": size, "block_tokens": block_tokens, "max_model_len": max_model_len,
        "blocks": -(-max_model_len // size) + int(rng.integers(0, 40)),
        "max_num_seqs": int(rng.integers(1, 12)), "max_num_batched_tokens": int(rng.choice([16, 64, 512])),
        "caching": bool(rng.random() < 0.9), "requests": requests, "offload_blocks": 0, "load_s": 0.0,
        "offload_outputs": False, "storage": False, "read_s": 0.0, "write_s": 0.0,
    }  # fmt: skip


def tiered_world(seed):
    """A world with CPU memory behind the pool, from which loads take parts of a step or several steps."""
    world, rng = random_world(seed), np.random.default_rng([seed, 1])
    least = -(-world["max_model_len"] // world["block_size"])
    blocks = least + int(rng.choice([0, 10, 60, 10_000]))
    return world | {"caching": True, "offload_blocks": blocks, "load_s": float(rng.choice([0.0, 0.5, 2.5]))}


def stored_world(seed):
    """A world with a storage behind its CPU memory, which is read and written in parts of a step or several steps."""
    world, rng = tiered_world(seed), np.random.default_rng([seed, 2])
    read_s, write_s = float(rng.choice([0.25, 0.5, 3.5])), float(rng.choice([0.0, 0.0, 2.5]))
    return world | {"storage": True, "read_s": read_s, "write_s": write_s}


def outputs_world(seed):
    """A world whose CPU memory, and the storage behind it in half of them, receive blocks of outputs, too.

    Writes take no time, because a chunk stays in CPU memory while it is written, and vLLM begins earlier.
    """
    world, rng = (stored_world if seed % 2 else tiered_world)(seed), np.random.default_rng([seed, 3])
    blocks = world["offload_blocks"] + int(rng.choice([0, 100, 10_000, 10_000, 10_000]))
    return world | {"offload_blocks": blocks, "offload_outputs": True, "write_s": 0.0}


KINDS = (random_world, tiered_world, stored_world, outputs_world)


class StepLink(Link):
    """A link whose jobs take the same time, all at once."""

    def end_s(self, _blocks, from_s):
        return from_s + self.latency_s


class Recorder(Reference):
    """Records every step as ``prefix_steps.py`` prints it."""

    def __init__(self, setup, world):
        super().__init__(setup)
        for rep in self.replicas:
            rep.tier.loads, rep.tier.stores = StepLink(0.0, world["load_s"]), StepLink(0.0, 0.0)
            rep.tier.reads, rep.tier.writes = StepLink(0.0, world["read_s"]), StepLink(0.0, world["write_s"])
        self.lines, self.preempted, self.admitted = [], [], []
        # Until a store does not fit, which vLLM tries again with every step, or a request reads again what was evicted
        # while it waited, for which vLLM looks without pause. Blocks of outputs are stored when their request ends, by
        # vLLM when they are full: until a request looks for one in between, or needs its place.
        self.exact_steps = None
        self.filled = {}  # full blocks of requests that decode, those of outputs included

    def _loadable(self, rep, q, found):
        nodes = self._prefix_nodes(q)[found : q.context // rep.s.params.block_size]
        loadable = super()._loadable(rep, q, found)
        missing = next((node for node in nodes if node not in rep.tier.pool.chunks), None)
        if self.exact_steps is None and (self.offloads[q.index].num_reads > 1 or missing in self._not_stored_yet(rep)):
            self.exact_steps = len(self.lines)
        return loadable

    def _not_stored_yet(self, rep):
        """The nodes of outputs that vLLM has stored, and the engine stores when their request ends."""
        requests = [q for q, blocks in self.filled.items() if self.offloads[q.index].stored < blocks]
        nodes = {
            node for q in requests for node in self._prefix_nodes(q)[self.offloads[q.index].stored : self.filled[q]]
        }
        return nodes.difference(rep.tier.pool.chunks)

    def _complete_offloading(self, rep):
        pending_stores = rep.pending_stores
        super()._complete_offloading(rep)
        for q in pending_stores:
            self.filled.pop(q, None)

    def _store(self, rep, q, tokens, computed_s):
        super()._store(rep, q, tokens, computed_s)
        if self.exact_steps is None and self.offloads[q.index].stored < tokens // rep.s.params.block_size:
            self.exact_steps = len(self.lines) + 1

    def _preempt(self, rep, step, q):
        super()._preempt(rep, step, q)
        self.preempted.append(q.index)

    def _place(self, rep, step, q, chunk):
        super()._place(rep, step, q, chunk)
        self.admitted.append([q.index, q.prefilled])

    def _launch(self, rep, step):
        params = rep.s.params
        if params.offload_outputs:
            self.filled |= {q: q.context // params.block_size for q in step.decodes}
            early = len(self._not_stored_yet(rep))
        super()._launch(rep, step)
        if params.offload_outputs and self.exact_steps is None:
            late = len(self._not_stored_yet(rep))
            if late + early and len(rep.tier.pool.chunks) + max(early, late) > params.offload_blocks:
                self.exact_steps = len(self.lines) + 1
        scheduled = [
            *([q.index, 1 + q.last.drafts] for q in step.decodes),
            *([q.index, chunk] for q, chunk in step.prompts),
        ]
        line = [step.start_s, rep.pool.free, sorted(scheduled), sorted(self.preempted), sorted(self.admitted)]
        if params.hybrid:
            line.append(sorted([q.index, q.blocks] for q in (*step.decodes, *(q for q, _ in step.prompts))))
        self.lines.append(line)
        self.preempted, self.admitted = [], []


def scheduler_of(world):
    """vLLM's scheduler of a world: by priority or in order of arrival, with what else the world turns on."""
    by_priority = {"rank": "priority", "victim": "priority"} if world.get("policy") == "priority" else {}
    switches = {name: world[name] for name in ("async_scheduling", "long_prefill_token_threshold") if name in world}
    return dataclasses.replace(scheduler("vllm_v1"), **switches, **by_priority)


def hybrid_model(layers):
    """A model with so many layers of each kind."""
    linear = LinearAttentionSpec(layers["states"], 1, 1, 1, layers["state_elements"], 1) if layers["states"] else None
    attention = AttentionSpec(
        8, layers["kv_heads"], layers["head_dim"], layers["local_tokens"] or None, layers["local"], linear=linear
    )
    number = layers["full"] + layers["local"] + layers["states"]
    metadata = ModelFacts(chunked_attention=layers["chunked"])
    return ModelSpec("hybrid", number, 128, 1000, attention, FfnSpec(256), 2**20, metadata=metadata)


def planned_kv(world):
    """The memory of a world's hybrid model."""
    limits = EngineLimits(
        max_num_batched_tokens=world["max_num_batched_tokens"],
        block_size=world["block_size"],
        enable_prefix_caching=world["caching"],
    )
    parallel = Parallelism(1, 1, 1)
    steps = 1 + world.get("async_scheduling", False)
    return plan_memory(hybrid_model(world["layers"]), catalog.gpu("H100"), parallel, limits, 16, hybrid=steps)


def engine_of(world):
    """The reference engine of a world, whose steps take one second."""
    limits = EngineLimits(
        max_num_seqs=world["max_num_seqs"],
        max_num_batched_tokens=world["max_num_batched_tokens"],
        block_size=world["block_size"],
        max_model_len=world["max_model_len"],
        watermark=0.0,
        enable_prefix_caching=world["caching"],
        kv_offloading=KVOffloading(
            world["offload_blocks"] * 1.0,
            math.inf,
            outputs=world["offload_outputs"],
            storage=KVStorage() if world["storage"] else None,
        )
        if world["offload_blocks"]
        else None,
    )
    model = hybrid_model(world["layers"]) if "layers" in world else "llama-3.1-8b"
    settings = {"num_blocks": world["blocks"], "scheduler": scheduler_of(world)}
    if "speculation" in world:
        given = world["speculation"]
        settings["speculation"] = Speculation(**given | {"acceptance": tuple(given["acceptance"])})
    made = deploy(model, "H100", limits=limits, **settings)
    free = {
        f.name: getattr(made.cost, f.name) * 0.0
        for f in dataclasses.fields(made.cost)
        if f.name.endswith("_s") and f.name != "shared_s"
    }
    free["host_s"] = np.ones_like(made.cost.host_s)
    kv = dataclasses.replace(made.kv, kv_bytes_per_block=1e9)
    made = dataclasses.replace(made, cost=dataclasses.replace(made.cost, **free), kv=kv)
    one = world["requests"]
    parents = np.array([q["parent"] for q in one])
    after = After(np.concatenate([[0], np.cumsum(parents >= 0)]), parents[parents >= 0], [q["delay"] for q in one])
    prefixes = SharedPrefixes(
        world["block_tokens"],
        np.concatenate([[0], np.cumsum([len(q["block_ids"]) for q in one])]),
        np.array([k for q in one for k in q["block_ids"]], np.int64),
        np.array([q["previous_turn"] for q in one]),
    )
    columns = (np.array([q[name] for q in one]) for name in ("arrival", "prompt", "output"))
    limits = {name: np.array([q[name] for q in one]) for name in ("max_tokens", "priority") if name in one[0]}
    workload = Workload(*columns, after=after, prefixes=prefixes, **limits)
    return Recorder(prepare(workload, made, seed=0, limit_s=np.inf, compiled=False), world)


def recorded(world):
    """The steps of the reference engine, and how many of them vLLM must have, too."""
    engine = engine_of(world)
    if (groups := engine.s.deployment.kv.groups) is not None:
        layers = world["layers"]
        size = group_layers(layers["full"], layers["local"], layers["states"])[0]
        blocks = world["memory"] // int(planned_kv(world).kv_bytes_per_block)
        engine.lines.append([size, groups.full + groups.local + groups.states, blocks])
    engine.run()
    return engine.lines, len(engine.lines) if engine.exact_steps is None else engine.exact_steps


def vllm_steps(worlds, python):
    """The steps of vLLM's own scheduler through each world."""
    import _vllm

    with tempfile.TemporaryDirectory() as folder:
        model, path = _vllm.make_model(Path(folder) / "tiny", "tiny"), Path(folder) / "worlds.json"
        path.write_text(json.dumps(worlds))
        words = [python, str(Path(__file__).parent / "prefix_steps.py"), str(model), str(path)]
        env = {**_vllm.QUIET, "PYTHONPATH": str(ROOT / "src"), "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
        ran = subprocess.run(words, env=env, capture_output=True, text=True, timeout=3000, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def every_world(engine_python):
    """The worlds of each kind with vLLM's steps, which one process records."""
    thresholds = [{"long_prefill_token_threshold": (0, 5, 0, 16)[seed % 4]} for seed in range(WORLDS)]
    made = {kind: [kind(seed) | one for seed, one in enumerate(thresholds)] for kind in KINDS}
    expected = iter(vllm_steps([world for worlds in made.values() for world in worlds], engine_python))
    return {kind: [(world, next(expected)) for world in worlds] for kind, worlds in made.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_that_of_vllm(every_world, kind):
    worlds = every_world[kind]
    steps = preempted = cached = left_out = 0
    for number, (world, expected) in enumerate(worlds):
        found, exact = recorded(world)
        for step, of_vllm in zip(found[:exact], expected, strict=False):
            assert step == of_vllm, (number, step, of_vllm)
        assert exact < len(found) or len(found) == len(expected), number
        left_out += exact < len(found)
        found = found[:exact]
        steps += len(found)
        preempted += sum(len(line[3]) for line in found)
        cached += sum(tokens > 0 for line in found for _, tokens in line[4])
    assert steps > 50 * len(worlds)
    assert preempted > len(worlds)
    assert cached > len(worlds)
    assert left_out <= 0.5 * len(worlds)
