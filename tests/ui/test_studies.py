"""The Studies page: differences of scenarios, errors of two answers, and what a browser stores and imports."""

from __future__ import annotations

import json
import tomllib

import numpy as np
import pytest
from browser import until
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.cli import main
from lengthwise.schema.errors import InputError
from lengthwise.ui import plan, studies
from lengthwise.ui.work import FIRST, Pool, Task

FIRST_TEXT = '[workload]\npreset = "chat-1m"\nrequest_rate = 3\n[[variants]]\nname = "SJF"\nscheduler.policy = "sjf"\n'
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def task():
    return Task(Pool(threads=1).session(None), "", FIRST, lambda _: None)


def test_scenarios_differ_in_the_keys_that_were_changed(task):
    second = FIRST_TEXT.replace("= 3", "= 5").replace('"sjf"', '"srtf"') + "[run]\nseeds = 2\n"
    found = studies.diff({"first": FIRST_TEXT, "second": second}, task)
    assert found["rows"] == [
        ["run.seeds", "\N{EN DASH}", "2"],
        ["variants[SJF].scheduler.policy", "sjf", "srtf"],
        ["workload.request_rate", "3", "5"],
    ]
    assert found["same"] == 2
    assert studies.diff({"first": second, "second": second}, task)["rows"] == []


KEYS = st.sampled_from(["a", "b", "name", "c.d"])
VALUES = st.integers(0, 2) | st.booleans() | st.sampled_from(["", "1", "x"])
TABLES = st.recursive(
    st.dictionaries(KEYS, VALUES, max_size=3),
    lambda inner: st.dictionaries(KEYS, VALUES | inner | st.lists(inner, max_size=2), max_size=3),
    max_leaves=6,
)


@given(TABLES, TABLES)
def test_differences_are_none_only_of_equal_tables_and_the_other_way_round_the_same(a, b):
    """Law: the order of the sides changes only the order of the values, and a table does not differ from itself."""
    one, other = studies.differences(a, b), studies.differences(b, a)
    assert [[key, y, x] for key, x, y in one["rows"]] == other["rows"]
    assert one["same"] == other["same"]
    assert studies.differences(a, a)["rows"] == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"first": "[", "second": ""}, "the first scenario is no TOML"),
        ({"first": "a = " + "[" * 20_000, "second": ""}, "the first scenario is no TOML"),
        ({"first": "", "second": ".".join("a" * 2000) + " = 1"}, "nested too deeply"),
        ({"first": 1, "second": ""}, "must be the text"),
        ({"first": "", "second": "#" * 28_001}, "at most 28,000 characters"),
        ({"file": "/etc/passwd"}, "no field named"),
    ],
)
def test_what_is_no_scenario_is_refused(fields, message, task):
    with pytest.raises(InputError, match=message):
        studies.diff(fields, task)


def test_errors_cover_the_ratio_of_two_noisy_values_as_often_as_both_intervals():
    """Of values with normal noise and their 95 % half-widths."""
    rng, sd = np.random.default_rng(1), (0.3, 0.2)
    draws = np.array([5.0, 4.0]) + rng.normal(size=(2000, 2)) * sd
    covered = 0
    for a, b in draws.tolist():
        error, half = studies.relative_error((a, 1.96 * sd[0]), (b, 1.96 * sd[1]))
        covered += abs(error - 0.25) <= half
    assert 0.93 < covered / len(draws) < 0.97


def test_two_answers_of_the_command_line_are_compared_by_metric(task, tmp_path, capsys):
    files = {}
    for side, rate in (("first", "4"), ("second", "2")):
        short = ["--model", "llama-3.1-8b", "--gpu", "H100", "--rate", rate, "--workload", "100/20", "--quiet"]
        small = ["--set", "workload.num_requests=60", "--set", "run.seeds=2", "--set", "run.model_draws=0"]
        assert main(["simulate", *short, *small, "--json", str(tmp_path / side)]) == 0
        files[f"{side}_file"] = task.session.store("answer.json", (tmp_path / side).read_bytes())
    capsys.readouterr()
    found = studies.compare(files, task)
    json.dumps(found, allow_nan=False)
    rows = {row[0]: row for row in found["rows"]}
    rates = [
        json.loads((tmp_path / side).read_text())["results"][0]["summary"]["rates"] for side in ("first", "second")
    ]
    a, b = (one["requests_per_s"]["value"] for one in rates)
    assert rows["Requests/s"][3] == f"{100 * (a / b - 1):+.1f} %"
    assert rows["TTFT p90"][1].endswith("ms")
    assert [row[0] for row in found["settings"]["rows"]] == ["description", "workload.request_rate"]
    with pytest.raises(InputError, match="no result named"):
        studies.compare(files | {"first": "x"}, task)


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.dictionaries(st.sampled_from(["value", "half_width", "ttft_s", "mean"]), inner),
        max_leaves=8,
    )
)
def test_whatever_a_file_has_is_compared_or_refused(task, summary):
    document = {"format": "lengthwise.results", "results": [{"name": EVIL, "summary": summary}]}
    identity = task.session.store("x.json", json.dumps(document).encode())
    try:
        json.dumps(studies.compare({"first_file": identity, "second_file": identity}, task), allow_nan=False)
    except InputError as error:
        assert "no answer with numbers" in str(error) or "no number in common" in str(error)  # noqa: PT017 - or none


@pytest.mark.slow
@pytest.mark.browser
def test_answers_are_stored_shared_by_file_and_shown_side_by_side(driver, served, tmp_path):
    from tests.ui.test_pages_browser import check, text
    from tests.ui.test_plan_browser import SETTLED, move

    driver.get_log("browser")
    with served(plan.PAGE, studies.PAGE) as address:
        driver.get(address)
        until(driver, SETTLED)
        for value in (1.0, 1.5):
            move(driver, "rate", value)
            driver.find_element("css selector", "[data-keep]").click()
        assert text(driver, "error") == ""
        driver.get(f"{address}studies")
        until(driver, "return document.querySelectorAll('#differences tr').length > 1")
        assert "workload.request_rate" in text(driver, "differences")
        assert "TTFT p90" in text(driver, "numbers")
        stored = json.loads(driver.execute_script("return localStorage.getItem('lengthwise.studies')"))
        assert [tomllib.loads(one["scenario"])["workload"]["request_rate"] for one in stored] == [10, 32]
        check(driver)

        name = driver.find_element("css selector", "#list input")
        name.send_keys("\ue009a\ue000the renamed one\ue007")  # in place of all that it has; then enter
        until(driver, "return document.getElementById('first').textContent.includes('the renamed one')")
        driver.find_element("css selector", "#list button").click()
        assert len(driver.find_elements("css selector", "#list > li")) == 1
        driver.find_element("id", "undo").click()
        assert len(driver.find_elements("css selector", "#list > li")) == 2

        shared = [stored[0] | {"name": EVIL, "cards": [{"label": EVIL, "value": EVIL, "unit": "", "interval": ""}]}]
        for document, message in (
            ({"format": "lengthwise.studies", "studies": shared}, ""),
            (
                {"format": "lengthwise.studies", "studies": [stored[0] | {"command": 1}]},
                'Answer 1 of the file has no text "command".',
            ),
            ({"format": "lengthwise.results"}, "is no file of stored answers"),
        ):
            (tmp_path / "shared.json").write_text(json.dumps(document))
            driver.execute_script("document.body.dataset.answers = 0")
            driver.find_element("id", "import").send_keys(str(tmp_path / "shared.json"))
            until(driver, "return document.body.dataset.answers >= 1")
            assert message in text(driver, "error")
        assert len(driver.find_elements("css selector", "#list > li")) == 3
        assert not driver.find_elements("css selector", "main img")
        driver.find_element("css selector", "#list a").click()
        until(driver, SETTLED)
        assert "--rate" in text(driver, "command")
        driver.execute_script("localStorage.clear()")
