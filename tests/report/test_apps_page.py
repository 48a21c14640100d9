"""The page of a plan or a run of an application: its sentences, and that it draws every GPU and second."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from driving import assert_fetches_nothing, look, without_plotly

from lengthwise.report.apps import write_app_html
from lengthwise.report.apps_text import (
    AppFacts,
    difference_text,
    duration_text,
    estimate_duration_text,
    gain_text,
    idle_shares,
    sentences,
    shape,
    what_if_text,
)
from lengthwise.schema.app import AppMethod, AppPlan, AppSpan, AppStage, AppWhatIf, ModelPlan, Switch
from lengthwise.schema.estimate import Estimate

NAMES = ("alpha", "</script>beta", *(f"model-{k}" for k in range(2, 10)))
GPU, BY = "A100-80GB", "\N{MULTIPLICATION SIGN}"
ONE, TWO, BIG = ModelPlan(0, GPU, 1), ModelPlan(1, GPU, 1, 2), ModelPlan(9, GPU, 1, 2, 1)


@pytest.fixture
def plan() -> AppPlan:
    """Two stages on four GPUs: one model waits for another, a third uses the GPUs after it."""
    first = AppStage(
        (ONE, TWO),
        {0: ((0,),), 1: ((2, 3),)},
        (Switch(0, (0,), "start", 10.0), Switch(1, (2, 3), "start", 12.0)),
        0.0,
        30.0,
        0,
    )
    second = AppStage((TWO, BIG), {1: ((2, 3),), 9: ((0, 1),)}, (Switch(9, (0, 1), "wake", 1.5),), 30.0, 50.0, 9)
    spans = [
        AppSpan(0, 0.0, 11.0, "load", 0, ONE),
        AppSpan(0, 11.0, 30.0, "run", 0, ONE),
        AppSpan(1, 0.0, 30.0, "no_plan_fits"),
        *(AppSpan(g, 30.0, 31.5, "load", 9, BIG) for g in (0, 1)),
        *(AppSpan(g, 31.5, 50.0, "run", 9, BIG) for g in (0, 1)),
        *(AppSpan(g, 0.0, 12.0, "load", 1, TWO) for g in (2, 3)),
        *(AppSpan(g, 12.0, 40.0, "run", 1, TWO) for g in (2, 3)),
        *(AppSpan(g, 40.0, 50.0, "waiting_for_parents", 1, TWO) for g in (2, 3)),
    ]
    return AppPlan(
        models=NAMES,
        method="lengthwise",
        stages=(first, second),
        planned=((ONE, TWO), (TWO, BIG)),
        reserve=(),
        makespan=Estimate(50.3, 0.2824),
        makespans_s=(50.0, 50.6),
        quantiles_s={0.05: 49.1, 0.5: 50.2, 0.95: 51.4},
        spans=tuple(sorted(spans, key=lambda s: (s.gpu, s.start_s))),
        flops=(1.0,) * 10,
        tokens=(100,) * 10,
        methods=(
            AppMethod("lengthwise", Estimate(50.3, 0.28), 50.0, 0.2, 2, 1.0),
            AppMethod("min_no_preemption", Estimate(61.2, 0.5), 61.0, 0.01, 3, 1.21),
        ),
        what_ifs=(
            AppWhatIf("island_plus_2", Estimate(45.0, 0.3), Estimate(-5.3, 0.25)),
            AppWhatIf("gpus_plus_1", Estimate(50.3, 0.2824), Estimate(3.19e-15, 0.0)),
            AppWhatIf("disk_twice_as_fast", Estimate(48.1, 0.2824), Estimate(-2.2, 4.91e-15)),
        ),
        search_s=0.2,
        notes=("switch times <b>are</b> assumed",),
    )


@pytest.fixture
def app_metadata() -> AppFacts:
    return AppFacts("an <i>app</i>", ("1,000 rows", "4 x A100"), tuple(f"GPU {k}" for k in range(4)))


MANIFEST = {
    "how": "done",
    "resumed": False,
    "counts": {"all": {"done": 90, "dead": 2, "blocked": 8}},
    "seconds": 60.0,
    "plan": [[{"model": "alpha", "gpu": GPU}]],
    "events": [
        {"at_s": 0.0, "what": "start", "model": "alpha", "gpus": [0], "description": ""},
        {"at_s": 0.0, "what": "start", "model": NAMES[1], "gpus": [2, 3], "description": ""},
        {"at_s": 11.0, "what": "ready", "model": "alpha", "gpus": [0], "description": "e"},
        {"at_s": 14.0, "what": "ready", "model": NAMES[1], "gpus": [2, 3], "description": "e"},
        {"at_s": 20.0, "what": "died", "model": "alpha", "gpus": [0], "description": "e"},
        {"at_s": 20.0, "what": "start", "model": "alpha", "gpus": [0], "description": ""},
        {"at_s": 31.0, "what": "ready", "model": "alpha", "gpus": [0], "description": "e"},
        {"at_s": 33.0, "what": "replan", "model": None, "gpus": [], "description": "stage 1"},
        {"at_s": 40.0, "what": "stop", "model": "alpha", "gpus": [0], "description": "e"},
    ],
}


def ran(app_metadata: AppFacts, **changed) -> AppFacts:
    answers, tokens = {"alpha": 50, NAMES[1]: 40}, {"alpha": 1800, NAMES[1]: 9200}
    return replace(app_metadata, manifest=MANIFEST | changed, tokens=tokens, answers=answers)


def written(path, plan, app_metadata, models=None):
    write_app_html(path, plan, app_metadata, models)
    text = path.read_text("utf-8")
    return text, json.loads(text.split('id="figures">')[1].split("</script>")[0])


@pytest.mark.parametrize(
    ("value", "half", "report"),
    [
        (45.3, 0.282, "45.30 ± 0.28 s"),
        (45.3, 3.19e-15, "45.3 s"),
        (45.3, math.nan, "45.3 s"),
        (160.6, 28.9, "2.68 ± 0.48 min"),
        (9000.0, 36.0, "2.500 ± 0.010 h"),
        (0.0, math.nan, "0 s"),
        (math.nan, math.nan, "\N{EN DASH}"),
    ],
)
def test_times_have_the_digits_that_their_intervals_leave(value, half, report):
    assert estimate_duration_text(Estimate(value, half)) == report


@pytest.mark.parametrize(
    ("value", "half", "report"),
    [
        (3.19e-15, 0.0, "none"),
        (3.19e-15, 2e-15, "none"),
        (-8.01, 4.91e-15, "\N{MINUS SIGN}8.01 s exactly"),
        (12.04, 0.0923, "+12.04 ± 0.09 s"),
        (-0.001, 0.5, "0.00 ± 0.50 s"),
        (-180.0, 6.0, "\N{MINUS SIGN}3.00 ± 0.10 min"),
        (2.0, math.nan, "+2.00 s"),
    ],
)
def test_differences_have_a_sign_and_are_none_where_only_sums_were_made_in_another_order(value, half, report):
    assert difference_text(Estimate(value, half), 65.0) == report


def test_a_methods_relative_time_has_the_interval_of_the_same_samples(plan):
    own = replace(plan.methods[0], name=plan.method, makespans_s=plan.makespans_s, lead_s=0.0)
    twice = replace(
        own, name="twice", gain=2.1, makespans_s=tuple(s * f for s, f in zip(plan.makespans_s, (2.0, 2.2), strict=True))
    )
    both = replace(plan, methods=(own, twice))
    assert gain_text(both, twice) == "2.1 ± 1.3"  # 12.7 standard errors of two ratios, 2.0 and 2.2
    assert gain_text(both, own) == f"{own.gain:.2f}"
    assert gain_text(both, replace(twice, makespans_s=())) == "2.10"


def test_no_time_has_an_exponent():
    for value in (0.0, 1e-15, 1e-6, 0.003, 0.5, 99.0, 1234.5, 1e6):
        assert "e" not in duration_text(value).replace("\N{EN DASH}", "")


def test_plans_and_what_ifs_have_words():
    assert shape(ONE) == "1"
    assert shape(ModelPlan(0, GPU, 3, 2, 4)) == f"3 {BY} tp 2 {BY} pp 4"
    one = Estimate(1.0)
    texts = {name: what_if_text(AppWhatIf(name, one, one)) for name in (
        "island_plus_2", "island_plus_8", "island_minus_8", "gpus_plus_1", "gpus_plus_4", "gpus_minus_1",
        "disk_twice_as_fast", "something_new")}  # fmt: skip
    assert list(texts.values()) == [
        "one more pair of GPUs (with fast links)",
        "one more group of 8 GPUs (with fast links)",
        "one fewer group of 8 GPUs (with fast links)",
        "one more GPU",
        "4 GPUs more",
        "one fewer GPU",
        "a disk twice as fast",
        "something new",
    ]


def test_the_answer_names_makespan_uncertainty_and_idle_gpus(plan, app_metadata):
    answer = " ".join(sentences(plan, app_metadata))
    assert "Makespan 50.30 ± 0.28 s on 4 GPUs (2 stages; mean over 2 length samples" in answer
    assert "The stages are those of one sample, which ends after 50.0 s." in answer
    assert "Nine of ten samples lie between 49.1 s and 51.4 s" in answer
    assert "Models run in 56 % of all GPU time; the rest: 19 % loading, 15 % no plan fits" in answer
    assert "min no preemption 1.21" in answer
    assert "With one more GPU, the makespan would not change." in answer
    assert "With a disk twice as fast, the makespan would be 48.10 ± 0.28 s (\N{MINUS SIGN}2.20 s exactly)." in answer
    assert sum(share for _, share in idle_shares(plan, 4)) == pytest.approx(88 / 200)


def test_the_page_of_a_plan_is_escaped_alone_and_the_same_again(plan, app_metadata, tmp_path):
    text, data = written(tmp_path / "one.html", plan, app_metadata)
    again, _ = written(tmp_path / "two.html", plan, app_metadata)
    assert text == again
    own = without_plotly(text)
    assert "an &lt;i&gt;app&lt;/i&gt;" in own
    assert "&lt;/script&gt;beta" in own
    assert "<b>are</b>" not in own
    assert_fetches_nothing(text, 60_000)
    for head in ("The answer", "Which model runs where and when", "Stages", "GPU time", "Other methods",
                 "Other hardware", "Assumptions"):  # fmt: skip
        assert f"<h2>{head}</h2>" in own, head
    assert "The run" not in own
    (chart,) = data["charts"]
    assert data["unit"] == "s"
    assert chart["rows"] == list(app_metadata.gpus)
    assert chart["marks"] == [30.0, 50.0]
    for row in range(4):  # every GPU and second once
        bars = sorted(bar[1:3] for bar in chart["bars"] if bar[0] == row)
        assert bars[0][0] == 0.0
        assert bars[-1][1] == 50.0
        assert all(a[1] == b[0] for a, b in pairwise(bars))
    words = {bar[4]: bar[6] for bar in chart["bars"]}
    assert words["no_plan_fits"].startswith("idle: no plan fits the free GPUs\n0 s to 30.0 s")
    assert "waiting for other models (</script>beta)" in words["waiting_for_parents"]
    assert {bar[5] for bar in chart["bars"] if bar[4] == "run"} == {
        "1\N{MULTIPLICATION SIGN}1",
        "1\N{MULTIPLICATION SIGN}2",
    }


def test_the_stages_of_the_page_have_a_row_for_each_model(plan, app_metadata, tmp_path):
    text, _ = written(tmp_path / "page.html", plan, app_metadata)
    table = without_plotly(text).split('aria-label="Stages"')[1].split("</table>")[0]
    rows = [row.replace("</th>", "|").replace("</td>", "|") for row in table.split("<tr>")[2:]]
    cells = [[cell.split(">")[-1] for cell in row.split("|")[:-1]] for row in rows]
    assert cells == [
        ["1", "0 s", "30.0 s", "alpha", "1", "1", "1", "1", "0", "start 10.0 s", "yes"],
        ["", "", "", "&lt;/script&gt;beta", "1", "2", "1", "2", "2,3", "start 12.0 s", ""],
        ["2", "30.0 s", "50.0 s", "&lt;/script&gt;beta", "1", "2", "1", "2", "2,3", "", ""],
        ["", "", "", "model-9", "1", "2", "1", "2", "0,1", "wake 1.50 s", "yes"],
    ]


def test_the_page_of_a_run_shows_its_plan_too(plan, app_metadata, tmp_path):
    text, data = written(tmp_path / "run.html", plan, ran(app_metadata))
    own = without_plotly(text)
    assert "The run finished after 60.0 s: 90 done, 2 dead, 8 blocked." in own
    planned = "Planned makespan 50.30 ± 0.28 s (nine of ten samples: 49.1 s to 51.4 s)"
    assert f"{planned}; the run was 19 % longer." in own
    assert "Engines died 1 time; their unfinished tasks were dispatched again." in own
    assert "The plan was renewed 1 time" in own
    assert "Without an answer: model-2" in own
    planned, happened = data["charts"]
    assert (happened["id"], planned["id"]) == ("run", "plan")
    assert data["end"] == 60.0
    assert happened["rows"] == planned["rows"]
    assert [bar[:5] for bar in happened["bars"] if bar[0] == 0] == [
        [0, 0.0, 11.0, 0, "load"], [0, 11.0, 20.0, 0, "run"], [0, 20.0, 31.0, 0, "load"], [0, 31.0, 40.0, 0, "run"],
    ]  # fmt: skip
    assert [bar[:5] for bar in happened["bars"] if bar[0] == 3] == [
        [3, 0.0, 14.0, 1, "load"], [3, 14.0, 60.0, 1, "run"],
    ]  # fmt: skip
    table = own.split('aria-label="Models"')[1]
    # alpha wrote 1,800 tokens in the 18 s in which it had an engine; beta's two GPUs are one engine's.
    assert "<td>1,800</td><td>100</td><td>11.0 s to 30.0 s</td><td>11.0 s to 40.0 s</td>" in table
    assert "<td>9,200</td><td>200</td>" in table


def test_a_stopped_or_resumed_run_is_not_measured_against_the_plan(plan, app_metadata, tmp_path):
    states = {"all": {"done": 10, "waiting": 5, "ready": 85}}
    text, _ = written(tmp_path / "a.html", plan, ran(app_metadata, how="stopped", counts=states))
    assert "The run was stopped after 60.0 s: 10 done, 90 unfinished." in text
    assert "for the complete application in one run" in text
    text, _ = written(tmp_path / "b.html", plan, ran(app_metadata, resumed=True))
    assert "The run continued one that was stopped" in text
    assert "<td>1,800</td><td>\N{EN DASH}</td>" in text


def test_a_run_on_given_engines_has_no_plan_and_a_row_for_each_engine(app_metadata, tmp_path):
    events = [
        {"at_s": 0.5, "what": "ready", "model": "b", "gpus": [0], "description": "http://x"},
        {"at_s": 0.5, "what": "ready", "model": "a", "gpus": [0], "description": "http://x"},
        {"at_s": 0.5, "what": "ready", "model": "a", "gpus": [1], "description": "http://y"},
    ]
    given = [[{"model": "a", "gpu": "given"}, {"model": "b", "gpu": "given"}]]
    metadata = replace(ran(app_metadata, events=events, plan=given), gpus=())
    text, data = written(tmp_path / "page.html", None, metadata, ["a", "b"])
    (chart,) = data["charts"]
    assert chart["rows"] == ["a 0", "a 1", "b 0"]
    assert [bar[:5] for bar in chart["bars"]] == [
        [2, 0.5, 60.0, 1, "run"], [0, 0.5, 60.0, 0, "run"], [1, 0.5, 60.0, 0, "run"],
    ]  # fmt: skip
    assert "Planned" not in without_plotly(text).split("<h2>Terms")[0].replace("planned to run", "")


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_are_drawn_and_nothing_is_wider_than_the_screen(driver, plan, app_metadata, tmp_path, width, scheme):
    driver.get_log("browser")
    for which, plots in ((app_metadata, 1), (ran(app_metadata), 2)):
        write_app_html(tmp_path / "page.html", plan, which)
        look(driver, (tmp_path / "page.html").as_uri(), width, scheme, plots=plots)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        bars = driver.execute_script("return document.querySelectorAll('#plan .bars .point').length")
        assert bars == len(plan.spans)
        rows = driver.execute_script("return [...document.querySelectorAll('#plan .ytick')].map(t => t.textContent)")
        assert sorted(rows) == list(app_metadata.gpus)
        boxes = driver.execute_script(
            "return [...document.querySelectorAll('.plot .main-svg')].map(p => p.getBoundingClientRect().right)"
        )
        assert max(boxes) <= width
        assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []


@pytest.mark.browser
def test_models_of_one_colour_differ_in_their_pattern_and_idle_gpus_in_their_reason(
    driver, plan, app_metadata, tmp_path
):
    write_app_html(tmp_path / "page.html", plan, app_metadata)
    look(driver, (tmp_path / "page.html").as_uri(), 1280, "light", plots=1)
    fills = driver.execute_script(
        "return [...document.querySelectorAll('#plan .bars .point path')].map(p => getComputedStyle(p).fill)"
    )
    plain = {fill for fill in fills if not fill.startswith("url")}
    assert len(plain) >= 4, "two models and two reasons"
    assert len({fill for fill in fills if fill.startswith("url")}) >= 4, "three that load, and the tenth model"
