"""CPU memory behind the prefix cache: a timeline computed by hand, and what it refuses."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from lengthwise import config
from lengthwise.engine import deploy, simulate
from lengthwise.metrics import summarize
from lengthwise.metrics.summary import hardware_of
from lengthwise.schema.deployment import EngineLimits, KVOffloading, KVStorage
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import SharedPrefixes, Workload

BLOCK = 16
LIMITS = EngineLimits(block_size=BLOCK, max_model_len=256, enable_prefix_caching=True)


@pytest.fixture(scope="module")
def plain():
    return deploy("llama-3.1-8b", "H100", limits=LIMITS, num_blocks=16)


def with_tier(plain, blocks, **more):
    offloading = KVOffloading((blocks + 0.5) * plain.kv.kv_bytes_per_block / 1e9, **more)
    return dataclasses.replace(plain, limits=dataclasses.replace(plain.limits, kv_offloading=offloading))


@pytest.fixture(scope="module")
def again():
    """A prompt of 10 blocks, one that takes the complete pool, and twice the first prompt again, at the same time."""
    prompt, count = np.array([165, 250, 165, 165]), np.array([10, 15, 10, 10])
    ids = np.concatenate([np.arange(10), np.arange(100, 115), np.arange(10), np.arange(10)])
    prefixes = SharedPrefixes(BLOCK, np.concatenate([[0], np.cumsum(count)]), ids, np.full(4, -1))
    return Workload(np.array([0.0, 10.0, 20.0, 20.0]), prompt, np.array([2, 6, 2, 2]), prefixes=prefixes)


@pytest.mark.parametrize("engine", ["reference", "kernel"])
def test_a_request_waits_for_its_load_and_another_one_for_the_same_blocks(plain, again, engine):
    deployment = with_tier(plain, 40, gb_per_s=2.0, latency_s=0.003)
    r = simulate(again, deployment, engine=engine).requests
    load_s = 0.003 + 10 * plain.kv.kv_bytes_per_block / 2e9
    assert r.cached_tokens.tolist() == [0, 0, 0, 160]
    assert r.loaded_tokens.tolist() == [0, 0, 160, 0]
    np.testing.assert_allclose(r.load_s, [0, 0, load_s, 0])
    np.testing.assert_allclose(r.scheduled_s[2:], 20 + load_s)
    np.testing.assert_allclose(r.queued_for_s, [0, 0, 0, load_s], atol=1e-12)
    summary = summarize(simulate(again, deployment, engine=engine), workload=again, deployment=deployment)
    assert math.isclose(summary.prefix_cache.loaded_share.value, 160 / again.prompt_tokens.sum())
    assert math.isclose(summary.prefix_cache.load_s.value, load_s)


def test_a_load_waits_for_the_store_of_its_blocks(plain, again):
    slow = with_tier(plain, 40, gb_per_s=20 * plain.kv.kv_bytes_per_block / 1e9)  # 20 blocks a second
    early = dataclasses.replace(again, arrival_s=np.array([0.0, 0.1, 0.2, 10.0]))
    r = simulate(early, slow, engine="reference").requests
    # Its blocks are stored half a second after the first step, and are loaded in another half.
    assert r.loaded_tokens[2] == 160
    assert 1.0 < r.scheduled_s[2] < 1.1
    np.testing.assert_allclose(r.load_s[2], 0.5)


@pytest.mark.parametrize("engine", ["reference", "kernel"])
def test_what_cpu_memory_has_lost_is_read_from_storage_and_then_loaded(plain, again, engine):
    storage = KVStorage(read_gb_per_s=1.0, latency_s=0.004)
    deployment = with_tier(plain, 16, gb_per_s=2.0, latency_s=0.003, storage=storage)
    r = simulate(again, deployment, engine=engine).requests
    # The second prompt takes 9 of the 10 chunks' places. To read them again evicts the tenth, which is the least
    # recently used one by then; the fourth request reads that.
    read_s = 2 * 0.004 + 10 * plain.kv.kv_bytes_per_block / 1e9
    load_s = 0.003 + 10 * plain.kv.kv_bytes_per_block / 2e9
    assert r.loaded_tokens.tolist() == [0, 0, 160, 0]
    assert r.storage_tokens.tolist() == [0, 0, 144, 0]
    np.testing.assert_allclose(r.load_s, [0, 0, load_s, 0])
    np.testing.assert_allclose(r.queued_for_s, [0, 0, read_s, read_s + load_s], atol=1e-12)
    np.testing.assert_allclose(r.scheduled_s[2:], 20 + read_s + load_s)
    summary = summarize(simulate(again, deployment, engine=engine), workload=again, deployment=deployment)
    assert math.isclose(summary.prefix_cache.storage_share.value, 144 / again.prompt_tokens.sum())
    faster = dataclasses.replace(storage, read_gb_per_s=0.01)
    r = simulate(again, with_tier(plain, 16, load="if_faster", storage=faster), engine=engine).requests
    assert (r.loaded_tokens[2], r.storage_tokens[2]) == (16, 0)  # what CPU memory has is still loaded


def test_a_storage_that_is_full_of_writes_leaves_others_out(plain, again):
    slow = KVStorage(16.5 * plain.kv.kv_bytes_per_block / 1e9, write_gb_per_s=10 * plain.kv.kv_bytes_per_block / 15e9)
    r = simulate(again, with_tier(plain, 16, storage=slow), engine="reference").requests
    # The first 10 blocks are written for 15 s, and stay in CPU memory so long: the 15 of the second have no room.
    assert r.loaded_tokens[2] == 160
    assert r.storage_tokens.sum() == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size_gb": -1.0}, "kv_offloading.size_gb must be at least 0"),
        ({"size_gb": math.nan}, "kv_offloading.size_gb must be at least 0"),
        ({"size_gb": 1.0, "gb_per_s": 0.0}, "kv_offloading.gb_per_s must be above 0"),
        ({"size_gb": 1.0, "latency_s": -0.1}, "kv_offloading.latency_s must be at least 0"),
        ({"size_gb": 1.0, "load": "if_fastr"}, "if_faster"),
        ({"size_gb": 0.0, "storage": KVStorage()}, "storage needs CPU memory"),
        ({"size_gb": 1.0, "usd_per_gb_hour": -0.1}, "kv_offloading.usd_per_gb_hour must be at least 0 and finite"),
    ],
)
def test_what_a_tier_refuses(given, message):
    with pytest.raises(InputError, match=message):
        KVOffloading(**given)


def test_a_tier_needs_a_prefix_cache_and_room_for_a_sequence(plain, again):
    with pytest.raises(InputError, match="kv_offloading needs enable_prefix_caching = true"):
        EngineLimits(kv_offloading=KVOffloading(1.0))
    assert EngineLimits(kv_offloading=KVOffloading(0.0)).kv_offloading is not None
    with pytest.raises(InputError, match="size_gb must hold one sequence of max_model_len 256 tokens"):
        simulate(again, with_tier(plain, 15), engine="reference")
    small = KVStorage(15 * plain.kv.kv_bytes_per_block / 1e9)
    with pytest.raises(InputError, match=r"storage.size_gb must hold one sequence of max_model_len 256 tokens"):
        simulate(again, with_tier(plain, 16, storage=small), engine="reference")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size_gb": -1.0}, "storage.size_gb must be at least 0"),
        ({"read_gb_per_s": 0.0}, "storage.read_gb_per_s must be above 0"),
        ({"write_gb_per_s": math.nan}, "storage.write_gb_per_s must be above 0"),
        ({"latency_s": math.inf}, "storage.latency_s must be at least 0 and finite"),
        ({"usd_per_gb_hour": math.nan}, "storage.usd_per_gb_hour must be at least 0 and finite"),
        ({"usd_per_gb_hour": 0.001}, "finite size_gb where a GB has a price; it has usd_per_gb_hour 0.001"),
    ],
)
def test_what_a_storage_refuses(given, message):
    with pytest.raises(InputError, match=message):
        KVStorage(**given)


def test_a_scenario_names_a_wrong_key():
    text = '[deployment]\nmodel = "x"\ngpu = "y"\n[workload]\nprompt = 5\noutput = 5\nrequest_rate = 1\n'
    found = config.loads(f'{text}[engine.kv_offloading]\nsize_gb = 64\nlatency = "50us"\n')
    assert found.engine.kv_offloading.latency == pytest.approx(50e-6)
    storage = config.loads(f"{text}[engine.kv_offloading]\nsize_gb = 64\nstorage = {{ shared = true }}\n")
    assert storage.engine.kv_offloading.storage.shared
    assert storage.engine.kv_offloading.storage.size_gb == math.inf
    with pytest.raises(InputError, match="size_gb"):
        config.loads(f"{text}[engine.kv_offloading]\nsize_gb = -1\n")
    with pytest.raises(InputError, match="gb_per_s"):
        config.loads(f"{text}[engine.kv_offloading]\nsize_gb = 1\nbandwidth = 3\n")


def test_memory_and_storage_are_in_the_price(plain, again):
    def with_replicas(replicas, **more):
        made = with_tier(plain, 16, **more)
        return dataclasses.replace(made, parallel=dataclasses.replace(made.parallel, replicas=replicas))

    def storage(*, shared):
        return KVStorage(10.0, usd_per_gb_hour=0.05, shared=shared)

    of_gpus = 3 * plain.gpu.price_per_hour_usd
    assert with_replicas(3).price_per_hour_usd == pytest.approx(of_gpus)
    memory = 3 * 16.5 * plain.kv.kv_bytes_per_block / 1e9 * 200.0
    assert memory > 1
    assert with_replicas(3, usd_per_gb_hour=200.0).price_per_hour_usd == pytest.approx(of_gpus + memory)
    own, shared = (with_replicas(3, storage=storage(shared=shared)) for shared in (False, True))
    assert own.price_per_hour_usd == pytest.approx(of_gpus + 3 * 0.5)
    assert shared.price_per_hour_usd == pytest.approx(of_gpus + 0.5)
    # The summary of a run divides this price by its tokens.
    cost = [
        hardware_of(simulate(again, made, engine="reference"), made).cost.usd_per_million_tokens.value
        for made in (with_replicas(3, storage=KVStorage(10.0)), own)
    ]
    assert cost[1] / cost[0] == pytest.approx(own.price_per_hour_usd / of_gpus)
