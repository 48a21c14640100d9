"""How long a task's prompts and outputs are, as probabilities of every number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.workload import Workload
from lengthwise.workload import Joint, Marginal, draw, preset

Floats = npt.NDArray[np.float64]

MOST_TOKENS = 2**20
"""Longest prompt or output that is tabled."""

_BISECTIONS = 54
_NEGLIGIBLE = 1e-12
_SUM_SLACK = 1e-6


@dataclass(frozen=True, eq=False)
class TaskLengths:
    """Lengths of a task. Prompts and outputs count as independent, as in ExeGPT's simulator.

    Attributes:
        prompt_pmf: [longest + 1] probability of so many prompt tokens; nothing at 0.
        output_pmf: [longest + 1] the same of output tokens.
        name: For tables and reports.
    """

    prompt_pmf: Floats
    output_pmf: Floats
    name: str = ""

    def __post_init__(self) -> None:
        for side in ("prompt_pmf", "output_pmf"):
            object.__setattr__(self, side, _checked(getattr(self, side), side))

    @classmethod
    def from_marginals(cls, prompt: Marginal, output: Marginal, name: str = "") -> TaskLengths:
        """The whole-token distributions of two marginals, exact to rounding.

        Raises:
            InputError: A tail reaches beyond ``MOST_TOKENS``; give the marginal a maximum.
        """
        return cls(_pmf_of(prompt, "prompts"), _pmf_of(output, "outputs"), name)

    @classmethod
    def from_samples(
        cls, prompt_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike, name: str = ""
    ) -> TaskLengths:
        """How often each length was seen.

        Raises:
            InputError: There is none, or one is no whole number from 1 on.
        """
        return cls(_counted(prompt_tokens, "prompts"), _counted(output_tokens, "outputs"), name)

    @classmethod
    def from_workload(cls, workload: Workload) -> TaskLengths:
        """How often each length occurs in a workload."""
        return cls.from_samples(workload.prompt_tokens, workload.output_tokens, workload.name)

    @classmethod
    def fixed(cls, prompt_tokens: int, output_tokens: int, name: str = "") -> TaskLengths:
        """All requests alike."""
        return cls.from_samples([prompt_tokens], [output_tokens], name)

    @classmethod
    def from_preset(cls, name: str, samples: int = 1 << 17, seed: int = 0) -> TaskLengths:
        """The lengths of a named workload: exact where it has two marginals, else from so many draws.

        Raises:
            UnknownNameError: There is no such preset.
        """
        named = preset(name)
        if isinstance(named.lengths, Joint):
            return cls.from_marginals(named.lengths.prompt, named.lengths.output, named.name)
        drawn = draw(named.lengths, samples, np.random.default_rng(seed))
        return cls.from_samples(drawn.prompt, drawn.output, named.name)

    @cached_property
    def mean_prompt_tokens(self) -> float:
        """Mean prompt."""
        return _moment(self.prompt_pmf, 1)

    @cached_property
    def mean_square_prompt(self) -> float:
        """Mean of the squared prompt tokens."""
        return _moment(self.prompt_pmf, 2)

    @cached_property
    def prompt_variance(self) -> float:
        """Variance of the prompt tokens; exactly 0 for prompts of one length."""
        tokens = np.arange(len(self.prompt_pmf))
        return float(self.prompt_pmf @ (tokens - self.mean_prompt_tokens) ** 2)

    @cached_property
    def mean_output_tokens(self) -> float:
        """Mean output."""
        return _moment(self.output_pmf, 1)

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt."""
        return len(self.prompt_pmf) - 1

    @property
    def max_output_tokens(self) -> int:
        """Longest output."""
        return len(self.output_pmf) - 1

    def prompt_quantile(self, level: float) -> int:
        """Fewest tokens that a share ``level`` of the prompts does not exceed."""
        return _quantile(self.prompt_pmf, level)

    def output_quantile(self, level: float) -> int:
        """Fewest tokens that a share ``level`` of the outputs does not exceed."""
        return _quantile(self.output_pmf, level)

    def decode_survival(self, from_encode: int = 1) -> Floats:
        """[longest - from_encode] share of requests that need a 1st, 2nd, ... decode iteration.

        ``from_encode`` tokens of every output come from its encoding.
        """
        at_least = np.cumsum(self.output_pmf[::-1])[::-1]
        return np.asarray(np.minimum(at_least[1 + from_encode :], 1.0))

    def require_within(self, model: ModelSpec) -> None:
        """Nothing, if the model takes the longest prompt with the longest output.

        Raises:
            InputError: It does not.
        """
        longest = self.max_prompt_tokens + self.max_output_tokens
        if longest > model.max_model_len:
            raise InputError(
                f"the longest prompt and output ({self.max_prompt_tokens} + {self.max_output_tokens} tokens) must be "
                f"within the {model.max_model_len} of {model.name}; give the lengths a lower maximum"
            )


def _checked(pmf: npt.ArrayLike, side: str) -> Floats:
    """The pmf with a sum of 1 and no empty tail, read-only."""
    values = np.array(pmf, dtype=np.float64)
    good = values.ndim == 1 and len(values) > 1 and np.isfinite(values).all() and (values >= 0).all()
    if not good or values[0] != 0 or abs(values.sum() - 1) > _SUM_SLACK:
        raise InputError(
            f"{side} must be probabilities of 0, 1, 2, ... tokens that add up to 1, 0 tokens at 0"
        )
    values = values[: np.flatnonzero(values)[-1] + 1]
    values /= values.sum()
    values.setflags(write=False)
    return values


def _counted(tokens: npt.ArrayLike, what: str) -> Floats:
    seen = np.asarray(tokens)
    if seen.ndim != 1 or seen.size == 0:
        raise InputError(f"{what} must be a column of at least one length; the shape is {seen.shape}")
    whole = np.isfinite(seen) & (seen == np.floor(seen)) & (seen >= 1) & (seen <= MOST_TOKENS)
    if not whole.all():
        raise InputError(
            f"{what} must be whole numbers of tokens from 1 to {MOST_TOKENS}; one is {seen[np.argmin(whole)]}"
        )
    return np.bincount(seen.astype(np.int64)) / seen.size


def _pmf_of(marginal: Marginal, what: str) -> Floats:
    """Where the quantile function passes each half token, by bisection over its level."""
    top = np.array([1 - _NEGLIGIBLE])
    longest = int(_whole(marginal.quantile(top))[0])
    if longest > MOST_TOKENS:
        raise InputError(
            f"{what} must not be longer than {MOST_TOKENS} tokens; a tail reaches {longest}. Give a maximum."
        )
    tokens = np.arange(longest)
    low, high = np.zeros(longest), np.ones(longest)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        below = _whole(marginal.quantile(np.clip(middle, _NEGLIGIBLE, 1 - _NEGLIGIBLE))) <= tokens
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    cdf = np.append(np.where(tokens > 0, low, 0.0), 1.0)
    return np.diff(np.maximum.accumulate(cdf), prepend=0.0)


def _whole(tokens: Floats) -> Floats:
    return np.asarray(np.maximum(np.rint(tokens), 1.0))


def _moment(pmf: Floats, power: int) -> float:
    return float(pmf @ np.arange(len(pmf), dtype=np.float64) ** power)


def _quantile(pmf: Floats, level: float) -> int:
    if not 0 < level <= 1:
        raise InputError(f"a quantile's level must be above 0 and at most 1; it is {level}")
    return int(np.argmax(np.cumsum(pmf) >= level - _NEGLIGIBLE))


__all__ = ["MOST_TOKENS", "TaskLengths"]
