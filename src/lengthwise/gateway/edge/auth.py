"""API keys: authentication in constant time, access to models, and limits of rate, concurrency, tokens and cost."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lengthwise.gateway.config import GatewayConfig, Key
from lengthwise.gateway.edge.errors import Fault
from lengthwise.gateway.protocols import Clock
from lengthwise.gateway.request import Request

if TYPE_CHECKING:
    from lengthwise.gateway.tenants.accounts import Accounts
    from lengthwise.gateway.tenants.records import ManagedKey

MAX_FAILURES = 30  # wrong keys per minute from one address
_PERIOD_S = 60.0
BURST_S = 10.0
MAX_ADDRESSES = MAX_IDENTIFIED = 10_000


class AuthThrottle:
    """Counts wrong keys per address and minute. After MAX_FAILURES, only keys that the address has used before pass."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._accepted: OrderedDict[tuple[str, str], None] = OrderedDict()

    def refused_s(self, address: str, digest: str | None) -> float:
        """Return the seconds for which a key is still blocked, or 0. ``digest`` is its hash, None for a wrong key."""
        if not self._failures:
            return 0.0
        net = network(address)
        started_s, count = self._failures.get(net, (0.0, 0))
        if count < MAX_FAILURES or (digest is not None and (net, digest) in self._accepted):
            return 0.0
        return max(0.0, started_s + _PERIOD_S - self._clock())

    def check(self, address: str, digest: str | None) -> None:
        """Raise Fault (429) while a key or token is blocked."""
        if after_s := self.refused_s(address, digest):
            message = "Too many wrong keys or tokens came from your address."
            raise Fault(429, "guessing", message, code="too_many_failures", retry_after_s=after_s)

    def failed(self, address: str) -> None:
        """Count a wrong key."""
        now_s, net = self._clock(), network(address)
        started_s, count = self._failures.pop(net, (now_s, 0))
        if now_s - started_s >= _PERIOD_S:
            started_s, count = now_s, 0
        self._failures[net] = (started_s, count + 1)
        if len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)

    def succeeded(self, address: str, digest: str) -> None:
        """Remember that this address has used a right key."""
        self._accepted.setdefault((network(address), digest))
        if len(self._accepted) > MAX_ADDRESSES:
            self._accepted.popitem(last=False)


def token_digest(authorization: bytes) -> str:
    """Return the SHA-256 of the key or token in an Authorization header."""
    return hashlib.sha256(authorization.partition(b" ")[2].strip()).hexdigest()


def network(address: str) -> str:
    """Return an IPv4 address unchanged. Of an IPv6 address return the /64 network, which usually has one owner."""
    if ":" not in address:
        return address
    try:
        ip = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(ip.ipv4_mapped or ipaddress.IPv6Network((int(ip) >> 64 << 64, 64)))


ANONYMOUS_TENANT = "anonymous"


class Tenants(list[str]):
    """The names of tenants by number. Number 0 is the anonymous tenant, and a name never changes its number."""

    def __init__(self) -> None:
        super().__init__([ANONYMOUS_TENANT])
        self._numbers = {ANONYMOUS_TENANT: 0}

    def number(self, name: str) -> int:
        """Return the number of a name. A new name gets a new number."""
        if name not in self._numbers:
            self._numbers[name] = len(self)
            self.append(name)
        return self._numbers[name]


class Bucket:
    """A token bucket of at most ``limit`` units, refilled by ``per_s`` units a second. ``left`` may be negative.

    ``taken`` counts the units that this gateway has taken since its last report to others.
    """

    def __init__(self, limit: float, per_s: float) -> None:
        self.limit, self.per_s, self.left, self.taken, self._at_s = limit, per_s, limit, 0.0, -math.inf

    def take(self, amount: float) -> None:
        """Take units, or return units if the amount is negative."""
        self.left -= amount
        self.taken += amount

    def wait_s(self, now_s: float, amount: float) -> float:
        """Refill the bucket. Return the seconds until it holds ``amount`` units or is full, whichever is earlier."""
        refill = max(0.0, now_s - self._at_s) * self.per_s if self.per_s else 0.0
        self.left, self._at_s = min(self.limit, self.left + refill), now_s
        missing = min(amount, self.limit) - self.left
        return 0.0 if missing <= 0 else missing / self.per_s if self.per_s else math.inf

    def headers(self, unit: bytes) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's rate limit headers for this bucket. Their names end with ``unit``, such as "tokens"."""
        reset_s = (self.limit - self.left) / self.per_s if self.per_s else 0.0
        values = {b"limit": b"%d" % self.limit, b"remaining": b"%d" % max(0.0, self.left), b"reset": b"%.3fs" % reset_s}
        return [(b"x-ratelimit-%b-%b" % (name, unit), value) for name, value in values.items()]


_DAY_S = 86_400.0


class Caller:
    """The owner of a key, or all clients if there are no keys.

    A request runs in its ``with`` block. Entering the block raises Fault (429) above the key's concurrency limit.
    """

    def __init__(self, key: Key | None, tenant: int) -> None:
        self._buckets: dict[str, Bucket] = {}
        self.open = 0
        self.open_elsewhere: dict[str, int] = {}  # by gateway of a shared queue
        self.update(key, tenant)

    def update(self, key: Key | None, tenant: int, account: ManagedKey | None = None) -> None:
        """Change the settings of the key. Open requests and the contents of buckets stay."""
        self.key, self.tenant, self.models = key, tenant, frozenset(key.models if key else ())
        self.account = account  # pays for the requests in the store of tenants; None: nothing does
        self.quotas: list[tuple[str, Bucket, float, float]] = []  # name, bucket, units per prompt and output token
        if key is None:
            return
        self._requests = self._bucket("requests", key.burst, key.rate_rps)
        costs = (key.input_cost_per_token, key.output_cost_per_token)
        kinds = ("tokens_per_minute", 60.0, (1, 1)), ("tokens_per_day", _DAY_S, (1, 1)), ("cost_per_day", _DAY_S, costs)
        for name, period_s, units in kinds:
            if (limit := getattr(key, name)) is not None:
                self.quotas.append((name, self._bucket(name, limit, limit / period_s), *units))

    def _bucket(self, name: str, limit: float, per_s: float) -> Bucket:
        bucket = self._buckets.setdefault(name, Bucket(limit, per_s))
        bucket.limit, bucket.per_s = limit, per_s
        return bucket

    def __enter__(self) -> None:
        limit = None if self.key is None else self.key.concurrency
        if limit is not None and self.open + sum(self.open_elsewhere.values()) >= limit:
            message = f"This API key must have at most {limit} requests in progress."
            raise Fault(429, "concurrency", message, code="concurrency_limit_exceeded")
        self.open += 1

    def __exit__(self, *_: object) -> None:
        self.open -= 1

    def pop_usage(self) -> tuple[dict[str, float], int]:
        """Return the units taken since the last call, by limit, and the open requests if their number is limited."""
        taken = {name: bucket.taken for name, bucket in self._buckets.items() if bucket.taken}
        for name in taken:
            self._buckets[name].taken = 0.0
        return taken, self.open if self.key is not None and self.key.concurrency is not None else 0

    def add_usage(self, gateway: str, taken: Mapping[str, float], num_open: int, now_s: float) -> None:
        """Take the units that another gateway has taken, by limit, and count its open requests."""
        for name in taken.keys() & self._buckets.keys():
            self._buckets[name].wait_s(now_s, 0.0)  # refills it up to now
            self._buckets[name].left -= taken[name]
        self.open_elsewhere[gateway] = num_open

    def can_access(self, model: str) -> bool:
        """Return whether the key gives access to a model."""
        return not self.models or model in self.models

    def take_request(self, now_s: float) -> list[tuple[bytes, bytes]]:
        """Take one request from the rate limit. Return the limit's headers. Raises Fault (429) if none is left."""
        key = self.key
        if key is None or math.isinf(key.rate_rps):
            return []
        after_s = self._requests.wait_s(now_s, 1.0)
        self._requests.take(0.0 if after_s else 1.0)
        headers = self._requests.headers(b"requests")
        if not after_s:
            return headers
        message = "Rate limit reached for requests of this API key."
        raise Fault(429, "rate", message, code="rate_limit_exceeded", headers=headers, retry_after_s=after_s)


Usage = tuple[str, dict[str, float], int]  # name of a caller, units taken by limit, open requests


class AddressRates:
    """Token buckets of clients' addresses: ``rate_rps`` requests a second, of which those of 10 s may come at once."""

    def __init__(self, rate_rps: float, clock: Clock) -> None:
        self._rate_rps, self._clock = rate_rps, clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def take(self, address: str) -> None:
        """Take one request from an address's rate limit. Raises Fault (429) if none is left."""
        net = network(address)
        bucket = self._buckets.pop(net, None) or Bucket(max(1.0, BURST_S * self._rate_rps), self._rate_rps)
        self._buckets[net] = bucket
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        if after_s := bucket.wait_s(self._clock(), 1.0):
            message = "Rate limit reached for requests of your address."
            raise Fault(429, "address", message, code="rate_limit_exceeded", retry_after_s=after_s)
        bucket.left -= 1.0


class Charge:
    """Charges the tokens of one request to the quotas of its key.

    A call charges the predicted tokens. The end of the ``with`` block corrects the charge to the generated tokens, or
    to ``Worker.unseen_tokens`` if the client left before any was counted, so that leaving early is not free. The prompt
    is corrected to what the engine reports.
    """

    def __init__(
        self, caller: Caller, clock: Clock, headers: list[tuple[bytes, bytes]], accounts: Accounts | None = None
    ) -> None:
        self._caller, self._clock, self._headers = caller, clock, headers
        self._accounts, self._account = accounts, caller.account
        self._request: Request | None = None
        self._output_tokens = 0.0

    @property
    def is_needed(self) -> bool:
        """Whether the key has quotas or an account."""
        return bool(self._caller.quotas) or self._account is not None

    async def __call__(self, request: Request) -> None:
        """Charge the prompt and the predicted output of all choices. Raises Fault (429) if that exceeds a quota.

        A request that is larger than a complete quota is admitted only while nothing of that quota is used. The quotas
        of the store of tenants are fixed: such a request exceeds them.
        """
        now_s, prompt_tokens = self._clock(), request.prompt_tokens
        output_tokens = request.choices * min(request.length_prediction.total_tokens, float(request.max_tokens))
        for name, bucket, prompt_units, output_units in self._caller.quotas:
            if after_s := bucket.wait_s(now_s, prompt_units * prompt_tokens + output_units * output_tokens):
                message = f"This request is predicted to exceed what is left of the {name} of this API key."
                raise Fault(429, "quota", message, code="rate_limit_exceeded", retry_after_s=after_s)
        self._take(prompt_tokens, output_tokens)
        self._request, self._output_tokens = request, output_tokens
        for name, bucket, *_ in self._caller.quotas:
            self._headers += bucket.headers(b"tokens") if name == "tokens_per_minute" else ()
        if self._accounts is not None and self._account is not None:
            await self._accounts.reserve(self._account, request, output_tokens)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        if (request := self._request) is not None:
            not_served = math.isnan(request.dispatch.dispatched_s)
            output_tokens = request.generated_tokens + request.dispatch.unseen_tokens
            prompt_tokens = 0 if not_served else request.dispatch.reported_prompt_tokens or request.prompt_tokens
            self._take(prompt_tokens - request.prompt_tokens, output_tokens - self._output_tokens)
            if self._accounts is not None:
                self._accounts.settle(request, None if not_served else (prompt_tokens, round(output_tokens)))

    def _take(self, prompt_tokens: int, output_tokens: float) -> None:
        for _, bucket, prompt_units, output_units in self._caller.quotas:
            bucket.take(prompt_units * prompt_tokens + output_units * output_tokens)


class Keys:
    """All API keys by their hash. A key that is also in ``previous`` retains its used quotas and its open requests.

    ``accounts`` adds the keys of a store. A key of the configuration has an account if the store has its tenant.
    """

    def __init__(
        self,
        config: GatewayConfig,
        clock: Clock,
        previous: Keys | None = None,
        *,
        tenants: Tenants | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        tenants = Tenants() if tenants is None else tenants
        self._tenants, self._accounts = tenants, accounts
        self._anonymous = None if config.needs_key else Caller(None, 0)
        known = previous.callers if previous else {}
        self.reported: dict[str, int] = previous.reported if previous else {}  # open requests at the last report
        self.callers: dict[str, Caller] = {}
        self._identified: OrderedDict[tuple[str, int], Caller] = OrderedDict()

        def caller_of(name: str, key: Key, account: ManagedKey | None) -> Caller:
            number = tenants.number(key.tenant)
            caller = self.callers[name] = known.get(name) or Caller(key, number)
            caller.update(key, number, account)
            return caller

        self._hashed = []
        for key in config.keys:
            digest = key.sha256.lower()
            account = None if accounts is None else accounts.of_configured(key)
            self._hashed.append((digest.encode(), caller_of(digest, key, account)))
        # A store may have thousands of keys: those whose hash begins with the same digits are compared.
        self._stored: dict[str, list[tuple[bytes, float, Caller]]] = {}
        for managed in accounts.keys if accounts else ():
            caller = caller_of(managed.id, managed.key, managed)
            for digest, until_s in managed.digests:
                self._stored.setdefault(digest[:8], []).append((digest.encode(), until_s, caller))
        self._wall = time.time if accounts is None else accounts.wall
        self.throttle: AuthThrottle = previous.throttle if previous else AuthThrottle(clock)

    def pop_usage(self) -> list[Usage]:
        """Return the usage since the last call of callers with limits."""
        found = [(name, *caller.pop_usage()) for name, caller in self.callers.items()]
        changed = [one for one in found if one[1] or one[2] != self.reported.get(one[0], 0)]
        self.reported |= {name: num_open for name, _, num_open in changed}
        return changed

    def add_usage(self, gateway: str, usage: Sequence[Usage] | None, now_s: float) -> None:
        """Count the usage at another gateway; None: that gateway, with its open requests, is lost."""
        for name, taken, num_open in usage or ():
            if (caller := self.callers.get(name)) is not None:
                caller.add_usage(gateway, taken, num_open, now_s)
        if usage is None:
            self.reported.clear()  # both gateways report all open requests again if that one comes back
            for caller in self.callers.values():
                caller.open_elsewhere.pop(gateway, None)

    def identified(self, key: Key) -> Caller:
        """Return the caller of a tenant that another service has identified."""
        name = key.tenant, key.priority
        if (caller := self._identified.pop(name, None)) is None:
            number, account = self._tenants.number(key.tenant), None
            if self._accounts is not None:
                account = self._accounts.of_configured(key, "identity")
            caller = Caller(key, number)
            caller.update(key, number, account)
        self._identified[name] = caller
        if len(self._identified) > MAX_IDENTIFIED:  # removes the least recently used
            self._identified.popitem(last=False)
        return caller

    def caller(self, authorization: bytes | None, address: str) -> Caller:
        """Return the owner of the key in an Authorization header. Raises Fault (401, or 429 after many wrong keys)."""
        if self._anonymous is not None:
            return self._anonymous
        challenge = [(b"www-authenticate", b"Bearer")]
        if authorization is None:
            message = "You did not provide an API key; send it as Authorization: Bearer YOUR_KEY."
            raise Fault(401, "auth", message, code="missing_api_key", headers=challenge)
        scheme, given = authorization.partition(b" ")[0], token_digest(authorization)
        # All keys are compared, so that the time does not depend on which one is right.
        matches = [caller for hashed, caller in self._hashed if hmac.compare_digest(hashed, given.encode())]
        if stored := self._stored.get(given[:8]):
            now_s = self._wall()
            matches += [
                one
                for hashed, until_s, one in stored
                if hmac.compare_digest(hashed, given.encode()) and now_s < until_s
            ]
        digest = given if matches and scheme.lower() == b"bearer" else None
        self.throttle.check(address, digest)
        if digest is None:
            self.throttle.failed(address)
            message = "Incorrect API key provided."
            raise Fault(401, "auth", message, code="invalid_api_key", headers=challenge)
        self.throttle.succeeded(address, digest)
        return matches[-1]
