"""How far a run is, from its ledger alone: models of several calls, tries, tokens, engines, dead ones."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import typer
from simulated_world import World, fresh, plan, tasks_of

from lengthwise.apps.ledger import Ending, Output, State, open_ledger
from lengthwise.apps.run import new_owner, status_of
from lengthwise.apps.run.job import ENGINES, OWNER
from lengthwise.apps.run.progress import SHAPE, encoded_engines, encoded_names
from lengthwise.cli import app_status


def two_calls(rows=4):
    """Model 0 answers calls 0 and 1, model 1 call 2; the second waits for the first."""
    tasks = tasks_of([0, 0, 1] * rows, parents=[(3 * i + 1, 3 * i) for i in range(rows)])
    return replace(tasks, call=np.array([0, 1, 2] * rows), calls=("draft", "judge", "other"))


def laid_out(ledger, world):
    ledger.open("app", world.layout.tasks)
    ledger.set_metadata({SHAPE: encoded_names(world.layout)})


def lease(ledger, model, most):
    return ledger.lease(model, most, owner="me", now_s=0.0, lease_s=60.0)


def test_a_model_is_the_sum_of_its_calls(tmp_path):
    world = World(two_calls(), [(plan(0), plan(1))])
    with fresh(tmp_path) as ledger:
        laid_out(ledger, world)
        one, two = lease(ledger, 0, 2)
        ledger.finalize([Ending(one.task, one.fence, State.DONE, "a", Output("x", "stop", 5, 7))])
        ledger.finalize([Ending(two.task, two.fence, State.DEAD, error="broken")])
        (third,) = lease(ledger, 1, 1)
        ledger.finalize([Ending(third.task, third.fence, State.READY, error="once more")])
        (third,) = lease(ledger, 1, 1)
        ledger.finalize([Ending(third.task, third.fence, State.DONE, "b", Output("y", "stop", 5, 11))])
        first, second = status_of(ledger)
    assert first.calls["draft"] == {"ready": 2, "done": 1, "dead": 1}
    assert first.calls["judge"] == {"waiting": 2, "ready": 1, "blocked": 1}
    assert first.tasks == {"ready": 3, "done": 1, "dead": 1, "waiting": 2, "blocked": 1}
    assert (first.total, first.completed, first.tokens, first.tries) == (8, 3, 7, 2)
    assert (second.total, second.completed, second.tokens, second.tries) == (4, 1, 11, 2)
    assert second.engines == ()


def test_engines_of_live_coordinators_are_reported(tmp_path):
    world, alive = World(two_calls(), [(plan(0), plan(1))]), new_owner()
    host, boot, _, _, name = new_owner().split("/")
    gone = f"{host}/{boot}/1/0/{name}"
    with fresh(tmp_path) as ledger:
        laid_out(ledger, world)
        for owner, engine in ((alive, "vllm at one"), (gone, "vllm at two")):
            ledger.set_metadata({OWNER + owner: "runs", ENGINES + owner: encoded_engines(("m0", "m1"), {1: {engine}})})
        assert [one.engines for one in status_of(ledger)] == [(), ("vllm at one",)]


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_lists_models(tmp_path, capsys, as_json):
    world = World(two_calls(), [(plan(0), plan(1))])
    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        assert world.run(ledger).exit_code == 0
    (tmp_path / "run.lock").touch()
    program = typer.Typer()
    program.command()(app_status.status)
    assert not program([str(tmp_path), *(["--json"] if as_json else [])], standalone_mode=False)
    printed = capsys.readouterr().out
    if not as_json:
        assert "12 of 12 tasks have finished: 12 done" in printed
        assert "m0: 8 of 8" in printed
        assert "8 attempts" in printed
        return
    reported = json.loads(printed)
    assert reported["tasks"] == {"done": 12}
    assert [(one["name"], one["total"], one["completed"], one["tries"]) for one in reported["models"]] == [
        ("m0", 8, 8, 8),
        ("m1", 4, 4, 4),
    ]
    outputs = world.draw.output_tokens
    assert reported["models"][1]["tokens"] == int(outputs[world.tasks.model == 1].sum())
