"""Predictors that are told the truth: the yardstick, and what errors are made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints, Samples
from lengthwise.predict.distribution import LEVELS, Floats, LengthDistribution, length_quantiles
from lengthwise.schema.errors import InputError


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


class LogNormalError:
    """The truth times exp(bias + sigma z), z normal: wrong by a factor, long ones by more.

    The belief is a log-normal about the wrong length with the same sigma: it knows how wrong it
    may be, though not that it is biased. With ``exact_lengths`` it is the wrong length alone.

    Args:
        sigma: Standard deviation of the error's logarithm; 0.5 is wrong by a factor of 1.65.
        bias: Mean of the error's logarithm; below 0 it says too little.
        half_life_tokens: See above; None: the error stays.
        exact_lengths: Believe in the wrong length as if it were sure.
    """

    def __init__(
        self, sigma: float, bias: float = 0.0, half_life_tokens: float | None = None, *, exact_lengths: bool = False
    ) -> None:
        if not 0 <= sigma < 20 or not abs(bias) < 20:
            raise InputError(f"sigma must be within 0 .. 20 and bias within -20 .. 20; got {sigma} and {bias}")
        self.sigma, self.bias, self.half_life_tokens, self.exact_lengths = (
            sigma,
            bias,
            half_life_tokens,
            exact_lengths,
        )
        check_half_life(half_life_tokens)

    def peek(self, output_tokens: Ints, tokens_so_far: int | Ints, luck: Floats) -> LengthDistribution:
        """The wrong lengths, with the doubt that becomes them."""
        share = left_of_error(tokens_so_far, self.half_life_tokens, len(luck))
        wrong = output_tokens * np.exp(share * (self.bias + self.sigma * _normal(luck)))
        wrong = np.clip(wrong, 1, 1e9)
        if self.exact_lengths or self.sigma == 0:
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
            np.repeat(self.pivot**2 / output_tokens[:, None].astype(float), 2, axis=1).clip(1), np.array([0.0, 1.0])
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


class Quantised:
    """Knows the class of every length and no more: its belief is the distribution within the class.

    A length y is of class i where boundary[i] < y <= boundary[i + 1]; what lies outside is of the
    first or last. Within a class all lengths are alike, unless ``fit`` has seen what they are like.

    Args:
        boundaries: k + 1 growing lengths, from the least to the greatest; or k, for classes that
            ``fit`` makes equally full.
    """

    def __init__(self, boundaries: Sequence[float] | int) -> None:
        self.boundaries = boundaries
        if isinstance(boundaries, int):
            if boundaries < 1:
                raise InputError(f"there must be at least one class; it is {boundaries}")
            self.boundaries_: Floats | None = None
        else:
            self.boundaries_ = np.asarray(boundaries, float)
            good = len(self.boundaries_) >= 2 and np.isfinite(self.boundaries_).all() and self.boundaries_[0] >= 0
            if not good or (np.diff(self.boundaries_) <= 0).any():
                raise InputError(f"boundaries must be at least two lengths that grow; they are {list(boundaries)}")
        self.table_: Floats | None = None

    @property
    def classes(self) -> int:
        """How many there are."""
        return self.boundaries if isinstance(self.boundaries, int) else len(self.boundaries) - 1

    def fit(self, samples: Samples) -> Self:
        """Learns boundaries, where their number was given, and the lengths within each class."""
        lengths, cut = samples.output_tokens, samples.censored
        if isinstance(self.boundaries, int):
            levels = np.linspace(0, 1, self.boundaries + 1)
            edges = length_quantiles(lengths, cut, levels)
            edges[0] = min(edges[0], lengths.min()) - 1
            self.boundaries_ = edges + np.arange(len(edges)) * 1e-9  # equal ones stay in order
        member = self.class_of(lengths)
        uniform = self._uniform()
        self.table_ = np.array(
            [
                length_quantiles(lengths[member == i], cut[member == i], LEVELS) if (member == i).any() else row
                for i, row in enumerate(uniform)
            ]
        )
        return self

    def class_of(self, output_tokens: npt.ArrayLike) -> Ints:
        """[n] the true class, from 0."""
        inner = self._edges()[1:-1]
        return np.asarray(np.searchsorted(inner, np.asarray(output_tokens, float), side="left"), np.int64)

    def peek(self, output_tokens: Ints, tokens_so_far: int | Ints, luck: Floats) -> LengthDistribution:
        """The distribution within the class that it takes each request for."""
        table = self._uniform() if self.table_ is None else self.table_
        said = self.predicted(self.class_of(output_tokens), tokens_so_far, luck)
        return LengthDistribution(table, LEVELS).take(said)

    def predicted(self, true: Ints, tokens_so_far: int | Ints, luck: Floats) -> Ints:
        """[n] the class that it takes each request for: the true one."""
        del tokens_so_far, luck
        return true

    def _edges(self) -> Floats:
        if self.boundaries_ is None:
            raise InputError(f"{self.classes} classes without boundaries need samples; call fit(samples) first")
        return self.boundaries_

    def _uniform(self) -> Floats:
        edges = np.maximum(self._edges(), 1.0)
        return edges[:-1, None] + np.diff(edges)[:, None] * LEVELS


class BinNeighbour(Quantised):
    """Takes a request for one of a neighbouring class (Multi-Bin Batching, Section 6.2).

    A request of an inner class is taken for one of the class below with probability 2 p split, of the
    class above with 2 p (1 - split), and for what it is with 1 - 2 p: p on each side where split
    is 0.5. One of an edge class is taken for its only neighbour with probability p.

    Args:
        boundaries: As in ``Quantised``.
        p: Within 0 .. 0.5.
        split: Which part of the errors goes down.
        half_life_tokens: p halves with every so many tokens that have come; None: it stays.
    """

    def __init__(
        self, boundaries: Sequence[float] | int, p: float, split: float = 0.5, half_life_tokens: float | None = None
    ) -> None:
        super().__init__(boundaries)
        if not 0 <= p <= 0.5 or not 0 <= split <= 1:
            raise InputError(f"p must be within 0 .. 0.5 and split within 0 .. 1; got {p} and {split}")
        self.p, self.split, self.half_life_tokens = p, split, half_life_tokens
        check_half_life(half_life_tokens)

    def predicted(self, true: Ints, tokens_so_far: int | Ints, luck: Floats) -> Ints:
        """[n] the class that it takes each request for."""
        p = self.p * left_of_error(tokens_so_far, self.half_life_tokens, len(luck))
        first, last = true == 0, true == self.classes - 1
        down = np.where(first, 0.0, np.where(last, p, 2 * p * self.split))
        up = np.where(last, 0.0, np.where(first, p, 2 * p * (1 - self.split)))
        return np.asarray(true - (luck < down) + (luck >= 1 - up))


class Confusion(Quantised):
    """Takes a request for one of another class as often as a confusion matrix says.

    Args:
        boundaries: As in ``Quantised``.
        matrix: [k][k], row: the true class, column: what it is taken for; rows sum to 1.
    """

    def __init__(self, boundaries: Sequence[float] | int, matrix: Sequence[Sequence[float]]) -> None:
        super().__init__(boundaries)
        try:
            self.matrix = np.asarray(matrix, float)
        except ValueError:
            raise InputError("matrix must have rows of one length; they differ") from None
        k = self.classes
        if self.matrix.shape != (k, k):
            raise InputError(f"matrix must be {k} x {k}, as there are {k} classes; it is {self.matrix.shape}")
        if not (self.matrix >= 0).all() or not np.allclose(self.matrix.sum(axis=1), 1, atol=1e-6):
            raise InputError(f"each row of matrix must be probabilities that sum to 1; they are {matrix}")

    def predicted(self, true: Ints, tokens_so_far: int | Ints, luck: Floats) -> Ints:
        """[n] the class that it takes each request for."""
        del tokens_so_far
        up_to = np.cumsum(self.matrix, axis=1)[:, :-1]
        return np.asarray((luck[:, None] >= up_to[true]).sum(axis=1), np.int64)
