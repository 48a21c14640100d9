"""Laws of one queue over several gateways, in virtual time."""

from __future__ import annotations

import contextlib

from gateways_world import LEASE_S, Job, World
from hypothesis import given, settings
from hypothesis import strategies as st

from lengthwise.gateway.config import Engine, GatewayConfig, Key
from lengthwise.gateway.edge.auth import Keys
from lengthwise.gateway.edge.errors import Fault

FAULTS = ("kill sender", "kill receiver", "lose", "outage", "partition")
CAPS = {"a": 2, "b": 3}
orders = st.sampled_from([
    {"mode": "fcfs"}, {"mode": "srtf"}, {"mode": "isrtf"}, {"mode": "srtf", "fairness": "vtc"},
    {"mode": "srtf", "max_wait_s": 3.0},
])  # fmt: skip


def jobs(gateways):
    one = st.builds(
        Job,
        st.integers(0, gateways - 1),
        st.integers(200, 900).map(lambda number: number / 100),
        st.integers(1, 400),
        st.integers(1, 4),
        st.sampled_from([0, 0, 1]),
    )
    return st.lists(one, min_size=1, max_size=24, unique_by=lambda job: job.arrival_s)


def of_one(found):
    """The same requests at a single gateway."""
    return [Job(0, job.arrival_s, job.tokens, job.tenant, job.priority) for job in found]


@settings(max_examples=15)
@given(jobs(3), orders)
def test_gateways_without_delay_decide_as_one(found, order):
    one = World(0, of_one(found), CAPS, **order).run()
    several = World(3, found, CAPS, **order).run()
    assert several.dispatched == one.dispatched


@settings(max_examples=15)
@given(jobs(3), orders, st.floats(0.001, 0.2))
def test_limits_hold_over_all_gateways_with_any_delay(found, order, delay_s):
    world = World(3, found, CAPS, delay_s=delay_s, **order).run(100.0)
    assert all(job.finished == 1 for job in found)
    assert world.over_limit == 0


@settings(max_examples=15)
@given(jobs(3), orders, st.dictionaries(st.integers(0, 150), st.sampled_from(FAULTS), max_size=3), st.booleans())
def test_no_request_is_lost_or_doubled_whatever_fails_at_any_message(found, order, faults, delayed):
    world = World(3, found, CAPS, faults=faults, delay_s=0.01 * delayed, **order).run(200.0)
    assert all(job.finished == 1 for job in world.alive())


@settings(max_examples=15)
@given(st.integers(0, 60), st.sampled_from(FAULTS))
def test_after_a_fault_the_queue_is_shared_again_within_leases(at, fault):
    found = [Job(number % 3, 1.0 + number / 10, 100) for number in range(60)]
    world = World(3, found, CAPS, faults={at: fault}).run(6.0)
    if fault not in ("outage", "partition"):
        assert not world.over_limit, "a new leader waits until it knows all slots in use"
    world.jobs.append(Job(0, 1e6, 1))  # runs on while no request is left
    world.run(world.now_s + 4 * LEASE_S)
    assert all(one.shared for one in world.gateways.values())
    assert sum(one.leads for one in world.gateways.values()) == 1
    running = [job for job in world.alive() if job.worker]
    (leader,) = [one for one in world.gateways.values() if one.leads]
    assert leader.statistics(world.now_s).shared_queue.gateways == len(world.gateways)
    assert leader.slots_in_use() == len(running), "the leader knows every slot in use, and no other"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), min_size=1, max_size=60))
def test_the_limits_of_a_key_hold_over_all_gateways(requests):
    """Requests at any gateway take from one bucket, and open requests count everywhere, from the next heartbeat on."""
    key = Key("t", "a" * 64, rate_rps=2.0, burst=4, concurrency=5)
    config = GatewayConfig((Engine("http://e"),), keys=(key,))
    now_s = 0.0
    keys = [Keys(config, lambda: now_s) for _ in range(3)]
    callers = [one.callers["a" * 64] for one in keys]
    admitted = 0
    for gateway, wait in requests:
        now_s += wait / 10
        with contextlib.suppress(Fault):
            callers[gateway].take_request(now_s)
            admitted += 1
            callers[gateway].__enter__()
        for number, one in enumerate(keys):  # a heartbeat of all gateways
            usage = one.pop_usage()
            for other in keys:
                if other is not one and usage:
                    other.add_usage(str(number), usage, now_s)
        assert admitted <= key.burst + key.rate_rps * now_s
        assert sum(one.open for one in callers) <= key.concurrency
