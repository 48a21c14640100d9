"""Uncertainty of a schedule, and the result of a watch: in words, and drawn."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from driving import look

from lengthwise import catalog, schedule
from lengthwise.cost.model_error import perturbed_degrees
from lengthwise.report.schedule import write_schedule_html
from lengthwise.report.schedule_text import sentences, spread_cells, watch_sentences
from lengthwise.schema.schedule import Adaptation, Change, LengthFacts, SchedulePlan, Spread, Uncertainty, Watched


@pytest.fixture(scope="module")
def plan() -> SchedulePlan:
    """Short outputs on two A40s, whose costs may be off."""
    model = catalog.model("opt-13b")
    cluster = schedule.Cluster(catalog.gpu("A40"), catalog.node("pcie4-4"), 2)
    task = schedule.TaskLengths.from_samples([200, 400, 900], [1, 5, 9])
    tables = schedule.cluster_tables(model, cluster, [1, 2])
    planner = schedule.Planner(schedule.Estimator(task, cluster, model, tables), [1, 2])
    made = schedule.build_plan(planner, 2.0)
    off = perturbed_degrees(tables, 10)
    costs = schedule.spread_over_costs(planner.estimator, made.chosen, off, 2.0)
    front = schedule.with_bands(planner.estimator, made.front, off)
    return replace(made, uncertainty=Uncertainty((costs,), ("Nothing else is known.",)), front=front)


DASH = "\N{EN DASH}"
LENGTHS = Spread("lengths", 200, 0.95, 5000, (22.6, 23.4), (5.4, 9.5), (5.9, 10.1), 0.48)


def test_a_spread_names_its_effect_on_the_bound(plan):
    sampled = replace(plan, uncertainty=replace(plan.uncertainty, spreads=(LENGTHS,)))
    answer = sentences(sampled)
    (one,) = (description for description in answer if "behind the lengths" in description)
    assert one == (
        "If the 5,000 requests behind the lengths are sampled again: 22.6-23.4 requests/s, latency 5.9-10 s in the "
        "worst case (95 % interval); the bound is met in 48 % of 200 draws."
    ).replace("-", DASH)
    assert "Nothing else is known." in answer
    assert "in the worst case, the best" in answer[0]
    assert "even" not in answer[0]
    assert answer[1] == "These are point estimates: the bound is met in 48 % of draws of their errors."
    sure = replace(plan, uncertainty=Uncertainty((replace(LENGTHS, met_share=0.99),)))
    assert not any("point estimates" in sentence for sentence in sentences(sure))
    unbounded = replace(sampled, bound=replace(plan.bound, limit_s=math.inf))
    (free,) = (s for s in sentences(unbounded) if "behind" in s)
    assert free.endswith("the memory suffices in 48 % of 200 draws.")


def test_a_spread_has_a_row_of_cells(plan):
    assert spread_cells(LENGTHS)[0] == "the 5,000 requests behind the lengths are sampled again"
    assert spread_cells(LENGTHS)[-1] == "48 %"
    assert spread_cells(replace(LENGTHS, latency_s=(5.4, math.inf)))[2] == "from 5.4"
    assert spread_cells(replace(LENGTHS, latency_s=(math.inf, math.inf)))[2] == DASH


def test_the_page_has_bands_and_a_table(plan, tmp_path):
    write_schedule_html(tmp_path / "page.html", plan)
    text = (tmp_path / "page.html").read_text("utf-8")
    assert "<h2>Uncertainty</h2>" in text
    data = json.loads(text.split('id="figures">')[1].split("</script>")[0])
    for curve in data["curves"]:
        assert len(curve["band"]) == len(curve["y"])
        assert all(low <= y <= high for (low, high), y in zip(curve["band"], curve["y"], strict=True))
    write_schedule_html(tmp_path / "bare.html", replace(plan, uncertainty=Uncertainty()))
    assert "Uncertainty" not in (tmp_path / "bare.html").read_text("utf-8")


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_bands_are_drawn(driver, plan, tmp_path, width, scheme):
    driver.get_log("browser")
    write_schedule_html(tmp_path / "page.html", plan)
    look(driver, (tmp_path / "page.html").as_uri(), width, scheme, plots=2)
    fills = driver.execute_script("return document.querySelectorAll('#front .fills path').length")
    assert fills == len(plan.front)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []


METADATA = LengthFacts(256, 138, 32, 13, 0.4, 63)


def change(plan, **given):
    known = {
        "before": METADATA, "after": replace(METADATA, output_mean=42.0), "bound_s": 2.0, "margin": 0.1,
        "free_rps": 9.0,
        "retained": plan.chosen, "retained_latency_s": 2.5, "late_share": 0.07,
        "new": plan.chosen, "new_latency_s": 1.7,
        "load_s": 0.0, "made": True, "repaid_s": math.nan, "cause": "the deployed schedule would take 2.5 s",
    }  # fmt: skip
    return Change(**{**known, **given})


def watched(plan, *changes):
    found = tuple(
        Adaptation(150 + i, 7.5, 101, 5.0, 50, ("outputs",), {"prompts": 0.2, "outputs": 400.0}, i == 0, one, 2.5, 0.07)
        for i, one in enumerate(changes)
    )
    return Watched("", "live", 400, 3, 2.0, 0.01, plan.chosen, METADATA, plan.chosen, found, 0.05, 0.3)


def test_a_watch_names_changes_and_their_effect(plan):
    answer = " ".join(watch_sentences(watched(plan, change(plan))))
    for words in (
        "Watched 400 requests (3 more were cut off)", "false alarm: at most 1 %",
        "Request 150 (7.50 s): outputs changed, from about request 101 on", "outputs 42 ± 13 tokens",
        "bound 2 s exceeded by 25 %; 7 % of requests take longer", "Changed to",
        "bound 10 % tighter (9.00 requests/s without)",
        "requests/s, latency 1.70 s, bound 10 %",
        "no weights move: the deployed schedule would take 2.5 s.",
        "about 21 requests would have taken longer than 2 s",
    ):  # fmt: skip
        assert words in answer, words


@pytest.mark.parametrize(
    ("given", "states"),
    [
        ({"new": None, "made": False, "cause": "nothing meets it"}, "Not changed: nothing meets it."),
        ({"made": False, "cause": "too little"}, "too little."),
        ({"retained": None, "retained_latency_s": math.inf}, "The running schedule would exceed the memory."),
        ({"load_s": 2.6, "repaid_s": 12.0}, "2.60 s without service, repaid after 12.0 s"),
        ({"bound_s": math.inf, "margin": 0.0}, "Unchanged: "),
        ({"retained_latency_s": 1.5, "late_share": 0.0}, "bound 2 s met"),
    ],
)
def test_every_outcome_has_its_words(plan, given, states):
    assert states in " ".join(watch_sentences(watched(plan, change(plan, **given))))


def test_an_unknown_time_is_omitted(plan):
    report = watched(plan, change(plan))
    (one,) = report.adaptations
    answer = " ".join(watch_sentences(replace(report, adaptations=(replace(one, at_s=0.0),))))
    assert "Request 150: outputs changed" in answer
    assert "0 ms" not in answer


def test_the_unused_margin_is_named(plan):
    rate = plan.chosen.throughput_rps
    answer = watch_sentences(watched(plan, change(plan, free_rps=rate / 0.8)))
    assert any("The margin of 10 % leaves 20 % of" in one and "--margin 0 uses them" in one for one in answer)
    for free in (change(plan, free_rps=rate), change(plan, free_rps=2 * rate, margin=0.0)):
        assert "--margin" not in " ".join(watch_sentences(watched(plan, free)))


def test_similar_neighbours_are_a_warning(plan):
    assert "Consecutive" not in " ".join(watch_sentences(watched(plan)))
    answer = " ".join(watch_sentences(replace(watched(plan), matching=0.6)))
    assert "Consecutive requests have similar lengths (rank correlation 0.60" in answer
    assert "--every" in answer


def test_only_requests_since_a_change_count_as_late(plan):
    report = watched(plan, change(plan), change(plan))
    assert report.late == pytest.approx(0.07 * 300), "the second tells of the same change"
    assert watched(plan).late == 0
