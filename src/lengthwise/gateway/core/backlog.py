"""What stands before one that arrives: tokens of all models, where engines are shared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lengthwise.gateway.core.bins import Bins
from lengthwise.gateway.core.queue import Queue


def tokens_by_model(queue: Queue, bins: Bins) -> dict[str, float]:
    """Predicted output tokens still to come of those who wait or gather; a model of which nobody does is not there."""
    models = sorted(queue.tokens.keys() | bins.tokens_of.keys())
    return {model: queue.tokens.get(model, 0.0) + bins.tokens_of.get(model, 0.0) for model in models}


def drained_s(
    tokens: Mapping[str, float], serving: Mapping[str, Sequence[int]], rates: Sequence[float]
) -> list[float]:
    """For each worker, the seconds until all that waits for it is done, were everybody who waits served.

    A model's tokens are poured where they are done soonest. Models that fewest workers serve come first: the
    others can go around them. So a model whose engines are its own is not held up by another one's queue.

    Args:
        tokens: That wait, by model.
        serving: Numbers of the workers that serve a model, for each of these models.
        rates: Tokens a second, by worker.
    """
    levels_s = [0.0] * len(rates)
    for model in sorted(tokens, key=lambda one: (len(serving[one]), one)):
        _pour(levels_s, rates, serving[model], tokens[model])
    return levels_s


def _pour(levels_s: list[float], rates: Sequence[float], into: Iterable[int], tokens: float) -> None:
    """Fills the lowest of the workers up to one level."""
    lowest = sorted(into, key=levels_s.__getitem__)
    rate, done = 0.0, tokens
    for at, worker in enumerate(lowest):
        if rate and done / rate <= levels_s[worker]:
            lowest = lowest[:at]
            break
        rate += rates[worker]
        done += rates[worker] * levels_s[worker]
    for worker in lowest:
        levels_s[worker] = done / rate
