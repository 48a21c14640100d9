"""How much may be tried again."""

from __future__ import annotations

from collections.abc import Hashable

from lengthwise.gateway.relay._seams import Asked
from lengthwise.gateway.relay._trouble import Trouble

AT_ONCE, OF_ONE = 10.0, 5.0
_ONE = 1.0 - 1e-9  # sums of shares round
CALLERS = 4096
"""Those are remembered who spent something last."""


def caller_of(asked: Asked) -> Hashable:
    """Who asks: a tenant, else an address, else a session."""
    return asked.tenant or asked.address or asked.session


class Budget:
    """Retries and further fail-overs: a share of requests, ``AT_ONCE`` together, ``OF_ONE`` of one caller.

    Without it every failure of an overloaded fleet would add to the load. A caller has as large a share of its own
    requests: one whose requests always fail leaves the others half of what there is.

    An engine that dies breaks all that it has in one moment. What it had is a bound, so the first fail-over of each
    of them is free; a request that has failed before may be what kills engines, and has to be paid for.
    """

    def __init__(self, share: float) -> None:
        self._share, self._left = share, AT_ONCE
        self._spenders: dict[Hashable, float] = {}
        self.spent = self.refused = 0

    def request(self, caller: Hashable) -> None:
        """One more request came."""
        self._left = min(AT_ONCE, self._left + self._share)
        if caller in self._spenders:
            left = self._spenders[caller] + self._share
            if left < OF_ONE:
                self._spenders[caller] = left
            else:
                del self._spenders[caller]

    def take(self, caller: Hashable) -> bool:
        """Whether one more may be tried for this caller."""
        left = self._spenders.get(caller, OF_ONE)
        if min(self._left, left) < _ONE:
            self.refused += 1
            return False
        self._left -= 1
        self._note(caller, left - 1)
        self.spent += 1
        return True

    def again(self, trouble: Trouble, caller: Hashable, *, failures: int, spoke: bool) -> bool:
        """Whether a request goes on elsewhere.

        Args:
            trouble: What came between.
            caller: Whose request.
            failures: Engines that failed it, this one with them.
            spoke: Whether this one had begun to answer.
        """
        return (failures == 1 and trouble.breaks_all(spoke=spoke)) or self.take(caller)

    def _note(self, caller: Hashable, left: float) -> None:
        """It has so much left; who spent longest ago is forgotten first."""
        self._spenders.pop(caller, None)
        self._spenders[caller] = left
        if len(self._spenders) > CALLERS:
            del self._spenders[next(iter(self._spenders))]
