"""Scores of predictors on unseen samples, with confidence intervals from a bootstrap over prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints, Predictor, Prompts, Samples, groups_of, with_output
from lengthwise.predict.distribution import Floats, LengthDistribution
from lengthwise.predict.features import is_mathematics
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.statistics import kaplan_meier, share_half_width

BINS = (2, 4, 8)  # numbers of bins of equal mass
WINDOWS = tuple(range(0, 601, 50))  # tokens so far
LEVELS_EVALUATED = np.round(np.arange(0.05, 0.96, 0.05), 2)  # of the pinball loss and of the calibration
MIN_PROMPTS = 20  # from fewer prompts a bootstrap cannot tell how exact a score is
_MIN_UNCENSORED = 0.1
_MIN_RUNNING = 20
_ROUNDING = 1e-9  # a smaller relative half-width comes from equal values, which say nothing of their spread
_MAX_SHOWN = 1500
_MAX_RANKED = 4000  # Kendall's tau of a bootstrap sample uses at most this many of its requests


@dataclass(frozen=True)
class ScoredLengths:
    """True lengths up to a horizon, with weights that represent the requests censored before it.

    ``tokens`` [n] are the lengths, capped at the horizon. ``weight`` [n] is the inverse probability that an output of
    this length is not censored earlier (Kaplan-Meier estimate of the censoring). ``horizon`` is the number of tokens
    beyond which too few outputs were observed; it is infinite if no scored length is capped or censored.
    """

    tokens: Floats
    weight: Floats
    horizon: float

    def take(self, rows: Ints) -> ScoredLengths:
        """Return the lengths of the requests ``rows``."""
        return replace(self, tokens=self.tokens[rows], weight=self.weight[rows])

    def mean(self, predicted: LengthDistribution) -> Floats:
        """Return the predicted means [n] of the lengths capped at the horizon."""
        if np.isinf(self.horizon):
            return predicted.mean
        a, b = predicted.tokens[:, :-1], predicted.tokens[:, 1:]
        low, high = np.minimum(a, self.horizon), np.minimum(b, self.horizon)
        share = np.divide(high - low, b - a, out=(b <= self.horizon).astype(float), where=b > a)
        means = share * (low + high) / 2 + (1 - share) * self.horizon
        return np.asarray((means * np.diff(predicted.levels)).sum(axis=1))

    def below(self, predicted: LengthDistribution, quantile: Floats, level: float) -> Floats:
        """Return 1 where the true length is at most ``quantile`` [n], and 0 elsewhere, [n].

        ``quantile`` is the predicted quantile at ``level``. If both are beyond the horizon, the answer is unknown; the
        predicted probability replaces it.
        """
        observed = (self.tokens <= quantile).astype(float)
        if np.isinf(self.horizon):
            return observed
        before = predicted.cdf(self.horizon - 0.5)  # lengths are integers: the horizon itself is not before it
        share = np.divide(level - before, 1 - before, out=np.ones(len(observed)), where=before < 1)
        probability = np.where(quantile >= self.horizon, np.clip(share, 0, 1), 0.0)
        return np.where(self.tokens >= self.horizon, probability, observed)

    def quantiles(self, levels: Floats) -> Floats:
        """Return the weighted quantiles [q] of the lengths."""
        if np.ptp(self.weight) == 0:
            return np.asarray(np.quantile(self.tokens, levels))
        order = np.argsort(self.tokens, kind="stable")
        cumulative = np.cumsum(self.weight[order]) / self.weight.sum()
        return self.tokens[order][np.minimum(np.searchsorted(cumulative, levels), len(order) - 1)]


def scored_lengths(tokens: Ints, censored: npt.NDArray[np.bool_]) -> tuple[Ints, ScoredLengths]:
    """Return the rows that can be scored, and their lengths.

    The horizon is the largest observed length that an output reaches uncensored with a probability of at least 0.1. A
    request censored before it cannot be scored; the weights of longer uncensored requests represent it.
    """
    y = np.asarray(tokens, float)
    if not censored.any():
        return np.arange(len(y)), ScoredLengths(y, np.ones(len(y)), float("inf"))
    # Censoring at a length comes after the completions at that length, which are not at risk any more.
    at, lost = kaplan_meier(y + np.where(censored, 0.5, 0.0), ~censored)
    uncensored = np.concatenate([[1.0], 1 - lost])
    share = uncensored[np.searchsorted(at, y, side="left")]
    horizon = float(y[share >= _MIN_UNCENSORED].max())
    if horizon == y.max() and not censored[y == horizon].any():
        horizon = float("inf")
    rows = np.flatnonzero(~censored | (y >= horizon))
    capped = np.minimum(y[rows], horizon)
    return rows, ScoredLengths(capped, 1 / uncensored[np.searchsorted(at, capped, side="left")], horizon)


def resampled(group: Ints, draws: int, seed: int) -> list[Ints]:
    """Return the rows of ``draws`` bootstrap samples. A sample draws complete groups, with replacement."""
    distinct, group = np.unique(group, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(len(distinct) + 1))
    drawn = np.random.default_rng(seed).integers(0, len(distinct), (draws, len(distinct)))
    return [np.concatenate([order[starts[g] : starts[g + 1]] for g in one]) for one in drawn]


class _Scores:
    def __init__(self, predicted: LengthDistribution, known: ScoredLengths, model: npt.NDArray[Any]) -> None:
        self.actual, self.weight, horizon = known.tokens, known.weight, known.horizon
        self.median = np.minimum(_snapped(predicted.median), horizon)
        self.mean = np.minimum(_snapped(known.mean(predicted)), horizon)
        low, high = _snapped(predicted.quantile(0.05)), _snapped(predicted.quantile(0.95))
        self.covered = known.below(predicted, np.rint(high), 0.95) - known.below(predicted, np.rint(low) - 1, 0.05)
        self.width = high - low
        self.pinball = pinball_losses(predicted, known)
        self.model = np.unique(model.astype(str), return_inverse=True)[1].reshape(-1)
        self.bin_errors: dict[int, Floats] = {}
        for k in BINS:
            edges = known.quantiles(np.arange(1, k) / k)
            bins = (np.searchsorted(edges, values, side="right") for values in (np.rint(self.median), self.actual))
            self.bin_errors[k] = np.abs(np.subtract(*bins)).astype(float)

    def score(self, name: str, rows: Ints) -> float:
        if name in _SCORES:
            return _SCORES[name](self, rows)
        if name == "tau_within":
            order = np.argsort(self.model[rows], kind="stable")
            ends = np.flatnonzero(np.diff(self.model[rows][order])) + 1
            found = [kendall(self.median[r], self.actual[r]) for r in (rows[p] for p in np.split(order, ends))]
            return float(np.nanmean(found)) if np.isfinite(found).any() else float("nan")
        kind, _, k = name.rpartition("_")
        return self.average(self.bin_errors[int(k)] <= (0 if kind == "accuracy" else 1), rows)

    def average(self, values: npt.NDArray[Any], rows: Ints) -> float:
        return float(np.average(values[rows], weights=self.weight[rows]))

    def estimate(self, name: str, samples: Sequence[Ints], prompts: int) -> Estimate:
        value = self.score(name, np.arange(len(self.actual)))
        if not samples or prompts < MIN_PROMPTS or not np.isfinite(value):
            return Estimate(value)
        thinned = (rows[:: -(-len(rows) // _MAX_RANKED)] for rows in samples) if name.startswith("tau") else samples
        half = 1.96 * float(np.nanstd([self.score(name, rows) for rows in thinned]))
        if name.startswith(("accuracy", "within_one", "coverage")):
            half = max(half, share_half_width(min(max(value, 0.0), 1.0), prompts))
        return Estimate(value, half if half > _ROUNDING * abs(value) else float("nan"))


def pinball_losses(predicted: LengthDistribution, known: ScoredLengths) -> Floats:
    """Return each request's mean pinball loss over LEVELS_EVALUATED, [n]; lengths are capped at the horizon."""
    quantiles = [(np.minimum(_snapped(predicted.quantile(p)), known.horizon), p) for p in LEVELS_EVALUATED]
    errors = [(known.tokens - quantile, p) for quantile, p in quantiles]
    return np.asarray(np.mean([np.maximum(p * e, (p - 1) * e) for e, p in errors], axis=0))


def kendall(predicted: Floats, actual: Floats) -> float:
    """Return Kendall's tau-b; NaN if all predicted or all actual values are equal."""
    from scipy.stats import kendalltau

    if len(actual) < 2 or np.ptp(predicted) == 0 or np.ptp(actual) == 0:
        return float("nan")
    return float(kendalltau(predicted, actual).statistic)


def r2(predicted: Floats, actual: Floats, weight: Floats) -> float:
    """Return the coefficient of determination with weights; NaN if the actual values are all equal."""
    total = float((weight * (actual - np.average(actual, weights=weight)) ** 2).sum())
    return 1 - float((weight * (actual - predicted) ** 2).sum()) / total if total > 0 else float("nan")


def _snapped(tokens: Floats) -> Floats:
    """Return the lengths without rounding errors: a value within a millionth of an integer becomes the integer."""
    near = np.rint(tokens)
    return np.where(np.abs(tokens - near) < 1e-6, near, tokens)


_SCORES: dict[str, Callable[[_Scores, Ints], float]] = {
    "mae": lambda c, r: c.average(np.abs(c.actual - c.median), r),
    "rmse": lambda c, r: float(np.sqrt(c.average((c.actual - c.mean) ** 2, r))),
    "r2": lambda c, r: r2(c.mean[r], c.actual[r], c.weight[r]),
    "log_r2": lambda c, r: r2(np.log(c.median[r]), np.log(c.actual[r]), c.weight[r]),
    "bias": lambda c, r: c.average(c.mean - c.actual, r),
    "tau": lambda c, r: kendall(c.median[r], c.actual[r]),
    "coverage90": lambda c, r: c.average(c.covered, r),
    "width90": lambda c, r: c.average(c.width, r),
    "pinball": lambda c, r: c.average(c.pinball, r),
}


@dataclass(frozen=True)
class Window:
    """Scores for the ``running`` requests that have generated more than ``tokens`` tokens.

    ``mae`` (in tokens) and ``tau`` (Kendall's) score the predicted median, ``r2`` the predicted mean. ``coverage90`` is
    the share of lengths within the 90 % interval. ``r2_all`` is R2 over all requests; the lengths of finished ones are
    known, as to a scheduler. ``mae_conditioned`` is the MAE of the first prediction, conditioned on the tokens so far.
    """

    tokens: int
    running: int
    mae: Estimate
    r2: Estimate
    tau: Estimate
    coverage90: Estimate
    r2_all: float
    mae_conditioned: float


@dataclass(frozen=True)
class Censoring:
    """Number and share of the samples with a censored output, and the horizon of the scores (infinite: no horizon)."""

    samples: int = 0
    share: float = 0.0
    horizon_tokens: float = float("inf")


@dataclass(frozen=True)
class Evaluation:
    """Scores of a predictor on samples."""

    name: str  # name of the predictor and the samples
    # number of scored requests, which have ``prompts`` distinct prompts; requests censored before the horizon are not
    # scored
    requests: int
    prompts: int
    # scores by name: mae, rmse, r2, log_r2, tau, tau_within (mean of the models' taus), bias, coverage90, width90
    # (tokens), pinball, and, for k = 2, 4, 8 bins of equal mass, accuracy_k and within_one_k. rmse, r2 and bias use the
    # predicted mean, coverage90, width90 and pinball the quantiles, the others the median
    scores: dict[str, Estimate]
    # for each model its number of "requests" and these scores, without tau_within and those of bins
    by_model: dict[str, dict[str, float]]
    windows: tuple[Window, ...]  # scores by tokens so far
    # levels, and for each level the share of lengths that are at most the predicted quantile
    calibration: tuple[Floats, Floats]
    # milliseconds per prompt in batches of 1 and 32; empty if it was not measured
    latency_ms: dict[int, float] = field(default_factory=dict)
    # number of test prompts that were in the training data; None if the predictor does not know
    seen: int | None = None
    # losses on held-out prompts in training, by tokens so far (``lexical_model.BandLosses``)
    held_out: tuple[Any, ...] = ()
    # first and last tokens so far at which the predictor reads the output; None: never
    reads_output: tuple[int, int] | None = None
    # number of requests that ask for mathematics, and Kendall's tau among them
    mathematics: tuple[int, float] = (0, float("nan"))
    # columns predicted (median), low (5 %), high (95 %), actual and model of at most 1500 requests
    shown: dict[str, Any] = field(default_factory=dict)
    censoring: Censoring = Censoring()


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
    """Return the scores of a predictor on unseen samples, with 95 % intervals from a bootstrap over prompts.

    Censored outputs are long, so that scores of the other outputs alone would be biased. Therefore true and predicted
    lengths are capped at a horizon (see ``scored_lengths``). A request that finished or reached the horizon has a
    weight: the inverse probability that it is not censored earlier (Kaplan-Meier; the censoring is assumed to be
    independent of the lengths). All scores except Kendall's tau use these weights. If a length and a quantile are both
    beyond the horizon, their order is unknown; the predicted probability replaces it.

    At each number of tokens so far in ``windows``, the predictor predicts again from the text so far; its first
    prediction, conditioned on these tokens, is scored as well. The windows end where fewer than 20 requests still run.
    With 0 ``draws`` or below ``MIN_PROMPTS`` prompts there are no intervals. Without a ``clock``, which returns
    seconds, latency is not measured. Raises InputError if every output was censored.
    """
    if samples.censored.all():
        raise InputError("every output was cut off at a limit, so no true length is known; some must be complete")
    rows, known = scored_lengths(samples.output_tokens, samples.censored)
    scored = samples.take(rows)
    predicted = predictor.predict(scored.prompts)
    group = groups_of(scored)
    prompts = int(group.max()) + 1
    model = np.array([str(m) for m in scored.prompts.model or [""] * len(scored)], object)
    columns, bootstrap = _Scores(predicted, known, model), resampled(group, draws, seed)
    names = [*_SCORES, "tau_within", *(f"{kind}_{k}" for k in BINS for kind in ("accuracy", "within_one"))]
    by_model: dict[str, dict[str, float]] = {}
    for one in sorted(set(model)):
        part = np.flatnonzero(model == one)
        own, all_rows = _Scores(predicted.take(part), known.take(part), model[part]), np.arange(len(part))
        by_model[str(one)] = {"requests": float(len(part))} | {name: own.score(name, all_rows) for name in _SCORES}
    below = [known.below(predicted, _snapped(predicted.quantile(p)), p) for p in LEVELS_EVALUATED]
    seen, texts = getattr(predictor, "knows", None), scored.prompts.text
    sums = np.flatnonzero([is_mathematics(text) for text in texts or ()])
    shown = np.sort(np.random.default_rng(seed).permutation(len(scored))[:_MAX_SHOWN])
    visible = predicted.take(shown)
    columns_shown = {"predicted": visible.median, "low": visible.quantile(0.05), "high": visible.quantile(0.95)}
    return Evaluation(
        name=name,
        requests=len(scored),
        prompts=prompts,
        scores={score: columns.estimate(score, bootstrap, prompts) for score in names},
        by_model=by_model,
        windows=tuple(_windows(predictor, predicted, scored, known, windows, group, draws, seed)),
        calibration=(LEVELS_EVALUATED, np.array([float(np.average(b, weights=known.weight)) for b in below])),
        latency_ms={n: latency_ms(predictor, scored.prompts, n, clock) for n in (1, 32)} if clock else {},
        seen=None if seen is None or texts is None else int(np.sum(seen(sorted({text.strip() for text in texts})))),
        held_out=tuple(getattr(predictor, "held_out_", ())),
        reads_output=getattr(predictor, "reads_output", None),
        mathematics=(len(sums), kendall(columns.median[sums], columns.actual[sums])),
        shown=columns_shown | {"actual": scored.output_tokens[shown], "model": [str(m) for m in model[shown]]},
        censoring=Censoring(int(samples.censored.sum()), float(samples.censored.mean()), known.horizon),
    )


def latency_ms(
    predictor: Predictor, prompts: Prompts, batch: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the milliseconds per prompt in batches of ``batch`` prompts: the median over several batches."""
    starts = np.random.default_rng(0).integers(0, max(1, len(prompts) - batch + 1), 40)
    batches = [prompts.take((start + np.arange(batch)) % len(prompts)) for start in starts]
    times = []
    for part in batches:
        before = clock()
        predictor.predict(part)
        times.append((clock() - before) / batch * 1e3)
    return float(np.median(times))


def _windows(
    predictor: Predictor, first: LengthDistribution, scored: Samples, known: ScoredLengths, windows: Sequence[int],
    group: Ints, draws: int, seed: int,
) -> list[Window]:  # fmt: skip
    y, w = known.tokens, known.weight
    variance = float((w * (y - np.average(y, weights=w)) ** 2).sum())
    made = []
    for so_far in windows:
        rows = np.flatnonzero(y > so_far)
        if len(rows) < _MIN_RUNNING:
            break
        part, running = scored.take(rows), known.take(rows)
        tokens = np.full(len(rows), so_far, np.int64)
        prompts = part.prompts
        if so_far and part.output is not None and any(part.output):
            prompts = with_output(prompts, part.output, part.output_tokens, tokens)
        predicted = predictor.predict(prompts, tokens)
        columns = _Scores(predicted, running, np.zeros(len(rows), object))
        bootstrap = resampled(group[rows], draws, seed)
        distinct = len(np.unique(group[rows]))
        found = {name: columns.estimate(name, bootstrap, distinct) for name in ("mae", "r2", "tau", "coverage90")}
        error = float((running.weight * (running.mean(predicted) - running.tokens) ** 2).sum())
        r2_all = 1 - error / variance if variance > 0 else float("nan")
        conditioned = np.minimum(_snapped(first.take(rows).given(tokens).median), known.horizon)
        off = float(np.average(np.abs(running.tokens - conditioned), weights=running.weight))
        made.append(Window(so_far, len(rows), **found, r2_all=r2_all, mae_conditioned=off))
    return made


@dataclass(frozen=True)
class ExplainableVariance:
    """The share of the variance of lengths that lies between prompts.

    No predictor from prompts alone has a higher R2. ``share`` is the share for lengths, and ``log_share`` the one for
    log lengths, each over all runs. ``runs`` maps the name of a run (a model with its settings) to its own two shares.
    """

    share: Estimate
    log_share: Estimate
    runs: dict[str, tuple[float, float]]


def explainable_variance(
    run: npt.ArrayLike, prompt: npt.ArrayLike, tokens: npt.ArrayLike, *, draws: int = 200, seed: int = 0
) -> ExplainableVariance:
    """Return the share of the variance of lengths that lies between prompts, from several samples per prompt.

    All columns are [n], and ``tokens`` are at least 1. The share follows from a one-way random-effects ANOVA. For each
    run (a model with its settings), the variance between prompts is (MSB - MSW) / n0 and the variance within prompts is
    MSW (Searle, Casella and McCulloch 1992, 3.6). The share of all runs uses the sums of their variances. The intervals
    come from a bootstrap with ``draws`` samples over prompts, the same prompts in every run. Raises InputError unless a
    run has several samples of at least two prompts.
    """
    names, runs = np.unique(np.asarray(run), return_inverse=True)
    texts, prompts = np.unique(np.asarray(prompt), return_inverse=True)
    length = np.asarray(tokens, float)
    shape = (len(names), len(texts))
    cell = runs * shape[1] + prompts

    def sums(values: Floats) -> Floats:
        return np.asarray(np.bincount(cell, values, shape[0] * shape[1]), float).reshape(shape)

    count = sums(np.ones(len(length)))
    moments = [(sums(values), sums(values**2)) for values in (length, np.log(length))]
    parts = [_variances(count, *moment, np.ones(len(texts))) for moment in moments]
    good = np.isfinite(parts[0][0]) & np.isfinite(parts[0][1])
    if not good.any():
        raise InputError("a run with several samples of at least two prompts is needed; there is none")
    rng, n = np.random.default_rng(seed), len(texts)
    weights = [np.bincount(rng.integers(0, n, n), minlength=n).astype(float) for _ in range(draws)]
    shares = []
    for part, moment in zip(parts, moments, strict=True):
        drawn = [_between_share(*_variances(count, *moment, w)) for w in weights]
        shares.append(Estimate(_between_share(*part), 1.96 * float(np.std(drawn))))
    of_run: dict[str, tuple[float, float]] = {}
    for i in np.flatnonzero(good):
        of_run[str(names[i])] = (_between_share(*parts[0][:, i : i + 1]), _between_share(*parts[1][:, i : i + 1]))
    return ExplainableVariance(shares[0], shares[1], of_run)


def _variances(count: Floats, total: Floats, squares: Floats, weight: Floats) -> Floats:
    """Return the variances of each run between prompts and within prompts, [2, runs]; NaN where unknown."""
    w = weight[None, :] * (count > 0)
    safe = np.maximum(count, 1)
    prompts, n = w.sum(axis=1), (w * count).sum(axis=1)
    within = (w * (squares - total**2 / safe)).sum(axis=1)
    mean = (w * total).sum(axis=1) / np.maximum(n, 1)
    between = (w * count * (total / safe - mean[:, None]) ** 2).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        msw = np.where(n > prompts, within / (n - prompts), np.nan)
        msb = between / (prompts - 1)
        n0 = (n - (w * count**2).sum(axis=1) / n) / (prompts - 1)
        return np.stack([np.maximum((msb - msw) / n0, 0.0), msw])


def _between_share(between: Floats, within: Floats) -> float:
    good = np.isfinite(between) & np.isfinite(within)
    total = float(between[good].sum() + within[good].sum())
    return float(between[good].sum()) / total if total > 0 else float("nan")
