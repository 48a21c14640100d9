"""Several predictors as one: the weighted mean of their quantiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict._holdout import split
from lengthwise.predict._state import State, array, fitted, prefixed, within
from lengthwise.predict.contract import Ints, Predictor, Prompts, Samples
from lengthwise.predict.distribution import LEVELS, Floats, LengthDistribution
from lengthwise.schema.errors import InputError

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
        self,
        members: Sequence[Predictor],
        weights: Sequence[float] | None = None,
        share: float = 0.25,
        seed: int = 0,
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
                tokens += (
                    weight * member.predict(prompts, tokens_so_far).given(tokens_so_far).at(LEVELS).tokens
                )
        return LengthDistribution.of(tokens)

    def state(self) -> State:
        """What is saved."""
        from lengthwise.predict.save import packed

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
        from lengthwise.predict.save import unpacked

        members = [
            unpacked(part, within(f"member{number}", arrays)) for number, part in enumerate(meta["members"])
        ]
        loaded = cls(members, meta["weights"], meta["share"], meta["seed"])
        loaded.weights_ = _normal(array(arrays, "weights", 1), len(members))
        return loaded


def _normal(weights: npt.ArrayLike, members: int) -> Floats:
    given = np.asarray(weights, float)
    if given.shape != (members,) or not np.isfinite(given).all() or (given < 0).any() or given.sum() <= 0:
        raise InputError(
            f"weights must be {members} numbers, not negative, not all 0; they are {given.tolist()}"
        )
    return np.asarray(given / given.sum())


def pinball(tokens: Floats, samples: Samples) -> float:
    """Mean pinball loss of quantiles [n, LEVELS]; of cut outputs the part that is certain."""
    return float(_loss(tokens, samples)[0])


def _least_loss(said: Floats, held: Samples) -> Floats:
    """[m] weights by exponentiated gradient; the loss is convex in them."""
    weights = np.full(len(said), 1 / len(said))
    mean, scale = np.zeros(len(said)), max(pinball(said.mean(axis=0), held), 1e-9)
    for step in range(_STEPS):
        _, slope = _loss(np.tensordot(weights, said, 1), held)
        gradient = (said * slope).mean(axis=(1, 2)) / scale
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
