"""Oracles with a named error: what a wrong guess costs can be asked before there is a predictor.

Chance comes in as ``luck``, one number a request (see ``oracle.Truthful``). Where a model takes
``half_life_tokens``, its error halves with every so many tokens that have come.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints
from lengthwise.predict.distribution import LEVELS, Floats, LengthDistribution
from lengthwise.schema.errors import InputError


class LogNormalError:
    """The truth times exp(bias + sigma z), z normal: wrong by a factor, long ones by more.

    The belief is a log-normal about the wrong length with the same sigma: it knows how wrong it
    may be, though not that it is biased. With ``certain`` it is the wrong length alone.

    Args:
        sigma: Standard deviation of the error's logarithm; 0.5 is wrong by a factor of 1.65.
        bias: Mean of the error's logarithm; below 0 it says too little.
        half_life_tokens: See above; None: the error stays.
        certain: Believe in the wrong length as if it were sure.
    """

    def __init__(
        self,
        sigma: float,
        bias: float = 0.0,
        half_life_tokens: float | None = None,
        *,
        certain: bool = False,
    ) -> None:
        if not 0 <= sigma < 20 or not abs(bias) < 20:
            raise InputError(
                f"sigma must be within 0 .. 20 and bias within -20 .. 20; got {sigma} and {bias}"
            )
        self.sigma, self.bias, self.half_life_tokens, self.certain = sigma, bias, half_life_tokens, certain
        check_half_life(half_life_tokens)

    def peek(self, output_tokens: Ints, tokens_so_far: int | Ints, luck: Floats) -> LengthDistribution:
        """The wrong lengths, with the doubt that becomes them."""
        share = left_of_error(tokens_so_far, self.half_life_tokens, len(luck))
        wrong = output_tokens * np.exp(share * (self.bias + self.sigma * _normal(luck)))
        wrong = np.clip(wrong, 1, 1e9)
        if self.certain or self.sigma == 0:
            return LengthDistribution.point(wrong)
        doubt = np.exp(share[:, None] * self.sigma * _normal(LEVELS))
        return LengthDistribution(np.clip(wrong[:, None] * doubt, 1, 1e9), LEVELS)


class Same:
    """Adversarial: the same length of every request.

    Args:
        tokens: The length.
    """

    def __init__(self, tokens: float = 256.0) -> None:
        if not 1 <= tokens < 1e12:
            raise InputError(f"tokens must be at least 1 and below 1e12; it is {tokens}")
        self.tokens = tokens

    def peek(self, output_tokens: Ints, tokens_so_far: int | Ints, luck: Floats) -> LengthDistribution:
        """The length, certain."""
        del tokens_so_far, luck
        return LengthDistribution.point(np.full(len(output_tokens), self.tokens))


class Reversed:
    """Adversarial: the longer, the shorter it says: pivot**2 / length, certain.

    Args:
        pivot: The length of which it says the truth, tokens.
    """

    def __init__(self, pivot: float = 256.0) -> None:
        if not 1 <= pivot < 1e6:
            raise InputError(f"pivot must be at least 1 and below 1e6; it is {pivot}")
        self.pivot = pivot

    def peek(self, output_tokens: Ints, tokens_so_far: int | Ints, luck: Floats) -> LengthDistribution:
        """Short ones said to be long, long ones short."""
        del tokens_so_far, luck
        return LengthDistribution(
            np.repeat(self.pivot**2 / output_tokens[:, None].astype(float), 2, axis=1).clip(1),
            np.array([0.0, 1.0]),
        )


def _normal(levels: npt.NDArray[Any]) -> Floats:
    """Standard normal quantiles, cut at a chance of one in a thousand."""
    from scipy.special import ndtri

    return np.asarray(ndtri(np.clip(levels, 0.001, 0.999)))


def check_half_life(tokens: float | None) -> None:
    """Raises InputError where it is no half-life."""
    if tokens is not None and not tokens > 0:
        raise InputError(f"half_life_tokens must be above 0; it is {tokens}")


def left_of_error(tokens_so_far: int | Ints, half_life_tokens: float | None, n: int) -> Floats:
    """[n] the share of the error that is left."""
    a = np.broadcast_to(np.asarray(tokens_so_far, float), (n,))
    return np.ones(n) if half_life_tokens is None else np.asarray(0.5 ** (a / half_life_tokens))
