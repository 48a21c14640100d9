"""Speculative decoding: a drafter proposes tokens, and one step of the model verifies them.

A sequence verifies its next token and d proposed ones in a step, accepts the first a of them, and advances by a + 1
tokens. The number a has three causes of variation:

* By position: token j is accepted at the rate ``acceptance[j - 1]``, given that those before it were. Like the rates in
  vLLM's log, this is a mean over all steps.
* By request: the probability that a step accepts any token (a *hit*) differs between requests by a Beta distribution,
  whose intraclass correlation is ``request_effect``. With ``length_correlation`` long outputs have more hits, or fewer.
* By time: ``burstiness`` is the correlation of hits in consecutive steps of a request (a Markov chain of two states).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.cost_tables import CostTables, Floats
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.estimate import Estimate

METHODS = ("ngram", "eagle", "eagle3", "mtp", "draft_model")
MAX_SPECULATIVE_TOKENS = 64
MTP_ACCEPTANCE = 0.69
"""Of DeepSeek-R1 at three proposed tokens, 2.5 tokens a step: in MT-Bench, and in random prompts in its chat template
(github.com/SemiAnalysisAI/InferenceX, pull request 649)."""
_QUANTILES = 400
_LOW, _BITS = 0xFFFF, 0xFFFFFFFF


@dataclass(frozen=True)
class Drafter:
    """What a drafter costs. It makes a pass for each token it proposes, the first one over all tokens of the step."""

    layers: float = 0.0  # layers of a pass; 0: the drafter computes nothing on the GPU, and makes one pass (n-gram)
    head_share: float = 0.0  # share of ``CostTables.head_s`` in a pass
    tables: CostTables | None = None  # costs of a draft model; None: a layer costs what one of the target model costs


@dataclass(frozen=True)
class Speculation:
    """Settings of speculative decoding, named as vLLM's, and the acceptance of proposed tokens."""

    method: str
    num_speculative_tokens: int
    # The rate at which the token of each position is accepted, given that those before it were; at least one rate for
    # each of ``num_speculative_tokens``. A single number applies to all.
    acceptance: float | tuple[float, ...]
    # Share of a sequence's steps for which the drafter proposes tokens: below 1 for n-gram, which finds none where the
    # text does not repeat. ``acceptance`` counts the other steps only.
    draft_rate: float = 1.0
    request_effect: float = 0.0
    length_correlation: float = 0.0
    burstiness: float = 0.0
    # vLLM's num_speculative_tokens_per_batch_size: (first, last number of sequences of a step, tokens proposed after
    # it). Empty: always ``num_speculative_tokens``.
    per_batch_size: tuple[tuple[int, int, int], ...] = ()
    draft_model: str = ""  # the model of method "draft_model": a name of the catalog, or the path of a ``config.json``
    pass_s: float = 0.0  # seconds of a pass besides ``drafter``, such as those of its launch
    drafter: Drafter = Drafter()  # what a pass costs on the GPU. ``engine.deploy`` sets it by the method

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UnknownNameError("speculation method", str(self.method), METHODS)
        k = self.num_speculative_tokens
        if not isinstance(k, int | np.integer) or not 1 <= k <= MAX_SPECULATIVE_TOKENS:
            raise InputError(
                f"num_speculative_tokens must be a whole number from 1 to {MAX_SPECULATIVE_TOKENS}; it is {k!r}"
            )
        if len(self.rates) < k or not all(0 <= rate <= 1 for rate in self.rates):
            given = list(self.rates) if isinstance(self.acceptance, tuple) else self.acceptance
            raise InputError(
                f"acceptance must be a rate from 0 to 1, or at least {k} rates, one for each of "
                f"num_speculative_tokens; it is {given}"
            )
        bounds = {
            "draft_rate": (0, 1), "request_effect": (0, 0.99), "length_correlation": (-1, 1), "burstiness": (0, 1),
            "pass_s": (0, 60),
        }  # fmt: skip
        for name, (low, high) in bounds.items():
            if not low <= (value := getattr(self, name)) <= high:
                raise InputError(f"{name} must be from {low} to {high}; it is {value!r}")
        if self.length_correlation and not self.request_effect:
            raise InputError(
                "length_correlation needs a request_effect above 0, because it is the correlation of a request's rate "
                f"with its output; it is {self.length_correlation}. Give request_effect, or leave it out"
            )
        if (self.method == "draft_model") != bool(self.draft_model):
            verb = "needs" if self.method == "draft_model" else "excludes"
            raise InputError(f'method "{self.method}" {verb} a draft_model; it is {self.draft_model!r}')
        end = 0
        for first, last, tokens in self.per_batch_size:
            if not (first > end and last >= first and 0 <= tokens <= k) or (end == 0 and first != 1):
                raise InputError(
                    "num_speculative_tokens_per_batch_size must be [[first, last, tokens], ...]: the first begins at "
                    "1, others after the one before (which a gap continues), with at most num_speculative_tokens, "
                    f"{k}, tokens; {[first, last, tokens]} does not"
                )
            end = last

    @staticmethod
    def are_alike(one: Speculation | None, other: Speculation | None) -> bool:
        """Return whether two deployments propose and accept the same tokens, maybe at different costs, or none does."""
        first, second = (chosen and replace(chosen, drafter=Drafter()) for chosen in (one, other))
        return first == second

    @property
    def rates(self) -> tuple[float, ...]:
        """Return the conditional rate of acceptance of each position."""
        if isinstance(self.acceptance, tuple):
            return self.acceptance[: self.num_speculative_tokens]
        return (float(self.acceptance),) * self.num_speculative_tokens

    @property
    def lookahead_tokens(self) -> int:
        """Return the slots of KV memory that a drafter with a KV cache needs after those of a step (vLLM 0.32)."""
        return 0 if self.method == "ngram" else self.num_speculative_tokens

    @property
    def drops_block(self) -> bool:
        """Return whether a request computes the last block of its cached prefix again, for the drafter (vLLM 0.32)."""
        return self.method in ("eagle", "eagle3", "mtp")

    @property
    def hit_rate(self) -> float:
        """Return the mean probability over steps that a step accepts any token."""
        return self.draft_rate * self.rates[0]

    @property
    def missed_draft_rate(self) -> float:
        """Return the share of the steps without a hit in which tokens were proposed all the same."""
        return (self.draft_rate - self.hit_rate) / (1 - self.hit_rate) if self.hit_rate < 1 else 1.0

    @property
    def survival(self) -> Floats:
        """Return [num_speculative_tokens] the probability that a hit accepts the tokens up to each position."""
        return np.asarray(np.cumprod([1.0, *self.rates[1:]]), np.float64)

    @property
    def tokens_per_step(self) -> float:
        """Return the mean number of tokens by which a sequence advances in a step: 1 + sum of products of the rates."""
        return 1.0 + self.hit_rate * float(self.survival.sum())

    def drafts_by_seqs(self, max_num_seqs: int) -> npt.NDArray[np.int64]:
        """Return [max_num_seqs + 1] the number of tokens that the drafter proposes, by sequences of the step before.

        Between and after the ranges of ``per_batch_size`` the range before continues, as in vLLM.
        """
        drafts = np.full(max_num_seqs + 1, self.num_speculative_tokens)
        for first, _, tokens in self.per_batch_size:
            drafts[first:] = tokens
        return drafts

    def hit_rates(self, output: npt.NDArray[Any], rng: np.random.Generator) -> Floats:
        """Return [n] the probability of a hit of each request, given the lengths of the outputs.

        Their mean over steps is ``hit_rate``. The one over requests differs, since those with few hits take more steps.
        """
        n, tied = len(output), self.length_correlation
        if n == 0 or self.request_effect == 0 or self.hit_rate in (0.0, 1.0):
            return np.full(n, self.hit_rate)
        shares, noise, order = np.sort(rng.random(n)), rng.standard_normal(n), rng.permutation(n)
        ranks = np.empty(n)  # equal lengths are ranked at random
        ranks[order[np.argsort(output[order], kind="stable")]] = np.sort(rng.standard_normal(n))
        score = tied * ranks + np.sqrt(1 - tied**2) * noise
        by_request = np.empty(n)
        by_request[np.argsort(score, kind="stable")] = self._beta(self._mean_over_requests(output), shares)
        return by_request

    def _beta(self, mean: float, shares: Floats) -> Floats:
        """Return quantiles of the probability of a hit, whose mean over requests is given."""
        from scipy.special import betaincinv

        spread = (1 - self.request_effect) / self.request_effect
        return np.asarray(betaincinv(mean * spread, (1 - mean) * spread, shares), np.float64)

    def _mean_over_requests(self, output: npt.NDArray[Any]) -> float:
        """Return the mean over requests with which the mean over steps is ``hit_rate``, by bisection.

        A request takes a number of steps in proportion to its decoded tokens / (1 + its mean of accepted tokens).
        """
        from scipy.special import ndtr, ndtri

        shares, tied = (np.arange(_QUANTILES) + 0.5) / _QUANTILES, self.length_correlation
        ranks = ndtr(tied * ndtri(shares)[:, None] + np.sqrt(1 - tied**2) * ndtri(shares))
        lengths = np.sort(output)[(ranks * len(output)).astype(np.int64).clip(max=len(output) - 1)]
        decoded = np.maximum(lengths - 1.0, 1e-9).mean(axis=1)  # by quantile of the hits; the prefill gives one token
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            rates = self._beta(middle, shares)
            steps = decoded / (1 + rates * self.survival.sum())
            low, high = (middle, high) if steps @ rates < self.hit_rate * steps.sum() else (low, middle)
        return high


@dataclass(frozen=True)
class DraftLength:
    """What a number of proposed tokens (0: no speculation) gives: its capacity, and metrics by load.

    ``capacity_rps`` has NaN where it was not searched. The sequences have a value for each load of the study: means
    over requests of TPOT and JCT, how many times shorter they are than without speculation (from the same requests and,
    for the model interval, from the same errors of the cost model), tokens of a sequence in a step, and sequences of a
    step.
    """

    tokens: int
    capacity_rps: Estimate
    binds: str
    tpot_s: tuple[Estimate, ...]
    jct_s: tuple[Estimate, ...]
    tpot_speedup: tuple[Estimate, ...]
    jct_speedup: tuple[Estimate, ...]
    tokens_per_step: tuple[Estimate, ...]
    batch_seqs: tuple[Estimate, ...]


@dataclass(frozen=True)
class SpeculationStudy:
    """Whether speculative decoding helps at the loads of a deployment: with and without it on the same requests.

    ``loads`` are shares of ``base_rps``, the capacity without speculation, and ``rates_rps`` the same in requests/s.
    ``lengths`` begins with the one of 0 tokens.
    """

    name: str
    metadata: tuple[str, ...]
    method: str
    base_rps: float
    loads: tuple[float, ...]
    rates_rps: tuple[float, ...]
    lengths: tuple[DraftLength, ...]
    requests: int
    seeds: int
    limits: tuple[str, ...]
    notes: tuple[str, ...]


def uniform(key: int, counter: int) -> float:
    """Return the number in [0, 1) that a key, below 2^32, gives a counter: the same compiled and interpreted.

    Integers of 32 bits are mixed by ``lowbias32`` (C. Wellons, hash-prospector, 2018), with products that stay below
    2^48.
    """
    mixed = counter * 0x9E3779B1 & _BITS
    for _ in range(2):
        mixed ^= mixed >> 16
        mixed = (mixed * 0x352D + ((mixed * 0x7FEB & _LOW) << 16)) & _BITS
        mixed ^= mixed >> 15
        mixed = (mixed * 0xA68B + ((mixed * 0x846C & _LOW) << 16)) & _BITS
        mixed ^= mixed >> 16
        mixed ^= key
    return mixed / 4294967296.0


def accepted(drawn: float, hit_probability: float, survival: Floats, drafts: int) -> int:
    """Return how many of ``drafts`` proposed tokens a step accepts, given a uniform random number."""
    tokens = 0
    while tokens < drafts and drawn < hit_probability * survival[tokens]:
        tokens += 1
    return tokens
