"""What each way of planning finds, and what finding it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from lengthwise.apps.plan.beam import METHODS, STEPS, Effort, Planned, beam, bettered, rolled_out
from lengthwise.apps.plan.evaluate import judged, makespans_s
from lengthwise.apps.plan.play import play, spare_plans
from lengthwise.apps.plan.purse import Purse, expected_cost_s
from lengthwise.apps.plan.runs import Runs
from lengthwise.apps.plan.space import Space
from lengthwise.apps.plan.stages import Stages

DEFAULT = "lengthwise"
BEST_TRIED = 3
"""Plans of the lists, and of the beam, that are simulated whole, on all draws planned with."""
_CHEAP = ("min", "min_no_preemption")
"""Ways that are quick beside what they save; they come first, and pay for what they have simulated."""
CHANGE_SHARE = 0.01
"""Engines that start already are given up only for a plan that is sooner by more than this: its gain is told by a few
draws, and is by chance a part of it."""
WORTH_SHARE = 0.003
"""What is not sooner by so much than a quick way on the draws planned with is not sooner on others."""


@dataclass(frozen=True)
class Asked:
    """How to plan.

    Attributes:
        method: "lengthwise", or a name of ``METHODS``.
        beside: Methods to compare with.
        quantile: Plan against this quantile over the draws; None: their mean.
        effort: How long to look.
        clock: Seconds, for ``search_s`` alone.
        known: Plans that "lengthwise" looks at too, where they fit.
    """

    method: str = DEFAULT
    beside: tuple[str, ...] = tuple(METHODS)
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
        spent_s: The same, by the clock.
        ahead_s: Of ``search_s``, those before engines of its first stage can start.
    """

    name: str
    planned: Planned
    planned_s: float
    search_s: float
    cost_s: float
    spent_s: float
    ahead_s: float


def searched(
    worlds: Sequence[Stages], space: Space, asked: Asked, begin: Callable[[Found], None] | None = None
) -> list[Found]:
    """What each method finds, "lengthwise" first.

    "lengthwise" pays for all that it takes the best of. Even splits and lists, which cost little, are looked at in any
    case; one model after another, Algorithm 1 and the beam as far as ``Effort.share`` of the best makespan goes: it
    shall not spend what it saves. What was run beside it for comparison alone it takes where that ends sooner by more
    than it cost, and pays for then.

    Args:
        worlds: The draws planned with.
        space: Of plans.
        asked: How to plan.
        begin: Told what "lengthwise" has at first sight: engines of its first stage can start while it looks on, which
            then costs no time where they stay.
    """
    search = _Search(worlds, space, asked)
    names = [name for name in dict.fromkeys((*asked.beside, asked.method)) if name != DEFAULT]
    first, found = None, dict[str, Found]()
    if begin is not None and DEFAULT in (asked.method, *asked.beside):
        first = search.by(search.at_first_sight)
        found[first.name] = first
        begin(replace(first, name=DEFAULT))
    found |= {name: search.by(name) for name in _CHEAP if name in names and name not in found}
    if DEFAULT in (asked.method, *asked.beside):
        best = search.looked_ahead(found)
        found |= {name: search.by(name) for name in names if name not in found}
        best = _best_end_to_end(best, [found[name] for name in names if name not in _CHEAP])
        found[DEFAULT] = best if first is None else search.overlapped(first, best)
    else:
        found |= {name: search.by(name) for name in names if name not in found}
    return [found[name] for name in (DEFAULT, *METHODS) if name in (asked.method, *asked.beside)]


def _best_end_to_end(best: Found, others: Iterable[Found]) -> Found:
    for other in others:
        if _is_worth(other.planned_s + other.cost_s, best.planned_s):
            best = replace(
                best,
                planned=other.planned,
                planned_s=other.planned_s,
                search_s=best.search_s + other.spent_s,
                ahead_s=best.ahead_s + other.spent_s,
                cost_s=best.cost_s + other.cost_s,
                spent_s=best.spent_s + other.spent_s,
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
    return seconds < than_s * (1.0 - WORTH_SHARE)


class _Search:
    """Of one application: worlds are the draws planned with, the first one is searched on."""

    def __init__(self, worlds: Sequence[Stages], space: Space, asked: Asked) -> None:
        self._worlds, self._space, self._asked = worlds, space, asked
        self._now = asked.clock
        for world in worlds:
            world.runs.clock = asked.clock
        self._scores: dict[Planned, float] = {}

    def by(self, name: str) -> Found:
        """By SamuLLM's way or a heuristic."""
        saved = _Saved([world.runs for world in self._worlds])
        started_s, purse = self._now(), Purse(self._worlds)
        made = rolled_out(self._worlds[0], METHODS[name])
        score = self.score(made)
        spent_s = self._now() - started_s
        search_s = spent_s + saved.seconds()
        return Found(name, made, score, search_s, purse.spent_s, spent_s, search_s)

    def score(self, made: Planned) -> float:
        """Its makespan on the draws planned with."""
        spare = spare_plans(self._space, len(self._space.models), made)
        return judged(makespans_s(self._worlds, made, spare), self._asked.quantile)

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
        return replace(best, ahead_s=first.ahead_s)

    def looked_ahead(self, found: dict[str, Found]) -> Found:
        """The best of the heuristics, lists, a beam's plans, and the best of these bettered.

        Args:
            found: What was found so far; methods that can be afforded are added, asked for or not.
        """
        effort, first, paid = self._asked.effort, self._worlds[0], list(found.values())
        quick = Stages(Runs(first.load, self._space, quick=True, known=first.runs))
        scores = self._scores
        started_s, purse = self._now(), Purse((*self._worlds, quick), sum(one.cost_s for one in paid))
        scores |= {one.planned: one.planned_s for one in paid}
        fits = self._space.fits
        self._try(scores, (one for one in self._asked.known if all(fits(plans) for plans in one)))
        self._try(scores, self._soonest(quick, [rolled_out(quick, choose) for choose in STEPS]))
        limit_s = effort.share * min(scores.values())

        def has_left() -> bool:
            return purse.holds(0.0, limit_s)

        self._try(scores, beam(quick, effort, has_left)[:BEST_TRIED])
        self._better(scores, quick, has_left)
        for name in METHODS:
            # Of models that wait for nobody, none of these was ever better than the beam.
            if self._waits and name not in found and purse.holds(expected_cost_s(first, name), limit_s):
                found[name] = self.by(name)
                scores[found[name].planned] = found[name].planned_s
        best = self._better(scores, quick, has_left)
        quick_ways = [found[name] for name in _CHEAP if name in found]
        if quick_ways:
            usual = min(quick_ways, key=lambda one: one.planned_s)
            if not _is_worth(scores[best], usual.planned_s):
                best = min((usual.planned, best), key=loaded_gpus)
        spent_s = self._now() - started_s + sum(one.spent_s for one in paid)
        return Found(DEFAULT, best, scores[best], spent_s, purse.spent_s, spent_s, spent_s)

    def _soonest(self, quick: Stages, plans: Iterable[Planned]) -> list[Planned]:
        """Those that may be the best on all draws, told by what is quickly simulated on one."""
        ends = {one: self._quick_s(quick, one) for one in plans}
        return sorted(ends, key=lambda one: (ends[one], one))[:BEST_TRIED]

    def _quick_s(self, quick: Stages, made: Planned) -> float:
        spare = spare_plans(self._space, len(self._space.models), made)
        return play(quick, made, spare, places=False).end_s

    def _better(self, scores: dict[Planned, float], quick: Stages, has_left: Callable[[], bool]) -> Planned:
        """The best, after the best one so far was bettered; of equals the one that was there."""
        ranked = sorted(scores, key=lambda one: (scores[one], one))
        self._try(scores, [bettered(quick, ranked[0], self._asked.effort, has_left)])
        return min(scores, key=lambda one: (scores[one], one != ranked[0], one))

    def _try(self, scores: dict[Planned, float], plans: Iterable[Planned]) -> None:
        for one in plans:
            if one not in scores:
                scores[one] = self.score(one)


class _Saved:
    """What others had simulated before, from now on: whoever asks for it would have had to simulate it himself."""

    def __init__(self, runs: Sequence[Runs]) -> None:
        self._before = [(one, dict(one.took_s)) for one in runs]
        for one in runs:
            one.asked.clear()

    def seconds(self) -> float:
        """Of all that was asked for and was there."""
        return sum(took_s.get(key, 0.0) for one, took_s in self._before for key in one.asked)
