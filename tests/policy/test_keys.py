"""Keys of many requests at once are those of each alone, and of the simulator's ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.policy import COLUMNS, interpreted, keys, known, rank, resolve
from lengthwise.policy.compile import INTEGER_COLUMNS
from lengthwise.policy.contracts import RANK_ARGUMENTS
from lengthwise.schema.errors import PolicyError

RANKS = [*known("rank"), "mlfq", "aged(weight=3)", "aged_gittins"]


def some(n, seed=0):
    """Columns of n requests."""
    rng = np.random.default_rng(seed)
    integers = {name: rng.integers(0, 500, n) for name in INTEGER_COLUMNS}
    return {name: integers[name] if name in INTEGER_COLUMNS else rng.uniform(1, 1000, n) for name in COLUMNS}


@pytest.mark.parametrize("name", RANKS)
def test_every_row_has_the_key_it_has_alone(name):
    policy, columns = resolve("rank", name), some(50)
    one = interpreted(policy)
    alone = [one(12.5, *(columns[name][i].item() for name in COLUMNS)) for i in range(50)]
    assert keys(policy, columns, 12.5).tolist() == alone


def test_a_custom_rank_is_called_the_same_way():
    @rank(every_step=True)
    def own(now_s, arrival_s, prompt_tokens):
        return (now_s - arrival_s) / (1 + prompt_tokens)

    columns = some(9)
    expected = (40.0 - columns["arrival_s"]) / (1 + columns["prompt_tokens"])
    assert keys(own, columns, 40.0).tolist() == expected.tolist()


@settings(max_examples=30)
@given(st.integers(0, 40), st.integers(0, 2**31))
def test_only_the_columns_that_a_rank_takes_are_looked_at(n, seed):
    columns = some(n, seed)
    found = keys(resolve("rank", "srtf"), {"remaining_tokens": columns["remaining_tokens"]}, 0.0)
    assert found.tolist() == columns["remaining_tokens"].tolist()


def test_columns_are_all_rank_arguments_except_the_time():
    assert ("now_s", *COLUMNS) == RANK_ARGUMENTS


def test_a_required_column_must_be_present():
    with pytest.raises(PolicyError, match="remaining_tokens"):
        keys(resolve("rank", "hrrn"), {"queued_for_s": np.ones(3)}, 0.0)


def test_columns_must_be_of_one_length():
    with pytest.raises(PolicyError, match="one value a request"):
        keys(resolve("rank", "hrrn"), {"queued_for_s": np.ones(3), "remaining_tokens": np.ones(2)}, 0.0)


def test_only_ranks_have_keys():
    with pytest.raises(PolicyError, match="axis"):
        keys(resolve("router", "round_robin"), some(2), 0.0)
