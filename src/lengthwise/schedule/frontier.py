"""Throughput against the latency bound: what each strategy has to offer, and where another one takes over.

A few bounds between the least latency and that of the highest throughput are searched, all with the same estimates;
whatever of those no other beats in both is the frontier. At the bounds themselves it is the best there is, between
them at least that. What is left out of a long frontier costs it the least throughput at any bound, and none at these.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.choose import Planner, improved
from lengthwise.schedule.controls import Layout, Stage, Strategy, rra_layout
from lengthwise.schedule.estimation import Estimator
from lengthwise.schedule.optimizer import Place
from lengthwise.schedule.sides import Side, row_of
from lengthwise.schedule.stage_costs import Setting, stage_bytes, visits_s
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import FrontPoint, Kink, ScheduleRow

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Fronts = tuple[tuple[str, tuple[FrontPoint, ...]], ...]

BOUNDS = 14
"""Bounds that are searched for each strategy, beside those near its least latency."""
NEAR_LEAST = (1.0, 1.02, 1.05, 1.1)
"""Bounds over the least latency that are searched, too: there a little latency is worth most."""
MOST_POINTS = 100
"""Points of a frontier that are kept, unless more bounds than these were searched."""
NEAR_BOUND = 1.1
"""How much looser a bound may be at which another kind of schedule would not yet be told apart."""

_NO_TIME_S = 1e-9
_HALVINGS = 30
_NEAR = (0.55, 0.7, 0.8, 0.9, 1.1, 1.2, 1.35, 1.55, 1.8)


class _Seen(NamedTuple):
    """A schedule that was estimated: its latency, its throughput, whose it is among some sides, and where it lies."""

    constrained_latency_s: float
    rps: float
    side: int
    point: Place


def frontiers(planner: Planner, bounds: int = BOUNDS) -> Fronts:
    """By strategy, its schedules from the least latency to the highest throughput; strategies that cannot run are out.

    Args:
        planner: Whose schedules.
        bounds: How many bounds are searched, no bound at all among them, beside those near the least latency.
    """
    return fronts_seen(planner, explored_s(planner, bounds))


def explored_s(planner: Planner, bounds: int = BOUNDS) -> dict[Strategy, list[float]]:
    """Bounds that were searched for each strategy; what was seen on the way is the planner's."""
    searched_s = {}
    for strategy in dict.fromkeys(side.strategy for side in planner.sides):
        sides = _sides(planner, strategy)
        searched_s[strategy] = _search_between(planner, sides, bounds)
        for side in sides:
            side.perf(_near(side))
    return searched_s


def fronts_seen(planner: Planner, at_s: Mapping[Strategy, Sequence[float]]) -> Fronts:
    """``frontiers`` of what a planner has seen; at some bounds none of them is left out."""
    fronts = []
    for strategy, kept_s in at_s.items():
        sides = _sides(planner, strategy)
        points = _rows(sides, _sampled(_undominated(sides), kept_s))
        if points:
            fronts.append((strategy.value, tuple(points)))
    return tuple(fronts)


def most_seen_rps(planner: Planner, bound_s: float) -> float:
    """The most that was seen within a bound."""
    return max((_seen_within(side, bound_s) for side in planner.sides), default=0.0)


def _sides(planner: Planner, strategy: Strategy) -> list[Side]:
    return [side for side in planner.sides if side.strategy is strategy and side.variables]


def _search_between(planner: Planner, sides: Sequence[Side], bounds: int) -> list[float]:
    """Searches bounds from the least latency on, always where most may be missed: steep or wide stretches; which."""
    ends = [one.best for one in planner.search(math.inf, sides) if one.found.best]
    if not ends:
        return []
    top = max(ends, key=lambda end: end.throughput_rps)
    min_s = _least_s(planner, sides)
    searched_s = [min_s * times for times in NEAR_LEAST if min_s * times < top.latency_s]
    for bound_s in searched_s:
        improved(planner.search(bound_s, sides), bound_s)
    stretches = [(-1.0, min_s, 0.0, top.latency_s, top.throughput_rps)]
    for _ in range(bounds - 1):
        _, low_s, low_rps, high_s, high_rps = heapq.heappop(stretches)
        middle_s = math.sqrt(low_s * high_s)
        planner.search(middle_s, sides, known_rps=low_rps)
        searched_s.append(middle_s)
        rps = max([low_rps, *(_seen_within(side, middle_s) for side in sides)])
        for stretch in ((low_s, low_rps, middle_s, rps), (middle_s, rps, high_s, high_rps)):
            heapq.heappush(stretches, (-_may_miss(*stretch), *stretch))
    return searched_s


def _least_s(planner: Planner, sides: Sequence[Side]) -> float:
    """The least latency there is, as it is told where nothing meets a bound."""
    search_results = improved(planner.search(_NO_TIME_S, sides), _NO_TIME_S)
    return min(one.found.fastest.latency_s for one in search_results)


def _near(side: Side) -> Ints:
    """[n, variables] a side's best points so far with other batches: what a step between two bounds passes over."""
    points, latency_s, rps = side.seen()
    best = points[_best_so_far(latency_s, rps)]
    batches = side.variables[0].values
    near = [best]
    for times in _NEAR:
        other = best.copy()
        other[:, 0] = np.clip(np.rint(best[:, 0] * times), batches[0], batches[-1])
        near.append(other)
    return np.unique(np.concatenate(near), axis=0)


def _may_miss(low_s: float, low_rps: float, high_s: float, high_rps: float) -> float:
    return (high_rps - low_rps) / high_rps * math.log(high_s / low_s) if high_rps > 0 else 0.0


def _seen_within(side: Side, bound_s: float) -> float:
    _, latency_s, rps = side.seen()
    return float(rps[latency_s <= bound_s].max(initial=0.0))


def non_dominated(sides: Sequence[Side]) -> list[FrontPoint]:
    """The schedules seen so far that none of the sides' beats in both, by latency."""
    return _rows(sides, _undominated(sides))


def _undominated(sides: Sequence[Side]) -> list[_Seen]:
    """Those that no other beats, as they were seen."""
    rows: list[tuple[float, float, int, Place]] = []
    for number, side in enumerate(sides):
        points, latency_s, rps = side.seen()
        keep = _best_so_far(latency_s, rps)
        rows += [(float(latency_s[i]), -float(rps[i]), number, tuple(points[i].tolist())) for i in keep]
    rows.sort()
    best, found = 0.0, []
    for held_s, loss, number, point in rows:
        if -loss > best:
            best = -loss
            found.append(_Seen(held_s, best, number, point))
    return found


def breakpoints(fronts: Fronts) -> tuple[Kink, ...]:
    """From which bound on which strategy at which degree is the best of all.

    One takes over where the last one would not have as much within a bound ``NEAR_BOUND`` times as loose: kinds that
    overtake each other at every step of a batch are as good as one.
    """
    points = sorted(
        (p for _, front in fronts for p in front), key=lambda p: (p.constrained_latency_s, -p.row.throughput_rps)
    )
    best, last, found = 0.0, ("", 0), []
    for point in points:
        if point.row.throughput_rps <= best:
            continue
        best, kind = point.row.throughput_rps, point.row.family[:2]
        if kind != last and _most_rps(points, last, NEAR_BOUND * point.constrained_latency_s) < best:
            found.append(Kink(point.constrained_latency_s, f"{_kind_words(*kind)}: {point.row.words}"))
            last = kind
    return tuple(found)


def _most_rps(points: Sequence[FrontPoint], kind: tuple[str, int], bound_s: float) -> float:
    """The most that schedules of a kind have within a bound."""
    own = (p.row.throughput_rps for p in points if p.constrained_latency_s <= bound_s and p.row.family[:2] == kind)
    return max(own, default=0.0)


def _kind_words(strategy: str, tp: int) -> str:
    return f"{strategy.upper()} with TP {tp}" if tp > 1 else f"{strategy.upper()} without tensor parallelism"


def _best_so_far(latency_s: Floats, rps: Floats) -> list[int]:
    order = np.lexsort((-rps, latency_s))
    before = np.concatenate([[0.0], np.maximum.accumulate(rps[order])[:-1]]) if len(order) else rps
    return [int(i) for i in order[rps[order] > before]]


def _rows(sides: Sequence[Side], found: Sequence[_Seen]) -> list[FrontPoint]:
    """The points with all that is estimated of them, a call a side."""
    made: dict[int, FrontPoint] = {}
    for number in {one.side for one in found}:
        side = sides[number]
        at = [i for i, one in enumerate(found) if one.side == number]
        points = np.array([found[i].point for i in at], dtype=np.int64)
        got, controls = side.estimates(points), side.columns(points)
        for row, i in enumerate(at):
            made[i] = FrontPoint(found[i].constrained_latency_s, row_of(controls.row(row), got, row))
    return [made[i] for i in range(len(found))]


def _sampled(found: Sequence[_Seen], at_s: Sequence[float]) -> list[_Seen]:
    held_s, rps = np.array([one.constrained_latency_s for one in found]), np.array([one.rps for one in found])
    return [found[at] for at in shown_of(held_s, rps, at_s)]


def shown_of(constrained_latency_s: Floats, rps: Floats, at_s: Sequence[float]) -> list[int]:
    """Which points of a frontier are shown, in its order.

    About ``MOST_POINTS``, so that at every bound as small a share of throughput is lacking as may be, and none at some.
    """
    if len(rps) <= MOST_POINTS:
        return list(range(len(rps)))
    kept = {0, len(rps) - 1} | {
        int(at) for at in np.searchsorted(constrained_latency_s, at_s, side="right") - 1 if at >= 0
    }
    low, high = 0.0, math.log(rps[-1] / rps[0])
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        enough = len(_steps(rps, math.exp(middle), kept)) <= max(MOST_POINTS, len(kept))
        low, high = (low, middle) if enough else (middle, high)
    return _steps(rps, math.exp(high), kept)


def _steps(rps: Floats, times: float, retained: Iterable[int]) -> list[int]:
    """Those kept, and from each on the first that has more than so many ``times`` its throughput."""
    found, wanted = [0], sorted(retained)
    while found[-1] < wanted[-1]:
        after = int(np.searchsorted(rps, times * rps[found[-1]], side="right"))
        found.append(min(after, wanted[bisect.bisect_right(wanted, found[-1])]))
    return found


MULTIPLE = 4
"""Batches are multiples of so many requests, and smaller ones."""
LARGEST = 4096


@dataclass(frozen=True, eq=False)
class StaticBatches:
    """Static batches that memory holds, a row each, from small to large.

    Attributes:
        batch: Requests.
        latency_s: From a batch's encoding to its last token.
        encode_s: Of the whole batch.
        decode_s: A decode iteration, mean.
        memory_share: What the fullest GPU needs over what it has.
        steps: Decode iterations.
        micro_batches: Parts in the pipeline.
        tp: Tensor-parallel degree.
        tp_groups: Stages of it; 0: of one GPU each.
        gpus: In all.
    """

    batch: Ints
    latency_s: Floats
    encode_s: Floats
    decode_s: Floats
    memory_share: Floats
    steps: int
    micro_batches: Ints
    tp: int
    tp_groups: int
    gpus: int

    def best(self, bound_s: float) -> ScheduleRow | None:
        """The batch of the highest throughput that meets a bound; None: none does."""
        good = np.flatnonzero(self.latency_s <= bound_s)
        if not len(good):
            return None
        return self.row(int(good[np.argmax((self.batch / self.latency_s)[good])]))

    def front(self, at_s: float = math.inf) -> tuple[FrontPoint, ...]:
        """Those that none beats in both throughput and latency, thinned, by latency; the best at a bound is kept."""
        rps = self.batch / self.latency_s
        before = np.maximum.accumulate(np.concatenate([[0.0], rps]))[:-1]
        best = np.flatnonzero(rps > before)
        at = best[shown_of(self.latency_s[best], rps[best], [at_s])] if len(best) else best
        return tuple(FrontPoint(float(self.latency_s[i]), self.row(int(i))) for i in at)

    def bounds_s(self, quantiles: tuple[float, ...] = (0.1, 0.3, 0.7)) -> tuple[float, ...]:
        """Quantiles of the latencies over batches in multiples of four, which ExeGPT takes for bounds."""
        latency_s = self.latency_s[self.batch % MULTIPLE == 0]
        if not len(latency_s):
            return ()
        return tuple(float(bound_s) for bound_s in np.quantile(latency_s, quantiles))

    def row(self, at: int) -> ScheduleRow:
        """One of them as a schedule."""
        batch, latency_s = int(self.batch[at]), float(self.latency_s[at])
        return ScheduleRow(
            strategy="static",
            encode_batch=batch,
            decode_steps=self.steps,
            micro_batches=int(self.micro_batches[at]),
            tp=self.tp,
            tp_groups=self.tp_groups,
            encode_gpus=self.gpus,
            throughput_rps=batch / latency_s,
            latency_s=latency_s,
            latency_high_s=latency_s,
            cycle_s=latency_s,
            encode_s=float(self.encode_s[at]),
            decode_s=float(self.decode_s[at]),
            decode_batch=float(batch),
            memory_share=float(self.memory_share[at]),
        )


def static_batches(estimator: Estimator) -> StaticBatches:
    """All static batches of an estimator's task on its cluster; none where they do not fit."""
    setting = estimator.setting
    tp, layout = _max_width(setting)
    batch = np.concatenate([np.arange(1, MULTIPLE), np.arange(MULTIPLE, LARGEST + 1, MULTIPLE)])
    if not layout.stages:
        batch = batch[:0]
    stages = len(layout.stages)
    parts = np.minimum(batch, max(stages, 1))
    steps = setting.task.max_output_tokens - setting.assumptions.from_encode
    share = _memory_share(setting, layout, batch, parts)
    fits = share <= 1
    batch, parts, share = batch[fits], parts[fits], share[fits]
    encode_s = _encode_s(setting, layout, batch, parts)
    decode_s = _decode_s(setting, layout, batch, parts, steps)
    return StaticBatches(
        batch=batch,
        latency_s=encode_s + decode_s,
        encode_s=encode_s,
        decode_s=decode_s / max(steps, 1),
        memory_share=share,
        steps=steps,
        micro_batches=parts,
        tp=tp,
        tp_groups=stages if tp > 1 else 0,
        gpus=setting.cluster.gpus,
    )


def _max_width(setting: Setting) -> tuple[int, Layout]:
    """The widest degree that divides the cluster within a node, and its stages; none: no layout has layers for all."""
    gpus, node = setting.cluster.gpus, setting.cluster.node.gpus
    for tp in sorted(setting.tables, reverse=True):
        if tp > node or gpus % tp:
            continue
        try:
            return tp, rra_layout(setting.model.layers, gpus, tp, gpus // tp if tp > 1 else 0)
        except InputError:
            break
    return 1, Layout(())


def _memory_share(setting: Setting, layout: Layout, batch: Ints, parts: Ints) -> Floats:
    """Room is kept for every output to be the longest."""
    if not layout.stages:
        return np.zeros(len(batch))
    whole, in_visit = batch.astype(np.float64), batch / np.maximum(parts, 1)
    kv_tokens = setting.prompt_tokens_high(whole) + whole * setting.task.max_output_tokens
    tokens = setting.prompt_tokens_high(in_visit)
    needed, _ = stage_bytes(setting.sizes(layout.stages), layout.stages, kv_tokens, None, tokens, in_visit)
    return np.asarray(needed / setting.available_bytes)


def _encode_s(setting: Setting, layout: Layout, batch: Ints, parts: Ints) -> Floats:
    visits = [
        count * _visit(setting, stage, place, len(layout.stages), batch / parts, 0.0, encode=True)
        for place, (stage, count) in _kinds(layout)
    ]
    slowest = [
        _visit(setting, stage, place, len(layout.stages), batch / parts, 0.0, encode=True)
        for place, (stage, _) in _kinds(layout)
    ]
    if not visits:
        return np.zeros(len(batch))
    return np.asarray(np.sum(visits, axis=0) + (parts - 1) * np.max(slowest, axis=0))


def _decode_s(setting: Setting, layout: Layout, batch: Ints, parts: Ints, steps: int) -> Floats:
    """Seconds of all decode iterations: each one way through the stages, or the slowest stage's visits."""
    if not steps or not len(batch):
        return np.zeros(len(batch))
    seqs = (batch / parts)[:, None] + np.zeros(steps)
    kv_tokens = seqs * (setting.task.mean_prompt_tokens + np.arange(1, steps + 1))
    whole, slowest = np.zeros(seqs.shape), np.zeros(seqs.shape)
    for place, (stage, count) in _kinds(layout):
        visit = _visit(setting, stage, place, len(layout.stages), seqs, kv_tokens, encode=False)
        whole, slowest = whole + count * visit, np.maximum(slowest, visit)
    return np.asarray(np.maximum(whole, parts[:, None] * slowest).sum(axis=1))


def _visit(
    setting: Setting, stage: Stage, place: int, stages: int, seqs: Floats, kv_tokens: Floats | float, *, encode: bool
) -> Floats:
    ends = place == 0, place == stages - 1
    return visits_s(setting.packed(stage.tp), seqs, kv_tokens, stage.layers, *ends, encode=encode)


def _kinds(layout: Layout) -> list[tuple[int, tuple[Stage, int]]]:
    """The first and the last stage, and those between them that differ: (place, (stage, how many))."""
    last = len(layout.stages) - 1
    found: dict[tuple[Stage, bool, bool], tuple[int, int]] = {}
    for place, stage in enumerate(layout.stages):
        key = stage, place == 0, place == last
        first, count = found.get(key, (place, 0))
        found[key] = first, count + 1
    return [(place, (key[0], count)) for key, (place, count) in found.items()]
