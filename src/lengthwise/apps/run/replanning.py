"""Plans the rest of a run when its output lengths or its times differ from the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lengthwise.apps.ledger.contracts import State
from lengthwise.apps.plan import PlanOptions, Space, plan
from lengthwise.apps.plan.draws import draw
from lengthwise.apps.plan.evaluate import PlanSimulation, simulate_plan, stages_of
from lengthwise.apps.plan.stages import Plans
from lengthwise.apps.run.job import PlanDeviation, RevisedPlan, RunPlan, simulated_run_plan
from lengthwise.apps.run.plan_tracking import MAX_CHECKS
from lengthwise.schema.app import Floats, Ints, TaskDraw, Tasks

if TYPE_CHECKING:
    from lengthwise.workload import Marginal

LEVELS = 4096
PRIOR_ANSWERS = 20.0  # weight of the planned length distribution, in observed outputs
_RATIO_ANSWERS = 5.0
UNKNOWN_TOKENS = 2**40  # length of a model without a known distribution: beyond any limit
FALSE_ALARMS = 0.01  # maximum share of runs that get a new plan although their lengths are as planned
MIN_CHANGE = 0.2  # a smaller difference of the means does not justify a new plan
MIN_GAIN = 0.05  # a new plan must shorten what is left by this share, and by more than the noise over draws
_DRAWS = 4


@dataclass(frozen=True, eq=False)
class LengthDistribution:
    """A distribution of output lengths. ``survival`` [k] is the probability of more than ``values`` [k] tokens."""

    values: Floats
    survival: Floats

    @classmethod
    def of(cls, marginal: Marginal | None) -> LengthDistribution:
        """Return a planned distribution on a grid of quantiles. For None, outputs are as long as the limits allow."""
        if marginal is None:
            return cls(np.array([float(UNKNOWN_TOKENS)]), np.zeros(1))
        tokens = np.maximum(np.rint(marginal.quantile((np.arange(LEVELS) + 0.5) / LEVELS)), 1.0)
        values, counts = np.unique(tokens, return_counts=True)
        return cls(values, 1.0 - np.cumsum(counts) / LEVELS)

    def longer_than(self, tokens: npt.ArrayLike) -> Floats:
        """Return the probability that an output has more than this many tokens."""
        at = np.searchsorted(self.values, tokens, side="right")
        return np.asarray(np.concatenate([[1.0], self.survival])[at])

    def conditional_quantile(self, level: Floats, above: Ints) -> Ints:
        """Return quantiles of the lengths above ``above``, [n], or 2 x ``above`` where no length is larger."""
        left = self.longer_than(above)
        at = np.searchsorted(-self.survival, -(left * (1.0 - level)), side="left")
        tokens = self.values[np.minimum(at, len(self.values) - 1)]
        return np.where(left > 0, np.maximum(tokens, above + 1), 2 * np.maximum(above, 1)).astype(np.int64)

    def mean(self, limit: float) -> float:
        """Return the mean of the lengths if each is at most ``limit``."""
        mass = -np.diff(self.survival, prepend=1.0)
        return float((np.minimum(self.values, limit) * mass).sum())


@dataclass(frozen=True, eq=False)
class ObservedLengths:
    """Output lengths of one model."""

    completed: Floats  # [n] tokens of outputs that ended by themselves
    censored: Floats  # [m] tokens so far of all other outputs, which are unfinished or were cut by a limit

    def at_risk(self, tokens: Floats) -> Floats:
        """Return the number of outputs with at least this many tokens, [k]."""
        parts = (np.sort(self.completed), np.sort(self.censored))
        return np.asarray(sum(len(part) - np.searchsorted(part, tokens, side="left") for part in parts), float)


def updated(prior: LengthDistribution, observed: ObservedLengths) -> LengthDistribution:
    """Return the prior updated by observations (Kaplan-Meier). The prior weighs as much as ``PRIOR_ANSWERS`` outputs.

    This is the mean of a beta-Stacy process (Walker and Muliere 1997). Since long outputs cannot be observed early, the
    hazards of the prior are first scaled by the observed ratio (proportional hazards). Probability beyond all
    observations and the prior goes to twice the longest length.
    """
    completed, expected, _ = _completions(prior, observed)
    scale = (completed + _RATIO_ANSWERS) / (expected + _RATIO_ANSWERS)
    prior = LengthDistribution(prior.values, prior.survival**scale)
    values = np.union1d(prior.values, observed.completed)
    before = np.concatenate([[1.0], prior.longer_than(values)])
    counts = np.bincount(np.searchsorted(values, observed.completed), minlength=len(values))
    weight = PRIOR_ANSWERS * -np.diff(before)
    risk = PRIOR_ANSWERS * before[:-1] + observed.at_risk(values)
    hazard = np.divide(weight + counts, risk, out=np.zeros(len(values)), where=risk > 0)
    survival = np.cumprod(1.0 - np.clip(hazard, 0.0, 1.0))
    if survival[-1] > 1.0 / LEVELS:
        longest = 2.0 * max(values[-1], observed.censored.max(initial=0.0))
        return LengthDistribution(np.append(values, longest), np.append(survival, 0.0))
    return LengthDistribution(values, np.append(survival[:-1], 0.0))


def has_changed(prior: LengthDistribution, observed: ObservedLengths, false_alarm: float) -> bool:
    """Return whether lengths differ from the prior. If they do not, True has at most the probability ``false_alarm``.

    The test is a one-sample log-rank test. The number of completions minus the number expected from the tokens so far
    is a martingale, which Bernstein's inequality bounds.
    """
    completed, expected, variance = _completions(prior, observed)
    log = math.log(2.0 / false_alarm)
    return abs(completed - expected) > log / 3 + math.sqrt(log * log / 9 + 2.0 * variance * log)


def _completions(prior: LengthDistribution, observed: ObservedLengths) -> tuple[int, float, float]:
    """Return the number of completions, the number expected from the tokens so far, and the variance of completions."""
    before = np.concatenate([[1.0], prior.survival])[:-1]
    hazard = np.clip(-np.diff(prior.survival, prepend=1.0) / np.maximum(before, 1e-12), 0.0, 1.0)
    risk = observed.at_risk(prior.values)
    return len(observed.completed), float((hazard * risk).sum()), float((hazard * (1.0 - hazard) * risk).sum())


CompletedRows = Sequence[tuple[int, State, int, int]]  # (task, state, prompt tokens, output tokens) of finished tasks


@dataclass(frozen=True, eq=False)
class RemainingTasks:
    """The unfinished tasks. The tokens so far of each output (``written`` [k]) are now part of the task's prompt."""

    tasks: Tasks
    written: Ints

    def draw(self, lengths: Sequence[LengthDistribution], max_model_lens: Sequence[int], seed: int) -> TaskDraw:
        """Sample which of the tasks are present, and the lengths of their outputs."""
        tasks = self.tasks
        level = np.random.default_rng((seed, 1)).random(len(tasks))
        tokens = np.ones(len(tasks), np.int64)
        for model, distribution in enumerate(lengths):
            own = np.flatnonzero(tasks.model == model)
            tokens[own] = distribution.conditional_quantile(level[own], self.written[own]) - self.written[own]
        tokens = np.where(tasks.known_tokens > 0, tasks.known_tokens, np.minimum(tokens, tasks.max_tokens))
        known = replace(tasks, known_tokens=np.maximum(tokens, 1))
        return draw(known, [None] * len(lengths), max_model_lens, (seed, 2))


def remaining(tasks: Tasks, completed: CompletedRows, written: Mapping[int, int]) -> RemainingTasks:
    """Return the tasks that have not finished. ``written`` are the tokens of unfinished outputs, by task."""
    place, state, _, output = _columns(completed)
    finished = np.zeros(len(tasks), bool)
    finished[place] = True
    tokens = np.zeros(len(tasks), np.int64)
    tokens[place] = output
    had = np.zeros(len(tasks), np.int64)
    had[list(written)] = list(written.values())
    left = np.flatnonzero(~finished)
    had = had[left]
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    # Outputs of finished parents are prompt tokens of their children from now on.
    inserted = np.flatnonzero(finished[tasks.parent] & (tasks.shown > 0))
    added = tasks.shown[inserted] * tokens[tasks.parent[inserted]]
    shown = np.bincount(child[inserted], added, len(tasks)).astype(np.int64)
    number = np.cumsum(~finished) - 1
    edges = np.flatnonzero(~finished[child] & ~finished[tasks.parent])
    chance = tasks.coins.chance.copy()
    for outcome, probability in ((State.SKIPPED, 0.0), (State.DONE, 1.0)):
        coins = tasks.random_draw[place[state == outcome]]
        chance[coins[coins >= 0]] = probability
    unchanged = ("call", "model", "row", "round", "index", "random_draw")
    known = tasks.known_tokens[left]
    rest = replace(
        tasks,
        **{name: getattr(tasks, name)[left] for name in unchanged},
        prompt_tokens=tasks.prompt_tokens[left] + shown[left] + had,
        max_tokens=np.maximum(tasks.max_tokens[left] - had, 1),
        known_tokens=np.where(known > 0, np.maximum(known - had, 1), 0),
        parent_start=np.searchsorted(number[child[edges]], np.arange(len(left) + 1)).astype(np.int64),
        parent=number[tasks.parent[edges]],
        shown=tasks.shown[edges],
        coins=replace(tasks.coins, chance=chance),
    )
    return RemainingTasks(rest, had)


def _columns(completed: CompletedRows) -> tuple[Ints, Ints, Ints, Ints]:
    rows = np.array([tuple(map(int, row)) for row in completed], np.int64).reshape(-1, 4)
    return rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]


def observed_lengths(
    tasks: Tasks, completed: CompletedRows, written: Mapping[int, int], max_model_lens: Sequence[int]
) -> list[ObservedLengths]:
    """Return the lengths of each model's outputs, without tasks whose lengths were known beforehand."""
    place, state, prompt, output = _columns(completed)
    unknown = (state == State.DONE) & (tasks.known_tokens[place] == 0)
    place, prompt, output = place[unknown], prompt[unknown], output[unknown]
    model = tasks.model[place]
    at_limit = (output >= tasks.max_tokens[place]) | (prompt + output >= np.asarray(max_model_lens)[model])
    open_ = np.array(list(written), np.int64)
    so_far = np.array(list(written.values()), np.float64)
    unknown = tasks.known_tokens[open_] == 0
    open_, so_far = open_[unknown], so_far[unknown]
    observed = []
    for m in range(len(max_model_lens)):
        censored = np.concatenate([output[at_limit & (model == m)] - 1.0, so_far[tasks.model[open_] == m]])
        observed.append(ObservedLengths(output[~at_limit & (model == m)].astype(np.float64), censored))
    return observed


@dataclass(eq=False)
class Replanner:
    """Plans the rest of a run, in which finished tasks have known lengths and unfinished outputs continue."""

    tasks: Tasks  # tasks of the run in the order of the ledger
    # Planned distributions by model. For None, outputs are as long as the limits allow.
    lengths: Sequence[Marginal | None]
    max_model_lens: Sequence[int]  # context length of each model
    space: Space
    stages: tuple[Plans, ...]  # stages that the run follows
    reserve: Plans = ()  # plans of models that are in no stage
    options: PlanOptions = field(default_factory=lambda: PlanOptions(additional=()))
    seed: int = 0

    def __post_init__(self) -> None:
        self._current = [LengthDistribution.of(marginal) for marginal in self.lengths]
        self._priors = list(self._current)

    def __call__(self, deviation: PlanDeviation) -> RevisedPlan | None:
        """Return the plan to follow from now on, or None if the run is as planned."""
        observed = observed_lengths(self.tasks, deviation.completed, deviation.written, self.max_model_lens)
        false_alarm = FALSE_ALARMS / (MAX_CHECKS * len(self.max_model_lens))
        new = [updated(prior, lengths) for prior, lengths in zip(self._priors, observed, strict=True)]
        ratios = {}
        for model, (current, lengths) in enumerate(zip(self._current, observed, strict=True)):
            if has_changed(current, lengths, false_alarm):
                limit = float(self.tasks.max_tokens[self.tasks.model == model].max(initial=1))
                ratio = new[model].mean(limit) / current.mean(limit)
                if abs(ratio - 1.0) > MIN_CHANGE:
                    ratios[model] = ratio
        if not ratios and not deviation.is_off_time:
            return None
        rest = remaining(self.tasks, deviation.completed, deviation.written)
        if not len(rest.tasks):
            return None
        if ratios:
            times = ", ".join(f"{self.tasks.models[model]} {ratio:.2g} times" for model, ratio in ratios.items())
            reason = f"answers are not as long as planned ({times} as long)"
        else:
            when = "sooner" if deviation.at_s < deviation.planned_s else "after"
            reason = f"stage {deviation.stage + 1} ends {when} than planned"
        self._current = new
        return self._better(rest, deviation, reason)

    def _better(self, rest: RemainingTasks, deviation: PlanDeviation, reason: str) -> RevisedPlan:
        """Return the rest of the old plan or a new one, whichever is better from the current placement on."""
        draws = [rest.draw(self._current, self.max_model_lens, self.seed + number) for number in range(_DRAWS)]
        stages = stages_of(rest.tasks, draws, self.space)
        started = deviation.running, deviation.placement
        old = self.stages[deviation.stage :] or (deviation.running,)
        # Models that are in none of the old stages may have more tasks than planned: they use their last plan.
        planned = {plan_.model for plans in old for plan_ in plans}
        last = {plan_.model: plan_ for plans in self.stages for plan_ in plans}
        reserve = (*self.reserve, *(plan_ for model, plan_ in sorted(last.items()) if model not in planned))
        retained = [simulate_plan(one, old, reserve, started=started) for one in stages]
        found = plan(
            rest.tasks, draws, self.space.models, self.space.cluster, times=self.space.times, options=self.options
        )
        new = [simulate_plan(one, found.planned, found.reserve, started=started) for one in stages]
        old_s, new_s = (float(np.mean([one.end_s for one in simulated])) for simulated in (retained, new))
        gain_s = np.array([before.end_s - after.end_s for before, after in zip(retained, new, strict=True)])
        noise_s = 2.0 * gain_s.std(ddof=1) / math.sqrt(len(gain_s))
        if new_s < old_s * (1.0 - MIN_GAIN) and gain_s.mean() > noise_s:
            self.stages, self.reserve = found.planned, found.reserve
            reason += f"; a new plan for the rest takes {new_s:.0f} s rather than {old_s:.0f} s"
            return RevisedPlan(_run_plan(found.planned, found.reserve, new), True, reason)
        self.stages, self.reserve = old, reserve
        return RevisedPlan(_run_plan(old, reserve, retained), False, f"{reason}; no other plan would end sooner")


def _run_plan(stages: tuple[Plans, ...], reserve: Plans, simulated: Sequence[PlanSimulation]) -> RunPlan:
    ends = [one.end_s for one in simulated]
    return simulated_run_plan(stages, reserve, simulated[0].stages, (min(ends), float(np.mean(ends)), max(ends)))
