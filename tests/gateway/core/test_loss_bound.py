"""What the worst predictor can cost against first come first served, in virtual time.

Let every request take at most S seconds at a worker with c places, and let W be max_wait_s. A request that has
waited W is passed by nobody but earlier arrivals: it waits for those in flight then (at most S) and for the work
of earlier arrivals, U / c. The work that any two orders have left differs by at most (c - 1) S, for an order that
has more left lately had a place empty; and first come first served lets it wait at least (U - (c - 1) S) / c.
Hence each request, and so the last one, too, ends at most

    W + S + 2 S (c - 1) / c

later than by first come first served, whatever is predicted. A cut costs a token of work besides.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_worlds import World, request, scheduler, worker

TOKEN_S = 0.01
MAX_WAIT_S = 1.5
LONGEST = 200
PREDICTORS = {
    "adversarial": lambda tokens: 1e4 / tokens,
    "zero": lambda tokens: 0.0,
    "endless": lambda tokens: math.inf if tokens == LONGEST else 1.0,
    "nobody knows": lambda tokens: math.nan,
}
TRAFFIC = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 0.05, 0.3, 2.0]), st.sampled_from([1, 5, 20, LONGEST])),
    min_size=2,
    max_size=60,
)


def ends_s(traffic, mode, places, predictor, max_wait_s):
    """When each request has ended, and how many cuts there were."""
    jobs, now_s = [], 0.0
    for number, (gap_s, tokens) in enumerate(traffic):
        now_s += gap_s
        jobs.append((request(number, now_s, predicted=predictor(tokens)), tokens))
    made = scheduler(mode, max_wait_s=max_wait_s, preemption="by_rank")
    world = World(made, jobs, [worker(cap=places)], token_s=TOKEN_S).run()
    return [job.finished_s for job in world.jobs.values()], made.statistics(world.now_s).preemptions


def max_s(places, cuts):
    longest_s = LONGEST * TOKEN_S
    return MAX_WAIT_S + longest_s * (1 + 2 * (places - 1) / places) + 2 * cuts * TOKEN_S


@settings(max_examples=60)
@given(TRAFFIC, st.sampled_from(["srtf", "isrtf"]), st.integers(1, 3), st.sampled_from(sorted(PREDICTORS)))
def test_no_predictor_costs_anybody_more_than_the_bound(traffic, mode, places, name):
    bare, _ = ends_s(traffic, "fcfs", places, PREDICTORS[name], MAX_WAIT_S)
    ordered, cuts = ends_s(traffic, mode, places, PREDICTORS[name], MAX_WAIT_S)
    most = max_s(places, cuts)
    assert all(one <= other + most + 1e-6 for one, other in zip(ordered, bare, strict=True))


@pytest.mark.parametrize("mode", ["srtf", "isrtf"])
def test_without_max_wait_an_adversary_costs_more_than_that(mode):
    """Long requests arrive at once, each predicted short; all of them pass a short one that is predicted long."""
    traffic = [(0.0, LONGEST), (0.0, 5), *((1.9, LONGEST) for _ in range(60))]
    adversary = PREDICTORS["adversarial"]
    bare, _ = ends_s(traffic, "fcfs", 1, adversary, math.inf)
    for max_wait_s, holds in ((MAX_WAIT_S, True), (math.inf, False)):
        ordered, cuts = ends_s(traffic, mode, 1, adversary, max_wait_s)
        assert (max(b - a for a, b in zip(bare, ordered, strict=True)) <= max_s(1, cuts)) is holds
