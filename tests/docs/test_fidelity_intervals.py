"""What the page says of held-out medians and their intervals is what the row holds."""

from __future__ import annotations

import pytest
from generated_pages import imported, row, table

DETAILS = {
    "n": 20,
    "satisfied": 14,
    "below": 1,
    "above": 5,
    "of_loads": 4,
    "by_load": {"wide-high": {"n": 5, "satisfied": 2}, "narrow-half": {"n": 15, "satisfied": 12}},
    "single_runs": {"n": 60, "satisfied": 60, "below": 0, "above": 0},
    "ends_apart": {"wide-high": 2.25, "narrow-half": 14.0},
    "model_alone": {"n": 20, "satisfied": 11},
    "errors_as_stored": {"n": 20, "satisfied": 19},
    "as_simulate_shows": {"n": 20, "satisfied": 17, "level": 0.9},
    "each": {"wide-high": {"jct_p50": [1.5, 1.25, 1.0, 1.4]}},
}


@pytest.fixture(scope="module")
def generator():
    with imported("generate_fidelity") as script:
        yield script


def covered(prefix: str) -> dict:
    told = {"unit": "share", "target": 0.95, "better": "higher", "ci": [0.457, 0.881], "details": DETAILS}
    return row(f"{prefix}interval_coverage", 0.7, **told)


@pytest.mark.parametrize("prefix", ["fidelity.live.", "fidelity.live_transformers."])
def test_held_out_medians_are_counted_with_an_interval_and_by_load(generator, prefix):
    text = generator.page([covered(prefix)])
    assert "**14 of 20 held-out medians lie within the 95 % interval" in text
    assert "; 1 were faster than all of it, 5 slower. By load: wide-high 2 of 5, narrow-half 12 of 15." in text
    assert "Of single runs 60 of 60 lie within. The form of these intervals was settled after" in text
    assert "**These intervals are wide**: by load their upper ends are 2.2, 14 times" in text
    assert "90 %), 17 of 20" in text
    assert table(text, "Figures and aims") == [
        [f"`{prefix}interval_coverage`", "70 % of 20 in 4 loads [45.7 to 88.1]", "95 %", "missed, too narrow"]
    ]


def test_each_number_stands_in_the_details_with_its_interval(generator):
    text = generator.runs_page([covered("fidelity.live.")], generator.SECTIONS)
    assert "each, wide-high, jct p50: measured 1.5, said 1.25, low 1, high 1.4." in text


def test_intervals_counted_later_are_no_campaign_of_their_own(generator):
    error = row("fidelity.live.jct_p50_error", 0.1, retained="2026-11-22T11:10")
    earlier = [row("fidelity.live.jct_p50_error", 0.2, retained="2026-11-21T11:10")]
    alone = generator.page([error], earlier)
    both = generator.page([error, covered("fidelity.live.") | {"retained": "2026-11-23T09:00"}], earlier)
    lines = [sum(line.startswith("| 2026") for line in text.splitlines()) for text in (alone, both)]
    assert lines == [2, 2]
    assert not any(line.startswith("| - |") for line in both.splitlines())


def test_a_circle_whose_intervals_were_not_counted_says_nothing_of_them(generator):
    assert "lie within the 95 % interval" not in generator.page([])


def test_the_widest_interval_is_told_with_what_its_width_costs(generator):
    widths = {
        "widest": "ttft_p50 of wide-high",
        "widest_from": 0.385,
        "widest_to": 5.86,
        "score_over_error": 17.6,
        "sharp_score_over_error": 5.86,
    }
    row_ = covered("fidelity.live.")
    text = generator.page([row_ | {"details": DETAILS | {"widths": widths}}])
    assert "that of TTFT P50 of wide-high reaches from 0.39 to 5.86 times what was measured" in text
    assert "is 17.6 times the mean error" in text
    assert "it would be 5.9 times" in text
    exact = widths | {"score_over_error": None}
    assert "interval score" not in generator.page([row_ | {"details": DETAILS | {"widths": exact}}])


def test_intervals_are_called_blind_only_where_their_code_is_known_to_be_older_than_the_runs(generator):
    row_, seen = covered("fidelity.live."), "was settled after these runs had been seen"
    assert seen in generator.page([row_])
    assert seen in generator.page([row_ | {"details": DETAILS | {"fresh": True, "frozen": False}}])
    assert seen not in generator.page([row_ | {"details": DETAILS | {"frozen": True}}])


@pytest.mark.parametrize(
    ("ci", "report"),
    [
        ([0.83, 1.0], "consistent"),
        ([0.96, 1.0], "missed, too wide"),
        ([0.5, 0.94], "missed, too narrow"),
        (None, "no interval"),
    ],
)
def test_a_share_that_is_held_is_consistent_with_its_aim_or_misses_it_on_a_side(generator, ci, report):
    text = generator.page([covered("fidelity.live.") | {"ci": ci}])
    assert table(text, "Figures and aims")[0][3] == report
