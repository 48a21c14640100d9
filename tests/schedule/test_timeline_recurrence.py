"""The pipeline's recurrence: the compiled one, a plain one, and closed forms."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.schedule.plan import pipelined_visits, round_visits
from lengthwise.schedule.stage_costs import compiled, workspace

SECONDS = st.floats(0.01, 10.0)


def steady_round(prefill_s, decode_s, parts, *, prefill_parts=None, finish_iteration=None, count=None, scale=None):
    """The compiled recurrence: seconds of a round, and from a prefill to the end of an iteration."""
    visit_s = np.ascontiguousarray(np.vstack([prefill_s, decode_s]).T, np.float64)
    stages, steps = len(visit_s), visit_s.shape[1] - 1
    prefill_parts = parts if prefill_parts is None else prefill_parts
    finish = steps if finish_iteration is None else finish_iteration
    count = np.ones(stages) if count is None else np.array(count, np.float64)
    scale = np.ones(prefill_parts) if scale is None else np.array(scale)
    return compiled("steady_round")(
        parts, prefill_parts, steps, finish, count, visit_s, scale, *workspace(parts, stages)
    )


def plain(prefill_s, decode_s, parts, prefill_parts, finish_iteration, scale, max_rounds=64, uniform=1e-10):
    """The recurrence over stages one by one, as it is written down."""
    visits = [prefill_s, *decode_s]
    free, ready = [0.0] * len(prefill_s), [0.0] * parts
    before, half, latency = None, 0.0, 0.0
    for turn in range(max_rounds):
        started, latency = [0.0] * prefill_parts, 0.0
        for column, seconds in enumerate(visits):
            for job in range(parts if column else prefill_parts):
                for stage, taken in enumerate(seconds):
                    begin = max(ready[job], free[stage])
                    if column == 0 and stage == 0:
                        started[job] = begin
                    free[stage] = ready[job] = begin + (taken if column else taken * scale[job])
            if column == finish_iteration:
                latency = max(0.0, *(ready[job] - started[job] for job in range(prefill_parts)))
        now = ready + free
        moved = [a - b for a, b in zip(now, before or [0.0] * len(now), strict=True)]
        before = now
        if max(moved) - min(moved) <= uniform * max(moved):
            return max(moved), latency
        if turn == max_rounds // 2 - 1:
            half = ready[0]
    return (ready[0] - half) / (max_rounds // 2), latency


@st.composite
def pipelines(draw):
    stages, steps = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    row = st.lists(SECONDS, min_size=stages, max_size=stages)
    parts = draw(st.integers(1, 5))
    return (
        draw(row), draw(st.lists(row, min_size=steps, max_size=steps)), parts,
        draw(st.integers(1, parts)), draw(st.integers(0, steps)),
    )  # fmt: skip


@given(pipelines())
@settings(max_examples=200)
def test_the_compiled_recurrence_agrees_with_the_plain_one_to_the_last_bit(case):
    prefill_s, decode_s, parts, prefill_parts, finish_iteration = case
    scale = [1.0 + 0.1 * job for job in range(prefill_parts)]
    got = steady_round(
        prefill_s, decode_s, parts, prefill_parts=prefill_parts, finish_iteration=finish_iteration, scale=scale
    )
    assert got == plain(prefill_s, decode_s, parts, prefill_parts, finish_iteration, scale)


@given(st.integers(0, 10**6))
@settings(max_examples=100)
def test_neighbours_that_take_the_same_time_may_be_taken_together(seed):
    rng = np.random.default_rng(seed)
    count = rng.integers(1, 5, rng.integers(1, 5))
    relative_speed = rng.uniform(0.5, 1.5, len(count))
    decode_s = relative_speed * np.sort(rng.uniform(0.3, 1.0, rng.integers(1, 6)))[::-1][:, None]
    prefill_s, parts = relative_speed * rng.uniform(1.0, 8.0, len(count)), int(rng.integers(1, 2 * count.sum() + 1))
    scale = rng.uniform(0.8, 1.2, parts)
    together = steady_round(prefill_s, decode_s, parts, count=count, scale=scale)
    separate = steady_round(np.repeat(prefill_s, count), np.repeat(decode_s, count, axis=1), parts, scale=scale)
    assert together[0] == pytest.approx(separate[0], rel=1e-9)
    assert together[1] == pytest.approx(separate[1], rel=1e-9)


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_visits_of_one_length_leave_no_gap(stages):
    got = steady_round([0.5] * stages, [[0.5] * stages] * 3, stages)
    assert got[0] == pytest.approx(stages * 4 * 0.5)


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_a_prefill_longer_than_decodes_leaves_the_bubble_of_the_closed_form(stages):
    """The last stage starts to decode when the last prefill has left it, and the next prefill waits for it."""
    decode = [0.5, 0.4, 0.2]
    got = steady_round([2.0] * stages, [[d] * stages for d in decode], stages)
    assert got[0] == pytest.approx((2 * stages - 1) * 2.0 + stages * (0.5 + 0.4) + 0.2)
    assert got[1] == pytest.approx(got[0])


def test_one_micro_batch_goes_through_the_stages_one_after_another():
    got = steady_round([2.0, 1.0, 3.0], [[0.5, 0.25, 0.125]] * 4, 1, finish_iteration=2)
    assert got[0] == pytest.approx(6.0 + 4 * 0.875)
    assert got[1] == pytest.approx(6.0 + 2 * 0.875)


@given(pipelines())
def test_no_round_is_shorter_than_a_stages_work_or_one_way_through(case):
    prefill_s, decode_s, parts, _, _ = case
    visits = np.array([prefill_s, *decode_s])
    bound = max(parts * visits.sum(axis=0).max(), visits.sum())
    assert steady_round(prefill_s, decode_s, parts)[0] >= bound * (1 - 1e-9)


@given(st.lists(SECONDS, min_size=1, max_size=4), st.integers(1, 5))
def test_a_decode_iteration_is_the_closed_form(visit_s, parts):
    many = 400
    visits = pipelined_visits(visit_s, 0.0, parts, many, is_prefill=False)
    ends = [v.end_s for v in visits if v.stage == len(visit_s) - 1 and v.micro_batch == 0]
    assert (ends[-1] - ends[many // 2 - 1]) / (many // 2) == pytest.approx(max(parts * max(visit_s), sum(visit_s)))


@given(pipelines())
def test_no_two_visits_of_a_stage_or_of_a_micro_batch_overlap(case):
    prefill_s, decode_s, parts, prefill_parts, _ = case
    visits = round_visits(prefill_s, decode_s, parts, 2, np.linspace(0.9, 1.1, prefill_parts))
    assert len(visits) == 2 * len(prefill_s) * (prefill_parts + parts * len(decode_s))
    for key in ("stage", "micro_batch"):
        for value in {getattr(v, key) for v in visits}:
            own = sorted((v.start_s, v.end_s) for v in visits if getattr(v, key) == value)
            assert all(a[1] <= b[0] for a, b in pairwise(own))


def test_the_drawn_rounds_are_as_long_as_the_steady_one():
    prefill_s, decode_s = [3.0, 2.0], [[0.5, 0.75], [0.25, 0.5]]
    visits = round_visits(prefill_s, decode_s, 3, 30)
    ends = [v.end_s for v in visits if v.stage == 1 and v.micro_batch == 2 and not v.is_prefill][1::2]
    assert ends[-1] - ends[-2] == pytest.approx(steady_round(prefill_s, decode_s, 3)[0])
