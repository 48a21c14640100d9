"""What the guide to serving under a bound quotes is what its commands print now."""

from __future__ import annotations

import pytest
from documents import ROOT, blocks

from lengthwise import scenario
from lengthwise.report.schedule import sentences
from lengthwise.scenario.schedules import question_of
from lengthwise.schema.errors import ScheduleError
from lengthwise.schema.schedule import SchedulePlan

GUIDE = ROOT / "docs" / "guide-serve-under-a-bound.md"
EXAMPLE = ROOT / "examples" / "schedule-70b-5s.toml"


@pytest.fixture(scope="module")
def quoted():
    """The blocks of output, each in one line."""
    return [" ".join(block.text.split()) for block in blocks(GUIDE) if block.language == "text"]


def test_the_choice_is_the_one_that_is_quoted(quoted):
    """Without its frontier and drifts, which take longer than all the rest."""
    asked = question_of(scenario.load(EXAMPLE))
    setting = asked.planner.estimator.setting
    choice = asked.planner.best(asked.section.latency_bound, apart=True)
    plan = SchedulePlan(
        name="",
        facts={},
        bound_s=choice.bound_s,
        level=setting.assumptions.level,
        quantile_tokens=setting.bound_tokens,
        worst_case=asked.section.worst_case,
        chosen=choice.row,
        sides=choice.sides,
        gap=choice.gap,
        evaluated=choice.evaluated,
        points=choice.points,
        seconds=choice.seconds,
    )
    assert sentences(plan)[0] == quoted[0]


def test_the_bound_that_cannot_be_met_is_refused_as_quoted(quoted):
    cluster = ["deployment.gpu=H100-80GB", "deployment.node=dgx-h100"]
    with pytest.raises(ScheduleError) as told:
        scenario.plan_schedule(scenario.load(EXAMPLE, cluster))
    assert f"error: {told.value}" == quoted[1]
