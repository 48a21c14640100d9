"""Laws of data-parallel ranks in lock-step: the ranks of a replica start and end their steps together."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lengthwise import policy
from lengthwise.engine import deploy, simulate
from lengthwise.engine.reference import Reference
from lengthwise.engine.setup import prepare
from lengthwise.metrics import summarize
from lengthwise.schema.deployment import Deployment, EngineLimits, KVOffloading, Parallelism, Scheduler
from lengthwise.schema.errors import InputError, PolicyError
from lengthwise.schema.records import Status
from lengthwise.schema.speculation import Drafter, Speculation
from lengthwise.schema.workload import Workload

sys.path.insert(0, str(Path(__file__).parent))
from observers import longest_output, may_get_stuck, run
from sides import decode_sides
from test_kernel_agrees import assert_same
from worlds import cost_tables, deployments, of_two_degrees, rank_worlds, shared_seconds, workloads

EXAMPLES = int(os.environ.get("LENGTHWISE_EXAMPLES", "100")) // 2
LAW = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@policy.router
def to_the_first(waiting):
    return 0 * len(waiting)


@st.composite
def plain_worlds(draw: st.DrawFn) -> tuple[Workload, Deployment]:
    """Independent requests on one replica of one rank, first come, first served, with memory that may be short.

    Some replicas are pipelines, schedule steps ahead, verify proposed tokens, or have a decode side.
    """
    workload, other = draw(workloads()), draw(deployments())
    workload = dataclasses.replace(workload, after=None, concurrency=None, prefixes=None, predictions=None)
    kind = draw(st.sampled_from(["plain", "plain", "pipeline", "ahead", "speculation", "decode"]))
    is_ahead = kind == "ahead"
    made = Scheduler(
        memory="paged_by_chunk", router="round_robin", async_scheduling=is_ahead,
        hide_host=is_ahead and draw(st.booleans()),
    )  # fmt: skip
    budget = min(other.limits.max_num_batched_tokens, 128)  # the tokens that the tables have
    limits = dataclasses.replace(other.limits, enable_prefix_caching=False, max_num_batched_tokens=max(budget, 48))
    if is_ahead or kind == "speculation":
        limits = dataclasses.replace(
            limits, max_step_seqs=None, timeout_s=np.inf, prefix_cache="vllm", radix_eviction_policy="lru"
        )
    drafter = draw(st.sampled_from([Drafter(), Drafter(1.0, 1.0), Drafter(2.0, 0.5, cost_tables([2], scale=0.3))]))
    stages = [1, 2] if kind == "pipeline" else [2]
    one = dataclasses.replace(
        other, scheduler=made, limits=limits, parallel=Parallelism(pp=len(stages)),
        cost=dataclasses.replace(cost_tables(stages), shared_s=draw(shared_seconds())),
        speculation=Speculation("mtp", 3, 1.0, drafter=drafter) if kind == "speculation" else None,
    )  # fmt: skip
    if kind == "decode":
        decode = dataclasses.replace(
            draw(decode_sides(one, ["round_robin"])), parallel=Parallelism(), batching="unified",
            memory="paged_by_chunk", cost=dataclasses.replace(cost_tables([3]), shared_s=one.cost.shared_s),
        )  # fmt: skip
        one = dataclasses.replace(one, decode=decode)
    return workload, one


def in_ranks(deployment: Deployment, dp: int, replicas: int = 1, **changes: Any) -> Deployment:
    """The deployment with so many ranks, on both sides if it has a decode side."""
    parallel = Parallelism(pp=len(deployment.cost.stage_layers), replicas=replicas, dp=dp)
    if deployment.decode is not None:
        changes["decode"] = dataclasses.replace(deployment.decode, parallel=Parallelism(dp=dp))
    return dataclasses.replace(deployment, parallel=parallel, **changes)


def sharing(deployment: Deployment, shared_s: np.ndarray) -> Deployment:
    """The deployment whose ranks compute something together in such times, on all sides."""
    decode = deployment.decode
    if decode is not None:
        decode = dataclasses.replace(decode, cost=dataclasses.replace(decode.cost, shared_s=shared_s))
    return dataclasses.replace(deployment, cost=dataclasses.replace(deployment.cost, shared_s=shared_s), decode=decode)


@LAW
@given(rank_worlds(), st.integers(0, 3))
def test_ranks_of_a_replica_start_and_end_their_steps_together(world, seed):
    _, deployment = world
    records, dp = run(*world, seed=seed), deployment.parallel.dp
    steps = records.steps
    for replica in range(deployment.parallel.replicas):
        own = steps.replica // dp == replica
        spans = np.unique(np.column_stack([steps.start_s[own], steps.end_s[own]]), axis=0)
        in_flight = 2 if deployment.scheduler.async_scheduling else deployment.limits.max_in_flight
        later = in_flight or len(deployment.cost.stage_layers)
        assert (spans[later:, 0] >= spans[:-later, 1]).all()
        ranks = np.column_stack([steps.replica[own], steps.start_s[own], steps.end_s[own]])
        assert len(np.unique(ranks, axis=0)) == len(ranks) or (spans[:, 0] == spans[:, 1]).any()
        of_ranks = slice(replica * dp, (replica + 1) * dp)
        assert len(set(records.totals.steps[of_ranks])) == 1, "dummy steps count, too"
        assert len(set(records.totals.busy_s[of_ranks])) == 1


@LAW
@given(rank_worlds(), st.integers(0, 3))
def test_every_request_finishes_with_its_tokens(world, seed):
    workload, deployment = world
    assume(not may_get_stuck(deployment) and deployment.limits.timeout_s == np.inf)
    r = run(*world, seed=seed).requests
    finished = r.status == Status.FINISHED
    assert (finished | (r.status == Status.REJECTED)).all()
    if not deployment.scheduler.engine_rules and not deployment.scheduler.reserve:
        assert (r.output_tokens[finished] == longest_output(workload, deployment)[finished]).all()
    assert (r.replica[finished] < deployment.parallel.ranks).all()


class Watched(Reference):
    """Notes the seconds of each rank's own work and of the common step."""

    def __init__(self, setup: Any) -> None:
        super().__init__(setup)
        self.seen: list[tuple[float, float, float]] = []

    def _launch_together(self, ranks, steps):
        working = [(rep, step) for rep, step in zip(ranks, steps, strict=True) if step.seqs]
        in_flight, stage_free_s = len(ranks[0].flights), list(ranks[0].stage_free_s)
        costs = [rep.step_cost(step, self._count_drafts(rep, step)) for rep, step in working]
        drafter_s = self._shared_drafter_s(ranks[0], [(rep.drafts, step) for rep, step in working])
        shared_s = ranks[0].cost.shared_s(sum(step.decode_tokens + step.prompt_tokens for step in steps))
        super()._launch_together(ranks, steps)
        assert len({step.end_s for _, step in working}) == 1
        assert len({len(rep.flights) for rep in ranks}) == 1
        if in_flight == 0 and not ranks[0].s.params.hide_host:
            own_s = sum(map(max, zip(*(cost.stages_s for cost in costs), strict=True)))
            self.seen.append((own_s, sum(shared_s) + drafter_s, working[0][1].end_s - steps[0].start_s))
        assert all(a >= b for a, b in zip(ranks[0].stage_free_s, stage_free_s, strict=True))


@LAW
@given(rank_worlds(), st.integers(0, 3))
def test_a_step_takes_its_slowest_rank_and_the_shared_seconds(world, seed):
    workload, deployment = world
    watched = Watched(prepare(workload, deployment, seed=seed, limit_s=np.inf, compiled=False))
    try:
        watched.run()
    except PolicyError:
        assume(not may_get_stuck(deployment))
    for own_s, shared_s, step_s in watched.seen:
        assert step_s == pytest.approx(own_s + shared_s, rel=1e-6)


@LAW
@given(plain_worlds(), st.integers(1, 4), st.integers(0, 3))
def test_ranks_with_equal_loads_are_one_rank(world, dp, seed):
    """With dp copies of each request, one to a rank. Shared seconds are those of dp times the tokens."""
    workload, one = world
    copies = np.repeat(np.arange(len(workload)), dp)
    columns = ("arrival_s", "prompt_tokens", "output_tokens", "predicted_tokens", "priority", "tenant")
    many = Workload(**{c: getattr(workload, c)[copies] for c in columns if getattr(workload, c) is not None})
    together = in_ranks(one, dp)
    if (shared := one.cost.shared_s) is not None:
        shared = np.resize(shared, 4 * 600)
        one, together = sharing(one, shared[::dp]), sharing(together, shared)
    a, b = simulate(workload, one, seed=seed).requests, simulate(many, together, seed=seed).requests
    assert (b.replica[b.replica >= 0] % dp == np.arange(len(many))[b.replica >= 0] % dp).all()
    for column in ("scheduled_s", "first_token_s", "finished_s", "output_tokens", "preemptions", "status"):
        np.testing.assert_allclose(getattr(b, column), getattr(a, column)[copies], rtol=1e-9)


@LAW
@given(plain_worlds(), st.integers(2, 4), st.integers(0, 3))
def test_ranks_without_work_change_nothing(world, dp, seed):
    """Their dummy steps compute no tokens: a rank beside them serves as if it were alone."""
    workload, one = world
    assume(one.decode is None)
    made = dataclasses.replace(one.scheduler, router=to_the_first)
    a = simulate(workload, one, seed=seed)
    b = simulate(workload, in_ranks(one, dp, scheduler=made), seed=seed)
    for column in ("scheduled_s", "first_token_s", "finished_s", "output_tokens", "preemptions", "status"):
        np.testing.assert_allclose(getattr(b.requests, column), getattr(a.requests, column), rtol=1e-9)
    np.testing.assert_allclose(b.totals.busy_s, np.repeat(a.totals.busy_s, dp), rtol=1e-9)
    assert b.totals.tokens.tolist() == [*a.totals.tokens, *[0] * (dp - 1)]


@LAW
@given(rank_worlds(), st.integers(0, 3))
def test_one_rank_computes_the_shared_seconds_alone(world, seed):
    workload, deployment = world
    one = in_ranks(deployment, 1, deployment.parallel.replicas)
    folded = dataclasses.replace(one, cost=one.cost.alone())
    assert folded.cost.shared_s is None
    assert_same(run(workload, one, seed=seed), run(workload, folded, seed=seed))
    if (shared := one.cost.shared_s) is not None:
        rows = min(len(shared), len(one.cost.layer_s))
        np.testing.assert_allclose(folded.cost.layer_s[:rows], (one.cost.layer_s[:rows] + shared[:rows]), rtol=1e-12)


def test_the_use_of_hardware_counts_all_ranks():
    limits = EngineLimits(max_num_seqs=8, max_model_len=2000)
    one = deploy("llama-3.1-8b", "H100", limits=limits)
    n = 64
    workload = Workload(np.zeros(n), np.full(n, 300), np.full(n, 50))
    together = dataclasses.replace(one, parallel=Parallelism(dp=4))
    separate = dataclasses.replace(one, parallel=Parallelism(replicas=4))
    assert together.gpus == separate.gpus == 4
    assert together.price_per_hour_usd == separate.price_per_hour_usd
    a, b = (summarize(simulate(workload, each), each).hardware for each in (together, separate))
    for name in ("busy_share", "batch_seqs", "mfu", "mbu", "kv_utilization", "power_w", "energy_j_per_output_token"):
        assert getattr(a, name).value == pytest.approx(getattr(b, name).value), name
    assert [share.value for share in a.replica_busy_share] == pytest.approx([a.busy_share.value] * 4)
    for use, share in b.time_shares.items():
        assert a.time_shares[use].value == pytest.approx(share.value, abs=1e-9), use


REFUSED = {
    "which counts rounds": lambda d: dataclasses.replace(
        d, cost=cost_tables([1, 1]), scheduler=Scheduler(batching="rra(prefill_batch=1, decode_steps=1)")
    ),
    "partial tensor parallelism": lambda d: dataclasses.replace(d, cost=of_two_degrees(cost_tables([1, 1]), [0, 1])),
    "vllm_internal": lambda d: dataclasses.replace(d, scheduler=Scheduler(router="central")),
    "kv_offloading": lambda d: dataclasses.replace(
        d, limits=dataclasses.replace(d.limits, enable_prefix_caching=True, kv_offloading=KVOffloading(100.0))
    ),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_is_not_modelled_with_ranks_is_refused(named):
    limits = EngineLimits(max_num_seqs=8, max_model_len=2000)
    made = REFUSED[named](deploy("llama-3.1-8b", "H100", limits=limits))
    workload = Workload(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
    with pytest.raises(InputError, match=f"dp 2.*{named}"):
        simulate(workload, dataclasses.replace(made, parallel=Parallelism(dp=2)))
