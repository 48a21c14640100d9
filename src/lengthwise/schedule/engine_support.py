"""Schedules that today's engines support, and the best substitute for a schedule that they do not support.

All stages of an engine have one tensor-parallel degree, so groups next to single GPUs (partial TP) are not supported.
Under disaggregation (WAA) vLLM transfers the KV cache from one prefill stage to one decode stage. Several such pairs
run in parallel, each with its own weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.schedule.controls import CODES, ControlColumns, Strategy
from lengthwise.schedule.estimation import Estimator
from lengthwise.schedule.planner import Planner, refine
from lengthwise.schedule.search_space import SearchSpace, row_of
from lengthwise.schema.errors import ScheduleError
from lengthwise.schema.schedule import ScheduleRow

MAX_PAIR_BATCH = 2**11


@dataclass(frozen=True)
class EngineShape:
    """Parallelism of an engine: ``stages`` pipeline stages of ``tp`` GPUs each."""

    tp: int
    stages: int = 1


@dataclass(frozen=True)
class Runnable:
    """A schedule that engines support.

    ``row`` has the estimates of one of ``pipelines`` equal pipelines, each with its own weights. ``prefill`` is the
    engine that prefills (RRA: the only engine). ``decode`` is the engine that decodes, or None if it is the same.
    Unless ``exact``, it is a substitute, and ``cause`` says why engines do not support the chosen schedule.
    """

    row: ScheduleRow
    pipelines: int
    prefill: EngineShape
    decode: EngineShape | None = None
    exact: bool = True
    cause: str = ""

    @property
    def throughput_rps(self) -> float:
        """Return the throughput of all pipelines."""
        return self.pipelines * self.row.throughput_rps


def runnable(planner: Planner, chosen: ScheduleRow, bound_s: float) -> Runnable:
    """Return the chosen schedule if engines support it. Otherwise return the best supported one under the bound.

    A substitute uses RRA (if the planner searches it) or the chosen strategy, whichever has more throughput. Raises
    ScheduleError if no supported schedule meets the bound.
    """
    gpus = planner.estimator.setting.cluster.gpus
    if chosen.strategy == Strategy.RRA:
        prefill, decode = _uniform(chosen.tp, chosen.tp_groups, gpus), None
        supported = prefill is not None
        cause = "its stages have two tensor-parallel degrees, an engine's stages one"
    else:
        decode_groups = min(chosen.tp_groups, (gpus - chosen.prefill_gpus) // chosen.tp)
        prefill = _uniform(chosen.tp, chosen.tp_groups - decode_groups, chosen.prefill_gpus)
        decode = _uniform(chosen.tp, decode_groups, gpus - chosen.prefill_gpus)
        single_stages = prefill is not None and decode is not None and prefill.stages == decode.stages == 1
        supported = single_stages and chosen.micro_batches <= 1
        cause = (
            "vLLM transfers the cache between one prefill stage and one decode stage, complete batches at a time; "
            "its sides have several stages, two tensor-parallel degrees, or micro-batches"
        )
    if supported and prefill is not None:
        return Runnable(chosen, 1, prefill, decode)
    found = list(_uniform_phases(planner, bound_s)) if Strategy.RRA in planner.strategies else []
    if chosen.strategy != Strategy.RRA:
        found += _pairs(planner, Strategy(chosen.strategy), bound_s)
    if not found:
        tried = dict.fromkeys([chosen.strategy] + [Strategy.RRA] * (Strategy.RRA in planner.strategies))
        more = "" if Strategy.RRA in planner.strategies else ", or let rra be among the strategies"
        raise ScheduleError(
            f"engines do not support {chosen.words}: {cause}. No schedule of {', '.join(tried)} that they "
            f"support meets {bound_s:g} s; give a looser bound{more}"
        )
    best = max(found, key=lambda one: one.throughput_rps)
    return replace(best, exact=False, cause=cause)


def _uniform(tp: int, groups: int, gpus: int) -> EngineShape | None:
    if groups == 0:
        return EngineShape(1, gpus)
    return EngineShape(tp, groups) if groups * tp == gpus else None


def _uniform_phases(planner: Planner, bound_s: float) -> Iterator[Runnable]:
    estimator = planner.estimator
    gpus = estimator.setting.cluster.gpus
    for tp in (tp for tp in sorted(estimator.setting.tables) if gpus % tp == 0):
        groups = gpus // tp if tp > 1 else 0
        space = SearchSpace(estimator, Strategy.RRA, tp, worst_case=planner.worst_case, groups=(groups,))
        for one in refine(planner.search(bound_s, [space]), bound_s):
            if one.result.best is not None:
                yield Runnable(space.row(one.best.point), 1, EngineShape(tp, groups or gpus))


def _pairs(planner: Planner, strategy: Strategy, bound_s: float) -> Iterator[Runnable]:
    """Yield the best schedule of equal pairs (a prefill and a decode stage) on all GPUs, for each two sizes of stages.

    Both stages have the same size, or one is a single GPU, because a schedule has only one degree for its groups.
    """
    setting = planner.estimator.setting
    gpus, node = setting.cluster.gpus, setting.cluster.node.gpus
    for tp in sorted(setting.tables):
        for prefill, decode in [(tp, tp)] if tp == 1 or 1 not in setting.tables else [(tp, tp), (1, tp), (tp, 1)]:
            together = prefill + decode
            if together > min(gpus, node) or gpus % together or node % together:
                continue
            pair = planner.estimator.replace(cluster=replace(setting.cluster, gpus=together))
            row = _best_pair(pair, strategy, prefill, decode, bound_s, worst_case=planner.worst_case)
            if row is not None:
                yield Runnable(row, gpus // together, EngineShape(prefill), EngineShape(decode))


def _best_pair(
    estimator: Estimator, strategy: Strategy, prefill: int, decode: int, bound_s: float, *, worst_case: bool
) -> ScheduleRow | None:
    tp = max(prefill, decode)
    groups = (prefill == tp) + (decode == tp) if tp > 1 else 0
    batches = np.arange(1, MAX_PAIR_BATCH + 1)
    ones = np.ones(len(batches), dtype=np.int64)
    columns = ControlColumns(CODES.index(strategy) * ones, batches, ones, ones, tp * ones, groups * ones)
    got = estimator.estimate(columns, prefill * ones)
    good = np.flatnonzero((got.constrained_latency_s(worst_case=worst_case) <= bound_s) & got.feasible)
    if not len(good):
        return None
    at = int(good[np.argmax(got.throughput_rps[good])])
    return row_of(columns.row(at), got, at)
