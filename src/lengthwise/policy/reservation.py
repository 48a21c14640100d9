"""KV memory reserved by predicted length: the rule of vLLM's plug-in and of the simulator.

A request reserves memory for its predicted remaining tokens, and for the share ``margin`` of the further tokens that
its ``max_tokens`` allows. A request is admitted if the KV cache can hold the peak of tokens that results if every
request produces exactly what it reserves (Past-Future, ASPLOS '25).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from typing import Any

MARGIN_STEP = 0.05


def reserved_tokens(remaining: float, allowed: int, margin: float) -> float:
    """Return the output tokens that a request reserves, given its predicted ``remaining`` tokens.

    Its limit allows ``allowed`` more tokens. With a margin of 1 or more, the request reserves all of these.
    """
    limit = float(max(1, allowed))
    if margin >= 1.0 or remaining >= limit:
        return limit
    return remaining + margin * (limit - remaining)


class MemoryGate:
    """Defers waiting requests while the predicted peak of KV tokens exceeds the cache.

    The margin adapts as in adaptive conformal inference (Gibbs and Candès 2021): a preemption for lack of memory
    raises it by MARGIN_STEP, an admission lowers it by MARGIN_STEP x ``max_preemption_rate``, but not below 0. While it
    is at least 1, every request reserves its limit until it ends, so that an admission cannot cause a preemption. There
    are thus at most ``max_preemption_rate`` x admissions + 1 / MARGIN_STEP + max_num_seqs preemptions.

    The peak assumes that each step adds one token to each running request, without chunked prompts and speculation.
    ``needs`` returns (predicted remaining tokens, further tokens that its limit allows, tokens so far) of a request.
    """

    def __init__(self, max_preemption_rate: float, needs: Callable[[Any], tuple[float, int, int]]) -> None:
        self._rate, self._needs, self.margin = max_preemption_rate, needs, 0.0

    def on_admitted(self, count: int) -> None:
        """Lower the margin."""
        self.margin = max(0.0, self.margin - MARGIN_STEP * self._rate * count)

    def on_preempted(self) -> None:
        """Raise the margin, since memory ran out."""
        self.margin += MARGIN_STEP

    def admissible(self, waiting: Iterable[Any], running: Iterable[Any], pool_tokens: int, block_size: int) -> int:
        """Return how many of the first waiting requests fit. A request that is alone in the engine always fits."""
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
