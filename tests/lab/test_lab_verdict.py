"""The verdict of the laboratory in words."""

from __future__ import annotations

import numpy as np
import pytest

from lengthwise import lab
from lengthwise.lab import answer
from lengthwise.lab.experiment import saturated_rps
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.lab import Cell, LoadUnit


def decision(cells, seeds: int = 5):
    return lab.decision(cells, seeds=seeds)


def cell(
    policy: str,
    predictor: str,
    mean: float,
    tail: float,
    half: float = 0.02,
    full: float = 0.8,
    waiting: float = 0.5,
    served: float = 1.0,
) -> Cell:
    values = {
        "jct.mean/fcfs": Estimate(mean, half),
        "jct.p99/fcfs": Estimate(tail, half),
        "gap_closed": Estimate((1 - mean) / 0.5, half),
        "found_full": Estimate(full),
        "waiting_share": Estimate(waiting),
        "served": Estimate(served),
    }
    return Cell(policy, predictor, 4, 0.9, 1.0, values)


def ends(gain: float = 0.5, full: float = 0.8, **more: float) -> list[Cell]:
    return [cell("fcfs", "", 1, 1, 0, full, **more), cell("oracle", "oracle", 1 - gain, 1.3, full=full, **more)]


def test_worth_it_names_the_best_and_what_it_brings() -> None:
    found = decision([*ends(), cell("sjf", "model", 0.7, 1.1), cell("srtf", "model", 0.6, 1.2)])
    assert found.is_improvement
    assert found.best == "srtf (model)"
    assert (
        "cuts mean JCT by 40.0 ± 2.5 % (significant among 2 candidates), 80 % of the gain with known lengths"
        in found.description
    )
    assert "grows by 20 %" in found.description


def test_an_oracle_is_no_candidate_next_to_a_real_predictor() -> None:
    found = decision([*ends(), cell("sjf", "oracle", 0.5, 1.1), cell("sjf", "model", 0.9, 1.0)])
    assert found.best == "sjf (model)"
    assert decision([*ends(), cell("sjf", "oracle", 0.5, 1.1)]).best == "sjf (oracle)"


def test_no_gain_without_a_queue() -> None:
    found = decision([*ends(full=0.001, gain=0.001, waiting=0.01), cell("sjf", "model", 0.7, 1.0)])
    assert (found.is_improvement, found.reason) == (False, "no queue")
    assert "Everything fits the batch" in found.description


def test_a_gain_whose_interval_contains_zero_is_none() -> None:
    found = decision([*ends(), cell("sjf", "model", 0.97, 1.0, half=0.04)])
    assert (found.is_improvement, found.reason, found.head) == (False, "no gain", "Not worth it")
    assert "changes mean JCT by -3.0 ± 4.0 %" in found.description
    assert "known lengths would cut it by 50 %" in found.description


def test_a_wide_interval_decides_nothing() -> None:
    found = decision([*ends(), cell("sjf", "model", 0.9, 1.0, half=0.2)])
    assert (found.is_improvement, found.reason, found.head) == (False, "undecided", "Not sure")
    assert "changes mean JCT by -10.0 ± 20.0 %" in found.description
    assert "The interval allows a gain of 30 %: run more seeds or requests." in found.description


def test_a_tail_that_pays_more_than_the_mean_gains() -> None:
    found = decision([*ends(), cell("sjf", "model", 0.8, 1.5)])
    assert (found.is_improvement, found.reason) == (False, "the tail pays")
    assert "max_wait_s" in found.description


def test_a_smaller_gain_with_a_bearable_tail_wins_over_a_larger_one_without() -> None:
    found = decision([*ends(), cell("sjf", "model", 0.6, 2.0), cell("aged", "model", 0.8, 1.1)])
    assert (found.is_improvement, found.best) == (True, "aged (model)")


def test_requests_that_wait_for_memory_alone_form_a_queue(small) -> None:
    """Constant outputs, slots for all, memory for few: perfect lengths bring nothing, but requests wait."""
    found = decision([*ends(full=0.0, gain=0.0, waiting=0.64), cell("sjf", "model", 1, 1)])
    assert (found.is_improvement, found.reason) == (False, "lengths alike")
    assert "wait for 64 % of their JCT" in found.description
    assert "lengths do not differ enough" in found.description
    made = small.succeeded(small.Constant(), batch_sizes=(64,), loads=(1.5,), seeds=2)
    assert made.cells[0]["found_full"].value < 0.01
    assert made.cells[0]["waiting_share"].value > 0.3
    assert [v.reason for v in made.decisions] == ["lengths alike"]


def test_other_survivors_are_not_compared() -> None:
    found = decision([*ends(served=0.9), cell("sjf", "model", 0.6, 1.0, served=0.95)])
    assert (found.is_improvement, found.reason, found.head) == (False, "not compared", "Cannot be compared")
    assert "90 % of the requests are served under FCFS and 95 % under sjf (model)" in found.description
    alike = decision([*ends(served=0.9), cell("sjf", "model", 0.6, 1.0, served=0.905)])
    assert alike.is_improvement
    assert "90 % of all requests are served" in alike.description
    assert answer((found,), LoadUnit.CAPACITY)[0].startswith("Cannot be compared at any load or")


def test_the_best_of_many_must_be_surer_than_one() -> None:
    """10 ± 9 % alone is sure; as the best of twenty it is not."""
    one = cell("sjf", "model", 0.9, 1.0, half=0.09)
    others = [cell(f"p{i}", "model", 1.0, 1.0, half=0.09) for i in range(19)]
    assert decision([*ends(), one]).is_improvement
    assert decision([*ends(), one, *others]).reason == "undecided"


def test_one_seed_is_never_sure() -> None:
    found = decision([*ends(), cell("sjf", "model", 0.6, 1.0, half=float("nan"))], seeds=1)
    assert (found.is_improvement, found.reason, found.head) == (False, "one seed", "Not sure")
    assert "one seed has no interval" in found.description


def test_a_workload_that_fits_the_batch_is_not_worth_it(small) -> None:
    made = small.succeeded(batch_sizes=(64,), loads=(0.01,), seeds=2)
    assert [v.reason for v in made.decisions] == ["no queue"]
    assert made.answer[0].startswith("Not worth it at any load or batch size. Everything fits the batch")


def test_a_run_too_short_for_a_queue_is_undecided(small) -> None:
    """All 60 requests fit the batch of 64, and arrive within the time of one of the longest."""
    made = small.succeeded(batch_sizes=(64,), loads=(3.0,), seeds=2)
    assert [v.reason for v in made.decisions] == ["undecided"]
    assert "too short for a queue" in made.answer[0]


def test_capacity_does_not_depend_on_the_number_of_requests(small) -> None:
    """A burst whose queue ends early finishes mostly short requests, at a rate above the capacity."""
    load, served = small.Bench(n=2000).requests(0, ""), small.Bench().deployment(Scheduler(), 32)
    few, many = (saturated_rps(load.take(np.arange(n)), served, "kernel") for n in (50, 2000))
    assert few == pytest.approx(many, rel=0.15)


def test_an_overload_with_known_lengths_is_worth_it(small) -> None:
    made = small.succeeded(loads=(3.0,), predictors=("oracle",))
    assert made.answer[0].startswith("Worth it at every load and batch size.")


def test_similar_verdicts_are_reported_together() -> None:
    good = decision([*ends(), cell("sjf", "model", 0.7, 1.1)])
    idle = decision(ends(full=0.0, gain=0.0, waiting=0.01))
    lines = answer((good, idle), LoadUnit.CAPACITY)
    assert lines[0].startswith("Worth it at 90 % of capacity (batch 4). sjf (model) cuts")
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
