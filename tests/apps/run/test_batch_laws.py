"""Jumps from change to change come to what single steps come to, wherever they are looked at or called off."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_world import cluster_of, ensemble, served

from lengthwise import engine
from lengthwise.apps.launch import Lengths, SimulatedLauncher
from lengthwise.apps.launch.simulated import Batch, Limits, SimulatedSequence
from lengthwise.apps.plan import Space
from lengthwise.schema.workload import Workload

LIMITS = Limits(4, 64, 400)
TIGHT = Limits(4, 64, 150, block_tokens=4, reserve=0.05)
"""Somebody has to make room."""


def linear(decodes, kv_tokens, prompts):
    return 1.0 + 0.1 * decodes + 0.001 * kv_tokens + 0.01 * sum(tokens for tokens, _ in prompts)


def flat(decodes, _kv_tokens, prompts):
    return 1.0 + 0.1 * decodes + 0.01 * sum(tokens for tokens, _ in prompts)


def jumped(arrivals, limits=LIMITS, cost=linear):
    """[n] when each of (at_s, prompt, need) has ended."""
    batch, ends, over = Batch(limits, cost), {}, []
    left = sorted((at_s, n) for n, (at_s, _, _) in enumerate(arrivals))
    sequences = [SimulatedSequence(prompt, need, lambda: None) for _, prompt, need in arrivals]
    now_s = 0.0
    while len(ends) < len(arrivals):
        now_s = min(left[0][0] if left else math.inf, batch.next_s)
        while left and left[0][0] <= now_s:
            batch.add(sequences[left.pop(0)[1]], now_s)
        if batch.idle or batch.next_s <= now_s:
            over = batch.turn(now_s)
        for one in over:
            ends[sequences.index(one)] = now_s
        over = []
    return [ends[n] for n in range(len(arrivals))]


def stepped(arrivals, limits=LIMITS, cost=linear):
    """The same rule, one step after another."""
    waiting, running, ends, now_s = [], [], {}, 0.0
    had, half = [0] * len(arrivals), limits.block_tokens // 2
    left = sorted((at_s, n) for n, (at_s, _, _) in enumerate(arrivals))
    while len(ends) < len(arrivals):
        while left and left[0][0] <= now_s + 1e-9:
            waiting.append(left.pop(0)[1])
        full = False
        while len(running) > 1 and held(arrivals, running, half) + len(running) > limits.kv_tokens:
            n, had[n] = running.pop()
            waiting.insert(0, n)
            full = True
        joining, tokens = [], len(running)
        free = limits.kv_tokens - held(arrivals, running, half) - int(limits.reserve * limits.kv_tokens)
        free -= len(running)
        while waiting and not full and len(running) + len(joining) < limits.seqs:
            read = arrivals[waiting[0]][1] + had[waiting[0]]
            free -= read + 1 + half
            if (free < 0 and (running or joining)) or (joining and tokens + read > limits.step_tokens):
                break
            joining.append(waiting.pop(0))
            tokens += read
        if not running and not joining:
            now_s = left[0][0]
            continue
        kv = sum(arrivals[n][1] + done for n, done in running)
        now_s += cost(len(running), kv, [(arrivals[n][1] + had[n], 0) for n in joining])
        running = [(n, done + 1) for n, done in running] + [(n, had[n] + 1) for n in joining]
        for n, done in running:
            if done >= arrivals[n][2]:
                ends[n] = now_s
        running = [(n, done) for n, done in running if n not in ends]
    return [ends[n] for n in range(len(arrivals))]


def held(arrivals, running, half):
    """Tokens of memory that are taken."""
    return sum(arrivals[n][1] + done + half for n, done in running)


together = st.lists(st.tuples(st.just(0.0), st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=12)
moments = st.integers(0, 2_000).map(lambda k: k * 0.10317 + 0.00013)  # never at a step's border
spread = st.lists(st.tuples(moments, st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=12)


@given(together)
def test_a_batch_that_comes_at_once_ends_as_step_by_step(arrivals):
    assert jumped(arrivals) == pytest.approx(stepped(arrivals), abs=0.06)


@given(st.one_of(together, spread))
def test_where_memory_is_short_the_last_one_makes_room_and_reads_again(arrivals):
    assert jumped(arrivals, TIGHT, flat) == pytest.approx(stepped(arrivals, TIGHT, flat), abs=1e-6)


@given(spread)
def test_arrivals_in_between_join_at_the_next_step(arrivals):
    """Within a jump its steps are taken as equally long, so that a step's border may lie a little elsewhere."""
    assert jumped(arrivals, cost=flat) == pytest.approx(stepped(arrivals, cost=flat), abs=1e-6)


@pytest.mark.parametrize("limits", [LIMITS, TIGHT])
@given(arrivals=spread, data=st.data())
def test_who_is_called_off_leaves_and_the_rest_end(limits, arrivals, data):
    batch, over = Batch(limits, linear), []
    sequences = [SimulatedSequence(prompt, need, lambda: None) for _, prompt, need in arrivals]
    for one in sequences:
        batch.add(one, 0.0)
    over += batch.turn(0.0)
    gone = data.draw(st.sets(st.sampled_from(range(len(sequences)))))
    at_s = data.draw(st.floats(0.0, 30.0))
    while batch.next_s <= at_s:
        over += batch.turn(batch.next_s)
    for n in sorted(gone):
        if sequences[n] not in over:
            assert 0 <= batch.written(sequences[n], at_s) <= sequences[n].need
            batch.remove(sequences[n], at_s)
    while batch.next_s < math.inf:
        over += batch.turn(batch.next_s)
    assert len(over) == len(set(map(id, over)))
    assert {n for n, one in enumerate(sequences) if one not in over} <= gone
    assert (batch._running, batch._kv) == (0, 0)


@pytest.mark.parametrize("name", ["llama-2-13b", "opt-1.3b"])
def test_a_replica_takes_as_long_as_the_one_that_is_planned_with_where_memory_is_short_too(name):
    """Of the larger model 256 answers at once do not all have room."""
    space = Space(served(1, name), cluster_of(1))
    (plan, *_) = space.plans(0)
    deployment, (tasks, draw) = (space.deployment(plan), ensemble((1000,), np.random.default_rng(1), mean=180.0))
    arrivals = [
        (0.0, *lengths) for lengths in zip(draw.prompt_tokens.tolist(), draw.output_tokens.tolist(), strict=True)
    ]
    launcher = SimulatedLauncher(tasks.models, space.deployment, Lengths.of(tasks, draw), space.seconds)
    completed_s = jumped(arrivals, *launcher._cost(plan))
    workload = Workload(np.zeros(len(tasks)), draw.prompt_tokens, draw.output_tokens)
    told = engine.simulate(workload, deployment, keep_steps=0).requests
    assert max(completed_s) == pytest.approx(float(told.finished_s.max()), rel=0.01)
    assert np.mean(completed_s) == pytest.approx(float(told.finished_s.mean()), rel=0.01)
