"""The complete plan: the chosen schedule with its alternatives, frontier, drift, timeline, and other systems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lengthwise.catalog import weight_bytes
from lengthwise.schedule.adaptation import redeployment
from lengthwise.schedule.baselines import curve
from lengthwise.schedule.controls import Controls, Layout, Stage, Strategy, rra_layout, waa_layout
from lengthwise.schedule.estimation import Estimates, Estimator, Reason
from lengthwise.schedule.frontier import best_evaluated_rps, breakpoints, evaluated_fronts, explore, static_batches
from lengthwise.schedule.kernel import largest_excess, pace_factor, part_factor, presence
from lengthwise.schedule.length_drift import drift
from lengthwise.schedule.planner import TIE, Planner
from lengthwise.schedule.stage_costs import Setting, normal_scores, projected_share
from lengthwise.schema.errors import InputError, ScheduleError
from lengthwise.schema.schedule import (
    LatencyBound,
    OtherSystem,
    ScheduleParts,
    SchedulePlan,
    StaticBatching,
    Timeline,
    TimelineBar,
)
from lengthwise.schema.workload import Floats

Progress = Callable[[int, int], None]
"""Callback that receives the number of simulated configurations and their total (0 if the total is unknown)."""

MIN_GAIN = 0.02
"""A division into parts with a smaller relative gain in throughput is not reported: a search may miss as much."""
WARM_UP_ROUNDS = 3  # rounds that a timeline omits, because they start with an empty pipeline
MAX_BARS = 2500


def other_systems(
    planner: Planner, bound_s: float, systems: Sequence[str], seed: int = 0, progress: Progress = lambda *_: None
) -> tuple[OtherSystem, ...]:
    """Return the results of other systems (Orca, vLLM, ...) under the planner's latency bound."""
    simulated = itertools.count(1)
    found = []
    for system in dict.fromkeys(systems):
        results = curve(planner.estimator, system, seed=seed, report=lambda: progress(next(simulated), 0))
        at, front = (
            results.best_at(bound_s, worst_case=planner.worst_case),
            results.front(worst_case=planner.worst_case),
        )
        low_rps, high_rps = (math.nan, math.nan) if at is None else results.intervals_rps[at]
        best = None if at is None else results.rows[at]
        found.append(OtherSystem(system, best, low_rps, high_rps, len(results.rows), front))
    return tuple(found)


def best_parts(planner: Planner, bound_s: float = math.inf, above_rps: float = 0.0) -> ScheduleParts | None:
    """Return the best division of the GPUs into equal, independent parts with the same schedule, under a bound.

    The result is None if no division serves noticeably more than ``above_rps``, the throughput of all GPUs together.
    """
    setting, found = planner.estimator.setting, []
    for size in part_sizes(setting.cluster.gpus, setting.cluster.node.gpus):
        if weight_bytes(setting.model) > size * setting.available_bytes:
            continue
        tables = {tp: one for tp, one in setting.tables.items() if tp <= size}
        part = planner.estimator.replace(cluster=replace(setting.cluster, gpus=size), tables=tables)
        try:
            row = planner.with_estimator(part).best(bound_s).row
        except (InputError, ScheduleError):
            continue  # Only WAA on one GPU, or no schedule fits and meets the bound.
        found.append(ScheduleParts(size, setting.cluster.gpus // size, row))
    best = max(found, key=lambda one: (one.throughput_rps, one.gpus), default=None)
    return best if best and best.throughput_rps > above_rps * (1 + MIN_GAIN) else None


def part_sizes(gpus: int, node_gpus: int) -> list[int]:
    """Return possible sizes of a part in GPUs: divisors of a node, and multiples of a node that divide all GPUs."""
    within = [size for size in range(1, node_gpus + 1) if node_gpus % size == 0]
    nodes = [size for size in range(2 * node_gpus, gpus, node_gpus) if gpus % size == 0]
    return [size for size in within + nodes if size < gpus]


@dataclass(frozen=True, eq=False)
class Explanation:
    """Stages and times of one schedule. Both are empty if no layout is possible.

    ``prefill_s`` [prefill stages] are the mean seconds of a prefill visit (RRA's timeline varies them by micro-batch).
    ``decode_s`` [N_D, decode stages] are the seconds of a decode visit at each iteration. ``timeline`` has the visits
    of a part of the steady state, which starts at 0 s. Its stages are numbered in the order of the layout, under WAA
    the prefill stages before the decode stages.
    """

    controls: Controls
    estimates: Estimates
    layout: Layout
    prefill_s: Floats
    decode_s: Floats
    timeline: tuple[TimelineBar, ...]


def explain(estimator: Estimator, controls: Controls, rounds: int = 2) -> Explanation:
    """Return one schedule in detail, with a timeline of ``rounds`` prefills. Raises as ``Estimator.estimate``."""
    estimates = estimator.estimate([controls])
    if estimates.reason[0] in (Reason.GROUPS, Reason.LAYERS):
        return Explanation(controls, estimates, Layout(()), np.zeros(0), np.zeros((0, 0)), ())
    kind = _explain_rra if controls.strategy == Strategy.RRA else _explain_waa
    return kind(estimator.setting, controls, estimates, rounds)


def _explain_rra(setting: Setting, controls: Controls, estimates: Estimates, rounds: int) -> Explanation:
    layout = rra_layout(setting.model.layers, setting.cluster.gpus, controls.tp, controls.tp_groups)
    parts = int(estimates.micro_batches[0])
    prefill_parts = min(parts, controls.prefill_batch)
    new = controls.prefill_batch * float(setting.batches.size_factor(np.array(controls.prefill_batch / prefill_parts)))
    prefill_s = setting.stage_visits_s(layout.prefill, new / prefill_parts, prefill=True)
    decode_s = _phase_s(setting, layout.decode, controls.decode_steps, new, parts)
    spread = float(estimates.prefill_range[0]) * prefill_parts**0.5 / setting.z if setting.z else 0.0
    scale = np.maximum(1.0 + spread * normal_scores(prefill_parts)[prefill_parts], 0.0)
    scale *= [part_factor(new, prefill_parts, job) for job in range(prefill_parts)]
    all_visits = round_visits(prefill_s, decode_s, parts, WARM_UP_ROUNDS + rounds, scale)
    visits = all_visits[WARM_UP_ROUNDS * (len(all_visits) // (WARM_UP_ROUNDS + rounds)) :]
    start_s = min(visit.start_s for visit in visits)
    timeline = tuple(replace(v, start_s=v.start_s - start_s, end_s=v.end_s - start_s) for v in visits)
    return Explanation(controls, estimates, layout, prefill_s, decode_s, timeline)


def _explain_waa(setting: Setting, controls: Controls, estimates: Estimates, rounds: int) -> Explanation:
    prefill_gpus = int(estimates.prefill_gpus[0])
    layout = waa_layout(setting.model.layers, setting.cluster.gpus, prefill_gpus, controls.tp, controls.tp_groups)
    parts, batch = int(estimates.micro_batches[0]), float(estimates.decode_batch[0])
    load, projected = setting.phase(1, renewal=True), projected_share(setting.model)
    context = load.kv_tokens[0] / load.seqs[0] if load.seqs[0] else 0.0
    new = controls.prefill_batch * float(setting.batches.size_factor(np.array(float(controls.prefill_batch))))
    prefill_s = setting.stage_visits_s(layout.prefill, new, prefill=True, share=1.0 - projected)
    seqs = np.array([batch / parts])
    entering = batch / load.seqs[0] / parts * setting.task.mean_prompt_tokens if projected and batch else 0.0
    decode_s = setting.stage_visits_s(
        layout.decode, seqs, seqs * context, prefill=False, share=projected, more_tokens=entering
    ).T
    cycle_s, iteration_s = float(estimates.cycle_s[0]), float(estimates.decode_s[0])
    pace_s = cycle_s if setting.assumptions.lockstep else iteration_s
    end_s, prefill_stages = rounds * cycle_s, len(prefill_s)
    turns = int(end_s / pace_s) + 2 if pace_s > 0 else 0
    prefills = pipelined_visits(prefill_s, cycle_s, 1, rounds + prefill_stages, is_prefill=True)
    decodes = pipelined_visits(decode_s[0], pace_s, parts, turns, is_prefill=False)
    both = prefills + [replace(visit, stage=visit.stage + prefill_stages) for visit in decodes]
    timeline = tuple(visit for visit in both if visit.start_s < end_s)
    return Explanation(controls, estimates, layout, prefill_s, decode_s, timeline)


def _phase_s(setting: Setting, stages: tuple[Stage, ...], steps: int, new: float, parts: int) -> Floats:
    load, uneven, new = setting.phase(steps), part_factor(new, parts, parts - 1), new / parts
    present, factor = np.array([presence(seqs, max(new, 1.0), False) for seqs in (new * load.seqs).tolist()]).T
    seqs, kv_tokens = new * load.seqs * factor, new * load.kv_tokens * factor
    visit_s = setting.stage_visits_s(stages, seqs, kv_tokens, prefill=False).T
    score = float(normal_scores(parts)[parts, -1])
    with np.errstate(divide="ignore", invalid="ignore"):
        dispersion = np.nan_to_num(load.seqs_variance / load.seqs)
        larger = np.array([largest_excess(one, by, score) for one, by in zip(seqs, dispersion, strict=True)])
        larger += (uneven - 1.0) * seqs
        more_tokens = np.nan_to_num(kv_tokens * (1 + larger / seqs))
        first_s = setting.stage_visits_s(stages, seqs + larger, more_tokens, prefill=False)[0]
        longest = np.nan_to_num(first_s / visit_s[:, 0], nan=1.0)
    rows = zip(present, longest, visit_s.max(axis=1), visit_s.sum(axis=1), strict=True)
    pace = [pace_factor(probability, parts, most, largest_s, total_s) for probability, most, largest_s, total_s in rows]
    return np.asarray(np.array(pace)[:, None] * visit_s)


def round_visits(
    prefill_s: npt.ArrayLike, decode_s: npt.ArrayLike, micro_batches: int, rounds: int, scale: npt.ArrayLike = ()
) -> list[TimelineBar]:
    """Return every visit of ``rounds`` rounds of RRA that start with an empty pipeline.

    A micro-batch enters a stage once it has left the stage before and the stage is free. It starts its next iteration
    once it has left the last stage. Stages serve the iterations in order, and the micro-batches of each in order.

    Args:
        prefill_s: [stages] seconds of a prefill visit.
        decode_s: [N_D, stages] seconds of a decode visit at each iteration.
        micro_batches: Number of micro-batches in the pipeline.
        rounds: Number of prefills, each with N_D decode iterations.
        scale: [at most micro_batches] factor on ``prefill_s`` of each micro-batch that prefills, in every round. If
            empty, all micro-batches prefill at a factor of 1.
    """
    prefill, decodes = np.asarray(prefill_s, dtype=np.float64), np.asarray(decode_s, dtype=np.float64)
    scales = np.asarray(scale, dtype=np.float64)
    scales = scales if len(scales) else np.ones(micro_batches)
    free_s, ready_s = [0.0] * len(prefill), [0.0] * micro_batches
    visits: list[TimelineBar] = []
    for _ in range(rounds):
        for job in range(len(scales)):
            visits += _pass_stages(prefill * scales[job], free_s, ready_s, job, is_prefill=True)
        for visit_s in decodes:
            for job in range(micro_batches):
                visits += _pass_stages(visit_s, free_s, ready_s, job, is_prefill=False)
    return visits


def pipelined_visits(
    visit_s: npt.ArrayLike, period_s: float, micro_batches: int, turns: int, *, is_prefill: bool
) -> list[TimelineBar]:
    """Return WAA's visits in ``turns`` passes of every micro-batch through the stages [stages] of ``visit_s`` seconds.

    Every ``period_s`` seconds all micro-batches start a pass. A prefill waits only until a stage is free. A decode also
    waits until its micro-batch's previous pass has ended.
    """
    seconds = np.asarray(visit_s, dtype=np.float64)
    free_s, ready_s = [0.0] * len(seconds), [0.0] * micro_batches
    visits: list[TimelineBar] = []
    for turn in range(turns):
        for job in range(micro_batches):
            ready_s[job] = max(0.0 if is_prefill else ready_s[job], turn * period_s)
            visits += _pass_stages(seconds, free_s, ready_s, job, is_prefill=is_prefill)
    return visits


def _pass_stages(
    seconds: Floats, free_s: list[float], ready_s: list[float], job: int, *, is_prefill: bool
) -> list[TimelineBar]:
    visits = []
    for stage, visit_s in enumerate(seconds.tolist()):
        start_s = max(ready_s[job], free_s[stage])
        free_s[stage] = ready_s[job] = start_s + visit_s
        visits.append(TimelineBar(stage, start_s, start_s + visit_s, is_prefill, job))
    return visits


def build_plan(
    planner: Planner,
    bound_s: float = math.inf,
    *,
    name: str = "",
    metadata: Mapping[str, str] | None = None,
    exhaustive: bool = False,
    baselines: Sequence[str] = (),
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> SchedulePlan:
    """Return the best schedule under a bound with alternatives, frontier, drift, timeline and static batches.

    Args:
        metadata: Fixed parameters by name, for display.
        exhaustive: Whether the choice evaluates every schedule.
        baselines: Other systems to compare with, from ``SYSTEMS``. Their simulation takes most of the time.
        seed: Seed of the baselines' lengths.
        progress: Called with (configurations simulated so far, 0).

    Raises:
        InputError: The bound is not above 0.
        ScheduleError: No schedule meets the bound, or none is feasible.
    """
    try:
        choice = planner.best(bound_s, separately=True, exhaustive=exhaustive)
    except ScheduleError as error:
        part = best_parts(planner, bound_s)
        if part is None:
            raise
        raise ScheduleError(
            f"{error}. Fewer GPUs meet it: {part.words}, with {part.row.words}, {part.throughput_rps:.3g} requests/s "
            f"(--gpus {part.gpus} plans a part)"
        ) from None
    setting = planner.estimator.setting
    searched_s = explore(planner)
    if best_evaluated_rps(planner, bound_s) > choice.row.throughput_rps * (1 + TIE):
        # The frontier's searches found a better schedule; a second search for the choice reuses their estimates.
        better = planner.best(bound_s, separately=True)
        evaluated = sum(space.evaluated for space in planner.spaces)
        seconds = choice.search.seconds + better.search.seconds
        choice = replace(better, search=replace(better.search, evaluated=evaluated, seconds=seconds))
    fronts = evaluated_fronts(planner, {strategy: [*known_s, bound_s] for strategy, known_s in searched_s.items()})
    static = static_batches(planner.estimator)
    explained = explain(planner.estimator, choice.controls)
    stages = explained.layout.prefill
    if choice.controls.strategy is not Strategy.RRA:
        stages += explained.layout.decode
    visits = sorted(explained.timeline, key=lambda visit: (visit.start_s, visit.stage))[:MAX_BARS]
    return SchedulePlan(
        name=name,
        metadata=dict(metadata or {}),
        bound=LatencyBound(bound_s, setting.bound_tokens, setting.assumptions.level, planner.worst_case),
        chosen=choice.row,
        search=choice.search,
        static=StaticBatching(static.best(bound_s), static.front(bound_s)),
        front=fronts,
        breakpoints=breakpoints(fronts),
        drift=drift(planner, choice),
        redeploy=redeployment(setting.model, setting.cluster, Strategy(choice.row.strategy)),
        timeline=Timeline(
            tuple(f"{place}: {_stage_label(stage)}" for place, stage in enumerate(stages, 1)), tuple(visits)
        ),
        others=other_systems(planner, bound_s, baselines, seed, progress),
        threshold=setting.assumptions.threshold,
        parts=best_parts(planner, bound_s, choice.row.throughput_rps),
    )


def _stage_label(stage: Stage) -> str:
    role = {"both": "", "prefill": ", prefills", "decode": ", decodes"}[stage.role]
    gpus = "1 GPU" if stage.tp == 1 else f"{stage.tp} GPUs"
    return f"{gpus}, {stage.layers} {'layer' if stage.layers == 1 else 'layers'}{role}"
