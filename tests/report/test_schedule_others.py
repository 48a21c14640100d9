"""Other systems compared with the chosen schedule: faster, as fast, slower."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from lengthwise import catalog, schedule
from lengthwise.report.schedule import OTHERS, figures, write_schedule_html, write_schedule_json
from lengthwise.report.schedule_text import OTHER_HEADS, other_cells, sentences
from lengthwise.schema.schedule import SYSTEM_NAMES, OtherSystem


@pytest.fixture(scope="module")
def plan():
    """OPT-13B on two A40s within 8 seconds, compared with two systems; short outputs."""
    model = catalog.model("opt-13b")
    cluster = schedule.Cluster(catalog.gpu("A40"), catalog.node("pcie4-4"), 2)
    task = schedule.TaskLengths.fixed(200, 8)
    tables = schedule.cluster_tables(model, cluster, [1, 2])
    planner = schedule.Planner(schedule.Estimator(task, cluster, model, tables), [1, 2])
    return schedule.build_plan(planner, 8.0, baselines=["orca", "vllm-v1", "orca"], seed=3)


def other(plan, system, times, *, spread=0.01):
    """A system of so many times the choice's throughput."""
    rps = plan.chosen.throughput_rps * times
    row = replace(plan.others[0].best, strategy=system, throughput_rps=rps)
    return OtherSystem(system, row, rps * (1 - spread), rps * (1 + spread), 5, ())


def test_each_system_is_compared_at_the_bound_once(plan):
    assert [one.system for one in plan.others] == ["orca", "vllm-v1"]
    for one in plan.others:
        assert one.best.latency_high_s <= 8
        assert one.low_rps <= one.best.throughput_rps <= one.high_rps
        assert one.configurations >= len(one.front) > 0
        assert one.best.throughput_rps <= one.front[-1].row.throughput_rps


def test_a_system_that_does_better_is_named_first(plan):
    beaten = replace(plan, others=(other(plan, "orca", 1.2), other(plan, "vllm-v1", 1.5)))
    faster = next(line for line in sentences(beaten) if "does better" in line)
    assert faster.index("vLLM v1") < faster.index("Orca")
    assert "1.50 times the chosen throughput" in faster
    assert "Orca 1.20" in faster


def test_insignificant_differences_are_not_called_better(plan):
    level = replace(plan, others=(other(plan, "sarathi", 1.02, spread=0.05),))
    answer = " ".join(sentences(level))
    assert "No significant difference in throughput: Sarathi" in answer
    assert "does better" not in answer


def test_slower_and_infeasible_systems_are_named(plan):
    none = OtherSystem("fastertransformer", None, math.nan, math.nan, 7, ())
    answer = " ".join(sentences(replace(plan, others=(other(plan, "vllm", 0.5), none))))
    assert "vLLM v0 0.50" in answer
    assert "No configuration meets the bound: FasterTransformer" in answer
    assert not any("does better" in line for line in sentences(replace(plan, others=())))


def test_cells_match_their_heads(plan):
    none = OtherSystem("fastertransformer", None, math.nan, math.nan, 7, ())
    for one in (*plan.others, none):
        cells = other_cells(one, plan.chosen)
        assert len(cells) == len(OTHER_HEADS)
        assert cells[0] == SYSTEM_NAMES[one.system]
    assert "none of 7 tried" in other_cells(none, plan.chosen)
    share = float(other_cells(plan.others[1], plan.chosen)[-1])
    assert share == pytest.approx(plan.others[1].best.throughput_rps / plan.chosen.throughput_rps, abs=0.006)


def test_page_and_file_contain_them(plan, tmp_path):
    write_schedule_html(tmp_path / "page.html", plan)
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "Other systems" in page
    assert plan.others[1].best.words.split(", ", 1)[1] in page
    write_schedule_json(tmp_path / "plan.json", plan)
    made = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    assert [one["system"] for one in made["others"]] == ["orca", "vllm-v1"]
    assert made["others"][0]["best"]["cycle_s"] is None


def test_every_system_has_a_name_and_a_line(plan):
    assert set(schedule.SYSTEMS) == set(SYSTEM_NAMES) == set(OTHERS)
    drawn = figures(plan)["others"]
    assert [curve["name"] for curve in drawn] == ["static batching, by formula", "Orca", "vLLM v1"]
    assert all(curve["x"] == sorted(curve["x"]) for curve in drawn)
