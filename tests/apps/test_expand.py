"""Applications unrolled: which tasks exist, which of them wait for which, and how long their outputs may be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from app_world import MODELS, chain, critique, ensemble, split
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.apps.app import App, Call, From, LengthFields, Loop, Sampling, each
from lengthwise.apps.expand import expand
from lengthwise.apps.plan.draws import draw
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.workload import Fixed, LogNormal

LENGTHS = [LogNormal.from_mean_cv(80, 1), Fixed(20), None]
TOPIC = {"topic": "tea"}


def where(tasks, call, row, k=0, index=0):
    found = (tasks.call == tasks.calls.index(call)) & (tasks.row == row) & (tasks.round == k) & (tasks.index == index)
    (number,) = np.flatnonzero(found)
    return int(number)


def parents(tasks, number):
    span = slice(tasks.parent_start[number], tasks.parent_start[number + 1])
    return dict(zip(tasks.parent[span].tolist(), tasks.shown[span].tolist(), strict=True))


def test_each_of_several_models_is_called_and_the_judge_waits_for_all():
    tasks = expand(ensemble(), [{"question": "q"}] * 2).tasks
    assert len(tasks) == 2 * 4
    requested = [where(tasks, "answer", 1, index=i) for i in range(3)]
    assert tasks.model[requested].tolist() == [0, 1, 2]
    assert parents(tasks, where(tasks, "judge", 1)) == dict.fromkeys(requested, 1)


def test_a_chain_waits_link_by_link_and_is_judged_by_its_end():
    rows = [{"chunks": ["one", "two two", "three"]}, {"chunks": ["one"]}, {"chunks": []}]
    tasks = expand(chain(), rows).tasks
    links = [where(tasks, "summarise", 0, k) for k in range(3)]
    assert [parents(tasks, link) for link in links] == [{}, {links[0]: 1}, {links[1]: 1}]
    assert parents(tasks, where(tasks, "evaluate", 0, index=1)) == {links[2]: 1}
    assert parents(tasks, where(tasks, "evaluate", 2)) == {}
    assert tasks.prompt_tokens[links[1]] > tasks.prompt_tokens[links[0]]


def test_what_hangs_on_an_empty_list_alone_is_planned_as_absent():
    """The run skips the call and all that depends on it: there is no output that it could be about."""
    rows = [{"chunks": ["one"]}, {"chunks": []}]
    complete = expand(chain(), rows)
    for seed in range(5):
        existing = draw(
            complete.tasks, LENGTHS[: len(complete.tasks.models)], [4096] * len(complete.tasks.models), seed
        ).present
        assert existing[where(complete.tasks, "evaluate", 0)]
        assert not existing[where(complete.tasks, "evaluate", 1)]


def test_a_loop_is_unrolled_round_by_round_with_coins_that_hang_on_one_another():
    tasks = expand(critique(share=0.25), [TOPIC]).tasks
    draft, first = where(tasks, "draft", 0), where(tasks, "critique", 0)
    assert parents(tasks, first) == {draft: 1}
    second = where(tasks, "critique", 0, 1)
    assert parents(tasks, second) == {draft: 1, first: 0, where(tasks, "revise", 0): 1}
    third = tasks.random_draw[where(tasks, "critique", 0, 2)]
    assert tasks.random_draw[first] == -1
    assert tasks.coins.after[third] == tasks.random_draw[second]
    assert tasks.coins.chance[third] == 0.75
    final = parents(tasks, where(tasks, "final", 0))
    assert final == {draft: 1, **{where(tasks, "revise", 0, k): int(k == 0) for k in range(3)}}


def test_a_list_that_hangs_on_an_output_has_its_most():
    tasks = expand(split(most=4), [TOPIC]).tasks
    steps = [where(tasks, "step", 0, index=i) for i in range(4)]
    assert tasks.coins.chance[tasks.random_draw[steps]].tolist() == [0.5] * 4
    assert parents(tasks, where(tasks, "join", 0)) == dict.fromkeys(steps, 1)


def test_a_row_names_its_model():
    rows = [{"q": "x", "best": name} for name in ("b", "a", "c")]
    app = App(MODELS, [Call("x", From("best"), "{{ q }}")])
    assert expand(app, rows).tasks.model.tolist() == [1, 0, 2]
    with pytest.raises(UnknownNameError, match=r"of row 1 .*'bb'.*Did you mean: b"):
        expand(app, [rows[0], {"q": "x", "best": "bb"}])


def test_lengths_given_in_rows_are_used():
    app = App(MODELS, [Call("x", "a", "{{ q }}", report=LengthFields("p", "o"))])
    tasks = expand(app, [{"q": "", "p": 7, "o": 3}, {"q": "", "p": 9, "o": 5}]).tasks
    assert tasks.prompt_tokens.tolist() == [7, 9]
    assert tasks.known_tokens.tolist() == [3, 5]
    assert draw(tasks, LENGTHS, [100] * 3, 0).output_tokens.tolist() == [3, 5]
    with pytest.raises(InputError, match=r"a whole number of tokens, at least 1; row 0 has 2\.5"):
        expand(app, [{"q": "", "p": 2.5, "o": 1}])


@pytest.mark.parametrize(
    ("app", "rows", "report"),
    [
        (ensemble(), [], "there are none"),
        (ensemble(), [{"questoin": "q"}], "Did you mean: questoin"),
        (chain(), [{"chunks": "abc"}], "row 0: chunks must be a list; it is str"),
        (
            App(MODELS, [Call("x", "a", "{{ item }}", fan=each("l", max_items=1))]),
            [{"l": [1, 2]}],
            "row 0: l may have 1 elements; it has 2",
        ),
    ],
)
def test_invalid_rows_are_reported(app, rows, report):
    with pytest.raises(InputError, match=report):
        expand(app, rows)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 99))
def test_draws_keep_to_tasks_and_to_their_limits(links, seed):
    tasks = expand(chain(), [{"chunks": ["x"] * k} for k in links]).tasks
    made = draw(tasks, LENGTHS, [90, 300, 300], seed)
    most = np.array([90, 300, 300])[tasks.model]
    assert (made.prompt_tokens + made.output_tokens <= np.maximum(most, made.prompt_tokens + 1)).all()
    assert (made.output_tokens >= 1).all()
    assert (made.output_tokens <= tasks.max_tokens).all()
    assert (made.prompt_tokens >= np.minimum(tasks.prompt_tokens, most - 1)).all()
    summed_up = np.array(links)[tasks.row] > 0
    assert (made.present == summed_up).all()


def test_prompts_contain_the_outputs_of_parents():
    tasks = expand(chain(), [{"chunks": ["x"] * 3}]).tasks
    made = draw(tasks, [Fixed(40), Fixed(5), None], [4096] * 3, 0)
    links = [where(tasks, "summarise", 0, k) for k in range(3)]
    added = made.prompt_tokens - tasks.prompt_tokens
    assert added[links].tolist() == [0, 40, 40]
    assert added[where(tasks, "evaluate", 0)] == 40


def test_a_chain_that_outgrows_its_context_is_cut_link_by_link():
    tasks = expand(chain(), [{"chunks": ["x"] * 6}]).tasks
    made = draw(tasks, [Fixed(60), Fixed(5), None], [80, 4096, 4096], 0)
    links = [where(tasks, "summarise", 0, k) for k in range(6)]
    for before, link in itertools.pairwise(links):
        assert made.prompt_tokens[link] == tasks.prompt_tokens[link] + made.output_tokens[before]
        assert made.prompt_tokens[link] + made.output_tokens[link] <= 80


def test_rounds_stop_as_often_as_stated():
    tasks = expand(critique(share=0.25), [TOPIC] * 4000).tasks
    made = draw(tasks, LENGTHS, [4096] * 3, 1)
    share = [made.present[(tasks.call == 1) & (tasks.round == k)].mean() for k in range(3)]
    np.testing.assert_allclose(share, [1.0, 0.75, 0.75**2], atol=0.03)
    later = made.present[(tasks.call == 1) & (tasks.round == 2)]
    assert not (later & ~made.present[(tasks.call == 1) & (tasks.round == 1)]).any()


def test_a_call_after_a_loop_is_present_however_many_rounds_run():
    calls = [Call("draft", "a", "Write of {{ topic }} {{ previous.draft }}"), Call("final", "b", "Sign {{ draft }}")]
    tasks = expand(App(MODELS, calls, [Loop("refine", ("draft",), 3, "draft", 0.9)]), [TOPIC] * 200).tasks
    present = draw(tasks, LENGTHS, [4096] * 3, 0).present
    assert present[tasks.call == 1].all()
    assert 0 < present[tasks.round == 1].sum() < 60


def test_the_same_seed_draws_the_same_and_first_tasks_whatever_comes_behind():
    app = App(MODELS, [Call("x", "a", "{{ q }}", sampling=Sampling(max_tokens=500))])
    short, long = (expand(app, [{"q": "cause"}] * n).tasks for n in (50, 90))
    one, two = draw(short, LENGTHS, [4096] * 3, 7), draw(long, LENGTHS, [4096] * 3, 7)
    np.testing.assert_array_equal(one.output_tokens, two.output_tokens[:50])
    assert (draw(short, LENGTHS, [4096] * 3, 8).output_tokens != one.output_tokens).any()
