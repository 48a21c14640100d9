"""Tasks stand in the ledger by the longest chain behind them; nothing is lost on the way there and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_world import tasks_of

from lengthwise.apps.run import identity_of, ledger_layout
from lengthwise.apps.run.job import chain_tokens
from lengthwise.schema.errors import InputError


@st.composite
def graphs(draw, most=24):
    """Tasks of up to three models, any of them behind any before it, and expected lengths."""
    n = draw(st.integers(1, most))
    models = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    edges = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=3 * n))
    parents = sorted({(max(a, b), min(a, b)) for a, b in edges if a != b})
    lengths = draw(st.lists(st.integers(0, 50), min_size=n, max_size=n))
    return tasks_of(models, parents=parents), np.array(lengths, float)


def longest(tasks, lengths, task):
    """By the definition."""
    start, child = tasks.children
    behind = child[start[task] : start[task + 1]].tolist()
    return lengths[task] + max((longest(tasks, lengths, one) for one in behind), default=0.0)


@given(graphs(most=12))
def test_a_chain_is_the_longest_way_to_an_end(world):
    tasks, lengths = world
    assert chain_tokens(tasks, lengths).tolist() == [longest(tasks, lengths, task) for task in range(len(tasks))]


@given(graphs())
def test_the_longest_chains_stand_first_and_every_parent_before_its_children(world):
    tasks, lengths = world
    layout = ledger_layout(tasks, lengths)
    left = chain_tokens(tasks, np.maximum(lengths, 1.0))[layout.task_of]
    assert (np.diff(left) <= 0).all()
    for place in range(len(tasks)):
        assert (layout.parents(place) < place).all()


@given(graphs())
def test_a_layout_is_the_same_tasks_in_another_order(world):
    tasks, lengths = world
    layout = ledger_layout(tasks, lengths)
    assert layout.task_of[layout.place_of].tolist() == list(range(len(tasks)))
    for task in range(len(tasks)):
        place = int(layout.place_of[task])
        assert layout.pairs[int(layout.tasks.call[place])] == (tasks.call[task], tasks.model[task])
        assert layout.tasks.row[place] == tasks.row[task]
        other = tasks.parent[tasks.parent_start[task] : tasks.parent_start[task + 1]]
        assert layout.task_of[layout.parents(place)].tolist() == other.tolist()


@given(graphs(), st.text(max_size=3))
def test_an_identity_distinguishes_words_and_tasks(world, words):
    tasks, lengths = world
    layout = ledger_layout(tasks, lengths)
    assert identity_of(words, layout) == identity_of(words, ledger_layout(tasks, lengths))
    assert identity_of(words, layout) != identity_of(words + "x", layout)
    more = tasks_of([*tasks.model.tolist(), 0])
    assert identity_of(words, layout) != identity_of(words, ledger_layout(more, np.append(lengths, 1.0)))


def test_lengths_are_required_for_every_task():
    with pytest.raises(InputError, match=r"each task \(2\); there are 3"):
        ledger_layout(tasks_of([0, 0]), np.ones(3))
