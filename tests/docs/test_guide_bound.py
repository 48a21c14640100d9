"""The tables and outputs quoted in the guide to latency bounds are what its commands print."""

from __future__ import annotations

import math
import os
import re

import pytest
from documents import ROOT, blocks

from lengthwise import config
from lengthwise.report.schedule_text import sentences
from lengthwise.schedule import curve
from lengthwise.schema.errors import ScheduleError
from lengthwise.schema.schedule import LatencyBound, SchedulePlan
from lengthwise.usecases import schedule
from lengthwise.usecases.schedule import question_of

GUIDE = ROOT / "docs" / "guide-serve-under-a-bound.md"
EXAMPLE = ROOT / "examples" / "schedule-70b-5s.toml"


@pytest.fixture(scope="module")
def requested():
    return question_of(config.load(EXAMPLE))


def rows_under(heading: str) -> dict[str, list[str]]:
    """By its first cell the others of each row of the table under a heading."""
    section = GUIDE.read_text("utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in lines[1:]}


def seconds_of(cell: str) -> float:
    return math.inf if cell == "none" else float(cell.removesuffix(" s"))


def assert_quoted(cell: str, value: float) -> None:
    """A number is as it is quoted, to the last digit that is."""
    (quoted, *_) = re.findall(r"[\d.]+", cell)
    digits = len(quoted.partition(".")[2])
    assert f"{value:.{digits}f}" == quoted, f"{cell!r} is {value}"


@pytest.fixture(scope="module")
def quoted():
    """The blocks of output, each in one line."""
    return [" ".join(block.text.split()) for block in blocks(GUIDE) if block.language == "text"]


def test_the_choice_is_the_one_that_is_quoted(quoted, requested):
    """Without its frontier and drifts, which take longer than all the rest."""
    setting = requested.planner.estimator.setting
    choice = requested.planner.best(requested.section.latency_bound, separately=True)
    plan = SchedulePlan(
        name="",
        metadata={},
        bound=LatencyBound(
            choice.bound_s, setting.bound_tokens, setting.assumptions.level, requested.section.worst_case
        ),
        chosen=choice.row,
        search=choice.search,
    )
    assert sentences(plan)[0] == quoted[0]


@pytest.mark.slow
def test_the_bound_that_cannot_be_met_is_refused_as_quoted(quoted):
    cluster = ["deployment.gpu=H100-80GB", "deployment.node=dgx-h100"]
    with pytest.raises(ScheduleError) as reported:
        schedule.plan_schedule(config.load(EXAMPLE, cluster))
    assert f"error: {reported.value}" == quoted[1]


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="choices under five bounds take minutes without the compiler"
)
def test_what_other_bounds_cost_is_as_in_the_table(requested):
    rows = rows_under("Other bounds")
    assert len(rows) == 5
    for bound, (words, rps) in rows.items():
        if words.startswith("none"):
            with pytest.raises(ScheduleError, match=re.escape(re.findall(r"[\d.]+ s", words)[0])):
                requested.planner.best(seconds_of(bound))
            assert rps == "0"
            continue
        row = requested.planner.best(seconds_of(bound)).row
        assert_quoted(rps, row.throughput_rps)
        assert row.strategy.upper().startswith(words[:3])
        controls = f"B_E = {row.prefill_batch}, N_D = {row.decode_steps}"
        assert ("B_E" in words) == (row.strategy == "rra")
        assert "B_E" not in words or controls in words
        assert "TP" not in words or f"TP {row.tp}" in words
        assert "four GPUs prefill" not in words or (row.prefill_gpus, row.tp_groups * row.tp) == (4, 8)


@pytest.mark.slow
def test_vllm_results_match_the_table(requested):
    planner = requested.planner
    played = curve(planner.estimator, "vllm-v1")
    rows = rows_under("Comparison with static batching and vLLM")
    assert len(rows) == 5
    for bound, (own, other) in rows.items():
        choice = planner.best(seconds_of(bound)).row
        assert_quoted(own, choice.throughput_rps)
        assert own.endswith(f"({choice.strategy[:3].upper()})")
        at = played.best_at(seconds_of(bound))
        assert_quoted(other, played.rows[at].throughput_rps)
        interval = re.search(r"\[([\d.]+) to ([\d.]+)\]", other)
        if interval:
            for quoted, rps in zip(interval.groups(), played.intervals_rps[at], strict=True):
                assert_quoted(quoted, rps)
    assert "two replicas of four stages" in rows["none"][1]
    last = played.best(math.inf)
    assert (last.replicas, last.stages) == (2, 4)
