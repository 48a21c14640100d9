"""Hit rates by cache size: equal to a simulated LRU cache, to the engine, to recorded traffic, and to closed forms."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise import catalog, config, engine
from lengthwise.config.workload import read_trace
from lengthwise.engine.step_time import step_time
from lengthwise.policy import scheduler
from lengthwise.report.kv import write_kv_html
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import After, SharedPrefixes, Workload
from lengthwise.usecases.kv import Prices, reuse, study, study_trace
from lengthwise.usecases.variants import build

BLOCK = 4


@st.composite
def workloads(draw):
    """Requests with shared blocks and later turns; later turns follow their parents without a delay."""
    prompts, outputs, ids, turns = [], [], [], []
    for i in range(draw(st.integers(1, 14))):
        turn = draw(st.integers(-1, i - 1))
        before = prompts[turn] + outputs[turn] if turn >= 0 else 0
        prompt = before + draw(st.integers(1, 4 * BLOCK + 1))
        shared = [] if turn >= 0 else draw(st.lists(st.integers(0, 2), max_size=-(-prompt // BLOCK)))
        for column, value in ((prompts, prompt), (outputs, draw(st.integers(1, 9))), (ids, shared), (turns, turn)):
            column.append(value)
    n = len(prompts)
    start = np.concatenate([[0], np.cumsum([len(one) for one in ids])])
    prefixes = SharedPrefixes(BLOCK, start, np.array(list(itertools.chain(*ids)), np.int64), np.array(turns))
    turns = np.array(turns)
    after = After(np.concatenate([[0], np.cumsum(turns >= 0)]), turns[turns >= 0])
    return Workload(np.arange(n) * 1000.0, np.array(prompts), np.array(outputs), after=after, prefixes=prefixes)


def contents(workload):
    """The tokens of each request, prompt and output, made from what prefixes state."""
    fresh, made, shared = itertools.count(10**6), [], workload.prefixes
    for i, (prompt, output) in enumerate(zip(workload.prompt_tokens, workload.output_tokens, strict=True)):
        own = list(made[shared.turns[i]]) if shared.turns[i] >= 0 else []
        for number in shared.block_ids[shared.start[i] : shared.start[i + 1]]:
            own += range(number * BLOCK, (number + 1) * BLOCK)
        # A block that the prompt fills only in part shares nothing.
        own = own[: prompt if shared.turns[i] >= 0 else prompt // BLOCK * BLOCK]
        made.append(own + [next(fresh) for _ in range(prompt + output - len(own))])
    return made


def serial_lru(workload, capacity, *, prompts_only):
    """Hits of each request in a serial LRU cache of full blocks, one block object after the other."""
    cache, hits = OrderedDict(), []
    for i, tokens in enumerate(contents(workload)):
        prompt, output = int(workload.prompt_tokens[i]), int(workload.output_tokens[i])
        computed = prompt if prompts_only else prompt + output - 1
        blocks = [tuple(tokens[: (k + 1) * BLOCK]) for k in range(computed // BLOCK)]
        findable = blocks[: (prompt - 1) // BLOCK]
        hits.append(sum(1 for _ in itertools.takewhile(cache.__contains__, findable)))
        for block in reversed(blocks):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@given(workloads(), st.booleans())
def test_one_pass_equals_a_simulated_cache_of_each_size(workload, prompts_only):
    found = reuse(workload, BLOCK, prompts_only=prompts_only)
    for capacity in range(1, found.largest + 2):
        assert found.hits(capacity).tolist() == serial_lru(workload, capacity, prompts_only=prompts_only)


@given(workloads(), st.integers(0, 12))
def test_the_engine_that_serves_one_request_at_a_time_finds_as_much(workload, more):
    """The engine's pool is one block smaller where a request fills its last block only in part."""
    most = -(-int((workload.prompt_tokens + workload.output_tokens).max()) // BLOCK)
    limits = EngineLimits(max_num_seqs=1, block_size=BLOCK, enable_prefix_caching=True, watermark=0.0)
    made = engine.deploy("llama-3.1-8b", "H100", limits=limits, num_blocks=most + more, scheduler=scheduler("vllm_v1"))
    records = engine.simulate(workload, made, engine="reference").requests
    found = reuse(workload, BLOCK, records)
    assert (found.hits(most + more) * BLOCK >= records.cached_tokens).all()
    assert (found.hits(most + more - 1) * BLOCK <= records.cached_tokens).all()


TABLE = {500: 0.042, 1000: 0.045, 2000: 0.055, 5000: 0.119, 10_000: 0.215, 20_000: 0.294, 50_000: 0.356, 10**9: 0.366}
"""Shares of block references found by a serial LRU simulation of Mooncake's conversation trace, by blocks of 512."""


def test_the_conversation_trace_has_the_hit_rates_of_a_simulated_cache(shared):
    workload = read_trace(shared("data/traces/mooncake_conversation_trace.jsonl.gz"))
    found = reuse(workload, 512, prompts_only=True)
    for blocks, share in TABLE.items():
        assert found.hits(blocks).sum() / found.references.sum() == pytest.approx(share, abs=1e-3)
    # Smaller blocks find the same tokens and, at the end of a chain, what is left of a block of 512.
    small = reuse(workload, 128, prompts_only=True)
    assert small.hits(10**9).sum() * 128 == pytest.approx(found.hits(10**9).sum() * 512, rel=0.01)


def independent(popularity, requests, seed=0):
    """Requests for one block each, drawn independently: the independent reference model."""
    ids = np.random.default_rng(seed).choice(len(popularity), requests, p=popularity)
    at = np.arange(requests + 1)
    return Workload(
        at[:-1].astype(float),
        np.full(requests, BLOCK + 1),
        np.full(requests, 1),
        prefixes=SharedPrefixes(BLOCK, at, ids),
    )


def king(popularity, capacity):
    """The hit rate of LRU under independent references (King, 1971), by all ordered contents of the cache."""
    total = 0.0
    for cached in itertools.permutations(range(len(popularity)), capacity):
        chance, left = 1.0, 1.0
        for one in cached:
            chance, left = chance * popularity[one] / left, left - popularity[one]
        total += chance * sum(popularity[one] for one in cached)
    return total


def che(popularity, capacity):
    """Che's approximation (2002): a block stays for the time in which ``capacity`` distinct blocks are used."""
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - np.exp(-popularity * middle)).sum() < capacity else (low, middle)
    return float((popularity * (1 - np.exp(-popularity * low))).sum())


def test_independent_references_have_the_hit_rates_of_the_closed_form():
    popularity = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    found = reuse(independent(popularity, 100_000), BLOCK)
    for capacity in range(1, 6):
        # 0.01 is more than six standard errors of a share of 100,000 hits.
        assert found.hits(capacity).mean() == pytest.approx(king(popularity, capacity), abs=0.01)


def test_independent_references_have_the_hit_rates_of_ches_approximation():
    popularity = np.arange(1, 1001) ** -0.8
    popularity /= popularity.sum()
    found = reuse(independent(popularity, 200_000), BLOCK)
    for capacity in (10, 50, 200, 600):
        assert found.hits(capacity)[20_000:].mean() == pytest.approx(che(popularity, capacity), abs=0.01)


def test_replicas_share_nothing():
    workload = independent(np.full(20, 1 / 20), 400)
    split = engine.deploy(
        "llama-3.1-8b", "H100", replicas=2, limits=EngineLimits(block_size=BLOCK), scheduler=scheduler("vllm_v1")
    )
    records = engine.simulate(workload, split, engine="reference").requests
    found = reuse(workload, BLOCK, records)
    for replica in (0, 1):
        rows = np.flatnonzero(records.replica == replica)
        order = rows[np.lexsort((rows, records.scheduled_s[rows]))]
        alone = reuse(replace(workload.take(order), arrival_s=np.arange(len(order)) * 1.0), BLOCK)
        by_row = dict(zip(order.tolist(), alone.hits(8).tolist(), strict=True))
        assert found.hits(8)[rows].tolist() == [by_row[row] for row in rows.tolist()]


def test_turns_of_a_trace_follow_after_their_think_times():
    """Between two turns, which stand together in the file, come three others, which a small cache remembers instead."""
    after = After(np.array([0, 0, 1, 1, 1, 1]), np.array([0]), np.array([0.0, 100, 0, 0, 0]))
    prompts = np.array([2, 4, 2, 2, 2]) * BLOCK
    prefixes = SharedPrefixes(BLOCK, np.zeros(6, int), np.zeros(0, int), np.array([-1, 0, -1, -1, -1]))
    workload = Workload(np.array([0.0, 0, 1, 2, 3]), prompts, np.full(5, 1), after=after, prefixes=prefixes)
    found = reuse(workload, BLOCK)
    assert found.hits(6).sum() == 0
    assert found.hits(8).tolist() == [0, 2, 0, 0, 0]


SESSIONS = """
[workload]
prompt = 100
output = 50
num_requests = 60
session_rate = 2
[workload.groups]
count = 3
system_prompt = 400
[workload.sessions]
turns = 3
[deployment]
model = "llama-3.1-8b"
gpu = "A100-80GB"
[engine]
enable_prefix_caching = true
[run]
seeds = 2
"""


@pytest.fixture(scope="module")
def sessions():
    (variant,) = build(config.loads(SESSIONS))
    return variant, study(variant, [1.0], Prices(0.01, (("slow", 0.05), ("fast", 25.0))))


def test_a_pool_that_never_fills_finds_what_the_simulation_finds(sessions):
    _, found = sessions
    assert found.found.simulated.value == pytest.approx(found.sizes[-1].token_share.value, abs=0.01)
    shares = [size.token_share.value for size in found.curve]
    assert shares == sorted(shares)
    assert [size.name for size in found.sizes if size.name.startswith("1 ")] == ["1 GB"]
    assert found.sizes[-1].token_share.half_width > 0


@pytest.mark.parametrize(
    ("memory_gb", "rate", "given"), [([1.0], -3.0, "CPU.* is -3"), ([0.0], 3.0, "memory .* it is 0")]
)
def test_sizes_and_rates_are_refused_before_any_simulation(sessions, memory_gb, rate, given):
    simulated = []
    with pytest.raises(InputError, match=given):
        study(sessions[0], memory_gb, Prices(0.01, (("CPU", rate),)), progress=lambda *done: simulated.append(done))
    assert simulated == []


def test_loads_win_from_the_break_even_prefix_on(sessions):
    variant, found = sessions
    deployed = variant.deployment
    seconds, size = step_time(deployed.cost), deployed.kv.block_size

    def saved_s(prefix):
        budget = deployed.limits.max_num_batched_tokens
        assert prefix + found.new_tokens <= budget
        return seconds(0, 0, [(prefix + found.new_tokens, 0)]) - seconds(0, 0, [(found.new_tokens, prefix)])

    slow, fast = found.loadings
    even = fast.break_even_tokens
    assert even.model_low <= even.value <= even.model_high
    load_s = deployed.kv.kv_bytes_per_block / size / 25e9
    assert load_s * even.value < saved_s(int(even.value))
    if even.value > size:
        assert load_s * (even.value - size) >= saved_s(int(even.value) - size)
    assert slow.break_even_tokens.value > even.value


def test_saved_seconds_are_those_of_the_prompts_computed_alone(sessions):
    variant, found = sessions
    workload = variant.workload(variant.scenario.run.seed)
    assert workload.prompt_tokens.max() <= variant.deployment.limits.max_num_batched_tokens
    seconds = step_time(variant.deployment.cost)
    shares = []
    for seed in (0, 1):
        workload = variant.workload(seed)
        one = reuse(workload, 16, engine.simulate(workload, variant.deployment, seed=seed).requests)
        cached = (one.hits(10**9) * 16).astype(int)
        alone = [seconds(0, 0, [(int(p), 0)]) for p in workload.prompt_tokens]
        rest = [seconds(0, 0, [(int(p - c), int(c))]) for p, c in zip(workload.prompt_tokens, cached, strict=True)]
        shares.append(1 - sum(rest) / sum(alone))
    assert found.sizes[-1].saved_share.value == pytest.approx(np.mean(shares), rel=1e-9)


SMALL_POOL = ["deployment.num_blocks=200", "run.seeds=6", "workload.num_requests=200"]


def added_s(variant, name, found):
    """Seconds [seeds] per hour of traffic that memory adds to the GPU pool, request by request."""
    deployed, rows = variant.deployment, []
    blocks, pool = (next(size.blocks for size in found.sizes if size.name == each) for each in (name, "GPU pool"))
    seconds = step_time(deployed.cost)
    for seed in range(variant.scenario.run.seeds):
        workload = variant.workload(seed)
        one = reuse(workload, 16, engine.simulate(workload, deployed, seed=seed).requests)
        pairs = zip(one.prompt_tokens, one.hits(pool) * 16, one.hits(blocks) * 16, strict=True)
        more_s = [seconds(0, 0, [(int(p - a), int(a))]) - seconds(0, 0, [(int(p - b), int(b))]) for p, a, b in pairs]
        starts = workload.arrival_s[np.diff(workload.after.start) == 0]
        rate = (len(starts) - 1) / (starts.max() - starts.min())
        rows.append(sum(more_s) * 3600 * rate / len(starts))
    return np.array(rows)


@pytest.fixture(scope="module")
def behind_a_small_pool():
    (variant,) = build(config.loads(SESSIONS, overrides=SMALL_POOL))
    return variant, study(variant, [0.6, 1.0, 50.0, 60.0], Prices(0.01))


@pytest.mark.parametrize("name", ["0.6 GB", "1 GB"])
def test_net_saving_and_price_are_those_of_the_seconds_added_to_the_pool(behind_a_small_pool, name):
    variant, found = behind_a_small_pool
    memory = next(size for size in found.sizes if size.name == name)
    more_s, usd = added_s(variant, name, found), memory.gb * 0.01
    gpu_usd_per_s = variant.deployment.price_per_hour_usd / 3600
    net, each = memory.net_usd_per_hour, memory.usd_per_saved_s
    assert net.value == pytest.approx(more_s.mean() * gpu_usd_per_s - usd, rel=1e-6)
    # Student's t with five degrees of freedom, of the differences of each seed.
    half_s = 2.570582 * more_s.std(ddof=1) / np.sqrt(6)
    assert net.half_width == pytest.approx(half_s * gpu_usd_per_s, rel=1e-5)
    assert each.value == pytest.approx(usd / more_s.mean(), rel=1e-6)
    assert each.half_width / each.value == pytest.approx(half_s / more_s.mean(), rel=1e-5)
    assert each.model_low < each.value < each.model_high
    assert net.model_low < net.value < net.model_high


def test_a_price_without_an_upper_bound_is_unknown():
    """Two seeds tell too little of the seconds that memory adds: their interval includes 0."""
    (variant,) = build(config.loads(SESSIONS, overrides=[*SMALL_POOL, "run.seeds=2", "workload.num_requests=60"]))
    found = study(variant, [1.0], Prices(0.01))
    memory = next(size for size in found.sizes if size.name == "1 GB")
    worth_usd = memory.net_usd_per_hour.value + 0.01 * memory.gb
    assert memory.net_usd_per_hour.half_width > worth_usd > 0
    assert np.isnan(memory.usd_per_saved_s.value)


def test_memory_that_finds_nothing_more_costs_its_price(behind_a_small_pool):
    _, found = behind_a_small_pool
    less, more = (next(size for size in found.sizes if size.name == name) for name in ("50 GB", "60 GB"))
    assert less.token_share.value == pytest.approx(more.token_share.value)
    lost = less.net_usd_per_hour.value - more.net_usd_per_hour.value
    assert lost == pytest.approx(0.01 * (more.gb - less.gb), rel=1e-9)
    assert np.isnan(next(s for s in found.sizes if s.name == "GPU pool").net_usd_per_hour.value)


def test_the_gpu_pool_keeps_outputs_where_the_memory_does_not(behind_a_small_pool):
    variant, both = behind_a_small_pool
    found = study(variant, [1.0], Prices(0.01), prompts_only=True)
    pool, same = (next(size for size in one.sizes if size.name == "GPU pool") for one in (found, both))
    assert pool.token_share == same.token_share
    assert pool.saved_s_per_hour.value == pytest.approx(same.saved_s_per_hour.value)
    assert found.sizes[-1].token_share.value < both.sizes[-1].token_share.value
    assert found.found.unlimited.value == pytest.approx(both.sizes[-1].token_share.value)
    assert any("blocks of outputs" in note for note in found.notes)


def serial_tiers(overrides, memory_gb=()):
    """A study of tiers behind a small pool, whose requests come one after the other, as good as always."""
    slow = ["workload.session_rate=0.002", "workload.num_requests=240", "run.seeds=1", "deployment.num_blocks=120"]
    (variant,) = build(config.loads(SESSIONS, overrides=[*slow, "engine.max_model_len=1900", *overrides]))
    return variant, study(variant, memory_gb)


@pytest.mark.parametrize("outputs", ["true", "false"])
def test_unlimited_memory_finds_in_the_simulation_what_the_hierarchy_says(outputs):
    overrides = ["engine.kv_offloading.size_gb=9000", f"engine.kv_offloading.outputs={outputs}"]
    variant, found = serial_tiers(overrides)
    pool, memory = found.tiers
    assert (pool.name, memory.name, memory.gb) == ("GPU pool", "CPU memory", 9000)
    assert memory.token_share.value > 0.04
    both = pool.token_share.value + memory.token_share.value
    # Of a request, the engine's pool can have a block less, and CPU memory the block of the last token.
    block = variant.deployment.kv.block_size * 240 / variant.workload(0).prompt_tokens.sum()
    assert pool.simulated.value == pytest.approx(pool.token_share.value, abs=block)
    assert pool.simulated.value + memory.simulated.value == pytest.approx(both, abs=0.1 * block)


def test_storage_finds_what_the_memory_before_it_has_lost():
    sizes = ["engine.kv_offloading.size_gb=0.3", "engine.kv_offloading.storage.size_gb=inf"]
    _, found = serial_tiers(sizes)
    _, unlimited = serial_tiers(["engine.kv_offloading.size_gb=9000"])
    assert [tier.name for tier in found.tiers] == ["GPU pool", "CPU memory", "storage"]
    assert all(tier.token_share.value > 0.01 for tier in found.tiers[::2])
    for of in ("token_share", "simulated"):
        total, most = (sum(getattr(tier, of).value for tier in one.tiers) for one in (found, unlimited))
        assert total == pytest.approx(most, abs=1e-9)


def test_replicas_that_share_a_storage_find_what_one_replica_finds():
    def found(of, replicas, *, shared, outputs):
        sizes = ["size_gb=0.3", f"outputs={outputs}", f"storage.shared={shared}", "storage.size_gb=inf"]
        overrides = [f"engine.kv_offloading.{size}" for size in sizes]
        _, one = serial_tiers([*overrides, f"deployment.replicas={replicas}"])
        return sum(getattr(tier, of).value for tier in one.tiers)

    # A pool with outputs that the storage does not get would find them on one replica alone.
    alone = found("token_share", 1, shared="true", outputs="true")
    assert found("token_share", 2, shared="true", outputs="true") == pytest.approx(alone, abs=1e-9)
    assert found("token_share", 2, shared="false", outputs="true") < alone - 0.01
    simulated = found("simulated", 2, shared="true", outputs="false")
    assert found("token_share", 2, shared="true", outputs="false") == pytest.approx(simulated, abs=1e-9)


def test_memory_behind_the_pool_adds_to_it_what_the_pool_does_not_have():
    variant, found = serial_tiers(["engine.kv_offloading.size_gb=0.5"], [0.5])
    pool, memory = (tier.token_share.value for tier in found.tiers)
    own = next(size for size in found.sizes if size.name == "0.5 GB")
    assert abs(own.blocks - variant.deployment.offload_blocks) <= 1
    assert own.hierarchy_share.value == pytest.approx(pool + memory, abs=1e-3)
    for size in (*found.curve, own):
        assert size.hierarchy_share.value >= max(pool, size.token_share.value) - 1e-12
    shares = [size.hierarchy_share.value for size in found.curve]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(pool)
    # With outputs in both, memory that is smaller than the pool adds nothing.
    sizes = ["engine.kv_offloading.outputs=true", "engine.max_model_len=1800", "engine.kv_offloading.size_gb=0.24"]
    variant, small = serial_tiers(sizes)
    assert variant.deployment.offload_blocks < variant.deployment.kv.num_blocks
    assert small.tiers[1].token_share.value == 0


def test_the_price_of_the_memory_is_the_scenarios_unless_the_command_has_one():
    priced = [*SMALL_POOL, "engine.kv_offloading.size_gb=1", "engine.kv_offloading.usd_per_gb_hour=0.02"]
    (plain,), (variant,) = (build(config.loads(SESSIONS, overrides=each)) for each in (SMALL_POOL, priced))
    found, other = study(variant, [1.0]), study(variant, [1.0], Prices(0.01))
    assert (found.usd_per_gb_hour, other.usd_per_gb_hour) == (0.02, 0.01)
    assert np.isnan(study(plain, [1.0]).usd_per_gb_hour)
    # The price of the GPUs' seconds is that of the GPUs alone.
    assert variant.deployment.price_per_hour_usd > plain.deployment.price_per_hour_usd
    assert found.gpu_usd_per_s == pytest.approx(plain.deployment.price_per_hour_usd / 3600)


def test_an_overloaded_deployment_is_warned_of_and_saves_no_more_in_an_hour_of_traffic(sessions):
    _, found = sessions
    (slow,) = build(config.loads(SESSIONS, overrides=["engine.max_num_seqs=1"]))
    late = study(slow)
    assert any("does not keep up with its load" in note for note in late.notes)
    assert not any("keep up" in note for note in found.notes)
    normal, overloaded = (one.sizes[-1].saved_s_per_hour.value for one in (found, late))
    assert overloaded == pytest.approx(normal, rel=0.02)


def test_a_closed_loop_has_the_rate_of_its_run():
    text = SESSIONS.replace("session_rate = 2", "concurrency = 2").replace("[workload.sessions]\nturns = 3\n", "")
    (variant,) = build(config.loads(text, overrides=["run.seeds=1"]))
    workload = variant.workload(0)
    end_s = engine.simulate(workload, variant.deployment, seed=0).end_s
    assert f"{len(workload) / end_s:.2g} requests/s each" in study(variant).metadata[-1]


def test_one_run_has_an_interval_from_batches_of_its_requests():
    found = study_trace(independent(np.full(20, 1 / 20), 1000), None, None)
    assert 0 < found.curve[-1].token_share.half_width < 0.1
    assert np.isnan(study_trace(independent(np.full(20, 1 / 20), 100), None, None).curve[-1].token_share.half_width)


def test_a_deployment_that_serves_nothing_is_refused():
    (variant,) = build(config.loads(SESSIONS, overrides=["engine.max_model_len=64"]))
    with pytest.raises(InputError, match="served none of 60"):
        study(variant)


def test_a_workload_without_prefixes_is_refused():
    alone = Workload(np.zeros(2), np.array([20, 20]), np.array([1, 1]))
    nothing = SharedPrefixes(4, np.zeros(3, int), np.zeros(0, int))
    for workload in (alone, replace(alone, prefixes=nothing)):
        with pytest.raises(InputError, match="prompts share prefixes"):
            study_trace(workload, None, None)


@pytest.mark.parametrize("shared", [True, False])
def test_net_saving_has_the_price_of_the_storage_and_what_it_finds(shared):
    """Replicas that share a storage pay for it together."""
    storage = {"size_gb": 2, "usd_per_gb_hour": 0.03, "shared": str(shared).lower()}
    given = [f"engine.kv_offloading.storage.{name}={value}" for name, value in storage.items()]
    overrides = [*SMALL_POOL, "deployment.replicas=2", "engine.kv_offloading.size_gb=0.5", *given]
    (variant,) = build(config.loads(SESSIONS, overrides=overrides))
    found = study(variant, [0.5, 0.6], Prices(0.01))
    storage_usd = 0.06 / 2 if shared else 0.06
    assert found.storage_usd_per_hour == pytest.approx(storage_usd)
    (plain,) = build(config.loads(SESSIONS, overrides=[*SMALL_POOL, "deployment.replicas=2"]))
    large = next(one for one in study(plain, [50.0], Prices(0.01), prompts_only=True).sizes if one.name == "50 GB")
    worth_usd = large.net_usd_per_hour.value + 0.01 * large.gb  # of all that one replica has computed
    for size in (one for one in found.sizes if one.name in ("0.5 GB", "0.6 GB")):
        usd = 0.01 * size.gb + storage_usd
        both_usd = size.net_usd_per_hour.value + usd
        assert size.usd_per_saved_s.value == pytest.approx(usd / both_usd * found.gpu_usd_per_s)
        assert both_usd > worth_usd * 1.1 if shared else both_usd == pytest.approx(worth_usd, rel=0.05)


def test_storage_alone_can_have_a_price():
    storage = ["engine.kv_offloading.storage.size_gb=2", "engine.kv_offloading.storage.usd_per_gb_hour=0.03"]
    (variant,) = build(config.loads(SESSIONS, overrides=[*SMALL_POOL, "engine.kv_offloading.size_gb=0.5", *storage]))
    found = study(variant, [0.5])
    assert (found.usd_per_gb_hour, found.storage_usd_per_hour) == (0, 0.06)
    assert all(np.isfinite(one.net_usd_per_hour.value) for one in found.sizes if one.name != "GPU pool")


IN_GROUPS = """
[workload]
prompt = 60
output = 40
num_requests = 40
session_rate = 2
[workload.groups]
count = 3
system_prompt = 300
[workload.sessions]
turns = 3
think_time = "5s"
[deployment]
model = "gpt-oss-20b"
gpu = "A100-80GB"
num_blocks = 300
[engine]
enable_prefix_caching = true
max_num_batched_tokens = 256
max_model_len = 1200
[run]
seeds = 2
"""
"""A window of 128 tokens in half of the layers: two groups."""


def simulated_share(variant, blocks):
    """The mean share of prompt tokens that the engine finds with a pool of so many blocks."""
    made = replace(variant.deployment, kv=replace(variant.deployment.kv, num_blocks=blocks))
    runs = [engine.simulate(variant.workload(seed), made, seed=seed).requests for seed in (0, 1)]
    return np.mean([r.cached_tokens.sum() / r.prompt_tokens.sum() for r in runs])


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ([], (1, 1)),
        (["deployment.model=llama-4-scout", "deployment.tp=4", "deployment.gpu=H200"], (1, 3)),
        (["deployment.replicas=3", "workload.num_requests=90"], (1, 1)),
        (["deployment.model=qwen3-next-80b-a3b", "deployment.tp=2", "deployment.gpu=H200"], (1, 3)),
    ],
    ids=["windows", "chunks", "replicas", "states"],
)
def test_kv_cache_groups_have_the_bytes_and_hits_of_the_simulation(tmp_path, changes, groups):
    (variant,) = build(config.loads(IN_GROUPS, overrides=changes))
    found, kv = study(variant), variant.deployment.kv
    assert (kv.groups.full, kv.groups.local) == groups
    longest = variant.deployment.max_model_len
    pool = next(size for size in found.sizes if size.name == "GPU pool")
    assert (pool.blocks, pool.tokens) == (kv.num_blocks, kv.kv_tokens(longest))
    assert pool.gb * 1e9 == pytest.approx(kv.num_blocks * kv.kv_bytes_per_block * variant.deployment.parallel.tp)
    sizes = [*found.sizes, *found.curve[4:]]
    assert len({size.blocks for size in sizes if size.blocks >= kv.longest_blocks(longest)}) > 5
    for size in sizes:
        if size.blocks >= kv.longest_blocks(longest):
            assert size.token_share.value == pytest.approx(simulated_share(variant, size.blocks), abs=1e-12)
    assert {size.blocks for size in found.sizes} < {size.blocks for size in found.curve}
    write_kv_html(tmp_path / "kv.html", found)
    assert "Simulations of the deployment with a GPU pool" in (tmp_path / "kv.html").read_text()
    every = next(size for size in found.sizes if size.name == "all blocks")
    unlimited = simulated_share(variant, 10 * every.blocks)
    assert every.token_share.value == pytest.approx(unlimited, abs=1e-12)
    assert found.found.unlimited.value == pytest.approx(unlimited, abs=1e-12)
    assert found.curve[0].token_share.value < unlimited


def test_a_hybrid_model_without_its_cache_is_studied_with_it():
    (on,), (off,) = (
        build(config.loads(IN_GROUPS, overrides=[f"engine.enable_prefix_caching={value}"]))
        for value in ("true", "false")
    )
    found, without = study(on), study(off)
    assert without.sizes == found.sizes
    assert "enable_prefix_caching is false here" in without.notes[0]
    assert without.notes[1:] == found.notes
    assert "gpt-oss-20b form KV cache groups" in found.notes[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts_only": True}, "--prompts-only needs memory behind the GPU pool.*Set engine.kv_offloading.size_gb"),
        ({"prices": Prices(0.01)}, "--memory-price needs memory behind the GPU pool.*or leave --memory-price out"),
        ({"memory_gb": [0.001]}, "--memory must hold the longest request; it is 0.001 GB. Give at least 0.0"),
    ],
)
def test_what_kv_cache_groups_do_not_have_is_refused(arguments, words):
    (variant,) = build(config.loads(IN_GROUPS))
    with pytest.raises(InputError, match=words):
        study(variant, **arguments)
    if "memory_gb" not in arguments:  # With CPU memory, the layers form one group.
        (behind,) = build(config.loads(IN_GROUPS, overrides=["engine.kv_offloading.size_gb=1"]))
        assert study(behind, **arguments).tiers


def test_a_trace_of_a_model_with_windows_counts_all_tokens_and_says_so():
    workload = independent(np.full(20, 1 / 20), 100)
    found = study_trace(workload, None, catalog.model("gemma-3-1b"))
    assert any("22 of the 26 layers of gemma-3-1b have windows" in note for note in found.notes)
    assert not any("windows" in note for note in study_trace(workload, None, catalog.model("llama-3.1-8b")).notes)
