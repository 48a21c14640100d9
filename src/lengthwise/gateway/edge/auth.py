"""Who asks: keys compared in constant time, what each may do, and how often."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import overload

from lengthwise.gateway.config import GatewayConfig, Key
from lengthwise.gateway.edge.errors import Fault
from lengthwise.gateway.protocols import Clock

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
        started_s, count = self._failures.get(network(address), (0.0, 0))
        return max(0.0, started_s + _SPAN_S - self._clock()) if count >= MOST else 0.0

    def failed(self, address: str) -> None:
        """One more wrong key."""
        now_s, net = self._clock(), network(address)
        started_s, count = self._failures.pop(net, (now_s, 0))
        if now_s - started_s >= _SPAN_S:
            started_s, count = now_s, 0
        self._failures[net] = (started_s, count + 1)
        if len(self._failures) > _ADDRESSES:
            self._failures.popitem(last=False)

    def work_done(self, address: str, key: str) -> None:
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


ANONYMOUS = "anonymous"
_CHALLENGE = [(b"www-authenticate", b"Bearer")]


class Tenants(Sequence[str]):
    """The names of tenants by their number: 0 is anonymous, then those of the keys as they first come.

    A number stays with its name for good, whichever keys come and go: what was counted by it is nobody else's.
    """

    def __init__(self) -> None:
        self._names, self._numbers = [ANONYMOUS], {ANONYMOUS: 0}

    def number(self, name: str) -> int:
        """The number of a name, a new one where it has none yet."""
        number = self._numbers.setdefault(name, len(self._names))
        if number == len(self._names):
            self._names.append(name)
        return number

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        """The name of a number."""
        return self._names[number]


class Caller:
    """One key's holder, or everybody where there are no keys; a context manager around each of its requests.

    Attributes:
        key: The key; None for everybody.
        tenant: Its number.
        models: What it may ask for; empty for all.
        open: Its requests that are in.
    """

    __slots__ = ("_at_s", "_left", "key", "models", "open", "tenant")

    def __init__(self, key: Key | None, tenant: int) -> None:
        self.tenant = tenant
        self.become(key)
        self._left, self._at_s = float(key.burst if key else 0), -math.inf
        self.open = 0

    def become(self, key: Key | None) -> None:
        """The same key with other facts: who is in stays counted, what is left in the bucket stays."""
        self.key, self.models = key, frozenset(key.models if key else ())

    def __enter__(self) -> None:
        """One more request is in; raises a Fault (429) where that is one too many."""
        most = self.key.concurrency if self.key else None
        if most is not None and self.open >= most:
            raise Fault(
                429, "concurrency", f"This API key may have {most} requests in at the same time.",
                code="concurrency_limit_exceeded",
            )  # fmt: skip
        self.open += 1

    def __exit__(self, *_: object) -> None:
        """It is over, however it ended."""
        self.open -= 1

    def can_access(self, model: str) -> bool:
        """Whether it may ask for a model."""
        return not self.models or model in self.models

    def take(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """Takes a request out of its bucket; returns what the answer tells of it.

        Raises:
            Fault: 429, the bucket is empty.
        """
        key = self.key
        if key is None or math.isinf(key.rate_rps):
            return []
        filled = (now_s - self._at_s) * key.rate_rps if key.rate_rps > 0 else 0.0
        self._left, self._at_s = min(float(key.burst), self._left + max(0.0, filled)), now_s
        if self._left < 1:
            after_s = (1 - self._left) / key.rate_rps if key.rate_rps > 0 else math.inf
            raise _too_many(self._report(), after_s)
        self._left -= 1
        return self._report()

    def _report(self) -> list[tuple[bytes, bytes]]:
        assert self.key is not None
        full_s = (self.key.burst - self._left) / self.key.rate_rps if self.key.rate_rps > 0 else 0.0
        return [
            (b"x-ratelimit-limit-requests", b"%d" % self.key.burst),
            (b"x-ratelimit-remaining-requests", b"%d" % self._left),
            (b"x-ratelimit-reset-requests", b"%.3fs" % full_s),
        ]


class Keys:
    """All keys, by hash.

    Args:
        config: Whose keys.
        clock: Now.
        before: The keys so far: who stays keeps what is left in its bucket, whatever else is told of it now.
        tenants: All that there were so far.

    Attributes:
        callers: Holders by the hash of their key.
    """

    def __init__(
        self, config: GatewayConfig, clock: Clock, before: Keys | None = None, *, tenants: Tenants | None = None
    ) -> None:
        tenants = Tenants() if tenants is None else tenants
        self._clock = clock
        self._nobody = Caller(None, 0)
        known = before.callers if before else {}
        self.callers: dict[str, Caller] = {}
        for key in config.keys:
            digest, number = key.sha256.lower(), tenants.number(key.tenant)
            caller = self.callers[digest] = known.get(digest) or Caller(key, number)
            caller.tenant = number
            caller.become(key)
        self._hashed = [(digest.encode(), caller) for digest, caller in self.callers.items()]
        self._guesses: Guesses = before._guesses if before else Guesses(clock)  # noqa: SLF001 - its own kind

    def caller(self, authorization: bytes | None, address: str) -> Caller:
        """Who shows this header.

        Raises:
            Fault: 401, no key or one that nobody knows; 429, too many of those came from the address.
        """
        if not self._hashed:
            return self._nobody
        if authorization is None:
            raise _unknown(given=False)
        found = self._found(authorization)
        digest = found.key.sha256.lower() if found is not None and found.key is not None else None
        if self._guesses.refuses(address, digest):
            after_s = self._guesses.over_s(address)
            raise Fault(
                429, "guessing", "Too many wrong API keys came from your address.",
                code="too_many_failures", retry_after_s=after_s,
            )  # fmt: skip
        if found is None or digest is None:
            self._guesses.failed(address)
            raise _unknown(given=True)
        self._guesses.work_done(address, digest)
        return found

    def _found(self, authorization: bytes) -> Caller | None:
        """The holder of a key: all are compared, whichever is right."""
        scheme, _, secret = authorization.partition(b" ")
        shown = hashlib.sha256(secret.strip()).hexdigest().encode()
        found = None
        for hashed, caller in self._hashed:
            if hmac.compare_digest(hashed, shown):
                found = caller
        return found if scheme.lower() == b"bearer" else None


def _unknown(*, given: bool) -> Fault:
    if given:
        message, code = "Incorrect API key provided.", "invalid_api_key"
    else:
        message = "You did not provide an API key; send it as Authorization: Bearer YOUR_KEY."
        code = "missing_api_key"
    return Fault(401, "auth", message, code=code, headers=_CHALLENGE)


def _too_many(report: Sequence[tuple[bytes, bytes]], after_s: float) -> Fault:
    return Fault(
        429, "rate", "Rate limit reached for requests of this API key.",
        code="rate_limit_exceeded", headers=report, retry_after_s=after_s,
    )  # fmt: skip
