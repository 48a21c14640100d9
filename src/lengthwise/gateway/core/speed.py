"""How fast a worker makes tokens when it has enough to do."""

from __future__ import annotations

import math

_EVERY_S = 1.0
_HALF_LIFE_S = 60.0


class Speed:
    """The best rate seen, fading by half in a minute of use: a worker with little to do is not a slow one.

    Attributes:
        tokens_per_s: None while nothing was seen.
    """

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        self._since_s = math.nan
        self._made = 0
        self._told_s = -math.inf

    def made(self, now_s: float, tokens: int) -> None:
        """So many tokens came."""
        if not now_s - self._since_s < 4 * _EVERY_S:  # it begins, or it had nothing to do
            self._since_s, self._made = now_s, 0
            return
        self._made += tokens
        passed_s = now_s - self._since_s
        if passed_s >= _EVERY_S:
            self._take(self._made / passed_s, passed_s)
            self._since_s, self._made = now_s, 0

    def told(self, now_s: float, tokens_per_s: float) -> None:
        """It was seen by others to be so fast."""
        if tokens_per_s > 0:
            self._take(tokens_per_s, min(now_s - self._told_s, 4 * _EVERY_S))
        self._told_s = now_s

    def _take(self, rate: float, passed_s: float) -> None:
        if rate > 0 and math.isfinite(rate):
            faded = (self.tokens_per_s or 0.0) * 0.5 ** (passed_s / _HALF_LIFE_S)
            self.tokens_per_s = max(rate, faded)
