"""The requests that a scenario's lengths were counted over, where there are any."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import schedule
from lengthwise import workload as w
from lengthwise.scenario._workloads import Source

Ints = npt.NDArray[np.int64]


def sample_of(source: Source) -> schedule.Sample | None:
    """The requests behind a source of lengths; None: they are distributions by formula."""
    if source.whole is not None:
        return schedule.Sample(source.whole.prompt_tokens, source.whole.output_tokens)
    lengths = source.lengths
    if isinstance(lengths, w.Samples):
        return schedule.Sample(np.asarray(lengths.prompt, np.int64), np.asarray(lengths.output, np.int64))
    if isinstance(lengths, w.Capped) and isinstance(lengths.lengths, w.Samples):
        return _capped(lengths, lengths.lengths)
    return _listed(lengths) if isinstance(lengths, w.Joint) else None


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


def _listed(lengths: w.Joint) -> schedule.Sample | None:
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


__all__ = ["sample_of"]
