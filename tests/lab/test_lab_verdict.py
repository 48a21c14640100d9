"""What the laboratory says in words."""

from __future__ import annotations

import pytest

from lengthwise.lab import answer, verdict
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.lab import Cell, LoadUnit


def cell(
    policy: str, predictor: str, mean: float, tail: float, half: float = 0.02, full: float = 0.8
) -> Cell:
    values = {
        "jct.mean/fcfs": Estimate(mean, half),
        "jct.p99/fcfs": Estimate(tail, half),
        "gap_closed": Estimate((1 - mean) / 0.5, half),
        "found_full": Estimate(full),
    }
    return Cell(policy, predictor, 4, 0.9, 1.0, values)


def ends(gain: float = 0.5, full: float = 0.8) -> list[Cell]:
    return [cell("fcfs", "", 1, 1, 0, full), cell("oracle", "oracle", 1 - gain, 1.3, full=full)]


def test_worth_it_names_the_best_and_what_it_brings() -> None:
    found = verdict([*ends(), cell("sjf", "model", 0.7, 1.1), cell("srtf", "model", 0.6, 1.2)])
    assert found.worth_it
    assert found.best == "srtf, model"
    assert "cuts mean JCT by 40.0 ± 2.0 %, 80 % of what perfect lengths would bring" in found.sentence
    assert "grows by 20 %" in found.sentence


def test_what_knows_the_lengths_is_no_candidate_beside_what_can_be_had() -> None:
    found = verdict([*ends(), cell("sjf", "oracle", 0.5, 1.1), cell("sjf", "model", 0.9, 1.0)])
    assert found.best == "sjf, model"
    assert verdict([*ends(), cell("sjf", "oracle", 0.5, 1.1)]).best == "sjf, oracle"


def test_nobody_waits() -> None:
    found = verdict([*ends(full=0.001, gain=0.001), cell("sjf", "model", 0.7, 1.0)])
    assert (found.worth_it, found.reason) == (False, "no queue")
    assert "Everything fits the batch" in found.sentence


def test_a_gain_whose_interval_holds_none_is_none() -> None:
    found = verdict([*ends(), cell("sjf", "model", 0.9, 1.0, half=0.2)])
    assert (found.worth_it, found.reason) == (False, "no gain")
    assert "changes mean JCT by -10.0 ± 20.0 %" in found.sentence
    assert "perfect lengths would cut it by 50 %" in found.sentence


def test_a_tail_that_pays_more_than_the_mean_gains() -> None:
    found = verdict([*ends(), cell("sjf", "model", 0.8, 1.5)])
    assert (found.worth_it, found.reason) == (False, "the tail pays")
    assert "max_wait_s" in found.sentence


def test_a_smaller_gain_with_a_bearable_tail_wins_over_a_larger_one_without() -> None:
    found = verdict([*ends(), cell("sjf", "model", 0.6, 2.0), cell("aged", "model", 0.8, 1.1)])
    assert (found.worth_it, found.best) == (True, "aged, model")


def test_a_workload_that_fits_the_batch_is_not_worth_it(small) -> None:
    made = small.answered(batch_sizes=(64,), loads=(0.1,), seeds=2)
    assert [v.reason for v in made.verdicts] == ["no queue"]
    assert made.answer[0].startswith("Not worth it at every load and batch size. Everything fits the batch")


def test_an_overload_with_known_lengths_is_worth_it(small) -> None:
    made = small.answered(loads=(3.0,), predictors=("oracle",))
    assert made.answer[0].startswith("Worth it at every load and batch size.")


def test_verdicts_that_end_alike_are_told_together() -> None:
    good = verdict([*ends(), cell("sjf", "model", 0.7, 1.1)])
    idle = verdict(ends(full=0.0, gain=0.0))
    lines = answer((good, idle), LoadUnit.CAPACITY)
    assert lines[0].startswith("Worth it at 90 % of capacity (batch 4). sjf, model cuts")
    assert lines[1].startswith("Not worth it at 90 % of capacity (batch 4). Everything fits")


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        (LoadUnit.CAPACITY, "90 % of capacity"),
        (LoadUnit.ALONE, "0.9x the average rate"),
        (LoadUnit.RPS, "0.9 requests/s"),
    ],
)
def test_loads_have_words(unit, text) -> None:
    assert unit.text(0.9) == text
