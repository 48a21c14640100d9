"""Steps and requests of a run that exceed the range of the measurements behind its cost tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.metrics.summary import by_group
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.records import Records

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Extrapolation:
    """A bound of the measured range, and by how much a run exceeds it."""

    bound: str  # "tokens", "seqs", "chunk", "context", "kv_tokens" or "prefix", as in Reach
    measured: int  # largest measured value
    largest: int  # largest value in the run
    out_of_range: int  # number of steps, requests or spans of time beyond the bound
    of: int  # total number of them
    unit: str  # "steps", "requests" ("context", "prefix") or "time" (large runs, which record no steps)

    @property
    def share(self) -> float:
        """Return the share of the run that exceeds the bound."""
        return self.out_of_range / self.of

    @property
    def words(self) -> str:
        """Return the name of the bounded quantity in reports."""
        return _WORDS[self.bound]

    @property
    def description(self) -> str:
        """Return a sentence about the extrapolation for reports."""
        share = f"{100 * self.share:.{0 if self.share >= 0.1 else 1 if self.share >= 0.001 else 3}f} %"
        unit = "the time in steps" if self.unit == "time" else self.unit
        return (
            f"{share} of {unit} had more {self.words} (up to {self.largest:,}) than the measurements "
            f"behind the cost tables reached ({self.measured:,}): their times are extrapolated"
        )


_WORDS = {
    "tokens": "tokens",
    "seqs": "sequences",
    "chunk": "tokens of one prompt in a step",
    "context": "tokens of context",
    "kv_tokens": "KV tokens",
    "prefix": "tokens of a prompt cached before a chunk of it",
}


def beyond_reach(records: Records, deployment: Deployment) -> tuple[Extrapolation, ...]:
    """Return the bounds of the measured range that a run exceeds, with how often and by how much.

    The measurements are those behind the cost tables. For numbers that the records lack, the largest possible value is
    taken: the longest chunk of a step has all its prompt tokens, less one for each other prompt; KV tokens fill the
    blocks in use; the longest prompts are the split ones. Without step records, sequences and KV tokens are means over
    spans of time and all replicas, and tokens and chunks are the engine's limits.
    """
    if deployment.groups:
        return merge_extrapolations([beyond_reach(*one) for one in by_group(records, deployment)])
    reach, r = deployment.cost.evidence.reach, records.requests
    served = np.isfinite(r.scheduled_s)
    context = (r.prompt_tokens + r.output_tokens)[served]
    longest = int(context.max(initial=0))
    series, limits = records.series, deployment.limits
    steps: Any = records.steps
    if steps is not None:
        unit, seqs, kv_blocks = "steps", steps.decode_seqs + steps.prefill_seqs, steps.kv_blocks
        verified = deployment.speculation.num_speculative_tokens if deployment.speculation else 0
        tokens = steps.decode_seqs * (1 + verified) + steps.prefill_tokens
        chunk = steps.prefill_tokens - np.maximum(steps.prefill_seqs - 1, 0)
    else:
        busy = series.step_s > 0
        step_s = series.step_s[busy]
        unit, seqs, kv_blocks = "time", series.seqs_s[busy] / step_s, series.kv_blocks_s[busy] / step_s
        tokens = chunk = np.full(len(step_s), max(limits.max_num_batched_tokens, limits.max_num_seqs))
    found: dict[str, tuple[Array, str]] = {
        "tokens": (tokens, unit),
        "seqs": (seqs, unit),
        "chunk": (np.minimum(chunk, longest), unit),
        "context": (context, "requests"),
        "kv_tokens": (kv_blocks * deployment.kv.tokens_per_block, unit),
        "prefix": (_cached_before_chunks(records, deployment), "requests"),
    }
    exceeded = []
    for name, (values, counted) in found.items():
        bound = getattr(reach, name)
        if bound is not None and len(values) and (largest := int(np.ceil(values.max()))) > bound:
            exceeded.append(Extrapolation(name, bound, largest, int((values > bound).sum()), len(values), counted))
    return tuple(exceeded)


def merge_extrapolations(runs: Sequence[tuple[Extrapolation, ...]]) -> tuple[Extrapolation, ...]:
    """Merge the extrapolations of several runs of one variant: counts are added, and the largest values remain."""
    by_bound = {name: [one for run in runs for one in run if one.bound == name] for name in _WORDS}
    merged = []
    for same in filter(None, by_bound.values()):
        out_of_range, of = sum(one.out_of_range for one in same), sum(one.of for one in same)
        largest = max(one.largest for one in same)
        merged.append(replace(same[-1], largest=largest, out_of_range=out_of_range, of=of))
    return tuple(merged)


def _cached_before_chunks(records: Records, deployment: Deployment) -> Array:
    """Return [served] how many tokens of each prompt can be in the KV cache before its last chunk, longest first.

    These tokens are from the prefix cache or from earlier chunks: 0 for a prompt in one piece without a cached prefix.
    """
    r, budget = records.requests, deployment.limits.max_num_batched_tokens
    served = np.isfinite(r.scheduled_s)
    longest_first = np.argsort(-r.prompt_tokens[served], kind="stable")
    prompts = r.prompt_tokens[served][longest_first]
    cached = 0 * prompts if r.cached_tokens is None else r.cached_tokens[served][longest_first]
    # Least number of chunks that follow the first chunk of a split prompt.
    further = np.maximum(-(-(prompts - cached) // budget) - 1, 1)
    if records.steps is None:  # only prompts above the budget are known to be split
        chunks = int(further[prompts - cached > budget].sum())
    else:
        # A preempted request computes its prompt again.
        first = len(prompts) + int(r.preemptions[served].sum())
        chunks = int(records.steps.prefill_seqs.sum()) - first
    return np.where(np.cumsum(further) - further < chunks, prompts - 1, cached)
