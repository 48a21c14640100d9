"""All pages in Chromium: accessibility on wide and narrow, light and dark screens, jobs, limits that move, playing."""

from __future__ import annotations

import json
from importlib.metadata import files
from urllib.parse import quote

import pytest
from browser import LIMIT_S, screen, until

pytestmark = pytest.mark.browser
ANSWERED = "return (document.body.dataset.answers || 0) >= 1 && !document.querySelector('#answer[aria-busy]')"
SEARCH = {"model": "llama-3.1-8b", "gpus": ["H100"], "tp": ["1", "2"], "rate": 8, "num_requests": 100, "seeds": 2}
APPLICATION = {"app": "apps/critique-tiny.toml", "nodes": "2xA100-80GB", "draws": 1, "true_draws": 2, "what_if": True}
SCHEDULERS = {"schedulers": ["FCFS", "SJF"], "workload": "chat-1m", "rate": 3, "num_requests": 200, "seeds": 2}


def opened(driver, planner, page, fields=None):
    driver.get(planner + "healthz")
    driver.execute_script("sessionStorage.clear()")  # the fields of an earlier test
    driver.get(planner + page + (f"#{quote(json.dumps(fields))}" if fields else ""))
    if page in ("search", "applications"):
        until(driver, "return document.body.dataset.ready")
        driver.find_element("id", "go").click()
    if page != "api":
        until(driver, ANSWERED, 6 * LIMIT_S)


def text(driver, name):
    return driver.execute_script("return document.getElementById(arguments[0]).textContent", name)


def check(driver):
    """No page is wider than its screen, and axe finds no violation, on a wide dark and a narrow light screen."""
    (script,) = (file for file in files("axe-playwright-python") or () if file.name == "axe.min.js")
    driver.execute_cdp_cmd("Runtime.evaluate", {"expression": script.read_text()})
    for width, scheme in ((1280, "dark"), (380, "light")):
        screen(driver, width, scheme)
        assert driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        found = driver.execute_async_script("const done = arguments[0]; axe.run().then(r => done(r.violations))")
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []
    assert [one for one in driver.get_log("browser") if one["level"] == "SEVERE"] == []
    screen(driver, 1280, "light")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["", "schedulers", "applications", "api"])
def test_a_page_fits_its_screen_and_axe_finds_no_violation(driver, planner, page):
    driver.get_log("browser")  # which empties it
    opened(driver, planner, page, {"schedulers": SCHEDULERS, "applications": APPLICATION}.get(page))
    check(driver)


@pytest.mark.slow
def test_a_search_is_filtered_by_limits_that_move_and_cancelled(driver, planner):
    driver.get_log("browser")
    opened(driver, planner, "search", SEARCH)
    check(driver)
    assert "cheapest within the limits" in text(driver, "best")
    assert text(driver, "within").startswith("Within these limits")
    driver.find_element("id", "bound-ttft.p90").send_keys("\ue011")  # home: 10 ms
    assert text(driver, "within") == "No simulated load meets these limits."
    driver.find_element("id", "bound-ttft.p90").send_keys("\ue010")  # end: 100 s
    assert text(driver, "within").startswith("Within these limits")
    last = driver.find_elements("css selector", "#chart circle[role=button]")[-1]
    name = last.get_attribute("aria-label").split(":")[0]
    driver.execute_script("arguments[0].focus()", last)
    last.send_keys("\ue007")  # enter
    assert name in text(driver, "compared")
    assert "--gpu H100" in text(driver, "command")
    driver.execute_script("document.body.dataset.answers = 0; document.getElementById('num_requests').value = 20000")
    driver.find_element("id", "go").click()
    driver.find_element("id", "stop").click()
    until(driver, ANSWERED)
    assert text(driver, "status") == "Cancelled."


@pytest.mark.slow
def test_the_minute_of_the_schedulers_is_moved_by_keyboard_and_plays(driver, planner):
    screen(driver, 1280, "light")
    opened(driver, planner, "schedulers", SCHEDULERS)
    assert len(driver.find_elements("css selector", "#lanes canvas")) == 2
    driver.find_element("id", "time").send_keys("\ue014")  # arrow right
    assert driver.find_element("css selector", "#lanes canvas").get_attribute("aria-label").startswith("FCFS at 0.1 s")
    driver.find_element("id", "play").click()
    until(driver, "return Number(document.getElementById('time').value) > 0.3")
    driver.find_element("id", "play").click()
    assert driver.find_element("id", "play").text == "Play"
    stopped = "return document.getElementById('time').value"
    before = driver.execute_script(stopped)
    driver.execute_script("frames = 0; (function next() { if (++frames < 30) requestAnimationFrame(next) })()")
    until(driver, "return frames === 30")  # in which a minute that plays moves
    assert driver.execute_script(stopped) == before
