"""Predictions from the earlier outputs of a session."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise import predict, workload
from lengthwise.predict.in_session import earlier_tokens
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import SharedPrefixes, Workload


def sessions(count: int, turns: int, rho: float, seed: int = 0) -> Workload:
    """Sessions with lognormal outputs of the intraclass correlation ``rho``, turn by turn."""
    rng = np.random.default_rng(seed)
    own, error = rng.standard_normal(count), rng.standard_normal((turns, count))
    output = np.exp(5 + np.sqrt(rho) * own + np.sqrt(1 - rho) * error).ravel()
    n = count * turns
    extra = {"session": np.tile(np.arange(count), turns), "turn": np.repeat(np.arange(turns), count)}
    return Workload(np.arange(n, dtype=float), np.full(n, 9), np.ceil(output).astype(int), extra=extra)


def trained(requests: Workload) -> predict.InSession:
    return predict.InSession(predict.Ecdf()).fit(predict.samples_of(requests))


@given(st.data())
def test_earlier_outputs_are_those_of_smaller_turns_of_the_session(data):
    n = data.draw(st.integers(1, 30))
    numbers = st.lists(st.integers(0, 4), min_size=n, max_size=n)
    session, turn = np.array(data.draw(numbers)), np.array(data.draw(numbers))
    output = np.arange(1, n + 1)
    made = Workload(np.arange(n, dtype=float), np.ones(n, int), output, extra={"session": session, "turn": turn})
    found = earlier_tokens(made, n)
    for i in range(n):
        expected = set(output[(session == session[i]) & (turn < turn[i])].tolist())
        assert set(found[i][np.isfinite(found[i])].astype(int).tolist()) == expected
        if expected:  # the last place has one of the latest turn
            assert turn[int(found[i][-1]) - 1] == max(turn[one - 1] for one in expected)


def test_the_correlation_of_sessions_is_learned_and_predicts_as_the_formula_says():
    assert trained(sessions(4000, 4, 0.6)).correlation_ == pytest.approx(0.6, abs=0.04)
    assert trained(sessions(4000, 4, 0.0)).correlation_ == pytest.approx(0.0, abs=0.04)
    predictor = trained(sessions(4000, 4, 0.6))
    rho, center = predictor.correlation_, float(predictor.inner.predict(predict.Prompts(1)).median[0])
    earlier = np.array([[np.nan, np.nan], [np.nan, 4 * center], [4 * center, 4 * center]])
    found = predictor.predict(predict.Prompts(3, earlier_tokens=earlier))
    weights = np.array([0, rho, 2 * rho / (1 + rho)])
    np.testing.assert_allclose(found.median, center * 4.0**weights, rtol=1e-6)
    spread = np.log(found.quantile(0.75) / found.quantile(0.25))
    np.testing.assert_allclose(spread / spread[0], np.sqrt(1 - rho * weights), rtol=0.02)


@pytest.mark.slow
def test_quantiles_are_reached_as_often_as_they_say_and_errors_shrink():
    predictor, new = trained(sessions(4000, 6, 0.6)), predict.samples_of(sessions(2000, 6, 0.6, seed=1))
    scores = predict.evaluate(predictor, new, draws=50, clock=None).scores
    plain = predict.evaluate(predictor.inner, new, draws=50, clock=None).scores
    assert scores["coverage90"].value == pytest.approx(0.9, abs=0.02)
    assert scores["width90"].value < 0.9 * plain["width90"].value
    assert scores["tau"].value > 0.35
    assert scores["mae"].value < 0.9 * plain["mae"].value


def test_without_earlier_turns_it_is_the_inner_predictor():
    predictor = trained(sessions(100, 2, 0.5))
    for prompts in (predict.Prompts(3), predict.Prompts(3, earlier_tokens=np.full((3, 8), np.nan))):
        np.testing.assert_array_equal(predictor.predict(prompts, 5).tokens, predictor.inner.predict(prompts, 5).tokens)


def test_it_is_saved_and_loaded(tmp_path):
    predictor = trained(sessions(100, 3, 0.5))
    predict.save(predictor, tmp_path / "x.lwp")
    loaded = predict.load(tmp_path / "x.lwp")
    prompts = predict.samples_of(sessions(20, 3, 0.5)).prompts
    np.testing.assert_array_equal(loaded.predict(prompts).tokens, predictor.predict(prompts).tokens)


def test_a_trace_without_sessions_is_refused():
    flat = replace(sessions(50, 2, 0.5), extra={})
    with pytest.raises(InputError, match=r"at least 30 samples must have an earlier turn .*; 0 have one"):
        trained(flat)


def test_sessions_are_found_by_prefixes_and_a_common_system_prompt_makes_none():
    # Blocks of 10 tokens: 0 is a system prompt, which requests 1 and 2 share; 3 continues 1, 4 continues 3.
    blocks = [[0, 6], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [5], [0, 2, 7]]
    start = np.cumsum([0, *map(len, blocks)])
    prefixes = SharedPrefixes(10, start, np.concatenate(blocks))
    prompts = np.array([10 * len(one) + 3 for one in blocks])
    found = workload.find_sessions(
        Workload(np.arange(7.0), prompts, np.array([2, 2, 20, 2, 2, 2, 2]), prefixes=prefixes)
    ).extra
    assert found["session"].tolist() == [0, 1, 2, 1, 1, 5, 6]  # 6 has no place for the output of 2
    assert found["turn"].tolist() == [0, 0, 0, 1, 2, 0, 0]


@pytest.mark.slow
def test_on_a_recorded_trace_earlier_outputs_predict_what_prompt_lengths_do_not(shared):
    path = shared("data/traces/mooncake_conversation_trace.jsonl.gz")
    requests = workload.find_sessions(workload.read(path))
    half = np.arange(len(requests) // 2)
    samples = predict.samples_of(requests)
    predictor = predict.InSession(predict.Ecdf()).fit(samples.take(half))
    later = samples.take(np.arange(len(half), len(samples)))
    later = later.take(np.flatnonzero(np.isfinite(later.prompts.earlier_tokens[:, -1])))
    by_length = predict.BucketEcdf(by=("prompt_tokens",)).fit(samples.take(half))
    found, plain = (predict.evaluate(one, later, draws=100, clock=None).scores for one in (predictor, by_length))
    assert found["tau"].value - found["tau"].half_width > 0.4
    assert plain["tau"].value + plain["tau"].half_width < 0.15
    assert found["mae"].value + found["mae"].half_width < 0.75 * plain["mae"].value
