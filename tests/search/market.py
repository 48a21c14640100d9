"""Deployments to choose from and requests for them; importable, as what is sent to processes must be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise import deploy, policy
from lengthwise.schema.deployment import Deployment, EngineLimits
from lengthwise.schema.plan import Limit, Plan
from lengthwise.schema.workload import Workload
from lengthwise.search import workers
from lengthwise.search.configuration_search import Options, Run, search
from lengthwise.search.limits import Question, SloLimits, objective
from lengthwise.search.load import Load
from lengthwise.search.objectives import Bench
from lengthwise.search.space import Space

TTFT = Limit("ttft.p90", 1.0)
THREE = Options(top=3, sensitivity=False)


@dataclass(frozen=True)
class Chat:
    """Poisson arrivals of lognormal lengths, independent for other offsets."""

    prompt: float = 800.0
    output: float = 60.0
    offset: int = 0

    def __call__(self, seed: int, n: int) -> Workload:
        rng = np.random.default_rng([self.offset, seed])
        return Workload(
            np.cumsum(rng.exponential(1.0, n)),
            np.clip(rng.lognormal(np.log(self.prompt), 0.7, n), 1, 2000).astype(int),
            np.clip(rng.lognormal(np.log(self.output), 0.7, n), 1, 500).astype(int),
        )


@dataclass(frozen=True)
class Build:
    """A replica from settings with short names."""

    model: str = "llama-3-8b"

    def __call__(self, settings: dict[str, Any]) -> Deployment:
        scheduler = policy.scheduler(settings.get("scheduler.policy", "vllm_v1"))
        if scheduler.memory == "reserve_max":
            scheduler = replace(scheduler, memory="paged")
        limits = EngineLimits(
            max_num_seqs=settings.get("engine.max_num_seqs", 64),
            max_num_batched_tokens=settings.get("engine.max_num_batched_tokens", 2048),
            max_model_len=4096,
        )
        return deploy(
            settings.get("deployment.model", self.model),
            settings.get("deployment.gpu", "H100"),
            tp=settings.get("deployment.tp", 1),
            scheduler=scheduler,
            limits=limits,
        )


SMALL = Space(
    {"deployment.gpu": ("A100-80GB", "H100"), "deployment.tp": (1, 2), "engine.max_num_seqs": (16, 64)},
    (
        {"scheduler.policy": ("vllm_v0", "orca")},
        {"scheduler.policy": ("sarathi",), "engine.max_num_batched_tokens": (512,)},
    ),
)


def question(name: str = "requests_per_dollar", *limits: Limit, **more: Any) -> Question:
    """A question, of a limit on TTFT where none is given."""
    slo = more.pop("slo", None)
    return Question(
        objective(name), SloLimits(limits or (TTFT,), slo), **{"precision": 0.1, "seeds": 4, "model_draws": 0} | more
    )


def bench(requested: Question, draw: Any = Chat(), build: Any = Build()) -> Bench:
    return Bench(build, Load(draw, "chat"), requested)


def ask(bench: Bench, space: Space = SMALL, options: Options = THREE, worker_pool: Any = None, **of_run: Any) -> Plan:
    """The plan of a search by ``crew``, or by one thread."""
    with workers.threads(1) as alone:
        run = Run(bench, worker_pool or alone, **of_run)
        return search("market", list(space.candidates()), space.values(), run, options)
