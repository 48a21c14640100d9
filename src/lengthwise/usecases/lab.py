"""The lab of a scenario: whether length-aware scheduling is worth it at its loads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lengthwise import engine, predict, search
from lengthwise import lab as laboratory
from lengthwise import policy as policies
from lengthwise.config.files import merged
from lengthwise.config.scenario import Scenario
from lengthwise.config.sections import LabPolicy, LabPredictor, LabSection
from lengthwise.config.workload import source_of
from lengthwise.cost import model_error
from lengthwise.policy import PREDICTION_ARGUMENTS
from lengthwise.schema.deployment import Deployment, Scheduler
from lengthwise.schema.errors import InputError, error_note
from lengthwise.schema.lab import ORACLE, LabTable, LoadUnit
from lengthwise.schema.workload import Workload
from lengthwise.usecases.requests import DEFAULT_REQUESTS, MAX_PARTS, WorkloadPredictor, search_load, workload_predictor
from lengthwise.usecases.variants import deployment, scheduler

Progress = Callable[[int, int], None]
LOADS = (0.7, 0.9, 1.1)


def lab(scenario: Scenario, *, jobs: int | None = None, progress: Progress = lambda *_: None) -> LabTable:
    """Compare the policies and predictors of a scenario's [lab], and return a table of results with verdicts.

    ``jobs`` is the number of simulations at a time, by default one per CPU. ``progress`` is called with (done, total).
    Raises InputError if the scenario has no [lab], or it cannot be used.
    """
    with error_note(f"in [lab] of {scenario.source}"):
        question, bench = question_of(scenario)
        engine.warm_up()  # otherwise all threads would wait for the first to compile it
        with search.threads(jobs) as workers:
            table = laboratory.lab(question, bench, each=workers.run, progress=progress)
    return replace(table, answer=(*table.answer, *bench.notes()))


def question_of(scenario: Scenario) -> tuple[laboratory.Question, ScenarioBench]:
    """Return the comparison that [lab] requests, and the bench that supplies its requests and deployments."""
    section = _section(scenario)
    bench = ScenarioBench(scenario, {one.title: one for one in section.predictors})
    own = scheduler(scenario)
    # The baseline forms steps and gives memory as the scenario does, but schedules in order of arrival.
    rank = own.rank if own.rank in ("fcfs", "fcfs_preempted_first", "queue_order") else "fcfs_preempted_first"
    base = replace(own, rank=rank, victim="latest_admitted", preemption="never", binning=None, max_wait_s=float("inf"))
    deployed = scenario.deployment
    gpus = f"{deployed.gpus} x {deployed.gpu}" if deployed.gpus > 1 else deployed.gpu
    question = laboratory.Question(
        policies=tuple(_contestant(one, scenario) for one in section.policies if one.title != "fcfs"),
        predictors=tuple(bench.predictors),
        loads=tuple(section.rates or section.loads or LOADS),
        batch_sizes=tuple(section.batch_sizes or [scenario.engine.max_num_seqs]),
        seeds=min(section.seeds, bench.load.seeds or section.seeds),
        unit=LoadUnit(section.unit) if section.rates is None else LoadUnit.RPS,
        base=base,
        name=scenario.name,
        metadata={"model": deployed.model, "GPU": gpus, "workload": bench.load.name},
    )
    return question, bench


def _section(scenario: Scenario) -> LabSection:
    if scenario.lab is None:
        raise InputError(
            'a lab needs a table [lab], such as: [lab] policies = ["sjf", "isrtf"], predictors = ["oracle"], '
            "loads = [0.7, 0.9, 1.1]"
        )
    if scenario.variants:
        raise InputError("a lab compares its own policies; remove the [[variants]], or put them into lab.policies")
    if scenario.predictor.kind != "none" or scenario.workload.predicted != "none":
        raise InputError("a lab takes its predictors from lab.predictors; remove the other predictions")
    return scenario.lab


def _contestant(entry: LabPolicy, scenario: Scenario) -> laboratory.Contestant:
    given = entry.model_dump(exclude={"name", "max_wait_factor"}, exclude_unset=True, exclude_none=True)
    own = {} if "policy" in given else scenario.scheduler.model_dump(exclude_unset=True, exclude_none=True)
    base = scenario.model_dump(exclude={"scheduler", "lab"}, exclude_unset=True, exclude_none=True)
    changed = type(scenario).model_validate(base | {"scheduler": merged(own, given)})
    made = scheduler(changed.with_origin(scenario.source, scenario.folder))
    axes = ("rank", "victim", "memory", "preemption", "binning")
    used = [policies.resolve(axis, getattr(made, axis)) for axis in axes if getattr(made, axis) is not None]
    predicts = any(policy.uses(*PREDICTION_ARGUMENTS) for policy in used)
    return laboratory.Contestant(entry.title, made, predicts, entry.max_wait_factor)


@dataclass
class ScenarioBench:
    """Supplies the requests and deployments that the lab of a scenario simulates."""

    scenario: Scenario
    predictors: dict[str, LabPredictor]
    load: search.Load = field(init=False)
    _predictions: dict[str, WorkloadPredictor | None] = field(default_factory=dict)
    _deployed: dict[int, Deployment] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        scenario = self.scenario
        seeds = MAX_PARTS if scenario.lab is None else min(MAX_PARTS, scenario.lab.seeds)
        self.load = search_load(scenario, seeds)
        source = source_of(scenario.workload, scenario.folder)
        lengths = source.lengths if source.replayed is None else None
        for title, section in self.predictors.items():
            self._predictions[title] = workload_predictor(section, scenario, lengths)

    def requests(self, seed: int, predictor: str) -> Workload:
        """Return the requests of a seed with predictions of the named predictor, or without any if the name is ""."""
        replayed = self.load.max_requests if self.scenario.workload.is_replay else DEFAULT_REQUESTS
        requests = self.scenario.workload.num_requests or replayed
        drawn = self.load.draw(seed, min(requests, self.load.max_requests))
        if not predictor:
            return drawn
        if predictor == ORACLE and predictor not in self.predictors:
            return predict.attach(drawn, predict.Oracle())
        prediction = self._predictions[predictor]
        assert prediction is not None  # the section refuses kind none
        return prediction(drawn, self.scenario.run.seed + seed)

    def notes(self) -> list[str]:
        """Return notes on unreliable costs of the deployments made so far."""
        deployed = self._deployed.values()
        return list(dict.fromkeys(note for one in deployed for note in model_error.deployment_notes(one)))

    def deployment(self, scheduler: Scheduler, batch: int) -> Deployment:
        """Return the scenario's deployment with another batch size and scheduler."""
        with self._lock:
            if batch not in self._deployed:
                one_pool = self.scenario.scheduler.model_copy(update={"hybrid_kv_cache": False})
                limits = self.scenario.engine.model_copy(update={"max_num_seqs": batch})
                changed = {"engine": limits, "scheduler": one_pool}
                self._deployed[batch] = made = deployment(self.scenario.model_copy(update=changed))
                if made.groups:
                    made.require_one_side("lab")
        return replace(self._deployed[batch], scheduler=scheduler)
