"""The interface of predictors: the prompts that they see, the samples that they learn from, and the protocol."""

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

_COLUMNS = ("text", "prompt_tokens", "model", "output_so_far", "earlier_tokens")


@dataclass(frozen=True)
class Prompts:
    """n requests as a predictor sees them, in columns of n values; an unknown column is None.

    ``text`` are the prompts, and ``prompt_tokens`` their lengths in tokens. ``model`` are the names of the models that
    serve the requests; a None in it becomes "unknown". ``output_so_far`` are the texts generated so far, for predictors
    that read them. ``earlier_tokens`` [n, turns] are the output lengths of the session's earlier requests, the latest
    one in the last column; NaN stands for no request.
    """

    size: int
    text: Sequence[str] | None = None
    prompt_tokens: Ints | None = None
    model: Sequence[str] | None = None
    output_so_far: Sequence[str] | None = None
    earlier_tokens: npt.NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return self.size

    def __post_init__(self) -> None:
        for column in _COLUMNS:
            value = getattr(self, column)
            if value is not None and len(value) != self.size:
                raise InputError(f"{column} must have one value per request ({self.size}); it has {len(value)}")
        if self.model is not None and any(name is None for name in self.model):
            object.__setattr__(self, "model", ["unknown" if name is None else name for name in self.model])
        if self.prompt_tokens is not None:
            object.__setattr__(self, "prompt_tokens", whole_numbers("prompt_tokens", self.prompt_tokens))

    def take(self, rows: Ints) -> Prompts:
        """Return the prompts of the requests with the indices ``rows``, in this order."""
        return replace(self, size=len(rows), **{name: _taken(getattr(self, name), rows) for name in _COLUMNS})


@dataclass(frozen=True)
class Samples:
    """n finished requests to learn from.

    ``prompts`` are the requests before generation. ``output_tokens`` [n] are the numbers of generated tokens, at least
    1. ``output`` [n] are the generated texts, for predictors that read partial output. ``censored`` [n] is whether the
    output was cut off (``finish_reason = "length"``), so that the true length is at least ``output_tokens``.
    ``group`` [n] are the numbers of groups of requests that are alike, such as sessions: a split and a bootstrap take
    complete groups. If it is None, requests with the same prompt are a group, and without texts each request is one.
    ``metadata`` describes where the samples come from, for the model card of a predictor trained on them.
    """

    prompts: Prompts
    output_tokens: Ints
    censored: npt.NDArray[np.bool_]
    output: Sequence[str] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    group: Ints | None = None

    def __len__(self) -> int:
        return len(self.output_tokens)

    def __post_init__(self) -> None:
        n = len(self.prompts)
        for column in ("output_tokens", "censored", "output", "group"):
            value = getattr(self, column)
            if value is not None and len(value) != n:
                raise InputError(f"{column} must have one value per request ({n}); it has {len(value)}")
        if n == 0:
            raise InputError("there must be at least one sample to learn from; there is none")
        object.__setattr__(self, "output_tokens", whole_numbers("output_tokens", self.output_tokens))
        object.__setattr__(self, "censored", np.asarray(self.censored, bool))
        if (self.output_tokens < 1).any():
            row = int(np.argmax(self.output_tokens < 1))
            raise InputError(f"output_tokens must be at least 1; sample {row} has {self.output_tokens[row]}")

    def take(self, rows: Ints) -> Samples:
        """Return the samples with the indices ``rows``, in this order."""
        columns = {name: _taken(getattr(self, name), rows) for name in ("output_tokens", "censored", "output", "group")}
        return replace(self, prompts=self.prompts.take(rows), **columns)


def _taken(values: Any, rows: Ints) -> Any:
    if values is None or isinstance(values, np.ndarray):
        return values if values is None else values[rows]
    return [values[row] for row in rows]


@runtime_checkable
class Predictor(Protocol):
    """A predictor maps prompts and the tokens so far to distributions of the output length.

    As in scikit-learn, ``__init__`` stores the parameters unchanged, ``fit`` learns and returns the predictor itself,
    and learned attributes end with an underscore.
    """

    def fit(self, samples: Samples) -> Self:
        """Learn from finished requests."""

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """Return the distribution of each request's total output length, given that this exceeds ``tokens_so_far``.

        Without ``prompts.output_so_far``, the result is ``predict(prompts).given(tokens_so_far)``. The text so far
        changes the result only if the predictor's attribute ``reads_output`` is a pair (first, last) and the tokens so
        far are within this range. If the attribute is None or absent, the predictor never reads the output.
        """


def rows_reading_output(predictor: object, prompts: Prompts, tokens_so_far: Ints) -> Ints:
    """Return the indices of the requests for which the predictor reads the output so far."""
    span, texts = getattr(predictor, "reads_output", None), prompts.output_so_far
    if span is None or texts is None:
        return np.empty(0, np.int64)
    inside = (tokens_so_far >= max(1, span[0])) & (tokens_so_far <= span[1])
    return np.flatnonzero(inside & np.array([bool(text) for text in texts], bool))


def with_output(prompts: Prompts, output: Sequence[str] | None, output_tokens: Ints, tokens_so_far: Ints) -> Prompts:
    """Return the prompts, with the text of each output's first ``tokens_so_far`` tokens as ``output_so_far``."""
    if output is None:
        return prompts
    so_far = np.broadcast_to(np.asarray(tokens_so_far), (len(output_tokens),))
    parts = zip(output, output_tokens, so_far, strict=True)
    return replace(prompts, output_so_far=[text_so_far(text, int(y), int(a)) for text, y, a in parts])


def whole_numbers(column: str, values: Any) -> Ints:
    """Return the values as int64. Raises InputError, which names the ``column``, if one is not an integer."""
    numbers = np.asarray(values)
    if numbers.dtype.kind not in "iu":
        try:
            as_floats = np.asarray(values, np.float64)
        except (TypeError, ValueError):
            invalid = next((value for value in values if not _is_number(value)), values)
            raise InputError(f"{column} must be whole numbers; among them is {invalid!r:.60}") from None
        good = np.isfinite(as_floats) & (as_floats == np.floor(as_floats))
        if not good.all():
            row = int(np.argmin(good))
            raise InputError(f"{column} must be whole numbers; row {row} has {as_floats[row]}")
    return numbers.astype(np.int64)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def by_prompt(texts: Sequence[str]) -> tuple[list[str], Ints]:
    """Return the distinct prompts, and each text's index among them, [n]. Case and outer spaces are ignored."""
    folded = np.array([text.strip().casefold() for text in texts], object)
    distinct, at = np.unique(folded, return_inverse=True)
    return [str(text) for text in distinct], at.reshape(-1)


def groups_of(samples: Samples) -> Ints:
    """Return [n] the number of each sample's group, from 0, by ``Samples.group``, else by prompt, else by sample."""
    if samples.group is not None:
        return np.unique(samples.group, return_inverse=True)[1].reshape(-1)
    text = samples.prompts.text
    return np.arange(len(samples)) if text is None else by_prompt(text)[1]


def split_rows(samples: Samples, share: float, seed: int) -> tuple[Ints, Ints]:
    """Return the indices of training samples and of held-out samples.

    About ``share`` of the groups (see ``Samples``), drawn with ``seed``, are held out. Raises InputError below two.
    """
    groups = groups_of(samples)
    count = int(groups.max()) + 1
    if count < 2:
        raise InputError(f"samples of at least two prompts are needed to hold some out; there is {count}")
    is_held_out = np.zeros(count, bool)
    number = max(1, min(count - 1, round(count * share)))
    is_held_out[np.random.default_rng(seed).permutation(count)[:number]] = True
    return np.flatnonzero(~is_held_out[groups]), np.flatnonzero(is_held_out[groups])
