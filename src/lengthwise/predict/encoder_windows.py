"""What is left of an output, from the text that has come so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.predict._lexical_fit import residual_quantiles
from lengthwise.predict.contract import Ints, Samples
from lengthwise.predict.distribution import LEVELS, Floats, LengthDistribution
from lengthwise.predict.encoder_head import Head, learn_head, trusted_share
from lengthwise.predict.progress import PROGRESS, progress_features, text_so_far

Embed = Callable[[Sequence[str]], npt.NDArray[Any]]
OWN_COLUMNS = len(PROGRESS) + 5
_BANDS = np.array([100, 200, 400, 800])
_MOST_A_SAMPLE = 40
_LEAST_ROWS, _LEAST_SCALE, _MOST_SCALE = 100, 0.2, 1.2
_LEAST_TURN, _MOST_TURN = -4.0, 1.0
"""The text may say so much less, or more, than survival does, in log tokens."""
_DECAY = 10.0
_FOLDS = 3


@dataclass(frozen=True)
class Left:
    """Tokens still to come: networks for their logarithm and for its doubt, and quantiles of what they miss.

    Attributes:
        middle: Log tokens left over what survival alone expects; reads the text's vector.
        scale: Log size of the residuals; reads the other columns.
        z: [bands, levels] quantiles of residuals over that size, by tokens so far.
    """

    middle: Head
    scale: Head
    z: Floats

    def total(
        self, so_far: Ints, texts: Sequence[str], vectors: npt.NDArray[Any], prior: LengthDistribution,
        asked: Sequence[int],
    ) -> Floats:  # fmt: skip
        """[n, levels] whole lengths above ``so_far``, given the text so far and what was said before it."""
        x, survival = _columns(so_far, texts, prior, asked)
        middle = survival + _turn(self.middle, np.hstack([x, vectors]))
        size = _size(self.scale, x)
        left = np.exp(np.minimum(middle[:, None] + size[:, None] * self.z[_band(so_far)], 20.0))
        return np.asarray(so_far[:, None] + np.maximum(left, 1.0))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """For a file."""
        return {**self.middle.arrays("left"), **self.scale.arrays("left_scale"), "left_z": self.z}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], vector: int) -> Left:
        """What ``arrays`` gave."""
        return cls(
            Head.of_arrays(arrays, "left", OWN_COLUMNS + vector),
            Head.of_arrays(arrays, "left_scale", OWN_COLUMNS),
            np.asarray(arrays["left_z"], float).reshape(len(_BANDS) + 1, len(LEVELS)),
        )


def learn_left(
    samples: Samples, prior: LengthDistribution, asked: Sequence[int], weight: Floats, embed: Embed,
    *, window_tokens: int, most: int, seed: int,
) -> Left | None:  # fmt: skip
    """Learns from outputs cut after some windows; None where there is no text, or too little.

    Args:
        samples: Finished requests.
        prior: What was predicted of each by a model that has not seen its prompt.
        asked: [n] items that each prompt asked for.
        weight: [n] how much each counts.
        embed: From texts so far to vectors.
        window_tokens: Tokens of a window.
        most: Windows that are drawn from all.
        seed: Of that draw, and of the networks.
    """
    output = samples.output
    row, so_far = drawn(samples.output_tokens, window_tokens, most, seed)
    if output is None or len(row) < _LEAST_ROWS:
        return None
    whole = samples.output_tokens[row]
    texts = [text_so_far(output[r], int(n), int(s)) for r, n, s in zip(row, whole, so_far, strict=True)]
    x, survival = _columns(so_far, texts, prior.take(row), [asked[r] for r in row])
    z = np.hstack([x, embed(texts)])
    y, cut, each = np.log(whole - so_far + 0.0) - survival, samples.censored[row], weight[row]
    keys = np.unique(np.asarray(samples.prompts.text, object).astype(str), return_inverse=True)[1].reshape(-1)
    fold = np.random.default_rng(seed).permutation(int(keys.max()) + 1)[keys[row]] % _FOLDS
    held, size = np.zeros(len(y)), np.zeros(len(y))
    for k in range(_FOLDS):
        head = _middle(z[fold != k], y[fold != k], cut[fold != k], each[fold != k], seed)
        held[fold == k] = _turn(head, z[fold == k])
    share = trusted_share(np.where(cut, np.maximum(y, held), y), held, each)
    held *= share
    full = np.where(cut, np.maximum(y, held) + 0.3, y)
    doubt = np.log(np.maximum(np.abs(full - held), _LEAST_SCALE))
    for k in range(_FOLDS):
        size[fold == k] = _size(
            learn_head(x[fold != k], doubt[fold != k], each[fold != k], seed), x[fold == k]
        )
    middle, scale = _middle(z, y, cut, each, seed).times(share), learn_head(x, doubt, each, seed)
    return Left(middle, scale, _quantiles((y - held) / size, cut, each, _band(so_far)))


def drawn(tokens: Ints, window_tokens: int, most: int, seed: int) -> tuple[Ints, Ints]:
    """Samples, and tokens so far, of windows that they outlived: a draw from all there are."""
    each = np.minimum((tokens - 1) // window_tokens, _MOST_A_SAMPLE)
    row = np.repeat(np.arange(len(tokens)), each)
    first = np.repeat(np.cumsum(each) - each, each)
    so_far = (np.arange(len(row)) - first + 1) * window_tokens
    chosen = np.sort(np.random.default_rng(seed).permutation(len(row))[:most])
    return row[chosen], so_far[chosen]


def _middle(x: npt.NDArray[Any], y: Floats, cut: npt.NDArray[np.bool_], weight: Floats, seed: int) -> Head:
    """Networks of what is left; where the output was cut, of what they say without it, if that is more."""
    if cut.any() and (~cut).sum() >= _LEAST_ROWS:
        first = learn_head(x[~cut], y[~cut], weight[~cut], seed, decay=_DECAY)(x[cut])
        y = y.copy()
        y[cut] = np.maximum(y[cut], first) + 0.3
    return learn_head(x, y, weight, seed, decay=_DECAY)


def _columns(
    so_far: Ints, texts: Sequence[str], prior: LengthDistribution, asked: Sequence[int]
) -> tuple[Floats, Floats]:
    """[n, OWN_COLUMNS] what is known without reading for sense; [n] log tokens left by survival alone."""
    survival = np.log(prior.remaining(so_far))
    log_so_far, middle = np.log(np.maximum(so_far, 1)), np.log(prior.median)
    reached = prior.cdf(so_far)
    more = np.column_stack([survival, middle, log_so_far - middle, log_so_far - survival, reached])
    return np.hstack([progress_features(so_far, texts, asked), more]), survival


def _turn(middle: Head, x: npt.NDArray[Any]) -> Floats:
    return np.asarray(np.clip(middle(x), _LEAST_TURN, _MOST_TURN))


def _size(scale: Head, x: Floats) -> Floats:
    return np.asarray(np.clip(np.exp(np.clip(scale(x), -6, 2)), _LEAST_SCALE, _MOST_SCALE))


def _band(so_far: Ints) -> Ints:
    return np.asarray(np.searchsorted(_BANDS, so_far, side="right"))


def _quantiles(residual: Floats, cut: npt.NDArray[np.bool_], weight: Floats, band: Ints) -> Floats:
    """[bands, levels]; a band of few rows has those of all."""
    everyone = residual_quantiles(residual, cut, weight, LEVELS)
    rows = [np.flatnonzero(band == b) for b in range(len(_BANDS) + 1)]
    return np.stack(
        [
            everyone if len(r) < _LEAST_ROWS else residual_quantiles(residual[r], cut[r], weight[r], LEVELS)
            for r in rows
        ]
    )
