"""The page and the file of a chosen schedule, and that the page draws."""

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
from lengthwise.schema.schedule import ScheduleParts, SchedulePlan, StaticBatching


@pytest.fixture(scope="module")
def plan() -> SchedulePlan:
    """OPT-13B summarises on four A40s within 3 seconds."""
    model = catalog.model("opt-13b")
    cluster = schedule.Cluster(catalog.gpu("A40"), catalog.node("pcie4-4"), 4)
    task = schedule.TaskLengths.from_preset("exegpt-s")
    tables = schedule.cluster_tables(model, cluster, [1, 2, 4])
    planner = schedule.Planner(schedule.Estimator(task, cluster, model, tables), [2, 4])
    return schedule.build_plan(planner, 3.0, name="a <b>plan</b>", metadata={"model": "</script>opt"})


def unbounded(plan: SchedulePlan) -> SchedulePlan:
    return replace(plan, bound=replace(plan.bound, limit_s=math.inf))


def test_the_answer_names_the_choice(plan):
    answer = " ".join(sentences(plan))
    assert "Within 3 s for outputs of 63 tokens in the worst case" in answer
    assert plan.chosen.words in answer
    assert f"Static batching with batches of {plan.static.best.prefill_batch}" in answer
    assert f"{plan.search.evaluated:,} of {plan.search.points:,} schedules" in answer
    assert "The bound breaks if the output lengths change by: mean +15 %, mean +30 %" in answer
    assert "tighter would have prevented it" in answer


def test_short_phases_are_not_called_monotone(plan):
    """Short phases are not monotone and are evaluated as well; WAA's runs are monotone."""
    answer = " ".join(sentences(plan))
    assert "This is not proved: RRA's estimates are not monotone for short phases" in answer
    assert "by these cost tables" in answer
    split = replace(
        plan, search=replace(plan.search, sides=tuple(one for one in plan.search.sides if one.strategy != "rra"))
    )
    assert "as far as the estimates are monotone" in " ".join(sentences(split))
    assert "short phases" not in " ".join(sentences(split))


def test_a_complete_search_assumes_nothing(plan):
    answer = " ".join(sentences(replace(plan, search=replace(plan.search, evaluated=plan.search.points, gap=0.0))))
    assert f"All {plan.search.points:,} schedules were evaluated; none has a higher throughput." in answer
    assert "monotone" not in answer


def test_the_limit_of_phases_is_approximate(plan):
    """Decision 0017: RRA's search has no proof where phases are short."""
    for side in (side for side in plan.search.sides if side.best):
        limit = side_cells(side)[6]
        assert limit.startswith("about ") == (side.strategy == "rra")
        assert not side_cells(replace(side, evaluated=side.points))[6].startswith("about")


def test_the_answer_omits_missing_parts(plan):
    bare = replace(unbounded(plan), static=StaticBatching(), search=replace(plan.search, gap=math.inf))
    answer = " ".join(sentences(bare))
    assert "Without a latency bound" in answer
    assert "no batch meets the bound" in answer
    assert "at the edge" in answer
    assert "drift" not in answer
    saved = tuple(replace(row, is_satisfied=True) for row in plan.drift)
    assert "holds under every tried change" in " ".join(sentences(replace(plan, drift=saved)))
    lost = tuple(replace(row, margin=math.nan) for row in plan.drift)
    assert "No tried tighter bound" in " ".join(sentences(replace(plan, drift=lost)))


def test_faster_parts_are_named(plan):
    assert "one pipeline" not in " ".join(sentences(replace(plan, parts=None)))
    cut = ScheduleParts(2, 2, replace(plan.chosen, throughput_rps=0.75 * plan.chosen.throughput_rps))
    (answer,) = (one for one in sentences(replace(plan, parts=cut)) if "one pipeline" in one)
    assert "2 parts of 2 GPUs, with" in answer
    assert "1.50 times its throughput" in answer
    assert "(--gpus 2 plans one part)" in answer
    assert ScheduleParts(1, 1, plan.chosen).words == "1 GPU alone"


def test_exceeded_memory_differs_from_a_broken_bound(plan):
    """A schedule that exceeds the memory has no latency; it is named even without a bound."""
    broken, unfit, *_ = (row for row in plan.drift if not row.is_satisfied)
    drift = (replace(broken, margin=0.06), replace(unfit, retained=None, retained_latency_s=math.inf, margin=0.13))
    breaks, fits_not = sentences(replace(plan, drift=drift))[-2:]
    saved = "Planning with a bound {} % tighter would have prevented it."
    assert breaks == f"The bound breaks if the output lengths change by: {move_text(broken)}. {saved.format(6)}"
    memory = f"The schedule exceeds the memory if the output lengths change by: {move_text(unfit)}."
    assert fits_not == f"{memory} {saved.format(13)}"
    assert sentences(replace(unbounded(plan), drift=drift))[-1] == memory


@pytest.mark.parametrize(("tokens", "words"), [(1, "1 token "), (2, "2 tokens "), (1024, "1,024 tokens ")])
def test_one_token_is_one(plan, tokens, words):
    bounded = replace(plan, bound=replace(plan.bound, tokens=tokens))
    assert f"for outputs of {words}in the worst case" in sentences(bounded)[0]


def test_infeasible_rows_have_no_numbers(plan):
    lost = next(side for side in plan.search.sides if side.best is None)
    cells = side_cells(lost)
    assert cells[2:7] == ["\N{EN DASH}"] * 5
    assert cells[-1] == lost.cause
    row = replace(
        plan.drift[0], retained=None, replanned=None, retained_latency_s=math.inf, margin=math.nan, is_satisfied=False
    )
    cells = drift_cells(row, plan.bound.limit_s)
    assert {"does not fit", "none meets it", "none is enough"} <= set(cells)
    assert "broken" not in cells, "what does not fit breaks no bound"
    assert drift_cells(replace(plan.drift[0], is_satisfied=False), plan.bound.limit_s)[5] == "broken"
    assert "none is enough" not in drift_cells(row, math.inf), "there is nothing to tighten"


def test_the_file_is_complete(plan, tmp_path):
    write_schedule_json(tmp_path / "plan.json", plan)
    made = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    assert (made["format"], made["version"]) == ("lengthwise.schedule", 1)
    assert made["answer"] == sentences(plan)
    assert made["chosen"]["throughput_rps"] == plan.chosen.throughput_rps
    assert [front["strategy"] for front in made["front"]] == ["rra", "waa-c", "waa-m"]
    assert len(made["drift"]) == 12
    assert len(made["static_front"]) == len(plan.static.front) > 1
    assert made["redeploy"]["dram_s"] > 0
    assert (made["bound_s"], made["quantile_tokens"], made["worst_case"]) == (3.0, 63, True)
    assert (len(made["stages"]), len(made["timeline"])) == (len(plan.timeline.stages), len(plan.timeline.bars))
    assert {"sides", "gap", "evaluated", "points", "seconds", "static", "level", "spreads", "spread_notes"} < set(made)
    write_schedule_json(tmp_path / "inf.json", unbounded(plan))
    assert json.loads((tmp_path / "inf.json").read_text("utf-8"))["bound_s"] is None


def test_the_page_is_escaped_and_reproducible(plan, tmp_path):
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
    (static,) = data["others"]
    assert static["name"] == "static batching, by formula"
    within = [rps for held_s, rps in zip(static["x"], static["y"], strict=True) if held_s <= 3.0]
    assert within[-1] == pytest.approx(plan.static.best.throughput_rps, rel=1e-4)
    assert data["bound"] == 3.0
    assert {bar[0] for bar in data["bars"]} == set(range(len(data["stages"])))
    for head in (
        "The answer",
        "Other strategies",
        "Drift of the output lengths",
        "Chosen schedule and static batching",
    ):
        assert f"<h2>{head}</h2>" in text


def test_a_timeline_has_prefills_and_decodings_that_do_not_overlap_on_a_stage(plan):
    for stage in range(len(plan.timeline.stages)):
        bars = sorted((bar for bar in plan.timeline.bars if bar.stage == stage), key=lambda bar: bar.start_s)
        assert bars
        assert all(one.end_s <= two.start_s + 1e-9 for one, two in pairwise(bars))
    assert {bar.is_prefill for bar in plan.timeline.bars} == {True, False}


@pytest.mark.browser
def test_tables_fit_a_wide_screen(driver, plan, tmp_path):
    """The last columns, reasons and margins, need no scrolling."""
    first = plan.search.sides[0]
    long = replace(first, best=first.best or plan.chosen, cause="its least latency is 12.3 s")
    unsplit = replace(long, cause="no split into prefill and decode GPUs has room for a group")
    search = replace(plan.search, sides=(*plan.search.sides, long, unsplit))
    write_schedule_html(tmp_path / "page.html", replace(plan, search=search))
    look(driver, (tmp_path / "page.html").as_uri(), 1280, "light", plots=2)
    beyond = "return [...document.querySelectorAll('.scroll')].filter(b => b.scrollWidth > b.clientWidth)"
    assert driver.execute_script(f"{beyond}.map(b => b.ariaLabel)") == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_are_drawn_and_nothing_is_wider_than_the_screen(driver, plan, tmp_path, width, scheme):
    driver.get_log("browser")
    for which in (plan, replace(unbounded(plan), static=StaticBatching())):
        write_schedule_html(tmp_path / "page.html", which)
        look(driver, (tmp_path / "page.html").as_uri(), width, scheme, plots=2)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        bars = driver.execute_script("return document.querySelectorAll('#timeline .bars .point').length")
        assert bars == len(plan.timeline.bars)
        assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []
