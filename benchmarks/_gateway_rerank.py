"""How long the gateway's scheduler takes to sort its whole queue anew."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from _harness import machine

from lengthwise.gateway.config import Admission, Dispatch, Order
from lengthwise.gateway.core import Scheduler
from lengthwise.gateway.request import LengthPrediction, Request
from lengthwise.gateway.scheduling import WorkerState

WAITING = 10_000


def figures(shared: Path | None, fast: bool) -> dict[str, Any]:
    """Milliseconds in which 10,000 queued requests are keyed and sorted again, and of an event among them."""
    del shared
    rng = np.random.default_rng(0)
    order = Order(mode="isrtf", rank="hrrn", max_wait_s=3600.0)  # a rank whose keys change with time
    scheduler = Scheduler(order, Admission(), Dispatch())
    scheduler.workers(0.0, [WorkerState("w", ("toy",), in_flight=1)])
    for i in range(WAITING + 1):
        length = float(rng.integers(1, 2000))
        request = Request(
            i, i * 1e-3, "toy", int(rng.integers(1, 2000)), 4096, length_prediction=LengthPrediction(length)
        )
        assert scheduler.offer(i * 1e-3, request) is None
    assert len(scheduler.schedule(15.0).assign) == 1
    waiting = [i for i in range(WAITING + 1) if scheduler.position(i) is not None]
    repeats = 20 if fast else 200
    ms = [_timed(lambda s=20.0 + k: scheduler.queue.rerank(s)) for k in range(repeats)]
    assert len({scheduler.position(i) for i in waiting}) == len(waiting) == WAITING
    chosen = rng.choice(waiting, repeats, replace=False)
    one = [_one_forecast(scheduler, 300.0 + k, int(i)) for k, i in enumerate(chosen)]
    details = {"ci": (min(ms), max(ms)), "waiting": WAITING, "machine": machine()}
    return {
        "gateway.rerank_10k_ms": {"value": statistics.median(ms)} | details,
        "gateway.reforecast_in_10k_ms": {"value": statistics.median(one), "unit": "ms", "better": "lower"},
    }


def _one_forecast(scheduler: Scheduler, now_s: float, number: int) -> float:
    length_prediction = LengthPrediction(float(number % 1000) + 1.5)
    return _timed(lambda: (scheduler.reforecast(now_s, number, length_prediction), scheduler.schedule(now_s)))


def _timed(run: Any) -> float:
    start = time.thread_time()  # of this thread: a busy neighbour disturbs it less than the wall
    run()
    return (time.thread_time() - start) * 1e3
