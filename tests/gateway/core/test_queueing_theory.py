"""The scheduler in a small world against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scheduler_worlds import World, request, scheduler, worker

TOKEN_S = 0.01


def served(mode, n=6000, load=0.7, seed=1, *, servers=1, **order):
    """Jobs after a run at one worker, geometric lengths predicted truly; a warm-up is left out."""
    rng = np.random.default_rng(seed)
    tokens = rng.geometric(1 / 40, n)
    mean_s = 40 * TOKEN_S
    arrivals = np.cumsum(rng.exponential(mean_s / load / servers, n))
    made = scheduler(mode, max_wait_s=math.inf, **order)
    jobs = [
        (request(i, float(at), predicted=float(size)), int(size))
        for i, (at, size) in enumerate(zip(arrivals, tokens, strict=True))
    ]
    world = World(made, jobs, [worker(cap=servers)], token_s=TOKEN_S).run()
    return list(world.jobs.values())[n // 20 :], tokens * TOKEN_S, load / mean_s


def mean_interval(values, batches=20):
    """Mean and three standard errors, by batch means."""
    means = [np.mean(part) for part in np.array_split(np.asarray(values), batches)]
    return float(np.mean(means)), 3 * float(np.std(means, ddof=1)) / math.sqrt(batches)


def test_first_come_first_served_waits_match_pollaczek_khinchine():
    jobs, _, _ = served("fcfs", n=8000, load=0.6)
    p = 1 / 40  # of the geometric law: E[X^2] = (2 - p) / p^2
    rate = 0.6 / (40 * TOKEN_S)
    expected_s = rate * (2 - p) / p**2 * TOKEN_S**2 / (2 * (1 - 0.6))
    mean_s, margin_s = mean_interval([job.started_s - job.request.arrival_s for job in jobs])
    assert margin_s < 0.4 * expected_s
    assert mean_s == pytest.approx(expected_s, abs=margin_s)


def test_shortest_first_waits_match_phipps():
    """M/G/1 shortest job first without preemption: integral over classes (Phipps 1956), for a geometric law."""
    jobs, _, _ = served("srtf", n=8000, load=0.7)
    sizes = np.arange(1, 2000)
    mass = (1 / 40) * (1 - 1 / 40) ** (sizes - 1)
    rate = 0.7 / (40 * TOKEN_S)
    busy = rate * np.cumsum(mass * sizes) * TOKEN_S
    before = np.concatenate([[0.0], busy[:-1]])
    residual = rate * float(np.sum(mass * sizes**2)) * TOKEN_S**2 / 2
    expected_s = float(np.sum(mass * residual / ((1 - before) * (1 - busy))))
    mean_s, margin_s = mean_interval([job.started_s - job.request.arrival_s for job in jobs])
    assert mean_s == pytest.approx(expected_s, abs=margin_s)


@pytest.mark.parametrize("mode", ["srtf", "isrtf"])
def test_going_by_length_beats_first_come_first_served(mode):
    preemption = {"preemption": "by_rank", "preemptions_per_s": math.inf} if mode == "isrtf" else {}
    spent = {}
    for one, order in (("fcfs", {}), (mode, preemption)):
        jobs, _, _ = served(one, n=2000, load=0.85, **order)
        spent[one] = np.mean([job.finished_s - job.request.arrival_s for job in jobs])
    assert spent[mode] < 0.75 * spent["fcfs"]


def test_cuts_bring_preemptive_shortest_remaining_below_shortest_first():
    plain, _, _ = served("srtf", n=2000, load=0.85)
    cut, _, _ = served("isrtf", n=2000, load=0.85, preemption="by_rank", preemptions_per_s=math.inf, max_preemptions=99)
    assert np.mean([j.finished_s - j.request.arrival_s for j in cut]) < 0.95 * np.mean(
        [j.finished_s - j.request.arrival_s for j in plain]
    )
