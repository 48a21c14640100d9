"""Makes any predictor honest: each quantile is exceeded as often as it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict._holdout import split
from lengthwise.predict._state import State, array, fitted, prefixed, within
from lengthwise.predict._survival import kaplan_meier
from lengthwise.predict.contract import Ints, Predictor, Prompts, Samples, partial
from lengthwise.predict.distribution import LEVELS, TAIL_SHAPE, Floats, LengthDistribution
from lengthwise.schema.errors import InputError

AGES = (0, 50, 100, 200, 400, 800, 1600)
_LEAST_SCORES = 30
_LEAST_SPREAD = 0.05
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
            raise InputError(
                f"ages must grow from 0 and window be at least 1; got {tuple(ages)} and {window}"
            )
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

    def observe(
        self, prompts: Prompts, output_tokens: npt.ArrayLike, censored: npt.ArrayLike | None = None
    ) -> Self:
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
        from lengthwise.predict.save import packed

        shifts = fitted(self, "shifts_")
        meta, arrays = packed(self.inner)
        given = {"share": self.share, "window": self.window, "ages": self.ages, "prefit": self.prefit}
        scores, spread = (of[-_SAVED:].astype(np.float32) for of in (self.scores_, self.spread_))
        own = {"shifts": shifts, "scores": scores, "spread": spread, "censored": self.censored_[-_SAVED:]}
        return {"inner": meta, "seed": self.seed, **given}, prefixed("inner", arrays) | own

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The predictor that was saved."""
        from lengthwise.predict.save import unpacked

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


def _left(said: LengthDistribution, so_far: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """[n, q] what is to come by quantile, and [n, 1] the predictor's doubt."""
    left = np.maximum(said.tokens - so_far[:, None], 1.0)
    low, high = np.searchsorted(LEVELS, (0.1, 0.9))
    return left, np.maximum(np.log(left[:, high] / left[:, low]), _LEAST_SPREAD)[:, None]


def _quantiles(scores: Floats, censored: npt.NDArray[np.bool_], tail: float) -> Floats:
    """[q] of each level the score that so many do not exceed, on the safe side by one sample."""
    n = len(scores)
    safe = np.where(
        LEVELS >= 0.5, np.minimum(1, LEVELS * (n + 1) / n), np.maximum(0, LEVELS - (1 - LEVELS) / n)
    )
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
