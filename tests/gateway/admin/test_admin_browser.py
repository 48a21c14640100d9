"""The admin page in headless Chromium: live, drawn, silent, no wider than the screen, in either scheme."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import pairwise

import pytest
from admin_worlds import EVIL, NAMES, Served, World
from browser import screen, until

from lengthwise.gateway.config import AdminUser

pytestmark = pytest.mark.browser
FOUND = {
    "decision": "switch on",
    "description": "mode = srtf changes mean JCT by -19.0 %",
    "requests": 600,
    "observed_jct_s": 2.0,
    "fcfs_jct_s": 2.4,
    "fcfs_p99_jct_s": 10.5,
    "orders": [
        {
            "name": name,
            "mean_jct_s": 1.9,
            "p99_jct_s": 11.0,
            "fcfs_s": None,
            "mean": {"value": -0.19, "low": -0.24, "high": -0.15},
            "p99": {"value": 0.04, "low": -0.2, "high": 0.2},
        }
        for name in ("srtf", "isrtf", "oracle")
    ],
    "times": [
        {"name": name, "jct_s": [1.9, 0.8, 4.5, 11.0], "queue_s": [0.7, 0.0, 2.5, 8.0]}
        for name in ("fcfs", "srtf", "isrtf", "oracle")
    ],
}


@pytest.fixture(scope="module")
def worlds():
    made = {
        "idle": World(engines=2),
        "busy": World(found=FOUND).live(90, 4.5).troubled(),
        "routed": World(router="uncached_load").live(60, 4.0),
        "down": World(down=NAMES, mode="observe").live(3, 2.0),
    }
    served = {name: Served(world.app) for name, world in made.items()}
    for one in served.values():
        one.__enter__()
    yield made, {name: one.url for name, one in served.items()}
    for one in served.values():
        one.__exit__()


def look(driver, url: str, width: int, scheme: str) -> None:
    screen(driver, width, scheme)
    driver.get(url)
    until(driver, "return Number(document.body.dataset.drawn || 0) >= 1")


def text(driver, selector: str) -> str:
    return driver.execute_script("return document.querySelector(arguments[0]).textContent", selector)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["idle", "busy", "down", "routed"])
def test_it_is_drawn_and_nothing_is_wider_than_the_screen(driver, worlds, name, width, scheme) -> None:
    driver.get_log("browser")
    look(driver, worlds[1][name], width, scheme)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    small = driver.execute_script("""
      return [...document.querySelectorAll('main *')].filter(e => !e.childElementCount && e.textContent.trim()
        && parseFloat(getComputedStyle(e).fontSize) < 11).map(e => e.textContent)""")
    assert small == []
    ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (int(ground.split("(")[1].split(",")[0]) > 200) is (scheme == "light")
    assert driver.get_log("browser") == []


def test_a_busy_gateway_is_shown_as_it_is(driver, worlds) -> None:
    look(driver, worlds[1]["busy"], 1280, "light")
    waiting = worlds[0]["busy"].scheduler.statistics(worlds[0]["busy"].now_s).waiting
    assert text(driver, "#headline") == f"{waiting} requests wait"
    assert driver.execute_script("return document.querySelectorAll('#next .bar').length") == min(waiting, 48)
    assert driver.execute_script("return document.querySelectorAll('#scatter .dot').length") > 50
    assert driver.execute_script("return document.querySelectorAll('#requests .line').length") == 2
    assert driver.execute_script("return document.querySelectorAll('#engines li').length") == 3
    assert not driver.find_element("id", "observed-section").is_displayed(), "another order is in use"
    policies = driver.execute_script(
        "return [...document.querySelectorAll('#policies tbody tr')].map(r => [r.className, r.cells[0].textContent])"
    )
    assert [kind for kind, _ in policies] == ["served", *["simulated"] * 4]
    assert policies[0][1].startswith("isrtf")
    assert all("simulated on this traffic" in name for kind, name in policies if kind == "simulated")
    served = driver.execute_script(
        "return [...document.querySelectorAll('#policies tr.served td')].map(c => c.querySelectorAll('.ends').length)"
    )
    assert served == [1, 1, 1, 0, 1, 1, 1, 0, 0, 0]  # too few are beyond the 99 %; the changes are simulated
    assert EVIL in text(driver, "#errors")
    assert driver.execute_script("return document.querySelectorAll('#errors img').length") == 0


def test_the_change_against_fcfs_is_shown_with_its_interval_and_its_count(driver, worlds) -> None:
    look(driver, worlds[1]["busy"], 1280, "light")
    change = worlds[0]["busy"].app.state.now()["change"]
    tile = driver.execute_script(
        "const e = [...document.querySelectorAll('#tiles li')].find(e => e.textContent.startsWith('JCT against FCFS'));"
        "return [e.querySelector('.value').textContent, e.querySelector('.value').className,"
        " e.querySelector('.hint').textContent]"
    )
    assert tile[0] == f"\N{MINUS SIGN}{abs(100 * change['value']):.1f} %"
    assert tile[1].split()[-1] == ("good" if change["high"] < 0 else "value")
    assert re.search(r"^\S+ % to \S+ %; simulated on (\d+) requests$", tile[2])[1] == str(change["requests"])


def test_axes_of_requests_and_tokens_have_integer_ticks(driver, worlds) -> None:
    look(driver, worlds[1]["busy"], 1280, "light")
    found = driver.execute_script(
        "return ['requests', 'tokens', 'next'].map(id => [...document.querySelectorAll('#' + id + ' text')]"
        ".filter(e => e.getAttribute('text-anchor') === 'end' && e.textContent !== 'now').map(e => e.textContent))"
    )
    for ticks in found:
        values = [float(tick.removesuffix("k")) * (1000 if tick.endswith("k") else 1) for tick in ticks]
        steps = {round(after - before, 6) for before, after in pairwise(values)}
        assert values[0] == 0
        assert len(steps) == 1
        assert str(int(steps.pop()))[0] in "125"
        assert all(value == int(value) for value in values)
    drawn = "const s = document.createElementNS('http://www.w3.org/2000/svg', 'svg'); document.body.append(s);"
    ask = (
        "return [...s.querySelectorAll('text')].filter(e => e.getAttribute('text-anchor') === 'end')"
        ".map(e => e.textContent)"
    )
    for most, ticks in (
        (1, "0 1"),
        (2.4, "0 1 2 3"),
        (10, "0 5 10"),
        (250, "0 100 200 300"),
        (188, "0 50 100 150 200"),
    ):
        script = f"{drawn} charts.lines(s, [[0, {most}]], [[1, 's0']], 0.001); {ask}"
        assert driver.execute_script(script) == [*ticks.split(), "now"]


def test_the_router_and_what_it_found_cached_are_shown(driver, worlds) -> None:
    look(driver, worlds[1]["routed"], 1280, "light")
    world = worlds[0]["routed"]
    counts = [worker.dispatched for worker in world.scheduler.statistics(world.now_s).workers]
    requests, prompts, cached = (
        sum(getattr(one, name) for one in counts) for name in ("requests", "prompt_tokens", "cached_tokens")
    )
    assert requests > 100
    assert 0 < cached < prompts
    assert text(driver, "#router") == (
        f"Router uncached_load: {requests} requests sent since the start; {100 * cached / prompts:.0f} % of their "
        "prompt tokens probably cached at the engine."
    )
    shown = driver.execute_script("return [...document.querySelectorAll('#engines .sent')].map(e => e.textContent)")
    assert shown == [
        f"{100 * one.requests / requests:.0f} % of requests ({one.requests}) · "
        f"{100 * one.cached_tokens / one.prompt_tokens:.0f} % of prompt tokens probably cached"
        for one in counts
    ]
    look(driver, worlds[1]["idle"], 1280, "light")
    assert text(driver, "#router") == "Router earliest_finish."


def test_engines_that_are_down_are_shown_immediately(driver, worlds) -> None:
    look(driver, worlds[1]["down"], 1280, "dark")
    assert text(driver, "#headline") == "No engine is up"
    assert text(driver, "#engines .cause") == "down: no connection"
    assert driver.execute_script("return document.querySelectorAll('#engines .badge.down').length") == 3


def test_it_stays_live_and_fetches_only_its_own(driver, worlds) -> None:
    driver.get_log("performance")
    world, url = worlds[0]["idle"], worlds[1]["idle"]
    look(driver, url, 1280, "light")
    assert text(driver, "#headline") == "Idle"
    world.live(20, 9.0)
    until(driver, "return document.querySelector('#headline').textContent.includes('wait')")
    assert text(driver, "#live") == "live"
    sent = [json.loads(row["message"])["message"] for row in driver.get_log("performance")]
    urls = {m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"}
    assert {one for one in urls if not one.startswith("data:")} == {f"{url}/", f"{url}/events", f"{url}/session"}


def test_a_browser_logs_in_and_out(driver) -> None:
    world = World()
    world.app.access.configure((AdminUser("olga", hashlib.sha256(b"right").hexdigest(), "operator"),), False)
    with Served(world.app) as served:
        driver.get(served.url)
        for token, shown in (
            ("wrong", "return document.querySelector('[role=alert]').textContent.includes('must be that of a user')"),
            ("right", "return document.body.textContent.includes('olga (operator)')"),
        ):
            driver.find_element("css selector", "#token").send_keys(token)
            driver.find_element("css selector", "button").click()
            until(driver, shown)
        driver.find_element("css selector", "form button").click()
        until(driver, "return location.pathname === '/login'")
        driver.get(served.url)
        assert driver.current_url == f"{served.url}/login"
