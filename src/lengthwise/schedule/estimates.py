"""Rows of estimates: what a schedule yields, or why it cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Reason(IntEnum):
    """Why a schedule cannot be; FITS: it can."""

    FITS = 0
    WEIGHTS = 1
    """The weights alone are more than a GPU holds."""
    CACHE = 2
    """Cache and activations do not fit beside the weights, at the level of the assumptions."""
    GROUPS = 3
    """No split into encoding and decoding GPUs holds the tensor-parallel groups."""
    LAYERS = 4
    """There are more stages than layers."""


@dataclass(frozen=True, eq=False)
class Estimates:
    """A row a schedule. What cannot be has no throughput and infinite latency.

    Attributes:
        throughput_rps: Requests that complete a second.
        would_rps: The same where memory held it; 0 where no layout is possible.
        latency_s: From when its micro-batch begins to be encoded to the last token of a request whose output is
            the level's quantile. Waiting to be encoded is not in it; it is at most one ``cycle_s``.
        latency_high_s: The same at the level's range of the work of encodings and decode batches.
        cycle_s: RRA: a round of encoding and N_D decode iterations; WAA: from one encoding to the next.
        encode_s: One batch's way through the encoding stages (RRA: of all its micro-batches).
        decode_s: A decode iteration, mean over a phase.
        decode_batch: B_D, sequences when a phase begins; WAA: in an iteration.
        encode_range: Relative range of a batch's encoding at the level.
        decode_range: Relative range of a decode iteration.
        memory_share: What the fullest GPU needs over what it has, at the level.
        micro_batches: As used.
        encode_gpus: GPUs that encode; RRA: all.
        reason: ``Reason`` of each.
    """

    throughput_rps: Floats
    would_rps: Floats
    latency_s: Floats
    latency_high_s: Floats
    cycle_s: Floats
    encode_s: Floats
    decode_s: Floats
    decode_batch: Floats
    encode_range: Floats
    decode_range: Floats
    memory_share: Floats
    micro_batches: Ints
    encode_gpus: Ints
    reason: Ints

    @property
    def feasible(self) -> npt.NDArray[np.bool_]:
        """[n] whether a schedule can be."""
        return np.asarray(self.reason == Reason.FITS)


class Filling:
    """The columns of ``Estimates`` while they are filled."""

    def __init__(self, n: int) -> None:
        self.seconds = np.full((n, 7), np.nan)
        self.encoded, self.decode_batch, self.memory_share = np.zeros(n), np.zeros(n), np.full(n, np.nan)
        self.micro_batches, self.encode_gpus, self.reason = (np.zeros(n, dtype=np.int64) for _ in range(3))

    def hold(self, here: Ints, needed_bytes: Floats, weight_bytes: float, usable_bytes: float) -> None:
        """Says whether memory holds it."""
        self.memory_share[here] = needed_bytes / usable_bytes
        reason = Reason.WEIGHTS if weight_bytes > usable_bytes else Reason.CACHE
        self.reason[here] = np.where(needed_bytes > usable_bytes, reason, Reason.FITS)

    def estimates(self) -> Estimates:
        """The finished columns."""
        fits = self.reason == Reason.FITS
        cycle_s, latency_s, high_s, encode_s, decode_s, encode_range, decode_range = self.seconds.T
        with np.errstate(divide="ignore", invalid="ignore"):
            would = np.where(cycle_s > 0, self.encoded / cycle_s, 0.0)
        return Estimates(
            np.where(fits, would, 0.0), would, np.where(fits, latency_s, np.inf), np.where(fits, high_s, np.inf),
            cycle_s, encode_s, decode_s, self.decode_batch, encode_range, decode_range, self.memory_share,
            self.micro_batches, self.encode_gpus, self.reason,
        )  # fmt: skip


__all__ = ["Estimates", "Filling", "Reason"]
