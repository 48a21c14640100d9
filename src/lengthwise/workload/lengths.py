"""How long requests are: models that draw prompt and output lengths in pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import pi, sin, sqrt
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload
from lengthwise.workload.distributions import Floats, Marginal

Ints = npt.NDArray[np.int64]

Cut = Literal["output", "prompt", "proportional", "redraw"]

_BLOCK = 1 << 18  # draws at a time: the temporaries stay in the cache, and ten million requests in memory
_REDRAWS = 200


TEXTS = ("prompt", "output", "model")
"""Columns of a workload that are drawn with its lengths: what predictors read."""


class Lengths(Protocol):
    """Anything that draws pairs of lengths."""

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Prompt and output tokens of ``n`` requests, [n] int64 each, at least 1."""
        ...


@dataclass(frozen=True, eq=False)
class Drawn:
    """Pairs of lengths, and the texts of the same requests where the model has any.

    Attributes:
        prompt: [n] prompt tokens.
        output: [n] output tokens.
        texts: Columns of [n] texts under their names in a workload's ``extra``.
    """

    prompt: Ints
    output: Ints
    texts: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


def draw(lengths: Lengths, n: int, rng: np.random.Generator) -> Drawn:
    """What ``lengths.sample`` draws, with texts where the model has a method ``draw`` that gives them."""
    whole = getattr(lengths, "draw", None)
    drawn: Drawn = Drawn(*lengths.sample(n, rng)) if whole is None else whole(n, rng)
    return drawn


@dataclass(frozen=True)
class Joint:
    """Two marginals tied by a Gaussian copula.

    ``correlation`` is Spearman's: the correlation of the ranks, which a copula can set whatever the
    marginals are. The normals behind it correlate by ``2 sin(pi r / 6)``. Ties of rounded lengths and
    later cuts weaken it a little. Prompts do not depend on the correlation, and the first k requests
    do not depend on n.

    Attributes:
        prompt: Distribution of prompt tokens.
        output: Distribution of output tokens.
        correlation: -1 to 1.
    """

    prompt: Marginal
    output: Marginal
    correlation: float = 0.0

    def __post_init__(self) -> None:
        if not -1 <= self.correlation <= 1:
            raise InputError(f"a rank correlation lies within -1 to 1; it is {self.correlation}")

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Prompt and output tokens, [n] int64 each, at least 1."""
        return _draw(n, rng, self.prompt, lambda u, v: self.output.quantile(self._tie(u, v)))

    def _tie(self, u: Floats, v: Floats) -> Floats:
        if self.correlation == 0:
            return v
        from scipy.special import ndtr, ndtri

        r = 2 * sin(pi * self.correlation / 6)
        tied: Floats = ndtr(r * ndtri(u) + sqrt(max(1 - r * r, 0.0)) * ndtri(v))
        return np.clip(tied, 2.0**-54, 1 - 2.0**-53)


@dataclass(frozen=True)
class Conditional:
    """Outputs whose distribution depends on how long the prompt is among the prompts.

    This keeps what a correlation cannot say, such as long outputs that come with short prompts only.

    Attributes:
        prompt: Distribution of prompt tokens.
        outputs: Distribution of output tokens in each of equally likely classes of prompts, from the
            shortest prompts to the longest; at least one.
    """

    prompt: Marginal
    outputs: Sequence[Marginal]

    def __post_init__(self) -> None:
        if not self.outputs:
            raise InputError("a conditional model needs at least one distribution of outputs")

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Prompt and output tokens, [n] int64 each, at least 1."""
        return _draw(n, rng, self.prompt, self._given)

    def _given(self, u: Floats, v: Floats) -> Floats:
        tokens = np.empty(len(u))
        classes = (u * len(self.outputs)).astype(np.int64)
        for number, marginal in enumerate(self.outputs):
            rows = np.flatnonzero(classes == number)
            tokens[rows] = marginal.quantile(v[rows])
        return tokens


@dataclass(frozen=True, eq=False)
class Samples:
    """Pairs that were seen, drawn again with replacement; their joint distribution is kept as it is.

    Attributes:
        prompt: [m] prompt tokens, at least 1.
        output: [m] output tokens, at least 1.
        texts: Columns of [m] texts that are drawn with them: "prompt", "output", "model".
    """

    prompt: Sequence[int] | Ints
    output: Sequence[int] | Ints
    texts: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prompt, output = np.asarray(self.prompt), np.asarray(self.output)
        if prompt.ndim != 1 or prompt.shape != output.shape or prompt.size == 0:
            raise InputError(f"samples must be pairs; got {prompt.size} prompts and {output.size} outputs")
        if not (prompt >= 1).all() or not (output >= 1).all():
            raise InputError("sampled lengths must be at least 1 token")
        if any(len(column) != prompt.size for column in self.texts.values()):
            raise InputError(f"there must be a text a sample ({prompt.size}) in every column of texts")

    @classmethod
    def of(cls, workload: Workload) -> Samples:
        """The pairs of a workload, such as one read from a trace, with its texts."""
        texts = {name: workload.extra[name] for name in TEXTS if name in workload.extra}
        return cls(workload.prompt_tokens, workload.output_tokens, texts)

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Prompt and output tokens, [n] int64 each."""
        drawn = self.draw(n, rng)
        return drawn.prompt, drawn.output

    def draw(self, n: int, rng: np.random.Generator) -> Drawn:
        """Lengths and texts of the same rows."""
        prompt, output = np.asarray(self.prompt, np.int64), np.asarray(self.output, np.int64)
        rows = rng.integers(0, len(prompt), n)
        texts = {name: np.asarray(column, object)[rows] for name, column in self.texts.items()}
        return Drawn(prompt[rows], output[rows], texts)


@dataclass(frozen=True)
class Capped:
    """Another model's pairs, kept within limits.

    ``max_prompt_tokens`` and ``max_output_tokens`` cut each side. What is then left above
    ``max_total_tokens`` goes by ``cut``: "output" first and then the prompt, as an engine ends a
    request at its context length; "prompt" first; "proportional", where each side gives its share
    of the excess, rounded up, as Vidur cuts a trace; or "redraw", where a pair above any limit is
    drawn again, as data sets are filtered. No side falls below 1.

    Attributes:
        lengths: The model whose pairs are cut.
        max_total_tokens: Limit of prompt plus output, at least 2; None has no limit.
        max_prompt_tokens: Limit of the prompt.
        max_output_tokens: Limit of the output.
        cut: Which side gives.
    """

    lengths: Lengths
    max_total_tokens: int | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    cut: Cut = "output"

    def __post_init__(self) -> None:
        limits = {"max_total_tokens": 2, "max_prompt_tokens": 1, "max_output_tokens": 1}
        for name, least in limits.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} must be at least {least}; it is {value}")
        if self.cut not in ("output", "prompt", "proportional", "redraw"):
            raise InputError(f"cut must be output, prompt, proportional or redraw; it is {self.cut!r}")

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Prompt and output tokens within the limits, [n] int64 each.

        Raises:
            InputError: With "redraw", next to no pair lies within the limits.
        """
        drawn = self.draw(n, rng)
        return drawn.prompt, drawn.output

    def draw(self, n: int, rng: np.random.Generator) -> Drawn:
        """Lengths within the limits with their texts; that of an output is cut with it."""
        drawn = draw(self.lengths, n, rng)
        if self.cut == "redraw":
            return self._redraw(drawn, rng)
        whole = drawn.output.copy()
        np.minimum(drawn.prompt, self.max_prompt_tokens or drawn.prompt, out=drawn.prompt)
        np.minimum(drawn.output, self.max_output_tokens or drawn.output, out=drawn.output)
        if self.max_total_tokens is not None:
            self._trim(drawn.prompt, drawn.output, self.max_total_tokens)
        return Drawn(drawn.prompt, drawn.output, _cut_texts(drawn, whole))

    def _trim(self, prompt: Ints, output: Ints, limit: int) -> None:
        rows = np.flatnonzero(prompt + output > limit)
        p, o = prompt[rows], output[rows]
        excess = p + o - limit
        if self.cut == "proportional":
            # Integers: ceil(excess * p / (p + o)) without a rounding of the share.
            p, o = p + -excess * p // (p + o), o + -excess * o // (p + o)
        elif self.cut == "output":
            o = np.maximum(o - excess, 1)
        else:
            p = np.maximum(p - excess, 1)
        p, o = np.maximum(p, 1), np.maximum(o, 1)
        p = np.minimum(p, np.maximum(limit - o, 1))
        prompt[rows], output[rows] = p, np.minimum(o, limit - p)

    def _redraw(self, drawn: Drawn, rng: np.random.Generator) -> Drawn:
        bad = np.flatnonzero(self._above(drawn.prompt, drawn.output))
        for _ in range(_REDRAWS):
            if len(bad) == 0:
                return drawn
            more = draw(self.lengths, len(bad), rng)
            drawn.prompt[bad], drawn.output[bad] = more.prompt, more.output
            for name, column in more.texts.items():
                drawn.texts[name][bad] = column
            bad = bad[self._above(more.prompt, more.output)]
        raise InputError(
            f"after {_REDRAWS} draws {len(bad)} requests still lie above the limits; raise the limits, or cut"
        )

    def _above(self, prompt: Ints, output: Ints) -> npt.NDArray[np.bool_]:
        above = np.zeros(len(prompt), bool)
        if self.max_total_tokens is not None:
            above |= prompt + output > self.max_total_tokens
        if self.max_prompt_tokens is not None:
            above |= prompt > self.max_prompt_tokens
        if self.max_output_tokens is not None:
            above |= output > self.max_output_tokens
        return above


def _cut_texts(drawn: Drawn, complete: Ints) -> dict[str, npt.NDArray[Any]]:
    """The texts, those of outputs that lost tokens shortened in proportion."""
    texts = dict(drawn.texts)
    rows = np.flatnonzero(drawn.output < complete)
    if "output" in texts and len(rows):
        texts["output"] = texts["output"].copy()
        for row in rows:
            text = str(texts["output"][row] or "")
            texts["output"][row] = text[: int(len(text) * drawn.output[row] / complete[row])]
    return texts


def _draw(
    n: int, rng: np.random.Generator, prompt: Marginal, output: Callable[[Floats, Floats], Floats]
) -> tuple[Ints, Ints]:
    """Pairs from a prompt marginal at levels u and an output that is a function of u and fresh levels v."""
    prompt_rng, output_rng = rng.spawn(2)
    prompts, outputs = np.empty(n, np.int64), np.empty(n, np.int64)
    for start in range(0, n, _BLOCK):
        block = slice(start, min(start + _BLOCK, n))
        u, v = (_uniform(stream, block.stop - start) for stream in (prompt_rng, output_rng))
        prompts[block], outputs[block] = _complete(prompt.quantile(u)), _complete(output(u, v))
    return prompts, outputs


def _uniform(rng: np.random.Generator, n: int) -> Floats:
    """Levels strictly between 0 and 1, so that no quantile is infinite."""
    return np.maximum(rng.random(n), 2.0**-54)


def _complete(tokens: Floats) -> Ints:
    return np.maximum(np.rint(tokens), 1).astype(np.int64)
