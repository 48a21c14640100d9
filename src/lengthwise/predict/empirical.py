"""The predictor to beat: one length for every request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints, Prompts, Samples
from lengthwise.predict.distribution import LEVELS, LengthDistribution, length_quantiles, mean_length
from lengthwise.predict.serialization import State, array, fitted, quantile_table
from lengthwise.schema.errors import InputError, UnknownNameError


class Constant:
    """The same length for every request.

    Args:
        tokens: The length; None: the mean of the lengths that it is fitted on, cut ones by
            Kaplan and Meier.
    """

    kind: ClassVar[str] = "constant"
    predicts_once: ClassVar[bool] = True

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


class Ecdf:
    """The empirical distribution of the model's output lengths (SamuLLM).

    A model that was not seen, or a request whose model nobody knows, has the distribution of all.
    Cut outputs count as Kaplan and Meier say.
    """

    kind: ClassVar[str] = "ecdf"
    predicts_once: ClassVar[bool] = True

    def fit(self, samples: Samples) -> Self:
        """Learns a distribution a model, and that of all."""
        models = np.asarray(samples.prompts.model if samples.prompts.model is not None else [], dtype=object)
        names = sorted({str(model) for model in models})
        parts = [models == name for name in names]
        rows = [np.ones(len(samples), bool), *parts]
        self.models_ = names
        self.table_ = np.array([length_quantiles(samples.output_tokens[r], samples.censored[r], LEVELS) for r in rows])
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


FEATURES = ("model", "prompt_chars", "prompt_tokens")
Key = tuple[int, ...]


class BucketEcdf:
    """The empirical distribution of requests in the same bucket of features.

    A bucket with few samples is drawn towards the one around it (the same without the last
    feature), in the end towards all: its share is n / (n + ``shrink``). A bucket that was not seen
    has the distribution of the one around it.

    Args:
        by: Features, the most telling first: "model", "prompt_tokens", "prompt_chars" (of the text).
        buckets: Into how many, equally full, a number is cut.
        shrink: Samples that the bucket around counts for.
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
        """Learns where to cut, and a distribution a bucket."""
        self.models_ = sorted({str(model) for model in _models(samples.prompts)})
        self.cuts_ = {name: self._cuts(name, samples.prompts) for name in self.by if name != "model"}
        codes = self._codes(samples.prompts)
        self.cells_: dict[Key, int] = {(): 0}
        table = [length_quantiles(samples.output_tokens, samples.censored, LEVELS)]
        for depth in range(1, len(self.by) + 1):
            keys, member = np.unique(codes[:, :depth], axis=0, return_inverse=True)
            for number, key in enumerate(keys):
                rows = member.reshape(-1) == number
                own = length_quantiles(samples.output_tokens[rows], samples.censored[rows], LEVELS)
                share = rows.sum() / (rows.sum() + self.shrink)
                around = table[self.cells_[tuple(map(int, key[:-1]))]]
                self.cells_[tuple(map(int, key))] = len(table)
                table.append(share * own + (1 - share) * around)
        self.table_ = np.array(table)
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """The distribution of each request's bucket."""
        table = fitted(self, "table_")
        keys, member = np.unique(self._codes(prompts), axis=0, return_inverse=True)
        cells = np.array([self._cell(tuple(map(int, key))) for key in keys], dtype=int)
        return LengthDistribution(table, LEVELS).take(cells[member.reshape(-1)]).given(tokens_so_far)

    def _cell(self, key: Key) -> int:
        return next(self.cells_[key[:d]] for d in range(len(key), -1, -1) if key[:d] in self.cells_)

    def _cuts(self, name: str, prompts: Prompts) -> npt.NDArray[np.float64]:
        values = _numbers(name, prompts)
        inner = np.linspace(0, 1, self.buckets + 1)[1:-1]
        return np.zeros(0) if values is None else np.unique(np.quantile(values, inner))

    def _codes(self, prompts: Prompts) -> npt.NDArray[np.int64]:
        """[n, features] the bucket along each feature; -1 where nobody knows."""
        codes = np.full((len(prompts), len(self.by)), -1)
        for column, name in enumerate(self.by):
            if name == "model":
                at = {model: number for number, model in enumerate(self.models_)}
                codes[:, column] = [at.get(model, -1) for model in _models(prompts)] or -1
            elif (values := _numbers(name, prompts)) is not None:
                codes[:, column] = np.searchsorted(self.cuts_[name], values, side="right")
        return codes

    def state(self) -> State:
        """What is saved."""
        table = fitted(self, "table_")
        meta = {"by": self.by, "buckets": self.buckets, "shrink": self.shrink, "models": self.models_}
        cells = [list(key) for key, _ in sorted(self.cells_.items(), key=lambda cell: cell[1])]
        cuts = {f"cuts_{name}": cuts for name, cuts in self.cuts_.items()}
        return meta | {"cells": cells}, {"table": table, **cuts}

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """The predictor that was saved."""
        loaded = cls(meta["by"], meta["buckets"], meta["shrink"])
        loaded.models_ = [str(name) for name in meta["models"]]
        loaded.cells_ = {tuple(map(int, key)): row for row, key in enumerate(meta["cells"])}
        loaded.cuts_ = {name: array(arrays, f"cuts_{name}", 1) for name in loaded.by if name != "model"}
        loaded.table_ = quantile_table(arrays, "table", len(LEVELS))
        if len(loaded.table_) != len(loaded.cells_) or () not in loaded.cells_:
            raise InputError(f"table must have a row a bucket ({len(loaded.cells_)}); it has {len(loaded.table_)}")
        return loaded


def _models(prompts: Prompts) -> list[str]:
    return [] if prompts.model is None else list(prompts.model)


def _numbers(name: str, prompts: Prompts) -> npt.NDArray[np.float64] | None:
    if name == "prompt_tokens":
        return None if prompts.prompt_tokens is None else prompts.prompt_tokens.astype(float)
    return None if prompts.text is None else np.array([len(text) for text in prompts.text], float)
