"""The page of a search as text, and the numbers that its figures draw."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys

import pytest
from driving import assert_fetches_nothing, without_plotly

from lengthwise.report import rounded, write_search_html
from lengthwise.report.formatting import span
from lengthwise.report.search import INFINITE, SHOWN, finite_number, load_curve, usd_per_thousand
from lengthwise.schema.errors import MissingExtraError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Status, Study


@pytest.fixture(scope="module")
def page(studies, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "study.html"
    write_search_html(path, studies.study())
    return path.read_text()


def drawn(page: str) -> dict:
    return json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])


def test_the_same_study_gives_the_same_bytes(studies, page, tmp_path) -> None:
    write_search_html(tmp_path / "again.html", studies.study())
    assert (tmp_path / "again.html").read_text() == page


def test_the_page_fetches_nothing(page) -> None:
    assert_fetches_nothing(page, 2e5)


def test_what_users_wrote_is_escaped(page) -> None:
    own = without_plotly(page)
    assert "<b>&</b>" not in own
    assert "<i>&</i>" not in own
    assert "h100-sxm &lt;b&gt;&amp;&lt;/b&gt;" in own
    assert "TTFT p90 &lt;at&gt; a higher load" in own


def test_the_answer_its_price_and_its_rivals_are_on_the_page(studies, page) -> None:
    best = studies.study().plans[0].best
    card = re.search(r'<article class="card answer">.*?</article>', page, re.DOTALL)[0]
    assert f"<b>{best.objective.value:,.0f}</b>" in card
    assert f"{best.price_per_hour_usd * 730:,.0f}" in card
    assert "Tied with it, by sampling or" in card
    assert card.count('class="bar') == 6
    assert "16 candidates: 10 ranked or scouted, 2 pruned" in card
    assert "1.31 \N{MULTIPLICATION SIGN}" in page
    assert "breaks a limit" in page


def with_kind(study: Study, **settings) -> Study:
    """The study of the best configuration with other settings, and with the tokens of its requests."""
    first, *others = study.plans[0].choices
    values = first.at.values | {"output_tokens_per_s": Estimate(150 * first.at.value("requests_per_s"))}
    at = dataclasses.replace(first.at, values=values)
    points = tuple(at if one == first.at else one for one in first.points)
    capacity = Estimate(1.2 * at.rate_rps, 0.3 * at.rate_rps, 0.6 * at.rate_rps, 2.4 * at.rate_rps)
    first = dataclasses.replace(first, settings=settings, at=at, points=points, capacity_rps=capacity)
    plan = dataclasses.replace(study.plans[0], choices=(first, *others), metadata={"gpu": "H100"})
    return dataclasses.replace(study, plans=(plan,))


@pytest.mark.parametrize(
    ("settings", "hardware"),
    [
        ({}, "{} \N{MULTIPLICATION SIGN} H100"),
        ({"deployment.gpu": "L40S"}, "{} \N{MULTIPLICATION SIGN} L40S"),
        ({"deployment.gpu": "folder/own.toml"}, "{} \N{MULTIPLICATION SIGN} own"),
        ({"deployment.gpu": "H100", "deployment.decode.gpu": "L40S"}, "{}"),  # the name has both
        ({"deployment.groups": '[{"gpu": "H100", "replicas": 1}, {"gpu": "L40S", "replicas": 2}]'}, "{}"),
    ],
)
def test_a_card_names_the_gpu_and_the_price_of_tokens_at_the_capacity(studies, tmp_path, settings, hardware) -> None:
    study = with_kind(studies.study(plans=1), **settings)
    best = study.plans[0].best
    write_search_html(tmp_path / "study.html", study)
    page = (tmp_path / "study.html").read_text()
    card = re.search(r'<article class="card answer">.*?</article>', page, re.DOTALL)[0]
    assert f">{hardware.format(best.gpus)}<" in card
    usd = best.price_per_hour_usd / 3600 / best.capacity_rps.value / 150 * 1e6
    assert "Per M output tokens, at the capacity" in card
    # a quarter of sampling error; half and twice the rate by the cost model's error
    value, half = rounded(usd, usd / 4)
    assert f"{value} \N{PLUS-MINUS SIGN} {half} ({span(usd / 2, usd * 2)})" in card
    made = drawn(page)["plans"][0]
    assert not any("Per M output" in one["label"] and "rate" not in one["label"] for one in made["metrics"])


def test_a_capacity_is_apart_from_the_rate_of_the_metrics(studies, tmp_path) -> None:
    """The objective follows from the capacity, while latencies are those of a run at a lower rate."""
    study = studies.study(plans=1)
    first, *others = study.plans[0].choices
    capacity = Estimate(1.2 * first.at.rate_rps, 0.2 * first.at.rate_rps)
    objective = capacity.scaled(3600 / first.price_per_hour_usd)
    choices = (dataclasses.replace(first, capacity_rps=capacity, objective=objective), *others)
    study = dataclasses.replace(study, plans=(dataclasses.replace(study.plans[0], choices=choices),))
    write_search_html(tmp_path / "study.html", study)
    page = (tmp_path / "study.html").read_text()
    card = re.search(r'<article class="card answer">.*?</article>', page, re.DOTALL)[0]
    assert f"at {first.at.rate_rps:.2f} requests/s, the lower end of the capacity" in card
    head, row = (
        re.search(rf"<{tag}>.*?</{tag[:5]}>", page[page.index('data-plan="0"') :])[0] for tag in ("thead", "tbody")
    )
    assert re.findall("<button[^>]*>([^<]*)", head)[5:8] == ["req/$", "req/s", "at req/s"]
    assert f">{first.at.rate_rps:.2f}<" in row
    made = drawn(page)["plans"][0]["choices"][0]
    assert made["capacity"] == pytest.approx([capacity.value, capacity.half_width], rel=1e-6)
    assert 3600 * made["capacity"][0] / made["price"] == pytest.approx(made["objective"][0], rel=1e-4)
    assert made["points"][made["at"]][0] == pytest.approx(first.at.rate_rps, rel=1e-4)


def test_hit_rates_are_in_the_answer_the_listing_and_the_figures(studies, page, tmp_path) -> None:
    write_search_html(tmp_path / "cached.html", studies.cached(studies.study(), hit_rate=0.8123))
    text = (tmp_path / "cached.html").read_text()
    card = re.search(r'<article class="card answer">.*?</article>', text, re.DOTALL)[0]
    assert "Prompt tokens cached" in card
    assert "81.2 %" in card
    assert '<button type="button">Prompt tokens cached %</button>' in text
    assert "hit_rate" in [one["name"] for one in drawn(text)["plans"][0]["metrics"]]
    assert "Prompt tokens" not in without_plotly(page)


def test_every_choice_is_listed_with_its_reason(studies, page) -> None:
    plan = studies.study().plans[0]
    box = page[page.index('data-plan="0"') : page.index('data-plan="1"')]
    ran = [c for c in plan.choices if c.status in (Status.RANKED, Status.SCOUTED)]
    body = ["", *re.findall(r"<tbody>(.*?)</tbody>", box)]
    assert body[1].count("<tr") == len(ran)
    assert body[2].count("<tr") == len(plan.excluded_groups)
    assert body[3].count("<tr") == len(plan.choices) - len(ran)
    assert "at most 900 req/$ by closed forms" in box
    assert "the weights need 61.2 GB" in box


def test_points_contain_rate_cost_feasibility_and_metrics(studies, page) -> None:
    plan, reported = studies.study().plans[0], drawn(page)["plans"][0]
    names = [metric["name"] for metric in reported["metrics"]]
    assert names[:3] == ["ttft.p90", "tbt.p99", "jct.mean"]
    ran = [choice for choice in plan.choices if choice.points]
    for choice, made in zip(ran, reported["choices"], strict=True):
        assert len(made.get("points", [])) == len(choice.points)
        for point, row in zip(choice.points, made.get("points", []), strict=True):
            cost = choice.price_per_hour_usd / (3600 * point.rate_rps) * 1000
            assert row[:3] == pytest.approx([point.rate_rps, cost, int(point.satisfied)], rel=1e-4)
            assert row[3 + names.index("ttft.p90")] == pytest.approx(point.value("ttft.p90"), rel=1e-4)
            assert row[3 + names.index("kv_utilization")] is None
        if choice.at:
            assert made["points"][made["at"]][0] == pytest.approx(choice.at.rate_rps, rel=1e-4)


def test_frontiers_and_shifts_point_at_their_choices(studies, page) -> None:
    plan, reported = studies.study().plans[0], drawn(page)["plans"][0]
    trade, row = plan.frontiers["tbt.p99"][0], reported["frontiers"]["tbt.p99"][0]
    assert row[:2] == pytest.approx([trade.latency_s, trade.cost_usd], rel=1e-4)
    assert reported["choices"][row[2]]["name"] == trade.choice
    shifts = reported["shifts"]["tbt.p99"]
    assert [s[0] for s in shifts] == sorted(s[0] for s in shifts)
    assert shifts[0][1:] == [None, -1]


def test_two_thousand_choices_stay_small(studies, tmp_path) -> None:
    one = studies.study(plans=1).plans[0]
    ran = [c for c in one.choices if c.points]
    out = [c for c in one.choices if not c.points]
    many = [dataclasses.replace(ran[i % len(ran)], key=str(i), name=f"choice {i}") for i in range(2000)]
    many += [dataclasses.replace(out[i % len(out)], key=f"out {i}", name=f"excluded {i}") for i in range(2000)]
    front = (dataclasses.replace(one.frontiers["tbt.p99"][0], choice="choice 1999"),)
    plan = dataclasses.replace(one, choices=tuple(many), frontiers={"tbt.p99": front}, shifts=())
    write_search_html(tmp_path / "many.html", Study("many", (plan,)))
    page = (tmp_path / "many.html").read_text()
    assert (tmp_path / "many.html").stat().st_size < 1.5e6
    reported = drawn(page)["plans"][0]
    assert [c["name"] for c in reported["choices"]] == [*(f"choice {i}" for i in range(SHOWN - 1)), "choice 1999"]
    assert reported["frontiers"]["tbt.p99"][0][2] == SHOWN - 1
    assert f"{2000 - SHOWN:,} more simulated configurations" in page
    assert sum(count for *_, count in reported["excluded"]["0,1"]) == 2000
    assert "<h2>Other limits" not in page


def test_limits_can_be_moved_where_none_is_met(studies, tmp_path) -> None:
    write_search_html(tmp_path / "hard.html", Study("x", (studies.plan("hard", (0.1, 0.01)),)))
    page = (tmp_path / "hard.html").read_text()
    assert "No tried configuration meets the limits." in page
    assert "Nearest misses" in page
    reported = drawn(page)["plans"][0]
    assert reported["best"] == -1
    assert reported["live"] == "rate"
    assert "Reasons" in page


def test_excluded_choices_are_counted_by_reason_and_settings(studies, page) -> None:
    plan, reported = studies.study().plans[0], drawn(page)["plans"][0]
    out = [c for c in plan.choices if not c.points]
    for pair, rows in reported["excluded"].items():
        assert sum(count for *_, count in rows) == len(out)
        a, b = map(int, pair.split(","))
        for value_a, value_b, reason, count in rows:
            axes = ((reported["axes"][a], value_a), (reported["axes"][b], value_b))
            values = {axis["key"]: axis["values"][i] for axis, i in axes}
            alike = [c for c in out if all(str(c.settings[key]) == value for key, value in values.items())]
            alike = [c for c in alike if c.exclusion.group == reported["reasons"][reason][0]]
            assert len(alike) == count
            assert reported["reasons"][reason][1] in {c.exclusion.reason for c in out}


def test_numbers_that_json_does_not_know() -> None:
    assert finite_number(math.nan) is None
    assert finite_number(math.inf) == INFINITE
    assert finite_number(0.123456789) == 0.12346


def test_all_at_once_costs_what_was_served(studies) -> None:
    choice = studies.study(plans=1).plans[0].choices[0]
    served = {"requests_per_s": Estimate(2.0)}
    point = dataclasses.replace(choice.points[0], rate_rps=math.inf, values=served)
    assert usd_per_thousand(choice, point) == pytest.approx(choice.price_per_hour_usd / 7.2)
    empty = dataclasses.replace(point, values={})
    assert math.isnan(usd_per_thousand(choice, empty))
    assert load_curve(dataclasses.replace(choice, at=point))[-1] is point


def test_a_missing_library_names_the_extra(studies, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "markupsafe", None)
    with pytest.raises(MissingExtraError, match=r"lengthwise\[report\]"):
        write_search_html(tmp_path / "a.html", studies.study())
    assert list(tmp_path.iterdir()) == []
