"""The whole answer to "which schedule": the choice, what else there was, and what would become of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lengthwise.catalog import weight_bytes
from lengthwise.schedule._kernel import beyond, pace, part, rare
from lengthwise.schedule.adaptation import redeployment
from lengthwise.schedule.baselines import curve
from lengthwise.schedule.choose import TIE, Choice, Planner
from lengthwise.schedule.controls import Controls, Layout, Stage, Strategy, rra_layout, waa_layout
from lengthwise.schedule.estimation import Estimates, Estimator, Reason
from lengthwise.schedule.frontier import breakpoints, explored_s, fronts_seen, most_seen_rps, static_batches
from lengthwise.schedule.length_drift import drift
from lengthwise.schedule.lengths import PhaseShares
from lengthwise.schedule.stage_costs import Setting, deviations, projected_share, visits_s
from lengthwise.schedule.timeline import Visit, pipelined_visits, round_visits
from lengthwise.schema.errors import InputError, ScheduleError
from lengthwise.schema.schedule import OtherSystem, ScheduleParts, SchedulePlan, TimelineBar

Progress = Callable[[int, int], None]
"""Of configurations played out, and of how many it will be, 0 where that is not known."""


def others(
    planner: Planner, bound_s: float, systems: Iterable[str], seed: int = 0, progress: Progress = lambda *_: None
) -> tuple[OtherSystem, ...]:
    """What the systems yield, each once, the bound held as the planner holds it."""
    played = itertools.count(1)
    return tuple(
        _other(planner, bound_s, system, seed, lambda: progress(next(played), 0)) for system in dict.fromkeys(systems)
    )


def _other(planner: Planner, bound_s: float, system: str, seed: int, report: Callable[[], None]) -> OtherSystem:
    of = curve(planner.estimator, system, seed=seed, report=report)
    at = of.best_at(bound_s, worst_case=planner.worst_case)
    return OtherSystem(
        system=system,
        best=None if at is None else of.row(at),
        low_rps=math.nan if at is None else float(of.throughput_low_rps[at]),
        high_rps=math.nan if at is None else float(of.throughput_high_rps[at]),
        configurations=of.configurations,
        front=of.front(worst_case=planner.worst_case),
    )


MIN_GAIN = 0.02
"""What a search may miss; less than so much more is not told."""


def parts(planner: Planner, bound_s: float = math.inf, above_rps: float = 0.0) -> ScheduleParts | None:
    """The parts that serve most under a bound; None: none serves noticeably more than ``above_rps``.

    Args:
        planner: Of all GPUs.
        bound_s: Latency that must be held; infinite: any.
        above_rps: What all of them together have.
    """
    found = list(_found(planner, bound_s))
    best = max(found, key=lambda one: (one.throughput_rps, one.gpus), default=None)
    return best if best and best.throughput_rps > above_rps * (1 + MIN_GAIN) else None


def _found(planner: Planner, bound_s: float) -> Iterator[ScheduleParts]:
    """The best of each size that meets the bound."""
    setting = planner.estimator.setting
    gpus = setting.cluster.gpus
    for size in _sizes(gpus, setting.cluster.node.gpus):
        if weight_bytes(setting.model) > size * setting.available_bytes:
            continue
        tables = {tp: one for tp, one in setting.tables.items() if tp <= size}
        cluster = replace(setting.cluster, gpus=size)
        part = Estimator(setting.task, cluster, setting.model, tables, setting.assumptions)
        try:
            yield ScheduleParts(size, gpus // size, planner.anew(part).best(bound_s).row)
        except (InputError, ScheduleError):
            continue  # WAA alone on one GPU, or nothing that fits and meets the bound


def _sizes(gpus: int, node_gpus: int) -> list[int]:
    """GPUs of a part: what a node holds a whole number of, a few left over or not, or whole nodes that use up all."""
    within = [size for size in range(1, node_gpus + 1) if node_gpus % size == 0]
    nodes = [size for size in range(2 * node_gpus, gpus, node_gpus) if gpus % size == 0]
    return [size for size in within + nodes if size < gpus]


Floats = npt.NDArray[np.float64]

WARM_ROUNDS = 3
"""Rounds from an empty pipeline that a timeline leaves out."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """One schedule's stages and times.

    Attributes:
        controls: The schedule.
        estimates: Its one row.
        layout: Which layers lie where; no stages where no layout is possible.
        encode_s: [encoding stages] seconds of an encode visit; RRA's timeline has shorter and longer ones.
        decode_s: [N_D, decoding stages] seconds of a decode visit at each iteration.
        timeline: Visits of a steady piece, from 0 s on. WAA: stages in the order of the layout.
    """

    controls: Controls
    estimates: Estimates
    layout: Layout
    encode_s: Floats
    decode_s: Floats
    timeline: tuple[Visit, ...]

    @property
    def reason(self) -> Reason:
        """Why the schedule cannot be, or that it can."""
        return Reason(int(self.estimates.reason[0]))

    @property
    def slowest_stage(self) -> tuple[Stage, Stage]:
        """The stages that bound encoding and decoding."""
        slow = int(self.encode_s.argmax()), int(self.decode_s.sum(axis=0).argmax())
        return self.layout.encode[slow[0]], self.layout.decode[slow[1]]


def explain(estimator: Estimator, controls: Controls, rounds: int = 2) -> Explanation:
    """One schedule in detail, with a timeline of so many rounds (WAA: encodings).

    Raises:
        InputError: As for ``Estimator.estimate``.
    """
    estimates = estimator.estimate([controls])
    setting = estimator.setting
    if estimates.reason[0] in (Reason.GROUPS, Reason.LAYERS):
        return Explanation(controls, estimates, Layout(()), np.zeros(0), np.zeros((0, 0)), ())
    if controls.strategy == Strategy.RRA:
        return _rra(setting, controls, estimates, rounds)
    return _waa(setting, controls, estimates, rounds)


def _rra(setting: Setting, controls: Controls, estimates: Estimates, rounds: int) -> Explanation:
    layout = rra_layout(setting.model.layers, setting.cluster.gpus, controls.tp, controls.tp_groups)
    parts = int(estimates.micro_batches[0])
    encoding = min(parts, controls.encode_batch)
    share = setting.phase(controls.decode_steps)
    new = controls.encode_batch * float(setting.resized.times(np.array(controls.encode_batch / encoding)))
    encode_s = _encode_s(setting, layout.encode, new / encoding, 1.0)
    decode_s = _phase_s(setting, layout.decode, new, share, parts)
    spread = float(estimates.encode_range[0]) * encoding**0.5 / setting.z if setting.z else 0.0
    scale = np.maximum(1.0 + spread * deviations(encoding)[encoding], 0.0)
    scale *= [part(new, encoding, job) for job in range(encoding)]
    all_visits = round_visits(encode_s, decode_s, parts, WARM_ROUNDS + rounds, scale)
    a_round = len(all_visits) // (WARM_ROUNDS + rounds)
    timeline = _from_zero(all_visits[WARM_ROUNDS * a_round :])
    return Explanation(controls, estimates, layout, encode_s, decode_s, timeline)


def _waa(setting: Setting, controls: Controls, estimates: Estimates, rounds: int) -> Explanation:
    encode_gpus = int(estimates.encode_gpus[0])
    layout = waa_layout(setting.model.layers, setting.cluster.gpus, encode_gpus, controls.tp, controls.tp_groups)
    parts, batch = int(estimates.micro_batches[0]), float(estimates.decode_batch[0])
    share, projected = setting.phase(1, renewal=True), projected_share(setting.model)
    context = share.kv_tokens[0] / share.seqs[0] if share.seqs[0] else 0.0
    new = controls.encode_batch * float(setting.resized.times(np.array(float(controls.encode_batch))))
    encode_s = _encode_s(setting, layout.encode, new, 1.0 - projected)
    per_visit = np.array([batch / parts])
    entering = batch / share.seqs[0] / parts * setting.task.mean_prompt_tokens if projected and batch else 0.0
    decode_s = _decode_s(setting, layout.decode, per_visit, per_visit * context, entering, projected)
    cycle_s, pace_s = float(estimates.cycle_s[0]), float(estimates.decode_s[0])
    held_s = cycle_s if setting.assumptions.lockstep else pace_s
    encodings = pipelined_visits(encode_s, cycle_s, 1, rounds + len(encode_s), "encode")
    end_s = rounds * cycle_s
    turns = int(end_s / held_s) + 2 if held_s > 0 else 0
    decodes = pipelined_visits(decode_s[0], held_s, parts, turns, "decode")
    behind = len(encode_s)
    both = encodings + [replace(visit, stage=visit.stage + behind) for visit in decodes]
    timeline = tuple(visit for visit in both if visit.start_s < end_s)
    return Explanation(controls, estimates, layout, encode_s, decode_s, timeline)


def _phase_s(setting: Setting, stages: tuple[Stage, ...], new: float, share: PhaseShares, parts: int) -> Floats:
    """[N_D, stages] seconds of decode visits of a micro-batch, ``new`` requests in all, as the estimate has them."""
    uneven, new = part(new, parts, parts - 1), new / parts
    there, more = np.array([rare(one, max(new, 1.0), False) for one in (new * share.seqs).tolist()]).T
    seqs, kv_tokens = new * share.seqs * more, new * share.kv_tokens * more
    visit_s = _decode_s(setting, stages, seqs, kv_tokens)
    score = float(deviations(parts)[parts, -1])
    with np.errstate(divide="ignore", invalid="ignore"):
        dispersion = np.nan_to_num(share.seqs_variance / share.seqs)
        larger = np.array([beyond(one, by, score) for one, by in zip(seqs, dispersion, strict=True)])
        larger += (uneven - 1.0) * seqs
        ahead = np.nan_to_num(kv_tokens * (1 + larger / seqs))
        longest = np.nan_to_num(_decode_s(setting, stages, seqs + larger, ahead)[:, 0] / visit_s[:, 0], nan=1.0)
    rows = zip(there, longest, visit_s.max(axis=1), visit_s.sum(axis=1), strict=True)
    times = [pace(some, parts, most, largest_s, whole_s) for some, most, largest_s, whole_s in rows]
    return np.asarray(np.array(times)[:, None] * visit_s)


def _encode_s(setting: Setting, stages: tuple[Stage, ...], seqs: float, share: float) -> Floats:
    last = len(stages) - 1
    seconds = [
        visits_s(setting.packed(s.tp), seqs, 0.0, s.layers, p == 0, p == last, encode=True, share=share)
        for p, s in enumerate(stages)
    ]
    return np.array(seconds, dtype=np.float64).reshape(len(stages))


def _decode_s(
    setting: Setting,
    stages: tuple[Stage, ...],
    seqs: Floats,
    kv_tokens: Floats,
    more_tokens: float = 0.0,
    share: float = 0.0,
) -> Floats:
    last = len(stages) - 1
    seconds = [
        visits_s(
            setting.packed(s.tp), seqs, kv_tokens, s.layers, p == 0, p == last,
            encode=False, share=share, more_tokens=more_tokens,
        )
        for p, s in enumerate(stages)
    ]  # fmt: skip
    return np.array(seconds).T


def _from_zero(visits: list[Visit]) -> tuple[Visit, ...]:
    begin_s = min(visit.start_s for visit in visits)
    return tuple(replace(v, start_s=v.start_s - begin_s, end_s=v.end_s - begin_s) for v in visits)


MOST_BARS = 2500
"""Bars of a timeline, from its start on."""


def answer(
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
    """The best schedule under a bound with its runner-ups, frontier, drift and timeline, and doing nothing beside it.

    Args:
        planner: Whose schedules.
        bound_s: Latency that must be held; infinite: any.
        name: Of the question.
        metadata: What is fixed, by name.
        exhaustive: Look at every schedule for the choice.
        baselines: Other systems to hold it against (``SYSTEMS``), which takes longer than all the rest.
        seed: Of the lengths that those are played with.
        progress: Called with how many of their configurations were played out, and 0.

    Raises:
        InputError: The bound is not above 0.
        ScheduleError: Nothing meets it, or nothing fits.
    """
    choice = _chosen(planner, bound_s, exhaustive=exhaustive)
    setting = planner.estimator.setting
    searched_s = explored_s(planner)
    if most_seen_rps(planner, bound_s) > choice.row.throughput_rps * (1 + TIE):
        choice = _retry(planner, choice)
    fronts = fronts_seen(planner, {of: [*known_s, bound_s] for of, known_s in searched_s.items()})
    static = static_batches(planner.estimator)
    explained = explain(planner.estimator, choice.controls)
    return SchedulePlan(
        name=name,
        metadata=dict(metadata or {}),
        bound_s=bound_s,
        level=setting.assumptions.level,
        quantile_tokens=setting.bound_tokens,
        worst_case=planner.worst_case,
        chosen=choice.row,
        sides=choice.sides,
        gap=choice.gap,
        evaluated=choice.evaluated,
        points=choice.points,
        seconds=choice.seconds,
        static=static.best(bound_s),
        static_front=static.front(bound_s),
        front=fronts,
        breakpoints=breakpoints(fronts),
        drift=drift(planner, choice),
        redeploy=redeployment(setting.model, setting.cluster, Strategy(choice.row.strategy)),
        stages=_stages(explained, choice),
        timeline=_bars(explained),
        others=others(planner, bound_s, baselines, seed, progress),
        threshold=setting.assumptions.threshold,
        parts=parts(planner, bound_s, choice.row.throughput_rps),
    )


def _chosen(planner: Planner, bound_s: float, *, exhaustive: bool) -> Choice:
    """The choice; where there is none the error says which part of the GPUs would have one by itself."""
    try:
        return planner.best(bound_s, disaggregated=True, exhaustive=exhaustive)
    except ScheduleError as error:
        less = parts(planner, bound_s)
        if less is None:
            raise
        raise ScheduleError(
            f"{error}. Fewer GPUs meet it: {less.words}, with {less.row.words}, {less.throughput_rps:.3g} requests/s "
            f"(--gpus {less.gpus} plans a part)"
        ) from None


def _retry(planner: Planner, choice: Choice) -> Choice:
    """The choice once more, where the frontier came by something better; it has cost all that was estimated."""
    better = planner.best(choice.bound_s, disaggregated=True)
    evaluated = sum(side.evaluated for side in planner.sides)
    return replace(better, evaluated=evaluated, seconds=choice.seconds + better.seconds)


def _stages(explained: Explanation, choice: Choice) -> tuple[str, ...]:
    split = choice.controls.strategy is not Strategy.RRA
    stages = explained.layout.encode + (explained.layout.decode if split else ())
    return tuple(f"{place}: {_stage(stage)}" for place, stage in enumerate(stages, 1))


def _stage(stage: Stage) -> str:
    does = {"both": "", "encode": ", encodes", "decode": ", decodes"}[stage.role]
    gpus = "1 GPU" if stage.tp == 1 else f"{stage.tp} GPUs"
    return f"{gpus}, {stage.layers} {'layer' if stage.layers == 1 else 'layers'}{does}"


def _bars(explained: Explanation) -> tuple[TimelineBar, ...]:
    visits = sorted(explained.timeline, key=lambda visit: (visit.start_s, visit.stage))[:MOST_BARS]
    return tuple(TimelineBar(v.stage, v.start_s, v.end_s, v.kind == "encode", v.micro_batch) for v in visits)
