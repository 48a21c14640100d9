"""Which requests a scenario's lengths were counted over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lengthwise import config
from lengthwise import workload as w
from lengthwise.config.sections import ScheduleSection
from lengthwise.config.workload import Source
from lengthwise.report.schedule import write_schedule_json
from lengthwise.schema.errors import InputError
from lengthwise.usecases import schedule, schedule_plan, schedule_run
from lengthwise.usecases.schedule import question_of, sample_of

SEEN = w.Samples([100, 200, 300, 400], [10, 20, 30, 40])


def of(lengths):
    return sample_of(Source(lengths, w.AllAtOnce(), ""))


def test_pairs_that_were_seen_are_the_sample():
    got = of(SEEN)
    assert (got.paired, got.requests) == (True, 4)
    assert got.output_tokens.tolist() == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("limits", "outputs"),
    [
        ({"max_output_tokens": 25}, [10, 20, 25, 25]),
        ({"max_total_tokens": 320}, [10, 20, 20, 1]),
        ({"max_output_tokens": 25, "cut": "redraw"}, [10, 20]),
        ({"max_prompt_tokens": 300, "max_total_tokens": 310, "cut": "redraw"}, [10, 20]),
    ],
)
def test_limits_hold_of_the_sample_too(limits, outputs):
    assert of(w.Capped(SEEN, **limits)).output_tokens.tolist() == outputs


def test_nothing_within_the_limits_is_no_sample():
    assert of(w.Capped(SEEN, max_prompt_tokens=50, cut="redraw")) is None


def test_lists_are_samples_of_their_side():
    entries = w.Empirical([10, 20.4, 30])
    got = of(w.Joint(w.Uniform(1, 9), entries))
    assert (got.prompt_tokens, got.paired) == (None, False)
    assert got.output_tokens.tolist() == [10, 20, 30]
    both = of(w.Joint(entries, entries))
    assert (both.paired, both.requests) == (False, 3)


def test_formulas_and_weights_are_no_samples():
    assert of(w.Joint(w.Uniform(1, 9), w.Uniform(1, 9))) is None
    assert of(w.Joint(w.Uniform(1, 9), w.Empirical([1, 2], [5.0, 6.0]))) is None
    assert of(w.Capped(w.Joint(w.Uniform(1, 9), w.Uniform(1, 9)), 10)) is None


def test_a_bound_may_be_for_a_fixed_length():
    section = ScheduleSection(bound_for="80 tokens")
    assert (section.level, section.output_tokens) == (0.99, 80)
    assert ScheduleSection(bound_for="p95").output_tokens is None
    with pytest.raises(ValueError, match="80 tokens"):
        ScheduleSection(bound_for="80")


LISTED = """
[workload]
prompt = {{ kind = "empirical", tokens = [200, 400, 900] }}
output = {{ kind = "empirical", tokens = [1, 5, 9, 7] }}
request_rate = 1
[deployment]
model = "opt-13b"
gpu = "A40"
node = "pcie4-4"
tp = 2
[schedule]
latency_bound = "3s"
bound_for = "9 tokens"
strategies = ["rra"]
[run]
model_draws = {draws}
"""


def test_a_plan_reports_its_uncertainty():
    plan = schedule.plan_schedule(config.loads(LISTED.format(draws=12)))
    lengths, costs = plan.uncertainty.spreads
    assert (lengths.source, lengths.requests, lengths.draws) == ("lengths", 3, 200)
    assert (costs.source, costs.draws) == ("costs", 12)
    assert costs.throughput_rps[0] < plan.chosen.throughput_rps < costs.throughput_rps[1]
    assert plan.uncertainty.notes == ()
    assert plan.bound.tokens == 9
    assert all(point.band_rps is not None for _, points in plan.front for point in points)


def test_the_model_length_limit_covers_all_lengths_that_may_occur():
    """Drift moves outputs to what is left beside the longest prompt."""
    reported = LISTED + "[engine]\nmax_model_len = {limit}\n"
    narrow = question_of(config.loads(reported.format(draws=0, limit=909)))
    assert narrow.planner.estimator.setting.model.max_model_len == 909
    wide = question_of(config.loads(reported.format(draws=0, limit=9000)))
    assert wide.planner.estimator.setting.model.max_model_len == 2048
    with pytest.raises(InputError, match=r"engine\.max_model_len, 908 tokens"):
        question_of(config.loads(reported.format(draws=0, limit=908)))


def test_an_interval_of_costs_is_not_the_full_range_of_its_draws():
    """Five of a hundred lie beyond each end; of 16 not one did."""
    question = question_of(config.loads(LISTED.format(draws=12).replace("model_draws = 12", "")))
    assert len(question.perturbed) >= 100


def test_a_plan_of_another_scenario_is_refused_with_what_to_do(tmp_path):
    text = LISTED.format(draws=0)
    file, scenario = tmp_path / "plan.json", config.loads(text)
    write_schedule_json(file, schedule.plan_schedule(scenario))
    assert schedule_plan.planned_run(scenario, file).source == str(file)
    for other, states in (
        (text.replace("opt-13b", "llama-3-8b"), "scenario's model, llama-3-8b"),
        (text.replace("tp = 2", "tp = 4"), "scenario's GPUs, 4 x A40"),
    ):
        with pytest.raises(InputError, match=states) as caught:
            schedule_plan.planned_run(config.loads(other), file)
        assert "it is of " in str(caught.value)
        assert "plan this one again" in str(caught.value)


def test_phases_longer_than_the_outputs_name_plan_and_scenario(tmp_path):
    file, reported = tmp_path / "plan.json", schedule.plan_schedule(config.loads(LISTED.format(draws=0)))
    write_schedule_json(file, replace(reported, chosen=replace(reported.chosen, decode_steps=617)))
    with pytest.raises(InputError, match=r"plan\.json has N_D = 617 .* \(9 tokens\) of \[workload\]"):
        schedule_plan.planned_run(config.loads(LISTED.format(draws=0)), file)


def test_as_many_requests_are_played_as_fill_phases_to_count():
    text = LISTED.format(draws=0)
    scenario = config.loads(text)
    planned = schedule_plan.planned_run(scenario)
    large = replace(planned, row=replace(planned.row, prefill_batch=400, decode_batch=900.0))
    number = schedule_run.requests_to_count(large.row, 2)
    assert 0.75 * number / 2 / 400 >= 30, "phases of an engine that count"
    assert 0.25 * number / 2 >= 900, "those in which batches fill do not"
    assert len(schedule_run.schedule_requests(scenario, large, 2)) == number
    requested = config.loads(text.replace("request_rate = 1", "request_rate = 1\nnum_requests = 70"))
    assert len(schedule_run.schedule_requests(requested, large, 2)) == 70


def test_unknown_errors_are_noted():
    question = question_of(config.loads(LISTED.format(draws=0)))
    assert question.perturbed == ()
    plan = schedule.plan_schedule(config.loads(LISTED.format(draws=0)))
    assert len(plan.uncertainty.spreads) == 1
    assert plan.uncertainty.notes == ("The error of the cost tables is not estimated: run.model_draws is 0.",)
