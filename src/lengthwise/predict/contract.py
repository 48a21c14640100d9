"""What a predictor is given, and what it must answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from lengthwise.predict.distribution import LengthDistribution
from lengthwise.predict.features import text_so_far
from lengthwise.schema.errors import InputError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Prompts:
    """n requests as a predictor sees them; a column that nobody knows is None.

    Attributes:
        size: How many requests there are.
        text: [n] the prompt.
        prompt_tokens: [n] int64, its length in tokens.
        model: [n] the name of the model that will answer; None, where nobody knows it, becomes "unknown".
        output_so_far: [n] text of the tokens that have come, for predictors that read it.
    """

    size: int
    text: Sequence[str] | None = None
    prompt_tokens: Ints | None = None
    model: Sequence[str] | None = None
    output_so_far: Sequence[str] | None = None

    def __len__(self) -> int:
        return self.size

    def __post_init__(self) -> None:
        for column in _COLUMNS:
            value = getattr(self, column)
            if value is not None and len(value) != self.size:
                raise InputError(f"{column} must have one value a request ({self.size}); it has {len(value)}")
        if self.model is not None and any(name is None for name in self.model):
            named = ["unknown" if name is None else name for name in self.model]
            object.__setattr__(self, "model", named)
        if self.prompt_tokens is not None:
            object.__setattr__(self, "prompt_tokens", whole_numbers("prompt_tokens", self.prompt_tokens))

    def take(self, rows: Ints) -> Prompts:
        """Some of the requests, in the order of ``rows``."""
        columns = {name: _taken(getattr(self, name), rows) for name in _COLUMNS}
        return replace(self, size=len(rows), **columns)


@dataclass(frozen=True)
class Samples:
    """n finished requests to learn from.

    Attributes:
        prompts: What was known before.
        output_tokens: [n] int64, at least 1: tokens that came.
        censored: [n] bool: the output was cut (``finish_reason = "length"``), the true length is
            at least ``output_tokens``.
        output: [n] text of the output, for predictors that read partial output.
        metadata: Where they come from, for the card of what is trained on them.
    """

    prompts: Prompts
    output_tokens: Ints
    censored: npt.NDArray[np.bool_]
    output: Sequence[str] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.output_tokens)

    def __post_init__(self) -> None:
        n = len(self.prompts)
        for column in ("output_tokens", "censored", "output"):
            value = getattr(self, column)
            if value is not None and len(value) != n:
                raise InputError(f"{column} must have one value a request ({n}); it has {len(value)}")
        if n == 0:
            raise InputError("there must be at least one sample to learn from; there is none")
        object.__setattr__(self, "output_tokens", whole_numbers("output_tokens", self.output_tokens))
        object.__setattr__(self, "censored", np.asarray(self.censored, bool))
        if (self.output_tokens < 1).any():
            row = int(np.argmax(self.output_tokens < 1))
            raise InputError(f"output_tokens must be at least 1; sample {row} has {self.output_tokens[row]}")

    def take(self, rows: Ints) -> Samples:
        """Some of the samples, in the order of ``rows``."""
        return replace(
            self,
            prompts=self.prompts.take(rows),
            output_tokens=self.output_tokens[rows],
            censored=self.censored[rows],
            output=_taken(self.output, rows),
        )


@runtime_checkable
class Predictor(Protocol):
    """From prompts, and the tokens so far, to distributions of the output length.

    As in scikit-learn: parameters go to ``__init__`` and stay as they are, ``fit`` learns and
    returns the predictor, what it learnt ends in an underscore.
    """

    def fit(self, samples: Samples) -> Self:
        """Learns from finished requests."""
        ...

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """The distribution of each request's whole output length, given that it is above ``tokens_so_far``."""
        ...


def partial(prompts: Prompts, output: Sequence[str] | None, output_tokens: Ints, tokens_so_far: Ints) -> Prompts:
    """The requests as they are known once some tokens have come: with that share of the output's text."""
    if output is None:
        return prompts
    so_far = np.broadcast_to(np.asarray(tokens_so_far), (len(output_tokens),))
    parts = zip(output, output_tokens, so_far, strict=True)
    return replace(prompts, output_so_far=[text_so_far(text, int(y), int(a)) for text, y, a in parts])


def whole_numbers(column: str, values: Any) -> Ints:
    """The values as int64; InputError where one is no whole number."""
    numbers = np.asarray(values)
    if numbers.dtype.kind not in "iu":
        try:
            as_floats = np.asarray(values, np.float64)
        except (TypeError, ValueError):
            raise InputError(f"{column} must be whole numbers; among them is {_no_number(values)!r:.60}") from None
        good = np.isfinite(as_floats) & (as_floats == np.floor(as_floats))
        if not good.all():
            row = int(np.argmin(good))
            raise InputError(f"{column} must be whole numbers; row {row} has {as_floats[row]}")
    return numbers.astype(np.int64)


def _no_number(values: Any) -> Any:
    """The first of the values that is no number, or all of them."""
    for value in values:
        try:
            float(value)
        except (TypeError, ValueError):
            return value
    return values


_COLUMNS = ("text", "prompt_tokens", "model", "output_so_far")


def _taken(values: Any, rows: Ints) -> Any:
    if values is None or isinstance(values, np.ndarray):
        return values if values is None else values[rows]
    return [values[row] for row in rows]


def by_prompt(texts: Sequence[str]) -> tuple[list[str], Ints]:
    """Different prompts, and [n] which one each text is: edges and case do not matter."""
    folded = np.array([text.strip().casefold() for text in texts], object)
    distinct, at = np.unique(folded, return_inverse=True)
    return [str(text) for text in distinct], at.reshape(-1)


def split(samples: Samples, share: float, seed: int) -> tuple[Ints, Ints]:
    """Rows to learn from and rows held out, about ``share`` of all; equal prompts are on the same side.

    Raises:
        InputError: Too few samples, or prompts, for two parts.
    """
    text = samples.prompts.text
    groups = np.arange(len(samples)) if text is None else by_prompt(text)[1]
    many = int(groups.max()) + 1
    if many < 2:
        raise InputError(f"samples of at least two prompts are needed to hold some out; there is {many}")
    held = max(1, min(many - 1, round(many * share)))
    out = np.zeros(many, bool)
    out[np.random.default_rng(seed).permutation(many)[:held]] = True
    return np.flatnonzero(~out[groups]), np.flatnonzero(out[groups])
