"""Choice of the best schedule for a scenario's model on its GPUs under a latency bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lengthwise import catalog, cost, engine, policy, schedule
from lengthwise import workload as w
from lengthwise.config.scenario import Scenario
from lengthwise.config.sections import ScheduleSection
from lengthwise.config.workload import InOrder, Source, source_of
from lengthwise.cost import model_error
from lengthwise.metrics import Extrapolation
from lengthwise.schedule import TaskLengths
from lengthwise.schedule.lengths import TAIL_LEVEL
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError, ProfileError, error_note
from lengthwise.schema.schedule import SchedulePlan, ScheduleRow, Uncertainty
from lengthwise.schema.specs import ModelSpec
from lengthwise.usecases.variants import TABLES, hardware

Ints = npt.NDArray[np.int64]
LENGTH_DRAWS = 1 << 17  # drawn requests over which dependent lengths are counted
# Sets of perturbed cost tables: five lie beyond each end of a 90 % interval, and a share of sets is known to 5 points.
# Each set costs new estimates of the choice and of the frontier: 25 ms for a model of 80 layers on eight GPUs.
COST_DRAWS = 100


@dataclass(frozen=True, eq=False)
class Question:
    """The lengths of a scenario's requests, and a planner of the schedules that its [schedule] allows."""

    section: ScheduleSection
    task: TaskLengths
    # The requests over which the lengths were counted; None: the lengths are distributions by formula.
    sample: schedule.Sample | None
    planner: schedule.Planner
    draws: int  # number of perturbed cost tables
    shares_prefixes: bool = False  # whether the requests' prompts share prefixes, which no schedule uses

    @cached_property
    def perturbed(self) -> tuple[dict[int, CostTables], ...]:
        """Return for each draw the cost tables by tensor-parallel degree, with random errors of the recorded size."""
        return tuple(model_error.perturbed_degrees(self.planner.estimator.setting.tables, self.draws))


def plan_schedule(
    scenario: Scenario, *, exhaustive: bool = False, progress: schedule.Progress = lambda *_: None
) -> SchedulePlan:
    """Return the best schedule of a scenario, with alternatives and uncertainty.

    ``progress`` is called with the number of configurations of other systems that are simulated so far, and with 0,
    because the total is unknown. Raises ScheduleError if no schedule meets the bound, or the model does not fit.
    """
    with error_note(f"in {scenario.source}"):
        requested = question_of(scenario)
        if requested.section.systems:
            engine.warm_up()
        plan = schedule.build_plan(
            requested.planner,
            requested.section.latency_bound,
            name=scenario.name,
            metadata=_metadata(scenario, requested),
            exhaustive=exhaustive,
            baselines=requested.section.systems,
            seed=scenario.run.seed,
            progress=progress,
        )
        return _with_uncertainty(plan, requested, scenario)


def question_of(scenario: Scenario) -> Question:
    """Return what a scenario's [schedule] requests, with a planner. Raises InputError if it cannot be planned."""
    if scenario.variants:
        raise InputError("a schedule is chosen for one deployment; remove the [[variants]]")
    section, source = scenario.schedule or ScheduleSection(), _source(scenario)
    cluster, (task, sample) = _cluster(scenario), _lengths(scenario, source)
    model = model_within(scenario, task)
    tokens = section.output_tokens
    if tokens is not None and tokens > task.max_output_tokens:
        raise InputError(
            f"schedule.bound_for must be a length that outputs have; it is {tokens} tokens, and the longest output has "
            f"{task.max_output_tokens}. Give one of at most that, or a quantile such as p99"
        )
    strategies = [schedule.Strategy(name) for name in section.strategies]
    tables = _tables(scenario, model, cluster)
    assumptions = schedule.Assumptions(level=section.level, threshold=section.threshold, output_tokens=tokens)
    estimator = schedule.Estimator(task, cluster, model, tables, assumptions)
    planner = schedule.Planner(estimator, tuple(tables), strategies, worst_case=section.worst_case)
    draws = scenario.run.model_draws
    shares = source.replayed is not None and source.replayed.prefixes is not None
    return Question(section, task, sample, planner, COST_DRAWS if draws is None else draws, shares)


def task_of(scenario: Scenario) -> TaskLengths:
    """Return the distributions of a scenario's prompt and output lengths.

    The result is exact if prompts and outputs have separate distributions. Otherwise lengths of requests are counted.
    """
    return _lengths(scenario, _source(scenario))[0]


def _source(scenario: Scenario) -> Source:
    source = source_of(scenario.workload, scenario.folder)
    source.require_independent("a schedule")
    return source


def _lengths(scenario: Scenario, source: Source) -> tuple[TaskLengths, schedule.Sample | None]:
    name, sample = source.name or scenario.name, sample_of(source)
    if sample is not None and sample.prompt_tokens is not None and sample.output_tokens is not None:
        return TaskLengths.from_samples(sample.prompt_tokens, sample.output_tokens, name), sample
    if isinstance(source.lengths, w.Joint):
        return TaskLengths.from_marginals(source.lengths.prompt, source.lengths.output, name), sample
    drawn = w.draw(source.lengths, LENGTH_DRAWS, np.random.default_rng(scenario.run.seed))
    return TaskLengths.from_samples(drawn.prompt, drawn.output, name), None


def sample_of(source: Source) -> schedule.Sample | None:
    """Return the observed requests that lengths come from, or None if formulas give the lengths."""
    if source.replayed is not None:
        return schedule.Sample(source.replayed.prompt_tokens, source.replayed.output_tokens)
    match _without_client_limits(source.lengths):
        case w.Samples() as seen:
            return schedule.Sample(np.asarray(seen.prompt, np.int64), np.asarray(seen.output, np.int64))
        case w.Capped(lengths=w.Samples() as seen) as limits:
            return _within_limits(limits, seen)
        case w.Joint() as joint:
            prompt, output = _observed(joint.prompt), _observed(joint.output)
            return None if prompt is None and output is None else schedule.Sample(prompt, output, paired=False)
    return None


def _without_client_limits(lengths: w.Lengths) -> w.Lengths:
    """Return the lengths with observed outputs already cut to the limits that clients set."""
    match lengths:
        case w.Capped(lengths=w.ClientLimits() as inner):
            return replace(lengths, lengths=_without_client_limits(inner))
        case w.ClientLimits(lengths=w.Samples() as seen):
            in_order = InOrder(seen.prompt, seen.output, max_tokens=seen.max_tokens, ignore_eos=seen.ignore_eos)
            rows = replace(lengths, lengths=in_order).draw(len(seen.prompt), np.random.default_rng(0))
            return w.Samples(rows.prompt, rows.output)
    return lengths


def _observed(side: w.Marginal) -> Ints | None:
    """Return the lengths that a list gives, one per request, or None for a formula or a list with weights."""
    if not isinstance(side, w.Empirical) or side.weights is not None:
        return None
    tokens: Ints = np.maximum(np.rint(np.asarray(side.tokens, float)), 1).astype(np.int64)
    return tokens


def _within_limits(limits: w.Capped, seen: w.Samples) -> schedule.Sample | None:
    """Return the requests cut to the limits. If ``cut`` is "redraw", longer requests are left out instead."""
    in_order, rng = InOrder(seen.prompt, seen.output), np.random.default_rng(0)
    if limits.cut != "redraw":
        drawn = replace(limits, lengths=in_order).draw(len(seen.prompt), rng)
        return schedule.Sample(drawn.prompt, drawn.output)
    prompt, output = in_order.sample(len(seen.prompt), rng)
    within = (prompt <= (limits.max_prompt_tokens or math.inf)) & (output <= (limits.max_output_tokens or math.inf))
    within &= prompt + output <= (limits.max_total_tokens or math.inf)
    return schedule.Sample(prompt[within], output[within]) if within.any() else None


def model_within(scenario: Scenario, task: TaskLengths) -> ModelSpec:
    """Return the model with a context of at most engine.max_model_len, which also limits changed lengths."""
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


def _cluster(scenario: Scenario) -> schedule.Cluster:
    deployed, section = scenario.deployment, scenario.schedule or ScheduleSection()
    gpus = section.gpus or deployed.gpus
    gpu = catalog.gpu(scenario.file_or_name(deployed.gpu))
    node = catalog.node(scenario.file_or_name(deployed.node)) if deployed.node else catalog.default_node(gpu, gpus)
    rates = (None if rate is None else 1e9 * rate for rate in (section.dram_gb_s, section.ssd_gb_s))
    return schedule.Cluster(gpu, node, gpus, scenario.engine.gpu_memory_utilization, *rates)


def _tables(scenario: Scenario, model: ModelSpec, cluster: schedule.Cluster) -> dict[int, CostTables]:
    """Return the cost tables of every tensor-parallel degree for which the scenario's cost source has tables."""
    deployed, degrees = scenario.deployment, schedule.tensor_degrees(model, cluster)
    if deployed.weight_dtype is not None or deployed.kv_dtype is not None:
        raise InputError("schedules use the model's own data types; remove weight_dtype and kv_dtype")
    if deployed.cost == "roofline":
        overhead = cost.host_overhead(deployed.host_overhead) or cost.HostOverhead()
        return schedule.cluster_tables(model, cluster, degrees, overhead)
    if deployed.cost.startswith(TABLES):
        raise InputError(
            "tables of one tensor-parallel degree have no times of others; give cost roofline, profile or vidur"
        )
    limits = EngineLimits(max_num_seqs=2**12, max_num_batched_tokens=2**15)
    made = {}
    for tp in degrees:
        try:
            made[tp] = engine.deploy(
                model,
                cluster.gpu,
                node=cluster.node,
                tp=tp,
                pp=max(1, min(cluster.gpus // tp, model.layers)),
                limits=limits,
                scheduler=replace(policy.scheduler("vllm_v1"), hybrid_kv_cache=False),  # whose blocks num_blocks counts
                cost=scenario.cost_source,
                host=deployed.host_overhead,
                num_blocks=2 * model.max_model_len // limits.block_size,
            ).cost
        except ProfileError:
            if tp == 1:
                raise
    return made


def plan_metadata(scenario: Scenario) -> dict[str, str]:
    """Return the model and the GPUs of a scenario in the form of a plan's metadata."""
    cluster = _cluster(scenario)
    return {"model": scenario.deployment.model, "GPUs": f"{cluster.gpus} x {cluster.gpu.name}"}


def _metadata(scenario: Scenario, requested: Question) -> dict[str, str]:
    section, task = requested.section, requested.task
    bound = "no latency bound"
    if math.isfinite(section.latency_bound):
        outputs = f"outputs of {section.bound_for}" if section.output_tokens else f"{section.bound_for} outputs"
        case = "worst case" if section.worst_case else "expected"
        bound = f"{section.latency_bound:g} s for {outputs}, {case}"
    if section.threshold is not None:
        bound += f"; prefills resized within {100 * section.threshold:g} %"
    lengths = (
        f"{task.name or 'lengths'}: prompts {task.mean_prompt_tokens:.0f}, outputs {task.mean_output_tokens:.0f} "
        f"tokens in the mean, p{100 * section.level:g} {task.output_quantile(section.level):,}"
    )
    return plan_metadata(scenario) | {"lengths": lengths, "bound": bound}


def _with_uncertainty(plan: SchedulePlan, requested: Question, scenario: Scenario) -> SchedulePlan:
    estimator, bound, task = requested.planner.estimator, plan.bound, requested.task
    spreads, notes, level = [], [], model_error.LEVEL
    if requested.sample is not None:
        spread = schedule.spread_over_resamples(
            estimator, plan.chosen, requested.sample, bound.limit_s, worst_case=bound.worst_case, seed=scenario.run.seed
        )
        spreads.append(spread)
    else:
        longest = f"prompts {task.max_prompt_tokens:,} and outputs {task.max_output_tokens:,} tokens"
        notes.append(
            "Lengths are distributions by formula: no sampling error is in them. One without a maximum ends at its "
            f"{100 * TAIL_LEVEL:g} % quantile, and longer requests count as that long; the longest here: {longest}."
        )
    if requested.perturbed:
        spread = schedule.spread_over_costs(
            estimator, plan.chosen, requested.perturbed, bound.limit_s, worst_case=bound.worst_case, level=level
        )
        spreads.append(spread)
    elif scenario.run.model_draws == 0:
        notes.append("The error of the cost tables is not estimated: run.model_draws is 0.")
    else:
        notes.append("The cost tables do not record their error.")
    if requested.shares_prefixes:
        notes.append("Prompts of the trace share prefixes; a schedule computes each prompt completely.")
    setting = estimator.setting
    notes += reach_notes(plan.chosen, task, bound.level, setting.tables, setting.cluster.gpus)
    warnings = map(model_error.fit_warning, setting.tables.values())
    notes += [*dict.fromkeys(warning for warning in warnings if warning), *catalog.approximations(setting.model)]
    rate_rps, served_rps = scenario.workload.request_rate or 0.0, plan.chosen.throughput_rps
    if served_rps < rate_rps < math.inf:
        needed = f"{math.ceil(rate_rps / served_rps)} replicas of it are needed, or the queue grows."
        notes.insert(0, f"The workload sends {rate_rps:g} requests/s, the schedule serves {served_rps:.3g}: {needed}")
    front = schedule.with_bands(estimator, plan.front, requested.perturbed, level)
    return replace(plan, uncertainty=Uncertainty(tuple(spreads), tuple(notes)), front=front)


def reach_notes(
    row: ScheduleRow, task: TaskLengths, level: float, tables: Mapping[int, CostTables], gpus: int
) -> list[str]:
    """Return a sentence for each quantity, such as tokens per step, in which a schedule exceeds the measured range.

    Measurements behind the cost tables give the range. With several tensor-parallel degrees the smallest range counts.
    """
    grouped = row.tp * row.tp_groups
    degrees = ({row.tp} if grouped else set()) | ({1} if grouped < gpus else set())
    reaches = [tables[tp].evidence.reach for tp in degrees if tp in tables]
    notes = []
    for bound, largest in largest_step(row, task, level).items():
        known = [measured for reach in reaches if (measured := getattr(reach, bound)) is not None]
        if known and largest > min(known):
            words = Extrapolation(bound, min(known), largest, 1, 1, "steps").words
            notes.append(
                f"The schedule's steps have more {words} (about {largest:,}) than the measurements behind the "
                f"cost tables reached ({min(known):,}): their times are extrapolated."
            )
    return notes


def largest_step(row: ScheduleRow, task: TaskLengths, level: float) -> dict[str, int]:
    """Return the expected size of a schedule's largest step. The keys are the names of the fields of ``Reach``.

    RRA divides prefill and decode batches into ``micro_batches`` parts, WAA only decode batches. A request in flight
    has cached its prompt and half of its output on average. Longer outputs are in flight longer and count more. "chunk"
    and "context" are for one request whose lengths are the quantiles at ``level``.
    """
    parts = max(1, row.micro_batches)
    prefilled = max(1.0, row.prefill_batch / (parts if row.strategy == "rra" else 1))
    decoded, prompt = row.decode_batch / parts, task.mean_prompt_tokens
    square = float(task.output_pmf @ np.arange(len(task.output_pmf), dtype=np.float64) ** 2)
    cached = prompt + square / (2 * task.mean_output_tokens)
    longest = task.prompt_quantile(level)
    return {
        "tokens": round(max(prefilled * prompt, decoded)),
        "seqs": round(max(prefilled, decoded)),
        "chunk": longest,
        "context": longest + task.output_quantile(level),
        "kv_tokens": round(max(prefilled * prompt, decoded * cached)),
    }
