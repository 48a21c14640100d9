"""The emulated engine's batch follows the rules of the engine room, request for request."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lengthwise import deploy, simulate
from lengthwise.policy import rank
from lengthwise.schema.deployment import EngineLimits, Scheduler
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload
from lengthwise.testing.engine_server.engine import Batch, BatchSequence, emulated


@rank
def worst_class_latest(priority, arrival_s):
    """As vLLM's preemption under priorities."""
    return priority * 1e12 + arrival_s


def deployment(blocks, *, seqs=8, budget=128, scheduler="vllm_v1"):
    limits = EngineLimits(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=300)
    return deploy("opt-125m", "A100-80GB", limits=limits, num_blocks=blocks, scheduler=scheduler)


def requests(seed, n=120):
    rng = np.random.default_rng(seed)
    return Workload(
        np.sort(rng.uniform(0, 0.4, n)),
        rng.integers(1, 180, n),
        rng.integers(1, 120, n),
        priority=rng.integers(0, 3, n),
    )


def run(workload, spec):
    """Every request's sequence after the batch has run dry."""
    batch = Batch(spec.limits, spec.steps)
    done = []
    for i in range(len(workload)):
        want = int(workload.output_tokens[i])
        q = BatchSequence(i, float(workload.arrival_s[i]), int(workload.prompt_tokens[i]), None)
        q.on_token = lambda _, q=q, want=want: q.generated == want
        q.priority = int(workload.priority[i])
        done.append(q)
        batch.enter(q)
    while batch.next_s() < float("inf"):
        batch.advance(batch.next_s())
    assert batch.free_blocks == spec.limits.num_blocks
    return batch, done


def agree(workload, deployed):
    batch, done = run(workload, emulated(deployed))
    records = simulate(workload, deployed, engine="reference").requests
    assert [q.first_token_s for q in done] == records.first_token_s.tolist()
    assert [q.finished_s for q in done] == records.finished_s.tolist()
    assert [q.preemptions for q in done] == records.preemptions.tolist()
    return batch


@pytest.mark.parametrize("seed", range(3))
def test_first_come_first_served_as_the_engine_room(seed):
    batch = agree(requests(seed), deployment(40))
    assert batch.preemptions > 0


def test_without_shortage_as_the_engine_room():
    assert agree(requests(7), deployment(4000, seqs=32, budget=512)).preemptions == 0


def test_by_priority_as_the_engine_room():
    scheduler = Scheduler(rank="priority", leave=worst_class_latest, batching="unified", memory="paged_by_chunk")
    batch = agree(requests(3), deployment(40, scheduler=scheduler))
    assert batch.preemptions > 0


def test_an_abort_frees_what_was_held_in_any_state():
    spec = emulated(deployment(40))
    batch = Batch(spec.limits, spec.steps)
    qs = [BatchSequence(i, 0.0, 50, lambda _: False) for i in range(20)]
    for q in qs:
        batch.enter(q)
    assert batch.abort(qs[19])
    for _ in range(5):
        batch.advance(batch.next_s())
    states = {q.state for q in qs}
    assert states == {"waiting", "running", "aborted"}
    assert all(batch.abort(q) for q in qs[:19])
    assert not batch.abort(qs[0])
    assert batch.free_blocks == 40
    assert batch.queued == batch.running == 0


def test_a_deployment_with_stages_or_other_batching_is_refused():
    two = dataclasses.replace(deployment(40), parallel=dataclasses.replace(deployment(40).parallel, pp=2))
    with pytest.raises(InputError, match="must have pp = 1"):
        emulated(two)
    with pytest.raises(InputError, match='batching "unified"'):
        emulated(deployment(40, scheduler=Scheduler(batching="static")))
