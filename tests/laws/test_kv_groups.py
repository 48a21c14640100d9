"""Laws of KV cache groups: groups of layers that cache the same tokens are one group."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lengthwise.engine import simulate
from lengthwise.schema.deployment import Deployment, KvGroups, aligned_chunk
from lengthwise.schema.records import Records

sys.path.insert(0, str(Path(__file__).parent))
from test_kernel_agrees import assert_same
from worlds import hybrid_worlds

EXAMPLES = int(os.environ.get("LENGTHWISE_EXAMPLES", "100")) // 2


def in_one_group(deployment: Deployment) -> Deployment:
    """The deployment with a pool of one group of full attention, and without a watermark, which is rounded."""
    kv, size = deployment.kv, deployment.kv.block_size
    blocks = -(-deployment.max_model_len // size) + kv.num_blocks % 9
    limits = dataclasses.replace(deployment.limits, watermark=0.0)
    return dataclasses.replace(deployment, kv=dataclasses.replace(kv, num_blocks=blocks, groups=None), limits=limits)


def in_groups(deployment: Deployment, groups: KvGroups, times: int) -> Deployment:
    kv = deployment.kv
    return dataclasses.replace(deployment, kv=dataclasses.replace(kv, num_blocks=times * kv.num_blocks, groups=groups))


def assert_same_but_blocks(workload: Any, one: Deployment, other: Deployment, times: int, seed: int) -> None:
    """The records are equal, with ``times`` the blocks."""
    found: list[Records] = [simulate(workload, deployment, seed=seed) for deployment in (one, other)]
    assert_same(found[0].requests, found[1].requests)
    for a, b in ((found[0].steps, found[1].steps),):
        assert a is not None
        assert b is not None
        assert_same(dataclasses.replace(a, kv_blocks=a.kv_blocks * times), b)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(hybrid_worlds(caches=False), st.integers(1, 4), st.integers(0, 3))
def test_groups_of_full_attention_are_one_group(world, number, seed):
    workload, one = world[0], in_one_group(world[1])
    groups = KvGroups(one.kv.block_size, number, in_flight_tokens=one.limits.max_num_batched_tokens)
    assert_same_but_blocks(workload, one, in_groups(one, groups, number), number, seed)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(hybrid_worlds(caches=False), st.integers(0, 2), st.integers(1, 3), st.booleans(), st.integers(0, 3))
def test_a_window_that_no_request_exceeds_frees_nothing(world, full, local, chunked, seed):
    workload, one = world[0], in_one_group(world[1])
    # A window's bound is a block larger, so that the pool must have one more for the longest request.
    one = dataclasses.replace(one, kv=dataclasses.replace(one.kv, num_blocks=one.kv.num_blocks + 1))
    tokens = one.limits.max_num_batched_tokens
    groups = KvGroups(one.kv.block_size, full, local, one.max_model_len + 1, chunked, 0, tokens)
    assert_same_but_blocks(workload, one, in_groups(one, groups, full + local), full + local, seed)


@settings(max_examples=EXAMPLES * 4, deadline=None)
@given(st.integers(1, 300), st.integers(0, 40), st.integers(1, 40), st.lists(st.integers(1, 60), min_size=1), st.data())
def test_steps_end_where_states_are_cached(prompt, generated, size, left, data):
    context, budget, done, ends = prompt + generated, max(left), 0, [0]
    last = (context - 1) // size * size
    junction = data.draw(st.integers(0, last // size)) * size
    for number in range(10_000):
        tokens = min(context - done, left[number % len(left)])
        chunk = aligned_chunk(done, tokens, prompt, context, junction, size, budget)
        assert 0 <= chunk <= tokens
        done += chunk
        ends.append(done)
        if done == context:
            break
    assert done == context  # The complete budget, which a step now and then has, lets every prompt advance.
    assert {last, junction} <= set(ends)
    assert all(end % size == 0 for end in ends if end < max(prompt, context - 1)) or size > budget
