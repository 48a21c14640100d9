"""Why one schedule takes what it takes: its stages, their seconds, and a piece of its timeline."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lengthwise.schedule._prepared import Setting, deviations
from lengthwise.schedule._rare import beyond, pace, part, rare
from lengthwise.schedule.controls import Controls, Strategy
from lengthwise.schedule.estimate import Estimator
from lengthwise.schedule.estimates import Estimates, Reason
from lengthwise.schedule.layout import Layout, Stage, rra_layout, waa_layout
from lengthwise.schedule.rra import PhaseShares
from lengthwise.schedule.stage_seconds import projected_share, visits_s
from lengthwise.schedule.timeline import Visit, pipelined_visits, round_visits

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
    layout = waa_layout(
        setting.model.layers, setting.cluster.gpus, encode_gpus, controls.tp, controls.tp_groups
    )
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


def _phase_s(
    setting: Setting, stages: tuple[Stage, ...], new: float, share: PhaseShares, parts: int
) -> Floats:
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
        longest = np.nan_to_num(
            _decode_s(setting, stages, seqs + larger, ahead)[:, 0] / visit_s[:, 0], nan=1.0
        )
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


__all__ = ["Explanation", "explain"]
