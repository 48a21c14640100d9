"""Laws 1 and 59 to 61, with a prefix cache: the engines agree, and what is found was computed before, in this run."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lengthwise.engine import simulate
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.records import Status
from lengthwise.schema.workload import After, Workload

sys.path.insert(0, str(Path(__file__).parent))
from sides import disaggregated
from test_kernel_agrees import EXAMPLES, assert_same
from worlds import deployments, limited, sglang_worlds, shared_prefixes

INFINITY = float("inf")
PREFIX_ROUTERS = (
    "session_affinity",
    "cache_aware",
    "prefix_precise",
    "prefix_approximate",
    "uncached_work",
    "uncached_load",
)


@st.composite
def caching_deployments(draw):
    """Replicas with a prefix cache that is often too small, under policies that compute prompts in chunks."""
    deployment = draw(deployments())
    scheduler = Scheduler(
        rank=draw(st.sampled_from(["fcfs", "srtf", "priority"])),
        victim=draw(st.sampled_from(["latest_admitted", "srtf"])),
        batching=draw(st.sampled_from(["unified", "chunked", "even"])),
        memory=draw(st.sampled_from(["paged_by_chunk", "paged", "predicted_peak", "reserve_max"])),
        preemption_mode=draw(st.sampled_from(["recompute", "recompute", "swap"])),
        router=draw(st.sampled_from(["round_robin", "central", "least_outstanding", *PREFIX_ROUTERS])),
        preemption=draw(st.sampled_from(["never", "by_rank"])),
    )
    limits = dataclasses.replace(deployment.limits, enable_prefix_caching=True)
    return dataclasses.replace(deployment, limits=limits, scheduler=scheduler)


@st.composite
def turns_and_groups(draw):
    """Requests with prefixes in common: alike prompts, or sessions of several turns."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, chains = draw(st.integers(2, 60)), draw(st.sampled_from([1, 3, 10]))
    parents = np.arange(n) - chains
    after = None
    if draw(st.booleans()):
        start = np.concatenate([[0], np.cumsum(parents >= 0)])
        after = After(start, parents[parents >= 0], np.round(rng.exponential(0.05, n), 2))
    prompt, output = rng.integers(1, draw(st.sampled_from([40, 150])), n), rng.integers(1, 40, n)
    prefixes = draw(shared_prefixes(prompt, output, after, rng))
    arrival_s = np.sort(np.round(rng.uniform(0, draw(st.sampled_from([0.0, 0.3])), n), 3))
    return Workload(
        arrival_s, prompt, output, np.round(output * rng.lognormal(0, 0.5, n), 1),
        priority=rng.integers(0, 3, n), after=after, prefixes=prefixes,
    )  # fmt: skip


@st.composite
def sglang_caches(draw):
    """Requests with limits and prefixes in common, on replicas that SGLang schedules with its radix cache."""
    _, deployment = draw(sglang_worlds())
    limits = dataclasses.replace(deployment.limits, enable_prefix_caching=True)
    workload = draw(limited(draw(turns_and_groups()), deployment.max_model_len))
    return workload, dataclasses.replace(deployment, limits=limits)


WORLDS = st.one_of(st.tuples(turns_and_groups(), caching_deployments()), sglang_caches())


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(WORLDS, st.sampled_from([INFINITY, INFINITY, 0.2]))
def test_kernel_and_reference_agree_with_prefixes(world, time_limit_s):
    workload, deployment = world
    kernel, reference = (
        simulate(workload, deployment, time_limit_s=time_limit_s, engine=engine) for engine in ("kernel", "reference")
    )
    assert_same(kernel, reference)
    found = kernel.requests.cached_tokens
    block_size = deployment.kv.block_size
    assert (found % block_size == 0).all()
    assert (found < workload.prompt_tokens).all()


def tokens_of(workload):
    """Return the tokens of each prompt with its output, where equal numbers are equal tokens."""
    found, fresh, shared = [], itertools.count(), {}
    prefixes = workload.prefixes
    for i, (prompt, output) in enumerate(zip(workload.prompt_tokens, workload.output_tokens, strict=True)):
        if (before := prefixes.turns[i]) >= 0:
            begin = found[before]
        else:
            size = prefixes.block_tokens
            ids = prefixes.block_ids[prefixes.start[i] : prefixes.start[i + 1]][: prompt // size].tolist()
            begin = [shared.setdefault((one, k), next(fresh)) for one in ids for k in range(size)]
        found.append([*begin, *itertools.islice(fresh, prompt + output - len(begin))])
    return found


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(WORLDS)
def test_what_is_found_was_computed_by_an_earlier_request_and_is_computed_no_more(world):
    workload, deployment = world
    records = simulate(workload, deployment)
    r, tokens = records.requests, tokens_of(workload)
    for i in np.flatnonzero(r.cached_tokens > 0):
        begin = tokens[i][: r.cached_tokens[i]]
        earlier = np.flatnonzero(r.scheduled_s <= r.scheduled_s[i])
        assert any(tokens[j][: len(begin)] == begin for j in earlier if j != i)
    if not r.preemptions.any() and deployment.limits.timeout_s == INFINITY:
        computed = r.prompt_tokens - r.cached_tokens + r.output_tokens - 1
        assert records.totals.tokens.sum() == computed[r.status == Status.FINISHED].sum()


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(turns_and_groups(), caching_deployments(), caching_deployments())
def test_earlier_runs_with_the_same_prefixes_change_nothing(workload, deployment, other):
    fresh = dataclasses.replace(workload, prefixes=copy.copy(workload.prefixes))
    for earlier in (workload, workload.with_arrivals(2 * workload.arrival_s)):
        simulate(earlier, other)
        simulate(earlier, deployment)
    assert_same(simulate(workload, deployment), simulate(fresh, deployment))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(turns_and_groups(), disaggregated(), st.sampled_from(["both", "scheduler", "decode"]), st.booleans())
def test_kernel_and_reference_agree_with_sessions_on_both_sides(workload, deployment, where, is_named):
    affine = {"router": "session_affinity"}
    if where != "decode":
        scheduler = dataclasses.replace(deployment.scheduler, **affine)
        deployment = dataclasses.replace(deployment, scheduler=scheduler)
    if where != "scheduler":
        deployment = dataclasses.replace(deployment, decode=dataclasses.replace(deployment.decode, **affine))
    if is_named:  # sessions that overlap, since nothing makes a request wait for the one before it
        session = np.arange(len(workload)) % 5 - 1
        workload = dataclasses.replace(workload, extra={"session": session})
    assert_same(*(simulate(workload, deployment, engine=engine) for engine in ("kernel", "reference")))
