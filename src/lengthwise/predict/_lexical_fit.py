"""How the lexical predictor, and the encoder's, learn: a location a prompt, an offset a model, a scale, residuals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.predict._survival import kaplan_meier
from lengthwise.predict.encoder_head import Head, learn_head
from lengthwise.predict.features import score, terms
from lengthwise.predict.lexical_trees import Trees, grow
from lengthwise.schema.errors import MissingExtraError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Vectors = npt.NDArray[Any]

SHARES = np.linspace(0, 1, 5)
"""Shares of the linear part in the location that are tried."""
SENSE_SHARES = np.linspace(0, 1, 11)
"""Shares of the networks in it."""
RIDGES = (10.0, 40.0, 160.0)
_FOLDS = 5
_CLIP = 4.0
_TAIL = 2.0
"""The ends of a distribution are at most so many times as far from its 1 % as that is from its 5 %."""
_DENSE = 0.5
_LEAST_PROMPTS, _MOST_TERMS = 4, 12_000


@dataclass(frozen=True)
class Location:
    """Log length of a prompt's answer relative to its model's: words' weights, features' weights, trees.

    Attributes:
        weights: Log tokens by term, and by feature (standardised by ``middle`` and ``spread``).
        linear: [m] weights of the standardised features; its last is the constant.
        share: The linear part's share of the two.
        trees: The other part.
        sense: Networks on features and an encoder's vector; None where there are no vectors.
        sense_share: Their share of the whole.
    """

    weights: dict[str, float]
    linear: Floats
    middle: Floats
    spread: Floats
    share: float
    trees: Trees
    sense: Head | None = None
    sense_share: float = 0.0

    def __call__(
        self, features: Floats, words: Sequence[list[str]], vectors: Vectors | None = None
    ) -> Floats:
        """[n] of prompts by their features, their words and their vectors."""
        linear = 0.0
        if self.share > 0:
            learnt = np.array([score(read, self.weights) for read in words])
            linear = (
                learnt + standard(features, self.middle, self.spread) @ self.linear[:-1] + self.linear[-1]
            )
        lexical = self.share * linear + (self._of_trees(features) if self.share < 1 else 0.0)
        if self.sense is None or vectors is None:
            return np.asarray(lexical)
        sense = self.sense(np.hstack([features, vectors]))
        return np.asarray((1 - self.sense_share) * lexical + self.sense_share * sense)

    def _of_trees(self, features: Floats) -> Floats:
        return (1 - self.share) * self.trees.predict(features)


def standard(features: Floats, middle: Floats, spread: Floats) -> Floats:
    """Features in standard deviations, at most four of them from the middle."""
    return np.minimum(np.maximum((features - middle) / spread, -_CLIP), _CLIP)


class Design:
    """Prompts as a learner sees them: terms that several share, and standardised features.

    Args:
        features: [n, m] of the prompts.
        words: [n] their words.
        seed: Of the folds, which share no prompt.
        vectors: [n, v] what an encoder makes of them, if one reads them.
    """

    def __init__(
        self, features: Floats, words: Sequence[list[str]], seed: int, vectors: Vectors | None = None
    ) -> None:
        from scipy import sparse

        self.sense = None if vectors is None else np.hstack([features, vectors])
        self.features, self.seed, n = features, seed, len(words)
        self.fold = np.random.default_rng(seed).permutation(n) % max(2, min(_FOLDS, n))
        self.middle, self.spread = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-6)
        self.vocabulary = _vocabulary(words)
        at = [[self.vocabulary[t] for t in terms(read) if t in self.vocabulary] for read in words]
        starts = np.concatenate([[0], np.cumsum([len(row) for row in at])])
        columns = np.array([c for row in at for c in row], np.int64)
        bag = sparse.csr_matrix((np.ones(len(columns)), columns, starts), (n, len(self.vocabulary)))
        dense = sparse.csr_matrix(_DENSE * standard(features, self.middle, self.spread))
        self.x: Any = sparse.hstack([bag, dense]).tocsr()

    def quick(self, y: Floats, weight: Floats) -> Floats:
        """[n] what a ridge regression of middling penalty says of prompts left out of it."""
        return self._linear(y, weight / weight.mean(), RIDGES[1])

    def locate(self, y: Floats, weight: Floats) -> tuple[Location, Floats]:
        """What follows ``y`` [n] best on prompts left out of it, and [n] what it says of those.

        The shares of the parts and the linear one's penalty are chosen by cross-validation over prompts.
        """
        weight = weight / weight.mean()  # a penalty means the same whatever the weights sum to
        linear = {ridge: self._linear(y, weight, ridge) for ridge in RIDGES}
        trees = self._held(y, lambda a, b: self._trees(a, y, weight).predict(self.features[b]))
        _, share, ridge = min(
            (float(np.average(np.abs(y - s * linear[r] - (1 - s) * trees), weights=weight)), s, r)
            for r in RIDGES
            for s in SHARES
        )
        everyone = np.arange(len(y))
        _, weights, dense = self._ridge(everyone, y, weight, ridge)
        grown = self._trees(everyone, y, weight)
        location = Location(weights, dense, self.middle, self.spread, float(share), grown)
        return self._with_sense(location, share * linear[ridge] + (1 - share) * trees, y, weight)

    def _with_sense(
        self, location: Location, held: Floats, y: Floats, weight: Floats
    ) -> tuple[Location, Floats]:
        """The same with networks on the vectors, in the share that serves prompts left out best."""
        x = self.sense
        if x is None:
            return location, held
        sense = self._held(y, lambda a, b: learn_head(x[a], y[a], weight[a], self.seed)(x[b]))
        _, share = min(
            (float(np.average(np.abs(y - (1 - s) * held - s * sense), weights=weight)), s)
            for s in SENSE_SHARES
        )
        if share == 0:
            return location, held
        head = learn_head(x, y, weight, self.seed)
        return replace(location, sense=head, sense_share=float(share)), (1 - share) * held + share * sense

    def _linear(self, y: Floats, weight: Floats, penalty: float) -> Floats:
        return self._held(y, lambda a, b: self._ridge(a, y, weight, penalty)[0](b))

    def _held(self, y: Floats, fitted: Callable[[Ints, Ints], Floats]) -> Floats:
        out = np.full(len(y), float(y.mean()))
        for k in range(int(self.fold.max()) + 1 if len(y) > 1 else 0):
            out[self.fold == k] = fitted(np.flatnonzero(self.fold != k), np.flatnonzero(self.fold == k))
        return out

    def _trees(self, rows: Ints, y: Floats, weight: Floats) -> Trees:
        return grow(self.features[rows], y[rows], weight[rows], trees=120, depth=4, seed=self.seed)

    def _ridge(
        self, rows: Ints, y: Floats, weight: Floats, penalty: float
    ) -> tuple[Callable[[Ints], Floats], dict[str, float], Floats]:
        """A ridge regression: what it says of rows, its weights of terms, and of features (last: the constant)."""
        known, constant = _ridge(self.x[rows], y[rows], weight[rows], penalty)
        count = len(self.vocabulary)
        weights = dict(zip(self.vocabulary, np.round(known[:count], 5).tolist(), strict=True))
        dense = np.round(np.append(known[count:] * _DENSE, constant), 6)
        return lambda others: np.asarray(self.x[others] @ known + constant), weights, dense


def _ridge(x: Any, y: Floats, weight: Floats, penalty: float) -> tuple[Floats, float]:
    try:
        from sklearn.linear_model import Ridge
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise MissingExtraError("training the lexical predictor", "predict") from error
    with threadpool_limits(1):
        model = Ridge(alpha=penalty, solver="sparse_cg", tol=1e-6).fit(x, y, weight)
    return np.asarray(model.coef_), float(model.intercept_)


def _vocabulary(words: Sequence[list[str]]) -> dict[str, int]:
    """Terms of several prompts, the most frequent first."""
    counted = Counter(term for read in words for term in terms(read))
    often = sorted((-n, term) for term, n in counted.items() if n >= _LEAST_PROMPTS)[:_MOST_TERMS]
    return {term: place for place, (_, term) in enumerate(often)}


def residual_quantiles(residual: Floats, censored: Bools, weight: Floats, levels: Floats) -> Floats:
    """[q] of residuals, some of them only known to be at least so large (Kaplan and Meier)."""
    rows = np.random.default_rng(0).choice(
        len(residual), min(4 * len(residual), 60_000), p=weight / weight.sum()
    )
    seen, cdf = kaplan_meier(residual[rows], censored[rows])
    if len(seen) == 0:
        return np.full(len(levels), float(residual.max()))
    inside = np.interp(levels, np.concatenate([[0.0], cdf]), np.concatenate([[seen[0]], seen]))
    beyond = (
        np.maximum(levels - cdf[-1], 0) / max(1e-9, 1 - cdf[-1])
        if cdf[-1] < 1 - 1e-9
        else np.zeros(len(levels))
    )
    tail = max(float(residual.max()) - float(seen[-1]), 0.2)
    out = np.maximum.accumulate(np.asarray(inside) + tail * beyond)
    p01, p05, p95, p99 = np.interp([0.01, 0.05, 0.95, 0.99], levels, out)
    return np.clip(out, p01 - _TAIL * (p05 - p01) - 1e-3, p99 + _TAIL * (p99 - p95) + 1e-3)


def imputed(y: Floats, censored: Bools, predicted: Floats) -> Floats:
    """[n] log lengths, those that were cut set to what is expected given that they are longer.

    The residuals of the uncut are taken for everybody's, as Buckley and James (1979) do: the mean of
    those residuals that are above the one at the cut.
    """
    if not censored.any() or censored.all():
        return y
    known = np.sort((y - predicted)[~censored])
    above = np.concatenate([np.cumsum(known[::-1])[::-1], [0.0]])
    cut = (y - predicted)[censored]
    first = np.searchsorted(known, cut, side="right")
    count = len(known) - first
    mean = np.where(count > 0, above[first] / np.maximum(count, 1), cut)
    out = y.copy()
    out[censored] = predicted[censored] + np.maximum(mean, cut + 0.1)
    return out
