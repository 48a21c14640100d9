"""Which schedules an engine of today can be told, and the nearest of them to one that it cannot.

An engine has stages of one tensor-parallel degree: groups beside single GPUs (partial TP) cannot be said to it. Where
encoding and decoding are split between engines (WAA), vLLM hands the cache over between one stage that encodes and
one that decodes; several such pairs run side by side, each with weights of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.schedule.choose import Planner, improved
from lengthwise.schedule.controls import CODES, ControlColumns, Controls, Strategy
from lengthwise.schedule.estimation import Estimator
from lengthwise.schedule.sides import Side, row_of
from lengthwise.schema.errors import ScheduleError
from lengthwise.schema.schedule import ScheduleRow

LARGEST_PAIR_BATCH = 2**11
"""Encode batches of a split pair are not looked for beyond."""


@dataclass(frozen=True)
class Cut:
    """An engine's degrees: ``stages`` pipeline stages of ``tp`` GPUs each."""

    tp: int
    stages: int = 1

    @property
    def gpus(self) -> int:
        """GPUs it takes."""
        return self.tp * self.stages


@dataclass(frozen=True)
class Runnable:
    """A schedule that engines can be told.

    Attributes:
        row: What it yields: all of it, or one of ``pipelines`` equal parts.
        pipelines: Equal parts side by side, each with weights of its own.
        encode: The engine that encodes; RRA: that does all.
        decode: The engine that decodes; None: the same.
        exact: Whether it is the schedule that was chosen.
        cause: Why that one cannot be told; "" where it can.
    """

    row: ScheduleRow
    pipelines: int
    encode: Cut
    decode: Cut | None = None
    exact: bool = True
    cause: str = ""

    @property
    def throughput_rps(self) -> float:
        """Of all pipelines."""
        return self.pipelines * self.row.throughput_rps


def runnable(planner: Planner, chosen: ScheduleRow, bound_s: float) -> Runnable:
    """The chosen schedule as engines can be told it, or the best of those that they can be told.

    Others are of the planner's strategies alone: who asks for WAA is not given phases.

    Args:
        planner: Who chose it.
        chosen: The schedule.
        bound_s: Latency that must be held; infinite: any.

    Raises:
        ScheduleError: None that engines can be told meets the bound.
    """
    as_it_is = _as_it_is(chosen, planner.estimator.setting.cluster.gpus)
    if as_it_is is not None:
        return as_it_is
    found = list(_even_phases(planner, bound_s)) if Strategy.RRA in planner.strategies else []
    if chosen.strategy != Strategy.RRA:
        found += _pairs(planner, Strategy(chosen.strategy), bound_s)
    if not found:
        asked = ", ".join(planner.strategies)
        more = "" if Strategy.RRA in planner.strategies else ", or let rra be among the strategies"
        raise ScheduleError(
            f"{chosen.words} cannot be told to engines: {_reason(chosen)}. No schedule of {asked} that can be told them "
            f"meets {bound_s:g} s; give a looser bound{more}"
        )
    best = max(found, key=lambda one: one.throughput_rps)
    return replace(best, exact=False, cause=_reason(chosen))


def _as_it_is(row: ScheduleRow, gpus: int) -> Runnable | None:
    if row.strategy == Strategy.RRA:
        cut = _even_cut(row.tp, row.tp_groups, gpus)
        return None if cut is None else Runnable(row, 1, cut)
    decode_gpus = gpus - row.encode_gpus
    decoding = min(row.tp_groups, decode_gpus // row.tp)
    encode = _even_cut(row.tp, row.tp_groups - decoding, row.encode_gpus)
    decode = _even_cut(row.tp, decoding, decode_gpus)
    if encode is None or decode is None or encode.stages > 1 or decode.stages > 1 or row.micro_batches > 1:
        return None
    return Runnable(row, 1, encode, decode)


def _even_cut(tp: int, groups: int, gpus: int) -> Cut | None:
    if groups == 0:
        return Cut(1, gpus)
    return Cut(tp, groups) if groups * tp == gpus else None


def _reason(row: ScheduleRow) -> str:
    if row.strategy == Strategy.RRA:
        return "its stages have two tensor-parallel degrees, an engine's stages one"
    return (
        "vLLM hands a cache over between one stage that encodes and one that decodes, whole batches at a time; "
        "its sides have several stages, two tensor-parallel degrees, or micro-batches"
    )


class _EvenSide(Side):
    """RRA whose groups take all GPUs."""

    def _groups(self) -> tuple[int, ...]:
        gpus = self._estimator.setting.cluster.gpus
        return tuple(groups for groups in super()._groups() if _even_cut(self.tp, groups, gpus))


def _even_phases(planner: Planner, bound_s: float) -> Iterator[Runnable]:
    """The best RRA of every degree whose stages are alike."""
    estimator = planner.estimator
    gpus = estimator.setting.cluster.gpus
    for tp in (tp for tp in sorted(estimator.setting.tables) if tp <= gpus):
        side = _EvenSide(estimator, Strategy.RRA, tp, worst_case=planner.worst_case)
        for search_results in improved(planner.search(bound_s, [side]), bound_s):
            best = search_results.found.best
            row = None if best is None else side.row(best.point)
            cut = None if row is None else _even_cut(row.tp, row.tp_groups, gpus)
            if row is not None and cut is not None:
                yield Runnable(row, 1, cut)


def _pairs(planner: Planner, strategy: Strategy, bound_s: float) -> Iterator[Runnable]:
    """The best pair of one encoding and one decoding stage of every size, as often as the GPUs hold it."""
    setting = planner.estimator.setting
    gpus, node = setting.cluster.gpus, setting.cluster.node.gpus
    for encode, decode in _sizes(sorted(setting.tables)):
        together = encode.gpus + decode.gpus
        if together > min(gpus, node) or gpus % together or node % together:
            continue
        cluster = replace(setting.cluster, gpus=together)
        pair = Estimator(setting.task, cluster, setting.model, setting.tables, setting.assumptions)
        row = _best_pair(pair, strategy, encode, decode, bound_s, worst_case=planner.worst_case)
        if row is not None:
            yield Runnable(row, gpus // together, encode, decode)


def _sizes(degrees: list[int]) -> Iterator[tuple[Cut, Cut]]:
    """Equal sides, and a single GPU beside a group: a schedule has one degree for its groups."""
    for tp in degrees:
        yield Cut(tp), Cut(tp)
        if tp > 1 and 1 in degrees:
            yield Cut(1), Cut(tp)
            yield Cut(tp), Cut(1)


def _best_pair(
    estimator: Estimator, strategy: Strategy, encode: Cut, decode: Cut, bound_s: float, *, worst_case: bool
) -> ScheduleRow | None:
    tp = max(encode.tp, decode.tp)
    batches = np.arange(1, LARGEST_PAIR_BATCH + 1)
    ones = np.ones(len(batches), dtype=np.int64)
    groups = (encode.tp == tp) + (decode.tp == tp) if tp > 1 else 0
    columns = ControlColumns(CODES.index(strategy) * ones, batches, ones, ones, tp * ones, groups * ones)
    got = estimator.estimate(columns, encode.gpus * ones)
    held_s = got.latency_high_s if worst_case else got.latency_s
    good = np.flatnonzero(got.feasible & (held_s <= bound_s))
    if not len(good):
        return None
    at = int(good[np.argmax(got.throughput_rps[good])])
    controls = Controls(strategy, int(batches[at]), 1, 1, tp, groups)
    return row_of(controls, got, at)
