"""KV cache groups: where they apply, what is refused with them, and what a request has in them by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lengthwise import EngineLimits, Workload, deploy, simulate
from lengthwise.engine import disaggregate
from lengthwise.engine.continuous_batching import Limits
from lengthwise.policy import scheduler
from lengthwise.schema.deployment import KvGroups, KVOffloading
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import SharedPrefixes

LIMITS = EngineLimits(max_num_seqs=4, max_num_batched_tokens=512, max_model_len=2048)
V1 = scheduler("vllm_v1")


def gemma(limits=LIMITS, chosen=V1, **more):
    return deploy("gemma-3-27b", "H100", limits=limits, scheduler=chosen, **more)


@pytest.mark.parametrize(
    "change",
    [
        {"hybrid_kv_cache": False},
        {"reserve": True},
        {"batching": "even"},
        {"memory": "paged"},
        {"preemption": "by_rank"},
        {"preemption_mode": "swap"},
        {"victim": "priority"},
    ],
)
def test_other_schedulers_cache_all_tokens_in_every_layer(change):
    other = dataclasses.replace(V1, **change)
    found = gemma(chosen=other)
    assert found.kv.groups is None
    with pytest.raises(
        InputError, match=r"KV cache groups .* are not modelled with .* plan the memory with a Scheduler"
    ):
        simulate(work(10, 10), dataclasses.replace(gemma(), scheduler=other))


@pytest.mark.parametrize(
    "limits",
    [
        {"enable_prefix_caching": True, "prefix_cache": "sglang"},
        {"enable_prefix_caching": True, "kv_offloading": KVOffloading(100.0)},
        {"max_in_flight": 2},
    ],
    ids=["radix tree", "kv_offloading", "max_in_flight"],
)
def test_other_limits_cache_all_tokens_in_every_layer(limits):
    assert gemma(limits=dataclasses.replace(LIMITS, **limits)).kv.groups is None


@pytest.mark.parametrize("chosen", ["vllm_v0", "sglang", "trtllm", "vidur_vllm"])
def test_groups_are_those_of_vllm_v1(chosen):
    assert deploy("gpt-oss-20b", "H100", limits=LIMITS, scheduler=scheduler(chosen)).kv.groups is None


def test_pipelines_and_disaggregation_have_no_groups():
    assert deploy("gemma-3-27b", "H100", pp=2, limits=LIMITS).kv.groups is None
    with pytest.raises(InputError, match=r"several KV cache groups, whose transfer is not modelled yet"):
        disaggregate(gemma(), gemma())
    with pytest.raises(InputError, match=r"counts every layer of gemma-3-27b in full"):
        Limits.of(gemma())


def work(prompt, output):
    one = np.ones(1, np.int64)
    return Workload(np.zeros(1), prompt * one, output * one, predicted_tokens=1.0 * output * one)


@pytest.mark.parametrize("engine", ["kernel", "reference"])
def test_a_prompt_and_its_decodes_by_hand(engine):
    """1,600 tokens in chunks of 512, and decodes from 1,601 on, with a window of 1,024 in six of seven groups."""
    steps = simulate(work(1600, 40), gemma(), engine=engine).steps
    # Chunks end at 512, 1,024, 1,536 and 1,600 tokens: 32, 64, 96 and 100 blocks in a group. When the chunk from token
    # 1,536 on is formed, tokens up to 1,536 - 1,023 = 513 have left the window, 32 blocks.
    assert steps.kv_blocks[:4].tolist() == [7 * 32, 7 * 64, 96 + 6 * 96, 100 + 6 * (100 - 32)]
    # Decode of token 1,601: 577 tokens before the window, 36 blocks; then another one at 1,615 computed tokens.
    assert steps.kv_blocks[4] == 101 + 6 * (101 - 36)
    assert steps.kv_blocks[4 + 14] == 101 + 6 * (101 - 36)
    assert steps.kv_blocks[4 + 15] == 101 + 6 * (101 - 37)
    assert steps.kv_blocks[4 + 16] == 102 + 6 * (102 - 37)


def test_chunks_are_freed_at_once_and_states_take_one_block():
    groups = KvGroups(16, 1, 3, 64, chunked=True, states=2)
    assert [groups.skipped(tokens) for tokens in (0, 63, 64, 127, 128)] == [0, 0, 4, 4, 8]
    assert groups.blocks(65, 64) == 5 + 3 * (5 - 4) + 2
    assert KvGroups(16, 1, states=3).blocks(1000, 999) == 63 + 3


def test_groups_admit_more_requests_at_once():
    limits = dataclasses.replace(LIMITS, max_num_seqs=256, max_model_len=8192)
    full = gemma(limits, dataclasses.replace(V1, hybrid_kv_cache=False))
    many = Workload(np.zeros(64), np.full(64, 4000), np.full(64, 200))
    seqs = [(run := simulate(many, one).steps).decode_seqs.max() for one in (gemma(limits), full)]
    assert run is not None
    assert seqs[0] > 2 * seqs[1]


def qwen(**more):
    limits = dataclasses.replace(LIMITS, enable_prefix_caching=True, **more)
    return deploy("qwen3-next-80b-a3b", "H200", tp=4, limits=limits)


@pytest.mark.parametrize("engine", ["kernel", "reference"])
def test_a_prompt_and_its_states_by_hand(engine):
    """700 tokens: blocks of 272 end steps at 272 (a step of at most 512) and 544, the last before the last token."""
    made = qwen()
    assert made.kv.groups == KvGroups(272, 1, 3, 2, in_flight_tokens=512, aligned=True)
    steps = simulate(work(700, 120), made, engine=engine).steps
    assert steps.prefill_tokens[:4].tolist() == [272, 272, 156, 0]
    # Each group of states has a block, and the one before it from which the step continues.
    assert steps.kv_blocks[:4].tolist() == [1 + 3, 2 + 6, 3 + 6, 3 + 3]
    # The decode of token 817 takes a block in every group, and the next one frees the state before it.
    assert steps.kv_blocks[3 + 115 : 3 + 118].tolist() == [3 + 3, 4 + 6, 4 + 3]


@pytest.mark.parametrize("engine", ["kernel", "reference"])
def test_hits_of_states_by_hand(engine):
    """Prompts of 10 blocks, one after the other: all of an earlier one, then the first 5 blocks, three times."""
    equal = np.array([10, 10, 5, 5, 5, 10])
    start, ids = np.concatenate([[0], np.cumsum(equal)]), np.concatenate([np.arange(blocks) for blocks in equal])
    prompts = SharedPrefixes(272, start, ids, np.full(6, -1))
    many = Workload(np.arange(6) * 1000.0, np.full(6, 2720), np.full(6, 4), prefixes=prompts)
    run = simulate(many, qwen(max_model_len=4096), engine=engine)
    # As with windows, the first prompt that shares 5 blocks finds no state there, and leaves one.
    assert run.requests.cached_tokens.tolist() == [0, 9 * 272, 0, 5 * 272, 5 * 272, 9 * 272]


@pytest.mark.parametrize("engine", ["kernel", "reference"])
def test_a_state_of_the_same_step_cannot_be_continued(engine):
    """Two equal prompts at once: the second waits until a step neither writes the first one's state nor reads it."""
    prompts = SharedPrefixes(272, np.array([0, 1, 2]), np.zeros(2, np.int64), np.full(2, -1))
    many = Workload(np.zeros(2), np.full(2, 300), np.full(2, 4), prefixes=prompts)
    steps = simulate(many, qwen(), engine=engine).steps
    assert steps.prefill_tokens[:3].tolist() == [272, 28, 28]


def test_states_with_a_prefix_cache_have_no_groups_with_max_step_seqs():
    assert qwen(max_step_seqs=4).kv.groups is None
    made = qwen()
    with pytest.raises(InputError, match=r"not modelled with max_step_seqs and a prefix cache of states yet"):
        simulate(work(10, 10), dataclasses.replace(made, limits=dataclasses.replace(made.limits, max_step_seqs=4)))


@pytest.mark.parametrize("engine", ["kernel", "reference"])
def test_hits_of_a_window_by_hand(engine):
    """Prompts of 100 blocks, one after the other, of which all or the first 50 are equal; windows of 8 blocks."""
    limits = dataclasses.replace(LIMITS, enable_prefix_caching=True)
    one = deploy("gpt-oss-20b", "H100", limits=limits, scheduler=V1)
    assert one.kv.groups is not None
    equal = np.array([100, 100, 50, 50, 100])
    start, ids = np.concatenate([[0], np.cumsum(equal)]), np.concatenate([np.arange(blocks) for blocks in equal])
    prompts = SharedPrefixes(16, start, ids, np.full(5, -1))
    many = Workload(np.arange(5) * 1000.0, np.full(5, 1600), np.full(5, 4), prefixes=prompts)
    found = simulate(many, one, engine=engine).requests.cached_tokens
    # The second prompt finds all but its last block: windows have blocks 91 to 98. Half of the prompt finds nothing in
    # them, and gives contents to the 8 blocks up to the end of what full attention has, so that the next one finds it.
    assert found.tolist() == [0, 99 * 16, 0, 50 * 16, 99 * 16]
