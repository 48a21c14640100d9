"""The schedule with the highest throughput under a latency bound (ExeGPT, sections 5 and 7).

The planner searches each strategy at each tensor-parallel degree; the best throughput of one search prunes the next. As
RRA's throughput is not quite monotone with few decode iterations between prefills, a local search (``refine``) follows.

The bound limits the latency of a request with ``Setting.bound_tokens`` output tokens. By default it limits the latency
at which the work of all batches is at the quantile ``Assumptions.level`` (99 %), as in the paper ("We do consider this
variance when determining control variables", section 7.9). With ``worst_case=False`` it limits the expected latency.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from lengthwise.schedule.controls import Assumptions, Cluster, Controls, Strategy, rra_layout, splits, waa_layout
from lengthwise.schedule.estimation import Estimator, Reason
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.optimizer import (
    EvaluatedPoint,
    Perf,
    Place,
    SearchResult,
    Tolerances,
    branch_and_bound,
    exhaustive,
)
from lengthwise.schedule.search_space import REASONS, SearchSpace
from lengthwise.schedule.stage_costs import Setting, TablesByDegree, cluster_tables, stage_bytes
from lengthwise.schema.errors import InputError, ScheduleError
from lengthwise.schema.schedule import ScheduleRow, ScheduleSearch, ScheduleSide
from lengthwise.schema.specs import ModelSpec
from lengthwise.schema.workload import Ints

ALL = tuple(Strategy)
SHORT_PHASE = 8  # every phase length up to this one is tried; longer ones at steps of the factor ``RATIO``
RATIO = 1.5
TIE = 1e-9  # relative difference up to which two throughputs count as equal; the lower latency then decides
_MAX_CLIMBS = 8
_GB = 1e9


@dataclass(frozen=True)
class SpaceResult:
    """A search space, the result of a search, and an upper bound on the throughput of all schedules in the space."""

    space: SearchSpace
    result: SearchResult
    at_most_rps: float

    @property
    def best(self) -> EvaluatedPoint:
        """Return the best point, which must exist."""
        assert self.result.best is not None
        return self.result.best


def refine(results: Sequence[SpaceResult], bound_s: float) -> list[SpaceResult]:
    """Return the search results, improved by a local search from the best point of each space.

    ``evaluated`` of each result then includes the local search.
    """
    before = [one.space.evaluated for one in results]
    if not any(one.result.best for one in results):
        results = [_refine_fastest(one, bound_s) for one in results]
    refined = []
    for one, evaluated_before in zip(results, before, strict=True):
        best = _climb(one, bound_s)
        evaluated = one.result.evaluated + one.space.evaluated - evaluated_before
        result = replace(one.result, best=best, evaluated=evaluated)
        refined.append(SpaceResult(one.space, result, max(one.at_most_rps, best.throughput_rps if best else 0.0)))
    return refined


def _refine_fastest(one: SpaceResult, bound_s: float) -> SpaceResult:
    fastest = one.result.fastest
    if not math.isfinite(fastest.latency_s):
        return one
    points = one.space.second_variable_line(fastest.point)
    got = one.space.perf(points)
    fastest = _point(points, got, int(np.argmin(got.latency_s)))
    if fastest.latency_s > bound_s:
        return replace(one, result=replace(one.result, fastest=fastest))
    return replace(one, result=replace(one.result, fastest=fastest, best=fastest), at_most_rps=math.inf)


def _climb(one: SpaceResult, bound_s: float) -> EvaluatedPoint | None:
    """Return the end of a local search from a space's best point, or None if no point meets the bound."""
    space, best = one.space, one.result.best
    seen = space.best_evaluated(bound_s) if best or space.strategy is Strategy.RRA else None
    if seen is not None:
        points = np.array([seen], dtype=np.int64)
        start = _point(points, space.perf(points), 0)
        if best is None or start.throughput_rps > best.throughput_rps * (1 + TIE):
            best = start
    for _ in range(_MAX_CLIMBS):
        if best is None:
            break
        points = space.neighbors(best.point)
        if space.strategy is Strategy.RRA:
            points = np.unique(np.concatenate([points, _ridge(space, best.point, bound_s)]), axis=0)
        got = space.perf(points)
        rps = np.where((got.latency_s <= bound_s) & np.isfinite(got.latency_s), got.throughput_rps, 0.0)
        at = int(np.argmax(rps))
        if rps[at] <= best.throughput_rps * (1 + TIE):
            break
        best = _point(points, got, at)
    return best


def _point(points: Ints, got: Perf, at: int) -> EvaluatedPoint:
    return EvaluatedPoint(tuple(points[at].tolist()), float(got.latency_s[at]), float(got.throughput_rps[at]))


def _ridge(space: SearchSpace, point: Place, bound_s: float) -> Ints:
    """Return [n, variables] RRA points: the largest batch that meets a bound, for some phase lengths and groups."""
    steps = phase_lengths(point[1], space.variables[1].values[-1])
    groups = np.unique([point[2], space.variables[2].values[0], space.variables[2].values[-1]])
    grid = np.array([(step, group) for group in groups for step in steps], dtype=np.int64)
    batch = max_batches(space, grid, bound_s)
    return np.column_stack([batch, grid])[batch > 0]


def phase_lengths(steps: int, longest: int) -> Ints:
    """Return phase lengths to try: all short ones, some long ones up to ``longest``, and neighbours of ``steps``."""
    longer = SHORT_PHASE * RATIO ** np.arange(1 + np.log(max(longest / SHORT_PHASE, 1.0)) / np.log(RATIO))
    near = [steps - 1, steps, steps + 1, longest]
    tried = np.concatenate([np.arange(1, SHORT_PHASE), longer.astype(np.int64), near])
    return np.unique(tried[(tried >= 1) & (tried <= longest)]).astype(np.int64)


def max_batches(space: SearchSpace, grid: Ints, bound_s: float) -> Ints:
    """Return [n] for each (N_D, groups) in ``grid`` [n, 2] the largest RRA batch that meets a bound, or 0."""
    low = np.zeros(len(grid), dtype=np.int64)
    high = np.full(len(grid), space.variables[0].values[-1] + 1, dtype=np.int64)
    while (wide := high - low > 1).any():
        middle = (low + high)[wide] // 2
        got = space.perf(np.column_stack([middle, grid[wide]]))
        meets = np.isfinite(got.latency_s) & (got.latency_s <= bound_s)
        low[wide] = np.where(meets, middle, low[wide])
        high[wide] = np.where(meets, high[wide], middle)
    return low


@dataclass(frozen=True)
class Choice:
    """The chosen schedule, and facts about the search that found it."""

    bound_s: float
    controls: Controls
    row: ScheduleRow
    search: ScheduleSearch


class Planner:
    """Chooses among all schedules of a task on a cluster. It stores estimates, so that later bounds reuse them.

    A bound limits ``latency_high_s`` if ``worst_case`` and ``latency_s`` otherwise. ``degrees`` are the tensor-parallel
    degrees to try. ``tolerances`` are assumed deviations from monotonicity. Raises InputError if there are no
    strategies or degrees, or if only WAA is given for one GPU.
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
            raise InputError("WAA needs at least 2 GPUs, one to prefill and one to decode; there is 1. Use RRA.")
        self.estimator, self.strategies, self.worst_case = estimator, tuple(strategies), worst_case
        self._degrees, self._tolerances, self._clock = tuple(degrees), tolerances or Tolerances(), clock
        largest_first = sorted({tp for tp in degrees if tp <= gpus}, reverse=True)
        kinds = product(dict.fromkeys(strategies), largest_first)
        self.spaces = [SearchSpace(estimator, strategy, tp, worst_case=worst_case) for strategy, tp in kinds]

    def with_estimator(self, estimator: Estimator) -> Planner:
        """Return a planner with the same options and another estimator, for example one of other lengths."""
        return Planner(
            estimator, self._degrees, self.strategies,
            worst_case=self.worst_case, tolerances=self._tolerances, clock=self._clock,
        )  # fmt: skip

    def best(self, bound_s: float = math.inf, *, separately: bool = False, exhaustive: bool = False) -> Choice:
        """Return the best schedule that meets a bound, to within ``ScheduleSearch.gap``.

        If ``separately``, no search space prunes another one: the search finds the best schedule of each, at a higher
        cost. If ``exhaustive``, it evaluates every schedule.

        Raises:
            InputError: The bound is not above 0.
            ScheduleError: No schedule meets the bound, or none is feasible.
        """
        started_s = self._clock()
        results = self.search(bound_s, self.spaces, separately=separately, exhaustive=exhaustive)
        if not exhaustive:
            results = refine(results, bound_s)
        found = [one for one in results if one.result.best]
        if not found:
            raise _unmet_bound(self, results, bound_s)
        max_rps = max(one.best.throughput_rps for one in found)
        ties = [one for one in found if one.best.throughput_rps >= max_rps * (1 - TIE)]
        chosen = min(ties, key=lambda one: one.best.latency_s)
        chosen.space.perf(np.array([chosen.best.point], dtype=np.int64))  # An exhaustive search stores no estimates.
        row, sides = chosen.space.row(chosen.best.point), []
        for space in self.spaces:
            one = next((result for result in results if result.space is space), None)
            if one is None:
                side = ScheduleSide(space.strategy.value, space.tp, None, 0.0, 0, 0, space.infeasible_reason)
            else:
                point = one.result.best.point if one.result.best else space.best_evaluated(bound_s)
                best = None if point is None else space.row(point)
                cause = "" if one is chosen else _reason_for_less(one, best, row, bound_s)
                side = ScheduleSide(
                    space.strategy.value, space.tp, best, one.at_most_rps, space.size, one.result.evaluated, cause
                )
            sides.append(side)
        search = ScheduleSearch(
            sides=tuple(sides),
            evaluated=sum(one.result.evaluated for one in results),
            points=sum(space.size for space in self.spaces),
            gap=max(0.0, max(one.at_most_rps for one in results) / row.throughput_rps - 1),
            seconds=self._clock() - started_s,
        )
        return Choice(bound_s, chosen.space.controls(chosen.best.point), row, search)

    def best_row(self, bound_s: float = math.inf) -> ScheduleRow | None:
        """Return the best schedule that meets a bound, or None if no schedule meets it."""
        try:
            return self.best(bound_s).row
        except ScheduleError:
            return None

    def search(
        self,
        bound_s: float,
        spaces: Iterable[SearchSpace],
        *,
        separately: bool = False,
        exhaustive: bool = False,
        known_rps: float = 0.0,
    ) -> list[SpaceResult]:
        """Return the search results of all non-empty spaces.

        The search looks only for schedules with more throughput than ``known_rps`` and than the best schedule of the
        spaces before. If ``separately``, it ignores both.
        """
        results: list[SpaceResult] = []
        for space in (space for space in spaces if space.variables):
            known_rps = 0.0 if separately else known_rps
            found = _search(space, bound_s, known_rps, self._tolerances, evaluate_all=exhaustive)
            known_rps = max(known_rps, found.best.throughput_rps if found.best else 0.0)
            at_most_rps = known_rps * (1 + found.gap) if known_rps else (0.0 if found.gap == 0 else math.inf)
            results.append(SpaceResult(space, found, at_most_rps))
        return results


def _search(
    space: SearchSpace, bound_s: float, known_rps: float, tolerances: Tolerances, *, evaluate_all: bool
) -> SearchResult:
    """Search a space. Points beyond the end of a WAA run are not schedules, so they do not count as evaluated."""
    if evaluate_all:
        found = exhaustive(space.perf_uncached, space.variables, bound_s)
        return replace(found, evaluated=space.size, total=space.size)
    evaluated = 0

    def perf(points: Ints) -> Perf:
        nonlocal evaluated
        evaluated += int(space.within(points).sum())
        return space.perf(points)

    found = branch_and_bound(perf, space.variables, bound_s, tolerances, known_rps=known_rps * (1 - TIE))
    return replace(found, evaluated=evaluated, total=space.size)


def best_schedule(
    task: TaskLengths,
    cluster: Cluster,
    model: ModelSpec,
    bound_s: float = math.inf,
    *,
    tables: TablesByDegree | None = None,
    assumptions: Assumptions = Assumptions(),
    strategies: Sequence[Strategy] = ALL,
) -> Choice:
    """Return the choice of ``Planner.best`` for a task on a cluster.

    ``tables`` are cost tables by tensor-parallel degree, by default those of the roofline model. Raises the errors of
    ``Planner.best``, and InputError if the task exceeds the model's context, or only WAA is given for one GPU.
    """
    tables = tables or cluster_tables(model, cluster, tensor_degrees(model, cluster))
    estimator = Estimator(task, cluster, model, tables, assumptions)
    return Planner(estimator, tuple(tables), strategies).best(bound_s)


def tensor_degrees(model: ModelSpec, cluster: Cluster) -> tuple[int, ...]:
    """Return the powers of two that divide the number of attention heads and fit in a node and in the cluster."""
    largest = min(cluster.gpus, cluster.node.gpus)
    powers = (2**i for i in range(largest.bit_length()))
    return tuple(tp for tp in powers if tp <= largest and model.attention.heads % tp == 0)


def min_evaluated_s(spaces: Iterable[SearchSpace]) -> float:
    """Return the minimum latency of the schedules evaluated so far, or infinity if no schedule is feasible."""
    return min((float(space.evaluated_points()[1].min(initial=math.inf)) for space in spaces), default=math.inf)


def rounded_up(seconds: float) -> str:
    """Format a number above 0 with three significant digits, rounded up."""
    digits = 2 - math.floor(math.log10(seconds))
    return f"{math.ceil(seconds * 10**digits) / 10**digits:.{max(digits, 0)}f}"


def _reason_for_less(one: SpaceResult, best: ScheduleRow | None, chosen: ScheduleRow, bound_s: float) -> str:
    min_s = one.result.fastest.latency_s
    if min_s > bound_s:
        return f"its least latency is {min_s:.3g} s"
    if best is None:
        return "its schedules within the bound have no more throughput than the choice"
    if best.throughput_rps >= chosen.throughput_rps * (1 - TIE):
        return "equal throughput, at a higher latency"
    return f"{100 * (1 - best.throughput_rps / chosen.throughput_rps):.1f} % less throughput"


def _unmet_bound(planner: Planner, results: Sequence[SpaceResult], bound_s: float) -> ScheduleError:
    setting = planner.estimator.setting
    feasible = [one for one in results if math.isfinite(one.result.fastest.latency_s)]
    if not feasible:
        return ScheduleError(_infeasibility(setting, planner.spaces))
    fastest = min(feasible, key=lambda one: one.result.fastest.latency_s)
    row, iterations = fastest.space.row(fastest.result.fastest.point), setting.iterations
    latency_s = row.latency_high_s if planner.worst_case else row.latency_s
    decode_share = 1 - row.prefill_s / latency_s
    limit = f"The prefill of its prompt takes {row.prefill_s:.3g} s of it."
    if decode_share >= 1 / 2:
        between = "" if row.decode_steps >= iterations else " and what is prefilled between them"
        take = "takes" if iterations == 1 and not between else "take"
        limit = f"{_plural(iterations, 'decode iteration')}{between} {take} {100 * decode_share:.0f} % of it."
    level = "" if setting.assumptions.output_tokens is not None else f" (p{100 * setting.assumptions.level:g})"
    return ScheduleError(
        f"no schedule meets {bound_s:g} s for an output of {_plural(setting.bound_tokens, 'token')}{level}: "
        f"the least latency is {latency_s:.3g} s ({row.words}). {limit} "
        f"Allow at least {rounded_up(latency_s)} s, or give faster GPUs or a lower quantile"
    )


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _infeasibility(setting: Setting, spaces: Sequence[SearchSpace]) -> str:
    reasons = [space.infeasible_reason for space in spaces]
    weights, cache = (REASONS[reason] in reasons for reason in (Reason.WEIGHTS, Reason.CACHE))
    if weights and not cache:
        message = (
            f"the weights of {setting.model.name} need {_min_weight_bytes(setting, spaces) / _GB:.3g} GB on the "
            f"fullest GPU, of {setting.available_bytes / _GB:.3g} GB available ({setting.cluster.gpu.name})"
        )
    else:
        named = {
            reason: [f"{s.strategy.value.upper()} at TP {s.tp}" for s in spaces if s.infeasible_reason == reason]
            for reason in reasons
        }
        message = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in named.items())
    if weights or cache:
        advice = "Use more GPUs, or GPUs with more memory"
    elif REASONS[Reason.LAYERS] in reasons:
        advice = (
            f"Use fewer GPUs, or more of them a stage (a higher tensor-parallel degree): a pipeline of "
            f"{setting.model.name} has at most {_plural(setting.model.layers, 'stage')}, one a layer"
        )
    elif REASONS[Reason.GROUPS] in reasons:
        advice = "Use a lower tensor-parallel degree, RRA, or more GPUs"
    else:
        advice = "Give cost tables of TP 1 too, or use as many GPUs as the degree divides"
    return f"no schedule fits {_plural(setting.cluster.gpus, 'GPU')}: {message}. {advice}"


def _min_weight_bytes(setting: Setting, spaces: Sequence[SearchSpace]) -> float:
    layers, gpus, none, minimum = setting.model.layers, setting.cluster.gpus, np.zeros(1), math.inf
    for space in (space for space in spaces if space.infeasible_reason == REASONS[Reason.WEIGHTS]):
        for groups in range(1, gpus // space.tp + 1) if space.tp > 1 else (0,):
            rra, tp = space.strategy is Strategy.RRA, space.tp
            for prefill in [gpus] if rra else splits(gpus, tp, groups).tolist():
                try:
                    layout = (
                        rra_layout(layers, gpus, tp, groups) if rra else waa_layout(layers, gpus, prefill, tp, groups)
                    )
                except InputError:  # more stages than layers
                    continue
                memory, pipelines = setting.memory(layout.stages), {layout.prefill, layout.decode}
                weights = [stage_bytes(memory, stages, none, None, none, none)[1] for stages in pipelines]
                minimum = min(minimum, max(weights))
    return minimum
