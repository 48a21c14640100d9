"""What the tables say of busy stretches, part by part: sums over their steps.

A stretch tells how many tokens its steps had by bucket, and no more of each: its steps are put into as many kinds as it
has buckets, and the tables are read at each kind's mean. What is fitted there is linear in these sums: factors on the
parts and the host's seconds. How the tables bend within a kind stays theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibrate._parameters import host_line
from lengthwise.measure.calibrate._step_parts import kernels_of, prompt_attention, step_parts
from lengthwise.measure.calibrate._stretches import Stretches
from lengthwise.measure.calibrate.iterations import Iterations
from lengthwise.schema.deployment import Deployment

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def stretch_parts(found: Stretches, prompt_tokens: Ints, deployment: Deployment) -> dict[str, Floats]:
    """[m] as ``step_parts``, summed over the steps of each stretch; "steps" and the host's "rest" beside them.

    Args:
        found: The stretches.
        prompt_tokens: Of the run's prompts, whose mixture each stretch's prompts are taken to be.
        deployment: With the tables.
    """
    stretch, steps, kinds = kinds_of(found, deployment)
    each = step_parts(kinds, deployment)
    parts = {name: _summed(stretch, steps * seconds, len(found)) for name, seconds in each.items()}
    step_s, sequence_s = host_line(deployment.cost.host_s)
    seqs = kinds.prefill_seqs + kinds.decode_seqs
    host_s = np.interp(seqs, np.arange(len(deployment.cost.host_s)), deployment.cost.host_s)
    parts["rest"] = _summed(stretch, steps * (host_s - step_s - sequence_s * seqs), len(found))
    parts["steps"] = _summed(stretch, steps, len(found))
    most = deployment.limits.max_num_batched_tokens
    token_s = prompt_attention(deployment.cost, prompt_tokens, most).sum() / max(1, prompt_tokens.sum())
    return parts | {"prefill": float(deployment.cost.stage_layers.sum()) * token_s * found.prompt_tokens}


def seconds_of(parts: Mapping[str, Floats], values: Mapping[str, float]) -> Floats:
    """[m] seconds of the stretches with these scales and this host."""
    host_s = values["host_step"] * parts["steps"] + values["host_sequence"] * parts["sequences"]
    return np.asarray(kernels_of(parts, values) + host_s + parts["rest"])


def kinds_of(found: Stretches, deployment: Deployment) -> tuple[Ints, Floats, Iterations]:
    """[k] kinds of steps: the stretch that each is of, how many steps it stands for, and what one of them is.

    Every step decodes for as many sequences; prompts' tokens are in the kinds that have more tokens than that, and in
    all of them the prompts' tokens and the decodes are those that were counted.
    """
    capacity = deployment.kv.num_blocks * deployment.kv.block_size
    rows = [_kinds(found, i, deployment.limits.max_num_batched_tokens) for i in range(len(found))]
    stretch = np.repeat(np.arange(len(found)), [len(steps) for steps, _ in rows])
    steps = np.concatenate([steps for steps, _ in rows])
    tokens = np.concatenate([tokens for _, tokens in rows])
    prompts = tokens * (found.prompts / np.maximum(1.0, found.prompt_tokens))[stretch]
    kinds = Iterations(
        prefill_seqs=prompts,
        prefill_tokens=tokens,
        decode_seqs=(found.decodes / _summed(stretch, steps, len(found)))[stretch],
        kv_share=(found.kv_tokens[stretch] + tokens) / capacity,
        seconds=np.full(len(steps), np.nan),
        steps=np.ones(len(steps), dtype=np.int64),
    )
    return stretch, steps, kinds


def _kinds(found: Stretches, i: int, most_tokens: int) -> tuple[Floats, Floats]:
    """Steps and their prompts' tokens, by kind, of one stretch.

    vLLM counts a prompt's tokens in the step in which it is through: what is more than a step may take was computed
    in steps before, which were counted with those that decode alone.
    """
    some = np.flatnonzero(found.counts[i])
    steps, own = found.counts[i][some], _own_tokens(found, i)
    more = np.maximum(0.0, _tokens(found, i, some) - own)
    if more.sum() == 0:
        more = np.ones(len(some))
    tokens = more * (found.prompt_tokens[i] / (steps * more).sum())
    parts = np.ceil(tokens / max(1.0, most_tokens - own))
    chunks = np.maximum(0.0, parts - 1) * steps
    alone = tokens == 0
    left = steps * (1 - alone * min(1.0, chunks.sum() / max(1.0, (steps * alone).sum())))
    split = np.maximum(1.0, parts)
    return np.where(parts > 1, steps * split, left), tokens / split


def _own_tokens(found: Stretches, i: int) -> float:
    """Mean tokens of a step that were made in it."""
    return float((found.decodes[i] + found.prompts[i]) / found.steps[i])


def _tokens(found: Stretches, i: int, some: Ints) -> Floats:
    """Mean tokens of the steps in some buckets: what one makes where that is in it, above it as all of them add up.

    Of the buckets above, all means are equally far between their bounds.
    """
    low = np.concatenate([[0.0], found.edges])[some]
    high = np.append(found.edges, 2 * found.edges[-1])[some]
    steps, own = found.counts[i][some], _own_tokens(found, i)
    told = np.clip(own, low, high)
    above = low >= own
    rest = found.prompt_tokens[i] + own * found.steps[i] - (steps * told)[~above].sum()
    spread = (steps * (high - low))[above].sum()
    share = np.clip((rest - (steps * low)[above].sum()) / spread, 0.0, 1.0) if spread > 0 else 0.0
    return np.asarray(np.where(above, low + share * (high - low), told))


def _summed(stretch: Ints, each: Floats, m: int) -> Floats:
    return np.asarray(np.bincount(stretch, weights=each, minlength=m), dtype=np.float64)
