"""How good a predictor is on samples it has not seen, with intervals over prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints, Predictor, Prompts, Samples, by_prompt, partial
from lengthwise.predict.distribution import Floats, LengthDistribution
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.statistics import kaplan_meier

_LEAST_UNCUT = 0.1


@dataclass(frozen=True)
class Known:
    """Lengths up to a horizon, and how many of those that were cut before it each stands for.

    Attributes:
        tokens: [n] lengths, what is beyond the horizon counted as the horizon.
        weight: [n] one over the chance of not having been cut before (Kaplan and Meier on the cuts).
        horizon: Tokens beyond which too few outputs were seen; infinite where none was cut.
    """

    tokens: Floats
    weight: Floats
    horizon: float

    def take(self, rows: Ints) -> Known:
        """Those of some of the requests."""
        return replace(self, tokens=self.tokens[rows], weight=self.weight[rows])

    def mean(self, predicted: LengthDistribution) -> Floats:
        """[n] the predicted mean of lengths up to the horizon."""
        if np.isinf(self.horizon):
            return predicted.mean
        a, b = predicted.tokens[:, :-1], predicted.tokens[:, 1:]
        low, high = np.minimum(a, self.horizon), np.minimum(b, self.horizon)
        within = np.divide(high - low, b - a, out=(b <= self.horizon).astype(float), where=b > a)
        means = within * (low + high) / 2 + (1 - within) * self.horizon
        return np.asarray((means * np.diff(predicted.levels)).sum(axis=1))

    def below(self, predicted: LengthDistribution, quantile: Floats, level: float) -> Floats:
        """[n] whether a length is at most a quantile; beyond the horizon, how likely it is said to be."""
        seen = (self.tokens <= quantile).astype(float)
        if np.isinf(self.horizon):
            return seen
        before = predicted.cdf(self.horizon - 0.5)  # a length is a whole number: this one is not before it
        share = np.divide(level - before, 1 - before, out=np.ones(len(seen)), where=before < 1)
        taken = np.where(quantile >= self.horizon, np.clip(share, 0, 1), 0.0)
        return np.where(self.tokens >= self.horizon, taken, seen)

    def quantiles(self, levels: npt.NDArray[np.float64]) -> Floats:
        """[q] quantiles of the lengths."""
        if np.ptp(self.weight) == 0:
            return np.asarray(np.quantile(self.tokens, levels))
        order = np.argsort(self.tokens, kind="stable")
        reached = np.cumsum(self.weight[order]) / self.weight.sum()
        return self.tokens[order][np.minimum(np.searchsorted(reached, levels), len(order) - 1)]


def known_of(tokens: Ints, censored: npt.NDArray[np.bool_]) -> tuple[Ints, Known]:
    """Rows that can be scored, and what is known of them.

    The horizon is the greatest length before which at least a tenth would not have been cut. Who was cut
    before it cannot be scored; those like it that were not stand for it.
    """
    y = np.asarray(tokens, float)
    if not censored.any():
        return np.arange(len(y)), Known(y, np.ones(len(y)), float("inf"))
    # A cut at a length comes after the ends at that length, so these are out of its risk.
    at, lost = kaplan_meier(y + np.where(censored, 0.5, 0.0), ~censored)
    uncut = np.concatenate([[1.0], 1 - lost])
    left = uncut[np.searchsorted(at, y, side="left")]
    horizon = float(y[left >= _LEAST_UNCUT].max())
    if horizon == y.max() and not censored[y == horizon].any():
        horizon = float("inf")
    rows = np.flatnonzero(~censored | (y >= horizon))
    kept = np.minimum(y[rows], horizon)
    return rows, Known(kept, 1 / uncut[np.searchsorted(at, kept, side="left")], horizon)


BINS = (2, 4, 8)
_PINBALL = np.round(np.arange(0.05, 0.96, 0.05), 2)
_MOST_RANKED = 4000
"""Kendall's tau of a resample takes at most so many requests, drawn from it."""


def groups(prompts: Prompts, n: int) -> Ints:
    """[n] the number of each request's prompt; where nobody kept texts, each is its own."""
    if prompts.text is None:
        return np.arange(n)
    return by_prompt(prompts.text)[1]


def resampled(group: Ints, draws: int, seed: int) -> list[Ints]:
    """Rows of so many bootstrap samples over groups, a group always whole."""
    distinct, group = np.unique(group, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(len(distinct) + 1))
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(distinct), (draws, len(distinct)))
    return [np.concatenate([order[starts[g] : starts[g + 1]] for g in one]) for one in drawn]


def of_all(
    predicted: LengthDistribution, known: Known, model: npt.NDArray[Any], repeats: Sequence[Ints]
) -> dict[str, Estimate]:
    """Every score with its interval."""
    columns = _Columns(predicted, known, model)
    names = [*_SCORES, "tau_within", *(f"{what}_{k}" for k in BINS for what in ("accuracy", "within_one"))]
    return {name: _estimate(columns, name, repeats) for name in names}


def of_some(
    predicted: LengthDistribution, known: Known, repeats: Sequence[Ints], names: Sequence[str]
) -> dict[str, Estimate]:
    """Some scores with their intervals."""
    columns = _Columns(predicted, known, np.zeros(len(predicted), object))
    return {name: _estimate(columns, name, repeats) for name in names}


def points(predicted: LengthDistribution, known: Known, model: npt.NDArray[Any]) -> dict[str, float]:
    """Scores without intervals, for many small groups."""
    columns = _Columns(predicted, known, model)
    everyone = np.arange(len(predicted))
    return {name: columns.score(name, everyone) for name in _SCORES}


class _Columns:
    """What scores are made of, a value a request, all up to the horizon."""

    def __init__(self, predicted: LengthDistribution, known: Known, model: npt.NDArray[Any]) -> None:
        self.actual, self.weight, end = known.tokens, known.weight, known.horizon
        self.median = np.minimum(whole(predicted.median), end)
        self.mean = np.minimum(whole(known.mean(predicted)), end)
        low, high = whole(predicted.quantile(0.05)), whole(predicted.quantile(0.95))
        self.covered = known.below(predicted, np.rint(high), 0.95) - known.below(predicted, np.rint(low) - 1, 0.05)
        self.width = high - low
        errors = [(self.actual - np.minimum(whole(predicted.quantile(p)), end), p) for p in _PINBALL]
        self.pinball = np.mean([np.maximum(p * e, (p - 1) * e) for e, p in errors], axis=0)
        self.model = np.unique(model.astype(str), return_inverse=True)[1].reshape(-1)
        self.bins: dict[int, Floats] = {}
        for k in BINS:
            edges = known.quantiles(np.arange(1, k) / k)
            off = np.searchsorted(edges, np.rint(self.median), side="right") - np.searchsorted(
                edges, self.actual, side="right"
            )
            self.bins[k] = np.abs(off).astype(float)

    def score(self, name: str, rows: Ints) -> float:
        if name in _SCORES:
            return _SCORES[name](self, rows)
        if name == "tau_within":
            found = [kendall(self.median[r], self.actual[r]) for r in _by(self.model[rows], rows)]
            return float(np.nanmean(found)) if np.isfinite(found).any() else float("nan")
        what, _, k = name.rpartition("_")
        return self.over(self.bins[int(k)] <= (0 if what == "accuracy" else 1), rows)

    def over(self, values: npt.NDArray[Any], rows: Ints) -> float:
        """The weighted mean over some rows."""
        return float(np.average(values[rows], weights=self.weight[rows]))

    def report(self, predicted: Floats, actual: Floats, rows: Ints) -> float:
        return r2(predicted[rows], actual[rows], self.weight[rows])


def kendall(predicted: Floats, actual: Floats) -> float:
    """Kendall's tau-b: the share of pairs in the right order less that in the wrong one; NaN where all are equal."""
    from scipy.stats import kendalltau

    if len(actual) < 2 or np.ptp(predicted) == 0 or np.ptp(actual) == 0:
        return float("nan")
    return float(kendalltau(predicted, actual).statistic)


def r2(predicted: Floats, actual: Floats, weight: Floats | None = None) -> float:
    """The share of the variance that is told; NaN where there is none."""
    w = np.ones(len(actual)) if weight is None else weight
    total = float((w * (actual - np.average(actual, weights=w)) ** 2).sum())
    return 1 - float((w * (actual - predicted) ** 2).sum()) / total if total > 0 else float("nan")


def whole(tokens: Floats) -> Floats:
    """Lengths without the error of rounding: what is a whole number but for a millionth is it."""
    near = np.rint(tokens)
    return np.where(np.abs(tokens - near) < 1e-6, near, tokens)


def _by(group: Ints, rows: Ints) -> list[Ints]:
    order = np.argsort(group, kind="stable")
    return [rows[part] for part in np.split(order, np.flatnonzero(np.diff(group[order])) + 1)]


def _estimate(columns: _Columns, name: str, repeats: Sequence[Ints]) -> Estimate:
    value = columns.score(name, np.arange(len(columns.actual)))
    ranked = name.startswith("tau")
    if not repeats or not np.isfinite(value):
        return Estimate(value)
    seen = [columns.score(name, rows[:: -(-len(rows) // _MOST_RANKED)] if ranked else rows) for rows in repeats]
    return Estimate(value, 1.96 * float(np.nanstd(seen)))


_SCORES: dict[str, Callable[[_Columns, Ints], float]] = {
    "mae": lambda c, r: c.over(np.abs(c.actual - c.median), r),
    "rmse": lambda c, r: float(np.sqrt(c.over((c.actual - c.mean) ** 2, r))),
    "r2": lambda c, r: c.report(c.mean, c.actual, r),
    "log_r2": lambda c, r: c.report(np.log(c.median), np.log(c.actual), r),
    "bias": lambda c, r: c.over(c.mean - c.actual, r),
    "tau": lambda c, r: kendall(c.median[r], c.actual[r]),
    "coverage90": lambda c, r: c.over(c.covered, r),
    "width90": lambda c, r: c.over(c.width, r),
    "pinball": lambda c, r: c.over(c.pinball, r),
}


WINDOWS = tuple(range(0, 601, 50))
CALIBRATED = np.round(np.arange(0.05, 0.96, 0.05), 2)
_LEAST_RUNNING = 20
_SHOWN = 1500


@dataclass(frozen=True)
class Window:
    """What is known of requests that have produced so many tokens.

    Attributes:
        tokens: So far.
        running: Requests that are not done yet, which the next are about.
        mae: Mean absolute error of the median, tokens.
        r2: Of the mean, against their own mean length.
        tau: Kendall's tau of the median.
        coverage90: Share within the 90 % interval.
        r2_all: R2 over all requests, those that are done counted as known: what a scheduler knows by then.
    """

    tokens: int
    running: int
    mae: Estimate
    r2: Estimate
    tau: Estimate
    coverage90: Estimate
    r2_all: float


@dataclass(frozen=True)
class Evaluation:
    """Scores of a predictor on samples.

    Attributes:
        name: What was evaluated on what.
        requests: Scored; those whose output was cut before the horizon are not among them.
        prompts: Different prompts.
        censored: Samples whose output was cut, scored or not.
        scores: By name: mae, rmse, r2, log_r2, tau, tau_within (mean over models of the tau of each), bias,
            coverage90, width90 (tokens), pinball, and for k = 2, 4, 8 bins of equal mass accuracy_k and
            within_one_k. Points are medians, but those of rmse, r2 and bias means.
        by_model: The same and "requests" for each model.
        windows: What is known after so many tokens.
        calibration: Levels, and the share of lengths below the quantile of each.
        latency_ms: A prompt, by batch size; empty where it was not measured.
        seen: Test prompts that the predictor had learnt from; None where it does not say.
        shown: Columns predicted, low, high, actual, model of some requests, for a figure.
        horizon_tokens: Lengths are scored up to so many; infinite where no output was cut.
        cut_share: Of the samples, cut.
    """

    name: str
    requests: int
    prompts: int
    censored: int
    scores: dict[str, Estimate]
    by_model: dict[str, dict[str, float]]
    windows: tuple[Window, ...]
    calibration: tuple[Floats, Floats]
    latency_ms: dict[int, float] = field(default_factory=dict)
    seen: int | None = None
    shown: dict[str, Any] = field(default_factory=dict)
    horizon_tokens: float = float("inf")
    cut_share: float = 0.0


def evaluate(
    predictor: Predictor,
    samples: Samples,
    *,
    name: str = "",
    windows: Sequence[int] = WINDOWS,
    draws: int = 100,
    seed: int = 0,
    clock: Callable[[], float] | None = time.perf_counter,
) -> Evaluation:
    """The scores of a predictor, with 95 % intervals of a bootstrap over prompts.

    Where outputs were cut, long ones are missing among those that ended, and scores of these alone
    would call a right predictor wrong. So lengths, and what is predicted of them, count up to a horizon:
    the greatest length before which at least a tenth of the requests would not have been cut. A request that
    ended, or reached the horizon, is weighed by one over the chance of not having been cut before
    (Kaplan and Meier on the cuts, taken to be independent of the lengths). MAE, RMSE, R2, bias, pinball loss, bins,
    and coverage are of these with these weights, Kendall's tau of these without. What nobody saw, on which side
    of a quantile beyond the horizon a length lies, is taken at the predictor's word. Without cuts all
    this changes nothing.

    Args:
        predictor: Trained.
        samples: Requests it has not seen.
        name: What to call it.
        windows: Tokens so far at which it is asked again, with the text of so many.
        draws: Of the bootstrap; 0: no intervals.
        seed: Of its draws.
        clock: Seconds; None: latency is not measured.

    Raises:
        InputError: Every output was cut.
    """
    if samples.censored.all():
        raise InputError("every output was cut at a limit, so no true length is known; some must have ended")
    rows, known = known_of(samples.output_tokens, samples.censored)
    kept = samples.take(rows)
    said = predictor.predict(kept.prompts)
    group = groups(kept.prompts, len(kept))
    again = resampled(group, draws, seed)
    model = np.array([str(m) for m in kept.prompts.model or [""] * len(kept)], object)
    return Evaluation(
        name,
        len(kept),
        int(group.max()) + 1,
        int(samples.censored.sum()),
        of_all(said, known, model, again),
        {str(m): _of_model(said, known, np.flatnonzero(model == m)) for m in sorted(set(model))},
        tuple(_windows(predictor, kept, known, windows, group, draws, seed)),
        (CALIBRATED, np.array([_share_below(said, known, p) for p in CALIBRATED])),
        {n: latency_ms(predictor, kept.prompts, n, clock) for n in (1, 32)} if clock else {},
        _seen(predictor, kept.prompts),
        _some(said, kept, model, seed),
        known.horizon,
        float(samples.censored.mean()),
    )


def latency_ms(
    predictor: Predictor, prompts: Prompts, batch: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Milliseconds a prompt, the median over batches of so many prompts, each another where there are enough."""
    starts = np.random.default_rng(0).integers(0, max(1, len(prompts) - batch + 1), 40)
    rows = [(start + np.arange(batch)) % len(prompts) for start in starts]
    taken = []
    for part in [prompts.take(r) for r in rows]:
        before = clock()
        predictor.predict(part)
        taken.append((clock() - before) / batch * 1e3)
    return float(np.median(taken))


def _of_model(predicted: LengthDistribution, known: Known, rows: Ints) -> dict[str, float]:
    found = points(predicted.take(rows), known.take(rows), np.zeros(len(rows), object))
    return {"requests": float(len(rows)), **found}


def _share_below(predicted: LengthDistribution, known: Known, level: float) -> float:
    below = known.below(predicted, whole(predicted.quantile(level)), level)
    return float(np.average(below, weights=known.weight))


def _windows(
    predictor: Predictor, retained: Samples, known: Known, windows: Sequence[int], group: Ints, draws: int, seed: int
) -> list[Window]:
    y, w = known.tokens, known.weight
    whole = float((w * (y - np.average(y, weights=w)) ** 2).sum())
    made = []
    for so_far in windows:
        rows = np.flatnonzero(y > so_far)
        if len(rows) < _LEAST_RUNNING:
            break
        part, still = retained.take(rows), known.take(rows)
        tokens = np.full(len(rows), so_far, np.int64)
        prompts = part.prompts
        if so_far and part.output is not None and any(part.output):
            prompts = partial(prompts, part.output, part.output_tokens, tokens)
        said = predictor.predict(prompts, tokens)
        again = resampled(group[rows], draws, seed)
        found = of_some(said, still, again, ("mae", "r2", "tau", "coverage90"))
        error = float((still.weight * (still.mean(said) - still.tokens) ** 2).sum())
        r2_all = 1 - error / whole if whole > 0 else float("nan")
        made.append(Window(so_far, len(rows), found["mae"], found["r2"], found["tau"], found["coverage90"], r2_all))
    return made


def _seen(predictor: Any, prompts: Prompts) -> int | None:
    """Different test prompts that the predictor says it has learnt from."""
    known = getattr(predictor, "knows", None)
    if known is None or prompts.text is None:
        return None
    distinct = sorted({text.strip() for text in prompts.text})
    return int(np.sum(known(distinct)))


def _some(predicted: LengthDistribution, retained: Samples, model: npt.NDArray[Any], seed: int) -> dict[str, Any]:
    rows = np.sort(np.random.default_rng(seed).permutation(len(retained))[:_SHOWN])
    part = predicted.take(rows)
    return {
        "predicted": part.median,
        "low": part.quantile(0.05),
        "high": part.quantile(0.95),
        "actual": retained.output_tokens[rows],
        "model": [str(m) for m in model[rows]],
    }


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


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
        Estimate(_pooled(*parts[i]), 1.96 * float(np.std([_pooled(*_parts(count, *sums[i], w)) for w in again])))
        for i in (0, 1)
    ]
    of_run = {str(name): (_share(parts[0], i), _share(parts[1], i)) for i, name in enumerate(names) if good[0][i]}
    return Knowable(shares[0], shares[1], of_run)


def _moments(values: FloatArray, cell: IntArray, shape: tuple[int, int]) -> tuple[FloatArray, FloatArray]:
    """[runs, prompts] sums of values and of their squares."""
    size = shape[0] * shape[1]
    first = np.asarray(np.bincount(cell, values, size), float).reshape(shape)
    return first, np.asarray(np.bincount(cell, values**2, size), float).reshape(shape)


def _parts(
    count: FloatArray, total: FloatArray, squares: FloatArray, weight: npt.NDArray[np.generic]
) -> tuple[FloatArray, FloatArray]:
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


def _pooled(between: FloatArray, within: FloatArray) -> float:
    good = np.isfinite(between) & np.isfinite(within)
    total = float(between[good].sum() + within[good].sum())
    return float(between[good].sum()) / total if total > 0 else float("nan")


def _share(parts: tuple[FloatArray, FloatArray], i: int) -> float:
    return _pooled(parts[0][i : i + 1], parts[1][i : i + 1])
