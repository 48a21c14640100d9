"""Length distributions of a task, the prefill batches that it forms, and the loads of its decode phases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import ModelSpec
from lengthwise.schema.workload import Floats
from lengthwise.workload import Joint, Marginal, draw, preset

MAX_TOKENS = 2**20
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Batch sizes at which adjusted batches are sampled; values between them are interpolated, beyond them constant."""

_BISECTIONS = 54
_NEGLIGIBLE = 1e-12
TAIL_LEVEL = 0.9999  # an unbounded distribution ends at this quantile: longer requests count as this long
_SUM_TOLERANCE = 1e-6
_STREAMS, _BATCHES, _WARM_UP_BATCHES = 400, 30, 3


@dataclass(frozen=True, eq=False)
class TaskLengths:
    """Distributions of the lengths of a task's requests. Prompts and outputs are independent, as in ExeGPT's simulator.

    ``prompt_pmf`` and ``output_pmf`` [longest + 1] are the probabilities of 0, 1, 2, ... tokens. The probability of 0
    tokens is 0. ``name`` is a label in tables and reports. Raises InputError if they are not such probabilities.
    """

    prompt_pmf: Floats
    output_pmf: Floats
    name: str = ""

    def __post_init__(self) -> None:
        for side in ("prompt_pmf", "output_pmf"):
            pmf = np.array(getattr(self, side), dtype=np.float64)
            valid = pmf.ndim == 1 and len(pmf) > 1 and np.isfinite(pmf).all() and (pmf >= 0).all()
            if not valid or pmf[0] != 0 or abs(pmf.sum() - 1) > _SUM_TOLERANCE:
                raise InputError(f"{side} must be probabilities of 0, 1, 2, ... tokens that add up to 1, 0 tokens at 0")
            pmf = pmf[: np.flatnonzero(pmf)[-1] + 1]
            pmf /= pmf.sum()
            pmf.setflags(write=False)
            object.__setattr__(self, side, pmf)

    @classmethod
    def from_marginals(cls, prompt: Marginal, output: Marginal, name: str = "") -> TaskLengths:
        """Return the distributions of two marginals, rounded to whole tokens (1 or more).

        Raises InputError if a tail is longer than ``MAX_TOKENS``. In this case give the marginal a maximum.
        """
        return cls(_discretize(prompt, "prompts"), _discretize(output, "outputs"), name)

    @classmethod
    def from_samples(cls, prompt_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike, name: str = "") -> TaskLengths:
        """Return the empirical distributions of observed lengths.

        Raises InputError if a column is empty, or a length is not an integer from 1 to ``MAX_TOKENS``.
        """
        return cls(_histogram(prompt_tokens, "prompts"), _histogram(output_tokens, "outputs"), name)

    @classmethod
    def fixed(cls, prompt_tokens: int, output_tokens: int, name: str = "") -> TaskLengths:
        """Return lengths that are the same for all requests."""
        return cls.from_samples([prompt_tokens], [output_tokens], name)

    @classmethod
    def from_preset(cls, name: str, samples: int = 1 << 17, seed: int = 0) -> TaskLengths:
        """Return a preset's lengths: exact if prompts and outputs are separate, else counted over ``samples`` draws."""
        named = preset(name)
        if isinstance(named.lengths, Joint):
            return cls.from_marginals(named.lengths.prompt, named.lengths.output, named.name)
        drawn = draw(named.lengths, samples, np.random.default_rng(seed))
        return cls.from_samples(drawn.prompt, drawn.output, named.name)

    @cached_property
    def mean_prompt_tokens(self) -> float:
        """Return the mean prompt length."""
        return _moment(self.prompt_pmf, 1)

    @cached_property
    def mean_square_prompt(self) -> float:
        """Return the mean of the squared prompt length."""
        return _moment(self.prompt_pmf, 2)

    @cached_property
    def prompt_variance(self) -> float:
        """Return the variance of the prompt length. It is exactly 0 if all prompts are equally long."""
        tokens = np.arange(len(self.prompt_pmf))
        return float(self.prompt_pmf @ (tokens - self.mean_prompt_tokens) ** 2)

    @cached_property
    def mean_output_tokens(self) -> float:
        """Return the mean output length."""
        return _moment(self.output_pmf, 1)

    @property
    def max_prompt_tokens(self) -> int:
        """Return the tokens of the longest prompt."""
        return len(self.prompt_pmf) - 1

    @property
    def max_output_tokens(self) -> int:
        """Return the tokens of the longest output."""
        return len(self.output_pmf) - 1

    @property
    def max_request_tokens(self) -> int:
        """Return the tokens of a request with the longest prompt and the longest output."""
        return self.max_prompt_tokens + self.max_output_tokens

    def prompt_quantile(self, level: float) -> int:
        """Return the ``level`` quantile of the prompt length."""
        return _quantile(self.prompt_pmf, level)

    def output_quantile(self, level: float) -> int:
        """Return the ``level`` quantile of the output length."""
        return _quantile(self.output_pmf, level)

    def decode_survival(self, prefill_output_tokens: int = 1) -> Floats:
        """Return the shares of requests that need a 1st, 2nd, ... decode iteration [longest - prefill_output_tokens].

        The prefill produces the first ``prefill_output_tokens`` tokens of each output, so they need no iteration.
        """
        at_least = np.cumsum(self.output_pmf[::-1])[::-1]
        return np.asarray(np.minimum(at_least[1 + prefill_output_tokens :], 1.0))

    def require_within(self, model: ModelSpec) -> None:
        """Raise InputError unless the longest prompt and the longest output together fit in the model's context."""
        if self.max_request_tokens > model.max_model_len:
            raise InputError(
                f"the longest prompt and output ({self.max_prompt_tokens} + {self.max_output_tokens} tokens) must be "
                f"within the context of {model.name} ({model.max_model_len} tokens); lower the maximum length, "
                "for example with workload.max_output_tokens"
            )


def _histogram(tokens: npt.ArrayLike, side: str) -> Floats:
    values = np.asarray(tokens)
    if values.ndim != 1 or values.size == 0:
        raise InputError(f"{side} must be a column of at least one length; the shape is {values.shape}")
    valid = np.isfinite(values) & (values == np.floor(values)) & (values >= 1) & (values <= MAX_TOKENS)
    if not valid.all():
        raise InputError(
            f"{side} must be whole numbers of tokens from 1 to {MAX_TOKENS}; one is {values[np.argmin(valid)]}"
        )
    return np.bincount(values.astype(np.int64)) / values.size


def _discretize(marginal: Marginal, side: str) -> Floats:
    def tokens_at(level: Floats) -> Floats:
        return np.asarray(np.maximum(np.rint(marginal.quantile(level)), 1.0))

    is_bounded = np.isfinite(marginal.quantile(np.ones(1)))[0]
    longest = int(tokens_at(np.array([1 - _NEGLIGIBLE if is_bounded else TAIL_LEVEL]))[0])
    if longest > MAX_TOKENS:
        raise InputError(
            f"{side} must not be longer than {MAX_TOKENS} tokens; a tail reaches {longest}. Give a maximum."
        )
    tokens = np.arange(longest)
    low, high = np.zeros(longest), np.ones(longest)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        below = tokens_at(np.clip(middle, _NEGLIGIBLE, 1 - _NEGLIGIBLE)) <= tokens
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    cdf = np.append(np.where(tokens > 0, low, 0.0), 1.0)
    return np.diff(np.maximum.accumulate(cdf), prepend=0.0)


def _moment(pmf: Floats, power: int) -> float:
    return float(pmf @ np.arange(len(pmf), dtype=np.float64) ** power)


def _quantile(pmf: Floats, level: float) -> int:
    if not 0 < level <= 1:
        raise InputError(f"a quantile's level must be above 0 and at most 1; it is {level}")
    return int(np.argmax(np.cumsum(pmf) >= level - _NEGLIGIBLE))


@dataclass(frozen=True, eq=False)
class AdjustedBatches:
    """Prefill batches under ExeGPT's dynamic adjustment, for each target batch size in ``SIZES``.

    Dynamic adjustment varies the number of prompts in a batch so that the batch's tokens stay within a threshold of
    their target, where the prompts' lengths allow it. ``prompts`` are the mean prompts of a batch divided by the target
    size. ``ranges`` are a quantile of a batch's tokens divided by their mean, less 1.
    """

    prompts: Floats
    ranges: Floats

    def size_factor(self, seqs: Floats) -> Floats:
        """Return [n] the mean number of prompts in a batch, divided by the target ``seqs``."""
        return np.asarray(np.interp(seqs, SIZES, self.prompts))

    def relative_range(self, seqs: Floats) -> Floats:
        """Return [n] the relative range of a batch of ``seqs`` prompts, interpolated from ``ranges``."""
        return np.asarray(np.interp(seqs, SIZES, self.ranges))


UNADJUSTED = AdjustedBatches(np.ones(len(SIZES)), np.full(len(SIZES), np.inf))
"""Batches without a threshold; their infinite ranges set no limit."""


def adjusted_batches(task: TaskLengths, threshold: float, level: float) -> AdjustedBatches:
    """Return a task's batches, sampled with fixed seeds. ``level`` is the quantile of ``AdjustedBatches.ranges``."""
    if task.prompt_variance == 0:
        return UNADJUSTED
    return _sampled_batches(task.prompt_pmf.tobytes(), threshold, level)


@lru_cache(maxsize=64)
def _sampled_batches(pmf_bytes: bytes, threshold: float, level: float) -> AdjustedBatches:
    pmf = np.frombuffer(pmf_bytes)
    cdf, mean = np.cumsum(pmf), float((pmf * np.arange(len(pmf))).sum())
    prompts, ranges = np.array([_sample_batches(cdf, mean, size, threshold, level) for size in SIZES]).T
    return AdjustedBatches(prompts / np.array(SIZES), ranges)


def _sample_batches(cdf: Floats, mean: float, size: int, threshold: float, level: float) -> tuple[float, float]:
    rng, target = np.random.default_rng([size, 1]), size * mean
    low, high = (1 - threshold) * target, (1 + threshold) * target
    tokens, prompts = np.zeros(_STREAMS), np.zeros(_STREAMS)
    finished: list[tuple[Floats, Floats]] = []
    for _ in range(math.ceil((_BATCHES + _WARM_UP_BATCHES) * size)):
        new = np.searchsorted(cdf, rng.random(_STREAMS) * cdf[-1], side="right").astype(np.float64)
        total, below = tokens + new, tokens < low
        fits = (total <= high) & ((prompts < size) | below)
        # A batch that is too small accepts a prompt beyond the upper limit if the total is then nearer to the target.
        closed = (prompts > 0) & ~(fits | (below & (tokens + total < 2 * target)))
        if closed.any():
            finished.append((prompts[closed], tokens[closed]))
        tokens, prompts = np.where(closed, new, total), np.where(closed, 1.0, prompts + 1)
    counts, sums = (np.concatenate(column[_WARM_UP_BATCHES:]) for column in zip(*finished, strict=True))
    return float(counts.mean()), max(float(np.quantile(sums, level) / sums.mean()) - 1.0, 0.0)


@dataclass(frozen=True, eq=False)
class PhaseLoads:
    """Load of each decode iteration of a phase, per new request of the phase."""

    seqs: Floats  # [N_D] sequences; the first is B_D / B_E
    kv_tokens: Floats  # [N_D] cached tokens that these sequences read
    seqs_variance: Floats  # [N_D] variance of ``seqs``
    kv_variance: Floats  # [N_D] variance of ``kv_tokens``

    @cached_property
    def columns(self) -> Floats:
        """Return [N_D, 4] the attributes as columns, in the order above."""
        return np.column_stack([self.seqs, self.kv_tokens, self.seqs_variance, self.kv_variance])


def phase_loads(task: TaskLengths, steps: int, prefill_output_tokens: int = 1, *, paper: bool = False) -> PhaseLoads:
    """Return the steady-state loads of phases with ``steps`` decode iterations (N_D, at most the longest output).

    If ``paper``, completions follow ``paper_completions``. Everything else, and the variances, follow renewal theory.
    """
    require_steps(task, steps)
    alive, age = _by_iteration(task, steps, prefill_output_tokens)
    seqs, prompt = alive.sum(axis=0), task.mean_prompt_tokens
    context = prompt + age
    kv_tokens = (alive * context).sum(axis=0)
    square = task.mean_square_prompt + 2 * age * prompt + age**2
    kv_variance = (alive * square - (alive * context) ** 2).sum(axis=0)
    if paper:
        tokens_per_seq = kv_tokens.sum() / seqs.sum() if seqs.any() else prompt
        completions = paper_completions(task, steps, prefill_output_tokens)
        seqs = np.zeros(steps)
        if total := completions.sum():
            entering = float(task.decode_survival(prefill_output_tokens)[:1].sum())
            before = np.concatenate([[0.0], np.cumsum(completions)[:-1]])
            seqs = np.asarray(entering / total * (1 - before))
        kv_tokens = seqs * tokens_per_seq
    return PhaseLoads(seqs, kv_tokens, (alive * (1 - alive)).sum(axis=0), np.maximum(kv_variance, 0.0))


def paper_completions(task: TaskLengths, steps: int, prefill_output_tokens: int = 0) -> Floats:
    """Return [N_D] ExeGPT's P_D(U), the share of the decode batch that completes at iteration U of a phase.

    For outputs of n iterations it is 1 at ``U = n`` if ``n <= N_D``, else ``1 / ceil(n / N_D)`` at ``U = 1 + (n - 1)
    mod N_D``. Requests that need no decode iteration are excluded.
    """
    require_steps(task, steps)
    needs = task.output_pmf[1 + prefill_output_tokens :]
    if not needs.any():
        return np.zeros(steps)
    n = np.arange(1, len(needs) + 1)
    weight = needs / needs.sum() / -(-n // steps)
    return np.asarray(np.bincount((n - 1) % steps, weights=weight, minlength=steps), dtype=np.float64)


def phase_position(steps: int, iterations: int) -> tuple[int, int]:
    """Return the phase and its iteration, both from 1, in which a request completes, or (1, 0) without iterations."""
    phases = max(1, -(-iterations // steps))
    return phases, iterations - (phases - 1) * steps


def require_steps(task: TaskLengths, steps: int) -> None:
    """Raise InputError unless ``steps`` is at least 1 and at most the tokens of the longest output."""
    if not 1 <= steps <= task.max_output_tokens:
        raise InputError(
            f"decode_steps must be from 1 to the longest output ({task.max_output_tokens} tokens); it is {steps}"
        )


def _by_iteration(task: TaskLengths, steps: int, prefill_output_tokens: int) -> tuple[Floats, Floats]:
    """Return shares of running requests, and their iterations so far, as arrays [phases since admission, N_D]."""
    alive = task.decode_survival(prefill_output_tokens)
    phases = max(1, -(-len(alive) // steps))
    padded = np.zeros(phases * steps)
    padded[: len(alive)] = alive
    age = np.arange(1, phases * steps + 1, dtype=np.float64)
    return padded.reshape(phases, steps), age.reshape(phases, steps)
