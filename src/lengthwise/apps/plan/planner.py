"""The room's door: an application's tasks and draws, models and GPUs become a plan."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.apps.plan.evaluate import (
    idle_seconds,
    judged,
    makespans_s,
    play,
    quantiles_of,
    spans_of,
    spare_plans,
    stages_of,
)
from lengthwise.apps.plan.methods import METHODS, STEPS, Effort, Planned, beam, bettered, rolled_out
from lengthwise.apps.plan.space import Served, Space, SwitchTimes
from lengthwise.apps.plan.stages import REPRESENTED_TASKS, Runs, Stages
from lengthwise.engine import simulate
from lengthwise.schema.app import (
    AppMethod,
    AppPlan,
    AppSpan,
    AppStage,
    AppWhatIf,
    Cluster,
    Machine,
    ModelPlan,
    Switch,
    TaskDraw,
    Tasks,
)
from lengthwise.schema.errors import DoesNotFitError, InputError, UnknownNameError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.files import write_whole
from lengthwise.schema.workload import Workload
from lengthwise.statistics import mean_estimate

POLL_INTERVAL_S, RUN_S, REQUEST_S = 4.5e-5, 1.7e-3, 5.2e-7
"""Seconds of a stage that is looked at, of a run that is simulated and of a request in it, about: fitted (least squares
of relative errors) to what the methods, lists and beam took on eight applications, on one core of a server. Most are
within a half; chains, whose requests wait for one another, take up to four times as long."""
AGAIN, LOOKS = 3.0, 6
"""So many times what Algorithm 1 simulates from the start it simulates in all, models that were cut, too; and so many
stages it looks at for each of these runs."""


class Purse:
    """What was spent on looking, in counted seconds.

    Args:
        counted: Whose work is counted, from now on.
        elapsed_s: Before that.
    """

    def __init__(self, counted: Sequence[Stages], elapsed_s: float = 0.0) -> None:
        self._counted = counted
        self._before_s = self._all_s() - elapsed_s

    @property
    def elapsed_s(self) -> float:
        """By now."""
        return self._all_s() - self._before_s

    def is_satisfied(self, cost_s: float, limit_s: float) -> bool:
        """Whether something is left of so much, and this too could be spent."""
        elapsed_s = self.elapsed_s
        return elapsed_s < limit_s and elapsed_s + cost_s <= limit_s

    def _all_s(self) -> float:
        return sum(
            POLL_INTERVAL_S * stages.evaluated
            + RUN_S * stages.runs.simulated_runs
            + REQUEST_S * stages.runs.simulated_requests
            for stages in self._counted
        )


def expected_cost_s(stages: Stages, name: str) -> float:
    """What a method will cost, about.

    Algorithm 1 simulates each model under each of its plans, and most of them again; "max" looks at those plans alone
    that have the most GPUs, each once.
    """
    seconds, alone = 0.0, name.startswith("max")
    for model, load in enumerate(stages.load.models):
        plans = stages.space.plans(model)
        most = max(plan.gpus for plan in plans) if alone else 0
        for plan in plans:
            if plan.gpus >= most:
                stands_for_all = len(load) >= REPRESENTED_TASKS * plan.dp
                requests = -(-len(load) // plan.dp) if stands_for_all else len(load)
                seconds += RUN_S + REQUEST_S * requests + (0.0 if alone else POLL_INTERVAL_S * LOOKS)
    return seconds * (1.0 if alone else AGAIN)


DEFAULT = "lengthwise"
BEST_TRIED = 3
"""Plans of the lists, and of the beam, that are simulated whole, on all draws planned with."""
_CHEAP = ("min", "min_no_preemption")
"""Ways that are quick beside what they save; they come first, and pay for what they have simulated."""
CHANGE_SHARE = 0.01
"""Engines that start already are given up only for a plan that is sooner by more than this: its gain is told by a few
draws, and is by chance a part of it."""
MIN_SHARE = 0.003
"""What is not sooner by so much than a quick way on the draws planned with is not sooner on others."""


@dataclass(frozen=True)
class RequestSpec:
    """How to plan.

    Attributes:
        method: "lengthwise", or a name of ``METHODS``.
        additional: Methods to compare with.
        quantile: Plan against this quantile over the draws; None: their mean.
        effort: How long to look.
        clock: Seconds, for ``search_s`` alone.
        known: Plans that "lengthwise" looks at too, where they fit.
    """

    method: str = DEFAULT
    additional: tuple[str, ...] = tuple(METHODS)
    quantile: float | None = None
    effort: Effort = field(default_factory=Effort)
    clock: Callable[[], float] = time.perf_counter
    known: tuple[Planned, ...] = ()


@dataclass(frozen=True)
class Found:
    """A plan that was found.

    Attributes:
        name: Of the way.
        planned: The plan.
        planned_s: Its makespan on the draws planned with.
        search_s: Seconds of finding it, had nothing been looked at before it.
        cost_s: Seconds of finding it after what was looked at before it, counted.
        elapsed_s: The same, by the clock.
        lead_s: Of ``search_s``, those before engines of its first stage can start.
    """

    name: str
    planned: Planned
    planned_s: float
    search_s: float
    cost_s: float
    elapsed_s: float
    lead_s: float


def search_results(
    worlds: Sequence[Stages], space: Space, requested: RequestSpec, begin: Callable[[Found], None] | None = None
) -> list[Found]:
    """What each method finds, "lengthwise" first.

    "lengthwise" pays for all that it takes the best of. Even splits and lists, which cost little, are looked at in any
    case; one model after another, Algorithm 1 and the beam as far as ``Effort.share`` of the best makespan goes: it
    shall not spend what it saves. What was run beside it for comparison alone it takes where that ends sooner by more
    than it cost, and pays for then.

    Args:
        worlds: The draws planned with.
        space: Of plans.
        requested: How to plan.
        begin: Told what "lengthwise" has at first sight: engines of its first stage can start while it looks on, which
            then costs no time where they stay.
    """
    search = _Search(worlds, space, requested)
    names = [name for name in dict.fromkeys((*requested.additional, requested.method)) if name != DEFAULT]
    first, found = None, dict[str, Found]()
    if begin is not None and DEFAULT in (requested.method, *requested.additional):
        first = search.by(search.at_first_sight)
        found[first.name] = first
        begin(replace(first, name=DEFAULT))
    found |= {name: search.by(name) for name in _CHEAP if name in names and name not in found}
    if DEFAULT in (requested.method, *requested.additional):
        best = search.looked_ahead(found)
        found |= {name: search.by(name) for name in names if name not in found}
        best = _best_end_to_end(best, [found[name] for name in names if name not in _CHEAP])
        found[DEFAULT] = best if first is None else search.overlapped(first, best)
    else:
        found |= {name: search.by(name) for name in names if name not in found}
    return [found[name] for name in (DEFAULT, *METHODS) if name in (requested.method, *requested.additional)]


def _best_end_to_end(best: Found, others: Iterable[Found]) -> Found:
    for other in others:
        if _is_worth(other.planned_s + other.cost_s, best.planned_s):
            best = replace(
                best,
                planned=other.planned,
                planned_s=other.planned_s,
                search_s=best.search_s + other.elapsed_s,
                lead_s=best.lead_s + other.elapsed_s,
                cost_s=best.cost_s + other.cost_s,
                elapsed_s=best.elapsed_s + other.elapsed_s,
            )
    return best


def loaded_gpus(plan: Planned) -> int:
    """GPUs that a plan has something loaded on, as often as it does: of two that end alike, fewer is better."""
    found = 0
    for before, plans in pairwise(((), *plan)):
        there = {(p.model, p.shape): p.gpus for p in before}
        found += sum(max(0, p.gpus - there.get((p.model, p.shape), 0)) for p in plans)
    return found


def _is_worth(seconds: float, than_s: float) -> bool:
    return seconds < than_s * (1.0 - MIN_SHARE)


class _Search:
    """Of one application: worlds are the draws planned with, the first one is searched on."""

    def __init__(self, worlds: Sequence[Stages], space: Space, requested: RequestSpec) -> None:
        self._worlds, self._space, self._requested = worlds, space, requested
        self._now = requested.clock
        for world in worlds:
            world.runs.clock = requested.clock
        self._scores: dict[Planned, float] = {}

    def by(self, name: str) -> Found:
        """By SamuLLM's way or a heuristic."""
        saved = _Saved([world.runs for world in self._worlds])
        started_s, purse = self._now(), Purse(self._worlds)
        made = rolled_out(self._worlds[0], METHODS[name])
        score = self.score(made)
        elapsed_s = self._now() - started_s
        search_s = elapsed_s + saved.seconds()
        return Found(name, made, score, search_s, purse.elapsed_s, elapsed_s, search_s)

    def score(self, made: Planned) -> float:
        """Its makespan on the draws planned with."""
        spare = spare_plans(self._space, len(self._space.models), made)
        return judged(makespans_s(self._worlds, made, spare), self._requested.quantile)

    @property
    def at_first_sight(self) -> str:
        """The quickest way that is seldom far off: GPUs shared out evenly, or one after another where models wait."""
        return "max" if self._waits else "min"

    @property
    def _waits(self) -> bool:
        return any(self._worlds[0].load.parents)

    def overlapped(self, first: Found, best: Found) -> Found:
        """What to run, where engines start as the plan at first sight has them while all else is looked for.

        Plans that begin alike lose nothing by that. Another one has to start its engines when it is found, in place of
        those, and must be worth it.
        """
        if not _is_worth(best.planned_s, first.planned_s):
            best = replace(best, planned=first.planned, planned_s=first.planned_s)
        if best.planned[:1] != first.planned[:1]:
            alike = {one: s for one, s in self._scores.items() if one[:1] == first.planned[:1]}
            stay = min(alike, key=lambda one: (alike[one], one != first.planned, one))
            if alike[stay] + first.cost_s > (best.planned_s + best.cost_s) * (1.0 + CHANGE_SHARE):
                return best
            best = replace(best, planned=stay, planned_s=alike[stay])
        return replace(best, lead_s=first.lead_s)

    def looked_ahead(self, found: dict[str, Found]) -> Found:
        """The best of the heuristics, lists, a beam's plans, and the best of these bettered.

        Args:
            found: What was found so far; methods that can be afforded are added, asked for or not.
        """
        effort, first, paid = self._requested.effort, self._worlds[0], list(found.values())
        quick = Stages(Runs(first.load, self._space, fast=True, known=first.runs))
        scores = self._scores
        started_s, purse = self._now(), Purse((*self._worlds, quick), sum(one.cost_s for one in paid))
        scores |= {one.planned: one.planned_s for one in paid}
        fits = self._space.fits
        self._try(scores, (one for one in self._requested.known if all(fits(plans) for plans in one)))
        self._try(scores, self._soonest(quick, [rolled_out(quick, choose) for choose in STEPS]))
        limit_s = effort.share * min(scores.values())

        def has_left() -> bool:
            return purse.is_satisfied(0.0, limit_s)

        self._try(scores, beam(quick, effort, has_left)[:BEST_TRIED])
        self._better(scores, quick, has_left)
        for name in METHODS:
            # Of models that wait for nobody, none of these was ever better than the beam.
            if self._waits and name not in found and purse.is_satisfied(expected_cost_s(first, name), limit_s):
                found[name] = self.by(name)
                scores[found[name].planned] = found[name].planned_s
        best = self._better(scores, quick, has_left)
        quick_ways = [found[name] for name in _CHEAP if name in found]
        if quick_ways:
            usual = min(quick_ways, key=lambda one: one.planned_s)
            if not _is_worth(scores[best], usual.planned_s):
                best = min((usual.planned, best), key=loaded_gpus)
        elapsed_s = self._now() - started_s + sum(one.elapsed_s for one in paid)
        return Found(DEFAULT, best, scores[best], elapsed_s, purse.elapsed_s, elapsed_s, elapsed_s)

    def _soonest(self, fast: Stages, plans: Iterable[Planned]) -> list[Planned]:
        """Those that may be the best on all draws, told by what is quickly simulated on one."""
        ends = {one: self._quick_s(fast, one) for one in plans}
        return sorted(ends, key=lambda one: (ends[one], one))[:BEST_TRIED]

    def _quick_s(self, fast: Stages, made: Planned) -> float:
        spare = spare_plans(self._space, len(self._space.models), made)
        return play(fast, made, spare, places=False).end_s

    def _better(self, scores: dict[Planned, float], fast: Stages, has_left: Callable[[], bool]) -> Planned:
        """The best, after the best one so far was bettered; of equals the one that was there."""
        ranked = sorted(scores, key=lambda one: (scores[one], one))
        self._try(scores, [bettered(fast, ranked[0], self._requested.effort, has_left)])
        return min(scores, key=lambda one: (scores[one], one != ranked[0], one))

    def _try(self, scores: dict[Planned, float], plans: Iterable[Planned]) -> None:
        for one in plans:
            if one not in scores:
                scores[one] = self.score(one)


class _Saved:
    """What others had simulated before, from now on: whoever asks for it would have had to simulate it himself."""

    def __init__(self, runs: Sequence[Runs]) -> None:
        self._before = [(one, dict(one.duration_s)) for one in runs]
        for one in runs:
            one.requested.clear()

    def seconds(self) -> float:
        """Of all that was asked for and was there."""
        return sum(duration_s.get(key, 0.0) for one, duration_s in self._before for key in one.requested)


def plan(
    tasks: Tasks,
    draws: Sequence[TaskDraw],
    models: Sequence[Served],
    cluster: Cluster,
    *,
    true_draws: Sequence[TaskDraw] = (),
    times: SwitchTimes | None = None,
    requested: RequestSpec | None = None,
    begin: Callable[[AppPlan], None] | None = None,
) -> AppPlan:
    """Which models run when, on how many GPUs each, so that all is done soonest.

    Args:
        tasks: What the application may ask.
        draws: To plan with; the first one is searched on, all decide between plans.
        models: One for each of ``tasks.models``, in their order.
        cluster: The GPUs.
        true_draws: To tell the makespan by, drawn apart from those planned with; none: told by those.
        times: Of switching; None: assumed.
        requested: How to plan.
        begin: Told a plan at first sight, where the method is "lengthwise": engines of its first stage can start while
            a better plan is looked for. What is found then is most often one that goes on from there.

    Raises:
        InputError: There is no draw, or a name is unknown.
        DoesNotFitError: A model fits no GPUs of the cluster.
    """
    requested = requested or RequestSpec()
    _check(tasks, draws, models, requested)
    space = Space(models, cluster, times or SwitchTimes())
    worlds = stages_of(tasks, draws, space)
    _warm(space, worlds[0])
    early: list[Found] = []

    def first(one: Found) -> None:
        early.append(one)
        assert begin is not None
        begin(_report(worlds, space, worlds[0], one, early))

    found = search_results(worlds, space, requested, None if begin is None else first)
    best = next(one for one in found if one.name == requested.method)
    truth = stages_of(tasks, true_draws, space) if true_draws else worlds
    return _report(truth, space, worlds[0], best, found)


def _warm(space: Space, stages: Stages) -> None:
    """Has deployments made and the engine loaded, which is no part of any search."""
    plans = [plan for model in range(len(space.models)) for plan in space.plans(model)]
    for plan_ in plans:
        space.deployment(plan_)
    if any(len(one) for one in stages.load.models):
        one = Workload(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
        simulate(one, space.deployment(plans[0]), keep_steps=0)


def _check(tasks: Tasks, draws: Sequence[TaskDraw], models: Sequence[Served], requested: RequestSpec) -> None:
    if not draws:
        raise InputError("a plan needs at least one draw of lengths to plan with; there is none")
    if len(models) != len(tasks.models):
        raise InputError(f"there must be a model for each of {len(tasks.models)}; there are {len(models)}")
    if any(len(draw.present) != len(tasks) for draw in draws):
        raise InputError(f"every draw must be of all {len(tasks)} tasks")
    if requested.quantile is not None and not 0 < requested.quantile < 1:
        raise InputError(f"quantile must be above 0 and below 1; it is {requested.quantile}")
    for name in (requested.method, *requested.additional):
        if name not in METHODS and name != DEFAULT:
            raise UnknownNameError("planning method", name, (DEFAULT, *METHODS))


def _report(truth: Sequence[Stages], space: Space, first: Stages, best: Found, found: Sequence[Found]) -> AppPlan:
    ends = {one.name: makespans_s(truth, one.planned, _spare(space, one)) for one in found}
    mine = ends[best.name]
    played = play(first, best.planned, _spare(space, best))
    # Where planning outlasts its first stage, the run waits for it.
    most_s = played.stages[0].end_s if played.stages else 0.0
    found = [replace(one, lead_s=max(one.lead_s, one.search_s - most_s)) for one in found]
    best = next(one for one in found if one.name == best.name)
    whole_s = mean_estimate(mine).value + best.lead_s
    spans = spans_of(played, space, first)
    loads = first.load.models
    return AppPlan(
        models=tuple(one.name for one in space.models),
        method=best.name,
        stages=played.stages,
        planned=best.planned,
        reserve=_spare(space, best),
        makespan=mean_estimate(mine),
        makespans_s=mine,
        quantiles_s=quantiles_of(mine),
        spans=spans,
        idle_s=idle_seconds(spans),
        flops=tuple(float(one.work(one.output).sum()) for one in loads),
        tokens=tuple(int(one.output.sum()) for one in loads),
        methods=tuple(_method(one, ends[one.name], whole_s) for one in found),
        search_s=best.search_s,
        notes=_notes(space, first),
    )


def _spare(space: Space, one: Found) -> tuple[ModelPlan, ...]:
    return spare_plans(space, len(space.models), one.planned)


def _method(one: Found, ends_s: Sequence[float], whole_s: float) -> AppMethod:
    mean = mean_estimate(ends_s)
    gain = (mean.value + one.lead_s) / max(whole_s, 1e-12)
    stages = len(one.planned)
    return AppMethod(one.name, mean, one.planned_s, one.search_s, stages, gain, tuple(ends_s), one.lead_s)


def _notes(space: Space, first: Stages) -> tuple[str, ...]:
    """What is assumed."""
    notes = []
    if not space.times.measured:
        rates = space.times.rates
        notes.append(
            f"switch times are assumed, not measured: {rates.engine_start_s:g} s to start an engine, weights at "
            f"{rates.disk_bytes_per_s / 1e9:g} GB/s from disk and {rates.pcie_bytes_per_s / 1e9:g} GB/s to each GPU; "
            "measure them (lengthwise app profile)"
        )
    if any(len(one) >= 2 * REPRESENTED_TASKS for one in first.load.models):
        notes.append(
            f"from {REPRESENTED_TASKS} independent tasks a replica on, one of a model's replicas stands for all of "
            "them: the one with the most tokens"
        )
    return tuple(notes)


def what_if(
    tasks: Tasks,
    draws: Sequence[TaskDraw],
    models: Sequence[Served],
    cluster: Cluster,
    report: AppPlan,
    *,
    true_draws: Sequence[TaskDraw] = (),
    times: SwitchTimes | None = None,
    requested: RequestSpec | None = None,
) -> tuple[AppWhatIf, ...]:
    """The makespan with an island of GPUs more, one fewer, a GPU more, and a disk twice as fast, each planned anew.

    The plan as it is stays among what is looked at, where it fits: more GPUs do not make it later. A variant under
    which a model does not fit any more is left out. Arguments are those of ``plan``, and ``report`` is what it said.
    """
    times = times or SwitchTimes()
    requested = replace(requested or RequestSpec(), method=report.method, additional=(), known=(report.planned,))
    variants = [(name, other, times) for name, other in _clusters(cluster)]
    variants.append(("disk_twice_as_fast", cluster, faster_disk(times, 2.0)))
    found = []
    for name, gpus, switching in variants:
        try:
            then = plan(tasks, draws, models, gpus, true_draws=true_draws, times=switching, requested=requested)
        except DoesNotFitError:
            continue
        apart = [b - a for a, b in zip(report.makespans_s, then.makespans_s, strict=True)]
        found.append(AppWhatIf(name, then.makespan, mean_estimate(apart)))
    return tuple(found)


def _clusters(cluster: Cluster) -> list[tuple[str, Cluster]]:
    """The last machine with an island of GPUs more and one fewer; one GPU more, there or in a machine of its own."""
    *others, last = cluster.machines
    step = min(last.node.link_group, last.gpus)
    found = [(_name("plus", step, last), _with_size((*others, _with(last, last.gpus + step))))]
    if step > 1:
        found.append(("gpus_plus_1", _one_more(cluster)))
    if cluster.gpus > step:
        found.append((_name("minus", step, last), _with_size((*others, _with(last, last.gpus - step)))))
    return found


def _name(way: str, step: int, machine: Machine) -> str:
    """GPUs that are an island are called so."""
    is_island = 1 < step == machine.node.link_group
    return f"{'island' if is_island else 'gpus'}_{way}_{step}"


def _one_more(cluster: Cluster) -> Cluster:
    *others, last = cluster.machines
    if last.gpus < last.node.gpus:
        return Cluster((*others, _with(last, last.gpus + 1)))
    return Cluster((*cluster.machines, Machine(last.gpu, last.node, 1)))


def _with_size(machines: Sequence[Machine]) -> Cluster:
    return Cluster(tuple(machine for machine in machines if machine.gpus))


def _with(machine: Machine, gpus: int) -> Machine:
    return replace(machine, gpus=gpus, node=replace(machine.node, gpus=max(gpus, machine.node.gpus)))


def faster_disk(times: SwitchTimes, factor: float) -> SwitchTimes:
    """Switch times with a disk so many times as fast; measured starts keep what an engine itself is assumed to take."""
    own_s = times.rates.engine_start_s
    measured = {
        key: min(own_s, s) + max(0.0, s - own_s) / factor if key[-1] == "start" else s
        for key, s in times.measured.items()
    }
    rates = replace(times.rates, disk_bytes_per_s=times.rates.disk_bytes_per_s * factor)
    return replace(times, measured=measured, rates=rates)


FORMAT = "lengthwise application plan 1"


def write_plan(path: Path | str, plan: AppPlan) -> None:
    """Writes a plan; NaN is written as null."""
    told = {"format": FORMAT, **_plain(asdict(plan))}
    write_whole(path, (json.dumps(told, allow_nan=False) + "\n").encode())


def read_plan(path: Path | str) -> AppPlan:
    """The plan of a file.

    Raises:
        InputError: It cannot be read, or is no plan.
    """
    try:
        told = json.loads(Path(path).read_text(encoding="utf-8"))
        if told.get("format") != FORMAT:
            raise InputError(f"{path} must be an application's plan as `lengthwise app plan --json` writes it")
        return _plan(told)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"cannot read the plan {path}: {type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _plan(report: Mapping[str, Any]) -> AppPlan:
    return AppPlan(
        models=tuple(report["models"]),
        method=report["method"],
        stages=tuple(map(_stage, report["stages"])),
        planned=tuple(_plans(plans) for plans in report["planned"]),
        reserve=_plans(report["reserve"]),
        makespan=_estimate(report["makespan"]),
        makespans_s=tuple(report["makespans_s"]),
        quantiles_s={float(level): value for level, value in report["quantiles_s"].items()},
        spans=tuple(AppSpan(**{**s, "plan": s["plan"] and ModelPlan(**s["plan"])}) for s in report["spans"]),
        idle_s=report["idle_s"],
        flops=tuple(report["flops"]),
        tokens=tuple(report["tokens"]),
        methods=tuple(map(_method_from_json, report["methods"])),
        what_ifs=tuple(
            AppWhatIf(w["name"], _estimate(w["makespan"]), _estimate(w["difference"])) for w in report["what_ifs"]
        ),
        search_s=report["search_s"],
        notes=tuple(report["notes"]),
    )


def _method_from_json(report: Mapping[str, Any]) -> AppMethod:
    ends = tuple(report.get("makespans_s", ()))
    return AppMethod(**{**report, "makespan": _estimate(report["makespan"]), "makespans_s": ends})


def _stage(report: Mapping[str, Any]) -> AppStage:
    placement = {int(m): tuple(map(tuple, replicas)) for m, replicas in report["placement"].items()}
    switches = tuple(Switch(**{**s, "replica": tuple(s["replica"])}) for s in report["switches"])
    return AppStage(**{**report, "plans": _plans(report["plans"]), "placement": placement, "switches": switches})


def _plans(report: list[dict[str, Any]]) -> tuple[ModelPlan, ...]:
    return tuple(ModelPlan(**one) for one in report)


def _estimate(report: Mapping[str, Any]) -> Estimate:
    return Estimate(**{name: math.nan if value is None else value for name, value in report.items()})
