"""The predictor to beat: one length for every request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict._state import State, fitted
from lengthwise.predict._survival import mean_length
from lengthwise.predict.contract import Ints, Prompts, Samples
from lengthwise.predict.distribution import LengthDistribution
from lengthwise.schema.errors import InputError


class Constant:
    """The same length for every request.

    Args:
        tokens: The length; None: the mean of the lengths that it is fitted on, cut ones by
            Kaplan and Meier.
    """

    kind: ClassVar[str] = "constant"
    asks_once: ClassVar[bool] = True

    def __init__(self, tokens: float | None = None) -> None:
        if tokens is not None and not 1 <= tokens < np.inf:
            raise InputError(f"tokens must be at least 1 and finite; it is {tokens}")
        self.tokens = tokens
        self.tokens_ = tokens

    def fit(self, samples: Samples) -> Self:
        """Learns the mean, unless a length was given."""
        if self.tokens is None:
            self.tokens_ = mean_length(samples.output_tokens, samples.censored)
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """The length, as if it were certain; a tail for what has outlived it."""
        tokens = fitted(self, "tokens_")
        return LengthDistribution.point(np.full(len(prompts), tokens)).given(tokens_so_far)

    def state(self) -> State:
        """What is saved."""
        return {"tokens": self.tokens, "tokens_": fitted(self, "tokens_")}, {}

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The predictor that was saved."""
        del arrays
        loaded = cls(meta["tokens"])
        loaded.tokens_ = cls(meta["tokens_"]).tokens
        return loaded
