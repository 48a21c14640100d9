"""The reference engine schedules as vLLM's Scheduler and AsyncScheduler: equal steps in random worlds, one by one."""

from __future__ import annotations

import os
from collections import Counter
from itertools import zip_longest

import numpy as np
import pytest
from plugin_engines import ROOT
from test_live_prefix_steps import engine_of, planned_kv, random_world, recorded, vllm_steps

from lengthwise.engine._reference_state import GroupPool
from lengthwise.schema.speculation import accepted, uniform

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


LAYERS = {
    "gemma-3-27b": (10, 52, 1024, False, 0, 16, 128, 0),
    "gpt-oss-20b": (12, 12, 128, False, 0, 8, 64, 0),
    "llama-4-scout": (12, 36, 8192, True, 0, 8, 128, 0),
    "qwen3-next-80b-a3b": (12, 0, 0, False, 36, 2, 256, 548_864),
    "jamba-v0.1": (4, 0, 0, False, 28, 8, 128, 8192 * (16 + 3)),
    "mistral-7b": (0, 32, 4096, False, 0, 8, 128, 0),
    "more kinds": (5, 7, 24, False, 6, 1, 4, 100),
    "few states": (4, 0, 0, False, 9, 1, 4, 100),
}
NAMES = ("full", "local", "local_tokens", "chunked", "states", "kv_heads", "head_dim", "state_elements")
"""Layers with full attention, with windows or chunks, of how many tokens, whether chunks, with states; and sizes."""


def hybrid_world(seed, *, ahead=True):
    """A world whose model has the layers of one in ``LAYERS``, many with smaller windows, in little memory.

    Each of them is in turn scheduled asynchronously, if ``ahead``.
    """
    made, rng = world(3 * seed), np.random.default_rng([seed, 5])
    made["async_scheduling"] = ahead and seed // len(LAYERS) % 2 == 1
    layers = dict(zip(NAMES, list(LAYERS.values())[seed % len(LAYERS)], strict=True))
    scale = int(rng.choice([1, 1, 1, 8, 40]))  # real windows, and prompts that exceed some of them
    if scale == 1 and layers["local"]:
        layers["local_tokens"] = int(rng.integers(1, 80))
    for one in made["requests"]:
        one |= {name: one[name] * scale for name in ("prompt", "output", "max_tokens")}
        one |= {"block_ids": [], "previous_turn": -1}
    made |= {"layers": layers, "caching": False, "max_model_len": made["max_model_len"] * scale}
    made["long_prefill_token_threshold"] = 0
    made["max_num_batched_tokens"] *= int(rng.choice([1, scale]))
    made |= {"block_size": 16, "memory": int(rng.integers(1, 2**36))}
    kv = planned_kv(made)
    made["block_size"] = kv.block_size
    return made | {"blocks": kv.longest_blocks(made["max_model_len"]) + int(rng.integers(0, 12))}


WINDOWED = [name for name, layers in LAYERS.items() if not layers[NAMES.index("states")]]
ALIGNED = ["qwen3-next-80b-a3b", "jamba-v0.1", "few states"]


def cached_hybrid_world(seed):
    """A world whose model has windows or chunks, and whose prompts share prefixes that its groups cache."""
    number = list(LAYERS).index(WINDOWED[seed % len(WINDOWED)])
    plain = random_world(3 * seed * len(LAYERS) + 3 * number)
    made = hybrid_world(seed * len(LAYERS) + number)
    scale = made["max_model_len"] // plain["max_model_len"]
    for one, shared in zip(made["requests"], plain["requests"], strict=True):
        one |= {name: shared[name] for name in ("block_ids", "previous_turn")}
    rng = np.random.default_rng([seed, 7])
    if rng.random() < 0.7:  # a window of a few blocks, in prompts of many
        made["layers"]["local_tokens"] = int(rng.choice([1, 2, 16, 17, 33, 48, 65, 100]))
    blocks = planned_kv(made).longest_blocks(made["max_model_len"]) + int(rng.choice([0, 3, 10, 40, 200]))
    made |= {"caching": True, "block_tokens": plain["block_tokens"] * scale, "blocks": blocks}
    return with_documents(made, rng)


def aligned_world(seed):
    """A world whose model has states, of which prompts with shared prefixes find those at the ends of blocks."""
    number, rng = list(LAYERS).index(ALIGNED[seed % len(ALIGNED)]), np.random.default_rng([seed, 8])
    plain = random_world(3 * seed * len(LAYERS) + 3 * number)
    made = hybrid_world(seed * len(LAYERS) + number, ahead=False)
    if rng.random() < 0.8:  # States of a block of 16 tokens.
        made["layers"]["state_elements"] = 2 * made["layers"]["kv_heads"] * made["layers"]["head_dim"]
    made |= {"caching": True, "block_size": 16}
    kv = planned_kv(made)
    made["block_tokens"] = int(rng.choice([16, kv.block_size, 2 * kv.block_size]))
    for one, shared in zip(made["requests"], plain["requests"], strict=True):
        one["previous_turn"] = shared["previous_turn"]
        one["block_ids"] = shared["block_ids"][: one["prompt"] // made["block_tokens"]]
    blocks = kv.longest_blocks(made["max_model_len"]) + int(rng.choice([0, 3, 10, 40, 200]))
    return with_documents(made | {"block_size": kv.block_size, "blocks": blocks}, rng)


def grouped_world(seed):
    """A world of one of the three kinds above, in turn."""
    return (hybrid_world, cached_hybrid_world, aligned_world)[seed % 3](seed // 3)


def with_documents(made, rng):
    """Let prompts, in most worlds, begin with a part of one of three documents, or be shorter ones sent again."""
    share, followed, sent = rng.choice([0.0, 0.5, 0.9]), {one["previous_turn"] for one in made["requests"]}, []
    for i, one in enumerate(made["requests"]):
        if one["previous_turn"] < 0 and rng.random() < share:
            document, blocks = 100 * int(rng.integers(0, 3)), int(one["prompt"] // made["block_tokens"])
            one["block_ids"] = [document + k for k in range(rng.integers(blocks // 2, blocks + 1))]
            again = [other for other in sent[-3:] if other["prompt"] <= one["prompt"]]
            if i not in followed and again and rng.random() < 0.7:
                one |= {name: again[0][name] for name in ("prompt", "block_ids")}
            sent.append(one)
    return made


def speculating_world(seed):
    """A world whose decodes verify proposed tokens, by n-gram (no look-ahead slots) or EAGLE, in little memory."""
    made, rng = world(3 * seed), np.random.default_rng([seed, 6])
    k = int(rng.integers(1, 6))
    made |= {"caching": seed % 2 == 1, "long_prefill_token_threshold": 0}
    if made["caching"]:
        with_documents(made, rng)
    else:
        made["requests"] = [one | {"block_ids": [], "previous_turn": -1} for one in made["requests"]]
    made["max_num_batched_tokens"] = max(made["max_num_batched_tokens"], made["max_num_seqs"] * (1 + k))
    made["speculation"] = {
        "method": str(rng.choice(["ngram", "eagle"])), "num_speculative_tokens": k,
        "acceptance": rng.choice([0.0, 0.4, 0.9, 1.0], k).tolist(), "draft_rate": float(rng.choice([1.0, 0.5])),
        "burstiness": float(rng.choice([0.0, 0.7])), "request_effect": 0.2,
    }  # fmt: skip
    setup = engine_of(made).s
    for i, one in enumerate(made["requests"]):
        tokens = range(one["output"] + k + 2)
        one["draws"] = [[drawn(setup, i, generated, hit) for hit in (None, 0, 1)] for generated in tokens]
    return made


def drawn(setup, i, generated, hit):
    """How many tokens are proposed for a step of a request, and how many accepted, with room for all of them."""
    chosen, rate = setup.deployment.speculation, float(setup.columns.hit_rate[i])
    rate += chosen.burstiness * (hit - rate) if hit is not None else 0.0
    number = uniform(int(setup.columns.draw_key[i]), generated)
    drafts = chosen.num_speculative_tokens if number < rate + (1 - rate) * chosen.missed_draft_rate else 0
    return drafts, accepted(number, rate, chosen.survival, drafts)


def compared(seeds, _python=None, world=world):
    """Compare all steps of random worlds. Return the counts of kinds and preemptions, and the steps that differ."""
    worlds = [world(seed) for seed in seeds]
    counts, different = Counter(), []
    for seed, one, expected in zip(seeds, worlds, vllm_steps(worlds, str(SOURCES)), strict=True):
        found, _ = recorded(one)
        different += [
            (seed, number, *pair) for number, pair in enumerate(zip_longest(found, expected)) if pair[0] != pair[1]
        ]
        lines = expected["layers" in one :]
        kind = "async" if one.get("async_scheduling") else one.get("policy", "fcfs")
        threshold = one["long_prefill_token_threshold"]
        side_by_side = sum(sum(tokens == threshold > 1 for _, tokens in line[2]) > 1 for line in lines)
        if "speculation" in one:
            counts["steps with several tokens"] += sum(any(tokens > 1 for _, tokens in line[2]) for line in lines)
        counts += Counter({
            kind: len(lines),
            "steps with a threshold": len(lines) * (threshold > 0),
            "steps with several prompts at the threshold": side_by_side,
            f"{kind} preemptions": sum(len(line[3]) for line in lines),
            "cached": sum(tokens > 0 for line in lines for _, tokens in line[4]),
            "steps": len(lines),
        })  # fmt: skip
    return counts, different


def test_every_step_is_that_of_vllm():
    counts, different = compared(range(WORLDS))
    assert not different[:1]
    assert counts["steps"] > 50 * WORLDS
    assert min(counts.values()) > WORLDS / 2, counts


def test_every_step_that_verifies_proposed_tokens_is_that_of_vllm():
    counts, different = compared(range(WORLDS), world=speculating_world)
    assert not different[:1]
    assert counts["steps"] > 20 * WORLDS
    assert counts["fcfs preemptions"] > WORLDS / 2, counts
    assert counts["cached"] > WORLDS, counts
    assert counts["steps with several tokens"] > 5 * WORLDS, counts


def test_every_step_in_kv_cache_groups_is_that_of_vllm():
    counts, different = compared(range(WORLDS), world=hybrid_world)
    assert not different[:1]
    assert counts["steps"] > 50 * WORLDS
    assert min(counts["fcfs preemptions"], counts["async preemptions"]) > WORLDS / 8, counts
    assert counts["async"] > 20 * WORLDS


def test_every_step_with_prefix_caches_in_groups_is_that_of_vllm():
    counts, different = compared(range(WORLDS // 2), world=cached_hybrid_world)
    assert not different[:1]
    assert counts["steps"] > 50 * WORLDS
    assert min(counts["fcfs preemptions"], counts["async preemptions"]) > WORLDS / 8, counts
    assert counts["async"] > 20 * WORLDS
    assert counts["cached"] > WORLDS, counts


def test_the_worlds_tell_the_order_in_which_groups_are_freed(monkeypatch):
    """These are among the worlds of the tests beside it, which thereby hold the reference to vLLM's order."""

    def release(self, cached, others=0):
        self.pool.free += others
        for table in reversed(cached.tables):
            self.pool.release([block for block in table if block])

    worlds = [cached_hybrid_world(14), aligned_world(0), aligned_world(5)]
    expected = [recorded(one) for one in worlds]
    monkeypatch.setattr(GroupPool, "release", release)
    assert all(recorded(one) != steps for one, steps in zip(worlds, expected, strict=True))


def test_every_step_with_prefix_caches_of_states_is_that_of_vllm():
    counts, different = compared(range(WORLDS), world=aligned_world)
    assert not different[:1]
    assert counts["steps"] > 50 * WORLDS
    assert counts["fcfs preemptions"] > WORLDS / 2, counts
    assert counts["cached"] > WORLDS / 2, counts
