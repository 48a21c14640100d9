"""Wrong keys by address: who guesses is soon not heard any more."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

from lengthwise.gateway.clock import Clock

MOST = 30
"""Wrong keys a minute from one address."""
_SPAN_S = 60.0
_ADDRESSES = 10_000


class Guesses:
    """Counts failures of an address in spans of a minute.

    Beyond MOST the address is refused, right keys included, or guessing could go on. Keys that had worked
    from there before it began to guess are still heard: behind one proxy everybody has the same address.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._worked: OrderedDict[tuple[str, str], None] = OrderedDict()

    def refuses(self, address: str, key: str | None) -> bool:
        """Whether an address, with the key (by its digest) that it shows, is not heard now; None: a wrong one."""
        if not self._failures or self.over_s(address) == 0:
            return False
        return key is None or (network(address), key) not in self._worked

    def over_s(self, address: str) -> float:
        """Seconds until an address is heard again; 0 where it is."""
        begun_s, count = self._failures.get(network(address), (0.0, 0))
        return max(0.0, begun_s + _SPAN_S - self._clock()) if count >= MOST else 0.0

    def failed(self, address: str) -> None:
        """One more wrong key."""
        now_s, net = self._clock(), network(address)
        begun_s, count = self._failures.pop(net, (now_s, 0))
        if now_s - begun_s >= _SPAN_S:
            begun_s, count = now_s, 0
        self._failures[net] = (begun_s, count + 1)
        if len(self._failures) > _ADDRESSES:
            self._failures.popitem(last=False)

    def worked(self, address: str, key: str) -> None:
        """A right key."""
        place = (network(address), key)
        if place in self._worked:
            return
        self._worked[place] = None
        if len(self._worked) > _ADDRESSES:
            self._worked.popitem(last=False)


def network(address: str) -> str:
    """The address, or the /64 of one of IPv6: that is what one customer has."""
    if ":" not in address:
        return address
    try:
        whole = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(whole.ipv4_mapped or ipaddress.IPv6Network((int(whole) >> 64 << 64, 64)))
