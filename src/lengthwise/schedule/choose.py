"""The schedule of the highest throughput under a latency bound (ExeGPT, sections 5 and 7).

Each strategy is searched at each tensor-parallel degree, and the best of all is taken. What one search found
bounds the next: a strategy or a degree that cannot beat it is given up after a few points. Where the bests of RRA
have better neighbours, these are taken (``searched.improved``): with few decode iterations between encodings
throughput is not quite monotone.

The bound is for an output of ``Assumptions.level``, 99 % of them unless said otherwise. It is held against the
latency when batches' work is at the far end of its 99 % range, as the paper does ("We do consider this variance
when determining control variables", section 7.9); ``worst_case=False`` holds it against the expected latency.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.controls import (
    Assumptions,
    Cluster,
    Controls,
    Layout,
    Strategy,
    rra_layout,
    splits,
    waa_layout,
)
from lengthwise.schedule.estimation import Estimator, Reason
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.optimizer import Found, Perf, Reached, Tolerances, branch_and_bound
from lengthwise.schedule.optimizer import exhaustive as look_at_all
from lengthwise.schedule.sides import WHY_NOT, Side
from lengthwise.schedule.stage_costs import DegreesTables, Setting, cluster_tables, stage_bytes
from lengthwise.schema.errors import InputError, ScheduleError
from lengthwise.schema.schedule import ScheduleRow, ScheduleSide
from lengthwise.schema.specs import ModelSpec

_GB = 1e9


def why_nothing_fits(setting: Setting, sides: Sequence[Side]) -> str:
    """The reason, in words: once for all where it is the weights, else by reason."""
    cluster = setting.cluster
    on = f"{cluster.gpus} {'GPU' if cluster.gpus == 1 else 'GPUs'}"
    reasons = [side.why_not for side in sides]
    if WHY_NOT[Reason.WEIGHTS] in reasons and WHY_NOT[Reason.CACHE] not in reasons:
        told = (
            f"the weights of {setting.model.name} need {_least_bytes(setting, sides) / _GB:.3g} GB on the fullest GPU, "
            f"and {setting.available_bytes / _GB:.3g} GB are there for them ({cluster.gpu.name})"
        )
    else:
        named = {why: [_named(side) for side in sides if side.why_not == why] for why in reasons}
        told = "; ".join(f"{why} ({', '.join(names)})" for why, names in named.items())
    return f"no schedule fits {on}: {told}. {_suggestion(setting, reasons)}"


def _suggestion(setting: Setting, reasons: Sequence[str]) -> str:
    """What to do: about memory where it is short anywhere, for more of it may do there; else about the layout."""
    if WHY_NOT[Reason.WEIGHTS] in reasons or WHY_NOT[Reason.CACHE] in reasons:
        return "Use more GPUs, or GPUs with more memory"
    if WHY_NOT[Reason.LAYERS] in reasons:
        layers = setting.model.layers
        return (
            f"Use fewer GPUs, or more of them a stage (a higher tensor-parallel degree): a pipeline of "
            f"{setting.model.name} has at most {layers:,} {'stage' if layers == 1 else 'stages'}, one a layer"
        )
    if WHY_NOT[Reason.GROUPS] in reasons:
        return "Use a lower tensor-parallel degree, RRA, or more GPUs"
    return "Give cost tables of TP 1 too, or use as many GPUs as the degree divides"


def _least_bytes(setting: Setting, sides: Sequence[Side]) -> float:
    """Weights on the fullest GPU, where that is least."""
    none = np.zeros(1)
    least = np.inf
    for layout in _layouts(setting, sides):
        sizes = setting.sizes(layout.stages)
        parts = {layout.encode, layout.decode}
        heaviest = max(stage_bytes(sizes, stages, none, None, none, none)[1] for stages in parts)
        least = min(least, heaviest)
    return float(least)


def _layouts(setting: Setting, sides: Sequence[Side]) -> Iterator[Layout]:
    """All layouts of those whose weights do not fit."""
    layers, gpus = setting.model.layers, setting.cluster.gpus
    for side in (side for side in sides if side.why_not == WHY_NOT[Reason.WEIGHTS]):
        for groups in range(1, gpus // side.tp + 1) if side.tp > 1 else (0,):
            encoding = [gpus] if side.strategy is Strategy.RRA else splits(gpus, side.tp, groups).tolist()
            for encode in encoding:
                try:
                    if side.strategy is Strategy.RRA:
                        yield rra_layout(layers, gpus, side.tp, groups)
                    else:
                        yield waa_layout(layers, gpus, encode, side.tp, groups)
                except InputError:
                    continue  # more stages than layers


def _named(side: Side) -> str:
    return f"{side.strategy.value.upper()} at TP {side.tp}"


if TYPE_CHECKING:
    from lengthwise.schedule.optimizer import Place
    from lengthwise.schedule.sides import Side

Ints = npt.NDArray[np.int64]

SHORT = 8
"""Every phase length up to it is tried, and of longer ones each ``RATIO`` times the one before."""
RATIO = 1.5
_BESIDE = (-1, 1)


def ridge(side: Side, point: Place, bound_s: float) -> Ints:
    """[n, variables] by lengths of phases the largest batch of RRA that meets a bound, in layouts of a side.

    The layouts are a point's, and those of the fewest and the most groups.
    """
    steps = ladder(point[1], side.variables[1].values[-1])
    groups = np.unique([point[2], side.variables[2].values[0], side.variables[2].values[-1]])
    grid = np.array([(step, group) for group in groups for step in steps], dtype=np.int64)
    batch = largest_batches(side, grid, bound_s)
    return np.column_stack([batch, grid])[batch > 0]


def ladder(steps: int, most: int) -> Ints:
    """Lengths of phases that are tried: all short ones, some long ones, and those beside a known one."""
    longer = SHORT * RATIO ** np.arange(1 + np.log(max(most / SHORT, 1.0)) / np.log(RATIO))
    near = [steps, *(steps + by for by in _BESIDE)]
    tried = np.concatenate([np.arange(1, SHORT), longer.astype(np.int64), near, [most]])
    return np.unique(tried[(tried >= 1) & (tried <= most)]).astype(np.int64)


def largest_batches(side: Side, grid: Ints, bound_s: float) -> Ints:
    """[n] the largest batch of each row of (iterations, groups) that meets a bound; 0: none does."""
    low = np.zeros(len(grid), dtype=np.int64)
    high = np.full(len(grid), side.variables[0].values[-1] + 1, dtype=np.int64)
    while (wide := high - low > 1).any():
        middle = (low + high)[wide] // 2
        got = side.perf(np.column_stack([middle, grid[wide]]))
        meets = np.isfinite(got.latency_s) & (got.latency_s <= bound_s)
        low[wide] = np.where(meets, middle, low[wide])
        high[wide] = np.where(meets, high[wide], middle)
    return low


TIE = 1e-9
"""Throughputs that differ by less are equal; the lower latency is then taken."""

_MOST_CLIMBS = 8


@dataclass(frozen=True)
class Searched:
    """A side, what a search of it came to, and the most that could still be there."""

    side: Side
    found: Found
    at_most_rps: float

    @property
    def best(self) -> Reached:
        """What was found; there is something."""
        assert self.found.best is not None
        return self.found.best


def improved(search_results: Sequence[Searched], bound_s: float) -> list[Searched]:
    """Searches with what they missed as estimates are not quite monotone; each way to a choice ends with it."""
    before = [one.side.evaluated for one in search_results]
    if not any(one.found.best for one in search_results):
        search_results = [_looked_closer(one, bound_s) for one in search_results]
    climbed = [_climbed(one, bound_s) for one in search_results]
    return [_counted(one, one.side.evaluated - was) for one, was in zip(climbed, before, strict=True)]


def _counted(one: Searched, more: int) -> Searched:
    """The search with the schedules that were estimated after it."""
    return replace(one, found=replace(one.found, evaluated=one.found.evaluated + more))


def _looked_closer(one: Searched, bound_s: float) -> Searched:
    """The search with the least latency among the neighbours of its fastest, which need not be quite monotone."""
    if not math.isfinite(one.found.fastest.latency_s):
        return one
    points = one.side.additional(one.found.fastest.point)
    got = one.side.perf(points)
    at = int(np.argmin(got.latency_s))
    least = Reached(tuple(points[at].tolist()), float(got.latency_s[at]), float(got.throughput_rps[at]))
    if least.latency_s > bound_s:
        return replace(one, found=replace(one.found, fastest=least))
    return replace(one, found=replace(one.found, fastest=least, best=least), at_most_rps=math.inf)


def _climbed(one: Searched, bound_s: float) -> Searched:
    """The search with the best that is reached from its own over better and better neighbours.

    It goes on from the best that was ever seen, RRA's even where the search gave up: its bounds are not quite bounds.
    """
    best = _best_seen(one, bound_s)
    for _ in range(_MOST_CLIMBS if best else 0):
        assert best is not None
        points = one.side.neighbors(best.point)
        if one.side.strategy is Strategy.RRA:
            points = np.unique(np.concatenate([points, ridge(one.side, best.point, bound_s)]), axis=0)
        got = one.side.perf(points)
        rps = np.where(got.latency_s <= bound_s, got.throughput_rps, 0.0)
        rps[np.isinf(got.latency_s)] = 0.0
        at = int(np.argmax(rps))
        if rps[at] <= best.throughput_rps * (1 + TIE):
            break
        best = Reached(tuple(points[at].tolist()), float(got.latency_s[at]), float(rps[at]))
    most_rps = max(one.at_most_rps, best.throughput_rps if best else 0.0)
    return replace(one, found=replace(one.found, best=best), at_most_rps=most_rps)


def _best_seen(one: Searched, bound_s: float) -> Reached | None:
    """What was found, or what was estimated before and is better; None: neither, or given up, and not RRA's."""
    found, side = one.found.best, one.side
    point = side.best_seen(bound_s) if found or side.strategy is Strategy.RRA else None
    if point is None:
        return found
    got = side.perf(np.array([point], dtype=np.int64))
    seen = Reached(point, float(got.latency_s[0]), float(got.throughput_rps[0]))
    if found and seen.throughput_rps <= found.throughput_rps * (1 + TIE):
        return found
    return seen


def told(
    side: Side, search_results: Sequence[Searched], won: Searched, row: ScheduleRow, bound_s: float
) -> ScheduleSide:
    """A side as the answer lists it: its best, how much it could have at most, and why it lost."""
    one = next((s for s in search_results if s.side is side), None)
    if one is None:
        return ScheduleSide(side.strategy.value, side.tp, None, 0.0, 0, 0, side.why_not)
    point = one.found.best.point if one.found.best else side.best_seen(bound_s)
    best = None if point is None else side.row(point)
    why = "" if one is won else _reason(one, best, row, bound_s)
    return ScheduleSide(side.strategy.value, side.tp, best, one.at_most_rps, side.size, one.found.evaluated, why)


def _reason(one: Searched, best: ScheduleRow | None, row: ScheduleRow, bound_s: float) -> str:
    min_s = one.found.fastest.latency_s
    if min_s > bound_s:
        return f"its least latency is {min_s:.3g} s"
    if best is None:
        return "what meets the bound has no more than the choice"
    if best.throughput_rps >= row.throughput_rps * (1 - TIE):
        return "as much, at a higher latency"
    return f"{100 * (1 - best.throughput_rps / row.throughput_rps):.1f} % less"


def nothing(
    estimator: Estimator, sides: Sequence[Side], search_results: Sequence[Searched], bound_s: float, *, worst_case: bool
) -> ScheduleError:
    """That nothing meets the bound: the least latency there is, and what makes it."""
    runs = [one for one in search_results if math.isfinite(one.found.fastest.latency_s)]
    if not runs:
        return ScheduleError(why_nothing_fits(estimator.setting, sides))
    least = min(runs, key=lambda one: one.found.fastest.latency_s)
    setting, row = estimator.setting, least.side.row(least.found.fastest.point)
    fixed = setting.assumptions.output_tokens is not None
    named = "" if fixed else f" (p{100 * setting.assumptions.level:g})"
    held_s = row.latency_high_s if worst_case else row.latency_s
    return ScheduleError(
        f"no schedule meets {bound_s:g} s for an output of {_many(setting.bound_tokens, 'token')}{named}: "
        f"the least latency is {held_s:.3g} s ({row.words}). {_limit(row, setting.iterations, held_s)} "
        f"Allow at least {rounded_up(held_s)} s, or give faster GPUs or a lower quantile"
    )


def _limit(row: ScheduleRow, iterations: int, constrained_latency_s: float) -> str:
    """What takes most of a latency."""
    share = 1 - row.encode_s / constrained_latency_s
    if share >= 1 / 2:
        between = "" if row.decode_steps >= iterations else " and what is encoded between them"
        take = "takes" if iterations == 1 and not between else "take"
        return f"{_many(iterations, 'decode iteration')}{between} {take} {100 * share:.0f} % of it."
    return f"Encoding its prompt takes {row.encode_s:.3g} s of it."


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def rounded_up(seconds: float) -> str:
    """A number of three digits that is no less."""
    digits = 2 - math.floor(math.log10(seconds))
    return f"{math.ceil(seconds * 10**digits) / 10**digits:.{max(digits, 0)}f}"


def least_seen_s(sides: Iterable[Side]) -> float:
    """The least latency among what was estimated of some sides; infinite: nothing of them can run."""
    return min((float(side.seen()[1].min(initial=math.inf)) for side in sides), default=math.inf)


ALL = tuple(Strategy)


@dataclass(frozen=True)
class Choice:
    """The schedule that was chosen, and how sure that is.

    Attributes:
        bound_s: The latency that it holds.
        controls: Its control variables.
        row: What it yields.
        sides: Every strategy and degree, with what it came to.
        evaluated: Schedules estimated.
        points: Schedules there are.
        gap: The best of all has at most (1 + gap) times its throughput, if the tolerances hold. Those of RRA's short
            phases do not: with RRA among the strategies it is about so, not proved, unless all were looked at.
        seconds: The choice took.
    """

    bound_s: float
    controls: Controls
    row: ScheduleRow
    sides: tuple[ScheduleSide, ...]
    evaluated: int
    points: int
    gap: float
    seconds: float


class Planner:
    """All schedules of a task on a cluster; what is estimated for one bound is known for the next.

    Args:
        estimator: Of the task on the cluster.
        degrees: Tensor-parallel degrees that may be taken.
        strategies: Which may be taken.
        worst_case: Whether a bound is held against ``latency_high_s``, else against ``latency_s``.
        tolerances: How far from monotone estimates may be.
        clock: Seconds.

    Raises:
        InputError: There is no strategy, or WAA alone on one GPU.
    """

    def __init__(
        self,
        estimator: Estimator,
        degrees: Sequence[int],
        strategies: Sequence[Strategy] = ALL,
        *,
        worst_case: bool = True,
        tolerances: Tolerances | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not strategies or not degrees:
            raise InputError("a choice needs a strategy and a tensor-parallel degree; one of them is missing")
        gpus = estimator.setting.cluster.gpus
        if gpus < 2 and Strategy.RRA not in strategies:
            raise InputError("WAA needs at least 2 GPUs, one to encode and one to decode; there is 1. Use RRA.")
        self.estimator, self.worst_case = estimator, worst_case
        self.strategies = tuple(strategies)
        self._degrees = tuple(degrees)
        self._tolerances, self._clock = tolerances or Tolerances(), clock
        wanted = [tp for tp in sorted(set(degrees), reverse=True) if tp <= gpus]
        self.sides = [
            Side(estimator, strategy, tp, worst_case=worst_case)
            for strategy in dict.fromkeys(strategies)
            for tp in wanted
        ]

    def best(self, bound_s: float = math.inf, *, disaggregated: bool = False, exhaustive: bool = False) -> Choice:
        """The best schedule that meets a bound, as sure as ``Choice.gap`` says.

        Args:
            bound_s: Latency; infinite: any.
            disaggregated: Find the best of every side, so that runner-ups are as sure as the choice; costs more.
            exhaustive: Look at every schedule.

        Raises:
            InputError: The bound is not above 0.
            ScheduleError: Nothing meets it, or nothing fits.
        """
        started_s = self._clock()
        search_results = self.search(bound_s, self.sides, disaggregated=disaggregated, exhaustive=exhaustive)
        if not exhaustive:
            search_results = improved(search_results, bound_s)
        some = [one for one in search_results if one.found.best]
        if not some:
            raise nothing(self.estimator, self.sides, search_results, bound_s, worst_case=self.worst_case)
        most_rps = max(one.best.throughput_rps for one in some)
        ties = [one for one in some if one.best.throughput_rps >= most_rps * (1 - TIE)]
        won = min(ties, key=lambda one: one.best.latency_s)
        won.side.perf(np.array([won.best.point], dtype=np.int64))  # of a look at all nothing is kept
        row = won.side.row(won.best.point)
        return Choice(
            bound_s=bound_s,
            controls=won.side.controls(won.best.point),
            row=row,
            sides=tuple(told(side, search_results, won, row, bound_s) for side in self.sides),
            evaluated=sum(one.found.evaluated for one in search_results),
            points=sum(side.size for side in self.sides),
            gap=max(0.0, max(one.at_most_rps for one in search_results) / row.throughput_rps - 1),
            seconds=self._clock() - started_s,
        )

    def anew(self, estimator: Estimator) -> Planner:
        """The same question of another estimator, such as one of other lengths."""
        return Planner(
            estimator,
            self._degrees,
            self.strategies,
            worst_case=self.worst_case,
            tolerances=self._tolerances,
            clock=self._clock,
        )

    def search(
        self,
        bound_s: float,
        sides: Sequence[Side],
        *,
        disaggregated: bool = False,
        exhaustive: bool = False,
        known_rps: float = 0.0,
    ) -> list[Searched]:
        """What searches come to, of the sides that have points; unless ``disaggregated``, each knows what others found.

        A throughput that is ``known_rps`` from elsewhere is not looked for again.
        """
        search_results: list[Searched] = []
        for side in (side for side in sides if side.variables):
            known_rps = 0.0 if disaggregated else known_rps
            found = self._searched(side, bound_s, known_rps, exhaustive=exhaustive)
            known_rps = max(known_rps, found.best.throughput_rps if found.best else 0.0)
            most_rps = known_rps * (1 + found.gap) if known_rps else (0.0 if found.gap == 0 else math.inf)
            search_results.append(Searched(side, found, most_rps))
        return search_results

    def _searched(self, side: Side, bound_s: float, known_rps: float, *, exhaustive: bool) -> Found:
        """What a search comes to; of the box's places it counts those that are schedules."""
        if exhaustive:
            found = look_at_all(side.perf_anew, side.variables, bound_s)
            return replace(found, evaluated=side.size, of=side.size)
        seen = 0

        def perf(points: Ints) -> Perf:
            nonlocal seen
            seen += int(side.within(points).sum())
            return side.perf(points)

        found = branch_and_bound(perf, side.variables, bound_s, self._tolerances, known_rps=known_rps * (1 - TIE))
        return replace(found, evaluated=seen, of=side.size)


def best_schedule(
    task: TaskLengths,
    cluster: Cluster,
    model: ModelSpec,
    bound_s: float = math.inf,
    *,
    tables: DegreesTables | None = None,
    assumptions: Assumptions = Assumptions(),
    strategies: Sequence[Strategy] = ALL,
    worst_case: bool = True,
    tolerances: Tolerances | None = None,
    exhaustive: bool = False,
) -> Choice:
    """The schedule of the highest throughput that meets a latency bound, as sure as ``Choice.gap`` says.

    Args:
        task: Lengths.
        cluster: GPUs.
        model: What is served.
        bound_s: Latency of an output of ``assumptions.level`` that must be held; infinite: any.
        tables: Cost tables by tensor-parallel degree, which say what degrees there are; None: roofline.
        assumptions: What to take for granted; ``level`` is the quantile of the output that the bound is for.
        strategies: Which may be taken; one that cannot be is passed over.
        worst_case: Whether the bound is held against ``latency_high_s``, else against ``latency_s``.
        tolerances: How far from monotone estimates may be.
        exhaustive: Look at every schedule.

    Raises:
        InputError: The bound is not above 0, the task is beyond the model, or WAA alone is asked for on one GPU.
        ScheduleError: Nothing meets the bound, or nothing fits.
    """
    known = tables or cluster_tables(model, cluster, tensor_degrees(model, cluster))
    estimator = Estimator(task, cluster, model, known, assumptions)
    planner = Planner(estimator, tuple(known), strategies, worst_case=worst_case, tolerances=tolerances)
    return planner.best(bound_s, exhaustive=exhaustive)


def tensor_degrees(model: ModelSpec, cluster: Cluster) -> tuple[int, ...]:
    """Powers of two that divide the heads, within a node and the cluster."""
    most = min(cluster.gpus, cluster.node.gpus)
    powers = (2**i for i in range(most.bit_length()))
    return tuple(tp for tp in powers if tp <= most and model.attention.heads % tp == 0)
