"""A server's counters between two looks tell steps' seconds: planted truth is found, and nothing is fitted blindly."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from planted_counters import SHIFT_S, logged, scraped, simulated, streamed, token_times
from planted_runs import LIMITS, MIN_COUNT, TRUTH, measured, requests

from lengthwise import engine
from lengthwise.measure.calibration import calibrate, step_evidence
from lengthwise.measure.calibration.busy_periods import MIN_STEPS, busy_periods_of, counters_of, max_steps
from lengthwise.measure.calibration.measured_runs import run_of
from lengthwise.measure.calibration.parameters import linear_host_cost
from lengthwise.measure.calibration.step_evidence import step_kinds
from lengthwise.schema.errors import InputError

STEADY = {"work": 1.3, "host_step": 2e-3}
LOADS = {
    "long": {"rate": 6.0},
    "few at a time": {"rate": 0.5, "n": 60},
    "short": {"rate": 20.0, "prompt": (20, 300)},
    "beyond the step's tokens": {"rate": 2.0, "prompt": (2100, 7000)},
}


def periods(run, validation=0.0, limits=LIMITS):
    one = run_of(run, "run", validation)
    return busy_periods_of(one, counters_of(run.metadata["metrics"]), limits)


def told_by(evidence, deployment):
    """Work's factor and the host's seconds of a step, by robust least squares of relative errors; the rest is known."""
    known = {"host_step": 0.0, "log_step": 0.0, "host_sequence": linear_host_cost(deployment.cost.host_s)[1]}
    rest = evidence.predict(evidence.parts | {"work": 0 * evidence.seconds}, known)
    steps = evidence.parts.get("steps", np.ones(len(evidence.seconds)))
    columns = np.column_stack([evidence.parts["work"], steps]) / evidence.seconds[:, None]
    wanted, weight = 1 - rest / evidence.seconds, np.ones(len(rest))
    for _ in range(20):
        found = np.linalg.lstsq(columns * weight[:, None], wanted * weight, rcond=None)[0]
        off = np.abs(columns @ found - wanted)
        weight = np.sqrt(np.minimum(1, 2.2 * max(0.005, np.median(off)) / np.maximum(off, 1e-12)))
    return found


def of_counters(run, deployment):
    return step_evidence.counter_evidence([run_of(run, "run", 0.0)], deployment)


@pytest.mark.parametrize("period_s", [0.25, 1.0])
@pytest.mark.parametrize("load", LOADS)
def test_busy_periods_cost_what_the_engine_took(deployment, load, period_s):
    workload = requests(**LOADS[load])
    found, _ = of_counters(scraped(workload, deployment, STEADY, period_s), deployment)
    step_s, sequence_s = linear_host_cost(deployment.cost.host_s)
    values = {"host_step": step_s, "host_sequence": sequence_s} | STEADY
    assert len(found.seconds) > 5
    assert abs(np.median(found.residuals(values))) < 0.01
    total_s = found.predict(found.parts, values).sum()
    assert total_s == pytest.approx(found.seconds.sum(), rel=0.01)


def test_counters_alone_recover_planted_parameters(deployment):
    """Nine of ten are within 5 % of a factor and 0.35 ms of a step, wherever in a step the counters are read."""
    rng, within = np.random.default_rng(0), []
    for k in range(24):
        work, host_s = rng.uniform(0.7, 1.6), rng.uniform(5e-4, 6e-3)
        period_s, answer_s, seed = rng.uniform(0.25, 1.0), rng.uniform(0.0, 0.1), int(rng.integers(0, 100))
        workload = requests(seed=seed, **LOADS[("long", "few at a time", "short")[k % 3]])
        truth = {"work": work, "host_step": host_s}
        run = streamed(workload, deployment, truth, period_s, late_s=1e-4, answer_s=answer_s)
        computed = told_by(of_counters(run, deployment)[0], deployment)
        within.append(abs(computed[0] / work - 1) <= 0.05 and abs(computed[1] - host_s) <= 3.5e-4)
    assert np.mean(within) >= 0.9


@pytest.mark.slow
def test_a_calibration_to_counters_is_as_good_as_one_to_a_log(deployment):
    """Over three runs, mean absolute error in log of each planted value; both with 2 % of noise on the requests."""
    off = {"counters": [], "log": []}
    for seed, period_s in enumerate((0.25, 0.5, 1.0)):
        workload = requests(seed=seed)
        run = scraped(workload, deployment, TRUTH, period_s, noise=0.02, seed=seed, answer_s=0.005)
        found = {
            "counters": calibrate([run], deployment, fit=MIN_COUNT),
            "log": calibrate(
                [run], deployment, fit=MIN_COUNT, iterations=logged(workload, deployment, TRUTH, TRUTH["host_step"] / 2)
            ),
        }
        for kind, one in found.items():
            off[kind].append([abs(np.log(one[name].value / value)) for name, value in TRUTH.items()])
            assert all(one[name].low <= value <= one[name].high for name, value in TRUTH.items())
    work, host = np.mean(off["counters"], axis=0)
    log_work, log_host = np.mean(off["log"], axis=0)
    assert work < max(0.03, 2 * log_work)
    assert host < max(0.25, 2 * log_host)


def test_counters_are_fitted_by_default_and_noted(deployment):
    run = scraped(requests(), deployment, TRUTH, 1.0)
    found = calibrate([run], deployment, fit=MIN_COUNT)
    for name, value in TRUTH.items():
        assert found[name].low <= value <= found[name].high
    (note,) = (note for note in found.notes if "counters were fitted" in note)
    assert "busy periods" in note
    without = calibrate([run], deployment, fit=["work"], scrape="no")
    assert not any("counters" in note for note in without.notes)
    with pytest.raises(InputError, match="scrape must be one of auto, no"):
        calibrate([run], deployment, scrape="yes")


def test_only_the_fitted_part_of_a_run_is_looked_at(deployment):
    run = scraped(requests(), deployment, TRUTH, 0.5)
    every, part = periods(run), periods(run, validation=0.5)
    deadline_s = np.sort(run.records.requests.arrival_s)[60]
    assert part.end_s.max() <= deadline_s < every.end_s.max()
    assert len(part) < len(every)
    assert isinstance(periods(run, validation=1.0), str)


def test_what_was_counted_is_in_the_kinds_of_steps(deployment):
    found = periods(scraped(requests(), deployment, TRUTH, 0.5))
    stretch, steps, kinds = step_kinds(found, deployment)
    for column, reported in (
        ("prefill_tokens", found.prompt_tokens),
        ("prefill_seqs", found.prompts),
        ("decode_seqs", found.decodes),
    ):
        sums = np.bincount(stretch, weights=steps * getattr(kinds, column))
        np.testing.assert_allclose(sums, reported, rtol=1e-9, atol=1e-6)
    assert found.steps.min() >= MIN_STEPS
    assert (kinds.prefill_tokens + kinds.decode_seqs).max() <= LIMITS.max_num_batched_tokens * 1.01


def steps_in(found, workload, deployment, truth):
    """The engine's steps; the numbers of the first one of each stretch, and of that behind its last."""
    steps = simulated(workload, deployment, truth).steps
    begin_s, end_s = found.end_s - found.seconds - SHIFT_S, found.end_s - SHIFT_S
    return steps, *(np.searchsorted(steps.end_s, at_s + 1e-3) for at_s in (begin_s, end_s))


def test_steps_that_only_compute_a_part_of_a_prompt_are_in_no_stretch(deployment):
    """With one slot prompts of several steps are computed alone, and vLLM counts the last of these steps only."""
    workload = requests(2.0, 60, prompt=(5000, 8000), output=(20, 90))
    one = replace(deployment, limits=replace(LIMITS, max_num_seqs=1))
    run = streamed(workload, one, STEADY, 0.25, late_s=1e-4)
    found = periods(run)
    _, first, last = steps_in(found, workload, one, STEADY)
    assert len(found) > 10
    np.testing.assert_array_equal(found.steps, last - first)
    assert counters_of(run.metadata["metrics"]).steps[-1] < 0.97 * len(simulated(workload, one, STEADY).steps.end_s)


def test_in_a_stretch_the_engine_never_idled(deployment):
    """Gaps are shorter than the time between looks, and requests are a while on their way to the engine."""
    workload, truth = requests(0.7, 300, prompt=(20, 300), output=(20, 200)), {"host_step": 2e-3}
    found = periods(streamed(workload, deployment, truth, 0.5, late_s=1e-4, front_s=0.2))
    steps, first, last = steps_in(found, workload, deployment, truth)
    busy_s = np.concatenate([[0.0], np.cumsum(steps.end_s - steps.start_s)])
    assert len(found) > 10
    assert busy_s[-1] < 0.8 * steps.end_s[-1]
    np.testing.assert_allclose(busy_s[last] - busy_s[first], found.seconds, rtol=0.02)


def test_a_host_with_nonlinear_seconds_per_sequence_is_counted_completely(deployment):
    bent = deployment.cost.host_s + 1e-3 * np.sqrt(np.arange(len(deployment.cost.host_s)))
    bent = replace(deployment, cost=replace(deployment.cost, host_s=bent))
    found, _ = of_counters(streamed(requests(3.0), bent, {}, 1.0, late_s=1e-4), bent)
    step_s, sequence_s = linear_host_cost(bent.cost.host_s)
    values = {"host_step": step_s, "host_sequence": sequence_s}
    assert abs(np.median(found.residuals(values))) < 0.01


def changed(run, **columns):
    """The run with other columns: a function of the column's values."""
    metrics = dict(run.metadata["metrics"])
    for name, change in columns.items():
        key = next(key for key in metrics if name in key)
        metrics[key] = change(metrics[key])
    return replace(run, metadata={"metrics": metrics})


@pytest.mark.parametrize(
    ("change", "report"),
    [
        ({"generation_tokens": lambda c: [3 * x for x in c]}, "generated .*, but its requests have only"),
        ({"total_sum": lambda c: [2 * x for x in c]}, "computed in prompts .*, but its requests have only"),
        ({"total_count": lambda c: [2 * x for x in c]}, "several HTTP fronts"),
        ({"num_requests_running": lambda c: [0] * len(c)}, "between two scrapes during which it was always busy"),
        ({"num_preemptions": lambda c: list(range(len(c)))}, "between two scrapes during which it was always busy"),
        ({"took_s": lambda c: [0.9] * len(c)}, "between two scrapes during which it was always busy"),
        (
            {"iteration_tokens_total_count": lambda c: [None] * len(c)},
            "between two scrapes during which it was always busy",
        ),
    ],
)
def test_counters_without_step_seconds_are_not_fitted(deployment, change, report):
    run = changed(scraped(requests(n=60), deployment, TRUTH, 0.25), **change)
    evidence, (note,) = of_counters(run, deployment)
    assert evidence is None
    assert note.startswith("the server's counters of run were not fitted: ")
    assert re.search(report, note)


def test_counters_of_another_kind_are_named_and_left(deployment):
    run = scraped(requests(n=60), deployment, TRUTH, 0.25)
    columns = run.metadata["metrics"]
    for gone, reported in (
        ("time_to_first_token", "lack vllm:time_to_first_token_seconds_count"),
        ("bucket", "lack the buckets of vllm:iteration_tokens_total"),
    ):
        assert reported in counters_of({name: c for name, c in columns.items() if gone not in name})
    drafts = columns | {"vllm:spec_decode_num_drafts_total": [1.0] * len(columns["at_s"])}
    assert "drafts tokens" in counters_of(drafts)
    two = engine.deploy("llama-3-8b", "H100", limits=LIMITS, replicas=2)
    evidence, (note,) = of_counters(run, two)
    assert evidence is None
    assert "2 replicas" in note


def test_a_run_without_counters_needs_no_word(deployment):
    assert of_counters(measured(requests(n=60), deployment), deployment) == (None, [])


def test_steps_longer_than_the_time_between_looks_are_in_periods_too(deployment):
    """Looks that fall within one step are put together: nearly all of a busy run is in periods."""
    workload, truth = requests(n=60), {"host_step": 0.4}
    found = periods(streamed(workload, deployment, truth, 0.25, late_s=1e-4))
    steps, first, last = steps_in(found, workload, deployment, truth)
    assert found.seconds.sum() > 0.8 * steps.end_s[-1]
    np.testing.assert_allclose(steps.end_s[last - 1] - steps.end_s[first - 1], found.seconds, rtol=0.02)


def test_each_of_two_fronts_counts_the_steps_in_which_it_has_a_request(deployment):
    """As vLLM does with --api-server-count 2: tokens add up, and steps do not."""
    workload = requests(n=60)
    run = scraped(workload, deployment, TRUTH, 0.25)
    fronts = [front_steps(run, workload, deployment, odd) for odd in (0, 1)]
    both = changed(run, iteration_tokens_total_count=lambda _: np.sum(fronts, axis=0).tolist())
    assert "several HTTP fronts" in periods(both)
    assert len(periods(changed(run, iteration_tokens_total_count=lambda c: [1.02 * x for x in c]))) > 0


def front_steps(run, workload, deployment, odd):
    """So far at each look, the steps in which a front that has every second request got a token."""
    records = simulated(workload, deployment, TRUTH)
    times = token_times(records, 1e-9, np.random.default_rng(0))
    own = np.arange(len(workload)) % 2 == odd
    at_s = np.unique(np.round(times.at_s[np.repeat(own, np.diff(times.start))], 4))
    return np.searchsorted(at_s, run.metadata["metrics"]["at_s"], side="right")


def test_steps_are_as_many_as_those_that_decode_get_tokens(deployment):
    for load in LOADS.values():
        records = simulated(requests(**load), deployment, STEADY)
        made = records.steps.decode_seqs > 0
        first = np.unique(np.searchsorted(records.steps.end_s, records.requests.first_token_s - 1e-9))
        made[first] = True
        assert max_steps(records.requests) == pytest.approx(made.sum(), rel=0.05)
