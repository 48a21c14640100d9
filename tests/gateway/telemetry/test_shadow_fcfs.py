"""Regret against first come, first served: exact where the queue is the shadow's own."""

from __future__ import annotations

import numpy as np
import pytest

from lengthwise.gateway.request import Outcome
from lengthwise.gateway.telemetry import Regret, Row


def row(number: int, arrival_s: float, start_s: float, service_s: float, outcome=Outcome.FINISHED) -> Row:
    end_s = start_s + service_s
    return Row(
        id=number, model="m", tenant="t", priority=0, arrival_s=arrival_s, prompt_tokens=1,
        max_tokens=9, predicted_tokens=1.0, source="prior", predicted_level=0.5, repredictions=(), output_tokens=1,
        queued_for_s=start_s - arrival_s, dispatched_s=start_s, first_token_s=end_s, finished_s=end_s,
        served_s=service_s, worker="w", preemptions=0, resumed_tokens=0, failovers=0, outcome=outcome.value,
    )  # fmt: skip


def served(arrival_s, service_s, max_num_seqs: int, key) -> list[Row]:
    """One queue before ``seats`` seats, the smallest key of those that are there first."""
    free, waiting, done, i = [0.0] * max_num_seqs, [], [], 0
    while i < len(arrival_s) or waiting:
        free.sort()
        now = free[0]
        if not waiting and arrival_s[i] > now:
            now = arrival_s[i]
        while i < len(arrival_s) and arrival_s[i] <= now:
            waiting.append(i)
            i += 1
        waiting.sort(key=key)
        one = waiting.pop(0)
        free[0] = now + service_s[one]
        done.append(row(one, arrival_s[one], now, service_s[one]))
    return done


def shadow(rows: list[Row], max_num_seqs: int) -> Regret:
    """As a gateway tells it: arrivals and ends in the order of time."""
    regret = Regret(max_num_seqs)
    events = [(r.arrival_s, 0, r) for r in rows] + [(r.finished_s, 1, r) for r in rows]
    for _, kind, r in sorted(events, key=lambda event: event[:2]):
        regret.finished(r) if kind else regret.on_arrival(r.id, r.arrival_s)
    return regret


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_regret_matches_brute_force(max_num_seqs: int) -> None:
    rng = np.random.default_rng(5)
    arrival_s = np.cumsum(rng.exponential(1.0 / max_num_seqs, 1500))
    service_s = rng.lognormal(-0.9, 1.0, 1500)
    fcfs = served(arrival_s, service_s, max_num_seqs, key=lambda i: arrival_s[i])
    shortest = served(arrival_s, service_s, max_num_seqs, key=lambda i: service_s[i])
    regret = shadow(shortest, max_num_seqs)
    truth = np.mean([r.jct_s for r in shortest]) - np.mean([r.jct_s for r in fcfs])
    assert truth < -0.1
    assert regret.count == 1500
    assert (regret.jct_s - regret.shadow_jct_s) / regret.count == pytest.approx(truth)
    assert regret.mean_s() == pytest.approx(truth)
    truth_s = {r.id: (r.jct_s, r.queued_for_s) for r in fcfs}
    pairs = regret.pairs()
    assert [pair.jct_s for pair in pairs] == [r.jct_s for r in sorted(shortest, key=lambda r: r.id)]
    assert [(pair.shadow_jct_s, pair.shadow_waited_s) for pair in pairs] == [
        pytest.approx(truth_s[one]) for one in range(1500)
    ]
    assert shadow(fcfs, max_num_seqs).mean_s() == pytest.approx(0.0, abs=1e-9)


def test_no_regret_is_counted_while_an_earlier_request_is_in_progress() -> None:
    regret = Regret(1)
    for number in range(3):
        regret.on_arrival(number, float(number))
    regret.finished(row(1, 1.0, 1.0, 2.0))
    assert regret.count == 0
    regret.finished(row(0, 0.0, 3.0, 2.0, Outcome.FAILED))
    assert (regret.count, regret.shadow_jct_s) == (1, pytest.approx(3.0))


def test_more_shadow_slots_wait_less() -> None:
    rows = [row(number, 0.0, float(number), 1.0) for number in range(8)]
    assert shadow(rows, 8).mean_s() == pytest.approx(3.5)
    assert shadow(rows, 1).mean_s() == pytest.approx(0.0)


def test_the_slots_are_those_at_the_time_of_dispatch() -> None:
    regret = Regret(8)
    regret.set_max_num_seqs(-1.0, 1)
    rows = [row(number, 0.0, float(number), 1.0) for number in range(4)]
    for r in rows:
        regret.on_arrival(r.id, r.arrival_s)
    regret.set_max_num_seqs(50.0, 8)
    for r in rows:
        regret.finished(r)
    assert regret.mean_s() == pytest.approx(0.0)
