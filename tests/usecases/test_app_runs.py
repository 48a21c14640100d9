"""Applications from rows to a plan, and from a plan to answers, in virtual time and on emulated engines."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "apps"))
from app_world import chain, critique
from plan_world import cluster_of

from lengthwise.apps.app import App, Call, Model, Sampling, each
from lengthwise.apps.inputs import Rows
from lengthwise.apps.launch import EngineConfig, EngineTimeouts
from lengthwise.apps.plan import Served, Space
from lengthwise.apps.run import Settings
from lengthwise.schema.errors import EngineError, InputError, UnknownNameError
from lengthwise.testing.engine_server import EngineServer, EngineSpec, Limits, in_thread
from lengthwise.usecases.app_plan import PlanSettings, planned_app, sampled_app
from lengthwise.usecases.app_run import run_app
from lengthwise.usecases.app_setup import Engines

QUICK = PlanSettings(draws=1, true_draws=2, what_ifs=False)
ROWS = Rows(
    [f"r{n}" for n in range(5)], [{"chunks": ["x"] * (1 + n % 3), "topic": f"t{n}"} for n in range(5)], "", "ab"
)


def small(app, tokens=24):
    """On models that are quick to deploy, with short outputs."""
    return replace(
        app,
        models=[replace(model, model="opt-125m") for model in app.models],
        calls=[replace(call, sampling=Sampling(max_tokens=tokens)) for call in app.calls],
    )


def space(app):
    return Space([Served(model.name, "opt-125m") for model in app.models], cluster_of(2))


def test_a_plan_reports_stages_makespan_and_assumptions():
    planned = planned_app(small(chain()), ROWS, space(chain()), replace(QUICK, what_ifs=True))
    assert planned.plan.makespan.value > 0
    assert planned.plan.stages[-1].end_s > 0
    assert {one.name for one in planned.plan.methods} >= {"lengthwise", "samullm", "max", "min"}
    assert {one.name for one in planned.plan.what_ifs} >= {"disk_twice_as_fast"}
    assert any("their outputs count as long as max_tokens allows" in note for note in planned.plan.notes)
    assert any("assumed, not measured" in note for note in planned.plan.notes)


def test_requests_that_no_engine_accepts_are_reported_before_any_starts():
    def notes(tokens):
        app = small(App([Model("a"), Model("b")], [Call("x", "a", "{{ topic }}"), Call("y", "b", "{{ x }}")]))
        calls = [replace(app.calls[0], sampling=Sampling(max_tokens=tokens)), app.calls[1]]
        made = planned_app(replace(app, calls=calls), ROWS, space(app), QUICK)
        return [note for note in made.plan.notes if "engines refuse" in note]

    assert notes(2000) == []
    (reported,) = notes(2048)  # opt-125m's whole context, and there is a prompt
    assert reported.startswith("5 requests of x need up to 2,0")
    assert "a has a context of 2,048" in reported


def test_rows_without_any_request_are_reported():
    app = App([Model("a", "opt-125m")], [Call("x", "a", "{{ item }}", fan=each("l"))])
    with pytest.raises(InputError, match="has no requests on these rows"):
        planned_app(app, Rows(["0"], [{"l": []}]), space(app), QUICK)


def test_in_virtual_time_a_run_takes_about_as_long_as_planned(tmp_path):
    planned = planned_app(small(chain()), ROWS, space(chain()), QUICK)
    ran = run_app(planned, ROWS, Engines("simulated"), tmp_path / "run")
    assert ran.completed.exit_code == 0
    assert ran.completed.seconds == pytest.approx(planned.plan.stages[-1].end_s, rel=0.2)
    metadata = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert metadata["how"] == "done"
    assert metadata["sha256"]["inputs"] == "ab"
    lines = [json.loads(line) for line in (tmp_path / "run" / "outputs.jsonl").read_text().splitlines()]
    assert [one["id"] for one in lines] == sorted(one["id"] for one in lines)
    assert len(lines) == ran.exported.answers == len(planned.expanded.tasks)
    assert (tmp_path / "run" / "outputs.parquet").exists()


def test_a_folder_with_a_run_is_resumed_only_when_requested(tmp_path):
    planned = planned_app(small(critique()), ROWS, space(critique()), QUICK)
    first = run_app(planned, ROWS, Engines("simulated"), tmp_path)
    with pytest.raises(InputError, match="--resume"):
        run_app(planned, ROWS, Engines("simulated"), tmp_path)
    again = run_app(planned, ROWS, Engines("simulated"), tmp_path, resume=True)
    assert again.exported.files == first.exported.files


def test_missing_engines_and_plans_are_reported():
    planned = planned_app(small(chain()), ROWS, space(chain()), QUICK)
    with pytest.raises(UnknownNameError, match="Did you mean: local"):
        Engines("locl")
    loaded = [EngineConfig(name) for name in "abc"]
    with pytest.raises(InputError, match="there is none for b, c"):
        run_app(planned, ROWS, Engines("static", loaded, {0: ["http://127.0.0.1:1"]}), Path("none"))
    with pytest.raises(InputError, match="needs a plan"):
        run_app(sampled_app(small(chain()), ROWS, QUICK), ROWS, Engines("local", loaded), Path("none"))


@pytest.mark.slow
def test_on_processes_of_this_machine_all_is_answered(tmp_path):
    command = f"{sys.executable} -m lengthwise.testing.engine_server --host {{host}} --port {{port}} --model {{name}}"
    planned = planned_app(small(chain()), ROWS, space(chain()), QUICK)
    loaded = [EngineConfig(name, served=name, max_num_seqs=4, command=command) for name in "abc"]
    engines = Engines("local", loaded, timeouts=EngineTimeouts(ready_s=60.0, grace_s=3.0))
    ran = run_app(planned, ROWS, engines, tmp_path, settings=Settings(linger_s=0.02))
    assert ran.completed.exit_code == 0
    assert ran.exported.answers == len(planned.expanded.tasks)
    assert ran.metadata["engines"]


@pytest.mark.slow
def test_where_engines_fail_what_was_answered_is_written_and_the_rest_is_gone_on_with(tmp_path):
    command = f"{sys.executable} -m lengthwise.testing.engine_server --host {{host}} --port {{port}} --model {{name}}"
    broken = f"{sys.executable} -c 'raise SystemExit(\"no such weights\")' {{host}} {{port}}"
    planned = planned_app(small(chain()), ROWS, space(chain()), QUICK)

    def engines(**commands):
        loaded = [
            EngineConfig(name, served=name, max_num_seqs=4, command=commands.get(name, command)) for name in "abc"
        ]
        return Engines("local", loaded, timeouts=EngineTimeouts(ready_s=60.0, grace_s=3.0))

    with pytest.raises(EngineError, match="no such weights") as reported:
        run_app(planned, ROWS, engines(b=broken), tmp_path, settings=Settings(linger_s=0.02))
    assert str(reported.value).endswith(f"Answers recorded before are in {tmp_path}")
    metadata = json.loads((tmp_path / "manifest.json").read_text())
    assert metadata["how"] == "failed"
    assert "no such weights" in metadata["error"]
    lines = (tmp_path / "outputs.jsonl").read_text().splitlines()
    assert len(lines) == metadata["answers"] < len(planned.expanded.tasks)
    ran = run_app(planned, ROWS, engines(), tmp_path, settings=Settings(linger_s=0.02), resume=True)
    assert ran.completed.exit_code == 0
    assert ran.metadata["error"] is None
    assert ran.exported.answers == len(planned.expanded.tasks)
    assert set(lines) <= set((tmp_path / "outputs.jsonl").read_text().splitlines())


@pytest.mark.parametrize("change", [{"body": {"chat_template_kwargs": {"thinking": False}}}, {"served": "other"}])
def test_what_engines_put_into_every_request_is_part_of_its_answer(tmp_path, change):
    """Answers to another request are requested again, which is reported; those to the same are kept."""
    spec = EngineSpec("opt-125m", limits=Limits(8, 2048))
    app = small(App([Model("a")], [Call("x", "a", "{{ topic }}")]), tokens=4)
    with in_thread(EngineServer(spec), EngineServer(replace(spec, model="other"))) as up:
        first, second = (one.url for one in up.servers)

        def ran(url, resume=True, **fields):
            loaded = [replace(EngineConfig("a", max_num_seqs=4), **fields)]
            engines = Engines("static", loaded, {0: [url]})
            planned = sampled_app(app, ROWS, QUICK)
            return run_app(planned, ROWS, engines, tmp_path, settings=Settings(linger_s=0.02), resume=resume)

        assert ran(first, resume=False).completed.exit_code == 0
        assert ran(first).completed.reused is None
        changed = ran(second if "served" in change else first, **change)
        assert changed.completed.reused is not None
        assert changed.completed.reused.words() == "x: 0 of 5 answers kept"
        back = ran(first)
        assert back.completed.exit_code == 0
