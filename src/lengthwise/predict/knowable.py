"""How much of the variance of lengths a prompt can tell at all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Knowable:
    """The between-prompt share of the variance of lengths: no predictor from prompts has a higher R2.

    Attributes:
        share: Of lengths, over all runs.
        log_share: Of their logarithms.
        runs: Share and log share of each run.
    """

    share: Estimate
    log_share: Estimate
    runs: dict[str, tuple[float, float]]


def knowable(
    run: npt.ArrayLike, prompt: npt.ArrayLike, tokens: npt.ArrayLike, *, draws: int = 200, seed: int = 0
) -> Knowable:
    """The share from several samples a prompt: a one-way analysis of variance with random effects.

    Of a run (a model with its settings) the variance between prompts is (MSB - MSW) / n0 and within prompts
    MSW (Searle, Casella and McCulloch 1992, 3.6); the share of all runs is that of the sums of their
    variances. Intervals are of a bootstrap over prompts, the same in every run.

    Args:
        run: [n] who answered.
        prompt: [n] what.
        tokens: [n] lengths, at least 1.
        draws: Of the bootstrap.
        seed: Of its draws.

    Raises:
        InputError: No run has several samples of two prompts or more.
    """
    names, runs = np.unique(np.asarray(run), return_inverse=True)
    texts, prompts = np.unique(np.asarray(prompt), return_inverse=True)
    length = np.asarray(tokens, float)
    shape = (len(names), len(texts))
    cell = runs * shape[1] + prompts
    count = np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape).astype(float)
    sums = [_moments(values, cell, shape) for values in (length, np.log(length))]
    one = np.ones(len(texts))
    parts = [_parts(count, *moments, one) for moments in sums]
    good = [np.isfinite(b) & np.isfinite(w) for b, w in parts]
    if not good[0].any():
        raise InputError("a run with several samples of at least two prompts is needed; there is none")
    rng = np.random.default_rng(seed)
    again = [np.bincount(rng.integers(0, len(one), len(one)), minlength=len(one)) for _ in range(draws)]
    shares = [
        Estimate(
            _pooled(*parts[i]), 1.96 * float(np.std([_pooled(*_parts(count, *sums[i], w)) for w in again]))
        )
        for i in (0, 1)
    ]
    of_run = {
        str(name): (_share(parts[0], i), _share(parts[1], i)) for i, name in enumerate(names) if good[0][i]
    }
    return Knowable(shares[0], shares[1], of_run)


def _moments(values: Floats, cell: Ints, shape: tuple[int, int]) -> tuple[Floats, Floats]:
    """[runs, prompts] sums of values and of their squares."""
    size = shape[0] * shape[1]
    first = np.asarray(np.bincount(cell, values, size), float).reshape(shape)
    return first, np.asarray(np.bincount(cell, values**2, size), float).reshape(shape)


def _parts(
    count: Floats, total: Floats, squares: Floats, weight: npt.NDArray[np.generic]
) -> tuple[Floats, Floats]:
    """[runs] variance between and within prompts, each prompt counted so many times; NaN where unknown."""
    w = np.asarray(weight, float)[None, :] * (count > 0)
    safe = np.maximum(count, 1)
    prompts, n = w.sum(axis=1), (w * count).sum(axis=1)
    within = (w * (squares - total**2 / safe)).sum(axis=1)
    mean = (w * total).sum(axis=1) / np.maximum(n, 1)
    between = (w * count * (total / safe - mean[:, None]) ** 2).sum(axis=1)
    free = n - prompts
    with np.errstate(invalid="ignore", divide="ignore"):
        msw = np.where(free > 0, within / free, np.nan)
        msb = between / (prompts - 1)
        n0 = (n - (w * count**2).sum(axis=1) / n) / (prompts - 1)
        return np.maximum((msb - msw) / n0, 0.0), msw


def _pooled(between: Floats, within: Floats) -> float:
    good = np.isfinite(between) & np.isfinite(within)
    total = float(between[good].sum() + within[good].sum())
    return float(between[good].sum()) / total if total > 0 else float("nan")


def _share(parts: tuple[Floats, Floats], i: int) -> float:
    return _pooled(parts[0][i : i + 1], parts[1][i : i + 1])
