"""Evaluation of configurations by their settings, the same in every worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import DoesNotFitError, InputError, PolicyError, ProfileError, UnknownNameError
from lengthwise.schema.plan import Choice, Status
from lengthwise.search.bounds import fits_any
from lengthwise.search.limits import AT_RATE, Question
from lengthwise.search.load import Load
from lengthwise.search.objectives import AtCapacity, AtRate, Makespan
from lengthwise.search.space import Settings, settings_key

Build = Callable[[Mapping[str, Any]], Deployment]
REPLICAS = "deployment.replicas"

_EVALUATIONS: dict[str, type[AtCapacity | AtRate | Makespan]] = {
    "requests_per_dollar": AtCapacity,
    "cost_at_rate": AtRate,
    "fewest_gpus": AtRate,
    "goodput": AtRate,
    "energy": AtCapacity,
    "makespan": Makespan,
}


@dataclass(frozen=True)
class Task:
    """One step of one configuration's evaluation; ``extra`` holds arguments of the step."""

    step: str
    choice: Choice
    extra: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Bench:
    """Turns settings into results.

    Attributes:
        build: Maps settings to a deployment of one replica; raises InputError where it cannot run.
        load: The requests.
        question: The question that each configuration is evaluated for.
    """

    build: Build
    load: Load
    question: Question

    def bound(self, settings: Settings) -> Choice:
        """Return a configuration with its bound in closed form: PRUNED until it is simulated, or REJECTED."""
        choice = Choice(settings_key(settings), "", settings, 0, 0.0, Status.PRUNED)
        try:
            deployment = self._deployment(settings)
        except (UnknownNameError, PolicyError):
            raise  # an error in the question, not a configuration that cannot run
        except InputError as error:
            region = "cannot be built"
            if isinstance(error, DoesNotFitError):
                region = "does not fit in memory"
            elif isinstance(error, ProfileError):
                region = "is not in the profile"
            return replace(choice, status=Status.REJECTED, reason=str(error), region=region)
        parallel, max_gpus = deployment.parallel, self.question.max_gpus
        choice = replace(choice, gpus=parallel.gpus, price_per_hour_usd=deployment.price_per_hour_usd)
        if parallel.gpus > max_gpus or parallel.gpus == 0:
            gpus = parallel.tp * parallel.pp * max(parallel.replicas, 1)
            reason = f"it takes {gpus} GPUs, and at most {max_gpus} are allowed"
            region = f"takes more than {max_gpus} GPUs"
            return replace(choice, gpus=gpus, status=Status.REJECTED, reason=reason, region=region)
        if not fits_any(deployment, self.load):
            reason = f"every prompt reaches max_model_len ({deployment.max_model_len}) or is rejected"
            return replace(choice, status=Status.REJECTED, reason=reason, region="takes no request")
        return self._evaluation(deployment).bound(choice)

    def scout(self, choice: Choice, threshold: float = math.nan) -> Choice:
        """Return a rough result: SCOUTED; REJECTED if limits break at any rate; PRUNED if below ``threshold``."""
        return self._evaluation(self._deployment(choice.settings)).scout(choice, threshold)

    def rank(self, choice: Choice, threshold: float = math.nan) -> Choice:
        """Return an exact result: RANKED with interval and load curve; SCOUTED if clearly below ``threshold``."""
        return self._evaluation(self._deployment(choice.settings)).rank(choice, threshold)

    def shift(self, choice: Choice, metric: str, factor: float) -> Choice:
        """Return a rough result with one limit's bound multiplied; an objective of NaN where it cannot hold."""
        question = replace(self.question, promises=self.question.promises.with_bound(metric, factor))
        bench = replace(self, question=question)
        return bench._evaluation(self._deployment(choice.settings)).shift(choice)  # noqa: SLF001 - of this class

    def __call__(self, task: Task) -> Choice:
        """Return the choice after one step of its evaluation."""
        if task.step == "bound":
            return self.bound(task.choice.settings)
        step: Callable[..., Choice] = getattr(self, task.step)
        return step(task.choice, *task.extra)

    def _evaluation(self, deployment: Deployment) -> AtCapacity | AtRate | Makespan:
        kind = _EVALUATIONS[self.question.objective.name]
        if self.question.rate_rps is not None and self.question.objective.name == "energy":
            kind = AtRate
        return kind(deployment, self.load, self.question)

    def _deployment(self, settings: Settings) -> Deployment:
        """Return the deployment with the replicas of the settings; with one if the search finds their number."""
        one = self.build({key: value for key, value in settings.items() if key != REPLICAS})
        one.require_one_side("a search")
        replicas = settings.get(REPLICAS, "auto" if self.question.objective.name in AT_RATE else 1)
        if replicas == "auto":
            return one
        count = self.question.max_gpus // one.parallel.gpus if replicas == "fill" else int(replicas)
        return replace(one, parallel=replace(one.parallel, replicas=count))


def sized(deployment: Deployment, gpus: int) -> Deployment:
    """Return the deployment with the number of replicas that makes up ``gpus`` GPUs."""
    parallel = deployment.parallel
    return replace(deployment, parallel=replace(parallel, replicas=max(1, gpus // (parallel.tp * parallel.pp))))


def better(a: float, b: float, question: Question) -> bool:
    """Return whether objective ``a`` is better than ``b``; NaN is never better."""
    if math.isnan(a) or math.isnan(b):
        return not math.isnan(a) and math.isnan(b)
    return a > b if question.objective.higher_is_better else a < b
