"""Baselines: one length for all requests, or an empirical distribution for each group of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints, Prompts, Samples
from lengthwise.predict.distribution import LEVELS, Floats, LengthDistribution, length_quantiles, mean_length
from lengthwise.predict.serialization import State, array, fitted, quantile_table
from lengthwise.schema.errors import InputError, UnknownNameError


class Constant:
    """Predicts ``tokens`` for every request; None stands for the mean of the training lengths (Kaplan-Meier)."""

    kind: ClassVar[str] = "constant"
    predicts_once: ClassVar[bool] = True

    def __init__(self, tokens: float | None = None) -> None:
        if tokens is not None and not 1 <= tokens < np.inf:
            raise InputError(f"tokens must be at least 1 and finite; it is {tokens}")
        self.tokens = tokens
        self.tokens_ = tokens

    def fit(self, samples: Samples) -> Self:
        """Learn the mean length, unless a length was given."""
        if self.tokens is None:
            self.tokens_ = mean_length(samples.output_tokens, samples.censored)
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """Return the length with probability 1; requests that have reached it get a Pareto tail."""
        tokens = fitted(self, "tokens_")
        return LengthDistribution.point(np.full(len(prompts), tokens)).given(tokens_so_far)

    def state(self) -> State:
        """Return the JSON values and the arrays from which ``from_state`` restores the predictor."""
        return {"tokens": self.tokens, "tokens_": fitted(self, "tokens_")}, {}

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], _arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Return the predictor from the JSON values and the arrays that ``state`` returned."""
        loaded = cls(meta["tokens"])
        loaded.tokens_ = cls(meta["tokens_"]).tokens
        return loaded


class Ecdf:
    """Predicts the empirical distribution of the output lengths of the request's model (SamuLLM).

    Requests of an unknown model get the distribution of all samples. Censored lengths are lower bounds (Kaplan-Meier).
    """

    kind: ClassVar[str] = "ecdf"
    predicts_once: ClassVar[bool] = True

    def fit(self, samples: Samples) -> Self:
        """Learn the distribution of each model, and the distribution of all samples."""
        models = np.asarray(samples.prompts.model if samples.prompts.model is not None else [], dtype=object)
        self.models_ = sorted({str(model) for model in models})
        rows = [np.ones(len(samples), bool), *(models == name for name in self.models_)]
        self.table_ = np.array([length_quantiles(samples.output_tokens[r], samples.censored[r], LEVELS) for r in rows])
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """Return the distribution of each request's model."""
        table = fitted(self, "table_")
        at = {name: row for row, name in enumerate(self.models_, start=1)}
        rows = [0] * len(prompts) if prompts.model is None else [at.get(model, 0) for model in prompts.model]
        return LengthDistribution(table, LEVELS).take(np.array(rows, int)).given(tokens_so_far)

    def state(self) -> State:
        """Return the JSON values and the arrays from which ``from_state`` restores the predictor."""
        table = fitted(self, "table_")
        return {"models": self.models_}, {"table": table}

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Return the predictor from the JSON values and the arrays that ``state`` returned."""
        loaded = cls()
        loaded.models_ = [str(name) for name in meta["models"]]
        loaded.table_ = quantile_table(arrays, "table", len(LEVELS))
        if len(loaded.table_) != len(loaded.models_) + 1:
            raise InputError(f"table must have one row per model and one for all; it has {len(loaded.table_)}")
        return loaded


FEATURES = ("model", "prompt_chars", "prompt_tokens")
Key = tuple[int, ...]


class BucketEcdf:
    """Predicts the empirical distribution of the training requests in the same bucket of features.

    ``by`` names the features, the most informative one first: "model", "prompt_tokens", "prompt_chars" (characters of
    the text). A numeric feature is divided into ``buckets`` intervals with equal numbers of samples. The parent of a
    bucket is the bucket without the last feature; the last parent has all samples. The quantiles of a bucket with n
    samples have the weight n / (n + ``shrink``), those of its parent the rest. A bucket without samples has the
    distribution of its nearest parent that has some.
    """

    kind: ClassVar[str] = "bucket_ecdf"
    predicts_once: ClassVar[bool] = True

    def __init__(self, by: Sequence[str] = ("model", "prompt_tokens"), buckets: int = 8, shrink: float = 32.0) -> None:
        for feature in by:
            if feature not in FEATURES:
                raise UnknownNameError("feature of a bucket", feature, FEATURES)
        if buckets < 1 or not 0 <= shrink < np.inf:
            raise InputError(f"buckets must be at least 1 and shrink not negative; got {buckets} and {shrink}")
        self.by, self.buckets, self.shrink = tuple(by), buckets, float(shrink)

    def fit(self, samples: Samples) -> Self:
        """Learn the boundaries of the buckets, and the distribution of each bucket."""
        prompts = samples.prompts
        self.models_ = sorted({str(model) for model in prompts.model or ()})
        inner = np.linspace(0, 1, self.buckets + 1)[1:-1]
        columns = {name: _feature_values(name, prompts) for name in self.by if name != "model"}
        self.cuts_ = {
            name: np.zeros(0) if values is None else np.unique(np.quantile(values, inner))
            for name, values in columns.items()
        }
        codes = self._codes(prompts)
        self.cells_: dict[Key, int] = {(): 0}
        table = [length_quantiles(samples.output_tokens, samples.censored, LEVELS)]
        for depth in range(1, len(self.by) + 1):
            keys, member = np.unique(codes[:, :depth], axis=0, return_inverse=True)
            for number, key in enumerate(keys):
                rows = member.reshape(-1) == number
                own = length_quantiles(samples.output_tokens[rows], samples.censored[rows], LEVELS)
                share = rows.sum() / (rows.sum() + self.shrink)
                parent = table[self.cells_[tuple(map(int, key[:-1]))]]
                self.cells_[tuple(map(int, key))] = len(table)
                table.append(share * own + (1 - share) * parent)
        self.table_ = np.array(table)
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """Return the distribution of each request's bucket."""
        table = fitted(self, "table_")
        keys, member = np.unique(self._codes(prompts), axis=0, return_inverse=True)
        prefixes = ([tuple(map(int, key[:d])) for d in range(len(key), -1, -1)] for key in keys)
        cells = [next(self.cells_[prefix] for prefix in some if prefix in self.cells_) for some in prefixes]
        return LengthDistribution(table, LEVELS).take(np.array(cells, int)[member.reshape(-1)]).given(tokens_so_far)

    def _codes(self, prompts: Prompts) -> Ints:
        """Return the bucket [n, features] of each request by each feature; -1 if the feature is unknown."""
        codes = np.full((len(prompts), len(self.by)), -1)
        for column, name in enumerate(self.by):
            if name == "model":
                at = {model: number for number, model in enumerate(self.models_)}
                codes[:, column] = [at.get(model, -1) for model in prompts.model or ()] or -1
            elif (values := _feature_values(name, prompts)) is not None:
                codes[:, column] = np.searchsorted(self.cuts_[name], values, side="right")
        return codes

    def state(self) -> State:
        """Return the JSON values and the arrays from which ``from_state`` restores the predictor."""
        table = fitted(self, "table_")
        meta = {"by": self.by, "buckets": self.buckets, "shrink": self.shrink, "models": self.models_}
        cells = [list(key) for key, _ in sorted(self.cells_.items(), key=lambda cell: cell[1])]
        cuts = {f"cuts_{name}": cuts for name, cuts in self.cuts_.items()}
        return meta | {"cells": cells}, {"table": table, **cuts}

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Return the predictor from the JSON values and the arrays that ``state`` returned."""
        loaded = cls(meta["by"], meta["buckets"], meta["shrink"])
        loaded.models_ = [str(name) for name in meta["models"]]
        loaded.cells_ = {tuple(map(int, key)): row for row, key in enumerate(meta["cells"])}
        loaded.cuts_ = {name: array(arrays, f"cuts_{name}", 1) for name in loaded.by if name != "model"}
        loaded.table_ = quantile_table(arrays, "table", len(LEVELS))
        if len(loaded.table_) != len(loaded.cells_) or () not in loaded.cells_:
            raise InputError(f"table must have one row per bucket ({len(loaded.cells_)}); it has {len(loaded.table_)}")
        return loaded


def _feature_values(name: str, prompts: Prompts) -> Floats | None:
    if name == "prompt_tokens":
        return None if prompts.prompt_tokens is None else prompts.prompt_tokens.astype(float)
    return None if prompts.text is None else np.array([len(text) for text in prompts.text], float)
