"""How far a run went beyond the measurements behind its cost tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.deployment import Deployment
from lengthwise.schema.records import Records, StepRecords

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Beyond:
    """One bound of the tables' reach that a run passed.

    Attributes:
        bound: "tokens", "seqs", "chunk", "context", "kv_tokens" or "prefix", as in Reach.
        measured: The largest that was measured.
        largest: The largest that the run had.
        out_of_range: How many steps (for "context" and "prefix": requests) were beyond; of large runs, which keep no steps,
            how many spans of time.
        of: How many there were.
        unit: "steps", "requests" or "time".
    """

    bound: str
    measured: int
    largest: int
    out_of_range: int
    of: int
    unit: str

    @property
    def share(self) -> float:
        """How much of the run was beyond."""
        return self.out_of_range / self.of

    @property
    def words(self) -> str:
        """What the bound counts, as people say it."""
        return _WORDS[self.bound]

    @property
    def description(self) -> str:
        """What a reader must know."""
        share = f"{100 * self.share:.{0 if self.share >= 0.1 else 1 if self.share >= 0.001 else 3}f} %"
        whose = {"steps": "steps", "requests": "requests", "time": "the time in steps"}[self.unit]
        return (
            f"{share} of {whose} had more {self.words} (up to {self.largest:,}) than the measurements "
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


def beyond_reach(records: Records, deployment: Deployment) -> tuple[Beyond, ...]:
    """Which bounds of the cost tables' reach a run passed, how often and by how much; empty where none.

    Where records do not tell a step's number exactly the largest it can have been is taken: of the tokens
    of several prompts in a step all but one each are the longest one's, and KV tokens are those of the
    blocks held. Runs without steps are told from means over bins of time, which hide short peaks; what
    these cannot tell (tokens, chunk) counts as passed in all of them where the engine's limits allow it. That
    prompts were cut into chunks, of which all but the first have tokens before them, is told by their count; the
    longest ones are taken to be those that were.
    """
    reach, r = deployment.cost.reach, records.requests
    served = np.isfinite(r.scheduled_s)
    whole = (r.prompt_tokens + r.output_tokens)[served]
    found = {"context": (whole, "requests"), "prefix": (_before_chunks(records, deployment), "requests")}
    if records.steps is not None:
        found |= {name: (values, "steps") for name, values in _of_steps(records.steps, whole, deployment).items()}
    else:
        found |= {name: (values, "time") for name, values in _of_series(records, whole, deployment).items()}
    bounds = {name: getattr(reach, name) for name in _WORDS}
    return tuple(
        _out_of_range(name, bound, *found[name])
        for name, bound in bounds.items()
        if bound is not None and len(found[name][0]) and int(np.ceil(found[name][0].max())) > bound
    )


def worst_of(runs: Sequence[tuple[Beyond, ...]]) -> tuple[Beyond, ...]:
    """Several runs of one variant as one: counts added up, the largest of all."""
    merged: dict[str, Beyond] = {}
    for one in (each for run in runs for each in run):
        seen = merged.get(one.bound)
        merged[one.bound] = one if seen is None else _both(seen, one)
    return tuple(merged[name] for name in _WORDS if name in merged)


def _both(a: Beyond, b: Beyond) -> Beyond:
    return replace(a, largest=max(a.largest, b.largest), out_of_range=a.out_of_range + b.out_of_range, of=a.of + b.of)


def _out_of_range(name: str, bound: int, values: Array, unit: str) -> Beyond:
    return Beyond(name, bound, int(np.ceil(values.max())), int((values > bound).sum()), len(values), unit)


def _before_chunks(records: Records, deployment: Deployment) -> Array:
    """[served] The most tokens that can have been cached before a chunk of a prompt; 0 where it was computed whole.

    Without steps only prompts that no step can take whole are known to be cut.
    """
    r, budget = records.requests, deployment.limits.max_num_batched_tokens
    served = np.isfinite(r.scheduled_s)
    prompts = -np.sort(-r.prompt_tokens[served])
    later = np.maximum(-(-prompts // budget) - 1, 1)  # chunks after its first that a prompt has at least, if cut
    if records.steps is None:
        chunks = int(later[prompts > budget].sum())
    else:  # whoever is preempted starts anew
        first = len(prompts) + int(r.preemptions[served].sum())
        chunks = int(records.steps.prefill_seqs.sum()) - first
    return np.where(np.cumsum(later) - later < chunks, prompts - 1, 0)


def _of_steps(steps: StepRecords, total: Array, deployment: Deployment) -> dict[str, Array]:
    longest = int(total.max(initial=0))
    return {
        "tokens": steps.decode_seqs + steps.prefill_tokens,
        "seqs": steps.decode_seqs + steps.prefill_seqs,
        "chunk": np.minimum(steps.prefill_tokens - np.maximum(steps.prefill_seqs - 1, 0), longest),
        "kv_tokens": steps.kv_blocks * deployment.kv.block_size,
    }


def _of_series(records: Records, total: Array, deployment: Deployment) -> dict[str, Array]:
    series, limits = records.series, deployment.limits
    busy = series.step_s > 0
    step_s = series.step_s[busy]
    tokens = np.full(len(step_s), max(limits.max_num_batched_tokens, limits.max_num_seqs))
    return {
        "tokens": tokens,
        "seqs": series.seqs_s[busy] / step_s,
        "chunk": np.minimum(tokens, int(total.max(initial=0))),
        "kv_tokens": series.kv_blocks_s[busy] / step_s * deployment.kv.block_size,
    }
