"""A predictor of somebody else's, whose faults do no damage and are counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict._state import State, prefixed, within
from lengthwise.predict.contract import Ints, Predictor, Prompts, Samples
from lengthwise.predict.distribution import LEVELS, Floats, LengthDistribution
from lengthwise.predict.ecdf import Ecdf

FAULTS = ("raised", "shape", "not_a_number", "not_positive", "absurd", "disordered", "already_passed")


class Guarded:
    """Another predictor; the rows where it fails are those of the prior.

    It may answer with a LengthDistribution, with anything that has ``tokens`` and ``levels``, or with
    plain lengths [n]. ``faults_`` counts the rows by kind: "raised" (an exception), "shape" (not a
    row a request, or no numbers), "not_a_number", "not_positive" (below 1), "absurd" (above
    ``most_tokens``), "disordered" (quantiles decrease), "already_passed" (a length that is not above
    the tokens so far).

    Args:
        inner: Any predictor, to be distrusted.
        prior: What stands in for it; None: the empirical distribution by model.
        most_tokens: No output is longer.
    """

    kind: ClassVar[str] = "guarded"

    def __init__(
        self, inner: Predictor, prior: Predictor | None = None, most_tokens: float = 2.0**20
    ) -> None:
        self.inner, self.prior, self.most_tokens = inner, Ecdf() if prior is None else prior, most_tokens
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
        answer = self._asked(prompts, tokens_so_far)
        if answer is None:
            return prior
        tokens, levels = answer
        good = self._judged(tokens, a)
        safe = LengthDistribution(np.where(good[:, None], tokens, np.maximum(a, 1)[:, None] + 1), levels)
        return LengthDistribution(np.where(good[:, None], safe.at(LEVELS).tokens, prior.tokens), LEVELS)

    def _asked(self, prompts: Prompts, tokens_so_far: int | Ints) -> tuple[Floats, Floats] | None:
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

    def _judged(self, tokens: Floats, a: Floats) -> npt.NDArray[np.bool_]:
        """[n] which rows can be used; the others are counted under their first fault."""
        with np.errstate(invalid="ignore"):
            faults = {
                "not_a_number": np.isnan(tokens).any(axis=1),
                "not_positive": (tokens < 1).any(axis=1),
                "absurd": (tokens > self.most_tokens).any(axis=1),
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
        from lengthwise.predict.save import packed

        inner, of_inner = packed(self.inner)
        prior, of_prior = packed(self.prior)
        meta = {"inner": inner, "prior": prior, "most_tokens": self.most_tokens}
        return meta, prefixed("inner", of_inner) | prefixed("prior", of_prior)

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The predictor that was saved, with nothing counted."""
        from lengthwise.predict.save import unpacked

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
