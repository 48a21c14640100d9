"""Models inside the lexical predictor: for a prompt's log length, and for the remaining length after some tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints, Samples
from lengthwise.predict.distribution import LEVELS, Floats, LengthDistribution
from lengthwise.predict.evaluation import pinball_losses, scored_lengths
from lengthwise.predict.features import NAMES, PROGRESS, progress_features, requested_items, score, terms, text_so_far
from lengthwise.predict.regressors import Head, Trees, fit_head, fit_trees, standardized
from lengthwise.schema.errors import MissingExtraError
from lengthwise.statistics import kaplan_meier

Bools = npt.NDArray[np.bool_]
Vectors = npt.NDArray[Any]

OutputVectors = Callable[[Sequence[str]], "npt.NDArray[Any] | None"]
"""Maps outputs so far to vectors [n, v], or to None without an encoder."""
_AXES = 16

LINEAR_SHARES = np.linspace(0, 1, 5)  # candidate shares of the linear part in the location
NETWORK_SHARES = np.linspace(0, 1, 11)  # candidate shares of the networks in the location
RIDGES = (10.0, 40.0, 160.0)  # candidate penalties of the ridge regression
_LOCATION_FOLDS = 5
_MAX_TAIL_FACTOR = 2.0
"""Quantiles are at most this many times p05 - p01 below p01, and at most this many times p99 - p95 above p99."""
_DENSE_SCALE = 0.5
_MIN_TERM_PROMPTS, _MAX_TERMS = 4, 12_000


@dataclass(frozen=True)
class PrincipalAxes:
    """The k axes of the largest variance of vectors: ``directions`` [v, k], around their mean ``middle`` [v]."""

    middle: Floats
    directions: Floats

    @classmethod
    def of(cls, vectors: npt.NDArray[Any]) -> PrincipalAxes:
        """Return the principal axes of vectors [n, v]."""
        known = vectors.astype(float)
        _, directions = np.linalg.eigh(np.cov(known.T))
        return cls(known.mean(axis=0), np.ascontiguousarray(directions[:, ::-1][:, :_AXES]))

    def extended(self, x: Floats, vectors: tuple[Ints, npt.NDArray[Any]] | None) -> Floats:
        """Return the columns ``x`` [n, m] followed by coordinates along the axes, [n, m + k].

        ``vectors`` are the indices of the rows that have a vector, and these vectors; other rows get the coordinates 0.
        """
        coordinates = np.zeros((len(x), self.directions.shape[1]))
        if vectors is not None:
            coordinates[vectors[0]] = np.einsum("ij,jk->ik", vectors[1] - self.middle, self.directions)
        return np.hstack([x, coordinates])


def text_vectors(texts: Sequence[str], output_vectors: OutputVectors) -> tuple[Ints, npt.NDArray[Any]] | None:
    """Return the indices of the texts that are not empty, and their vectors; None without texts or an encoder."""
    rows = np.flatnonzero([bool(text) for text in texts])
    vectors = output_vectors([texts[int(i)] for i in rows]) if len(rows) else None
    return None if vectors is None else (rows, vectors)


@dataclass(frozen=True)
class Location:
    """A model of the location: the log length of a prompt's answer, relative to the serving model's offset.

    It is a weighted mean of three parts. The linear part is the sum of ``weights`` over the prompt's terms and of
    ``linear`` [m + 1] (the weights of the standardized features, then the constant); ``middle`` and ``spread`` [m] are
    the mean and the standard deviation of each feature. ``trees`` read the features. ``networks`` read the features and
    an encoder's vector; they are None without an encoder. The networks have the weight ``network_share``, the linear
    part has the share ``share`` of the rest, and the trees have what remains.
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
        """Return the locations [n] of prompts, from their features, words and vectors."""
        linear: Any = 0.0
        if self.share > 0:
            by_terms = np.array([score(read, self.weights) for read in words])
            linear = by_terms + standardized(features, self.middle, self.spread) @ self.linear[:-1] + self.linear[-1]
        lexical = self.share * linear
        if self.share < 1:
            lexical = lexical + (1 - self.share) * self.trees.predict(features)
        if self.networks is None or vectors is None:
            return np.asarray(lexical)
        by_networks = self.networks(np.hstack([features, vectors]))
        return np.asarray((1 - self.network_share) * lexical + self.network_share * by_networks)


class Design:
    """The design matrix of prompts, with common terms and standardized features, and the folds of cross-validation.

    Folds are drawn with ``seed`` and have no common prompt. ``vectors`` [n, v] come from an encoder, if there is one.
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
        dense = sparse.csr_matrix(_DENSE_SCALE * standardized(features, self.middle, self.spread))
        self.x: Any = sparse.hstack([bag, dense]).tocsr()

    def cross_validated_ridge(self, y: Floats, weight: Floats) -> Floats:
        """Return the predictions [n] of ridge regressions with a medium penalty, for held-out prompts."""
        return self._held_out_ridge(y, weight / weight.mean(), RIDGES[1])

    def _held_out_ridge(self, y: Floats, weight: Floats, penalty: float) -> Floats:
        def predicted(train: Ints, test: Ints) -> Floats:
            coefficients, constant = self._ridge(train, y, weight, penalty)
            return np.asarray(self.x[test] @ coefficients + constant)

        return cross_validated(self.fold, predicted, float(y.mean()))

    def fit(self, y: Floats, weight: Floats) -> tuple[Location, Floats]:
        """Return the location model fitted to the log lengths ``y`` [n], and its predictions [n] for held-out prompts.

        Cross-validation over prompts chooses the weights of the model's parts and the penalty of the linear part.
        """
        weight = weight / weight.mean()  # a penalty then does not depend on the sum of the weights

        def grown(rows: Ints) -> Trees:
            return fit_trees(self.features[rows], y[rows], weight[rows], trees=120, depth=4, seed=self.seed)

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


def cross_validated(fold: Ints, predicted: Callable[[Ints, Ints], Floats], default: float = 0.0) -> Floats:
    """Return predictions [n], each by a model that was not trained on the row's fold.

    ``predicted`` maps the indices of training rows and of test rows to predictions for the test rows. If there is only
    one fold, all predictions are ``default``.
    """
    out = np.full(len(fold), default)
    for k in np.unique(fold):
        train, test = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        if len(train):
            out[test] = predicted(train, test)
    return out


def residual_quantiles(residual: Floats, censored: Bools, weight: Floats, levels: Floats) -> Floats:
    """Return weighted quantiles [q] of residuals; ``censored`` ones are lower bounds (Kaplan and Meier)."""
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
    """Return the log lengths [n], with an estimate in place of each censored one, which is only a lower bound.

    As in Buckley and James (1979), the estimate is the expectation above the lower bound: the prediction plus the mean
    of the uncensored residuals above the censored one.
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


_PROMPT = [
    NAMES.index(name) for name in ("log_chars", "requested_log_tokens", "guess", "foreign_share", "words of code")
]
WINDOW_COLUMNS = len(PROGRESS) + len(_PROMPT) + 4
_MAX_WINDOWS_PER_REQUEST = 40
_MIN_SCALE = 0.05
_MIN_ROWS, _MIN_PROMPTS = 200, 100
_MIN_ERRORS = 2.0  # standard errors: by chance alone, 2.3 % of bands are better by so much
_MIN_ALIVE, _MIN_UNCENSORED = 50, 0.5
_WINDOW_FOLDS = 3
_WEIGHT_POWER = 0.25
"""A window's weight is its sample's to this power: the prompt says less about the remainder than about the total."""
BANDS = np.array([100, 200, 400, 800])  # largest tokens so far of each band of windows; the last band has no limit


@dataclass(frozen=True)
class BandLosses:
    """Pinball losses, in tokens, of two ways to predict again in one band: ``first`` to ``last`` tokens so far.

    They are means over ``windows`` windows of ``prompts`` held-out prompts. A window is the beginning of an output.
    ``repredicted`` is the loss of the window model, and ``conditioned`` that of the first prediction, conditioned on
    the tokens so far. ``half_width`` is one standard error of their difference.
    """

    first: int
    last: int
    windows: int
    prompts: int
    repredicted: float
    conditioned: float
    half_width: float

    @property
    def is_better(self) -> bool:
        """Return whether a paired test over prompts shows that the window model is better: by two standard errors."""
        enough = self.windows >= _MIN_ROWS and self.prompts >= _MIN_PROMPTS
        return enough and self.repredicted + _MIN_ERRORS * self.half_width <= self.conditioned


def reading_range(held_out: Sequence[BandLosses]) -> tuple[int, int] | None:
    """Return the first and last tokens so far at which the window model predicts; None if it never does.

    The bands are tested in their order, and the first one that fails ends the range. So the chance to read text that
    is of no use is that of a single test, however many bands follow (a fixed-sequence test, Maurer et al. 1995).
    """
    used = list(takewhile(lambda band: band.is_better, held_out))
    return (used[0].first, used[-1].last) if used else None


@dataclass(frozen=True)
class WindowModel:
    """Predicts the log remaining tokens from the text so far, by trees for the location and for the scale.

    ``middle`` predicts the difference of the location to the survival estimate. That estimate is the log of the median
    remainder by the prompt's prediction and the tokens so far; it uses ``base_z`` [levels], the quantiles of the
    standardized residuals of prompts. ``scale`` predicts the log size of the residuals. ``z`` [bands, levels] are the
    quantiles of the residuals divided by their size, in each band of tokens so far. ``axes`` are the principal axes of
    the vectors of the texts so far; they are None without an encoder.
    """

    middle: Trees
    scale: Trees
    z: Floats
    base_z: Floats
    axes: PrincipalAxes | None = None

    def total(
        self, so_far: Ints, texts: Sequence[str], mu: Floats, scale: Floats,
        words: Sequence[list[str]], features: Floats, output_vectors: OutputVectors,
    ) -> Floats:  # fmt: skip
        """Return the quantiles [n, levels] of total lengths; they exceed the tokens so far, which are at least 1."""
        x, survival = _window_features(so_far, texts, mu, scale, words, features, self.base_z)
        if self.axes is not None:
            x = self.axes.extended(x, text_vectors(texts, output_vectors))
        middle = survival + self.middle.predict(x)
        return _totals(so_far, middle, _size(self.scale.predict(x)), self.z[_band(so_far)])


@dataclass(frozen=True)
class BasePredictions:
    """Predictions of samples from their prompts alone."""

    mu: Floats  # [n] log length: a location by models that have not seen the prompt, plus offsets fitted to all
    scale: Floats  # [n] size of the residuals
    words: Sequence[list[str]]  # [n] words of the prompt
    features: Floats  # [n, m] features of the prompt
    prompt: Ints  # [n] index of the prompt: held-out windows share none
    weight: Floats  # [n] weight of the sample in the fit
    predicted: LengthDistribution  # [n] before the first token


def fit_windows(
    samples: Samples,
    base: BasePredictions,
    *,
    output_vectors: OutputVectors,
    window_tokens: int,
    max_windows: int,
    seed: int,
) -> tuple[WindowModel | None, tuple[BandLosses, ...]]:
    """Return a model of the remaining length, and its losses in each band of tokens so far.

    It learns from at most ``max_windows`` windows: beginnings of outputs, of multiples of ``window_tokens`` tokens,
    drawn at random. The losses are measured on held-out prompts. The model is None if ``reading_range`` is; with fewer
    than 200 windows or 100 prompts there are no losses either.
    """
    if samples.output is None:
        return None, ()
    mu, scale, prompt = base.mu, base.scale, base.prompt
    y = np.log(samples.output_tokens.astype(float))
    base_z = residual_quantiles((y - mu) / scale, samples.censored, np.ones(len(y)), LEVELS)
    horizon = _last_window_tokens(samples, window_tokens)
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
    axes = None if vectors is None else PrincipalAxes.of(vectors[1])
    x = x if axes is None else axes.extended(x, vectors)

    def middle_of(rows: Ints) -> Trees:
        """Fit trees; a censored remainder becomes at least the prediction of trees fitted to uncensored ones."""
        z, target, is_censored, w = x[rows], remaining[rows], censored[rows], weights[rows]
        if is_censored.any() and not is_censored.all():
            known = ~is_censored
            first = fit_trees(z[known], target[known], w[known], trees=300, depth=5, seed=seed, min_leaf=40).predict(z)
            target = np.where(is_censored, np.maximum(target, first) + 0.3, target)
        return fit_trees(z, target, w, trees=300, depth=5, seed=seed, min_leaf=40)

    def scale_of(rows: Ints) -> Trees:
        return fit_trees(x[rows], log_size[rows], weights[rows], trees=60, depth=3, seed=seed)

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
    held_out = _band_losses(samples, base, row, so_far, LengthDistribution.of(totals), window_tokens)
    if reading_range(held_out) is None:
        return None, held_out
    z, all_rows = _band_quantiles(residual, censored, band), np.arange(len(row))
    return WindowModel(middle_of(all_rows), scale_of(all_rows), z, base_z, axes), held_out


def _band_losses(
    samples: Samples, base: BasePredictions, row: Ints, so_far: Ints, predicted: LengthDistribution, window_tokens: int
) -> tuple[BandLosses, ...]:
    scored, known = scored_lengths(samples.output_tokens, samples.censored)
    at = np.full(len(samples), -1)
    at[scored] = np.arange(len(scored))
    windows = np.flatnonzero(at[row] >= 0)
    windows = windows[known.tokens[at[row[windows]]] > so_far[windows]]
    truths, conditioned = known.take(at[row[windows]]), base.predicted.take(row[windows]).given(so_far[windows])
    losses = np.stack([pinball_losses(one, truths) for one in (predicted.take(windows), conditioned)])
    return compared_bands(so_far[windows], base.prompt[row[windows]], truths.weight, losses, window_tokens)


def compared_bands(
    so_far: Ints, prompt: Ints, weight: Floats, losses: Floats, window_tokens: int
) -> tuple[BandLosses, ...]:
    """Return the mean losses in each band of windows, with the standard error of their difference over prompts.

    ``losses`` [2, n] are those of the window model and of conditioning; other columns are [n].
    """
    band, made = _band(so_far), []
    for k in np.unique(band):
        rows = band == k
        w, loss = weight[rows], losses[:, rows]
        means = np.average(loss, axis=1, weights=w)
        off = w * (loss[0] - loss[1] - (means[0] - means[1]))
        error = float(np.sqrt((np.bincount(prompt[rows], off) ** 2).sum()) / w.sum())
        first = window_tokens if k == 0 else int(BANDS[k - 1]) + 1
        last = int(so_far[rows].max()) if k == band.max() else int(BANDS[k])
        prompts = len(np.unique(prompt[rows]))
        made.append(BandLosses(first, last, int(rows.sum()), prompts, float(means[0]), float(means[1]), error))
    return tuple(made)


def drawn_windows(tokens: Ints, window_tokens: int, max_windows: int, seed: int) -> tuple[Ints, Ints]:
    """Return random windows, at most 40 a sample, each before its last token: (index of the sample, tokens so far)."""
    count = np.clip((tokens - 1) // window_tokens, 0, _MAX_WINDOWS_PER_REQUEST)
    row = np.repeat(np.arange(len(tokens)), count)
    window = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count) + 1
    drawn = np.sort(np.random.default_rng(seed).permutation(len(row))[:max_windows])
    return row[drawn], (window * window_tokens)[drawn]


def _last_window_tokens(samples: Samples, window_tokens: int) -> int:
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
    """Return features [n, WINDOW_COLUMNS], and the log remaining tokens [n] as the tokens so far predict them."""
    progress = progress_features(so_far, texts, [requested_items(read) for read in words])
    log = progress[:, 0]
    steps = base_z + 1e-9 * np.arange(len(base_z))
    passed = np.clip(np.interp((log - mu) / scale, steps, LEVELS), 0, 0.98)
    middle = mu + scale * np.interp(passed + (1 - passed) / 2, LEVELS, base_z)
    survival = np.log(np.maximum(np.exp(np.minimum(middle, 20)) - so_far, 0.25 * so_far))
    return np.column_stack([progress, features[:, _PROMPT], mu, scale, mu - log, passed]), survival


def _totals(so_far: Ints, middle: Floats, size: Floats, z: Floats) -> Floats:
    remaining = np.exp(np.minimum(middle[:, None] + size[:, None] * z, 20.0))
    return np.asarray(so_far[:, None] + np.maximum(remaining, 1.0))


def _band(so_far: Ints) -> Ints:
    return np.asarray(np.searchsorted(BANDS, so_far), np.int64)


def _band_quantiles(z: Floats, censored: Bools, band: Ints) -> Floats:
    """Return the quantiles of ``z`` in each band, [bands, levels]; a band with few windows gets those of all."""
    made = np.tile(residual_quantiles(z, censored, np.ones(len(z)), LEVELS), (len(BANDS) + 1, 1))
    for k in np.unique(band):
        rows = band == k
        if rows.sum() >= _MIN_ROWS and not censored[rows].all():
            made[k] = residual_quantiles(z[rows], censored[rows], np.ones(rows.sum()), LEVELS)
    return made


def _size(log: Floats) -> Floats:
    return np.asarray(np.maximum(np.exp(np.clip(log, -8, 2)), _MIN_SCALE))
