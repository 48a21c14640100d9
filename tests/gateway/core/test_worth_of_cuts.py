"""A cut is held against the whole queue: what all who wait start sooner by, less the way back of who leaves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from engine_worlds import mean_s
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scheduler_worlds import request, scheduler, sent, worker
from test_price_of_cuts import NEAR

from lengthwise.gateway.core.preemption import saved_steps, slot_release_tokens
from lengthwise.gateway.core.ranking import PREFILL_WEIGHT
from lengthwise.gateway.request import LengthPrediction
from lengthwise.predict import LEVELS

EAGER = {"preemption": "by_rank", "preemptions_per_s": math.inf}


def running(lengths, *, workers, prompt_tokens=1, **order):
    """A scheduler whose slots are taken by requests of these predicted lengths: 0, 1, ..."""
    made = scheduler("isrtf", workers=workers, **(EAGER | order))
    for i, predicted in enumerate(lengths):
        made.offer(0.0, request(i, predicted=predicted, prompt_tokens=prompt_tokens))
    assert len(made.schedule(0.0).assign) == len(lengths)
    return made


def with_waiting(made, lengths, now_s=1.0, **metadata):
    """What is decided once requests of these lengths wait, too: 100, 101, ..."""
    for i, predicted in enumerate(lengths):
        made.offer(now_s, request(100 + i, now_s, predicted=predicted, prompt_tokens=1, **metadata))
    return made.schedule(now_s).preempt


# -- the whole queue -----------------------------------------------------------------------


def test_slots_become_free_after_exponential_times():
    assert slot_release_tokens([100.0] * 4) == pytest.approx([25, 25 + 100 / 3, 25 + 100 / 3 + 50, 25 + 100 / 3 + 150])
    assert slot_release_tokens([7.0]) == [7.0]


def test_a_waiting_request_saves_the_slot_time_beyond_its_own_length():
    assert saved_steps([], 100.0, [(40.0, 40.0)], 100.0) == pytest.approx(60.0)
    assert saved_steps([100.0] * 3, 100.0, [(20.0, 20.0)], 100.0) == pytest.approx(5.0)
    assert saved_steps([100.0] * 3, 100.0, [(40.0, 40.0)], 100.0) < 0


def test_a_slot_occupied_for_thousands_of_steps_is_preempted_for_a_long_queue():
    """The first would gain 3 tokens; all fifty gain a third more slots for as long as they wait."""
    reported = {"workers": [worker(cap=4)], "prompt_tokens": 400}
    assert with_waiting(running([100, 100, 100, 10_000], **reported), [30] * 50) == (3,)
    assert with_waiting(running([100, 100, 100, 10_000], **reported), [30]) == ()


def posterior(median, at_tokens=0):
    row = np.maximum(1.0, median * np.exp(1.5 * (2 * LEVELS - 1)))
    return LengthPrediction(float(median), quantiles=row, at_tokens=at_tokens)


@pytest.mark.parametrize("knows", ["distribution", "number"])
def test_a_stream_past_its_prediction_does_not_stop_all_cuts_of_its_model(knows):
    """It goes on, until it is predicted again: it is not about to end, as a token still to come would say."""
    made = running([60, 5000], workers=[worker("a"), worker("b")])
    length_prediction = posterior(60.0) if knows == "distribution" else LengthPrediction(60.0)
    made.repredict(0.1, 0, length_prediction)
    made.on_progress(0.9, 0, 90)
    assert with_waiting(made, [20]) == (1,)


@pytest.mark.parametrize(("cap", "most"), [(2, 0.96), (4, 0.97)])
def test_with_heavy_tails_and_a_long_queue_cuts_gain_on_ordering_alone(cap, most):
    """Log-normal lengths of sigma 1.6 at three times what engines serve."""
    costs, traffic = NEAR
    reported = {"costs": costs, "cap": cap, "count": 100, "spread": 1.6, **traffic}
    cut = {"preemption": "worth(factor=1)", "preemptions_per_s": math.inf}
    seeds = range(10, 18)
    with_cuts = [mean_s("isrtf", seed, 3.0, **reported, **cut) for seed in seeds]
    ordered = [mean_s("isrtf", seed, 3.0, **reported, preemption="never") for seed in seeds]
    assert sum(one[2] for one in with_cuts) > len(seeds)
    assert sum(one[0] for one in with_cuts) <= most * sum(one[0] for one in ordered)


# -- law 46 --------------------------------------------------------------------------------


def by_hand(active, stopping, waiting):
    """[saved tokens] of a cut, simulated event by event: a waiting request takes the slot that comes free first."""

    def first_places(lengths):
        at, left, found = 0.0, sorted(lengths), []
        while left:
            at += 1 / sum(1 / one for one in left)
            found.append(at)
            left = left[1:]
        return found

    def sum_of_starts(max_num_seqs, order):
        total = 0.0
        for tokens in order:
            max_num_seqs = sorted(max_num_seqs)
            total += max_num_seqs[0]
            max_num_seqs = [max_num_seqs[0] + tokens, *max_num_seqs[1:]]
        return total

    back = sorted([*waiting, stopping])
    return sum_of_starts(first_places([*active, stopping]), sorted(waiting)) - sum_of_starts(
        [0.0, *first_places(active)], back
    )


LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=6, unique=True)


@settings(max_examples=80)
@given(LENGTHS, st.lists(st.integers(1, 3000), min_size=1, max_size=20, unique=True), st.integers(1, 800))
def test_waiting_requests_gain_more_than_all_lose_wherever_one_is_preempted(active, waiting, prompt):
    """The first of them, or all three times as much; and wherever that holds, the longest is cut."""
    assume(not set(active) & set(waiting) and min(waiting) < max(active))
    made = scheduler("isrtf", workers=[worker(cap=len(active))], **(EAGER | {"preemptions_per_s": 1.0}))
    for i, predicted in enumerate(active):
        made.offer(0.0, request(i, predicted=predicted, prompt_tokens=prompt))
    made.schedule(0.0)
    cut = with_waiting(made, waiting)
    others = sorted(active)[:-1]
    loss = prompt * PREFILL_WEIGHT / len(active) * (len(active) + len(waiting))
    gain = max(by_hand(others, max(active), [min(waiting)]), by_hand(others, max(active), waiting) / 3)
    assume(abs(gain - loss) > 1e-6)
    assert cut == ((active.index(max(active)),) if gain > loss else ())


def test_an_overdue_request_need_not_gain_as_much():
    made = running([100.0] * 4, workers=[worker(cap=4)], max_wait_s=5.0)
    assert with_waiting(made, [40.0]) == ()
    made.on_progress(6.5, 0, 50)
    assert made.schedule(6.5).preempt == (3,)


# -- models and engines --------------------------------------------------------------------

TWO = [worker("a", models=("A",)), worker("b", models=("B",))]


def two_models(**order):
    """One runs on each; that of model A cannot be cut."""
    made = scheduler("isrtf", workers=TWO, **(EAGER | order))
    made.offer(0.0, request(0, predicted=1000, model="A", preemptible=False))
    made.offer(0.0, request(1, predicted=1000, model="B"))
    assert sent(made.schedule(0.0)) == [0, 1]
    return made


def test_a_model_whose_first_request_finds_none_to_preempt_blocks_no_other_model():
    made = two_models()
    made.offer(1.0, request(2, 1.0, predicted=5, model="A"))
    made.offer(1.0, request(3, 1.0, predicted=10, model="B"))
    assert made.schedule(1.0).preempt == (1,)


def test_one_that_has_waited_too_long_holds_up_no_other_model():
    made = two_models(max_wait_s=5.0)
    made.offer(1.0, request(2, 1.0, predicted=500, model="A"))
    assert made.schedule(1.0).preempt == ()
    made.offer(6.5, request(3, 6.5, predicted=10, model="B"))
    assert made.schedule(6.5).preempt == (1,)


def test_a_place_that_is_coming_is_taken_by_its_model_alone():
    made = scheduler("isrtf", workers=TWO, **EAGER)
    made.offer(0.0, request(0, predicted=1000, model="A"))
    made.offer(0.0, request(1, predicted=1000, model="B"))
    made.schedule(0.0)
    made.offer(1.0, request(2, 1.0, predicted=50, model="A"))
    assert made.schedule(1.0).preempt == (0,), "on its way back from now on"
    made.offer(2.0, request(3, 2.0, predicted=10, model="B"))
    assert made.schedule(2.0).preempt == (1,), "the first of all who wait, but of another model"


def test_a_request_that_avoids_an_engine_leaves_its_slots_to_others_of_its_model():
    made = scheduler("isrtf", workers=[worker("a"), worker("b")], **EAGER)
    made.offer(0.0, request(0, predicted=5))
    made.offer(0.0, request(1, predicted=900, preemptible=False))
    assert made.schedule(0.0).assign == ((0, "a"), (1, "b"))
    made.requeue(0.1, 0, 0, avoid="a")
    made.offer(0.1, request(2, 0.1, predicted=1000))
    assert made.schedule(0.1).assign == ((2, "a"),)
    made.offer(1.0, request(3, 1.0, predicted=10))
    made.on_progress(1.0, 2, 50)
    assert made.schedule(1.0).preempt == (2,), "the one that goes before it could not use that seat"
