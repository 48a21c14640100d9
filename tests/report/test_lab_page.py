"""What a laboratory's table, page and file say, and that the page draws."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace

import driving
import pytest
from driving import until, without_plotly
from rich.console import Console

from lengthwise.lab import answer, decision
from lengthwise.report import lab_table, write_lab_html, write_lab_json
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.lab import Cell, LabTable, LoadUnit

SIDES = [
    ("fcfs", "", 1.0, 1.0),
    ("oracle", "oracle", 0.5, 1.4),
    ("sjf", "</script><b>model</b>", 0.7, 1.2),
    ("sjf", "noisy", 0.9, 1.3),
    ("mlfq", "", 0.95, 1.02),
]


def cell(side: tuple[str, str, float, float], batch: int, load: float) -> Cell:
    policy, predictor, mean, tail = side
    idle = load < 0.5
    mean, tail = (1.0, 1.0) if idle else (mean, tail)
    values = {
        "gap_closed": Estimate(math.nan) if idle else Estimate((1 - mean) / 0.5, 0.02),
        "jct.mean": Estimate(10 * mean * load, 0.4),
        "jct.mean/fcfs": Estimate(mean, 0.01 if policy != "fcfs" else 0.0),
        "jct.p99/fcfs": Estimate(tail, 0.05 if policy != "fcfs" else 0.0),
        "jct.p99/oracle": Estimate(tail / 1.4, 0.05),
        "slowdown.mean": Estimate(3 * mean, 0.1),
        "wait.max": Estimate(20 * tail, 1.0),
        "found_full": Estimate(0.0 if idle else 0.8),
        "waiting_share": Estimate(0.0 if idle else 0.5),
    }
    return Cell(policy, predictor, batch, load, load * batch, values)


@pytest.fixture(scope="module")
def found() -> LabTable:
    places = [(batch, load) for batch in (2, 8) for load in (0.3, 0.9, 1.2)]
    cells = tuple(cell(side, *place) for place in places for side in SIDES)
    by_place = ([c for c in cells if (c.batch, c.load) == place] for place in places)
    decisions = tuple(decision(one, seeds=5) for one in by_place)
    reported = answer(decisions, LoadUnit.CAPACITY)
    return LabTable("a <b>lab</b>", {"model": "tiny"}, LoadUnit.CAPACITY, cells, decisions, reported, 5, 200)


def printed(found: LabTable, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(lab_table(found))
    return console.file.getvalue()


def test_the_terminal_shows_the_worth_at_every_load(found) -> None:
    text = printed(found)
    assert text.count("Not worth it: Everything fits the batch") == 2
    assert (
        text.count(
            "Worth it: sjf (</script><b>model</b>) cuts mean JCT by 30.0 ± 1.4 % (significant among 3 candidates), 60 %"
        )
        == 4
    )
    assert "90 % of capacity (7.20 requests/s), batch 8" in text
    assert re.search(r"sjf\s+│ noisy\s+│\s+20.0 ± 2.0", text)
    assert "preempted" not in text  # no request was


def test_hit_rates_are_shown_where_a_cache_has_some(found, tmp_path) -> None:
    write_lab_html(tmp_path / "plain.html", found)
    cells = [replace(c, values=c.values | {"hit_rate": Estimate(0.8123, 0.01)}) for c in found.cells]
    cached = replace(found, cells=tuple(cells))
    write_lab_html(tmp_path / "cached.html", cached)
    plain, page = ((tmp_path / f"{name}.html").read_text("utf-8") for name in ("plain", "cached"))
    assert page.count("Prompt tokens cached, %") == 6
    assert "81.2" in page
    assert "Prompt tokens" not in without_plotly(plain)
    assert "cached, %" in printed(cached)
    assert "cached" not in printed(found)


def test_the_terminal_output_is_not_wider_than_requested(found) -> None:
    assert max(len(line) for line in printed(found, 80).splitlines()) <= 80


def test_the_page_holds_every_number_and_escapes_names(found, tmp_path) -> None:
    write_lab_html(tmp_path / "lab.html", found)
    page = (tmp_path / "lab.html").read_text("utf-8")
    assert "&lt;/script&gt;&lt;b&gt;model&lt;/b&gt;" in page
    assert "<b>model</b>" not in page
    assert page.count("<details>") == 6
    assert page.index('<dl class="numbers">') < page.index("<figure")
    assert "https://" not in page.split("</style>")[1].split("<script")[0]
    write_lab_html(tmp_path / "again.html", found)
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "lab.html").read_bytes()


def test_the_file_holds_everything_under_stable_keys(found, tmp_path) -> None:
    write_lab_json(tmp_path / "lab.json", found)
    reported = json.loads((tmp_path / "lab.json").read_text("utf-8"))
    assert (reported["format"], reported["version"], reported["unit"]) == ("lengthwise.lab", 1, "capacity")
    assert len(reported["cells"]) == 30
    assert reported["cells"][7]["values"]["gap_closed"] == {"value": pytest.approx(0.6), "half_width": 0.02}
    assert reported["cells"][0]["values"]["gap_closed"]["value"] is None
    assert [v["is_improvement"] for v in reported["decisions"]] == [False, True, True] * 2


def test_an_empty_result_is_reported(found, tmp_path) -> None:
    empty = replace(found, cells=())
    for write in (lambda: lab_table(empty), lambda: write_lab_html(tmp_path / "x.html", empty)):
        with pytest.raises(InputError, match="at least one cell"):
            write()
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def page(found, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("lab") / "lab.html"
    write_lab_html(path, found)
    return path.as_uri()


def look(driver, page: str, width: int = 1280, scheme: str = "light") -> None:
    driving.look(driver, page, width, scheme, plots=2)


def choose(driver, element: str, value: int) -> None:
    driver.execute_script(
        "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
        "e.dispatchEvent(new Event('change', { bubbles: true }))",
        element,
        str(value),
    )


MARKS = "return document.querySelectorAll('#frontier path.point').length"


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_are_drawn_and_nothing_is_wider_than_the_screen(driver, page, width, scheme) -> None:
    driver.get_log("browser")
    look(driver, page, width, scheme)
    assert driver.execute_script(MARKS) == len(SIDES)
    assert driver.execute_script("return document.querySelectorAll('#heat tbody td').length") == 30
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.get_log("browser") == []


@pytest.mark.browser
def test_loads_metrics_and_legends_change_the_figures(driver, page) -> None:
    look(driver, page)
    choose(driver, "load", 0)
    until(driver, f"{MARKS} === 0")  # no queue, no gap
    assert "no gap to close" in driver.execute_script("return document.getElementById('frontier').textContent")
    choose(driver, "load", 1)
    until(driver, f"{MARKS} === {len(SIDES)}")
    driver.execute_script("document.querySelector('#policies button').click()")
    until(driver, f"{MARKS} === 3")  # both ends and MLFQ
    choose(driver, "across", 1)
    until(driver, "return document.querySelector('#curves .xtitle').textContent === 'batch size'")
    choose(driver, "heat-metric", 1)
    until(
        driver,
        "return document.querySelector('#heat thead td + td, #heat tr:nth-child(2) td').textContent === 'Mean JCT, s'",
    )
    assert driver.get_log("browser") == []
