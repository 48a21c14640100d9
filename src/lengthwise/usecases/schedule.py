"""From a scenario to the best schedule of its model on its GPUs under a latency bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import catalog, cost, engine, schedule
from lengthwise import workload as w
from lengthwise.config.scenario import Scenario
from lengthwise.config.sections import ScheduleSection
from lengthwise.config.variants import cost_source, hardware, host, spec_of
from lengthwise.config.workload import Source, source_of
from lengthwise.metrics import Beyond
from lengthwise.schedule import TaskLengths
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError, ProfileError
from lengthwise.schema.schedule import SchedulePlan, ScheduleRow
from lengthwise.schema.specs import ModelSpec
from lengthwise.usecases import model_error

Ints = npt.NDArray[np.int64]


def sample_of(source: Source) -> schedule.Sample | None:
    """The requests behind a source of lengths; None: they are distributions by formula."""
    if source.complete is not None:
        return schedule.Sample(source.complete.prompt_tokens, source.complete.output_tokens)
    lengths = source.lengths
    if isinstance(lengths, w.Samples):
        return schedule.Sample(np.asarray(lengths.prompt, np.int64), np.asarray(lengths.output, np.int64))
    if isinstance(lengths, w.Capped) and isinstance(lengths.lengths, w.Samples):
        return _capped(lengths, lengths.lengths)
    return _entries(lengths) if isinstance(lengths, w.Joint) else None


def _capped(limits: w.Capped, seen: w.Samples) -> schedule.Sample | None:
    """The requests within limits: cut to them, or without those that would be drawn again."""
    drawn = w.draw(_InOrder(seen), len(seen.prompt), np.random.default_rng(0))
    if limits.cut != "redraw":
        drawn = replace(limits, lengths=_InOrder(seen)).draw(len(seen.prompt), np.random.default_rng(0))
        return schedule.Sample(drawn.prompt, drawn.output)
    most = (
        (drawn.prompt, limits.max_prompt_tokens),
        (drawn.output, limits.max_output_tokens),
        (drawn.prompt + drawn.output, limits.max_total_tokens),
    )
    kept = np.ones(len(drawn.prompt), dtype=np.bool_)
    for tokens, limit in most:
        kept &= tokens <= (tokens.max() if limit is None else limit)
    within = np.flatnonzero(kept)
    return schedule.Sample(drawn.prompt[within], drawn.output[within]) if len(within) else None


def _entries(lengths: w.Joint) -> schedule.Sample | None:
    """Two lists of lengths, or one beside a formula; lists with weights do not say how many requests they are of."""
    prompt, output = (_list(side) for side in (lengths.prompt, lengths.output))
    if prompt is None and output is None:
        return None
    return schedule.Sample(prompt, output, paired=False)


def _list(side: Any) -> Ints | None:
    if not isinstance(side, w.Empirical) or side.weights is not None:
        return None
    tokens: Ints = np.maximum(np.rint(np.asarray(side.tokens, float)), 1).astype(np.int64)
    return tokens


@dataclass(frozen=True, eq=False)
class _InOrder:
    """Requests as they were seen, one after another."""

    seen: w.Samples

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:  # noqa: ARG002 - the contract
        return np.array(self.seen.prompt[:n], np.int64), np.array(self.seen.output[:n], np.int64)


def model_within(scenario: Scenario, task: TaskLengths) -> ModelSpec:
    """The model with no more tokens a request than engines are told to take, so that lengths that move stay within it.

    Raises:
        InputError: The longest prompt and output are beyond the model, or beyond what engines are told.
    """
    model, limit = hardware(scenario)[0], scenario.engine.max_model_len
    task.require_within(model)
    if limit is None or limit >= model.max_model_len:
        return model
    if task.max_prompt_tokens + task.max_output_tokens > limit:
        raise InputError(
            f"the longest prompt and output ({task.max_prompt_tokens} + {task.max_output_tokens} tokens) must be "
            f"within engine.max_model_len, {limit} tokens; raise it, or give the lengths a lower maximum"
        )
    return replace(model, max_model_len=limit)


def require_reached(section: ScheduleSection, task: TaskLengths) -> None:
    """Nothing, if some output is as long as the fixed length that a bound is for.

    Raises:
        InputError: None is.
    """
    tokens = section.output_tokens
    if tokens is not None and tokens > task.max_output_tokens:
        raise InputError(
            f"schedule.bound_for must be a length that outputs have; it is {tokens} tokens, and the longest output has "
            f"{task.max_output_tokens}. Give one of at most that, or a quantile such as p99"
        )


def reach_notes(
    row: ScheduleRow, task: TaskLengths, level: float, tables: Mapping[int, CostTables], gpus: int
) -> list[str]:
    """A sentence for each bound of its tables' reach (the least of its degrees) that the schedule passes.

    Args:
        row: The schedule.
        task: What it serves.
        level: Quantile of the lengths that a single request is taken at.
        tables: By tensor-parallel degree.
        gpus: GPUs in all.
    """
    had, notes = largest_of(row, task, level), []
    reaches = [tables[tp].reach for tp in _degrees(row, gpus) if tp in tables]
    for bound, largest in had.items():
        known = [most for reach in reaches if (most := getattr(reach, bound)) is not None]
        if known and largest > min(known):
            words = Beyond(bound, min(known), largest, 1, 1, "steps").words
            notes.append(
                f"The schedule's steps have more {words} (about {largest:,}) than the measurements behind the "
                f"cost tables reached ({min(known):,}): their times are extrapolated."
            )
    return notes


def largest_of(row: ScheduleRow, task: TaskLengths, level: float) -> dict[str, int]:
    """The largest step of a schedule in the mean, by the bounds of ``Reach``; a single request at the level's lengths.

    RRA cuts encodings and decode batches into ``micro_batches`` parts, WAA decode batches alone. A request in flight
    caches its prompt and half of its output, outputs weighted by how long they are in flight.
    """
    parts = max(1, row.micro_batches)
    encoded = max(1.0, row.encode_batch / (parts if row.strategy == "rra" else 1))
    decoded, prompt = row.decode_batch / parts, task.mean_prompt_tokens
    square = float(task.output_pmf @ np.arange(len(task.output_pmf), dtype=np.float64) ** 2)
    cached = prompt + square / (2 * task.mean_output_tokens)
    longest = task.prompt_quantile(level)
    return {
        "tokens": round(max(encoded * prompt, decoded)),
        "seqs": round(max(encoded, decoded)),
        "chunk": longest,
        "context": longest + task.output_quantile(level),
        "kv_tokens": round(max(encoded * prompt, decoded * cached)),
    }


def _degrees(row: ScheduleRow, gpus: int) -> set[int]:
    """Tensor-parallel degrees of its stages."""
    grouped = row.tp * row.tp_groups
    return ({row.tp} if grouped else set()) | ({1} if grouped < gpus else set())


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
    plan = schedule.build_plan(
        asked.planner,
        section.latency_bound,
        name=scenario.name,
        metadata=_metadata(scenario, asked),
        exhaustive=exhaustive,
        baselines=section.systems,
        seed=scenario.run.seed,
        progress=progress,
    )
    return _with_warnings(plan, asked, scenario)


def _with_warnings(plan: SchedulePlan, requested: Question, scenario: Scenario) -> SchedulePlan:
    """The plan with how far the chosen schedule may be from what it says, and from what was measured."""
    estimator, bound_s, worst_case = requested.planner.estimator, plan.bound_s, plan.worst_case
    spreads, notes = [], []
    if requested.sample is not None:
        spreads.append(
            schedule.over_resamples(
                estimator, plan.chosen, requested.sample, bound_s, worst_case=worst_case, seed=scenario.run.seed
            )
        )
    else:
        notes.append("Lengths are distributions by formula: no sampling error is in them.")
    if requested.off:
        spreads.append(
            schedule.over_costs(
                estimator, plan.chosen, requested.off, bound_s, worst_case=worst_case, level=model_error.LEVEL
            )
        )
    elif scenario.run.model_draws == 0:
        notes.append("How far the cost tables may be off is not said: run.model_draws is 0.")
    else:
        notes.append("The cost tables do not say how far they may be off.")
    setting = estimator.setting
    notes += reach_notes(plan.chosen, requested.task, plan.level, setting.tables, setting.cluster.gpus)
    front = schedule.banded(estimator, plan.front, requested.off, model_error.LEVEL)
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
        return schedule.cluster_tables(model, cluster, degrees, cost.host_overhead(host(on)) or cost.HostOverhead())
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


def _metadata(scenario: Scenario, requested: Question) -> dict[str, str]:
    section, task = requested.section, requested.task
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
