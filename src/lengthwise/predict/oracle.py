"""Predictors that see the true lengths: an upper bound on predictors, and models of prediction errors."""

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
    """A predictor that needs the true lengths, and therefore exists only in simulation.

    It has the method ``peek`` instead of ``predict``. Its only randomness is ``uniform``, one number per request. A
    request has the same number at every prediction, and different error models use the same numbers.
    """

    def peek(self, output_tokens: Ints, tokens_so_far: int | Ints, uniform: Floats) -> LengthDistribution:
        """Return the distributions of the total lengths, from the true lengths.

        ``output_tokens`` [n] are the true lengths, which exceed ``tokens_so_far``. ``uniform`` [n] are random numbers
        in [0, 1]. The result is not conditioned on ``tokens_so_far``.
        """


class Oracle:
    """Predicts the true length of every request."""

    def peek(self, output_tokens: Ints, tokens_so_far: int | Ints, uniform: Floats) -> LengthDistribution:  # noqa: ARG002
        """Return the true lengths with probability 1."""
        return LengthDistribution.point(output_tokens)


def uniform_draws(seed: int, n: int) -> Floats:
    """Return one uniform random number per request, [n], for ``Truthful.peek``; the first k do not depend on n."""
    return np.random.default_rng(np.random.SeedSequence([seed, 0x1E46])).random(n)


class LogNormalError:
    """Predicts the true length times an error exp(bias + sigma z), where z is standard normal.

    The predicted distribution is log-normal with the same sigma, and its median is the wrong length: it includes the
    error's variance, but not its bias. With ``exact_lengths``, the wrong length has probability 1. With sigma 0.5, one
    standard deviation is a factor of 1.65. A negative bias underestimates. The logarithm of the error halves after
    every ``half_life_tokens`` tokens (None: it is constant).
    """

    def __init__(
        self, sigma: float, bias: float = 0.0, half_life_tokens: float | None = None, *, exact_lengths: bool = False
    ) -> None:
        if not 0 <= sigma < 20 or not abs(bias) < 20:
            raise InputError(f"sigma must be within 0 .. 20 and bias within -20 .. 20; got {sigma} and {bias}")
        _check_half_life(half_life_tokens)
        self.sigma, self.bias = sigma, bias
        self.half_life_tokens, self.exact_lengths = half_life_tokens, exact_lengths

    def peek(self, output_tokens: Ints, tokens_so_far: int | Ints, uniform: Floats) -> LengthDistribution:
        """Return the predicted distributions, whose medians are the wrong lengths."""
        share = _error_share(tokens_so_far, self.half_life_tokens, len(uniform))
        wrong = output_tokens * np.exp(share * (self.bias + self.sigma * _normal_quantile(uniform)))
        wrong = np.clip(wrong, 1, 1e9)
        if self.exact_lengths or self.sigma == 0:
            return LengthDistribution.point(wrong)
        spread = np.exp(share[:, None] * self.sigma * _normal_quantile(LEVELS))
        return LengthDistribution(np.clip(wrong[:, None] * spread, 1, 1e9), LEVELS)


class Same:
    """An adversarial predictor: it predicts the same length for every request."""

    def __init__(self, tokens: float = 256.0) -> None:
        if not 1 <= tokens < 1e12:
            raise InputError(f"tokens must be at least 1 and below 1e12; it is {tokens}")
        self.tokens = tokens

    def peek(self, output_tokens: Ints, tokens_so_far: int | Ints, uniform: Floats) -> LengthDistribution:  # noqa: ARG002
        """Return the same length, with probability 1, for every request."""
        return LengthDistribution.point(np.full(len(output_tokens), self.tokens))


class Reversed:
    """An adversarial predictor: it predicts pivot**2 / length, so that long requests look short and short ones long."""

    def __init__(self, pivot: float = 256.0) -> None:
        if not 1 <= pivot < 1e6:
            raise InputError(f"pivot must be at least 1 and below 1e6; it is {pivot}")
        self.pivot = pivot

    def peek(self, output_tokens: Ints, tokens_so_far: int | Ints, uniform: Floats) -> LengthDistribution:  # noqa: ARG002
        """Return the reversed lengths with probability 1."""
        return LengthDistribution.point(self.pivot**2 / output_tokens.astype(float))


def _normal_quantile(levels: npt.NDArray[Any]) -> Floats:
    from scipy.special import ndtri

    return np.asarray(ndtri(np.clip(levels, 0.001, 0.999)))


def _check_half_life(tokens: float | None) -> None:
    if tokens is not None and not tokens > 0:
        raise InputError(f"half_life_tokens must be above 0; it is {tokens}")


def _error_share(tokens_so_far: int | Ints, half_life_tokens: float | None, n: int) -> Floats:
    """Return the share [n] of the error that remains after ``tokens_so_far``: 1 without a half-life."""
    a = np.broadcast_to(np.asarray(tokens_so_far, float), (n,))
    return np.ones(n) if half_life_tokens is None else np.asarray(0.5 ** (a / half_life_tokens))


class Quantised:
    """Predicts the distribution of the lengths in the class of the true length.

    A length y belongs to class i if boundaries[i] < y <= boundaries[i + 1]; shorter and longer lengths belong to the
    first and the last class. Within a class, lengths are uniform, unless ``fit`` has learned their distribution.
    ``boundaries`` are k + 1 increasing lengths, or an integer k: then ``fit`` learns k classes of equal mass.
    """

    def __init__(self, boundaries: Sequence[float] | int) -> None:
        self.boundaries = boundaries
        self.boundaries_: Floats | None = None
        if isinstance(boundaries, int):
            if boundaries < 1:
                raise InputError(f"there must be at least one class; it is {boundaries}")
        else:
            self.boundaries_ = np.asarray(boundaries, float)
            good = len(self.boundaries_) >= 2 and np.isfinite(self.boundaries_).all() and self.boundaries_[0] >= 0
            if not good or (np.diff(self.boundaries_) <= 0).any():
                raise InputError(f"boundaries must be at least two increasing lengths; they are {list(boundaries)}")
        self.table_: Floats | None = None

    @property
    def classes(self) -> int:
        """Return the number of classes."""
        return self.boundaries if isinstance(self.boundaries, int) else len(self.boundaries) - 1

    def fit(self, samples: Samples) -> Self:
        """Learn the distribution of the lengths in each class, and the boundaries if only their number is given."""
        lengths, censored = samples.output_tokens, samples.censored
        if isinstance(self.boundaries, int):
            levels = np.linspace(0, 1, self.boundaries + 1)
            edges = length_quantiles(lengths, censored, levels)
            edges[0] = min(edges[0], lengths.min()) - 1
            self.boundaries_ = edges + np.arange(len(edges)) * 1e-9  # equal edges remain in order
        member = self.class_of(lengths)
        self.table_ = self._uniform()
        for i in np.unique(member):
            self.table_[i] = length_quantiles(lengths[member == i], censored[member == i], LEVELS)
        return self

    def class_of(self, output_tokens: npt.ArrayLike) -> Ints:
        """Return the true classes [n], counted from 0."""
        inner = self._edges()[1:-1]
        return np.asarray(np.searchsorted(inner, np.asarray(output_tokens, float), side="left"), np.int64)

    def peek(self, output_tokens: Ints, tokens_so_far: int | Ints, uniform: Floats) -> LengthDistribution:
        """Return the distribution of the lengths in each request's predicted class."""
        table = self._uniform() if self.table_ is None else self.table_
        predicted = self.predicted_class(self.class_of(output_tokens), tokens_so_far, uniform)
        return LengthDistribution(table, LEVELS).take(predicted)

    def predicted_class(self, true_class: Ints, tokens_so_far: int | Ints, uniform: Floats) -> Ints:  # noqa: ARG002
        """Return the predicted classes [n], which are the true ones here; subclasses add errors."""
        return true_class

    def _edges(self) -> Floats:
        if self.boundaries_ is None:
            raise InputError(f"{self.classes} classes without boundaries need samples; call fit(samples) first")
        return self.boundaries_

    def _uniform(self) -> Floats:
        edges = np.maximum(self._edges(), 1.0)
        return edges[:-1, None] + np.diff(edges)[:, None] * LEVELS


class BinNeighbour(Quantised):
    """Predicts a neighbouring class with some probability (Multi-Bin Batching, Section 6.2).

    For a true class with two neighbours, the prediction is one class lower with probability 2 * p * split, one class
    higher with probability 2 * p * (1 - split), and correct otherwise. For the first and the last class, it is the only
    neighbour with probability p. ``p`` is within 0 .. 0.5 and halves after every ``half_life_tokens`` tokens (None: it
    is constant).
    """

    def __init__(
        self, boundaries: Sequence[float] | int, p: float, split: float = 0.5, half_life_tokens: float | None = None
    ) -> None:
        super().__init__(boundaries)
        if not 0 <= p <= 0.5 or not 0 <= split <= 1:
            raise InputError(f"p must be within 0 .. 0.5 and split within 0 .. 1; got {p} and {split}")
        self.p, self.split, self.half_life_tokens = p, split, half_life_tokens
        _check_half_life(half_life_tokens)

    def predicted_class(self, true_class: Ints, tokens_so_far: int | Ints, uniform: Floats) -> Ints:
        """Return the predicted classes [n]: the true one or a neighbour."""
        p = self.p * _error_share(tokens_so_far, self.half_life_tokens, len(uniform))
        first, last = true_class == 0, true_class == self.classes - 1
        down = np.where(first, 0.0, np.where(last, p, 2 * p * self.split))
        up = np.where(last, 0.0, np.where(first, p, 2 * p * (1 - self.split)))
        return np.asarray(true_class - (uniform < down) + (uniform >= 1 - up))


class Confusion(Quantised):
    """Predicts classes by a confusion matrix.

    ``matrix`` [k][k] has a row for each true class with the probabilities of the predicted classes, which sum to 1.
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

    def predicted_class(self, true_class: Ints, tokens_so_far: int | Ints, uniform: Floats) -> Ints:  # noqa: ARG002
        """Return the predicted classes [n], drawn from the row of each true class."""
        cumulative = np.cumsum(self.matrix, axis=1)[:, :-1]
        return np.asarray((uniform[:, None] >= cumulative[true_class]).sum(axis=1), np.int64)
