"""Predictions of a whole workload."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_lengths import Misled, world

from lengthwise.predict import (
    BucketEcdf,
    Conditional,
    Conformal,
    Constant,
    Ecdf,
    LengthDistribution,
    LogNormalError,
    Oracle,
    Prompts,
    attach,
)
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload

SAMPLES = world(1500)
PREDICTORS = {
    "buckets": BucketEcdf().fit(SAMPLES),
    "conditional": Conditional(Misled()),
    "conformal": Conformal(Misled()).fit(SAMPLES),
    "misled": Misled(),
}


def workload(lengths, **extra):
    n = len(lengths)
    prompt_tokens = np.arange(1, n + 1) * 7 % 1900 + 1
    return Workload(np.arange(n) * 0.1, prompt_tokens, np.asarray(lengths), extra=extra)


def rows(found, request):
    p = found.predictions
    return p.total_tokens[p.start[request] : p.start[request + 1]]


def test_a_row_a_window_that_the_request_reaches():
    found = attach(workload([1, 50, 51, 1000]), Constant(80))
    assert np.diff(found.predictions.start).tolist() == [1, 1, 2, 20]
    np.testing.assert_allclose(rows(found, 3)[:4], [80, 80, 150, 225])  # outlived: half as much again
    np.testing.assert_array_equal(found.predicted_tokens, 80)
    once = attach(workload([1, 50, 51, 1000]), Constant(80), update_predictions=False)
    assert np.diff(once.predictions.start).tolist() == [1, 1, 1, 1]


def test_the_oracle_is_right_at_every_window():
    found = attach(workload([1, 70, 420]), Oracle(), window_tokens=100)
    np.testing.assert_array_equal(rows(found, 2), 420)
    p = found.predictions
    np.testing.assert_allclose(p.gittins_rank, [1, 70, 420, 320, 220, 120, 20])


@pytest.mark.parametrize("name", PREDICTORS)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.lists(st.integers(1, 400), min_size=8, max_size=8))
def test_only_the_number_of_rows_depends_on_the_truth(name, output, other):
    """Law: two workloads that differ in their true lengths alone agree in every row that both have."""
    one, two = (attach(workload(y), PREDICTORS[name]) for y in (output, other[: len(output)]))
    for request in range(len(output)):
        a, b = rows(one, request), rows(two, request)
        both = min(len(a), len(b))
        np.testing.assert_array_equal(a[:both], b[:both])


@given(st.lists(st.integers(1, 400), min_size=2, max_size=8), st.integers(0, 5))
def test_an_oracles_luck_is_one_draw_a_request(output, seed):
    """Without a fading error a request is wrong by the same factor at all windows, and in any company."""
    model = LogNormalError(0.5, exact_lengths=True)
    found = attach(workload(output), model, seed=seed)
    alone = attach(workload(output[:1]), model, seed=seed)
    np.testing.assert_array_equal(rows(found, 0), rows(alone, 0))
    first = found.predicted_tokens
    for request in range(len(output)):
        so_far = np.arange(len(rows(found, request))) * 50
        reached = so_far < first[request]
        np.testing.assert_allclose(rows(found, request)[reached], np.maximum(first[request], so_far + 1)[reached])


@pytest.mark.parametrize("statistic", ["mean", "median", "q0.9", "tail_inflated"])
def test_statistics_are_those_of_what_is_given(statistic):
    predictor = BucketEcdf().fit(SAMPLES)
    found = attach(workload([300]), predictor, statistic=statistic)
    message = predictor.predict(Prompts(1, prompt_tokens=np.array([8])), 0)
    for window, total in enumerate(rows(found, 0)):
        after = message.given(50 * window)
        tail = np.mean([after.quantile(level)[0] for level in np.linspace(0.9, 1, 41)[1::2]])
        expected = {"mean": after.mean[0], "median": after.median[0], "q0.9": after.quantile(0.9)[0]}
        if statistic in expected:
            assert total == pytest.approx(expected[statistic], rel=0.02)
        else:
            assert after.mean[0] < total < after.tokens[0, -1]
            assert total == pytest.approx((after.mean[0] + tail) / 2, rel=0.05)


@pytest.mark.parametrize("wrong", ["max", "q", "q1.5", "q0", "", "p90"])
def test_unknown_statistics_are_named(wrong):
    with pytest.raises(InputError, match=r"tail_inflated"):
        attach(workload([3]), Constant(3), statistic=wrong)


def test_windows_must_be_positive():
    with pytest.raises(InputError, match="window_tokens"):
        attach(workload([3]), Constant(3), window_tokens=0)


def test_texts_models_and_partial_outputs_are_handed_over():
    seen = []

    class Reader:
        def predict(self, prompts, tokens_so_far=0):
            seen.append((list(prompts.text), list(prompts.model), list(prompts.output_so_far), list(tokens_so_far)))
            return LengthDistribution.point(np.asarray(tokens_so_far) + 5.0)

    reported = workload([100, 40], prompt=["hello", None], model=["a", "b"], output=["x" * 200, "y" * 10])
    attach(reported, Reader())
    assert seen == [(["hello", ""], ["a", "b"], ["", ""], [0, 0]), (["hello"], ["a"], ["x" * 100], [50])]


def test_a_prompt_comes_once_a_call_however_long_its_output_is():
    class Counts:
        """Takes a prompt for long that comes often."""

        def predict(self, prompts, tokens_so_far=0):
            often = Counter(prompts.text)
            return LengthDistribution.point(np.array([50.0 * often[t] for t in prompts.text])).given(tokens_so_far)

    output = np.array([1, 400, 90, 1000])
    reported = attach(workload(output, prompt=list("abcd")), Counts())
    np.testing.assert_array_equal(reported.predicted_tokens, 50)

    class OnceCounts(Counts):
        predicts_once = True

    np.testing.assert_array_equal(attach(workload(output, prompt=list("abcd")), OnceCounts()).predicted_tokens, 50)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (np.ones, r"LengthDistribution of one row per request \(3\); it returned ndarray of 3"),
        (lambda n: LengthDistribution.point([4.0]), "it returned LengthDistribution of 1"),
        (lambda n: None, "it returned NoneType"),
        (lambda n: LengthDistribution.point(np.full(n, 1e11)), "at most 1e.10 tokens; Bad predicts 1e.11"),
    ],
)
def test_answers_that_are_none_are_errors(once, answer, words):
    class Bad:
        predicts_once = once

        def predict(self, prompts, tokens_so_far=0):
            return answer(len(prompts))

    with pytest.raises(InputError, match=words):
        attach(workload([5, 60, 7]), Bad())


def test_many_requests_are_predicted_in_chunks_with_the_same_result():
    output = np.random.default_rng(0).integers(1, 300, 30_000)
    complete = attach(workload(output), PREDICTORS["buckets"])
    part = attach(workload(output[:100]), PREDICTORS["buckets"])
    np.testing.assert_array_equal(rows(complete, 99), rows(part, 99))
    assert complete.predictions.start[-1] > 2**15


def test_the_rest_of_the_workload_stays():
    before = replace(workload([5, 6], model=["a", "b"]), priority=np.array([1, 2]), name="x")
    after = attach(before, Ecdf().fit(SAMPLES))
    assert (after.name, after.extra, after.priority.tolist()) == ("x", before.extra, [1, 2])
    assert before.predictions is None
