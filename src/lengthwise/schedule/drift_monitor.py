"""Whether live lengths are still those that were planned for: a test that may be looked at for ever.

Every request has two ranks, of its prompt and of its output, among the lengths planned for. While lengths do not
change, each is uniform; ``_evidence`` bets against that, and an alarm is given where the mean of both sides' evidence
reaches ``1 / false_alarms``. While nothing changes this ever happens with a probability of at most ``false_alarms``,
whatever the distributions are, however prompts and outputs hang together, and however long is watched. Where the
plan's lengths were counted over requests, ranks are among these and all that followed: that they are a sample is
part of the test.

After an alarm the watch begins anew among what comes from then on, with a false-alarm rate of its own.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.lengths import MAX_TOKENS, TaskLengths
from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]

BLOCK = 16
"""Requests from one start to the next."""
CELLS = 256
"""A bet is a constant on each so large a part of [0, 1], its mean there: it adds up to 1 exactly."""
SHIFTS = (-0.8, -0.4, -0.2, 0.2, 0.4, 0.8)
"""Standard deviations by which normal scores are moved."""
SPREADS = (0.75, 0.87, 1.15, 1.35)
"""Factors on their standard deviation."""
BENDS = (-0.5, -0.25, 0.25, 0.5)
"""Weights of the polynomial."""
SLACK = 2.0
"""Logarithm of how many times likelier another start may be than the one that is taken: late ones mix nothing in."""
BETS = len(SHIFTS) + len(SPREADS) + len(BENDS)

_MOST = 1e290


class Evidence:
    """What one unit has become, for each of some streams of ranks.

    Args:
        streams: Shape of the streams that are watched side by side.
        retained: Last ranks of which what each bet paid is kept, to tell where a change began.

    Attributes:
        seen: Ranks of each stream so far.
    """

    def __init__(self, streams: tuple[int, ...] = (), retained: int = 0) -> None:
        self.seen = 0
        self._stakes = np.zeros((*streams, BETS))
        self._paid: deque[Floats] = deque(maxlen=retained)

    def add(self, ranks: npt.ArrayLike) -> None:
        """One more rank of each stream, 0 to 1."""
        factor = _factors()[np.minimum((np.asarray(ranks) * CELLS).astype(np.int64), CELLS - 1)]
        if self.seen % BLOCK == 0:
            self._stakes += _left(self.seen // BLOCK) - _left(self.seen // BLOCK + 1)
        self._stakes = np.minimum(self._stakes * factor, _MOST)
        self._paid.append(factor)
        self.seen += 1

    @property
    def amount(self) -> Floats:
        """[streams] what became of one unit; its mean stays 1 while nothing changes."""
        return np.asarray(self._stakes.mean(axis=-1) + _left(-(-self.seen // BLOCK)))

    def length(self, stream: int) -> int:
        """How many of the last ranks of a stream are of the change: the fewest that are about as likely as any."""
        paid = np.log(np.array([factors[stream] for factors in reversed(self._paid)]))
        best = np.cumsum(paid, axis=0).max(axis=1)
        return int(np.argmax(best >= best.max() - SLACK)) + 1


def _left(blocks: int) -> float:
    """What is not staked yet after so many blocks: it falls as slowly as a logarithm grows."""
    return 1.0 / math.log(blocks + math.e)


@lru_cache(maxsize=1)
def _factors() -> Floats:
    """[cells, bets] what each bet pays there."""
    edges = np.arange(CELLS + 1) / CELLS
    columns = [
        *(_scores(edges, shift, 1.0) for shift in SHIFTS),
        *(_scores(edges, 0.0, spread) for spread in SPREADS),
        *(_bent(edges, bend) for bend in BENDS),
    ]
    made = np.column_stack([CELLS * np.diff(column) for column in columns])
    made.setflags(write=False)
    return made


def _scores(edges: Floats, shift: float, spread: float) -> Floats:
    """[edges] share of ranks below each where normal scores are ``shift + spread z``."""
    normal = NormalDist()
    inner = [normal.cdf((normal.inv_cdf(float(edge)) - shift) / spread) for edge in edges[1:-1]]
    return np.array([0.0, *inner, 1.0])


def _bent(edges: Floats, bend: float) -> Floats:
    """[edges] the same of the density ``1 + bend P3(2 u - 1)``."""
    x = 2 * edges - 1
    return np.asarray(edges + bend * (5 * x**4 - 6 * x**2 + 1) / 16)


WIDTH = 256
"""Lengths that are counted together, so that a rank need not count them all."""


class Ranks(Protocol):
    """What tells ranks."""

    def of(self, tokens: int, draw: float) -> float:
        """The rank of a length; ``draw``, uniform from 0 to 1, decides among equal ones."""
        ...


class KnownRanks:
    """Ranks in a distribution that is known: its probability integral transform."""

    def __init__(self, pmf: Floats) -> None:
        self._pmf = pmf
        self._below = np.concatenate([[0.0], np.cumsum(pmf)])

    def of(self, tokens: int, draw: float) -> float:
        """As ``Ranks``; what is longer than anything ranks 1."""
        if tokens >= len(self._pmf):
            return 1.0
        return float(min(self._below[tokens] + draw * self._pmf[tokens], 1.0))


class SeenRanks:
    """Ranks among all that were seen, each new length included and then counted.

    Of lengths that come in no particular order these ranks are exactly uniform and independent, whatever their
    distribution is (Vovk, Gammerman and Shafer, 2005): that the first of them are few costs power, and no truth.

    Args:
        counts: [longest + 1] how often each length was seen before, in whole requests.
    """

    def __init__(self, counts: Floats | None = None) -> None:
        known = np.zeros(0) if counts is None else counts
        rows = max(1, -(-len(known) // WIDTH))
        self._counts = np.zeros((rows, WIDTH))
        self._counts.reshape(-1)[: len(known)] = known
        self._rows = self._counts.sum(axis=1)
        self._seen = float(self._rows.sum())

    def of(self, tokens: int, draw: float) -> float:
        """As ``Ranks``; the length is counted from then on."""
        row, column = divmod(tokens, WIDTH)
        if row >= len(self._rows):
            self._grow(row + 1)
        below = float(self._rows[:row].sum()) + float(self._counts[row, :column].sum())
        self._counts[row, column] += 1
        self._rows[row] += 1
        self._seen += 1
        return (below + draw * float(self._counts[row, column])) / self._seen

    def _grow(self, rows: int) -> None:
        more = rows - len(self._rows)
        self._counts = np.concatenate([self._counts, np.zeros((more, WIDTH))])
        self._rows = np.concatenate([self._rows, np.zeros(more)])


Ints = npt.NDArray[np.int64]

SIDES = ("prompts", "outputs")
RETAINED = 1 << 14
"""Last requests that are remembered for an alarm."""


@dataclass(frozen=True)
class Monitor:
    """How lengths are watched.

    Attributes:
        false_positive_rate: Probability that lengths which never change raise an alarm, ever.
        min_requests: An alarm waits until so many have come since the change began, to know the new lengths by.
        every: One request in so many is tested. The promise is of requests that come in no particular order: where
            neighbours are alike, as turns of one conversation are, test so few that they no longer are.
        seed: Of the draws that decide among equal lengths, and which counted requests are kept with ``every``.
        sides: Which lengths are tested, "prompts", "outputs" or both: leave out one that is only estimated.
    """

    false_positive_rate: float = 0.01
    min_requests: int = 100
    every: int = 1
    seed: int = 0
    sides: tuple[str, ...] = SIDES

    def __post_init__(self) -> None:
        if not 0 < self.false_positive_rate < 1:
            raise InputError(f"false_alarms must be above 0 and below 1; it is {self.false_positive_rate}")
        if not 1 <= self.min_requests <= RETAINED:
            raise InputError(f"least_requests must be from 1 to {RETAINED}; it is {self.min_requests}")
        if self.every < 1:
            raise InputError(f"every must be at least 1; it is {self.every}")
        if not self.sides or not set(self.sides) <= set(SIDES):
            raise InputError(f"sides must be some of {SIDES}; they are {self.sides}")


@dataclass(frozen=True, eq=False)
class Alarm:
    """That lengths moved.

    Attributes:
        request: The request at which it was sure, counted from 1 over all that was observed.
        at_s: When that was.
        started: The request from which on lengths are taken to be others.
        started_s: When that was.
        evidence: By side, what a unit staked on its change became.
        sides: Those that moved: at least the one with most evidence.
        prompt_tokens: Of the requests since the change, oldest first; of very many the last.
        output_tokens: Of the same.
        watched: Sides that were tested; of the others nothing is known.
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
    """Watches requests one after another. Equal requests and seeds give equal alarms.

    Requests are to be told in the order of their arrival, not of their end: at any time those that ended
    early are the short ones. Who was cut short by something else than its own end says nothing of lengths.

    Args:
        task: Lengths that were planned for.
        requests: How many requests they were counted over; None: they are known.
        monitor: How to watch.
    """

    def __init__(self, task: TaskLengths, requests: int | None = None, monitor: Monitor = Monitor()) -> None:
        if requests is not None and requests < 1:
            raise InputError(f"lengths must be counted over at least 1 request; it is {requests}")
        self.monitor = monitor
        self._rng = np.random.default_rng(monitor.seed)
        self._sides = tuple(SIDES.index(side) for side in SIDES if side in monitor.sides)
        planned = (task.prompt_pmf, task.output_pmf)
        self._ranks: tuple[Ranks, ...] = tuple(
            KnownRanks(planned[n]) if requests is None else SeenRanks(self._sampled(planned[n], requests))
            for n in self._sides
        )
        self._evidence, self._significant = self._anew()
        self._retained: deque[tuple[int, int, float]] = deque(maxlen=RETAINED)
        self._last_s, self.observed, self.alarms = -np.inf, 0, 0

    @property
    def evidence(self) -> float:
        """What a unit became since the watch began; an alarm is given from ``1 / false_alarms`` on."""
        return float(self._evidence.amount.mean())

    def observe(self, prompt_tokens: int, output_tokens: int, at_s: float) -> Alarm | None:
        """One request that ended on its own; an alarm if it makes sure that lengths moved.

        Args:
            prompt_tokens: Of the request.
            output_tokens: Likewise.
            at_s: When it is told, by any clock that does not go back.

        Raises:
            InputError: A length is no whole number from 1 on, or time goes back.
        """
        prompt, output = _checked("prompts", prompt_tokens), _checked("outputs", output_tokens)
        if not at_s >= self._last_s:
            raise InputError(f"requests must be told in order of time; one at {at_s} s came after {self._last_s} s")
        self._retained.append((prompt, output, at_s))
        self._last_s, self.observed = at_s, self.observed + 1
        if self.observed % self.monitor.every == 0:
            self._test(prompt, output)
        return self._alarm() if self._significant else None

    def _sampled(self, pmf: Floats, requests: int) -> Floats:
        """[longest + 1] how often each length is among one in ``every`` of the counted requests, by chance.

        As few of them are tested as of those that come. Each of them counts whole: ranks among parts of requests
        would not be uniform.
        """
        counts = np.rint(pmf * requests).astype(np.int64)
        if self.monitor.every == 1:
            return counts.astype(np.float64)
        kept = int(counts.sum()) // self.monitor.every
        chosen = self._rng.multivariate_hypergeometric(counts, kept, method="marginals")
        return np.asarray(chosen, dtype=np.float64)

    def _anew(self) -> tuple[Evidence, bool]:
        return Evidence((len(self._sides),), RETAINED), False

    def _test(self, prompt: int, output: int) -> None:
        draws, pair = self._rng.random(len(self._sides)), (prompt, output)
        tested = zip(self._ranks, self._sides, draws.tolist(), strict=True)
        self._evidence.add([ranks.of(pair[side], draw) for ranks, side, draw in tested])
        self._significant = self._significant or self.evidence >= 1 / self.monitor.false_positive_rate

    def _alarm(self) -> Alarm | None:
        """The alarm, once enough is known of the new lengths; then all begins anew."""
        amounts = self._evidence.amount
        tested = self._evidence.length(int(amounts.argmax()))
        since = min(tested * self.monitor.every, len(self._retained))
        if since < self.monitor.min_requests:
            return None
        rows = list(self._retained)[-since:]
        enough = min(float(amounts.max()), self.monitor.false_positive_rate**-0.5)
        told = dict(zip((SIDES[n] for n in self._sides), amounts.tolist(), strict=True))
        prompts, outputs, _ = zip(*rows, strict=True)
        self._evidence, self._significant = self._anew()
        self._ranks = tuple(SeenRanks() for _ in self._sides)
        self._retained.clear()
        self.alarms += 1
        return Alarm(
            request=self.observed,
            at_s=self._last_s,
            started=self.observed - since + 1,
            started_s=rows[0][2],
            evidence=told,
            sides=tuple(side for side, amount in told.items() if amount >= enough),
            prompt_tokens=np.array(prompts, dtype=np.int64),
            output_tokens=np.array(outputs, dtype=np.int64),
            watched=tuple(told),
        )


def _checked(side: str, tokens: int) -> int:
    if not (1 <= tokens <= MAX_TOKENS and tokens == int(tokens)):
        raise InputError(f"{side} must be whole numbers of tokens from 1 to {MAX_TOKENS}; one is {tokens}")
    return int(tokens)
