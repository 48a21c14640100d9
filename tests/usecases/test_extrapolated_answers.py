"""Capacities and schedules say where they go beyond the measurements behind their cost tables."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lengthwise import config, schedule
from lengthwise.cli import main
from lengthwise.cost import MadeFor, save
from lengthwise.schema.cost_tables import CostEvidence, Reach
from lengthwise.usecases import capacity
from lengthwise.usecases import schedule as schedules
from lengthwise.usecases.schedule import largest_step, reach_notes
from lengthwise.usecases.variants import deployment

SERVED = """
[workload]
isl = { kind = "uniform", low = 100, high = 900 }
osl = { kind = "uniform", low = 20, high = 300 }
request_rate = 1
[deployment]
model = "llama-3-8b"
gpu = "H100"
[search]
seeds = 2
precision = 0.1
[search.limits]
"ttft.p50" = "1s"
"""
EXTRAPOLATED = "than the measurements behind the cost tables reached ({}): their times are extrapolated."


@pytest.fixture
def tables(tmp_path):
    """A function that keeps tables of this reach, and returns their file."""

    def made(**bounds: int):
        path = tmp_path / "tables.npz"
        served = deployment(config.loads(SERVED))
        save(replace(served.cost, evidence=CostEvidence(reach=Reach(**bounds))), path, MadeFor.of_deployment(served))
        return path

    return made


def test_a_capacity_beyond_the_measurements_is_noted(tables, tmp_path, capsys):
    requested, out = tmp_path / "asked.toml", tmp_path / "out.json"
    requested.write_text(SERVED, "utf-8")
    assert main(["capacity", str(requested), "--cost", f"tables:{tables(seqs=4)}", "--json", str(out)]) == 0
    reported = json.loads(out.read_text("utf-8"))["capacities"][0]
    (beyond,) = reported["beyond_reach"]
    assert (beyond["bound"], beyond["measured"], beyond["unit"]) == ("seqs", 4, "steps")
    assert beyond["largest"] > 4
    (note,) = reported["notes"]
    assert note.startswith("At capacity ")
    assert EXTRAPOLATED.format(4) in note
    assert note in " ".join(capsys.readouterr().out.split())


def test_a_capacity_within_the_measurements_has_no_note(tables):
    reach = Reach(tokens=10**6, seqs=10**6, chunk=10**6, context=10**6, kv_tokens=10**9)
    path = tables(**{name: getattr(reach, name) for name in vars(reach)})
    (found,) = capacity.capacities(config.loads(SERVED, overrides=[f"deployment.cost=tables:{path}"]))
    assert (found.extrapolations, found.notes) == ((), ())


PLANNED = """
[workload]
prompt = { kind = "empirical", tokens = [200, 400, 900] }
output = { kind = "empirical", tokens = [2, 5, 9, 7] }
request_rate = 1
[deployment]
model = "opt-13b"
gpu = "A40"
node = "pcie4-4"
tp = 2
[schedule]
latency_bound = "3s"
strategies = ["rra"]
[run]
model_draws = 0
"""


@pytest.mark.slow
def test_a_schedule_beyond_the_measurements_is_noted(monkeypatch):
    complete = schedule.cluster_tables

    def of_reach(*args):
        made = complete(*args)
        return {tp: replace(one, evidence=CostEvidence(reach=Reach(seqs=1, context=10**6))) for tp, one in made.items()}

    plain = schedules.plan_schedule(config.loads(PLANNED))
    monkeypatch.setattr(schedule, "cluster_tables", of_reach)
    reported = schedules.plan_schedule(config.loads(PLANNED))
    assert reported.chosen == plain.chosen
    assert not any("extrapolated" in note for note in plain.uncertainty.notes)
    (note,) = (note for note in reported.uncertainty.notes if "extrapolated" in note)
    assert note.startswith("The schedule's steps have more sequences (about ")
    assert note.endswith(EXTRAPOLATED.format(1))


def test_the_largest_step_of_a_schedule_follows_from_its_batches():
    row = schedules.plan_schedule(config.loads(PLANNED)).chosen
    row = replace(row, strategy="rra", prefill_batch=12, micro_batches=3, decode_batch=60.0)
    task = schedule.TaskLengths.fixed(100, 21)
    had = largest_step(row, task, 0.99)
    assert had == {"tokens": 400, "seqs": 20, "chunk": 100, "context": 121, "kv_tokens": 2210}
    assert largest_step(replace(row, strategy="waa-c"), task, 0.99)["tokens"] == 1200  # its prefills go whole
    base = deployment(config.loads(SERVED)).cost
    alone, grouped = (replace(base, evidence=CostEvidence(reach=Reach(seqs=seqs))) for seqs in (19, 20))
    passed = {1: alone, 2: grouped}
    assert len(reach_notes(replace(row, tp=2, tp_groups=1), task, 0.99, passed, gpus=4)) == 1
    assert reach_notes(replace(row, tp=2, tp_groups=2), task, 0.99, passed, gpus=4) == []
