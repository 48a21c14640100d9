"""What is left to come, by survival alone: the cheapest predictor that predicts again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints, Predictor, Prompts, Samples, partial, split
from lengthwise.predict.distribution import LEVELS, TAIL_SHAPE, Floats, LengthDistribution, kaplan_meier
from lengthwise.predict.empirical import Ecdf
from lengthwise.predict.serialization import State, array, fitted, prefixed, within
from lengthwise.schema.errors import InputError


class Conditional:
    """Another predictor's first word, and from then on the survival arithmetic of its distribution.

    The other is asked once, before the first token; each token that comes without an end rules out
    the shorter lengths.

    Args:
        inner: Any predictor.
    """

    kind: ClassVar[str] = "conditional"
    predicts_once: ClassVar[bool] = True

    def __init__(self, inner: Predictor) -> None:
        self.inner = inner

    def fit(self, samples: Samples) -> Self:
        """Fits the other."""
        self.inner.fit(samples)
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """The other's distribution of the whole length, of those lengths that are above ``tokens_so_far``."""
        return self.inner.predict(prompts, 0).given(tokens_so_far)

    def state(self) -> State:
        """What is saved."""
        from lengthwise.predict.serialization import packed

        meta, arrays = packed(self.inner)
        return {"inner": meta}, prefixed("inner", arrays)

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The predictor that was saved."""
        from lengthwise.predict.serialization import unpacked

        return cls(unpacked(meta["inner"], within("inner", arrays)))


AGES = (0, 50, 100, 200, 400, 800, 1600)
_LEAST_SCORES = 30
_MIN_SPREAD = 0.05
_SAVED = 400


class Conformal:
    """Another predictor, its quantiles moved to where the lengths of held-out samples fell.

    Of every level p the score of a sample is (log(y - a) - log(q_p - a)) / s at age a, where s is the
    logarithm of q_0.9 - a over q_0.1 - a: by how much the true remainder misses the predicted one,
    in units of the predictor's own doubt. The quantile is moved by the p-quantile of the scores, with the
    finite-sample correction of split conformal prediction (Vovk; Romano, Patterson and Candes 2019
    for quantiles). A sample whose output was cut has a score of at least what was seen, by Kaplan
    and Meier. Points get a spread, quantiles that are too narrow become wide, at all levels.

    The scores of the last ``window`` samples are kept; ``observe`` adds what is seen in service.

    Args:
        inner: Any predictor.
        share: Of the samples, held out by prompt from its training.
        window: Samples remembered.
        ages: Tokens so far at which is calibrated; between two, as at the lower one.
        prefit: The inner predictor has learnt elsewhere: all samples calibrate.
        seed: Of who is held out.
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
            raise InputError(f"ages must grow from 0 and window be at least 1; got {tuple(ages)} and {window}")
        self.inner, self.share, self.window, self.ages = inner, share, window, tuple(ages)
        self.prefit, self.seed, self._new = prefit, seed, 0

    def fit(self, samples: Samples) -> Self:
        """Fits the other on most samples and calibrates it on the rest."""
        if self.prefit:
            held = samples
        else:
            own, out = split(samples, self.share, self.seed)
            self.inner.fit(samples.take(own))
            held = samples.take(out)
        self.scores_: Floats = np.empty((0, len(self.ages), len(LEVELS)))
        self.spread_: Floats = np.empty((0, len(self.ages)))
        self.censored_ = np.empty(0, bool)
        self._add(held)
        self._calibrate()
        return self

    def observe(self, prompts: Prompts, output_tokens: npt.ArrayLike, censored: npt.ArrayLike | None = None) -> Self:
        """Takes finished requests into the window, the oldest going.

        It calibrates anew whenever a hundredth of the window is new.
        """
        fitted(self, "scores_")
        cut = np.zeros(len(prompts), bool) if censored is None else np.asarray(censored, bool)
        self._add(Samples(prompts, np.asarray(output_tokens), cut))
        self._new += len(prompts)
        if self._new >= self.window / 100:
            self._calibrate()
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """The other's distributions, each quantile moved."""
        shifts = fitted(self, "shifts_")
        a = np.broadcast_to(np.asarray(tokens_so_far, float), (len(prompts),))
        said = self.inner.predict(prompts, tokens_so_far).given(a).at(LEVELS)
        left, spread = _left(said, a)
        age = np.searchsorted(np.asarray(self.ages), a, side="right") - 1
        moved = left * np.exp(np.clip(spread * shifts[age], -30, 30))
        tokens = np.maximum.accumulate(np.maximum(a[:, None] + moved, (a + 1)[:, None]), axis=1)
        return LengthDistribution(np.minimum(tokens, 1e9 + a[:, None]), LEVELS)

    def _add(self, samples: Samples) -> None:
        last = samples.take(np.arange(max(0, len(samples) - self.window), len(samples)))
        found = [self._scores(last, age) for age in self.ages]
        scores, spread = (np.stack(part, axis=1) for part in zip(*found, strict=True))
        self.scores_ = np.concatenate([self.scores_, scores])[-self.window :]
        self.spread_ = np.concatenate([self.spread_, spread])[-self.window :]
        self.censored_ = np.concatenate([self.censored_, last.censored])[-self.window :]

    def _scores(self, samples: Samples, age: int) -> tuple[Floats, Floats]:
        """[n, q] scores at an age, and [n] the predictor's doubt; NaN for those that had ended."""
        rows = np.flatnonzero(samples.output_tokens > age)
        scores, doubt = np.full((len(samples), len(LEVELS)), np.nan), np.full(len(samples), np.nan)
        if len(rows):
            part = samples.take(rows)
            so_far = np.full(len(rows), age)
            prompts = partial(part.prompts, part.output, part.output_tokens, so_far)
            left, spread = _left(self.inner.predict(prompts, so_far).given(so_far).at(LEVELS), so_far)
            true = (part.output_tokens - age)[:, None]
            scores[rows] = (np.log(true) - np.log(left)) / spread
            doubt[rows] = spread[:, 0]
        return scores, doubt

    def _calibrate(self) -> None:
        """Shifts [ages, q]; an age with few scores is moved as the one before it."""
        self._new = 0
        self.shifts_: Floats = np.zeros((len(self.ages), len(LEVELS)))
        for at in range(len(self.ages)):
            rows = np.isfinite(self.scores_[:, at, 0])
            if rows.sum() < _LEAST_SCORES and at > 0:
                self.shifts_[at] = self.shifts_[at - 1]
            elif rows.any():
                tail = 1 / (TAIL_SHAPE * float(np.median(self.spread_[rows, at])))
                self.shifts_[at] = _quantiles(self.scores_[rows, at], self.censored_[rows], tail)

    def state(self) -> State:
        """What is saved: the shifts, and of the memory the last few hundred samples."""
        from lengthwise.predict.serialization import packed

        shifts = fitted(self, "shifts_")
        meta, arrays = packed(self.inner)
        given = {"share": self.share, "window": self.window, "ages": self.ages, "prefit": self.prefit}
        scores, spread = (of[-_SAVED:].astype(np.float32) for of in (self.scores_, self.spread_))
        own = {"shifts": shifts, "scores": scores, "spread": spread, "censored": self.censored_[-_SAVED:]}
        return {"inner": meta, "seed": self.seed, **given}, prefixed("inner", arrays) | own

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The predictor that was saved."""
        from lengthwise.predict.serialization import unpacked

        inner = unpacked(meta["inner"], within("inner", arrays))
        given = {key: meta[key] for key in ("share", "window", "prefit", "seed")}
        loaded = cls(inner, ages=tuple(meta["ages"]), **given)
        grid = (len(loaded.ages), len(LEVELS))
        shifts, scores, cut = array(arrays, "shifts", 2), arrays["scores"].astype(float), arrays["censored"]
        if shifts.shape != grid or scores.shape != (len(cut), *grid) or np.isinf(scores).any():
            raise InputError(
                f"shifts and scores must have ages x levels {grid}; they are {shifts.shape}, {scores.shape}"
            )
        spread = arrays["spread"].astype(float)
        known = np.isfinite(scores[:, :, 0])
        if spread.shape != known.shape or not (spread[known] > 0).all() or np.isinf(spread).any():
            raise InputError(f"spread must be above 0 wherever there is a score, {known.shape}; it is not")
        loaded.shifts_, loaded.scores_, loaded.censored_ = shifts, scores, cut.astype(bool)
        loaded.spread_ = spread
        return loaded


def _left(predicted: LengthDistribution, so_far: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """[n, q] what is to come by quantile, and [n, 1] the predictor's doubt."""
    left = np.maximum(predicted.tokens - so_far[:, None], 1.0)
    low, high = np.searchsorted(LEVELS, (0.1, 0.9))
    return left, np.maximum(np.log(left[:, high] / left[:, low]), _MIN_SPREAD)[:, None]


def _quantiles(scores: Floats, censored: npt.NDArray[np.bool_], tail: float) -> Floats:
    """[q] of each level the score that so many do not exceed, on the safe side by one sample."""
    n = len(scores)
    safe = np.where(LEVELS >= 0.5, np.minimum(1, LEVELS * (n + 1) / n), np.maximum(0, LEVELS - (1 - LEVELS) / n))
    if censored.any():
        return np.array([_quantile(scores[:, q], censored, float(p), tail) for q, p in enumerate(safe)])
    rank = np.clip(np.ceil(safe * n - 1e-9).astype(int) - 1, 0, n - 1)
    return np.asarray(np.sort(scores, axis=0)[rank, np.arange(len(LEVELS))])


def _quantile(scores: Floats, censored: npt.NDArray[np.bool_], level: float, tail: float) -> float:
    seen, cdf = kaplan_meier(scores, censored)
    reached = float(cdf[-1]) if len(cdf) else 0.0
    if len(cdf) and level <= reached + 1e-12:
        return float(seen[min(int(np.searchsorted(cdf, level - 1e-12)), len(seen) - 1)])
    beyond = min((level - reached) / (1 - reached), 0.99)
    return float(scores.max() - np.log(1 - beyond) * tail)


_STEPS = 300


class Ensemble:
    """The weighted mean of the quantiles of its members.

    Args:
        members: Predictors, at least one.
        weights: One a member; None: those of the least pinball loss on held-out samples.
        share: Of the samples, held out by prompt to weigh; then every member learns from all.
        seed: Of who is held out.
    """

    kind: ClassVar[str] = "ensemble"

    def __init__(
        self, members: Sequence[Predictor], weights: Sequence[float] | None = None, share: float = 0.25, seed: int = 0
    ) -> None:
        if not members:
            raise InputError("an ensemble must have at least one member; it has none")
        self.members, self.share, self.seed = list(members), share, seed
        self.weights = None if weights is None else tuple(float(weight) for weight in weights)
        self.weights_ = None if self.weights is None else _normal(self.weights, len(self.members))

    def fit(self, samples: Samples) -> Self:
        """Weighs the members, unless weights were given, and fits each on all samples."""
        if self.weights is None:
            own, out = split(samples, self.share, self.seed)
            for member in self.members:
                member.fit(samples.take(own))
            held = samples.take(out)
            said = np.stack([member.predict(held.prompts).at(LEVELS).tokens for member in self.members])
            self.weights_ = _least_loss(said, held)
        for member in self.members:
            member.fit(samples)
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """The mean of the members' quantiles."""
        weights = fitted(self, "weights_")
        tokens = np.zeros((len(prompts), len(LEVELS)))
        for weight, member in zip(weights, self.members, strict=True):
            if weight > 0:
                tokens += weight * member.predict(prompts, tokens_so_far).given(tokens_so_far).at(LEVELS).tokens
        return LengthDistribution.of(tokens)

    def state(self) -> State:
        """What is saved."""
        from lengthwise.predict.serialization import packed

        weights = fitted(self, "weights_")
        parts = [packed(member) for member in self.members]
        arrays = {"weights": weights}
        for number, (_, own) in enumerate(parts):
            arrays |= prefixed(f"member{number}", own)
        given = {"weights": self.weights, "share": self.share, "seed": self.seed}
        return {"members": [meta for meta, _ in parts], **given}, arrays

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The predictor that was saved."""
        from lengthwise.predict.serialization import unpacked

        members = [unpacked(part, within(f"member{number}", arrays)) for number, part in enumerate(meta["members"])]
        loaded = cls(members, meta["weights"], meta["share"], meta["seed"])
        loaded.weights_ = _normal(array(arrays, "weights", 1), len(members))
        return loaded


def _normal(weights: npt.ArrayLike, members: int) -> Floats:
    given = np.asarray(weights, float)
    if given.shape != (members,) or not np.isfinite(given).all() or (given < 0).any() or given.sum() <= 0:
        raise InputError(f"weights must be {members} numbers, not negative, not all 0; they are {given.tolist()}")
    return np.asarray(given / given.sum())


def pinball(tokens: Floats, samples: Samples) -> float:
    """Mean pinball loss of quantiles [n, LEVELS]; of cut outputs the part that is certain."""
    return float(_loss(tokens, samples)[0])


def _least_loss(predicted: Floats, validation: Samples) -> Floats:
    """[m] weights by exponentiated gradient; the loss is convex in them."""
    weights = np.full(len(predicted), 1 / len(predicted))
    mean, scale = np.zeros(len(predicted)), max(pinball(predicted.mean(axis=0), validation), 1e-9)
    for step in range(_STEPS):
        _, slope = _loss(np.tensordot(weights, predicted, 1), validation)
        gradient = (predicted * slope).mean(axis=(1, 2)) / scale
        weights = weights * np.exp(-np.clip(gradient - gradient.min(), 0, 50) / np.sqrt(1 + step))
        weights /= weights.sum()
        mean += weights / _STEPS
    return np.asarray(mean / mean.sum())


def _loss(tokens: Floats, samples: Samples) -> tuple[float, Floats]:
    """The loss, and [n, q] its slope by each quantile."""
    true = samples.output_tokens[:, None]
    above = tokens > true
    slope = np.where(above, np.where(samples.censored[:, None], 0.0, 1 - LEVELS), -LEVELS)
    return float((slope * (tokens - true)).mean()), slope


FAULTS = ("raised", "shape", "not_a_number", "not_positive", "absurd", "disordered", "already_passed")


class Guarded:
    """Another predictor; the rows where it fails are those of the prior.

    It may answer with a LengthDistribution, with anything that has ``tokens`` and ``levels``, or with
    plain lengths [n]. ``faults_`` counts the rows by kind: "raised" (an exception), "shape" (not a
    row a request, or no numbers), "not_a_number", "not_positive" (below 1), "absurd" (above
    ``max_tokens``), "disordered" (quantiles decrease), "already_passed" (a length that is not above
    the tokens so far).

    Args:
        inner: Any predictor, to be distrusted.
        prior: What stands in for it; None: the empirical distribution by model.
        max_tokens: No output is longer.
    """

    kind: ClassVar[str] = "guarded"

    def __init__(self, inner: Predictor, prior: Predictor | None = None, max_tokens: float = 2.0**20) -> None:
        self.inner, self.prior, self.max_tokens = inner, Ecdf() if prior is None else prior, max_tokens
        self.faults_: dict[str, int] = dict.fromkeys(FAULTS, 0)
        self.last_error_: str | None = None
        self.unfit_ = False

    def fit(self, samples: Samples) -> Self:
        """Fits both; an inner predictor that cannot be fitted is asked no more."""
        self.prior.fit(samples)
        try:
            self.inner.fit(samples)
            self.unfit_ = False
        except Exception as error:  # noqa: BLE001 - whatever it raises is what is guarded against
            self.unfit_ = True
            self.last_error_ = f"fit: {type(error).__name__}: {error}"
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """The other's distributions where they can be used, else the prior's."""
        a = np.broadcast_to(np.asarray(tokens_so_far, float), (len(prompts),))
        prior = self.prior.predict(prompts, tokens_so_far).given(a).at(LEVELS)
        answer = self._requested(prompts, tokens_so_far)
        if answer is None:
            return prior
        tokens, levels = answer
        good = self._evaluated(tokens, a)
        safe = LengthDistribution(np.where(good[:, None], tokens, np.maximum(a, 1)[:, None] + 1), levels)
        return LengthDistribution(np.where(good[:, None], safe.at(LEVELS).tokens, prior.tokens), LEVELS)

    def _requested(self, prompts: Prompts, tokens_so_far: int | Ints) -> tuple[Floats, Floats] | None:
        """Quantiles [n, q] and levels [q], or None where nothing of the answer can be used."""
        if self.unfit_:
            self.faults_["raised"] += len(prompts)
            return None
        try:
            answer = _numbers(self.inner.predict(prompts, tokens_so_far), len(prompts))
        except Exception as error:  # noqa: BLE001 - whatever it raises is what is guarded against
            self.faults_["raised"] += len(prompts)
            self.last_error_ = f"predict: {type(error).__name__}: {error}"
            return None
        if answer is None:
            self.faults_["shape"] += len(prompts)
        return answer

    def _evaluated(self, tokens: Floats, a: Floats) -> npt.NDArray[np.bool_]:
        """[n] which rows can be used; the others are counted under their first fault."""
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
        """What is saved; the counts are not."""
        from lengthwise.predict.serialization import packed

        inner, of_inner = packed(self.inner)
        prior, of_prior = packed(self.prior)
        meta = {"inner": inner, "prior": prior, "most_tokens": self.max_tokens}
        return meta, prefixed("inner", of_inner) | prefixed("prior", of_prior)

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The predictor that was saved, with nothing counted."""
        from lengthwise.predict.serialization import unpacked

        inner, prior = (unpacked(meta[part], within(part, arrays)) for part in ("inner", "prior"))
        return cls(inner, prior, float(meta["most_tokens"]))


def _numbers(answer: Any, n: int) -> tuple[Floats, Floats] | None:
    if hasattr(answer, "tokens") and hasattr(answer, "levels"):
        tokens, levels = np.asarray(answer.tokens, float), np.asarray(answer.levels, float)
        spans = levels.ndim == 1 and len(levels) > 1 and levels[0] == 0 and levels[-1] == 1
        fits = spans and bool((np.diff(levels) > 0).all()) and tokens.shape == (n, len(levels))
        return (tokens, levels) if fits else None
    points = np.asarray(answer, float)
    return (np.repeat(points[:, None], 2, axis=1), np.array([0.0, 1.0])) if points.shape == (n,) else None
