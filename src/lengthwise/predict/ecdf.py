"""Lengths as a model's outputs were before: the empirical distribution, one a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict._state import State, fitted, quantile_table
from lengthwise.predict._survival import length_quantiles
from lengthwise.predict.contract import Ints, Prompts, Samples
from lengthwise.predict.distribution import LEVELS, LengthDistribution
from lengthwise.schema.errors import InputError


class Ecdf:
    """The empirical distribution of the model's output lengths (SamuLLM).

    A model that was not seen, or a request whose model nobody knows, has the distribution of all.
    Cut outputs count as Kaplan and Meier say.
    """

    kind: ClassVar[str] = "ecdf"
    asks_once: ClassVar[bool] = True

    def fit(self, samples: Samples) -> Self:
        """Learns a distribution a model, and that of all."""
        models = np.asarray(samples.prompts.model if samples.prompts.model is not None else [], dtype=object)
        names = sorted({str(model) for model in models})
        parts = [models == name for name in names]
        rows = [np.ones(len(samples), bool), *parts]
        self.models_ = names
        self.table_ = np.array(
            [length_quantiles(samples.output_tokens[r], samples.censored[r], LEVELS) for r in rows]
        )
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """The distribution of each request's model."""
        table = fitted(self, "table_")
        at = {name: row for row, name in enumerate(self.models_, start=1)}
        rows = (
            np.zeros(len(prompts), int)
            if prompts.model is None
            else np.fromiter((at.get(model, 0) for model in prompts.model), int, len(prompts))
        )
        return LengthDistribution(table, LEVELS).take(rows).given(tokens_so_far)

    def state(self) -> State:
        """What is saved."""
        table = fitted(self, "table_")
        return {"models": self.models_}, {"table": table}

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The predictor that was saved."""
        loaded = cls()
        loaded.models_ = [str(name) for name in meta["models"]]
        loaded.table_ = quantile_table(arrays, "table", len(LEVELS))
        if len(loaded.table_) != len(loaded.models_) + 1:
            raise InputError(f"table must have a row a model and one of all; it has {len(loaded.table_)}")
        return loaded
