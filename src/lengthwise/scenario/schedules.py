"""From a scenario to the best schedule of its model on its GPUs under a latency bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lengthwise import catalog, cost, engine, schedule
from lengthwise import workload as w
from lengthwise.scenario import model_error
from lengthwise.scenario._sampled import sample_of
from lengthwise.scenario._schedule import ScheduleSection
from lengthwise.scenario._schedule_lengths import model_within, require_reached
from lengthwise.scenario._schedule_reach import reach_notes
from lengthwise.scenario._workloads import source_of
from lengthwise.scenario.scenario import Scenario
from lengthwise.scenario.variants import cost_source, host, spec_of
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError, ProfileError
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.schedule import SchedulePlan

DRAWS = 1 << 17
"""Requests that lengths without marginals are counted over."""
COST_DRAWS = 100
"""Cost tables that are off: five lie beyond each end of a 90 % interval, and a share of them is known to 5 points.

A draw estimates the choice and all of the frontier again: 25 ms for a model of 80 layers on eight GPUs.
"""


def plan_schedule(
    scenario: Scenario, *, exhaustive: bool = False, progress: schedule.Progress = lambda *_: None
) -> SchedulePlan:
    """The best schedule of a scenario, with what else there is.

    Args:
        scenario: Its [schedule] says the bound; without one there is none.
        exhaustive: Look at every schedule.
        progress: Called with the configurations of other systems that were played out, and 0: how many it will be is
            not known.

    Raises:
        InputError: Something of it does not work out; a note says where.
        ScheduleError: No schedule meets the bound, or the model does not fit.
    """
    try:
        return _planned(scenario, exhaustive=exhaustive, progress=progress)
    except InputError as error:
        error.add_note(f"in {scenario.source}")
        raise


@dataclass(frozen=True, eq=False)
class Question:
    """A scenario as schedules take it.

    Attributes:
        section: Its [schedule].
        task: Lengths.
        sample: The requests that these were counted over; None: they are distributions by formula.
        planner: Of all its schedules.
        draws: How many cost tables that are off are asked for.
    """

    section: ScheduleSection
    task: schedule.TaskLengths
    sample: schedule.Sample | None
    planner: schedule.Planner
    draws: int

    @cached_property
    def off(self) -> tuple[dict[int, CostTables], ...]:
        """Cost tables by degree that are off as far as they may be, a draw each."""
        return tuple(model_error.perturbed_degrees(self.planner.estimator.setting.tables, self.draws))


def question_of(scenario: Scenario) -> Question:
    """What a scenario asks of schedules.

    Raises:
        InputError: Something of it does not work out.
    """
    if scenario.variants:
        raise InputError("a schedule is chosen for one deployment; take the [[variants]] out")
    section = scenario.schedule or ScheduleSection()
    cluster, (task, sample) = _cluster(scenario, section), _lengths(scenario)
    model = model_within(scenario, task)
    require_reached(section, task)
    strategies = [schedule.Strategy(name) for name in section.strategies]
    tables = _tables(scenario, model, cluster)
    assumptions = schedule.Assumptions(
        level=section.level, threshold=section.threshold, output_tokens=section.output_tokens
    )
    estimator = schedule.Estimator(task, cluster, model, tables, assumptions)
    planner = schedule.Planner(estimator, tuple(tables), strategies, worst_case=section.worst_case)
    draws = scenario.run.model_draws
    return Question(section, task, sample, planner, COST_DRAWS if draws is None else draws)


def task_of(scenario: Scenario) -> schedule.TaskLengths:
    """How long a scenario's prompts and outputs are: exact where it has two distributions, else counted."""
    return _lengths(scenario)[0]


def plan_facts(scenario: Scenario) -> dict[str, str]:
    """The model and the GPUs that a scenario's plan is of, as its facts name them."""
    cluster = _cluster(scenario, scenario.schedule or ScheduleSection())
    return {"model": scenario.deployment.model, "GPUs": f"{cluster.gpus} x {cluster.gpu.name}"}


def _lengths(scenario: Scenario) -> tuple[schedule.TaskLengths, schedule.Sample | None]:
    source = source_of(scenario.workload, scenario.folder)
    name, sample = source.name or scenario.name, sample_of(source)
    if sample is not None and sample.prompt_tokens is not None and sample.output_tokens is not None:
        return schedule.TaskLengths.from_samples(sample.prompt_tokens, sample.output_tokens, name), sample
    if isinstance(source.lengths, w.Joint):
        return schedule.TaskLengths.from_marginals(source.lengths.prompt, source.lengths.output, name), sample
    drawn = w.draw(source.lengths, DRAWS, np.random.default_rng(scenario.run.seed))
    return schedule.TaskLengths.from_samples(drawn.prompt, drawn.output, name), None


def _planned(scenario: Scenario, *, exhaustive: bool, progress: schedule.Progress) -> SchedulePlan:
    asked = question_of(scenario)
    section = asked.section
    plan = schedule.answer(
        asked.planner,
        section.latency_bound,
        name=scenario.name,
        facts=_facts(scenario, asked),
        exhaustive=exhaustive,
        baselines=section.systems,
        seed=scenario.run.seed,
        progress=progress,
    )
    return _doubted(plan, asked, scenario)


def _doubted(plan: SchedulePlan, asked: Question, scenario: Scenario) -> SchedulePlan:
    """The plan with how far the chosen schedule may be from what it says, and from what was measured."""
    estimator, bound_s, worst_case = asked.planner.estimator, plan.bound_s, plan.worst_case
    spreads, notes = [], []
    if asked.sample is not None:
        spreads.append(
            schedule.over_resamples(
                estimator, plan.chosen, asked.sample, bound_s, worst_case=worst_case, seed=scenario.run.seed
            )
        )
    else:
        notes.append("Lengths are distributions by formula: no sampling error is in them.")
    if asked.off:
        spreads.append(
            schedule.over_costs(
                estimator, plan.chosen, asked.off, bound_s, worst_case=worst_case, level=model_error.LEVEL
            )
        )
    elif scenario.run.model_draws == 0:
        notes.append("How far the cost tables may be off is not said: run.model_draws is 0.")
    else:
        notes.append("The cost tables do not say how far they may be off.")
    setting = estimator.setting
    notes += reach_notes(plan.chosen, asked.task, plan.level, setting.tables, setting.cluster.gpus)
    front = schedule.banded(estimator, plan.front, asked.off, model_error.LEVEL)
    return replace(plan, spreads=tuple(spreads), spread_notes=tuple(notes), front=front)


def _cluster(scenario: Scenario, section: ScheduleSection) -> schedule.Cluster:
    on = scenario.deployment
    gpus = section.gpus or on.tp * on.pp * on.replicas
    gpu = catalog.gpu(spec_of(on.gpu, scenario))
    node = catalog.node(spec_of(on.node, scenario)) if on.node else catalog.default_node(gpu, gpus)
    rates = (None if rate is None else 1e9 * rate for rate in (section.dram_gb_s, section.ssd_gb_s))
    return schedule.Cluster(gpu, node, gpus, scenario.engine.gpu_memory_utilization, *rates)


def _tables(scenario: Scenario, model: ModelSpec, cluster: schedule.Cluster) -> dict[int, CostTables]:
    """Cost tables of every tensor-parallel degree that the scenario's cost source has."""
    on, degrees = scenario.deployment, schedule.tensor_degrees(model, cluster)
    if on.cost == "roofline" and on.weight_dtype is None and on.kv_dtype is None:
        return schedule.cluster_tables(
            model, cluster, degrees, cost.host_overhead(host(on)) or cost.HostOverhead()
        )
    if on.weight_dtype is not None or on.kv_dtype is not None:
        raise InputError("schedules take the model's own data types; take weight_dtype and kv_dtype out")
    if on.cost.startswith("tables:"):
        raise InputError(
            "tables of one tensor-parallel degree do not say what others take; give cost roofline, profile or vidur"
        )
    made = {}
    for tp in degrees:
        try:
            made[tp] = _built(scenario, model, cluster, tp)
        except ProfileError:
            if tp == 1:
                raise
    return made


def _built(scenario: Scenario, model: ModelSpec, cluster: schedule.Cluster, tp: int) -> CostTables:
    limits = EngineLimits(max_num_seqs=2**12, max_num_batched_tokens=2**15)
    return engine.deploy(
        model,
        cluster.gpu,
        node=cluster.node,
        tp=tp,
        pp=max(1, min(cluster.gpus // tp, model.layers)),
        limits=limits,
        cost=cost_source(scenario.deployment, scenario),
        host=host(scenario.deployment),
        num_blocks=2 * model.max_model_len // limits.block_size,
    ).cost


def _facts(scenario: Scenario, asked: Question) -> dict[str, str]:
    section, task = asked.section, asked.task
    bound = "no latency bound"
    if math.isfinite(section.latency_bound):
        held = "worst case" if section.worst_case else "expected"
        whom = f"outputs of {section.bound_for}" if section.output_tokens else f"{section.bound_for} outputs"
        bound = f"{section.latency_bound:g} s for {whom}, {held}"
    if section.threshold is not None:
        bound += f"; encodings resized within {100 * section.threshold:g} %"
    return plan_facts(scenario) | {
        "lengths": (
            f"{task.name or 'lengths'}: prompts {task.mean_prompt_tokens:.0f}, outputs "
            f"{task.mean_output_tokens:.0f} tokens in the mean, p{100 * section.level:g} "
            f"{task.output_quantile(section.level):,}"
        ),
        "bound": bound,
    }
