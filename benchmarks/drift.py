"""The watch over live lengths: how often it cries wolf, how soon it sees a move, what recorded neighbours do to it.

The figures of docs/decisions/0019-drift-of-lengths.md. Recorded traces are looked for in the folder ``shared`` beside
the checkout (or in LENGTHWISE_SHARED, or --shared). Prints JSON lines; some ten minutes, all from fixed seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lengthwise.config.workload import read_trace
from lengthwise.schedule import Monitor, TaskLengths, Watcher
from lengthwise.schedule.drift_monitor import Evidence
from lengthwise.schedule.length_drift import moved

RATE = 0.01
MOVES = (*(("mean", by) for by in (-0.3, -0.15, 0.15, 0.3)), *(("sd", by) for by in (-0.3, -0.15, 0.15, 0.3)))
BENT = (("skewness", 0.4), ("skewness", -0.4))
PLANS = (("exegpt-s", None), ("exegpt-s", 2000), ("exegpt-t", None), ("exegpt-t", 2000), ("exegpt-c2", None))
TRACES = {
    "arXiv summaries": ("lengths_arxiv_summarization_llama2tok.csv.gz", 20_000),
    "Mooncake": ("mooncake_conversation_trace.jsonl.gz", 20_000),
    "Azure 2023": ("azure_llm_2023_conv.csv.gz", 20_000),
    "ShareGPT": ("lengths_sharegpt_8k_llama2tok.csv.gz", 20_000),
}
EVERY = (1, 3, 10, 30, 100)


def known(streams: int = 2000, requests: int = 2000) -> dict[str, object]:
    """Share of streams of known lengths that stay with an alarm, ever."""
    rng, evidence, ever = np.random.default_rng(0), Evidence((streams, 2)), np.zeros(streams, dtype=bool)
    for _ in range(requests):
        evidence.add(rng.random((streams, 2)))
        ever |= evidence.amount.mean(axis=-1) >= 1 / RATE
    return {"name": "known", "streams": streams, "requests": requests, "share": float(ever.mean())}


def delay(task: TaskLengths, requests: int | None, what: str, by: float, seed: int) -> int:
    """Requests from a move of the outputs, after 1,000 as planned, to the alarm."""
    rng = np.random.default_rng(seed)
    after = moved(task.output_pmf, what, by, 4096)
    watcher = Watcher(task, requests, Monitor(RATE, min_requests=1, seed=seed))
    for at in range(21_000):
        pmf = task.output_pmf if at < 1000 else after
        pair = int(rng.choice(len(task.prompt_pmf), p=task.prompt_pmf)), int(rng.choice(len(pmf), p=pmf))
        if watcher.observe(*pair, float(at)) is not None and at >= 1000:
            return at - 999
    return 20_000


def delays(streams: int) -> Iterator[dict[str, object]]:
    """The median delay of every move and plan."""
    for preset, requests in PLANS:
        task = TaskLengths.from_preset(preset)
        for what, by in (*MOVES, *BENT):
            found = [delay(task, requests, what, by, seed) for seed in range(streams)]
            yield {
                "name": "delay", "plan": preset, "requests": requests, "move": what, "by": by,
                "median": float(np.median(found)),
            }  # fmt: skip


def alarms(prompts: np.ndarray, outputs: np.ndarray, planned: int, every: int, seed: int = 0) -> int:
    """Of a watch over all but the first requests, which its plan was counted over."""
    task = TaskLengths.from_samples(prompts[:planned], outputs[:planned])
    watcher = Watcher(task, planned, Monitor(RATE, every=every, seed=seed))
    pairs = zip(prompts[planned:].tolist(), outputs[planned:].tolist(), strict=True)
    return sum(watcher.observe(*pair, float(at)) is not None for at, pair in enumerate(pairs))


def recorded(folder: Path, shuffles: int) -> Iterator[dict[str, object]]:
    """Alarms over recorded requests in their own order, by how few are tested, and in none."""
    for name, (file, asked) in TRACES.items():
        path = folder / file
        if not path.exists():
            yield {"name": "recorded", "trace": name, "absent": str(path)}
            continue
        trace = read_trace(path, sort=True)
        planned = min(2000, len(trace) // 4)
        most = min(len(trace), planned + asked)
        prompts, outputs = trace.prompt_tokens[:most], trace.output_tokens[:most]
        for every in EVERY:
            found = alarms(prompts, outputs, planned, every)
            yield {"name": "recorded", "trace": name, "watched": most - planned, "every": every, "alarms": found}
        for seed in range(shuffles):
            order = np.random.default_rng(seed).permutation(len(prompts))
            found = alarms(prompts[order], outputs[order], planned, 1, seed)
            yield {"name": "shuffled", "trace": name, "watched": most - planned, "seed": seed, "alarms": found}


def cost(requests: int = 20_000) -> dict[str, object]:
    """CPU seconds of one request."""
    task, rng = TaskLengths.from_preset("exegpt-s"), np.random.default_rng(0)
    drawn = zip(rng.integers(1, 400, requests).tolist(), rng.integers(1, 60, requests).tolist(), strict=True)
    watcher, started_s = Watcher(task), time.process_time()
    for at, pair in enumerate(drawn):
        watcher.observe(*pair, float(at))
    return {"name": "cost", "cpu_us": 1e6 * (time.process_time() - started_s) / requests}


def main() -> int:
    """Prints the figures."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", default="known,recorded,cost,delays", help="sections, with commas")
    options.add_argument("--streams", type=int, default=11, help="of each delay")
    options.add_argument("--shuffles", type=int, default=5, help="of each trace")
    beside = Path(__file__).parents[2] / "shared"
    options.add_argument("--shared", type=Path, default=Path(os.environ.get("LENGTHWISE_SHARED", beside)))
    options.add_argument("--quick", action="store_true", help="one stream of each delay, one shuffle")
    options.add_argument("--json", action="store_true", help="as it always prints")
    given = options.parse_args()
    if given.fast:
        given.streams = given.shuffles = 1
    sections = {
        "known": lambda: iter([known()]),
        "recorded": lambda: recorded(given.shared / "data/traces", given.shuffles),
        "cost": lambda: iter([cost()]),
        "delays": lambda: delays(given.streams),
    }
    for section in given.only.split(","):
        for row in sections[section]():
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
