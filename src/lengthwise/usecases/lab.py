"""Runs a scenario's laboratory: is length-aware scheduling worth it at its loads?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lengthwise import engine, predict, search
from lengthwise import lab as laboratory
from lengthwise import policy as policies
from lengthwise.config.files import merged
from lengthwise.config.scenario import Scenario
from lengthwise.config.sections import LabPolicy, LabPredictor, LabSection
from lengthwise.config.variants import deployment, scheduler
from lengthwise.config.workload import DEFAULT_REQUESTS, LengthPrediction, length_prediction, load_of, source_of
from lengthwise.policy import PREDICTED
from lengthwise.schema.deployment import Deployment, Scheduler
from lengthwise.schema.errors import InputError
from lengthwise.schema.lab import ORACLE, LabTable, LoadUnit
from lengthwise.schema.workload import Workload

Progress = Callable[[int, int], None]
LOADS = (0.7, 0.9, 1.1)


def lab(scenario: Scenario, *, jobs: int | None = None, progress: Progress = lambda *_: None) -> LabTable:
    """The table of a scenario's laboratory, and its verdicts.

    Args:
        scenario: With a [lab].
        jobs: Runs at a time; None: one a CPU.
        progress: Called with runs done and runs in all.

    Raises:
        InputError: There is no [lab], or something of it does not work out; a note says where.
    """
    try:
        question, bench = _requested(scenario)
        if not engine.ready():
            engine.warm_up()  # else every thread would compile it
        with search.threads(jobs) as workers:
            return laboratory.lab(question, bench, each=workers.run, progress=progress)
    except InputError as error:
        error.add_note(f"in [lab] of {scenario.source}")
        raise


def _requested(scenario: Scenario) -> tuple[laboratory.Question, ScenarioBench]:
    section = _section(scenario)
    bench = ScenarioBench(scenario, {one.title: one for one in section.predictors})
    of_rates = section.rates is not None
    question = laboratory.Question(
        policies=tuple(_contestant(one, scenario) for one in section.policies if one.title != "fcfs"),
        predictors=tuple(bench.predictors),
        loads=tuple(section.rates or section.loads or LOADS),
        batch_sizes=tuple(section.batch_sizes or [scenario.engine.max_num_seqs]),
        seeds=min(section.seeds, bench.load.seeds or section.seeds),
        unit=LoadUnit.RPS if of_rates else LoadUnit(section.unit),
        base=_fcfs(scenario),
        name=scenario.name,
        metadata=_metadata(scenario, bench),
    )
    return question, bench


def _section(scenario: Scenario) -> LabSection:
    if scenario.lab is None:
        raise InputError(
            'a laboratory needs a table [lab], such as: [lab] policies = ["sjf", "isrtf"], predictors = ["oracle"], '
            "loads = [0.7, 0.9, 1.1]"
        )
    if scenario.variants:
        raise InputError(
            "a laboratory compares its own policies; take the [[variants]] out, or put them into lab.policies"
        )
    if scenario.predictor.kind != "none" or scenario.workload.predicted != "none":
        raise InputError("in a laboratory who predicts stands in lab.predictors; take the other predictions out")
    return scenario.lab


def _fcfs(scenario: Scenario) -> Scheduler:
    """The scenario's own way to form steps and give memory, first come first served."""
    own = scheduler(scenario)
    rank = own.rank if own.rank in ("fcfs", "fcfs_evicted_first") else "fcfs_evicted_first"
    return replace(own, rank=rank, leave="latest_admitted", takeover="never", binning=None, max_wait_s=float("inf"))


def _contestant(entry: LabPolicy, scenario: Scenario) -> laboratory.Contestant:
    given = entry.model_dump(exclude={"name", "longest_wait"}, exclude_unset=True, exclude_none=True)
    own = {} if "policy" in given else scenario.scheduler.model_dump(exclude_unset=True, exclude_none=True)
    base = scenario.model_dump(exclude={"scheduler", "lab"}, exclude_unset=True, exclude_none=True)
    whole = type(scenario).model_validate(base | {"scheduler": merged(own, given)})
    made = scheduler(whole.from_file(scenario.source, scenario.folder))
    return laboratory.Contestant(entry.title, made, _predicts(made), entry.longest_wait)


def _predicts(made: Scheduler) -> bool:
    """Whether any axis reads a predicted length."""
    axes = ("rank", "leave", "memory", "takeover", "binning")
    used = [policies.resolve(axis, getattr(made, axis)) for axis in axes if getattr(made, axis) is not None]
    return any(one.uses(*PREDICTED) for one in used)


@dataclass
class ScenarioBench:
    """The requests and deployments of a scenario.

    Attributes:
        scenario: Whose.
        predictors: By their titles.
    """

    scenario: Scenario
    predictors: dict[str, LabPredictor]
    load: search.Load = field(init=False)
    _forecasts: dict[str, LengthPrediction | None] = field(default_factory=dict)
    _deployed: dict[int, Deployment] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        whole = self.scenario
        self.load = load_of(whole.workload, whole.folder, whole.run.seed)
        source = source_of(whole.workload, whole.folder)
        for title, section in self.predictors.items():
            self._forecasts[title] = length_prediction(
                section, whole.folder, whole.deployment.model, lambda: source.others
            )

    def requests(self, seed: int, predictor: str) -> Workload:
        """The requests of a seed with the predictions of one of the predictors."""
        wanted = self.scenario.workload.num_requests or DEFAULT_REQUESTS
        drawn = self.load.draw(seed, min(wanted, self.load.most))
        if not predictor:
            return drawn
        if predictor == ORACLE and predictor not in self.predictors:
            return predict.attach(drawn, predict.Oracle())
        told = self._forecasts[predictor]
        assert told is not None  # the section refuses kind none
        return told(drawn, self.scenario.run.seed + seed)

    def deployment(self, scheduler: Scheduler, batch: int) -> Deployment:
        """The scenario's deployment with a batch size and a scheduler."""
        with self._lock:
            if batch not in self._deployed:
                limits = self.scenario.engine.model_copy(update={"max_num_seqs": batch})
                self._deployed[batch] = deployment(self.scenario.model_copy(update={"engine": limits}))
        return replace(self._deployed[batch], scheduler=scheduler)


def _metadata(scenario: Scenario, bench: ScenarioBench) -> dict[str, str]:
    on = scenario.deployment
    gpus = on.tp * on.pp * on.replicas
    metadata: dict[str, Any] = {
        "model": on.model,
        "GPU": f"{gpus} x {on.gpu}" if gpus > 1 else on.gpu,
        "workload": bench.load.name,
    }
    return metadata
