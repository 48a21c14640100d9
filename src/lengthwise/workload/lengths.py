"""Models pairs of prompt and output lengths, and the limits that clients and engines set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import pi, sin, sqrt
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import MAX_TOKENS, UNCAPPED, Workload
from lengthwise.workload.distributions import Floats, Marginal

Ints = npt.NDArray[np.int64]

Cut = Literal["output", "prompt", "proportional", "redraw"]

_BLOCK = 1 << 18  # pairs drawn at once: temporary arrays stay in the processor's cache and need little memory
_MAX_REDRAWS = 200
TEXTS = ("prompt", "output", "model")  # text columns of a workload that are drawn with its lengths, for predictors


class Lengths(Protocol):
    """The interface of models of lengths."""

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return the prompt tokens and output tokens of ``n`` requests, [n] int64 each, at least 1."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """Drawn prompt tokens and output tokens [n], and the texts [n] of these requests, by column of ``Workload.extra``.

    The clients' limits ``max_tokens`` and ``ignore_eos`` are as in ``Workload``; None: no client sets one.
    """

    prompt: Ints
    output: Ints
    texts: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    max_tokens: Ints | None = None
    ignore_eos: npt.NDArray[np.bool_] | None = None

    def limit_columns(self) -> dict[str, Any]:
        """Return the columns max_tokens and ignore_eos as arguments of ``Workload``."""
        return {"max_tokens": self.max_tokens, "ignore_eos": self.ignore_eos}


def draw(lengths: Lengths, n: int, rng: np.random.Generator) -> Drawn:
    """Return drawn lengths of ``n`` requests, with texts and limits if the model has a method ``draw``."""
    with_texts: Callable[[int, np.random.Generator], Drawn] | None = getattr(lengths, "draw", None)
    return Drawn(*lengths.sample(n, rng)) if with_texts is None else with_texts(n, rng)


class WithTexts:
    """Base of models of lengths whose requests also have texts or limits of clients (``draw``)."""

    def draw(self, n: int, rng: np.random.Generator) -> Drawn:
        """Return drawn lengths of ``n`` requests, with their texts and limits."""
        raise NotImplementedError

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return the prompt tokens and output tokens of ``draw``, [n] int64 each."""
        drawn = self.draw(n, rng)
        return drawn.prompt, drawn.output


@dataclass(frozen=True)
class Joint:
    """Joins two marginal distributions by a Gaussian copula; ``correlation`` is Spearman's r, from -1 to 1."""

    # The underlying normals have the correlation ``2 sin(pi r / 6)``; ties of rounded lengths weaken r slightly. With
    # one seed, every correlation gives the same prompts, and the first k requests do not depend on n.

    prompt: Marginal
    output: Marginal
    correlation: float = 0.0

    def __post_init__(self) -> None:
        if not -1 <= self.correlation <= 1:
            raise InputError(f"a rank correlation lies within -1 to 1; it is {self.correlation}")

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return prompt tokens and output tokens, [n] int64 each, at least 1."""
        if self.correlation == 0:
            return _draw_pairs(n, rng, self.prompt, lambda _, v: self.output.quantile(v))
        from scipy.special import ndtr, ndtri

        r = 2 * sin(pi * self.correlation / 6)

        def correlated(u: Floats, v: Floats) -> Floats:
            level = ndtr(r * ndtri(u) + sqrt(max(1 - r * r, 0.0)) * ndtri(v))
            return self.output.quantile(np.clip(level, 2.0**-54, 1 - 2.0**-53))

        return _draw_pairs(n, rng, self.prompt, correlated)


@dataclass(frozen=True)
class Conditional:
    """Draws a prompt, and then an output from the distribution of the prompt's class.

    Prompts are divided by length into as many equally likely classes as there are ``outputs``, the shortest first.
    """

    prompt: Marginal
    outputs: Sequence[Marginal]

    def __post_init__(self) -> None:
        if not self.outputs:
            raise InputError("a conditional model needs at least one distribution of outputs")

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Return prompt tokens and output tokens, [n] int64 each, at least 1."""

        def by_class(u: Floats, v: Floats) -> Floats:
            tokens = np.empty(len(u))
            classes = (u * len(self.outputs)).astype(np.int64)
            for number, marginal in enumerate(self.outputs):
                rows = np.flatnonzero(classes == number)
                tokens[rows] = marginal.quantile(v[rows])
            return tokens

        return _draw_pairs(n, rng, self.prompt, by_class)


@dataclass(frozen=True, eq=False)
class Samples(WithTexts):
    """Observed pairs of lengths [m], at least 1 token, with their ``texts`` [m]. Pairs are drawn with replacement.

    The clients' limits ``max_tokens`` and ``ignore_eos`` [m] of the pairs are drawn with them.
    """

    prompt: Sequence[int] | Ints
    output: Sequence[int] | Ints
    texts: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    max_tokens: Ints | None = None
    ignore_eos: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        prompt, output = np.asarray(self.prompt), np.asarray(self.output)
        if prompt.ndim != 1 or prompt.shape != output.shape or prompt.size == 0:
            raise InputError(f"samples must be pairs; got {prompt.size} prompts and {output.size} outputs")
        if not (prompt >= 1).all() or not (output >= 1).all():
            raise InputError("sampled lengths must be at least 1 token")
        if any(len(column) != prompt.size for column in self.texts.values()):
            raise InputError(f"every column of texts must have one text for each sample ({prompt.size})")

    @classmethod
    def of(cls, workload: Workload) -> Self:
        """Return the pairs of a workload, such as one read from a trace, with their texts and the clients' limits."""
        texts = {name: workload.extra[name] for name in TEXTS if name in workload.extra}
        return cls(workload.prompt_tokens, workload.output_tokens, texts, workload.max_tokens, workload.ignore_eos)

    def draw(self, n: int, rng: np.random.Generator) -> Drawn:
        """Return drawn lengths, with the texts and limits of the same rows."""
        return self.take(rng.integers(0, len(self.prompt), n))

    def take(self, rows: Ints) -> Drawn:
        """Return copies of these rows."""
        prompt, output = np.asarray(self.prompt, np.int64)[rows], np.asarray(self.output, np.int64)[rows]
        texts = {name: np.asarray(column, object)[rows] for name, column in self.texts.items()}
        cap = None if self.max_tokens is None else self.max_tokens[rows]
        return Drawn(prompt, output, texts, cap, None if self.ignore_eos is None else self.ignore_eos[rows])


@dataclass(frozen=True)
class ClientLimits(WithTexts):
    """Draws pairs from the model ``lengths``, with the limit ``max_tokens`` that clients set for each output.

    An output that would be longer than its limit ends there, as in an engine. ``max_tokens`` is a distribution of
    limits; a factor of at least 1, for limits that are a multiple of the output, rounded up; "own", for the limits that
    ``lengths`` draws; or None, for no limits. With ``ignore_eos``, every output is as long as its limit.
    """

    lengths: Lengths
    max_tokens: Marginal | float | Literal["own"] | None = "own"
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        times = self.max_tokens
        if isinstance(times, int | float) and not 1 <= times < np.inf:
            raise InputError(f"max_tokens must be at least 1 times the output; it is {times} times")

    def draw(self, n: int, rng: np.random.Generator) -> Drawn:
        """Return drawn lengths with limits. Raises InputError if ``ignore_eos`` finds an output without a limit."""
        drawn, limits = draw(self.lengths, n, rng), self.max_tokens
        if limits == "own":
            cap = drawn.max_tokens
        elif limits is None:
            cap = None
        elif isinstance(limits, int | float):
            cap = np.minimum(np.ceil(drawn.output * float(limits)), MAX_TOKENS).astype(np.int64)
        else:
            levels = np.maximum(rng.spawn(1)[0].random(n), 2.0**-54)
            cap = np.clip(np.rint(limits.quantile(levels)), 1, MAX_TOKENS).astype(np.int64)
        if not self.ignore_eos:
            limited = replace(drawn, max_tokens=cap, ignore_eos=drawn.ignore_eos if limits == "own" else None)
            return limited if cap is None else _shortened(limited, cap)
        if cap is None or (cap >= UNCAPPED).any():
            raise InputError(
                "ignore_eos makes outputs as long as max_tokens, and a request has none; give workload.max_tokens"
            )
        return replace(_shortened(drawn, cap), output=cap, max_tokens=cap, ignore_eos=np.ones(n, bool))


def limits_within(max_total_tokens: int, prompt: Ints, output: Ints, max_tokens: Ints) -> Ints:
    """Return clients' limits [n], lowered to the total less the prompts, but not below the outputs."""
    left = np.maximum(max_total_tokens - prompt, output)
    return np.where(max_tokens < UNCAPPED, np.minimum(max_tokens, left), max_tokens)


def _shortened(drawn: Drawn, output: Ints) -> Drawn:
    """Return the requests with outputs of at most ``output`` tokens [n], whose texts are shortened in proportion."""
    texts, shorter = dict(drawn.texts), np.minimum(drawn.output, output)
    rows = np.flatnonzero(shorter < drawn.output)
    if "output" in texts and len(rows):
        texts["output"] = texts["output"].copy()
        for row in rows:
            text = str(texts["output"][row] or "")
            texts["output"][row] = text[: int(len(text) * shorter[row] / drawn.output[row])]
    return replace(drawn, output=shorter, texts=texts)


@dataclass(frozen=True)
class Capped(WithTexts):
    """Draws pairs from the model ``lengths`` and enforces limits (None: no limit); both lengths stay at least 1.

    ``cut`` says how a pair above ``max_total_tokens`` (at least 2) is shortened: "output" tokens first, as an engine
    finishes a request at its context length; "prompt" tokens first; or "proportional", both in proportion to their
    lengths, rounded up, as Vidur cuts a trace. With "redraw", a pair above any limit is drawn again. A client's limit
    is lowered to ``max_total_tokens`` less the prompt, and with ``ignore_eos`` to the output.
    """

    lengths: Lengths
    max_total_tokens: int | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    cut: Cut = "output"

    def __post_init__(self) -> None:
        limits = {"max_total_tokens": 2, "max_prompt_tokens": 1, "max_output_tokens": 1}
        for name, lower in limits.items():
            value = getattr(self, name)
            if value is not None and value < lower:
                raise InputError(f"{name} must be at least {lower}; it is {value}")
        if self.cut not in ("output", "prompt", "proportional", "redraw"):
            raise InputError(f"cut must be output, prompt, proportional or redraw; it is {self.cut!r}")

    def draw(self, n: int, rng: np.random.Generator) -> Drawn:
        """Return drawn lengths within the limits, with shortened texts. Raises InputError if redrawing fails."""
        drawn = draw(self.lengths, n, rng)
        if self.cut == "redraw":
            return self._redraw(drawn, rng)
        output = np.minimum(drawn.output, self.max_output_tokens or drawn.output)
        np.minimum(drawn.prompt, self.max_prompt_tokens or drawn.prompt, out=drawn.prompt)
        if self.max_total_tokens is not None:
            self._trim(drawn.prompt, output, self.max_total_tokens)
        return self._within_context(_shortened(drawn, output))

    def _within_context(self, drawn: Drawn) -> Drawn:
        cap = drawn.max_tokens
        if cap is None:
            return drawn
        if self.max_total_tokens is not None:
            cap = limits_within(self.max_total_tokens, drawn.prompt, drawn.output, cap)
        if drawn.ignore_eos is not None:
            cap = np.where(drawn.ignore_eos, drawn.output, cap)
        return replace(drawn, max_tokens=cap)

    def _trim(self, prompt: Ints, output: Ints, limit: int) -> None:
        rows = np.flatnonzero(prompt + output > limit)
        p, o = prompt[rows], output[rows]
        excess = p + o - limit
        if self.cut == "proportional":
            # Integer arithmetic: ceil(excess * p / (p + o)) without rounding errors.
            p, o = p + -excess * p // (p + o), o + -excess * o // (p + o)
        elif self.cut == "output":
            o = np.maximum(o - excess, 1)
        else:
            p = np.maximum(p - excess, 1)
        p, o = np.maximum(p, 1), np.maximum(o, 1)
        p = np.minimum(p, np.maximum(limit - o, 1))
        prompt[rows], output[rows] = p, np.minimum(o, limit - p)

    def _redraw(self, drawn: Drawn, rng: np.random.Generator) -> Drawn:
        limits = (self.max_total_tokens, self.max_prompt_tokens, self.max_output_tokens)
        max_total, max_prompt, max_output = (np.inf if limit is None else limit for limit in limits)
        rows, latest = np.arange(len(drawn.prompt)), drawn
        for _ in range(_MAX_REDRAWS):
            total = latest.prompt + latest.output
            rows = rows[(total > max_total) | (latest.prompt > max_prompt) | (latest.output > max_output)]
            if len(rows) == 0:
                return self._within_context(drawn)
            latest = draw(self.lengths, len(rows), rng)
            drawn.prompt[rows], drawn.output[rows] = latest.prompt, latest.output
            for name, texts in latest.texts.items():
                drawn.texts[name][rows] = texts
            for column in ("max_tokens", "ignore_eos"):
                if getattr(drawn, column) is not None:
                    getattr(drawn, column)[rows] = getattr(latest, column)
        raise InputError(
            f"after {_MAX_REDRAWS} draws {len(rows)} requests are still above the limits; raise the limits, or cut"
        )


def _draw_pairs(
    n: int, rng: np.random.Generator, prompt: Marginal, output: Callable[[Floats, Floats], Floats]
) -> tuple[Ints, Ints]:
    """Return prompts at random levels u, and outputs for these levels and for independent levels v."""
    prompt_rng, output_rng = rng.spawn(2)
    prompts, outputs = np.empty(n, np.int64), np.empty(n, np.int64)
    for start in range(0, n, _BLOCK):
        block = slice(start, min(start + _BLOCK, n))
        # Levels above 0, so that no quantile is infinite.
        u, v = (np.maximum(stream.random(block.stop - start), 2.0**-54) for stream in (prompt_rng, output_rng))
        for column, tokens in ((prompts, prompt.quantile(u)), (outputs, output(u, v))):
            column[block] = np.maximum(np.rint(tokens), 1)
    return prompts, outputs
