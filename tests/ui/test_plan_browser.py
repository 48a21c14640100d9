"""The planner in Chromium: moves of the controls, errors, links, narrow and dark screens, accessibility."""

from __future__ import annotations

import pytest
from browser import screen, until

pytestmark = pytest.mark.browser
SETTLED = """return (document.body.dataset.answers || 0) >= (document.getElementById('error').hidden ? 2 : 1)
&& !document.querySelector('#answer[aria-busy]')"""


def opened(driver, planner, link=""):
    driver.get(planner + "healthz")
    driver.execute_script("sessionStorage.clear()")  # the fields of an earlier test
    driver.get(planner + link)
    until(driver, SETTLED)


def card(driver, label):
    cards = driver.find_elements("css selector", "#cards div")
    return next(one.text for one in cards if one.text.startswith(f"{label}\n"))


def move(driver, name, value):
    """Set a control as a user would, and wait for the complete answer."""
    driver.execute_script(
        "document.body.dataset.answers = 0; const i = document.getElementById(arguments[0]); i.value = arguments[1];"
        "i.dispatchEvent(new Event('input', {bubbles: true}))",
        name,
        value,
    )
    until(driver, SETTLED)


def test_a_move_gives_new_numbers_with_intervals_and_the_command(driver, planner):
    screen(driver, 1280, "light")
    opened(driver, planner)
    before = card(driver, "TTFT p90")
    assert "±" in before
    move(driver, "rate", 1.5)
    assert card(driver, "TTFT p90") != before
    assert "--rate 32" in driver.execute_script("return document.getElementById('command').textContent")
    assert len(driver.find_elements("css selector", "#charts svg .line")) == 4
    assert int(driver.execute_script("return document.body.dataset.firstMs")) > 0


@pytest.mark.slow
def test_a_deployment_that_does_not_fit_shows_its_error_and_recovers(driver, planner):
    opened(driver, planner)
    move(driver, "tp", "1")
    move(driver, "model", "llama-3.1-405b")
    error = driver.find_element("id", "error")
    assert error.is_displayed()
    assert "does not fit" in error.text
    move(driver, "tp", "16")
    assert not error.is_displayed()


@pytest.mark.slow
def test_a_link_restores_the_settings(driver, planner):
    opened(driver, planner)
    move(driver, "workload", "own lengths")
    move(driver, "prompt", 3)
    move(driver, "gpu", "H200")
    link, shown = driver.current_url, card(driver, "TTFT p90")
    opened(driver, planner, "#" + link.partition("#")[2])
    assert driver.execute_script("return document.getElementById('gpu').value") == "H200"
    assert driver.find_element("id", "prompt").is_displayed()
    assert card(driver, "TTFT p90") == shown


def test_the_keyboard_moves_a_slider(driver, planner):
    opened(driver, planner)
    driver.execute_script("document.body.dataset.answers = 0")
    driver.find_element("id", "replicas").send_keys("\ue014")  # arrow right
    until(driver, SETTLED)
    assert "2 x H100" in driver.find_element("id", "deployment").text


@pytest.mark.slow
def test_a_trace_is_uploaded_and_its_columns_are_mapped(driver, planner, tmp_path):
    screen(driver, 1280, "light")
    opened(driver, planner)
    rows = "".join(f"{2 * at},{50 + at},{5 + at % 3}\n" for at in range(40))
    (tmp_path / "own.csv").write_text(f"second,in_toks,out_toks\n{rows}")
    driver.find_element("id", "trace-upload").send_keys(str(tmp_path / "own.csv"))
    until(driver, "return !document.getElementById('mapping').hidden")
    driver.execute_script("document.body.dataset.answers = 0; document.getElementById('arrival').value = 'second'")
    driver.find_element("id", "map").click()
    until(driver, SETTLED)
    assert "40 requests, 0.5 requests/s" in driver.find_element("id", "trace-about").text
    command = driver.execute_script("return document.getElementById('command').textContent")
    assert "--workload own.csv --column prompt_tokens=in_toks" in command
    assert "workload.time_scale=1" in command  # its own arrivals, unless the box is cleared
    driver.execute_script("document.body.dataset.answers = 0")
    driver.find_element("id", "replay").click()
    until(driver, SETTLED)
    command = driver.execute_script("return document.getElementById('command').textContent")
    assert "--workload own.csv --rate 0.5 --column prompt_tokens=in_toks" in command
    driver.execute_script("document.body.dataset.answers = 0")
    driver.find_element("id", "trace-clear").click()
    until(driver, SETTLED)
    assert "own.csv" not in driver.execute_script("return document.getElementById('command').textContent")
