"""A small laboratory: a tiny model, few requests, the plain engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest

from lengthwise import engine
from lengthwise.lab import Contestant, Question, lab
from lengthwise.schema.deployment import Deployment, EngineLimits, Scheduler
from lengthwise.schema.lab import LabTable
from lengthwise.schema.workload import Workload

SJF = Scheduler(rank="sjf", memory="paged_by_chunk")


@lru_cache(maxsize=8)
def deployed(batch: int) -> Deployment:
    limits = EngineLimits(max_num_seqs=batch, max_model_len=512)
    return engine.deploy("opt-125m", "A100-80GB", limits=limits, num_blocks=4096)


@dataclass(frozen=True)
class Bench:
    """Requests with long and short outputs; "noisy" and "reversed" predictors beside the oracle."""

    n: int = 40

    def requests(self, seed: int, predictor: str) -> Workload:
        rng = np.random.default_rng(seed)
        output = np.maximum(1, rng.lognormal(1.8, 0.9, self.n).astype(np.int64))
        arrival_s = np.cumsum(rng.exponential(1.0, self.n))
        made = Workload(arrival_s - arrival_s[0], np.full(self.n, 20), output)
        guess = {
            "": None,
            "oracle": output.astype(float),
            "noisy": output * rng.lognormal(0, 0.7, self.n),
            "reversed": 1.0 + output.max() - output,
        }[predictor]
        return replace(made, predicted_tokens=guess)

    def deployment(self, scheduler: Scheduler, batch: int) -> Deployment:
        return replace(deployed(batch), scheduler=scheduler)


class Together(Bench):
    """All requests at once: no rate could be stretched."""

    def requests(self, seed: int, predictor: str) -> Workload:
        made = super().requests(seed, predictor)
        return replace(made, arrival_s=np.zeros(len(made)))


class Constant(Bench):
    """Outputs of equal length, slots for all, and memory for a few."""

    def requests(self, seed: int, predictor: str) -> Workload:
        made = super().requests(seed, predictor)
        guess = None if made.predicted_tokens is None else np.full(len(made), 60.0)
        return replace(made, output_tokens=np.full(len(made), 60), predicted_tokens=guess)

    def deployment(self, scheduler: Scheduler, batch: int) -> Deployment:
        limits = EngineLimits(max_num_seqs=batch, max_model_len=256)
        served = engine.deploy("opt-125m", "A100-80GB", limits=limits, num_blocks=16)
        return replace(served, scheduler=scheduler)


class Cheating(Bench):
    """A predictor that shortens the requests."""

    def requests(self, seed: int, predictor: str) -> Workload:
        made = super().requests(seed, predictor)
        return replace(made, output_tokens=np.ones(len(made))) if predictor == "noisy" else made


def question(**changes: object) -> Question:
    requested = Question(
        policies=(Contestant("sjf", SJF),),
        predictors=("oracle", "noisy", "reversed"),
        loads=(2.0, 4.0),
        batch_sizes=(2,),
        seeds=4,
    )
    return replace(requested, **changes)


def answered(bench: Bench | None = None, **changes: object) -> LabTable:
    return lab(question(**changes), bench or Bench(), engine_name="reference")


@pytest.fixture(scope="session")
def table() -> LabTable:
    return answered()


@pytest.fixture(scope="session")
def small() -> SimpleNamespace:
    """What labs are made of here."""
    return SimpleNamespace(
        question=question, succeeded=answered, Bench=Bench, Together=Together, Cheating=Cheating, Constant=Constant
    )
