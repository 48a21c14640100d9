"""Points at which an operator was measured or is asked for, with what the roofline says of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.cost._efficiency import RIDGE, Work
from lengthwise.schema.cost_tables import Floats

PARTS = ("compute", "padding", "memory", "network", "launch", "sequences")
"""Columns of ``Points.parts``: seconds of the multiplications asked for, of those that padding adds, of the
bytes, of the network, of a launch, and of what a launch takes longer with every sequence."""

COMPUTE, PADDING, MEMORY, NETWORK, LAUNCH, SEQUENCES = range(len(PARTS))


@dataclass(frozen=True)
class Points:
    """One operator at n places.

    Attributes:
        operator: Its name in a profile.
        axes: [n, d] the coordinates that grow with the step: tokens, or (chunk, context), or (sequences,
            mean context); a batch of prompts has a third one.
        shape: [n, e] what the shard or kernel is: TP, or the sizes of a kernel of no model.
        parts: [n, 6] seconds by PARTS, as the roofline has them.
        flops: [n] multiplications and additions asked for.
        batch: [n] sequences (or tokens) whose work is done at once: SamuLLM's B.
        padded: [n] SamuLLM's B * s: tokens, every sequence as long as the longest.
        total: [n] SamuLLM's S: tokens of all sequences.
        seconds: [n] measured; NaN where it is asked for.
    """

    operator: str
    axes: Floats
    shape: Floats
    parts: Floats
    flops: Floats
    batch: Floats
    padded: Floats
    total: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def roofline(self) -> Floats:
        """[n] seconds by the roofline."""
        return combined(self.parts)

    def take(self, rows: npt.NDArray[Any]) -> Points:
        """The points of these rows (indices or a mask)."""
        names = ("axes", "shape", "parts", "flops", "batch", "padded", "total", "seconds")
        taken: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        return replace(self, **taken)

    def places(self) -> npt.NDArray[np.int64]:
        """[n] the number of the place at which each row stands: rows of one place repeat each other."""
        where = np.concatenate([self.shape, self.axes], axis=1)
        return np.asarray(np.unique(where, axis=0, return_inverse=True)[1], dtype=np.int64).ravel()


def combined(parts: Floats, factors: Floats | None = None) -> Floats:
    """[n] seconds of parts, each times its factor: compute and memory overlap, the rest does not."""
    if factors is not None:
        parts = parts * factors
    ridge = _ridge(parts[:, COMPUTE] + parts[:, PADDING], parts[:, MEMORY])
    return np.asarray(ridge + parts[:, NETWORK] + parts[:, LAUNCH] + parts[:, SEQUENCES], dtype=np.float64)


def slopes(parts: Floats, factors: Floats) -> Floats:
    """[n, 6] how many seconds a factor's e-fold would add: the slopes of ``combined`` by the log factors."""
    grown = parts * factors
    compute, memory = grown[:, COMPUTE] + grown[:, PADDING], grown[:, MEMORY]
    ridge = np.maximum(_ridge(compute, memory), 1e-300)
    grown[:, [COMPUTE, PADDING]] *= ((compute / ridge) ** (RIDGE - 1))[:, None]
    grown[:, MEMORY] *= (memory / ridge) ** (RIDGE - 1)
    return grown


def _ridge(compute: Floats, memory: Floats) -> Floats:
    """(compute^4 + memory^4)^(1/4): squares and roots are ten times as fast as powers."""
    return np.asarray(np.sqrt(np.sqrt(np.square(np.square(compute)) + np.square(np.square(memory)))))


def parts_of(work: Work, empty: Work, n: int) -> Floats:
    """[n, 6] the parts of a work; ``empty`` is the same operator with nothing to do: padding and launch."""
    columns = np.zeros((n, len(PARTS)))
    columns[:, PADDING] = np.minimum(empty.compute_s, work.compute_s)
    columns[:, COMPUTE] = np.asarray(work.compute_s) - columns[:, PADDING]
    columns[:, MEMORY] = work.memory_s
    columns[:, NETWORK] = work.network_s
    columns[:, LAUNCH] = np.minimum(empty.latency_s, work.latency_s)
    columns[:, SEQUENCES] = np.asarray(work.latency_s) - columns[:, LAUNCH]
    return columns


def points(operator: str, work: tuple[Work, Work], given: Mapping[str, Any], n: int) -> Points:
    """Points from (work, work of nothing) and columns named as in Points; ``axes`` and ``shape`` are lists."""
    columns = {name: _column(given.get(name, 0.0), n) for name in ("batch", "padded", "total")}
    seconds = _column(given.get("seconds", np.nan), n)
    return Points(
        operator,
        axes=_matrix(given["axes"], n),
        shape=_matrix(given.get("shape", []), n),
        parts=parts_of(*work, n),
        flops=_column(work[0].flops, n),
        seconds=seconds,
        **columns,
    )


def _column(values: Any, n: int) -> Floats:
    return np.broadcast_to(np.asarray(values, dtype=np.float64), (n,)).copy()


def _matrix(columns: list[Any], n: int) -> Floats:
    return np.stack([_column(c, n) for c in columns], axis=1) if columns else np.zeros((n, 0))


def batched(found: Points, prompts: Any) -> Points:
    """The points of so many prompts in one launch each."""
    scaled = found.parts.copy()
    scaled[:, :LAUNCH] *= np.asarray(prompts, dtype=np.float64).reshape(-1, 1)
    return replace(found, parts=scaled, flops=found.flops * prompts)


def joined(many: list[Points]) -> Points:
    """The points of all of them, one after the other."""
    names = ("axes", "shape", "parts", "flops", "batch", "padded", "total", "seconds")
    columns: dict[str, Any] = {n: np.concatenate([getattr(p, n) for p in many]) for n in names}
    return replace(many[0], **columns)


def prefill_padding(work: Work, chunk: Any, pad_tokens: float) -> Work:
    """What of a prefill is padding and launch: ``pad_tokens`` more queries, which see as many keys as the others."""
    share = pad_tokens / (np.asarray(chunk) + pad_tokens)
    return Work(work.name, compute_s=work.compute_s * share, latency_s=work.latency_s)
