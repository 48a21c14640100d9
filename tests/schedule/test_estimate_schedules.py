"""Estimates of many schedules: closed forms, what cannot be, directions, and ExeGPT's own four."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from stage_visits import decode_visit_s, estimate, prefill_visit_s

from lengthwise import catalog
from lengthwise.schedule import (
    Assumptions,
    Cluster,
    Controls,
    Estimator,
    Reason,
    Strategy,
    TaskLengths,
    cluster_tables,
    columns,
    explain,
)
from lengthwise.schema.errors import InputError

R, C, M = Strategy
TABLE_6 = [
    (Controls(C, 4, tp=2, tp_groups=2), 3.01, 22.41),
    (Controls(C, 10, tp=2, tp_groups=2), 4.11, 23.76),
    (Controls(R, 52, 13, tp=4, tp_groups=1), 10.23, 25.23),
    (Controls(R, 49, 7, tp=4, tp_groups=1), 16.87, 26.15),
]


def test_lengths_that_do_not_vary_have_the_closed_form(opt, four_a40, opt_tables):
    """One stage: 8 outputs less the prefill's are 7 iterations, three phases of 3; 3 + 3 + 1."""
    task = TaskLengths.fixed(256, 8)
    got = estimate([Controls(R, 10, 3, tp=4, tp_groups=1)], task, four_a40, opt, opt_tables)
    ends = {"first": True, "last": True}
    prefill_s = float(prefill_visit_s(opt_tables[4], task, 10, 40, **ends))
    kv_tokens = [10 * (3 * 256 + 12), 10 * (2 * 256 + 7), 10 * (2 * 256 + 9)]
    decode_s = decode_visit_s(opt_tables[4], task, [30, 20, 20], kv_tokens, 40, **ends)
    round_s = prefill_s + decode_s.sum()
    assert got.cycle_s[0] == pytest.approx(round_s)
    assert got.throughput_rps[0] == pytest.approx(10 / round_s)
    assert got.latency_s[0] == pytest.approx(2 * round_s + prefill_s + decode_s[0])
    assert got.latency_high_s[0] == pytest.approx(got.latency_s[0])
    assert got.decode_batch[0] == pytest.approx(30)


def test_outputs_of_one_token_only_prefill(opt, four_a40, opt_tables):
    got = estimate(
        [Controls(R, 5, tp=4, tp_groups=1), Controls(C, 5)], TaskLengths.fixed(64, 1), four_a40, opt, opt_tables
    )
    assert got.decode_batch.tolist() == [0.0, 0.0]
    assert got.decode_s.tolist() == [0.0, 0.0]
    assert got.latency_s[0] == pytest.approx(got.cycle_s[0])


def test_exegpts_four_schedules_come_out_as_published(opt_estimator):
    """Table 6: our tables are no measured ones, so only the order of magnitude must agree."""
    got = opt_estimator.estimate([controls for controls, _, _ in TABLE_6])
    for row, (controls, latency_s, rate) in enumerate(TABLE_6):
        print(
            f"{controls.strategy}: {got.latency_s[row]:.2f} s ({latency_s}), {got.throughput_rps[row]:.2f}/s ({rate})"
        )
        assert latency_s / 2 < got.latency_s[row] < latency_s * 2
        assert rate / 2 < got.throughput_rps[row] < rate * 2
    assert (np.diff(got.throughput_rps) > 0).all()


def test_a_row_is_the_same_alone_and_among_others(opt_estimator):
    rng = np.random.default_rng(1)
    given = [
        Controls(R, int(rng.integers(1, 90)), int(rng.integers(1, 80)), tp=2, tp_groups=int(rng.integers(0, 3)))
        for _ in range(20)
    ] + [
        Controls(s, int(rng.integers(1, 30)), micro_batches=int(rng.integers(1, 4)), tp=2, tp_groups=1) for s in (C, M)
    ]
    together = opt_estimator.estimate(columns(given))
    for row, controls in enumerate(given):
        alone = opt_estimator.estimate([controls])
        for field in fields(together):
            np.testing.assert_array_equal(getattr(together, field.name)[row], getattr(alone, field.name)[0])


@pytest.mark.parametrize(("name", "values"), [("prefill_batch", range(4, 160, 4)), ("decode_steps", range(1, 64))])
def test_rra_is_monotone_as_in_the_paper(opt_estimator, name, values):
    """More new requests: more throughput, more latency. Fewer decodes between prefills: the same."""
    base = Controls(R, 40, 8, tp=2, tp_groups=1)
    got = opt_estimator.estimate([replace(base, **{name: value}) for value in values])
    sign = 1 if name == "prefill_batch" else -1
    assert got.feasible.sum() > 30
    for column in (got.throughput_rps[got.feasible], got.latency_s[got.feasible]):
        rising = sign * np.diff(column) > -0.05 * column[:-1]
        assert rising.mean() >= 0.95


def test_more_groups_shorten_the_latency(opt_estimator):
    got = opt_estimator.estimate([Controls(R, 8, 16, tp=2, tp_groups=groups) for groups in (0, 1, 2)])
    assert (np.diff(got.latency_s) < 0).all()


def test_the_papers_completions_expect_more_throughput_from_smaller_batches(opt, four_a40, opt_tables, summaries):
    given = [Controls(R, 49, 7, tp=4, tp_groups=1)]
    own, paper = (
        estimate(given, summaries, four_a40, opt, opt_tables, Assumptions(paper_completions=p)) for p in (False, True)
    )
    assert paper.decode_batch[0] < own.decode_batch[0]
    assert paper.throughput_rps[0] > own.throughput_rps[0]


def test_adjustment_narrows_what_it_can_and_none_leaves_the_normal_range(opt, four_a40, opt_tables, summaries):
    given = [Controls(R, 50, 13, tp=4, tp_groups=1), Controls(C, 10, tp=2, tp_groups=2)]
    free, limited, fixed = (
        estimate(given, summaries, four_a40, opt, opt_tables, Assumptions(threshold=t)) for t in (None, 0.05, 0.001)
    )
    assert (limited.prefill_range < free.prefill_range).all()
    assert (limited.latency_high_s < free.latency_high_s).all()
    np.testing.assert_allclose(limited.decode_range, free.decode_range, rtol=0.01)
    # Batches are of whole prompts: ten cannot be made equal, fifty nearly.
    assert fixed.prefill_range[0] < 0.02
    assert 0.05 < fixed.prefill_range[1] < limited.prefill_range[1] * 1.2
    sd = np.sqrt(summaries.prompt_variance) / summaries.mean_prompt_tokens
    assert free.prefill_range[0] == pytest.approx(2.326 * sd / np.sqrt(50), rel=0.1)


def test_a_schedule_that_does_not_fit_has_a_reason_and_yields_nothing(opt_estimator, four_a40):
    got = opt_estimator.estimate([Controls(R, 3000, 10), Controls(C, 4, tp=4, tp_groups=1), Controls(R, 4, 10)])
    assert got.reason.tolist() == [Reason.CACHE, Reason.GROUPS, Reason.FITS]
    assert got.throughput_rps[:2].tolist() == [0.0, 0.0]
    assert np.isinf(got.latency_s[:2]).all()
    large = catalog.model("gpt-3-175b")
    tables = cluster_tables(large, four_a40, [1])
    heavy = estimate([Controls(R, 1, 2)], TaskLengths.fixed(8, 8), four_a40, large, tables)
    assert heavy.reason.tolist() == [Reason.WEIGHTS]


def test_more_stages_than_layers_cannot_be(opt, summaries):
    cluster = Cluster(catalog.gpu("A40"), catalog.node("pcie4-8"), 48)
    tables = cluster_tables(opt, cluster, [1, 2])
    got = estimate([Controls(R, 8, 8), Controls(R, 8, 8, tp=2, tp_groups=24)], summaries, cluster, opt, tables)
    assert got.reason.tolist() == [Reason.LAYERS, Reason.FITS]


def test_controls_out_of_range_are_refused(opt_estimator):
    for wrong in ({"prefill_batch": 0}, {"decode_steps": 0}, {"micro_batches": 0}, {"tp": 0}, {"tp_groups": -1}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Controls(**{"strategy": R, "prefill_batch": 4} | wrong)
    with pytest.raises(InputError, match="decode_steps of WAA must be 1"):
        Controls(C, 4, 2)
    with pytest.raises(InputError, match="must fit the 4 GPUs"):
        opt_estimator.estimate([Controls(R, 4, 4, tp=2, tp_groups=3)])
    with pytest.raises(InputError, match="longest output"):
        opt_estimator.estimate([Controls(R, 4, 81)])
    with pytest.raises(InputError, match="tensor-parallel degree 3"):
        opt_estimator.estimate([Controls(R, 4, 4, tp=3, tp_groups=1)])


def test_no_schedules_are_no_rows(opt_estimator):
    assert len(opt_estimator.estimate([]).throughput_rps) == 0


def test_columns_give_their_rows_back():
    given = [Controls(R, 4, 9, tp=2, tp_groups=1), Controls(M, 3, micro_batches=2)]
    assert [columns(given).row(i) for i in range(2)] == given


@pytest.mark.parametrize("controls", [Controls(R, 9, 4, tp=2, tp_groups=1), Controls(C, 4, tp=2, tp_groups=2)])
def test_an_explanation_draws_what_was_estimated(opt_estimator, controls):
    drawn_as_estimated(explain(opt_estimator, controls, rounds=3))


@pytest.mark.parametrize("controls", [Controls(R, 3, 9, tp=2, tp_groups=1), Controls(C, 1, tp=2, tp_groups=2)])
def test_an_explanation_has_prefills_as_large_as_a_threshold_makes_them(summaries, four_a40, opt, opt_tables, controls):
    free, limited = (
        explain(Estimator(summaries, four_a40, opt, opt_tables, Assumptions(threshold=t)), controls, rounds=3)
        for t in (None, 0.1)
    )
    drawn_as_estimated(limited)
    assert (limited.prefill_s > 1.02 * free.prefill_s).all()  # a short prompt is joined by another


def drawn_as_estimated(got):
    assert got.estimates.reason[0] == Reason.FITS
    cycle_s, stages = got.estimates.cycle_s[0], got.layout.stages
    started = sorted(v.start_s for v in got.timeline if v.stage == 0 and v.is_prefill and v.micro_batch == 0)
    assert started[0] == 0.0
    assert started[2] - started[1] == pytest.approx(cycle_s, rel=1e-6)
    assert {v.stage for v in got.timeline} == set(range(len(stages)))
    assert got.estimates.prefill_s[0] >= got.prefill_s.sum() * (1 - 1e-9)
    if got.controls.strategy is not R:
        assert got.estimates.prefill_s[0] == pytest.approx(got.prefill_s.sum())


@pytest.mark.parametrize(
    ("batch", "steps", "groups"), [(2, 75, 1), (1, 60, 1), (8, 40, 1), (30, 75, 1), (4, 72, 0), (40, 74, 0)]
)
def test_an_explanation_of_few_requests_has_the_cycle_that_is_stated(opt_estimator, batch, steps, groups):
    """Late in a phase a micro-batch holds a hundredth of a sequence: the same visits as the estimate's."""
    controls = Controls(R, batch, steps, tp=4 if groups else 1, tp_groups=groups)
    got = explain(opt_estimator, controls, rounds=2)
    started = [v.start_s for v in got.timeline if v.stage == 0 and v.is_prefill and v.micro_batch == 0]
    assert started[1] - started[0] == pytest.approx(got.estimates.cycle_s[0], rel=1e-6)
    if groups:
        assert got.decode_s.sum() / steps == pytest.approx(got.estimates.decode_s[0], rel=1e-9)
