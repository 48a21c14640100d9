"""ExeGPT's evaluation: its models on its clusters, its tasks, and FasterTransformer's batches under a bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from lengthwise import catalog, schedule
from lengthwise.schedule import Estimator, Strategy
from lengthwise.schema.errors import ScheduleError
from lengthwise.schema.schedule import ScheduleRow

NODES = {"A40": ("A40", "pcie4-8"), "A100": ("A100-80GB", "dgx-a100")}
"""Cluster to (GPU, node); the paper's A40s are joined by 100 Gb/s, its A100s by 8 x 200 Gb/s a node."""
TASKS = ("s", "t", "g", "c1", "c2")
BOUNDS = ("10 %", "30 %", "70 %", "none")
WAA = (Strategy.WAA_C, Strategy.WAA_M)


@dataclass(frozen=True)
class Served:
    """A model on a number of GPUs of a cluster."""

    model: str
    cluster: str
    gpus: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.cluster.lower()}"


T5, OPT = Served("t5-11b", "A40", 8), Served("opt-13b", "A40", 4)
GPT39, GPT101 = Served("gpt-3-39b", "A40", 16), Served("gpt-3-101b", "A100", 16)
GPT175, GPT175_A100 = Served("gpt-3-175b", "A40", 32), Served("gpt-3-175b", "A100", 16)
GPT341 = Served("gpt-3-341b", "A40", 48)
SERVED = (T5, OPT, GPT39, GPT101, GPT175, GPT175_A100, GPT341)
SMALL_MID = tuple((served, task) for served in (T5, OPT, GPT39, GPT101) for task in ("s", "t", "c1"))
LARGE = tuple((served, task) for served in (GPT101, GPT175, GPT175_A100, GPT341) for task in ("g", "c1", "c2"))
"""Models and tasks of sections 7.3 and 7.4; section 7.4 does not name the cluster of GPT-3 175B."""
EVERYTHING = tuple((served, task) for served in SERVED for task in TASKS if (served, task) != (T5, "c2"))
"""Every model and task; T5 takes no prompt of 1,024 tokens."""


@lru_cache(maxsize=1)
def _tables(served: Served) -> tuple:
    gpu, node = NODES[served.cluster]
    cluster = schedule.Cluster(catalog.gpu(gpu), catalog.node(node), served.gpus)
    model = catalog.model(served.model)
    return cluster, model, schedule.cluster_tables(model, cluster, schedule.tensor_degrees(model, cluster))


def estimator(served: Served, task: str | schedule.TaskLengths, **options: Any) -> Estimator:
    """Return the estimator of a task, by its letter or as lengths; ``options`` as Estimator takes them."""
    lengths = schedule.TaskLengths.from_preset(f"exegpt-{task}") if isinstance(task, str) else task
    return Estimator(lengths, *_tables(served), **options)


def planner(of: Estimator, strategies: Sequence[Strategy] = tuple(Strategy)) -> schedule.Planner:
    """Return the planner over all schedules of the strategies at all degrees."""
    return schedule.Planner(of, tuple(of.setting.tables), strategies)


def chosen(plan: schedule.Planner, bound_s: float, **options: bool) -> schedule.Choice | None:
    """Return the choice under a bound; None: no schedule meets it."""
    try:
        choice = plan.best(bound_s, **options)
    except ScheduleError:
        return None
    assert choice.row.latency_high_s <= bound_s
    return choice


def best_by_strategy(choice: schedule.Choice | None) -> dict[str, ScheduleRow | None]:
    """Return the best schedule of each strategy over all degrees, of a choice that was searched separately."""
    best: dict[str, ScheduleRow | None] = {strategy.value: None for strategy in Strategy}
    for side in choice.sides if choice else ():
        known = best[side.strategy]
        if side.best and (known is None or side.best.throughput_rps > known.throughput_rps):
            best[side.strategy] = side.best
    return best


@dataclass(frozen=True)
class FasterTransformer:
    """Static batches: a bound limits the task's longest output, a batch ends with its own longest one."""

    static: schedule.StaticBatches
    rps: np.ndarray

    def best(self, bound_s: float) -> tuple[float, ScheduleRow] | None:
        """Return (requests per second, batch) of the highest throughput that meets a bound."""
        pairs = zip(self.rps.tolist(), self.static.rows, strict=True)
        good = [(rps, row) for rps, row in pairs if row.latency_s <= bound_s]
        return max(good, key=lambda pair: pair[0], default=None)

    def bounds_s(self) -> tuple[float, ...]:
        """Return the paper's four bounds; none if no batch fits in memory."""
        quantiles = self.static.bounds_s()
        return (*quantiles, math.inf) if quantiles else ()


def faster_transformer(of: Estimator) -> FasterTransformer:
    """Return its batches.

    Every iteration takes the mean over the iterations of the task's longest output, slightly too much.
    """
    static, setting = schedule.static_batches(of), of.setting
    log_cdf = np.log(np.maximum(np.cumsum(setting.task.output_pmf)[:-1], 1e-300))
    rps = []
    for row in static.rows:
        longest = (1 - np.exp(row.prefill_batch * log_cdf)).sum()  # mean maximum of a batch
        steps = longest - setting.assumptions.encode_output_tokens
        rps.append(row.prefill_batch / (row.encode_s + row.decode_s * steps))
    return FasterTransformer(static, np.array(rps))


def as_deployed(of: Estimator, row: ScheduleRow) -> schedule.Estimates:
    """Estimate a schedule with the GPU split that was planned, for other lengths."""
    strategy = Strategy(row.strategy)
    steps = min(row.decode_steps, of.setting.task.max_output_tokens)
    parts = None if strategy is Strategy.RRA else row.micro_batches
    controls = schedule.Controls(strategy, row.prefill_batch, steps, parts, row.tp, row.tp_groups)
    return of.estimate([controls], np.array([row.encode_gpus]))


def summary_of(row: ScheduleRow | None) -> dict[str, Any] | None:
    """Return a schedule as rows save it."""
    if row is None:
        return None
    numbers = {"rps": row.throughput_rps, "latency_s": row.latency_s, "constrained_latency_s": row.latency_high_s}
    return {"words": row.words} | {name: float(f"{value:.5g}") for name, value in numbers.items()}


def finite(bound_s: float) -> float | None:
    """Return a bound for JSON; None where there is none."""
    return bound_s if math.isfinite(bound_s) else None
