"""The page of applications is what the committed results say, and the tests that it names are there."""

from __future__ import annotations

import re
import sys

import pytest
from documents import ROOT
from generated_pages import by_first, check_committed, imported, row

TESTS = ROOT / "tests"


@pytest.fixture(scope="module")
def generator():
    with imported("generate_apps") as script:
        yield script


def test_the_page_is_what_the_committed_results_say():
    check_committed("generate_apps")


def test_what_is_not_measured_is_called_so(generator):
    figures = by_first(generator.page([row("apps.search_s", 1.25, ci=(1.1, 1.5))]), "Figures and aims")
    assert figures["`apps.search_s`"][1:] == ["1.25 [1.1, 1.5] s", "at most 2 s", "met"]
    assert figures["`apps.search_mixed_s`"][1] == "not measured yet"
    assert "Not measured yet." in generator.page([]).partition("## Estimate against reality")[2]


def test_a_gain_a_hair_below_one_is_missed_and_seen(generator):
    name = "apps.chain.speedup_over_max_lowest"
    figures = by_first(generator.page([row(name, 0.99968, better="higher")]), "Figures and aims")
    assert figures[f"`{name}`"][1:] == ["0.9997", "at least 1", "missed"]


def test_a_case_is_told_end_to_end_with_what_the_search_took(generator):
    methods = {
        name: {"makespan_s": seconds, "search_s": 0.5, "lead_s": lead_s}
        for name, seconds, lead_s in (
            ("lengthwise", 10.0, 0.1), ("samullm", 12.0, 0.5), ("max", 20.0, 0.5), ("min", 15.0, 0.5)
        )
    }  # fmt: skip
    case = {"case": "of one", "tasks": 7, "methods": methods, "estimate_error": -0.031}
    text = generator.page([row("apps.chain.cases", 1, details={"cases": [case]})])
    assert "| of one | 7 | 10.1 | 0.5 | 0.1 | 12.5 | 20.5 | 15.5 | -3.1% |" in text


@pytest.mark.parametrize(
    ("cases", "report"),
    [
        ([{}, {}], "load was above 3 had other work beside them: they are told and not counted, by a bound that was"),
        ([{"busy_above": 3.0}, {}], "by a bound that was set when they had been seen; there was none."),
        ([{"busy_above": 2.5}, {"busy_above": 2.5}], "load was above 2.5 had other work"),
        ([{"busy_above": 2.5}] * 2, "by a bound that was fixed before they were measured; there was none."),
        ([{"busy_above": 2.5, "busy": [(9.0, -0.3)]}], "that was fixed before they were measured.\n"),
    ],
)  # fmt: skip
def test_since_when_the_bound_on_busy_machines_is_fixed_is_told_of_the_rows(generator, cases, report):
    whole = {"cores": 1, "estimate_s": 6.0, "measured_s": [6.0], "errors": [0.0], "plan": [["a x1"]]}
    rows = [row("apps.estimate_error_live", 0.1, details={"cases": [whole | case for case in cases]})]
    assert report in generator.page(rows)


def test_live_runs_stand_beside_their_estimates(generator):
    case = {
        "cores": 1,
        "plan": [["a x1"], ["b x1"]],
        "estimate_s": 90.0,
        "estimate_half_width_s": 2.0,
        "measured_s": [100.0, 80.0],
        "errors": [-0.1, 0.125],
        "busy": [(180.0, -0.5)],
        "starts_s": {"a": [{"stop_s": [1.0, 2.0]}], "b": [{"stop_s": [3.0]}]},
    }
    text = generator.page([row("apps.estimate_error_live", 0.11, details={"cases": [case]})])
    assert "| of a sample | 1 | a x1; b x1 | 90 ± 2 | 100, 80 | -10.0%, +12.5% |" in text
    assert "| of a sample, the machine busy | 1 | not counted | 90 | 180 | -50.0% |" in text
    assert "With all of them counted, the mean error is 24.2% (of a sample)." in text
    assert "an engine ends (2 s each in the profile)" in text
    held = generator.page([row("apps.estimate_error_live", 0.11, details={"cases": [case | {"holds_stops": True}]})])
    assert "an engine ends" not in held


def test_every_fault_names_tests_that_are_there(generator):
    generator.page([])
    faults = sys.modules["_apps_faults"].FAULTS
    named = [test for _, rows in faults for _, _, tests in rows for test in tests]
    assert len(named) > 30
    for test in named:
        file, _, name = test.partition("::")
        found = re.findall(r"^(?:async )?def (test_\w+)", (TESTS / file).read_text("utf-8"), re.MULTILINE)
        assert name in found, test
