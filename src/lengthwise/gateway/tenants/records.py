"""Settings of tenants and keys, quotas of fixed windows, and the windows in UTC."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from lengthwise.gateway.config import Key, require_known
from lengthwise.schema.errors import InputError

UNITS = ("requests", "tokens", "cost")
PERIODS = ("minute", "hour", "day", "month")
_SECONDS = {"minute": 60, "hour": 3600, "day": 86_400}
_QUOTAS = tuple(f"{unit}_per_{period}" for unit in UNITS for period in PERIODS)
COST_UNIT = 1e9  # the store counts costs in billionths, so that sums are exact
_MAX = 1e15

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
_Price = Annotated[float, Meta(ge=0, le=100)]  # so that the cost of a request in billionths fits in 64 bits
Quotas = dict[str, Annotated[float, Meta(gt=0, le=_MAX)]]


class TenantSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a tenant as the API takes them."""

    quotas: Quotas = {}  # such as {"tokens_per_day": 1000000}: limits of all its keys together
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0  # its share of service with fairness "vtc"
    input_cost_per_token: _Price = 0.0  # price of a prompt token
    output_cost_per_token: _Price = 0.0  # price of an output token


class KeySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a key as the API takes them. Their meanings are those of ``gateway.config.Key``."""

    tenant: Name
    name: Annotated[str, Meta(max_length=200)] = ""
    models: tuple[str, ...] = ()
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    rate_rps: Annotated[float, Meta(gt=0)] | None = None
    burst: Annotated[int, Meta(ge=1)] = 100
    concurrency: Annotated[int, Meta(ge=1)] | None = None
    slo_class: str | None = None
    quotas: Quotas = {}


class Quota(NamedTuple):
    """At most ``limit`` units in each window of a period, for a subject such as "tenant:search" or "key:k_1f"."""

    subject: str
    unit: str
    period: str
    limit: int  # requests, tokens, or billionths of the currency

    @property
    def name(self) -> str:
        """Return the name of the quota, such as "tokens_per_day"."""
        return f"{self.unit}_per_{self.period}"


def quotas(subject: str, limits: Quotas) -> tuple[Quota, ...]:
    """Return quotas from their settings. Raises InputError if there is no such quota, or if a price is missing."""
    found = []
    for name, limit in limits.items():
        require_known("quota", name, _QUOTAS)
        unit, _, period = name.split("_")
        found.append(Quota(subject, unit, period, round(limit * COST_UNIT) if unit == "cost" else math.floor(limit)))
    return tuple(found)


def check_prices(tenant: TenantSettings, limits: Quotas) -> None:
    """Raise InputError if a quota of cost can never be used up, because the tenant has no price."""
    if (
        any(name.startswith("cost") for name in limits)
        and not tenant.input_cost_per_token + tenant.output_cost_per_token
    ):
        raise InputError(
            "a quota of cost must have input_cost_per_token or output_cost_per_token above 0 at the tenant"
        )


def window(period: str, at_s: float) -> tuple[int, int]:
    """Return start and end of the window that contains a time, in seconds since 1970 (UTC)."""
    if period == "month":
        day = datetime.fromtimestamp(at_s, UTC)
        start, end = (
            datetime(day.year, day.month, 1, tzinfo=UTC),
            datetime(day.year + day.month // 12, day.month % 12 + 1, 1, tzinfo=UTC),
        )
        return int(start.timestamp()), int(end.timestamp())
    seconds = _SECONDS[period]
    start_s = int(at_s // seconds) * seconds
    return start_s, start_s + seconds


@dataclass(frozen=True)
class ManagedKey:
    """A key of the store, and the quotas and prices of its requests."""

    id: str
    settings: KeySettings
    digests: tuple[tuple[str, float], ...]  # SHA-256 of the secret and of the one before, and until when each is valid
    created_s: float
    quotas: tuple[Quota, ...]  # of the key and of its tenant: all must hold
    tenant: TenantSettings

    @property
    def key(self) -> Key:
        """The key as a key of the configuration."""
        one = self.settings
        rate_rps = math.inf if one.rate_rps is None else one.rate_rps
        limits = one.priority, rate_rps, one.burst, one.concurrency
        return Key(one.tenant, self.digests[0][0], one.models, *limits, slo_class=one.slo_class)

    def cost(self, prompt_tokens: int, output_tokens: int) -> int:
        """Return the cost of a request in billionths of the currency."""
        return cost(prompt_tokens, output_tokens, self.tenant.input_cost_per_token, self.tenant.output_cost_per_token)


def cost(prompt_tokens: int, output_tokens: int, input_price: float, output_price: float) -> int:
    """Return a cost in billionths of the currency."""
    return round((prompt_tokens * input_price + output_tokens * output_price) * COST_UNIT)
