"""Traffic whose gain is known: a single server by hand, and engines that are simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lengthwise.engine import simulate
from lengthwise.gateway.config import Order
from lengthwise.gateway.observe.replay import Service, deployment_of, scheduler
from lengthwise.gateway.telemetry import Row
from lengthwise.schema.workload import Workload

STEP_S, PROMPT_S = 0.01, 0.001
LOAD = 0.7


def row(number: int, arrival_s, prompt, output, predicted, sent_s, first_s, finished_s, worker="w0", **more) -> Row:
    metadata = {
        "model": "m", "tenant": "t", "priority": 0, "max_tokens": 4096, "source": "predictor", "predicted_level": 0.5,
        "repredictions": (), "queued_for_s": float(sent_s - arrival_s), "served_s": float(finished_s - sent_s),
        "preemptions": 0,
        "resumed_tokens": 0, "failovers": 0, "outcome": "finished",
    } | more  # fmt: skip
    return Row(
        id=number,
        arrival_s=float(arrival_s),
        prompt_tokens=int(prompt),
        predicted_tokens=float(predicted),
        output_tokens=int(output),
        dispatched_s=float(sent_s),
        first_token_s=float(first_s),
        finished_s=float(finished_s),
        worker=worker,
        **metadata,
    )


def lengths(rng, n: int):
    """(prompt tokens, output tokens, seconds of service) of the single server's requests."""
    prompt = rng.integers(20, 60, n)
    output = np.maximum(1, np.rint(rng.lognormal(4.0, 1.0, n))).astype(np.int64)
    return prompt, output, PROMPT_S * prompt + STEP_S * output


def single_server(seed: int, n: int, *, sigma: float = 0.0, load: float = LOAD, reserved: bool = True) -> list[Row]:
    """M/G/1, first come first served; ``reserved``: requests wait in the gateway, else in the engine."""
    rng = np.random.default_rng(seed)
    prompt, output, service_s = lengths(rng, n)
    arrival_s = np.cumsum(rng.exponential(service_s.mean() / load, n))
    predicted = output * np.exp(sigma * rng.normal(size=n))
    reported, end_s = [], 0.0
    for i in range(n):
        start_s = max(arrival_s[i], end_s)
        first_s, end_s = start_s + PROMPT_S * prompt[i] + STEP_S, start_s + service_s[i]
        sent_s = start_s if reserved else arrival_s[i]
        reported.append(row(i, arrival_s[i], prompt[i], output[i], predicted[i], sent_s, first_s, end_s))
    return reported


def true_change(load: float = LOAD, n: int = 200_000) -> float:
    """Of the mean JCT, shortest first against first come, in that M/G/1 (Cobham 1954, Pollaczek 1930)."""
    _, output, service_s = lengths(np.random.default_rng(77), n)
    rate = load / service_s.mean()
    order = np.argsort(output, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(service_s[order])]) * rate / n
    ranked = output[order]
    below, upto = (sums[np.searchsorted(ranked, ranked, side)] for side in ("left", "right"))
    residual_s = rate * np.mean(service_s**2) / 2
    shortest_s = np.mean(residual_s / ((1 - below) * (1 - upto))) + service_s.mean()
    return float(shortest_s / (residual_s / (1 - load) + service_s.mean()) - 1)


def batch_engine(service: Service, seed: int, n: int, rate_rps: float, *, sigma: float = 0.0) -> list[Row]:
    """Engines as ``service`` specifies, simulated first come first served; requests wait inside them (mode observe)."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(20, 400, n)
    output = np.maximum(2, np.rint(rng.lognormal(4.5, 0.9, n))).astype(np.int64)
    arrival_s = np.cumsum(rng.exponential(1 / rate_rps, n))
    work = Workload(arrival_s, prompt, output, output.astype(float))
    r = simulate(work, deployment_of(work, service, scheduler("fcfs", Order()))).requests
    predicted = output * np.exp(sigma * rng.normal(size=n))
    return [
        row(
            i, arrival_s[i], prompt[i], output[i], predicted[i], arrival_s[i], r.first_token_s[i], r.finished_s[i],
            worker=f"w{r.replica[i]}",
        )
        for i in range(n)
    ]  # fmt: skip


def stuttering(
    rows: list[Row], seed: int, *, share: float = 0.05, times: float = 20.0, tick_s: float = 0.025
) -> list[Row]:
    """The same traffic on a machine of which a share of the ticks takes so many times as long.

    Nothing is seen within such a tick: what happened in it is seen at its end, tokens in a bunch.
    """
    rng = np.random.default_rng(seed)
    slow = rng.random(int(max(row.finished_s for row in rows) / tick_s) + 2) < share
    starts_s = np.concatenate([[0.0], np.cumsum(np.where(slow, times, 1.0) * tick_s)])

    def seen(at_s: float) -> float:
        tick = int(at_s / tick_s)
        return float(starts_s[tick + 1] if slow[tick] else starts_s[tick] + at_s - tick * tick_s)

    times_of = ("arrival_s", "dispatched_s", "first_token_s", "finished_s")
    return [replace(row, **{name: seen(getattr(row, name)) for name in times_of}) for row in rows]


def shortest_first(rows: list[Row]) -> list[Row]:
    """The same requests at a single server that takes the shortest of those who wait, each as long as before."""
    waiting, reported, now_s = sorted(rows, key=lambda row: row.arrival_s), [], 0.0
    while waiting:
        present = [row for row in waiting if row.arrival_s <= now_s] or waiting[:1]
        first = min(present, key=lambda row: row.output_tokens)
        waiting.remove(first)
        start_s = max(now_s, first.arrival_s)
        now_s, first_s = (start_s + at_s - first.dispatched_s for at_s in (first.finished_s, first.first_token_s))
        sent = {"dispatched_s": start_s, "queued_for_s": start_s - first.arrival_s}
        reported.append(replace(first, first_token_s=first_s, finished_s=now_s, **sent))
    return reported


def renamed(rows: list[Row], names: int) -> list[Row]:
    """The same traffic while every engine is replaced by one of another name, again and again."""
    last_s = max(row.dispatched_s for row in rows) + 1e-9
    return [replace(row, worker=f"{row.worker}.{int(names * row.dispatched_s / last_s)}") for row in rows]
