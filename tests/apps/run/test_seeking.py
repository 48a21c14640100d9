"""Engines of an initial plan start while the search for another plan goes on."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from engines_world import answers, chained, engines, job_of, local, plan, undisturbed, until

from lengthwise.apps.ledger import State, open_ledger
from lengthwise.apps.run import Coordinator, RunPlan
from lengthwise.schema.errors import DoesNotFitError

pytestmark = pytest.mark.slow

FIRST = ((plan(0),), (plan(1),), (plan(0),))
BEGINS_ALIKE = ((plan(0),), (plan(0), plan(1)))
BEGINS_OTHERWISE = ((plan(0), plan(1)),)


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """The answers of the chained application in an undisturbed run."""
    return undisturbed(tmp_path_factory.mktemp("complete"), chained())


class Sought:
    """A plan that is there when it is let go, or an error."""

    def __init__(self, found):
        self.found, self.present, self.requested = found, threading.Event(), threading.Event()

    def __call__(self):
        self.requested.set()
        assert self.present.wait(60)
        if isinstance(self.found, Exception):
            raise self.found
        return RunPlan(self.found)


def ran(tmp_path, sought, during):
    """How the run ended, and its answers; ``during(coordinator, launcher)`` runs beside it."""
    job = replace(job_of(chained(), FIRST), pending_plan=sought)
    launcher = local(tmp_path, ("m0", "m1"), more="--fixed-s 0.02")

    async def whole_run(ledger):
        import time

        one = Coordinator(job, ledger, launcher, now_s=time.time)
        companion = asyncio.create_task(during(one, launcher))
        finished = await one.run()
        await companion
        return finished

    with open_ledger(tmp_path / "ledger.sqlite") as ledger:
        finished = asyncio.run(whole_run(ledger))
        return finished, answers(ledger, job.layout)


def let_go_once_an_engine_is_there(sought):
    async def during(_, launcher):
        await until(lambda: engines(launcher))
        assert sought.requested.is_set()
        sought.present.set()

    return during


def events(completed, *names):
    return [(one.what, one.model) for one in completed.events if one.what in names]


def test_engines_of_a_plan_that_begins_alike_stay(tmp_path, complete):
    sought = Sought(BEGINS_ALIKE)
    finished, reported = ran(tmp_path, sought, let_go_once_an_engine_is_there(sought))
    assert finished.exit_code == 0
    assert reported == complete
    # By the plan at first sight the first model's engine would have gone, and come again.
    assert events(finished, "start", "replan", "keep") == [("start", 0), ("start", 1)]


def test_a_plan_with_a_different_start_is_followed_once_it_is_found(tmp_path, complete):
    sought = Sought(BEGINS_OTHERWISE)
    finished, reported = ran(tmp_path, sought, let_go_once_an_engine_is_there(sought))
    assert finished.exit_code == 0
    assert reported == complete
    assert events(finished, "start", "replan") == [("start", 0), ("replan", -1), ("start", 1)]


def test_where_no_other_plan_is_found_the_run_goes_on_by_the_one_it_has(tmp_path, complete):
    sought = Sought(DoesNotFitError("the model needs 2 GPUs; there is 1"))
    finished, reported = ran(tmp_path, sought, let_go_once_an_engine_is_there(sought))
    assert finished.exit_code == 0
    assert reported == complete
    assert any("needs 2 GPUs" in one.description for one in finished.events if one.what == "keep")


def test_a_run_that_is_stopped_does_not_wait_for_a_plan(tmp_path):
    sought = Sought(BEGINS_ALIKE)

    async def during(one, launcher):
        await until(lambda: engines(launcher))
        one.stop()

    finished, reported = ran(tmp_path, sought, during)
    assert not sought.present.is_set()
    sought.present.set()
    assert finished.how == "stopped"
    assert all(state != State.LEASED for state, _ in reported)
