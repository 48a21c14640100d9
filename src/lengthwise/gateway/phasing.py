"""The schedule that mode rra keeps before each engine: phases of encoding and decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lengthwise.gateway._checks import whole
from lengthwise.schema.errors import InputError

SPLIT = ("waa", "waa-c", "waa-m")
"""Schedules that admission alone cannot keep: some engines only encode, the others only decode."""


@dataclass(frozen=True)
class Phases:
    """A schedule of phases (ExeGPT's RRA), as ``lengthwise schedule`` chooses it; every engine keeps its own.

    Attributes:
        encode_batch: New requests of one encoding, B_E.
        decode_steps: Decode iterations from one encoding to the next, N_D.
        decode_batch: Requests at an engine after an encoding in the mean, B_D; None: unknown.
        mean_prompt_tokens: Of a prompt; None: unknown.
        threshold: Encodings have more or fewer requests, so that their prompts' tokens stay within this share of their
            mean, and the decode batch within it of its own; None: they are never resized.
        most_in_flight: Requests at an engine at most; None: with a threshold what that lets the decode batch be and an
            encoding more (of whose seats some are about to be left), else the engine's own seats.
    """

    encode_batch: int
    decode_steps: int
    decode_batch: float | None = None
    mean_prompt_tokens: float | None = None
    threshold: float | None = None
    most_in_flight: int | None = None

    def __post_init__(self) -> None:
        whole("encode_batch", self.encode_batch, 1)
        whole("decode_steps", self.decode_steps, 1)
        for name in ("decode_batch", "mean_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < math.inf:
                raise InputError(f"{name} must be at least 1; it is {value!r}")
        if self.threshold is not None:
            self._check_threshold(self.threshold)
        if self.most_in_flight is not None:
            whole("most_in_flight", self.most_in_flight, self.encode_batch)

    def _check_threshold(self, threshold: float) -> None:
        if not 0 <= threshold < 1:
            raise InputError(f"threshold must be from 0 to below 1; it is {threshold!r}")
        if self.decode_batch is None or self.mean_prompt_tokens is None:
            raise InputError(
                "threshold must have decode_batch and mean_prompt_tokens beside it: batches are kept near these means"
            )

    @property
    def high(self) -> int | None:
        """The most requests that an engine may have at once by the schedule; None: it sets no bound."""
        if self.most_in_flight is not None or self.threshold is None or self.decode_batch is None:
            return self.most_in_flight
        return math.floor(self.decode_batch * (1 + self.threshold) + 1e-9) + self.encode_batch


def refuse_split(mode: str) -> None:
    """Nothing, unless a mode is one of those that need engines of two kinds.

    Raises:
        InputError: It is; the message says what does it.
    """
    if mode.lower() in SPLIT:
        raise InputError(
            f"mode {mode!r} must run on engines that split prefill and decode, which admission before them cannot do: "
            "`lengthwise schedule SCENARIO --deploy DIR` writes their commands. Mode 'rra' keeps phases on any engine"
        )
