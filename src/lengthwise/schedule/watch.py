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

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lengthwise.schedule._evidence import Evidence
from lengthwise.schedule._ranks import KnownRanks, Ranks, SeenRanks
from lengthwise.schedule.lengths import MOST_TOKENS, TaskLengths
from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SIDES = ("prompts", "outputs")
KEPT = 1 << 14
"""Last requests that are remembered for an alarm."""


@dataclass(frozen=True)
class Watch:
    """How lengths are watched.

    Attributes:
        false_alarms: Probability that lengths which never change raise an alarm, ever.
        least_requests: An alarm waits until so many have come since the change began, to know the new lengths by.
        every: One request in so many is tested. The promise is of requests that come in no particular order: where
            neighbours are alike, as turns of one conversation are, test so few that they no longer are.
        seed: Of the draws that decide among equal lengths, and which counted requests are kept with ``every``.
        sides: Which lengths are tested, "prompts", "outputs" or both: leave out one that is only estimated.
    """

    false_alarms: float = 0.01
    least_requests: int = 100
    every: int = 1
    seed: int = 0
    sides: tuple[str, ...] = SIDES

    def __post_init__(self) -> None:
        if not 0 < self.false_alarms < 1:
            raise InputError(f"false_alarms must be above 0 and below 1; it is {self.false_alarms}")
        if not 1 <= self.least_requests <= KEPT:
            raise InputError(f"least_requests must be from 1 to {KEPT}; it is {self.least_requests}")
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
        began: The request from which on lengths are taken to be others.
        began_s: When that was.
        evidence: By side, what a unit staked on its change became.
        sides: Those that moved: at least the one with most evidence.
        prompt_tokens: Of the requests since the change, oldest first; of very many the last.
        output_tokens: Of the same.
        watched: Sides that were tested; of the others nothing is known.
    """

    request: int
    at_s: float
    began: int
    began_s: float
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
        watch: How to watch.
    """

    def __init__(self, task: TaskLengths, requests: int | None = None, watch: Watch = Watch()) -> None:
        if requests is not None and requests < 1:
            raise InputError(f"lengths must be counted over at least 1 request; it is {requests}")
        self.watch = watch
        self._rng = np.random.default_rng(watch.seed)
        self._sides = tuple(SIDES.index(side) for side in SIDES if side in watch.sides)
        planned = (task.prompt_pmf, task.output_pmf)
        self._ranks: tuple[Ranks, ...] = tuple(
            KnownRanks(planned[n]) if requests is None else SeenRanks(self._thinned(planned[n], requests))
            for n in self._sides
        )
        self._evidence, self._sure = self._anew()
        self._kept: deque[tuple[int, int, float]] = deque(maxlen=KEPT)
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
            raise InputError(
                f"requests must be told in order of time; one at {at_s} s came after {self._last_s} s"
            )
        self._kept.append((prompt, output, at_s))
        self._last_s, self.observed = at_s, self.observed + 1
        if self.observed % self.watch.every == 0:
            self._test(prompt, output)
        return self._alarm() if self._sure else None

    def _thinned(self, pmf: Floats, requests: int) -> Floats:
        """[longest + 1] how often each length is among one in ``every`` of the counted requests, by chance.

        As few of them are tested as of those that come. Each of them counts whole: ranks among parts of requests
        would not be uniform.
        """
        counts = np.rint(pmf * requests).astype(np.int64)
        if self.watch.every == 1:
            return counts.astype(np.float64)
        kept = int(counts.sum()) // self.watch.every
        chosen = self._rng.multivariate_hypergeometric(counts, kept, method="marginals")
        return np.asarray(chosen, dtype=np.float64)

    def _anew(self) -> tuple[Evidence, bool]:
        return Evidence((len(self._sides),), KEPT), False

    def _test(self, prompt: int, output: int) -> None:
        draws, pair = self._rng.random(len(self._sides)), (prompt, output)
        tested = zip(self._ranks, self._sides, draws.tolist(), strict=True)
        self._evidence.add([ranks.of(pair[side], draw) for ranks, side, draw in tested])
        self._sure = self._sure or self.evidence >= 1 / self.watch.false_alarms

    def _alarm(self) -> Alarm | None:
        """The alarm, once enough is known of the new lengths; then all begins anew."""
        amounts = self._evidence.amount
        tested = self._evidence.length(int(amounts.argmax()))
        since = min(tested * self.watch.every, len(self._kept))
        if since < self.watch.least_requests:
            return None
        rows = list(self._kept)[-since:]
        enough = min(float(amounts.max()), self.watch.false_alarms**-0.5)
        told = dict(zip((SIDES[n] for n in self._sides), amounts.tolist(), strict=True))
        prompts, outputs, _ = zip(*rows, strict=True)
        self._evidence, self._sure = self._anew()
        self._ranks = tuple(SeenRanks() for _ in self._sides)
        self._kept.clear()
        self.alarms += 1
        return Alarm(
            request=self.observed,
            at_s=self._last_s,
            began=self.observed - since + 1,
            began_s=rows[0][2],
            evidence=told,
            sides=tuple(side for side, amount in told.items() if amount >= enough),
            prompt_tokens=np.array(prompts, dtype=np.int64),
            output_tokens=np.array(outputs, dtype=np.int64),
            watched=tuple(told),
        )


def _checked(side: str, tokens: int) -> int:
    if not (1 <= tokens <= MOST_TOKENS and tokens == int(tokens)):
        raise InputError(f"{side} must be whole numbers of tokens from 1 to {MOST_TOKENS}; one is {tokens}")
    return int(tokens)


__all__ = ["SIDES", "Alarm", "Watch", "Watcher"]
