"""Laws of the wait in front of the engine: a pure delay moves an open loop as a whole, a serial front is a queue."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from observers import LAW, run
from worlds import GPU, MODEL, NODE, cost_tables, deployments, workloads

from lengthwise.engine import simulate
from lengthwise.schema.cost_tables import Front
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.workload import Workload

FRONTS = st.sampled_from([Front(0.01), Front(0.0, 0.004), Front(0.03, 0.02)])


def behind(deployment, front):
    """The deployment behind another front."""
    return dataclasses.replace(deployment, cost=dataclasses.replace(deployment.cost, front=front))


def blind_to_waiting(deployment):
    """Nothing there tells a delay from a wait in the queue: no bound on waiting, no rank by it."""
    s, endless = deployment.scheduler, float("inf")
    by_wait = "hrrn" in (s.rank, s.victim)
    chosen = {"rank": "srtf", "victim": "latest_admitted"} if by_wait else {}
    if s.preemption != "never":
        chosen["preemption"] = "by_rank"
    return dataclasses.replace(
        deployment,
        scheduler=dataclasses.replace(s, max_wait_s=endless, batch_wait_s=endless, **chosen),
        limits=dataclasses.replace(deployment.limits, timeout_s=endless),
    )


@LAW
@given(workloads(), deployments(), st.sampled_from([1e-3, 0.125, 3.0]))
def test_a_pure_delay_shifts_an_open_loop_uniformly(workload, deployment, delay_s):
    """TTFT behind a pure delay is TTFT without, plus the delay, whatever the scheduler."""
    assume(workload.concurrency is None)
    workload = workload.without_dependencies()
    deployment = blind_to_waiting(deployment)
    plain = run(workload, behind(deployment, Front())).requests
    late = run(workload, behind(deployment, Front(request_s=delay_s))).requests
    np.testing.assert_array_equal(late.arrival_s, plain.arrival_s)
    np.testing.assert_array_equal(late.preemptions, plain.preemptions)
    for column in ("scheduled_s", "first_token_s", "finished_s"):
        np.testing.assert_allclose(getattr(late, column), getattr(plain, column) + delay_s, rtol=1e-9)


@LAW
@given(workloads(), deployments(), FRONTS)
def test_a_serial_front_is_lindleys_recursion(workload, deployment, front):
    """An open loop behind a front is one whose requests come when they have passed it."""
    assume(workload.concurrency is None)
    workload = workload.without_dependencies()
    ranks = str((deployment.scheduler.rank, deployment.scheduler.victim))
    assume("aged" not in ranks and "mlfq" not in ranks)  # by the time it was sent
    deployment = blind_to_waiting(deployment)
    late = run(workload, behind(deployment, front)).requests
    entered = dataclasses.replace(workload, arrival_s=front.entries_s(workload.arrival_s))
    plain = run(entered, behind(deployment, Front())).requests
    for column in ("scheduled_s", "first_token_s", "finished_s"):
        np.testing.assert_allclose(getattr(late, column), getattr(plain, column), rtol=1e-9)


@pytest.mark.parametrize("engine", ["kernel", "reference"])
def test_a_closed_loop_sends_when_one_ends_and_then_takes_the_front(engine):
    front = Front(request_s=0.5, serial_s=0.25)
    cost = dataclasses.replace(cost_tables([4]), front=front)
    limits = EngineLimits(max_num_seqs=8, block_size=4)
    one = Deployment(
        MODEL, GPU, NODE, Parallelism(), limits, Scheduler(), cost,
        KvPlan(500, 4, 0.0, 0.0, 0.0, 0.0), max_model_len=300,
    )  # fmt: skip
    n = 7
    requests = Workload(np.zeros(n), np.full(n, 10), np.full(n, 5), concurrency=3)
    r = simulate(requests, one, engine=engine).requests
    np.testing.assert_array_equal(r.arrival_s[3:], np.sort(r.finished_s)[: n - 3])
    np.testing.assert_array_equal(r.scheduled_s[:3], [0.75, 1.0, 1.25])
    entries_s = front.entries_s(r.arrival_s)
    np.testing.assert_allclose(r.scheduled_s, entries_s, rtol=0.1)
    assert (r.scheduled_s >= entries_s - 1e-12).all()
    np.testing.assert_array_equal(r.queued_for_s, r.scheduled_s - r.arrival_s)
    bare = simulate(requests, dataclasses.replace(one, cost=cost_tables([4])), engine=engine).requests
    assert (r.first_token_s - r.arrival_s > bare.first_token_s - bare.arrival_s + 0.5).all()


def test_entries_are_those_of_the_recursion():
    rng = np.random.default_rng(1)
    arrival_s = np.sort(rng.uniform(0, 10, 500))
    for front in (Front(), Front(0.3), Front(0.1, 0.019), Front(0.0, 0.5)):
        free_s, expected = 0.0, []
        for at_s in arrival_s:
            free_s = max(at_s, free_s) + front.serial_s
            expected.append(free_s + front.request_s)
        np.testing.assert_allclose(front.entries_s(arrival_s), expected, rtol=1e-12)
