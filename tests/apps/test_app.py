"""An application that cannot be run is reported when it is created."""

from __future__ import annotations

import pytest
from app_world import MODELS, critique

from lengthwise.apps.app import App, Call, Fan, From, Loop, Model, Sampling, each, ordered_units, over
from lengthwise.schema.errors import InputError, UnknownNameError


def app(*calls, loops=(), models=MODELS):
    return App(models, calls, loops)


@pytest.mark.parametrize(
    ("make", "report"),
    [
        (lambda: App((), [Call("x", "a", "hi")]), "at least one model"),
        (app, "at least one call"),
        (lambda: app(Call("x", "a", "1"), Call("x", "a", "2")), "duplicates: x"),
        (lambda: app(Call("item", "a", "1")), "a call's name must be usable in templates"),
        (lambda: app(Call("a b", "a", "1")), "a call's name must be usable in templates"),
        (lambda: app(Call("x", (), "1")), "must name a model"),
        (
            lambda: app(Call("x", "a", "{{ y }}"), Call("y", "b", "{{ z }}"), Call("z", "a", "{{ x }}")),
            "x -> z -> y -> x",
        ),
        (lambda: app(Call("x", "a", "{{ x }}")), "call 'x' names 'x', which is itself. To use a field 'x'"),
        (lambda: app(Call("x", "a", "one\ntwo {{ foo")), r"call 'x': .* line 2: .*two \{\{ foo"),
        (lambda: app(Call("x", "a", "hi", when="1 +")), "call 'x': an? .*Jinja2"),
        (lambda: app(Call("x", "a", "{{ previous }}")), "it is in neither"),
        (lambda: app(Call("p", "a", "hi"), Call("x", "a", "{{ item }}", fan=each("p.split()"))), "needs max_items"),
        (lambda: app(Call("p", "a", "hi"), Call("x", "a", "{{ item }}", fan=over("p.split()"))), "list in the row"),
        (lambda: app(Call("x", ("a", "b"), "hi", fan=each("items"))), "cannot fan out as well"),
        (lambda: app(Call("x", "a", (("user", "hi"),), api="completion")), "must have one prompt"),
        (lambda: app(Call("x", "a", "hi", when_share=1.5)), "from 0 to 1"),
        (lambda: app(Call("x", "a", "hi"), loops=[Loop("l", (), 2)]), "must have calls"),
        (lambda: app(Call("x", "a", "hi"), loops=[Loop("l", ("x",), 2), Loop("m", ("x",), 2)]), "in l and m"),
        (lambda: app(Call("x", "a", "hi", fan=over("c")), loops=[Loop("l", ("x",), 2)]), "it can be one of them"),
        (
            lambda: app(Call("x", "a", "{{ y }}"), Call("y", "a", "{{ x }}"), loops=[Loop("l", ("x", "y"), 2)]),
            "write previous.y",
        ),
        (lambda: Fan(each="a", over="b"), "each and over are given"),
        (lambda: Loop("l", ("x",), 0), "at least 1"),
        (lambda: Sampling(max_tokens=0), "at least 1"),
    ],
)
def test_an_invalid_app_is_reported(make, report):
    with pytest.raises(InputError, match=report):
        make()


@pytest.mark.parametrize(
    ("make", "near"),
    [
        (lambda: app(Call("x", "vicuna", "hi"), models=[Model("vicuna-13b")]), "Did you mean: vicuna-13b"),
        (lambda: app(Call("write", "a", "hi"), loops=[Loop("l", ("wrote",), 2)]), "Did you mean: write"),
        (
            lambda: app(
                Call("draft", "a", "{{ previous.drift }}"), Call("other", "a", "hi"), loops=[Loop("l", ("draft",), 2)]
            ),
            "Did you mean: draft",
        ),
        (lambda: app(Call("x", "a", "hi", api="chatt")), "Did you mean: chat"),
    ],
)
def test_unknown_names_are_reported_with_the_nearest(make, near):
    with pytest.raises(UnknownNameError, match=near):
        make()


def test_calls_are_made_after_those_that_they_name():
    assert ordered_units(critique()) == [("draft",), ("critique", "revise"), ("final",)]


def test_a_loop_ends_what_would_be_a_cycle():
    App(MODELS, [Call("x", "a", "{{ previous.y }}"), Call("y", "b", "{{ x }}")], [Loop("l", ("x", "y"), 2)])


def test_a_loop_takes_its_calls_as_a_list_too():
    app = App(MODELS, [Call("x", "a", "{{ previous.x }}")], [Loop("l", ["x"], 2)])
    assert app.loops[0].calls == ("x",)
    assert ordered_units(app) == [("x",)]


def test_a_model_may_be_named_by_the_row():
    assert App(MODELS, [Call("x", From("best"), "{{ q }}")]).calls[0].model.field == "best"
