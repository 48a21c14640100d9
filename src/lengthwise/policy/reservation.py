"""KV memory reserved by predicted length: the rule of vLLM's plug-in and of the simulator.

A request reserves memory for a share of its predicted remaining tokens, or for all of them and a share of the further
tokens that its ``max_tokens`` allows. The ``margin`` sets the share. A request is admitted if the KV cache can hold the
peak of tokens that results if every request produces exactly what it reserves (Past-Future, ASPLOS '25).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable
from typing import Any

GAIN = 2.0
STEP = 0.03  # what a preemption adds to the margin of a budget
OWN_RULE = -1.0  # margin at which no memory is reserved: an engine admits by its own rule alone


def reserved_tokens(remaining: float, allowed: int, margin: float) -> float:
    """Return the output tokens that a request reserves, given its predicted ``remaining`` tokens.

    Its limit allows ``allowed`` more tokens. With a margin of 0, the request reserves what is predicted, with a margin
    of 1 or more its limit.
    """
    limit = float(max(1, allowed))
    if margin >= 1.0:
        return limit
    predicted = min(remaining, limit)
    return predicted + margin * (predicted if margin < 0.0 else limit - predicted)


def adapted_margin(margin: float, max_share: float, spent_s: float, idle_s: float, turnovers_per_s: float) -> float:
    """Return the margin after a step.

    ``spent_s``, the time to recompute what was preempted for lack of memory, raises the margin. ``idle_s``, the step's
    decoding time times the share of memory that is free while requests wait, lowers it. So the margin settles where
    recomputation takes ``max_share`` of the idle time. With ``max_share`` 0, the first preemption makes every request
    reserve its limit. The tokens of the run fill the KV cache ``turnovers_per_s`` times a second.
    """
    if max_share <= 0.0:
        return math.inf if spent_s > 0.0 else margin
    return max(OWN_RULE, margin + GAIN * turnovers_per_s * (spent_s / max_share - idle_s))


def budget_margin(margin: float, budget: float, preemptions: int, finished: int) -> float:
    """Return the least margin of a budget of preemptions per request after a step.

    Each of the ``preemptions`` for lack of memory since the last step raises it, and each of the ``finished`` requests
    lowers it by ``budget`` times as much. From a margin of 1 on requests reserve their limits, so that no more
    preemptions follow: they exceed the budget by a fixed number at most.
    """
    return OWN_RULE if budget == math.inf else max(OWN_RULE, margin + STEP * (preemptions - budget * finished))


def first_margins(max_share: float, budget: float) -> tuple[float, float]:
    """Return the margin, and the least one of the budget, at an engine's start."""
    return OWN_RULE if max_share == math.inf else 0.0, OWN_RULE if budget == math.inf else STEP


class MemoryGate:
    """Defers waiting requests while the predicted peak of KV tokens exceeds the cache.

    The margin adapts as in adaptive conformal inference (Gibbs and Candès 2021), by what preemptions cost instead of
    their number (``adapted_margin``). While it is at least 1, every request reserves its limit until it ends, so that
    an admission cannot cause a preemption. At OWN_RULE the gate is open. ``preemptions`` counts those for lack of
    memory since the last step. The ``margin`` is the larger one of that ``by_cost`` and of that ``by_budget``.

    The peak assumes that each step adds one token to each running request, without chunked prompts and speculation.
    ``needs`` returns (predicted remaining tokens, further tokens that its limit allows, tokens so far) of a request.
    """

    def __init__(
        self, max_recompute_share: float, budget: float, needs: Callable[[Any], tuple[float, int, int]]
    ) -> None:
        self._max_share, self._budget, self._needs = max_recompute_share, budget, needs
        self.by_cost, self.by_budget = first_margins(max_recompute_share, budget)
        self.margin, self.preemptions = max(self.by_cost, self.by_budget), 0

    def adapt(self, spent_s: float, idle_s: float, turnovers_per_s: float, finished: int) -> None:
        """Adapt the margin to a step. ``finished`` requests have ended since the step before it."""
        self.by_cost = adapted_margin(self.by_cost, self._max_share, spent_s, idle_s, turnovers_per_s)
        self.by_budget = budget_margin(self.by_budget, self._budget, self.preemptions, finished)
        self.margin, self.preemptions = max(self.by_cost, self.by_budget), 0

    def admissible(self, waiting: Iterable[Any], running: Iterable[Any], pool_tokens: int, block_size: int) -> int:
        """Return how many of the first waiting requests fit. A request that is alone in the engine always fits."""
        if self.margin <= OWN_RULE:
            return sum(1 for _ in waiting)
        reserved, count = sorted(map(self._reservation, running)), 0
        for request in waiting:
            insort(reserved, self._reservation(request))
            if len(reserved) > 1 and self._peak_tokens(reserved, block_size) > pool_tokens:
                break
            count += 1
        return count

    def _peak_tokens(self, reserved: list[tuple[float, int]], block_size: int) -> float:
        """Return the peak of tokens in use, by (remaining, tokens so far) of each request in ascending order."""
        in_use = peak = 0.0
        for size, (remaining, tokens) in enumerate(reversed(reserved), 1):  # ``size`` requests: those that end last
            in_use += tokens + block_size - 1  # a last block may have one token
            peak = peak + remaining if self.margin >= 1 else max(peak, in_use + remaining * size)
        return in_use + peak if self.margin >= 1 else peak

    def _reservation(self, request: Any) -> tuple[float, int]:
        remaining, allowed, tokens = self._needs(request)
        return reserved_tokens(remaining, allowed, self.margin), tokens
