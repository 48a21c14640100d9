"""Throughput against the latency bound: the frontier of each strategy, their breakpoints, and static batches.

The search covers some latency bounds, from the minimum latency to the latency of the highest throughput, and reuses
estimates. The frontier is optimal at these bounds (within the gap of the search) and underestimates the throughput
between them. A long frontier is thinned so that the largest relative loss of throughput at any bound is minimal, and
zero at the searched bounds.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lengthwise.schedule.controls import Layout, Strategy, rra_layout
from lengthwise.schedule.estimation import Estimator
from lengthwise.schedule.optimizer import Place
from lengthwise.schedule.planner import Planner, refine
from lengthwise.schedule.search_space import SearchSpace, row_of
from lengthwise.schedule.stage_costs import Setting, stage_bytes, stage_kinds, visits_s
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import FrontPoint, Kink, ScheduleRow
from lengthwise.schema.workload import Floats

Fronts = tuple[tuple[str, tuple[FrontPoint, ...]], ...]

BOUNDS = 14  # bounds searched per strategy, in addition to the bounds near its minimum latency
NEAR_MINIMUM = (1.0, 1.02, 1.05, 1.1)
"""Multiples of the minimum latency that are also bounds of searches, because throughput rises most there."""
MAX_POINTS = 100  # largest number of points of a thinned frontier, unless more bounds were searched
OVERTAKE = 1.1
"""A kind of schedule replaces the previous kind only if that has less throughput even at a bound times this factor."""
MULTIPLE, MAX_STATIC_BATCH = 4, 4096
"""Sizes of static batches: all below MULTIPLE, then its multiples up to MAX_STATIC_BATCH."""

_IMPOSSIBLE_S = 1e-9
_HALVINGS = 30
_NEARBY = (0.55, 0.7, 0.8, 0.9, 1.1, 1.2, 1.35, 1.55, 1.8)


class _Evaluated(NamedTuple):
    """An evaluated schedule. ``space`` is the index of the search space."""

    latency_s: float
    rps: float
    space: int
    point: Place


def frontiers(planner: Planner, bounds: int = BOUNDS) -> Fronts:
    """Return the frontier of each feasible strategy, from the minimum latency to the highest throughput.

    The planner searches each strategy at ``bounds`` latency bounds, one of which is infinite, and at some bounds near
    its minimum latency.
    """
    return evaluated_fronts(planner, explore(planner, bounds))


def explore(planner: Planner, bounds: int = BOUNDS) -> dict[Strategy, list[float]]:
    """Search each strategy at several latency bounds, and return the finite ones. The planner stores the estimates."""
    searched_s = {}
    for strategy in dict.fromkeys(space.strategy for space in planner.spaces):
        spaces = _spaces(planner, strategy)
        searched_s[strategy] = _search_between(planner, spaces, bounds)
        for space in spaces:  # Between two bounds searches skip points: try the best points with other batch sizes.
            points, latency_s, rps = space.evaluated_points()
            best, batches = points[_best_so_far(latency_s, rps)], space.variables[0].values
            nearby = [best]
            for factor in _NEARBY:
                other = best.copy()
                other[:, 0] = np.clip(np.rint(best[:, 0] * factor), batches[0], batches[-1])
                nearby.append(other)
            space.perf(np.unique(np.concatenate(nearby), axis=0))
    return searched_s


def _spaces(planner: Planner, strategy: Strategy) -> list[SearchSpace]:
    return [space for space in planner.spaces if space.strategy is strategy and space.variables]


def _search_between(planner: Planner, spaces: Sequence[SearchSpace], bounds: int) -> list[float]:
    """Search bounds near the minimum latency and ``bounds`` - 1 that divide the widest gaps. Return them in seconds."""
    ends = [one.best for one in planner.search(math.inf, spaces) if one.result.best]
    if not ends:
        return []
    top = max(ends, key=lambda end: end.throughput_rps)
    fastest = refine(planner.search(_IMPOSSIBLE_S, spaces), _IMPOSSIBLE_S)
    min_s = min(one.result.fastest.latency_s for one in fastest)
    searched_s = [min_s * factor for factor in NEAR_MINIMUM if min_s * factor < top.latency_s]
    for bound_s in searched_s:
        refine(planner.search(bound_s, spaces), bound_s)
    gaps = [(-1.0, min_s, 0.0, top.latency_s, top.throughput_rps)]
    for _ in range(bounds - 1):
        _, low_s, low_rps, high_s, high_rps = heapq.heappop(gaps)
        middle_s = math.sqrt(low_s * high_s)
        planner.search(middle_s, spaces, known_rps=low_rps)
        searched_s.append(middle_s)
        rps = max([low_rps, *(_max_rps(space, middle_s) for space in spaces)])
        for from_s, from_rps, to_s, to_rps in ((low_s, low_rps, middle_s, rps), (middle_s, rps, high_s, high_rps)):
            loss = (to_rps - from_rps) / to_rps * math.log(to_s / from_s) if to_rps > 0 else 0.0
            heapq.heappush(gaps, (-loss, from_s, from_rps, to_s, to_rps))
    return searched_s


def _max_rps(space: SearchSpace, bound_s: float) -> float:
    _, latency_s, rps = space.evaluated_points()
    return float(rps[latency_s <= bound_s].max(initial=0.0))


def best_evaluated_rps(planner: Planner, bound_s: float) -> float:
    """Return the highest throughput of the schedules evaluated so far that meet a bound."""
    return max((_max_rps(space, bound_s) for space in planner.spaces), default=0.0)


def evaluated_fronts(planner: Planner, at_s: Mapping[Strategy, Sequence[float]]) -> Fronts:
    """Return each strategy's frontier of all evaluated schedules. Thinning loses nothing at the bounds ``at_s``."""
    fronts = []
    for strategy, exact_s in at_s.items():
        spaces = _spaces(planner, strategy)
        found = _undominated(spaces)
        latency_s, rps = np.array([one.latency_s for one in found]), np.array([one.rps for one in found])
        if found:
            points = _front_points(spaces, [found[at] for at in thinned(latency_s, rps, exact_s)])
            fronts.append((strategy.value, tuple(points)))
    return tuple(fronts)


def non_dominated(spaces: Sequence[SearchSpace]) -> list[FrontPoint]:
    """Return the evaluated schedules with more throughput than all of lower latency, ordered by latency."""
    return _front_points(spaces, _undominated(spaces))


def _undominated(spaces: Sequence[SearchSpace]) -> list[_Evaluated]:
    seen: list[_Evaluated] = []
    for number, space in enumerate(spaces):
        points, latency_s, rps = space.evaluated_points()
        best = _best_so_far(latency_s, rps)
        seen += [_Evaluated(float(latency_s[i]), float(rps[i]), number, tuple(points[i].tolist())) for i in best]
    best_rps, found = 0.0, []
    for one in sorted(seen, key=lambda one: (one.latency_s, -one.rps, one.space, one.point)):
        if one.rps > best_rps:
            best_rps = one.rps
            found.append(one)
    return found


def _best_so_far(latency_s: Floats, rps: Floats) -> list[int]:
    """Return the indices of points with more throughput than all points of lower latency, ordered by latency."""
    order = np.lexsort((-rps, latency_s))
    before = np.concatenate([[0.0], np.maximum.accumulate(rps[order])[:-1]]) if len(order) else rps
    return [int(i) for i in order[rps[order] > before]]


def _front_points(spaces: Sequence[SearchSpace], found: Sequence[_Evaluated]) -> list[FrontPoint]:
    points: dict[int, FrontPoint] = {}
    for number in {one.space for one in found}:
        at = [i for i, one in enumerate(found) if one.space == number]
        places = np.array([found[i].point for i in at], dtype=np.int64)
        got, controls = spaces[number].estimates(places), spaces[number].columns(places)
        for row, i in enumerate(at):
            points[i] = FrontPoint(found[i].latency_s, row_of(controls.row(row), got, row))
    return [points[i] for i in range(len(found))]


def thinned(latency_s: Floats, rps: Floats, exact_s: Sequence[float]) -> list[int]:
    """Return ascending indices of at most ``MAX_POINTS`` points (more for many ``exact_s``) that represent a frontier.

    They minimize the largest relative loss of throughput at any bound. At the bounds ``exact_s`` there is no loss.
    """
    if len(rps) <= MAX_POINTS:
        return list(range(len(rps)))
    exact = np.searchsorted(latency_s, exact_s, side="right") - 1
    required = {0, len(rps) - 1} | {int(at) for at in exact if at >= 0}
    low, high = 0.0, math.log(rps[-1] / rps[0])
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        enough = len(growth_steps(rps, math.exp(middle), required)) <= max(MAX_POINTS, len(required))
        low, high = (low, middle) if enough else (middle, high)
    return growth_steps(rps, math.exp(high), required)


def growth_steps(rps: Floats, factor: float, required: Iterable[int]) -> list[int]:
    """Return the required indices and, between them, each index before throughput grows by another ``factor``."""
    found, stops = [0], sorted(required)
    while found[-1] < stops[-1]:
        after = int(np.searchsorted(rps, factor * rps[found[-1]], side="right"))
        found.append(min(after, stops[bisect.bisect_right(stops, found[-1])]))
    return found


def breakpoints(fronts: Fronts) -> tuple[Kink, ...]:
    """Return the latency bounds at which the best kind of schedule changes.

    A kind is a strategy at a tensor-parallel degree. It replaces the previous kind only if the previous kind has less
    throughput even at a bound that is ``OVERTAKE`` times as large. Otherwise two kinds that alternate as the batch
    grows would give a breakpoint at each step.
    """
    points = sorted(
        (p for _, front in fronts for p in front), key=lambda p: (p.constrained_latency_s, -p.row.throughput_rps)
    )

    def max_rps(kind: tuple[str, int], bound_s: float) -> float:
        own = (p.row.throughput_rps for p in points if p.constrained_latency_s <= bound_s and p.row.family[:2] == kind)
        return max(own, default=0.0)

    best, last, found = 0.0, ("", 0), []
    for point in points:
        if point.row.throughput_rps <= best:
            continue
        best, kind = point.row.throughput_rps, point.row.family[:2]
        if kind != last and max_rps(last, OVERTAKE * point.constrained_latency_s) < best:
            strategy, tp = kind
            degree = f"with TP {tp}" if tp > 1 else "without tensor parallelism"
            found.append(Kink(point.constrained_latency_s, f"{strategy.upper()} {degree}: {point.row.words}"))
            last = kind
    return tuple(found)


@dataclass(frozen=True)
class StaticBatches:
    """Static batches that fit in memory, one schedule for each batch size.

    Latencies are from the start of the prefill to the last token. Those in ``rows`` are of outputs of maximum length,
    those in ``quantile_latency_s`` of outputs at the quantile ``Assumptions.level``.
    """

    rows: tuple[ScheduleRow, ...]
    quantile_latency_s: tuple[float, ...] = ()

    def best(self, bound_s: float) -> ScheduleRow | None:
        """Return the batch with the highest throughput that meets a bound, or None if no batch meets it."""
        good = (row for row in self.rows if row.latency_s <= bound_s)
        return max(good, key=lambda row: row.throughput_rps, default=None)

    def front(self, at_s: float = math.inf) -> tuple[FrontPoint, ...]:
        """Return the thinned frontier, ordered by latency. At the bound ``at_s`` thinning loses nothing."""
        rps = np.array([row.throughput_rps for row in self.rows])
        before = np.maximum.accumulate(np.concatenate([[0.0], rps]))[:-1]
        best = [self.rows[i] for i in np.flatnonzero(rps > before)]
        latency_s = np.array([row.latency_s for row in best])
        return tuple(FrontPoint(best[i].latency_s, best[i]) for i in thinned(latency_s, rps[rps > before], [at_s]))

    def bounds_s(self, quantiles: tuple[float, ...] = (0.1, 0.3, 0.7)) -> tuple[float, ...]:
        """Return quantiles of ``quantile_latency_s`` over multiples of four as batch sizes (ExeGPT, section 7.1)."""
        pairs = zip(self.rows, self.quantile_latency_s, strict=True)
        latency_s = [seconds for row, seconds in pairs if row.prefill_batch % MULTIPLE == 0]
        return tuple(np.quantile(latency_s, quantiles).tolist()) if latency_s else ()


def static_batches(estimator: Estimator) -> StaticBatches:
    """Return all static batches of an estimator's task on its cluster. ``rows`` is empty if none fits in memory."""
    setting = estimator.setting
    tp, layout = _widest_layout(setting)
    if not layout.stages:
        return StaticBatches(())
    batch = np.concatenate([np.arange(1, MULTIPLE), np.arange(MULTIPLE, MAX_STATIC_BATCH + 1, MULTIPLE)])
    stages = len(layout.stages)
    steps = setting.task.max_output_tokens - setting.assumptions.prefill_output_tokens
    parts = np.minimum(batch, stages)
    # Memory is reserved for outputs of maximum length.
    visit = batch / parts
    kv_tokens = setting.prompt_tokens_high(batch.astype(np.float64)) + batch * float(setting.task.max_output_tokens)
    tokens = setting.prompt_tokens_high(visit)
    needed, _ = stage_bytes(setting.memory(layout.stages), layout.stages, kv_tokens, None, tokens, visit)
    share = needed / setting.available_bytes
    batch, parts, share = batch[share <= 1], parts[share <= 1], share[share <= 1]
    total, slowest = _pass_s(setting, layout, batch / parts, 0.0, prefill=True)
    prefill_s = total + (parts - 1) * slowest
    seqs = (batch / parts)[:, None] + np.zeros(steps)
    kv_tokens = seqs * (setting.task.mean_prompt_tokens + np.arange(1, steps + 1))
    total, slowest = _pass_s(setting, layout, seqs, kv_tokens, prefill=False)
    iteration_s = np.maximum(total, parts[:, None] * slowest)
    decode_s, level = iteration_s.sum(axis=1), setting.assumptions.level
    quantile_steps = setting.task.output_quantile(level) - setting.assumptions.prefill_output_tokens
    quantile_latency_s = prefill_s + iteration_s[:, :quantile_steps].sum(axis=1)
    rows = []
    for at, latency_s in enumerate((prefill_s + decode_s).tolist()):
        row = ScheduleRow(
            strategy="static",
            prefill_batch=int(batch[at]),
            decode_steps=steps,
            micro_batches=int(parts[at]),
            tp=tp,
            tp_groups=stages if tp > 1 else 0,
            prefill_gpus=setting.cluster.gpus,
            throughput_rps=int(batch[at]) / latency_s,
            latency_s=latency_s,
            latency_high_s=latency_s,
            cycle_s=latency_s,
            prefill_s=float(prefill_s[at]),
            decode_s=float(decode_s[at]) / max(steps, 1),
            decode_batch=float(batch[at]),
            memory_share=float(share[at]),
        )
        rows.append(row)
    return StaticBatches(tuple(rows), tuple(quantile_latency_s.tolist()))


def _widest_layout(setting: Setting) -> tuple[int, Layout]:
    """Return the largest degree that divides the cluster and fits in a node, and its layout (empty if none)."""
    gpus, node = setting.cluster.gpus, setting.cluster.node.gpus
    for tp in sorted(setting.tables, reverse=True):
        if tp <= node and gpus % tp == 0:
            try:
                return tp, rra_layout(setting.model.layers, gpus, tp, gpus // tp if tp > 1 else 0)
            except InputError:
                break
    return 1, Layout(())


def _pass_s(
    setting: Setting, layout: Layout, seqs: Floats, kv_tokens: Floats | float, *, prefill: bool
) -> tuple[Floats, Floats]:
    """Return the seconds of a pass through all stages, and the seconds of a visit to the slowest stage."""
    total, slowest = np.zeros(seqs.shape), np.zeros(seqs.shape)
    for (stage, first, last), count in stage_kinds(layout.stages).items():
        packed = setting.packed(stage.tp)
        visit_s = visits_s(packed, seqs, kv_tokens, (stage.layers, first, last), prefill=prefill)
        total, slowest = total + count * visit_s, np.maximum(slowest, visit_s)
    return total, slowest
