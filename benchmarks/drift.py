"""Drift detection of live lengths: false alarms, delay until an alarm, recorded traces, cost.

The figures of docs/decisions/0019-drift-of-lengths.md, as JSON lines: about ten minutes, all from fixed seeds.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _harness import parser
from _sections import SHARED

from lengthwise.config.workload import read_trace
from lengthwise.schedule import Monitor, TaskLengths, Watcher
from lengthwise.schedule.drift_monitor import Evidence
from lengthwise.schedule.length_drift import moved

Rows = Iterator[dict[str, object]]
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
WATCHED = 20_000
EVERY = (1, 3, 10, 30, 100)


def known(streams: int = 2000, requests: int = 2000) -> Rows:
    """Yield the share of streams of the planned lengths that ever raise an alarm."""
    rng, evidence, alarmed = np.random.default_rng(0), Evidence((streams, 2)), np.zeros(streams, dtype=bool)
    for _ in range(requests):
        evidence.add(rng.random((streams, 2)))
        alarmed |= evidence.amount.mean(axis=-1) >= 1 / RATE
    yield {"name": "known", "streams": streams, "requests": requests, "share": float(alarmed.mean())}


def delays(streams: int) -> Rows:
    """Yield the median delay of every drift and plan: requests from the change, after 1,000 without, to the alarm."""

    def delay(task: TaskLengths, requests: int | None, after: np.ndarray, seed: int) -> int:
        rng = np.random.default_rng(seed)
        watcher = Watcher(task, requests, Monitor(RATE, min_requests=1, seed=seed))
        for at in range(21_000):
            pmf = task.output_pmf if at < 1000 else after
            pair = int(rng.choice(len(task.prompt_pmf), p=task.prompt_pmf)), int(rng.choice(len(pmf), p=pmf))
            if watcher.observe(*pair, float(at)) is not None and at >= 1000:
                return at - 999
        return 20_000

    for preset, requests in PLANS:
        task = TaskLengths.from_preset(preset)
        for what, by in MOVES:
            after = moved(task.output_pmf, what, by, 4096)
            median = float(np.median([delay(task, requests, after, seed) for seed in range(streams)]))
            yield {"name": "delay", "plan": preset, "requests": requests, "move": what, "by": by, "median": median}


def recorded(folder: Path, shuffles: int) -> Rows:
    """Yield alarms on recorded requests in their own order, by the share that is tested, and in random orders."""

    def alarms(rows: np.ndarray, every: int, seed: int = 0) -> int:
        task = TaskLengths.from_samples(*rows[:planned].T)
        watcher = Watcher(task, planned, Monitor(RATE, every=every, seed=seed))
        return sum(watcher.observe(*pair, float(at)) is not None for at, pair in enumerate(rows[planned:].tolist()))

    for name, file in TRACES.items():
        if not (folder / file).exists():
            yield {"name": "recorded", "trace": name, "absent": str(folder / file)}
            continue
        trace = read_trace(folder / file, sort=True)
        planned = min(2000, len(trace) // 4)  # requests that the plan is made from
        rows = np.stack([trace.prompt_tokens, trace.output_tokens], axis=1)[: planned + WATCHED]
        about = {"trace": name, "watched": len(rows) - planned}
        for every in EVERY:
            yield {"name": "recorded", **about, "every": every, "alarms": alarms(rows, every)}
        for seed in range(shuffles):
            order = np.random.default_rng(seed).permutation(len(rows))
            yield {"name": "shuffled", **about, "seed": seed, "alarms": alarms(rows[order], 1, seed)}


def cost(requests: int = 20_000) -> Rows:
    task, rng = TaskLengths.from_preset("exegpt-s"), np.random.default_rng(0)
    drawn = zip(rng.integers(1, 400, requests).tolist(), rng.integers(1, 60, requests).tolist(), strict=True)
    watcher, started_s = Watcher(task), time.process_time()
    for at, pair in enumerate(drawn):
        watcher.observe(*pair, float(at))
    yield {"name": "cost", "cpu_us": 1e6 * (time.process_time() - started_s) / requests}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", default="known,recorded,cost,delays", help="sections, with commas")
    options.add_argument("--shared", type=Path, default=SHARED, help="the folder of recorded data")
    args = options.parse_args()
    sections = {
        "known": known,
        "recorded": lambda: recorded(args.shared / "data/traces", 1 if args.quick else 5),
        "cost": cost,
        "delays": lambda: delays(1 if args.quick else 11),
    }
    for section in args.only.split(","):
        for row in sections[section]():
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
