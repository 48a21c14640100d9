"""One configuration is bounded, scouted and measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import DoesNotFitError, InputError, PolicyError, ProfileError, UnknownNameError
from lengthwise.schema.plan import Choice, Status
from lengthwise.search import makespan, objective_at_capacity, objective_at_rate
from lengthwise.search.bounds import fits_any
from lengthwise.search.limits import AT_RATE, Question
from lengthwise.search.load import Load
from lengthwise.search.space import Settings, settings_key

Build = Callable[[Mapping[str, Any]], Deployment]
REPLICAS = "deployment.replicas"

_KINDS: dict[str, Any] = {
    "requests_per_dollar": objective_at_capacity,
    "cost_at_rate": objective_at_rate,
    "fewest_gpus": objective_at_rate,
    "goodput": objective_at_rate,
    "energy": objective_at_capacity,
    "makespan": makespan,
}


@dataclass(frozen=True)
class Task:
    """One step of one configuration's evaluation; ``extra`` are the step's own arguments."""

    step: str
    choice: Choice
    extra: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Bench:
    """What turns settings into evidence, the same in every worker.

    Attributes:
        build: From settings to a deployment of one replica; raises InputError where they cannot run.
        load: The requests.
        question: What is asked.
    """

    build: Build
    load: Load
    question: Question

    def bound(self, settings: Settings) -> Choice:
        """What closed forms say: PRUNED for now, with a bound, or REJECTED."""
        blank = Choice(settings_key(settings), "", settings, 0, 0.0, Status.PRUNED)
        try:
            deployment = self._deployment(settings)
        except (UnknownNameError, PolicyError):
            raise  # a slip in the question, not a configuration that cannot run
        except InputError as error:
            return replace(blank, status=Status.REJECTED, reason=str(error), region=_region(error))
        sized = replace(blank, gpus=deployment.parallel.gpus, price_per_hour_usd=deployment.price_per_hour_usd)
        if sized.gpus > self.question.max_gpus or sized.gpus == 0:
            return self._too_many(sized, deployment)
        if not fits_any(deployment, self.load):
            reason = f"every prompt reaches max_model_len ({deployment.max_model_len}) or is refused"
            return replace(sized, status=Status.REJECTED, reason=reason, region="takes no request")
        bounded: Choice = self._kind.bound(sized, deployment, self.load, self.question)
        return bounded

    def scout(self, choice: Choice, least: float = math.nan) -> Choice:
        """A quick look: SCOUTED; REJECTED if the limits break at any rate; PRUNED if below ``least``."""
        deployment = self._deployment(choice.settings)
        found: Choice = self._kind.scout(choice, deployment, self.load, self.question, least)
        return found

    def rank(self, choice: Choice, least: float = math.nan) -> Choice:
        """The whole answer: RANKED with its interval and load curve; SCOUTED if clearly below ``least``."""
        deployment = self._deployment(choice.settings)
        found: Choice = self._kind.rank(choice, deployment, self.load, self.question, least)
        return found

    def shift(self, choice: Choice, metric: str, factor: float) -> Choice:
        """A rough answer with one limit's bound multiplied; an objective of NaN where it cannot hold."""
        question = replace(self.question, promises=self.question.promises.with_bound(metric, factor))
        found: Choice = self._kind.shift(choice, self._deployment(choice.settings), self.load, question)
        return found

    def __call__(self, task: Task) -> Choice:
        """Does one step of one configuration's evaluation."""
        if task.step == "bound":
            return self.bound(task.choice.settings)
        step: Callable[..., Choice] = getattr(self, task.step)
        return step(task.choice, *task.extra)

    @property
    def _kind(self) -> Any:
        name = self.question.objective.name
        return objective_at_rate if self.question.rate_rps is not None and name == "energy" else _KINDS[name]

    def _deployment(self, settings: Settings) -> Deployment:
        """With as many replicas as the settings say; of one where the search itself finds their number."""
        one = self.build({key: value for key, value in settings.items() if key != REPLICAS})
        one.require_one_side("a search")
        wanted = settings.get(REPLICAS, "auto" if self.question.objective.name in AT_RATE else 1)
        if wanted == "auto":
            return one
        count = self.question.max_gpus // one.parallel.gpus if wanted == "fill" else int(wanted)
        return replace(one, parallel=replace(one.parallel, replicas=count))

    def _too_many(self, choice: Choice, deployment: Deployment) -> Choice:
        gpus = deployment.parallel.tp * deployment.parallel.pp * max(deployment.parallel.replicas, 1)
        return replace(
            choice,
            gpus=gpus,
            status=Status.REJECTED,
            reason=f"it takes {gpus} GPUs, and there may be {self.question.max_gpus}",
            region=f"takes more than {self.question.max_gpus} GPUs",
        )


def sized(deployment: Deployment, gpus: int) -> Deployment:
    """The deployment with as many replicas as make so many GPUs."""
    parallel = deployment.parallel
    return replace(deployment, parallel=replace(parallel, replicas=max(1, gpus // (parallel.tp * parallel.pp))))


def better(a: float, b: float, question: Question) -> bool:
    """Whether an objective is better than another; NaN is never better."""
    if math.isnan(a) or math.isnan(b):
        return not math.isnan(a) and math.isnan(b)
    return a > b if question.objective.higher_is_better else a < b


def _region(error: InputError) -> str:
    if isinstance(error, DoesNotFitError):
        return "does not fit in memory"
    if isinstance(error, ProfileError):
        return "is not in the profile"
    return "cannot be built"
