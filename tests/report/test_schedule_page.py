"""What the page and the file of a choice of schedule say, and that the page draws."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from driving import assert_fetches_nothing, look

from lengthwise import catalog, schedule
from lengthwise.report.schedule import write_schedule_html, write_schedule_json
from lengthwise.report.schedule_text import drift_cells, move_text, sentences, side_cells
from lengthwise.schema.schedule import ScheduleParts, SchedulePlan


@pytest.fixture(scope="module")
def plan() -> SchedulePlan:
    """OPT-13B summarises on four A40s within 3 seconds."""
    model = catalog.model("opt-13b")
    cluster = schedule.Cluster(catalog.gpu("A40"), catalog.node("pcie4-4"), 4)
    task = schedule.TaskLengths.from_preset("exegpt-s")
    tables = schedule.cluster_tables(model, cluster, [1, 2, 4])
    planner = schedule.Planner(schedule.Estimator(task, cluster, model, tables), [2, 4])
    return schedule.build_plan(planner, 3.0, name="a <b>plan</b>", metadata={"model": "</script>opt"})


def test_the_answer_says_what_was_found(plan):
    said = " ".join(sentences(plan))
    assert "Within 3 s for outputs of 63 tokens even in the worst case" in said
    assert plan.chosen.words in said
    assert f"static batches of {plan.static.encode_batch}" in said
    assert f"{plan.evaluated:,} of {plan.points:,} schedules" in said
    assert "The bound breaks when outputs move so: mean +15 %, mean +30 %" in said
    assert "tighter would have kept it" in said


def test_of_phases_nobody_says_that_they_are_monotone_alone(plan):
    """Short phases break it, and are tried besides; WAA's runs are monotone."""
    said = " ".join(sentences(plan))
    assert "which is not proved: RRA's estimates are not monotone where phases are short" in said
    assert "by these cost tables" in said
    split = replace(plan, sides=tuple(side for side in plan.sides if side.strategy != "rra"))
    assert "as far as estimates are monotone" in " ".join(sentences(split))
    assert "phases are short" not in " ".join(sentences(split))


def test_where_all_were_looked_at_nothing_is_assumed(plan):
    said = " ".join(sentences(replace(plan, evaluated=plan.points, gap=0.0)))
    assert f"All {plan.points:,} schedules were estimated; none of them has more throughput." in said
    assert "monotone" not in said


def test_the_most_of_phases_is_about_so(plan):
    """Decision 0017: RRA's search has no proof where phases are short."""
    for side in (side for side in plan.sides if side.best):
        most = side_cells(side)[6]
        assert most.startswith("about ") == (side.strategy == "rra")
        assert not side_cells(replace(side, evaluated=side.points))[6].startswith("app_metadata")


def test_the_answer_fits_what_is_not_there(plan):
    said = " ".join(sentences(replace(plan, static=None, bound_s=math.inf, gap=math.inf)))
    assert "With no latency bound" in said
    assert "no static batch meets the bound" in said
    assert "at the edge" in said
    assert "drift" not in said
    kept = tuple(replace(row, is_satisfied=True) for row in plan.drift)
    assert "holds under every drift" in " ".join(sentences(replace(plan, drift=kept)))
    lost = tuple(replace(row, margin=math.nan) for row in plan.drift)
    assert "No tighter bound that was tried" in " ".join(sentences(replace(plan, drift=lost)))


def test_parts_that_serve_more_are_told_and_no_others(plan):
    assert "one pipeline" not in " ".join(sentences(replace(plan, parts=None)))
    cut = ScheduleParts(2, 2, replace(plan.chosen, throughput_rps=0.75 * plan.chosen.throughput_rps))
    (said,) = (one for one in sentences(replace(plan, parts=cut)) if "one pipeline" in one)
    assert "2 parts of 2 GPUs, with" in said
    assert "1.50 times as much" in said
    assert "(--gpus 2 plans a part)" in said
    assert ScheduleParts(1, 1, plan.chosen).words == "1 GPU alone"


def test_what_no_longer_fits_is_told_from_what_breaks_the_bound(plan):
    """A schedule that memory does not hold has no latency; with no bound it is told all the same."""
    broken, unfit, *_ = (row for row in plan.drift if not row.is_satisfied)
    drift = (replace(broken, margin=0.06), replace(unfit, retained=None, kept_held_s=math.inf, margin=0.13))
    breaks, fits_not = sentences(replace(plan, drift=drift))[-2:]
    kept = "Choosing under a bound {} % tighter would have kept it."
    assert breaks == f"The bound breaks when outputs move so: {move_text(broken)}. {kept.format(6)}"
    memory = f"It does not fit the memory when outputs move so: {move_text(unfit)}."
    assert fits_not == f"{memory} {kept.format(13)}"
    assert sentences(replace(plan, drift=drift, bound_s=math.inf))[-1] == memory


@pytest.mark.parametrize(("tokens", "words"), [(1, "1 token "), (2, "2 tokens "), (1024, "1,024 tokens ")])
def test_one_token_is_one(plan, tokens, words):
    assert f"for outputs of {words}even in the worst case" in sentences(replace(plan, quantile_tokens=tokens))[0]


def test_rows_of_what_cannot_be_have_no_numbers(plan):
    lost = next(side for side in plan.sides if side.best is None)
    cells = side_cells(lost)
    assert cells[2:7] == ["\N{EN DASH}"] * 5
    assert cells[-1] == lost.cause
    row = replace(
        plan.drift[0], retained=None, replanned=None, kept_held_s=math.inf, margin=math.nan, is_satisfied=False
    )
    cells = drift_cells(row, plan.bound_s)
    assert {"does not fit", "none meets it", "none is enough"} <= set(cells)
    assert "broken" not in cells, "what does not fit breaks no bound"
    assert drift_cells(replace(plan.drift[0], is_satisfied=False), plan.bound_s)[5] == "broken"
    assert "none is enough" not in drift_cells(row, math.inf), "there is nothing to tighten"


def test_the_file_holds_everything(plan, tmp_path):
    write_schedule_json(tmp_path / "plan.json", plan)
    told = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    assert (told["format"], told["version"]) == ("lengthwise.schedule", 1)
    assert told["answer"] == sentences(plan)
    assert told["chosen"]["throughput_rps"] == plan.chosen.throughput_rps
    assert [front["strategy"] for front in told["front"]] == ["rra", "waa-c", "waa-m"]
    assert len(told["drift"]) == 12
    assert len(told["static_front"]) == len(plan.static_front) > 1
    assert told["redeploy"]["dram_s"] > 0
    write_schedule_json(tmp_path / "inf.json", replace(plan, bound_s=math.inf))
    assert json.loads((tmp_path / "inf.json").read_text("utf-8"))["bound_s"] is None


def test_the_page_is_escaped_alone_and_the_same_again(plan, tmp_path):
    paths = [tmp_path / name for name in ("one.html", "two.html")]
    for path in paths:
        write_schedule_html(path, plan)
    text = paths[0].read_text("utf-8")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert "a &lt;b&gt;plan&lt;/b&gt;" in text
    assert "<b>plan" not in text
    assert "&lt;/script&gt;opt" in text
    assert_fetches_nothing(text, 250_000)
    data = json.loads(text.split('id="figures">')[1].split("</script>")[0])
    assert [curve["name"] for curve in data["curves"]] == ["RRA", "WAA-C", "WAA-M"]
    (nothing_done,) = data["others"]
    assert nothing_done["name"] == "doing nothing, by formula"
    within = [rps for held_s, rps in zip(nothing_done["x"], nothing_done["y"], strict=True) if held_s <= 3.0]
    assert within[-1] == pytest.approx(plan.static.throughput_rps, rel=1e-4)
    assert data["bound"] == 3.0
    assert {bar[0] for bar in data["bars"]} == set(range(len(data["stages"])))
    for head in ("The answer", "What else there was", "If outputs drift", "Chosen, and doing nothing"):
        assert f"<h2>{head}</h2>" in text


def test_a_timeline_has_encodings_and_decodings_that_do_not_overlap_on_a_stage(plan):
    for stage in range(len(plan.stages)):
        bars = sorted((bar for bar in plan.timeline if bar.stage == stage), key=lambda bar: bar.start_s)
        assert bars
        assert all(one.end_s <= two.start_s + 1e-9 for one, two in pairwise(bars))
    assert {bar.encodes for bar in plan.timeline} == {True, False}


@pytest.mark.browser
def test_tables_are_seen_whole_on_a_wide_screen(driver, plan, tmp_path):
    """Why a strategy lost, and the margin, stand in the last column."""
    long = replace(plan.sides[0], best=plan.sides[0].best or plan.chosen, cause="its least latency is 12.3 s")
    unsplit = replace(long, cause="no split into encoding and decoding GPUs has room for a group")
    write_schedule_html(tmp_path / "page.html", replace(plan, sides=(*plan.sides, long, unsplit)))
    look(driver, (tmp_path / "page.html").as_uri(), 1280, "light", plots=2)
    beyond = "return [...document.querySelectorAll('.scroll')].filter(b => b.scrollWidth > b.clientWidth)"
    assert driver.execute_script(f"{beyond}.map(b => b.ariaLabel)") == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_are_drawn_and_nothing_is_wider_than_the_screen(driver, plan, tmp_path, width, scheme):
    driver.get_log("browser")
    for which in (plan, replace(plan, static=None, bound_s=math.inf)):
        write_schedule_html(tmp_path / "page.html", which)
        look(driver, (tmp_path / "page.html").as_uri(), width, scheme, plots=2)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        bars = driver.execute_script("return document.querySelectorAll('#timeline .bars .point').length")
        assert bars == len(plan.timeline)
        assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []
