"""ExeGPT's evaluation: its models on its clusters, its tasks, and FasterTransformer's batches under a bound."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lengthwise import catalog
from lengthwise.schedule import (
    Choice,
    Cluster,
    Controls,
    Estimates,
    Estimator,
    Planner,
    StaticBatches,
    Strategy,
    TaskLengths,
    cluster_tables,
    static_batches,
    tensor_degrees,
)
from lengthwise.schema.errors import ScheduleError
from lengthwise.schema.schedule import ScheduleRow

NODES = {"A40": ("A40", "pcie4-8"), "A100": ("A100-80GB", "dgx-a100")}
"""Cluster to (GPU, node); the paper's A40s are joined by 100 Gb/s, its A100s by 8 x 200 Gb/s a node."""
TASKS = ("s", "t", "g", "c1", "c2")
BOUNDS = ("10 %", "30 %", "70 %", "none")


@dataclass(frozen=True)
class Served:
    """A model on so many GPUs of a cluster."""

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
"""Tasks and models as sections 7.3 and 7.4 have them; of its clusters the second does not say which it took."""


def everything() -> Iterator[tuple[Served, str]]:
    """Every model and task; T5 takes no prompt of 1,024 tokens."""
    return ((served, task) for served in SERVED for task in TASKS if (served, task) != (T5, "c2"))


@lru_cache(maxsize=1)
def _tables(served: Served) -> tuple:
    gpu, node = NODES[served.cluster]
    cluster = Cluster(catalog.gpu(gpu), catalog.node(node), served.gpus)
    model = catalog.model(served.model)
    return cluster, model, cluster_tables(model, cluster, tensor_degrees(model, cluster))


@lru_cache(maxsize=8)
def lengths(task: str) -> TaskLengths:
    """One of the paper's tasks, by its letter."""
    return TaskLengths.from_preset(f"exegpt-{task}")


def estimator(served: Served, task: str | TaskLengths, **more) -> Estimator:
    """Of a task, by name or as lengths; ``more`` as Estimator takes it."""
    cluster, model, tables = _tables(served)
    return Estimator(lengths(task) if isinstance(task, str) else task, cluster, model, tables, **more)


def planner(of: Estimator, strategies: Sequence[Strategy] = tuple(Strategy)) -> Planner:
    """All schedules of the strategies at all degrees."""
    return Planner(of, tuple(of.setting.tables), strategies)


def chosen(planner: Planner, bound_s: float, **how) -> Choice | None:
    """The choice under a bound; None: nothing meets it."""
    try:
        found = planner.best(bound_s, **how)
    except ScheduleError:
        return None
    assert found.row.latency_high_s <= bound_s
    return found


def best_of_each(choice: Choice | None) -> dict[str, ScheduleRow | None]:
    """By strategy its best over degrees, of a choice whose sides were searched apart."""
    best: dict[str, ScheduleRow | None] = {strategy.value: None for strategy in Strategy}
    for side in choice.sides if choice else ():
        known = best[side.strategy]
        if side.best and (known is None or side.best.throughput_rps > known.throughput_rps):
            best[side.strategy] = side.best
    return best


@dataclass(frozen=True)
class FasterTransformer:
    """Static batches: a bound is held for the task's longest output, a batch is over with its own longest one."""

    static: StaticBatches
    rps: np.ndarray
    padded_s: np.ndarray
    """Seconds more that encoding would take were prompts padded to the longest of their micro-batch."""

    def best(self, bound_s: float) -> tuple[float, ScheduleRow] | None:
        """(requests a second, the batch) of the highest throughput that meets a bound."""
        good = np.flatnonzero(self.static.latency_s <= bound_s)
        if not len(good):
            return None
        at = int(good[np.argmax(self.rps[good])])
        return float(self.rps[at]), self.static.row(at)

    def padded_rps(self, bound_s: float) -> float:
        """The highest throughput that meets a bound were prompts padded; 0: nothing does."""
        rps = self.static.batch / (self.static.batch / self.rps + self.padded_s)
        return float(rps[self.static.latency_s + self.padded_s <= bound_s].max(initial=0.0))

    def bounds_s(self) -> tuple[float, ...]:
        """The paper's four bounds; none where nothing fits."""
        quantiles = self.static.bounds_s()
        return (*quantiles, math.inf) if quantiles else ()


def faster_transformer(of: Estimator) -> FasterTransformer:
    """Its batches. Iterations take what they take in the mean up to the task's longest output, a little too much."""
    static, setting = static_batches(of), of.setting
    steps = expected_longest(setting.task.output_pmf, static.batch) - setting.assumptions.encode_output_tokens
    in_part = np.maximum(static.batch // static.micro_batches, 1)
    longer = expected_longest(setting.task.prompt_pmf, in_part) / setting.task.mean_prompt_tokens
    rps = static.batch / (static.encode_s + static.decode_s * steps)
    return FasterTransformer(static, rps, static.encode_s * (longer - 1))


def expected_longest(pmf: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """[n] mean of the longest of so many lengths."""
    log_cdf = np.log(np.maximum(np.cumsum(pmf)[:-1], 1e-300))
    return np.array([(1 - np.exp(many * log_cdf)).sum() for many in batch])


def as_deployed(of: Estimator, row: ScheduleRow) -> Estimates:
    """A schedule as it was planned, split and all, for other lengths."""
    strategy = Strategy(row.strategy)
    controls = Controls(
        strategy,
        row.encode_batch,
        min(row.decode_steps, of.setting.task.max_output_tokens),
        None if strategy is Strategy.RRA else row.micro_batches,
        row.tp,
        row.tp_groups,
    )
    return of.estimate([controls], np.array([row.encode_gpus]))


def seen(row: ScheduleRow | None) -> dict[str, object] | None:
    """A schedule as results keep it."""
    if row is None:
        return None
    numbers = {"rps": row.throughput_rps, "latency_s": row.latency_s, "constrained_latency_s": row.latency_high_s}
    return {"words": row.words} | {name: float(f"{value:.5g}") for name, value in numbers.items()}
