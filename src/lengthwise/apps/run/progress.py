"""How far a run is: a snapshot for whoever shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.apps.ledger.contracts import ENDED, State
from lengthwise.schema.app import ModelPlan, Replica

if TYPE_CHECKING:
    from lengthwise.apps.run._work import Berth
    from lengthwise.apps.run.contracts import Job
    from lengthwise.apps.run.following import Following
    from lengthwise.apps.run.line import Line


@dataclass(frozen=True)
class Event:
    """Something that happened to an engine or the plan: "start", "wake", "ready", "sleep", "stop", "died", "replan".

    Attributes:
        at_s: Since the start.
        what: Of these.
        model: By number; -1: of none.
        gpus: Of the replica.
        about: The engine, in a few words.
    """

    at_s: float
    what: str
    model: int
    gpus: Replica
    about: str


@dataclass(frozen=True)
class ModelProgress:
    """One model.

    Attributes:
        name: As the application calls it.
        state: "runs", "starts", "waits" (for its turn) or "finished".
        total: Tasks.
        states: Of them, by state.
        going: Requests under way.
        tokens: Output tokens that were written since the start.
        tokens_per_s: Since the start of the run, of the time in which it ran.
        plan: Under which it runs.
        gpus: Of its replicas.
    """

    name: str
    state: str
    total: int
    states: Mapping[State, int]
    going: int
    tokens: int
    tokens_per_s: float
    plan: ModelPlan | None
    gpus: tuple[Replica, ...]

    @property
    def ended(self) -> int:
        """Tasks that have ended."""
        return sum(self.states.get(state, 0) for state in ENDED)


@dataclass(frozen=True)
class Progress:
    """The whole run.

    Attributes:
        at_s: Seconds since the start.
        stage: Of the plan, from 0.
        stages: How many it has.
        models: Each of them.
        share: Of the work, by expected tokens.
        left_s: Seconds left, and as low and high as the plan was unsure; None: nobody can tell yet.
    """

    at_s: float
    stage: int
    stages: int
    models: tuple[ModelProgress, ...]
    share: float
    left_s: tuple[float, float, float] | None


def snapshot(
    job: Job,
    following: Following,
    lines: Sequence[Line],
    berths: Sequence[Berth],
    counts: Mapping[tuple[int, int, State], int],
    at_s: float,
) -> Progress:
    """How far a run is, from what its parts know."""
    names = job.layout.tasks.models
    models = tuple(
        _model(model, names[model], following, lines[model], berths, counts, at_s)
        for model in range(len(names))
    )
    share = worked(job, counts)
    guide = following.guide
    left = time_left(share, at_s, guide.ends_s[-1] if guide.ends_s else None, guide.slack)
    return Progress(at_s, following.now.stage, len(guide.stages), models, share, left)


def _model(
    model: int,
    name: str,
    following: Following,
    line: Line,
    berths: Sequence[Berth],
    counts: Mapping[tuple[int, int, State], int],
    at_s: float,
) -> ModelProgress:
    states: dict[State, int] = {}
    for (_, of, state), tasks in counts.items():
        if of == model:
            states[state] = states.get(state, 0) + tasks
    total = sum(states.values())
    mine = [berth for berth in berths if berth.plan.model == model]
    plan = next((plan for plan in following.now.plans if plan.model == model), None)
    if total == sum(states.get(state, 0) for state in ENDED):
        how = "finished"
    elif any(berth.engine is not None for berth in mine):
        how = "runs"
    else:
        how = "starts" if mine else "waits"
    gpus = tuple(berth.gpus for berth in mine)
    ran_s = line.ran_s(at_s)
    rate = line.tokens / ran_s if ran_s > 0 else 0.0
    return ModelProgress(name, how, total, states, line.going, line.tokens, rate, plan, gpus)


def worked(job: Job, counts: Mapping[tuple[int, int, State], int]) -> float:
    """The share of the work that is done, each task of a call and model taken as the mean of them."""
    tasks = job.layout.tasks
    pairs = len(job.layout.pairs)
    sums = np.bincount(tasks.call, weights=job.expected_tokens, minlength=pairs)
    numbers = np.maximum(np.bincount(tasks.call, minlength=pairs), 1)
    mean = dict(zip(job.layout.pairs, (sums / numbers).tolist(), strict=True))
    done = sum(n * mean[call, model] for (call, model, state), n in counts.items() if state in ENDED)
    whole = float(sums.sum())
    return min(1.0, done / whole) if whole > 0 else 1.0


def time_left(
    share: float, at_s: float, planned_s: float | None, slack: tuple[float, float]
) -> tuple[float, float, float] | None:
    """Seconds left with an interval: by the plan's clock at first, by what was measured the further the run is."""
    if share >= 1.0:
        return 0.0, 0.0, 0.0
    measured_s = at_s * (1.0 - share) / share if share > 0.0 else None
    by_plan_s = None if planned_s is None else max(0.0, planned_s - at_s)
    if measured_s is None or by_plan_s is None:
        known = by_plan_s if measured_s is None else measured_s
        return None if known is None else (known, known * slack[0], known * slack[1])
    left_s = share * measured_s + (1.0 - share) * by_plan_s
    return left_s, left_s * slack[0], left_s * slack[1]
