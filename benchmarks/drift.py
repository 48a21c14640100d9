"""Drift detection of live lengths (docs/decisions/0019-drift-of-lengths.md): ten minutes, all from fixed seeds."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from _exegpt_lengths import DATA
from _sections import Sections

from lengthwise.config.workload import read_trace
from lengthwise.schedule import Monitor, TaskLengths, Watcher
from lengthwise.schedule.length_drift import shift_moment

Rows = dict[str, Any]
RATE = 0.01
MOVES = (
    *((what, by) for what in ("mean", "sd") for by in (-0.3, -0.15, 0.15, 0.3)),
    *(("skewness", by) for by in (0.4, -0.4)),
)
PLANS = (("exegpt-s", None), ("exegpt-s", 2000), ("exegpt-t", None), ("exegpt-t", 2000), ("exegpt-c2", None))
TRACES = {name: file for name, (file, *_) in DATA.items() if file.startswith("traces/")}
WATCHED = 20_000
EVERY = (1, 3, 10, 30, 100)


def delays(_shared: Path, quick: bool) -> Rows:
    """Return the median delay by drift and plan: requests from the change, after 1,000 without, to the alarm."""

    def delay(task: TaskLengths, requests: int | None, after: np.ndarray, seed: int) -> int:
        rng = np.random.default_rng(seed)
        watcher = Watcher(task, requests, Monitor(RATE, min_requests=1, seed=seed))
        for at in range(21_000):
            pmf = task.output_pmf if at < 1000 else after
            pair = int(rng.choice(len(task.prompt_pmf), p=task.prompt_pmf)), int(rng.choice(len(pmf), p=pmf))
            if watcher.observe(*pair, float(at)) is not None and at >= 1000:
                return at - 999
        return 20_000

    rows, seeds = {}, range(1 if quick else 11)
    for preset, requests in PLANS:
        task, medians = TaskLengths.from_preset(preset), {}
        for what, by in MOVES:
            after = shift_moment(task.output_pmf, what, by, 4096)
            medians[f"{what} {by:+g}"] = float(np.median([delay(task, requests, after, seed) for seed in seeds]))
        rows[f"drift.delay.{preset}.{requests or 'known'}"] = {"by_move": medians}
    return rows


def recorded(shared: Path, quick: bool) -> Rows:
    """Return alarms on recorded requests in their own order, by the share that is tested, and in random orders."""

    def alarms(rows: np.ndarray, every: int, seed: int = 0) -> int:
        task = TaskLengths.from_samples(*rows[:planned].T)
        watcher = Watcher(task, planned, Monitor(RATE, every=every, seed=seed))
        return sum(watcher.observe(*pair, float(at)) is not None for at, pair in enumerate(rows[planned:].tolist()))

    found = {}
    for name, file in TRACES.items():
        trace = read_trace(shared / "data" / file, sort=True)
        planned = min(2000, len(trace) // 4)  # requests that the plan is made from
        rows = np.stack([trace.prompt_tokens, trace.output_tokens], axis=1)[: planned + WATCHED]
        orders = [np.random.default_rng(seed).permutation(len(rows)) for seed in range(1 if quick else 5)]
        by_every = {str(every): alarms(rows, every) for every in EVERY}
        of = {"value": by_every["1"], "watched": len(rows) - planned, "by_every": by_every}
        found[f"drift.alarms.{name}"] = of | {"shuffled": [alarms(rows[o], 1, seed) for seed, o in enumerate(orders)]}
    return found


def cost(_shared: Path, _quick: bool, requests: int = 20_000) -> Rows:
    task, rng = TaskLengths.from_preset("exegpt-s"), np.random.default_rng(0)
    drawn = zip(rng.integers(1, 400, requests).tolist(), rng.integers(1, 60, requests).tolist(), strict=True)
    watcher, started_s = Watcher(task), time.process_time()
    for at, pair in enumerate(drawn):
        watcher.observe(*pair, float(at))
    return {"drift.cost": {"value": 1e6 * (time.process_time() - started_s) / requests, "unit": "us"}}


MODULES = {name: f"drift:{name}" for name in ("recorded", "cost", "delays")}
SECTIONS = Sections("drift", __doc__, MODULES)

if __name__ == "__main__":
    SECTIONS.main()
