"""How the lexical predictor, and the encoder's, learn: a location a prompt, an offset a model, a scale, residuals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints, Samples
from lengthwise.predict.distribution import LEVELS, Floats
from lengthwise.predict.features import (
    NAMES,
    PROGRESS,
    Axes,
    Endings,
    asked_items,
    progress_features,
    read_endings,
    score,
    terms,
    text_so_far,
)
from lengthwise.predict.regressors import Head, Trees, grow, learn_head
from lengthwise.schema.errors import MissingExtraError
from lengthwise.statistics import kaplan_meier

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Vectors = npt.NDArray[Any]

SHARES = np.linspace(0, 1, 5)
"""Shares of the linear part in the location that are tried."""
SENSE_SHARES = np.linspace(0, 1, 11)
"""Shares of the networks in it."""
RIDGES = (10.0, 40.0, 160.0)
_LOCATION_FOLDS = 5
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
        direction: Networks on features and an encoder's vector; None where there are no vectors.
        sense_share: Their share of the whole.
    """

    weights: dict[str, float]
    linear: FloatArray
    middle: FloatArray
    spread: FloatArray
    share: float
    trees: Trees
    direction: Head | None = None
    sense_share: float = 0.0

    def __call__(self, features: FloatArray, words: Sequence[list[str]], vectors: Vectors | None = None) -> FloatArray:
        """[n] of prompts by their features, their words and their vectors."""
        linear = 0.0
        if self.share > 0:
            learnt = np.array([score(read, self.weights) for read in words])
            linear = learnt + standard(features, self.middle, self.spread) @ self.linear[:-1] + self.linear[-1]
        lexical = self.share * linear + (self._of_trees(features) if self.share < 1 else 0.0)
        if self.direction is None or vectors is None:
            return np.asarray(lexical)
        direction = self.direction(np.hstack([features, vectors]))
        return np.asarray((1 - self.sense_share) * lexical + self.sense_share * direction)

    def _of_trees(self, features: FloatArray) -> FloatArray:
        return (1 - self.share) * self.trees.predict(features)


def standard(features: FloatArray, middle: FloatArray, spread: FloatArray) -> FloatArray:
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
        self, features: FloatArray, words: Sequence[list[str]], seed: int, vectors: Vectors | None = None
    ) -> None:
        from scipy import sparse

        self.direction = None if vectors is None else np.hstack([features, vectors])
        self.features, self.seed, n = features, seed, len(words)
        self.fold = np.random.default_rng(seed).permutation(n) % max(2, min(_LOCATION_FOLDS, n))
        self.middle, self.spread = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-6)
        self.vocabulary = _vocabulary(words)
        at = [[self.vocabulary[t] for t in terms(read) if t in self.vocabulary] for read in words]
        starts = np.concatenate([[0], np.cumsum([len(row) for row in at])])
        columns = np.array([c for row in at for c in row], np.int64)
        bag = sparse.csr_matrix((np.ones(len(columns)), columns, starts), (n, len(self.vocabulary)))
        dense = sparse.csr_matrix(_DENSE * standard(features, self.middle, self.spread))
        self.x: Any = sparse.hstack([bag, dense]).tocsr()

    def fast(self, y: FloatArray, weight: FloatArray) -> FloatArray:
        """[n] what a ridge regression of middling penalty says of prompts left out of it."""
        return self._linear(y, weight / weight.mean(), RIDGES[1])

    def locate(self, y: FloatArray, weight: FloatArray) -> tuple[Location, FloatArray]:
        """What follows ``y`` [n] best on prompts left out of it, and [n] what it says of those.

        The shares of the parts and the linear one's penalty are chosen by cross-validation over prompts.
        """
        weight = weight / weight.mean()  # a penalty means the same whatever the weights sum to
        linear = {ridge: self._linear(y, weight, ridge) for ridge in RIDGES}
        trees = self._reserved(y, lambda a, b: self._trees(a, y, weight).predict(self.features[b]))
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
        self, location: Location, validation: FloatArray, y: FloatArray, weight: FloatArray
    ) -> tuple[Location, FloatArray]:
        """The same with networks on the vectors, in the share that serves prompts left out best."""
        x = self.direction
        if x is None:
            return location, validation
        direction = self._reserved(y, lambda a, b: learn_head(x[a], y[a], weight[a], self.seed)(x[b]))
        _, share = min(
            (float(np.average(np.abs(y - (1 - s) * validation - s * direction), weights=weight)), s)
            for s in SENSE_SHARES
        )
        if share == 0:
            return location, validation
        head = learn_head(x, y, weight, self.seed)
        return replace(location, direction=head, sense_share=float(share)), (1 - share) * validation + share * direction

    def _linear(self, y: FloatArray, weight: FloatArray, penalty: float) -> FloatArray:
        return self._reserved(y, lambda a, b: self._ridge(a, y, weight, penalty)[0](b))

    def _reserved(self, y: FloatArray, fit_result: Callable[[IntArray, IntArray], FloatArray]) -> FloatArray:
        out = np.full(len(y), float(y.mean()))
        for k in range(int(self.fold.max()) + 1 if len(y) > 1 else 0):
            out[self.fold == k] = fit_result(np.flatnonzero(self.fold != k), np.flatnonzero(self.fold == k))
        return out

    def _trees(self, rows: IntArray, y: FloatArray, weight: FloatArray) -> Trees:
        return grow(self.features[rows], y[rows], weight[rows], trees=120, depth=4, seed=self.seed)

    def _ridge(
        self, rows: IntArray, y: FloatArray, weight: FloatArray, penalty: float
    ) -> tuple[Callable[[IntArray], FloatArray], dict[str, float], FloatArray]:
        """A ridge regression: what it says of rows, its weights of terms, and of features (last: the constant)."""
        known, constant = _ridge(self.x[rows], y[rows], weight[rows], penalty)
        count = len(self.vocabulary)
        weights = dict(zip(self.vocabulary, np.round(known[:count], 5).tolist(), strict=True))
        dense = np.round(np.append(known[count:] * _DENSE, constant), 6)
        return lambda others: np.asarray(self.x[others] @ known + constant), weights, dense


def _ridge(x: Any, y: FloatArray, weight: FloatArray, penalty: float) -> tuple[FloatArray, float]:
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


def residual_quantiles(residual: FloatArray, censored: Bools, weight: FloatArray, levels: FloatArray) -> FloatArray:
    """[q] of residuals, some of them only known to be at least so large (Kaplan and Meier)."""
    rows = np.random.default_rng(0).choice(len(residual), min(4 * len(residual), 60_000), p=weight / weight.sum())
    seen, cdf = kaplan_meier(residual[rows], censored[rows])
    if len(seen) == 0:
        return np.full(len(levels), float(residual.max()))
    inside = np.interp(levels, np.concatenate([[0.0], cdf]), np.concatenate([[seen[0]], seen]))
    beyond = np.maximum(levels - cdf[-1], 0) / max(1e-9, 1 - cdf[-1]) if cdf[-1] < 1 - 1e-9 else np.zeros(len(levels))
    tail = max(float(residual.max()) - float(seen[-1]), 0.2)
    out = np.maximum.accumulate(np.asarray(inside) + tail * beyond)
    p01, p05, p95, p99 = np.interp([0.01, 0.05, 0.95, 0.99], levels, out)
    return np.clip(out, p01 - _TAIL * (p05 - p01) - 1e-3, p99 + _TAIL * (p99 - p95) + 1e-3)


def imputed(y: FloatArray, censored: Bools, predicted: FloatArray) -> FloatArray:
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


_PROMPT = [NAMES.index(name) for name in ("log_chars", "asked_log_tokens", "guess", "foreign_share", "words of code")]
COLUMNS = len(PROGRESS) + len(_PROMPT) + 4
_MOST_WINDOWS = 40
_LEAST_SCALE = 0.05
_MIN_ROWS = 200
_LEAST_ALIVE, _LEAST_UNCUT = 50, 0.5
_REPORTED, _WINDOW_FOLDS = 0.75, 3
_UNIFORM = 0.25
"""Weights of windows are this power of the samples': what is left depends on the prompt less than the whole does."""
_BANDS = np.array([100, 200, 400, 800])


@dataclass(frozen=True)
class Windows:
    """Log tokens still to come: trees for the middle and for the scale, and quantiles of residuals.

    Attributes:
        middle: What is left, log tokens, over what survival alone says.
        scale: Log size of the residuals.
        z: [2 x bands, levels] quantiles of residuals over the scale, first without a text, then with one, by
            tokens so far.
        base_z: [levels] quantiles of the residuals of prompts, for survival.
        horizon: Tokens so far up to which enough outputs were seen to end by themselves. Beyond, the least
            that is left is that at the horizon, and the most grows in proportion to the age.
        axes: Of the vectors of texts so far, whose places on them are columns; None where nobody reads them.
    """

    middle: Trees
    scale: Trees
    z: Floats
    base_z: Floats
    horizon: int
    axes: Axes | None = None

    def total(
        self, so_far: Ints, texts: Sequence[str] | None, mu: Floats, scale: Floats,
        words: Sequence[list[str]], features: Floats, endings: Endings,
    ) -> Floats:  # fmt: skip
        """[n, levels] quantiles of whole lengths above the tokens so far (at least 1)."""
        age = np.minimum(so_far, self.horizon)
        x, survival = _table(so_far, age, texts, mu, scale, words, features, self.base_z)
        if self.axes is not None:
            x = self.axes.additional(x, read_endings(texts or (), endings))
        middle = survival + self.middle.predict(x)
        size = _size(self.scale.predict(x))
        z = self.z[_band(age, x[:, 1] > 0)]
        left = np.exp(np.minimum(middle[:, None] + size[:, None] * z, 20.0))
        left = left * (so_far / age)[:, None] ** LEVELS**2
        return np.asarray(so_far[:, None] + np.maximum(left, 1.0))


def learn_windows(
    samples: Samples, mu: Floats, scale: Floats, words: Sequence[list[str]], features: Floats,
    *, prompt: Ints, weight: Floats, endings: Endings, window_tokens: int, most: int, seed: int,
) -> Windows:  # fmt: skip
    """Learns from outputs cut at multiples of ``window_tokens``, with their text and without.

    Args:
        samples: Finished requests.
        mu: [n] log length predicted of each by a model that has not seen its prompt.
        scale: [n] the size of its residuals.
        words: [n] words of the prompts.
        features: [n, m] their features.
        prompt: [n] number of the prompt of each: windows that are held out share none.
        weight: [n] how much each sample counts.
        endings: From texts so far to vectors, None where nobody reads them.
        window_tokens: Tokens of a window.
        most: Windows that are drawn from all.
        seed: Of that draw.
    """
    y = np.log(samples.output_tokens.astype(float))
    base_z = residual_quantiles((y - mu) / scale, samples.censored, np.ones(len(y)), LEVELS)
    horizon = _horizon(samples, window_tokens)
    row, so_far = _drawn(np.minimum(samples.output_tokens, horizon + 1), window_tokens, most, seed)
    if len(row) < _MIN_ROWS:
        return Windows(*_survival_alone(base_z), base_z, horizon)
    texts = _texts_of(samples, row, so_far, seed)
    x, survival = _table(so_far, so_far, texts, mu[row], scale[row], [words[r] for r in row], features[row], base_z)
    left = np.log(samples.output_tokens[row] - so_far + 0.0) - survival
    cut, each = samples.censored[row], weight[row] ** _UNIFORM
    fold = np.random.default_rng(seed).permutation(int(prompt.max()) + 1)[prompt[row]] % _WINDOW_FOLDS
    read = read_endings(texts, endings)
    axes = None if read is None else Axes.of(read[1])
    x = x if axes is None else axes.additional(x, read)
    held = _reserved(fold, lambda a, b: _middle(x[a], left[a], cut[a], each[a], seed).predict(x[b]))
    full = np.where(cut, np.maximum(left, held) + 0.3, left)
    log_size = np.log(np.maximum(np.abs(full - held), _LEAST_SCALE))
    size = _reserved(fold, lambda a, b: grow(x[a], log_size[a], each[a], trees=60, depth=3, seed=seed).predict(x[b]))
    z = _tables((left - held) / _size(size), cut, np.ones(len(row)), _band(so_far, x[:, 1] > 0))
    whole = _middle(x, left, cut, each, seed)
    doubt = grow(x, log_size, each, trees=60, depth=3, seed=seed)
    return Windows(whole, doubt, z, base_z, horizon, axes)


def _texts_of(samples: Samples, row: Ints, so_far: Ints, seed: int) -> list[str]:
    """Texts so far of three quarters of the windows; "" for the others, and where nobody kept them."""
    if samples.output is None:
        return [""] * len(row)
    told = np.random.default_rng(seed).random(len(row)) < _REPORTED
    return [
        text_so_far(samples.output[r], int(samples.output_tokens[r]), int(s)) if known else ""
        for r, s, known in zip(row, so_far, told, strict=True)
    ]


def _reserved(fold: Ints, predicted: Callable[[Ints, Ints], Floats]) -> Floats:
    """[n] what is said of each fold's rows by who learnt from the others'."""
    out = np.zeros(len(fold))
    for k in range(_WINDOW_FOLDS):
        own, rest = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        if len(own) and len(rest):
            out[rest] = predicted(own, rest)
    return out


def _middle(x: Floats, left: Floats, cut: npt.NDArray[np.bool_], weight: Floats, seed: int) -> Trees:
    """Trees of what is left; where the output was cut, of what was said without it, if that is more."""
    if cut.any() and not cut.all():
        first = _trees(x[~cut], left[~cut], weight[~cut], seed).predict(x)
        left = np.where(cut, np.maximum(left, first) + 0.3, left)
    return _trees(x, left, weight, seed)


def _trees(x: Floats, y: Floats, weight: Floats, seed: int) -> Trees:
    return grow(x, y, weight, trees=300, depth=5, seed=seed, least=40)


def _drawn(tokens: Ints, window_tokens: int, most: int, seed: int) -> tuple[Ints, Ints]:
    """Rows, and the tokens so far, of windows that the samples outlived."""
    count = np.minimum((tokens - 1) // window_tokens, _MOST_WINDOWS)
    row = np.repeat(np.arange(len(tokens)), count)
    window = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count) + 1
    kept = np.sort(np.random.default_rng(seed).permutation(len(row))[:most])
    return row[kept], (window * window_tokens)[kept]


def _horizon(samples: Samples, window_tokens: int) -> int:
    """The last window that several outputs outlived, most of which then ended by themselves."""
    ends = np.sort(samples.output_tokens)
    uncut = np.sort(samples.output_tokens[~samples.censored])
    windows = np.arange(1, _MOST_WINDOWS + 1) * window_tokens
    alive = len(ends) - np.searchsorted(ends, windows, side="right")
    ended = len(uncut) - np.searchsorted(uncut, windows, side="right")
    good = (alive >= _LEAST_ALIVE) & (ended >= _LEAST_UNCUT * alive)
    return int(windows[good].max()) if good.any() else window_tokens


def _table(
    so_far: Ints, age: Ints, texts: Sequence[str] | None, mu: Floats, scale: Floats,
    words: Sequence[list[str]], features: Floats, base_z: Floats,
) -> tuple[Floats, Floats]:  # fmt: skip
    """[n, COLUMNS] features, and [n] the log tokens left at the middle of what survival alone says."""
    progress = progress_features(so_far, texts, [asked_items(read) for read in words])
    log = np.log(age)
    progress[:, 0] = log
    reached = np.clip(_reached(log, mu, scale, base_z), 0, 0.98)
    middle = mu + scale * np.interp(reached + (1 - reached) / 2, LEVELS, base_z)
    survival = np.log(np.maximum(np.exp(np.minimum(middle, 20)) - age, 0.25 * age))
    extra = [mu, scale, mu - log, reached]
    return np.column_stack([progress, features[:, _PROMPT], *extra]), survival


def _reached(log: Floats, mu: Floats, scale: Floats, base_z: Floats) -> Floats:
    steps = base_z + 1e-9 * np.arange(len(base_z))
    return np.asarray(np.interp((log - mu) / scale, steps, LEVELS))


def _band(so_far: Ints, report: npt.NDArray[np.bool_]) -> Ints:
    return np.asarray(np.searchsorted(_BANDS, so_far) + (len(_BANDS) + 1) * report, np.int64)


def _tables(z: Floats, cut: npt.NDArray[np.bool_], weight: Floats, band: Ints) -> Floats:
    """Quantiles a band; a band with few windows takes those of all."""
    of_all = residual_quantiles(z, cut, weight, LEVELS)
    made = np.tile(of_all, (2 * (len(_BANDS) + 1), 1))
    for k in np.unique(band):
        rows = band == k
        if rows.sum() >= _MIN_ROWS and not cut[rows].all():
            made[k] = residual_quantiles(z[rows], cut[rows], weight[rows], LEVELS)
    return made


def _size(log: Floats) -> Floats:
    return np.asarray(np.maximum(np.exp(np.clip(log, -8, 2)), _LEAST_SCALE))


def _survival_alone(base_z: Floats) -> tuple[Trees, Trees, Floats]:
    none = np.zeros((0, 1), np.int32), np.zeros((0, 1)), np.zeros((0, 2))
    z = np.tile(base_z - base_z[len(LEVELS) // 2], (2 * (len(_BANDS) + 1), 1))
    return Trees(0.0, *none), Trees(0.0, *none), z
