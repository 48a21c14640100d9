from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload
from lengthwise.workload import (
    ClosedLoop,
    Delay,
    Fixed,
    Groups,
    Joint,
    LogNormal,
    Poisson,
    Sessions,
    Tools,
    Uniform,
    generate_sessions,
)

LENGTHS = Joint(Uniform(1, 60), Uniform(1, 40))
delays = st.builds(Delay, st.floats(0, 20), st.floats(0, 2))
tools = st.builds(
    Tools,
    calls=st.floats(0.1, 4),
    time=delays,
    tokens=st.sampled_from([Fixed(9), Uniform(1, 50)]),
    max_calls=st.none() | st.integers(1, 5),
    fan_out=st.integers(1, 4),
    fan_out_share=st.sampled_from([0.0, 0.4, 1.0]),
)
groups = st.builds(Groups, st.integers(1, 9), st.sampled_from([Fixed(40), Uniform(1, 90)]), st.floats(0, 3))
sessions = st.builds(
    Sessions,
    turns=st.floats(1, 6),
    think_time=delays,
    max_turns=st.none() | st.integers(1, 8),
    max_context_tokens=st.none() | st.integers(250, 900),
    groups=st.none() | groups,
    tools=st.none() | tools,
    block_tokens=st.sampled_from([1, 16, 24]),
)


def drawn(sessions: Sessions, n: int = 200, seed: int = 0, **more) -> Workload:
    return generate_sessions(n, sessions, LENGTHS, Poisson(2.0), seed, **more)


def parents_of(workload: Workload, i: int) -> list[int]:
    after = workload.after
    return [] if after is None else after.parent[after.start[i] : after.start[i + 1]].tolist()


def bytes_of(workload: Workload) -> bytes:
    columns = [workload.arrival_s, workload.prompt_tokens, workload.output_tokens, *workload.extra.values()]
    if workload.after is not None:
        columns += [workload.after.start, workload.after.parent, workload.after.delay_s]
    if workload.prefixes is not None:
        columns += [workload.prefixes.start, workload.prefixes.block_ids, workload.prefixes.turns]
    return b"".join(column.tobytes() for column in columns)


@settings(max_examples=40, deadline=None)
@given(sessions=sessions, n=st.integers(1, 300), seed=st.integers(0, 2**40))
def test_each_prompt_is_the_context_and_new_tokens(sessions, n, seed):
    w = drawn(sessions, n, seed)
    assert len(w) == n
    session, turn = w.extra["session"], w.extra["turn"]
    assert session[0] == 0
    assert (np.diff(session) >= 0).all()
    assert np.array_equal(w.session_starts_s, np.unique(w.arrival_s))
    assert len(w.session_starts_s) == session[-1] + 1
    assert np.array_equal(w.without_dependencies().session_starts_s, w.arrival_s)
    limit = sessions.max_context_tokens
    assert limit is None or (w.prompt_tokens + w.output_tokens <= limit).all()
    assert w.after is None or (w.after.delay_s >= 0).all()
    for i in range(n):
        parents = parents_of(w, i)
        assert (len(parents) == 0) == (turn[i] == 0)
        if not parents:
            continue
        before = w.prefixes.turns[i]
        assert parents[0] == before
        assert turn[before] == turn[i] - 1
        assert (session[parents] == session[i]).all()
        new = w.prompt_tokens[i] - w.prompt_tokens[before] - w.output_tokens[before]
        assert new >= 1
        if len(parents) > 1:
            children = parents[1:]
            assert len(children) == sessions.tools.fan_out
            assert (w.prefixes.turns[children] == before).all()
            assert new == w.output_tokens[children].sum()
    first = turn == 0
    if sessions.groups is not None:
        counts = np.diff(w.prefixes.start)
        assert (counts[~first] == 0).all()
        assert (w.prompt_tokens[first] > counts[first] * sessions.block_tokens).all()
        for group in np.unique(w.extra["group"]):
            ids = [
                tuple(w.prefixes.block_ids[w.prefixes.start[i] : w.prefixes.start[i + 1]])
                for i in np.flatnonzero(first & (w.extra["group"] == group))
            ]
            assert len(set(ids)) <= 1


@settings(max_examples=15, deadline=None)
@given(sessions=sessions, seed=st.integers(0, 2**40))
def test_equal_seeds_give_equal_bytes_and_more_requests_begin_alike(sessions, seed):
    few, again, more = drawn(sessions, 60, seed), drawn(sessions, 60, seed), drawn(sessions, 400, seed)
    assert bytes_of(few) == bytes_of(again)
    assert bytes_of(more.take(np.arange(60))) == bytes_of(few.take(np.arange(60)))
    assert bytes_of(few) != bytes_of(drawn(sessions, 60, seed + 1))


@pytest.mark.parametrize("zipf", [0.0, 0.8, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_groups_have_zipf_shares(zipf, seed):
    groups, n = Groups(20, Fixed(64), zipf), 20_000
    w = drawn(Sessions(groups=groups), n, seed)
    assert w.after is None
    share = groups.shares
    assert share[0] / share[9] == pytest.approx(10**zipf)
    error = np.bincount(w.extra["group"], minlength=20) / n - share
    assert (np.abs(error) < 5 * np.sqrt(share * (1 - share) / n)).all()


def test_turns_are_geometric_and_think_times_lognormal():
    w = drawn(Sessions(turns=4, think_time=Delay(5.0, 0.8)), 40_000)
    turns = np.bincount(w.extra["session"])[:-1]
    assert turns.mean() == pytest.approx(4, rel=0.03)
    assert turns.var() == pytest.approx(12, rel=0.1)
    later = np.log(w.after.delay_s[w.extra["turn"] > 0])
    assert np.exp(np.median(later)) == pytest.approx(5.0, rel=0.03)
    assert later.std() == pytest.approx(0.8, rel=0.03)
    assert (w.after.delay_s[w.extra["turn"] == 0] == 0).all()


def test_tools_add_their_results():
    w = drawn(Sessions(tools=Tools(3, Delay(2.0), Fixed(70))), 5_000)
    later = np.flatnonzero(w.extra["turn"] > 0)
    before = w.prefixes.turns[later]
    assert (w.prompt_tokens[later] - w.prompt_tokens[before] - w.output_tokens[before] == 70).all()
    assert (w.after.delay_s[later] == 2.0).all()
    assert np.bincount(w.extra["session"])[:-1].mean() == pytest.approx(4, rel=0.1)


def test_tenants_and_predictions():
    w = drawn(Sessions(turns=3), 500, predicted="oracle", tenants=[3, 1], name="chat")
    assert w.name == "chat"
    assert (w.predicted_tokens == w.output_tokens).all()
    for session in range(20):
        assert len(set(w.tenant[w.extra["session"] == session])) == 1


def test_groups_of_single_requests_may_come_in_a_closed_loop():
    w = generate_sessions(50, Sessions(groups=Groups(2, Fixed(99))), LENGTHS, ClosedLoop(4))
    assert (w.concurrency, w.after, int(np.diff(w.prefixes.start).max())) == (4, None, 6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Delay(-1.0), "median_s must be a finite number from 0; it is -1"),
        (lambda: Delay(1.0, 11), "sigma must be from 0 to 10; it is 11"),
        (lambda: Groups(0, Fixed(5)), "the number of groups must be at least 1; it is 0"),
        (lambda: Groups(3, Fixed(5), -1), "zipf must be from 0 to 10; it is -1"),
        (lambda: Tools(0), "calls must be a finite number above 0; it is 0"),
        (lambda: Tools(1, fan_out=0), "fan_out must be from 1 to 1000; it is 0"),
        (lambda: Tools(1, fan_out_share=2), "fan_out_share must be from 0 to 1; it is 2"),
        (lambda: Sessions(turns=0.5), "turns must be a finite number from 1; it is 0.5"),
        (lambda: Sessions(max_turns=0), "max_turns must be at least 1; it is 0"),
        (lambda: Sessions(max_context_tokens=1), "max_context_tokens must be at least 2; it is 1"),
        (lambda: drawn(Sessions(max_context_tokens=2, groups=Groups(1, Fixed(9)))), "raise max_context_tokens"),
        (lambda: drawn(Sessions(), 0), "num_requests must be at least 1; it is 0"),
        (lambda: drawn(Sessions(), 1, -1), "seed must not be negative; it is -1"),
        (lambda: generate_sessions(9, Sessions(turns=3), LENGTHS, ClosedLoop(2)), "a closed loop has none"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_limit_ends_sessions_early():
    w = drawn(Sessions(turns=50, max_context_tokens=300), 2_000)
    free = drawn(Sessions(turns=50), 2_000)
    assert w.extra["turn"].max() < free.extra["turn"].max()
    assert (w.prompt_tokens + w.output_tokens).max() <= 300


def test_lengths_may_come_from_any_model():
    lengths = Joint(LogNormal(5.0, 1.0), Fixed(20), 0.5)
    assert (generate_sessions(100, Sessions(turns=2), lengths, Poisson(1.0)).output_tokens == 20).all()
