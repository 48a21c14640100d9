"""The gateway's routers are those of the simulator, on what the gateway knows of its workers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_worlds import request, scheduler, sent, worker

from lengthwise.gateway.config import OWN_ROUTER, Admission, Dispatch, Order, router_policy
from lengthwise.gateway.core.dispatch import DispatchPass, Router, Sessions
from lengthwise.gateway.core.ranking import Entry
from lengthwise.gateway.core.worker import Worker
from lengthwise.gateway.request import PrefixHasher
from lengthwise.gateway.scheduling import Signals, WorkerState
from lengthwise.policy import known
from lengthwise.policy.compile import compiled
from lengthwise.policy.contracts import ROUTER_ARGUMENTS
from lengthwise.schema.errors import InputError, UnknownNameError

HASHES = PrefixHasher(b"a secret of tests")
SYSTEMS = [f"You are clerk {number} of the archive. " * 60 for number in range(4)]
NAMES = sorted(set(known("router")) - {"central", "prefix_precise", "shortest_expected_delay", "least_work_left"})


def begins(system, tokens=500):
    return {"prompt_tokens": tokens, "prefix": HASHES.of_text(system, tokens, model="m")}


def place(made, now_s, one):
    made.offer(now_s, one)
    ((_, name),) = made.schedule(now_s).assign
    return name


loads = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400), st.booleans()), max_size=5),  # its requests
        st.sampled_from([None, 20_000, 60_000]),  # its KV cache, large enough for all
        st.one_of(st.none(), st.floats(0, 1)),  # the share in use, as its engine reports it
    ),
    min_size=2,
    max_size=5,
)


def workers_of(loads, *, passthrough):
    """Workers with requests in flight, and for each the arguments of a router, counted anew."""
    workers, expected = [], []
    for number, (jobs, kv_tokens, kv_used) in enumerate(loads):
        state = WorkerState(f"w{number}", ("m",), concurrency=9, kv_tokens=kv_tokens, signals=Signals(kv_used=kv_used))
        one = Worker(state, Dispatch(), passthrough=passthrough)
        started = 0
        for at, (system, predicted, has_started) in enumerate(jobs):
            entry = Entry(request(100 * number + at, predicted=predicted, **begins(SYSTEMS[system])))
            entry.set_prediction(entry.request.length_prediction)
            one.dispatch(entry)
            if has_started:
                entry.request.generated_tokens = 1
                one.on_progress(1.0, entry, 1)
                started += 1
        tokens = sum(500 + max(predicted, 1 + has_started) for _, predicted, has_started in jobs)
        expected.append((len(jobs) - started if passthrough else 0, len(jobs), tokens))
        workers.append(one)
    return workers, expected


@settings(max_examples=100, deadline=None)
@given(loads, st.sampled_from(NAMES), st.integers(0, 3), st.integers(-1, 4), st.booleans(), st.integers(0, 9))
def test_the_compiled_router_of_the_simulator_chooses_the_same_worker(loads, name, system, previous, passthrough, seed):
    workers, expected = workers_of(loads, passthrough=passthrough)
    entry = Entry(request(1, session="s", **begins(SYSTEMS[system] + "who?")))
    entry.set_prediction(entry.request.length_prediction)
    policy = router_policy(Dispatch(router=name))
    sessions = Sessions()
    if 0 <= previous < len(workers):
        sessions.dispatched(entry, f"w{previous}")
    routers = [Router(policy, passthrough=passthrough, seed=seed) for _ in range(2)]
    chosen = DispatchPass(workers, sessions, 0.5, 0.0, {"m": 1}, routers[0]).choose(entry)
    arguments = routers[1].arguments(entry, workers, sessions.worker_of(entry))
    assert workers[compiled(policy)(*arguments)] is chosen

    seen = dict(zip(ROUTER_ARGUMENTS, arguments, strict=True))
    waiting, all_there, tokens = (np.array(column) for column in zip(*expected, strict=True))
    assert seen["waiting"].tolist() == waiting.tolist()
    assert (seen["waiting"] + seen["running"]).tolist() == all_there.tolist()
    assert seen["tokens"].tolist() == tokens.tolist()
    assert seen["previous_replica"] == (previous if 0 <= previous < len(workers) else -1)
    assert 0 <= seen["draw_a"] < 1
    if policy.prefix:
        alike = [any(job[0] == system for job in jobs) for jobs, _, _ in loads]
        assert (seen["prefix_tokens"] > 0).tolist() == alike
        assert (seen["prefix_tokens"] <= 500).all()
    if policy.uses("free_blocks"):
        shares = seen["free_blocks"] / seen["total_blocks"]
        reported = [(1 - used, share) for (_, _, used), share in zip(loads, shares, strict=True) if used is not None]
        assert [share for _, share in reported] == pytest.approx([free for free, _ in reported], abs=0.01)
        assert ((shares >= 0) & (shares <= 1)).all()


@pytest.mark.parametrize("name", ["cache_aware", "prefix_approximate", "uncached_work", "uncached_load"])
def test_a_shared_prefix_goes_to_the_worker_that_has_it(name):
    made = scheduler("fcfs", workers=[worker(f"w{n}", cap=9) for n in range(3)], dispatch=Dispatch(router=name))
    first = place(made, 0.0, request(0, **begins(SYSTEMS[0])))
    made.remove(0.1, 0)
    others = {place(made, 0.2, request(n, **begins(SYSTEMS[1] * n))) for n in (1, 2)}
    for n in (1, 2):
        made.remove(0.3, n)
    then = {place(made, 1.0 + n, request(n, **begins(SYSTEMS[0] + "and who?"))) for n in (3, 4, 5)}
    assert then == {first}
    assert others


def test_round_robin_takes_all_workers_in_turn():
    made = scheduler("fcfs", workers=[worker(n, cap=9) for n in "abc"], dispatch=Dispatch(router="round_robin"))
    assert "".join(place(made, 0.0, request(n)) for n in range(7)) == "abcabca"


def test_a_request_does_not_wait_for_the_worker_of_its_session():
    """The queue is one for all workers: a router chooses among those with a free slot only."""
    dispatch = Dispatch(router="session_affinity")
    made = scheduler("fcfs", workers=[worker("a", cap=1), worker("b", cap=1)], dispatch=dispatch)
    assert place(made, 0.0, request(1, session="s")) == "a"
    assert place(made, 0.1, request(2, session="s")) == "b"
    made.remove(0.2, 1)
    made.remove(0.2, 2)
    assert place(made, 0.3, request(3, session="s")) == "b"
    assert place(made, 0.4, request(4)) == "a"


def test_workers_that_may_not_take_the_request_are_not_offered():
    workers = [worker("down", cap=9, up=False), worker("other", cap=9, models=("n",)), worker("full", cap=1)]
    workers += [worker("a", cap=9), worker("b", cap=9)]
    made = scheduler("fcfs", workers=workers, dispatch=Dispatch(router="round_robin"))
    assert [place(made, 0.0, request(n)) for n in range(5)] == ["full", "b", "a", "b", "a"]
    made.on_queue_full(0.1, "a", 2)
    for number in (8, 9):
        made.offer(0.1, request(number))
    assert {name for _, name in made.schedule(0.1).assign} == {"b"}


def test_requests_without_a_first_token_wait_at_a_worker_only_where_engines_queue():
    for mode, expected in (("observe", "b"), ("fcfs", "a")):
        workers = [WorkerState("a", ("m",), concurrency=9), WorkerState("b", ("m",), concurrency=9)]
        made = scheduler(mode, workers=workers, dispatch=Dispatch(router="least_waiting"))
        assert place(made, 0.0, request(1)) == "a"
        assert place(made, 0.1, request(2)) == expected
        made.on_progress(0.2, 1, 1)
        assert place(made, 0.3, request(3)) == "a"


def test_the_router_can_change_while_the_gateway_runs():
    made = scheduler("fcfs", workers=[worker(n, cap=9) for n in "ab"], dispatch=Dispatch(router="round_robin"))
    order, admission = Order(mode="fcfs"), Admission()
    assert place(made, 0.0, request(1)) == "a"
    made.configure(0.1, order, admission, Dispatch(router="least_outstanding"))
    assert place(made, 0.1, request(2)) == "b"
    with pytest.raises(InputError, match="central"):
        made.configure(0.2, order, admission, Dispatch(router="central", max_concurrency=100))
    assert made.worker_pool.batch_size("m") == 9
    made.configure(0.3, order, admission, Dispatch())
    made.offer(0.3, request(3))
    assert sent(made.schedule(0.3)) == [3]
    assert not math.isnan(made.entries[3].work)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"router": "cache-aware"}, UnknownNameError, "Did you mean: cache_aware"),
        ({"router": "earliest"}, UnknownNameError, OWN_ROUTER),
        ({"router": "central"}, InputError, "one queue for all engines anyway"),
        ({"router": "prefix_precise"}, InputError, "prefix_approximate"),
        ({"router": "uncached_load", "prefixes": "none"}, InputError, 'prefixes = "tenant"'),
    ],
)
def test_a_router_that_the_gateway_cannot_run_is_refused(settings, kind, message):
    with pytest.raises(kind, match=message):
        router_policy(Dispatch(**settings))
    with pytest.raises(kind, match=message):
        scheduler("fcfs", dispatch=Dispatch(**settings))
