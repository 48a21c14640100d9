"""Models inside the lexical predictor: of a prompt's log length, and of the remaining length during generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints, Samples
from lengthwise.predict.distribution import LEVELS, Floats, LengthDistribution
from lengthwise.predict.evaluation import known_of, pinball_losses
from lengthwise.predict.features import NAMES, PROGRESS, progress_features, requested_items, score, terms, text_so_far
from lengthwise.predict.regressors import Head, Trees, fit_head, grow, standard
from lengthwise.schema.errors import MissingExtraError
from lengthwise.statistics import kaplan_meier

Bools = npt.NDArray[np.bool_]
Vectors = npt.NDArray[Any]

OutputVectors = Callable[[Sequence[str]], "npt.NDArray[Any] | None"]
"""Maps texts so far to vectors [n, v], or to None without an encoder."""
_AXES = 16

LINEAR_SHARES = np.linspace(0, 1, 5)
"""Candidate shares of the linear part in the location."""
NETWORK_SHARES = np.linspace(0, 1, 11)
"""Candidate shares of the networks in it."""
RIDGES = (10.0, 40.0, 160.0)
"""Candidate penalties of the ridge regression."""
_LOCATION_FOLDS = 5
_MAX_TAIL_FACTOR = 2.0
"""The ends of a distribution are at most this many times as far from its 1 % quantile as that is from its 5 %."""
_DENSE_SCALE = 0.5
_MIN_TERM_PROMPTS, _MAX_TERMS = 4, 12_000


@dataclass(frozen=True)
class Axes:
    """Principal axes of vectors: their mean ``middle`` [v], and ``turn`` [v, k], the axes of the largest variance."""

    middle: Floats
    turn: Floats

    @classmethod
    def of(cls, vectors: npt.NDArray[Any]) -> Axes:
        """Return the axes of vectors [n, v]."""
        known = vectors.astype(float)
        _, directions = np.linalg.eigh(np.cov(known.T))
        return cls(known.mean(axis=0), np.ascontiguousarray(directions[:, ::-1][:, :_AXES]))

    def extended(self, x: Floats, vectors: tuple[Ints, npt.NDArray[Any]] | None) -> Floats:
        """Return [n, m + k] the columns ``x`` and the coordinates of the vectors of some rows; 0 for the others."""
        coordinates = np.zeros((len(x), self.turn.shape[1]))
        if vectors is not None:
            coordinates[vectors[0]] = np.einsum("ij,jk->ik", vectors[1] - self.middle, self.turn)
        return np.hstack([x, coordinates])


def text_vectors(texts: Sequence[str], output_vectors: OutputVectors) -> tuple[Ints, npt.NDArray[Any]] | None:
    """Return the rows with a text, and their vectors; None without any text, or without an encoder."""
    rows = np.flatnonzero([bool(text) for text in texts])
    vectors = output_vectors([texts[int(i)] for i in rows]) if len(rows) else None
    return None if vectors is None else (rows, vectors)


@dataclass(frozen=True)
class Location:
    """Log length of a prompt's answer relative to its model's.

    The linear part has ``weights``, log tokens by term, and ``linear``, [m + 1] weights of the features, standardized
    by their mean ``middle`` and deviation ``spread`` [m]; last the constant. Its weight is ``share``, the rest are the
    ``trees`` on the features. ``networks`` on features and an encoder's vector have the weight ``network_share``, the
    two others the rest; None without an encoder.
    """

    weights: dict[str, float]
    linear: Floats
    middle: Floats
    spread: Floats
    share: float
    trees: Trees
    networks: Head | None = None
    network_share: float = 0.0

    def __call__(self, features: Floats, words: Sequence[list[str]], vectors: Vectors | None = None) -> Floats:
        """Return [n] the location of prompts by their features, words and vectors."""
        linear: Any = 0.0
        if self.share > 0:
            by_terms = np.array([score(read, self.weights) for read in words])
            linear = by_terms + standard(features, self.middle, self.spread) @ self.linear[:-1] + self.linear[-1]
        lexical = self.share * linear
        if self.share < 1:
            lexical = lexical + (1 - self.share) * self.trees.predict(features)
        if self.networks is None or vectors is None:
            return np.asarray(lexical)
        by_networks = self.networks(np.hstack([features, vectors]))
        return np.asarray((1 - self.network_share) * lexical + self.network_share * by_networks)


class Design:
    """The design matrix of prompts: common terms and standardized features [n, m].

    Folds, drawn with ``seed``, share no prompt. ``vectors`` are [n, v] of an encoder, if there is one.
    """

    def __init__(self, features: Floats, words: Sequence[list[str]], seed: int, vectors: Vectors | None = None) -> None:
        from scipy import sparse

        self.network_input = None if vectors is None else np.hstack([features, vectors])
        self.features, self.seed, n = features, seed, len(words)
        self.fold = np.random.default_rng(seed).permutation(n) % max(2, min(_LOCATION_FOLDS, n))
        self.middle, self.spread = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-6)
        counts = Counter(term for read in words for term in terms(read))
        common = sorted((-n, term) for term, n in counts.items() if n >= _MIN_TERM_PROMPTS)[:_MAX_TERMS]
        self.vocabulary = {term: place for place, (_, term) in enumerate(common)}
        at = [[self.vocabulary[t] for t in terms(read) if t in self.vocabulary] for read in words]
        starts = np.concatenate([[0], np.cumsum([len(row) for row in at])])
        columns = np.array([c for row in at for c in row], np.int64)
        bag = sparse.csr_matrix((np.ones(len(columns)), columns, starts), (n, len(self.vocabulary)))
        dense = sparse.csr_matrix(_DENSE_SCALE * standard(features, self.middle, self.spread))
        self.x: Any = sparse.hstack([bag, dense]).tocsr()

    def cross_validated_ridge(self, y: Floats, weight: Floats) -> Floats:
        """Return [n] predictions of ridge regressions with a medium penalty for held-out prompts."""
        return self._held_out_ridge(y, weight / weight.mean(), RIDGES[1])

    def _held_out_ridge(self, y: Floats, weight: Floats, penalty: float) -> Floats:
        def predicted(train: Ints, test: Ints) -> Floats:
            coefficients, constant = self._ridge(train, y, weight, penalty)
            return np.asarray(self.x[test] @ coefficients + constant)

        return cross_validated(self.fold, predicted, float(y.mean()))

    def fit(self, y: Floats, weight: Floats) -> tuple[Location, Floats]:
        """Return the location model of ``y`` [n] and its predictions [n] for held-out prompts.

        The weights of its parts and the penalty of the linear one are chosen by cross-validation over prompts.
        """
        weight = weight / weight.mean()  # a penalty then does not depend on the sum of the weights

        def grown(rows: Ints) -> Trees:
            return grow(self.features[rows], y[rows], weight[rows], trees=120, depth=4, seed=self.seed)

        linear = {ridge: self._held_out_ridge(y, weight, ridge) for ridge in RIDGES}
        mean = float(y.mean())
        trees = cross_validated(self.fold, lambda train, test: grown(train).predict(self.features[test]), mean)
        _, share, ridge = min(
            (float(np.average(np.abs(y - s * linear[r] - (1 - s) * trees), weights=weight)), s, r)
            for r in RIDGES
            for s in LINEAR_SHARES
        )
        all_rows, terms_count = np.arange(len(y)), len(self.vocabulary)
        coefficients, constant = self._ridge(all_rows, y, weight, ridge)
        weights = dict(zip(self.vocabulary, np.round(coefficients[:terms_count], 5).tolist(), strict=True))
        dense = np.round(np.append(coefficients[terms_count:] * _DENSE_SCALE, constant), 6)
        location = Location(weights, dense, self.middle, self.spread, float(share), grown(all_rows))
        held_out, x = share * linear[ridge] + (1 - share) * trees, self.network_input
        if x is None:
            return location, held_out

        def fit_networks(rows: Ints) -> Head:
            return fit_head(x[rows], y[rows], weight[rows], self.seed)

        networks = cross_validated(self.fold, lambda train, test: fit_networks(train)(x[test]), mean)
        _, network_share = min(
            (float(np.average(np.abs(y - (1 - s) * held_out - s * networks), weights=weight)), s)
            for s in NETWORK_SHARES
        )
        if network_share == 0:
            return location, held_out
        location = replace(location, networks=fit_networks(all_rows), network_share=float(network_share))
        return location, (1 - network_share) * held_out + network_share * networks

    def _ridge(self, rows: Ints, y: Floats, weight: Floats, penalty: float) -> tuple[Floats, float]:
        try:
            from sklearn.linear_model import Ridge
            from threadpoolctl import threadpool_limits
        except ImportError as error:
            raise MissingExtraError("training the lexical predictor", "predict") from error
        model: Any = Ridge(alpha=penalty, solver="sparse_cg", tol=1e-6)
        with threadpool_limits(1):
            model.fit(self.x[rows], y[rows], weight[rows])
        return np.asarray(model.coef_), float(model.intercept_)


def cross_validated(fold: Ints, predicted: Callable[[Ints, Ints], Floats], otherwise: float = 0.0) -> Floats:
    """Return [n] predictions for the rows of each fold from those of the others; ``otherwise`` without others."""
    out = np.full(len(fold), otherwise)
    for k in np.unique(fold):
        train, test = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        if len(train):
            out[test] = predicted(train, test)
    return out


def residual_quantiles(residual: Floats, censored: Bools, weight: Floats, levels: Floats) -> Floats:
    """Return [q] quantiles of residuals, the censored ones of which are lower bounds (Kaplan and Meier)."""
    rows = np.random.default_rng(0).choice(len(residual), min(4 * len(residual), 60_000), p=weight / weight.sum())
    seen, cdf = kaplan_meier(residual[rows], censored[rows])
    if len(seen) == 0:
        return np.full(len(levels), float(residual.max()))
    inside = np.interp(levels, np.concatenate([[0.0], cdf]), np.concatenate([[seen[0]], seen]))
    beyond = np.maximum(levels - cdf[-1], 0) / max(1e-9, 1 - cdf[-1]) if cdf[-1] < 1 - 1e-9 else np.zeros(len(levels))
    tail = max(float(residual.max()) - float(seen[-1]), 0.2)
    out = np.maximum.accumulate(np.asarray(inside) + tail * beyond)
    p01, p05, p95, p99 = np.interp([0.01, 0.05, 0.95, 0.99], levels, out)
    return np.clip(out, p01 - _MAX_TAIL_FACTOR * (p05 - p01) - 1e-3, p99 + _MAX_TAIL_FACTOR * (p99 - p95) + 1e-3)


def imputed(y: Floats, censored: Bools, predicted: Floats) -> Floats:
    """Return [n] log lengths, with censored ones set to their expectation given that they are longer.

    As in Buckley and James (1979), the expectation uses the residuals of uncensored samples above the one at the
    censoring.
    """
    if not censored.any() or censored.all():
        return y
    known = np.sort((y - predicted)[~censored])
    above = np.concatenate([np.cumsum(known[::-1])[::-1], [0.0]])
    bound = (y - predicted)[censored]
    first = np.searchsorted(known, bound, side="right")
    count = len(known) - first
    mean = np.where(count > 0, above[first] / np.maximum(count, 1), bound)
    out = y.copy()
    out[censored] = predicted[censored] + np.maximum(mean, bound + 0.1)
    return out


_PROMPT = [NAMES.index(name) for name in ("log_chars", "asked_log_tokens", "guess", "foreign_share", "words of code")]
WINDOW_COLUMNS = len(PROGRESS) + len(_PROMPT) + 4
_MAX_WINDOWS_PER_REQUEST = 40
_MIN_SCALE = 0.05
_MIN_ROWS, _MIN_PROMPTS = 200, 20
_MIN_ALIVE, _MIN_UNCENSORED = 50, 0.5
_WINDOW_FOLDS = 3
_WEIGHT_POWER = 0.25
"""Weights of windows are this power of the samples': the remainder depends less on the prompt than the total."""
BANDS = np.array([100, 200, 400, 800])
"""Tokens so far, at most, of each band of windows but the last."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out windows of a band of tokens so far: pinball loss in tokens of both ways to predict again.

    ``repredicted`` is the loss of the window model, ``conditioned`` that of the first prediction given the tokens so
    far, ``half_width`` one standard error of their difference over ``prompts``.
    """

    first: int
    last: int
    windows: int
    prompts: int
    repredicted: float
    conditioned: float
    half_width: float

    @property
    def used(self) -> bool:
        """Return whether there are enough windows, and the window model is not worse beyond the standard error."""
        enough = self.windows >= _MIN_ROWS and self.prompts >= _MIN_PROMPTS
        return enough and self.repredicted + self.half_width <= self.conditioned


def range_read(held_out: Sequence[HeldOut]) -> tuple[int, int] | None:
    """Return the first and last tokens so far of the first run of used bands; None if no band is used."""
    used = list(takewhile(lambda band: band.used, dropwhile(lambda band: not band.used, held_out)))
    return (used[0].first, used[-1].last) if used else None


@dataclass(frozen=True)
class WindowModel:
    """Log remaining tokens from the text so far: trees for the middle and for the scale, and quantiles of residuals.

    The ``middle`` is relative to the survival estimate, which uses ``base_z``, [levels] quantiles of the residuals of
    prompts. ``scale`` is the log size of the residuals, ``z`` [bands, levels] the quantiles of these divided by it, by
    tokens so far. ``axes`` are those of the vectors of texts so far; None without an encoder.
    """

    middle: Trees
    scale: Trees
    z: Floats
    base_z: Floats
    axes: Axes | None = None

    def total(
        self, so_far: Ints, texts: Sequence[str], mu: Floats, scale: Floats,
        words: Sequence[list[str]], features: Floats, output_vectors: OutputVectors,
    ) -> Floats:  # fmt: skip
        """Return [n, levels] quantiles of total lengths above the tokens so far (at least 1)."""
        x, survival = _window_features(so_far, texts, mu, scale, words, features, self.base_z)
        if self.axes is not None:
            x = self.axes.extended(x, text_vectors(texts, output_vectors))
        middle = survival + self.middle.predict(x)
        return _totals(so_far, middle, _size(self.scale.predict(x)), self.z[_band(so_far)])


@dataclass(frozen=True)
class FromPrompts:
    """Prediction of each sample from its prompt alone, by a model that has not seen this prompt."""

    mu: Floats  # [n] log length
    scale: Floats  # [n] size of the residuals
    words: Sequence[list[str]]  # [n] words of the prompt
    features: Floats  # [n, m] features of the prompt
    prompt: Ints  # [n] index of the prompt: held-out windows share none
    weight: Floats  # [n]
    predicted: LengthDistribution  # [n]


def fit_windows(
    samples: Samples,
    base: FromPrompts,
    *,
    output_vectors: OutputVectors,
    window_tokens: int,
    max_windows: int,
    seed: int,
) -> tuple[WindowModel | None, tuple[HeldOut, ...]]:
    """Learn from outputs truncated at multiples of ``window_tokens``, with their text.

    ``max_windows`` are drawn from all. Folds by prompt give the held-out losses of each band, against conditioning; the
    model is None if no band uses it.
    """
    if samples.output is None:
        return None, ()
    mu, scale, prompt = base.mu, base.scale, base.prompt
    y = np.log(samples.output_tokens.astype(float))
    base_z = residual_quantiles((y - mu) / scale, samples.censored, np.ones(len(y)), LEVELS)
    horizon = _horizon(samples, window_tokens)
    readable = np.where([bool(text) for text in samples.output], samples.output_tokens, 0)
    row, so_far = drawn_windows(np.minimum(readable, horizon + 1), window_tokens, max_windows, seed)
    if len(row) < _MIN_ROWS or len(np.unique(prompt[row])) < _MIN_PROMPTS:
        return None, ()
    parts = zip(row, so_far, strict=True)
    texts = [text_so_far(samples.output[r], int(samples.output_tokens[r]), int(s)) for r, s in parts]
    own_words = [base.words[r] for r in row]
    x, survival = _window_features(so_far, texts, mu[row], scale[row], own_words, base.features[row], base_z)
    remaining = np.log(samples.output_tokens[row] - so_far + 0.0) - survival
    censored, weights = samples.censored[row], base.weight[row] ** _WEIGHT_POWER
    fold = np.random.default_rng(seed).permutation(int(prompt.max()) + 1)[prompt[row]] % _WINDOW_FOLDS
    vectors = text_vectors(texts, output_vectors)
    axes = None if vectors is None else Axes.of(vectors[1])
    x = x if axes is None else axes.extended(x, vectors)

    def middle_of(rows: Ints) -> Trees:
        """Fit trees; censored remainders are raised to their predictions from uncensored ones."""
        z, target, is_censored, w = x[rows], remaining[rows], censored[rows], weights[rows]
        if is_censored.any() and not is_censored.all():
            known = ~is_censored
            first = grow(z[known], target[known], w[known], trees=300, depth=5, seed=seed, min_leaf=40).predict(z)
            target = np.where(is_censored, np.maximum(target, first) + 0.3, target)
        return grow(z, target, w, trees=300, depth=5, seed=seed, min_leaf=40)

    def scale_of(rows: Ints) -> Trees:
        return grow(x[rows], log_size[rows], weights[rows], trees=60, depth=3, seed=seed)

    middle = cross_validated(fold, lambda train, test: middle_of(train).predict(x[test]))
    full = np.where(censored, np.maximum(remaining, middle) + 0.3, remaining)
    log_size = np.log(np.maximum(np.abs(full - middle), _MIN_SCALE))
    size = _size(cross_validated(fold, lambda train, test: scale_of(train).predict(x[test])))
    residual, band = (remaining - middle) / size, _band(so_far)
    totals = np.empty((len(row), len(LEVELS)))
    for k in np.unique(fold):
        train, test = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        z = _band_quantiles(residual[train], censored[train], band[train])[band[test]]
        totals[test] = _totals(so_far[test], (survival + middle)[test], size[test], z)
    held_out = _held_out(samples, base, row, so_far, LengthDistribution.of(totals), window_tokens)
    if range_read(held_out) is None:
        return None, held_out
    z, all_rows = _band_quantiles(residual, censored, band), np.arange(len(row))
    return WindowModel(middle_of(all_rows), scale_of(all_rows), z, base_z, axes), held_out


def _held_out(
    samples: Samples, base: FromPrompts, row: Ints, so_far: Ints, repredicted: LengthDistribution, window_tokens: int
) -> tuple[HeldOut, ...]:
    """Return the losses of each band over the windows of requests that can be scored, as in ``evaluate``."""
    scored, known = known_of(samples.output_tokens, samples.censored)
    at = np.full(len(samples), -1)
    at[scored] = np.arange(len(scored))
    windows = np.flatnonzero(at[row] >= 0)
    windows = windows[known.tokens[at[row[windows]]] > so_far[windows]]
    of, prompt, band = known.take(at[row[windows]]), base.prompt[row[windows]], _band(so_far[windows])
    conditioned = base.predicted.take(row[windows]).given(so_far[windows])
    losses = np.stack([pinball_losses(one, of) for one in (repredicted.take(windows), conditioned)])
    made = []
    for k in np.unique(band):
        rows = band == k
        weight, loss = of.weight[rows], losses[:, rows]
        means = np.average(loss, axis=1, weights=weight)
        off = weight * (loss[0] - loss[1] - (means[0] - means[1]))
        error = float(np.sqrt((np.bincount(prompt[rows], off) ** 2).sum()) / weight.sum())
        first = window_tokens if k == 0 else int(BANDS[k - 1]) + 1
        last = int(so_far[windows][rows].max()) if k == band.max() else int(BANDS[k])
        prompts = len(np.unique(prompt[rows]))
        made.append(HeldOut(first, last, int(rows.sum()), prompts, float(means[0]), float(means[1]), error))
    return tuple(made)


def drawn_windows(tokens: Ints, window_tokens: int, max_windows: int, seed: int) -> tuple[Ints, Ints]:
    """Return rows, and the tokens so far, of windows after which the samples continued."""
    count = np.clip((tokens - 1) // window_tokens, 0, _MAX_WINDOWS_PER_REQUEST)
    row = np.repeat(np.arange(len(tokens)), count)
    window = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count) + 1
    drawn = np.sort(np.random.default_rng(seed).permutation(len(row))[:max_windows])
    return row[drawn], (window * window_tokens)[drawn]


def _horizon(samples: Samples, window_tokens: int) -> int:
    """Return the last window after which enough outputs continued, most of which were uncensored."""
    lengths = np.sort(samples.output_tokens)
    uncensored = np.sort(samples.output_tokens[~samples.censored])
    windows = np.arange(1, _MAX_WINDOWS_PER_REQUEST + 1) * window_tokens
    alive = len(lengths) - np.searchsorted(lengths, windows, side="right")
    known = len(uncensored) - np.searchsorted(uncensored, windows, side="right")
    good = (alive >= _MIN_ALIVE) & (known >= _MIN_UNCENSORED * alive)
    return int(windows[good].max()) if good.any() else window_tokens


def _window_features(
    so_far: Ints, texts: Sequence[str], mu: Floats, scale: Floats,
    words: Sequence[list[str]], features: Floats, base_z: Floats,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Return [n, WINDOW_COLUMNS] features, and [n] the median log remaining tokens by survival alone."""
    progress = progress_features(so_far, texts, [requested_items(read) for read in words])
    log = progress[:, 0]
    steps = base_z + 1e-9 * np.arange(len(base_z))
    passed = np.clip(np.interp((log - mu) / scale, steps, LEVELS), 0, 0.98)
    middle = mu + scale * np.interp(passed + (1 - passed) / 2, LEVELS, base_z)
    survival = np.log(np.maximum(np.exp(np.minimum(middle, 20)) - so_far, 0.25 * so_far))
    return np.column_stack([progress, features[:, _PROMPT], mu, scale, mu - log, passed]), survival


def _totals(so_far: Ints, middle: Floats, size: Floats, z: Floats) -> Floats:
    """Return [n, levels] total tokens of quantiles ``z`` of the log remaining tokens."""
    remaining = np.exp(np.minimum(middle[:, None] + size[:, None] * z, 20.0))
    return np.asarray(so_far[:, None] + np.maximum(remaining, 1.0))


def _band(so_far: Ints) -> Ints:
    return np.asarray(np.searchsorted(BANDS, so_far), np.int64)


def _band_quantiles(z: Floats, censored: Bools, band: Ints) -> Floats:
    """Return [bands, levels] quantiles; a band with few windows has those of all."""
    made = np.tile(residual_quantiles(z, censored, np.ones(len(z)), LEVELS), (len(BANDS) + 1, 1))
    for k in np.unique(band):
        rows = band == k
        if rows.sum() >= _MIN_ROWS and not censored[rows].all():
            made[k] = residual_quantiles(z[rows], censored[rows], np.ones(rows.sum()), LEVELS)
    return made


def _size(log: Floats) -> Floats:
    return np.asarray(np.maximum(np.exp(np.clip(log, -8, 2)), _MIN_SCALE))
