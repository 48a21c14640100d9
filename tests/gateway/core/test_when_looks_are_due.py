"""Tokens of running requests trigger no decision before running and waiting requests may be compared again."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_worlds import request, scheduler, sent

from lengthwise.gateway.core.preemption import POLL_INTERVAL_S
from lengthwise.gateway.core.ranking import Entry, Ranker, TenantService
from lengthwise.gateway.request import LengthPrediction
from lengthwise.policy.named_schedulers import resolve


def looked_at():
    """A long one runs, a longer one waits, and they were compared at 1 s."""
    made = scheduler("isrtf", preemption="by_rank", window_tokens=5, preemptions_per_s=math.inf)
    made.offer(0.0, request(1, predicted=1000))
    assert sent(made.schedule(0.0)) == [1]
    made.offer(1.0, request(2, 1.0, predicted=2000))
    assert not made.schedule(1.0)
    return made


@pytest.mark.parametrize("what", ["tokens", "length_prediction"])
def test_updates_of_running_requests_are_decided_on_at_the_next_poll(what):
    made = looked_at()
    now_s = 1.0 + POLL_INTERVAL_S / 4
    if what == "tokens":
        made.on_progress(now_s, 1, 5)
    else:
        made.repredict(now_s, 1, LengthPrediction(3000.0, at_tokens=0))
    assert made.next_s(now_s) == pytest.approx(1.0 + POLL_INTERVAL_S)
    assert not made.schedule(now_s)
    decided = made.schedule(1.0 + POLL_INTERVAL_S)
    assert decided.preempt == ((1,) if what == "length_prediction" else ())


def test_tokens_within_a_window_make_no_look():
    made = looked_at()
    before_s = made.next_s(1.5)
    made.on_progress(1.5, 1, 4)
    assert made.next_s(1.5) == before_s


def test_a_window_that_is_over_is_decided_on_at_once():
    made = scheduler("windowed", window_tokens=5)
    made.offer(0.0, request(1, predicted=1000))
    made.schedule(0.0)
    made.offer(1.0, request(2, 1.0, predicted=10))
    made.schedule(1.0)
    made.on_progress(1.001, 1, 5)
    assert made.next_s(1.001) == 1.001
    assert made.schedule(1.001).preempt == (1,)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["srtf", "hrrn", "fcfs", "gittins", "sjf"]),
    metadata=st.lists(st.tuples(st.floats(0, 100), st.floats(1, 5000), st.integers(0, 4000)), min_size=1, max_size=8),
    now_s=st.floats(100, 200),
)
def test_stored_keys_of_running_requests_match_those_of_the_loop(name, metadata, now_s):
    ranker = Ranker(resolve("rank", name), TenantService())
    running = []
    for number, (arrival_s, predicted, generated) in enumerate(metadata):
        entry = Entry(request(number, arrival_s, predicted=predicted))
        entry.request.generated_tokens = generated
        entry.set_prediction(LengthPrediction(predicted))
        ranker.add(entry)
        ranker.update(now_s, entry)
        running.append(entry)
    rows = np.array([entry.row for entry in running])
    assert ranker.running_keys(now_s, running) == ranker.keys(now_s, rows, waiting=False).tolist()
