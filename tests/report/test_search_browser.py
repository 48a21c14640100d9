"""The page of a search in headless Chromium: limits move, configurations compare, nothing overflows."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import driving
import pytest
from driving import prefer, until

from lengthwise.report import write_search_html
from lengthwise.report.search import usd_per_thousand
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Limit, Study

pytestmark = pytest.mark.browser

NOW = "return document.getElementById('now').textContent"
OFF = "return document.querySelectorAll('#scatter path.off').length"


@pytest.fixture(scope="module")
def pages(studies, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    hard = Study("hard", (studies.plan("hard", (0.1, 0.01)),))
    for name, study in (("two", studies.study()), ("hard", hard)):
        write_search_html(folder / f"{name}.html", study)
    return {name: (folder / f"{name}.html").as_uri() for name in ("two", "hard")}


def look(driver, page: str, width: int = 1280, scheme: str = "light") -> None:
    driving.look(driver, page, width, scheme, plots=4)
    until(driver, "return document.querySelector('#scatter .slo span')?.textContent")


def choose(driver, element: str, value: str) -> None:
    driver.execute_script(
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event('change', { bubbles: true }))",
        element,
        value,
    )


def texts(driver, selector: str) -> list[str]:
    return driver.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector
    )


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_are_drawn_and_nothing_is_wider_than_the_screen(driver, pages, studies, width, scheme) -> None:
    driver.get_log("browser")
    look(driver, pages["two"], width, scheme)
    plan = studies.study().plans[0]
    marks = driver.execute_script("return document.querySelectorAll('#scatter path.point').length")
    assert marks == sum(len(c.points) for c in plan.choices)
    boxes = driver.execute_script(
        "return [...document.querySelectorAll('.plot')].map(p => p.getBoundingClientRect().toJSON())"
    )
    assert len(boxes) == 4
    assert all(box["right"] <= width and box["width"] > 0.7 * min(width, 500) for box in boxes)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    small = driver.execute_script("""
      return [...document.querySelectorAll('main *')].filter(e => !e.childElementCount && e.textContent.trim()
        && parseFloat(getComputedStyle(e).fontSize) < 11).map(e => e.textContent)""")
    assert small == []
    assert driver.get_log("browser") == []


def test_a_few_bad_configurations_lie_outside_the_axes_with_a_note(driver, studies, tmp_path) -> None:
    plan = studies.study(plans=1).plans[0]
    worst = next(c for c in reversed(plan.choices) if c.points)
    slow = replace(worst.points[-1], satisfied=False)
    slow = replace(slow, values=slow.values | {"ttft.p90": Estimate(900.0)})
    bad = replace(worst, price_per_hour_usd=100 * worst.price_per_hour_usd, points=(*worst.points[:-1], slow), at=None)
    choices = tuple(bad if c is worst else c for c in plan.choices)
    write_search_html(tmp_path / "page.html", Study("bad", (replace(plan, choices=choices),)))
    look(driver, (tmp_path / "page.html").as_uri())
    note = re.fullmatch(r"(\d+) marks lie outside, up to 900 s and \$ [\d,.]+", texts(driver, "#colours li")[-1])
    assert int(note[1]) >= len(bad.points)
    ends = "const { xaxis, yaxis } = document.getElementById('scatter')._fullLayout; return [xaxis, yaxis].map("
    x_end, y_end = driver.execute_script(f"{ends}axis => axis.p2d(axis === xaxis ? axis._length : 0))")
    assert 2 < x_end < 100
    highest = max(trade.cost_usd for trade in plan.frontiers["ttft.p90"])
    assert highest < y_end < 2.5 * highest < usd_per_thousand(bad, slow)
    choose(driver, "colour", "one")
    choose(driver, "one", str([c.name for c in choices if c.points].index(bad.name)))
    until(driver, "return !document.querySelector('#colours .outside')")


def test_figures_follow_the_scheme(driver, pages) -> None:
    look(driver, pages["two"])
    ink = "return getComputedStyle(document.querySelector('#scatter .xtick text')).fill"
    light = driver.execute_script(ink)
    prefer(driver, "dark")
    until(driver, f"{ink} !== {json.dumps(light)}")


def test_dragging_a_limit_greys_points_and_finds_another_best(driver, pages) -> None:
    from selenium.webdriver import ActionChains

    look(driver, pages["two"])
    before, off = driver.execute_script(NOW), driver.execute_script(OFF)
    assert "The requested limits." in before
    assert "at the capacity of" in before
    line = driver.find_element("css selector", "#scatter .slo")
    driver.execute_script("arguments[0].scrollIntoView({ block: 'center' })", line)
    where = line.rect["x"]
    ActionChains(driver).drag_and_drop_by_offset(line, -260, 0).perform()
    until(driver, f"return (() => {{ {OFF} }})() > {off}")
    assert line.rect["x"] == pytest.approx(where - 260, abs=3)
    after = driver.execute_script(NOW)
    assert after != before
    assert "% from the answer" in after
    assert "at the capacity of" not in after
    value, price, rate = (
        float(re.search(pattern, after)[1].replace(",", ""))
        for pattern in (r"([\d,.]+) req/\$", r"\$ ([\d.]+) per hour", r"at ([\d.]+) requests/s")
    )
    assert value == pytest.approx(3600 * rate / price, rel=0.01)
    assert float(driver.execute_script("return document.getElementById('limit-0').value")) < 2
    driver.execute_script("document.getElementById('reset').click()")
    until(driver, f"return (() => {{ {NOW} }})() === {json.dumps(before)}")
    assert driver.execute_script(OFF) == off
    assert driver.get_log("browser") == []


def test_limits_move_by_keyboard_too(driver, pages) -> None:
    from selenium.webdriver.common.keys import Keys

    look(driver, pages["two"], 400)
    before, off = driver.execute_script(NOW), driver.execute_script(OFF)
    slider = driver.find_element("css selector", ".limit input[type=range]")
    slider.send_keys(*[Keys.ARROW_LEFT] * 70)
    until(driver, f"return (() => {{ {OFF} }})() > {off}")
    assert driver.execute_script(NOW) != before
    field = driver.find_element("id", "limit-0")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("0.0001")
    until(driver, f"return (() => {{ {NOW} }})().includes('No simulated load meets')")
    assert driver.execute_script("return document.querySelector('#scatter .ring').hidden")


@pytest.mark.parametrize("factors", [(0.5, 1), (1, 1), (2, 1), (1, 0.75), (4, 4), (0.1, 1), (0.01, 1)])
@pytest.mark.parametrize("number", [0, 1])
def test_the_best_under_other_limits_is_that_of_the_measured_points(driver, pages, studies, number, factors) -> None:
    plan = studies.study().plans[number]
    moved = [Limit(li.metric, float(f"{li.bound * f:.3g}")) for li, f in zip(plan.limits, factors, strict=True)]
    _, value = studies.best_under([c for c in plan.choices if c.points], moved)
    if driver.current_url != pages["two"]:
        look(driver, pages["two"])
    choose(driver, "plan", str(number))
    bounds = json.dumps([limit.bound for limit in moved])
    found = driver.execute_script(f"{bounds}.forEach((b, i) => study.setBound(i, b)); return study.best()")
    assert (found["value"] if found else math.nan) == pytest.approx(value, rel=1e-3, nan_ok=True)


def test_looser_limits_give_an_answer(driver, pages, studies) -> None:
    look(driver, pages["hard"])
    assert "No simulated load meets" in driver.execute_script(NOW)
    plan = studies.plan("hard", (0.1, 0.01))
    _, value = studies.best_under([c for c in plan.choices if c.points], [Limit("ttft.p90", 2.0)])
    found = driver.execute_script("study.setBound(0, 2); study.setBound(1, 50); return study.best()")
    assert found["value"] == pytest.approx(value, rel=1e-3)
    assert driver.get_log("browser") == []


def test_tabs_and_colours_change_the_scatter(driver, pages) -> None:
    look(driver, pages["two"])
    assert texts(driver, "#metrics button") == ["TTFT p90", "TBT p99", "JCT mean"]
    driver.execute_script("document.querySelectorAll('#metrics button')[2].click()")
    until(driver, "return document.querySelector('#scatter .xtitle').textContent === 'JCT mean, seconds'")
    until(driver, "return !document.querySelector('#scatter .slo')")
    choose(driver, "colour", "2")
    assert texts(driver, "#colours li")[:3] == ["Rank:", "fcfs", "srtf"]
    choose(driver, "colour", "one")
    assert not driver.execute_script("return document.getElementById('one-label').hidden")
    fills = "return new Set([...document.querySelectorAll('#scatter path.point')].map(p => p.style.fill)).size"
    until(driver, f"{fills} === 2")


def test_two_configurations_compare(driver, pages, studies) -> None:
    look(driver, pages["two"])
    plan = studies.study().plans[0]
    choose(driver, "second", "4")
    heads = texts(driver, "#compared thead th")
    assert heads == [plan.choices[0].name, plan.choices[4].name, "change"]
    row = next(
        r
        for r in driver.execute_script(
            "return [...document.querySelectorAll('#compared tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
        )
        if r[0].startswith("TTFT p90")
    )
    a, b = (c.at.value("ttft.p90") for c in (plan.choices[0], plan.choices[4]))
    change = 100 * (b / a - 1)
    assert float(row[1].split()[0]) == pytest.approx(a, abs=0.001)
    assert float(row[3].replace("\N{MINUS SIGN}", "-").split()[0]) == pytest.approx(change, rel=0.06)
    choose(driver, "curve", "jct.mean")
    until(driver, "return document.querySelector('#curves .ytitle').textContent.startsWith('JCT mean')")


def test_the_heat_map_takes_any_two_axes_and_explains_empty_cells(driver, pages, studies) -> None:
    look(driver, pages["two"])
    plan = studies.study().plans[0]
    choose(driver, "across", "2")
    assert texts(driver, "#heat thead th") == ["fcfs", "srtf"]
    choose(driver, "down", "1")
    assert texts(driver, "#heat tbody th") == ["1", "2", "4", "8"]
    cells = texts(driver, "#heat tbody td")
    top = max(
        c.objective.value
        for c in plan.choices
        if c.settings["deployment.tp"] == 2 and c.settings["scheduler.rank"] == "srtf" and c.points
    )
    assert cells[3] == f"{top:,.0f}"
    assert cells[0] == "\N{EN DASH}"
    driver.execute_script("document.querySelector('#heat tbody td').focus()")
    missing = "weights do not fit (the weights need 61.2 GB"
    until(driver, f"return document.querySelector('#cell').textContent.includes('{missing}')")
    choose(driver, "across", "1")  # the other axis makes room
    assert driver.execute_script("return document.getElementById('down').value") == "2"


def test_the_list_sorts_and_filters(driver, pages) -> None:
    look(driver, pages["two"])
    box = "[data-plan='0'] table.listing"
    driver.execute_script(f'document.querySelectorAll("{box} th button")[3].click()')
    prices = [float(text) for text in texts(driver, f"{box} tbody td:nth-child(4)")]
    assert prices == sorted(prices)
    driver.execute_script(f'document.querySelectorAll("{box} th button")[3].click()')
    assert texts(driver, f"{box} [aria-sort=descending]") == ["$/h"]
    assert [float(t) for t in texts(driver, f"{box} tbody td:nth-child(4)")] == prices[::-1]
    driver.execute_script(
        "const i = document.querySelector(\"[data-plan='0'] input\"); i.value = 'A100 SRTF';"
        "i.dispatchEvent(new Event('input'))"
    )
    shown = texts(driver, f"{box} tbody tr:not([hidden]) th")
    assert len(shown) == 3
    assert all("a100" in name and "srtf" in name for name in shown)
    assert "3 configurations" in texts(driver, "[data-plan='0'] output")[0]


def test_another_question_changes_every_part(driver, pages, studies) -> None:
    look(driver, pages["two"])
    choose(driver, "plan", "1")
    best = studies.study().plans[1].best
    assert best.name in driver.execute_script(NOW)
    assert driver.execute_script("return document.querySelector('[data-plan=\"0\"]').hidden")
    until(driver, "return document.querySelector('#scatter .slo span').textContent.includes('6.00 s')")
    assert driver.get_log("browser") == []
