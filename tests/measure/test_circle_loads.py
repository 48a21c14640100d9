"""The capacity of an engine is observed while requests wait, and loads are shares of it."""

import heapq
from dataclasses import dataclass, field
from types import SimpleNamespace

import _circle
import numpy as np
import pytest

TOKEN_S, SLOTS = 0.02, 8


@dataclass
class Ran:
    """What of a measured run is looked at."""

    records: SimpleNamespace
    tokens: SimpleNamespace
    metadata: dict = field(default_factory=dict)


def served(workload, prompt_s=0.0):
    """Serves by so many slots of equal speed, in order; each request starts with ``prompt_s``."""
    n, free = len(workload), [0.0] * SLOTS
    finished, first, at = np.zeros(n), np.zeros(n), []
    for i in range(n):
        started = max(heapq.heappop(free), workload.arrival_s[i])
        own = started + prompt_s + TOKEN_S * np.arange(1, workload.output_tokens[i] + 1)
        first[i], finished[i] = own[0], own[-1]
        at.append(own)
        heapq.heappush(free, finished[i])
    tokens = SimpleNamespace(at_s=np.concatenate(at), tokens=np.ones(sum(map(len, at)), dtype=np.int64))
    requests = SimpleNamespace(finished_s=finished, first_token_s=first)
    return Ran(SimpleNamespace(requests=requests), tokens)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("generations", [3, 8, 40])
def test_capacity_is_the_output_of_all_slots_while_requests_wait(generations, seed):
    work = _circle.Lengths().workload(generations * SLOTS, seed, None)
    assert _circle.capacity_tokens_s(served(work)) == pytest.approx(SLOTS / TOKEN_S, rel=0.05)


def test_without_waiting_requests_there_is_no_capacity():
    work = _circle.Lengths(output=(24, 0.0, 24, 24)).workload(SLOTS, 0, None)
    with pytest.raises(ValueError, match="there must be more than max_num_seqs"):
        _circle.capacity_tokens_s(served(work))


@pytest.mark.parametrize("seed", range(5))
def test_a_load_offers_its_own_tokens_at_the_requested_rate(seed):
    work = _circle.Lengths().arriving(200.0, 60.0, seed, "high")
    per_request_s = work.arrival_s[-1] / (len(work) - 1)
    assert work.output_tokens.mean() / per_request_s == pytest.approx(200.0)
    assert work.arrival_s[-1] == pytest.approx(60.0, rel=0.15)  # of its lengths


def test_requests_of_a_load_are_between_the_least_and_the_most():
    lengths = _circle.Lengths()
    assert len(lengths.arriving(1.0, 1.0, 0, "", least=20)) == 20
    assert len(lengths.arriving(1e6, 1e3, 0, "", most=300)) == 300


def test_a_turn_measures_the_capacity_before_its_loads():
    requested = []

    def bench(workload):
        requested.append(workload)
        return served(workload, prompt_s=0.1)

    turn = _circle.Turn(_circle.Setting("s", SLOTS, 64), bench, lambda _: None, _circle.Lengths(), 10.0, 30.0)
    turn.warm()
    turn.run("half", 0)
    reported = turn.run("high", 0).measured.metadata["capacity_tokens_s"]
    full, half, high = requested[-3:]
    assert len(full) == 8 * SLOTS
    assert reported == pytest.approx(turn.capacity_tokens_s, abs=0.1)
    assert turn.capacity_tokens_s == pytest.approx(28 * SLOTS / (0.1 + 28 * TOKEN_S), rel=0.1)
    offered = [one.output_tokens.sum() / one.arrival_s[-1] / turn.capacity_tokens_s for one in (half, high)]
    assert offered == pytest.approx([0.5, 0.85], rel=0.2)
