"""Drift detection of live lengths: false alarms, delay until an alarm, recorded traces, cost.

The figures of docs/decisions/0019-drift-of-lengths.md. Recorded traces are read from the folder ``shared`` next to the
checkout (or LENGTHWISE_SHARED, or --shared). Takes about ten minutes, all from fixed seeds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from _sections import Sections

from lengthwise.config.workload import read_trace
from lengthwise.schedule import Monitor, TaskLengths, Watcher
from lengthwise.schedule.drift_monitor import Evidence
from lengthwise.schedule.length_drift import moved

RATE = 0.01
MOVES = (
    *((what, by) for what in ("mean", "sd") for by in (-0.3, -0.15, 0.15, 0.3)),
    *(("skewness", by) for by in (0.4, -0.4)),
)
PLANS = (("exegpt-s", None), ("exegpt-s", 2000), ("exegpt-t", None), ("exegpt-t", 2000), ("exegpt-c2", None))
TRACES = {
    "arXiv summaries": "lengths_arxiv_summarization_llama2tok.csv.gz",
    "Mooncake": "mooncake_conversation_trace.jsonl.gz",
    "Azure 2023": "azure_llm_2023_conv.csv.gz",
    "ShareGPT": "lengths_sharegpt_8k_llama2tok.csv.gz",
}
STREAMS, REQUESTS, WATCHED = 2000, 2000, 20_000
EVERY = (1, 3, 10, 30, 100)


def known(_: Path, _quick: bool) -> dict[str, Any]:
    """Return the share of streams of the planned lengths that ever raise an alarm."""
    rng, evidence, alarmed = np.random.default_rng(0), Evidence((STREAMS, 2)), np.zeros(STREAMS, dtype=bool)
    for _request in range(REQUESTS):
        evidence.add(rng.random((STREAMS, 2)))
        alarmed |= evidence.amount.mean(axis=-1) >= 1 / RATE
    return {"drift.known": {"value": alarmed.mean(), "unit": "share", "streams": STREAMS, "requests": REQUESTS}}


def delays(_: Path, quick: bool) -> dict[str, Any]:
    """Return the median delay of every drift and plan: requests from the change, after 1,000 without, to the alarm."""

    def delay(task: TaskLengths, requests: int | None, after: np.ndarray, seed: int) -> int:
        rng = np.random.default_rng(seed)
        watcher = Watcher(task, requests, Monitor(RATE, min_requests=1, seed=seed))
        for at in range(21_000):
            pmf = task.output_pmf if at < 1000 else after
            pair = int(rng.choice(len(task.prompt_pmf), p=task.prompt_pmf)), int(rng.choice(len(pmf), p=pmf))
            if watcher.observe(*pair, float(at)) is not None and at >= 1000:
                return at - 999
        return 20_000

    rows = {}
    for preset, requests in PLANS:
        task = TaskLengths.from_preset(preset)
        for what, by in MOVES:
            after = moved(task.output_pmf, what, by, 4096)
            median = float(np.median([delay(task, requests, after, seed) for seed in range(1 if quick else 11)]))
            name = f"drift.delay.{preset}.{requests or 'known'}.{what}{by:+g}"
            rows[name] = {"value": median, "unit": "requests", "better": "lower"}
    return rows


def recorded(shared: Path, quick: bool) -> dict[str, Any]:
    """Return alarms on recorded requests in their own order, by the share that is tested, and in random orders."""

    def alarms(rows: np.ndarray, every: int, seed: int = 0) -> int:
        """Watch all requests after the first ones, which the plan is made from."""
        task = TaskLengths.from_samples(*rows[:planned].T)
        watcher = Watcher(task, planned, Monitor(RATE, every=every, seed=seed))
        pairs = enumerate(rows[planned:].tolist())
        return sum(watcher.observe(*pair, float(at)) is not None for at, pair in pairs)

    found = {}
    for name, file in TRACES.items():
        trace = read_trace(shared / "data/traces" / file, sort=True)
        planned = min(2000, len(trace) // 4)
        rows = np.stack([trace.prompt_tokens, trace.output_tokens], axis=1)[: planned + WATCHED]
        orders = (np.random.default_rng(seed).permutation(len(rows)) for seed in range(1 if quick else 5))
        by_order = {f"every {every}": alarms(rows, every) for every in EVERY}
        by_order |= {f"order {seed}": alarms(rows[order], 1, seed) for seed, order in enumerate(orders)}
        about = {"unit": "alarms", "better": "lower", "watched": len(rows) - planned, "alarms": by_order}
        found[f"drift.recorded.{name}"] = {"value": by_order["every 1"]} | about
    return found


def cost(_: Path, _quick: bool) -> dict[str, Any]:
    """Return CPU microseconds per request."""
    task, rng = TaskLengths.from_preset("exegpt-s"), np.random.default_rng(0)
    drawn = zip(rng.integers(1, 400, WATCHED).tolist(), rng.integers(1, 60, WATCHED).tolist(), strict=True)
    watcher, started_s = Watcher(task), time.process_time()
    for at, pair in enumerate(drawn):
        watcher.observe(*pair, float(at))
    cpu_us = 1e6 * (time.process_time() - started_s) / WATCHED
    return {"drift.cost_us": {"value": cpu_us, "unit": "us", "better": "lower"}}


MODULES = {name: f"drift:{name}" for name in ("known", "recorded", "cost", "delays")}

if __name__ == "__main__":
    sys.exit(Sections("drift", __doc__, MODULES).main())
