"""Planning of an application: search, comparison of methods, hypothetical clusters, and plan files."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.apps.plan.evaluate import makespans_s, simulate_plan, spans_of, spare_plans, stages_of
from lengthwise.apps.plan.methods import METHODS, STEPS, Effort, Planned, beam, chosen_plan, improve
from lengthwise.apps.plan.space import Served, Space, SwitchTimes
from lengthwise.apps.plan.stages import REPRESENTED_TASKS, Runs, Stages
from lengthwise.cost.model_error import LEVEL, deployment_notes
from lengthwise.engine import simulate, warm_up
from lengthwise.schema.app import PLAN_FORMAT, AppMethod, AppPlan, AppWhatIf, Cluster, Machine, TaskDraw, Tasks
from lengthwise.schema.errors import DoesNotFitError, InputError, UnknownNameError
from lengthwise.schema.files import write_atomic
from lengthwise.schema.workload import Workload
from lengthwise.statistics import drawn_estimate, mean_estimate

STAGE_S, RUN_S, REQUEST_S = 4.5e-5, 1.7e-3, 5.2e-7
"""Approximate seconds of each evaluated stage, each simulated run, and each request in a run.

They are fitted (least squares of relative errors) to the durations of methods, list schedules and the beam on eight
applications, on one core of a server. Most estimates are wrong by less than a half, but chains, whose requests wait for
one another, take up to four times as long.
"""
_RESIMULATION, _STAGES_PER_RUN = 3.0, 6
"""Factor by which preemption multiplies the runs that Algorithm 1 simulates, and stages evaluated per run."""


class SearchBudget:
    """Estimated seconds of a search, of which ``elapsed_s`` have passed before.

    The estimate counts simulated stages, runs and requests instead of time, so that equal inputs give equal plans.
    """

    def __init__(self, samples: Sequence[Stages], elapsed_s: float = 0.0) -> None:
        self._samples, self._offset_s = samples, 0.0
        self._offset_s = elapsed_s - self.elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Return the counted seconds so far."""
        return self._offset_s + sum(
            STAGE_S * stages.evaluated + RUN_S * stages.runs.simulated_runs + REQUEST_S * stages.runs.simulated_requests
            for stages in self._samples
        )

    def allows(self, cost_s: float, limit_s: float) -> bool:
        """Return whether the limit has not been reached, and a further ``cost_s`` would not exceed it."""
        elapsed_s = self.elapsed_s
        return elapsed_s < limit_s and elapsed_s + cost_s <= limit_s


def expected_cost_s(stages: Stages, name: str) -> float:
    """Return the approximate seconds that ``SearchBudget`` counts for the method ``name``."""
    seconds, is_max = 0.0, name.startswith("max")
    for model, load in enumerate(stages.load.models):
        plans = stages.space.plans(model)
        fewest = max(plan.gpus for plan in plans) if is_max else 0  # "max" simulates only the largest plans
        for plan in plans:
            if plan.gpus >= fewest:
                is_represented = len(load) >= REPRESENTED_TASKS * plan.dp
                requests = -(-len(load) // plan.dp) if is_represented else len(load)
                seconds += RUN_S + REQUEST_S * requests + (0.0 if is_max else STAGE_S * _STAGES_PER_RUN)
    return seconds * (1.0 if is_max else _RESIMULATION)


DEFAULT = "lengthwise"
_MAX_CANDIDATES = 3  # list schedules, and plans of the beam, that are compared on all samples used for planning
_CHEAP = ("min", "min_no_preemption")
"""Methods that cost little compared to their gain; they run first, and their cost includes runs that others reuse."""
CHANGE_SHARE = 0.01
"""Engines that already start are replaced only for a plan with a gain above this share, because the gain is estimated
from a few samples and is partly due to chance."""
MIN_SHARE = 0.003
"""A plan whose gain over a cheap method is below this share on the planning samples had no gain on other samples."""
FINALIST_SHARE, _MAX_FINALISTS = 0.02, 4
"""Plans whose makespan is within this share of the best on the few compared samples are compared on all samples: with
three samples the choice between them is partly chance."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of planning."""

    method: str = DEFAULT  # "lengthwise", or a name in ``METHODS``
    additional: tuple[str, ...] = tuple(METHODS)  # methods whose plans are compared with the plan of ``method``
    quantile: float | None = None  # quantile of the samples' makespans to minimize; None minimizes their mean
    effort: Effort = field(default_factory=Effort)
    clock: Callable[[], float] = time.perf_counter  # function that returns seconds, to measure ``search_s``
    known: tuple[Planned, ...] = ()  # plans that "lengthwise" also considers, if they fit
    # samples on which all plans are compared; the rest only choose between the best (``FINALIST_SHARE``). None: all
    compared: int | None = None
    model_draws: int = 0  # of the cost model's error, for the interval of the chosen plan's makespan


@dataclass(frozen=True)
class MethodPlan:
    """A plan that a method found."""

    name: str
    planned: Planned
    planned_s: float  # mean (or the requested quantile) of the makespan on the samples used for planning
    search_s: float  # seconds that the search would take by the clock without earlier simulations
    cost_s: float  # counted seconds (``SearchBudget``) of the search, which reused earlier simulations
    elapsed_s: float  # seconds of the search by the clock
    lead_s: float  # part of ``search_s`` before engines of the first stage can start


def search_results(
    samples: Sequence[Stages],
    space: Space,
    options: PlanOptions,
    begin: Callable[[MethodPlan], None] | None = None,
    more: Iterable[Stages] = (),
) -> list[MethodPlan]:
    """Return the plan of each method, "lengthwise" first.

    "lengthwise" takes the best plan of several searches, whose costs are added. Even splits and list schedules, which
    cost little, always run. The beam and, if models wait for one another, "max" and Algorithm 1 run within
    ``Effort.share`` of the best makespan, so that the search does not cost more than it saves. If the plan of a method
    that runs only for comparison ends earlier by more than its cost, "lengthwise" takes it, and the cost is added.
    Last, ``more`` samples choose between the plans that are nearly as good as the best.

    ``begin`` receives a first plan of "lengthwise". Engines of its first stage can start during the search. If the
    final plan has the same first stage, the search takes extra time only if it is longer than that stage.
    """
    search = Search(samples, space, options)
    names = [name for name in dict.fromkeys((*options.additional, options.method)) if name != DEFAULT]
    has_default = DEFAULT in (options.method, *options.additional)
    first, found = None, dict[str, MethodPlan]()
    if begin is not None and has_default:
        # Even splits are rarely far from the best plan, unless models wait for one another.
        first = search.run_method("max" if search.has_dependencies else "min")
        found[first.name] = first
        begin(replace(first, name=DEFAULT))
    found |= {name: search.run_method(name) for name in _CHEAP if name in names and name not in found}
    best = search.run_default(found) if has_default else None
    found |= {name: search.run_method(name) for name in names if name not in found}
    if best is not None:
        for other in (found[name] for name in names if name not in _CHEAP):
            if _is_worth(other.planned_s + other.cost_s, best.planned_s):
                paid = {name: getattr(best, name) + other.elapsed_s for name in ("search_s", "lead_s", "elapsed_s")}
                cost_s = best.cost_s + other.cost_s
                best = replace(best, planned=other.planned, planned_s=other.planned_s, cost_s=cost_s, **paid)
        best = search.best_finalist(best, iter(more))
        found[DEFAULT] = best if first is None else search.overlapped(first, best)
    return [found[name] for name in (DEFAULT, *METHODS) if name in (options.method, *options.additional)]


def loaded_gpus(plan: Planned) -> int:
    """Return the number of GPUs that load a model, summed over stages. For equal makespans, fewer are better."""
    loaded = 0
    for before, plans in pairwise(((), *plan)):
        resident = {(p.model, p.shape): p.gpus for p in before}
        loaded += sum(max(0, p.gpus - resident.get((p.model, p.shape), 0)) for p in plans)
    return loaded


def _is_worth(seconds: float, than_s: float) -> bool:
    return seconds < than_s * (1.0 - MIN_SHARE)


class Search:
    """Search for one application's plan. Methods run on the first sample, and plans are compared on all samples.

    ``scores`` has the mean (or requested quantile) of the makespan of each plan that was compared.
    """

    def __init__(self, samples: Sequence[Stages], space: Space, options: PlanOptions) -> None:
        self._samples, self._space, self._options = samples, space, options
        for sample in samples:
            sample.runs.clock = options.clock
        self.scores: dict[Planned, float] = {}

    def run_method(self, name: str) -> MethodPlan:
        """Return the plan that a method in ``METHODS`` finds."""
        cached_s = [dict(sample.runs.duration_s) for sample in self._samples]
        for sample in self._samples:
            sample.runs.requested.clear()
        started_s, budget = self._options.clock(), SearchBudget(self._samples)
        planned = chosen_plan(self._samples[0], METHODS[name])
        planned_s = self._score(planned)
        elapsed_s = self._options.clock() - started_s
        # On its own, the method would have to simulate the runs that earlier methods have cached.
        search_s = elapsed_s + sum(
            seconds.get(key, 0.0)
            for sample, seconds in zip(self._samples, cached_s, strict=True)
            for key in sample.runs.requested
        )
        return MethodPlan(name, planned, planned_s, search_s, budget.elapsed_s, elapsed_s, search_s)

    @property
    def has_dependencies(self) -> bool:
        """Return whether some model uses outputs of another model."""
        return any(self._samples[0].load.parents)

    def overlapped(self, first: MethodPlan, best: MethodPlan) -> MethodPlan:
        """Return the plan to run after engines of the ``first`` plan have started during the search.

        A plan with the same first stage loses no time. Any other plan replaces the started engines after the search,
        and its gain must justify that.
        """
        if not _is_worth(best.planned_s, self.scores.get(first.planned, first.planned_s)):
            best = replace(best, planned=first.planned, planned_s=first.planned_s)
        if best.planned[:1] != first.planned[:1]:
            alike = {one: s for one, s in self.scores.items() if one[:1] == first.planned[:1]}
            stay = min(alike, key=lambda one: (alike[one], one != first.planned, one))
            if alike[stay] + first.cost_s > (best.planned_s + best.cost_s) * (1.0 + CHANGE_SHARE):
                return best
            best = replace(best, planned=stay, planned_s=alike[stay])
        return replace(best, lead_s=first.lead_s)

    def run_default(self, found: dict[str, MethodPlan]) -> MethodPlan:
        """Return the plan of "lengthwise": the best of ``found``, known plans, list schedules and the beam, improved.

        Methods that fit the budget are added to ``found``, even if they were not requested.
        """
        effort, first, parts = self._options.effort, self._samples[0], self._search_parts()
        paid = [*found.values(), *parts]
        quick = Stages(Runs(first.load, self._space, fast=True, known=first.runs))
        smaller = self._space.with_one_gpu_less()
        fewer = None if smaller is None else Stages(Runs(first.load, smaller, fast=True, known=first.runs))
        scores, fits = self.scores, self._space.fits
        started_s = self._options.clock()
        budget = SearchBudget((*self._samples, quick, *([fewer] if fewer else ())), sum(one.cost_s for one in paid))
        scores |= {one.planned: one.planned_s for one in found.values()}
        self._add(one for one in self._options.known if all(fits(plans) for plans in one))
        # Joint plans have more local optima; without these, planning one part after the other could be faster.
        self._add(part.planned + sum((one.planned for one in parts if one != part), ()) for part in parts)
        self._add(_best_lists(quick))
        limit_s = effort.share * min(scores.values())

        def has_budget() -> bool:
            return budget.allows(0.0, limit_s)

        self._add(beam(quick, effort, has_budget)[:_MAX_CANDIDATES])
        if fewer is not None and has_budget():
            # More GPUs have more local optima; without this search, one GPU more can give a slower plan.
            self._add([improve(fewer, _best_lists(fewer)[0], effort, has_budget)])
        self._improve(quick, has_budget)
        for name in METHODS:
            # Without dependencies between models, none of these was ever better than the beam.
            if self.has_dependencies and name not in found and budget.allows(expected_cost_s(first, name), limit_s):
                found[name] = self.run_method(name)
                scores[found[name].planned] = found[name].planned_s
        best = self._improve(quick, has_budget)
        cheap = [found[name] for name in _CHEAP if name in found]
        if cheap:
            usual = min(cheap, key=lambda one: one.planned_s)
            if not _is_worth(scores[best], usual.planned_s):
                best = min((usual.planned, best), key=loaded_gpus)
        elapsed_s = self._options.clock() - started_s + sum(one.elapsed_s for one in paid)
        return MethodPlan(DEFAULT, best, scores[best], elapsed_s, budget.elapsed_s, elapsed_s, elapsed_s)

    def best_finalist(self, best: MethodPlan, more: Iterator[Stages]) -> MethodPlan:
        """Return the finalist with the shortest makespan on the compared samples and ``more`` together.

        Finalists are the plans that are nearly as good as ``best`` on the compared samples, whichever method found
        them. A finalist that is slower than the first beyond its 95 % interval, or equal, drops out. The comparison
        ends when one is left, or when it has cost ``Effort.share`` of the makespan.
        """
        limit_s = best.planned_s * (1.0 + FINALIST_SHARE)
        near = sorted((one for one, s in self.scores.items() if s <= limit_s), key=lambda one: (self.scores[one], one))
        left = list(dict.fromkeys((best.planned, *near)))[:_MAX_FINALISTS]
        sample = next(more, None) if len(left) > 1 else None
        if sample is None:
            return best
        started_s, cost_s, options = self._options.clock(), 0.0, self._options
        ends = {one: list(self._ends_s(self._samples, one)) for one in left}
        while len(left) > 1 and sample is not None and cost_s < options.effort.share * best.planned_s:
            budget = SearchBudget([sample])
            for one in left:
                ends[one] += self._ends_s([sample], one)
            cost_s += budget.elapsed_s
            if options.quantile is None:
                first = min(left, key=lambda one: (sum(ends[one]), loaded_gpus(one), one))
                slower = {one: mean_estimate(np.subtract(ends[one], ends[first])) for one in left}
                left = [one for one in left if one == first or slower[one].value < slower[one].half_width]
            sample = next(more, None)
        chosen = min(left, key=lambda one: (self._combined(ends[one]), loaded_gpus(one), one))
        own_s = self.scores[chosen]
        for one, seconds in ends.items():  # a plan that dropped out has fewer samples
            self.scores[one] = own_s * self._combined(seconds) / self._combined(ends[chosen][: len(seconds)])
        elapsed_s = self._options.clock() - started_s
        paid = {name: getattr(best, name) + elapsed_s for name in ("search_s", "lead_s", "elapsed_s")}
        return replace(best, planned=chosen, planned_s=own_s, cost_s=best.cost_s + cost_s, **paid)

    def _search_parts(self) -> list[MethodPlan]:
        """Return the best plan of each independent part of the graph, or no plans if the graph is a single part."""
        found, parts = [], self._samples[0].load.parts
        for part in parts if len(parts) > 1 else ():
            samples = [Stages(Runs(one.load.only(part), self._space, known=one.runs)) for one in self._samples]
            found.append(Search(samples, self._space, replace(self._options, known=())).run_default({}))
        return found

    def _score(self, planned: Planned) -> float:
        return self._combined(self._ends_s(self._samples, planned))

    def _ends_s(self, samples: Sequence[Stages], planned: Planned) -> tuple[float, ...]:
        return makespans_s(samples, planned, spare_plans(self._space, planned))

    def _combined(self, ends_s: Sequence[float]) -> float:
        quantile = self._options.quantile
        return float(np.mean(ends_s) if quantile is None else np.quantile(ends_s, quantile))

    def _improve(self, quick: Stages, has_budget: Callable[[], bool]) -> Planned:
        before = min(self.scores, key=lambda one: (self.scores[one], one))
        self._add([improve(quick, before, self._options.effort, has_budget)])
        return min(self.scores, key=lambda one: (self.scores[one], one != before, one))

    def _add(self, plans: Iterable[Planned]) -> None:
        for one in plans:
            if one not in self.scores:
                self.scores[one] = self._score(one)


def _best_lists(quick: Stages) -> list[Planned]:
    quick_s = {
        one: simulate_plan(quick, one, spare_plans(quick.space, one), places=False).end_s
        for one in (chosen_plan(quick, choose) for choose in STEPS)
    }
    return sorted(quick_s, key=lambda one: (quick_s[one], one))[:_MAX_CANDIDATES]


def plan(
    tasks: Tasks,
    draws: Sequence[TaskDraw],
    models: Sequence[Served],
    cluster: Cluster,
    *,
    true_draws: Sequence[TaskDraw] = (),
    times: SwitchTimes | None = None,
    options: PlanOptions | None = None,
    begin: Callable[[AppPlan], None] | None = None,
) -> AppPlan:
    """Search for the plan with the shortest makespan: which models run when, and on how many GPUs each.

    Args:
        draws: Samples used for planning. Methods run on the first one, plans are compared on the first
            ``PlanOptions.compared``, and those that are nearly as good as the best on all.
        models: The model for each name in ``tasks.models``, in this order.
        true_draws: Independent samples on which the makespan is evaluated. If empty, ``draws`` are used.
        times: Times to start, wake and stop replicas; None assumes those of ``SwitchRates``.
        begin: Receives a first plan if the method is "lengthwise". Engines of its first stage can start during the
            search, and the final plan usually continues from that stage.

    Raises:
        InputError: There is no sample, or a name is unknown.
        DoesNotFitError: A model does not fit the cluster's GPUs.
    """
    options = options or PlanOptions()
    if not draws:
        raise InputError("a plan needs at least one draw of lengths to plan with; there is none")
    if len(models) != len(tasks.models):
        raise InputError(f"there must be a model for each of the tasks' {len(tasks.models)}; there are {len(models)}")
    if any(len(draw.present) != len(tasks) for draw in draws):
        raise InputError(f"every draw must contain all {len(tasks)} tasks")
    if options.quantile is not None and not 0 < options.quantile < 1:
        raise InputError(f"quantile must be above 0 and below 1; it is {options.quantile}")
    for name in (options.method, *options.additional):
        if name not in METHODS and name != DEFAULT:
            raise UnknownNameError("planning method", name, (DEFAULT, *METHODS))
    space = Space(models, cluster, times or SwitchTimes())
    samples = stages_of(tasks, draws[: options.compared], space)
    more = (one for draw in draws[len(samples) :] for one in stages_of(tasks, [draw], space))
    _warm_up(space, samples[0])

    def first(one: MethodPlan) -> None:
        assert begin is not None
        begin(_report(samples, space, samples[0], one, [one]))

    found = search_results(samples, space, options, None if begin is None else first, more)
    best = next(one for one in found if one.name == options.method)
    truth = stages_of(tasks, true_draws, space) if true_draws else samples
    made = _report(truth, space, samples[0], best, found)
    if not options.model_draws:
        return made
    chosen = {one for plans in (*made.planned, made.reserve) for one in plans}
    spaces = [space, *space.with_model_errors(chosen, options.model_draws)]
    # All errors on one sample: its difference from the mean is not that of the cost model.
    drawn = [stages_of(tasks, (*true_draws, *draws)[:1], one) for one in spaces]
    ends_s = [makespans_s(one, made.planned, made.reserve)[0] for one in drawn]
    return replace(made, makespan=drawn_estimate(made.makespan, ends_s, LEVEL))


def _warm_up(space: Space, stages: Stages) -> None:
    """Build deployments and load the simulation engine, so that the first method's time does not include this."""
    plans = [plan for model in range(len(space.models)) for plan in space.plans(model)]
    for one in plans:
        space.deployment(one)
    if any(len(load) for load in stages.load.models):
        warm_up()
        requests = Workload(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
        simulate(requests, space.deployment(plans[0]), max_log_steps=0)


def _report(
    truth: Sequence[Stages], space: Space, first: Stages, best: MethodPlan, found: Sequence[MethodPlan]
) -> AppPlan:
    reserve = {one.name: spare_plans(space, one.planned) for one in found}
    ends = {one.name: makespans_s(truth, one.planned, reserve[one.name]) for one in found}
    played = simulate_plan(first, best.planned, reserve[best.name])
    # The run waits for a search that takes longer than the first stage.
    first_end_s = played.stages[0].end_s if played.stages else 0.0
    lead_s = {one.name: max(one.lead_s, one.search_s - first_end_s) for one in found}
    total_s = mean_estimate(ends[best.name]).value + lead_s[best.name]
    methods = []
    for one in found:
        mean = mean_estimate(ends[one.name])
        gain = (mean.value + lead_s[one.name]) / max(total_s, 1e-12)
        stages = len(one.planned)
        methods.append(
            AppMethod(one.name, mean, one.planned_s, one.search_s, stages, gain, ends[one.name], lead_s[one.name])
        )
    loads = first.load.models
    return AppPlan(
        models=tuple(one.name for one in space.models),
        method=best.name,
        stages=tuple(played.stages),
        planned=best.planned,
        reserve=reserve[best.name],
        makespan=mean_estimate(ends[best.name]),
        makespans_s=ends[best.name],
        quantiles_s={level: float(np.quantile(ends[best.name], level)) for level in (0.05, 0.5, 0.95)},
        spans=spans_of(played, space, first),
        flops=tuple(float(one.work(one.output).sum()) for one in loads),
        tokens=tuple(int(one.output.sum()) for one in loads),
        methods=tuple(methods),
        search_s=best.search_s,
        notes=_assumptions(space, first, best.planned),
    )


def _assumptions(space: Space, first: Stages, planned: Planned) -> tuple[str, ...]:
    notes = []
    if not space.times.measured:
        rates = space.times.rates
        notes.append(
            f"switch times are assumed, not measured: {rates.engine_start_s:g} s to start an engine, weights at "
            f"{rates.disk_bytes_per_s / 1e9:g} GB/s from disk and {rates.pcie_bytes_per_s / 1e9:g} GB/s to each GPU, "
            "for each of the replicas that load at once; measure them (lengthwise app profile)"
        )
    if any(len(one) >= 2 * REPRESENTED_TASKS for one in first.load.models):
        notes.append(
            f"from {REPRESENTED_TASKS} independent tasks per replica, one of a model's replicas represents all of "
            "them: the one with the most tokens"
        )
    chosen = dict.fromkeys(plan for stage in planned for plan in stage)
    return (*notes, *dict.fromkeys(note for plan in chosen for note in deployment_notes(space.deployment(plan))))


def what_if(
    tasks: Tasks,
    draws: Sequence[TaskDraw],
    models: Sequence[Served],
    cluster: Cluster,
    report: AppPlan,
    *,
    true_draws: Sequence[TaskDraw] = (),
    times: SwitchTimes | None = None,
    options: PlanOptions | None = None,
) -> tuple[AppWhatIf, ...]:
    """Return the makespans on changed clusters. The application is planned anew for each cluster.

    The changes are an island of GPUs more or less, one more GPU, and a disk twice as fast. The method "lengthwise" also
    considers the plan of ``report``, so that on ``draws`` more GPUs lengthen its makespan by at most MIN_SHARE. Changes
    under which a model does not fit are omitted. The other arguments are as in ``plan``.
    """
    times = times or SwitchTimes()
    options = replace(options or PlanOptions(), method=report.method, additional=(), known=(report.planned,))
    variants = [(name, other, times) for name, other in _clusters(cluster)]
    variants.append(("disk_twice_as_fast", cluster, faster_disk(times, 2.0)))
    found = []
    for name, gpus, switching in variants:
        try:
            then = plan(tasks, draws, models, gpus, true_draws=true_draws, times=switching, options=options)
        except DoesNotFitError:
            continue
        mean = mean_estimate([b - a for a, b in zip(report.makespans_s, then.makespans_s, strict=True)])
        pairs = zip(getattr(report.makespan, "draws", ()), getattr(then.makespan, "draws", ()), strict=False)
        drawn = drawn_estimate(mean, [mean.value, *(b - a for a, b in pairs)], LEVEL)
        difference = replace(mean, model_low=drawn.model_low, model_high=drawn.model_high)
        found.append(AppWhatIf(name, then.makespan, difference))
    return tuple(found)


def _clusters(cluster: Cluster) -> list[tuple[str, Cluster]]:
    *others, last = cluster.machines
    step = min(last.node.link_group, last.gpus)
    unit = "island" if 1 < step == last.node.link_group else "gpus"

    def with_gpus(gpus: int) -> Cluster:
        machine = replace(last, gpus=gpus, node=replace(last.node, gpus=max(gpus, last.node.gpus)))
        return Cluster((*others, machine) if gpus else tuple(others))

    found = [(f"{unit}_plus_{step}", with_gpus(last.gpus + step))]
    if step > 1:
        has_slot = last.gpus < last.node.gpus
        one_more = with_gpus(last.gpus + 1) if has_slot else Cluster((*others, last, Machine(last.gpu, last.node, 1)))
        found.append(("gpus_plus_1", one_more))
    if cluster.gpus > step:
        found.append((f"{unit}_minus_{step}", with_gpus(last.gpus - step)))
    return found


def faster_disk(times: SwitchTimes, factor: float) -> SwitchTimes:
    """Return switch times with a disk ``factor`` times as fast. ``engine_start_s`` of a measured start remains."""
    engine_s = times.rates.engine_start_s
    measured = {
        key: min(engine_s, s) + max(0.0, s - engine_s) / factor if key[-1] == "start" else s
        for key, s in times.measured.items()
    }
    rates = replace(times.rates, disk_bytes_per_s=times.rates.disk_bytes_per_s * factor)
    return replace(times, measured=measured, rates=rates)


def write_plan(path: Path | str, plan: AppPlan) -> None:
    """Write ``plan_json`` to a file."""
    write_atomic(path, plan_json(plan).encode())


def plan_json(plan: AppPlan) -> str:
    """Return a plan as JSON, with NaN as null."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(one) for key, one in value.items() if key != "draws"}
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        return None if isinstance(value, float) and math.isnan(value) else value

    content = {"format": PLAN_FORMAT, **plain(asdict(plan)), "idle_s": plan.idle_s}
    return json.dumps(content, allow_nan=False) + "\n"
