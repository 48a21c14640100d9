"""What is done about a deployed schedule when lengths moved: what it costs, and when it is left."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from lengthwise.schedule import (
    Adapter,
    Assumptions,
    Controls,
    Estimator,
    Monitor,
    Planner,
    ReplanOptions,
    Strategy,
    TaskLengths,
    drift,
    redeployment,
    replan,
)
from lengthwise.schedule.adaptation import MIN_COUNTED_REQUESTS, late_share, lengths_since, repeat_change
from lengthwise.schedule.drift_monitor import Alarm
from lengthwise.schedule.length_drift import evaluate_deployed, moments, shift_moment
from lengthwise.schedule.search_space import row_of
from lengthwise.schema.errors import InputError, ScheduleError

BOUND_S = 6.0


def at(estimator, task):
    """The same estimator of other lengths."""
    setting = estimator.setting
    return Estimator(task, setting.cluster, setting.model, setting.tables, setting.assumptions)


def longer(task, change, what="mean"):
    return TaskLengths(task.prompt_pmf, shift_moment(task.output_pmf, what, change, 1500))


@pytest.fixture(scope="module")
def planner(opt_estimator):
    return Planner(opt_estimator, [2, 4], [Strategy.RRA])


@pytest.fixture(scope="module")
def choice(planner):
    return planner.best(BOUND_S)


@pytest.fixture(scope="module")
def after(planner, summaries):
    """Planned for outputs that are 30 % longer."""
    return planner.with_estimator(at(planner.estimator, longer(summaries, 0.3)))


@pytest.fixture(scope="module")
def slow(opt_estimator):
    """A schedule of four stages that holds the bound and serves less than the best."""
    controls = Controls(Strategy.RRA, 4, 16)
    return row_of(controls, opt_estimator.estimate([controls]))


def test_a_schedule_that_breaks_its_bound_is_left_for_one_that_holds_it(after, choice, summaries):
    change = replan(after, choice.row, summaries, BOUND_S)
    assert not change.is_satisfied
    assert change.retained_latency_s > BOUND_S
    assert change.made
    assert change.new_latency_s <= BOUND_S * (1 - change.margin)
    assert change.late_share > 0.01
    assert change.after.output_mean == pytest.approx(1.3 * change.before.output_mean, rel=0.01)


def test_loading_is_charged_only_where_weights_move(after, choice, summaries):
    change = replan(after, choice.row, summaries, BOUND_S, ReplanOptions(storage="ssd"))
    setting = after.estimator.setting
    loading = redeployment(setting.model, setting.cluster, Strategy(change.new.strategy))
    same = (change.new.family, change.new.prefill_gpus) == (choice.row.family, choice.row.prefill_gpus)
    assert change.load_s == (0.0 if same else loading.ssd_s)


def test_a_change_that_does_not_pay_by_the_horizon_is_not_made(planner, slow, summaries):
    terms = ReplanOptions(margin=0.0, horizon_s=3600.0)
    long = replan(planner, slow, summaries, BOUND_S, terms)
    assert long.is_satisfied
    assert long.made
    assert long.load_s > 0
    kept_rps, new_rps = long.retained.throughput_rps, long.new.throughput_rps
    assert kept_rps * long.repaid_s == pytest.approx(new_rps * (long.repaid_s - long.load_s))
    short = replan(planner, slow, summaries, BOUND_S, dataclasses.replace(terms, horizon_s=long.load_s))
    assert short.load_s == 0, "only what needs no loading is left to be done"
    assert long.new.throughput_rps > short.new.throughput_rps


def test_the_best_is_left_as_it_is(planner, choice, summaries):
    change = replan(planner, choice.row, summaries, BOUND_S)
    assert change.is_satisfied
    assert not change.made
    assert change.late_share <= 0.01 + 1e-9


def test_a_gain_below_the_least_is_not_worth_a_change(planner, slow, summaries):
    terms = ReplanOptions(margin=0.0)
    gain = replan(planner, slow, summaries, BOUND_S, terms)
    more = gain.new.throughput_rps / gain.retained.throughput_rps - 1
    assert not replan(planner, slow, summaries, BOUND_S, dataclasses.replace(terms, min_gain=2 * more)).made


def test_where_nothing_meets_the_bound_nothing_is_changed(planner, choice, summaries):
    far = planner.with_estimator(at(planner.estimator, longer(summaries, 6.0)))
    change = replan(far, choice.row, summaries, 1.0)
    assert (change.new, change.made) == (None, False)
    assert change.cause.startswith("no schedule meets the bound with these lengths: the least latency is ")
    min_s = float(change.cause.split()[-2])
    assert far.best(min_s).row.latency_high_s <= min_s
    with pytest.raises(ScheduleError):
        far.best(0.98 * min_s)


def test_where_nothing_may_be_loaded_the_least_latency_is_that_of_what_is_loaded(planner, slow, summaries):
    far = planner.with_estimator(at(planner.estimator, longer(summaries, 6.0)))
    loaded = replan(far, slow, summaries, 1.0)
    change = replan(far, slow, summaries, 1.0, ReplanOptions(allow_reload=False))
    assert (change.new, change.made) == (None, False)
    assert change.cause.startswith("no schedule without loading weights meets the bound")
    assert float(change.cause.split()[-2]) > float(loaded.cause.split()[-2])


def test_the_reason_for_leaving_a_schedule_is_about_that_schedule(after, choice, summaries):
    change = replan(after, choice.row, summaries, BOUND_S)
    assert change.cause == f"the deployed schedule would take {change.retained_latency_s:.3g} s"
    assert change.new_latency_s < change.retained_latency_s


def test_the_margin_holds_the_bound_when_lengths_move_on(after, choice, summaries):
    change = replan(after, choice.row, summaries, BOUND_S, ReplanOptions(max_margin_cost=1.0))
    assert change.margin > 0
    assert change.free_rps > change.new.throughput_rps
    chosen = after.best(BOUND_S * (1 - change.margin)).row
    latencies_s = [
        evaluate_deployed(
            at(after.estimator, repeat_change(summaries, after.estimator.setting.task, share, 2048)),
            chosen,
            worst_case=True,
        )[1]
        for share in (1.0, 0.5, 0.25)
    ]
    assert min(latencies_s) <= BOUND_S


def test_a_margin_costs_no_more_than_it_may(after, choice, summaries):
    for max_margin_cost in (0.0, 0.1, 0.5):
        change = replan(after, choice.row, summaries, BOUND_S, ReplanOptions(max_margin_cost=max_margin_cost))
        best = after.best(BOUND_S * (1 - change.margin)).row
        assert best.throughput_rps >= (1 - max_margin_cost) * change.free_rps * (1 - 1e-9)


def test_without_a_bound_there_is_no_margin_and_no_late_request(planner, choice, summaries):
    change = replan(planner, choice.row, summaries)
    assert (change.margin, change.late_share) == (0.0, 0.0)


def test_late_requests_are_those_longer_than_the_bound_allows(opt_estimator, slow):
    task, bound_s = opt_estimator.setting.task, 1.5
    late = late_share(opt_estimator, slow, bound_s, worst_case=True)
    setting = opt_estimator.setting
    fixed = (
        Estimator(task, setting.cluster, setting.model, setting.tables, Assumptions(output_tokens=tokens))
        for tokens in range(1, 81)
    )
    held_s = [evaluate_deployed(one, slow, worst_case=True)[1] for one in fixed]
    tokens = sum(one <= bound_s for one in held_s)
    assert held_s == sorted(held_s)
    assert late == pytest.approx(task.output_pmf[tokens + 1 :].sum())
    assert 0 < late < 1


def alarm_of(prompts, outputs, evidence=None):
    return Alarm(9, 1.0, 1, 0.0, evidence or {}, ("outputs",), np.array(prompts), np.array(outputs))


def test_few_requests_move_the_planned_shape(summaries):
    rng = np.random.default_rng(0)
    outputs = rng.integers(20, 80, 200)
    after = lengths_since(summaries, alarm_of(rng.integers(1, 9, 200), outputs), 2048)
    assert after.prompt_pmf.tolist() == summaries.prompt_pmf.tolist()
    mean, sd, _ = moments(after.output_pmf)
    assert mean == pytest.approx(outputs.mean(), rel=0.02)
    assert sd == pytest.approx(outputs.std(ddof=1), rel=0.05)
    assert after.max_output_tokens > outputs.max()


def test_a_side_that_may_have_moved_is_taken_as_it_was_seen(summaries):
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(300, 500, 200), rng.integers(20, 80, 200)
    for evidence, mean in ((0.9, summaries.mean_prompt_tokens), (1.5, prompts.mean())):
        after = lengths_since(summaries, alarm_of(prompts, outputs, {"prompts": evidence}), 2048)
        assert after.mean_prompt_tokens == pytest.approx(mean, rel=0.01)


def test_enough_requests_are_counted(summaries):
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(1, 50, MIN_COUNTED_REQUESTS), rng.integers(20, 80, MIN_COUNTED_REQUESTS)
    after = lengths_since(summaries, alarm_of(prompts, outputs), 2048)
    assert after.output_pmf.tolist() == (np.bincount(outputs) / MIN_COUNTED_REQUESTS).tolist()
    assert after.mean_prompt_tokens == pytest.approx(prompts.mean())


def test_lengths_seen_stay_within_the_model(summaries):
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(1, 1900, MIN_COUNTED_REQUESTS), rng.integers(1, 1500, MIN_COUNTED_REQUESTS)
    after = lengths_since(summaries, alarm_of(prompts, outputs), 2048)
    assert after.max_prompt_tokens + after.max_output_tokens <= 2048
    assert after.prompt_pmf.sum() == pytest.approx(1)


@pytest.fixture(scope="module")
def followed(planner, choice, summaries):
    """A stream whose outputs become 30 % longer, observed by two adapters alike."""
    rng = np.random.default_rng(5)
    new = longer(summaries, 0.3)
    outputs = [rng.choice(len(t.output_pmf), n, p=t.output_pmf) for t, n in ((summaries, 500), (new, 1300))]
    prompts = rng.choice(len(summaries.prompt_pmf), 1800, p=summaries.prompt_pmf)
    rows = list(zip(prompts.tolist(), np.concatenate(outputs).tolist(), strict=True))
    made = []
    for _ in range(2):
        adapter = Adapter(planner, choice.row, BOUND_S, monitor=Monitor(seed=3))
        answers = [adapter.observe(*row, i / 10) for i, row in enumerate(rows)]
        made.append((adapter, [one for one in answers if one is not None]))
    return made


@pytest.mark.slow
def test_an_adapter_changes_what_runs_and_looks_again_once_more_is_known(followed, choice):
    adapter, (first, again) = followed[0]
    assert (first.first, again.first) == (True, False)
    assert abs(first.started - 501) < 40
    assert again.requests == MIN_COUNTED_REQUESTS
    assert adapter.deployed != choice.row
    assert adapter.deployed in (first.change.new, again.change.new)
    assert first.first_latency_s == first.change.retained_latency_s > BOUND_S
    assert again.first_latency_s > BOUND_S, "the first schedule would still break it"
    assert again.change.retained_latency_s <= BOUND_S
    assert again.change.before == first.change.before


def test_equal_requests_give_equal_answers(followed):
    one, two = followed
    assert repr(one[1]) == repr(two[1])
    assert one[0].deployed == two[0].deployed


def test_a_bound_for_a_fixed_length_does_not_move_with_the_lengths(opt, four_a40, opt_tables, summaries):
    """The paper's SLA (b) needs smaller margins than its SLA (a)."""
    rows = {}
    for name, fixed in (("a", None), ("b", summaries.output_quantile(0.99))):
        estimator = Estimator(summaries, four_a40, opt, opt_tables, Assumptions(output_tokens=fixed))
        planner = Planner(estimator, [4], [Strategy.RRA])
        best = planner.best(6.0)
        (row,) = drift(planner, best, (("mean", 0.15),))
        rows[name] = best.row, row
    (best_a, row_a), (best_b, row_b) = rows.values()
    assert best_a == best_b
    assert row_b.retained_latency_s < row_a.retained_latency_s
    assert row_b.margin <= row_a.margin


@pytest.mark.parametrize(
    ("given", "states"),
    [
        ({"storage": "tape"}, "storage must be"),
        ({"horizon_s": math.inf}, "horizon_s must be above 0 and finite"),
        ({"margin": 1.0}, "margin must be at least 0 and below 1"),
        ({"min_gain": -0.1}, "min_gain must be at least 0"),
        ({"max_margin_cost": 2.0}, "max_margin_cost must be from 0 to 1"),
    ],
)
def test_terms_have_their_ranges(given, states):
    with pytest.raises(InputError, match=states):
        ReplanOptions(**given)


def test_a_bound_of_nothing_is_refused(planner, choice, summaries):
    with pytest.raises(InputError, match="above 0"):
        replan(planner, choice.row, summaries, 0.0)
    with pytest.raises(InputError, match="output_tokens must be at least 1"):
        Assumptions(output_tokens=0)
