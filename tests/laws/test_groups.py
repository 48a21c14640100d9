"""Laws of several groups of unlike replicas behind one router."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lengthwise import policy
from lengthwise.engine import deploy, mix, simulate
from lengthwise.engine.step_time import service_rate
from lengthwise.schema.cost_tables import MERGED, PER_REQUEST
from lengthwise.schema.deployment import Deployment, EngineLimits, KVOffloading, KvPlan, Parallelism, Scheduler
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Status
from lengthwise.schema.workload import Workload

sys.path.insert(0, str(Path(__file__).parent))
from test_kernel_agrees import assert_same, outcome
from worlds import ROUTERS, async_worlds, cost_tables, deployments, workloads

EXAMPLES = int(os.environ.get("LENGTHWISE_EXAMPLES", "100")) // 2
LAW = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
UNLIKE_ROUTERS = [name for name in ROUTERS if name not in ("central", "vllm_internal")]


@st.composite
def single(draw: st.DrawFn) -> Deployment:
    """One group of replicas, with rules that several groups may have."""
    made = draw(st.one_of(deployments(), async_worlds().map(lambda world: world[1])))
    scheduler = dataclasses.replace(
        made.scheduler, preemption="never", binning=None, router=draw(st.sampled_from(UNLIKE_ROUTERS))
    )
    return dataclasses.replace(made, scheduler=scheduler, cost=dataclasses.replace(made.cost, other=None))


@st.composite
def mixed(draw: st.DrawFn) -> Deployment:
    """Two or three groups that differ in speed, pipeline, memory, limits of a step and number of replicas."""
    first = draw(single())
    others = []
    for _ in range(draw(st.integers(1, 2))):
        pp, size, seqs = draw(st.sampled_from([1, 1, 2])), first.kv.block_size, draw(st.integers(1, 12))
        step_seqs = draw(st.none() | st.integers(1, seqs))
        if first.scheduler.async_scheduling:
            pp, step_seqs = 1, None
        rule = draw(st.sampled_from([PER_REQUEST, MERGED]))
        tables = cost_tables([2] * pp, rule, draw(st.sampled_from([0.5, 1.0, 3.0])), additional=draw(st.booleans()))
        tables = dataclasses.replace(tables, front=first.cost.front, masked_s=draw(st.sampled_from([0.0, 2e-7])))
        limits = dataclasses.replace(
            first.limits,
            max_num_seqs=seqs,
            max_num_batched_tokens=draw(st.sampled_from([16, 64, 512])),
            max_step_seqs=step_seqs,
            watermark=draw(st.sampled_from([0.0, 0.01, 0.1])),
        )
        blocks = -(-first.max_model_len // size) + draw(st.sampled_from([1, 2, 8, 200]))
        kv = KvPlan(blocks, size, 0.0, 0.0, 0.0, 0.0, swap_s_per_block=draw(st.sampled_from([1e-5, 3e-5])))
        parallel = Parallelism(1, pp, draw(st.integers(1, 2)))
        others.append(dataclasses.replace(first, cost=tables, limits=limits, kv=kv, parallel=parallel))
    return mix([first, *others])


@LAW
@given(workloads(), mixed(), st.sampled_from([float("inf"), float("inf"), 0.5]), st.integers(0, 3))
def test_kernel_and_reference_agree_on_unlike_replicas(workload, deployment, time_limit_s, seed):
    options = {"time_limit_s": time_limit_s, "seed": seed}
    reference = outcome("reference", workload, deployment, **options)
    assert_same(outcome("kernel", workload, deployment, **options), reference)


@LAW
@given(workloads(), single(), st.lists(st.integers(1, 3), min_size=2, max_size=3), st.integers(0, 3))
def test_equal_groups_are_one_deployment_of_as_many_replicas(workload, made, counts, seed):
    groups = [dataclasses.replace(made, parallel=dataclasses.replace(made.parallel, replicas=n)) for n in counts]
    one = dataclasses.replace(made, parallel=dataclasses.replace(made.parallel, replicas=sum(counts)))
    assert_same(outcome("kernel", workload, mix(groups), seed=seed), outcome("kernel", workload, one, seed=seed))


@LAW
@given(workloads(), single(), st.integers(2, 4), st.integers(0, 3), st.booleans())
def test_with_equal_speeds_a_router_by_speed_is_the_one_without(workload, made, replicas, seed, is_work):
    pair = ("least_work_left", "least_tokens") if is_work else ("shortest_expected_delay", "least_outstanding")
    parallel = dataclasses.replace(made.parallel, replicas=replicas)
    both = [
        dataclasses.replace(made, parallel=parallel, scheduler=dataclasses.replace(made.scheduler, router=router))
        for router in pair
    ]
    assert_same(*(outcome("kernel", workload, one, seed=seed) for one in both))


COUNT = st.integers(0, 10**6)


@LAW
@given(st.lists(st.tuples(COUNT, COUNT, COUNT, st.floats(0.01, 100)), min_size=1, max_size=9), st.integers(1, 10**5))
def test_routers_by_speed_take_the_least_of_all_quotients(rows, prompt):
    waiting, running, tokens, rate = (np.array(column) for column in zip(*rows, strict=True))
    columns = {"waiting": waiting, "running": running, "tokens": tokens, "service_rate": rate, "prompt_tokens": prompt}
    naive = {
        "shortest_expected_delay": [(w + n + 1) / mu for w, n, _, mu in rows],
        "least_work_left": [(work + prompt) / mu for _, _, work, mu in rows],
    }
    for name, delays_s in naive.items():
        router = policy.resolve("router", name)
        assert router.function(**{of: columns[of] for of in router.arguments}) == int(np.argmin(delays_s))


def one_at_a_time(step_s: float, router: str) -> Deployment:
    """A replica that serves one request at a time, with ``step_s`` for each token."""
    limits = EngineLimits(max_num_seqs=1, max_num_batched_tokens=512, max_model_len=4000)
    made = deploy("llama-3.1-8b", "H100", limits=limits, scheduler=Scheduler(router=router))
    tables = cost_tables([1])
    zeros = {
        name: np.zeros_like(getattr(tables, name))
        for name in ("comm_s", "embedding_s", "send_s", "head_s", "host_s", "prefill_s", "decode_s")
    }
    tables = dataclasses.replace(tables, layer_s=np.full_like(tables.layer_s, step_s), **zeros)
    return dataclasses.replace(made, cost=tables)


def mean_requests(rate_rps: float, mu: tuple[float, float], most: int = 60) -> tuple[float, float]:
    """Return the stationary (mean requests in the system, share sent to the first replica) of two M/M/1 queues.

    An arrival joins the queue with the smaller (requests + 1) / mu. This solves the Markov chain of both queue lengths,
    of at most ``most`` requests each.
    """
    size = most + 1
    flow = np.zeros((size * size, size * size))
    to_first = np.zeros(size * size)
    for i in range(size):
        for j in range(size):
            at = i * size + j
            is_first = (i + 1) / mu[0] <= (j + 1) / mu[1]
            to_first[at] = is_first
            moves = [(i + is_first, j + (not is_first), rate_rps), (i - 1, j, mu[0]), (i, j - 1, mu[1])]
            for a, b, rate in moves:
                if 0 <= a < size and 0 <= b < size:
                    flow[at, a * size + b] += rate
    balance = flow - np.diag(flow.sum(axis=1))
    system = np.vstack([balance.T[:-1], np.ones(size * size)])
    share = np.linalg.solve(system, np.append(np.zeros(size * size - 1), 1.0))
    count = np.add.outer(np.arange(size), np.arange(size)).ravel()
    return float(share @ count), float(share @ to_first)


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="12 million steps need the compiler")
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_shortest_expected_delay_is_the_markov_chain_of_two_unlike_servers(load):
    n, tokens = 60_000, 100
    rng = np.random.default_rng(7)
    fast, slow = (one_at_a_time(step_s, "shortest_expected_delay") for step_s in (0.001, 0.002))
    mu = 1 / (0.001 * tokens), 1 / (0.002 * tokens)
    rate_rps = load * sum(mu)
    workload = Workload(
        np.cumsum(rng.exponential(1 / rate_rps, n)),
        np.ones(n, np.int64),
        np.minimum(rng.geometric(1 / tokens, n), 3900),
    )
    assert service_rate(fast, 1, tokens) == pytest.approx(2 * service_rate(slow, 1, tokens))
    requests = simulate(workload, mix([fast, slow])).requests
    expected, to_first = mean_requests(rate_rps, mu, 40)
    jct_s = (requests.finished_s - requests.arrival_s).mean()
    assert jct_s == pytest.approx(expected / rate_rps, rel=0.06)
    assert (requests.replica == 0).mean() == pytest.approx(to_first, abs=0.02)
    assert to_first > 2 / 3, "the fast replica gets more than its share of the speed"


def test_price_and_gpus_are_the_sums_over_the_groups():
    limits = EngineLimits(max_num_seqs=8, max_model_len=2000)
    a, b = deploy("llama-3.1-8b", "H100", replicas=3, limits=limits), deploy("llama-3.1-8b", "L40S", limits=limits)
    both = mix([a, b])
    assert both.gpus == a.gpus + b.gpus == 4
    assert both.price_per_hour_usd == pytest.approx(a.price_per_hour_usd + b.price_per_hour_usd)
    assert both.schedulers == 4


def test_all_requests_end_on_replicas_of_both_groups():
    rng, n = np.random.default_rng(3), 500
    workload = Workload(np.cumsum(rng.exponential(0.01, n)), rng.integers(10, 1500, n), rng.integers(1, 300, n))
    limits = EngineLimits(max_model_len=4000)
    groups = [deploy("llama-3.1-8b", gpu, limits=limits, scheduler="vllm_v1") for gpu in ("H100", "L40S")]
    by_speed = [
        dataclasses.replace(one, scheduler=dataclasses.replace(one.scheduler, router="least_work_left"))
        for one in groups
    ]
    records = simulate(workload, mix(by_speed))
    assert (records.requests.status == Status.FINISHED).all()
    counts = np.bincount(records.requests.replica, minlength=2)
    assert counts[0] > counts[1] > 0, "the H100 is faster"


REFUSED: dict[str, Any] = {
    "dp": lambda d: dataclasses.replace(d, parallel=Parallelism(dp=2)),
    "kv_offloading": lambda d: dataclasses.replace(
        d, limits=dataclasses.replace(d.limits, enable_prefix_caching=True, kv_offloading=KVOffloading(100.0))
    ),
    "the same scheduler": lambda d: dataclasses.replace(d, scheduler=Scheduler(rank="sjf")),
    "the same engine.block_size": lambda d: dataclasses.replace(d, kv=dataclasses.replace(d.kv, block_size=8)),
}


@pytest.mark.parametrize("named", REFUSED)
def test_groups_that_cannot_share_a_router_are_refused(named):
    made = deploy("llama-3.1-8b", "H100", limits=EngineLimits(max_num_seqs=8, max_model_len=2000))
    with pytest.raises(InputError, match=named):
        mix([made, REFUSED[named](made)])


@pytest.mark.parametrize("axes", [{"router": "central"}, {"router": "vllm_internal"}, {"preemption": "by_rank"}])
def test_policies_that_take_replicas_to_be_alike_are_refused(axes):
    made = deploy("llama-3.1-8b", "H100", limits=EngineLimits(max_num_seqs=8, max_model_len=2000))
    made = dataclasses.replace(made, scheduler=dataclasses.replace(made.scheduler, **axes))
    workload = Workload(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
    with pytest.raises(InputError, match="several groups"):
        simulate(workload, mix([made, made]))
