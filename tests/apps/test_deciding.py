"""What tasks ask once their parents have ended: branches, rounds, items, prompts and keys."""

from __future__ import annotations

import pytest
from app_world import MODELS, chain, critique, ensemble, played, split

from lengthwise.apps.app import App, Call, Model, Sampling, times
from lengthwise.apps.expand import TemplateDecider, expand
from lengthwise.apps.ledger.contracts import Output
from lengthwise.schema.errors import InputError


def test_a_judge_sees_answers_by_model():
    reported = played(ensemble(), [{"question": "q"}], lambda call, *_: "A" if call == "answer" else "J")
    assert reported["judge", 0, 0, 0] == "Best of {'a': 'A', 'b': 'A', 'c': 'A'}?"


def test_a_chain_passes_on_its_output_and_an_empty_one_is_skipped_completely():
    rows = [{"chunks": ["one", "two"]}, {"chunks": []}]
    reported = played(chain(), rows, lambda call, row, k, _: f"S{k}" if call == "summarise" else "E")
    assert reported["summarise", 0, 0, 0] == "Next: one"
    assert reported["summarise", 0, 1, 0] == "So far: S0. Next: two"
    assert reported["evaluate", 0, 0, 1] == "Rate S1 (1)"
    assert reported["evaluate", 1, 0, 0] is None


def test_a_loop_ends_on_its_condition_and_its_last_output_is_seen_outside():
    def reply(call, row, k, message):
        return ("OK" if k >= row else "bad") if call == "critique" else f"{call}{k}"

    reported = played(critique(), [{"topic": "t"}] * 3, reply)
    assert reported["critique", 0, 0, 0] == "Criticise draft0"
    assert reported["revise", 0, 0, 0] is None
    assert reported["critique", 0, 1, 0] is None
    assert reported["final", 0, 0, 0] == "Sign draft0"
    assert reported["critique", 1, 1, 0] == "Criticise revise0"
    assert reported["critique", 1, 2, 0] is None
    assert reported["final", 1, 0, 0] == "Sign revise0"
    assert reported["revise", 2, 1, 0] == "Mend revise0 by bad"
    assert reported["final", 2, 0, 0] == "Sign revise1"


def test_a_list_of_an_output_is_as_long_as_it_turns_out():
    reported = played(split(), [{"topic": "t"}], lambda call, *_: "one\ntwo" if call == "plan" else call)
    assert [reported["step", 0, 0, i] for i in range(4)] == ["Do one", "Do two", None, None]
    assert reported["join", 0, 0, 0] == "Join step+step"


def test_a_list_that_is_too_long_is_the_tasks_fault():
    with pytest.raises(InputError, match=r"call 'step', row 0: .*may have 4 elements; it has 9. Raise max_items"):
        played(split(), [{"topic": "t"}], lambda *_: "\n".join("123456789"))


def test_a_call_that_names_only_skipped_calls_is_skipped():
    app = App(
        MODELS,
        [
            Call("x", "a", "{{ q }}", when="q == 'yes'"),
            Call("y", "b", "{{ x }}"),
            Call("z", "c", "{{ q }} {{ x }}{{ y }}"),
        ],
    )
    reported = played(app, [{"q": "yes"}, {"q": "no"}], lambda call, *_: call)
    assert reported["y", 0, 0, 0] == "x"
    assert reported["y", 1, 0, 0] is None
    assert reported["z", 1, 0, 0] is None


def test_outputs_are_data_and_templates_are_in_a_sandbox():
    app = App(MODELS, [Call("x", "a", "hi"), Call("y", "b", "{{ x }}")])
    reported = played(app, [{}], lambda *_: "{{ 1 + 1 }} {% raw %}")
    assert reported["y", 0, 0, 0] == "{{ 1 + 1 }} {% raw %}"
    bad = App(MODELS, [Call("x", "a", "{{ q.__class__.__mro__ }}")])
    with pytest.raises(InputError, match="row 0"):
        expand(bad, [{"q": "x"}])


def test_a_field_that_a_row_lacks_is_reported_with_its_row():
    app = App(MODELS, [Call("x", "a", "hi"), Call("y", "a", "{{ x }} {{ q }}")])
    expanded = expand(app, [{"q": "present"}])
    short = type(expanded)(expanded.app, [{}], ["r7"], expanded.tasks, expanded.blocks)
    with pytest.raises(InputError, match="call 'y', row r7: 'q' is undefined"):
        TemplateDecider(short).decide(1, lambda _: Output("t", "stop", 1, 1))


def keys(app, rows=({"q": "a"}, {"q": "a"})):
    expanded = expand(app, list(rows))
    decider = TemplateDecider(expanded)
    return [decider.decide(i, lambda _: None).key for i in range(len(expanded.tasks))]


def test_the_same_request_has_the_same_key_where_decoding_is_greedy():
    one = App(MODELS, [Call("x", "a", "{{ q }}")])
    assert len(set(keys(one))) == 1
    assert keys(one) == keys(App(MODELS, [Call("renamed", "a", "{{ q }}")]))
    for other in (
        App([Model("a", "vicuna-13b", revision="2")], one.calls),
        App([Model("a", weights="other/weights")], one.calls),
        App(MODELS, [Call("x", "a", "{{ q }}!")]),
        App(MODELS, [Call("x", "a", "{{ q }}", sampling=Sampling(max_tokens=7))]),
        App(MODELS, [Call("x", "a", "{{ q }}", api="completion")]),
    ):
        assert set(keys(other)).isdisjoint(keys(one))


def test_what_is_left_to_chance_is_each_tasks_own_and_the_same_again():
    app = App(MODELS, [Call("x", "a", "{{ q }}", sampling=Sampling(temperature=1.0), fan=times(3))])
    assert len(set(keys(app))) == 6
    assert keys(app) == keys(app)
    seeded = App(MODELS, [Call("x", "a", "{{ q }}", sampling=Sampling(temperature=1.0, seed=1), fan=times(3))])
    assert set(keys(seeded)).isdisjoint(keys(app))
