"""What a cut saves all together, played forward by what is predicted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate

import numpy as np

from lengthwise.gateway.core.entry import Entry


def believed(entry: Entry) -> float:
    """Predicted tokens still to come, also of one that has made more of them than had been thought.

    Within a window ``remaining`` is counted down from what was predicted at its beginning, to 1 where that is passed:
    a stream that goes on beyond it is not about to end. From half of it on the distribution is asked again, once a
    prediction, for what is left of those that have come so far; where only a number is known, what is passed is to
    last half as long again (as beyond all quantiles of a distribution).
    """
    forecast, generated = entry.request.forecast, entry.request.generated_tokens
    if entry.remaining > (entry.predicted - forecast.at_tokens) / 2 or not generated:
        return entry.remaining
    most = float(max(1, entry.request.max_tokens - generated))
    if forecast.quantiles is None:
        late = max(1.0, generated / 2) if entry.remaining <= 1 else entry.remaining
        return min(late, most)
    if entry.late_tokens != entry.late_tokens:
        from lengthwise.predict import LEVELS, LengthDistribution

        belief = LengthDistribution(np.asarray(forecast.quantiles)[None, :], LEVELS)
        entry.late_tokens = float(belief.remaining(generated)[0])
    return min(max(entry.remaining, entry.late_tokens), most)


def places(there: Iterable[float]) -> list[float]:
    """When seats come free by themselves, in tokens from now, of those who are to make so many more.

    As of independent exponential times with these means, the shortest gone first: of four that are to make 100 more
    the first is done after 25, the second after 58.
    """
    rates = list(accumulate(1 / tokens for tokens in sorted(there, reverse=True)))
    return list(accumulate(1 / rate for rate in reversed(rates)))


def starts(free: list[float], waiting: Iterable[float]) -> float:
    """The sum of the starts of those who wait, each in its turn at the seat that is free first."""
    heapify(free)
    total = 0.0
    for tokens in waiting:
        total += free[0]
        heapreplace(free, free[0] + tokens)
    return total


def saved(
    there: Sequence[float], leaving: float, waiting: Sequence[tuple[float, float]], key: float
) -> float:
    """Tokens that those who wait start sooner by, less those that the one that leaves waits for its seat.

    Args:
        there: What the others that run have still to make.
        leaving: The same of the one that would leave.
        waiting: Keys, and what each is to make, in order.
        key: Of the one that would leave: it goes behind those whose keys are no greater.
    """
    lengths = [tokens for _, tokens in waiting]
    at = bisect_right([one for one, _ in waiting], key)
    before = starts(places([*there, leaving]), lengths)
    return before - starts([0.0, *places(there)], [*lengths[:at], leaving, *lengths[at:]])
