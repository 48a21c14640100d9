"""The load of a search: a rate only stretches time."""

from __future__ import annotations

import os
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from market import Chat

from lengthwise.engine import deploy
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError
from lengthwise.schema.plan import Limit
from lengthwise.schema.workload import Workload
from lengthwise.search import capacity_search
from lengthwise.search.capacity_search import rough_capacity, scout
from lengthwise.search.limits import SloLimits
from lengthwise.search.load import SMALLEST_DRAW, Load
from lengthwise.workload import Delay, Fixed, Groups, Joint, Poisson, Sessions, generate_sessions

RATES = st.floats(1e-3, 1e3)


def same(a, b):
    return (
        a.arrival_s.tobytes() == b.arrival_s.tobytes()
        and a.prompt_tokens.tobytes() == b.prompt_tokens.tobytes()
        and a.output_tokens.tobytes() == b.output_tokens.tobytes()
    )


@settings(max_examples=40)
@given(st.integers(0, 3), st.integers(2, 5000), RATES, RATES)
def test_a_rate_only_stretches_time(seed, n, rate, other):
    load = Load(Chat())
    slow, fast = load.at(seed, n, rate), load.at(seed, n, other)
    assert len(slow) == len(fast) == n
    np.testing.assert_array_equal(slow.prompt_tokens, fast.prompt_tokens)
    np.testing.assert_array_equal(slow.output_tokens, fast.output_tokens)
    np.testing.assert_allclose(slow.arrival_s * rate, fast.arrival_s * other, rtol=1e-12)
    assert slow.arrival_s[0] == 0
    assert (n - 1) / slow.arrival_s[-1] == pytest.approx(rate)


@settings(max_examples=20)
@given(st.permutations([(0, 10), (1, 10), (0, 4096), (0, 4097), (1, 5000)]))
def test_earlier_calls_change_nothing(requested):
    load = Load(Chat())
    for seed, n in requested:
        assert same(load.at(seed, n, 2.0), Load(Chat()).at(seed, n, 2.0))
        assert same(load.batch(seed, n), Load(Chat()).batch(seed, n))


def test_seeds_differ_and_few_requests_are_the_first_of_many():
    load = Load(Chat())
    few, many = load.at(0, 100, 1.0), load.at(0, 4000, 1.0)
    np.testing.assert_array_equal(few.prompt_tokens, many.prompt_tokens[:100])
    assert not same(few, load.at(1, 100, 1.0))


def test_a_pickled_load_gives_the_same_and_carries_no_requests():
    load = Load(Chat(), "chat", 5)
    first = load.at(3, 4000, 1.5)
    packed = pickle.dumps(load)
    again = pickle.loads(packed)
    assert len(packed) < 1000
    assert (again.name, again.seeds) == ("chat", 5)
    assert same(again.at(3, 4000, 1.5), first)


def test_threads_draw_once_and_get_the_same():
    drawn, got = [], []

    def draw(seed, n):
        drawn.append((seed, n))
        return Chat()(seed, n)

    load = Load(draw)
    start = threading.Barrier(8)

    def take(rate):
        start.wait()
        got.append([load.at(seed, 500, 1.0) for seed in range(3)])

    threads = [threading.Thread(target=take, args=(1.0 + i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(drawn) == [(seed, SMALLEST_DRAW) for seed in range(3)]
    assert all(same(a, b) for own in got for a, b in zip(own, got[0], strict=True))


def test_a_batch_arrives_all_at_once():
    batch = Load(Chat()).batch(0, 77)
    assert len(batch) == 77
    assert not batch.arrival_s.any()


def columns(n):
    """A workload with every column."""
    return Workload(
        np.arange(n) * 0.5, np.arange(n) + 1, np.arange(n) + 2, np.arange(n) + 0.5, np.arange(n) % 3,
        {"session": np.arange(n) // 2},
    )  # fmt: skip


def test_all_columns_are_cut_alike_and_a_short_trace_gives_what_it_has():
    cut = Load(lambda _, n: columns(min(n, 50))).at(0, 20, 3.0)
    assert len(cut) == len(cut.predicted_tokens) == len(cut.priority) == len(cut.extra["session"]) == 20
    np.testing.assert_array_equal(cut.predicted_tokens, np.arange(20) + 0.5)
    complete = Load(lambda _, n: columns(min(n, 50))).at(0, 9000, 3.0)
    assert len(complete) == 50
    assert 49 / complete.arrival_s[-1] == pytest.approx(3.0)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_is_above_zero_and_finite(rate):
    with pytest.raises(InputError, match="above 0 and finite"):
        Load(Chat()).at(0, 10, rate)


@pytest.mark.parametrize("concurrency", [None, 4])
def test_requests_without_times_have_no_rate(concurrency):
    load = Load(lambda _, n: Workload(np.zeros(n), np.ones(n, int), np.ones(n, int), concurrency=concurrency))
    with pytest.raises(InputError, match="one after the other"):
        load.at(0, 10, 1.0)


def chats(seed, requests):
    """Sessions of about four turns with a think time of 10 s, one a second."""
    sessions = Sessions(turns=4, think_time=Delay(10.0))
    return generate_sessions(requests, sessions, Joint(Fixed(50), Fixed(10)), Poisson(1.0), seed)


def test_a_rate_of_sessions_counts_all_their_requests():
    load = Load(chats)
    drawn = load.at(0, 4000, 8.0)
    starts = drawn.arrival_s[np.diff(drawn.after.start) == 0]
    assert (len(drawn) - 1) / starts[-1] == pytest.approx(8.0)
    assert load.requests_per_session == pytest.approx(4, rel=0.1)
    assert load.requests_per_session * len(starts) / starts[-1] == pytest.approx(8.0, rel=0.1)
    np.testing.assert_array_equal(drawn.after.delay_s, load.at(0, 4000, 1.0).after.delay_s)


def test_the_rate_of_sessions_builds_up_over_their_later_turns():
    """A geometric number of turns: 5 % of the requests are preceded by about 10 others, each with a think time."""
    load = Load(chats)
    before = load.ramp_s(0.0) / 10.0
    assert load.ramp_s(1.0) == pytest.approx(11.0 * before)
    drawn = load.sample()
    assert (drawn.extra["turn"] <= before).mean() == pytest.approx(0.95, abs=0.03)
    assert Load(Chat()).ramp_s(1.0) == 0.0


def grouped_chats(seed, requests):
    sessions = Sessions(turns=4, think_time=Delay(10.0), groups=Groups(3, Fixed(64)))
    return generate_sessions(requests, sessions, Joint(Fixed(50), Fixed(10)), Poisson(1.0), seed)


def test_rates_of_sessions_share_all_but_their_times():
    load = Load(grouped_chats)
    slow, fast = load.at(0, 300, 1.0), load.at(0, 300, 3.0)
    assert slow.prefixes is fast.prefixes
    fresh = Load(grouped_chats).at(0, 300, 3.0)
    for column in ("arrival_s", "prompt_tokens", "output_tokens"):
        np.testing.assert_array_equal(getattr(fast, column), getattr(fresh, column))
    for part, names in {"after": ("start", "parent", "delay_s"), "prefixes": ("start", "block_ids", "turns")}.items():
        for name in names:
            np.testing.assert_array_equal(getattr(getattr(fast, part), name), getattr(getattr(fresh, part), name))
    assert fast.arrival_s[-1] * 3 == pytest.approx(slow.arrival_s[-1])


def test_other_arrivals_are_checked():
    with pytest.raises(InputError, match="must not decrease"):
        Load(grouped_chats).at(0, 99, 1.0).with_arrivals(np.arange(99.0)[::-1])


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="needs the compiled engine")
def test_short_runs_of_sessions_find_the_ratios_of_long_ones(monkeypatch):
    """Rough capacities are compared with each other: what a run lacks at its start is missing in all of them."""
    load, limits = Load(grouped_chats), SloLimits((Limit("queueing_delay.p99", 1.0),))
    limited = EngineLimits(max_num_seqs=2, max_model_len=2048, enable_prefix_caching=True)
    deployments = [deploy("llama-3-8b", gpu, limits=limited) for gpu in ("H100", "L40S")]
    guesses = [scout(one, load, limits).rate_rps.value for one in deployments]

    def rough():
        return [
            rough_capacity(one, load, limits, guess, seeds=2) for one, guess in zip(deployments, guesses, strict=True)
        ]

    short = rough()
    monkeypatch.setattr(capacity_search, "RAMP_SPANS", 20.0)
    long = rough()
    assert all(4 * a.requests < b.requests for a, b in zip(short, long, strict=True))
    ratios = [one[0].rate_rps.value / one[1].rate_rps.value for one in (short, long)]
    assert ratios[0] == pytest.approx(ratios[1], rel=0.1)
