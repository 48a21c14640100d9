"""Time left: the plan's clock at first, what was measured in the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lengthwise.apps.run.progress import time_left

SLACK = (0.8, 1.3)


def test_nobody_can_tell_before_anything_is_done_without_a_plan():
    assert time_left(0.0, 10.0, None, SLACK) is None


def test_at_the_start_it_is_the_plan_and_at_the_end_nothing():
    assert time_left(0.0, 0.0, 100.0, (1.0, 1.0)) == (100.0, 100.0, 100.0)
    assert time_left(1.0, 50.0, 100.0, SLACK) == (0.0, 0.0, 0.0)


def test_without_a_plan_it_is_what_was_measured():
    assert time_left(0.25, 30.0, None, SLACK) == (90.0, 72.0, 117.0)


@given(st.floats(0.01, 0.99), st.floats(0.1, 1e5), st.floats(0.1, 1e5))
def test_it_is_between_the_plan_and_what_was_measured_and_within_its_interval(share, at_s, planned_s):
    left_s, low_s, high_s = time_left(share, at_s, planned_s, SLACK)
    both = (at_s * (1 - share) / share, max(0.0, planned_s - at_s))
    assert min(both) * (1 - 1e-9) <= left_s <= max(both) * (1 + 1e-9)
    assert 0 <= low_s <= left_s <= high_s
