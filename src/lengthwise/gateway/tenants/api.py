"""The API of tenants and keys at the admin port."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import parse_qs

import msgspec

from lengthwise.gateway.admin.api import Change, Methods
from lengthwise.gateway.config import require_known
from lengthwise.gateway.request import SloClass
from lengthwise.gateway.tenants.accounts import Accounts
from lengthwise.gateway.tenants.records import PERIODS, KeySettings, ManagedKey, Name, TenantSettings
from lengthwise.schema.errors import InputError


class Rotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a rotation."""

    grace_s: Annotated[float, msgspec.Meta(ge=0, le=31 * 86_400)] = 86_400.0  # how long the old secret stays valid


class TenantsApi:
    """Has the routes of keys, tenants and usage, and their changes, for ``AdminApi``."""

    def __init__(self, accounts: Accounts, slo_classes: Callable[[], Iterable[SloClass]] = tuple) -> None:
        self._accounts, self._slo_classes = accounts, slo_classes
        self.routes: dict[str, Methods] = {
            "keys": {"GET": self._list_keys, "POST": self._add_key},
            "keys/*": {"DELETE": self._revoke_key},
            "keys/*/rotate": {"POST": self._rotate_key},
            "tenants": {"GET": self._list_tenants},
            "tenants/*": {"PUT": self._put_tenant},
            "usage": {"GET": self._usage},
        }
        self.changes = {
            "POST keys": Change("key_added"),
            "DELETE keys/*": Change("key_revoked"),
            "POST keys/*/rotate": Change("key_rotated"),
            "PUT tenants/*": Change("tenant_changed"),
        }

    async def _list_keys(self, *_: Any) -> tuple[int, Any]:
        return 200, {"keys": [_shown(key) for key in self._accounts.keys]}

    async def _add_key(self, _: str, body: bytes, *__: Any) -> tuple[int, Any]:
        settings = msgspec.json.decode(body, type=KeySettings)
        if settings.slo_class is not None:
            require_known("class in slo_classes", settings.slo_class, tuple(one.name for one in self._slo_classes()))
        key, secret = await self._accounts.add_key(settings)
        return 201, _shown(key) | {"secret": secret}

    async def _rotate_key(self, key_id: str, body: bytes, *_: Any) -> tuple[int, Any]:
        grace_s = msgspec.json.decode(body, type=Rotation).grace_s
        key, secret = await self._accounts.rotate_key(key_id, grace_s)
        return 200, _shown(key) | {"secret": secret}

    async def _revoke_key(self, key_id: str, *_: Any) -> tuple[int, Any]:
        await self._accounts.revoke_key(key_id)
        return 204, None

    async def _list_tenants(self, *_: Any) -> tuple[int, Any]:
        tenants = self._accounts.tenants.items()
        return 200, {"tenants": [{"name": name} | msgspec.to_builtins(settings) for name, settings in tenants]}

    async def _put_tenant(self, name: str, body: bytes, *_: Any) -> tuple[int, Any]:
        settings = msgspec.json.decode(body, type=TenantSettings)
        await self._accounts.put_tenant(msgspec.convert(name, Name), settings)
        return 200, {"name": name} | msgspec.to_builtins(settings)

    async def _usage(self, _: str, __: bytes, query: bytes, ___: Any) -> tuple[int, Any]:
        given = {name: values[-1] for name, values in parse_qs(query.decode("latin-1")).items()}
        for name in given:
            require_known("parameter", name, ("period", "tenant", "key"))
        period = given.get("period", "day")
        require_known("period", period, PERIODS)
        if "tenant" in given and "key" in given:
            raise InputError("usage must be that of a tenant or of a key; both are given: leave one out")
        subject = next((f"{name}:{given[name]}" for name in ("key", "tenant") if name in given), "")
        return 200, {"usage": await self._accounts.usage(period, subject)}


def _shown(key: ManagedKey) -> dict[str, Any]:
    """Return the settings of a key without its secret and its hash."""
    previous = [until_s for _, until_s in key.digests[1:]]
    until = datetime.fromtimestamp(previous[0], UTC).isoformat() if previous else None
    created = datetime.fromtimestamp(key.created_s, UTC).isoformat()
    settings: dict[str, Any] = msgspec.to_builtins(key.settings)
    return {"id": key.id, "created": created, "previous_secret_until": until} | settings
