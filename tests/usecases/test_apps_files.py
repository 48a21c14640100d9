"""The example applications: their rows, their plans, their runs in virtual time; and reports of mistakes in them."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

from lengthwise.apps.expand import expand
from lengthwise.apps.ledger import State, open_ledger
from lengthwise.cli import main
from lengthwise.config.app_file import load_app, loads_app
from lengthwise.schema.errors import ScenarioError
from lengthwise.usecases.app_plan import PlanSettings
from lengthwise.usecases.app_run import run_app
from lengthwise.usecases.app_setup import load_app_request

FOLDER = Path(__file__).parents[2] / "examples" / "apps"
KINDS = ("ensemble", "routing", "chain-summary", "mixed", "critique")
TINY = tuple(f"{kind}-tiny" for kind in KINDS)
QUICK = PlanSettings(compare=False, draws=1, true_draws=2, what_ifs=False)


def example(name):
    return FOLDER / f"{name}.toml"


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_file_of_an_application_is_one_of_these():
    apps = {path.stem for path in FOLDER.glob("*.toml") if "[calls." in path.read_text()}
    assert apps == {*KINDS, *TINY}


def test_rows_are_what_their_script_writes():
    written = runpy.run_path(str(FOLDER / "make_rows.py"))["files"]()
    assert set(written) == {path.name for form in ("*.jsonl", "*.csv") for path in FOLDER.glob(form)}
    for name, text in written.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"run make_rows.py: {name} differs"


def test_more_rows_can_be_made(tmp_path):
    words = [sys.executable, str(FOLDER / "make_rows.py")]
    for kind, count in (("questions", 10_000), ("routed", 500), ("documents", 300), ("mixed", 40)):
        path = tmp_path / f"{kind}.{'csv' if kind == 'routed' else 'jsonl'}"
        subprocess.run([*words, kind, str(count), str(path)], check=True, timeout=60)
        assert len(path.read_text().splitlines()) == count + (kind == "routed")
    requested = [row["question"] for row in read(tmp_path / "questions.jsonl")]
    assert len(set(requested)) == 10_000
    sizes = [len(row["chunks"]) for row in read(tmp_path / "documents.jsonl")]
    assert (median(sizes), max(sizes)) == (3, 201)


@pytest.mark.parametrize("name", [*KINDS, *TINY])
def test_an_example_is_checked_completely_and_names_its_gpus(name):
    found = load_app(example(name))
    assert found.cluster is not None
    assert found.app.name
    assert {one.weights is not None for one in found.app.models} == {True}
    assert len(expand(found.app, found.rows.rows, found.rows.ids).tasks)


def test_the_large_examples_match_the_paper():
    ensemble = load_app(example("ensemble"))
    assert (len(ensemble.app.models), len(ensemble.rows)) == (9, 1000)
    routing = load_app(example("routing"))
    counts = Counter(row["model"] for row in routing.rows.rows)
    assert [counts[one.name] for one in routing.app.models] == [408, 1267, 2068, 456, 2657]
    sizes = [len(row["chunks"]) for row in load_app(example("chain-summary")).rows.rows]
    assert (len(sizes), median(sizes), max(sizes)) == (100, 3, 60)
    assert ensemble.cluster is not None
    assert [(one.gpus, one.gpu.name, one.node.link_group) for one in ensemble.cluster.machines] == [(8, "A100-80GB", 2)]


def test_lengths_of_the_data_sets_have_the_means_of_the_paper():
    for name, mean, low, high in (("ensemble", 180, 1, 490), ("routing", 199, 3, 1585)):
        for model in load_app(example(name)).app.models:
            assert model.lengths is not None
            tokens = model.lengths.quantile([(k + 0.5) / 1000 for k in range(1000)])
            assert tokens.mean() == pytest.approx(mean, rel=0.02)
            assert low <= tokens.min() <= tokens.max() <= high
    rows = load_app(example("routing")).rows.rows
    assert sum(row["tokens"] for row in rows) / len(rows) == pytest.approx(199, rel=0.02)


@pytest.mark.parametrize("name", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS), *TINY])
def test_an_example_is_planned_on_its_gpus_and_runs_completely_in_virtual_time(name, tmp_path):
    requested = load_app_request(example(name))
    planned = requested.planned(QUICK)
    plan, space = planned.plan, planned.space
    assert plan is not None
    assert space is not None
    assert plan.makespan.value > 0
    assert all(0 < stage.gpus <= space.cluster.gpus for stage in plan.stages)
    assert {one.model for stage in plan.planned for one in stage} == set(range(len(plan.models)))
    ran = run_app(planned, requested.file.rows, requested.engines("simulated"), tmp_path / "run")
    assert ran.completed.exit_code == 0
    tasks = len(planned.expanded.tasks)
    assert ran.completed.of(State.DONE) + ran.completed.of(State.SKIPPED) == tasks
    assert ran.exported.answers == ran.completed.of(State.DONE) > 0
    lines = read(tmp_path / "run" / "outputs.jsonl")
    assert len(lines) == ran.exported.answers
    order = {row: place for place, row in enumerate(map(str, requested.file.rows.ids))}
    assert [order[one["id"]] for one in lines] == sorted(order[one["id"]] for one in lines)


class CutError(Exception):
    """The run was cut here."""


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_run_that_was_cut_goes_on_and_ends_with_the_same_bytes(name, tmp_path):
    requested = load_app_request(example(name))
    planned = requested.planned(QUICK)
    engines = requested.engines("simulated")
    complete = run_app(planned, requested.file.rows, engines, tmp_path / "complete")
    folder = tmp_path / "cut"
    script = f"""
import os, sys
from pathlib import Path
from lengthwise.apps.ledger import FINISHED
from lengthwise.usecases.app_setup import load_app_request
from lengthwise.usecases.app_plan import PlanSettings
from lengthwise.usecases.app_run import RunMonitor, run_app
def cut(progress):
    if sum(one.states.get(state, 0) for one in progress.models for state in FINISHED) >= 4:
        os.kill(os.getpid(), 9)
asked = load_app_request(Path({str(example(name))!r}))
planned = asked.planned(PlanSettings(compare=False, draws=1, true_draws=2, what_ifs=False))
run_app(planned, asked.file.rows, asked.engines("simulated"), Path({str(folder)!r}), monitor=RunMonitor(cut, 0.05))
"""
    finished = subprocess.run([sys.executable, "-c", script], check=False, timeout=120)
    assert finished.returncode == -9
    with open_ledger(folder, read_only=True) as ledger:
        done = sum(n for (_, state), n in ledger.counts().items() if state == State.DONE)
    assert 0 < done < complete.completed.of(State.DONE)
    again = run_app(planned, requested.file.rows, engines, folder, resume=True)
    assert again.completed.exit_code == 0
    assert again.exported.files == complete.exported.files
    assert (folder / "outputs.jsonl").read_bytes() == (tmp_path / "complete" / "outputs.jsonl").read_bytes()


def test_a_batch_file_is_answered_as_one(tmp_path, capsys):
    lines = [
        {
            "custom_id": f"r{k}",
            "method": "POST",
            "url": "/v1/chat/completions" if k % 2 else "/v1/completions",
            "body": {"model": ("opt-125m", "opt-1.3b")[k % 3 == 0], "max_tokens": 9 + k}
            | ({"messages": [{"role": "user", "content": f"Hi {k}"}]} if k % 2 else {"prompt": f"Hi {k}"}),
        }
        for k in range(7)
    ]
    (tmp_path / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "app.toml").write_text('[inputs]\nopenai_batch = "batch.jsonl"\n[cluster]\nnodes = ["1xA100-80GB"]\n')
    out = tmp_path / "run"
    code = main(["app", "run", str(tmp_path / "app.toml"), "--launcher", "simulated", "--out", str(out), "-q"])
    assert code == 0, capsys.readouterr().err
    found = read(out / "batch-output.jsonl")
    assert [one["custom_id"] for one in found] == [f"r{k}" for k in range(7)]
    for one, line in zip(found, lines, strict=True):
        body = one["response"]["body"]
        assert body["model"] == line["body"]["model"]
        assert body["usage"]["completion_tokens"] == line["body"]["max_tokens"]
        assert body["object"] == ("chat.completion" if "messages" in line["body"] else "text_completion")
    assert (out / "batch-errors.jsonl").read_text() == ""
    metadata = json.loads((out / "manifest.json").read_text())
    assert "batch-output.jsonl" in json.dumps(metadata)


def test_the_first_rows_alone_are_another_run():
    requested = load_app_request(example("ensemble-tiny"), ["inputs.rows=4"])
    assert len(requested.file.rows) == 4
    assert requested.file.rows.sha256 != load_app(example("ensemble-tiny")).rows.sha256
    with pytest.raises(ScenarioError, match="a batch is always answered completely; take rows out"):
        loads_app('[inputs]\nopenai_batch = "b.jsonl"\nrows = 3\n')


def test_engines_that_start_slowly_are_planned_so():
    requested = [load_app_request(example("critique-tiny"), [f"cluster.engine_start={s}"]) for s in ("7s", "100")]
    plans = [one.planned(QUICK).plan for one in requested]
    fast, slow = (plan.stages[0].switches for plan in plans if plan is not None)
    assert {round(s.seconds - f.seconds, 6) for f, s in zip(fast, slow, strict=True)} == {93.0}
    with pytest.raises(ScenarioError, match=r"cluster\.engine_start: must be seconds"):
        load_app(example("critique-tiny"), ["cluster.engine_start=soon"])
