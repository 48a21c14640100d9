"""Whether runs are of an engine whose attention masks every query against the keys of the whole batch.

Few engines do, and those that are known not to are not asked. A parameter that is nothing for most of them would cost
every calibration time and certainty, so it is tried last, and with it everything anew only where it explains what the
others cannot. Costs that grow otherwise with tokens than the tables say look alike: what no mask can cost is not taken
for one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lengthwise.engine.step_time import step_time
from lengthwise.measure.calibrate._cloud import loss
from lengthwise.measure.calibrate._parameters import MASKED, knobs
from lengthwise.measure.calibrate._problem import Problem
from lengthwise.measure.calibrate._solve import (
    COST_TOLD,
    WIDE,
    Floats,
    Mask,
    Solution,
    downhill,
    narrow,
    solve,
)
from lengthwise.measure.calibrate._sureness import deviations, scale_at, weights
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.measured import Measured

UNMASKED = ("llama.cpp", "sglang", "tgi", "vllm")
"""Engines that attend by request: what would pass for masks in their runs is something else."""

MOST_PAIRS = 2.0
"""A masked pair is computed like a prompt's own: beyond so many times its seconds it is something else."""


def with_masks(
    problem: Problem, solution: Solution, deployment: Deployment, seed: int
) -> tuple[Problem, Solution, list[str]]:
    """The problem with dense masks beside its parameters, and its solution, if they stand out; else what came.

    The third are notes: at what masks were taken, or why they were refused although they stand out.
    """
    names = [knob.name for knob in problem.knobs]
    if MASKED in names:
        return problem, solution, []
    more = problem.with_knobs(knobs(deployment, logged="log_step" in names, masked=True))
    names = [knob.name for knob in more.knobs]
    at, notes = names.index(MASKED), []
    told = np.insert(solution.told, at, True)
    place = _stands_out(more, np.insert(solution.best, at, 0.0), told, at, seed)
    if place is not None:
        found = solve(more, names, seed, place)
        if found.z[at] != 0.0:
            pairs = own_pairs(more.values(found.z), deployment)
            if pairs <= MOST_PAIRS:
                return more, found, []
            notes = [_refused(pairs)]
    problem.simulations = more.simulations
    return problem, solution, notes


def without_masks(runs: Sequence[Measured]) -> tuple[str, ...]:
    """The names of the runs' engines, if all are known to attend by request; nothing where one may do otherwise."""
    names = {str(run.facts.get("engine") or "").lower() for run in runs}
    return tuple(sorted(names)) if names and names <= set(UNMASKED) else ()


def not_looked_for(engines: Sequence[str]) -> str:
    """That masks were not looked for, and why."""
    return (
        f"dense masks were not looked for: {', '.join(engines)} attends by request (--fit with masked among the names "
        "looks all the same)"
    )


def notes_of(values: dict[str, float], deployment: Deployment) -> list[str]:
    """What a reader must know of the masks in these values: nothing where there are none."""
    masked_s = values.get(MASKED, 0.0)
    if masked_s == 0.0:
        return []
    pairs = own_pairs(values, deployment)
    told = (
        f"dense masks are taken: each query and cached token of another request costs {_times(pairs)} what a "
        "prompt's own pair does; an engine that does not mask the whole batch has none (--masks no)"
    )
    return [told if pairs <= MOST_PAIRS else f"{told}. More than {MOST_PAIRS:g} times is doubtful"]


def own_pairs(values: dict[str, float], deployment: Deployment) -> float:
    """How many of a prompt's own pairs a masked pair costs; infinite where the tables have no seconds of them."""
    own_s = values.get("prefill", 1.0) * own_pair_s(deployment)
    return values[MASKED] / own_s if own_s > 0 else np.inf


def own_pair_s(deployment: Deployment) -> float:
    """A layer's seconds for one more of a prompt's own pairs, in the largest chunk of a step.

    A mask over the batch is computed for a whole step at once, so that no smaller chunk's price is its own.
    """
    chunk = max(1, min(deployment.limits.max_num_batched_tokens, deployment.max_model_len // 2))
    seconds = step_time(deployment.cost)
    more_s = seconds(0, 0, [(chunk, chunk)]) - seconds(0, 0, [(chunk, 0)])
    return more_s / float(deployment.cost.stage_layers.sum()) / chunk**2


def _refused(pairs: float) -> str:
    return (
        f"dense masks would explain these runs, but only at {_times(pairs)} what a prompt's own pair costs, which no "
        "mask does, and were not taken: the costs of large steps are doubtful, their tables may be wrong in how "
        "they grow with tokens (profile the operators, or give --iterations)"
    )


def _times(pairs: float) -> str:
    return f"{pairs:.2g} times" if np.isfinite(pairs) else "more than any times"


def _stands_out(problem: Problem, z: Floats, free: Mask, at: int, seed: int) -> Floats | None:
    """Where parameter ``at``, nothing at ``z``, improves the agreement by more than noise would; None: nowhere.

    Where masks cost much, the others stand far off to make up for them, and the way down is long.
    """
    scale = scale_at(problem, z)
    weight = weights(problem, scale)
    place = np.array(downhill(problem, z, free, WIDE, weight, seed)[1])
    place, _, around = narrow(problem, place, free, scale, seed)
    before, after = (loss(problem.residuals(one) * weight, one) for one in (z, place))
    if after > before - COST_TOLD:
        return None
    noise = deviations(problem, place, around, scale)[1]
    return place if after <= before - COST_TOLD * float(noise[at]) else None
