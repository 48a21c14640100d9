"""What a cut costs at a worker: learned from its own starts, streams and cuts."""

from __future__ import annotations

from lengthwise.gateway.core.entry import PREFILL_WEIGHT

_LEAST_STARTS, _LEAST_COLD, _LEAST_TOKENS = 8.0, 16.0, 64.0
"""Seen before anything is believed of it."""
_START_FADES, _TOKEN_FADES = 0.98, 0.998
"""What one more says of those before it: the last 50 starts and 500 pieces count most."""
_LEAST_SPREAD = 0.01
"""Of the lengths whose cost is to be told apart: their variance over their mean square."""
_LONGEST_TIMES = 4.0
"""A silence counts as so many usual ones at most: who takes a stream slowly says nothing of its engine."""


class Price:
    """Seconds of a worker, as the gateway sees them.

    A start takes ``a + b x`` (prompt and tokens so far) until the first token; a stream takes some time a token; from
    the decision of a cut until the request is back its seat is lost as well. Bringing a request back later thus takes
    from its seat the way there and back (without the step that makes the first token), and from the whole batch
    what is computed again. Until enough was seen a prompt token counts a tenth of an output token.
    """

    def __init__(self) -> None:
        self._starts, self._cold = _Line(_START_FADES), _Line(_START_FADES)
        self._tokens = self._token_s = 0.0
        self._backs = self._back_s = 0.0

    def began(self, context_tokens: int, seconds: float, *, cold: bool = False) -> None:
        """A request with so many tokens spoke so long after it had been sent; cold: hardly any were in the cache."""
        self._starts.add(float(context_tokens), seconds)
        if cold:
            self._cold.add(float(context_tokens), seconds)

    def streamed(self, tokens: int, seconds: float) -> None:
        """So many further tokens of a stream came after so long."""
        if not self._token_s:  # all before came at once: that says nothing of how long a token takes
            self._tokens = 0.0
        if self._tokens >= _LEAST_TOKENS:
            seconds = min(seconds, _LONGEST_TIMES * tokens * self._token_s / self._tokens)
        self._tokens = self._tokens * _TOKEN_FADES + tokens
        self._token_s = self._token_s * _TOKEN_FADES + seconds

    def came_back(self, seconds: float) -> None:
        """A cut took so long."""
        self._backs = self._backs * _START_FADES + 1.0
        self._back_s = self._back_s * _START_FADES + seconds

    def prefill_s(self) -> float | None:
        """Seconds of a prompt token that is in no cache; None until enough prompts of several lengths were seen."""
        if self._cold.count < _LEAST_COLD or not self._cold.varied:
            return None
        return self._cold.fitted()[1]

    def recompute_steps(self, context_tokens: int, resident: int) -> float:
        """What bringing a request back costs, in steps of a batch of so many that are there."""
        if self._starts.count < _LEAST_STARTS or self._tokens < _LEAST_TOKENS or not self._token_s:
            return context_tokens * PREFILL_WEIGHT / resident
        step_s = self._token_s / self._tokens
        way_s, each_s = self._starts.fitted()
        back_s = self._back_s / self._backs if self._backs else 0.0
        idle_s = max(0.0, way_s - step_s) + back_s
        return (idle_s / resident + each_s * context_tokens) / step_s


class _Line:
    """A straight line through what was seen, none of its coefficients below 0; what is older counts less."""

    __slots__ = ("_fades", "_x", "_xx", "_xy", "_y", "count")

    def __init__(self, fades: float) -> None:
        self._fades = fades
        self.count = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """One more point."""
        fades = self._fades
        self.count = self.count * fades + 1.0
        self._x, self._y = self._x * fades + x, self._y * fades + y
        self._xx, self._xy = self._xx * fades + x * x, self._xy * fades + x * y

    @property
    def varied(self) -> bool:
        """Whether a slope can be told."""
        return self._xx - self._x * self._x / self.count > _LEAST_SPREAD * self._xx

    def fitted(self) -> tuple[float, float]:
        """(at 0, slope); there must be points."""
        n = self.count
        spread = self._xx - self._x * self._x / n
        slope = (self._xy - self._x * self._y / n) / spread if spread > 1e-9 * self._xx else 0.0
        if slope <= 0:
            return self._y / n, 0.0
        at_0 = (self._y - slope * self._x) / n
        return (at_0, slope) if at_0 >= 0 else (0.0, self._xy / self._xx)
