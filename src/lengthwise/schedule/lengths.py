"""How long a task's prompts and outputs are, as probabilities of every number of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import ModelSpec
from lengthwise.schema.workload import Workload
from lengthwise.workload import Joint, Marginal, draw, preset

Floats = npt.NDArray[np.float64]

MAX_TOKENS = 2**20
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
    def from_samples(cls, prompt_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike, name: str = "") -> TaskLengths:
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
        raise InputError(f"{side} must be probabilities of 0, 1, 2, ... tokens that add up to 1, 0 tokens at 0")
    values = values[: np.flatnonzero(values)[-1] + 1]
    values /= values.sum()
    values.setflags(write=False)
    return values


def _counted(tokens: npt.ArrayLike, what: str) -> Floats:
    seen = np.asarray(tokens)
    if seen.ndim != 1 or seen.size == 0:
        raise InputError(f"{what} must be a column of at least one length; the shape is {seen.shape}")
    whole = np.isfinite(seen) & (seen == np.floor(seen)) & (seen >= 1) & (seen <= MAX_TOKENS)
    if not whole.all():
        raise InputError(
            f"{what} must be whole numbers of tokens from 1 to {MAX_TOKENS}; one is {seen[np.argmin(whole)]}"
        )
    return np.bincount(seen.astype(np.int64)) / seen.size


def _pmf_of(marginal: Marginal, what: str) -> Floats:
    """Where the quantile function passes each half token, by bisection over its level."""
    top = np.array([1 - _NEGLIGIBLE])
    longest = int(_complete(marginal.quantile(top))[0])
    if longest > MAX_TOKENS:
        raise InputError(
            f"{what} must not be longer than {MAX_TOKENS} tokens; a tail reaches {longest}. Give a maximum."
        )
    tokens = np.arange(longest)
    low, high = np.zeros(longest), np.ones(longest)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        below = _complete(marginal.quantile(np.clip(middle, _NEGLIGIBLE, 1 - _NEGLIGIBLE))) <= tokens
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    cdf = np.append(np.where(tokens > 0, low, 0.0), 1.0)
    return np.diff(np.maximum.accumulate(cdf), prepend=0.0)


def _complete(tokens: Floats) -> Floats:
    return np.asarray(np.maximum(np.rint(tokens), 1.0))


def _moment(pmf: Floats, power: int) -> float:
    return float(pmf @ np.arange(len(pmf), dtype=np.float64) ** power)


def _quantile(pmf: Floats, level: float) -> int:
    if not 0 < level <= 1:
        raise InputError(f"a quantile's level must be above 0 and at most 1; it is {level}")
    return int(np.argmax(np.cumsum(pmf) >= level - _NEGLIGIBLE))


SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Prompts of a batch for which it is drawn; between them it is interpolated, beyond them batches are as of the last."""
_STREAMS, _BATCHES, _LEAD = 400, 30, 3


@dataclass(frozen=True, eq=False)
class Resized:
    """By ``SIZES``.

    Attributes:
        prompts: Mean prompts of a batch, over the size.
        ranges: How far above its mean a batch's tokens are at the level, relative to the mean.
    """

    prompts: Floats
    ranges: Floats

    def times(self, seqs: Floats) -> Floats:
        """[n] how many times as many prompts batches have in the mean as the ``seqs`` they should have."""
        return np.asarray(np.interp(seqs, SIZES, self.prompts))

    def ranges_of(self, seqs: Floats) -> Floats:
        """[n] relative ranges of their tokens."""
        return np.asarray(np.interp(seqs, SIZES, self.ranges))


UNCHANGED = Resized(np.ones(len(SIZES)), np.full(len(SIZES), np.inf))
"""Without a threshold; that a range is infinite says that nothing bounds it."""


def resized(task: TaskLengths, threshold: float, level: float) -> Resized:
    """What a threshold makes of a task's batches; the same for the same task."""
    if task.prompt_variance == 0:
        return UNCHANGED
    return _resized(task.prompt_pmf.tobytes(), threshold, level)


@lru_cache(maxsize=64)
def _resized(pmf: bytes, threshold: float, level: float) -> Resized:
    cdf = np.cumsum(np.frombuffer(pmf))
    mean = float((np.frombuffer(pmf) * np.arange(len(cdf))).sum())
    rows = [_drawn(cdf, mean, size, threshold, level) for size in SIZES]
    prompts, ranges = np.array(rows).T
    return Resized(prompts / np.array(SIZES), ranges)


def _drawn(cdf: Floats, mean: float, size: int, threshold: float, level: float) -> tuple[float, float]:
    """(mean prompts, relative range) of batches cut from streams of prompts."""
    rng, batch = np.random.default_rng([size, 1]), size * mean
    low, high = (1 - threshold) * batch, (1 + threshold) * batch
    tokens, prompts = np.zeros(_STREAMS), np.zeros(_STREAMS)
    ended: list[tuple[Floats, Floats]] = []
    for _ in range(math.ceil((_BATCHES + _LEAD) * size)):
        following = np.searchsorted(cdf, rng.random(_STREAMS) * cdf[-1], side="right").astype(np.float64)
        after, short = tokens + following, tokens < low
        more = (after <= high) & ((prompts < size) | short)
        over = (prompts > 0) & ~(more | (short & (tokens + after < 2 * batch)))
        if over.any():
            ended.append((prompts[over], tokens[over]))
        tokens, prompts = np.where(over, following, after), np.where(over, 1.0, prompts + 1)
    counts, sums = (np.concatenate(column[_LEAD:]) for column in zip(*ended, strict=True))
    return float(counts.mean()), max(float(np.quantile(sums, level) / sums.mean()) - 1.0, 0.0)


@dataclass(frozen=True, eq=False)
class PhaseShares:
    """What each decode iteration of a phase works on, for one new request a phase.

    Attributes:
        seqs: [N_D] sequences; the first is B_D / B_E.
        kv_tokens: [N_D] cached tokens that they read.
        seqs_variance: [N_D] variance of the sequences, over phases of one new request each.
        kv_variance: [N_D] variance of the cached tokens.
    """

    seqs: Floats
    kv_tokens: Floats
    seqs_variance: Floats
    kv_variance: Floats

    def columns(self) -> Floats:
        """[N_D, 4] all of it."""
        return np.column_stack([self.seqs, self.kv_tokens, self.seqs_variance, self.kv_variance])


def phase_shares(task: TaskLengths, steps: int, from_encode: int = 1, *, paper: bool = False) -> PhaseShares:
    """The steady state of phases of ``steps`` decode iterations.

    Args:
        task: Lengths.
        steps: N_D.
        from_encode: Output tokens that come from the encoding.
        paper: Completions as ExeGPT writes them; the variances stay renewal theory's.

    Raises:
        InputError: ``steps`` is above the longest output.
    """
    require_steps(task, steps)
    alive, age = _by_iteration(task, steps, from_encode)
    seqs, prompt = alive.sum(axis=0), task.mean_prompt_tokens
    context = prompt + age
    kv_tokens = (alive * context).sum(axis=0)
    square = task.mean_square_prompt + 2 * age * prompt + age**2
    kv_variance = (alive * square - (alive * context) ** 2).sum(axis=0)
    if paper:
        per_seq = kv_tokens.sum() / seqs.sum() if seqs.any() else prompt
        seqs = _paper_seqs(task, steps, from_encode)
        kv_tokens = seqs * per_seq
    return PhaseShares(seqs, kv_tokens, (alive * (1 - alive)).sum(axis=0), np.maximum(kv_variance, 0.0))


def paper_completions(task: TaskLengths, steps: int, from_encode: int = 0) -> Floats:
    """[N_D] ExeGPT's P_D(U): the share of the decode batch that completes at each iteration of a phase.

    ``P_D(U | n)`` is 1 at ``U = n`` for ``n <= N_D``, else ``1 / ceil(n / N_D)`` at ``U = 1 + (n - 1) mod N_D``.
    Requests that need no decode iteration are left out.
    """
    require_steps(task, steps)
    needs = task.output_pmf[1 + from_encode :]
    if not needs.any():
        return np.zeros(steps)
    n = np.arange(1, len(needs) + 1)
    weight = needs / needs.sum() / -(-n // steps)
    return np.asarray(np.bincount((n - 1) % steps, weights=weight, minlength=steps), dtype=np.float64)


def renewal_completions(task: TaskLengths, steps: int, from_encode: int = 1) -> Floats:
    """[N_D] the share of the decode batch at a phase's start that completes at each iteration."""
    require_steps(task, steps)
    alive, _ = _by_iteration(task, steps, from_encode)
    left = _after(alive)
    start = alive.sum(axis=0)[0]
    return np.zeros(steps) if start == 0 else np.asarray((alive - left).sum(axis=0) / start)


def finish(steps: int, iterations: int) -> tuple[int, int]:
    """(phases, iteration of the last of them) in which a request's ``iterations`` are over."""
    phases = max(1, -(-iterations // steps))
    return phases, iterations - (phases - 1) * steps


def require_steps(task: TaskLengths, steps: int) -> None:
    """Nothing, if a phase of ``steps`` decode iterations is no longer than the longest output.

    Raises:
        InputError: It is, or it has none.
    """
    if not 1 <= steps <= task.max_output_tokens:
        raise InputError(
            f"decode_steps must be from 1 to the longest output ({task.max_output_tokens} tokens); it is {steps}"
        )


def _by_iteration(task: TaskLengths, steps: int, from_encode: int) -> tuple[Floats, Floats]:
    """[phases ago, N_D] share of requests alive, and which of its own iterations each is at."""
    alive = task.decode_survival(from_encode)
    phases = max(1, -(-len(alive) // steps))
    padded = np.zeros(phases * steps)
    padded[: len(alive)] = alive
    age = np.arange(1, phases * steps + 1, dtype=np.float64)
    return padded.reshape(phases, steps), age.reshape(phases, steps)


def _after(alive: Floats) -> Floats:
    """The same, one iteration later in each request's own life."""
    flat = np.append(alive.reshape(-1)[1:], 0.0)
    return flat.reshape(alive.shape)


def _paper_seqs(task: TaskLengths, steps: int, from_encode: int) -> Floats:
    completions = paper_completions(task, steps, from_encode)
    total = completions.sum()
    if total == 0:
        return np.zeros(steps)
    entering = float(task.decode_survival(from_encode)[:1].sum())
    before = np.concatenate([[0.0], np.cumsum(completions)[:-1]])
    return np.asarray(entering / total * (1 - before))
