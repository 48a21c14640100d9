"""The live batch follows the engine's rules request for request, and joined steps come to what single steps come to."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise import deploy, simulate
from lengthwise.engine.continuous_batching import BatchSequence, ContinuousBatch, Limits, SequenceOrder
from lengthwise.engine.step_time import step_time
from lengthwise.policy import rank
from lengthwise.schema.deployment import EngineLimits, Scheduler
from lengthwise.schema.workload import Workload

ROOMY = Limits(4, 64, 1, 400, 0.0)
TIGHT = Limits(4, 64, 4, 32, 0.05)
"""Requests are preempted."""


@rank
def worst_class_latest(priority, arrival_s):
    """As vLLM's preemption under priorities."""
    return priority * 1e12 + arrival_s


def deployment(blocks, *, seqs=8, budget=128, scheduler="vllm_v1"):
    limits = EngineLimits(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=300)
    return deploy("opt-125m", "A100-80GB", limits=limits, num_blocks=blocks, scheduler=scheduler)


def workload(seed, n=120):
    rng = np.random.default_rng(seed)
    return Workload(
        np.sort(rng.uniform(0, 0.4, n)),
        rng.integers(1, 180, n),
        rng.integers(1, 120, n),
        priority=rng.integers(0, 3, n),
    )


def rows(workload):
    """(arrival, prompt tokens, output tokens, priority) of each request."""
    columns = (workload.arrival_s, workload.prompt_tokens, workload.output_tokens, workload.priority)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def sequence(number, arrival_s, prompt_tokens, output_tokens, priority=0, *, listens):
    """A sequence of a known length; one that listens to its tokens forces single steps."""
    q = BatchSequence(SequenceOrder(number, arrival_s, priority), prompt_tokens)
    if listens:
        q.on_token = lambda _: q.generated == output_tokens
    else:
        q.output_tokens = output_tokens
    return q


def served(requests, limits, cost, *, listens):
    """(batch, sequences) after all requests have been served."""
    batch = ContinuousBatch(limits, cost)
    sequences = [sequence(n, *row, listens=listens) for n, row in enumerate(requests)]
    for q in sorted(sequences, key=lambda q: q.order.arrival_s):
        batch.enter(q)
    while batch.next_s() < math.inf:
        batch.advance(batch.next_s())
        assert 0 <= batch.free_blocks <= limits.num_blocks
    assert batch.free_blocks == limits.num_blocks
    assert batch.queued == batch.running == 0
    assert {q.state for q in sequences} == {"finished"}
    return batch, sequences


def agree(workload, deployed):
    """Asserts that all times are those of the reference engine; returns the batch."""
    batch, done = served(rows(workload), Limits.of(deployed), step_time(deployed.cost), listens=True)
    records = simulate(workload, deployed, engine="reference").requests
    assert [q.first_token_s for q in done] == records.first_token_s.tolist()
    assert [q.finished_s for q in done] == records.finished_s.tolist()
    assert [q.preemptions for q in done] == records.preemptions.tolist()
    assert batch.tokens == workload.output_tokens.sum()
    return batch


@pytest.mark.parametrize("seed", range(3))
def test_first_come_first_served_as_the_reference_engine(seed):
    assert agree(workload(seed), deployment(40)).preemptions > 0


def test_without_shortage_as_the_reference_engine():
    assert agree(workload(7), deployment(4000, seqs=32, budget=512)).preemptions == 0


def test_by_priority_as_the_reference_engine():
    scheduler = Scheduler(rank="priority", victim=worst_class_latest, batching="unified", memory="paged_by_chunk")
    assert agree(workload(3), deployment(40, scheduler=scheduler)).preemptions > 0


@pytest.mark.parametrize(("blocks", "seqs", "budget"), [(40, 8, 128), (200, 64, 512), (4000, 32, 512)])
def test_joined_steps_take_about_as_long_as_the_reference_engine(blocks, seqs, budget):
    """Joined steps take the mean of their costs, and an arrival may find a step that ends a little elsewhere."""
    deployed, work = deployment(blocks, seqs=seqs, budget=budget), workload(11)
    batch, done = served(rows(work), Limits.of(deployed), step_time(deployed.cost), listens=False)
    records = simulate(work, deployed, engine="reference").requests
    assert max(q.finished_s for q in done) == pytest.approx(records.finished_s.max(), rel=0.002)
    assert np.mean([q.finished_s for q in done]) == pytest.approx(records.finished_s.mean(), rel=0.01)
    assert batch.preemptions == pytest.approx(records.preemptions.sum(), abs=5)


def linear(decodes, kv_tokens, prompts):
    return 1.0 + 0.1 * decodes + 0.001 * kv_tokens + 0.01 * sum(tokens for tokens, _ in prompts)


def flat(decodes, _kv_tokens, prompts):
    return 1.0 + 0.1 * decodes + 0.01 * sum(tokens for tokens, _ in prompts)


def ends(requests, limits, cost, *, listens):
    return [q.finished_s for q in served(requests, limits, cost, listens=listens)[1]]


together = st.lists(st.tuples(st.just(0.0), st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=12)
moments = st.integers(0, 2_000).map(lambda k: k * 0.10317 + 0.00013)  # never at the end of a step
spread = st.lists(st.tuples(moments, st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=12)


@given(together)
def test_joined_steps_end_as_single_steps(requests):
    joined, single = (ends(requests, ROOMY, linear, listens=listens) for listens in (False, True))
    assert joined == pytest.approx(single, abs=0.06)


@pytest.mark.parametrize("limits", [ROOMY, TIGHT])
@given(requests=st.one_of(together, spread))
def test_arrivals_and_preemptions_in_joined_steps_are_those_of_single_steps(limits, requests):
    """With equally long steps the two agree exactly."""
    joined, single = (ends(requests, limits, flat, listens=listens) for listens in (False, True))
    assert joined == pytest.approx(single, abs=1e-6)


@pytest.mark.parametrize("limits", [ROOMY, TIGHT])
@given(requests=spread, data=st.data())
def test_aborted_sequences_leave_and_the_others_finish(limits, requests, data):
    batch = ContinuousBatch(limits, linear)
    sequences = [
        sequence(n, 0.0, prompt, output, listens=data.draw(st.booleans()))
        for n, (_, prompt, output) in enumerate(requests)
    ]
    for q in sequences:
        batch.enter(q)
    now_s = data.draw(st.floats(0.0, 30.0))
    batch.advance(now_s)
    aborted = data.draw(st.sets(st.sampled_from(range(len(sequences)))))
    for n in sorted(aborted):
        q = sequences[n]
        running, before = q.state in {"waiting", "running"}, batch.generated(q, now_s)
        assert 0 <= before <= requests[n][2]
        assert batch.abort(q, now_s) is running
        assert q.generated == before
    while batch.next_s() < math.inf:
        batch.advance(batch.next_s())
    assert {n for n, q in enumerate(sequences) if q.state != "finished"} <= aborted
    assert batch.free_blocks == limits.num_blocks
    assert batch.queued == batch.running == 0


def test_an_abort_frees_memory_in_any_state():
    batch = ContinuousBatch(Limits.of(deployment(40)), step_time(deployment(40).cost))
    qs = [BatchSequence(SequenceOrder(i, 0.0), 50, on_token=lambda _: False) for i in range(20)]
    for q in qs:
        batch.enter(q)
    assert batch.abort(qs[19], -1.0)
    for _ in range(5):
        batch.advance(batch.next_s())
    assert {q.state for q in qs} == {"waiting", "running", "aborted"}
    now_s = math.nextafter(batch.next_s(), 0)
    assert all(batch.abort(q, now_s) for q in qs[:19])
    assert not batch.abort(qs[0], now_s)
    assert batch.free_blocks == 40
    assert batch.queued == batch.running == 0


def test_tokens_are_counted_while_steps_run_together():
    batch = ContinuousBatch(ROOMY, flat)
    q = sequence(0, 0.0, 10, 50, listens=False)
    batch.enter(q)
    batch.advance(0.0)
    first_s = flat(0, 0, [(10, 0)])
    batch.advance(first_s)
    counts = [batch.generated(q, first_s + steps * flat(1, 0, []) + 0.01) for steps in range(5)]
    assert counts == [1, 2, 3, 4, 5]
