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
STEP = 0.03  # what each preemption beyond the budget adds to the margin
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


def adapted_margin(
    margin: float, max_share: float, spent_s: float, idle_s: float, turnovers_per_s: float, beyond: int = -1
) -> float:
    """Return the margin after a step.

    ``spent_s``, the time to recompute what was preempted for lack of memory, raises the margin. ``idle_s``, the step's
    decoding time times the share of memory that is free while requests wait, lowers it. So the margin settles where
    recomputation takes ``max_share`` of the idle time. With ``max_share`` 0, the first preemption makes every request
    reserve its limit. The tokens of the run fill the KV cache ``turnovers_per_s`` times a second.

    While there have been more preemptions than the budget allows (``beyond_budget``), idle memory does not lower the
    margin, and each preemption raises it by STEP.
    """
    if max_share <= 0.0:
        return math.inf if spent_s > 0.0 else margin
    if beyond >= 0:
        idle_s = 0.0
        margin += STEP * beyond
    return max(OWN_RULE, margin + GAIN * turnovers_per_s * (spent_s / max_share - idle_s))


def beyond_budget(preemptions: int, earlier: int, finished: int, budget: float) -> int:
    """Return the preemptions since the last step, or -1 within the budget: ``budget`` preemptions per request.

    Of the ``preemptions`` for lack of memory, ``earlier`` were before the last step; ``finished`` requests have ended.
    """
    return preemptions - earlier if budget < math.inf and preemptions > budget * finished else -1


def first_margin(max_share: float, budget: float) -> float:
    """Return the margin at an engine's start."""
    return OWN_RULE if max_share == math.inf else STEP if budget < math.inf else 0.0


class MemoryGate:
    """Defers waiting requests while the predicted peak of KV tokens exceeds the cache.

    The margin adapts as in adaptive conformal inference (Gibbs and Candès 2021), by what preemptions cost instead of
    their number (``adapted_margin``). While it is at least 1, every request reserves its limit until it ends, so that
    an admission cannot cause a preemption. At OWN_RULE the gate is open. ``preemptions`` counts those for lack
    of memory.

    The peak assumes that each step adds one token to each running request, without chunked prompts and speculation.
    ``needs`` returns (predicted remaining tokens, further tokens that its limit allows, tokens so far) of a request.
    """

    def __init__(
        self, max_recompute_share: float, budget: float, needs: Callable[[Any], tuple[float, int, int]]
    ) -> None:
        self._max_share, self._budget, self._needs = max_recompute_share, budget, needs
        self.margin, self.preemptions, self._earlier = first_margin(max_recompute_share, budget), 0, 0

    def adapt(self, spent_s: float, idle_s: float, turnovers_per_s: float, finished: int) -> None:
        """Adapt the margin to a step, after which ``finished`` requests have ended (``adapted_margin``)."""
        beyond = beyond_budget(self.preemptions, self._earlier, finished, self._budget)
        self._earlier = self.preemptions
        self.margin = adapted_margin(self.margin, self._max_share, spent_s, idle_s, turnovers_per_s, beyond)

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
