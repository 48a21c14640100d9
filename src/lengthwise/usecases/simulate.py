"""Simulation of a scenario: every variant with every seed, and a summary over the seeds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise import engine, metrics
from lengthwise.backend.launch import chunks_prompts
from lengthwise.config.scenario import Scenario, load
from lengthwise.cost import model_error
from lengthwise.metrics import Extrapolation, Slo, Summary
from lengthwise.report.formatting import two_digits
from lengthwise.report.json_file import deployment_facts, plain
from lengthwise.report.result import Result
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment, Scheduler
from lengthwise.schema.errors import error_note
from lengthwise.schema.metric_names import metric_of, quantity
from lengthwise.schema.records import SIMULATED, Records, RunResult, Status, shape_facts
from lengthwise.schema.workload import Workload
from lengthwise.search.workers import available_cpus, processes, threads
from lengthwise.usecases.variants import Variant, build, engine_note, unchecked_tables_note

BUSY_FRONT = 0.7  # utilization of the front end above which its queue grows fast
MAX_LOGGED_STEPS = 4_000_000  # for a timeline, or to find step times beyond the measured ones
Progress = Callable[[int, int], None]


def front_note(cost: CostTables, rate_rps: float) -> str:
    """Return a warning if the front end is busy for more than BUSY_FRONT of the time at this rate, otherwise ""."""
    busy = rate_rps * cost.front.serial_s
    if not busy > BUSY_FRONT:
        return ""
    has = "is busy" if busy <= 1 else "has work for"
    return (
        f"The engine's front end (HTTP, tokenization) limits the rate: it takes one request at a time, "
        f"{1e3 * cost.front.serial_s:.3g} ms each, and {has} {busy:.0%} of the time at {rate_rps:.3g} requests a "
        "second. More or faster GPUs do not help; set deployment.host to the measured overhead of your own front end."
    )


def sent_rps(records: Records) -> float:
    """Return the requests per second while clients sent requests, or over the complete run if all arrived at once."""
    arrival_s = records.requests.arrival_s[np.isfinite(records.requests.arrival_s)]  # others were never sent
    span_s = float(arrival_s.max() - arrival_s.min()) or records.end_s - float(arrival_s.min())
    return len(arrival_s) / span_s if span_s > 0 else 0.0


def slo_of(scenario: Scenario) -> Slo | None:
    """Return the limits of [slo] that apply to single requests, or None if there are no such limits."""
    limits = scenario.slo
    if (limits.ttft, limits.tpot, limits.jct) == (None, None, None):
        return None
    return Slo(ttft_s=limits.ttft, tpot_s=limits.tpot, jct_s=limits.jct)


@dataclass(frozen=True)
class VariantOutcome:
    """The results of simulating one variant: records of the first seed, and summaries of all seeds."""

    variant: Variant
    records: Records
    summaries: list[Summary]
    summary: Summary  # over all seeds; with intervals of the cost model's error where it is estimated
    # Where a run passed the range of the measurements behind the cost tables.
    extrapolations: tuple[Extrapolation, ...] = ()
    model_draws: int = 0  # runs with perturbed cost tables, which give the cost model's intervals

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the warnings that limit the trust in the numbers."""
        cost, run = self.variant.deployment.cost, self.variant.scenario.run
        notes = [
            *group_notes(self.records, self.variant.deployment),
            *(f"{one.description}." for one in self.extrapolations),
            front_note(cost, sent_rps(self.records)),
            unchecked_tables_note(self.variant.scenario),
            preemption_note(self.variant.deployment.scheduler, self.records),
            whole_prompts_note(self.variant.deployment),
            hidden_host_note(self.variant),
            unsteady_note(self),
            limits_note(self.records, self.variant.workload(self.records.seed)),
            slo_note(self.variant.scenario, self.records),
            *model_error.deployment_notes(self.variant.deployment),
        ]
        if cost.evidence.errors and not self.model_draws:
            reason = (
                "run.model_draws is 0"
                if run.model_draws == 0
                else f"runs of more than {model_error.MAX_REPEATED_REQUESTS:,} requests are not repeated by default; "
                f"run.model_draws = {model_error.DRAWS} repeats them"
            )
            notes.append(f"The cost model's own error is not in the intervals: {reason}.")
        return tuple(note for note in notes if note)


def result_of(outcome: VariantOutcome, scenario_text: str | None = None) -> Result:
    """Return an outcome in the form that reports take. A ``scenario_text`` that is given is not written again."""
    return Result(
        name=outcome.variant.name,
        summary=outcome.summary,
        records=outcome.records,
        deployment=outcome.variant.deployment,
        scenario_text=outcome.variant.scenario.to_toml() if scenario_text is None else scenario_text,
        summaries=outcome.summaries,
        notes=outcome.notes,
        extrapolations=outcome.extrapolations,
        model_draws=outcome.model_draws,
    )


def slo_note(scenario: Scenario, records: Records) -> str:
    """Return a warning of each limit of [slo] that no request meets, with the smallest value, otherwise ""."""
    texts = []
    for key, bound in (("ttft", scenario.slo.ttft), ("tpot", scenario.slo.tpot), ("jct", scenario.slo.jct)):
        found = metrics.request_column(records.requests, f"{key}_s")
        least = np.min(found[np.isfinite(found)], initial=math.inf)
        if bound is not None and bound < least < math.inf:
            label = metric_of(key).label
            texts.append(
                f"slo.{key} = {quantity(key, bound)} (the smallest {label} is {quantity(key, float(least), 3)})"
            )
    return f"No request meets {' and '.join(texts)}." if texts else ""


def preemption_note(scheduler: Scheduler, records: Records) -> str:
    """Return a warning if requests were preempted under by_rank, which ignores the cost of preemption, otherwise ""."""
    count = int(records.requests.preemptions.sum())
    if scheduler.preemption != "by_rank" or not count:
        return ""
    return (
        f"{count:,} preemptions, by rank or for lack of memory. by_rank ignores what swapping and recomputing"
        ' cost, which near capacity can exceed the gain. Compare with preemption = "worth(factor=1)".'
    )


def group_notes(records: Records, deployment: Deployment) -> list[str]:
    """Return a sentence for each group of replicas: what it served, how fast, at what price and model error."""
    notes, requests = [], records.requests
    mean = float(requests.prompt_tokens.mean()), max(1.0, float(requests.output_tokens.mean()))
    for number, (of_group, group) in enumerate(metrics.by_group(records, deployment) if deployment.groups else ()):
        r = of_group.requests
        share = len(r.status) / max(1, len(requests.status))
        ttft_s, tpot_s = (metrics.request_column(r, name) for name in ("ttft_s", "tpot_s"))
        ttft_s, tpot_s = ttft_s[np.isfinite(ttft_s)], tpot_s[np.isfinite(tpot_s)]
        served = f"{share:.0%} of the requests"
        if len(ttft_s):
            served += f", TTFT p50 {np.median(ttft_s):.3g} s and p90 {np.quantile(ttft_s, 0.9):.3g} s"
        if len(tpot_s):
            served += f", TPOT p50 {1e3 * np.median(tpot_s):.3g} ms"
        perturbed = model_error.perturbed_deployments(group)
        rates = [engine.service_rate(one, *mean) for one in (group, *perturbed)]
        error = f"{np.expm1(np.log(rates[1:]).std()):.0%}" if perturbed else "unknown"
        busy = np.minimum(of_group.totals.busy_s / records.end_s, 1.0).mean() if records.end_s > 0 else math.nan
        notes.append(
            f"Group {number}, {group_text(group)}: {served}, busy {busy:.0%}, {group.price_per_hour_usd:.2f} $/h; "
            f"service rate of a replica {rates[0]:.3g} requests/s (standard deviation of the cost model's error: "
            f"{error})."
        )
    return notes


def group_text(group: Deployment) -> str:
    """Return the replicas of a group as text: "2 x H100 tp2"."""
    p = group.parallel
    return f"{p.replicas} x {group.gpu.name} tp{p.tp}" + (f" pp{p.pp}" if p.pp > 1 else "")


def hidden_host_note(variant: Variant) -> str:
    """Return a warning if ``hide_host`` is set and the host is a named one, otherwise "".

    The times of named hosts are fitted to engines that overlap host and GPU, so that the overlap would count twice.
    """
    host = variant.scenario.deployment.host
    if not variant.deployment.scheduler.hide_host or not isinstance(host, str):
        return ""
    return (
        f"hide_host with the host {host!r} counts overlap twice, since its times are fitted to engines that overlap "
        "host and GPU. Set deployment.host to the measured CPU time of a step."
    )


def whole_prompts_note(deployment: Deployment) -> str:
    """Return a warning if the prefix cache is on, but the batching policy never uses it, otherwise ""."""
    by_sglang = deployment.scheduler.sglang is not None  # SGLang's rules use the cache for whole prompts, too
    if not deployment.limits.enable_prefix_caching or chunks_prompts(deployment) or by_sglang:
        return ""
    return (
        "The prefix cache finds nothing under this batching policy, which computes whole prompts. Take one with "
        'chunked prefill, such as scheduler.batching = "unified", or set engine.enable_prefix_caching = false.'
    )


def limits_note(records: Records, workload: Workload) -> str:
    """Return a warning with the share of finished outputs that ``max_tokens`` cut off, or "" if it is 0.

    Outputs with ``ignore_eos`` always end at ``max_tokens``: they count as finished, and not as cut off.
    """
    r = records.requests
    finished = r.status == Status.FINISHED
    if workload.max_tokens is None or not finished.any():
        return ""
    may_end = True if workload.ignore_eos is None else ~workload.ignore_eos
    share = float((finished & may_end & (r.output_tokens == workload.max_tokens)).sum() / finished.sum())
    if not share:
        return ""
    return f"{two_digits(100 * share)} % of outputs stop at max_tokens. With a larger max_tokens they could be longer."


def unsteady_note(outcome: VariantOutcome) -> str:
    """Return a warning if sessions make the load rise and fall for much of the window, otherwise ""."""
    variant, rates = outcome.variant, outcome.summary.rates
    if outcome.summary.is_steady:
        return ""
    period_s = metrics.steady_period(outcome.records, variant.workload(outcome.records.seed))
    assert period_s is not None  # a run with a steady share has sessions
    begin_s, end_s = period_s
    remedies = []
    if not variant.scenario.workload.is_replay:
        # With n times the requests, sessions start until n end_s. The load then falls for about as long as it rises, so
        # that its steady share is (n end_s - begin_s) / (n end_s + begin_s).
        n = begin_s * (1 + metrics.STEADY_SHARE) / (1 - metrics.STEADY_SHARE) / end_s
        remedies.append(f"raise workload.num_requests to {math.ceil(n * len(outcome.records.requests.status)):,}")
    if begin_s < end_s:
        remedies.append(f"measure from run.warmup_s = {begin_s:.0f} to run.time_limit_s = {end_s:.0f}")
    advice = " or ".join(remedies)
    return (
        f"The load is not steady for {1 - rates.steady_share.value:.0%} of the measured time: it rises until "
        f"{begin_s:.0f} s, while few sessions have reached later turns, and falls from {end_s:.0f} s on, when no more "
        f"sessions start. Rates, cost and waits are not those of a steady load{advice and f': {advice}'}."
    )


def recorded_run(outcome: VariantOutcome) -> RunResult:
    """Return the run of the first seed with the requests and the scenario, in the form that a records file takes."""
    variant = outcome.variant
    deployment = plain(deployment_facts(variant.deployment))
    metadata = {
        "scenario": variant.scenario.to_toml(),
        "deployment": deployment | {"model_shape": shape_facts(variant.deployment.model)},
        "warmup_s": variant.scenario.run.warmup_s,
    }
    return RunResult(outcome.records, variant.workload(outcome.records.seed), SIMULATED, metadata)


_Run = tuple[Records | None, Summary, tuple[Extrapolation, ...]]


def run(
    scenario: Scenario | Path | str,
    *,
    variants: Sequence[Variant] | None = None,
    jobs: int | None = None,
    progress: Progress = lambda *_: None,
    log_steps: bool = False,
    in_processes: bool = False,
) -> list[VariantOutcome]:
    """Return the outcome of every variant of a scenario, each simulated with every seed.

    Variants with the same [workload] have the same requests at a seed. If no variant is random (replays), only one seed
    is run. If cost tables have estimates of their error, the first seed is run again with perturbed tables, for the
    intervals of the cost model's error, unless ``run.model_draws`` is 0, or is not given and the workload is long. Runs
    use threads, because the compiled engine releases the GIL.

    Args:
        scenario: The scenario, or its file.
        variants: The result of ``build`` for this scenario. If None, the variants are built here.
        jobs: Runs at a time, by default one for each CPU that this process may use.
        in_processes: Whether runs may use processes (``search.processes``) while the kernel is not compiled.
    """
    requested = scenario if isinstance(scenario, Scenario) else load(scenario)
    built = list(build(requested) if variants is None else variants)
    first_seed, count = requested.run.seed, requested.run.seeds if any(one.is_random for one in built) else 1
    seeds = range(first_seed, first_seed + count)
    logs = {"max_log_steps": MAX_LOGGED_STEPS} if log_steps else {}
    by_seed = [_Task(one, seed, with_records=seed == seeds[0], logs=logs) for seed in seeds for one in built]
    perturbed_tasks = [_perturbed_tasks(one, seeds[0]) for one in built]
    tasks = [*by_seed, *(task for tasks_of_variant in perturbed_tasks for task in tasks_of_variant)]
    runs = _run_all(tasks, min(jobs or available_cpus(), len(tasks)), progress, split=in_processes)
    remaining = iter(runs[len(by_seed) :])
    outcomes = []
    for number, (variant, tasks_of_variant) in enumerate(zip(built, perturbed_tasks, strict=True)):
        variant_runs = runs[number : len(by_seed) : len(built)]  # tasks are ordered by seed, then variant
        summaries = [summary for _, summary, _ in variant_runs]
        summary = metrics.combine(summaries)
        perturbed = [next(remaining)[1] for _ in tasks_of_variant]
        if perturbed:
            summary = metrics.with_model_error(summary, summaries[0], perturbed, model_error.LEVEL)
        if variant.scenario.workload.is_replay and summary.counts.finished == summary.counts.arrivals:
            names = ("requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s")  # fixed by the trace
            fixed = {name: replace(getattr(summary.rates, name), half_width=math.nan) for name in names}
            summary = replace(summary, rates=replace(summary.rates, **fixed))
        extrapolations = metrics.merge_extrapolations([one for _, _, one in variant_runs])
        records = variant_runs[0][0]
        assert records is not None  # those of the first seed are kept
        outcomes.append(VariantOutcome(variant, records, summaries, summary, extrapolations, len(perturbed)))
    return outcomes


def _perturbed_tasks(variant: Variant, seed: int) -> list[_Task]:
    draws = variant.scenario.run.model_draws
    if draws == 0 or not any(one.cost.evidence.errors for one in variant.deployment.replica_groups):
        return []
    if draws is None and len(variant.workload(seed)) > model_error.MAX_REPEATED_REQUESTS:
        return []
    perturbed = model_error.perturbed_deployments(variant.deployment, draws or model_error.DRAWS)
    return [_Task(replace(variant, deployment=one), seed) for one in perturbed]


@dataclass(frozen=True)
class _Task:
    """A run of one seed. Records are only returned if requested, because records of many seeds fill the memory."""

    variant: Variant
    seed: int
    with_records: bool = False
    logs: Mapping[str, int] = field(default_factory=dict)

    def sendable(self) -> _Task:
        """Return a copy for another process, with its requests instead of the function that draws them."""
        drawn = self.variant.workload(self.seed)
        return replace(self, variant=replace(self.variant, workload=partial(_drawn, drawn)))


def _drawn(workload: Workload, _seed: int) -> Workload:
    return workload


def _simulated(task: _Task, engine_name: str = "kernel") -> _Run:
    """Simulate by the kernel, or by the reference until the kernel is compiled."""
    variant, seed, settings = task.variant, task.seed, task.variant.scenario.run
    with error_note(f"in the run of {variant.name!r} with seed {seed}"), engine_note(variant.scenario):
        workload = variant.workload(seed)
        options: dict[str, Any] = {"time_limit_s": settings.time_limit_s, "strict": settings.strict, **task.logs}
        options["engine"] = "kernel" if engine.ready() else engine_name
        records = engine.simulate(workload, variant.deployment, seed=seed, **options)
        slo = slo_of(variant.scenario)
        summary = metrics.summarize(records, variant.deployment, workload=workload, slo=slo, warmup_s=settings.warmup_s)
    return records if task.with_records else None, summary, metrics.beyond_reach(records, variant.deployment)


def _run_all(tasks: Sequence[_Task], jobs: int, progress: Progress, *, split: bool) -> list[_Run]:
    progress(0, len(tasks))

    def reference_s() -> float:
        runs = ((task.variant.workload(task.seed), task.variant.deployment) for task in tasks)
        return sum(engine.reference_s(*one) for one in runs) / (jobs if split else 1)

    engine_name = engine.warm_up(reference_s)  # Otherwise all threads would wait for the first to compile the kernel.
    results: dict[int, _Run] = {}
    split = split and jobs > 1 and engine_name == "reference"
    with processes(jobs) if split else threads(jobs) as workers:
        sent = [task.sendable() for task in tasks] if split else tasks
        for number, result in workers.run(sent, partial(_simulated, engine_name=engine_name)):
            results[number] = result
            progress(len(results), len(tasks))
    return [results[number] for number in range(len(tasks))]


def ineffective_options(variants: Sequence[Variant], seeds: int) -> list[str]:
    """Return notes on settings that a trace leaves without effect, and on requests that were left out of a trace."""
    found = []
    for variant in variants:
        section, workload = variant.scenario.workload, variant.workload(variant.scenario.run.seed)
        # The readers of traces note in the name how many rows they left out: "mine (without 3 empty)".
        trace, _, left_out = workload.name.partition(" (")
        if section.trace is not None and (counts := re.search(r"without ([\d,]+) (?:failed or )?empty", left_out)):
            found.append(f"{trace} has {counts[1]} requests that failed or have 0 tokens; they were left out")
        if section.is_replay and (replayed := len(workload)) < (section.num_requests or 0):
            found.append(
                f"num_requests is {section.num_requests:,}, but the replayed trace has only {replayed:,}; "
                "those were run"
            )
    if seeds > 1 and not any(variant.is_random for variant in variants):
        found.append("a replay is deterministic: further seeds change nothing, so one was run")
    for variant in variants:
        scheduler, policy = variant.deployment.scheduler, variant.scenario.scheduler.policy
        if scheduler.binning == "one":
            found.append(f'{policy} has one bin; set scheduler.binning = "learned(k=8)" and a [predictor] for more')
        if scheduler.rank == "vtc" and variant.workload(variant.scenario.run.seed).tenant is None:
            found.append("vtc without tenants is first come, first served; set workload.tenants")
    return list(dict.fromkeys(found))
