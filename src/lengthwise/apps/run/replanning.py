"""What is left of a run planned anew, once its lengths or its clock have left what was planned with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lengthwise.apps.ledger.contracts import State
from lengthwise.apps.plan import RequestSpec, Space, plan
from lengthwise.apps.plan.draws import draw
from lengthwise.apps.plan.evaluate import Simulated, play, stages_of
from lengthwise.apps.plan.stages import Plans
from lengthwise.apps.run.job import SLACK, PlanDeviation, RevisedPlan, RunPlan, ends_s
from lengthwise.apps.run.plan_tracking import LOOKS
from lengthwise.schema.app import Flags, TaskDraw, Tasks

if TYPE_CHECKING:
    from lengthwise.workload import Marginal

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LEVELS = 4096
PRIOR_ANSWERS = 20.0
"""For so many answers that were seen stands what was planned with."""
_RATIO_ANSWERS = 5.0
ENDLESS = 2**40
"""Of a model of which nothing is known: longer than any limit."""


@dataclass(frozen=True, eq=False)
class Spread:
    """A distribution of lengths.

    Attributes:
        values: [k] tokens, ascending.
        out_of_range: [k] share that is longer than each; nothing behind the last.
    """

    values: Floats
    out_of_range: Floats

    @classmethod
    def of(cls, marginal: Marginal | None) -> Spread:
        """What is planned with; None: as long as may be."""
        if marginal is None:
            return cls(np.array([float(ENDLESS)]), np.zeros(1))
        tokens = np.maximum(np.rint(marginal.quantile((np.arange(LEVELS) + 0.5) / LEVELS)), 1.0)
        values, counts = np.unique(tokens, return_counts=True)
        return cls(values, 1.0 - np.cumsum(counts) / LEVELS)

    def longer_than(self, tokens: npt.ArrayLike) -> Floats:
        """Share that is longer."""
        place = np.searchsorted(self.values, tokens, side="right")
        return np.asarray(np.concatenate([[1.0], self.out_of_range])[place])

    def drawn(self, level: Floats, above: Ints) -> Ints:
        """[n] lengths of answers that already have so many tokens; twice as many where none was thought so long."""
        left = self.longer_than(above)
        place = np.searchsorted(-self.out_of_range, -(left * (1.0 - level)), side="left")
        tokens = self.values[np.minimum(place, len(self.values) - 1)]
        return np.where(left > 0, np.maximum(tokens, above + 1), 2 * np.maximum(above, 1)).astype(np.int64)

    def mean(self, most: float) -> float:
        """Of lengths that are cut at a limit."""
        mass = -np.diff(self.out_of_range, prepend=1.0)
        return float((np.minimum(self.values, most) * mass).sum())


@dataclass(frozen=True, eq=False)
class Seen:
    """Answers of one model.

    Attributes:
        completed: [n] tokens of those that ended by themselves.
        cut: [m] tokens that others have at least: they go on, or came to their limit.
    """

    completed: Floats
    cut: Floats

    def at_risk(self, tokens: Floats) -> Floats:
        """[k] how many were seen to have at least so many tokens."""
        parts = (np.sort(self.completed), np.sort(self.cut))
        return np.asarray(sum(len(part) - np.searchsorted(part, tokens, side="left") for part in parts), float)


def updated(prior: Spread, seen: Seen) -> Spread:
    """The distribution after what was seen: Kaplan-Meier's, with what was planned with as ``PRIOR_ANSWERS`` answers.

    (The mean of a beta-Stacy process, Walker and Muliere 1997.) What was planned with has its hazards scaled as those
    seen were (proportional hazards): long answers are not seen to end before they could. What no one was seen to end
    at, and nothing was planned for, ends at twice the longest.
    """
    ended, expected, _ = _against(prior, seen)
    prior = Spread(prior.values, prior.out_of_range ** ((ended + _RATIO_ANSWERS) / (expected + _RATIO_ANSWERS)))
    values = np.union1d(prior.values, seen.completed)
    before = np.concatenate([[1.0], prior.longer_than(values)])
    ends = np.bincount(np.searchsorted(values, seen.completed), minlength=len(values))
    weight = PRIOR_ANSWERS * -np.diff(before)
    risk = PRIOR_ANSWERS * before[:-1] + seen.at_risk(values)
    hazard = np.divide(weight + ends, risk, out=np.zeros(len(values)), where=risk > 0)
    beyond = np.cumprod(1.0 - np.clip(hazard, 0.0, 1.0))
    if beyond[-1] > 1.0 / LEVELS:
        longest = 2.0 * max(values[-1], seen.cut.max(initial=0.0))
        return Spread(np.append(values, longest), np.append(beyond, 0.0))
    return Spread(values, np.append(beyond[:-1], 0.0))


def has_moved(prior: Spread, seen: Seen, chance: float) -> bool:
    """Whether answers end otherwise than planned, wrongly said with at most this chance.

    Answers that ended less those that should have by the tokens written so far, the cut ones' too, are a martingale
    (the one-sample log-rank test); Bernstein's inequality holds it.
    """
    ended, expected, variance = _against(prior, seen)
    loud = math.log(2.0 / chance)
    return abs(ended - expected) > loud / 3 + math.sqrt(loud * loud / 9 + 2.0 * variance * loud)


def _against(prior: Spread, seen: Seen) -> tuple[int, float, float]:
    """Answers that ended, those that should have by the tokens that were written, and the variance of those."""
    before = np.concatenate([[1.0], prior.out_of_range])[:-1]
    hazard = np.clip(-np.diff(prior.out_of_range, prepend=1.0) / np.maximum(before, 1e-12), 0.0, 1.0)
    risk = seen.at_risk(prior.values)
    return len(seen.completed), float((hazard * risk).sum()), float((hazard * (1.0 - hazard) * risk).sum())


EndedRows = Sequence[tuple[int, State, int, int]]
"""(task, state, prompt tokens, output tokens) of all that have ended."""


@dataclass(frozen=True, eq=False)
class Rest:
    """What is left.

    Attributes:
        tasks: Those that have not ended.
        written: [k] tokens of their answers so far, which stand in their prompts now.
    """

    tasks: Tasks
    written: Ints

    def draws(self, spreads: Sequence[Spread], longest: Sequence[int], seeds: Sequence[int]) -> list[TaskDraw]:
        """Ways in which it may turn out."""
        return [self._draw(spreads, longest, seed) for seed in seeds]

    def _draw(self, spreads: Sequence[Spread], longest: Sequence[int], seed: int) -> TaskDraw:
        tasks = self.tasks
        level = np.random.default_rng((seed, 1)).random(len(tasks))
        tokens = np.ones(len(tasks), np.int64)
        for model, spread in enumerate(spreads):
            mine = np.flatnonzero(tasks.model == model)
            tokens[mine] = spread.drawn(level[mine], self.written[mine]) - self.written[mine]
        tokens = np.where(tasks.known_tokens > 0, tasks.known_tokens, np.minimum(tokens, tasks.max_tokens))
        known = replace(tasks, known_tokens=np.maximum(tokens, 1))
        return draw(known, [None] * len(spreads), longest, (seed, 2))


def rest_of(tasks: Tasks, completed: EndedRows, written: Mapping[int, int]) -> Rest:
    """What is left of tasks when some have ended and others have so many tokens already."""
    place, state, _, output = _columns(completed)
    over = np.zeros(len(tasks), bool)
    over[place] = True
    tokens = np.zeros(len(tasks), np.int64)
    tokens[place] = output
    had = np.zeros(len(tasks), np.int64)
    had[list(written)] = list(written.values())
    left = np.flatnonzero(~over)
    had = had[left]
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    put = np.flatnonzero(over[tasks.parent] & (tasks.shown > 0))
    shown = np.bincount(child[put], tasks.shown[put] * tokens[tasks.parent[put]], len(tasks)).astype(np.int64)
    number = np.cumsum(~over) - 1
    stays = np.flatnonzero(~over[child] & ~over[tasks.parent])
    start = np.searchsorted(number[child[stays]], np.arange(len(left) + 1)).astype(np.int64)
    same = ("call", "model", "row", "round", "index", "random_draw")
    known = tasks.known_tokens[left]
    return Rest(
        replace(
            tasks,
            **{name: getattr(tasks, name)[left] for name in same},
            prompt_tokens=tasks.prompt_tokens[left] + shown[left] + had,
            max_tokens=np.maximum(tasks.max_tokens[left] - had, 1),
            known_tokens=np.where(known > 0, np.maximum(known - had, 1), 0),
            parent_start=start,
            parent=number[tasks.parent[stays]],
            shown=tasks.shown[stays],
            coin_chance=_fallen(tasks, place, state),
        ),
        had,
    )


def _columns(completed: EndedRows) -> tuple[Ints, Ints, Ints, Ints]:
    rows = np.array([tuple(map(int, row)) for row in completed], np.int64).reshape(-1, 4)
    return rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]


def _fallen(tasks: Tasks, place: Ints, state: Ints) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Chances of coins, certain ones of those that have fallen."""
    chance = tasks.coin_chance.copy()
    for which, sure in ((State.SKIPPED, 0.0), (State.DONE, 1.0)):
        coins = tasks.random_draw[place[state == which]]
        chance[coins[coins >= 0]] = sure
    return chance


def seen_of(tasks: Tasks, completed: EndedRows, written: Mapping[int, int], longest: Sequence[int]) -> list[Seen]:
    """What was seen of each model's lengths; tasks whose lengths were known beforehand tell nothing."""
    place, state, prompt, output = _columns(completed)
    free: Flags = (state == State.DONE) & (tasks.known_tokens[place] == 0)
    place, prompt, output = place[free], prompt[free], output[free]
    model = tasks.model[place]
    full = (output >= tasks.max_tokens[place]) | (prompt + output >= np.asarray(longest)[model])
    some = np.array(list(written), np.int64)
    going = np.array(list(written.values()), np.float64)
    counts = tasks.known_tokens[some] == 0
    some, going = some[counts], going[counts]
    found = []
    for m in range(len(longest)):
        at_limit = output[full & (model == m)] - 1.0
        cut = np.concatenate([at_limit, going[tasks.model[some] == m]])
        found.append(Seen(output[~full & (model == m)].astype(np.float64), cut))
    return found


if TYPE_CHECKING:
    from lengthwise.workload import Marginal

FALSE_ALARMS = 0.01
"""The share of runs whose lengths are as planned that are looked at anew for their lengths all the same, at most."""
LEAST_CHANGE = 0.2
"""Means that are less apart than this are not worth a new plan."""
MIN_GAIN = 0.05
"""A new plan is followed where it ends sooner by this share of what is left, and by more than chance over draws."""
_DRAWS = 4


@dataclass(eq=False)
class Replanner:
    """Plans anew from where a run is: what has ended with its lengths, what is under way from its tokens on.

    Attributes:
        tasks: Of the run, by place.
        lengths: As planned with, by model; None: as long as may be.
        longest: Context of each model.
        space: Plans of its models on the GPUs.
        stages: That are followed.
        spare: Of models in none of them.
        requested: How to plan.
        seed: Of all draws.
    """

    tasks: Tasks
    lengths: Sequence[Marginal | None]
    longest: Sequence[int]
    space: Space
    stages: tuple[Plans, ...]
    reserve: Plans = ()
    requested: RequestSpec = field(default_factory=lambda: RequestSpec(additional=()))
    seed: int = 0

    def __post_init__(self) -> None:
        self._spreads = [Spread.of(one) for one in self.lengths]
        self._priors = list(self._spreads)

    def __call__(self, deviation: PlanDeviation) -> RevisedPlan | None:
        """What to follow from there on; None: all is as planned."""
        seen = seen_of(self.tasks, deviation.completed, deviation.written, self.longest)
        moved = [m for m, one in enumerate(seen) if self._has_moved(m, one)]
        if not moved and not deviation.is_late:
            return None
        rest = rest_of(self.tasks, deviation.completed, deviation.written)
        if not len(rest.tasks):
            return None
        about = self._description(moved, seen, deviation)
        self._spreads = [updated(prior, one) for prior, one in zip(self._priors, seen, strict=True)]
        return self._revised(rest, deviation, about)

    def _has_moved(self, model: int, seen: Seen) -> bool:
        chance = FALSE_ALARMS / (LOOKS * len(self.longest))
        before = self._spreads[model]
        if not has_moved(before, seen, chance):
            return False
        return abs(self._ratio(model, seen) - 1.0) > LEAST_CHANGE

    def _ratio(self, model: int, seen: Seen) -> float:
        """Mean length as seen over that which was planned with."""
        mine = self.tasks.max_tokens[self.tasks.model == model]
        most = float(mine.max(initial=1))
        return updated(self._priors[model], seen).mean(most) / self._spreads[model].mean(most)

    def _description(self, moving: Sequence[int], seen: Sequence[Seen], deviation: PlanDeviation) -> str:
        if not moving:
            way = "sooner" if deviation.at_s < deviation.planned_s else "after"
            return f"stage {deviation.stage + 1} ends {way} than planned"
        told = (f"{self.tasks.models[m]} {self._ratio(m, seen[m]):.2g} times" for m in moving)
        return f"answers are not as long as planned: of {', '.join(told)}"

    def _revised(self, rest: Rest, deviation: PlanDeviation, description: str) -> RevisedPlan:
        """The better one of what is left of the old plan and a new one, both from where engines are now."""
        draws = rest.draws(self._spreads, self.longest, range(self.seed, self.seed + _DRAWS))
        worlds = stages_of(rest.tasks, draws, self.space)
        begun = deviation.running, deviation.placement
        old = self.stages[deviation.stage :] or (deviation.running,)
        spare = (*self.reserve, *_last(self.stages, old))
        kept = [play(one, old, spare, started=begun) for one in worlds]
        cluster, times = self.space.cluster, self.space.times
        made = plan(rest.tasks, draws, self.space.models, cluster, times=times, requested=self.requested)
        new = [play(one, made.planned, made.reserve, started=begun) for one in worlds]
        kept_s, new_s = _mean_s(kept), _mean_s(new)
        if new_s < kept_s * (1.0 - MIN_GAIN) and _sooner_for_sure(new, kept):
            self.stages, self.reserve = made.planned, made.reserve
            return RevisedPlan(
                _guide(made.planned, made.reserve, new),
                True,
                f"{description}; the rest is planned anew: {new_s:.0f} s rather than {kept_s:.0f} s",
            )
        self.stages, self.reserve = old, spare
        return RevisedPlan(_guide(old, spare, kept), False, f"{description}; no other plan would end sooner")


def _last(stages: Sequence[Plans], ahead: Sequence[Plans]) -> Plans:
    """The last plans of models that are in none of the stages ahead: they may have more to do than was planned."""
    there = {plan_.model for plans in ahead for plan_ in plans}
    last = {plan_.model: plan_ for plans in stages for plan_ in plans}
    return tuple(plan_ for model, plan_ in sorted(last.items()) if model not in there)


def _mean_s(simulated: Sequence[Simulated]) -> float:
    return float(np.mean([one.end_s for one in simulated]))


def _sooner_for_sure(new: Sequence[Simulated], retained: Sequence[Simulated]) -> bool:
    """Whether the difference over the same draws is beyond twice its standard error."""
    gain_s = np.array([old.end_s - one.end_s for one, old in zip(new, retained, strict=True)])
    return bool(gain_s.mean() > 2.0 * gain_s.std(ddof=1) / math.sqrt(len(gain_s)))


def _guide(stages: tuple[Plans, ...], reserve: Plans, simulated: Sequence[Simulated]) -> RunPlan:
    ends = [one.end_s for one in simulated]
    mean_s = max(float(np.mean(ends)), 1e-9)
    slack = (min(ends) / mean_s * SLACK[0], max(ends) / mean_s * SLACK[1])
    return RunPlan(stages, reserve, ends_s(stages, simulated[0].stages), slack)
