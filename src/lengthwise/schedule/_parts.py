"""The GPUs cut into parts that each serve by themselves, which ExeGPT does not consider: more pipelines, each shorter.

RRA and WAA make one pipeline of all GPUs. Where a bound is tight that is long: of sixteen GPUs eight by themselves may
have nearly as much, and of seven four may meet a bound that all of them do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from lengthwise.catalog import weight_bytes
from lengthwise.schedule.choose import Planner
from lengthwise.schedule.estimate import Estimator
from lengthwise.schema.errors import InputError, ScheduleError
from lengthwise.schema.schedule import ScheduleParts

LEAST_GAIN = 0.02
"""What a search may miss; less than so much more is not told."""


def parts(planner: Planner, bound_s: float = math.inf, above_rps: float = 0.0) -> ScheduleParts | None:
    """The parts that serve most under a bound; None: none serves noticeably more than ``above_rps``.

    Args:
        planner: Of all GPUs.
        bound_s: Latency that must be held; infinite: any.
        above_rps: What all of them together have.
    """
    found = list(_found(planner, bound_s))
    best = max(found, key=lambda one: (one.throughput_rps, one.gpus), default=None)
    return best if best and best.throughput_rps > above_rps * (1 + LEAST_GAIN) else None


def _found(planner: Planner, bound_s: float) -> Iterator[ScheduleParts]:
    """The best of each size that meets the bound."""
    setting = planner.estimator.setting
    gpus = setting.cluster.gpus
    for size in _sizes(gpus, setting.cluster.node.gpus):
        if weight_bytes(setting.model) > size * setting.usable_bytes:
            continue
        tables = {tp: one for tp, one in setting.tables.items() if tp <= size}
        cluster = replace(setting.cluster, gpus=size)
        part = Estimator(setting.task, cluster, setting.model, tables, setting.assumptions)
        try:
            yield ScheduleParts(size, gpus // size, planner.anew(part).best(bound_s).row)
        except (InputError, ScheduleError):
            continue  # WAA alone on one GPU, or nothing that fits and meets the bound


def _sizes(gpus: int, node_gpus: int) -> list[int]:
    """GPUs of a part: what a node holds a whole number of, a few left over or not, or whole nodes that use up all."""
    within = [size for size in range(1, node_gpus + 1) if node_gpus % size == 0]
    nodes = [size for size in range(2 * node_gpus, gpus, node_gpus) if gpus % size == 0]
    return [size for size in within + nodes if size < gpus]


__all__ = ["LEAST_GAIN", "parts"]
