"""Outputs as files: in the order of the inputs, whatever order they came in; the dead apart, with their errors."""

from __future__ import annotations

import hashlib
import json
import resource

import numpy as np
import polars as pl
import pytest
from plan_world import tasks_of
from simulated_world import World, fresh, plan

from lengthwise.apps.ledger import State
from lengthwise.apps.run import DrawDecider
from lengthwise.apps.run.results import export, manifest, write_manifest
from lengthwise.schema.app import TaskDraw
from lengthwise.schema.errors import InputError, OutputError, UnknownNameError


def world_of(rows=7):
    """Three tasks a row, the second model's short; every fifth row has no third one."""
    parents = [(3 * i + j, 3 * i + j - 1) for i in range(rows) for j in (1, 2)]
    tasks = tasks_of([0, 1, 0] * rows, parents=parents)
    object.__setattr__(tasks, "row", np.repeat(np.arange(rows)[::-1], 3))
    world = World(tasks, [(plan(0), plan(1))])
    present = np.ones(len(tasks), bool)
    present[2::15] = False
    world.draw = TaskDraw(present, world.draw.prompt_tokens, world.draw.output_tokens)
    return world


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_outputs_stand_in_the_order_of_the_inputs(tmp_path):
    world = world_of()
    with fresh(tmp_path) as ledger:
        finished = world.run(ledger)
        reported = export(ledger, world.layout, tmp_path / "out", ids=lambda row: f"r{row}", forms=("jsonl", "parquet"))
    rows = lines(tmp_path / "out" / "outputs.jsonl")
    assert len(rows) == reported.answers == finished.of(State.DONE) == 19
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    by_row = {row["id"]: [one["call"] for one in rows if one["id"] == row["id"]] for row in rows}
    assert set(map(tuple, by_row.values())) == {("c0", "c1", "c0"), ("c0", "c1")}
    assert pl.read_parquet(tmp_path / "out" / "outputs.parquet").to_dicts() == rows
    complete = hashlib.sha256((tmp_path / "out" / "outputs.jsonl").read_bytes()).hexdigest()
    assert reported.files["outputs.jsonl"] == complete
    assert reported.dead == 0


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_file_that_may_not_grow_is_named_and_the_one_before_stays(tmp_path, form):
    """What a full disk does, at a size that stops this file and none before it."""
    world, name = world_of(rows=2), f"outputs.{form}"
    with fresh(tmp_path) as ledger:
        world.run(ledger)
        reported = export(ledger, world.layout, tmp_path, forms=("jsonl", "parquet"))
        before = (tmp_path / name).read_bytes()
        most = {"jsonl": 100, "parquet": (tmp_path / "outputs.jsonl").stat().st_size}[form]
        assert len(before) > most
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            with pytest.raises(OutputError, match=f"cannot write .*{name}: .*too large"):
                export(ledger, world.layout, tmp_path, forms=("jsonl", "parquet"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (tmp_path / name).read_bytes() == before
        assert export(ledger, world.layout, tmp_path, forms=("jsonl", "parquet")) == reported


def test_some_calls_alone(tmp_path):
    world = world_of()
    with fresh(tmp_path) as ledger:
        world.run(ledger)
        reported = export(ledger, world.layout, tmp_path / "out", calls=["c1"])
        assert reported.answers == 7
        assert {row["call"] for row in lines(tmp_path / "out" / "outputs.jsonl")} == {"c1"}
        with pytest.raises(UnknownNameError, match="Did you mean: c1"):
            export(ledger, world.layout, tmp_path / "out", calls=["c11"])
        with pytest.raises(InputError, match="must have a form"):
            export(ledger, world.layout, tmp_path / "out", forms=())


def test_dead_tasks_and_their_dependents_are_reported_separately(tmp_path):
    world = world_of()
    world.draw = TaskDraw(np.ones(21, bool), world.draw.prompt_tokens, world.draw.output_tokens)

    class Picky(DrawDecider):
        """The second task of the row that stands first has no request."""

        def decide(self, task, outputs):
            if task == 19:
                raise InputError("no title")
            return super().decide(task, outputs)

    with fresh(tmp_path) as ledger:
        finished = world.run(ledger, decider=Picky(world.tasks, world.draw))
        reported = export(ledger, world.layout, tmp_path / "out")
        assert (reported.answers, reported.dead, finished.exit_code) == (19, 2, 1)
        dead = [(row["id"], row["call"], row["state"], row["error"]) for row in lines(tmp_path / "out" / "dead.jsonl")]
        assert dead == [("0", "c1", "dead", "no title"), ("0", "c0", "blocked", None)]
        job = world.job()
        metadata = manifest(job, finished, reported, app="a", inputs="i", models={"m0": "r0", "m1": "r1"})
        write_manifest(tmp_path / "out", metadata)
    read = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert read["counts"]["all"] == {"done": 19, "dead": 1, "blocked": 1}
    assert sum(sum(states.values()) for call, states in read["counts"].items() if call != "all") == 21
    assert read["sha256"]["outputs.jsonl"] == reported.files["outputs.jsonl"]
    assert read["plan"][0][0]["model"] == "m0"
