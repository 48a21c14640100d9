"""A client's deadline is for the start of its answer: a stream that has started has none any more."""

from __future__ import annotations

import pytest
from scheduler_worlds import request, scheduler, sent, worker


def returned(tokens_kept, *, workers=("w",), avoid="", **metadata):
    """A request with a deadline at 4 s that came back at 5 s, behind 60 tokens."""
    made = scheduler("isrtf", workers=[worker(name) for name in workers])
    made.offer(0.0, request(1, deadline_s=4.0, **metadata))
    assert sent(made.schedule(0.0)) == [1]
    made.schedule(4.5)
    made.on_progress(5.0, 1, 60)
    made.requeue(5.0, 1, tokens_kept, avoid=avoid)
    return made.schedule(5.0)


@pytest.mark.parametrize("avoid", ["", "a"])
def test_a_stream_that_was_cut_or_failed_over_goes_on_however_old_it_is(avoid):
    decisions = returned(60, workers=("a", "b"), avoid=avoid)
    assert not decisions.expire
    assert sent(decisions) == [1]


@pytest.mark.parametrize("metadata", [{"tokens_kept": 60, "streamed": False}, {"tokens_kept": 0}])
def test_a_request_without_any_output_still_has_its_deadline(metadata):
    decisions = returned(**metadata)
    assert [(one, refusal.reason) for one, refusal in decisions.expire] == [(1, "deadline")]
    assert not decisions.assign


def test_a_stream_that_waits_again_waits_past_its_deadline():
    made = scheduler("isrtf")
    made.offer(0.0, request(1, deadline_s=4.0))
    made.schedule(0.0)
    made.on_progress(2.0, 1, 60)
    assert made.update_workers(3.0, []) == (1,)
    made.requeue(3.0, 1, 60)
    assert not made.schedule(4.0).expire
    assert not made.schedule(5.0).expire
    made.update_workers(6.0, [worker("next")])
    assert sent(made.schedule(6.0)) == [1]
