"""Batch of 1: waiting times against queueing theory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.stats import kstest
from servers import (
    check_mean,
    deployment,
    erlang_c,
    gi_m_1_wait,
    one_step_requests,
    poisson,
    pollaczek_khinchine,
    run,
    shortest_first,
    step_costs,
    waits,
)

from lengthwise.schema.cost_tables import Front
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.workload import Workload

N, WARMUP = 30_000, 2_000
TOKEN_S = 1e-5
ONE = deployment(step_costs(0.0, TOKEN_S), max_num_seqs=1)
PREFILL_S, DECODE_S, PROMPT = 0.66, 0.03, 64


def servers(replicas, router):
    return deployment(step_costs(0.0, TOKEN_S), Scheduler(router=router), max_num_seqs=1, replicas=replicas)


def mean_wait(rng, rate_rps, service_s, server=ONE):
    workload = one_step_requests(poisson(rng, rate_rps, N), service_s, TOKEN_S)
    return waits(run(workload, server, int(rng.integers(1 << 30))), WARMUP).mean()


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_m_m_1(load):
    check_mean(lambda rng: mean_wait(rng, load, rng.exponential(1, N)), load / (1 - load))


def test_m_m_1_sojourn_is_exponential():
    """In M/M/1 the whole time in the system is exponential with rate mu - lambda."""
    rng = np.random.default_rng(4)
    r = run(one_step_requests(poisson(rng, 0.6, 400_000), rng.exponential(1, 400_000), TOKEN_S), ONE).requests
    separate = (r.finished_s - r.arrival_s)[WARMUP::200]
    assert kstest(separate, "expon", args=(0, 1 / 0.4)).pvalue > 0.001
    assert kstest(separate, "expon", args=(0, 1.15 / 0.4)).pvalue < 0.001, "the test has no power"


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_serial_front_is_an_m_d_1(load):
    """Before an engine that takes no time; each request is served for a second, and then two on its way."""
    idle = deployment(step_costs(0.0, 1e-9), max_num_seqs=1000)
    server = dataclasses.replace(idle, cost=dataclasses.replace(idle.cost, front=Front(2.0, 1.0)))
    check_mean(lambda rng: mean_wait(rng, load, np.ones(N), server) - 3.0, load / (2 * (1 - load)))


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_m_d_1(load):
    check_mean(lambda rng: mean_wait(rng, load, np.ones(N)), load / (2 * (1 - load)))


def test_m_g_1_with_a_heavy_share_of_long_requests():
    sizes_s, shares = np.array([0.25, 4.0]), np.array([0.8, 0.2])
    rate_rps = 0.7 / (sizes_s @ shares)
    expected = pollaczek_khinchine(rate_rps, sizes_s @ shares, sizes_s**2 @ shares)
    check_mean(lambda rng: mean_wait(rng, rate_rps, rng.choice(sizes_s, N, p=shares)), expected, runs=40)


OUTPUTS = np.arange(1, 41)
SIZES_S = PREFILL_S + DECODE_S * (OUTPUTS - 1)
SHARES = 0.9**OUTPUTS / np.sum(0.9**OUTPUTS)
TOKEN_SLOPE_S = (PREFILL_S - DECODE_S) / (PROMPT - 1)
DECODER = step_costs(DECODE_S - TOKEN_SLOPE_S, TOKEN_SLOPE_S)


def chat(rng, rate_rps, n=N):
    """Requests of a prefill and up to 39 decodes, their outputs foreseen."""
    outputs = rng.choice(OUTPUTS, n, p=SHARES)
    return Workload(poisson(rng, rate_rps, n), np.full(n, PROMPT), outputs, predicted_tokens=outputs)


def test_service_is_a_prefill_and_its_decodes():
    server = deployment(DECODER, max_num_seqs=1)
    workload = chat(np.random.default_rng(0), 0.5, 500)
    r = run(workload, server).requests
    service_s = PREFILL_S + DECODE_S * (workload.output_tokens - 1)
    np.testing.assert_allclose(r.finished_s - r.scheduled_s, service_s, rtol=1e-9)
    np.testing.assert_allclose(r.first_token_s - r.scheduled_s, PREFILL_S, rtol=1e-9)


@pytest.mark.parametrize("load", [0.6, 0.85])
@pytest.mark.parametrize("rank", ["fcfs", "sjf"])
def test_m_g_1_by_output_length(rank, load):
    rate_rps = load / (SIZES_S @ SHARES)
    if rank == "fcfs":
        expected = pollaczek_khinchine(rate_rps, SIZES_S @ SHARES, SIZES_S**2 @ SHARES)
    else:
        expected = shortest_first(rate_rps, SIZES_S, SHARES)
    server = deployment(DECODER, Scheduler(rank=rank), max_num_seqs=1)
    check_mean(lambda rng: waits(run(chat(rng, rate_rps), server), WARMUP).mean(), expected)


def test_shortest_first_beats_and_longest_first_loses_to_arrival_order():
    """Order matters to the mean; in M/G/1 the work left at any time does not depend on it."""
    workload = chat(np.random.default_rng(3), 0.85 / (SIZES_S @ SHARES))
    mean, end_s = {}, {}
    for rank in ("sjf", "fcfs", "ljf"):
        records = run(workload, deployment(DECODER, Scheduler(rank=rank), max_num_seqs=1))
        mean[rank], end_s[rank] = waits(records).mean(), records.end_s
    assert mean["sjf"] < 0.95 * mean["fcfs"]
    assert mean["fcfs"] < 0.95 * mean["ljf"]
    np.testing.assert_allclose(list(end_s.values()), end_s["fcfs"], rtol=1e-9)


def test_two_priority_classes_without_preemption():
    """Cobham: the first class waits for its own kind and the request in service, the second for all."""
    load, n = np.array([0.3, 0.4]), N
    residual_s = load.sum()  # rate x E[S^2] / 2 with E[S^2] = 2
    expected = residual_s / (1 - load[0]), residual_s / ((1 - load[0]) * (1 - load.sum()))
    server = dataclasses.replace(ONE, scheduler=Scheduler(rank="priority"))

    def mean_of(priority):
        def one_run(rng):
            priorities = (rng.random(n) < load[1] / load.sum()).astype(np.int64)
            arrival_s = poisson(rng, load.sum(), n)
            plain = one_step_requests(arrival_s, rng.exponential(1, n), TOKEN_S)
            waited = waits(run(dataclasses.replace(plain, priority=priorities), server))
            return waited[priorities == priority][WARMUP // 2 :].mean()

        return one_run

    for priority, value in enumerate(expected):
        check_mean(mean_of(priority), value)


@pytest.mark.parametrize(("replicas", "load"), [(2, 0.7), (5, 0.8)])
def test_m_m_c_over_a_central_queue(replicas, load):
    share = erlang_c(replicas, load * replicas)
    server = servers(replicas, "central")

    def run_of(rng):
        arrival_s = poisson(rng, load * replicas, N)
        workload = one_step_requests(arrival_s, rng.exponential(1, N), TOKEN_S)
        return waits(run(workload, server), WARMUP)

    check_mean(lambda rng: run_of(rng).mean(), share / (replicas * (1 - load)))
    check_mean(lambda rng: (run_of(rng) > 0).mean(), share)


def test_random_routing_is_as_many_separate_queues():
    load, server = 0.6, servers(4, "random")
    check_mean(lambda rng: mean_wait(rng, 4 * load, rng.exponential(1, N), server), load / (1 - load))


def test_round_robin_makes_arrivals_regular():
    """Every fourth of a Poisson stream: times between arrivals are Erlang-4, the queue E4/M/1."""
    load, replicas = 0.7, 4
    rate = load * replicas
    expected = gi_m_1_wait(lambda s: (rate / (rate + s)) ** replicas, 1.0)
    server = servers(replicas, "round_robin")
    check_mean(lambda rng: mean_wait(rng, rate, rng.exponential(1, N), server), expected)


def test_power_of_two_choices():
    """Many replicas, the less loaded of two: mean time sum_i load^(2^i - 2) (Mitzenmacher 2001)."""
    load, replicas = 0.8, 200
    expected = sum(load ** (2**i - 2) for i in range(1, 8)) - 1
    server = servers(replicas, "power_of_two")
    rng = np.random.default_rng(8)
    n = 300_000
    workload = one_step_requests(poisson(rng, load * replicas, n), rng.exponential(1, n), TOKEN_S)
    wait = waits(run(workload, server), n // 10).mean()
    assert wait == pytest.approx(expected, rel=0.04)
    assert wait < 0.3 * load / (1 - load), "far below random routing"
