"""The page in headless Chromium: drawn, silent, nothing fetched, no wider than the screen."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import driving
import pytest
from driving import prefer, until

from lengthwise.report import write_html

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(results, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(path, results)
    return path.as_uri()


def look(driver, page: str, width: int, scheme: str) -> None:
    driving.look(driver, page, width, scheme, plots=9)


def luminance(colour: str) -> float:
    red, green, blue = (int(x) / 255 for x in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_are_drawn_and_nothing_is_wider_than_the_screen(driver, page, width, scheme) -> None:
    look(driver, page, width, scheme)
    drawn = driver.execute_script("""
      return [...document.querySelectorAll('.plot')].map(p => ({
        id: p.id, box: p.getBoundingClientRect().toJSON(),
        lines: [...p.querySelectorAll('.scatterlayer path.js-line')].map(l => l.getAttribute('d').length),
        bars: p.querySelectorAll('.barlayer .point path').length}))""")
    assert len(drawn) == 9
    for plot in drawn:
        assert plot["box"]["width"] > 0.7 * min(width, 500)
        assert plot["box"]["right"] <= width
        if plot["id"] == "shares":
            assert plot["bars"] >= 10
        else:
            assert len(plot["lines"]) == 2
            assert min(plot["lines"]) > 15
    root = "document.documentElement"
    assert driver.execute_script(f"return {root}.scrollWidth") <= width
    small = driver.execute_script("""
      return [...document.querySelectorAll('main *')].filter(e => !e.childElementCount && e.textContent.trim()
        && parseFloat(getComputedStyle(e).fontSize) < 11).map(e => e.textContent)""")
    assert small == []
    assert driver.get_log("browser") == []


def test_nothing_is_fetched(driver, page) -> None:
    driver.get_log("performance")
    look(driver, page, 1280, "light")
    sent = [json.loads(row["message"])["message"] for row in driver.get_log("performance")]
    urls = {m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"}
    assert page in urls
    assert all(url == page or url.startswith("data:") for url in urls)


def test_text_stands_out_and_figures_follow_the_scheme(driver, page) -> None:
    ink = "return getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    body = "return getComputedStyle(document.body)"
    look(driver, page, 1280, "light")
    light = driver.execute_script(ink)
    assert luminance(driver.execute_script(f"{body}.backgroundColor")) > 0.9
    assert luminance(driver.execute_script(f"{body}.color")) < 0.2
    assert luminance(light) < 0.5
    prefer(driver, "dark")
    until(driver, f"{ink} !== {json.dumps(light)}")
    assert luminance(driver.execute_script(ink)) > 0.5
    assert luminance(driver.execute_script(f"{body}.backgroundColor")) < 0.1


def test_axes_of_counts_have_plain_numbers(driver, results, tmp_path) -> None:
    """A queue that is mostly empty and an output of thousands of tokens a second need no prefixes of units."""
    records = results[1].records
    series = replace(
        records.series, waiting_s=records.series.waiting_s / 100, output_tokens=records.series.output_tokens * 100
    )
    path = tmp_path / "report.html"
    write_html(path, [replace(results[1], records=replace(records, series=series))])
    look(driver, path.as_uri(), 1280, "light")
    ticks = "return [...document.querySelectorAll('[id^=time-] .ytick text')].map(t => t.textContent)"
    found = driver.execute_script(ticks)
    assert {text[:2] for text in found} >= {"0.", "5,"}
    assert [text for text in found if not re.fullmatch(r"[\d,.]+%?", text)] == []


def test_the_tail_button_turns_the_curves_over(driver, page) -> None:
    look(driver, page, 1280, "light")
    ticks = "return [...document.querySelectorAll('#cdf-ttft .ytick text')].map(t => t.textContent)"
    assert "75%" in driver.execute_script(ticks)
    driver.execute_script("document.getElementById('tail').click()")
    until(driver, "return document.querySelector('#tail').getAttribute('aria-pressed') === 'true'")
    until(driver, f"return (() => {{ {ticks} }})().includes('0.1%')")
    assert driver.get_log("browser") == []


def test_names_reach_the_reader_as_they_are(driver, page) -> None:
    look(driver, page, 1280, "light")
    assert driver.execute_script("return document.querySelector('.verdicts h3 span').textContent") == "roomy <b>&</b>"
    labels = "return [...document.querySelectorAll('#shares .annotation-text')].map(t => t.textContent)"
    assert driver.execute_script(labels)[0] == "roomy <b>&</b>"
    driver.execute_script("document.querySelector('details').open = true")
    assert "</script><script>alert(1)" in driver.execute_script("return document.querySelector('pre').textContent")
