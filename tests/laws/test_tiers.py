"""Laws 54 to 56, CPU memory and storage behind the prefix cache: the engines agree, loads cost what they must."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lengthwise.engine import simulate
from lengthwise.engine.deployment_builder import deploy
from lengthwise.schema.deployment import EngineLimits, KVOffloading, KVStorage
from lengthwise.schema.workload import SharedPrefixes, Workload
from lengthwise.usecases.kv import reuse

sys.path.insert(0, str(Path(__file__).parent))
from test_kernel_agrees import EXAMPLES, assert_same
from test_prefix_cache import caching_deployments, turns_and_groups

INFINITY = float("inf")
BLOCK_GB = 1e-3  # of a block in the worlds of this file
BLOCK = 16


@st.composite
def storages(draw, least):
    blocks = least + draw(st.sampled_from([0, 7, 40, INFINITY]))
    return KVStorage(
        size_gb=(blocks + 0.5) * BLOCK_GB,
        read_gb_per_s=draw(st.sampled_from([0.01, 0.2, 5.0, INFINITY])),
        write_gb_per_s=draw(st.sampled_from([0.05, 5.0, INFINITY])),
        latency_s=draw(st.sampled_from([0.0, 0.0, 0.02])),
        shared=draw(st.booleans()),
    )


@st.composite
def tiered_deployments(draw):
    """Replicas with a prefix cache, CPU memory and storage, at times so small that all chunks are in transfer."""
    deployment = draw(caching_deployments())
    least = -(-deployment.max_model_len // deployment.kv.block_size)
    blocks = least + draw(st.sampled_from([0, 3, 20, 10_000]))
    offloading = KVOffloading(
        size_gb=(blocks + 0.5) * BLOCK_GB,
        gb_per_s=draw(st.sampled_from([0.01, 0.5, 20.0, INFINITY])),
        latency_s=draw(st.sampled_from([0.0, 0.0, 0.01, 0.2])),
        load=draw(st.sampled_from(["always", "always", "if_faster"])),
        outputs=draw(st.booleans()),
        storage=draw(st.none() | storages(least)),
    )
    limits = dataclasses.replace(
        deployment.limits, prefix_cache="vllm", radix_eviction_policy="lru", kv_offloading=offloading
    )
    pool = least + draw(st.sampled_from([1, 1, 4, 20]))
    kv = dataclasses.replace(deployment.kv, num_blocks=pool, kv_bytes_per_block=BLOCK_GB * 1e9 / deployment.parallel.pp)
    return dataclasses.replace(deployment, limits=limits, kv=kv)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(turns_and_groups(), tiered_deployments(), st.sampled_from([INFINITY, INFINITY, 0.2]))
def test_kernel_and_reference_agree_with_tiers(workload, deployment, time_limit_s):
    kernel, reference = (
        simulate(workload, deployment, time_limit_s=time_limit_s, engine=engine) for engine in ("kernel", "reference")
    )
    assert_same(kernel, reference)
    r = kernel.requests
    assert (r.cached_tokens + r.loaded_tokens < workload.prompt_tokens).all()
    served = np.isfinite(r.first_token_s)
    # No request has its first token while its load is in flight.
    assert (r.first_token_s - r.arrival_s >= r.load_s - 1e-9)[served & (r.preemptions == 0)].all()


def serial_traffic(seed, n=30, gap_s=1000.0):
    """Requests of one replica, each after the end of the one before, with prefixes in common."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 12, n) * BLOCK + rng.integers(1, BLOCK, n)
    ids = [rng.integers(0, 3, k) for k in rng.integers(0, prompt // BLOCK + 1)]
    start = np.concatenate([[0], np.cumsum([len(one) for one in ids])])
    prefixes = SharedPrefixes(BLOCK, start, np.concatenate(ids), np.full(n, -1))
    return Workload(np.arange(n) * gap_s, prompt, rng.integers(1, 30, n), prefixes=prefixes)


@pytest.fixture(scope="module")
def plain():
    """A deployment with a prefix cache of 24 blocks and without CPU memory."""
    limits = EngineLimits(block_size=BLOCK, max_model_len=256, max_num_batched_tokens=64, enable_prefix_caching=True)
    return deploy("llama-3.1-8b", "H100", limits=limits, num_blocks=24)


def with_tier(plain, blocks, **more):
    offloading = KVOffloading((blocks + 0.5) * plain.kv.kv_bytes_per_block / 1e9 if blocks else 0.0, **more)
    return dataclasses.replace(plain, limits=dataclasses.replace(plain.limits, kv_offloading=offloading))


def served(workload, deployment):
    return simulate(workload, deployment, engine="reference").requests


SERIAL = settings(max_examples=max(5, EXAMPLES // 10), deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@SERIAL
@given(seed=st.integers(0, 2**32 - 1))
def test_serial_traffic_finds_in_unlimited_memory_what_the_stack_distances_say(plain, seed):
    workload = serial_traffic(seed)
    curve = reuse(workload, BLOCK, prompts_only=True)
    unlimited = served(workload, with_tier(plain, 10_000))
    np.testing.assert_array_equal(unlimited.cached_tokens + unlimited.loaded_tokens, curve.hits(10_000) * BLOCK)
    pool = served(workload, plain)
    for blocks in (16, 25, 60):
        tier = served(workload, with_tier(plain, blocks))
        np.testing.assert_array_equal(tier.cached_tokens, pool.cached_tokens)
        assert (tier.loaded_tokens <= unlimited.loaded_tokens).all()


@SERIAL
@given(seed=st.integers(0, 2**32 - 1))
def test_a_tier_of_no_blocks_is_no_tier(plain, seed):
    workload = serial_traffic(seed, gap_s=0.02)
    assert_same(
        simulate(workload, with_tier(plain, 0), engine="reference"), simulate(workload, plain, engine="reference")
    )


@SERIAL
@given(seed=st.integers(0, 2**32 - 1))
def test_loads_that_take_no_time_cost_nothing(plain, seed):
    workload = serial_traffic(seed)
    in_pool = dataclasses.replace(plain, kv=dataclasses.replace(plain.kv, num_blocks=10_000))
    loaded, cached = served(workload, with_tier(plain, 10_000, gb_per_s=INFINITY)), served(workload, in_pool)
    np.testing.assert_array_equal(loaded.cached_tokens + loaded.loaded_tokens, cached.cached_tokens)
    np.testing.assert_allclose(loaded.first_token_s, cached.first_token_s, rtol=1e-9)


def dense_world(seed, plain):
    """Requests on replicas whose CPU memory is so small that much is in storage only."""
    rng = np.random.default_rng(seed)
    replicas = int(rng.integers(1, 4))
    workload = serial_traffic(seed, n=50, gap_s=float(rng.choice([0.001, 0.01, 0.1])))
    storage = KVStorage(
        float(rng.choice([20, 40, INFINITY])) * plain.kv.kv_bytes_per_block / 1e9,
        read_gb_per_s=float(rng.choice([0.1, 5.0, INFINITY])),
        write_gb_per_s=float(rng.choice([1.0, INFINITY])),
        latency_s=float(rng.choice([0.0, 0.001])),
        shared=bool(rng.random() < 0.6),
    )
    load = str(rng.choice(["always", "always", "if_faster"]))
    made = with_tier(plain, int(rng.integers(16, 22)), load=load, outputs=bool(rng.random() < 0.3), storage=storage)
    return workload, dataclasses.replace(made, parallel=dataclasses.replace(made.parallel, replicas=replicas))


@settings(max_examples=max(10, EXAMPLES // 3), deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_kernel_and_reference_agree_where_much_is_read_from_storage(plain, seed):
    workload, deployment = dense_world(seed, plain)
    kernel, reference = (simulate(workload, deployment, engine=engine) for engine in ("kernel", "reference"))
    assert_same(kernel, reference)
    assert (kernel.requests.storage_tokens <= kernel.requests.loaded_tokens).all()


@SERIAL
@given(seed=st.integers(0, 2**32 - 1))
def test_serial_traffic_finds_in_unlimited_storage_what_the_stack_distances_say(plain, seed):
    workload = serial_traffic(seed)
    everything = reuse(workload, BLOCK, prompts_only=True).hits(10_000) * BLOCK
    for replicas in (1, 3):  # Replicas that share the storage find what one replica finds.
        made = with_tier(plain, 16, storage=KVStorage(shared=True))
        made = dataclasses.replace(made, parallel=dataclasses.replace(made.parallel, replicas=replicas))
        r = served(workload, made)
        np.testing.assert_array_equal(r.cached_tokens + r.loaded_tokens, everything)
    assert len(set(r.replica)) == 3


@SERIAL
@given(seed=st.integers(0, 2**32 - 1))
def test_replicas_with_storage_of_their_own_find_as_much_as_without_the_others(plain, seed):
    workload, made = serial_traffic(seed), with_tier(plain, 16, storage=KVStorage())
    separate = served(workload, dataclasses.replace(made, parallel=dataclasses.replace(made.parallel, replicas=2)))
    for number in range(2):
        rows = np.flatnonzero(separate.replica == number)
        alone = served(part_of(workload, rows), made)
        np.testing.assert_array_equal(alone.loaded_tokens, separate.loaded_tokens[rows])


def part_of(workload, rows):
    shared = workload.prefixes
    ids = [shared.block_ids[shared.start[i] : shared.start[i + 1]] for i in rows]
    start = np.concatenate([[0], np.cumsum([len(one) for one in ids])])
    prefixes = SharedPrefixes(BLOCK, start, np.concatenate(ids), np.full(len(rows), -1))
    columns = (workload.arrival_s[rows], workload.prompt_tokens[rows], workload.output_tokens[rows])
    return Workload(*columns, prefixes=prefixes)


def test_a_slow_link_makes_computing_faster(plain):
    workload = serial_traffic(1)
    always, faster = (
        served(workload, with_tier(plain, 10_000, gb_per_s=0.001, load=load)) for load in ("always", "if_faster")
    )
    assert always.loaded_tokens.sum() > 0
    assert faster.loaded_tokens.sum() == 0
    assert (faster.first_token_s <= always.first_token_s).all()
