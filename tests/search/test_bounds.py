"""What closed forms say of a deployment is never beaten by what it does."""

from __future__ import annotations

import dataclasses
import os
import re
from functools import lru_cache

import numpy as np
import pytest
import sides
import worlds
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from observers import EXAMPLES, may_get_stuck
from servers import deployment as textbook
from servers import step_costs

from lengthwise import deploy, engine
from lengthwise.schema.deployment import EngineLimits, KVTransfer, Scheduler
from lengthwise.schema.plan import Limit
from lengthwise.schema.records import Status
from lengthwise.schema.workload import After, SharedPrefixes, Workload
from lengthwise.search.bounds import ceiling
from lengthwise.search.limits import SloLimits
from lengthwise.search.measurement import Window

pytestmark = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="millions of tokens take long without the compiler"
)

SCHEDULERS = ("vllm_v0", "orca", "sarathi", "vllm_v1", "faster_transformer", "vidur_sarathi")
QUANTILES = ("p50", "p90", "p99")


@lru_cache(maxsize=64)
def built(model, gpu, tp, pp, limits, scheduler, blocks):
    return deploy(model, gpu, tp=tp, pp=pp, limits=limits, scheduler=scheduler, num_blocks=blocks)


@st.composite
def rooflines(draw):
    """Deployments on the roofline, many with little memory or few tokens a step."""
    seqs, pp = draw(st.sampled_from([1, 3, 16, 100])), draw(st.sampled_from([1, 1, 2]))
    limits = EngineLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.sampled_from([64, 256, 700, 2048])),
        max_step_seqs=draw(st.sampled_from([None, max(1, seqs // pp)])),
        max_model_len=draw(st.sampled_from([512, 1024])),
    )
    one = built(
        draw(st.sampled_from(["llama-3.2-1b", "llama-3-8b", "mixtral-8x7b"])),
        draw(st.sampled_from(["A100-80GB", "H100"])),
        draw(st.sampled_from([2, 4])),
        pp,
        limits,
        draw(st.sampled_from(SCHEDULERS)),
        draw(st.sampled_from([None, 70, 400])),
    )
    replicas = draw(st.sampled_from([1, 1, 2]))
    return dataclasses.replace(one, parallel=dataclasses.replace(one.parallel, replicas=replicas))


@st.composite
def batches(draw):
    """Requests that are all there, of random lengths."""
    n, rng = draw(st.integers(1, 120)), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prompt = rng.integers(1, draw(st.sampled_from([2, 60, 400, 1100])), n)
    output = rng.integers(1, draw(st.sampled_from([2, 10, 200])), n)
    return Workload(np.zeros(n), prompt, output, predicted_tokens=output)


def complete(workload, deployment):
    """A run to its end, as a window."""
    records = engine.simulate(workload, deployment, max_log_steps=0)
    return Window(deployment, records, None, -1.0, records.end_s)


def check_batch(workload, deployment):
    """The requests take as long as the ceiling states, with limits on TBT that the run just holds, too."""
    window = complete(workload, deployment)
    achieved = len(workload) / window.end_s if window.end_s else 0.0
    assert achieved <= ceiling(deployment, workload).rate_rps
    for quantile in QUANTILES if window.gaps().total else ():
        edges_s, share = window.gaps().edges_s, 1 - float(quantile[1:]) / 100
        beyond = 1 - np.cumsum(window.gaps().histogram) / window.gaps().total
        limit = Limit(f"tbt.{quantile}", float(edges_s[1 + np.flatnonzero(beyond <= share)[0]]))
        top = ceiling(deployment, workload, [limit])
        assert SloLimits((limit,)).usage(window)[limit.metric] <= 1 + 1e-9
        assert achieved <= top.rate_rps
        assert not top.impossible


@settings(max_examples=2 * EXAMPLES)
@given(batches(), rooflines())
def test_no_batch_is_done_sooner_than_the_ceiling_allows(workload, deployment):
    check_batch(workload, deployment)


def all_at_once(workload, deployment):
    """The same requests without waiting for each other, and a deployment whose clients wait for all answers."""
    assume(not may_get_stuck(deployment))
    limits = dataclasses.replace(deployment.limits, timeout_s=float("inf"))
    workload = dataclasses.replace(workload.without_dependencies(), arrival_s=np.zeros(len(workload)), concurrency=None)
    return workload, dataclasses.replace(deployment, limits=limits)


@pytest.mark.slow
@settings(max_examples=2 * EXAMPLES)
@given(worlds.workloads(), worlds.deployments())
def test_nor_on_any_tables_with_any_scheduler(workload, deployment):
    check_batch(*all_at_once(workload, deployment))


@st.composite
def split_rooflines(draw):
    """The same with separate prefill and decode replicas, of one GPU or two, over a fast, a slow or their own link."""
    one, other = draw(rooflines()), draw(rooflines())
    scheduler, blocks = draw(st.sampled_from(SCHEDULERS)), draw(st.sampled_from([None, 70, 400]))
    tp, pp = draw(st.sampled_from([2, 4])), other.parallel.pp
    gpu = draw(st.sampled_from([one.gpu.name, "H200", "A100-80GB"]))
    second = built(one.model.name, gpu, tp, pp, other.limits, scheduler, blocks)
    more = dataclasses.replace(second.parallel, replicas=draw(st.integers(1, 3)))
    second = dataclasses.replace(second, parallel=more)
    links = [None, KVTransfer(), KVTransfer(0.05), *(KVTransfer(0.01, 1e5, 1e8, s) for s in ("none", "fair"))]
    links.append(KVTransfer(0.01, 1e5, 1e8, "fair", links_at_once=0.7))
    links += [KVTransfer(1.0, timeout_s=0.5, kv_load_failure_policy=policy) for policy in ("recompute", "fail")]
    link = draw(st.sampled_from(links))
    both = engine.disaggregate(one, second, link)
    local = draw(st.sampled_from([{}, {}, {"max_local_prefill_length": 300}, {"max_prefill_queue_size": 2}]))
    return dataclasses.replace(both, decode=dataclasses.replace(both.decode, **local))


@pytest.mark.slow
@settings(max_examples=2 * EXAMPLES)
@given(batches(), split_rooflines())
def test_no_batch_is_done_sooner_on_separate_sides(workload, deployment):
    check_batch(workload, deployment)


@pytest.mark.slow
@settings(max_examples=2 * EXAMPLES)
@given(worlds.workloads(), sides.disaggregated())
def test_nor_on_any_tables_of_separate_sides(workload, deployment):
    check_batch(*all_at_once(workload, deployment))


@st.composite
def mixed_rooflines(draw):
    """Two groups of replicas of different GPUs, parallelism, memory and limits, behind any router."""
    one, other = draw(rooflines()), draw(rooflines())
    router = draw(st.sampled_from(["round_robin", "least_tokens", "least_work_left", "shortest_expected_delay"]))
    scheduler, limits = dataclasses.replace(one.scheduler, router=router), other.limits
    limits = dataclasses.replace(limits, max_model_len=one.limits.max_model_len)
    blocks = draw(st.sampled_from([None, 70, 400]))
    tp, gpu = draw(st.sampled_from([2, 4])), draw(st.sampled_from(["A100-80GB", "H100", "L40S"]))
    second = built(one.model.name, gpu, tp, other.parallel.pp, limits, "vllm_v1", blocks)
    groups = [
        dataclasses.replace(
            each, scheduler=scheduler, parallel=dataclasses.replace(each.parallel, replicas=draw(st.integers(1, 3)))
        )
        for each in (one, second)
    ]
    return engine.mix(groups)


@pytest.mark.slow
@settings(max_examples=2 * EXAMPLES)
@given(batches(), mixed_rooflines())
def test_no_batch_is_done_sooner_on_unlike_replicas(workload, deployment):
    check_batch(workload, deployment)


@settings(max_examples=EXAMPLES)
@given(batches(), split_rooflines(), st.integers(2, 4))
def test_more_replicas_never_lower_the_ceiling_of_separate_sides(workload, deployment, times):
    """Each part's bound grows with its own replicas, and all with both; n times of both allow n times the rate."""

    def resized(prefills, decodes):
        of, decode = deployment.parallel, deployment.decode
        more = dataclasses.replace(decode.parallel, replicas=decode.parallel.replicas * decodes)
        side = dataclasses.replace(decode, parallel=more)
        return dataclasses.replace(
            deployment, parallel=dataclasses.replace(of, replicas=of.replicas * prefills), decode=side
        )

    one, more_prefills, more_decodes, both = (
        ceiling(resized(*factors), workload) for factors in ((1, 1), (times, 1), (1, times), (times, times))
    )
    assume(one.rate_rps < float("inf"))
    close = 1 + 1e-9
    assert one.rate_rps <= close * min(more_prefills.rate_rps, more_decodes.rate_rps)
    assert max(more_prefills.rate_rps, more_decodes.rate_rps) <= close * both.rate_rps
    assert both.rate_rps == pytest.approx(times * one.rate_rps)
    assert set(one.parts) == {"prefill side", "KV transfer", "decode side"}
    side = dict.fromkeys(("prefill side", "decode side"), 1.0)
    for found, factors in ((more_prefills, {"prefill side": times}), (more_decodes, {"decode side": times})):
        for name, factor in (side | factors).items():  # what a side carries does not depend on the other one
            assert found.parts[name] == pytest.approx(factor * one.parts[name])
    assert min(one.parts.values()) <= close * one.rate_rps, "preemptions can only move tokens to the prefill side"
    assert one.rate_rps <= close * one.parts["prefill side"]


@settings(max_examples=EXAMPLES)
@given(
    batches(),
    rooflines() | split_rooflines(),
    st.sampled_from(["ttft", "jct", "tpot", "tbt"]),
    st.sampled_from([*QUANTILES, "mean"]),
)
def test_what_an_idle_deployment_holds_is_not_impossible(workload, deployment, metric, statistic):
    """Far apart, requests do not overlap: the least bound that their run holds must pass, half of it may not."""
    far = dataclasses.replace(workload, arrival_s=np.arange(len(workload)) * 1e5)
    window = complete(far, deployment)
    served = window.records.requests.output_tokens > 0
    assume(served.all())
    assume(metric in ("ttft", "jct") or (workload.output_tokens > 1).any())
    low, high = 1e-6, 1e4
    while high > 1.001 * low:
        middle = (low * high) ** 0.5
        satisfied = SloLimits((Limit(f"{metric}.{statistic}", middle),)).usage(window)[f"{metric}.{statistic}"] <= 1
        low, high = (low, middle) if satisfied else (middle, high)
    assert not ceiling(deployment, workload, [Limit(f"{metric}.{statistic}", high)]).impossible
    if low < 1e-5:
        return
    for factor in (0.9, 0.5, 0.1):
        limit = Limit(f"{metric}.{statistic}", low * factor)
        if ceiling(deployment, workload, [limit]).impossible:
            assert SloLimits((limit,)).usage(window)[limit.metric] > 1


def test_impossible_limits_are_found():
    """Half of what an idle deployment takes is reported, and of gaps nine tenths."""
    one = built("llama-3-8b", "H100", 1, 1, EngineLimits(max_model_len=4096), "sarathi", None)
    workload = Workload(np.zeros(50), np.full(50, 3000), np.full(50, 10))
    window = complete(dataclasses.replace(workload, arrival_s=np.arange(50) * 100.0), one)
    for metric, share in (("ttft.p50", 0.5), ("jct.mean", 0.5), ("tbt.p99", 0.9), ("tpot.p90", 0.9)):
        low, high = 1e-5, 10.0
        while high > 1.001 * low:
            middle = (low * high) ** 0.5
            satisfied = SloLimits((Limit(metric, middle),)).usage(window)[metric] <= 1
            low, high = (low, middle) if satisfied else (middle, high)
        reported = ceiling(one, workload, [Limit(metric, share * low)]).impossible
        assert list(reported) == [metric], (metric, low)
        assert re.search(r"is at least [\d.]+ m?s without other requests; the limit is", reported[metric])


def test_an_idle_deployment_without_decodes_breaks_no_limit_on_gaps():
    one = built("llama-3-8b", "H100", 1, 1, EngineLimits(max_model_len=4096), "sarathi", None)
    workload = Workload(np.zeros(5), np.full(5, 100), np.ones(5, int))
    assert not ceiling(one, workload, [Limit("tbt.p99", 1e-6), Limit("tpot.p99", 1e-6)]).impossible


@pytest.mark.parametrize(("batch", "prompt", "output"), [(1, 1, 1), (8, 100, 33), (32, 1, 64)])
def test_the_ceiling_is_reached_where_nothing_is_lost(batch, prompt, output):
    """Equal requests in full batches come within a few per cent of it: it is no empty promise."""
    one = textbook(step_costs(0.02, 1e-5), Scheduler(batching="mixed"), max_num_seqs=batch)
    n = 50 * batch
    workload = Workload(np.zeros(n), np.full(n, prompt), np.full(n, output))
    top = ceiling(one, workload).rate_rps
    assert 0.94 * top < n / complete(workload, one).end_s <= top


def test_refused_requests_cost_nothing():
    """Half of the requests are refused at once: twice as many may come."""
    limits = EngineLimits(max_num_batched_tokens=256, max_num_seqs=16, max_model_len=2048)
    one = built("llama-3-8b", "H100", 1, 1, limits, "vllm_v0", None)
    prompt = np.tile([100, 1000], 50)
    mixed = Workload(np.zeros(100), prompt, np.full(100, 10))
    short = Workload(np.zeros(50), np.full(50, 100), np.full(50, 10))
    assert ceiling(one, mixed).rate_rps == pytest.approx(2 * ceiling(one, short).rate_rps)
    assert ceiling(one, mixed).rate_rps > 100 / complete(mixed, one).end_s


def test_where_no_request_fits_the_ceiling_is_no_limit():
    one = built("llama-3-8b", "H100", 1, 1, EngineLimits(max_model_len=512), "vllm_v1", None)
    workload = Workload(np.zeros(3), np.full(3, 600), np.full(3, 10))
    assert ceiling(one, workload, [Limit("ttft.p90", 1e-9)]).rate_rps == float("inf")


def test_a_limit_lowers_the_ceiling_and_a_tight_one_more():
    one = built("llama-3-8b", "H100", 1, 1, EngineLimits(max_model_len=4096), "sarathi", None)
    workload = Workload(np.zeros(20), np.full(20, 500), np.full(20, 100))
    rates = [ceiling(one, workload, [Limit("tbt.p99", bound)]).rate_rps for bound in (0.007, 0.008, 0.01, 9.0)]
    assert rates == sorted(rates)
    assert rates[0] < rates[1] < rates[-1] == ceiling(one, workload).rate_rps


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 2**32 - 1), st.sampled_from([40, 130, 600]), st.sampled_from([100, 2000]), st.booleans())
def test_nor_do_shared_blocks_beat_the_ceiling(seed, blocks, shared_tokens, is_small):
    """Requests that use the same blocks need the memory of one: more decode at once than their KV tokens would fit."""
    rng = np.random.default_rng(seed)
    n, own = 60, 16 if is_small else 200
    prompt, output = rng.integers(shared_tokens + 1, shared_tokens + own, n), rng.integers(1, 80, n)
    ids = shared_tokens // 16
    shared = SharedPrefixes(16, np.arange(n + 1) * ids, np.tile(np.arange(ids), n))
    workload = Workload(np.zeros(n), prompt, output, predicted_tokens=output, prefixes=shared)
    limits = EngineLimits(max_model_len=4096, max_num_batched_tokens=2048, enable_prefix_caching=True)
    one = built("llama-3.2-1b", "A100-80GB", 1, 1, limits, "vllm_v1", max(blocks, 256))
    check_batch(workload, one)


def test_children_of_rejected_requests_do_not_count():
    limits = EngineLimits(max_model_len=512, max_num_batched_tokens=512)
    one = built("llama-3.2-1b", "A100-80GB", 1, 1, limits, "vllm_v1", 400)
    n = 40
    prompt = np.where(np.arange(n) % 4 == 0, 600, 100)  # each fourth is rejected, and the one that waits for it
    parents = np.arange(n) % 4 == 1
    after = After(np.concatenate([[0], np.cumsum(parents)]), np.flatnonzero(parents) - 1)
    workload = Workload(np.zeros(n), prompt, np.full(n, 20), after=after)
    records = engine.simulate(workload, one)
    assert (records.requests.status == Status.REJECTED).sum() == n // 2
    half = workload.without_dependencies().take(np.flatnonzero(np.arange(n) % 4 > 1))
    assert ceiling(one, workload).rate_rps == pytest.approx(2 * ceiling(one, half).rate_rps)
