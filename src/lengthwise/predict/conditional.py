"""What is left to come, by survival alone: the cheapest predictor that predicts again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy.typing as npt

from lengthwise.predict._state import State, prefixed, within
from lengthwise.predict.contract import Ints, Predictor, Prompts, Samples
from lengthwise.predict.distribution import LengthDistribution


class Conditional:
    """Another predictor's first word, and from then on the survival arithmetic of its distribution.

    The other is asked once, before the first token; each token that comes without an end rules out
    the shorter lengths.

    Args:
        inner: Any predictor.
    """

    kind: ClassVar[str] = "conditional"
    asks_once: ClassVar[bool] = True

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
        from lengthwise.predict.save import packed

        meta, arrays = packed(self.inner)
        return {"inner": meta}, prefixed("inner", arrays)

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The predictor that was saved."""
        from lengthwise.predict.save import unpacked

        return cls(unpacked(meta["inner"], within("inner", arrays)))
