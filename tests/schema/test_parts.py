"""Parts of a workload keep what requests share and wait for, or refuse to lose it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import After, SharedPrefixes, Workload


def chain(n: int) -> Workload:
    """Return sessions of three turns each; the first turns share a block with each other."""
    turn = np.arange(n) % 3
    first = turn == 0
    later = np.flatnonzero(~first)
    starts = np.concatenate([[0], np.cumsum(~first)])
    return Workload(
        np.arange(n) // 3 * 1.0,
        30 + 30 * turn,
        np.full(n, 9),
        extra={"session": np.arange(n) // 3},
        after=After(starts, later - 1, turn * 0.5),
        prefixes=SharedPrefixes(
            16, np.concatenate([[0], np.cumsum(first)]), np.full(first.sum(), 4), np.where(first, -1, np.arange(n) - 1)
        ),
    )


@given(n=st.integers(1, 20), data=st.data())
def test_complete_sessions_can_be_taken(n, data):
    sessions = data.draw(st.sets(st.integers(0, (n - 1) // 3), min_size=1))
    rows = np.flatnonzero(np.isin(np.arange(n) // 3, sorted(sessions)))
    complete = chain(n)
    part = complete.take(rows)
    assert part.prompt_tokens.tolist() == complete.prompt_tokens[rows].tolist()
    assert rows[part.after.parent].tolist() == [r - 1 for r in rows if r % 3]
    assert part.after.delay_s.tolist() == complete.after.delay_s[rows].tolist()
    assert [rows[t] if t >= 0 else -1 for t in part.prefixes.turns] == complete.prefixes.turns[rows].tolist()
    assert part.prefixes.block_ids.tolist() == [4] * len(sessions)


@pytest.mark.parametrize("rows", [[1, 2], [0, 2], [3, 4, 2]])
def test_parts_of_sessions_are_refused(rows):
    with pytest.raises(
        InputError, match=r"request \d depends on request \d, which is left out; take complete sessions"
    ):
        chain(6).take(np.array(rows))


def test_prefixes_are_cut_with_their_prompts():
    prefixes = SharedPrefixes(16, np.array([0, 3, 3, 5]), np.array([1, 2, 3, 1, 2]))
    cut = prefixes.within(np.array([20, 9, 16]))
    assert cut.start.tolist() == [0, 2, 2, 3]
    assert cut.block_ids.tolist() == [1, 2, 1]


def test_a_part_has_other_arrivals_if_given():
    w = chain(6)
    assert w.take(np.arange(3), np.full(3, 7.0)).arrival_s.tolist() == [7, 7, 7]
