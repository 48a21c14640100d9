from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from lengthwise.gateway.fleet.health import CLOSED, HALF_OPEN, OPEN, OWNER_S, Breaker

STEPS = st.lists(st.tuples(st.sampled_from("fab"), st.floats(0.0, 20.0)), max_size=120)


def test_so_many_failures_in_a_row_open_it_and_one_answer_between_does_not():
    breaker = Breaker(3, 1.0)
    for what in "ffaff":
        breaker.failed(0.0) if what == "f" else breaker.succeeded(0.0)
    assert breaker.state(0.0) == CLOSED
    assert breaker.failed(0.0)
    assert breaker.state(0.99) == OPEN
    assert breaker.state(1.0) == HALF_OPEN


def test_it_is_open_twice_as_long_each_time_up_to_sixteen_times_and_an_answer_closes_it():
    breaker, now_s, lengths = Breaker(1, 1.0), 0.0, []
    for _ in range(7):
        breaker.failed(now_s)
        lengths.append(breaker.next_s(now_s) - now_s)
        now_s = breaker.next_s(now_s)
    assert lengths == [1, 2, 4, 8, 16, 16, 16]
    assert breaker.succeeded(now_s)
    assert breaker.state(now_s) == CLOSED
    breaker.failed(now_s)
    assert breaker.next_s(now_s) == now_s + 1.0


def test_an_output_that_begins_ends_a_trial_and_is_no_answer_while_it_is_closed():
    breaker = Breaker(2, 1.0)
    for _ in range(2):
        assert not breaker.started(0.0)
        breaker.failed(0.0)
    assert breaker.state(0.0) == OPEN
    assert not breaker.started(0.5)
    assert breaker.started(1.0)
    assert breaker.state(1.0) == CLOSED
    breaker.failed(1.0)
    breaker.failed(1.0)
    assert breaker.next_s(1.0) == 3.0  # no answer came to its end since: twice as long


def test_requests_sent_before_the_breaker_opened_neither_close_nor_extend_it():
    breaker = Breaker(1, 1.0)
    breaker.failed(0.0)
    assert not breaker.failed(0.5)
    assert not breaker.succeeded(0.6)
    assert breaker.next_s(0.7) == 1.0


def test_owners_count_once_in_a_while_and_so_many_are_remembered_at_most():
    breaker = Breaker(5, 1.0)
    assert [breaker.count_owner(owner, 0.0) for owner in ("a", "b", "a")] == [True, True, False]
    assert breaker.count_owner("a", OWNER_S), "it is long ago"
    counted = sum(breaker.count_owner(number, OWNER_S) for number in range(100_000))
    assert counted < 2000
    assert not breaker.count_owner("one more", OWNER_S + 1.0)
    assert breaker.count_owner("one more", 2 * OWNER_S)


@given(STEPS, st.integers(1, 6))
def test_laws_of_the_breaker(steps, most):
    breaker, now_s, row = Breaker(most, 1.0), 0.0, 0
    for what, passed_s in steps:
        now_s += passed_s
        before = breaker.state(now_s)
        assert (breaker.next_s(now_s) < math.inf) == (before == OPEN)
        reported = {"f": breaker.failed, "a": breaker.succeeded, "b": breaker.started}[what]
        changed = reported(now_s)
        after = breaker.state(now_s)
        row = {"f": row + 1, "a": 0, "b": row}[what]
        assert changed == (before != after)
        if before == CLOSED:
            assert (after == OPEN) == (what == "f" and row >= most)
        elif before == OPEN:
            assert after == OPEN  # nothing but time ends it
            row = 0
        else:
            assert after == (OPEN if what == "f" else CLOSED)
            row = 0
        if after == OPEN:
            assert now_s < breaker.next_s(now_s) <= now_s + 16.0
            assert breaker.state(breaker.next_s(now_s)) == HALF_OPEN  # it is always tried again
