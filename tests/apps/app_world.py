"""Small applications for the tests of what is written, unrolled, drawn and decided."""

from __future__ import annotations

from lengthwise.apps.app import App, Call, Loop, Model, each, over, times
from lengthwise.apps.expand import TemplateDecider, expand
from lengthwise.apps.ledger.contracts import Output

MODELS = (Model("a", "vicuna-13b"), Model("b", "llama-2-70b"), Model("c", "mistral-7b"))


def ensemble():
    return App(MODELS, [Call("answer", ("a", "b", "c"), "{{ question }}"), Call("judge", "b", "Best of {{ answer }}?")])


def chain():
    step = "{% if previous %}So far: {{ previous }}. {% endif %}Next: {{ item }}"
    return App(
        MODELS,
        [
            Call("summarise", "a", step, fan=over("chunks")),
            Call("evaluate", "b", "Rate {{ summarise }} ({{ index }})", fan=times(2)),
        ],
    )


def critique(until="'OK' in critique", share=0.5):
    return App(
        MODELS,
        [
            Call("draft", "a", "Write of {{ topic }}"),
            Call("critique", "b", "Criticise {{ previous.revise or draft }}"),
            Call("revise", "a", "Mend {{ previous.revise or draft }} by {{ critique }}", when="'OK' not in critique"),
            Call("final", "c", "Sign {{ revise or draft }}"),
        ],
        [Loop("refine", ("critique", "revise"), 3, until, share)],
    )


def split(most=4):
    """A list that hangs on an output."""
    return App(
        MODELS,
        [
            Call("plan", "a", "Plan {{ topic }}"),
            Call("step", "b", "Do {{ item }}", fan=each("plan.splitlines()", max_items=most, expected=2)),
            Call("join", "c", "Join {{ step | join('+') }}"),
        ],
    )


def played(app, rows, reply):
    """(call, row, round, index) -> the last message that was asked, or None; ``reply(call, row, round, message)``."""
    expanded = expand(app, rows)
    tasks, decider, outputs, reported = expanded.tasks, TemplateDecider(expanded), {}, {}
    for task in range(len(tasks)):
        requested = decider.decide(task, lambda i, outputs=outputs: outputs[i])
        where = (tasks.calls[tasks.call[task]], *(int(getattr(tasks, n)[task]) for n in ("row", "round", "index")))
        reported[where] = None if requested is None else requested.request.body["messages"][-1]["content"]
        text = None if requested is None else reply(where[0], where[1], where[2], reported[where])
        outputs[task] = None if text is None else Output(text, "stop", 1, 1)
    return reported
