"""Evaluation of configurations by their settings, the same in every worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import DoesNotFitError, InputError, PolicyError, ProfileError, UnknownNameError
from lengthwise.schema.plan import Choice
from lengthwise.search.bounds import fits_any
from lengthwise.search.limits import AT_RATE, Question
from lengthwise.search.load import Load
from lengthwise.search.objectives import evaluation_of, rejected
from lengthwise.search.space import Settings

Build = Callable[[Mapping[str, Any]], Deployment]
REPLICAS = "deployment.replicas"


@dataclass(frozen=True)
class Task:
    """One step ("bound", "scout", "rank" or "shift") of one configuration's evaluation.

    ``extra`` holds arguments of the step: a threshold of ``scout`` and ``rank``; metric and factor of ``shift``.

    """

    step: str
    choice: Choice
    extra: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Bench:
    """Turns settings into results.

    ``build`` maps settings to a deployment of one replica; it raises InputError where it cannot run.

    """

    build: Build
    load: Load
    question: Question

    def __call__(self, task: Task) -> Choice:
        """Return the choice after one step of its evaluation."""
        choice, question, extra = task.choice, self.question, task.extra
        if task.step == "bound":
            return self._bound(choice)
        if task.step == "shift":
            question, extra = replace(question, promises=question.promises.with_bound(*extra)), ()
        evaluation = evaluation_of(self._deployment(choice.settings), self.load, question)
        step: Callable[..., Choice] = getattr(evaluation, task.step)
        return step(choice, *extra)

    def _bound(self, choice: Choice) -> Choice:
        """Return a configuration with its bound in closed form: PRUNED until it is simulated, or REJECTED."""
        try:
            deployment = self._deployment(choice.settings)
        except (UnknownNameError, PolicyError):
            raise  # an error in the question, not a configuration that cannot run
        except InputError as error:
            regions = {DoesNotFitError: "does not fit in memory", ProfileError: "is not in the profile"}
            region = next((name for kind, name in regions.items() if isinstance(error, kind)), "cannot be built")
            return rejected(choice, str(error), region)
        parallel, max_gpus = deployment.parallel, self.question.max_gpus
        choice = replace(choice, gpus=parallel.gpus, price_per_hour_usd=deployment.price_per_hour_usd)
        if parallel.gpus > max_gpus or parallel.gpus == 0:
            gpus = parallel.tp * parallel.pp * max(parallel.replicas, 1)
            reason = f"it takes {gpus} GPUs, and at most {max_gpus} are allowed"
            return rejected(choice, reason, f"takes more than {max_gpus} GPUs", gpus=gpus)
        if not fits_any(deployment, self.load):
            reason = f"every prompt reaches max_model_len ({deployment.max_model_len}) or is rejected"
            return rejected(choice, reason, "takes no request")
        return evaluation_of(deployment, self.load, self.question).bound(choice)

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
