"""What drift does to a chosen schedule, and what reloading costs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lengthwise import catalog
from lengthwise.schedule import (
    Assumptions,
    Cluster,
    Estimator,
    Planner,
    Strategy,
    TaskLengths,
    best_schedule,
    drift,
    redeployment,
)
from lengthwise.schedule.adaptation import DRAM_BYTES_PER_S, SSD_BYTES_PER_S
from lengthwise.schedule.length_drift import moments, shift_moment
from lengthwise.schema.errors import InputError

MIN_COUNT = (("mean", 0.15), ("mean", 0.30), ("sd", -0.3), ("skewness", 0.4))


@pytest.fixture(scope="module")
def planned(opt_estimator):
    planner = Planner(opt_estimator, [2, 4], [Strategy.RRA])
    choice = planner.best(6.0)
    return planner, choice, drift(planner, choice, MIN_COUNT)


@pytest.mark.parametrize("change", [-0.3, 0.15, 0.3])
def test_the_mean_moves_alone(summaries, change):
    before = moments(summaries.output_pmf)
    after = moments(shift_moment(summaries.output_pmf, "mean", change, 2048))
    assert after[0] == pytest.approx(before[0] * (1 + change), rel=0.01)
    assert after[1] == pytest.approx(before[1], rel=0.04)


@pytest.mark.parametrize("change", [-0.3, 0.15])
def test_the_spread_moves_alone(summaries, change):
    before = moments(summaries.output_pmf)
    after = moments(shift_moment(summaries.output_pmf, "sd", change, 2048))
    assert after[0] == pytest.approx(before[0], rel=0.01)
    assert after[1] == pytest.approx(before[1] * (1 + change), rel=0.02)


@pytest.mark.parametrize("change", [-0.2, 0.2, 0.4])
def test_the_skewness_moves_alone(change):
    pmf = TaskLengths.from_preset("exegpt-t").output_pmf
    before, after = moments(pmf), moments(shift_moment(pmf, "skewness", change, 2048))
    assert after[2] == pytest.approx(before[2] + change, abs=0.02)
    assert after[:2] == pytest.approx(before[:2], rel=0.01)


def test_moved_lengths_stay_within_the_model():
    pmf = np.zeros(101)
    pmf[[1, 100]] = 0.5
    for what, change in (("mean", 0.3), ("sd", 0.3), ("mean", -0.3)):
        made = shift_moment(pmf, what, change, 110)
        assert made.sum() == pytest.approx(1)
        assert made[0] == 0
        assert np.flatnonzero(made).max() <= 110


def test_no_move_is_no_change(summaries):
    assert shift_moment(summaries.output_pmf, "mean", 0.0, 200)[:81] == pytest.approx(summaries.output_pmf)


def test_longer_outputs_take_longer_and_only_then_break_the_bound(planned):
    _, choice, rows = planned
    by = {(row.changed, row.change): row for row in rows}
    assert by["mean", 0.15].retained_latency_s > choice.row.latency_high_s
    assert by["mean", 0.30].retained_latency_s > by["mean", 0.15].retained_latency_s
    for row in rows:
        assert row.is_satisfied == (row.retained_latency_s <= choice.bound_s)
        assert (row.margin == 0) == row.is_satisfied


def test_the_retained_schedule_is_the_deployed_one_at_the_new_lengths(planned, summaries):
    planner, choice, rows = planned
    setting = planner.estimator.setting
    row = rows[1]
    task = TaskLengths(setting.task.prompt_pmf, shift_moment(setting.task.output_pmf, "mean", 0.30, 1500))
    got = Estimator(task, setting.cluster, setting.model, setting.tables).estimate(
        [choice.controls], np.array([choice.row.prefill_gpus])
    )
    assert row.retained.prefill_gpus == choice.row.prefill_gpus
    assert row.retained_latency_s == pytest.approx(got.latency_high_s[0])
    assert row.retained.throughput_rps == pytest.approx(got.throughput_rps[0])


def test_a_bound_tighter_by_the_margin_would_have_been_met(planned):
    """Planned under the tighter bound, the schedule still holds the bound when the lengths have moved."""
    planner, choice, rows = planned
    setting = planner.estimator.setting
    broken = [row for row in rows if not row.is_satisfied and math.isfinite(row.margin)]
    assert broken
    for row in broken:
        sooner = planner.best(choice.bound_s * (1 - row.margin)).row
        task = TaskLengths(
            setting.task.prompt_pmf, shift_moment(setting.task.output_pmf, row.changed, row.change, 1500)
        )
        estimator = Estimator(task, setting.cluster, setting.model, setting.tables)
        controls = planner.best(choice.bound_s * (1 - row.margin)).controls
        got = estimator.estimate([controls], np.array([sooner.prefill_gpus]))
        assert got.latency_high_s[0] <= choice.bound_s


def test_replanned_schedules_meet_the_bound_after_every_change(planned):
    _, choice, rows = planned
    for row in rows:
        assert row.replanned.latency_high_s <= choice.bound_s


def test_without_a_bound_what_fits_holds(opt_estimator):
    """The choice fills the memory: longer outputs are then too many, shorter ones are not."""
    planner = Planner(opt_estimator, [4], [Strategy.RRA])
    shorter, longer = drift(planner, planner.best(), (("mean", -0.3), ("mean", 0.3)))
    assert (shorter.is_satisfied, shorter.margin) == (True, 0.0)
    assert not longer.is_satisfied
    assert longer.retained is None
    assert math.isnan(longer.margin)
    assert longer.replanned is not None


def test_lengths_without_spread_can_only_move_in_the_mean(opt, four_a40, opt_tables):
    estimator = Estimator(TaskLengths.fixed(200, 20), four_a40, opt, opt_tables, Assumptions())
    planner = Planner(estimator, [4], [Strategy.RRA])
    rows = drift(planner, planner.best(5.0))
    assert {row.changed for row in rows} == {"mean"}
    assert {round(row.mean_tokens) for row in rows} == {14, 17, 23, 26}


def test_phases_longer_than_what_is_left_are_cut(opt, four_a40, opt_tables):
    """A phase of 60 iterations, outputs that then end at 47."""
    estimator = Estimator(TaskLengths.fixed(200, 60), four_a40, opt, opt_tables)
    planner = Planner(estimator, [4], [Strategy.RRA])
    choice = planner.best(1.05 * planner.best().row.latency_high_s)
    (row,) = drift(planner, choice, (("mean", -0.3),))
    assert row.retained is not None


def test_an_unknown_move_is_refused(opt_estimator):
    with pytest.raises(InputError, match="mean, sd or skewness"):
        shift_moment(opt_estimator.setting.task.output_pmf, "median", 0.1, 100)


def test_loading_takes_what_the_paper_measured():
    a40 = catalog.gpu("A40"), catalog.node("pcie4-8")
    for name, gpus, dram_s, ssd_s in (("gpt-3-175b", 32, 2.1, 11.9), ("gpt-3-341b", 48, 3.5, 15.1)):
        got = redeployment(catalog.model(name), Cluster(*a40, gpus))
        assert (got.dram_s, got.ssd_s) == (dram_s, ssd_s)
        rates = {"dram_bytes_per_s": DRAM_BYTES_PER_S, "ssd_bytes_per_s": SSD_BYTES_PER_S}
        near = redeployment(catalog.model(name), Cluster(*a40, gpus, **rates))
        assert near.dram_s == pytest.approx(dram_s, rel=0.25)
        assert near.ssd_s == pytest.approx(ssd_s, rel=0.1)


def test_a_given_rate_is_used_and_the_source_states_which(opt, four_a40):
    usual = redeployment(opt, four_a40)
    drives = redeployment(opt, replace(four_a40, ssd_bytes_per_s=2 * SSD_BYTES_PER_S))
    assert (drives.dram_s, drives.ssd_s) == (usual.dram_s, pytest.approx(usual.ssd_s / 2))
    assert drives.source == f"drives: rate as given; else {usual.source}"
    both = replace(four_a40, dram_bytes_per_s=1e9, ssd_bytes_per_s=1e9)
    assert redeployment(opt, both).source == "rates as given"
    with pytest.raises(InputError, match="above 0"):
        replace(four_a40, dram_bytes_per_s=0.0)


def test_other_gpus_do_not_take_the_seconds_of_those_that_were_measured():
    model, h200 = catalog.model("gpt-3-175b"), Cluster(catalog.gpu("H200"), catalog.node("dgx-h200"), 32)
    got = redeployment(model, h200)
    assert got.source.endswith("its rates")
    assert (got.dram_s, got.ssd_s) != (2.1, 11.9)


def test_two_copies_take_twice_as_long(opt, four_a40):
    one, two = (redeployment(opt, four_a40, strategy) for strategy in (Strategy.RRA, Strategy.WAA_C))
    assert two.dram_s == pytest.approx(2 * one.dram_s)
    assert two.ssd_s == pytest.approx(2 * one.ssd_s)


def test_an_encoder_decoder_has_its_halves_once(four_a40):
    model = catalog.model("t5-11b")
    assert redeployment(model, four_a40, Strategy.WAA_C) == redeployment(model, four_a40)


def test_best_schedule_and_planner_agree(opt, four_a40, opt_tables, summaries):
    alone = best_schedule(summaries, four_a40, opt, 6.0, tables={1: opt_tables[1], 4: opt_tables[4]})
    planner = Planner(Estimator(summaries, four_a40, opt, opt_tables), [1, 4])
    assert alone.row == planner.best(6.0).row
