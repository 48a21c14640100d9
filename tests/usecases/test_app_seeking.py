"""An initial plan exists while the search for another goes on, and the run reports the plan that was found."""

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


def requested():
    app = chain()
    app = replace(
        app,
        models=[replace(model, model="opt-125m") for model in app.models],
        calls=[replace(call, sampling=Sampling(max_tokens=24)) for call in app.calls],
    )
    space = Space([Served(model.name, "opt-125m") for model in app.models], cluster_of(2))
    return app, ROWS, space, QUICK


def test_an_initial_plan_is_available_before_the_search_has_finished(monkeypatch):
    on, through = threading.Event(), app_plan.plan

    def blocked(*args, begin, **more):
        def reported(one):
            begin(one)
            assert on.wait(60)

        return through(*args, begin=reported, **more)

    monkeypatch.setattr(app_plan, "plan", blocked)
    made = planned_app(*requested(), early=True)
    assert made.plan.planned
    assert made.plan.notes
    on.set()
    found = made.final_plan()
    assert found.notes == made.plan.notes
    assert found.makespan.value <= made.plan.makespan.value * 1.05
    assert found.planned[:1] == made.plan.planned[:1] or found.methods[0].lead_s == found.search_s


def test_an_error_of_the_search_reaches_its_caller(monkeypatch):
    def fails(*_, begin, **__):
        raise DoesNotFitError("no GPU has the memory")

    monkeypatch.setattr(app_plan, "plan", fails)
    with pytest.raises(DoesNotFitError, match="no GPU has the memory"):
        planned_app(*requested(), early=True)


def test_the_final_plan_is_the_one_reported_for_the_run(tmp_path):
    app, rows, space, how = requested()
    complete = planned_app(app, rows, space, how)
    # A plan at first sight is another one here: one model after another.
    first = replace(complete.plan, planned=tuple((plans[0],) for plans in complete.plan.planned))
    ran = run_app(replace(complete, plan=first, final_plan=lambda: complete.plan), rows, Engines("simulated"), tmp_path)
    assert ran.completed.exit_code == 0
    assert ran.plan == complete.plan
    assert [len(plans) for plans in ran.metadata["plan"]] == [len(plans) for plans in complete.plan.planned]
    assert ran.completed.seconds == pytest.approx(complete.plan.stages[-1].end_s, rel=0.2)
