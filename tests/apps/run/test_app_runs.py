"""Applications as users write them, on emulated engines and in virtual time: every answer is what it has to be."""

from __future__ import annotations

import asyncio
import codecs

import numpy as np
import pytest
from app_world import chain, critique, ensemble, split
from engines_world import QUICK, local, plan, play
from plan_world import cluster_of, served

from lengthwise.apps.expand import TemplateDecider, expand
from lengthwise.apps.launch import Lengths, SimulatedLauncher
from lengthwise.apps.ledger import Output, State, open_ledger
from lengthwise.apps.plan.draws import draw
from lengthwise.apps.plan.space import Space
from lengthwise.apps.run import (
    ClusterPlacer,
    Planned,
    RunPlan,
    RunTasks,
    expected_tokens,
    export,
    job_of,
    run_simulated,
)
from lengthwise.testing.engine_server.completions import END, ToyModel, chat_ids, token_bytes

TOPICS = [
    {"topic": f"the sea, part {n}", "question": f"why {n}?", "chunks": ["one", "two", "three"][: 1 + n % 3]}
    for n in range(6)
]
APPS = {
    "ensemble": ensemble(),
    "chain": chain(),
    "critique": critique(until="'a' in critique"),
    "branches": critique(until="'OK' in critique", share=0.1),
    "split": split(most=8),
}
SECONDS = {"start": 5.0, "wake": 1.0, "stop": 0.5, "sleep": 0.5}


def message(model, body):
    """What the emulated model must answer, computed without an engine."""
    ids = chat_ids(body)
    mind, tokens, text = ToyModel(model, ids, 64), [], codecs.getincrementaldecoder("utf-8")("replace")
    words = ""
    while len(tokens) < body["max_tokens"]:
        token = mind.next()
        mind.read((token,))
        tokens.append(token)
        words += text.decode(token_bytes(token))
        if token == END:
            return Output(words, "stop", len(ids), len(tokens))
    return Output(words, "length", len(ids), len(tokens))


def oracle(expanded):
    """Answers of all tasks, one after another."""
    decider, found = TemplateDecider(expanded), {}
    for task in range(len(expanded.tasks)):
        requested = decider.decide(task, found.get)
        name = expanded.tasks.models[int(expanded.tasks.model[task])]
        found[task] = None if requested is None else message(name, requested.request.body)
    return found


def short(app):
    """The same with short outputs."""
    from dataclasses import replace

    from lengthwise.apps.app import Sampling

    return replace(app, calls=[replace(call, sampling=Sampling(max_tokens=24)) for call in app.calls])


def prepared(name, rows=TOPICS):
    expanded = expand(short(APPS[name]), rows)
    draws = [draw(expanded.tasks, [None] * 3, [4096] * 3, seed) for seed in range(4)]
    work = RunTasks(expanded.tasks, TemplateDecider(expanded), expected_tokens(draws), source_hashes=name)
    placer = ClusterPlacer(cluster_of(2), lambda plan, how: SECONDS[how])
    stages = ((plan(0), plan(1)), (plan(1), plan(2)), (plan(2), plan(0)))
    run_plan = RunPlan(stages, reserve=(plan(0), plan(1), plan(2)))
    return expanded, draws[0], job_of(work, Planned(run_plan, placer), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(APPS))
def test_every_answer_equals_that_of_sequential_requests(tmp_path, name):
    expanded, _, job = prepared(name)
    complete = oracle(expanded)
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(play(job, ledger, local(tmp_path, ("a", "b", "c"))))
        assert finished.exit_code == 0
        places = job.layout.place_of.tolist()
        found = ledger.outputs(places)
        assert {task: found[places[task]] for task in complete} == complete
        assert finished.of(State.SKIPPED) == sum(output is None for output in complete.values())
        reported = export(ledger, job.layout, tmp_path / "out", ids=lambda row: str(expanded.ids[row]))
        assert reported.answers == sum(output is not None for output in complete.values())


@pytest.mark.parametrize("name", sorted(APPS))
def test_in_virtual_time_the_same_application_comes_to_an_end(tmp_path, name):
    expanded, drawn, job = prepared(name)
    space = Space(served(3, "opt-1.3b"), cluster_of(2))
    launcher = SimulatedLauncher(
        ("a", "b", "c"), space.deployment, Lengths.of(expanded.tasks, drawn), lambda plan, how: SECONDS[how]
    )
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = run_simulated(job, ledger, launcher)
        assert finished.how == "done"
        assert sum(finished.counts.values()) == len(expanded.tasks)
        assert {state for _, _, state in finished.counts} <= {State.DONE, State.SKIPPED, State.DEAD, State.BLOCKED}
        assert finished.seconds > SECONDS["start"]


def test_expected_lengths_are_means_over_draws_and_nothing_where_a_task_is_not():
    expanded = expand(APPS["critique"], TOPICS)
    draws = [draw(expanded.tasks, [None] * 3, [4096] * 3, seed) for seed in range(8)]
    means = expected_tokens(draws)
    by_hand = [np.mean([d.output_tokens[n] if d.present[n] else 0 for d in draws]) for n in range(len(expanded.tasks))]
    assert means.tolist() == pytest.approx(by_hand)
