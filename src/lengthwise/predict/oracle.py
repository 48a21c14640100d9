"""Predictors that are told the truth: the yardstick, and what errors are made from."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints
from lengthwise.predict.distribution import Floats, LengthDistribution


@runtime_checkable
class Truthful(Protocol):
    """A predictor that needs the true length, and so exists in simulation alone.

    In place of ``predict`` it has ``peek``. All chance comes in as ``luck``: one number a request,
    drawn once. The same request is wrong in the same way at every window, and two error models meet
    the same luck.
    """

    def peek(self, output_tokens: Ints, tokens_so_far: int | Ints, luck: Floats) -> LengthDistribution:
        """What it believes of each request once ``tokens_so_far`` have come.

        Args:
            output_tokens: [n] the truth.
            tokens_so_far: Below the truth, one for all or [n].
            luck: [n] within 0 .. 1, uniform.

        Returns:
            The belief about the whole length; ``.given(tokens_so_far)`` of it rules out what has passed.
        """
        ...


class Oracle:
    """Knows every length."""

    def peek(self, output_tokens: Ints, tokens_so_far: int | Ints, luck: Floats) -> LengthDistribution:
        """The truth, certain."""
        del tokens_so_far, luck
        return LengthDistribution.point(output_tokens)


def luck_of(seed: int, n: int) -> npt.NDArray[np.float64]:
    """[n] one number within 0 .. 1 a request; the first k do not depend on n."""
    return np.random.default_rng(np.random.SeedSequence([seed, 0x1E46])).random(n)
