"""Predictors that wrap others: conditioning on tokens so far, conformal calibration, ensembles, fault protection."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints, Predictor, Prompts, Samples, rows_reading_output, split_rows, with_output
from lengthwise.predict.distribution import LEVELS, TAIL_SHAPE, Floats, LengthDistribution
from lengthwise.predict.empirical import Ecdf
from lengthwise.predict.serialization import State, array, fitted, packed, unpacked
from lengthwise.schema.errors import InputError
from lengthwise.statistics import kaplan_meier


def predicted_after(
    predictor: Any, predict_at: Callable[[Prompts, Ints], LengthDistribution], prompts: Prompts, tokens_so_far: Any
) -> LengthDistribution:
    """Return the predictions after ``tokens_so_far``, for a predictor that wraps others.

    For a request whose output so far ``predictor`` reads, ``predict_at`` predicts again from that output. For other
    requests, the distribution that ``predict_at`` predicts before the first token is conditioned on the tokens so far.
    """
    n = len(prompts)
    so_far = np.broadcast_to(np.asarray(tokens_so_far, np.int64), (n,))
    predicted = predict_at(prompts, np.zeros(n, np.int64)).given(so_far)
    rows = rows_reading_output(predictor, prompts, so_far)
    if not len(rows):
        return predicted
    tokens = predicted.tokens.copy()
    tokens[rows] = predict_at(prompts.take(rows), so_far[rows]).tokens
    return LengthDistribution(tokens, LEVELS)


class Conditional:
    """Predicts once with the predictor ``inner``, and then conditions this distribution on the tokens so far."""

    kind: ClassVar[str] = "conditional"
    predicts_once: ClassVar[bool] = True

    def __init__(self, inner: Predictor) -> None:
        self.inner = inner

    def fit(self, samples: Samples) -> Self:
        """Fit the inner predictor."""
        self.inner.fit(samples)
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """Return the inner distributions before the first token, conditioned on lengths above ``tokens_so_far``."""
        return self.inner.predict(prompts, 0).given(tokens_so_far)

    def state(self) -> State:
        """Return the JSON values and the arrays from which ``from_state`` restores the predictor."""
        meta, arrays = packed(self.inner, "inner/")
        return {"inner": meta}, arrays

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Return the predictor from the JSON values and the arrays that ``state`` returned."""
        return cls(unpacked(meta["inner"], arrays, "inner/"))


class _ReadsAsInner:
    """Reads the output at the tokens so far at which ``inner`` does."""

    inner: Predictor

    @property
    def reads_output(self) -> tuple[int, int] | None:
        """Return the first and last tokens so far at which the inner predictor reads the text; None: never."""
        span: tuple[int, int] | None = getattr(self.inner, "reads_output", None)
        return span


AGES = (0, 50, 100, 200, 400, 800, 1600)  # tokens so far at which Conformal scores samples
_MIN_SCORES = 30
_MIN_SPREAD = 0.05
_SAVED_SAMPLES = 400


class Conformal(_ReadsAsInner):
    """Calibrates the quantiles of the predictor ``inner`` on held-out samples.

    At level p and age a (tokens so far), the score of a sample with length y is (log(y - a) - log(q_p - a)) / s: the
    error of the predicted remaining length, in units of the predictor's own uncertainty s = log((q_0.9 - a) / (q_0.1 -
    a)), at least 0.05. The log of the predicted remaining length is shifted by s times the p-quantile of the scores,
    with the finite-sample correction of split conformal prediction (Vovk; Romano, Patterson and Candes 2019 for
    quantiles). The score of a censored sample is a lower bound (Kaplan-Meier). Point predictions get a spread, and
    quantiles that are too narrow become wider.

    A ``share`` of the groups (see ``Samples``) is held out for the calibration, drawn with ``seed``; with ``prefit``,
    ``inner`` is already trained and all samples are used. Ages above 0 have their own scores only if ``inner`` reads
    outputs; an age between two of ``ages`` uses the scores of the lower one. The scores of the last ``window`` samples
    are stored, and ``observe`` adds finished requests.
    """

    kind: ClassVar[str] = "conformal"

    def __init__(
        self,
        inner: Predictor,
        share: float = 0.25,
        window: int = 4000,
        ages: Sequence[int] = AGES,
        *,
        prefit: bool = False,
        seed: int = 0,
    ) -> None:
        if not 0 < share < 1:
            raise InputError(f"share must be between 0 and 1; it is {share}")
        if not ages or ages[0] != 0 or sorted(set(ages)) != list(ages) or window < 1:
            raise InputError(f"ages must increase from 0 and window be at least 1; got {tuple(ages)} and {window}")
        self.inner, self.share, self.window, self.ages = inner, share, window, tuple(ages)
        self.prefit, self.seed, self._new = prefit, seed, 0

    def fit(self, samples: Samples) -> Self:
        """Fit the inner predictor, unless it is ``prefit``, and calibrate it on held-out samples."""
        held_out = samples
        if not self.prefit:
            train, test = split_rows(samples, self.share, self.seed)
            self.inner.fit(samples.take(train))
            held_out = samples.take(test)
        self.scores_: Floats = np.empty((0, len(self.ages), len(LEVELS)))
        self.spread_: Floats = np.empty((0, len(self.ages)))
        self.censored_ = np.empty(0, bool)
        self._add(held_out)
        self._calibrate()
        return self

    def observe(self, prompts: Prompts, output_tokens: npt.ArrayLike, censored: npt.ArrayLike | None = None) -> Self:
        """Add finished requests to the stored scores, and calibrate again after every ``window`` / 100 of them."""
        fitted(self, "scores_")
        is_censored = np.zeros(len(prompts), bool) if censored is None else np.asarray(censored, bool)
        self._add(Samples(prompts, np.asarray(output_tokens), is_censored))
        self._new += len(prompts)
        if self._new >= self.window / 100:
            self._calibrate()
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """Return the inner predictor's distributions with shifted quantiles."""
        fitted(self, "shifts_")
        return predicted_after(self, self._shifted, prompts, tokens_so_far)

    def _shifted(self, prompts: Prompts, so_far: Ints) -> LengthDistribution:
        a = so_far.astype(float)
        remaining, spread = _remaining(self.inner.predict(prompts, so_far), a)
        age = np.searchsorted(np.asarray(self.ages), a, side="right") - 1
        shifted = remaining * np.exp(np.clip(spread * self.shifts_[age], -30, 30))
        tokens = np.maximum.accumulate(np.maximum(a[:, None] + shifted, (a + 1)[:, None]), axis=1)
        return LengthDistribution(np.minimum(tokens, 1e9 + a[:, None]), LEVELS)

    def _add(self, samples: Samples) -> None:
        last = samples.take(np.arange(max(0, len(samples) - self.window), len(samples)))
        scores = np.full((len(last), len(self.ages), len(LEVELS)), np.nan)  # NaN: finished earlier, or text not read
        spreads = np.full((len(last), len(self.ages)), np.nan)
        ages = self.ages if last.output is not None and self.reads_output is not None else self.ages[:1]
        for at, age in enumerate(ages):
            rows = np.flatnonzero(last.output_tokens > age)
            if len(rows):
                part, so_far = last.take(rows), np.full(len(rows), age)
                prompts = with_output(part.prompts, part.output, part.output_tokens, so_far)
                remaining, spread = _remaining(self.inner.predict(prompts, so_far), so_far)
                true = (part.output_tokens - age)[:, None]
                scores[rows, at] = (np.log(true) - np.log(remaining)) / spread
                spreads[rows, at] = spread[:, 0]
        self.scores_ = np.concatenate([self.scores_, scores])[-self.window :]
        self.spread_ = np.concatenate([self.spread_, spreads])[-self.window :]
        self.censored_ = np.concatenate([self.censored_, last.censored])[-self.window :]

    def _calibrate(self) -> None:
        self._new = 0
        self.shifts_: Floats = np.zeros((len(self.ages), len(LEVELS)))
        for at in range(len(self.ages)):
            rows = np.isfinite(self.scores_[:, at, 0])
            if rows.sum() < _MIN_SCORES and at > 0:
                self.shifts_[at] = self.shifts_[at - 1]
            elif rows.any():
                tail = 1 / (TAIL_SHAPE * float(np.median(self.spread_[rows, at])))
                self.shifts_[at] = _score_quantiles(self.scores_[rows, at], self.censored_[rows], tail)

    def state(self) -> State:
        """Return the state to save: the shifts, and the scores of the last 400 samples."""
        shifts = fitted(self, "shifts_")
        meta, arrays = packed(self.inner, "inner/")
        parameters = {name: getattr(self, name) for name in ("share", "window", "ages", "prefit", "seed")}
        scores, spread = (values[-_SAVED_SAMPLES:].astype(np.float32) for values in (self.scores_, self.spread_))
        own = {"shifts": shifts, "scores": scores, "spread": spread, "censored": self.censored_[-_SAVED_SAMPLES:]}
        return {"inner": meta, **parameters}, arrays | own

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Return the predictor from the JSON values and the arrays that ``state`` returned."""
        parameters = {name: meta[name] for name in ("share", "window", "ages", "prefit", "seed")}
        loaded = cls(unpacked(meta["inner"], arrays, "inner/"), **parameters)
        grid = (len(loaded.ages), len(LEVELS))
        shifts, scores, censored = array(arrays, "shifts", 2), arrays["scores"].astype(float), arrays["censored"]
        if shifts.shape != grid or scores.shape != (len(censored), *grid) or np.isinf(scores).any():
            message = f"shifts and scores must have ages x levels {grid}; they are {shifts.shape}, {scores.shape}"
            raise InputError(message)
        spread, known = arrays["spread"].astype(float), np.isfinite(scores[:, :, 0])
        if spread.shape != known.shape or not (spread[known] > 0).all() or np.isinf(spread).any():
            raise InputError(f"spread must be above 0 wherever there is a score, {known.shape}; it is not")
        loaded.shifts_, loaded.scores_, loaded.spread_ = shifts, scores, spread
        loaded.censored_ = censored.astype(bool)
        return loaded


def _remaining(predicted: LengthDistribution, so_far: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """Return quantiles of the remaining tokens [n, q], and the predictor's own uncertainty s [n, 1] (``Conformal``)."""
    tokens = predicted.given(so_far).at(LEVELS).tokens
    remaining = np.maximum(tokens - so_far[:, None], 1.0)
    low, high = np.searchsorted(LEVELS, (0.1, 0.9))
    return remaining, np.maximum(np.log(remaining[:, high] / remaining[:, low]), _MIN_SPREAD)[:, None]


def _score_quantiles(scores: Floats, censored: npt.NDArray[np.bool_], tail: float) -> Floats:
    """Return the quantiles of the scores, [q], for finite n; above all scores, an exponential tail of mean ``tail``."""
    n = len(scores)
    safe = np.where(LEVELS >= 0.5, np.minimum(1, LEVELS * (n + 1) / n), np.maximum(0, LEVELS - (1 - LEVELS) / n))
    if censored.any():
        return np.array([_censored_quantile(scores[:, q], censored, float(p), tail) for q, p in enumerate(safe)])
    rank = np.clip(np.ceil(safe * n - 1e-9).astype(int) - 1, 0, n - 1)
    return np.asarray(np.sort(scores, axis=0)[rank, np.arange(len(LEVELS))])


def _censored_quantile(scores: Floats, censored: npt.NDArray[np.bool_], level: float, tail: float) -> float:
    seen, cdf = kaplan_meier(scores, censored)
    known_share = float(cdf[-1]) if len(cdf) else 0.0
    if len(cdf) and level <= known_share + 1e-12:
        return float(seen[min(int(np.searchsorted(cdf, level - 1e-12)), len(seen) - 1)])
    beyond = min((level - known_share) / (1 - known_share), 0.99)
    return float(scores.max() - np.log(1 - beyond) * tail)


_STEPS = 300


class Ensemble:
    """Averages the quantiles of several predictors, with one weight for each.

    If ``weights`` is None, ``fit`` holds out a ``share`` of the groups (see ``Samples``), finds the weights that
    minimize the pinball loss on them, and then fits every member on all samples.
    """

    kind: ClassVar[str] = "ensemble"

    def __init__(
        self, members: Sequence[Predictor], weights: Sequence[float] | None = None, share: float = 0.25, seed: int = 0
    ) -> None:
        if not members:
            raise InputError("an ensemble must have at least one member; it has none")
        self.members, self.share, self.seed = list(members), share, seed
        self.weights = None if weights is None else tuple(float(weight) for weight in weights)
        self.weights_ = None if self.weights is None else _normalized(self.weights, len(self.members))

    def fit(self, samples: Samples) -> Self:
        """Find the weights, unless they were given, and fit each member on all samples."""
        if self.weights is None:
            train, test = split_rows(samples, self.share, self.seed)
            for member in self.members:
                member.fit(samples.take(train))
            held_out = samples.take(test)
            predicted = np.stack([member.predict(held_out.prompts).at(LEVELS).tokens for member in self.members])
            self.weights_ = _best_weights(predicted, held_out)
        for member in self.members:
            member.fit(samples)
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """Return the weighted mean of the members' quantiles."""
        fitted(self, "weights_")
        return predicted_after(self, self._mean, prompts, tokens_so_far)

    @property
    def reads_output(self) -> tuple[int, int] | None:
        """Return the first and last tokens so far at which any member reads the text; None: never."""
        spans = [span for member in self.members if (span := getattr(member, "reads_output", None)) is not None]
        return (min(span[0] for span in spans), max(span[1] for span in spans)) if spans else None

    def _mean(self, prompts: Prompts, so_far: Ints) -> LengthDistribution:
        tokens = np.zeros((len(prompts), len(LEVELS)))
        for weight, member in zip(fitted(self, "weights_"), self.members, strict=True):
            if weight > 0:
                tokens += weight * member.predict(prompts, so_far).given(so_far).at(LEVELS).tokens
        return LengthDistribution.of(tokens)

    def state(self) -> State:
        """Return the JSON values and the arrays from which ``from_state`` restores the predictor."""
        arrays = {"weights": fitted(self, "weights_")}
        parts = [packed(member, f"member{number}/") for number, member in enumerate(self.members)]
        for _, own in parts:
            arrays |= own
        parameters = {"weights": self.weights, "share": self.share, "seed": self.seed}
        return {"members": [meta for meta, _ in parts], **parameters}, arrays

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Return the predictor from the JSON values and the arrays that ``state`` returned."""
        members = [unpacked(part, arrays, f"member{number}/") for number, part in enumerate(meta["members"])]
        loaded = cls(members, meta["weights"], meta["share"], meta["seed"])
        loaded.weights_ = _normalized(array(arrays, "weights", 1), len(members))
        return loaded


def _normalized(weights: npt.ArrayLike, members: int) -> Floats:
    given = np.asarray(weights, float)
    if given.shape != (members,) or not np.isfinite(given).all() or (given < 0).any() or given.sum() <= 0:
        raise InputError(f"weights must be {members} numbers, not negative, not all 0; they are {given.tolist()}")
    return np.asarray(given / given.sum())


def pinball(tokens: Floats, samples: Samples) -> float:
    """Return the mean pinball loss of quantiles [n, q] at LEVELS; those above a censored length cost nothing."""
    return _pinball_loss(tokens, samples)[0]


def _best_weights(predicted: Floats, validation: Samples) -> Floats:
    """Return the weights [m] with the smallest loss, by exponentiated gradient descent; the loss is convex in them."""
    weights = np.full(len(predicted), 1 / len(predicted))
    mean, scale = np.zeros(len(predicted)), max(pinball(predicted.mean(axis=0), validation), 1e-9)
    for step in range(_STEPS):
        _, slope = _pinball_loss(np.tensordot(weights, predicted, 1), validation)
        gradient = (predicted * slope).mean(axis=(1, 2)) / scale
        weights = weights * np.exp(-np.clip(gradient - gradient.min(), 0, 50) / np.sqrt(1 + step))
        weights /= weights.sum()
        mean += weights / _STEPS
    return np.asarray(mean / mean.sum())


def _pinball_loss(tokens: Floats, samples: Samples) -> tuple[float, Floats]:
    true = samples.output_tokens[:, None]
    slope = np.where(tokens > true, np.where(samples.censored[:, None], 0.0, 1 - LEVELS), -LEVELS)
    return float((slope * (tokens - true)).mean()), slope


FAULTS = ("raised", "shape", "not_a_number", "not_positive", "absurd", "disordered", "already_passed")


class Guarded(_ReadsAsInner):
    """Replaces invalid predictions of the predictor ``inner`` by those of ``prior``.

    The default prior is the empirical distribution by model. The inner predictor may return a LengthDistribution, any
    object with ``tokens`` and ``levels``, or plain lengths [n]. ``faults_`` counts replaced rows by kind of fault:
    "raised" (an exception, also of ``fit``, or an answer without numbers), "shape" (not one row per request, or invalid
    levels), "not_a_number", "not_positive" (below 1), "absurd" (above ``max_tokens``), "disordered" (decreasing
    quantiles), "already_passed" (a length that does not exceed the tokens so far).
    """

    kind: ClassVar[str] = "guarded"

    def __init__(self, inner: Predictor, prior: Predictor | None = None, max_tokens: float = 2.0**20) -> None:
        self.inner, self.prior, self.max_tokens = inner, Ecdf() if prior is None else prior, max_tokens
        self.faults_: dict[str, int] = dict.fromkeys(FAULTS, 0)
        self.last_error_: str | None = None
        self.unfit_ = False

    def fit(self, samples: Samples) -> Self:
        """Fit the prior and the inner predictor. If the inner one raises an exception, only the prior predicts."""
        self.prior.fit(samples)
        self.unfit_ = False
        try:
            self.inner.fit(samples)
        except Exception as error:  # noqa: BLE001 - any exception is a fault of the inner predictor
            self.unfit_ = True
            self.last_error_ = f"fit: {type(error).__name__}: {error}"
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """Return the inner predictor's distributions where they are valid, and the prior's elsewhere."""
        a = np.broadcast_to(np.asarray(tokens_so_far, float), (len(prompts),))
        prior = self.prior.predict(prompts, tokens_so_far).given(a).at(LEVELS)
        answer, fault = None, "raised"
        if not self.unfit_:
            try:
                answer, fault = _quantiles_of(self.inner.predict(prompts, tokens_so_far), len(prompts)), "shape"
            except Exception as error:  # noqa: BLE001 - any exception is a fault of the inner predictor
                self.last_error_ = f"predict: {type(error).__name__}: {error}"
        if answer is None:
            self.faults_[fault] += len(prompts)
            return prior
        tokens, levels = answer
        good = self._valid(tokens, a)
        safe = LengthDistribution(np.where(good[:, None], tokens, np.maximum(a, 1)[:, None] + 1), levels)
        return LengthDistribution(np.where(good[:, None], safe.at(LEVELS).tokens, prior.tokens), LEVELS)

    def _valid(self, tokens: Floats, a: Floats) -> npt.NDArray[np.bool_]:
        """Return which rows are valid, [n], and count each other row under its first fault."""
        with np.errstate(invalid="ignore"):
            faults = {
                "not_a_number": np.isnan(tokens).any(axis=1),
                "not_positive": (tokens < 1).any(axis=1),
                "absurd": (tokens > self.max_tokens).any(axis=1),
                "disordered": (np.diff(tokens, axis=1) < 0).any(axis=1),
                "already_passed": (a > 0) & (tokens[:, 0] <= a),
            }
        good = np.ones(len(tokens), bool)
        for name, rows in faults.items():
            self.faults_[name] += int((rows & good).sum())
            good &= ~rows
        return good

    def state(self) -> State:
        """Return the state to save, without the counts of faults."""
        inner, of_inner = packed(self.inner, "inner/")
        prior, of_prior = packed(self.prior, "prior/")
        return {"inner": inner, "prior": prior, "max_tokens": self.max_tokens}, of_inner | of_prior

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Return the predictor from the JSON values and the arrays that ``state`` returned."""
        inner, prior = (unpacked(meta[part], arrays, f"{part}/") for part in ("inner", "prior"))
        return cls(inner, prior, float(meta["max_tokens"]))


def _quantiles_of(answer: Any, n: int) -> tuple[Floats, Floats] | None:
    """Return the quantiles [n, q] and levels [q] in a predictor's answer; None if its shape is wrong."""
    if hasattr(answer, "tokens") and hasattr(answer, "levels"):
        tokens, levels = np.asarray(answer.tokens, float), np.asarray(answer.levels, float)
        spans = levels.ndim == 1 and len(levels) > 1 and levels[0] == 0 and levels[-1] == 1
        fits = spans and bool((np.diff(levels) > 0).all()) and tokens.shape == (n, len(levels))
        return (tokens, levels) if fits else None
    points = np.asarray(answer, float)
    return (np.repeat(points[:, None], 2, axis=1), np.array([0.0, 1.0])) if points.shape == (n,) else None
