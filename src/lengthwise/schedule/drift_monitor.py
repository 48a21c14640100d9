"""Sequential test of whether live lengths still follow the planned distributions. Its result is valid at any time.

Every prompt and every output has a rank among the planned lengths. While the lengths do not change, ranks are uniform.
``Evidence`` bets against uniform ranks. Once the mean evidence of the tested sides (prompts, outputs) reaches ``1 /
false_positive_rate``, the change is significant, and the test raises an alarm when ``min_requests`` requests follow the
change. By Ville's inequality, lengths that never change ever raise an alarm with a probability of at most
``false_positive_rate``, for any distributions, any dependence of outputs on prompts, and any duration. If the planned
lengths are counts of requests, ranks are among these and all tested requests, so that the test accounts for their
sampling error. After an alarm the test restarts on the following requests, with the same false-positive rate.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.lengths import MAX_TOKENS, TaskLengths
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Floats, Ints

SIDES = ("prompts", "outputs")
BLOCK = 16  # ranks between two starts of new bets
CELLS = 256
"""A bet is constant on each 1 / CELLS of [0, 1], equal to its mean there, so that it integrates to 1 exactly."""
SHIFTS = (-0.8, -0.4, -0.2, 0.2, 0.4, 0.8)  # shifts of the normal scores of ranks, in standard deviations
SPREADS = (0.75, 0.87, 1.15, 1.35)  # factors on the standard deviation of the normal scores of ranks
CUBIC_WEIGHTS = (-0.5, -0.25, 0.25, 0.5)  # weights of the third Legendre polynomial in the density of ranks
BETS = len(SHIFTS) + len(SPREADS) + len(CUBIC_WEIGHTS)
LOG_SLACK = 2.0
"""The estimated start of a change is the latest whose log likelihood ratio is at most this far below the best."""
BUCKET = 256  # lengths per bucket of counts; sums per bucket make ranks cheap
RETAINED = 1 << 14  # latest requests that a test stores
_MAX_STAKE = 1e290


class Evidence:
    """Evidence that ranks are not uniform, for several parallel streams of ranks.

    It is the wealth of a bettor that starts with one unit and bets against uniform ranks (a test martingale). The bet
    factors of the latest ``retained`` ranks locate the start of a change. ``count`` is the number of all ranks.
    """

    def __init__(self, streams: tuple[int, ...] = (), retained: int = 0) -> None:
        self.count = 0
        self._stakes = np.zeros((*streams, BETS))
        self._factors: deque[Floats] = deque(maxlen=retained)

    def add(self, ranks: npt.ArrayLike) -> None:
        """Add one rank, from 0 to 1, to each stream."""
        factor = bet_factors()[np.minimum((np.asarray(ranks) * CELLS).astype(np.int64), CELLS - 1)]
        if self.count % BLOCK == 0:
            self._stakes += _reserve(self.count // BLOCK) - _reserve(self.count // BLOCK + 1)
        self._stakes = np.minimum(self._stakes * factor, _MAX_STAKE)
        self._factors.append(factor)
        self.count += 1

    @property
    def amount(self) -> Floats:
        """Return the wealth of each stream. The expected wealth is 1 while ranks are uniform."""
        return np.asarray(self._stakes.mean(axis=-1) + _reserve(-(-self.count // BLOCK)))

    def change_length(self, stream: int) -> int:
        """Return the number of a stream's ranks since the change: the fewest with almost all the evidence."""
        logs = np.log(np.array([factors[stream] for factors in reversed(self._factors)]))
        best = np.cumsum(logs, axis=0).max(axis=1)
        return int(np.argmax(best >= best.max() - LOG_SLACK)) + 1


def _reserve(blocks: int) -> float:
    """Return the part of the initial unit that is not bet yet after ``blocks`` blocks: 1 / log(blocks + e)."""
    return 1.0 / math.log(blocks + math.e)


@lru_cache(maxsize=1)
def bet_factors() -> Floats:
    """Return [CELLS, BETS] the factor by which each bet's wealth grows if a rank is in a cell of [0, 1]."""
    edges, normal = np.arange(CELLS + 1) / CELLS, NormalDist()

    def normal_cdf(shift: float, spread: float) -> Floats:  # of ranks whose normal scores are shift + spread z
        inner = [normal.cdf((normal.inv_cdf(float(edge)) - shift) / spread) for edge in edges[1:-1]]
        return np.array([0.0, *inner, 1.0])

    x = 2 * edges - 1  # The cubic bets have the density 1 + weight P3(2 u - 1).
    cdfs = [
        *(normal_cdf(shift, 1.0) for shift in SHIFTS),
        *(normal_cdf(0.0, spread) for spread in SPREADS),
        *(edges + weight * (5 * x**4 - 6 * x**2 + 1) / 16 for weight in CUBIC_WEIGHTS),
    ]
    factors = np.column_stack([CELLS * np.diff(cdf) for cdf in cdfs])
    factors.setflags(write=False)
    return factors


class KnownRanks:
    """Ranks in a known distribution (the probability integral transform)."""

    def __init__(self, pmf: Floats) -> None:
        self._pmf = pmf
        self._below = np.concatenate([[0.0], np.cumsum(pmf)])

    def rank_of(self, tokens: int, draw: float) -> float:
        """Return the rank of a length (0 to 1, and 1 beyond the longest). ``draw``, uniform on [0, 1), breaks ties."""
        if tokens >= len(self._pmf):
            return 1.0
        return float(min(self._below[tokens] + draw * self._pmf[tokens], 1.0))


class EmpiricalRanks:
    """Ranks among all lengths observed so far, including the new one.

    For exchangeable lengths these ranks are exactly uniform and independent, whatever the distribution (Vovk, Gammerman
    and Shafer, 2005). Few lengths at the beginning cost power, not validity. ``counts`` [longest + 1] are the requests
    of each length that were observed before.
    """

    def __init__(self, counts: Floats | None = None) -> None:
        known = np.zeros(0) if counts is None else counts
        self._counts = np.zeros((max(1, -(-len(known) // BUCKET)), BUCKET))
        self._counts.reshape(-1)[: len(known)] = known
        self._totals = self._counts.sum(axis=1)
        self._seen = float(self._totals.sum())

    def rank_of(self, tokens: int, draw: float) -> float:
        """Return the rank of a length, from 0 to 1, and count the length. ``draw``, uniform on [0, 1), breaks ties."""
        bucket, column = divmod(tokens, BUCKET)
        if bucket >= len(self._totals):
            more = bucket + 1 - len(self._totals)
            self._counts = np.concatenate([self._counts, np.zeros((more, BUCKET))])
            self._totals = np.concatenate([self._totals, np.zeros(more)])
        below = float(self._totals[:bucket].sum()) + float(self._counts[bucket, :column].sum())
        self._counts[bucket, column] += 1
        self._totals[bucket] += 1
        self._seen += 1
        return (below + draw * float(self._counts[bucket, column])) / self._seen


@dataclass(frozen=True)
class Monitor:
    """Settings of a drift test."""

    false_positive_rate: float = 0.01  # largest probability that lengths that never change raise an alarm
    min_requests: int = 100  # requests that must follow the change before an alarm, as a sample of the new lengths
    # The test uses one request in this many. The false-positive rate holds for exchangeable requests: if neighbours are
    # similar, such as turns of a conversation, test so few that tested requests are not similar.
    every: int = 1
    seed: int = 0  # seed of the draws that break ties, and of the choice of counted requests if ``every`` is above 1
    sides: tuple[str, ...] = SIDES  # "prompts", "outputs" or both; leave out a side whose lengths are only estimated

    def __post_init__(self) -> None:
        if not 0 < self.false_positive_rate < 1:
            raise InputError(f"false_positive_rate must be above 0 and below 1; it is {self.false_positive_rate}")
        if not 1 <= self.min_requests <= RETAINED:
            raise InputError(f"min_requests must be from 1 to {RETAINED}; it is {self.min_requests}")
        if self.every < 1:
            raise InputError(f"every must be at least 1; it is {self.every}")
        if not self.sides or not set(self.sides) <= set(SIDES):
            raise InputError(f"sides must be some of {SIDES}; they are {self.sides}")


@dataclass(frozen=True, eq=False)
class Alarm:
    """A detected change of lengths.

    The test detected it at ``at_s``, at request number ``request`` (from 1, over all observed requests). The changed
    lengths began at ``started_s`` with request number ``started``. ``evidence`` is the wealth of each side. ``sides``
    are the changed sides, at least the side with the most evidence. ``watched`` are the tested sides. ``prompt_tokens``
    and ``output_tokens`` are the lengths since the change, oldest first, at most the latest ``RETAINED``.
    """

    request: int
    at_s: float
    started: int
    started_s: float
    evidence: dict[str, float]
    sides: tuple[str, ...]
    prompt_tokens: Ints = field(repr=False)
    output_tokens: Ints = field(repr=False)
    watched: tuple[str, ...] = SIDES


class Watcher:
    """Tests requests one after another. Equal requests and seeds give equal alarms.

    Observe requests in the order of arrival, not of completion, because short requests complete early. Exclude censored
    outputs, because they do not show their length. ``requests`` is the number of requests over which the planned
    lengths were counted, or None if the distributions are exact.
    """

    def __init__(self, task: TaskLengths, requests: int | None = None, monitor: Monitor = Monitor()) -> None:
        if requests is not None and requests < 1:
            raise InputError(f"lengths must be counted over at least 1 request; it is {requests}")
        self.monitor = monitor
        self._rng = np.random.default_rng(monitor.seed)
        self._sides = tuple(SIDES.index(side) for side in SIDES if side in monitor.sides)
        planned = (task.prompt_pmf, task.output_pmf)
        self.ranks: tuple[KnownRanks | EmpiricalRanks, ...] = tuple(
            KnownRanks(planned[n]) if requests is None else EmpiricalRanks(self._subsample(planned[n], requests))
            for n in self._sides
        )
        self._evidence, self._significant = Evidence((len(self._sides),), RETAINED), False
        self._retained: deque[tuple[int, int, float]] = deque(maxlen=RETAINED)
        self._last_s, self.observed, self.alarms = -math.inf, 0, 0

    def _subsample(self, pmf: Floats, requests: int) -> Floats:
        """Return [longest + 1] the counts of a random sample of one in ``every`` of the counted requests.

        Scaled counts do not suffice: ranks among fractions of requests are not uniform.
        """
        counts = np.rint(pmf * requests).astype(np.int64)
        if self.monitor.every == 1:
            return counts.astype(np.float64)
        size = int(counts.sum()) // self.monitor.every
        chosen = self._rng.multivariate_hypergeometric(counts, size, method="marginals")
        return np.asarray(chosen, dtype=np.float64)

    @property
    def evidence(self) -> float:
        """Return the mean wealth of the sides since the test started: significant at 1 / false_positive_rate."""
        return float(self._evidence.amount.mean())

    def observe(self, prompt_tokens: int, output_tokens: int, at_s: float) -> Alarm | None:
        """Observe one completed request. Return an alarm if a change is significant and old enough, otherwise None.

        ``at_s`` is a monotonic time. Raises InputError if a length is not a positive integer, or time goes back.
        """
        for side, tokens in zip(SIDES, (prompt_tokens, output_tokens), strict=True):
            if not (1 <= tokens <= MAX_TOKENS and tokens == int(tokens)):
                raise InputError(f"{side} must be whole numbers of tokens from 1 to {MAX_TOKENS}; one is {tokens}")
        if not at_s >= self._last_s:
            raise InputError(f"requests must be observed in order of time; {at_s} s came after {self._last_s} s")
        pair = int(prompt_tokens), int(output_tokens)
        self._retained.append((*pair, at_s))
        self._last_s, self.observed = at_s, self.observed + 1
        if self.observed % self.monitor.every == 0:
            draws = self._rng.random(len(self._sides)).tolist()
            tested = zip(self.ranks, self._sides, draws, strict=True)
            self._evidence.add([ranks.rank_of(pair[side], draw) for ranks, side, draw in tested])
            self._significant = self._significant or self.evidence >= 1 / self.monitor.false_positive_rate
        return self._alarm() if self._significant else None

    def _alarm(self) -> Alarm | None:
        amounts = self._evidence.amount
        tested = self._evidence.change_length(int(amounts.argmax()))
        since = min(tested * self.monitor.every, len(self._retained))
        if since < self.monitor.min_requests:
            return None
        rows = list(self._retained)[-since:]
        threshold = min(float(amounts.max()), self.monitor.false_positive_rate**-0.5)
        evidence = dict(zip((SIDES[n] for n in self._sides), amounts.tolist(), strict=True))
        prompts, outputs, _ = zip(*rows, strict=True)
        self._evidence, self._significant = Evidence((len(self._sides),), RETAINED), False
        self.ranks = tuple(EmpiricalRanks() for _ in self._sides)
        self._retained.clear()
        self.alarms += 1
        return Alarm(
            request=self.observed,
            at_s=self._last_s,
            started=self.observed - since + 1,
            started_s=rows[0][2],
            evidence=evidence,
            sides=tuple(side for side, amount in evidence.items() if amount >= threshold),
            prompt_tokens=np.array(prompts, dtype=np.int64),
            output_tokens=np.array(outputs, dtype=np.int64),
            watched=tuple(evidence),
        )
