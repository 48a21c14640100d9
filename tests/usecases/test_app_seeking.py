"""A plan to begin with is there while another is looked for, and what is found is what is told of the run."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "apps"))
from app_world import chain
from plan_world import cluster_of

from lengthwise.apps.app import Sampling
from lengthwise.apps.inputs import Rows
from lengthwise.apps.plan import Served, Space
from lengthwise.schema.errors import DoesNotFitError
from lengthwise.usecases import app_plan
from lengthwise.usecases.app_plan import PlanSettings, planned_app
from lengthwise.usecases.app_run import run_app
from lengthwise.usecases.app_setup import Engines

QUICK = PlanSettings(compare=False, draws=1, true_draws=2, what_ifs=False)
ROWS = Rows([f"r{n}" for n in range(5)], [{"chunks": ["x"] * (1 + n % 3)} for n in range(5)], "", "ab")


def asked():
    app = chain()
    app = replace(
        app,
        models=[replace(model, model="opt-125m") for model in app.models],
        calls=[replace(call, sampling=Sampling(max_tokens=24)) for call in app.calls],
    )
    space = Space([Served(model.name, "opt-125m") for model in app.models], cluster_of(2))
    return app, ROWS, space, QUICK


def test_a_plan_to_begin_with_is_there_before_the_search_has_ended(monkeypatch):
    on, through = threading.Event(), app_plan.plan

    def held(*args, begin, **more):
        def told(one):
            begin(one)
            assert on.wait(60)

        return through(*args, begin=told, **more)

    monkeypatch.setattr(app_plan, "plan", held)
    made = planned_app(*asked(), early=True)
    assert made.plan.planned
    assert made.plan.notes
    on.set()
    found = made.final_plan()
    assert found.notes == made.plan.notes
    assert found.makespan.value <= made.plan.makespan.value * 1.05
    assert found.planned[:1] == made.plan.planned[:1] or found.methods[0].lead_s == found.search_s


def test_an_error_of_the_search_is_told_by_whom_it_stops(monkeypatch):
    def fails(*_, begin, **__):
        raise DoesNotFitError("no GPU has the memory")

    monkeypatch.setattr(app_plan, "plan", fails)
    with pytest.raises(DoesNotFitError, match="no GPU has the memory"):
        planned_app(*asked(), early=True)


def test_what_was_found_is_what_is_told_of_the_run(tmp_path):
    app, rows, space, how = asked()
    whole = planned_app(app, rows, space, how)
    # A plan at first sight is another one here: one model after another.
    first = replace(whole.plan, planned=tuple((plans[0],) for plans in whole.plan.planned))
    ran = run_app(replace(whole, plan=first, final_plan=lambda: whole.plan), rows, Engines("simulated"), tmp_path)
    assert ran.completed.exit_code == 0
    assert ran.plan == whole.plan
    assert [len(plans) for plans in ran.metadata["plan"]] == [len(plans) for plans in whole.plan.planned]
    assert ran.completed.seconds == pytest.approx(whole.plan.stages[-1].end_s, rel=0.2)
