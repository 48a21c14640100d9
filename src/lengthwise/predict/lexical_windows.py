"""What is left of an output once some of it has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.predict._endings import Axes, Endings, read_endings
from lengthwise.predict._lexical_fit import residual_quantiles
from lengthwise.predict.contract import Ints, Samples
from lengthwise.predict.distribution import LEVELS, Floats
from lengthwise.predict.features import NAMES, asked_items
from lengthwise.predict.lexical_trees import Trees, grow
from lengthwise.predict.progress import PROGRESS, progress_features, text_so_far

_PROMPT = [
    NAMES.index(name) for name in ("log_chars", "asked_log_tokens", "guess", "foreign_share", "words of code")
]
COLUMNS = len(PROGRESS) + len(_PROMPT) + 4
_MOST_WINDOWS = 40
_LEAST_SCALE = 0.05
_LEAST_ROWS = 200
_LEAST_ALIVE, _LEAST_UNCUT = 50, 0.5
_TOLD, _FOLDS = 0.75, 3
_EVEN = 0.25
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
            x = self.axes.beside(x, read_endings(texts or (), endings))
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
    if len(row) < _LEAST_ROWS:
        return Windows(*_survival_alone(base_z), base_z, horizon)
    texts = _texts_of(samples, row, so_far, seed)
    x, survival = _table(
        so_far, so_far, texts, mu[row], scale[row], [words[r] for r in row], features[row], base_z
    )
    left = np.log(samples.output_tokens[row] - so_far + 0.0) - survival
    cut, each = samples.censored[row], weight[row] ** _EVEN
    fold = np.random.default_rng(seed).permutation(int(prompt.max()) + 1)[prompt[row]] % _FOLDS
    read = read_endings(texts, endings)
    axes = None if read is None else Axes.of(read[1])
    x = x if axes is None else axes.beside(x, read)
    held = _held(fold, lambda a, b: _middle(x[a], left[a], cut[a], each[a], seed).predict(x[b]))
    full = np.where(cut, np.maximum(left, held) + 0.3, left)
    log_size = np.log(np.maximum(np.abs(full - held), _LEAST_SCALE))
    size = _held(
        fold, lambda a, b: grow(x[a], log_size[a], each[a], trees=60, depth=3, seed=seed).predict(x[b])
    )
    z = _tables((left - held) / _size(size), cut, np.ones(len(row)), _band(so_far, x[:, 1] > 0))
    whole = _middle(x, left, cut, each, seed)
    doubt = grow(x, log_size, each, trees=60, depth=3, seed=seed)
    return Windows(whole, doubt, z, base_z, horizon, axes)


def _texts_of(samples: Samples, row: Ints, so_far: Ints, seed: int) -> list[str]:
    """Texts so far of three quarters of the windows; "" for the others, and where nobody kept them."""
    if samples.output is None:
        return [""] * len(row)
    told = np.random.default_rng(seed).random(len(row)) < _TOLD
    return [
        text_so_far(samples.output[r], int(samples.output_tokens[r]), int(s)) if known else ""
        for r, s, known in zip(row, so_far, told, strict=True)
    ]


def _held(fold: Ints, said: Callable[[Ints, Ints], Floats]) -> Floats:
    """[n] what is said of each fold's rows by who learnt from the others'."""
    out = np.zeros(len(fold))
    for k in range(_FOLDS):
        own, rest = np.flatnonzero(fold != k), np.flatnonzero(fold == k)
        if len(own) and len(rest):
            out[rest] = said(own, rest)
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


def _band(so_far: Ints, told: npt.NDArray[np.bool_]) -> Ints:
    return np.asarray(np.searchsorted(_BANDS, so_far) + (len(_BANDS) + 1) * told, np.int64)


def _tables(z: Floats, cut: npt.NDArray[np.bool_], weight: Floats, band: Ints) -> Floats:
    """Quantiles a band; a band with few windows takes those of all."""
    of_all = residual_quantiles(z, cut, weight, LEVELS)
    made = np.tile(of_all, (2 * (len(_BANDS) + 1), 1))
    for k in np.unique(band):
        rows = band == k
        if rows.sum() >= _LEAST_ROWS and not cut[rows].all():
            made[k] = residual_quantiles(z[rows], cut[rows], weight[rows], LEVELS)
    return made


def _size(log: Floats) -> Floats:
    return np.asarray(np.maximum(np.exp(np.clip(log, -8, 2)), _LEAST_SCALE))


def _survival_alone(base_z: Floats) -> tuple[Trees, Trees, Floats]:
    none = np.zeros((0, 1), np.int32), np.zeros((0, 1)), np.zeros((0, 2))
    z = np.tile(base_z - base_z[len(LEVELS) // 2], (2 * (len(_BANDS) + 1), 1))
    return Trees(0.0, *none), Trees(0.0, *none), z
