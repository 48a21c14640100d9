"""Samples in two parts that share no prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lengthwise.predict.contract import Ints, Samples
from lengthwise.schema.errors import InputError


def by_prompt(texts: Sequence[str]) -> tuple[list[str], Ints]:
    """Different prompts, and [n] which one each text is: edges and case do not matter."""
    folded = np.array([text.strip().casefold() for text in texts], object)
    distinct, at = np.unique(folded, return_inverse=True)
    return [str(text) for text in distinct], at.reshape(-1)


def split(samples: Samples, share: float, seed: int) -> tuple[Ints, Ints]:
    """Rows to learn from and rows held out, about ``share`` of all; equal prompts are on the same side.

    Raises:
        InputError: Too few samples, or prompts, for two parts.
    """
    text = samples.prompts.text
    groups = np.arange(len(samples)) if text is None else by_prompt(text)[1]
    many = int(groups.max()) + 1
    if many < 2:
        raise InputError(f"samples of at least two prompts are needed to hold some out; there is {many}")
    held = max(1, min(many - 1, round(many * share)))
    out = np.zeros(many, bool)
    out[np.random.default_rng(seed).permutation(many)[:held]] = True
    return np.flatnonzero(~out[groups]), np.flatnonzero(out[groups])
